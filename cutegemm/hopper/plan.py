"""What a GemmConfig means on sm_90a: who holds what, and whether it is legal. No compiler needed.

The one place for the limits of Hopper kernels: the config is checked here, the kernel is built from
the plan that comes out, and the heuristic asks the same function.
"""

from dataclasses import dataclass, replace

from cutegemm.config import GemmConfig, check_one_of
from cutegemm.epilogue.graph import HALF
from cutegemm.epilogue.spec import Epilogue, scaled_size
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
from cutegemm.parts.lines import INPUT_BYTES, ODD_PITCH, LineBoxes, check_lines, line_boxes
from cutegemm.parts.paths import ALIGNED, Paths
from cutegemm.parts.plan import check_epilogue
from cutegemm.problem import GemmProblem, dtype_bytes

MMA_M = 64  # rows of one WGMMA
ROWS_OF_A_PART = 16  # of them one warp has: a reduction over rows comes in parts of so many
# Registers a consumer thread needs beside its accumulators: addresses, stage state, an output chunk.
STREAM_BUDGET = 184  # the same where parts of sums are added to the accumulators
STREAM_DIRECT_BUDGET = 160  # and then stored element by element
REGISTER_RESERVE = 40
# Accumulators that fit beside a store's addresses, by kind of store and contiguous mode of D, where that is
# less than the reserve leaves. Found by compiling: at least 8 below the fewest seen to spill.
STORE_BUDGET = {
    ("direct", "m"): 168,
    ("split", "m"): 168,
    ("split", "n"): 168,
    ("fused", "n"): 192,
    ("fused", "m"): 192,
    ("wide fused", "n"): 64,
    ("wide fused", "m"): 64,
    ("much fused", "n"): 160,
    ("much fused", "m"): 160,
    ("fused split", "n"): 96,
    ("fused split", "m"): 96,
}
LIGHT = 3.0  # an epilogue's load, see _load, up to which it fits beside the most accumulators
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = {1: 240, 2: 232}  # by number of consumer warpgroups; the sum fits 64 Ki registers
# The same where a warpgroup more moves lines, what it takes itself, and what its producer does: it has as
# many descriptors as there are classes of lines.
CONSUMER_REGISTERS_BESIDE_MOVERS = {1: 240, 2: 192}
MOVERS = 4  # warps that move lines: a warpgroup, which registers are traded by
MOVING_REGISTERS = 56
PRODUCER_REGISTERS_BESIDE_MOVERS = 72
ENTRY_REGISTERS_BESIDE_MOVERS = 128  # of a thread of 512, before they are traded
WIDEST_BESIDE_MOVERS = 192  # columns of a WGMMA; wider ones were seen not to fit those

TILE_M = (64, 128, 192, 256)
TILE_K = (64, 128)
CLUSTER = (1, 2)
SPLITS = (1, 2, 4, 8)


