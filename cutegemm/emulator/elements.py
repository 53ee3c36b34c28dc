"""Element types of tensor core operands: their sizes, and their bits as numbers."""

import numpy as np
import torch

from cutegemm.emulator.values import Lanes

STEP_BYTES = 32  # of K, that one instruction covers, whatever the type
BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


def widen(raw: Lanes, name: str) -> Lanes:
    """Element patterns as numbers: exactly, but tf32 without the bits the tensor core does not read.

    raw: unsigned numbers of the element's size. float32, for integers float64.
    """
    if name == "bf16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if name == "f16":
        return raw.view(np.float16).astype(np.float32)
    if name == "tf32":
        return (raw & np.uint32(0xFFFFE000)).view(np.float32)
    if name in ("u8", "s8"):
        return (raw.view(np.int8) if name == "s8" else raw).astype(np.float64)
    if name == "e5m2":
        return (raw.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)
    return _E4M3[raw]


def _e4m3_table() -> Lanes:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    values = np.where((codes & 0x7F) == 0x7F, np.nan, values) * np.where(codes >> 7, -1, 1)
    return values.astype(np.float32)


_E4M3 = _e4m3_table()


def float8_bits(numbers: Lanes, name: str) -> Lanes:
    """float32 numbers as e4m3 or e5m2 patterns: the nearest, ties to even; the largest for what is larger."""
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    largest = torch.finfo(dtype).max
    near = np.clip(numbers, -largest, largest)
    bits: Lanes = torch.from_numpy(near).to(dtype).view(torch.uint8).numpy()
    return np.where(np.isnan(numbers), np.uint8(0x7F), bits)
