"""Which kernel serves which sizes, and where its compiled form comes from: chosen, keyed, built once."""

import threading
from dataclasses import dataclass, replace
from functools import cached_property

from cutegemm import heuristic
from cutegemm.artifact import Artifact
from cutegemm.cache import default_cache
from cutegemm.config import GemmConfig
from cutegemm.errors import ConfigError
from cutegemm.fingerprint import KernelKey, kernel_key
from cutegemm.hardware import Gpu
from cutegemm.parts.paths import Paths
from cutegemm.parts.plan import KernelPlan
from cutegemm.problem import GemmProblem
from cutegemm.scheduler import TileScheduler, default_order
from cutegemm.scheduler.arithmetic import ceil_div
from cutegemm.scheduler.identity import scheduler_identity
from cutegemm.targets import builder, plan

NOMINAL_SIZE = 4096  # of M and N where they are not known
STREAM_CANDIDATES = 100  # of the heuristic's ranking, among which StreamK finds one it can be used with
ALL_CANDIDATES = 1 << 20
TILE_N_UNIT = 8  # the steps in which a smaller tile is looked for


@dataclass(frozen=True)
class Choice:
    """One kernel of a problem's kind: its configuration, tile order, ways of its operands, for whom."""

    config: GemmConfig
    scheduler: TileScheduler
    paths: Paths
    target: str

    def plan(self, problem: GemmProblem) -> KernelPlan:
        """The configuration worked out for the problem's dtypes and majors. Raises ConfigError."""
        swap = self.config.swap_ab
        seen, paths = (problem.swapped(), self.paths.swapped()) if swap else (problem, self.paths)
        splits, streamed = self.scheduler.splits, self.scheduler.streamed
        return plan(self.target, self.config, seen, paths, splits, streamed)

    def is_legal(self, problem: GemmProblem) -> bool:
        """Whether there is a plan for the problem."""
        try:
            return self.plan(problem) is not None
        except ConfigError:
            return False

    @property
    def share(self) -> int:
        """Elements of a tile that one consumer warpgroup has: what decides on the registers it needs."""
        config = self.config
        return config.tile_m * config.tile_n // (1 if config.schedule == "pingpong" else config.consumers)


@dataclass(frozen=True)
class Fastest:
    """The kernel that was fastest for a problem whose operands went these ways.

    It says nothing about operands that are loaded in other ways: those get the heuristic's choice.
    """

    config: GemmConfig
    scheduler: TileScheduler
    paths: Paths

    def choice(self, problem: GemmProblem, paths: Paths, target: str) -> Choice | None:
        """The measured kernel with operands that go these ways; None where it is not the one to take."""
        choice = Choice(self.config, self.scheduler, paths, target)
        alike = replace(paths, store=self.paths.store) == self.paths
        return choice if alike and choice.is_legal(problem) else None

    def __str__(self) -> str:
        return f"{self.config} as measured"


