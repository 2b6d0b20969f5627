"""The benchmark measures a tiny model for real, its workload is worth measuring, and its
predictions are exact where they count passes."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

from shared.bench import kit
from shared.bench.claims import ROUND
from shared.bench.forecast import simulate
from shared.bench.rows import Results, Row
from shared.bench.tests.tools import check_drawn, check_sums, measured
from shared.checkpoint import PRESETS, Checkpoint
from shared.parity import random_prompt
from shared.peers import TransformersContinuous, transformers_greedy, transformers_model
from shared.roofline import block_weights, forward_cost
from stage04_continuous import benchmark
from stage04_continuous.benchmark import BENCHMARK, FULL, OURS, STATIC, WHOLE
from stage04_continuous.scheduler import Scheduler

CROWD = kit.crowd(FULL)
TINY = replace(
    FULL, models=("tiny",), requests=9, slots=3, budget=8, prompts=(2, 6), answers=(2, 20),
    middle=5, repeats=(1, 1), equal_slots=(2, 4), equal=(3, 4), equal_repeats=(2, 1),
    neighbours=2, neighbours_prompt=4, before=3, after=9,
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


def test_answers_of_the_winning_workload_differ_in_length() -> None:
    """Were all alike, every batch would end at once, and there would be nothing to win."""
    for plan in (FULL, BENCHMARK.quick):
        lengths = kit.crowd(plan)
        batches = [lengths[at : at + plan.slots] for at in range(0, plan.requests, plan.slots)]
        static = sum(max(count for _, count in batch) for batch in batches)
        assert static > 1.5 * len(simulate(Scheduler(plan.slots, plan.budget), lengths))
        assert plan.long_prompt + plan.long_answer <= PRESETS["gpt2"].n_positions


def test_the_sums_of_the_lesson() -> None:
    """Every number that it predicts, worked out again."""
    about = {"configuration": {"plan": asdict(FULL)}, "limits": vars(ROUND), "results": {}}
    model = {"model": "gpt2", "dtype": "float32"}
    row = partial(Row, Results(about), model)
    (whole, first), (chunk, last) = (benchmark.arrival(row(name)) for name in (WHOLE, "64"))
    batches = [CROWD[at : at + FULL.slots] for at in range(0, FULL.requests, FULL.slots)]
    steps = [max(answer for _, answer in batch) for batch in batches]
    tokens, places = sum(answer for _, answer in CROWD), sum(steps) * FULL.slots
    crowd = {"slots": FULL.slots, "budget": FULL.budget, "lengths": kit.packed(CROWD)}
    static, ours = (Row(Results(about), model | crowd, name) for name in (STATIC, OURS))
    config, kind = PRESETS["gpt2"], torch.float32
    one, many = (forward_cost(config, kind, 1, rows=rows) for rows in (1, 32))
    blocks, pairs = block_weights(config), FULL.long_prompt * (FULL.long_prompt + 1) / 2
    reading = 4 * blocks / 40e9
    check_sums(
        "stage04_continuous",
        f"together they have {tokens:,}.",
        f"three batches take 3 * {steps[0]} = {sum(steps)} steps, and {tokens:,} tokens fill "
        f"{100 * tokens / places:.0f} % of their {places:,} places",
        f"at least {tokens:,} / {FULL.slots} = {math.ceil(tokens / FULL.slots)} steps, but never "
        f"fewer than the longest answer's {max(steps)}",
        f"{one.bytes / 1e6:.0f} MB of weights in {one.bytes / 40e6:.1f} ms, and computes "
        f"{one.flops / 1e9:.3f} GFLOP a row in {one.flops / 200e6:.1f} ms",
        f"32 rows take {many.seconds(ROUND, kind) * 1e3:.0f} ms",
        f"The scheduler below needs {len(benchmark.costs(ours))} steps. At these prices, they "
        f"serve the crowd {benchmark.least(static) / benchmark.least(ours):.1f} times as fast",
        f"{2 * blocks * FULL.long_prompt / 1e9:.0f} GFLOP in the blocks and "
        f"{4 * config.n_embd * config.n_layer * pairs / 1e9:.0f} in attention",
        f"one step of {whole:.0f} ms",
        f"no step takes longer than {chunk:.0f} ms",
        f"after {last:.0f} ms instead of {first:.0f}",
        f"{4 * blocks / 1e6:.0f} MB or {reading * 1e3:.1f} ms",
        f"tokens take {FULL.long_prompt * reading:.1f} s",
    )


def test_everything_is_drawn_and_every_answer_proved_and_the_same_in_all_engines(
    results: Results,
) -> None:
    assert check_drawn(benchmark.BENCHMARK, dict(results.content)) == {
        "limits": 1, "win": 3, "null": 12, "chunking": 8, "claims": 6,
    }  # fmt: skip
    for row in results.groups("win") + results.groups("equal"):
        assert {row["proof"][name]["tokens"] for name in (STATIC, OURS)} == {row.tokens}
        if row["dtype"] == "float32":
            assert set(row["same"].values()) == {row.requests}  # transformers' too
    for row in results.groups("chunking"):
        neighbours = TINY.neighbours * (1 + TINY.before + TINY.after)
        proved = {name: proof["tokens"] for name, proof in row["proof"].items()}
        assert proved == dict.fromkeys(row["seconds"], neighbours + TINY.long_answer)


def test_passes_are_predicted_and_caches_and_occupancy_have_their_size(results: Results) -> None:
    for group in results.groups("win") + results.groups("equal"):
        for row in (group.of(STATIC), group.of(OURS)):
            assert len(benchmark.costs(row)) == row["passes"]
            assert sum(times for _, times in row["rows"]) == row["passes"]
            assert sum(rows * times for rows, times in row["rows"]) == row["busy"]
    for group in results.groups("equal"):
        assert [benchmark.occupancy(group.of(name)) for name in (STATIC, OURS)] == [1, 1]
    (row,) = results.groups("win")
    assert row["busy"][STATIC] == row.tokens  # a row is alive once for each of its tokens
    each = PRESETS["tiny"].kv_bytes_per_token(torch.float32)
    assert row["slot_tokens"] == max(map(sum, row.lengths))
    assert row["bytes"][OURS] == row["slots"] * row["slot_tokens"] * each
    assert row["bytes"][STATIC] <= row["bytes"][OURS] + row["slots"] * TINY.prompts[1] * each


def test_a_long_prompt_runs_in_the_chunks_of_its_name(results: Results) -> None:
    """In pieces of 6 it takes 5 passes, and whole it delays the neighbours by a single pass."""
    crowd = [(0, TINY.neighbours_prompt, 20)] * TINY.neighbours
    for name, count in {"6": 5, "16": 2, WHOLE: 1}.items():
        scheduler = benchmark.chunk_scheduler(asdict(TINY), name)
        passes = simulate(scheduler, [*crowd, (4, TINY.long_prompt, 1)])
        mixed = [parts for parts in passes if TINY.neighbours in {part.request for part in parts}]
        assert len(mixed) == count and {len(parts) for parts in mixed} == {1 + TINY.neighbours}
    for row in (row for group in results.groups("chunking") for row in group.variants):
        (first,), (gaps,) = row["seconds"], row["after"]
        assert len(gaps) == TINY.after and 0 < first <= sum(gaps)
        longest, least = benchmark.arrival(row)
        assert (longest == least) == (row.variant == WHOLE)


def test_transformers_batches_continuously_with_a_limit_for_each_request(tiny: Checkpoint) -> None:
    model = transformers_model(tiny, torch.float32, "sdpa")
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
