"""Look into a compiled kernel without a GPU: `python -m cutegemm inspect`, and the same from Python.

report = inspect(Request((4096, 4096, 7168), target="sm_90a"))
report.resources.registers, report.histogram["WGMMA"]
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cutegemm.errors import ConfigError, DeviceError, MissingDependencyError, ProblemError
from cutegemm.hardware import current_target, normalise_target

if TYPE_CHECKING:
    from cutegemm.artifact import Artifact, Resources
    from cutegemm.cache import KernelCache
    from cutegemm.config import GemmConfig
    from cutegemm.gemm import Gemm
    from cutegemm.scheduler import TileScheduler

DEFAULT_TARGET = "sm_90a"  # where there is no GPU to ask
KERNEL_FACTS = ("target", "problem", "config", "scheduler")  # what tells one cached kernel from another


@dataclass(frozen=True)
class Request:
    """What to compile, as ``cutegemm.compile`` takes it.

    ``config`` holds the fields of a GemmConfig to fix; empty: the heuristic chooses all.
    ``target`` None: the GPU here, or without one ``DEFAULT_TARGET``.
    """

    shape: tuple[int | None, ...]
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    majors: tuple[str, str, str] = ("k", "k", "n")  # of A, B and D
    target: str | None = None
    config: Mapping[str, object] = field(default_factory=dict)

    @property
    def resolved_target(self) -> str:
        """The target that will be compiled for; TargetError if it is none of ours."""
        if self.target is not None:
            return normalise_target(self.target)
        try:
            return current_target()
        except DeviceError:
            return DEFAULT_TARGET

    def gemm_config(self) -> "GemmConfig | None":
        """The configuration asked for, None if none was; ConfigError if it is only half said."""
        from cutegemm.config import GemmConfig

        if not self.config:
            return None
        if "tile_m" not in self.config or "tile_n" not in self.config:
            given = ", ".join(self.config)
            raise ConfigError(
                f"{given} given without a tile; add --tile, e.g. 128x256x64, or leave all of them out"
            )
        fields: dict[str, Any] = dict(self.config)
        return GemmConfig(**fields)

    def compile(self, scheduler: "TileScheduler | None" = None) -> "Gemm":
        """The Gemm; nothing is built yet. Raises what ``cutegemm.compile`` raises."""
        import cutegemm

        a_major, b_major, out_major = self.majors
        return cutegemm.compile(
            self.shape,
            self.dtype,
            out_dtype=self.out_dtype,
            a_major=a_major,
            b_major=b_major,
            out_major=out_major,
            scheduler=scheduler,
            config=self.gemm_config(),
            target=self.resolved_target,
        )


@dataclass(frozen=True)
class Report:
    """A compiled kernel and what is in it.

    ``paths`` says how operands are loaded and the result is stored. ``histogram`` is None where there is no
    disassembler.
    """

    problem: str
    config: str
    paths: str
    target: str
    artifact: "Artifact"
    histogram: Mapping[str, int] | None
    no_histogram: str = ""  # why, if so

    @property
    def resources(self) -> "Resources":
        """Registers, spills, shared memory, stages, threads."""
        return self.artifact.resources

    def render(self, console: Console) -> None:
        """Print the tables."""
        console.print(Group(self._facts(), ""))
        if self.histogram is None:
            console.print(f"[yellow]no instruction histogram:[/] {escape(self.no_histogram)}")
        else:
            console.print(histogram_table(self.histogram))

    def _facts(self) -> Table:
        resources, artifact = self.resources, self.artifact
        built = (
            "read from the cache" if artifact.from_cache else f"compiled in {artifact.build_seconds:.2f} s"
        )
        spills = "none" if resources.spills == 0 else f"[red]{resources.spills} bytes per thread[/]"
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold")
        table.add_column()
        for name, value in (
            ("problem", escape(self.problem)),
            ("configuration", escape(self.config)),
            ("operands by", self.paths),
            ("kernel", f"{escape(artifact.kernel_name)} for {self.target}, {built}"),
            ("registers", f"{resources.registers} per thread, {resources.threads} threads"),
            ("spills", spills),
            ("shared memory", f"{resources.smem_bytes:,} bytes, {resources.stages} stages"),
            ("size", f"{len(artifact.cubin):,} bytes of cubin, {len(artifact.ptx):,} of PTX"),
        ):
            table.add_row(name, value)
        return table


@dataclass(frozen=True)
class ShareBar:
    """A bar as long as ``part`` of ``whole``; in characters that the output's encoding has."""

    part: int
    whole: int
    width: int = 40

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.ascii_only:
            yield Text("#" * max(1, round(self.width * self.part / self.whole)), style="cyan")
        else:
            yield Bar(self.whole, 0, self.part, width=self.width, color="cyan")


