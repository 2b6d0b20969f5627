"""What memory in blocks buys, where it buys nothing, and what it costs:
`python -m stage05_paged.benchmark`.

Win: a crowd of unlike answers in the memory of 4 slots. Null: requests that fill a slot each. Lose:
the gather before attention. And a prefix that is found, and a preempted request. All is proved.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import count as counting
from typing import Any

from matplotlib.figure import Figure
from torch.nn.functional import pad

from shared import charts, cli, kit
from shared import measure as watch
from shared.kit import Results, Row, Subject
from shared.roofline import Cost, forward_cost
from stage04_continuous.cache import SlotCache
from stage04_continuous.engine import make as make_slots
from stage04_continuous.runner import Runner

from .blocks import BlockPool
from .cache import PagedCache
from .engine import Engine, make
from .memory import block_bytes, measure_cost

STAGE = "stage05_paged"
SLOTS, PAGED = "stage 04, slots", "stage 05, blocks"
BLOCK, MEMORY, BUDGET = 16, 4096, 256  # tokens of a block, of all keys and values, of a pass
FULL = [(960, 64)] * 6  # each fills a slot
SYSTEM, OWN, LOST = 512, 32, 512  # tokens: of a common beginning, after it, and preempted
RECOMPUTE, SWAP = "recompute", "swap"


def start_cold(engine: Engine) -> None:
    """Evict all cached blocks of an engine without requests."""
    pool = engine.scheduler.pool
    for block in reversed([pool.take() for _ in range(pool.count)]):  # reversed: the order stays
        pool.give_back(block)


def measure(bench: kit.Bench) -> None:
    for subject in bench.subjects(("gpt2", "float32"), ("gpt2", "bfloat16")):
        if subject.about["dtype"] == "float32":
            crowd = kit.crowd(12 if bench.quick else 72)
            for load, lengths in bench.sizes(("crowd", crowd), ("full slots", FULL)):
                capacity(bench, subject, load, lengths)
            prefix(bench, subject)
            preemption(bench, subject)
        for rows, context in bench.sizes((1, 256), (32, 64), (32, 256), (32, 1008)):
            gather(bench, subject, rows, context)


def capacity(bench: kit.Bench, subject: Subject, load: str, lengths: Any) -> None:
    """A workload in the same memory, contiguous and paged."""
    pool, passes = BlockPool(MEMORY // BLOCK, BLOCK), kit.Passes(subject)
    options: dict[str, Any] = {"token_budget": BUDGET, "observers": [passes]}
    slots = make_slots(subject.model, MEMORY // subject.config.n_positions, **options)
    options |= {"max_sequences": min(pool.count, BUDGET), "prefix_caching": False}
    engines = {SLOTS: slots, PAGED: make(subject.model, pool=pool, **options)}

    def keep(engine: Any) -> dict[str, Any]:
        steps = [*engine.steps]
        queued = [step.rows for step in steps if step.waiting]
        costs, rows = passes.costs[-len(steps) :], [step.rows for step in steps]
        return {"costs": costs, "queued": sum(queued) / max(1, len(queued)), "rows": rows}

    bench.answers("capacity", subject, engines, lengths, 1, keep, load=load)


def gather(bench: kit.Bench, subject: Subject, rows: int, context: int) -> None:
    """A decode pass over equal sequences: in slots, and in shuffled blocks that hold the same."""
    config, dtype, per_row = subject.config, subject.dtype, -(-(context + 1) // BLOCK)
    slots = SlotCache(config, rows, context + 1, dtype)
    slots.kv.normal_()
    paged = PagedCache(config, rows * per_row, BLOCK, dtype=dtype)
    order = random.Random("blocks").sample(range(rows * per_row), rows * per_row)
    tables = [order[row * per_row : (row + 1) * per_row] for row in range(rows)]
    for row, blocks in enumerate(tables):
        held = pad(slots.kv[:, :, row], (0, 0, 0, per_row * BLOCK - context - 1))
        paged.kv[:, :, :, blocks] = held.unflatten(3, (per_row, BLOCK))
    shares = [(table, context, 1) for table in tables]
    inputs = [(row, context, 1) for row in range(rows)], range(rows)
    ways = {
        SLOTS: partial(Runner(subject.model, slots).run, [*range(rows)], *inputs),
        PAGED: partial(Runner(subject.model, paged).run, [*range(rows)], shares, range(rows)),
    }
    proof = partial(kit.prove, ways[SLOTS]().float(), ways[PAGED]().argmax(-1), dtype)
    bench.row("gather", ways, 7, 1, proof, **subject.about, rows=rows, context=context)


def prefix(bench: kit.Bench, subject: Subject) -> None:
    """Seconds to a request's first token, whose beginning another has computed or not."""
    (system,), numbers = subject.prompts([SYSTEM], "system"), counting()
    engine = make(subject.model, 2, token_budget=SYSTEM + OWN)

    def first(found: bool) -> dict[str, Any]:
        start_cold(engine)
        prompts = [system + subject.prompts([OWN], f"own {next(numbers)}")[0] for _ in range(2)]
        if found:
            engine.generate(prompts[:1], kit.greedy(1))
        ids: list[int] = []
        tokens = (token.id for token in engine.stream(prompts[1], kit.greedy(2)))
        seconds = watch.seconds(lambda: ids.append(next(tokens)))
        subject.prove(prompts[1:], [[*ids, *tokens]])
        return {"seconds": seconds}

    ways = {"computed": partial(first, False), "found": partial(first, True)}
    bench.row("prefix", ways, 5, **subject.about)


