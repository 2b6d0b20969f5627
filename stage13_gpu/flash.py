"""Attention over stage 05's blocks, read in place, on a GPU.

A kernel is a program for one tile. The GPU runs as many copies of it at a time as it has room for,
in any order; a copy knows only its place in the grid. A tensor in a program (shapes in the margin)
lives in the registers of its threads, and `tl.load` and `tl.store` are all it does to memory.

    attend  a tile of queries of a sequence: of many new tokens (prefill), over all keys before
            them; of one (decode), over a piece of the keys, with a partial result
    merge   adds these up, piece by piece

naive.py has the same functions in PyTorch, and says what a slot is. Papers: Dao et al.,
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
def attend(
    q, keys, values, tables, items, out, states,
    q_stride, head_stride, table_stride, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    W: tl.constexpr, TILE: tl.constexpr, PIECE: tl.constexpr, WHOLE: tl.constexpr,
    MANY: tl.constexpr,
):  # fmt: skip
    """One program: one item, of up to ROWS // GROUP tokens of a sequence, and one KV head. Row r of
    its tile of queries is query head r % GROUP of token r // GROUP.

    q (N, heads, D); keys, values (H, slots, D); items (I, 4): table, token, first position, count.
    MANY: items have several tokens, each of which sees the keys up to its own. WHOLE: the program
    takes all keys, and out (N, heads, D) is final. Else, for items of one token, it takes PIECE of
    them; out (pieces, I, heads, D) float32 and states (pieces, I, heads, 2), best and total, are
    for `merge`. Pieces and tiles count from position 0: where a sequence is cut depends on no
    neighbour and on no chunk. An item without keys gives 0.
    """
    item, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, token = tl.load(items + 4 * item), tl.load(items + 4 * item + 1)
    start, count = tl.load(items + 4 * item + 2), tl.load(items + 4 * item + 3)
    first, last = piece * PIECE, start + count  # of the keys
    if not WHOLE:
        last = tl.minimum(last, first + PIECE)
    if first >= last and not WHOLE:
        return
    rows, channels = tl.arange(0, ROWS), tl.arange(0, W)
    tokens, heads = rows // GROUP, head * GROUP + rows % GROUP  # (ROWS,)
    lines, real = token.to(tl.int64), tokens < 1  # (ROWS,)
    if MANY:
        lines, real = lines + tokens[:, None], tokens < count
    inner = real[:, None] & (channels < D)  # (ROWS, W)
    at = heads[:, None] * D + channels
    query = tl.load(q + lines * q_stride + at, mask=inner, other=0.0)  # (ROWS, W)
    query_at = start + tl.minimum(tokens, count - 1)  # (ROWS,): positions of the queries
    table = tables + row.to(tl.int64) * table_stride
    base = head.to(tl.int64) * head_stride
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, W), tl.float32)
    for begin in range(first, last, TILE):
        positions = begin + tl.arange(0, TILE)  # (TILE,)
        inside = positions < last
        seen = inside[None, :]  # (1, TILE)
        if MANY:
            seen = seen & (positions[None, :] <= query_at[:, None])  # (ROWS, TILE)
        slots = slots_of(table, positions, inside, BLOCK)
        best, total, mixed = online(
            query, keys + base, values + base, slots, inside, seen, best, total, mixed, scale, D
        )
    width = tl.num_programs(1) * GROUP  # query heads
    if WHOLE:
        result = mixed / tl.where(last > 0, total, 1.0)[:, None]
        tl.store(out + lines * (width * D) + at, result.to(out.dtype.element_ty), mask=inner)
    else:
        line = (piece * tl.num_programs(0) + item).to(tl.int64) * width
        tl.store(out + line * D + at, mixed, mask=inner)
        tl.store(states + (line + heads) * 2, best, mask=real)
        tl.store(states + (line + heads) * 2 + 1, total, mask=real)


@triton.jit
def merge(parts, states, items, out, D: tl.constexpr, W: tl.constexpr, PIECE: tl.constexpr):
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
