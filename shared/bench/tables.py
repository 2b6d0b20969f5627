"""What the tables of all stages have in common: how a median is shown, the machine's limits, the dominant operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import measure


def label(dtype: torch.dtype) -> str:
    """The dtype without its module: float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


def median(values: Sequence[float]) -> float:
    return measure.summarize(values).median


def milliseconds(seconds: Sequence[float], digits: int = 1) -> str:
    """The median of some seconds, and their range, in ms."""
    return measure.summarize([value * 1e3 for value in seconds]).show(digits)


def limits_of(results: Mapping[str, Any]) -> measure.Limits:
    """The machine's limits, as they were measured in the same run."""
    return measure.Limits(**results["limits"])


def limits_table(results: Mapping[str, Any]) -> str:
    machine, limits, torch_version = (
        results["machine"],
        limits_of(results),
        results["versions"]["torch"],
    )
    cpus = f"{machine['cpus']} CPU{'s' if machine['cpus'] > 1 else ''}"
    rates = ", ".join(f"{rate:,.0f} GFLOP/s in {dtype}" for dtype, rate in limits.gflops.items())
    return (
        "| machine | threads | reads memory at | multiplies matrices at |\n|---|--:|--:|--:|\n"
        f"| {machine['processor']}, {cpus}, {machine['memory_gib']:.0f} GiB, torch {torch_version} "
        f"| {results['threads']} | {limits.bandwidth_gb_s:.0f} GB/s | {rates} |"
    )


def profile_table(found: Sequence[Mapping[str, Any]]) -> str:
    """Dominant operators, as `profile.profile` finds them."""
    lines = [
        "| share of time | operator | rows x in -> out | kind | weights, GB/s | GFLOP/s |",
        "|--:|---|---|---|--:|--:|",
    ]
    for each in found:
        rates = [
            f"{each[name]:.0f}" if each[name] is not None else "" for name in ("gb_s", "gflops")
        ]
        name = f"`{each['operator']}`"
        lines.append(
            f"| {each['share']:.0%} | {name} | {each['product'] or ''} | {each['kind']} | {rates[0]} | {rates[1]} |"
        )
    return "\n".join(lines)
