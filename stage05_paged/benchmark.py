"""What memory in blocks buys: `python -m stage05_paged.benchmark`.

Win: a crowd of unlike answers in the memory of 4 slots, and a prefix that is found. Null: requests
that fill a slot each. Lose: the gather before attention. All is proved.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from shared import charts, cli, kit
from shared.kit import BLOCK, Results, Row, Subject
from shared.roofline import Cost
from stage04_continuous.cache import SlotCache
from stage04_continuous.engine import make as make_slots
from stage04_continuous.runner import Runner

from .cache import PagedCache
from .engine import make

SLOTS, PAGED = "stage 04, slots", "stage 05, blocks"
MEMORY, BUDGET = 4096, 256  # tokens of all keys and values, of a pass
SYSTEM, OWN = 512, 32  # tokens: of a common beginning, and after it


def measure(bench: kit.Bench) -> None:
    for subject in bench.subjects(("gpt2", "float32"), ("gpt2", "bfloat16")):
        if subject.about["dtype"] == "float32":
            capacity(bench, subject, "crowd", kit.crowd(12 if bench.quick else 72))
            capacity(bench, subject, "full slots", [(960, 64)] * 6)  # each fills a slot
            prefix(bench, subject)
        for rows, context in bench.sizes((1, 256), (32, 64), (32, 256), (32, 1008)):
            gather(bench, subject, rows, context)


def capacity(bench: kit.Bench, subject: Subject, load: str, lengths: Any) -> None:
    """A workload in the same memory, contiguous and paged."""
    passes, contexts = kit.Passes(subject), MEMORY // subject.config.n_positions
    options: Any = {"token_budget": BUDGET, "observers": [passes]}
    slots = make_slots(subject.model, contexts, **options)
    paged = make(subject.model, contexts, max_sequences=BUDGET, prefix_caching=False, **options)

    def keep(engine: Any) -> dict[str, Any]:
        rows, full = [s.rows for s in engine.steps], [s.rows for s in engine.steps if s.waiting]
        return {"costs": passes.costs[-len(rows) :], "rows": rows, "queued": sum(full) / len(full)}

    bench.answers("capacity", subject, {SLOTS: slots, PAGED: paged}, lengths, 1, keep, load=load)


def gather(bench: kit.Bench, subject: Subject, rows: int, context: int) -> None:
    """A decode pass over equal sequences: in slots, and in shuffled blocks that hold the same."""
    config, dtype, each = subject.config, subject.dtype, -(-(context + 1) // BLOCK)
    slots = SlotCache(config, rows, each * BLOCK, dtype)
    paged = PagedCache(config, rows * each, BLOCK, dtype=dtype)
    tables, ids, ways = [share[0] for share in kit.inputs(rows, context)[1]], [*range(rows)], {}
    paged.kv[:, :, :, tables] = slots.kv.normal_().transpose(2, 3).unflatten(4, (each, BLOCK))
    for name, cache, places in ((SLOTS, slots, ids), (PAGED, paged, tables)):
        shares = [(place, context, 1) for place in places]
        ways[name] = partial(Runner(subject.model, cache).run, ids, shares, ids)
    proof = partial(kit.prove, ways[SLOTS]().float(), ways[PAGED]().argmax(-1), dtype)
    bench.row("gather", ways, 4, 1, proof, **subject.about, rows=rows, context=context)


def prefix(bench: kit.Bench, subject: Subject) -> None:
    """Seconds to a request's first token, whose beginning another has computed or not."""
    system, other, own = subject.prompts([SYSTEM, OWN, OWN])

    def first(before: list[int]) -> dict[str, Any]:
        engine = make(subject.model, 2, token_budget=SYSTEM + OWN)
        ask = partial(engine.generate, sampling=kit.greedy(1))
        ask([before])
        seconds, (output,) = kit.measure.timed(partial(ask, [system + own]))
        return {"seconds": seconds} | subject.prove([system + own], [output.token_ids])

    ways = {"computed": partial(first, other), "found": partial(first, system + other)}
    bench.row("prefix", ways, **subject.about)


