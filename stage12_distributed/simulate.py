"""What a fleet would do: `python -m stage12_distributed simulate`.

A router serves a cell of some replicas, and a fleet is many cells that know nothing of each other:
one of them is simulated. Its pass times come from a short run of the real engine on this machine.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared import cli
from shared.errors import UserError
from stage07_loadtest.workload import ANSWER, QUESTION, SYSTEM

from .passes import AMOUNTS, VOCABULARY, PassTime, calibrate
from .routing import Routing
from .simulator import POLICIES, Ask, Cell, Fleet
from .virtual import simpy

if TYPE_CHECKING:
    import argparse

TRAFFIC = ("prefix", "free", "hot")
PREFIXES = 64
CROWD = 100  # requests at once, to find what a replica answers a second
ABOUT = "Simulates a fleet: the real scheduler, blocks and routing, and fitted pass times."
EXAMPLES = """\
  python -m stage12_distributed simulate
  python -m stage12_distributed simulate --traffic free --load 0.8
  python -m stage12_distributed simulate --kill 2
  python -m stage12_distributed simulate --target 4 --swing 0.8
  python -m stage12_distributed simulate --prefill 5"""
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


def arrivals(rate: float, count: int, seed: int = 0, swing: float = 0.0) -> list[float]:
    """Poisson arrivals, on average `rate` a second for the time that `count` take: from 1 - swing
    times as many up to 1 + swing times in the middle and back, as in a day."""
    chance, now, end = random.Random(f"arrivals {seed}"), 0.0, count / rate
    found = []
    while (now := now + chance.expovariate(rate * (1 + swing))) < end:
        if chance.random() * (1 + swing) < 1 - swing * math.cos(2 * math.pi * now / end):
            found.append(now)
    return found


def traffic(
    kind: str,
    starts: Sequence[float],
    seed: int = 0,
    prefixes: int = PREFIXES,
    answer: int = ANSWER,
) -> list[Ask]:
    """Prompts that begin with SYSTEM tokens: "prefix" has one of `prefixes`, the n-th 1/n times as
    often as the first; "hot" has one for all; "free" has a new one each."""
    chance = random.Random(f"traffic {seed}")

    def ids(count: int) -> list[int]:
        return chance.choices(range(VOCABULARY), k=count)

    known = [ids(SYSTEM) for _ in range(1 if kind == "hot" else prefixes)]
    often, asks = [1 / (place + 1) for place in range(len(known))], []
    for at in starts:
        begin = ids(SYSTEM) if kind == "free" else chance.choices(known, often)[0]
        asks.append(Ask(begin + ids(chance.randint(*QUESTION)), answer, at))
    return asks


def one_big_cache(asks: Sequence[Ask]) -> float:
    """Share of the prompts' tokens that a single cache without limit would have."""
    routing, seen, hits = Routing(), set[bytes](), 0
    for ask in asks:
        digests = routing.digests(ask.prompt)
        hits += sum(digest in seen for digest in digests) * routing.block_size
        seen.update(digests)
    return hits / sum(len(ask.prompt) for ask in asks)


def capacity(cell: Cell, pass_time: PassTime, kind: str = "free") -> float:
    """Requests a second that one replica answers when it always has enough to do."""
    alone = Cell(blocks=cell.blocks, sequences=cell.sequences, budget=cell.budget)
    return CROWD / Fleet(alone, pass_time, traffic(kind, [0.0] * CROWD)).run().env.now


def simulate(
    cell: Cell, pass_time: PassTime, asks: Sequence[Ask], seed: int = 0
) -> dict[str, float]:
    """The summary of a cell: see `Fleet.summary`."""
    return Fleet(cell, pass_time, asks, seed).run().summary()


@dataclass(frozen=True)
class Scenarios:
    """Questions to a cell of replicas: `count` requests at a share `load` of what it answers."""

    cell: Cell
    pass_time: PassTime
    count: int
    load: float = 0.7
    deaths: int = 5
    handover: float = 0.0

    def run(self, ratios: Sequence[int]) -> Iterator[dict[str, Any]]:
        """All traffic by all policies; deaths; a day's load with and without autoscaling; then some
        `ratios`: replicas of the cell that only prefill."""
        cell = self.cell
        rate = self.load * cell.replicas * capacity(cell, self.pass_time)
        starts = arrivals(rate, self.count)
        asks = {kind: traffic(kind, starts) for kind in TRAFFIC}
        asks["day"] = traffic("prefix", arrivals(rate / 2, self.count, swing=0.9))
        cases = [("policies", kind, replace(cell, policy=p)) for kind in TRAFFIC for p in POLICIES]
        last = starts[-1]
        deaths = tuple(last * (n + 1) / (self.deaths + 1) for n in range(self.deaths))
        cases.append(("deaths", "prefix", replace(cell, failures=deaths, starting=last / 20)))
        scaling = replace(cell, target=6.0, starting=last / 50, calm=last / 25)
        cases += [("always", "day", cell), ("scaled", "day", scaling)]
        for number in (0, *ratios):
            split: dict[str, Any] = {"prefill": number, "replicas": cell.replicas - number}
            cases.append(("ratio", "free", replace(cell, handover=self.handover, **split)))
        for case, kind, own in cases:
            about: dict[str, Any] = {"case": case, "traffic": kind, "policy": own.policy}
            about |= {"prefill": own.prefill} | {
                "replicas": own.replicas,
                "big": one_big_cache(asks[kind]),
                "rate": rate,
            }
            yield about | simulate(own, self.pass_time, asks[kind])