def preemption(bench: kit.Bench, subject: Subject) -> None:
    """What it costs a request to lose the blocks of its tokens, as the scheduler measures it."""
    pools = BlockPool(LOST // BLOCK, BLOCK), BlockPool(LOST // BLOCK, BLOCK)
    runner = make(subject.model, pool=pools[0], swap_pool=pools[1], preemption=SWAP).runner

    def costs() -> dict[str, float]:
        cost = measure_cost(runner, *pools, subject.dtype)
        return {RECOMPUTE: cost.recompute(LOST), SWAP: cost.swap(LOST)}

    bench.row("preemption", {"cost": costs}, 5, **subject.about)


# ---- tables and chart ---------------------------------------------------------------------------


def copied(row: Row) -> float:
    """Bytes that a decode pass gathers: whole blocks."""
    return (
        row["rows"] * -(-(row["context"] + 1) // BLOCK) * block_bytes(row.config, row.kind, BLOCK)
    )


def slower(row: Row) -> float:
    """Predicted time of a decode pass, paged over contiguous."""
    cost = forward_cost(row.config, row.kind, 1, row["context"], rows=row["rows"])
    return 1 + copied(row) / (row.limits.bandwidth_gb_s * 1e9) / row.least(cost)


def tables(results: Results) -> kit.Tables:
    capacity = [
        {
            "requests": f"{len(row.lengths)}, {row['load']}", "engine": variant,
            "tok/s": row.rate(variant), "steps": f"{row.median(variant, 'passes'):,.0f}",
            "at once, on average": f"{sum(rows) / len(rows):.1f}", "at most": max(rows),
            "while others wait": f"{row.median(variant, 'queued'):.1f}",
            "over stage 04": f"{row.gain(SLOTS, variant):.2f}x", "same tokens": row.proof,
        }
        for row in results.rows("capacity") for variant, (*_, rows) in row["rows"].items()
    ]  # fmt: skip
    gather = [
        {
            "dtype": row["dtype"], "rows": row["rows"], "context": row["context"],
            "slots, ms": row.ms(SLOTS), "blocks, ms": row.ms(PAGED),
            "blocks over slots": f"{row.gain(PAGED, SLOTS):.2f}x",
            "predicted": f"{slower(row):.2f}x", "gathered, MB": f"{copied(row) / 1e6:,.0f}",
        }
        for row in results.rows("gather")
    ]  # fmt: skip
    return {"capacity": capacity, "gather": gather, "claims": claims(results)}


def claims(results: Results) -> Iterator[dict[str, str]]:
    """What the lesson predicts, for GPT-2 in float32."""
    for row in results.rows("capacity", model="gpt2"):
        slots, paged = (row.least(Cost(*c) for c in row["costs"][v][-1]) for v in (SLOTS, PAGED))
        here, measured = slots / paged, row.gain(SLOTS, PAGED)
        if row["load"] == "crowd":
            stay = [(p + a / 2, a) for p, a in row.lengths]  # tokens held, weighted by steps
            fit = (
                MEMORY / BLOCK / -(-sum(n * a for n, a in stay) / sum(a for _, a in stay) // BLOCK)
            )
            why = "long answers stay longer, so those that are in memory are longer than average"
            queued = row.median(PAGED, "queued")
            yield kit.claim("sequences at once, while others wait", 51, fit, queued, "", why)
            yield kit.claim("seconds of the crowd, slots over blocks", 1.87, here, measured)
        else:
            why = "the control: no more requests fit, and the gather still costs time"
            yield kit.claim("the same where requests fill slots", 0.91, here, measured, "x", why)
    for row in results.rows("gather", model="gpt2", dtype="float32", rows=32, context=256):
        what = "a step of 32 rows at context 256, blocks over slots"
        yield kit.claim(what, 1.39, slower(row), row.gain(PAGED, SLOTS))
    for row in results.rows("prefix", model="gpt2"):
        whole, rest = (
            forward_cost(row.config, row.kind, *n) for n in ((SYSTEM + OWN,), (OWN, SYSTEM))
        )
        here, why = (
            row.least(whole) / row.least(rest),
            "a step of 32 rows is further from its limit",
        )
        what = "first token of 544 tokens, 512 of which are found"
        yield kit.claim(what, 15.5, here, row.gain("computed", "found"), "x", why)
    for row in results.rows("preemption", model="gpt2"):
        again = row.least(forward_cost(row.config, row.kind, LOST, sampled=0))
        moved = 2 * LOST * row.config.kv_bytes_per_token(row.kind) / row.limits.bandwidth_gb_s / 1e9
        for way, hand, here in ((RECOMPUTE, 459, again), (SWAP, 1.89, moved)):
            what = f"preemption at 512 tokens, {way}"
            yield kit.claim(what, hand, 1e3 * here, 1e3 * row.median("cost", way), "ms")


def chart(results: Results) -> Figure:
    """Sequences in each step of the crowd."""
    (row, *_) = results.rows("capacity")
    runs = {variant: rows[-1] for variant, rows in row["rows"].items()}
    steps = max(map(len, runs.values()))
    places = range(0, steps, max(1, steps // 60))
    series = {
        name: [rows[at] if at < len(rows) else float("nan") for at in places]
        for name, rows in runs.items()
    }
    title = "In the same memory, blocks hold many times as many sequences"
    return charts.lines(title, "step of the crowd", "sequences in it", [*places], series)


def headline(results: Results) -> str:
    for row in results.rows("capacity", load="crowd"):
        return (
            f"in the memory of 4 slots, {row.median(PAGED, 'queued'):.0f} sequences at once, and "
            f"{row.gain(SLOTS, PAGED):.1f}x the tok/s"
        )
    return kit.UNMEASURED


main = partial(kit.main, STAGE, __doc__, measure, tables)

if __name__ == "__main__":
    cli.run(main)
