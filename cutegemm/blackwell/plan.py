"""What a GemmConfig means on sm_100a: who holds what, and whether it is legal. No compiler needed.

The one place for the limits of Blackwell kernels: the config is checked here, the kernel is built from
the plan that comes out, and the heuristic asks the same function.
"""

from dataclasses import dataclass, replace
from typing import Any

from cutegemm.config import GemmConfig, check_one_of
from cutegemm.epilogue.graph import FULL
from cutegemm.errors import ConfigError
from cutegemm.parts.limits import (
    ALIGNMENT,
    BARRIER_BYTES,
    CHUNK_ROW_BYTES,
    MAX_STAGES,
    MIN_STAGES,
    SMEM_BYTES,
    WARPGROUP_THREADS,
)
from cutegemm.parts.lines import LineBoxes, check_lines, line_boxes
from cutegemm.parts.paths import ALIGNED, Paths, StorePath
from cutegemm.parts.plan import check_epilogue
from cutegemm.problem import GemmProblem, dtype_bytes

TMEM_COLUMNS = 512  # of 32 bits, 128 lanes each
MIN_TMEM_COLUMNS = 32  # allocations are powers of two from here on
ACCUMULATORS = 2  # one is computed while the other is read
SM_SMEM_BYTES = 228 * 1024  # of an SM; the driver keeps 1 KiB for each CTA on it
DRIVER_BYTES = 1024
WARP_THREADS = 32
MOVERS = 8  # warps that put lines in their place, one for each class: they take few registers
MOVERS_BESIDE_EPILOGUE = 4  # the same where threads of the epilogue need more than so many warps leave them
EPILOGUE_SHARE = 4  # parts of a swizzle span that are read at a time where an epilogue follows
CROWDED_SHARE = 2  # the same where parts of sums are added, and movers leave a thread 96 registers

TILE_M = {1: (64, 128), 2: (128, 256)}  # by the CTAs of an MMA
TILE_K = (64, 128)
SPLITS = (1, 2, 4, 8)
CLUSTER_M = (1, 2, 4)
CLUSTER_N = (1, 2)


