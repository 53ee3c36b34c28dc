"""hypothesis strategies: cases of a kind, simplest first, so that a failure shrinks to a simple one."""

from dataclasses import dataclass, fields, replace

from hypothesis import strategies as st

from cutegemm.fuzz.case import CALLS, Case, Shape, Strided, dense_strides
from cutegemm.fuzz.kinds import Kind, is_legal, takes_any_alignment

PLAIN = 300  # one in so many draws has the plain value of a field of the kind: what shrinking arrives at
FAR = 2**33  # elements: a stride that no 32-bit number holds


@dataclass(frozen=True)
class Limits:
    """How large cases get.

    small, middle, most   of M and N: up to small as a rule, up to middle now and then, up to most seldom
    most_k                of K
    elements              of any operand and its buffer
    work                  multiplications
    batch                 products in a batch
    block                 cases that share a kind: the more, the fewer compilations
    """

    small: int
    middle: int
    most: int
    most_k: int
    elements: int
    work: int
    batch: int
    block: int


GPU = Limits(
    small=300, middle=1100, most=70_000, most_k=20_000, elements=1 << 24, work=1 << 34, batch=40, block=100
)
EMULATOR = Limits(
    small=40, middle=150, most=400, most_k=700, elements=1 << 20, work=1 << 24, batch=4, block=50
)


@st.composite
def cases(draw: st.DrawFn, kind: Kind, limits: Limits, emulated: bool) -> Case:
    """Cases of a kind, now and then with a plain value for one of its fields."""
    chosen = _mostly(draw, kind)
    l = draw(_batches(limits)) if chosen.batched else None  # noqa: E741 - the field's own name
    m, n, k = draw(_sizes(chosen, limits, 1 if l is None else l))
    call = draw(st.sampled_from(CALLS[:2] if emulated else CALLS))
    plain = Case(m, n, k, l, chosen.dtype, chosen.out_dtype, chosen.majors)
    given = draw(st.integers(0, 3)) > 0
    # Where the configuration has no kernel for them, unaligned operands are seldom worth trying.
    anywhere = takes_any_alignment(chosen) or draw(st.integers(0, 19)) == 19
    changes: dict[str, object] = {
        "a": draw(_places(plain, "a", anywhere)),
        "b": draw(_places(plain, "b", anywhere)),
        "out": draw(_places(plain, "out", True)) if given else None,
        "planted": draw(st.sampled_from((0, 0, 1, 3))),
        "seed": draw(st.integers(0, 9999)),
        "call": call,
    }
    if emulated:  # matmul takes what lies on a GPU
        changes["adverse"] = draw(st.none() | st.integers(0, 9999))
        changes["resident"] = draw(st.none() | st.integers(1, 5))
    majors = chosen.majors
    if call == "matmul":
        if changes["out"] is None and chosen.out_dtype == chosen.dtype:
            majors = majors[:2] + "n"  # as it is allocated
        elif changes["out"] is None:
            changes["call"] = "open"  # matmul allocates a D of the inputs' dtype
    if changes["call"] != "matmul":
        changes |= {"config": chosen.config, "scheduler": chosen.scheduler}
    return Case(m, n, k, l, chosen.dtype, chosen.out_dtype, majors, **changes)  # type: ignore[arg-type]


def _mostly(draw: st.DrawFn, kind: Kind) -> Kind:
    """The kind, seldom with plain values: 0 is what shrinking tries first."""
    plain = Kind(target=kind.target)
    sources = {field.name: kind if draw(st.integers(0, PLAIN)) else plain for field in fields(Kind)}
    mixed = Kind(**{name: getattr(source, name) for name, source in sources.items()})
    return mixed if is_legal(mixed) else replace(mixed, config=None)


# --- sizes -------------------------------------------------------------------------------------------------


def _batches(limits: Limits) -> st.SearchStrategy[int]:
    return st.integers(1, 3) | st.integers(0, limits.batch)


