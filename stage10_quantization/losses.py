"""Measures what fewer bits cost in quality: `python -m stage10_quantization.losses`.

One table: the formats of weights, keys and values, beside the float model, in the kernels that a
server runs. `quality.py` has the protocols. No time is taken, so the machine may do other work
meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from shared import cli, linear, models, tokenizer
from shared.bench import kit, rows
from shared.bench.claims import Claim, closing
from shared.bench.kit import Group
from shared.bench.rows import Results, Row
from shared.errors import UserError
from shared.paths import ROOT

from . import quality
from .convert import Quantize
from .gptq import calibrate, text_ids, windows_of

KIND = "stage10_losses"
FULL = kit.plan(windows=40, calibration=32)
FEW = {"windows": 2, "calibration": 2}
INT8, GROUPS, KEYS = "int8", "int8-g32", "keys and values in int8"
NEAREST, GPTQ = "int4, nearest", "int4, GPTQ"
UNIT = "thousandths"
LESSONS = sorted(ROOT.glob("stage0[1-7]_*/README.md"))  # text for a model of English
QUALITY = {  # what is rounded, of each model
    "stories": (INT8, GROUPS, NEAREST, GPTQ, KEYS),
    "stories-chat": (INT8, GROUPS, NEAREST, GPTQ, KEYS),
    "smollm2": (INT8, GROUPS, KEYS),  # its file is in int4: rounding to int4 again loses nothing
}


def judged(plan: Any) -> Iterator[Group]:
    """What each format costs in quality."""
    for name, changes in QUALITY.items():
        try:
            shape = models.load(name, weights="float32")
        except UserError as error:  # the package of smollm2 is not installed
            tqdm.write(f"{name} is not judged: {error}", file=sys.stderr)
            continue
        words, is_story = tokenizer.load_tokenizer(shape.folder), name.startswith("stories")
        learnt, count = (quality.WINDOW * n for n in (plan.calibration, plan.windows))
        if is_story:
            end = shape.config.eos_ids[-1]  # a chat model's first ends a turn
            learning = text_ids(words, end, learnt, None, "calibration")
            ids = text_ids(words, end, count, None, "judged")
        else:
            text = words.encode("\n".join(path.read_text("utf-8") for path in LESSONS))
            ids, learning = text[:count], text[count : count + learnt]
        reference = quality.engine_of(models.load_model(shape, dtype=torch.float32))
        for how in tqdm(changes, desc=name, unit="format", leave=False):
            model = models.load_model(shape, dtype=torch.float32)
            if how == GPTQ:
                calibrate(model, windows_of(learning, plan.calibration), "int4")
            elif how != KEYS:
                linear.convert(model, Quantize(how.partition(",")[0]), {})
            engine = quality.engine_of(model, dtype=torch.int8 if how == KEYS else None)
            loss = asdict(quality.divergence(reference, engine, ids))
            yield {"model": name, "how": how, "loss": loss}


def claims(results: Results) -> Iterator[Claim]:
    """What the lesson aims at on the embedded model: no law gives these figures."""
    losses = {
        row["how"]: 1e3 * row["loss"]["difference"]
        for row in results.groups("judged", model="stories")
    }
    for how, most in ((INT8, 0.3), (KEYS, 0.3)):
        yield Claim(f"{how}: nats lost", most, losses[how], UNIT, "the aim", aim=True)
    left = losses[GPTQ] / losses[NEAREST]
    yield Claim("int4: of the loss, left by GPTQ", 0.7, left, "x", "the aim", aim=True)


def millinats(row: Row) -> str:
    difference, low, high = (1e3 * row["loss"][key] for key in ("difference", "low", "high"))
    return f"{difference:+.2f} ({low:+.2f} to {high:+.2f})"


COLUMNS: dict[str, rows.Column] = {
    "what is rounded": "how",
    "nats lost, in thousandths": millinats,
    "KL": lambda row: f"{row['loss']['kl']:.5f}",
    "same likeliest token": lambda row: f"{row['loss']['top_1']:.2%}",
}
TABLES = rows.tables(
    COLUMNS,
    """
    quality < judged: model | what is rounded | nats lost, in thousandths | KL
      | same likeliest token
    """,
    judged=lambda results: results.groups("judged"),
    losses=closing(claims),
)


def headline(results: Results) -> str:
    found = {(row["model"], row["how"]): row["loss"]["kl"] for row in results["judged"]}
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
