"""Measuring which kernel is fastest for one shape, and remembering it: ``config="autotune"``.

candidates  which kernels are worth measuring       winners  what was found, on disk
tuner       build, measure, check, decide           report   progress and tables
command     the command line

Nothing is imported here: `python -m cutegemm cache` reads what was found where torch is not installed.
"""
