"""What the kernels of all architectures are made of; each is put together in a package of its own.

    limits.py    numbers that hold everywhere
    paths.py     how operands get into shared memory and results out of it
    plan.py      what every kernel's plan says to the outside
    tensors.py   the operands: dtypes, the symbolic ones a kernel is traced with, how the kernel sees them
    host.py      what the compiled host code checks before it launches
    grid.py      the work of a launch, and where a CTA stands in it
    feed.py      whose work is what
    ring.py      operand stages and their barriers
    loads.py     what the loading warp starts
    lines.py     operands that TMA cannot put in their place: what a tile's lines are
    realign.py   their loads, and the warps that shift them into place
    build.py     a plan compiled
    meeting.py   where a cluster's warps wait for each other
    sharing.py   tiles whose K several workers share: who has which part, and how they meet
    squares.py   elements of accumulators to global memory, one by one

Nothing here knows torch. Every module but limits.py, lines.py, paths.py and plan.py imports the compiler.
"""
