"""What several processes buy and cost: `python -m stage12_distributed.benchmark`.

cases.py measures; here are the predictions, the tables and the chart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shared import cli
from shared.bench import kit, rows
from shared.bench.claims import Claim, closing
from shared.bench.kit import Case
from shared.bench.rows import Results, Row
from shared.roofline import forward_cost, static_costs

from .apart import APART, TOGETHER
from .cases import BUDGET, FULL, LATENCIES, ONE, QUICK, TWO, apart, fleets, ranks, replay, router

STAGE = "stage12_distributed"
SUM = 0.2e-3  # seconds, assumed for a sum over a socket of this machine


def replays(results: Results) -> Iterator[dict[str, str]]:
    """A line for each load and latency."""
    for row in results.groups("replay"):
        for name in LATENCIES:
            share = f"{row['share']:.0%}{', fitted' * row['fitted']}"
            line = {"of capacity": share, "latency": name.upper()}
            for place, percent in enumerate(("p50", "p99")):
                real, made = (row[way][name][place] for way in ("measured", "simulated"))
                line[f"{percent}, ms"] = f"{real * 1e3:,.1f}"
                line[f"simulated {percent}, ms"] = f"{made * 1e3:,.1f} ({made / real - 1:+.0%})"
            yield line


def fleet(*cases: str) -> Callable[[Results], list[Row]]:
    return lambda results: [row for row in results.groups("fleets") if row["case"] in cases]


def chunk(row: Row) -> float:
    """Least seconds of a pass over a whole budget of a long prompt."""
    return row.least([forward_cost(row.config, row.kind, BUDGET, BUDGET, sampled=0)])


def step(row: Row) -> float:
    """Least seconds of a decode step of the streams, with the whole machine."""
    return row.least([forward_cost(row.config, row.kind, 1, 80, rows=row["streams"])])


def itl(row: Row, name: str, place: int) -> float:
    """Seconds between two tokens of a stream: the median of the repeats' p50 or p99."""
    return rows.median(own[place] for own in row["itl"][name])


def summing(row: Row) -> float:
    """Least seconds of a load on two ranks of one machine: one process's, and the sums."""
    passes = row.of(ONE)["passes"] * (2 * row.config.n_layer + 1)
    return row.least(static_costs(row.config, row.kind, row.lengths)) + passes * SUM


def claims(results: Results) -> Iterator[Claim]:
    """What the lesson predicts."""
    found = {(row["traffic"], row["policy"]): row for row in fleet("policies")(results)}
    load, prefix = found["prefix", "load"], found["prefix", "prefix"]
    why = "a prefix whose replica is too busy is computed by another one too"
    yield Claim("prompts found, by prefix", 100 * prefix["big"], 100 * prefix["hits"], "%", why)
    why = "a request waits for the pass that runs, and both policies have some hits"
    gain = load["ttft_p50"] / prefix["ttft_p50"]
    yield Claim("TTFT, by load over by prefix", 1 / (1 - prefix["big"]), gain, "x", why)
    free = found["free", "load"]["ttft_p50"] / found["free", "prefix"]["ttft_p50"]
    yield Claim("the same without common prefixes", 1.0, free, "x", "the control: no hits")
    busy = results.groups("apart")[-1]
    why = "the pass has the streams' rows too, and a budget is rarely all one prompt's"
    yield Claim("p99 between tokens, together", chunk(busy), itl(busy, TOGETHER, 1), "ms", why)
    why = "one processor of two, and both processes read one memory"
    yield Claim("p99 between tokens, apart", 2 * step(busy), itl(busy, APART, 1), "ms", why)
    why = "a process that waits cannot lend its processor to the other one"
    gain = busy.of(TOGETHER).median / busy.of(APART).median
    yield Claim("tok/s, apart over together", 1.0, gain, "x", why)
    one = results.groups("ranks")[0]
    why = "a sum takes as long as the slower rank, and each waits for the other 25 times a pass"
    least = one.least(static_costs(one.config, one.kind, one.lengths))
    gain = one.of(ONE).median / one.of(TWO).median
    yield Claim("two ranks over one process, 1 row", least / summing(one), gain, "x", why)
    row = results.groups("replay", fitted=False)[-1]
    made, real = (row[way]["e2e"][0] for way in ("simulated", "measured"))
    what = f"E2E p50 at {row['share']:.0%} of the capacity, over simulated"
    yield Claim(what, 1.0, real / made, "x", "the scheduler is the real one")


