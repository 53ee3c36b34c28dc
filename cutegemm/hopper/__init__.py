"""The sm_90a kernel, from what it must not exceed to what is launched.

    plan.py       what a configuration means and whether it is legal; no compiler needed
    layouts.py    shared-memory layouts and MMA atoms of a plan
    producer.py   TMA loads of one stage
    mainloop.py   WGMMAs over the stages of one tile
    teams.py      consumers on one tile (cooperative) or taking turns (ping-pong)
    store.py      accumulators to global memory
    kernel.py     the roles, put together; host launch
    build.py      traced with symbolic operands and compiled

Operands, feeds and ring are those of cutegemm/parts. Nothing here knows torch. Every module but plan.py
imports the compiler.
"""