def slower(row: Row) -> float:
    """Predicted time of a decode pass, paged over contiguous: whole blocks are gathered."""
    tokens = row["rows"] * -(-(row["context"] + 1) // BLOCK) * BLOCK
    gathered = Cost(0, tokens * row.config.kv_bytes_per_token(row.kind))
    return 1 + row.least(gathered) / row.bound(1, row["context"], row["rows"])


def tables(results: Results) -> kit.Tables:
    capacity = [
        {
            "requests": f"{len(row.lengths)}, {row['load']}", "engine": variant,
            "tok/s": row.rate(variant), "steps": f"{row.median(variant, 'passes'):,.0f}",
            "at once, while others wait": f"{row.median(variant, 'queued'):.1f}",
            "over stage 04": f"{row.gain(SLOTS, variant):.2f}x",
        }
        for row in results.rows("capacity") for variant in (SLOTS, PAGED)
    ]  # fmt: skip
    gather = [
        {
            "dtype": row["dtype"], "rows, context": f"{row['rows']}, {row['context']}",
            "slots, ms": row.ms(SLOTS), "blocks, ms": row.ms(PAGED),
            "over slots (predicted)": f"{row.gain(PAGED, SLOTS):.2f}x ({slower(row):.2f}x)",
        }
        for row in results.rows("gather")
    ]  # fmt: skip
    return {"capacity": capacity, "gather": gather, "claims": claims(results)}


def claims(results: Results) -> Iterator[dict[str, str]]:
    """What the lesson predicts, for GPT-2 in float32."""
    for row in results.rows("capacity", model="gpt2"):
        slots, paged = (row.least(Cost(*c) for c in row["costs"][v][-1]) for v in (SLOTS, PAGED))
        what, hand = "the same where requests fill slots", 0.91
        why = "the control: no more requests fit, and the gather still costs time"
        if row["load"] == "crowd":
            # A request holds its prompt and half of its answer, for as many steps as that has.
            held = sum((p + a / 2) * a for p, a in row.lengths) / row.tokens
            fit, queued = MEMORY // BLOCK / -(-held // BLOCK), row.median(PAGED, "queued")
            late = "long answers stay longer; and the mean includes the steps that fill the memory"
            yield kit.claim("sequences at once, while others wait", 51, fit, queued, "", late)
            what, hand = "seconds of the crowd, slots over blocks", 1.87
            why = "as this machine's limits say"
        yield kit.claim(what, hand, slots / paged, row.gain(SLOTS, PAGED), "x", why)
    for row in results.rows("gather", model="gpt2", dtype="float32", rows=32, context=256):
        what = "a step of 32 rows at context 256, blocks over slots"
        why = "the step is above its limit without the gather too, which is a smaller share"
        yield kit.claim(what, 1.39, slower(row), row.gain(PAGED, SLOTS), "x", why)
    for row in results.rows("prefix", model="gpt2"):
        here = row.bound(SYSTEM + OWN) / row.bound(OWN, SYSTEM)
        what, why = "first token of 544, 512 found", "a step of 32 rows is further from its limit"
        yield kit.claim(what, 15.5, here, row.gain("computed", "found"), why=why)


def chart(results: Results) -> charts.Figure:
    (row, *_) = results.rows("capacity", load="crowd")
    most = max(len(runs[-1]) for runs in row["rows"].values())
    # A line stays at 0 once its requests have ended.
    series = {name: runs[-1] + [0] * (most - len(runs[-1])) for name, runs in row["rows"].items()}
    title = "In the same memory, blocks hold many times as many sequences"
    return charts.lines(title, "step of the crowd", "sequences in it", range(most), series)


def headline(results: Results) -> Iterator[str]:
    for row in results.rows("capacity", load="crowd"):
        queued = f"{row.median(PAGED, 'queued'):.0f} sequences"
        yield f"in the memory of 4 slots, {queued}, and {row.gain(SLOTS, PAGED):.1f}x the tok/s"


if __name__ == "__main__":
    cli.run(partial(kit.main, "stage05_paged", __doc__, measure, tables))
