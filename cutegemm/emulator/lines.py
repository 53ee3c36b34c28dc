"""From lines of PTX to lines of the Python it was compiled from, for code compiled without line information.

The same kernel compiled with it has the same instructions; its ``.loc`` directives are read off there.
"""

from collections.abc import Callable
from difflib import SequenceMatcher

from cutegemm.emulator.ptx import parse


def source_lines(ptx: str, with_lines: str) -> Callable[[int], str]:
    """A function from a line of ``ptx`` to "file:line", or "" where nothing is known.

    with_lines: PTX of the same kernel with ``.loc`` directives. ``ptx`` may have been changed since; what
    the two still have in common, in order, is known.
    """
    ours, theirs = parse(ptx).statements, parse(with_lines).statements
    matcher = SequenceMatcher(None, [s.opcode for s in ours], [s.opcode for s in theirs], autojunk=False)
    sources = {
        ours[block.a + i].line: theirs[block.b + i].source
        for block in matcher.get_matching_blocks()
        for i in range(block.size)
    }
    return lambda line: sources.get(line, "")
