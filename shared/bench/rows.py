"""Results as rows and rows as tables: every report's numbers come through here.

A benchmark's results are lists of groups, one list per case. A group is what was measured together:
a workload on a model in a dtype. Each field that differs between the engines (or layers, or caches)
that ran it in turn is a mapping by variant:

    {"model": "gpt2", "dtype": "float32", "lengths": [[64, 32, 1], ...],
     "seconds": {"ours": [...], ...}, "passes": {"ours": 32, ...}, "proof": {"ours": {...}, ...}}

A `Row` is a group as one of its variants sees it. A table is a choice of rows and a list of
columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from shared import measure, models
from shared.config import Config
from shared.measure import Summary, summarize
from shared.roofline import Cost

# What fills a column: a key and a format ("passes:,", "bytes * 1e-6:.1f"), or a function of a row.
# A heading that is not declared is its own key; "naive, ms" is the variant "naive" in ms.
Column = str | Callable[[Any], Any]
NUMBER = re.compile(r"|inf|[\d.,]+[%x]?( (\(|to ).*)?")  # right-aligned cells


def is_peer(variant: str) -> bool:
    return variant.startswith("transformers")


def median(values: Iterable[float]) -> float:
    return summarize(list(values)).median


def percentile(values: Sequence[float], share: float) -> float:
    """The least of `values` that this share of them does not exceed: always a measured value."""
    return float(np.percentile(values, 100 * share, method="inverted_cdf"))


def milliseconds(seconds: Iterable[float], digits: int = 1) -> str:
    """The median and range of some seconds, in ms."""
    return summarize([value * 1e3 for value in seconds]).show(digits)


class Row:
    """A group, as one of its variants sees it; "" is the group as a whole."""

    def __init__(self, results: Results, group: Mapping[str, Any], variant: str = "") -> None:
        self.results, self.group, self.variant = results, group, variant
        self.kind: torch.dtype = getattr(torch, group.get("dtype", "float32"))
        self.limits = results.beside(group.get("beside", {}))
        self.bandwidth = self.limits.bandwidth_gb_s * 1e9  # bytes per second of the machine
        # Tokens of prompt and answer of each request, and those of all answers.
        self.lengths = [pair for *pair, times in group.get("lengths", ()) for _ in range(times)]
        self.requests, self.tokens = len(self.lengths), sum(answer for _, answer in self.lengths)

    def __getitem__(self, key: str) -> Any:
        value = self.group[key]
        by_variant = isinstance(value, dict) and self.variant in value
        return value[self.variant] if by_variant else value

    def of(self, variant: str) -> Row:
        """The same group, as another variant sees it."""
        return Row(self.results, self.group, variant)

    @property
    def variants(self) -> list[Row]:
        return [self.of(name) for name in self.group["seconds"]]

    @property
    def config(self) -> Config:
        return models.presets()[self["model"]]

    @property
    def median(self) -> float:
        """Seconds."""
        return median(self["seconds"])

    @property
    def ms(self) -> str:
        return milliseconds(self["seconds"])

    @property
    def rate(self) -> Summary:
        """Tokens of answers per second."""
        return summarize(self["seconds"]).of(self.tokens)

    def gain(self, slow: str, fast: str) -> float:
        """The speedup of the variant `fast` over the variant `slow`."""
        return self.of(slow).median / self.of(fast).median

    def least(self, passes: Iterable[Cost]) -> float:
        """The least seconds that some passes can take, by the machine's limits."""
        return sum(cost.seconds(self.limits, self.kind) for cost in passes)

    @property
    def peak(self) -> float:
        """FLOP/s of the machine in this dtype."""
        return self.limits.gflops[self["dtype"]] * 1e9

    @property
    def proof(self) -> str:
        """How many tokens were compared, and how many of them only tie with the oracle's; for a
        group as a whole, those of the last variant."""
        proof = self["proof"]
        proof = proof if "tokens" in proof else [*proof.values()][-1]
        ties = f"{proof['near_ties']} near tie{'s' if proof['near_ties'] > 1 else ''}"
        but = f" but {ties} (gap up to {proof['widest_gap']:.1g})" if proof["near_ties"] else ""
        return f"all {proof['tokens']}{but}"

    def alike(self, other: str, name: str) -> str:
        """The proof, where there is one, and how many answers equal those of the variant
        `other`."""
        proof = self.proof if self.variant in self.group["proof"] else ""
        if self.variant == other:
            return proof
        same = f"{self['same']} of {self.requests} answers as {name}"
        return f"{proof}; {same}" if proof else same


