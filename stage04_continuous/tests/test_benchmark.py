"""The benchmark measures a tiny model for real, its workload is worth measuring, and its
predictions are exact where they count passes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

from shared.bench.forecast import simulate
from shared.bench.rows import Results, Row
from shared.bench.tests.tools import check_drawn, measured
from shared.checkpoint import PRESETS, Checkpoint
from shared.parity import random_prompt
from shared.peers import TransformersContinuous, transformers_greedy, transformers_model
from stage04_continuous import benchmark
from stage04_continuous.benchmark import FULL, OURS, QUICK, SINGLE, STATIC, WHOLE, workload
from stage04_continuous.scheduler import Scheduler

TINY = replace(
    FULL, models=("tiny",), requests=9, slots=3, budget=8, prompts=(2, 6), answers=(2, 20),
    middle=5, repeats=(1, 1), equal_slots=(2, 4), equal=(3, 4), equal_repeats=(2, 1),
    single=(4, 3), single_repeats=1, neighbours=2, neighbours_prompt=4, before=3, after=9,
    long_prompt=30, long_answer=2, chunks=(6, 16), chunk_repeats=1, gantt=(2, 12),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """`transformers` collects garbage after each batching, among all that was loaded: a second each
    time, unless that is frozen."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def results() -> Results:
    return Results(measured(benchmark.BENCHMARK, TINY))


def side_by_side(results: Results) -> list[Row]:
    return results.groups("win") + results.groups("equal")


def test_everything_is_drawn(results: Results) -> None:
    assert check_drawn(benchmark.BENCHMARK, dict(results.content)) == {
        "limits": 1, "win": 3, "win_seconds": 3, "null": 8, "peers": 12, "lose": 6, "chunking": 8,
        "overhead": 4,
    }  # fmt: skip


def test_answers_of_the_winning_workload_differ_in_length() -> None:
    """Were all alike, every batch would end at once, and there would be nothing to win."""
    for plan in (FULL, QUICK):
        lengths = workload(plan)
        answers = sorted(count for _, count in lengths)
        assert len(lengths) == plan.requests and len(set(answers)) > plan.requests / 3
        assert answers[-1] > 4 * answers[len(answers) // 2]  # the longest, and the median
        batches = [lengths[at : at + plan.slots] for at in range(0, plan.requests, plan.slots)]
        static = sum(max(count for _, count in batch) for batch in batches)
        assert static > 1.5 * len(simulate(Scheduler(plan.slots, plan.budget), lengths).passes)
        assert plan.long_prompt + plan.long_answer <= PRESETS["gpt2"].n_positions
    few, many = (sum(count for _, count in workload(plan)) for plan in (QUICK, FULL))
    assert few < many / 8 and 60 < many / FULL.requests < 90


def test_every_answer_was_proved_and_is_the_same_in_all_engines(results: Results) -> None:
    for row in side_by_side(results) + results.groups("single"):
        ours = [name for name in row["seconds"] if not name.startswith("transformers")]
        assert {row["proof"][name]["tokens"] for name in ours} == {row.tokens}
        if row["dtype"] == "float32":
            assert set(row["same"].values()) == {row.requests}  # transformers' too
    for row in results.groups("single"):
        assert list(row["seconds"]) == [SINGLE, STATIC, OURS] and set(row["passes"].values()) == {3}
    for row in results.groups("chunking"):
        neighbours = TINY.neighbours * (1 + TINY.before + TINY.after)
        proved = {name: proof["tokens"] for name, proof in row["proof"].items()}
        assert proved == dict.fromkeys(row["seconds"], neighbours + TINY.long_answer)


def test_both_caches_have_room_for_as_much(results: Results) -> None:
    (row,) = results.groups("win")
    each = PRESETS["tiny"].kv_bytes_per_token(torch.float32)
    assert row["slot_tokens"] == max(map(sum, row.lengths))
    assert row["bytes"][OURS] == row["slots"] * row["slot_tokens"] * each
    assert row["bytes"][STATIC] <= row["bytes"][OURS] + row["slots"] * TINY.prompts[1] * each


def test_passes_are_predicted_and_occupancy_counts_busy_places(results: Results) -> None:
    for group in side_by_side(results):
        for row in (group.of(STATIC), group.of(OURS)):
            assert len(benchmark.costs(row)) == row["passes"]
            assert sum(times for _, times in row["rows"]) == row["passes"]
            assert sum(rows * times for rows, times in row["rows"]) == row["busy"]
    for group in results.groups("equal"):
        assert [benchmark.occupancy(group.of(name)) for name in (STATIC, OURS)] == [1, 1]
    (group,) = results.groups("win")
    assert group.of(STATIC)["busy"] == group.tokens  # a row is alive once for each of its tokens


def test_a_long_prompt_runs_in_the_chunks_of_its_name(results: Results) -> None:
    """In pieces of 6 it takes 5 passes, and whole it delays the neighbours by a single pass."""
    crowd = [(0, TINY.neighbours_prompt, 20)] * TINY.neighbours
    for name, count in {"6": 5, "16": 2, WHOLE: 1}.items():
        scheduler = benchmark.chunk_scheduler(asdict(TINY), name)
        passes = simulate(scheduler, [*crowd, (4, TINY.long_prompt, 1)]).passes
        mixed = [parts for parts in passes if TINY.neighbours in {part.request for part in parts}]
        assert len(mixed) == count and {len(parts) for parts in mixed} == {1 + TINY.neighbours}
    for group in results.groups("chunking"):
        for row in group.variants:
            (first,), (gaps,) = row["seconds"], row["after"]
            assert len(gaps) == TINY.after and 0 < first <= sum(gaps)
            longest, least = benchmark.arrival(row)
            assert (longest == least) == (row.variant == WHOLE)


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
    assert answers == list(map(partial(transformers_greedy, model), prompts, counts))
    # after an error too
    with pytest.raises(ZeroDivisionError), TransformersContinuous(model, 2, 16, 8) as peer:
        raise ZeroDivisionError
    assert threading.active_count() == threads