class Kernels:
    """The kernels of one problem: what the user fixed, and the heuristic for the rest.

    problem     sizes may be unknown
    config      None: chosen for the sizes at hand; Fastest: that where it holds, chosen elsewhere
    scheduler   None: chosen with the configuration
    """

    def __init__(
        self,
        problem: GemmProblem,
        config: GemmConfig | Fastest | None,
        scheduler: TileScheduler | None,
        target: str,
    ) -> None:
        self.problem = problem
        self.config = config
        self.scheduler = scheduler
        self.target = target
        self._lock = threading.RLock()
        self._artifacts: dict[Choice, Artifact] = {}
        self._shares_that_fit = ALL_CANDIDATES  # below the least that was seen to spill

    def built(self, sizes: GemmProblem, gpu: Gpu, paths: Paths) -> tuple[Choice, Artifact]:
        """``choice``, and its compiled kernel. With an epilogue, one that keeps its values in registers.

        Limits of plans know how much an epilogue holds only roughly. What spills nevertheless is given up
        for the heuristic's next candidate of which a warpgroup has less; a given one is refused.
        Raises ProblemError, ConfigError, BuildError.
        """
        while True:
            choice = self.choice(sizes, gpu, paths)
            artifact = self.artifact(choice)
            if self.problem.epilogue is None or not artifact.resources.spills:
                return choice, artifact
            if isinstance(self.config, GemmConfig):
                raise ConfigError(self._refused(choice, artifact.resources.spills))
            with self._lock:
                self._shares_that_fit = min(self._shares_that_fit, choice.share)

    def _refused(self, choice: Choice, spills: int) -> str:
        """What to say of a configuration that was asked for and spills; looks for one that does not."""
        config = choice.config.with_(stages=None, store_stages=None)
        smaller = [
            replace(choice, config=config.with_(tile_n=tile_n))
            for tile_n in range(TILE_N_UNIT, config.tile_n, TILE_N_UNIT)
        ]
        smaller = [self._filled_in(one) for one in smaller if one.is_legal(self.problem)]
        fits = -1
        beyond = len(smaller)
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            if self.artifact(smaller[middle]).resources.spills:
                beyond = middle
            else:
                fits = middle
        remedy = "no narrower one fits them: let the epilogue read or return less at once"
        if fits >= 0:
            remedy = f"the largest tile that fits them is {config.tile_m}x{smaller[fits].config.tile_n}"
        return (
            f"{choice.config} with the epilogue {self.problem.epilogue} spills {spills} bytes a thread: its "
            f"values do not fit the registers; {remedy}, and config=None chooses one that does"
        )

    def choice(self, sizes: GemmProblem, gpu: Gpu, paths: Paths) -> Choice:
        """The kernel for a problem of these sizes on a GPU. Raises ProblemError, ConfigError."""
        if isinstance(self.config, Fastest):
            measured = self.config.choice(self.problem, paths, self.target)
            if measured is None or measured.share >= self._shares_that_fit:
                return self._chosen(sizes, gpu, paths)
            return self._filled_in(measured)
        if self.config is not None:
            scheduler = self.scheduler or default_scheduler(self.config, 1, self.problem, gpu)
            return self._filled_in(Choice(self.config, scheduler, paths, self.target))
        return self._chosen(sizes, gpu, paths)

    def _filled_in(self, given: Choice) -> Choice:
        """With the stages the plan finds room for. Raises ConfigError."""
        return replace(given, config=given.plan(self.problem).config)

    def _chosen(self, sizes: GemmProblem, gpu: Gpu, paths: Paths) -> Choice:
        """The heuristic's. Raises ConfigError."""
        splits = heuristic.SPLITS if self.scheduler is None else (self.scheduler.splits,)
        likely = _by_size_class(self.problem, sizes)
        ranking = heuristic.ranked(likely, gpu, 1, paths, splits)
        if self.scheduler is not None and self.scheduler.streamed:
            # Ranked as for whole tiles; the widest of those do not leave StreamK its registers.
            ranking = heuristic.ranked(likely, gpu, STREAM_CANDIDATES, paths, splits)
        if self._shares_that_fit < ALL_CANDIDATES:
            ranking = heuristic.ranked(likely, gpu, ALL_CANDIDATES, paths, splits)
        for best in ranking:
            scheduler = self.scheduler or default_scheduler(best.config, best.splits, likely, gpu)
            choice = Choice(best.config, scheduler, paths, self.target)
            if choice.share < self._shares_that_fit and choice.is_legal(self.problem):
                return choice
        if self._shares_that_fit < ALL_CANDIDATES:
            raise ConfigError(
                f"the epilogue {self.problem.epilogue} holds more than fits the registers even beside the "
                "smallest tile: let it read or return less at once"
            )
        raise ConfigError(
            f"none of the {len(ranking)} likeliest configurations is legal with {self.scheduler}"
        )

    def of_one_product(self) -> "Kernels":
        """Those of one product of a batch; what was measured for the batch is not taken for one of it."""
        problem = replace(self.problem, l=1, batched=False)
        config = None if isinstance(self.config, Fastest) else self.config
        return Kernels(problem, config, self.scheduler, self.target)

    @cached_property
    def _given_identity(self) -> str | None:
        """Of the user's scheduler, if there is one. Found once: one from outside is tried out for it."""
        return None if self.scheduler is None else scheduler_identity(self.scheduler)

    def artifact(self, choice: Choice) -> Artifact:
        """The compiled kernel: of this object, else from the cache, else built now. Raises BuildError."""
        artifact = self._artifacts.get(choice)
        if artifact is None:
            with self._lock:
                artifact = self._artifacts.get(choice) or self._from_cache(choice)
                self._artifacts[choice] = artifact
        return artifact

    def import_compiler_unless_cached(self, choice: Choice) -> None:
        """Brings in the kernel compiler now if the choice's kernel will have to be compiled."""
        if not default_cache().holds(self._key(choice)):
            builder(self.target)

    def ptx_with_lines(self, choice: Choice) -> str:
        """PTX of the same instructions as the artifact's with .loc directives. Raises BuildError.

        Compiled apart, because with line information cubin and object are two to three times as large.
        """
        return self._from_cache(choice, "--generate-line-info").ptx

    def _from_cache(self, choice: Choice, options: str = "") -> Artifact:
        def compile_now() -> dict[str, bytes]:
            build = builder(self.target)
            plan, kind = choice.plan(self.problem), self.problem.kind()
            return build(plan, kind, choice.scheduler, self.target, options)

        return Artifact.from_entry(default_cache().get_or_build(self._key(choice, options), compile_now))

    def _key(self, choice: Choice, options: str = "") -> KernelKey:
        """Cache key of a kernel: everything that shapes it, in words."""
        parts = (choice.plan(self.problem), self.problem.kind())
        identity = self._given_identity or scheduler_identity(choice.scheduler)
        spec = f"{parts[0]!r}\n{parts[1]!r}\n{identity}"
        return kernel_key(f"{spec}\n{options}" if options else spec, self.target)


def default_scheduler(config: GemmConfig, splits: int, problem: GemmProblem, gpu: Gpu) -> TileScheduler:
    """The scheduler of a configuration where nobody asked for one.

    Strips of tiles for the sizes at hand, 4096 where they are not known; K split as the heuristic says.
    """
    m, n = problem.m or NOMINAL_SIZE, problem.n or NOMINAL_SIZE
    if config.swap_ab:
        m, n = n, m
    cta_m = config.tile_m // config.mma_ctas
    order = default_order(
        ceil_div(m, cta_m),
        ceil_div(n, config.tile_n),
        config.cluster_m,
        config.cluster_n,
        tile_m=cta_m,
        tile_n=config.tile_n,
        workers=gpu.resident_clusters(config.cluster_size * splits),
    )
    return replace(TileScheduler.splitting(splits), order=order)


def _by_size_class(asked: GemmProblem, actual: GemmProblem) -> GemmProblem:
    """Sizes unknown at compile time, rounded up to a power of two: a loop over them builds few kernels."""

    def rounded(wanted: int | None, size: int | None) -> int | None:
        return size if wanted is not None or size is None else 1 << max(size - 1, 0).bit_length()

    return replace(
        asked,
        m=rounded(asked.m, actual.m),
        n=rounded(asked.n, actual.n),
        k=rounded(asked.k, actual.k),
        l=rounded(asked.l, actual.l),
    )
