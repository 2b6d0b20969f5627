"""The benchmark measures a tiny model through and through, its workload is worth measuring, and its predictions are exact
where they count passes."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shared import charts, measure, roofline
from shared.bench import benchmarks
from shared.checkpoint import PRESETS, Checkpoint
from shared.parity import random_prompt
from shared.peers import TransformersContinuous, transformers_greedy, transformers_model
from stage02_kv_cache.benchmark import greedy
from stage03_batching import benchmark as static_benchmark
from stage04_continuous import benchmark, timeline
from stage04_continuous.benchmark import (
    FULL,
    OURS,
    QUICK,
    SINGLE,
    STATIC,
    WHOLE,
    Part,
    Plan,
    simulate,
    workload,
)
from stage04_continuous.engine import Engine
from stage04_continuous.scheduler import Scheduler

TINY = Plan(
    model="tiny", requests=9, slots=3, budget=8, prompts=(2, 6), answers=(2, 20), middle=5, win_repeats=1, win_peer_repeats=1,
    equal_slots=(2, 4), equal_prompt=3, equal_answer=4, equal_repeats=2, equal_peer_repeats=1,
    single_prompt=4, single_answer=3, single_repeats=1,
    neighbours=2, neighbours_prompt=4, before=3, after=9, long_prompt=30, long_answer=2, chunks=(6, 16), chunk_repeats=1,
    gantt_slots=2, gantt_steps=12,
)  # fmt: skip
LIMITS = measure.Limits("cpu", 1, 30.0, {"float32": 100.0, "bfloat16": 200.0})


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """`transformers` collects garbage at the end of each batching, among all that a process full of tests has loaded: a second
    each time. What is there already need not be looked at."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "FULL", TINY)
        patch.setattr(static_benchmark, "PROMPT", 6)
        patch.setattr(measure, "limits", lambda **_: LIMITS)
        measured = benchmarks.unsaved(*benchmark.run(quick=False))
    return json.loads(json.dumps(measured, allow_nan=False))  # as it will be read back


def test_every_table_is_whole(results: dict[str, Any]) -> None:
    found = benchmark.tables(results)
    assert list(found) == ["limits", "win", "null", "lose", "chunking", "overhead", "peers"]
    for name, text in found.items():
        for block in text.split("\n\n"):
            assert len({line.count("|") for line in block.splitlines()}) == 1, name
    rows = {name: len(text.split("\n\n")[0].splitlines()) - 2 for name, text in found.items()}
    assert (
        rows["win"],
        rows["null"],
        rows["lose"],
        rows["chunking"],
        rows["overhead"],
        rows["peers"],
    ) == (3, 8, 6, 8, 4, 16)


def test_every_chart_is_drawn_and_the_headline_has_its_number(results: dict[str, Any]) -> None:
    drawn = benchmark.charts(results)
    assert list(drawn) == ["gantt", "occupancy", "chunking"]
    for function in drawn.values():
        assert charts.render(function()).endswith(b"</svg>\n")
    assert "x static batching where answers differ in length: " in benchmark.headline(results)


