"""All stages, one workload: `python -m reports.tour`.

Every stage with an engine answers the same prompts, with memory for the same number of contexts;
then the server answers them over HTTP. The answers must be the first stage's, token for token; a
table shows each stage's speed. It is a tour, not a benchmark: one run, on a machine that may have
other work to do, with fewer or shorter stories if it is slow. The numbers to trust are in the
reports.
"""

from __future__ import annotations

import argparse
import itertools

from shared import cli

FIRST = "Once upon a time"
SIZES = (
    (32, 1.0),
    (16, 1.0),
    (8, 1.0),
    (8, 0.5),
    (8, 0.25),
    (4, 0.125),
)  # stories, of --max-tokens
SECONDS = 12  # at most for the first stage, by the estimate: all others take as long together
LENGTHS = (4, 24, 12, 32, 8, 48, 16, 20)  # tokens of the prompts, in turn
SHARES = (1.0, 0.25, 0.5, 0.25, 0.75, 0.4, 0.6, 0.3)  # of the longest answer, in turn
CONTEXTS, WARM_UP, TRIAL, BAR = 8, 4, 16, 24  # CONTEXTS: whole ones in memory; BAR: characters


def workload(loaded: cli.Loaded, count: int, most: int) -> tuple[list[list[int]], list[int]]:
    """The beginnings of `count` stories, and how many tokens each answer has at most."""
    from shared.stories import grammar

    prompts, stories = [loaded.tokenizer.encode(FIRST)], grammar.stories("tour")
    for length in itertools.islice(itertools.cycle(LENGTHS), 1, count):
        ids = loaded.tokenizer.encode(next(stories).text)
        prompts.append(ids[: min(length, loaded.config.n_positions // 2)])
    shares = itertools.islice(itertools.cycle(SHARES), count)
    return prompts, [max(1, int(most * share)) for share in shares]


def visit(loaded: cli.Loaded, options: argparse.Namespace) -> int:
    """Run all engines and the server; returns the exit status, 1 if a token differs."""
    import asyncio
    import importlib
    import time
    from dataclasses import replace

    from rich.console import Console
    from rich.table import Table

    from shared import parity, registry
    from shared.server import MODULE, own_server

    from . import staircase

    params = registry.load(registry.SAMPLING)
    engines = {
        n: registry.load(registry.ENGINES[n])(loaded.model, CONTEXTS) for n in staircase.ENGINES
    }
    (first, oracle), *_ = engines.items()
    (prompt,), _ = workload(loaded, 1, TRIAL)
    oracle.generate([prompt], params(max_tokens=WARM_UP))
    started = time.perf_counter()
    oracle.generate([prompt], params(max_tokens=TRIAL))
    cost = (time.perf_counter() - started) / TRIAL  # seconds of a token
    for count, share in SIZES:
        prompts, counts = workload(loaded, count, max(1, int(share * options.max_tokens)))
        if cost * sum(counts) <= SECONDS:
            break
    sampling = [params(max_tokens=count) for count in counts]
    print(
        f"{len(prompts)} stories: greedy answers of at most {max(counts)} tokens, in memory for "
        f"{CONTEXTS} whole contexts of {loaded.config.n_positions:,}.\n"
    )
    expected = oracle.generate(prompts, [replace(p, logprobs=parity.LIKELIEST) for p in sampling])
    text = loaded.tokenizer.decode([*prompts[0], *expected[0].token_ids])
    print(f"{text}{' ...' if expected[0].finish_reason == 'length' else ''}\n")
    rates: dict[str, float] = {}
    differ = []

    def note(name: str, seconds: float, answers: list[list[int]]) -> None:
        result = parity.Parity()
        outputs = [
            replace(want, token_ids=ids) for want, ids in zip(expected, answers, strict=True)
        ]
        try:
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
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling)
        seconds = time.perf_counter() - started
        note(staircase.title(name), seconds, [output.token_ids for output in outputs])
    if loaded.device.type == "cpu" and not options.random_weights:
        words = ["--model", options.model, "--dtype", str(loaded.dtype).removeprefix("torch.")]
        with own_server(words, quiet=True) as server:
            asyncio.run(staircase.ask_all(server.url, prompts[:1], [WARM_UP]))
            answers = asyncio.run(staircase.ask_all(server.url, prompts, counts, False))
        note(MODULE, answers["seconds"], answers["ids"])
    table, console = Table(box=None, pad_edge=False), Console(highlight=False)
    for heading in ("stage", "tok/s", "speed-up", ""):
        table.add_column(heading, justify="left" if heading in ("stage", "") else "right")
    base, fastest = rates[staircase.title(first)], max(rates.values())
    for name, rate in rates.items():
        block = "█" if "utf" in console.encoding.lower() else "#"
        bar = block * max(1, round(BAR * rate / fastest))
        table.add_row(name, f"{rate:,.0f}", f"{rate / base:.1f}x", bar)
    console.print(table)
    if differ:
        print(f"\nNot the same tokens as the first stage: {', '.join(differ)}.")
        return 1
    print(
        "\nAll stages gave the same tokens. Next: read stage01_forward/README.md, and run\n"
        '  python -m stage01_forward "Once upon a time"'
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    about = "Runs all stages on the same prompts, checks that their tokens agree, and shows how "
    about += "fast each of them is, in less than two minutes."
    examples = "  python -m reports.tour\n  python -m reports.tour --model gpt2 --max-tokens 32"
    parser = cli.Parser("reports.tour", about, examples)
    cli.add_max_tokens(parser, default=128)
    cli.add_model_options(parser)
    options = parser.parse_args(argv)
    print(f"All stages, one workload. Loading {options.model} ...", flush=True)
    return visit(cli.load_model_from(options), options)


if __name__ == "__main__":
    cli.run(main)
