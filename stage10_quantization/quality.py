"""What quantization costs in quality, by two protocols; `losses.py` makes the table.

- Stories that the models never saw, each between two ends of text: nats a token above the float
  model. Both models read the same stories, so the difference is taken story by story, and its
  interval is that of resampled stories (bootstrap).
- llama.cpp's: disjoint windows of 512 tokens, the tail dropped, and only the second half of each
  scored. Mean KL(float || quantized) of the next token; how often the likeliest token is the same;
  nats a token above the float model, with an interval of windows.

Both models run in the kernels, as a server runs them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from shared.config import Config
from shared.errors import UserError
from shared.stories import grammar
from stage05_paged.blocks import BlockPool
from stage09_kernels.engine import make

WINDOW = 512
BLOCKS = 256  # of a cache: for a context of the embedded model's
RESAMPLED = 2000  # times, for an interval of 95 %


@dataclass(frozen=True)
class Loss:
    """Nats a token above the float model, with its interval of 95 %."""

    tokens: int
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class Divergence(Loss):
    """Of windows: also the mean KL(float || quantized) in nats, and the share of tokens whose
    likeliest successor is the same."""

    kl: float
    top_1: float


def end_of_text(config: Config) -> int:
    """The token between two texts: the last end id, because a chat model's first ends a turn."""
    return config.eos_ids[-1] if config.eos_ids else 0


def engine_of(model: Any, **options: Any) -> Any:
    """The kernels' engine. options: dtype=torch.int8 for keys and values in int8."""
    return make(model, pool=BlockPool(BLOCKS), prefix_caching=False, **options)


@torch.inference_mode()
def logprobs(engine: Any, ids: Sequence[int], first: int = 0) -> Tensor:
    """Log probabilities (T - first, V) in float64 behind each of `ids` (T,) from `first` on."""
    share = list(range(BLOCKS)), 0, len(ids)
    logits: Tensor = engine.runner.run(ids, [share], range(first, len(ids)))
    return logits.float().log_softmax(-1).double()


def nats(scores: Tensor, following: Sequence[int]) -> float:
    """-ln p of the tokens `following` (T,) by log probabilities (T, V)."""
    return -scores.gather(1, torch.tensor(following)[:, None]).sum().item()


def loss_of(differences: Sequence[float], tokens: Sequence[int]) -> Loss:
    """The loss of texts whose nats differ by `differences`, with the 95 % among texts that are
    drawn from these ones again and again."""
    lost, counts = (torch.tensor(values, dtype=torch.float64) for values in (differences, tokens))
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(counts), (RESAMPLED, len(counts)), generator=generator)
    ratios = lost[picks].sum(1) / counts[picks].sum(1)
    low, high = ratios.quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return Loss(sum(tokens), (lost.sum() / counts.sum()).item(), low, high)


def held_out(reference: Any, engine: Any, tokenizer: Any, count: int) -> Loss:
    """Of both engines on the same `count` stories. The tokenizer is that of a stories model."""
    lost, tokens, end = [], [], end_of_text(reference.runner.config)
    stories = itertools.islice(grammar.stories("held out"), count)
    for story in tqdm(stories, total=count, unit="story", desc="held out", disable=None):
        ids = [end, *tokenizer.encode(story.text), end]
        before, after = (nats(logprobs(kind, ids[:-1]), ids[1:]) for kind in (reference, engine))
        lost.append(after - before)
        tokens.append(len(ids) - 1)
    return loss_of(lost, tokens)


def divergence(reference: Any, engine: Any, ids: Sequence[int], window: int = WINDOW) -> Divergence:
    """llama.cpp's protocol over a text's token ids, by two engines. Raises UserError for less than
    a window."""
    if len(ids) < window:
        raise UserError(
            f"The text has {len(ids)} tokens, but a window has {window}: give a longer text."
        )
    starts, middle = range(0, len(ids) - window + 1, window), window // 2
    kl, lost, same = 0.0, [], 0
    for start in tqdm(starts, unit="window", desc="KL", disable=None):
        part = ids[start : start + window]
        p, q = (logprobs(kind, part[:-1], middle) for kind in (reference, engine))
        kl += (p.exp() * (p - q)).sum().item()
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        lost.append(nats(q, part[middle + 1 :]) - nats(p, part[middle + 1 :]))
    loss = loss_of(lost, [window - 1 - middle] * len(lost))
    return Divergence(**vars(loss), kl=kl / loss.tokens, top_1=same / loss.tokens)
