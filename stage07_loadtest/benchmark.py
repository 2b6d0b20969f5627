"""One server under load, with one, eight or all requests at a time:
`python -m stage07_loadtest.benchmark`.

The servers are stage 06's with stage 05's engine, and differ in `--max-num-seqs` alone: one request
at a time, eight, as many as fit into the memory of eight contexts. They have the same weights,
threads and tokens. First each answers prompts of the load, and the answers are proved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from urllib.request import Request, urlopen

import torch
from matplotlib.figure import Figure

from shared import charts, cli, kit
from shared.catalog import EMBEDDED
from shared.kit import Results, Row, Subject
from shared.roofline import static_costs
from shared.server import own_server

from . import metrics, schedule
from .load import load
from .workload import ANSWER, LENGTHS, Ask

STAGE, CONTEXTS = "stage07_loadtest", 8
PROMPT = LENGTHS["short"]  # tokens
SERVERS = {"one at a time": 1, "eight at a time": 8, "as many as fit": 64}
ALONE, EIGHT, ALL = SERVERS
SLO = metrics.Slo(ttft=1.0, tpot=0.2)
# Users of the closed loops of each server, and the requests of each user.
USERS = {ALONE: ((1, 8), (8, 1)), EIGHT: ((64, 1),), ALL: ((1, 8), (8, 4), (16, 4), (64, 2))}
SHARES, ARRIVALS = (0.5, 0.9, 1.1), 150  # of the capacity, in open loops; requests


def prove(subject: Subject, url: str) -> dict[str, Any]:
    """Some answers of a server, by stage 01."""
    prompts, answers = subject.prompts([PROMPT] * 2, "proof"), list[list[int]]()
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
        data = json.dumps(body | {"return_token_ids": True}).encode()
        head = {"Content-Type": "application/json"}
        with urlopen(Request(f"{url}/v1/completions", data, head)) as response:
            answers.append(json.load(response)["choices"][0]["token_ids"])
    return subject.prove(prompts, answers)


def measure(bench: kit.Bench) -> None:
    for subject in bench.subjects(("gpt2", "float32")):
        model, config = subject.about["model"], subject.config
        size = CONTEXTS * config.n_positions * config.kv_bytes_per_token(subject.dtype)
        options = {"model": model, "dtype": "float32", "engine": "paged", "kv-memory": size}
        options |= {"threads": torch.get_num_threads()}
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        words += [
            "--no-enable-prefix-caching",
            *([] if model in EMBEDDED else ["--random-weights"]),
        ]
        with ExitStack() as stack:
            urls = {
                name: stack.enter_context(
                    own_server([*words, "--max-num-seqs", str(rows)], quiet=True)
                ).url
                for name, rows in SERVERS.items()
            }
            proofs = {name: prove(subject, url) for name, url in urls.items()}

            run = partial(loaded, bench, subject, urls, proofs)
            for server, loops in USERS.items():
                for users, count in bench.sizes(*loops):
                    plan, times = schedule.closed(users, users * count), 3 if users < 64 else 2
                    run("closed", server, plan, users * count, times, users=users)
            count = 8 if bench.quick else ARRIVALS
            flood = run("flood", ALL, schedule.poisson(200.0, count, seed=0), count, 1)
            capacity = flood.median(ALL, "rate") if flood else 10.0
            for share in bench.sizes(*SHARES):
                plan = schedule.poisson(share * capacity, count, seed=round(100 * share))
                about = {"share": share, "offered": share * capacity, "requests": count}
                run("open", ALL, plan, count, 1, **about)


def loaded(
    bench: kit.Bench, subject: Subject, urls: Any, proofs: Any,
    case: str, server: str, plan: Any, count: int, times: int, **about: Any,
) -> Row | None:  # fmt: skip
    asks = [Ask(prompt, ANSWER) for prompt in subject.prompts([PROMPT] * count, case)]
    ways = {server: partial(point, urls[server], asks, plan)}
    about |= {"server": server, **subject.about}
    return bench.row(case, ways, times, 0, partial(proofs.get, server), **about)


def point(url: str, asks: list[Ask], plan: schedule.Schedule) -> dict[str, Any]:
    """One load: requests and tokens per second, latencies, and what failed. Raises AssertionError
    where client and server do not agree on the tokens."""
    summary = metrics.summarize(load(url, asks, plan), SLO)
    if summary.tokens_match is False or summary.succeeded < summary.requests:
        raise AssertionError(f"requests failed, or tokens got lost: {summary.failures}")
    late = {f"{name}_p{p}": summary.at(key, p) for name, key in (
        ("ttft", metrics.TTFT_INTENDED), ("e2e", metrics.E2E_INTENDED), ("tpot", metrics.TPOT),
    ) for p in (50, 95)}  # fmt: skip
    rates = {"rate": summary.request_rate, "output": summary.output_rate}
    rates |= {"goodput": summary.goodput, "client_cpu": summary.client_cpu}
    return {"seconds": summary.seconds, "succeeded": summary.succeeded, **rates, **late}


# ---- tables and chart ---------------------------------------------------------------------------


def predicted(row: Row, server: str, users: int) -> float:
    """Output tok/s if steps took only the time that their operations and bytes need."""
    rows = min(SERVERS[server], users)
    costs = static_costs(row.config, row.kind, [(PROMPT, ANSWER)] * rows, rows)
    return rows * ANSWER / row.least(costs)


def output(row: Row) -> float:
    return row.median(row["server"], "output")


def cells(row: Row) -> dict[str, object]:
    name = row["server"]
    return {
        "tok/s": kit.spread(row["output"][name]),
        "TTFT p95, ms": f"{1e3 * row.median(name, 'ttft_p95'):,.0f}",
        "E2E p95, ms": f"{1e3 * row.median(name, 'e2e_p95'):,.0f}",
        "goodput, req/s": f"{row.median(name, 'goodput'):.2f}",
        "client CPU": f"{row.median(name, 'client_cpu'):.0%}",
    }


def tables(results: Results) -> kit.Tables:
    closed = [
        {"server": row["server"], "users": row["users"], **cells(row),
         "limit, tok/s": f"{predicted(row, row['server'], row['users']):,.0f}"}
        for row in results.rows("closed")
    ]  # fmt: skip
    opened = [
        {"of capacity": f"{row['share']:.0%}", "offered, req/s": f"{row['offered']:.1f}"}
        | cells(row)
        for row in results.rows("open")
    ]
    return {"load": closed, "open": opened, "loop": claims(results)}


def most(results: Results) -> dict[str, Row]:
    """Of each server, the row with the most users, for GPT-2's shape."""
    rows = results.rows("closed", model="gpt2")
    return {row["server"]: row for row in sorted(rows, key=lambda row: row["users"])}


