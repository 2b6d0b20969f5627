"""What a fleet would do: `python -m stage12_distributed simulate`.

A router serves a cell of several replicas, and a fleet is many cells that know nothing of each
other. One cell is simulated, with pass times from a short run of the real engine on this machine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared import cli
from shared.errors import UserError
from shared.files import read_text
from stage07_loadtest.workload import ANSWER, QUESTION, SYSTEM

from ..router.routing import Routing
from .passes import AMOUNTS, VOCABULARY, PassTime, calibrate
from .simulator import POLICIES, Ask, Cell, Fleet, simpy

TRAFFIC = ("prefix", "free", "hot")
PREFIXES = 64
CROWD = 100  # requests at once, to find what a replica answers a second
ABOUT = (
    "Simulates a fleet: the real scheduler, blocks and routing, and fitted pass times. A line for "
    "each policy and kind of traffic, then deaths, autoscaling, and replicas that only prefill."
)
EXAMPLES = """\
  python -m stage12_distributed simulate
  python -m stage12_distributed simulate --load 0.9 --model gpt2 --random-weights
  python -m stage12_distributed simulate --steps steps.json --replay run    see timed --help"""
COLUMNS = {
    "hits": ("hits", "{:.0%}", 1.0),
    "max/mean": ("balance", "{:.2f}", 1.0),
    "TTFT p50": ("ttft_p50", "{:,.0f} ms", 1e3),
    "TTFT p99": ("ttft_p99", "{:,.0f} ms", 1e3),
    "ITL p99": ("itl_p99", "{:,.0f} ms", 1e3),
    "retried": ("retried", "{:.0f}", 1.0),
    "lost": ("lost", "{:.0f}", 1.0),
    "replica s": ("paid", "{:,.0f}", 1.0),
}


def arrivals(rate: float, count: int, swing: float = 0.0) -> list[float]:
    """Poisson arrivals at a mean `rate` a second, for the time that `count` of them take. As in a
    day, the rate rises from 1 - swing times the mean to 1 + swing times in the middle, and falls
    back."""
    rng, now, end = random.Random("arrivals 0"), 0.0, count / rate
    starts = []
    while (now := now + rng.expovariate(rate * (1 + swing))) < end:
        if rng.random() * (1 + swing) < 1 - swing * math.cos(2 * math.pi * now / end):
            starts.append(now)
    return starts


def traffic(kind: str, starts: Sequence[float], answer: int = ANSWER) -> list[Ask]:
    """Prompts that begin with SYSTEM tokens: "prefix" has one of PREFIXES, the n-th 1/n times as
    often as the first; "hot" has one for all; "free" has a new one each."""
    rng = random.Random("traffic 0")

    def ids(count: int) -> list[int]:
        return rng.choices(range(VOCABULARY), k=count)

    known = [ids(SYSTEM) for _ in range(1 if kind == "hot" else PREFIXES)]
    often, asks = [1 / (place + 1) for place in range(len(known))], []
    for at in starts:
        begin = ids(SYSTEM) if kind == "free" else rng.choices(known, often)[0]
        asks.append(Ask(begin + ids(rng.randint(*QUESTION)), answer, at))
    return asks


def one_big_cache(asks: Sequence[Ask]) -> float:
    """Share of the prompts' tokens that a single cache without limit would have."""
    routing, seen, hits = Routing(), set[bytes](), 0
    for ask in asks:
        digests = routing.digests(ask.prompt)
        hits += sum(digest in seen for digest in digests) * routing.block_size
        seen.update(digests)
    return hits / sum(len(ask.prompt) for ask in asks)


def capacity(cell: Cell, pass_time: PassTime) -> float:
    """Requests a second that one replica answers when it always has enough to do."""
    alone = Cell(blocks=cell.blocks, sequences=cell.sequences, budget=cell.budget)
    return CROWD / Fleet(alone, pass_time, traffic("free", [0.0] * CROWD)).run().env.now


