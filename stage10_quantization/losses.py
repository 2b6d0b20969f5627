"""Measures what fewer bits cost in words: `python -m stage10_quantization.losses`.

The formats of weights, keys and values on models that say something, beside the float model, in the
kernels that a server runs; and what the same weights lose in llama.cpp's formats, where `python -m
reports.peers` has installed it. `quality.py` has the protocols. No time is taken, so the
machine may do other work meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from reports.peers import scorer
from shared import cli, linear, models, tokenizer
from shared.bench import kit, rows
from shared.bench.claims import Claim, closing
from shared.bench.kit import Group
from shared.bench.rows import Results, Row
from shared.errors import UserError
from shared.paths import ROOT

from . import quality
from .convert import INT8 as ROWS
from .convert import Quantize
from .gptq import calibrate, windows_of
from .smoothquant import plant, smooth

KIND = "stage10_losses"
FULL = kit.plan(stories=200, windows=20, calibration=32, answer=100)
FEW = {"stories": 10, "windows": 2, "calibration": 2}
INT8, GROUPS, WEIGHT_ONLY = "int8", "int8-g32", "weights only"
HEAD = "int8-g32, a scale for each row of the head"
NEAREST, GPTQ = "int4, nearest", "int4, GPTQ"
KEYS = "keys and values in int8"
Q8_0, Q4_K_M = f"{scorer.NAME}, q8_0", f"{scorer.NAME}, q4_K_M"
UNIT = "thousandths"
LESSONS = sorted(ROOT.glob("stage0[1-7]_*/README.md"))  # text for a model of English
QUALITY = {  # what is rounded, of each model
    "stories": (
        INT8, GROUPS, NEAREST, GPTQ, KEYS, "int8, outliers", "int8, outliers, SmoothQuant"
    ),
    "stories-chat": (INT8, GROUPS, NEAREST, GPTQ, KEYS),
    "smollm2": (  # whose file is in int4: rounding to int4 again loses nothing
        INT8, "int8, SmoothQuant", f"int8, {WEIGHT_ONLY}", GROUPS, HEAD, NEAREST,
        f"int4, {WEIGHT_ONLY}", KEYS, Q8_0, Q4_K_M,
    ),
}  # fmt: skip


def judged(plan: Any) -> Iterator[Group]:
    """What each format costs in words."""
    for name, changes in QUALITY.items():
        try:
            shape = models.load(name, weights="float32")
        except UserError as error:  # the package of smollm2 is not installed
            tqdm.write(f"{name} is not judged: {error}", file=sys.stderr)
            continue
        words, is_story = tokenizer.load_tokenizer(shape.folder), name.startswith("stories")
        learnt, count = (quality.WINDOW * n for n in (plan.calibration, plan.windows))
        if is_story:
            end = quality.end_of_text(shape.config)
            learning = quality.text_ids(words, end, learnt, None, "calibration")
            ids = quality.text_ids(words, end, count, None, "judged")
        else:
            text = words.encode("\n".join(quality.read_text(str(path)) for path in LESSONS))
            ids, learning = text[:count], text[count : count + learnt]
        reference = quality.engine_of(models.load_model(shape, dtype=torch.float32))
        starts = range(0, min(len(ids), 10 * quality.WINDOW), quality.WINDOW)
        prompts = [ids[start : start + 20] for start in starts]
        for how in tqdm(changes, desc=name, unit="format", leave=False):
            if how.startswith(scorer.NAME):
                yield from peer(name, shape, how, reference, ids)
                continue
            model = models.load_model(shape, dtype=torch.float32)
            change(model, how, windows_of(learning, plan.calibration))
            engine = quality.engine_of(model, dtype=torch.int8 if how == KEYS else None)
            group: Group = {"model": name, "how": how}
            if is_story:
                group["nats"] = asdict(quality.held_out(reference, engine, words, plan.stories))
            group["divergence"] = asdict(quality.divergence(reference, engine, ids))
            places = quality.first_differences(reference, engine, prompts, plan.answer)
            yield group | {"first": places}


def peer(name: str, shape: Any, how: str, reference: Any, ids: list[int]) -> Iterator[Group]:
    """What the same weights lose in llama.cpp's format, if it is installed."""
    try:
        with scorer.scorer(shape, how.partition(", ")[2]) as engine:
            kl = asdict(quality.divergence(reference, engine, ids))
    except UserError as error:
        tqdm.write(f"{how}, {name}, is not judged: {error}", file=sys.stderr)
        return
    yield {"model": name, "how": how, "divergence": kl, "first": []}


