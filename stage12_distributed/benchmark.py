"""What several processes buy and cost: `python -m stage12_distributed.benchmark`.

In simulated time, with passes as long as this machine's: policies, and chats at several loads.
In real time: two ranks. All answers of real engines are proved.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from shared import charts, cli, kit
from shared.kit import Results, Subject
from shared.roofline import forward_cost, static_costs
from stage05_paged.engine import make

from .passes import PassTime, calibrate
from .routing import BLOCK_SIZE
from .simulator import Cell, chats, policies
from .tensor import group

SUM = 0.2e-3  # seconds, assumed for a sum over a socket of this machine
ONE, TWO = "one process", "two ranks"
PROMPT = 276  # tokens: a system prompt, and a question
CONTEXTS = 8  # memory of a replica, in whole contexts


def measure(bench: kit.Bench) -> None:
    for subject in bench.subjects(("gpt2", "float32")):
        times = PassTime.fit(calibrate(make(subject.model, CONTEXTS)))
        blocks = CONTEXTS * subject.config.n_positions // BLOCK_SIZE
        cell = Cell(4 if bench.quick else 10, blocks=blocks)
        fleets = policies(cell, times, 200 if bench.quick else 800)
        bench.results["fleets"] = [subject.about | case for case in fleets]
        few = [((2, 0.4),)] if bench.quick else []
        cases = chats(cell, times, 50 if bench.quick else 150, *few)
        bench.results["bounded"] = [subject.about | case for case in cases]
        ranks(bench, subject)


def whole(name: str) -> Any:
    """The model that every rank loads."""
    return Subject(name, "float32", plain=True).model


class Threads:
    """An engine whose process computes with this many threads."""

    def __init__(self, engine: Any, threads: int) -> None:
        self.engine, self.threads, self.steps = engine, threads, engine.steps

    def generate(self, prompts: Any, sampling: Any) -> Any:
        torch.set_num_threads(self.threads)
        return self.engine.generate(prompts, sampling)


def ranks(bench: kit.Bench, subject: Subject) -> None:
    """One process with all threads, and two ranks with half of them each."""
    threads = torch.get_num_threads()
    half = max(1, threads // 2)
    torch.set_num_threads(half)  # as many as each rank has
    load = partial(whole, subject.about["model"])
    workers = group.RankGroup(group.Setup(load, 2, timeout=60.0, linear="auto"))
    engines = {
        ONE: Threads(make(subject.model, CONTEXTS), threads),
        TWO: Threads(group.make(workers.model, CONTEXTS), half),
    }
    try:
        for rows in bench.sizes(1, 8):
            bench.answers("ranks", subject, engines, [(64, 32)] * rows, 3)
    finally:
        workers.close()
        torch.set_num_threads(threads)


# ---- tables and chart ---------------------------------------------------------------------------


def tables(results: Results) -> kit.Tables:
    few = [
        {
            "traffic": row["traffic"], "policy": row["policy"], "found": f"{row['hits']:.0%}",
            "most over mean load": f"{row['balance']:.2f}",
            **{f"TTFT {p}, ms": f"{1e3 * row[f'ttft_{p}']:,.0f}" for p in ("p50", "p99")},
        }
        for row in results.rows("fleets")
    ]  # fmt: skip
    lines: dict[Any, dict[str, object]] = {}
    for row in results.rows("bounded"):
        line = {"replicas": row["replicas"], "load": f"{row['load']:.0%}"}
        cell = f"{row['hits']:.0%}, {1e3 * row['ttft_p99']:,.0f} ms"
        lines.setdefault((row["replicas"], row["load"]), line)[row["policy"]] = cell
    return {"few": few, "chats": lines.values(), "claims": claims(results)}


def claims(results: Results) -> Iterator[dict[str, str]]:
    """What the lesson predicts."""
    rows = {(row["traffic"], row["policy"]): row for row in results.rows("fleets")}
    if not rows:
        return
    prefix, chance = rows["prefix", "prefix"], rows["prefix", "random"]
    why = "a prefix whose replica is too busy is computed by another one too"
    big = 100 * prefix["big"]
    yield kit.claim("prompts found, by prefix, %", 88.8, big, 100 * prefix["hits"], "", why)
    costs = (forward_cost(prefix.config, prefix.kind, PROMPT // part) for part in (2, 9))
    half, few = (cost.seconds(kit.ROUND, prefix.kind) for cost in costs)
    gain = chance["ttft_p50"] / prefix["ttft_p50"]
    yield kit.claim("TTFT, at random over by prefix", 4.6, half / few, gain)
    free = rows["free", "random"]["ttft_p50"] / rows["free", "prefix"]["ttft_p50"]
    yield kit.claim("the same without common prefixes", 1.0, 1.0, free, "x", "the control: no hits")
    for row in results.rows("ranks")[:1]:
        seconds = row.least(static_costs(row.config, row.kind, row.lengths))
        sums = row.median(ONE, "passes") * (2 * row.config.n_layer + 1) * SUM
        what, why = "two ranks over one process, 1 row", "each rank waits for the other in each sum"
        yield kit.claim(what, 0.73, seconds / (seconds + sums), row.gain(ONE, TWO), "x", why)


def found(results: Results) -> dict[str, float]:
    """The share of tokens that each policy finds, where prompts have common prefixes."""
    return {row["policy"]: row["hits"] for row in results.rows("fleets", traffic="prefix")}


def chart(results: Results) -> charts.Figure:
    return charts.bars(
        "Prompts with common prefixes: what each policy finds",
        "% of the prompts' tokens (ten simulated replicas, 64 prefixes)",
        list(found(results)),
        {"found": [100 * hits for hits in found(results).values()]},
        digits=0,
    )


def headline(results: Results) -> Iterator[str]:
    if hits := found(results):
        shares = "{prefix:.0%} of the prompts' tokens, at random {random:.0%}".format(**hits)
        yield f"routing by prefix finds {shares}"


if __name__ == "__main__":
    cli.run(partial(kit.main, "stage12_distributed", __doc__, measure, tables))