def histogram_table(histogram: Mapping[str, int]) -> Table:
    """The instruction groups that occur, the most frequent first, each with a bar."""
    present = sorted(((n, name) for name, n in histogram.items() if n), key=lambda pair: (-pair[0], pair[1]))
    most = present[0][0] if present else 1
    total = sum(histogram.values())
    table = Table(box=None, pad_edge=False, caption=f"{total} instructions", caption_justify="left")
    table.add_column("instructions", style="bold")
    table.add_column("count", justify="right")
    table.add_column("", width=40)
    for count, name in present:
        table.add_row(escape(name), str(count), ShareBar(count, most))
    return table


def inspect(request: Request) -> Report:
    """Compile what is asked for and take it apart. Needs no GPU.

    Raises whatever ``cutegemm.compile`` and building raise; a missing nvdisasm only costs the histogram.
    """
    from cutegemm.artifact import instruction_histogram

    gemm = request.compile()
    artifact = gemm.artifact
    histogram, reason = None, ""
    try:
        histogram = instruction_histogram(artifact.sass)
    except MissingDependencyError as error:
        reason = str(error)
    return Report(
        str(gemm.problem),
        str(gemm.config),
        str(gemm.paths),
        request.resolved_target,
        artifact,
        histogram,
        no_histogram=reason,
    )


def save(report: Report, folder: Path) -> list[Path]:
    """Write kernel.ptx, kernel.cubin and, where there is a disassembler, kernel.sass; the paths written.

    Raises ProblemError if ``folder`` cannot be made or written.
    """
    contents: dict[str, bytes] = {
        "kernel.ptx": report.artifact.ptx.encode(),
        "kernel.cubin": report.artifact.cubin,
    }
    if report.histogram is not None:
        contents["kernel.sass"] = report.artifact.sass.encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise ProblemError(
            f"the kernel cannot be saved in {folder}: {error.strerror}; name a folder that can be written"
        ) from error
    return [folder / name for name in contents]


def kernels(count: int) -> str:
    """ "1 kernel", "2 kernels"."""
    return f"{count} kernel" if count == 1 else f"{count} kernels"


def results(count: int) -> str:
    """ "1 tuning result", "2 tuning results"."""
    return f"{count} tuning result" if count == 1 else f"{count} tuning results"


def cache_table(cache: "KernelCache") -> Table:
    """The kernels of a cache, newest first, and what they take on disk."""
    entries = cache.entries()
    table = Table(
        title=f"{cache.root}",
        title_justify="left",
        caption=f"{kernels(len(entries))}, {cache.size() / 1e6:.1f} MB",
        caption_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("key", style="bold", no_wrap=True)
    table.add_column("made", no_wrap=True)
    table.add_column("kB", justify="right")
    table.add_column("build s", justify="right")
    table.add_column("kernel", overflow="fold")
    for entry in entries:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.created))
        kernel = " | ".join(str(entry.facts[name]) for name in KERNEL_FACTS if name in entry.facts)
        row = (f"{entry.size / 1e3:.0f}", f"{entry.build_seconds:.2f}", escape(kernel))
        table.add_row(entry.key[:16], made, *row)
    return table
