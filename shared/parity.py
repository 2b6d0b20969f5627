"""The proof that stands before every number: a stage's tokens are the naive engine's tokens.

One list of scenarios (scenarios.json) drives every stage; one oracle, the engine of the first stage, answers them.
In float64 all tokens must be equal. In float32 two engines add the same numbers in another order, so a first
difference is allowed, but only at a near tie: where the oracle's logits of the two tokens lie less than 1e-3 apart.
bfloat16 keeps 8 bits of a number, so there a near tie is as wide as its rounding: see `near_tie`. Near ties are counted
and shown, never hidden.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .config import Config

NEAR_TIE = {torch.float64: 0.0, torch.float32: 1e-3}
STEPS = 4
LIKELIEST = 5  # of so many tokens the oracle tells the log-probabilities: a token that is none of them ties with nothing


class ParityError(AssertionError):
    """A stage gave a token that the oracle did not."""


@dataclass(frozen=True)
class Scenario:
    """Prompts as token ids, and the fields of SamplingParams for each of them."""

    name: str
    prompts: list[list[int]]
    sampling: list[dict[str, Any]]
    stop_at: list[int] = field(
        default_factory=list
    )  # stop each sequence at what the oracle's n-th token is


@dataclass
class Parity:
    """What was compared: `tokens` in all, and for each sequence that parted at a near tie, where and how near."""

    tokens: int = 0
    sequences: int = 0
    near_ties: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        ties = f", {len(self.near_ties)} parted at a near tie" if self.near_ties else ", identical"
        return f"{self.sequences} sequences, {self.tokens} tokens{ties}"


def random_prompt(length: int, config: Config, seed: int | str) -> list[int]:
    rng = random.Random(f"prompt {seed} {length}")
    return [rng.randrange(config.vocab_size) for _ in range(length)]


def scenarios(config: Config) -> list[Scenario]:
    """The scenarios of scenarios.json with prompts for `config`. A length below zero counts back from the context's end."""
    found = []
    for number, entry in enumerate(
        json.loads(Path(__file__).with_name("scenarios.json").read_text(encoding="utf-8"))
    ):
        name, lengths, stop_at = entry.pop("name"), entry.pop("prompts"), entry.pop("stop_at", [])
        lengths = [length if length > 0 else config.n_positions + length for length in lengths]
        prompts = [
            random_prompt(length, config, f"{number} {i}") for i, length in enumerate(lengths)
        ]
        sampling = [
            {key: v[i] if isinstance(v, list) else v for key, v in entry.items()}
            for i in range(len(prompts))
        ]
        if "seed" in entry:  # neighbours with one seed would draw alike
            sampling = [{**each, "seed": each["seed"] + i} for i, each in enumerate(sampling)]
        found.append(Scenario(name, prompts, sampling, stop_at))
    return found


def near_tie(dtype: torch.dtype, highest: float) -> float:
    """Two logits tie if they lie less than this apart, where the highest logit of their row is `highest`.

    In a half dtype it is 4 steps, a step being the distance between neighbouring numbers at `highest`: in bfloat16 1/8
    from 16 to 32, and 1/64 from 2 to 4. Rounding two logits in two engines moves their gap by up to 2 steps, and what was
    rounded in the layers before adds to that. Tried on two layouts of the same bfloat16 weights, at 125,000 places: the
    likeliest token became another one across gaps of 0 to 3 steps, ever more rarely (20 times at 3), and never of 4.
    """
    if dtype in NEAR_TIE:
        return NEAR_TIE[dtype]
    return STEPS * torch.finfo(dtype).eps * 2.0 ** (math.frexp(highest)[1] - 1)


def compare(
    name: str, expected: list[Any], got: list[Any], dtype: torch.dtype, parity: Parity
) -> None:
    """Add the comparison of two lists of Outputs to `parity`; raise ParityError at a difference that is no near tie.

    `expected` must carry the oracle's log-probabilities of its LIKELIEST tokens: their differences are the logits' own.
    """
    for row, (want, have) in enumerate(zip(expected, got, strict=True)):
        parity.sequences += 1
        parity.tokens += len(want.token_ids)
        if (want.token_ids, want.finish_reason) == (have.token_ids, have.finish_reason):
            continue
        at = next(
            (
                i
                for i, pair in enumerate(zip(want.token_ids, have.token_ids, strict=False))
                if pair[0] != pair[1]
            ),
            min(len(want.token_ids), len(have.token_ids)),
        )
        if at < len(want.logprobs):
            oracle = want.logprobs[at]
            other = (
                dict(oracle.top).get(have.token_ids[at], -math.inf)
                if at < len(have.token_ids)
                else -math.inf
            )
            gap = abs(oracle.token - other)
            if gap < near_tie(dtype, oracle.highest):
                parity.near_ties.append({"scenario": name, "row": row, "token": at, "gap": gap})
                continue
            why = f"to the oracle the two lie {gap:.2g} apart"
        else:
            why = f"the oracle ended there ({want.finish_reason})"
        raise ParityError(
            f"{name}, sequence {row}, token {at}: expected {want.token_ids[at : at + 3]}, got {have.token_ids[at : at + 3]} "
            f"(finish reasons {want.finish_reason} and {have.finish_reason}); {why}"
        )


def prove(engine: Any, oracle: Any, params_of: Any, only: list[str] | None = None) -> Parity:
    """Drive `engine` and `oracle` through all scenarios, or those named in `only`; `params_of` is the class SamplingParams.

    Below float64, sampled scenarios are left out: one rounding moves a draw, and a draw knows no near tie.
    Raises ParityError.
    """
    parity, dtype = Parity(), oracle.model.dtype
    for scenario in scenarios(oracle.model.config):
        params = [params_of(**{**fields, "logprobs": LIKELIEST}) for fields in scenario.sampling]
        if (
            only is not None
            and scenario.name not in only
            or dtype != torch.float64
            and params[0].temperature > 0
        ):
            continue
        expected = oracle.generate(scenario.prompts, params)
        if scenario.stop_at:
            stops = [
                (output.token_ids[n],) for output, n in zip(expected, scenario.stop_at, strict=True)
            ]
            params = [
                replace(each, stop_token_ids=stop) for each, stop in zip(params, stops, strict=True)
            ]
            expected = oracle.generate(scenario.prompts, params)
        got = engine.generate(scenario.prompts, params)
        compare(scenario.name, expected, got, dtype, parity)
        if dtype == torch.float64:
            compare_logprobs(scenario.name, expected, got)
    return parity


def compare_logprobs(name: str, expected: list[Any], got: list[Any], most: float = 1e-9) -> None:
    """Raise ParityError where log-probabilities of equal tokens lie more than `most` apart.

    A small model often says the right token for wrong reasons: with half of its past overwritten, tokens alone stay the same.
    """
    for row, (want, have) in enumerate(zip(expected, got, strict=True)):
        for at, (one, other) in enumerate(zip(want.logprobs, have.logprobs, strict=True)):
            if abs(one.token - other.token) > most:
                raise ParityError(
                    f"{name}, sequence {row}, token {at}: the same token, but with log-probability {other.token} for {one.token}"
                )