def change(model: Any, how: str, windows: list[Any]) -> None:
    """Make of a float `model` what one of QUALITY names."""
    weights = how.partition(",")[0]
    if "outliers" in how:
        plant(model, [1, 2], 2.0**7)
    if "SmoothQuant" in how:
        smooth(model, windows)
    if "GPTQ" in how:
        calibrate(model, windows, weights)
    elif how != KEYS:
        activations = "float" if WEIGHT_ONLY in how else "int8"
        table = ROWS if how == HEAD else None
        linear.convert(model, Quantize(weights, activations, table), {})


# ---- tables -------------------------------------------------------------------------------------


def claims(results: Results) -> Iterator[Claim]:
    """What may be lost, as it was aimed at before anything was measured."""
    rows = {(row["model"], row["how"]): row for row in results.groups("judged")}

    def lost(how: str) -> float:
        nats = rows["stories", how]["nats"]
        return 1e3 * (nats["quantized"] - nats["float_model"])

    for how, name in ((INT8, INT8), (GROUPS, GROUPS), (KEYS, "keys in int8")):
        row = rows["stories", how]
        why = f"95 %: {1e3 * row['nats']['low']:+.2f} to {1e3 * row['nats']['high']:+.2f}"
        yield Claim(f"{name}: nats a token", 0.3, lost(how), UNIT, why, aim=True)
        kl = row["divergence"]
        why = f"99.9 % of the tokens are below {1e3 * kl['percentile']:.1f}"
        yield Claim(f"{name}: KL", 0.5, 1e3 * kl["mean"], UNIT, why, aim=True)
    kls = [rows["stories", how]["divergence"]["mean"] for how in (NEAREST, GPTQ)]
    why = f"of the KL: {kls[1] / kls[0]:.0%}"
    left = lost(GPTQ) / lost(NEAREST)
    yield Claim("int4: of the loss, left by GPTQ", 0.7, left, "x", why, aim=True)
    for how, other in ((INT8, Q8_0), (GROUPS, Q8_0), (NEAREST, Q4_K_M)):
        if ("smollm2", other) in rows:
            ours, theirs = (rows["smollm2", x]["divergence"]["mean"] for x in (how, other))
            what = f"{how.partition(',')[0]}, SmolLM2: KL, of {other}'s"
            why = f"{1e3 * ours:.1f} and {1e3 * theirs:.1f} thousandths"
            yield Claim(what, 1.0, ours / theirs, "x", why, aim=True)


def millinats(row: Row) -> str:
    """Of held-out stories; of the windows for a model that was not made for stories."""
    lost = dict(row["divergence"])
    if nats := row.group.get("nats"):
        lost = nats | {"difference": nats["quantized"] - nats["float_model"]}
    difference, low, high = (1e3 * lost[key] for key in ("difference", "low", "high"))
    return f"{difference:+.2f} ({low:+.2f} to {high:+.2f})"


def differs(row: Row) -> str:
    """The first token that differs, by the median of the greedy answers that differ, and how many
    do not."""
    if not row["first"]:
        return ""
    places = [place for place in row["first"] if place is not None]
    alike = f"{len(row['first']) - len(places)} of {len(row['first'])} alike"
    return f"{rows.median(places):.0f}; {alike}" if places else alike


COLUMNS: dict[str, rows.Column] = {
    "what is rounded": "how",
    "nats lost, in thousandths": millinats,
    "KL": lambda row: f"{row['divergence']['mean']:.5f}",
    "KL, 99.9 %": lambda row: f"{row['divergence']['percentile']:.4f}",
    "KL, highest": lambda row: f"{row['divergence']['highest']:.3f}",
    "same likeliest token": lambda row: f"{row['divergence']['top_1']:.2%}",
    "first token that differs": differs,
}
TABLES = rows.tables(
    COLUMNS,
    """
    quality < judged: model | what is rounded | nats lost, in thousandths | KL
      | same likeliest token
    words < words: model | what is rounded | nats lost, in thousandths | KL
      | same likeliest token
    divergence < judged: model | what is rounded | KL | KL, 99.9 % | KL, highest
      | first token that differs
    """,
    judged=lambda results: results.groups("judged"),
    words=lambda results: [
        row
        for row in results.groups("judged")
        if row["model"] == "stories"
        and "outliers" not in row["how"]
        or (row["model"], row["how"]) in (("smollm2", how) for how in (INT8, GROUPS, NEAREST))
    ],
    losses=closing(claims),
)


def headline(results: Results) -> str:
    found = {(row["model"], row["how"]): row["divergence"]["mean"] for row in results["judged"]}
    return ", ".join(
        f"{how}: KL {found[model, how]:.4f} ({model})"
        for model, how in (("stories", INT8), ("smollm2", GROUPS))
        if (model, how) in found
    )


def work(plan: Any) -> dict[str, Any]:
    return {"judged": list(judged(plan))}


BENCHMARK = kit.Benchmark(
    KIND, __doc__, FULL, work, TABLES, {}, headline, FEW, module="stage10_quantization.losses"
)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
