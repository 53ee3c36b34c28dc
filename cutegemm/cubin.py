"""Reading device code: what a cubin says about its kernel, its disassembly, and a count of its instructions.

Registers and stack come from the ELF file itself; only the disassembly needs a CUDA tool (nvdisasm).
"""

import importlib.util
import math
import os
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cutegemm.errors import BuildError, MissingDependencyError

# --- what a cubin says about its kernel --------------------------------------------------------------------

_ENTRY_FLAG = 0x10  # in a symbol's st_other: callable from the host
_ATTRIBUTE_REGISTERS, _ATTRIBUTE_FRAME, _ATTRIBUTE_MIN_STACK = 0x2F, 0x11, 0x12
_ATTRIBUTE_REQUIRED_THREADS = 0x10
_FORMAT_SIZED = 4  # an attribute with a byte count and that many bytes; other formats hold their value inline


@dataclass(frozen=True)
class CubinKernel:
    """A kernel in a cubin: symbol, registers per thread, stack bytes per thread, threads per CTA if fixed."""

    name: str
    registers: int
    stack_bytes: int
    threads: int | None


@dataclass(frozen=True)
class _Section:
    name: str
    content: bytes
    link: int
    info: int


def _string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _sections(elf: bytes) -> list[_Section]:
    if elf[:6] != b"\x7fELF\x02\x01":
        raise BuildError("the cubin is not a 64-bit little-endian ELF file")
    start = struct.unpack_from("<Q", elf, 0x28)[0]
    size, count, names_at = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, start + i * size) for i in range(count)]
    no_bits = 8
    contents = [b"" if h[1] == no_bits else elf[h[4] : h[4] + h[5]] for h in headers]
    return [
        _Section(_string(contents[names_at], h[0]), content, h[6], h[7])
        for h, content in zip(headers, contents, strict=True)
    ]


def _attributes(section: bytes) -> list[tuple[int, bytes]]:
    """The (attribute, value) pairs of an .nv.info section; inline values as their two bytes."""
    found, at = [], 0
    while at + 4 <= len(section):
        kind, attribute, inline = struct.unpack_from("<BBH", section, at)
        at += 4
        if kind == _FORMAT_SIZED:
            found.append((attribute, section[at : at + inline]))
            at += inline
        else:
            found.append((attribute, struct.pack("<H", inline)))
    return found