def scenarios(
    cell: Cell,
    pass_time: PassTime,
    count: int,
    ratios: Sequence[int],
    load: float = 0.7,
    deaths: int = 5,
    handover: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """Questions to a cell of replicas, each with `count` requests at a share `load` of its
    capacity: all traffic by all policies; deaths; a day's load with and without autoscaling; then
    some `ratios`: numbers of replicas that only prefill."""
    rate = load * cell.replicas * capacity(cell, pass_time)
    starts = arrivals(rate, count)
    asks = {kind: traffic(kind, starts) for kind in TRAFFIC}
    asks["day"] = traffic("prefix", arrivals(rate / 2, count, swing=0.9))
    cases = [("policies", kind, replace(cell, policy=p)) for kind in TRAFFIC for p in POLICIES]
    last = starts[-1]
    failures = tuple(last * (n + 1) / (deaths + 1) for n in range(deaths))
    cases.append(("deaths", "prefix", replace(cell, failures=failures, starting=last / 20)))
    scaling = replace(cell, target=6.0, starting=last / 50, calm=last / 25)
    cases += [("always", "day", cell), ("scaled", "day", scaling)]
    for number in (0, *ratios):
        split: dict[str, Any] = {"prefill": number, "replicas": cell.replicas - number}
        cases.append(("ratio", "free", replace(cell, handover=handover, **split)))
    for case, kind, varied in cases:
        about: dict[str, Any] = {"case": case, "traffic": kind, "policy": varied.policy}
        about |= {"prefill": varied.prefill, "replicas": varied.replicas}
        about |= {"big": one_big_cache(asks[kind]), "rate": rate}
        yield about | Fleet(varied, pass_time, asks[kind]).run().summary()


def read_steps(path: Path) -> list[list[float]]:
    """Amounts and seconds of passes, as JSON. Raises UserError if they cannot be read."""
    try:
        steps = json.loads(read_text(path))
        if not steps or any(len(step) != len(AMOUNTS) + 1 or min(step) < 0 for step in steps):
            raise ValueError("no list of passes")
        return [list(map(float, step)) for step in steps]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"The steps {path} cannot be read ({error}): write them with timed --keep."
        ) from None


def measured_steps(options: argparse.Namespace) -> list[tuple[float, ...]]:
    from stage05_paged.engine import make

    return calibrate(make(cli.load_model_from(options).model))


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser("stage12_distributed simulate", ABOUT, EXAMPLES)
    whole, number = cli.whole_number, cli.number
    for name, kind, default, text in (
        ("replicas", whole(1, 100_000), 200, "replicas in the fleet"),
        ("cell", whole(5, 1000), 10, "replicas behind one router; one such cell is simulated"),
        ("requests", whole(50, 1_000_000), 500, "requests to the cell, in each line"),
        ("load", number(0, 2, above=True), 0.7, "offered, as a share of what the cell can answer"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=text)
    parser.add_argument(
        "--steps",
        type=Path,
        metavar="FILE",
        help="file of passes that timed --keep wrote; default: time a short run",
    )
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="FOLDER",
        help="instead of a fleet, simulate a run of python -m stage07_loadtest --out, and compare "
        "with what it measured; give its server's passes as --steps",
    )
    cli.add_model_options(parser)
    options = parser.parse_args(argv)
    simpy()  # before the model is loaded
    steps = read_steps(options.steps) if options.steps else measured_steps(options)
    pass_time, size = PassTime.fit(steps), options.cell
    if options.replay:
        from .replay import lines  # with HTTP, which takes a second

        print(*lines(options.replay, pass_time, Cell()), sep="\n")
        return 0
    cells, ratios = options.replicas / size, [size * fifths // 5 for fifths in (1, 2, 3)]
    print(f"{options.replicas} replicas as {cells:g} cells of {size}; one cell is simulated")
    show(scenarios(Cell(size), pass_time, options.requests, ratios, options.load), cells)
    return 0


def show(cases: Iterator[Mapping[str, Any]], cells: float) -> None:
    """Print a line for each case; tokens a second are those of all `cells`."""
    names = ["case", "traffic", "policy", "prefill", *COLUMNS, "fleet tok/s"]
    print(" ".join(name.rjust(11) for name in names))
    for case in cases:
        line = [str(case[name]) for name in names[:4]]
        line += [form.format(case[key] * unit) for key, form, unit in COLUMNS.values()]
        line.append(f"{case['tokens'] * cells:,.0f}")
        print(" ".join(text.rjust(11) for text in line), flush=True)


if __name__ == "__main__":
    cli.run(main)
