"""What the kernels of all architectures are made of; each is put together in a package of its own.

    limits.py    numbers that hold everywhere; no compiler needed
    tensors.py   the operands: dtypes, the symbolic ones a kernel is traced with, how the kernel sees them
    host.py      what the compiled host code checks before it launches
    grid.py      the work of a launch, and where a CTA stands in it
    feed.py      whose work is what
    ring.py      operand stages and their barriers

Nothing here knows torch. Every module but limits.py imports the compiler.
"""