@dataclass(frozen=True)
class HopperPlan:
    """A legal configuration worked out for one problem's dtypes and majors.

    warpgroups_m, warpgroups_n  how the consumers of one tile split it
    teams                       tiles a CTA has in flight: 1 cooperative, 2 ping-pong
    chunks                      (first column, width) of the output pieces a warpgroup stores, in elements
    line_boxes                  of the operands that come by way of the staging buffer
    stage_bytes                 of A and B in their places, without the staging buffer
    smem_bytes                  dynamic shared memory of a CTA
    streamed                    whether a tile's sum may come in parts from several workers (StreamK)
    """

    config: GemmConfig
    paths: Paths
    splits: int
    warpgroups_m: int
    warpgroups_n: int
    teams: int
    chunks: tuple[tuple[int, int], ...]
    line_boxes: LineBoxes
    stages: int
    store_stages: int
    stage_bytes: int
    store_buffer_bytes: int
    smem_bytes: int
    streamed: bool = False

    @property
    def cluster_ctas(self) -> int:
        """CTAs of a cluster: those that share operands, and those that share a tile's K."""
        return self.config.cluster_size * self.splits

    @property
    def threads(self) -> int:
        """Threads of a CTA: one producer warpgroup, the consumers, and a warpgroup of movers where needed."""
        return WARPGROUP_THREADS * (1 + self.config.consumers + (1 if self.staged_bytes else 0))

    @property
    def store_steps(self) -> int:
        """Output pieces a warpgroup stores for each tile, one after another through its buffers."""
        return len(self.chunks) * self.warpgroup_m // MMA_M

    def pending_stores(self, step: int) -> int:
        """How many of a warpgroup's latest stores may still be reading when it fills the buffer of ``step``.

        Steps take the buffers in turn and start over with each tile. The store that used this buffer
        before must be done: in this tile, or else the last one of the tile before.
        """
        buffers, steps = self.store_stages, self.store_steps
        if step >= buffers:
            return buffers - 1
        last_use = step + (steps - 1 - step) // buffers * buffers
        return steps - 1 - last_use + step

    def piece_bytes(self, dtype: str) -> int:
        """Shared memory of one piece of an epilogue's operand of a dtype."""
        return piece_bytes(self.chunks, dtype)

    @property
    def consumer_buffer_bytes(self) -> int:
        """Bytes of all output buffers of one consumer warpgroup."""
        return self.store_stages * self.store_buffer_bytes

    @property
    def warpgroup_m(self) -> int:
        """Rows of the tile one warpgroup accumulates."""
        return self.config.tile_m // self.warpgroups_m

    @property
    def warpgroup_n(self) -> int:
        """Columns of the tile one warpgroup accumulates; the N of its WGMMA."""
        return self.config.tile_n // self.warpgroups_n

    @property
    def accumulator_registers(self) -> int:
        """Accumulator registers of a consumer thread."""
        return self.warpgroup_m * self.warpgroup_n // WARPGROUP_THREADS

    @property
    def consumer_warps_per_tile(self) -> int:
        """Warps that read a stage before it is free again, in one CTA."""
        return 4 * self.warpgroups_per_tile

    @property
    def launch_control(self) -> bool:
        """Whether the hardware can hand out tasks: not on Hopper."""
        return False

    @property
    def reading_warps(self) -> int:
        """Warps of a CTA that follow the sequence of its tasks: ping-pong teams follow all of them."""
        return 1 + 4 * self.config.consumers + self.line_boxes.movers

    @property
    def staged_bytes(self) -> int:
        """Bytes of a stage that come by way of the staging buffer."""
        return self.line_boxes.staged_bytes

    @property
    def stages_ahead(self) -> int:
        """Stages that may be under way or waiting: those in the staging buffer count as well."""
        return self.stages * (2 if self.staged_bytes else 1)

    @property
    def filling_arrivals(self) -> int:
        """How often those that fill a stage arrive: TMA's issuer for its bytes, the movers for theirs."""
        return (1 if self.line_boxes.in_place_bytes else 0) + self.line_boxes.movers

    @property
    def producer_registers(self) -> int:
        """Registers of a thread of the producer's warpgroup."""
        return PRODUCER_REGISTERS_BESIDE_MOVERS if self.staged_bytes else PRODUCER_REGISTERS

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer thread."""
        return consumer_registers(self.config.consumers, self.staged_bytes > 0)

    @property
    def warpgroups_per_tile(self) -> int:
        """Consumer warpgroups that share a tile."""
        return self.warpgroups_m * self.warpgroups_n

    @property
    def thread_squares(self) -> int:
        """2 x 2 squares of accumulators that a consumer thread holds."""
        return self.accumulator_registers // 4

    def parts_of_row(self, columns: int) -> int:
        """See KernelPlan.parts_of_row: one for each warpgroup's columns."""
        return -(-columns // self.warpgroup_n)

    def parts_of_column(self, rows: int) -> int:
        """See KernelPlan.parts_of_column: one for each warp's rows of an MMA."""
        return -(-rows // ROWS_OF_A_PART)


def plan(
    config: GemmConfig,
    problem: GemmProblem,
    paths: Paths = ALIGNED,
    splits: int = 1,
    streamed: bool = False,
) -> HopperPlan:
    """Checks ``config`` for ``problem`` (as the kernel sees it: already swapped) and works it out.

    paths   how A and B, as the kernel sees them, are loaded and D is stored
    splits  CTAs of a cluster that share one tile's K and reduce their sums in shared memory; with more than
            one, the store is direct
    streamed  whether workers add parts of tiles through global memory (StreamK)
    Raises ConfigError naming the limit and the nearest legal value.
    """
    _check_shape(config, problem)
    if splits > 1:
        _check_split(config, splits)
        paths = replace(paths, store="direct")
    if problem.epilogue is not None:
        check_epilogue(problem.epilogue, splits)
    warpgroups_m, warpgroups_n = _split(config)
    _check_tile_n(config, problem, warpgroups_n)
    _check_realigned(config, problem, paths, warpgroups_n)
    store_kind: str = "split" if splits > 1 else paths.store
    if problem.epilogue is not None:
        store_kind = "much fused" if _load(problem.epilogue) > LIGHT else "fused"
        store_kind = "wide fused" if problem.epilogue.is_wide else store_kind
        store_kind = "fused split" if splits > 1 else store_kind
    _check_registers(config, problem, (warpgroups_m, warpgroups_n), (store_kind, streamed, paths))
    chunks = output_chunks(config.tile_n // warpgroups_n, problem)
    beside = 4 * config.tile_m * config.tile_n if splits > 1 else 0
    if problem.epilogue is not None and splits == 1:
        columns = sum(dtype_bytes(str(operand.dtype)) for operand in problem.epilogue.columns)
        beside += config.consumers * config.tile_n // warpgroups_n * columns
    boxes = line_boxes(config, problem, paths, MOVERS)
    staged = boxes.buffer_bytes
    # A direct store has no pieces in shared memory, unless they come out of an epilogue.
    stored = chunks if paths.store == "tma" or (problem.epilogue is not None and splits == 1) else ()
    stages, store_stages, sizes = _shared_memory(config, problem, stored, (beside, staged))
    return HopperPlan(
        config=config.with_(stages=stages, store_stages=store_stages),
        paths=paths,
        line_boxes=boxes,
        splits=splits,
        warpgroups_m=warpgroups_m,
        warpgroups_n=warpgroups_n,
        teams=2 if config.schedule == "pingpong" else 1,
        chunks=chunks,
        stages=stages,
        store_stages=store_stages,
        stage_bytes=sizes[0],
        store_buffer_bytes=sizes[1],
        smem_bytes=BARRIER_BYTES
        + beside
        + stages * (sizes[0] + staged)
        + config.consumers * store_stages * (sizes[1] + _companion_bytes(problem, stored)),
        streamed=streamed,
    )


def output_chunks(columns: int, problem: GemmProblem) -> tuple[tuple[int, int], ...]:
    """Cuts a warpgroup's columns into pieces of one swizzle span; the last piece takes what is left.

    Returns (first column, width) pairs, in elements; every width is a multiple of 8.
    """
    width = CHUNK_ROW_BYTES // dtype_bytes(problem.out_dtype)
    if problem.epilogue is not None and problem.epilogue.is_wide:
        width //= 2  # a span holds two elements for each column here
    return tuple((first, min(width, columns - first)) for first in range(0, columns, width))


def piece_bytes(chunks: tuple[tuple[int, int], ...], dtype: str) -> int:
    """Shared memory of one piece, the widest, in elements of a dtype."""
    bytes_ = MMA_M * max((width for _, width in chunks), default=0) * dtype_bytes(dtype)
    return -(-bytes_ // ALIGNMENT) * ALIGNMENT


def _companion_bytes(problem: GemmProblem, chunks: tuple[tuple[int, int], ...]) -> int:
    """Shared memory that an epilogue's operands and further outputs take beside each output buffer."""
    if problem.epilogue is None:
        return 0
    operands = sum(piece_bytes(chunks, str(operand.dtype)) for operand in problem.epilogue.staged)
    for output in problem.epilogue.stored[1:]:
        width = problem.epilogue.graph.width(output)
        operands += scaled_size(piece_bytes(chunks, output.dtype or problem.out_dtype), width)
    return operands


def _load(epilogue: Epilogue) -> float:
    """How much an epilogue keeps in registers beside the accumulators, roughly: operands and outputs."""
    tensors = len(epilogue.operands) - len(epilogue.scalars)
    return tensors + 0.5 * len(epilogue.scalars) + 3.5 * len(epilogue.further)


def _check_shape(config: GemmConfig, problem: GemmProblem) -> None:
    check_one_of("tile_m", config.tile_m, TILE_M, "a tile of whole 64-row WGMMAs that fits the registers")
    check_one_of("tile_k", config.tile_k, TILE_K, "a stage of whole 128-byte swizzle spans")
    check_one_of("tile_n", config.tile_n, tuple(range(8, 257, 8)), "WGMMA")
    check_one_of("cluster_m", config.cluster_m, CLUSTER, "this kernel")
    check_one_of("cluster_n", config.cluster_n, CLUSTER, "this kernel")
    check_one_of("consumers", config.consumers, (1, 2), "the register file")
    check_one_of("mma_ctas", config.mma_ctas, (1,), "WGMMA, an instruction of one CTA,")
    if config.schedule == "pingpong" and config.consumers != 2:
        raise ConfigError(
            f"pingpong alternates two consumer warpgroups, consumers={config.consumers} was given; "
            "use consumers=2"
        )
    # Each CTA of a multicast loads an equal slice of whole 8-row swizzle atoms.
    if config.tile_n % (8 * config.cluster_m):
        low = config.tile_n // (8 * config.cluster_m) * 8 * config.cluster_m
        raise ConfigError(
            f"tile_n={config.tile_n} with cluster_m={config.cluster_m}: each CTA loads "
            f"tile_n / {config.cluster_m} rows of B, which must be a multiple of 8; "
            f"the nearest legal tile_n is {max(low, 8 * config.cluster_m)}"
        )


def consumer_registers(consumers: int, moving: bool) -> int:
    """Registers of a consumer thread. moving: whether the CTA has warps that move lines."""
    return (CONSUMER_REGISTERS_BESIDE_MOVERS if moving else CONSUMER_REGISTERS)[consumers]


def accumulator_budget(
    consumers: int, out_major: str, store_kind: str, streamed: bool = False, moving: bool = False
) -> int:
    """Accumulator registers a consumer thread may hold without spilling.

    consumers   warpgroups among which the CTA's registers are divided
    out_major   contiguous mode of D as the kernel sees it
    store_kind  "tma", "direct", or "split" for a tile whose K is split; "fused", "fused split" with epilogues
    streamed    whether parts of other workers are added to them
    moving      whether the CTA has warps that move lines
    """
    lost = CONSUMER_REGISTERS[consumers] - consumer_registers(consumers, moving)
    budget = CONSUMER_REGISTERS[consumers] - REGISTER_RESERVE
    budget = min(budget, STORE_BUDGET.get((store_kind, out_major), budget))
    if streamed:
        budget = min(budget, STREAM_DIRECT_BUDGET if store_kind == "direct" else STREAM_BUDGET)
    return budget - lost


def _check_registers(
    config: GemmConfig, problem: GemmProblem, warpgroups: tuple[int, int], beside: tuple[str, bool, Paths]
) -> None:
    """Limits found by compiling the legal space: beyond them the assembler spills."""
    sharing = warpgroups[0] * warpgroups[1]
    store_kind, streamed, paths = beside
    moving = "realigned" in (paths.a, paths.b)
    registers = config.tile_m * config.tile_n // (WARPGROUP_THREADS * sharing)
    budget = accumulator_budget(config.consumers, problem.out_major, store_kind, streamed, moving)
    if registers > budget:
        unit = _tile_n_unit(config, problem, warpgroups[1])
        legal = budget * WARPGROUP_THREADS * sharing // config.tile_m // unit * unit
        shared = accumulator_budget(2, problem.out_major, store_kind, streamed, moving)
        others = f" beside a {store_kind} store to an {problem.out_major}-major D" * (store_kind != "tma")
        others += " where StreamK adds the parts of other workers" * streamed
        raise ConfigError(
            f"tile {config.tile_m}x{config.tile_n} with {config.consumers} {config.schedule} consumer(s) "
            f"needs {registers} accumulator registers a thread, {budget} fit without spilling{others}; "
            f"the nearest legal tile_n is {legal}"
            + (", or use 2 cooperative consumers" if sharing == 1 and registers // 2 <= shared else "")
        )
    if config.tile_k == 128 and config.tile_m > 128 and problem.b_major == "n":
        raise ConfigError(
            f"tile {config.tile_m}x{config.tile_n}x128 with B n-major: the loads of a stage do not fit the "
            f"producer's {PRODUCER_REGISTERS} registers; the nearest legal tile_k is 64"
        )


def _split(config: GemmConfig) -> tuple[int, int]:
    """How many warpgroups share a tile along M and along N."""
    if config.schedule == "pingpong" or config.consumers == 1:
        return 1, 1
    return (2, 1) if config.tile_m % (2 * MMA_M) == 0 else (1, 2)


def _tile_n_unit(config: GemmConfig, problem: GemmProblem, warpgroups_n: int) -> int:
    """What tile_n must be a multiple of."""
    # An N-major B needs a swizzle span of at least 32 bytes along N; the multicast slices are spans too.
    # Pieces of half the columns are whole 16-byte units as well.
    halved = problem.epilogue is not None and any(
        problem.epilogue.graph.width(output) == HALF for output in problem.epilogue.stored
    )
    atom = 16 if problem.b_major == "n" or halved else 8
    return atom * max(warpgroups_n, config.cluster_m)


def _check_tile_n(config: GemmConfig, problem: GemmProblem, warpgroups_n: int) -> None:
    unit = _tile_n_unit(config, problem, warpgroups_n)
    if config.tile_n % unit:
        sharers = ""
        if config.cluster_m > warpgroups_n:
            sharers = f" with cluster_m={config.cluster_m}"
        elif warpgroups_n > 1:
            sharers = f" with {warpgroups_n} consumers along N"
        legal = tuple(range(unit, 257, unit))
        check_one_of("tile_n", config.tile_n, legal, f"B {problem.b_major}-major{sharers}")


def _check_realigned(config: GemmConfig, problem: GemmProblem, paths: Paths, warpgroups_n: int) -> None:
    if "realigned" not in (paths.a, paths.b):
        return
    check_lines(config, problem, paths)
    if config.consumers == 2 and config.tile_n // warpgroups_n > WIDEST_BESIDE_MOVERS:
        raise ConfigError(
            f"tile_n={config.tile_n} with {ODD_PITCH}: the assembler has {ENTRY_REGISTERS_BESIDE_MOVERS} "
            "registers a thread for a WGMMA beside two consumers and the movers, which is too few for one of "
            f"{config.tile_n // warpgroups_n} columns; the nearest legal tile_n is "
            f"{WIDEST_BESIDE_MOVERS * warpgroups_n}, or use 1 consumer"
        )


def _check_split(config: GemmConfig, splits: int) -> None:
    check_one_of("splits", splits, SPLITS, "a cluster of at most 8 CTAs that halves its work evenly")
    if config.cluster_size > 1:
        raise ConfigError(
            f"cluster {config.cluster_m}x{config.cluster_n} with K split {splits} ways: the cluster's CTAs "
            "already share the tile's K; use a cluster of 1x1"
        )
    if config.schedule == "pingpong":
        raise ConfigError(
            f"pingpong with K split {splits} ways: both teams would wait for the other CTAs in turn; "
            "use a cooperative schedule"
        )


def _shared_memory(
    config: GemmConfig, problem: GemmProblem, chunks: tuple[tuple[int, int], ...], beside: tuple[int, int]
) -> tuple[int, int, tuple[int, int]]:
    """(stages, store buffers a warpgroup, (bytes of a stage, bytes of a store buffer)).

    beside: bytes that the partial sums of a split tile, or an epilogue's operands, take, and those of a
            stage in the staging buffer.
    """
    partials, staged = beside
    placed = (config.tile_m + config.tile_n) * config.tile_k * INPUT_BYTES
    stage = placed + staged
    buffer = MMA_M * max((width for _, width in chunks), default=0) * dtype_bytes(problem.out_dtype)
    if problem.epilogue is not None:
        buffer = scaled_size(buffer, problem.epilogue.width)
    out_buffer = -(-buffer // ALIGNMENT) * ALIGNMENT
    buffer = out_buffer + _companion_bytes(problem, chunks)
    steps = len(chunks) * config.tile_m // (MMA_M * _split(config)[0])
    store_stages = config.store_stages or max(1, min(2, steps))

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
        buffers = next((fewer for fewer in range(store_stages - 1, 0, -1) if room(fewer) >= MIN_STAGES), 0)
        remedy = f"even {MIN_STAGES} stages do not fit: use a smaller tile"
        if fitting >= MIN_STAGES:
            remedy = f"the nearest legal stages is {fitting}"
        elif buffers:
            remedy = f"the nearest legal store_stages is {buffers}"
        raise ConfigError(
            f"{config.with_(stages=stages)} needs {needed} bytes of shared memory, a CTA has {SMEM_BYTES}; "
            + remedy
        )
    if config.store_stages is None:
        # Leftover room goes to the output buffers: the more, the fewer waits between chunks.
        while store_stages < steps and room(store_stages + 1) >= stages:
            store_stages += 1
    return stages, store_stages, (placed, out_buffer)
