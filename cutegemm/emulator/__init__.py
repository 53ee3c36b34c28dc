"""Runs the PTX the compiler emitted on a CPU: no GPU, no driver, and faults hardware would hide.

    host.py      what the compiled host code launches: grid, parameters, tensor maps
    ptx.py       PTX text to statements; decode.py: statements to closures (ops_*.py: one family each)
    warp.py      lanes that run together or apart; machine.py: CTAs, clusters, who runs next
    memory.py    global and shared memory; mbarrier.py: barriers
    tma.py, wgmma.py, mma.py, tcgen05.py   what the engines do
    engines.py, tensor_core.py   when it is done and whom it tells
    processors.py, tmem.py   SMs, and their tensor memory
    independence.py, processes.py   clusters that run in processes of their own
    races.py, races_tensor.py, global_races.py, knowledge.py   accesses that nothing orders
    trace.py     what ran when; faults.py: what a kernel can be guilty of

Scope: sm_90a and sm_100a kernels. Float sums are taken in float32 along K, in another order than a tensor
core's; PTX memory ordering beyond barriers is not modelled, all memory is sequentially consistent.
"""

from cutegemm.emulator.arguments import Addresses
from cutegemm.emulator.faults import (
    BarrierCountError,
    ConvergenceError,
    DeadlockError,
    EmulationError,
    HostCodeError,
    MisuseError,
    OutOfBoundsError,
    RaceError,
    UninitializedReadError,
    UnknownInstructionError,
)
from cutegemm.emulator.host import TensorArgument
from cutegemm.emulator.machine import Progress
from cutegemm.emulator.run import Emulation, run
from cutegemm.emulator.trace import Event, Trace

__all__ = [
    "Addresses",
    "BarrierCountError",
    "ConvergenceError",
    "DeadlockError",
    "Emulation",
    "EmulationError",
    "Event",
    "HostCodeError",
    "MisuseError",
    "OutOfBoundsError",
    "Progress",
    "RaceError",
    "TensorArgument",
    "Trace",
    "UninitializedReadError",
    "UnknownInstructionError",
    "run",
]