def read_steps(path: Path) -> list[list[float]]:
    """What --keep wrote. Raises UserError if it cannot be read."""
    try:
        steps = json.loads(path.read_text(encoding="utf-8"))
        if not steps or any(len(step) != len(AMOUNTS) + 1 or min(step) < 0 for step in steps):
            raise ValueError("no list of passes")
        return [list(map(float, step)) for step in steps]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"The steps {path} cannot be read ({error}): write them with --keep."
        ) from None


def measured_steps(options: argparse.Namespace) -> list[tuple[float, ...]]:
    from stage01_forward import families
    from stage05_paged.make import make

    return calibrate(make(cli.load_model_from(options, families).model))


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser("stage12_distributed simulate", ABOUT, EXAMPLES)
    whole, number = cli.whole_number, cli.number
    for name, kind, default, text in (
        ("replicas", whole(1, 100_000), 200, "of the fleet"),
        ("cell", whole(1, 1000), 20, "replicas behind one router: those that are simulated"),
        ("requests", whole(100, 1_000_000), 2000, "to the cell"),
        ("load", number(0, 2, above=True), 0.7, "offered, as a share of what the cell can answer"),
        ("swing", number(0, 1), 0.0, "of the load in the course of a day, 0 to 1 times its mean"),
        ("kill", whole(0, 1000), 0, "replicas that die, at even times"),
        (
            "target",
            number(0, 1000),
            0.0,
            "requests in flight for each replica: autoscaling; 0: off",
        ),
        ("starting", number(0, 86_400, above=True), 30.0, "seconds until a new replica is ready"),
        ("prefill", whole(0, 999), 0, "replicas of the cell that only prefill; the rest decode"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=text)
    parser.add_argument(
        "--traffic",
        choices=TRAFFIC,
        default=TRAFFIC[0],
        help=f"beginnings of {SYSTEM} tokens: one of {PREFIXES}, none alike, or the same for all",
    )
    parser.add_argument("--steps", type=Path, metavar="FILE", help="passes kept by --keep")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write the measured passes to it")
    cli.add_model_options(parser)
    options = parser.parse_args(argv)
    simpy()  # before the model is loaded
    if options.prefill >= options.cell:
        raise UserError("A cell needs a replica that decodes: give --prefill less than --cell.")
    steps = read_steps(options.steps) if options.steps else measured_steps(options)
    if options.keep:
        options.keep.write_text(json.dumps(steps), encoding="utf-8")
    run(options, PassTime.fit(steps))
    return 0


def run(options: argparse.Namespace, pass_time: PassTime) -> None:
    """Print a line for each policy."""
    seed = options.seed or 0
    decoding = options.cell - options.prefill
    cell = Cell(decoding, prefill=options.prefill, target=options.target, starting=options.starting)
    rate = options.load * options.cell * capacity(cell, pass_time)
    asks = traffic(options.traffic, arrivals(rate, options.requests, seed, options.swing), seed)
    last = asks[-1].at
    kills = tuple(last * (n + 1) / (options.kill + 1) for n in range(options.kill))
    scale = options.replicas / options.cell
    print(
        f"{options.replicas} replicas as {scale:g} cells of {options.cell}; one cell simulated: "
        f"{len(asks)} requests in {last:,.0f} s. One cache without limit would have "
        f"{one_big_cache(asks):.0%} of the prompts."
    )
    print(
        " ".join(
            ["policy".ljust(8), *(name.rjust(10) for name in COLUMNS), "fleet tok/s".rjust(12)]
        )
    )
    for policy in POLICIES:
        found = simulate(replace(cell, policy=policy, failures=kills), pass_time, asks, seed)
        cells = [form.format(found[key] * unit) for key, form, unit in COLUMNS.values()]
        total = f"{found['tokens'] * scale:,.0f}"
        print(" ".join([policy.ljust(8), *(text.rjust(10) for text in cells), total.rjust(12)]))


if __name__ == "__main__":
    cli.run(main)
