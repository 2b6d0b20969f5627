"""What quantization costs in quality: rows for the table of the benchmark.

The protocol is llama.cpp's: a text in disjoint windows of 512 tokens, the tail dropped, and only
the second half of each scored. Mean KL(float || quantized) of the next token; how often the
likeliest token is the same; nats a token above the float model, with the interval of resampled
windows (bootstrap). Both models run in the kernels, as a server runs them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from shared import models, tokenizer
from shared.conversion import convert
from shared.errors import UserError
from shared.paths import ROOT
from stage05_paged.blocks import BlockPool
from stage09_kernels.engine import make

from .convert import Quantize
from .gptq import WINDOW, calibrate, text_ids, windows_of

BLOCKS = WINDOW // 16  # of a cache
INT8, GROUPS, KEYS = "int8", "int8-g32", "keys and values in int8"
NEAREST, GPTQ = "int4, nearest", "int4, GPTQ"
ROUNDED = {  # what is rounded, of each model
    "stories": (INT8, GROUPS, NEAREST, GPTQ, KEYS),
    "smollm2": (INT8, GROUPS, KEYS),  # its file is in int4: rounding to int4 again loses nothing
}
LESSONS = sorted(ROOT.glob("stage0[1-7]_*/README.md"))  # text for a model of English
RESAMPLED = 2000  # times, for an interval of 95 %


def engine_of(model: Any, **options: Any) -> Any:
    """The kernels' engine. options: dtype=torch.int8 for keys and values in int8."""
    return make(model, pool=BlockPool(BLOCKS), prefix_caching=False, **options)


@torch.inference_mode()
def logprobs(engine: Any, ids: Sequence[int], first: int) -> Tensor:
    """Log probabilities (T - first, V) in float64 behind each of `ids` (T,) from `first` on."""
    share = list(range(BLOCKS)), 0, len(ids)
    logits: Tensor = engine.runner.run(ids, [share], range(first, len(ids)))
    return logits.float().log_softmax(-1).double()


def divergence(reference: Any, engine: Any, ids: Sequence[int]) -> dict[str, float]:
    """Of a text's token ids, by two engines. Of the scored tokens: mean KL in nats, share of the
    same likeliest tokens, and nats a token above the float model, with their interval of 95 %."""
    starts, middle = range(0, len(ids) - WINDOW + 1, WINDOW), WINDOW // 2
    kl, lost, same = 0.0, [], 0
    for start in tqdm(starts, unit="window", desc="KL", disable=None):
        part = ids[start : start + WINDOW]
        p, q = (logprobs(kind, part[:-1], middle) for kind in (reference, engine))
        kl += (p.exp() * (p - q)).sum().item()
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        following = torch.tensor(part[middle + 1 :])[:, None]
        lost.append((p - q).gather(1, following).mean().item())
    tokens, losses = len(lost) * (WINDOW - 1 - middle), torch.tensor(lost, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(lost), (RESAMPLED, len(lost)), generator=generator)
    ends = losses[picks].mean(1).quantile(torch.tensor([0.025, 0.975]).double())
    low, high = ends.tolist()
    shares = {"tokens": tokens, "kl": kl / tokens, "top_1": same / tokens}
    return shares | {"difference": losses.mean().item(), "low": low, "high": high}


def losses(windows: int, calibration: int) -> Iterator[dict[str, Any]]:
    """What each format costs, a row each: on `windows` windows of a text that the model never saw,
    GPTQ calibrated on others. No time is taken, so the machine may do other work meanwhile."""
    for name, kinds in ROUNDED.items():
        try:
            shape = models.load(name, weights="float32")
        except UserError as error:  # the package of smollm2 is not installed
            print(f"{name} is not judged: {error}", file=sys.stderr)
            continue
        words = tokenizer.load_tokenizer(shape.folder)
        learnt, count = calibration * WINDOW, windows * WINDOW
        if name == "stories":
            end = shape.config.eos_ids[0]
            learning = text_ids(words, end, learnt, None, "calibration")
            ids = text_ids(words, end, count, None, "judged")
        else:
            text = words.encode("\n".join(path.read_text("utf-8") for path in LESSONS))
            ids, learning = text[:count], text[count : count + learnt]
        reference = engine_of(models.load_model(shape, dtype=torch.float32))
        for kind in kinds:
            model = models.load_model(shape, dtype=torch.float32)
            if kind == GPTQ:
                calibrate(model, windows_of(learning), "int4")
            elif kind != KEYS:
                convert(model, Quantize(kind.partition(",")[0]))
            engine = engine_of(model, dtype=torch.int8 if kind == KEYS else None)
            yield {"model": name, "rounded": kind, **divergence(reference, engine, ids)}


def line(row: dict[str, Any]) -> dict[str, str]:
    """The cells of a row of `losses`."""
    lost, low, high = (f"{1e3 * row[key]:+.2f}" for key in ("difference", "low", "high"))
    return {
        "model": row["model"],
        "what is rounded": row["rounded"],
        "nats lost, in thousandths": f"{lost} ({low} to {high})",
        "KL": f"{row['kl']:.5f}",
        "same likeliest token": f"{row['top_1']:.2%}",
    }