def test_answers_of_the_winning_workload_differ_in_length() -> None:
    """Were all answers as long, every batch would end at once, and continuous batching could not show anything."""
    for plan in (FULL, QUICK):
        lengths = workload(plan)
        answers = sorted(count for _, count in lengths)
        assert lengths == workload(plan) and len(lengths) == plan.requests
        assert plan.answers[0] <= answers[0] and answers[-1] <= plan.answers[1]
        assert len(set(answers)) > plan.requests / 3
        assert (
            answers[-1] > 4 * answers[len(answers) // 2]
        )  # the longest, and the one in the middle
        assert all(plan.prompts[0] <= prompt <= plan.prompts[1] for prompt, _ in lengths)
        batches = [lengths[at : at + plan.slots] for at in range(0, plan.requests, plan.slots)]
        static = sum(max(count for _, count in batch) for batch in batches)
        assert static > 1.5 * len(
            simulate(Scheduler(plan.slots, plan.budget), [(0, *each) for each in lengths])
        )
    answers = [count for _, count in workload(FULL)]
    assert 80 < sum(answers) / len(answers) < 120


def test_both_engines_ran_the_same_requests_and_every_answer_was_proved(
    results: dict[str, Any],
) -> None:
    for row in results["results"]["win"] + results["results"]["equal"]:
        tokens = sum(count for _, count in row["lengths"])
        assert {row["proof"][name]["tokens"] for name in (STATIC, OURS)} == {tokens}
        if row["dtype"] == "float32":
            assert set(row["same"].values()) == {
                len(row["lengths"])
            }  # transformers says the same too
    for row in results["results"]["single"]:
        assert {each["tokens"] for each in row["proof"].values()} == {TINY.single_answer}
    for row in results["results"]["chunking"]:
        assert (
            row["proof"]["tokens"]
            == TINY.neighbours * (1 + TINY.before + TINY.after) + TINY.long_answer
        )


def test_the_cache_of_both_has_room_for_as_much(results: dict[str, Any]) -> None:
    (row,) = results["results"]["win"]
    each = PRESETS["tiny"].kv_bytes_per_token(torch.float32)
    assert row["slot_tokens"] == max(sum(lengths) for lengths in row["lengths"])
    assert row["cache_bytes"][OURS] == row["slots"] * row["slot_tokens"] * each
    assert (
        row["cache_bytes"][STATIC]
        <= row["cache_bytes"][OURS] + row["slots"] * TINY.prompts[1] * each
    )


def test_passes_are_predicted_to_the_last_one(results: dict[str, Any]) -> None:
    for row in results["results"]["win"] + results["results"]["equal"]:
        for name in (STATIC, OURS):
            assert benchmark.predicted(results, row, name)[0] == row["passes"][name]


def test_occupancy_counts_places_that_worked(results: dict[str, Any]) -> None:
    for row in results["results"]["equal"]:
        assert [benchmark.occupancy(row, name) for name in (STATIC, OURS)] == [1, 1]
    (row,) = results["results"]["win"]
    for name in (STATIC, OURS):
        assert sum(rows * times for rows, times in row["rows"][name]) == row["busy"][name]
        assert sum(times for _, times in row["rows"][name]) == row["passes"][name]
    assert row["busy"][STATIC] == sum(
        count for _, count in row["lengths"]
    )  # a row is alive once for each of its tokens


def test_no_pass_of_the_winning_run_has_an_empty_slot_while_somebody_waits(
    tiny: Checkpoint,
) -> None:
    lengths = workload(TINY)
    passes = simulate(Scheduler(TINY.slots, 64), [(0, *each) for each in lengths])
    admitted = 0
    for parts in passes:
        admitted = max([admitted, *(part.request + 1 for part in parts)])
        assert len(parts) == TINY.slots or admitted == len(lengths)


def test_equal_requests_take_as_many_passes_in_both_stages() -> None:
    passes = simulate(Scheduler(4, 4 * 3), [(0, 3, 5)] * 4)
    assert [[(part.cached, part.count) for part in parts] for parts in passes] == [[(0, 3)] * 4] + [
        [(n, 1)] * 4 for n in range(3, 7)
    ]


def test_a_packed_pass_reads_the_weights_once_and_each_cache() -> None:
    config, kind = PRESETS["gpt2"], torch.float32
    one = roofline.forward_cost(config, kind, 1, 79)
    many = benchmark.pass_cost(config, kind, [Part(row, 79, 1, True) for row in range(32)])
    assert many == roofline.forward_cost(config, kind, 1, 79, rows=32)
    mixed = benchmark.pass_cost(config, kind, [Part(0, 79, 1, True), Part(1, 128, 64, False)])
    chunk = roofline.forward_cost(config, kind, 64, 128, sampled=0)
    assert mixed.flops == one.flops + chunk.flops
    assert mixed.bytes == one.bytes + 128 * config.kv_bytes_per_token(kind)


def test_a_long_prompt_is_run_as_its_name_says(results: dict[str, Any]) -> None:
    """In pieces of 6 it takes 5 passes, and the whole one holds the neighbours up in a single pass."""
    for name, count in {"6": 5, "16": 2, WHOLE: 1}.items():
        crowd = [(0, TINY.neighbours_prompt, 20)] * TINY.neighbours
        passes = simulate(benchmark.chunk_scheduler(TINY, name), [*crowd, (4, TINY.long_prompt, 1)])
        mixed = [
            parts for parts in passes if any(part.request == TINY.neighbours for part in parts)
        ]
        assert len(mixed) == count and all(len(parts) == 1 + TINY.neighbours for parts in mixed)
    for row in results["results"]["chunking"]:
        for name, first in row["first"].items():
            assert len(first) == TINY.chunk_repeats
            assert all(
                0 < wait <= sum(gaps) for wait, gaps in zip(first, row["after"][name], strict=True)
            )
            longest, least = benchmark.predicted_arrival(results, row, name)
            assert (longest == least) == (name == WHOLE)


def test_percentiles_are_values_that_were_measured() -> None:
    assert benchmark.percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert benchmark.percentile([1.0] * 99 + [5.0], 0.99) == 1.0
    assert benchmark.percentile([1.0] * 98 + [5.0] * 2, 0.99) == 5.0


def test_the_gantt_chart_is_drawn_from_what_the_engine_did(tiny_model: Any) -> None:
    engine = Engine(tiny_model, scheduler=Scheduler(3, 5))
    counts = (4, 1, 6, 3, 2)
    prompts = [random_prompt(3 + i, tiny_model.config, i) for i in range(len(counts))]
    engine.generate(prompts, [greedy(count) for count in counts])
    steps = list(engine.steps)
    drawn = {"steps": len(steps), "pieces": json.loads(json.dumps(benchmark.pieces(steps, 3)))}
    assert timeline.bars(benchmark.records(drawn)) == timeline.bars(steps)
    lowest = benchmark.records({"steps": len(steps), "pieces": benchmark.pieces(steps, 1)})
    assert {each.slot for step in lowest for each in step.slots} == {0}


def test_run_lengths_keep_every_pass() -> None:
    assert benchmark.run_lengths([7, 7, 3, 7]) == [[7, 2], [3, 1], [7, 1]]
    assert benchmark.run_lengths([]) == []


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_transformers_batches_continuously_with_a_limit_for_each_request(
    tiny: Checkpoint, kind: str
) -> None:
    model = transformers_model(tiny, torch.float32, kind)
    prompts, counts = [random_prompt(2 + i, tiny.config, i) for i in range(5)], [1, 6, 3, 4, 2]
    threads = threading.active_count()
    with TransformersContinuous(model, slots=2, slot_tokens=16, token_budget=8) as peer:
        answers = peer.generate(prompts, counts)
        assert peer.passes >= sum(counts) / 2
        assert peer.generate(prompts, counts) == answers
    assert threading.active_count() == threads  # its thread has ended
    assert [len(answer) for answer in answers] == counts
    assert answers == [
        transformers_greedy(model, prompt, count)
        for prompt, count in zip(prompts, counts, strict=True)
    ]


def test_transformers_thread_ends_after_an_error_too(tiny: Checkpoint) -> None:
    model = transformers_model(tiny, torch.float32)
    threads = threading.active_count()
    with (
        pytest.raises(ZeroDivisionError),
        TransformersContinuous(model, slots=2, slot_tokens=16, token_budget=8) as peer,
    ):
        peer.generate([[1, 2]], [2])
        raise ZeroDivisionError
    assert threading.active_count() == threads


def test_a_wrong_token_stops_the_benchmark(results: dict[str, Any], tiny: Checkpoint) -> None:
    subject = benchmark.Subject(tiny, torch.float32)
    runs = benchmark.Runs(
        Engine(subject.model, scheduler=Scheduler(2, 8)),
        [random_prompt(3, tiny.config, i) for i in range(3)],
        [5] * 3,
    )
    runs()
    assert runs.proof(subject)["tokens"] == 15
    taken = runs.outputs[0][1].token_ids
    taken[2] = (taken[2] + 1) % tiny.config.vocab_size
    with pytest.raises(AssertionError, match="below the best"):
        runs.proof(subject)


def test_a_single_request_is_measured_on_three_stages(results: dict[str, Any]) -> None:
    for row in results["results"]["single"]:
        assert list(row["seconds"]) == [SINGLE, STATIC, OURS]
        assert set(row["passes"].values()) == {TINY.single_answer}


def test_the_quick_plan_is_the_smaller_one() -> None:
    assert QUICK.runs < FULL.runs / 2
    for plan in (FULL, QUICK):
        assert (
            plan.model == "gpt2"
            and plan.long_prompt + plan.long_answer <= PRESETS["gpt2"].n_positions
        )
    few, many = (sum(count for _, count in workload(plan)) for plan in (QUICK, FULL))
    assert few < many / 10
