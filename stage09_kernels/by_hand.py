"""Attention of one query and one head over blocks, written in C the obvious way.

attention.c does the same with 16 numbers at a time, several queries, a running maximum and threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from . import library


def one_head() -> str:
    """The C source of

        void attend(const float *q, const float *cache, const int32_t *table, int64_t tokens,
                    int64_t width, int64_t block, float *out)

    cache: blocks of one head; each has `block` keys of `width` numbers, then as many values.
    table: the blocks of a sequence of `tokens` tokens. out: `width` numbers.
    Slots after the last token may hold anything, even NaN. <math.h>, <stdint.h> and <stdlib.h>
    are included.
    """
    return r"""
    void attend(const float *q, const float *cache, const int32_t *table, int64_t tokens,
                int64_t width, int64_t block, float *out) {
        float *scores = malloc(tokens * sizeof(float));
        float most = -INFINITY, sum = 0;
        for (int64_t t = 0; t < tokens; t++) {
            const float *key = cache + (2 * table[t / block] * block + t % block) * width;
            scores[t] = 0;
            for (int64_t d = 0; d < width; d++) scores[t] += q[d] * key[d];
            scores[t] /= sqrtf(width);
            if (scores[t] > most) most = scores[t];
        }
        for (int64_t d = 0; d < width; d++) out[d] = 0;
        for (int64_t t = 0; t < tokens; t++) {
            const float *value = cache + ((2 * table[t / block] + 1) * block + t % block) * width;
            float weight = expf(scores[t] - most);
            sum += weight;
            for (int64_t d = 0; d < width; d++) out[d] += weight * value[d];
        }
        for (int64_t d = 0; d < width; d++) out[d] /= sum;
        free(scores);
    }
    """


def attend(q: Tensor, cache: Tensor, table: Sequence[int], tokens: int) -> Tensor:
    """Attention of q (D,) over the first `tokens` tokens of `table`, in a float32 cache (blocks, 2,
    block, D). Compiles `one_head`; raises NoKernels if that fails."""
    out, blocks = torch.empty_like(q), torch.tensor(table, dtype=torch.int32)
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "by_hand.c"
        includes = "".join(f"#include <{name}.h>\n" for name in ("math", "stdint", "stdlib"))
        file.write_text(includes + one_head(), encoding="utf-8")
        numbers = (ctypes.c_int64(each) for each in (tokens, q.shape[0], cache.shape[2]))
        pointers = (ctypes.c_void_p(each.data_ptr()) for each in (q, cache, blocks))
        library.load(file).attend(*pointers, *numbers, ctypes.c_void_p(out.data_ptr()))
    return out
