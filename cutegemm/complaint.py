"""What a compiler exception says first, in one line a user can act on."""

import os
import re
import sysconfig
import traceback
from pathlib import Path

from cutegemm.errors import CutegemmError

_OWN = {str(Path(__file__).with_name(name)) for name in ("artifact.py", "complaint.py", "loader.py")}
"""Files whose lines say nothing about the kernel: they only call the compiler."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOG = re.compile(r"(?:ptxas|backend) log:(.*?)(?:suggestion:|note:|$)", re.DOTALL)
_HEADLINE = re.compile(r"^\s*error(?:\[\w+\])?:\s*(\S.*)$", re.MULTILINE)
_PLACE = re.compile(r"-->\s*(\S+?\.py):(\d+)")


def first_complaint(error: BaseException) -> str:
    """What a compiler exception says first, in one line: no colours, no listing, no MLIR.

    The assembler's own log counts before the compiler's headline; the source line follows in brackets where
    it is known.
    """
    text = _COLOUR.sub("", str(error))
    if found := _LOG.search(text):
        log = re.sub(r"\s+", " ", found[1])
        log = re.sub(r"\s*ptxas fatal.*$", "", log) or log
        complaint = re.sub(r"^\s*ptxas application ptx input, line \d+; error\s*: ", "ptxas: ", log)
    elif found := _HEADLINE.search(text):
        complaint = found[1]
    else:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        complaint = lines[0] if lines else "no further explanation"
        if not isinstance(error, CutegemmError):
            complaint = f"{type(error).__name__}: {complaint}"
    complaint = re.split(r"\.\s+(?=[A-Z])", complaint)[0]
    places = [f"{Path(name).name}:{line}" for name, line in _PLACE.findall(text) if name not in _OWN]
    where = places[0] if places else _raised_at(error)
    complaint = complaint.strip().rstrip(".")
    if len(complaint) > 400:
        complaint = complaint[:400] + " ..."
    return f"{complaint} ({where})" if where else complaint


def _raised_at(error: BaseException) -> str:
    """File and line of the innermost frame of the kernel's own code; empty if there is none."""
    library = sysconfig.get_path("stdlib") + os.sep
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = frame.filename
        of_python = name.startswith(library) and "site-packages" not in name
        of_compiler = f"{os.sep}cutlass{os.sep}" in name or name in _OWN
        if not of_python and not of_compiler and os.path.exists(name):
            return f"{Path(name).name}:{frame.lineno}"
    return ""
