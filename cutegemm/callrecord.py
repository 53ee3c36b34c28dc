"""What Python tells the compiled host code about a call, and what that answers: plain int32 memory.

The host entry of a kernel compares the tensors it is handed with this record in a few machine
instructions, which costs a hundredth of the same checks in Python.
"""

import ctypes
import threading
from enum import IntEnum


class Outcome(IntEnum):
    """What became of a call."""

    LAUNCHED = 0
    OTHER_SIZES = 1  # the tensors' sizes are not the ones this launch was chosen for
    MAY_OVERLAP = 2  # the output's byte range meets an input's, or its own lines or batches meet
    OTHER_PATHS = 3  # an operand is aligned better than this kernel needs: another kernel is faster


class CallRecord(ctypes.Structure):
    """What a launch was chosen for, and what it is given beside the tensors.

    l, m, n, k   sizes
    resident     clusters that fit on the GPU at once
    disjoint     1: the caller has shown by itself that what looks like an overlap shares no element
    counters     device address of zeroed int32 counters; 0 where the scheduler has none
    partials     device address of room for parts of sums; 0 where the scheduler has none
    """

    _fields_ = [
        ("l", ctypes.c_int32),
        ("m", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("resident", ctypes.c_int32),
        ("disjoint", ctypes.c_int32),
        ("counters", ctypes.c_int64),
        ("partials", ctypes.c_int64),
    ]


class OutcomeWord(threading.local):
    """One int32 for each thread, so that concurrent calls do not read each other's outcome."""

    def __init__(self) -> None:
        self.word = ctypes.c_int32(0)
        self.address = ctypes.addressof(self.word)
        # Both by one access, which for a thread's own data costs more than for other attributes.
        self.both = self.word, self.address
