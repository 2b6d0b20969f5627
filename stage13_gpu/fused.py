"""What lies between two products, a pass over memory each: norms, rotary positions, gates.

On a GPU such an operation takes as long as the bytes that it reads and writes, and some
microseconds to launch. So what reads the same numbers is done while they are in registers:

    store     norm and rotate q and k, and write k and v to their slots
    add_norm  add what the last product returned to the stream, and norm the sum
    silu_mul  a Llama's gate

Arithmetic is in float32, rounded where PyTorch's operators would write to memory.
"""

from __future__ import annotations

from . import launch  # noqa: F401  decides how kernels run

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def store(
    q, k, v, keys, values, slots, cosines, sines, q_gain, k_gain,
    q_stride, k_stride, v_stride, head_stride, epsilon,
    QUERIES: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """One program: one token and one head, of QUERIES query heads and then the KV heads.

    q (N, heads, D) is changed in place; k, v (N, H, D) go to keys and values (H, slots, D) at
    `slots` (N,), or nowhere where a slot is negative. cosines, sines (N, D / 2) float32; gains
    (D,). Without NORM and ROTATE, QUERIES is 0.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    middle: tl.constexpr = (D + 1) // 2
    pairs = tl.arange(0, HALF)
    is_first, is_second = pairs < middle, pairs < D - middle
    is_query = head < QUERIES
    cached = head - QUERIES
    x = q + token * q_stride + head * D if is_query else k + token * k_stride + cached * D
    first = tl.load(x + pairs, mask=is_first, other=0.0)  # (HALF,)
    second = tl.load(x + middle + pairs, mask=is_second, other=0.0)
    dtype = first.dtype
    if NORM:  # stage 08's RMSNorm over the channels of a head, for q and k
        wide, wider = first.to(tl.float32), second.to(tl.float32)
        square = (tl.sum(wide * wide) + tl.sum(wider * wider)) / D
        rate = tl.rsqrt(square + epsilon)
        gain = q_gain if is_query else k_gain
        gains = tl.load(gain + pairs, mask=is_first, other=0.0).to(tl.float32)
        first = ((wide * rate).to(dtype).to(tl.float32) * gains).to(dtype)
        gains = tl.load(gain + middle + pairs, mask=is_second, other=0.0).to(tl.float32)
        second = ((wider * rate).to(dtype).to(tl.float32) * gains).to(dtype)
    if ROTATE:  # channel i with channel i + D / 2
        turn = token * (D // 2) + pairs
        cosine = tl.load(cosines + turn, mask=is_second, other=0.0)
        sine = tl.load(sines + turn, mask=is_second, other=0.0)
        left, right = first.to(tl.float32), second.to(tl.float32)
        first = (left * cosine - right * sine).to(dtype)
        second = (right * cosine + left * sine).to(dtype)
    if is_query:
        tl.store(x + pairs, first, mask=is_first)
        tl.store(x + middle + pairs, second, mask=is_second)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            to = cached.to(tl.int64) * head_stride + slot * D
            kind = keys.dtype.element_ty
            tl.store(keys + to + pairs, first.to(kind), mask=is_first)
            tl.store(keys + to + middle + pairs, second.to(kind), mask=is_second)
            y = v + token * v_stride + cached * D
            first = tl.load(y + pairs, mask=is_first, other=0.0)
            second = tl.load(y + middle + pairs, mask=is_second, other=0.0)
            tl.store(values + to + pairs, first.to(kind), mask=is_first)
            tl.store(values + to + middle + pairs, second.to(kind), mask=is_second)


@triton.jit
def add_norm(
    x, y, out, gain, bias, x_stride, y_stride, epsilon,
    C: tl.constexpr, W: tl.constexpr, ADD: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """One program: one row of the stream x (N, C), to which y (N, C) is added in place if ADD;
    out (N, C) is its norm: GPT-2's LayerNorm if CENTRED, else a Llama's RMSNorm."""
    row, channels = tl.program_id(0).to(tl.int64), tl.arange(0, W)
    inside = channels < C
    here = x + row * x_stride + channels
    wide = tl.load(here, mask=inside, other=0.0).to(tl.float32)  # (W,)
    dtype = x.dtype.element_ty
    if ADD:
        added = tl.load(y + row * y_stride + channels, mask=inside, other=0.0)
        wide = (wide + added.to(tl.float32)).to(dtype).to(tl.float32)  # as the next reader gets it
        tl.store(here, wide.to(dtype), mask=inside)
    scale = tl.load(gain + channels, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        centred = tl.where(inside, wide - tl.sum(wide) / C, 0.0)
        rate = tl.rsqrt(tl.sum(centred * centred) / C + epsilon)
        shift = tl.load(bias + channels, mask=inside, other=0.0)
        normed = centred * rate * scale + shift.to(tl.float32)
    else:
        rate = tl.rsqrt(tl.sum(wide * wide) / C + epsilon)
        normed = (wide * rate).to(dtype).to(tl.float32) * scale
    tl.store(out + row * C + channels, normed.to(dtype), mask=inside)


@triton.jit
def silu_mul(x, out, F, x_stride, TILE: tl.constexpr):
    """One program: TILE columns of one row. x (N, 2F), gates and what they scale -> out (N, F)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < F
    gate = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + F + columns, mask=inside, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    opened = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * F + columns, (opened * up).to(dtype), mask=inside)