def quantile(name: str, place: int, unit: float = 1e3) -> rows.Column:
    return lambda row: f"{row[name][place] * unit:,.0f}"


def between(name: str, place: int) -> rows.Column:
    return lambda row: f"{itl(row, name, place) * 1e3:,.1f}"


def rate(name: str) -> rows.Column:
    return lambda row: f"{row['tokens'] / row.of(name).median:,.1f}"


def latency(key: str) -> rows.Column:
    return lambda row: f"{row[key] * 1e3:,.0f}"


COLUMNS: dict[str, rows.Column] = {
    "hits": "hits:.0%",
    "fleet, tok/s": lambda row: (
        f"{row['tokens'] * row.results.plan['replicas'] / row.results.plan['cell']:,.0f}"
    ),
    "one big cache": "big:.0%",
    "max/mean load": "balance:.2f",
    "prefill + decode": lambda row: f"{row['prefill']} + {row['replicas']}",
    "requests": lambda row: row.requests if "lengths" in row.group else row["requests"],
    "what": "case",
    "lost": "lost:.0f",
    "retried": "retried:.0f",
    "replica-seconds": "paid:,.0f",
    "a choice p50, us": quantile("decision", 0, 1e6),
    "p99, us": quantile("decision", 1, 1e6),
    "an event, us of processor": lambda row: f"{row['relay'] * 1e6:,.0f}",
    "together": rows.gain(ONE, None, TWO),
    "same tokens": lambda row: row.of(TWO).proof,
    "long prompts": "long",
    **{f"{name}, tok/s": rate(name) for name in (TOGETHER, APART)},
    **{
        f"{name}, ITL {percent}, ms": between(name, place)
        for name in (TOGETHER, APART)
        for place, percent in enumerate(("p50", "p99"))
    },
    **{
        f"{name.upper()} {percent}, ms": latency(f"{name}_{percent}")
        for name in LATENCIES
        for percent in ("p50", "p99")
    },
}
TABLES = rows.tables(
    COLUMNS,
    """
    policies: traffic | policy | hits | one big cache | max/mean load | TTFT p50, ms | TTFT p99, ms
      | ITL p99, ms | fleet, tok/s
    few: traffic | policy | hits | max/mean load | TTFT p50, ms | TTFT p99, ms
    deaths: what | requests | lost | retried | TTFT p99, ms
    scaling: what | requests | replica-seconds | TTFT p50, ms | TTFT p99, ms | lost
    ratios: prefill + decode | TTFT p50, ms | TTFT p99, ms | ITL p50, ms | ITL p99, ms | E2E p50, ms
    apart: long prompts | together, ITL p50, ms | together, ITL p99, ms | apart, ITL p50, ms
      | apart, ITL p99, ms | together, tok/s | apart, tok/s
    ranks: requests | one process, tok/s | two ranks, tok/s | together | same tokens
    router: replicas | a choice p50, us | p99, us | an event, us of processor
    """,
    policies=fleet("policies"),
    few=lambda results: [r for r in fleet("policies")(results) if r["traffic"] == "prefix"],
    deaths=fleet("deaths"),
    scaling=fleet("always", "scaled"),
    ratios=fleet("ratio"),
    replays=replays,
    claims=closing(claims),
)
CHARTS = {
    "policies": rows.bars(
        "Common prefixes: what is found, by policy",
        ("share of the prompts' tokens (simulated)",),
        fleet("policies"),
        lambda row: row["traffic"],
        {"{policy}": "hits"},
    )
}


def headline(results: Results) -> str:
    found = {(row["traffic"], row["policy"]): row for row in fleet("policies")(results)}
    prefix, chance = found["prefix", "prefix"], found["prefix", "random"]
    return (
        f"by prefix {prefix['hits']:.0%} of the prompts' tokens are found, at random "
        f"{chance['hits']:.0%}, in a simulated cell of {results.plan['cell']} replicas"
    )


ABOUT = "Measures the simulator against a server, policies in simulated time, and leases."
WORK = kit.cases(Case(replay), Case(fleets), Case(apart), Case(ranks), Case(router))
BENCHMARK = kit.Benchmark(STAGE, ABOUT, FULL, QUICK, WORK, TABLES, CHARTS, headline)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
