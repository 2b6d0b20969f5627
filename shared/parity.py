"""The proof before every number: a stage's tokens are the naive engine's tokens.

One list of scenarios (scenarios.json) drives every stage; the oracle, the engine of the first
stage, answers them too. In float64 all tokens must be equal. In float32 two engines add the same
numbers in different orders, so a first difference is allowed at a near tie: where the oracle's
logits of the two tokens differ by less than 1e-3. In bfloat16, with 8 significant bits, a near tie
is as wide as the rounding: see `near_tie`. Near ties are counted and shown.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch

from .config import Config

NEAR_TIE = {torch.float64: 0.0, torch.float32: 1e-3}
STEPS = 4
LIKELIEST = 5  # log probabilities from the oracle; any other token ties with nothing


class ParityError(AssertionError):
    """A token, or its log probability, differs from the oracle's."""


@dataclass
class Parity:
    """How many tokens of how many sequences were compared, and how many sequences parted at a near
    tie, after which nothing is compared."""

    tokens: int = 0
    sequences: int = 0
    near_ties: int = 0

    def __str__(self) -> str:
        ties = f", {self.near_ties} parted at a near tie" if self.near_ties else ", identical"
        return f"{self.sequences} sequences, {self.tokens} tokens{ties}"


def random_prompt(length: int, config: Config, seed: int | str) -> list[int]:
    rng = random.Random(f"prompt {seed} {length}")
    return [rng.randrange(config.vocab_size) for _ in range(length)]


def scenarios(config: Config) -> Iterator[tuple[str, list[list[int]], list[dict[str, Any]]]]:
    """Of each scenario: its name, prompts (token ids) for `config`, and the fields of each prompt's
    SamplingParams. In scenarios.json a negative length counts back from the end of the context, and
    a list has a value for each prompt."""
    text = Path(__file__).with_name("scenarios.json").read_text(encoding="utf-8")
    for number, entry in enumerate(json.loads(text)):
        name, lengths = entry.pop("name"), entry.pop("prompts")
        lengths = [length if length > 0 else config.n_positions + length for length in lengths]
        prompts = [random_prompt(n, config, f"{number} {i}") for i, n in enumerate(lengths)]
        sampling = [
            {key: v[i] if isinstance(v, list) else v for key, v in entry.items()}
            for i in range(len(prompts))
        ]
        if "seed" in entry:  # prompts with one seed would draw alike
            sampling = [{**fields, "seed": fields["seed"] + i} for i, fields in enumerate(sampling)]
        yield name, prompts, sampling


def near_tie(dtype: torch.dtype, highest: float) -> float:
    """Two logits tie if they differ by less than this. highest: the highest logit of their row.

    In a half dtype it is 4 steps, where a step is the distance between neighbouring numbers at
    `highest`: in bfloat16 1/8 from 16 to 32, and 1/64 from 2 to 4. Rounding two logits in two
    engines moves their gap by up to 2 steps, and the rounding in earlier layers adds to that.
    Measured on two layouts of the same bfloat16 weights, at 125,000 tokens: the likeliest token
    changed across gaps of 0 to 3 steps, ever more rarely (20 times at 3), and never of 4.
    """
    if dtype in NEAR_TIE:
        return NEAR_TIE[dtype]
    return STEPS * torch.finfo(dtype).eps * 2.0 ** (math.frexp(highest)[1] - 1)


def compare(
    name: str, expected: list[Any], got: list[Any], dtype: torch.dtype, parity: Parity
) -> None:
    """Compare two lists of Outputs. Raises ParityError at a difference that is not a near tie.

    `parity` keeps the counts. `expected` must have the oracle's log probabilities of its LIKELIEST
    tokens: their differences are those of the logits. In float64 those of both lists are compared
    too: with half of its past overwritten, a small model often emits the right tokens all the same.
    """
    for row, (want, have) in enumerate(zip(expected, got, strict=True)):
        parity.sequences += 1
        if (want.token_ids, want.finish_reason) == (have.token_ids, have.finish_reason):
            parity.tokens += len(want.token_ids)
            for at, (score, other) in enumerate(zip(want.logprobs, have.logprobs, strict=True)):
                if dtype == torch.float64 and abs(score.token - other.token) > 1e-9:
                    raise ParityError(
                        f"{name}, sequence {row}, token {at}: the same token, but with log "
                        f"probability {other.token} instead of {score.token}"
                    )
            continue
        at, gap = len(commonprefix([want.token_ids, have.token_ids])), math.inf
        if at < len(want.logprobs):
            oracle = want.logprobs[at]
            token = have.token_ids[at] if at < len(have.token_ids) else None
            gap = abs(oracle.token - dict(oracle.top).get(token, -math.inf))
            if gap < near_tie(dtype, oracle.highest):
                parity.near_ties += 1
                parity.tokens += at + 1  # later tokens answer different texts
                continue
        raise ParityError(
            f"{name}, sequence {row}, token {at}: expected {want.token_ids[at : at + 3]}, got "
            f"{have.token_ids[at : at + 3]} (finish reasons {want.finish_reason} and "
            f"{have.finish_reason}); the oracle's logits of the two differ by {gap:.2g}"
        )


def prove(engine: Any, oracle: Any, params_of: Any, only: list[str] | None = None) -> Parity:
    """Drive `engine` and `oracle` through all scenarios, or those named in `only`.

    params_of: the class SamplingParams. Below float64, sampled scenarios are left out: rounding can
    change a draw, and a draw has no near ties. Raises ParityError.
    """
    parity, dtype = Parity(), oracle.model.dtype
    for name, prompts, sampling in scenarios(oracle.model.config):
        params = [params_of(**fields, logprobs=LIKELIEST) for fields in sampling]
        if only is not None and name not in only:
            continue
        if dtype != torch.float64 and params[0].temperature > 0:
            continue
        expected, got = oracle.generate(prompts, params), engine.generate(prompts, params)
        compare(name, expected, got, dtype, parity)
    return parity
