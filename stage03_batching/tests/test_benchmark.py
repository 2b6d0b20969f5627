"""The benchmark measures a tiny model through and through, and what it says of batches is arithmetic."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tqdm import tqdm

from shared import charts, checkpoint, measure, roofline
from shared.bench import benchmarks
from shared.checkpoint import PRESETS, Checkpoint
from stage03_batching import benchmark

TINY = {
    "MODEL": "tiny", "PROMPT": 6, "TOKENS": 4, "BATCHES": (1, 2, 4), "WIDE": 8, "WIDE_TOKENS": 3, "PEERS": {2: 1, 3: 1},
    "SINGLE": {1: 1, 4: 1}, "WASTE_ROWS": 4, "SHORT": 3, "LONG_ANSWER": 12, "LONG_PROMPT": 20, "PROFILE": (2, 2, 4),
}  # fmt: skip
LIMITS = measure.Limits("cpu", 1, 30.0, {"float32": 100.0, "bfloat16": 200.0})


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TINY.items():
            patch.setattr(benchmark, name, value)
        patch.setattr(measure, "limits", lambda **_: LIMITS)
        measured = benchmarks.unsaved(*benchmark.run(quick=False))
    return json.loads(json.dumps(measured, allow_nan=False))  # as it will be read back


def test_every_table_is_whole(results: dict[str, Any]) -> None:
    found = benchmark.tables(results)
    assert list(found) == ["limits", "scaling", "peers", "win", "null", "waste", "profile"]
    for name, text in found.items():
        for block in text.split("\n\n"):
            if block.startswith("|"):
                assert len({line.count("|") for line in block.splitlines()}) == 1, name
    rows = {name: len(text.splitlines()) - 2 for name, text in found.items()}
    assert (rows["scaling"], rows["peers"], rows["win"], rows["null"], rows["waste"]) == (
        2 * 4,
        2 * 2 * 4,
        2,
        2,
        4,
    )


def test_every_chart_is_drawn_and_the_headline_has_its_number(results: dict[str, Any]) -> None:
    drawn = benchmark.charts(results)
    assert list(drawn) == ["roofline", "scaling", "waste"]
    for function in drawn.values():
        assert charts.render(function()).endswith(b"</svg>\n")
    assert benchmark.headline(results).startswith("4 prompts as one batch: ")


def test_each_batch_and_its_cache_are_what_they_claim_to_be(results: dict[str, Any]) -> None:
    for row in results["results"]["scaling"]:
        new = 3 if row["batch"] == 8 else 4
        assert row["tokens"] == new and {len(run) for run in row["decode"]} == {new - 1}
        each = PRESETS["tiny"].kv_bytes_per_token(getattr(torch, row["dtype"]))
        assert row["cache_bytes"] == row["batch"] * (6 + new - 1) * each
        assert row["proof"]["tokens"] == row["batch"] * new


def test_transformers_says_the_same_in_float32(results: dict[str, Any]) -> None:
    for row in results["results"]["peers"]:
        if row["dtype"] == "float32":
            assert set(row["same"].values()) == {row["batch"]}


def test_waste_is_counted_as_arithmetic_counts_it(results: dict[str, Any]) -> None:
    found = {row["case"]: row for row in results["results"]["waste"]}
    # 4 rows of 3 tokens, 11 passes of 4 rows, and 3 of the rows end with the third token: nobody needs their last 9 passes.
    answers = found["one long answer"]
    assert (answers["passes"], answers["wasted"], answers["useful"]) == (
        12,
        3 * 9,
        4 * 3 + 3 * 2 + 11,
    )
    # 3 prompts of 3 beside one of 20, then 2 passes.
    prompts = found["one long prompt"]
    assert (prompts["passes"], prompts["wasted"], prompts["useful"]) == (3, 3 * 17, 29 + 2 * 4)
    assert sum(new for _, new in found["equal answers"]["lengths"]) == 3 * 3 + 12
    assert sum(prompt for prompt, _ in found["equal prompts"]["lengths"]) == 3 * 3 + 20


def test_the_cost_of_a_batch_reads_the_weights_once_and_each_rows_cache() -> None:
    config = PRESETS["gpt2"]
    one, many = (roofline.forward_cost(config, torch.float32, 1, 79, rows=rows) for rows in (1, 32))
    assert many.flops == 32 * one.flops
    assert many.bytes - one.bytes == 31 * 79 * config.kv_bytes_per_token(torch.float32)
    assert (one.bound(LIMITS, torch.float32), many.bound(LIMITS, torch.float32)) == (
        "memory",
        "compute",
    )


def test_a_wrong_token_stops_the_benchmark(tiny: Checkpoint) -> None:
    subject = benchmark.Subject(tiny, torch.float32)
    outputs = subject.engine.generate(subject.prompts(3, 5), benchmark.greedy(6))
    assert subject.prove(outputs)["tokens"] == 18
    assert (
        subject.prove(subject.engine.generate(subject.prompts(3, 5), benchmark.greedy(2)))["tokens"]
        == 6
    )
    outputs[1].token_ids[4] = (outputs[1].token_ids[4] + 1) % tiny.config.vocab_size
    with pytest.raises(AssertionError, match="below the best"):
        subject.prove(outputs)


def test_a_quick_run_is_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is measured and how often; nothing runs."""
    monkeypatch.setattr(measure, "limits", lambda **_: LIMITS)
    monkeypatch.setattr(checkpoint, "load", lambda *_, **__: None)
    monkeypatch.setattr(benchmark, "DTYPES", ())
    configuration, _, _ = benchmark.run(quick=True)
    assert configuration["repeats"] == {
        "scaling": 1,
        "single": {1: 2, 8: 1},
        "peers": {8: 2},
        "waste": 1,
    }


def test_a_batch_that_does_not_fit_into_memory_is_left_out(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert benchmark.fits(PRESETS["gpt2"], torch.float32, 1, 8)
    assert not benchmark.fits(PRESETS["gpt2"], torch.float32, 10**7, 8)
    monkeypatch.setattr(benchmark, "PROMPT", 6)
    monkeypatch.setattr(benchmark, "fits", lambda *_: False)
    subject = benchmark.Subject(tiny, torch.float32)
    found = benchmark.measure_scaling(subject, (1, 2), 8, 4, 1, tqdm(disable=True))
    assert [row["batch"] for row in found] == [1, 2]
