"""Fuzzing: random products in every shape, layout and alignment, until one is wrong.

case       one product, as a text that repeats it
kinds      what a kernel is compiled for, at random
drawing    hypothesis strategies for cases
memory     operands between poison and canaries
product    what is fuzzed: the library on a GPU, or emulated
judge      what is right, and by how much
trial      one case, tried in a worker process
campaign   many cases, in parallel; failures shrunk
tally      what was counted
report     progress and tables
command    the command line

hypothesis runs in the process that hands out the cases, which therefore survives whatever a kernel does to
the worker: a hang is a failure like any other and shrinks like one.
"""