class Results:
    """What `measure.load` read of one benchmark, or what a run has just measured.

    assumed: the limits of another machine, for predictions.
    """

    def __init__(self, content: Mapping[str, Any], assumed: measure.Limits | None = None) -> None:
        self.content, self.assumed = content, assumed
        self.plan: Mapping[str, Any] = content["configuration"].get("plan", {})
        self.limits = assumed or measure.Limits(**content["limits"])

    def beside(self, seen: Mapping[str, Any]) -> measure.Limits:
        """The machine's limits as a ruler saw them: the means of before and after. Those of the
        whole run, if it saw none."""
        if self.assumed or not seen:
            return self.limits
        means = {name: (seen["before"][name] + seen["after"][name]) / 2 for name in seen["before"]}
        return replace(self.limits, bandwidth_gb_s=means.pop("memory"), gflops=means)

    def __getitem__(self, case: str) -> Any:
        return self.content["results"][case]

    def groups(self, case: str, /, **where: Any) -> list[Row]:
        """The groups of a case whose fields have the given values; none if this run is older than
        the case."""
        rows = [Row(self, group) for group in self.content["results"].get(case, ())]
        return [row for row in rows if all(row[key] == value for key, value in where.items())]

    def rows(self, case: str, /, **where: Any) -> list[Row]:
        """The same groups, once for each variant that was timed."""
        return [row for group in self.groups(case, **where) for row in group.variants]


# ---- columns and tables -------------------------------------------------------------------------


def fill(row: Any, heading: str, columns: Mapping[str, Column]) -> str:
    """One cell. A heading that is not declared is a variant in one of UNITS, or a key."""
    variant, _, unit = heading.partition(", ")
    units = UNITS if isinstance(row, Row) else {}
    column = columns.get(heading) or (units[unit](variant) if unit in units else heading)
    if not isinstance(column, str):
        return str(column(row))
    key, _, form = column.partition(":")
    key, _, factor = key.partition(" * ")
    keyed = isinstance(row, Mapping) or (isinstance(row, Row) and not hasattr(row, key))
    value = row[key] if keyed else getattr(row, key)
    return format(value * float(factor) if factor else value, form)


def table(
    rows: Iterable[Any], header: str = "", columns: Mapping[str, Column] | None = None
) -> str:
    """Markdown: a line for each row. `header` names the columns: "dtype | tok/s". Without it, rows
    are mappings from the names to their cells."""
    rows = list(rows)
    header = header or " | ".join(rows[0] if rows else ())
    names = header.split(" | ")
    cells = [[fill(row, name, columns or {}) for name in names] for row in rows]
    right = [all(map(NUMBER.fullmatch, column)) for column in zip(*cells, strict=True)]
    marks = ["--:" if number else "---" for number in right] or ["---"] * len(names)
    lines = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([f"| {header} |", f"|{'|'.join(marks)}|", *lines])


Draw = Callable[[Results], str]
Picture = Callable[[Results], Figure]


def first(case: str, **where: Any) -> Callable[[Results], list[Row]]:
    """A source: the groups of a case in its first model and dtype, with the given values."""

    def source(results: Results) -> list[Row]:
        about = {key: results[case][0][key] for key in ("model", "dtype")}
        return results.groups(case, **about, **where)

    return source


def tables(columns: Mapping[str, Column], declared: str, **sources: Any) -> dict[str, Draw]:
    """Tables by name, one per line: "name < source: heading | heading". The source, by default the
    name itself, is a case, or one of `sources`: a function from results to rows. A line that begins
    with | continues the one before. With the column "engine" a group gets a line for each variant.

    Sources without headings give markdown, or mappings from headings to cells.
    """
    known = COLUMNS | dict(columns)

    def markdown(source: Any, header: str, results: Results) -> str:
        select = results.rows if "engine" in header.split(" | ") else results.groups
        rows = source(results) if callable(source) else select(source)
        return rows if isinstance(rows, str) else table(rows, header, known if header else {})

    drawn: dict[str, Draw] = {}
    rest = dict.fromkeys(sources, "")
    for line in re.sub(r"\n\s*\|", " |", declared).strip().splitlines():
        name, header = line.strip().split(": ", 1)
        name, _, source = name.partition(" < ")
        rest.pop(source or name, None)
        drawn[name] = partial(markdown, sources.get(source or name, source or name), header)
    return drawn | {name: partial(markdown, sources[name], header) for name, header in rest.items()}


