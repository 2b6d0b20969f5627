"""The structs of operations.h, which Python fills in and C reads."""

from __future__ import annotations

import ctypes
from typing import Any

EMBED, NORM, LINEAR, ROPE, ATTEND = range(5)
BODIES = "embed", "norm", "linear", "rope", "attention"  # of each, in the union
ALL_ROWS, OUT_ROWS = range(2)
PLAIN, GELU, SILU_MUL = range(3)
PAD, PANEL, K_PAD, MAX_HEAD_DIM = 16, 64, 32, 512  # K_PAD: in bfloat16
MAX_QUERIES, TILE_QUERIES = 8, 32  # as in fast/attention.c: by vectors, by tiles


def fields(pointers: str, numbers: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in pointers.split()] + [
        (name, ctypes.c_int64) for name in numbers.split()
    ]


class Embed(ctypes.Structure):
    _fields_ = fields("table positions out", "out_stride width") + fields("read_row format", "")


class Norm(ctypes.Structure):
    _fields_ = [
        *fields("x out gain bias", "x_stride out_stride width heads centred out_is_operand"),
        ("epsilon", ctypes.c_double),
    ]


class Linear(ctypes.Structure):
    _fields_ = fields(
        "x out weights bias residual",
        "x_stride out_stride residual_stride inputs outputs epilogue out_is_operand "
        "residual_of_all x_is_operand",
    ) + fields("product format scratch", "")


class Rope(ctypes.Structure):
    _fields_ = fields("x", "x_stride head_dim heads")


class Attention(ctypes.Structure):
    _fields_ = [
        *fields("q k v out cache", "q_stride k_stride v_stride out_stride block_stride"),
        *fields("", "heads group head_dim block"),
        ("scale", ctypes.c_double),
    ]


class Pass(ctypes.Structure):
    _fields_ = fields(
        "ids shares items out_items tables out_rows cosines sines",
        "n_shares n_items n_out_items n_rows n_out_rows",
    )


class _Any(ctypes.Union):
    _fields_ = list(zip(BODIES, (Embed, Norm, Linear, Rope, Attention), strict=True))


class Operation(ctypes.Structure):
    """kind: EMBED, NORM, LINEAR, ROPE or ATTEND. rows: ALL_ROWS or OUT_ROWS."""

    _fields_ = [
        ("kind", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("of", _Any),
        ("the_pass", ctypes.c_void_p),
    ]
