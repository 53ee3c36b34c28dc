"""Make the virtual environment that the Makefile's commands run in.

Standard library only: it runs before anything is installed. What needs thought is torch, because PyPI's Linux
build brings gigabytes of CUDA libraries that a machine without a GPU has no use for:

* ``host``  the interpreter given imports a CUDA torch already, and a GPU is there: that torch is reused
* ``cuda``  a GPU is there but no torch: PyPI's build
* ``cpu``   no GPU: a CPU build (local version ``+cpu``), from the configured indexes if they have one,
  else from PyTorch's own CPU index, else whatever PyPI has for this platform

``--torch auto`` chooses among the three.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_VERSION = "2.13.0"
EXTRAS = "test,dev,inspect,plot"
HOST_TORCH_PTH = "cutegemm_host_torch.pth"


class SetupError(Exception):
    """A step failed; the message says which command and shows the end of what it printed."""


@dataclass(frozen=True)
class HostTorch:
    """The torch of the interpreter the environment is made from."""

    version: str
    cuda: str | None
    site_packages: str


def has_nvidia_gpu() -> bool:
    """Whether ``nvidia-smi -L`` lists at least one GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU " in listing.stdout


def host_torch(python: str) -> HostTorch | None:
    """The torch that ``python`` imports, or None."""
    probe = (
        "import json, pathlib, torch; site = pathlib.Path(torch.__file__).parent.parent; "
        "print(json.dumps([torch.__version__, torch.version.cuda, str(site)]))"
    )
    try:
        answer = subprocess.run(
            [python, "-c", probe], capture_output=True, text=True, timeout=300, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode != 0:
        return None
    version, cuda, site_packages = json.loads(answer.stdout.strip().splitlines()[-1])
    return HostTorch(version, cuda, site_packages)


def choose_torch(gpu: bool, host: HostTorch | None) -> str:
    """``host``, ``cuda`` or ``cpu``: which torch suits this machine."""
    if not gpu:
        return "cpu"
    if host is not None and host.cuda is not None:
        return "host"
    return "cuda"


def cpu_torch_attempts(machine: str) -> list[list[str]]:
    """pip arguments to try in turn for a CPU build of torch on this kind of machine."""
    plain = [f"torch=={TORCH_VERSION}"]
    if machine != "x86_64":
        return [plain]  # PyPI's torch for other processors carries no CUDA
    cpu = [f"torch=={TORCH_VERSION}+cpu"]
    elsewhere = [*cpu, "--extra-index-url", CPU_INDEX, "--retries", "1", "--timeout", "20"]
    return [cpu, elsewhere, plain]


def run_step(title: str, command: Sequence[str], *, log: Path) -> None:
    """Run one step with a line of progress, its output appended to ``log``; SetupError if it fails."""
    started = time.monotonic()
    live = sys.stdout.isatty()
    print(f"-- {title} ...", end="" if live else "\n", flush=True)
    with log.open("ab") as sink:
        sink.write(f"\n$ {' '.join(command)}\n".encode())
        sink.flush()
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, cwd=REPOSITORY)
        said = started
        while True:
            try:
                status = process.wait(timeout=1.0)
                break
            except subprocess.TimeoutExpired:
                now = time.monotonic()
                if live:
                    print(f"\r-- {title} ... {now - started:.0f} s", end="", flush=True)
                elif now - said > 30:
                    print(f"   {title}: {now - started:.0f} s", flush=True)
                    said = now
    seconds = time.monotonic() - started
    outcome = "done" if status == 0 else "failed"
    start = "\r" if live else ""
    print(f"{start}-- {title}: {outcome}, {seconds:.0f} s", flush=True)
    if status != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SetupError(f"{title} failed: {' '.join(command)}\n{tail}\n(the whole output is in {log})")


def runs(command: Sequence[str]) -> bool:
    """Whether the command can be started and succeeds."""
    try:
        return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def install_torch(kind: str, host: HostTorch | None, venv: Path, pip: list[str], log: Path) -> None:
    """Bring torch into the environment: link the host's, or install a CUDA or a CPU build."""
    if kind == "host":
        if host is None:
            raise SetupError(f"--torch host was asked for, but {sys.executable} cannot import torch")
        # --system-site-packages would show the base interpreter's packages only and miss the torch of an
        # interpreter that is itself a virtual environment. A path file that adds the folder as a site serves
        # both, and honours the path files of the packages there (the DSL has one).
        site = next(venv.glob("lib/python3.*/site-packages"))
        (site / HOST_TORCH_PTH).write_text(f"import site; site.addsitedir({host.site_packages!r})\n")
        print(f"-- torch {host.version} of {host.site_packages} is used as it is")
        return
    if kind == "cuda":
        run_step("torch with CUDA (some gigabytes)", [*pip, "install", "torch>=2.9"], log=log)
        return
    attempts = cpu_torch_attempts(platform.machine())
    for number, arguments in enumerate(attempts, 1):
        title = "torch for the CPU" if number == 1 else f"torch for the CPU, another source ({number})"
        try:
            run_step(title, [*pip, "install", *arguments], log=log)
        except SetupError:
            if number == len(attempts):
                raise
        else:
            return


def make_venv(venv: Path, kind: str) -> None:
    """Create ``venv`` and install torch, cutegemm (editable), its tests' needs and its tools into it."""
    python = venv / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    if venv.exists() and not runs([*pip, "--version"]):
        shutil.rmtree(venv)  # half made: interrupted, or its interpreter has gone
    venv.mkdir(parents=True, exist_ok=True)
    log = venv / "setup.log"
    log.write_bytes(b"")
    host = host_torch(sys.executable) if kind in ("auto", "host") else None
    if kind == "auto":
        kind = choose_torch(has_nvidia_gpu(), host)
    print(f"-- virtual environment in {venv}, Python {platform.python_version()}, torch: {kind}", flush=True)
    if not python.exists():
        run_step("create", [sys.executable, "-m", "venv", str(venv)], log=log)
        run_step("pip", [*pip, "install", "--upgrade", "pip"], log=log)
    installed = subprocess.run([*pip, "show", "torch"], capture_output=True, text=True, check=False)
    present = (
        re.search(r"^Version: (\S+)", installed.stdout, re.MULTILINE) if installed.returncode == 0 else None
    )
    if present is None:
        install_torch(kind, host, venv, pip, log)
    else:
        print(f"-- torch {present.group(1)} is there already")
    run_step("cutegemm and what it needs", [*pip, "install", "-e", f".[{EXTRAS}]"], log=log)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(description="Make cutegemm's virtual environment.")
    parser.add_argument("--venv", type=Path, default=REPOSITORY / ".venv")
    parser.add_argument("--torch", choices=("auto", "host", "cuda", "cpu"), default="auto")
    arguments = parser.parse_args(argv)
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        print(f"cutegemm needs Python 3.11 or 3.12; this is {platform.python_version()}", file=sys.stderr)
        return 1
    try:
        make_venv(Path(os.path.abspath(arguments.venv)), arguments.torch)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
