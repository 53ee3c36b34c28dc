"""What the plan of a kernel says to those who know no architecture. No compiler needed."""

from typing import Protocol

from cutegemm.config import GemmConfig
from cutegemm.epilogue.spec import Epilogue
from cutegemm.errors import ConfigError
from cutegemm.parts.paths import Paths
from cutegemm.scheduler import Dynamic, TileScheduler


class KernelPlan(Protocol):
    """A configuration found legal and worked out for one problem's dtypes and majors."""

    @property
    def config(self) -> GemmConfig:
        """With stages and store buffers filled in."""

    @property
    def paths(self) -> Paths:
        """How the kernel sees its operands loaded and its results stored."""

    @property
    def splits(self) -> int:
        """CTAs of a cluster that share one tile's K."""

    @property
    def stages(self) -> int:
        """Of the operand ring."""

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""

    @property
    def cluster_ctas(self) -> int:
        """CTAs of a cluster, be it that they share operands or a tile's K."""

    @property
    def threads(self) -> int:
        """Of a CTA."""

    @property
    def warpgroups_per_tile(self) -> int:
        """That store one CTA's tile together."""

    @property
    def thread_squares(self) -> int:
        """2 x 2 squares of elements of a tile that one of their threads holds at most."""

    def parts_of_row(self, columns: int) -> int:
        """Parts in which an epilogue's reduction over so many of the kernel's columns comes."""

    def parts_of_column(self, rows: int) -> int:
        """The same over so many of its rows."""

    @property
    def reading_warps(self) -> int:
        """Warps of a CTA that follow the sequence of its tasks."""

    @property
    def launch_control(self) -> bool:
        """Whether the hardware can hand out tasks."""


def counts_tasks(scheduler: TileScheduler, plan: KernelPlan) -> bool:
    """Whether workers fetch their tasks from a counter in global memory: Dynamic, but for what hardware does.

    Hardware launches as many workers as fit; only a counter knows of a limit.
    """
    assignment = scheduler.assignment
    if not isinstance(assignment, Dynamic):
        return False
    return not plan.launch_control or assignment.max_workers is not None


def check_epilogue(epilogue: Epilogue, splits: int) -> None:
    """Raises ConfigError for an epilogue that a configuration leaves no thread to do.

    epilogue as the kernel sees it; splits: CTAs that share a tile's K
    """
    if epilogue.swapped and epilogue.pairs:
        raise ConfigError(
            f"the epilogue {epilogue} takes columns in pairs, which swap_ab=True would put into different "
            "threads; use swap_ab=False"
        )
    if epilogue.reductions and splits > 1:
        raise ConfigError(
            f"the epilogue {epilogue} reduces rows or columns; with K split {splits} ways no thread has all "
            "values of a row; use another scheduler than SplitK"
        )
