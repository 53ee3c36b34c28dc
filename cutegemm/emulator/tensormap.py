"""The driver's cuTensorMapEncodeTiled, for host code that calls it instead of writing tensor maps itself.

The words are those compiled host code writes; see tma.py.
"""

from collections.abc import Sequence

from cutegemm.emulator.faults import HostCodeError

# The driver's element types: the code in a tensor map, and bytes of an element.
_ELEMENTS = {0: (0, 1), 2: (2, 4), 3: (2, 4), 6: (6, 2), 7: (7, 4), 9: (10, 2), 11: (7, 4)}
_UNIT = 16


def encode_map(
    element: int,
    address: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int,
) -> bytes:
    """128 bytes of a tensor map; ``element`` and ``swizzle`` are the driver's numbers, strides in bytes.

    Raises HostCodeError for what the driver refuses, or what is not known here.
    """
    if element not in _ELEMENTS or swizzle not in (0, 1, 2, 3):
        raise HostCodeError(f"a tensor map of element type {element} and swizzle {swizzle} is not known here")
    code, size = _ELEMENTS[element]
    if address % _UNIT or any(stride % _UNIT for stride in strides):
        raise HostCodeError(
            "a tensor map needs an address and strides that are multiples of 16 bytes, not "
            f"0x{address:x} and {list(strides)}"
        )
    if any(not 0 < b <= 256 for b in box) or box[0] * size % _UNIT:
        raise HostCodeError(f"a tensor map has no box of {list(box)} elements of {size} bytes")
    words = [0] * 16
    words[0] = address
    words[1] = 2 | (len(sizes) - 1) << 4 | code << 7 | swizzle << 13 | 2 << 17
    units = [stride // _UNIT for stride in strides] + [0] * (4 - len(strides))
    words[1] |= (units[0] & 0xFFFFFFFF) << 32
    words[2] = units[1] & 0xFFFFFFFF | (units[2] & 0xFFFFFFFF) << 32
    words[3] = units[3] & 0xFFFFFFFF
    for i, unit in enumerate(units):
        words[3] |= (unit >> 32 & 0xF) << (32 + 4 * i)
    less = [s - 1 for s in sizes] + [0] * (5 - len(sizes))
    words[4], words[5] = less[0] | less[1] << 32, less[2] | less[3] << 32
    words[6] = less[4] | (box[0] - 1) << 56
    for i, b in enumerate(box[1:]):
        words[7] |= (b - 1) << (8 * i)
    return b"".join(word.to_bytes(8, "little") for word in words)