def gain(
    base: str, predicted: Callable[[Row], float] | None = None, variant: str = ""
) -> Callable[[Row], str]:
    """The speedup of a row, or of the `variant` of its group, over the variant `base`; in brackets,
    the speedup by the predicted seconds."""

    def text(row: Row) -> str:
        fast = variant or row.variant
        measured = f"{row.gain(base, fast):.2f}x"
        if predicted is None or is_peer(fast):
            return measured
        return f"{measured} ({predicted(row.of(base)) / predicted(row.of(fast)):.2f}x)"

    return text


def ms(variant: str, digits: int = 1) -> Callable[[Row], str]:
    return lambda row: milliseconds(row.of(variant)["seconds"], digits)


# Headings that need no declaration: "naive, ms" is the variant "naive" in ms.
UNITS: dict[str, Callable[[str], Column]] = {
    "ms": ms,
    "us": lambda variant: lambda row: f"{row.of(variant).median * 1e6:,.0f}",
    "tok/s": lambda variant: lambda row: row.of(variant).rate.show(),
}


def limits_of(least: Callable[[Row], float]) -> dict[str, Column]:
    """Columns with the machine's limit, by the least seconds of an engine's passes."""
    return {
        "limit, tok/s": lambda row: f"{row.tokens / least(row):,.1f}",
        "seconds, limit": lambda row: (
            summarize(row["seconds"]).show(2)
            + ("" if is_peer(row.variant) else f", {least(row):.2f}")
        ),
    }


def whole(key: str) -> Callable[[Mapping[str, Any]], str]:
    """Rounded, or nothing where there is no number."""
    return lambda row: "" if row[key] is None else f"{row[key]:,.0f}"


COLUMNS: dict[str, Column] = {
    "engine": "variant",
    "prompt": lambda row: row.lengths[0][0],
    "answer": lambda row: row.lengths[0][1],
    "context": "context:,",
    "tok/s": lambda row: row.rate.show(),
    "cache, MB": "bytes * 1e-6:,.0f",
    "same tokens": "proof",
    "share of time": "share:.0%",
    "operator": lambda operator: f"`{operator['operator']}`",
    "rows x in -> out": lambda operator: operator["product"] or "",
    "weights, GB/s": whole("gb_s"),
    "GFLOP/s": whole("gflops"),
}
OPERATORS = "share of time | operator | rows x in -> out | kind | weights, GB/s | GFLOP/s"


def operators(results: Results) -> str:
    """Where the time went, for each group of "profile": its title, and its dominant operators."""
    texts = []
    for group in results.groups("profile"):
        title = [f"{group['title']}:"] if group["title"] else []
        texts += [*title, table(group["operators"], OPERATORS, COLUMNS)]
    return "\n\n".join(texts)


def limits(results: Results) -> str:
    """The machine, and its limits as they were measured in the same run: at its start, and beside
    the groups that it measured."""
    content, machine, speeds = results.content, results.content["machine"], results.limits
    cpus = f"{machine['cpus']} CPU{'s' if machine['cpus'] > 1 else ''}"
    size, version = f"{machine['memory_gib']:.0f} GiB", f"torch {content['versions']['torch']}"
    rates = [f"{rate:,.0f} GFLOP/s in {dtype}" for dtype, rate in speeds.gflops.items()]
    name = f"{machine['processor']}{' with AVX2' * (machine.get('instructions') == 'AVX2')}"
    cells = {"machine": f"{name}, {cpus}, {size}, {version}"}
    cells |= {"threads": content["threads"], "reads memory at": f"{speeds.bandwidth_gb_s:.0f} GB/s"}
    cells["multiplies matrices at"] = ", ".join(rates)
    return "\n\n".join([table([cells]), *steadiness(results)])


def steadiness(results: Results) -> list[str]:
    """What memory and arithmetic gave beside the groups, and which were measured again."""
    cases = results.content["results"]
    listed = [case for case in cases.values() if isinstance(case, list)] if cases else []
    seen = [group["beside"] for case in listed for group in case if "beside" in group]
    if not seen:
        return []

    def span(name: str) -> str:
        values = [beside[when][name] for beside in seen for when in ("before", "after")]
        return f"{min(values):,.0f} to {max(values):,.0f}"

    again = sum(beside["attempts"] > 1 for beside in seen)
    unsteady = sum(beside["moved"] > measure.MOVED for beside in seen)
    return [
        f"Beside the {len(seen)} measurements memory gave {span('memory')} GB/s, and arithmetic "
        f"{span('float32')} GFLOP/s in float32, {span('bfloat16')} in bfloat16. {again} saw "
        f"one of these move by more than {measure.MOVED:.0%} and were made again, at most "
        f"{measure.ATTEMPTS} times; in {unsteady} it moved that much every time. A share of the "
        "limit divides by what was measured beside it."
    ]
