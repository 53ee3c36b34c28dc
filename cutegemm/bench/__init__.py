"""Measuring cutegemm beside other libraries.

workload   shapes, floor, rotation of inputs         method    the knobs of a run
inputs     operands and poison                       accuracy  whether a result is right
gpu, cuda  the GPU behind an interface               peers     what can be measured
measure    one shape: check, capture, time, check    result    numbers, JSON
suite      many shapes: run_suite                    hostcost  host time, first calls
worker     another process for builds and GPU work   sweeps    many configurations of a shape
report     progress and tables                       command   the command line
"""

from cutegemm.bench.command import add_arguments, main, parse_config
from cutegemm.bench.method import QUICK, Method
from cutegemm.bench.report import sweep_table
from cutegemm.bench.result import Report, Result, Row, Timing
from cutegemm.bench.suite import run_suite
from cutegemm.bench.sweeps import sweep, sweep_many
from cutegemm.bench.workload import Case, Ceilings

__all__ = [
    "QUICK",
    "Case",
    "Ceilings",
    "Method",
    "Report",
    "Result",
    "Row",
    "Timing",
    "add_arguments",
    "main",
    "parse_config",
    "run_suite",
    "sweep",
    "sweep_many",
    "sweep_table",
]
