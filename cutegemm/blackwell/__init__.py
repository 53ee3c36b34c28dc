"""The sm_100a kernel, from what it must not exceed to what is launched.

    plan.py       what a configuration means and whether it is legal; no compiler needed
    layouts.py    the MMA, and shared-memory layouts of a plan
    producer.py   TMA loads of one stage
    stages.py     the stages' ring where a pair fills them, and as movers see them
    mainloop.py   the MMAs of one tile, issued by one thread
    results.py    accumulators in tensor memory: who may use which, and how they are read
    chunks.py     how epilogue warpgroups share a tile
    store.py      results to global memory by TMA
    direct.py     the same element by element, for outputs TMA cannot store
    fused.py      what an epilogue makes of results on their way
    reduction.py  who stores a tile whose K several workers share
    split.py      the same after adding the sums of CTAs that share a tile's K
    feed.py       whose work is what: tasks handed out by the hardware
    launch_control.py   what asks for them
    kernel.py     the roles, put together; host launch
    build.py      traced with symbolic operands and compiled

Operands, feeds and ring are those of cutegemm/parts. Nothing here knows torch. Every module but plan.py
imports the compiler.
"""
