"""Every stage there is, on the same prompts: `python -m shared.tour`.

Each stage streams the first text and works through the others; then all of them must have said the same, token for token,
and a table shows how fast each was. It is a tour, not a benchmark: one run, on whatever else the machine is doing. The numbers
to trust are in the reports.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import cli, parity
from . import stages

PROMPTS = (
    "Once upon a time",
    "Long ago, in a village under the cliffs, there lived a girl whose name was",
    "There was once a merry boy named",
)
WARM_UP_TOKENS = (
    4  # libraries choose their kernels at the first call; no stage should pay for that alone
)


@dataclass
class Told:
    """One continuation, with the names that `parity.compare` reads, and how long it took."""

    token_ids: list[int]
    finish_reason: str | None
    seconds: float


def tell(
    engine: cli.Streaming, loaded: cli.Loaded, prompt: Sequence[int], sampling: Any, show: bool
) -> Told:
    """Continue `prompt` (token ids); `show` streams prompt and text to standard output."""
    told = Told([], None, 0.0)
    if show:
        print(loaded.tokenizer.decode(prompt), end="", flush=True)
    started = time.perf_counter()
    for token, text in cli.with_text(engine.stream(prompt, sampling), loaded):
        told.token_ids.append(token.id)
        told.finish_reason = token.finish_reason
        if show:
            print(text, end="", flush=True)
    told.seconds = time.perf_counter() - started
    if show:
        print(flush=True)
    return told


def table(told: dict[str, list[Told]]) -> str:
    """Tokens, seconds, tokens per second and speed-up over the first stage, a line a stage."""
    rates = {}
    lines = [f"{'stage':<24}{'tokens':>8}{'seconds':>10}{'tok/s':>10}{'speed-up':>10}"]
    for name, texts in told.items():
        tokens, seconds = (
            sum(len(each.token_ids) for each in texts),
            sum(each.seconds for each in texts),
        )
        rates[name] = tokens / seconds
        gain = rates[name] / next(iter(rates.values()))
        lines.append(f"{name:<24}{tokens:>8}{seconds:>10.2f}{rates[name]:>10.1f}{gain:>9.1f}x")
    return "\n".join(lines)


def compare(
    told: dict[str, list[Told]], prompts: Sequence[Sequence[int]], oracle: Any, sampling: Any
) -> list[str]:
    """Compare every stage with the first, and print a line on each; returns the names of the stages that differ.

    Below float64 two stages may part where two tokens are nearly tied: that is said, and is no difference (see parity.py).
    `oracle` is the first stage's engine, `sampling` what all were asked for.
    """
    first, *others = told
    differ = []
    for name in others:
        found = parity.Parity()
        try:
            for prompt, want, have in zip(prompts, told[first], told[name], strict=True):
                same = (want.token_ids, want.finish_reason) == (have.token_ids, have.finish_reason)
                # Only after a difference ask the first stage how sure it was: asking takes time, which would count as its own.
                expected = (
                    want
                    if same
                    else oracle.generate([prompt], replace(sampling, logprobs=parity.LIKELIEST))[0]
                )
                parity.compare("tour", [expected], [have], oracle.model.dtype, found)
            print(f"{name} against {first}: {found}")
        except parity.ParityError as error:
            print(f"{name} against {first}: DIFFERENT, {error}")
            differ.append(name)
    return differ


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        "shared.tour",
        "Runs every stage on the same prompts, checks that all say the same, and shows how fast each is.",
        "  python -m shared.tour\n"
        "  python -m shared.tour --model gpt2 --max-tokens 20\n"
        "  python -m shared.tour --dtype float64 --threads 1",
    )
    cli.add_max_tokens(parser, default=400)
    cli.add_model_options(parser)
    options = parser.parse_args(argv)
    loaded = cli.load_model_from(options, stages.load_model)
    return visit(loaded, stages.engines(), options)


def visit(loaded: cli.Loaded, engines: dict[str, Any], options: argparse.Namespace) -> int:
    """Run `engines` (name -> class), print texts, table and verdict; returns the exit status, 1 if a token differs."""
    prompts = [loaded.tokenizer.encode(prompt) for prompt in PROMPTS]
    sampling = stages.sampling_params()(max_tokens=options.max_tokens)
    print(f"{loaded}; {len(prompts)} prompts, greedy, at most {options.max_tokens} tokens each")
    told: dict[str, list[Told]] = {}
    for name, engine_class in engines.items():
        print(f"\n--- {name} ---", flush=True)
        engine = engine_class(loaded.model)
        for _ in engine.stream(
            prompts[0], replace(sampling, max_tokens=min(WARM_UP_TOKENS, options.max_tokens))
        ):
            pass
        told[name] = [tell(engine, loaded, prompts[0], sampling, show=True)]
        for text, prompt in zip(PROMPTS[1:], prompts[1:], strict=True):
            told[name].append(tell(engine, loaded, prompt, sampling, show=False))
            print(f"and {len(told[name][-1].token_ids)} tokens after '{text}'", flush=True)
    print(f"\n{table(told)}\n")
    differ = compare(told, prompts, stages.oracle(loaded.model), sampling)
    print(
        f"Not the same tokens as the first stage: {', '.join(differ)}."
        if differ
        else "All stages agree."
    )
    return 1 if differ else 0