@dataclass(frozen=True)
class BlackwellPlan:
    """A legal configuration worked out for one problem's dtypes and majors.

    chunks                (first column, width) of the pieces in which an accumulator is read and stored, in
                          columns of tensor memory
    line_boxes            of the operands that come by way of the staging buffer
    stage_bytes           of A and B in their places, without the staging buffer
    accumulator_columns   of tensor memory, for one accumulator
    tmem_columns          allocated, for all accumulators
    smem_bytes            dynamic shared memory of a CTA
    padding_bytes         of them unused: see _least_smem
    """

    config: GemmConfig
    paths: Paths
    splits: int
    chunks: tuple[tuple[int, int], ...]
    line_boxes: LineBoxes
    stages: int
    store_stages: int
    stage_bytes: int
    store_buffer_bytes: int
    accumulator_columns: int
    tmem_columns: int
    padding_bytes: int
    smem_bytes: int

    @property
    def cluster_ctas(self) -> int:
        """CTAs of a cluster: those that share operands, and those that share a tile's K."""
        return self.config.cluster_size * self.splits

    @property
    def teams_m(self) -> int:
        """CTAs or pairs of a cluster along M: each computes a tile."""
        return self.config.cluster_m // self.config.mma_ctas

    @property
    def cta_m(self) -> int:
        """Rows of a tile whose results one CTA holds."""
        return self.config.tile_m // self.config.mma_ctas

    @property
    def cta_n(self) -> int:
        """Columns of a tile whose B one CTA holds."""
        return self.config.tile_n // self.config.mma_ctas

    @property
    def halves(self) -> int:
        """Parts of a tile's columns that lie below each other in tensor memory: 2 for 64 rows of a pair."""
        return self.config.tile_n // self.accumulator_columns

    @property
    def readers(self) -> int:
        """Tiles of a cluster whose MMAs read what one CTA loads."""
        return self.teams_m + self.config.cluster_n - 1

    @property
    def epilogue_threads(self) -> int:
        """Threads that read results."""
        return WARPGROUP_THREADS * self.config.consumers

    @property
    def moving_warps(self) -> int:
        """Warps that put lines in their place."""
        return self.line_boxes.movers

    @property
    def threads(self) -> int:
        """Threads of a CTA: the epilogue's, warps that issue MMAs, load, and fetch work, and movers."""
        return self.epilogue_threads + (3 + self.moving_warps) * WARP_THREADS

    @property
    def stages_ahead(self) -> int:
        """Stages that may be under way or waiting: those in the staging buffer count as well."""
        return self.stages * (2 if self.moving_warps else 1)

    @property
    def filling_arrivals(self) -> int:
        """How often those that fill a stage arrive: TMA's issuer for its bytes, the movers of all CTAs that
        compute a tile for theirs."""
        return (1 if self.line_boxes.in_place_bytes else 0) + self.config.mma_ctas * self.moving_warps

    @property
    def warpgroups_per_tile(self) -> int:
        """Warpgroups that store one CTA's tile together."""
        return self.config.consumers

    @property
    def launch_control(self) -> bool:
        """Whether the hardware can hand out tasks."""
        return True

    @property
    def reading_warps(self) -> int:
        """Warps of a CTA that follow the sequence of its tasks: epilogue, MMA, load, movers."""
        return 4 * self.config.consumers + 2 + self.moving_warps

    @property
    def store_steps(self) -> int:
        """Turns in which the warpgroups take a tile's chunks, one chunk each."""
        return -(-len(self.chunks) // self.config.consumers)

    @property
    def full_steps(self) -> int:
        """Of them those in which every warpgroup has a chunk of full width: all, or all but the last."""
        widest = self.chunks[0][1]
        return sum(width == widest for _, width in self.chunks) // self.config.consumers

    @property
    def windows(self) -> int:
        """16-row parts of a chunk that one warp reads."""
        return 1 if self.config.tile_m == 64 else 2

    @property
    def rows_of_a_part(self) -> int:
        """Rows of a tile that one warp reads: a reduction over rows comes in parts of so many."""
        return 16 * self.windows

    @property
    def parts_of_tile(self) -> int:
        """Parts in which a reduction over a tile's columns comes: of each half, those of each warpgroup."""
        return self.halves * self.config.consumers

    def parts_of_row(self, columns: int) -> int:
        """See KernelPlan.parts_of_row."""
        return -(-columns // self.config.tile_n) * self.parts_of_tile

    def parts_of_column(self, rows: int) -> int:
        """See KernelPlan.parts_of_column."""
        return -(-rows // self.rows_of_a_part)

    @property
    def thread_squares(self) -> int:
        """See KernelPlan.thread_squares: the first warpgroup has the most."""
        return self.squares(0)

    def squares(self, consumer: int) -> int:
        """2 x 2 squares of elements that a thread of an epilogue warpgroup holds of a tile."""
        widths = [width for _, width in self.chunks[consumer :: self.config.consumers]]
        return self.windows * sum(widths) // 8

    def squares_before(self, step: Any) -> Any:
        """Of them those in chunks of earlier steps, all of full width; step of Python or of a kernel."""
        return step * self.windows * self.chunks[0][1] // 8

    def pending_stores(self, step: int) -> int:
        """How many of a warpgroup's latest stores may still be reading when it fills the buffer of ``step``.

        Steps take the buffers in turn and start over with each tile; there is a group of stores for each
        step, be it empty. The group that used this buffer before must be done: in this tile, or else the last
        one of the tile before.
        """
        buffers, steps = self.store_stages, self.store_steps
        if step >= buffers:
            return buffers - 1
        last_use = step + (steps - 1 - step) // buffers * buffers
        return steps - 1 - last_use + step

    @property
    def fewest_pending_stores(self) -> int:
        """The same for all steps alike."""
        return min(self.pending_stores(step) for step in range(self.store_steps))

    @property
    def consumer_buffer_bytes(self) -> int:
        """Bytes of all output buffers of one epilogue warpgroup."""
        return self.store_stages * self.store_buffer_bytes


def plan(
    config: GemmConfig,
    problem: GemmProblem,
    paths: Paths = ALIGNED,
    splits: int = 1,
    streamed: bool = False,
) -> BlackwellPlan:
    """Checks ``config`` for ``problem`` (as the kernel sees it: already swapped) and works it out.

    paths     how A and B, as the kernel sees them, are loaded and D is stored
    splits    CTAs of a cluster that share one tile's K and reduce their sums in shared memory; with more than
              one, the store is direct
    streamed  whether workers add parts of tiles through global memory (StreamK)
    Raises ConfigError naming the limit and the nearest legal value.
    """
    if problem.epilogue is not None:
        check_epilogue(problem.epilogue, splits)
    _check_shape(config)
    if splits > 1:
        _check_split(config, splits)
        paths = replace(paths, store="direct")
    _check_tile_n(config, problem)
    check_lines(config, problem, paths)
    columns = config.tile_n // (2 if _folded(config) else 1)
    boxes = line_boxes(config, problem, paths, MOVERS if problem.epilogue is None else MOVERS_BESIDE_EPILOGUE)
    crowded = streamed and boxes.movers > 0 and config.consumers == 2
    chunks = output_chunks(columns, problem, CROWDED_SHARE if crowded else 1)
    partials = partial_bytes(config, chunks) if splits > 1 else 0
    stored = chunks if stores_by_tma(paths.store, problem) else ()
    stages, store_stages, sizes = _shared_memory(config, problem, stored, (partials, boxes.buffer_bytes))
    used = BARRIER_BYTES + partials + stages * (sizes[0] + boxes.buffer_bytes)
    used += config.consumers * store_stages * sizes[1]
    tmem = tmem_columns(config)
    padding = max(0, _least_smem(tmem) - used)
    return BlackwellPlan(
        config=config.with_(stages=stages, store_stages=store_stages),
        paths=paths,
        splits=splits,
        chunks=chunks,
        line_boxes=boxes,
        stages=stages,
        store_stages=store_stages,
        stage_bytes=sizes[0],
        store_buffer_bytes=sizes[1],
        accumulator_columns=columns,
        tmem_columns=tmem,
        padding_bytes=padding,
        smem_bytes=used + padding,
    )


def stores_by_tma(store: StorePath, problem: GemmProblem) -> bool:
    """Whether results go through shared memory: not where an epilogue makes D narrower or wider."""
    return store == "tma" and (problem.epilogue is None or problem.epilogue.width == FULL)


def _check_split(config: GemmConfig, splits: int) -> None:
    check_one_of("splits", splits, SPLITS, "a cluster of at most 8 CTAs that halves its work evenly")
    if config.cluster_size > 1:
        raise ConfigError(
            f"cluster {config.cluster_m}x{config.cluster_n} with K split {splits} ways: the cluster's CTAs "
            "already share the tile's K; use a cluster of 1x1, and mma_ctas=1"
        )


def partial_bytes(config: GemmConfig, chunks: tuple[tuple[int, int], ...]) -> int:
    """Shared memory for the sums of a split tile; as much for each warpgroup as the first needs."""
    columns = sum(width for _, width in chunks[:: config.consumers])
    return 4 * config.tile_m * columns * config.consumers


def _folded(config: GemmConfig) -> bool:
    """Whether a CTA's rows take half the lanes, and the right half of the columns the others."""
    return config.mma_ctas == 2 and config.tile_m == 128


def output_chunks(columns: int, problem: GemmProblem, share: int = 1) -> tuple[tuple[int, int], ...]:
    """Cuts an accumulator's columns into pieces of one swizzle span or a part of it; the last takes the rest.

    Returns (first column, width) pairs, in elements; every width is a multiple of 8.
    """
    width = CHUNK_ROW_BYTES // dtype_bytes(problem.out_dtype)
    if problem.epilogue is not None:
        # What it does with a piece takes registers of its own.
        share = EPILOGUE_SHARE
    width //= share
    return tuple((first, min(width, columns - first)) for first in range(0, columns, width))


def tmem_columns(config: GemmConfig) -> int:
    """Columns to allocate for both accumulators; those of 64 rows of one CTA share columns, by lanes."""
    columns = config.tile_n // (2 if _folded(config) else 1)
    if config.tile_m != 64:
        columns *= ACCUMULATORS
    return max(MIN_TMEM_COLUMNS, 1 << (columns - 1).bit_length())


def _least_smem(columns: int) -> int:
    """The share of an SM's shared memory that so many columns are of its tensor memory.

    With at least that, whatever CTAs of these kernels an SM has room for, it has tensor memory for too.
    Otherwise clusters that hold columns on one SM and wait for some on another could wait for each other.
    """
    share = SM_SMEM_BYTES * columns // TMEM_COLUMNS - DRIVER_BYTES
    return -(-share // ALIGNMENT) * ALIGNMENT


def _check_shape(config: GemmConfig) -> None:
    check_one_of("mma_ctas", config.mma_ctas, (1, 2), "tcgen05, an instruction of one CTA or a pair,")
    check_one_of("tile_m", config.tile_m, TILE_M[config.mma_ctas], f"tcgen05 with mma_ctas={config.mma_ctas}")
    check_one_of("tile_k", config.tile_k, TILE_K, "a stage of whole 128-byte swizzle spans")
    check_one_of("cluster_m", config.cluster_m, CLUSTER_M, "this kernel")
    check_one_of("cluster_n", config.cluster_n, CLUSTER_N, "this kernel")
    check_one_of("consumers", config.consumers, (1, 2), "the epilogue")
    if config.cluster_m % config.mma_ctas:
        raise ConfigError(
            f"mma_ctas=2 with cluster_m={config.cluster_m}: the CTAs of a pair are neighbours along M; "
            "use cluster_m=2 or 4"
        )
    if config.schedule != "cooperative":
        raise ConfigError(
            f'schedule="{config.schedule}": on sm_100a a tile is stored under the MMAs of the next in any '
            'case; use "cooperative"'
        )


def tile_n_unit(config: GemmConfig, problem: GemmProblem) -> int:
    """What tile_n must be a multiple of."""
    unit = 8 if config.tile_m == 64 else 16 * config.mma_ctas
    # The CTAs that share B load equal slices of whole 8-row atoms, or of spans of 16 along a contiguous N.
    atom = 16 if problem.b_major == "n" else 8
    return max(unit, atom * config.cluster_m)


def _check_tile_n(config: GemmConfig, problem: GemmProblem) -> None:
    unit = tile_n_unit(config, problem)
    beside = f" with cluster_m={config.cluster_m}" * (config.cluster_m > 1)
    why = f"tile_m={config.tile_m} with mma_ctas={config.mma_ctas} and B {problem.b_major}-major{beside}"
    check_one_of("tile_n", config.tile_n, tuple(range(unit, 257, unit)), why)


def _shared_memory(
    config: GemmConfig, problem: GemmProblem, chunks: tuple[tuple[int, int], ...], beside: tuple[int, int]
) -> tuple[int, int, tuple[int, int]]:
    """(stages, store buffers of a warpgroup, (bytes of a stage, bytes of a store buffer)), of one CTA.

    beside: bytes that the partial sums of a split tile take, and those of a stage in the staging buffer.
    """
    partials, staged = beside
    rows = (config.tile_m + config.tile_n) // config.mma_ctas
    placed = rows * config.tile_k * dtype_bytes(problem.a_dtype)
    stage = placed + staged
    # A direct store has no pieces in shared memory. Half of a folded tile's columns lie below the others.
    lanes = 64 if config.tile_m == 64 else 128
    buffer = lanes * max((width for _, width in chunks), default=0) * dtype_bytes(problem.out_dtype)
    buffer = -(-buffer // ALIGNMENT) * ALIGNMENT
    steps = -(-len(chunks) // config.consumers)
    store_stages = config.store_stages or max(1, min(2 // config.consumers, steps))

    def room(buffers: int) -> int:
        return (SMEM_BYTES - BARRIER_BYTES - partials - config.consumers * buffers * buffer) // stage

    fitting = min(MAX_STAGES, room(store_stages))
    stages = config.stages or max(MIN_STAGES, fitting)
    if not MIN_STAGES <= stages <= MAX_STAGES:
        legal = MIN_STAGES if stages < MIN_STAGES else max(MIN_STAGES, fitting)
        raise ConfigError(
            f"stages={stages}: a pipeline has at least {MIN_STAGES} stages and at most {MAX_STAGES}; "
            f"the nearest legal stages is {legal}"
        )
    if stages > fitting:
        needed = BARRIER_BYTES + partials + stages * stage + config.consumers * store_stages * buffer
        fewer = next((some for some in range(store_stages - 1, 0, -1) if room(some) >= MIN_STAGES), 0)
        remedy = f"even {MIN_STAGES} stages do not fit: use a smaller tile"
        if fitting >= MIN_STAGES:
            remedy = f"the nearest legal stages is {fitting}"
        elif fewer:
            remedy = f"the nearest legal store_stages is {fewer}"
        raise ConfigError(
            f"{config.with_(stages=stages)} needs {needed} bytes of shared memory, a CTA has {SMEM_BYTES}; "
            + remedy
        )
    if config.store_stages is None:
        # Leftover room goes to the output buffers: the more, the fewer waits between chunks.
        while store_stages < steps and room(store_stages + 1) >= stages:
            store_stages += 1
    return stages, store_stages, (placed, buffer)
