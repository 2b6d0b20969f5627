"""What quantization costs in words: `python -m stage10_quantization.quality --weights int4`.

Two protocols, each printed with its figures:
- Stories that the models never saw, each between two ends of text: nats a token above the floor,
  which the grammar knows, and above the float model. Both models read the same stories, so the
  difference is taken story by story, and its interval is that of resampled stories (bootstrap).
- llama.cpp's: disjoint windows of 512 tokens, the tail dropped, and only the second half of each
  scored. KL(float || quantized) of the next token: mean, 99.9th percentile, maximum; how often the
  likeliest token is the same; nats a token above the float model, with an interval of windows.
Both models run in the kernels, as a server runs them.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from shared import cli
from shared.config import Config
from shared.errors import UserError
from shared.linear import convert
from shared.stories import grammar
from stage01_forward.params import SamplingParams
from stage01_forward.perplexity import read_text
from stage05_paged.blocks import BlockPool
from stage09_kernels.engine import make

from .convert import FORMATS, Quantize
from .gptq import calibrate, windows_of
from .layers import ACTIVATIONS
from .smoothquant import plant, smooth

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

    def __str__(self) -> str:
        excess, before = self.quantized - self.floor, self.float_model - self.floor
        return (
            f"{self.stories} held-out stories, {self.tokens:,} tokens, floor {self.floor:.5f}: "
            f"{excess:.5f} nats a token above it, {before:.5f} in float; difference "
            f"{self.difference:+.5f} (95 %: {self.low:+.5f} to {self.high:+.5f})"
        )


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

    def __str__(self) -> str:
        return (
            f"{self.windows} windows of {WINDOW}, second half scored, {self.tokens:,} tokens: KL "
            f"mean {self.mean:.6f}, 99.9 % {self.percentile:.5f}, maximum {self.highest:.4f}; the "
            f"same likeliest token {self.top_1:.3%}; {self.difference:+.5f} nats a token (95 %: "
            f"{self.low:+.5f} to {self.high:+.5f})"
        )


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


def main(argv: list[str] | None = None) -> None:
    parser = cli.Parser(
        "stage10_quantization.quality",
        __doc__,
        "  python -m stage10_quantization.quality --weights int8\n"
        "  python -m stage10_quantization.quality --weights int4 --gptq 64 --text FILE",
    )
    parser.add_argument("--weights", choices=FORMATS, default="int8", help="default: int8")
    parser.add_argument(
        "--activations", choices=ACTIVATIONS, default="int8", help="what products read"
    )
    whole = cli.whole_number
    parser.add_argument(
        "--gptq", type=whole(1, 4096), metavar="N", help="calibrate GPTQ on N windows of 512 tokens"
    )
    parser.add_argument("--act-order", action="store_true", help="GPTQ: large inputs first")
    parser.add_argument(
        "--smooth", type=whole(1, 4096), metavar="N", help="calibrate SmoothQuant on N windows"
    )
    parser.add_argument(
        "--plant", type=whole(1, 16), metavar="N", help="first make outliers, 2^N times as large"
    )
    parser.add_argument(
        "--stories",
        type=whole(0, 100_000),
        default=200,
        metavar="N",
        help="held-out stories to read, 0 for a model that was not made for them; default: 200",
    )
    parser.add_argument("--text", metavar="FILE", help="to calibrate and judge; default: stories")
    parser.add_argument(
        "--windows", type=whole(1, 4096), default=40, metavar="N", help="for the KL; default: 40"
    )
    cli.add_model_options(parser)
    options = parser.parse_args(argv)
    floats = {"linear": "plain", "dtype": "float32", "weights": "float32"}  # quantized below
    plain = argparse.Namespace(**{**vars(options), **floats})
    reference, loaded = (cli.load_model_from(plain) for _ in range(2))
    tokenizer, model = reference.tokenizer, loaded.model
    end = end_of_text(reference.config)
    learnt = max(options.gptq or 0, options.smooth or 0) * WINDOW
    judged = options.windows * WINDOW
    if options.text:  # the beginning to calibrate on, what follows to judge
        ids = text_ids(tokenizer, end, learnt + judged, options.text, "")
        calibration, ids = ids[:learnt], ids[learnt:]
    else:
        calibration = text_ids(tokenizer, end, learnt, None, "calibration")
        ids = text_ids(tokenizer, end, judged, None, "judged")
    if options.plant:
        plant(model, [1, 2], 2.0**options.plant)
    if options.smooth:
        smooth(model, windows_of(calibration, options.smooth))
    if options.gptq:
        windows = windows_of(calibration, options.gptq)
        how = {"activations": options.activations, "act_order": options.act_order}
        calibrate(model, windows, options.weights, **how)
    else:
        convert(model, Quantize(options.weights, options.activations), {})
    engines = engine_of(reference.model), engine_of(model)
    if options.stories:
        print(held_out(*engines, tokenizer, options.stories), flush=True)
    print(divergence(*engines, ids), flush=True)
    prompts = [ids[start : start + 20] for start in range(0, min(len(ids), 10 * WINDOW), WINDOW)]
    places = first_differences(*engines, prompts, 200)
    shown = ", ".join("none" if place is None else str(place) for place in places)
    print(f"first difference of {len(places)} greedy answers of at most 200 tokens: {shown}")


if __name__ == "__main__":
    cli.run(main)
