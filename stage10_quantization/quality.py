"""What quantization costs in words, as `losses.py` measures it. Two protocols:

- Stories that the models never saw, each between two ends of text: nats a token above the floor,
  which the grammar knows, and above the float model. Both models read the same stories, so the
  difference is taken story by story, and its interval is that of resampled stories (bootstrap).
- llama.cpp's: disjoint windows of 512 tokens, the tail dropped, and only the second half of each
  scored. KL(float || quantized) of the next token: mean, 99.9th percentile, maximum; how often the
  likeliest token is the same; nats a token above the float model, with an interval of windows.
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
from stage01_forward.params import SamplingParams
from stage01_forward.perplexity import read_text
from stage05_paged.blocks import BlockPool
from stage09_kernels.make import make

WINDOW = 512
BLOCKS = 256  # of a cache: for a context of the embedded model's, or 10 short answers
RESAMPLED = 2000  # times, for an interval of 95 %


@dataclass(frozen=True)
class Nats:
    """Nats a token of the same stories: above the floor, and above the float model."""

    stories: int
    tokens: int
    floor: float
    float_model: float
    quantized: float
    low: float  # of the difference, 95 %
    high: float

    @property
    def difference(self) -> float:
        return self.quantized - self.float_model


@dataclass(frozen=True)
class Divergence:
    """KL(float || quantized) in nats over the scored tokens, and what the text itself takes."""

    windows: int
    tokens: int
    mean: float
    percentile: float  # 99.9th
    highest: float
    top_1: float  # share of tokens with the same likeliest token
    difference: float  # nats a token of the text above the float model
    low: float  # of the difference, 95 %
    high: float


def end_of_text(config: Config) -> int:
    """The token between two texts: the last end id, because a chat model's first ends a turn."""
    return config.eos_ids[-1] if config.eos_ids else 0


def engine_of(model: Any, **options: Any) -> Any:
    """The kernels' engine for whole passes and some greedy answers. options: dtype=torch.int8 for
    keys and values in int8."""
    return make(model, pool=BlockPool(BLOCKS), prefix_caching=False, **options)


@torch.inference_mode()
def logprobs(engine: Any, ids: Sequence[int], first: int = 0) -> Tensor:
    """Log probabilities (T - first, V) in float32 behind each of `ids` (T,) from `first` on."""
    share = list(range(BLOCKS)), 0, len(ids)
    logits: Tensor = engine.runner.run(ids, [share], range(first, len(ids)))
    return logits.float().log_softmax(-1)


def _nats(scores: Tensor, following: Sequence[int]) -> float:
    """-ln p of the tokens `following` (T,) by log probabilities (T, V)."""
    picked = scores.gather(1, torch.tensor(following)[:, None])
    return -picked.double().sum().item()


def interval(differences: Tensor, tokens: Tensor) -> tuple[float, float]:
    """The 95 % of the sum of `differences` (S,) over that of `tokens` (S,), float64, among texts
    that are drawn from these ones again and again."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(tokens), (RESAMPLED, len(tokens)), generator=generator)
    ratios = differences[picks].sum(1) / tokens[picks].sum(1)
    low, high = ratios.quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return low, high


def held_out(reference: Any, engine: Any, tokenizer: Any, count: int) -> Nats:
    """Both engines on the same `count` stories. The tokenizer is that of a stories model."""
    rows: list[tuple[float, ...]] = []
    end = end_of_text(reference.runner.config)
    stories = itertools.islice(grammar.stories("held out"), count)
    for story in tqdm(stories, total=count, unit="story", desc="held out", disable=None):
        ids = [end, *tokenizer.encode(story.text), end]
        nats = [_nats(logprobs(kind, ids[:-1]), ids[1:]) for kind in (reference, engine)]
        rows.append((len(ids) - 1, -story.log_probability, *nats))
    table = torch.tensor(rows, dtype=torch.float64)  # (S, 4)
    tokens, floor, before, after = table.sum(0).tolist()
    low, high = interval(table[:, 3] - table[:, 2], table[:, 0])
    return Nats(count, int(tokens), floor / tokens, before / tokens, after / tokens, low, high)


def divergence(reference: Any, engine: Any, ids: Sequence[int], window: int = WINDOW) -> Divergence:
    """llama.cpp's protocol over a text's token ids, by two engines. Raises UserError for less than
    a window."""
    if len(ids) < window:
        raise UserError(
            f"The text has {len(ids)} tokens, but a window has {window}: give a longer text."
        )
    starts, middle = range(0, len(ids) - window + 1, window), window // 2
    sums, lost, same = [], [], 0
    for start in tqdm(starts, unit="window", desc="KL", disable=None):
        part = ids[start : start + window]
        p, q = (logprobs(kind, part[:-1], middle).double() for kind in (reference, engine))
        sums.append((p.exp() * (p - q)).sum(-1))  # (T,)
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        lost.append(_nats(q, part[middle + 1 :]) - _nats(p, part[middle + 1 :]))
    kl, losses = torch.cat(sums), torch.tensor(lost, dtype=torch.float64)
    low, high = interval(losses, torch.full_like(losses, len(kl) / len(losses)))
    return Divergence(
        windows=len(starts),
        tokens=len(kl),
        mean=kl.mean().item(),
        percentile=kl.sort().values[int(0.999 * (len(kl) - 1))].item(),
        highest=kl.max().item(),
        top_1=same / len(kl),
        difference=losses.sum().item() / len(kl),
        low=low,
        high=high,
    )


def first_differences(
    reference: Any, engine: Any, prompts: Sequence[Sequence[int]], tokens: int
) -> list[int | None]:
    """For each prompt, which of the `tokens` of the greedy answer is the first that differs."""
    params = SamplingParams(max_tokens=tokens)
    answers = [kind.generate(prompts, params) for kind in (reference, engine)]
    places: list[int | None] = []
    for want, have in zip(*answers, strict=True):
        pairs = itertools.zip_longest(want.token_ids, have.token_ids)
        places.append(next((i for i, (a, b) in enumerate(pairs) if a != b), None))
    return places


def text_ids(tokenizer: Any, end: int, tokens: int, file: str | None, seed: str) -> list[int]:
    """Ids of a text file, at most `tokens`; without one, of stories with an end of text before
    each."""
    if file is not None:
        return list(tokenizer.encode(read_text(file))[:tokens])
    ids: list[int] = []
    stories = grammar.stories(seed)
    while len(ids) < tokens:
        ids += [end, *tokenizer.encode(next(stories).text)]
    return ids[:tokens]
