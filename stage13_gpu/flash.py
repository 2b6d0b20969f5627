"""Attention over stage 05's blocks, read in place, on a GPU.

A kernel is a program for one tile. The GPU runs as many copies of it at a time as it has room for,
in any order; a copy knows only its place in the grid. A tensor in a program (shapes in the margin)
lives in the registers of its threads, and `tl.load` and `tl.store` are all it does to memory.

    decode   one new token a sequence: keys are split over programs, which return partial results
    merge    adds these up, piece by piece
    prefill  many new tokens a sequence: a tile of queries, over all keys before them

    keys and values of a layer and head: (blocks, BLOCK, D), that is (slots, D)
    slot of a position: table[position // BLOCK] * BLOCK + position % BLOCK

naive.py has the same functions under the same names, in PyTorch. Papers: Dao et al.,
"FlashAttention" (2022), and "Flash-Decoding" (2023); Kwon et al., "PagedAttention" (2023).
"""

from __future__ import annotations

from .launch import INTERPRETED

import triton  # isort: skip
import triton.language as tl  # isort: skip

# Products of bfloat16 were wrong in the interpreter (Triton 3.9): there it multiplies in float32,
# where products of the half formats are exact.
WIDE = tl.constexpr(INTERPRETED)


@triton.jit
def product(a, b):
    """a (M, K) @ b (K, N) -> (M, N) float32. "ieee": float32 is not rounded to TF32."""
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def slots_of(table, positions, inside, BLOCK: tl.constexpr):
    """The slots of `positions` (T,) of one sequence; those not `inside` get any."""
    blocks = tl.load(table + positions // BLOCK, mask=inside, other=0)
    return (blocks * BLOCK + positions % BLOCK).to(tl.int64)


@triton.jit
def online(q, keys, values, slots, inside, seen, best, total, mixed, scale, D: tl.constexpr):
    """Take T keys into the online softmax of M queries.

    q (M, W), padded from D to W channels; slots, inside (T,); seen (M, T): which query sees which
    key. State: best (M,) the largest score so far, total (M,) the sum of the weights, mixed (M, W)
    the weighted sum of values, all relative to best. Scores are in powers of 2, as the hardware's.
    """
    channels = tl.arange(0, q.shape[1])  # (W,)
    at = slots[:, None] * D + channels  # (T, W)
    stored = inside[:, None] & (channels < D)  # all else may hold NaN, and 0 * NaN is NaN
    key = tl.load(keys + at, mask=stored, other=0.0).to(q.dtype)  # (T, W)
    scores = tl.where(seen, product(q, tl.trans(key)) * scale, float("-inf"))  # (M, T)
    now = tl.maximum(best, tl.max(scores, 1))  # (M,)
    shift = tl.where(now == float("-inf"), 0.0, now)  # of a query that has seen nothing yet
    weights = tl.exp2(scores - shift[:, None])  # (M, T)
    decay = tl.exp2(best - shift)  # (M,): what was added so far, relative to the new best
    value = tl.load(values + at, mask=stored, other=0.0).to(q.dtype)  # (T, W)
    mixed = mixed * decay[:, None] + product(weights.to(q.dtype), value)
    return now, total * decay + tl.sum(weights, 1), mixed


@triton.jit
def decode(
    q, keys, values, tables, items, out, states,
    q_stride, head_stride, table_stride, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    W: tl.constexpr, TILE: tl.constexpr, PIECE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One program: PIECE keys of one item and one KV head, for the GROUP queries that share it.

    q (N, heads, D); keys, values (H, slots, D); items (I, 4): table, token, first position, count.
    out (pieces, I, heads, D) float32 and states (pieces, I, heads, 2): best and total. WHOLE: there
    is one piece, and out (N, heads, D) is final. Pieces count from position 0: where a sequence is
    cut depends on no neighbour.
    """
    item, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, token = tl.load(items + 4 * item), tl.load(items + 4 * item + 1)
    length = tl.load(items + 4 * item + 2) + tl.load(items + 4 * item + 3)  # of the keys
    first, last = piece * PIECE, tl.minimum((piece + 1) * PIECE, length)
    if first >= last and not WHOLE:
        return
    lanes, channels = tl.arange(0, ROWS), tl.arange(0, W)
    heads = head * GROUP + lanes  # (ROWS,): query heads, GROUP of them real
    real = (lanes < GROUP)[:, None] & (channels < D)  # (ROWS, W)
    at = heads[:, None] * D + channels
    query = tl.load(q + token.to(tl.int64) * q_stride + at, mask=real, other=0.0)  # (ROWS, W)
    table = tables + row.to(tl.int64) * table_stride
    base = head.to(tl.int64) * head_stride
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, W), tl.float32)
    for begin in range(first, last, TILE):
        positions = begin + tl.arange(0, TILE)  # (TILE,)
        inside = positions < last
        slots = slots_of(table, positions, inside, BLOCK)
        best, total, mixed = online(
            query, keys + base, values + base, slots, inside, inside[None, :], best, total, mixed,
            scale, D,
        )  # fmt: skip
    count = tl.num_programs(1) * GROUP  # of query heads
    if WHOLE:
        place = token.to(tl.int64) * count * D + at
        result = mixed / tl.where(length > 0, total, 1.0)[:, None]  # 0 for a token without keys
        tl.store(out + place, result.to(out.dtype.element_ty), mask=real)
    else:
        line = (piece * tl.num_programs(0) + item).to(tl.int64) * count
        tl.store(out + line * D + at, mixed, mask=real)
        tl.store(states + (line + heads) * 2, best, mask=lanes < GROUP)
        tl.store(states + (line + heads) * 2 + 1, total, mask=lanes < GROUP)


@triton.jit
def merge(
    parts, states, items, out, D: tl.constexpr, W: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One program: one item and query head. Adds up its pieces, always in the order of positions.

    parts (pieces, I, heads, D), states (pieces, I, heads, 2) -> out (N, heads, D).
    """
    item, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(items + 4 * item + 1)
    length = tl.load(items + 4 * item + 2) + tl.load(items + 4 * item + 3)
    channels = tl.arange(0, W)
    best = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    mixed = tl.zeros((W,), tl.float32)
    for piece in range(tl.cdiv(length, PIECE)):
        line = (piece * tl.num_programs(0) + item).to(tl.int64) * tl.num_programs(1) + head
        its_best, its_total = tl.load(states + 2 * line), tl.load(states + 2 * line + 1)
        its_mixed = tl.load(parts + line * D + channels, mask=channels < D, other=0.0)  # (W,)
        now = tl.maximum(best, its_best)
        decay, share = tl.exp2(best - now), tl.exp2(its_best - now)
        mixed = mixed * decay + its_mixed * share
        total, best = total * decay + its_total * share, now
    place = (token.to(tl.int64) * tl.num_programs(1) + head) * D + channels
    result = mixed / tl.where(length > 0, total, 1.0)  # 0 for a token without keys
    tl.store(out + place, result.to(out.dtype.element_ty), mask=channels < D)


@triton.jit
def prefill(
    q, keys, values, tables, items, out,
    q_stride, head_stride, table_stride, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    W: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: up to ROWS // GROUP tokens of one sequence, and one KV head.

    Row r of the tile of queries is head r % GROUP of token r // GROUP. Tiles of keys count from
    position 0, so that it makes no difference how a prompt is cut. Arguments as for `decode`.
    """
    item, head = tl.program_id(0), tl.program_id(1)
    row, token = tl.load(items + 4 * item), tl.load(items + 4 * item + 1)
    start, count = tl.load(items + 4 * item + 2), tl.load(items + 4 * item + 3)
    rows, channels = tl.arange(0, ROWS), tl.arange(0, W)
    tokens, lanes = rows // GROUP, rows % GROUP  # (ROWS,)
    real = (tokens < count)[:, None] & (channels < D)  # (ROWS, W)
    at = (head * GROUP + lanes)[:, None] * D + channels
    lines = (token + tokens).to(tl.int64)[:, None]
    query = tl.load(q + lines * q_stride + at, mask=real, other=0.0)  # (ROWS, W)
    table = tables + row.to(tl.int64) * table_stride
    base = head.to(tl.int64) * head_stride
    query_positions = start + tl.minimum(tokens, count - 1)  # (ROWS,): positions of the queries
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, W), tl.float32)
    for begin in range(0, start + count, TILE):
        positions = begin + tl.arange(0, TILE)  # (TILE,)
        inside = positions < start + count
        seen = inside[None, :] & (positions[None, :] <= query_positions[:, None])  # (ROWS, TILE)
        slots = slots_of(table, positions, inside, BLOCK)
        best, total, mixed = online(
            query, keys + base, values + base, slots, inside, seen, best, total, mixed, scale, D
        )
    place = lines * (tl.num_programs(1) * GROUP * D) + at
    tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=real)
