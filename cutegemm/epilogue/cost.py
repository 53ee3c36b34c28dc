"""What an epilogue costs, for the cost models: instructions of an element, bytes beside those of D."""

from collections.abc import Iterator

from cutegemm.epilogue.graph import Graph, Node
from cutegemm.epilogue.spec import Epilogue
from cutegemm.problem import dtype_bytes

# Instructions for one element, and those among them for the special function unit, as the assembler emits
# them. What is not listed takes one.
INSTRUCTIONS = {
    "acc": (0, 0), "constant": (0, 0), "row_index": (0, 0), "column_index": (0, 0), "batch_index": (0, 0),
    "even": (0, 0), "odd": (0, 0), "interleave": (0, 0), "float": (0.5, 0), "neg": (0, 0), "abs": (0, 0),
    "div": (4, 1), "floordiv": (6, 0), "mod": (8, 0), "exp": (1, 1),
    "log": (1, 1), "sqrt": (1, 1), "rsqrt": (0, 1), "tanh": (15, 2), "sigmoid": (3, 2), "erf": (11, 2),
    "gelu": (12, 1), "cast": (1, 0), "random": (22, 0),
}  # fmt: skip
PLAIN_PER_CYCLE, SPECIAL_PER_CYCLE = 128, 16  # elements of one SM


def cycles_per_element(epilogue: Epilogue | None) -> float:
    """Cycles of an SM for each element of the product, if nothing else ran; 0 without an epilogue."""
    if epilogue is None:
        return 0.0
    plain, special = 0.0, 0.0
    for node, share in _nodes(epilogue.graph):
        one, other = INSTRUCTIONS.get(node.op, (1, 0))
        plain, special = plain + share * one, special + share * other
    # Each output beyond the first is converted and stored as the first is; reductions combine each element.
    plain += 2 * len(epilogue.further)
    # The special function unit works beside the others.
    return max(plain / PLAIN_PER_CYCLE, special / SPECIAL_PER_CYCLE)


def _nodes(graph: Graph) -> Iterator[tuple[Node, float]]:
    """Nodes, and how many of their values there are for each element of the product."""
    for node in graph.nodes:
        yield node, 1.0 if node.width is None else 2.0**node.width


def bytes_per_element(epilogue: Epilogue | None, out_dtype: str) -> float:
    """Bytes of matrices read and of outputs beside the main one, for each element of the product."""
    if epilogue is None:
        return 0.0
    total = 0.0
    for operand in epilogue.operands:
        if operand.modes == "mn":
            total += dtype_bytes(str(operand.dtype)) * 2.0**operand.width
    for output in epilogue.stored[1:]:
        total += dtype_bytes(output.dtype or out_dtype) * 2.0 ** epilogue.graph.width(output)
    return total
