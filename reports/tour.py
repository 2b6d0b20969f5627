"""All stages, one workload: `python -m reports.tour`.

Every stage with an engine answers the same prompts, with memory for the same number of contexts;
then the server answers them over HTTP. The answers must be the first stage's, token for token; a
table shows each stage's speed. It is a tour, not a benchmark: one run, with fewer stories on a slow
machine. The numbers to trust are in the reports.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from statistics import mean

from shared import cli

FIRST = "Once upon a time"
MOST, LEAST, SECONDS = 32, 2, 12  # stories; about what the first stage takes, and all others
LENGTHS = (4, 24, 12, 32, 8, 48, 16, 20)  # tokens of the prompts, in turn
SHARES = (1.0, 0.25, 0.5, 0.25, 0.75, 0.4, 0.6, 0.3)  # of the longest answer, in turn
CONTEXTS, WARM_UP, TRIAL, BAR = 8, 4, 16, 24  # CONTEXTS: whole ones in memory; BAR: characters


def workload(loaded: cli.Loaded, count: int, most: int) -> tuple[list[list[int]], list[int]]:
    """The beginnings of `count` stories, and how many tokens each answer has at most."""
    from shared.stories import grammar

    stories = (story.text for story in grammar.stories("tour"))
    texts = [FIRST, *itertools.islice(stories, count - 1)]
    encoded = zip(map(loaded.tokenizer.encode, texts), itertools.cycle(LENGTHS), strict=False)
    prompts = [ids[: min(length, loaded.config.n_positions // 2)] for ids, length in encoded]
    shares = itertools.islice(itertools.cycle(SHARES), count)
    return prompts, [max(1, int(most * share)) for share in shares]


def visit(loaded: cli.Loaded, options: argparse.Namespace) -> int:
    """Run all engines and the server; returns the exit status, 1 if a token differs."""
    import asyncio
    import importlib
    from dataclasses import replace

    from shared import measure, parity, registry
    from shared.server import MODULE, own_server

    from . import staircase

    params, rates, differ = registry.load(registry.SAMPLING), dict[str, float](), list[str]()
    makers = {n: registry.load(registry.ENGINES[n]) for n in staircase.ENGINES}
    engines = {n: make(loaded.model, CONTEXTS) for n, make in makers.items()}
    oracle, (prompt, _) = engines[staircase.ENGINES[0]], workload(loaded, 1, TRIAL)
    oracle.generate(prompt, params(max_tokens=WARM_UP))
    trial, _ = measure.timed(partial(oracle.generate, prompt, params(max_tokens=TRIAL)))
    count = int(SECONDS / (trial / TRIAL) / options.max_tokens / mean(SHARES))
    prompts, counts = workload(loaded, min(MOST, max(LEAST, count)), options.max_tokens)
    print(
        f"{len(prompts)} stories: greedy answers of at most {max(counts)} tokens, in memory for "
        f"{CONTEXTS} whole contexts of {loaded.config.n_positions:,}.\n"
    )
    sampling = [params(max_tokens=count) for count in counts]
    expected = oracle.generate(prompts, [replace(p, logprobs=parity.LIKELIEST) for p in sampling])
    text = loaded.tokenizer.decode([*prompts[0], *expected[0].token_ids])
    print(f"{text}{' ...' if expected[0].finish_reason == 'length' else ''}\n")

    def note(name: str, seconds: float, answers: list[list[int]]) -> None:
        result, pairs = parity.Parity(), zip(expected, answers, strict=True)
        try:
            outputs = [replace(want, token_ids=ids) for want, ids in pairs]
            parity.compare(name, expected, outputs, loaded.dtype, result)
            verdict = str(result)
        except parity.ParityError as error:
            verdict = f"DIFFERENT, {error}"
            differ.append(name)
        rates[name] = sum(map(len, answers)) / seconds
        question = getattr(importlib.import_module(name), "QUESTION", "")
        print(f"{name}: {question}\n  {rates[name]:,.0f} tokens a second; {verdict}\n", flush=True)

    for name, engine in engines.items():
        engine.generate(prompts[:1], params(max_tokens=WARM_UP))
        seconds, outputs = measure.timed(partial(engine.generate, prompts, sampling))
        note(staircase.title(name), seconds, [output.token_ids for output in outputs])
    if loaded.device.type == "cpu" and not options.random_weights:
        words = ["--model", options.model, "--dtype", str(loaded.dtype).removeprefix("torch.")]
        with own_server(words, quiet=True) as server:
            asyncio.run(staircase.ask_all(server.url, prompts[:1], [WARM_UP]))
            answers = asyncio.run(staircase.ask_all(server.url, prompts, counts))
        note(MODULE, answers["seconds"], answers["ids"])
    print(f"{'stage':<18}{'tok/s':>7}  speed-up")
    for name, rate in rates.items():
        bar = "█" * max(1, round(BAR * rate / max(rates.values())))
        gain = f"{rate / next(iter(rates.values())):.1f}x"
        print(f"{name:<18}{rate:>7,.0f}  {gain:>8}  {bar}")
    if differ:
        print(f"\nNot the same tokens as the first stage: {', '.join(differ)}.")
        return 1
    print(
        "\nAll stages gave the same tokens. Next: read stage01_forward/README.md, and run\n"
        '  python -m stage01_forward "Once upon a time"'
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    about = "Compares the tokens and the speed of all stages on the same prompts, in two minutes."
    parser = cli.Parser("reports.tour", about, "  python -m reports.tour --model gpt2")
    cli.add_max_tokens(parser, default=128)
    cli.add_model_options(parser)
    options = parser.parse_args(argv)
    print(f"All stages, one workload. Loading {options.model} ...", flush=True)
    return visit(cli.load_model_from(options), options)


if __name__ == "__main__":
    cli.run(main)