def claims(results: Results) -> Iterator[dict[str, str]]:
    """The lesson's predictions."""
    rows = most(results)
    hand = {ALONE: 80.6, EIGHT: 583, ALL: 735}
    limits = {name: predicted(row, name, row["users"]) for name, row in rows.items()}
    for name, row in rows.items():
        yield kit.claim(
            f"{row['users']} users, {name}", hand[name], limits[name], output(row), "tok/s"
        )
    for slow, fast, ratio in ((ALONE, EIGHT, 7.24), (EIGHT, ALL, 1.26)):
        if {slow, fast} <= rows.keys():
            gain = output(rows[fast]) / output(rows[slow])
            yield kit.claim(f"{fast} over {slow}", ratio, limits[fast] / limits[slow], gain)
    for row in results.rows("open", model="gpt2", share=1.1):
        waited = 0.95 * row["requests"] * (1 - 1 / row["share"]) / (row["offered"] / row["share"])
        why = "the first arrivals fill the batch before a queue grows"
        late = row.median(ALL, "ttft_p95")
        yield kit.claim("TTFT p95 above the capacity", waited, waited, late, "s", why)


def chart(results: Results) -> Figure:
    rows = most(results)
    return charts.bars(
        "Users share a server: one, eight, or as many requests at a time as fit",
        "output tok/s (GPT-2 124M shape, float32)",
        [f"{name}\n{row['users']} users" for name, row in rows.items()],
        {"tok/s": [output(row) for row in rows.values()]},
        digits=0,
    )


def headline(results: Results) -> str:
    rows = most(results)
    if not {ALONE, ALL} <= rows.keys():
        return kit.UNMEASURED
    gain = output(rows[ALL]) / output(rows[ALONE])
    return f"64 users get {gain:.1f}x the tok/s of one request at a time"


main = partial(kit.main, STAGE, __doc__, measure, tables)

if __name__ == "__main__":
    cli.run(main)