def cubin_kernels(cubin: bytes) -> list[CubinKernel]:
    """The kernels in a cubin, in symbol order. Raises BuildError if it is not a cubin."""
    try:
        sections = _sections(cubin)
        by_name = {section.name: section for section in sections}
        symbol_table = by_name[".symtab"]
        strings = sections[symbol_table.link].content
        per_symbol: dict[tuple[int, int], int] = {}  # (attribute, symbol index) -> value
        for attribute, value in _attributes(by_name[".nv.info"].content):
            if len(value) == 8:
                symbol, number = struct.unpack("<II", value)
                per_symbol[attribute, symbol] = number
        kernels = []
        for index in range(len(symbol_table.content) // 24):
            name_at, _, other = struct.unpack_from("<IBB", symbol_table.content, index * 24)
            if not other & _ENTRY_FLAG:
                continue
            name = _string(strings, name_at)
            # Older cubins carry the count in the section header, newer ones as an attribute.
            registers = per_symbol.get((_ATTRIBUTE_REGISTERS, index), by_name[f".text.{name}"].info >> 24)
            stacks = [per_symbol.get((what, index), 0) for what in (_ATTRIBUTE_FRAME, _ATTRIBUTE_MIN_STACK)]
            own = dict(_attributes(by_name[f".nv.info.{name}"].content))
            threads = own.get(_ATTRIBUTE_REQUIRED_THREADS)
            fixed = math.prod(struct.unpack("<III", threads)) if threads else None
            kernels.append(CubinKernel(name, registers, max(stacks), fixed))
    except (struct.error, KeyError, IndexError, ValueError, OverflowError) as error:
        raise BuildError(f"the cubin cannot be read: {type(error).__name__} {error}") from error
    return kernels


def only_kernel(cubin: bytes) -> CubinKernel:
    """The kernel of a cubin that must hold exactly one. Raises BuildError."""
    kernels = cubin_kernels(cubin)
    if len(kernels) != 1:
        names = ", ".join(kernel.name for kernel in kernels) or "none"
        raise BuildError(f"exactly one kernel must come out of a compile, not {len(kernels)} ({names})")
    return kernels[0]


# --- disassembly -------------------------------------------------------------------------------------------


def find_nvdisasm() -> Path:
    """The nvdisasm to use: of an installed NVIDIA wheel, else of $CUDA_HOME, else on the PATH.

    Raises MissingDependencyError, naming the package to install.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or []]
    candidates = [tool for folder in folders for tool in sorted(folder.glob("*/bin/nvdisasm"), reverse=True)]
    if home := os.environ.get("CUDA_HOME"):
        candidates.append(Path(home, "bin", "nvdisasm"))
    if on_path := shutil.which("nvdisasm"):
        candidates.append(Path(on_path))
    for candidate in candidates:
        if os.access(candidate, os.X_OK) and candidate.is_file():
            return candidate
    raise MissingDependencyError(
        "nvdisasm, which turns a cubin into SASS, is in no installed NVIDIA package, not in CUDA_HOME "
        "and not on the PATH; install it with: pip install nvidia-cuda-nvdisasm"
    )


def disassemble(cubin: bytes) -> str:
    """The SASS text of a cubin. Raises MissingDependencyError without nvdisasm, BuildError if it fails."""
    tool = find_nvdisasm()
    try:
        with tempfile.TemporaryDirectory(prefix="cutegemm-sass-") as scratch:
            path = Path(scratch, "kernel.cubin")
            path.write_bytes(cubin)
            done = subprocess.run([str(tool), "-c", str(path)], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(
            f"the cubin cannot be given to {tool} through a temporary folder ({error}); free some space, or "
            "set TMPDIR to a folder that can be written"
        ) from error
    if done.returncode != 0:
        complaint = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise BuildError(f"{tool} could not read the cubin (exit {done.returncode}): {complaint[0]}")
    return done.stdout


_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_]*)((?:\.[\w]+)*)")

# Group -> opcodes (without their modifiers), in the order of the report.
_GROUPS: dict[str, tuple[str, ...]] = {
    "WGMMA": ("HGMMA", "QGMMA", "IGMMA", "BGMMA"),
    "tcgen05 MMA": ("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA", "UTCMXQMMA"),
    "MMA": ("HMMA", "IMMA", "QMMA", "DMMA", "OMMA"),
    "TMA load": ("UTMALDG", "UBLKCP", "UBLKPF", "UTMAPF"),
    "TMA store": ("UTMASTG", "UTMAREDG", "UBLKRED"),
    "mbarrier": ("SYNCS", "UTCBAR"),
    "barrier": ("BAR", "UCGABAR_ARV", "UCGABAR_WAIT", "WARPSYNC", "NANOSLEEP", "BSYNC", "BSSY", "BREAK"),
    "fence": ("FENCE", "MEMBAR", "WARPGROUP", "UTMACMDFLUSH", "ERRBAR", "DEPBAR", "CCTL", "UTMACCTL"),
    "local memory": ("LDL", "STL"),
    "stmatrix": ("STSM",),
    "shared memory": ("LDS", "STS", "LDSM", "ATOMS", "LDGSTS"),
    "tensor memory": ("LDTM", "STTM", "LDT", "STT", "UTCCP", "UTCATOMSWS"),
    "global memory": ("LDG", "STG", "RED", "REDG", "ATOM", "ATOMG", "LD", "ST"),
    "float": (
        *(
            "FADD",
            "FMUL",
            "FFMA",
            "FADD2",
            "FMUL2",
            "FFMA2",
            "FMNMX",
            "FSEL",
            "FSETP",
            "FSET",
            "MUFU",
            "FCHK",
        ),
        *("HADD2", "HMUL2", "HFMA2", "HMNMX2", "HSETP2", "F2F", "F2FP", "F2I", "I2F", "I2FP", "FRND"),
    ),
    "integer": (
        *("IADD3", "IADD", "IMAD", "ISETP", "IMNMX", "VIADD", "VIMNMX", "VIADDMNMX", "LEA", "LOP3", "PLOP3"),
        *(
            "SHF",
            "SHL",
            "SHR",
            "IABS",
            "SEL",
            "PRMT",
            "POPC",
            "FLO",
            "BREV",
            "SGXT",
            "BMSK",
            "LOP",
            "I2I",
            "IDP",
        ),
        *(
            "UIADD3",
            "UIMAD",
            "UISETP",
            "ULEA",
            "ULOP3",
            "UPLOP3",
            "USHF",
            "USEL",
            "UPRMT",
            "UFLO",
            "UPOPC",
            "USGXT",
        ),
        *("UBMSK", "UBREV", "UIABS", "UVIADD", "UVIMNMX", "UIADD"),
    ),
    "constant": ("LDC", "LDCU", "ULDC"),
    "move": (
        "MOV",
        "UMOV",
        "S2R",
        "S2UR",
        "CS2R",
        "R2UR",
        "R2P",
        "P2R",
        "SHFL",
        "UP2UR",
        "UR2UP",
        "VOTE",
        "VOTEU",
    ),
    "branch": ("BRA", "BRX", "BRXU", "CALL", "RET", "EXIT", "JMP", "UBRA", "UCALL"),
    "padding": ("NOP",),
}
_GROUP_OF = {opcode: group for group, opcodes in _GROUPS.items() for opcode in opcodes}


def instruction_histogram(sass: str) -> dict[str, int]:
    """How many instructions of each group a disassembly holds; every group is a key, "other" the last one.

    NOPs after the last instruction are "padding"; the branch to itself before them counts as one "branch".
    """
    counts = dict.fromkeys([*_GROUPS, "other"], 0)
    for opcode, _ in _INSTRUCTION.findall(sass):
        counts[_GROUP_OF.get(opcode, "other")] += 1
    return counts