def _near(unit: int, most: int) -> st.SearchStrategy[int]:
    """Multiples of a unit, one less, and one more."""
    multiples = st.integers(1, max(1, most // unit))
    return st.builds(lambda count, past: count * unit + past, multiples, st.integers(-1, 1))


def _size(limits: Limits, most: int, units: tuple[int, ...]) -> st.SearchStrategy[int]:
    """0 to ``most``, mostly small, and often around multiples of the units."""
    small, middle = min(most, limits.small), min(most, limits.middle)
    return st.one_of(
        st.integers(min(1, most), min(most, 9)),
        _around(units, small),
        _around(units, middle),
        st.integers(0, min(most, 9)),
        st.integers(0, small),
        st.integers(0, middle),
        st.integers(0, most),
    ).map(lambda size: min(size, most))


def _around(units: tuple[int, ...], most: int) -> st.SearchStrategy[int]:
    return st.sampled_from(units).flatmap(lambda unit: _near(unit, most))


@st.composite
def _sizes(draw: st.DrawFn, kind: Kind, limits: Limits, batch: int) -> tuple[int, int, int]:
    """M, N and K, together within the limits."""
    config = kind.config
    tiles = (64, 64, 64) if config is None else (config.tile_m, config.tile_n, config.tile_k)
    if config is not None and config.swap_ab:
        tiles = (tiles[1], tiles[0], tiles[2])
    batch = max(1, batch)
    m = draw(_size(limits, min(limits.most, limits.elements // batch), (8, 16, tiles[0])))
    area = min(limits.elements, limits.work // 64) // batch
    n = draw(_size(limits, min(limits.most, area // max(1, m)), (8, 16, tiles[1])))
    depth = min(
        limits.most_k, limits.elements // batch // max(1, m, n), limits.work // batch // max(1, m * n)
    )
    k_limits = Limits(**(vars(limits) | {"middle": 3 * limits.middle}))
    return m, n, draw(_size(k_limits, max(1, depth), (8, 16, tiles[2])))


# --- places ------------------------------------------------------------------------------------------------


@st.composite
def _places(draw: st.DrawFn, case: Case, name: str, anywhere: bool) -> Strided | None:
    """Where an operand lies: dense, padded, shifted, transposed within its batch, spread out, expanded.

    anywhere: whether it may lie off multiples of 16 bytes
    """
    shape, last = case.shape(name), case.last_contiguous(name)
    aligned = draw(st.sampled_from((False, False, True))) or not anywhere
    unit = 16 // (4 if name == "out" and case.out_dtype == "float32" else 2) if aligned else 1
    where = draw(_layouts(shape, last, unit, may_overlap=name != "out"))
    offset = draw(st.just(0) | st.integers(0, 8) | st.sampled_from((8, 16, 24, 63))) // unit * unit
    if where == dense_strides(shape, last) and offset == 0 and name != "out":
        return None
    return Strided(_loosened(draw, shape, where), offset)


@st.composite
def _layouts(
    draw: st.DrawFn, shape: Shape, last_contiguous: bool, unit: int, may_overlap: bool
) -> tuple[int, ...]:
    """Strides of a matrix, or a batch of them, that share no element unless they may.

    unit: elements, of which pitches are multiples if it is not 1; there is a contiguous mode then
    """
    rows, columns = shape[-2:]
    lines, run = (rows, columns) if last_contiguous else (columns, rows)
    lines, run, batch = max(1, lines), max(1, run), max(1, shape[0]) if len(shape) == 3 else 1
    odd_steps = (2, 3, 0) if may_overlap else (2, 3, 2)
    # Drawn in any case: a failure shrinks better where draws keep their places.
    step = draw(st.sampled_from((*(1,) * 8, *odd_steps)))
    step = 1 if unit > 1 else step
    length = -(-((run - 1) * step + 1) // unit) * unit
    pads = (st.sampled_from((0, 0, 8, 64)) | st.integers(0, 9) | st.integers(0, 70)).map(
        lambda pad: pad // unit * unit
    )
    # Beside a step other than 1, a pitch of 1 would make the other mode the contiguous one.
    pitch = max(length + draw(pads), 1 if step == 1 else 2)
    batch_pitch = pitch * lines + draw(pads)
    style = draw(st.sampled_from(("plain",) * 6 + ("interleaved", "overlapping")))
    if style == "interleaved":  # the batch between lines and the elements of one, as heads of attention lie
        batch_pitch, pitch = pitch, pitch * batch
    elif style == "overlapping" and may_overlap:
        pitch = draw(st.sampled_from((0, 8)) | st.integers(0, length)) // unit * unit
        pitch += step != 1 and pitch == 1
        batch_pitch = draw(st.sampled_from((0, 8)) | st.integers(0, pitch * lines + 8)) // unit * unit
    elif may_overlap and draw(st.integers(0, 4)) == 4:
        batch_pitch = 0
    matrix = (pitch, step) if last_contiguous else (step, pitch)
    return matrix if len(shape) == 2 else (batch_pitch, *matrix)


def _loosened(draw: st.DrawFn, shape: Shape, strides: tuple[int, ...]) -> tuple[int, ...]:
    """The stride of a mode of one element says nothing, and may be anything."""
    if 1 not in shape or draw(st.integers(0, 3)) < 3:
        return strides
    anything = st.integers(0, 99) | st.just(FAR)
    return tuple(draw(anything) if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
