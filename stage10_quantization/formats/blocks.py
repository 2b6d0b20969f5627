"""The blocks of GGUF: 32 or 256 neighbours of a row, in a few bytes with their scales.

A reader takes `block`, B blocks as bytes (B, size), and returns

    codes    (B, values) int8
    scale    (B, groups) float32, and value = scale * code
    minimum  (B, groups) float32 if value = scale * code + minimum; else None.

`d`, `m` and `dmin` are float16, low byte first. "nibbles" holds two codes a byte: first the low
halves of all its bytes, then the high ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Parts = tuple[NDArray[np.int8], Floats, Floats | None]
EIGHT = np.arange(8, dtype=np.uint8)
TWICE = EIGHT[::2, None]  # 0, 2, 4, 6


@dataclass(frozen=True)
class Format:
    """A block of `values` codes of `bits` bits in `size` bytes."""

    values: int
    size: int
    bits: int
    read: Callable[[Bytes], Parts]


def halves(block: Bytes) -> Floats:
    """(B, 2n) bytes -> (B, n): float16, as float32."""
    return np.ascontiguousarray(block).view("<f2").astype(np.float32)


def nibbles(packed: Bytes) -> Bytes:
    """(..., n) -> (..., 2n): the low halves of the bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], -1)


def signed(codes: Bytes, zero: int) -> NDArray[np.int8]:
    """codes - zero, for codes up to 127 + zero."""
    return (codes - np.uint8(zero)).view(np.int8)  # wraps around, as int8 does


def q8_0(block: Bytes) -> Parts:
    """d 2 | 32 int8."""
    return block[:, 2:].view(np.int8), halves(block[:, :2]), None


def q4_0(block: Bytes) -> Parts:
    """d 2 | nibbles 16: d * (q - 8)."""
    return signed(nibbles(block[:, 2:]), 8), halves(block[:, :2]), None


def q4_1(block: Bytes) -> Parts:
    """d 2 | m 2 | nibbles 16: d * q + m."""
    return nibbles(block[:, 4:]).view(np.int8), halves(block[:, :2]), halves(block[:, 2:4])


def _five(block: Bytes) -> Bytes:
    """high 4 | nibbles 16: bit i of `high` is the fifth bit of code i."""
    high: Bytes = np.unpackbits(block[:, :4], axis=1, bitorder="little")  # (B, 32)
    return nibbles(block[:, 4:]) | high << np.uint8(4)


def q5_0(block: Bytes) -> Parts:
    """d 2 | high 4 | nibbles 16: d * (q - 16)."""
    return signed(_five(block[:, 2:]), 16), halves(block[:, :2]), None


def q5_1(block: Bytes) -> Parts:
    """d 2 | m 2 | high 4 | nibbles 16: d * q + m."""
    return _five(block[:, 4:]).view(np.int8), halves(block[:, :2]), halves(block[:, 2:4])


def _eight_scales(block: Bytes) -> tuple[Floats, Floats]:
    """d 2 | dmin 2 | S 12: eight scales d * s and minimums -dmin * m, of six bits each.

    byte of S   bits 0 to 3           4 and 5        6 and 7
    0 to 3      s of groups 0 to 3 .......................|  high bits of s of 4 to 7
    4 to 7      m of groups 0 to 3 .......................|  high bits of m of 4 to 7
    8 to 11     low bits of s of 4 to 7 | low bits of m of 4 to 7 (bits 4 to 7)
    """
    first, second, third = block[:, 4:8], block[:, 8:12], block[:, 12:16]
    s = np.concatenate([first & 63, third & 15 | first >> 6 << 4], 1)  # (B, 8)
    m = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], 1)
    d, dmin = halves(block[:, :2]), halves(block[:, 2:4])
    return d * s.astype(np.float32), -(dmin * m.astype(np.float32))


def _four(block: Bytes) -> Bytes:
    """128 bytes -> (B, 8, 32) codes: 32 bytes hold the nibbles of two groups."""
    return nibbles(block.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def q4_k(block: Bytes) -> Parts:
    """d 2 | dmin 2 | S 12 | four times 32 bytes of nibbles: (d * s) * q - dmin * m."""
    scale, minimum = _eight_scales(block)
    return _four(block[:, 16:]).reshape(-1, 256).view(np.int8), scale, minimum


def q5_k(block: Bytes) -> Parts:
    """d 2 | dmin 2 | S 12 | high 32 | nibbles 128: bit j of high[i] is the fifth bit of code i of
    group j."""
    scale, minimum = _eight_scales(block)
    fifth = block[:, 16:48, None] >> EIGHT & 1  # (B, 32, 8)
    codes = _four(block[:, 48:]) | fifth.swapaxes(1, 2) << 4
    return codes.reshape(-1, 256).view(np.int8), scale, minimum


def q6_k(block: Bytes) -> Parts:
    """low 128 | high 64 | s 16 int8 | d 2: (d * s) * (q - 32), a scale for 16 codes.

    Each half of the block has 64 bytes of `low`, the nibbles of 128 codes, and 32 of `high`: bits
    2g and 2g + 1 of high[i] are bits 4 and 5 of code 32g + i.
    """
    low = nibbles(block[:, :128].reshape(-1, 2, 64))  # (B, 2, 128)
    high = block[:, 128:192].reshape(-1, 2, 1, 32) >> TWICE & 3  # (B, 2, 4, 32)
    codes = np.bitwise_or(low, high.reshape(-1, 2, 128) << 4, dtype=np.uint8)
    scale = halves(block[:, 208:]) * block[:, 192:208].view(np.int8).astype(np.float32)
    return signed(codes.reshape(-1, 256), 32), scale, None


FORMATS = {
    "Q4_0": Format(32, 18, 4, q4_0),
    "Q4_1": Format(32, 20, 4, q4_1),
    "Q5_0": Format(32, 22, 5, q5_0),
    "Q5_1": Format(32, 24, 5, q5_1),
    "Q8_0": Format(32, 34, 8, q8_0),
    "Q4_K": Format(256, 144, 4, q4_k),
    "Q5_K": Format(256, 176, 5, q5_k),
    "Q6_K": Format(256, 210, 6, q6_k),
}


# ---- writing ----


def write_q8_0(codes: Bytes, scale: Bytes, minimum: Bytes) -> Bytes:
    return np.concatenate([scale, codes], 1)


def write_q4_0(codes: Bytes, scale: Bytes, minimum: Bytes) -> Bytes:
    """Codes from -8 on."""
    return np.concatenate([scale, packed(codes + np.uint8(8))], 1)


def write_q4_1(codes: Bytes, scale: Bytes, minimum: Bytes) -> Bytes:
    return np.concatenate([scale, minimum, packed(codes)], 1)


def packed(codes: Bytes) -> Bytes:
    """Codes (B, 32) of four bits -> nibbles (B, 16)."""
    return codes[:, :16] | codes[:, 16:] << np.uint8(4)


WRITERS = {  # by the bits of a code, and whether there is a minimum
    (8, False): ("Q8_0", write_q8_0),
    (4, False): ("Q4_0", write_q4_0),
    (4, True): ("Q4_1", write_q4_1),
}
