"""Users of one server: `python -m stage07_loadtest.benchmark`.

The servers are stage 06's with stage 05's engine, and differ in `--max-num-seqs` alone: one request
at a time, eight, as many as fit into the memory of eight contexts. First each proves its answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from urllib.request import Request, urlopen

from shared import charts, cli, kit
from shared.kit import Results, Row, Subject
from shared.roofline import static_costs
from shared.server import own_server

from . import metrics, schedule
from .client import Target
from .load import run_point
from .workload import LENGTHS, Ask

CONTEXTS = 8  # whole ones, in memory
PROMPT, ANSWER = LENGTHS["fixed"]  # tokens
SERVERS = {"one at a time": 1, "eight at a time": 8, "as many as fit": 64}
ALONE, EIGHT, ALL = SERVERS
SLO = metrics.Slo(ttft=1.0, tpot=0.2)
# Users of the closed loops of each server, and the requests of each user.
USERS = {ALONE: ((1, 8), (8, 1)), EIGHT: ((64, 1),), ALL: ((1, 8), (8, 4), (16, 4), (64, 2))}
SHARES, ARRIVALS = (0.5, 0.9, 1.1), 150  # of the capacity; requests


def prove(subject: Subject, url: str) -> dict[str, Any]:
    """Two answers of a server."""
    body = {"max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    prompts, answers = subject.prompts([PROMPT] * 2, "proof"), list[list[int]]()
    for prompt in prompts:
        data = json.dumps(body | {"prompt": prompt}).encode()
        request = Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
        with urlopen(request) as response:
            answers.append(json.load(response)["choices"][0]["token_ids"])
    return subject.prove(prompts, answers)


def measure(bench: kit.Bench) -> None:
    (subject,) = bench.subjects(("gpt2", "float32"))
    options = [*subject.server_options(CONTEXTS), "--engine", "paged"]
    options += ["--no-enable-prefix-caching", "--max-num-seqs"]
    with ExitStack() as stack:
        urls, proofs = dict[str, str](), dict[str, Any]()
        for name, rows in SERVERS.items():
            program = own_server([*options, str(rows)], quiet=True)
            urls[name] = stack.enter_context(program).url
            proofs[name] = prove(subject, urls[name])

        def run(case: str, server: str, plan: Any, count: int, times: int, **about: Any) -> Any:
            asks = [Ask(prompt, ANSWER) for prompt in subject.prompts([PROMPT] * count, case)]
            ways, proof = {server: partial(point, urls[server], asks, plan)}, proofs[server]
            about |= {"server": server, **subject.about}
            return bench.row(case, ways, times, 0, lambda: proof, **about)

        for server, loops in USERS.items():
            for users, each in bench.sizes(*loops):
                plan, times = schedule.closed(users, users * each), 3 if users < 64 else 2
                last = run("closed", server, plan, users * each, times, users=users)
        count = 8 if bench.quick else ARRIVALS
        capacity = last.median(ALL, "rate") if last else 10.0
        for share in bench.sizes(*SHARES):
            plan = schedule.poisson(share * capacity, count, seed=round(100 * share))
            run("open", ALL, plan, count, 1, share=share, offered=plan.rate, requests=count)


def point(url: str, asks: list[Ask], plan: schedule.Schedule) -> dict[str, Any]:
    """One load. Raises AssertionError where client and server do not agree on the tokens."""
    summary = metrics.summarize(asyncio.run(run_point(Target(url), asks, plan)), SLO)
    if summary.tokens_match is False or summary.succeeded < summary.requests:
        raise AssertionError(f"requests failed, or tokens got lost: {summary.failures}")
    names = {"TTFT p95": metrics.TTFT_INTENDED, "E2E p95": metrics.E2E_INTENDED}
    waits = {key: summary.at(name, 95) for key, name in names.items()}
    rates = {"rate": summary.request_rate, "output": summary.output_rate}
    rates |= {"goodput": summary.goodput, "client_cpu": summary.client_cpu}
    return {"seconds": summary.seconds} | rates | waits


def predicted(row: Row) -> float:
    """Output tok/s that bytes and operations allow."""
    rows = min(SERVERS[row["server"]], row["users"])
    costs = static_costs(row.config, row.kind, [(PROMPT, ANSWER)] * rows, rows)
    return rows * ANSWER / row.least(costs)


def tables(results: Results) -> kit.Tables:
    lines = []
    for row in results.rows("closed") + results.rows("open"):
        name, share = row["server"], row.get("share")
        load = f"{share:.0%} of capacity" if share else str(schedule.Schedule(row["users"]))
        line = {"load": load, "server": name, "tok/s": kit.spread(row["output"][name])}
        line |= {f"{k}, ms": f"{1e3 * row.median(name, k):,.0f}" for k in ("TTFT p95", "E2E p95")}
        line["goodput, req/s"] = f"{row.median(name, 'goodput'):.2f}"
        lines.append(line | {"client CPU": f"{row.median(name, 'client_cpu'):.0%}"})
    return {"load": lines, "loop": claims(results)}


def most(results: Results) -> dict[str, Row]:
    """Of each server, the row with the most users, which is the last."""
    return {row["server"]: row for row in results.rows("closed", model="gpt2")}


def claims(results: Results) -> Iterator[dict[str, str]]:
    """The lesson's predictions."""
    hand, few = {ALONE: 80.6, EIGHT: 583, ALL: 735}, "steps of so few rows take as long offline"
    for name, row in most(results).items():
        what, why = f"{row['users']} users, {name}", few if name != ALL else "not known"
        yield kit.claim(what, hand[name], predicted(row), row.median(name, "output"), "tok/s", why)
    for row in results.rows("open", model="gpt2", share=1.1):
        waited = 0.95 * row["requests"] * (row["share"] - 1) / row["offered"]
        what, why = "TTFT p95 above the capacity", "the first arrivals fill the batch"
        yield kit.claim(what, waited, waited, row.median(ALL, "TTFT p95"), "s", why)


def chart(results: Results) -> charts.Figure:
    rows = most(results)
    title = "Users share a server: one, eight, or as many requests at a time as fit"
    groups = [f"{name}\n{row['users']} users" for name, row in rows.items()]
    series = {"tok/s": [row.median(name, "output") for name, row in rows.items()]}
    return charts.bars(title, "output tok/s (GPT-2 124M shape, float32)", groups, series, digits=0)


def headline(results: Results) -> Iterator[str]:
    rates = {name: row.median(name, "output") for name, row in most(results).items()}
    if {ALONE, ALL} <= rates.keys():
        yield f"64 users get {rates[ALL] / rates[ALONE]:.1f}x the tok/s of one at a time"


if __name__ == "__main__":
    cli.run(partial(kit.main, "stage07_loadtest", __doc__, measure, tables))
