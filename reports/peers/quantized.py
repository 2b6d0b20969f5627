"""Weights of 8 and 4 bits, ours beside other engines': `python -m reports.peers.quantized`.

Measured as in `compare`, keys and values in 16 bits. Each engine has its own format, so answers
differ: ours are proved by the slow layers of the same format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from shared import cli, models
from shared.bench import kit, rows
from shared.bench.rows import Results, Row
from stage10_quantization.convert import Quantize

from . import compare
from .compare import rate, what
from .install import QUANTIZED

KIND, NAME = "peers_quantized", "reports.peers.quantized"
FULL = replace(
    compare.FULL, dtypes=("bfloat16",), engines=tuple(QUANTIZED), rounds=(5, 5, 3), tries=1,
    answers=((1, 64), (32, 32)), load=None,
)  # fmt: skip
FEW = {"answers": ((1, 16), (8, 8))}
INT8, INT4 = "int8", "int4"
BITS = {INT8: "8", INT4: "4"}  # what the names of engines have in common
ONE, MANY, PROMPT = "one row", "many rows", "prompt"
AIMS = (  # the rate of ours over that of the fastest other engine, at least
    (INT8, ONE, 1.3), (INT8, MANY, 1.2), (INT8, PROMPT, 1.0), (INT4, ONE, 1.3), (INT4, MANY, 1.0),
)  # fmt: skip
SHARE = 0.85  # of what the memory gives, at one row


def prove(groups: list[kit.Group], model: str, dtype: str) -> None:
    """Prove our answers, in "proof", by the slow layers of the same format."""
    place = str(compare.checkpoint(model))
    for name in {name for group in groups for name in group["proof"]}:
        shape = models.load(place)
        weights, activations = QUANTIZED[name].options[1:]
        shape.conversion = Quantize(weights, activations)
        subject = kit.Subject(shape, getattr(torch, dtype))
        for proof in [group["proof"] for group in groups if name in group["proof"]]:
            proof[name] = subject.prove(proof[name])


# ---- tables -------------------------------------------------------------------------------------


def kind(row: Row) -> str:
    ((_, answer, count),) = row["lengths"]
    return PROMPT if answer == 1 else MANY if count > 1 else ONE


def size(row: Row) -> int:
    """Bytes of the engine's weights."""
    return int(row.results["bytes"][row.variant])


def engines(bits: str, results: Results) -> list[dict[str, str]]:
    """A line per engine, a column per cell. An engine that failed is named with the reason."""
    groups, lines = results.groups("cells"), []
    reasons = {failure["engine"]: failure["reason"] for failure in results["failed"]}
    for name in [name for name in results.plan["engines"] if BITS[bits] in name]:
        line = {"engine": f"{name}: {reasons[name]}" if name in reasons else name}
        bytes = results["bytes"].get(name)
        line["weights, MB"] = f"{bytes / 1e6:,.0f}" if bytes else ""
        for group in groups:
            there = name in group.group["seconds"]
            line[what(group)] = rate(group.of(name)).show(0) if there else ""
        lines.append(line)
    return lines


def share(row: Row) -> float:
    """Of what the memory gives at best, in a decode step: weights, keys and values."""
    ((length, answer, count),) = row["lengths"]
    cached = count * (length + answer / 2) * row.config.kv_bytes_per_token(row.kind)
    most = 1e9 * max(row.results.limits.bandwidth_gb_s, *row["bandwidth"])
    return (size(row) + cached) * rate(row).median / count / most


def against(bits: str, row: Row) -> list[tuple[Row, float]]:
    """The other engines with weights of so many bits, the fastest first, and our rate over
    theirs."""
    mine = rate(row.of(f"ours, {bits}")).median
    rivals = [rival for rival in compare.others(row) if BITS[bits] in rival.variant]
    return [(rival, mine / rate(rival).median) for rival in rivals]


def aims(results: Results) -> Iterator[dict[str, str]]:
    """What was aimed at before anything was measured."""

    def line(aim: str, least: str, measured: str, held: bool) -> dict[str, str]:
        result = "held" if held else "**missed**"
        return {"aim": aim, "at least": least, "measured": measured, "result": result}

    rows = {kind(row): row for row in results.groups("cells")}
    for bits, which, least in AIMS:
        mine = rows[which].of(f"ours, {bits}")
        for rival, ratio in against(bits, mine)[:1]:
            aim = f"{bits}, {what(mine)}: over {rival.variant}"
            yield line(aim, f"{least:.2f}x", f"{ratio:.2f}x", ratio >= least)
        if which != ONE:
            continue
        for rival, ratio in against(bits, mine) if bits == INT4 else []:
            ratio *= size(mine) / size(rival)
            aim = f"{bits}, {what(mine)}: over {rival.variant}, at equal bytes"
            yield line(aim, f"{least:.2f}x", f"{ratio:.2f}x", ratio >= least)
        aim = f"{bits}, {what(mine)}: of the memory's bandwidth"
        yield line(aim, f"{SHARE:.0%}", f"{share(mine):.0%}", share(mine) >= SHARE)


def proved(row: Row) -> str:
    """The proofs of all formats together."""
    together = kit.together(row.group["proof"].values())
    return Row(row.results, {**row.group, "proof": together}).proof


def headline(results: Results) -> str:
    (row,) = [row for row in results.groups("cells") if kind(row) == ONE]
    best = {bits: against(bits, row)[:1] for bits in BITS}
    return "one row: " + ", ".join(
        f"{bits} {ratio:.2f}x {rival.variant}" for bits in BITS for rival, ratio in best[bits]
    )


TABLES = rows.tables(
    compare.COLUMNS | {"ours proved": proved},
    """
    conditions < cells: what | memory, GB/s | arithmetic, GFLOP/s | other programs took
      | ours proved
    """,
    int8=partial(engines, INT8),
    int4=partial(engines, INT4),
    aims=aims,
)
WORK = partial(compare.run, prove=prove)
BENCHMARK = kit.Benchmark(KIND, __doc__, FULL, WORK, TABLES, {}, headline, FEW, NAME)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
