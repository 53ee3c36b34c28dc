"""Where a worker's work comes from on sm_100a: as everywhere, or from the hardware (Dynamic)."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutegemm.blackwell.launch_control import ANSWER_BYTES, ask, first_cta, is_granted
from cutegemm.blackwell.plan import BlackwellPlan
from cutegemm.parts import feed as common
from cutegemm.parts.feed import Feed, QueuePosition
from cutegemm.parts.plan import counts_tasks
from cutegemm.parts.ring import StageCursor, advanced
from cutegemm.scheduler import TileScheduler
from cutegemm.scheduler.stream import Span

CLUSTER = cutlass._mlir.dialects.nvvm.MemScopeKind.CLUSTER
SLOTS = 2  # one answer is being read, the next is on its way
ANSWER_WORDS = ANSWER_BYTES // 4


@dataclass(frozen=True)
class LaunchControlFeed:
    """Tasks that the hardware hands out: every task is a cluster of the launch, and has its number.

    A cluster begins with its own task. Then one warp of its first CTA asks for a cluster that has not been
    launched yet, and the cluster does that one's task, until the answer is no. Clusters that nobody was
    granted are launched by the hardware and do their own tasks: nothing is lost when the answer is no though
    clusters wait, as it can be while another process uses the GPU. Nor does anybody ask again after a no,
    since a grant that nobody follows would be a task that nobody does.

    Answers go into a ring of SLOTS in every CTA of the cluster:

        task_arrived[s]   completes when the answer is in slot s
        task_taken[s]     in the first CTA: completes when every reading warp of every CTA has read it
        task_begun        in the first CTA: completes each time its load warp begins with a task

    The next task is asked for when the loads of the one before begin: early enough to be there in time, and
    no earlier, since a worker that holds several when the tasks run out ends later than the others.
    """

    slots: cute.Pointer
    task_arrived: cute.Pointer
    task_taken: cute.Pointer
    task_begun: cute.Pointer
    worker: Int32
    tasks: Int32
    k_tiles: Int32
    plan: cutlass.Constexpr[BlackwellPlan]

    def init(self) -> None:
        """See Feed.init."""
        readers = self.plan.reading_warps * self.plan.cluster_ctas
        for slot in range(SLOTS):
            cute.arch.mbarrier_init(self.task_arrived + slot, 1)
            cute.arch.mbarrier_init(self.task_taken + slot, readers)
        cute.arch.mbarrier_init(self.task_begun, 1)

    def first(self) -> QueuePosition:
        """See Feed.first."""
        return QueuePosition(self.worker, Int32(0), Int32(0))

    @cute.jit
    def next(self, position: QueuePosition) -> QueuePosition:
        """See Feed.next; beyond the last task nothing more is taken."""
        following = position
        if position.task < self.tasks:
            task = self._answer(position)
            # The hardware writes the slot again: what was read of it must not be read later than that.
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                if cutlass.const_expr(self.plan.cluster_ctas > 1):
                    cute.arch.mbarrier_arrive(self.task_taken + position.slot, Int32(0), scope=CLUSTER)
                else:
                    cute.arch.mbarrier_arrive(self.task_taken + position.slot)
            following = _after(task, position)
        return following

    def span(self, position: QueuePosition) -> Span:
        """See Feed.span."""
        return Span(position.task, Int32(0), self.k_tiles)

    @cute.jit
    def begin(self) -> None:
        """See Feed.begin."""
        first = cutlass.Boolean(True)
        if cutlass.const_expr(self.plan.cluster_ctas > 1):
            first = cute.arch.block_idx_in_cluster() == 0
        if (cute.arch.lane_idx() == 0) & first:
            cute.arch.mbarrier_arrive(self.task_begun)

    @cute.jit
    def fetch(self) -> None:
        """See Feed.fetch: one task ahead of the load warp."""
        position = self.first()
        begun = Int32(0)
        while position.task < self.tasks:
            cute.arch.mbarrier_wait(self.task_begun, begun)
            begun = begun ^ 1
            cute.arch.mbarrier_wait(self.task_taken + position.slot, position.parity ^ 1)
            self._ask(position.slot)
            position = _after(self._answer(position), position)
        # Nobody arrives here any more once the last answer is read: only then may this CTA end.
        for _ in cutlass.range_constexpr(SLOTS):
            cute.arch.mbarrier_wait(self.task_taken + position.slot, position.parity ^ 1)
            position = _after(position.task, position)

    @cute.jit
    def _ask(self, slot: Int32) -> None:
        """Announces the answer's bytes in every CTA, then asks."""
        lane, ctas = cute.arch.lane_idx(), self.plan.cluster_ctas
        arrived = self.task_arrived + slot
        if cutlass.const_expr(ctas == 1):
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(arrived, ANSWER_BYTES)
        else:
            if lane < ctas:
                cute.arch.mbarrier_arrive_and_expect_tx(arrived, ANSWER_BYTES, lane, scope=CLUSTER)
        if lane == 0:
            ask(self._slot(slot), arrived, ctas > 1)

    @cute.jit
    def _answer(self, position: QueuePosition) -> Int32:
        """The task in a position's slot, once it is there; the number of tasks if there is none."""
        cute.arch.mbarrier_wait(self.task_arrived + position.slot, position.parity)
        task = self.tasks
        answer = self._slot(position.slot)
        if is_granted(answer):
            task = first_cta(answer) // self.plan.cluster_ctas
        return task

    def _slot(self, slot: Int32) -> cute.Pointer:
        pointer = self.slots + ANSWER_WORDS * slot
        # The sum loses the alignment that the answer needs.
        return cute.make_ptr(Int32, pointer.toint(), cute.AddressSpace.smem, assumed_align=ANSWER_BYTES)


def _after(task: Int32, position: QueuePosition) -> QueuePosition:
    """The position of a task whose slot is the next one."""
    cursor = advanced(StageCursor(position.slot, position.parity), SLOTS)
    return QueuePosition(task, cursor.stage, cursor.parity)


def worker_count(scheduler: TileScheduler, plan: BlackwellPlan, tasks: Int32, resident: Int32) -> Int32:
    """Host side: clusters to launch; one for each task where the hardware hands them out."""
    if scheduler.queued and not counts_tasks(scheduler, plan):
        return tasks
    return scheduler.assignment.workers(tasks, resident)


def make_feed(scheduler: TileScheduler, plan: BlackwellPlan, smem: Any, grid: Any, place: Any) -> Feed:
    """Device side: the feed of a scheduler, with its slots and barriers in shared memory if it has any.

    grid, place   the kernel's TaskGrid and Place
    """
    if not scheduler.queued or counts_tasks(scheduler, plan):
        return common.make_feed(scheduler, plan, smem, grid, place)
    barriers = smem.allocate_array(cutlass.Int64, 2 * SLOTS + 1)
    slots = smem.allocate_array(Int32, SLOTS * ANSWER_WORDS, byte_alignment=ANSWER_BYTES)
    return LaunchControlFeed(
        slots,
        barriers,
        barriers + SLOTS,
        barriers + 2 * SLOTS,
        place.worker,
        grid.tasks(),
        grid.k_tiles,
        plan,
    )
