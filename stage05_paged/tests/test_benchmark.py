"""The benchmark measures a tiny model for real, its workloads are worth measuring, and its
predictions are exact where they count passes and memory."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from shared.bench import kit
from shared.bench.claims import ROUND
from shared.bench.forecast import Part, pass_cost, simulate
from shared.bench.kit import Subject, greedy, prove
from shared.bench.rows import Results, Row
from shared.bench.tests.tools import check_drawn, check_sums, measured
from shared.checkpoint import PRESETS, Checkpoint
from shared.parity import random_prompt
from stage05_paged import benchmark
from stage05_paged.benchmark import FULL, HIT, MISS, OURS, WIN, Cold
from stage05_paged.blockmap import CACHED
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import make
from stage05_paged.memory import Cost
from stage05_paged.scheduler import Scheduler

CROWD = kit.crowd(FULL)
TINY = replace(
    FULL, models=("tiny",), memory=128, block_size=4, budget=16, requests=14, prompts=(2, 6),
    answers=(2, 40), middle=16, repeats=(1, 1), null=(5, 56, 8), null_repeats=1,
    rows=(1, 3), contexts=(5, 20, 30), sized=20, gather_repeats=2, sizes=(1, 4, 16), system=16,
    own=5, prefix_repeats=2, preempted=(8, 32), preemption_repeats=1, frames=25,
)  # fmt: skip


@pytest.fixture(scope="module")
def results() -> Results:
    return Results(measured(benchmark.BENCHMARK, TINY))


@pytest.fixture
def subject(tiny: Checkpoint) -> Subject:
    return Subject(tiny, torch.float32)


def test_the_winning_workload_fills_the_memory() -> None:
    pool = BlockPool(FULL.memory // FULL.block_size, FULL.block_size)
    scheduler = Scheduler(pool, pool.count, FULL.budget)
    most = max(map(len, simulate(scheduler, CROWD)))
    assert FULL.requests > most > FULL.memory // PRESETS["gpt2"].n_positions
    assert scheduler.counts.preemptions > 0  # so all blocks were owned at some time


def test_passes_are_predicted_to_the_last_one_in_the_same_memory(results: Results) -> None:
    each = PRESETS["tiny"].kv_bytes_per_token(torch.float32)
    assert results.groups("capacity", case=WIN)[0]["preemptions"][OURS] > 0
    for row in results.rows("capacity"):
        assert len(benchmark.pass_times(row)) == row["passes"], row.variant
        assert row["bytes"] == TINY.memory * each


def test_the_sums_of_the_lesson() -> None:
    """Every number that it predicts, worked out again on the round machine."""
    plan = {"plan": asdict(FULL)}
    about = Results({"configuration": plan, "limits": vars(ROUND), "results": {}})
    config, kind, size = PRESETS["gpt2"], torch.float32, FULL.block_size
    each, n = config.kv_bytes_per_token(kind), FULL.requests
    model = {"model": "gpt2", "dtype": "float32", "block_size": size}
    prompts, answers = (sum(pair[which] for pair in CROWD) / n for which in (0, 1))
    held, blocks = math.ceil((prompts + answers / 2) / size), FULL.memory // size
    crowd = {"slots": 4, "blocks": blocks, "budget": FULL.budget, "lengths": kit.packed(CROWD)}
    slots, ours = (Row(about, model | crowd, name) for name in (benchmark.CONTINUOUS, OURS))
    gain = benchmark.least(slots) / benchmark.least(ours)
    rows = [Row(about, model | {"rows": count, "context": FULL.sized}) for count in FULL.rows]
    bytes_gathered = [
        benchmark.gathered(row, [Part(0, FULL.sized, 1)] * row["rows"]) for row in rows
    ]
    found = {"system": FULL.system, "own": FULL.own}
    hit, miss = (benchmark.first_token_limit(Row(about, model | found, way)) for way in (HIT, MISS))
    cpu, gpu = (Cost(config, kind, *rates) for rates in ((200e9, 40e9), (100e12, 25e9)))
    four = Row(about, model).least([pass_cost(config, kind, [Part(0, 64, 1)] * 4)])
    check_sums(
        "stage05_paged",
        f"takes {each:,} bytes, so a block of {size} takes {size * each / 1e6:.2f} MB, and a slot "
        f"of 1,024 takes {1024 * each / 1e6:.1f} MB",
        f"{FULL.memory * each / 1e6:.0f} MB, makes {blocks} blocks",
        f"prompts of {prompts:.0f} tokens and answers of {answers:.0f} on average",
        f"some {prompts + answers / 2:.0f} tokens, or {held} blocks. So {blocks // held} requests",
        f"reads the weights in {four * 1e3:.0f} ms",
        f"With the gather below, that makes {gain:.1f} times as fast",
        f"{bytes_gathered[1] / 1e6:.0f} MB, {bytes_gathered[1] / 40e6:.0f} ms",
        f"{benchmark.overhead(rows[1]):.2f} times as long. For one row it is "
        f"{benchmark.overhead(rows[0]):.2f} times",
        f"{hit * 1e3:.0f} ms to the first token instead of {miss * 1e3:.0f}",
        f"{cpu.recompute(512) * 1e3:.0f} ms to compute them again",
        f"{cpu.swap(512) * 1e3:.1f} ms to swap them, two copies of {512 * each / 1e6:.0f} MB",
        f"that is {gpu.recompute(512) * 1e3:.1f} ms against {gpu.swap(512) * 1e3:.1f} ms",
    )


def test_blocks_hold_more_sequences_unless_all_are_as_long_as_a_slot(results: Results) -> None:
    win, null = (results.groups("capacity", case=case)[0] for case in (WIN, benchmark.NULL))
    most = [
        benchmark.most_rows(group.of(name))
        for group in (win, null)
        for name in (benchmark.CONTINUOUS, OURS)
    ]
    assert most[0] == most[2] == most[3] == win["slots"] == 2 < most[1]
    assert win.of(OURS)["crowded"] > 2 >= win.of(benchmark.CONTINUOUS)["crowded"]
    assert {sum(pair) for pair in null.lengths} == {PRESETS["tiny"].n_positions}


def test_everything_is_drawn_and_every_answer_proved_and_the_same_in_all_engines(
    results: Results,
) -> None:
    assert check_drawn(benchmark.BENCHMARK, dict(results.content)) == {
        "limits": 1, "capacity": 4, "capacity_memory": 4, "waste": 5, "gather": 16,
        "prefix": 4, "preemption": 2, "claims": 7,
    }  # fmt: skip
    for row in results.groups("capacity"):
        assert {proof["tokens"] for proof in row["proof"].values()} == {row.tokens}
        assert set(row["same"].values()) == {row.requests}
    for row in results.groups("gather"):
        assert row["proof"]["tokens"] == row["rows"]
        parts = [Part(number, row["context"], 1) for number in range(row["rows"])]
        assert row["bytes"] == benchmark.gathered(row, parts)


def test_an_engine_starts_cold(subject: Subject) -> None:
    engine = Cold(subject, TINY)
    pool, prompt = engine.engine.scheduler.pool, random_prompt(13, subject.config, "again")
    for _ in range(2):  # the second finds nothing of the first
        engine.generate([prompt], [greedy(2)])
        assert sum(step.prefill_tokens for step in engine.steps) == 13
    assert pool.cached
    benchmark.start_cold(engine.engine)
    assert not pool.cached and not pool.by_digest and len(pool.free) == pool.count


def test_what_is_reserved_and_used_is_counted_in_every_pass(subject: Subject) -> None:
    one = replace(TINY, requests=1, prompts=(3, 3), answers=(5, 5))
    assert {row["name"]: row["memory"] for row in benchmark.waste(subject, one)} == {
        "contiguous, whole context": [5 * 64, 25],  # passes with 3, 4, 5, 6 and 7 keys
        "contiguous, exact length known": [5 * 7, 25],
        "paged, blocks of 1": [25, 25],
        "paged, blocks of 4": [4 + 4 + 8 + 8 + 8, 25],
        "paged, blocks of 16": [5 * 16, 25],
    }


def test_a_pair_holds_the_same_and_is_noticed_if_it_does_not(subject: Subject) -> None:
    ways, _ = benchmark.pair(subject, 3, 30, 4)
    (_, shares, _), scores = ways["paged"].args, ways["contiguous"]().float()
    flat: list[int] = sum((blocks for blocks, *_ in shares), [])
    assert sorted(flat) == list(range(3 * 8)) != flat
    assert torch.allclose(scores, ways["paged"](), atol=1e-4)
    assert prove(scores, ways["paged"]().argmax(-1), torch.float32)["tokens"] == 3
    shares.reverse()
    with pytest.raises(AssertionError, match="below the best"):
        prove(scores, ways["paged"]().argmax(-1), torch.float32)


def test_too_little_memory_leaves_a_pair_out_and_says_so(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "free_memory", lambda: 100_000)
    plan = replace(TINY, rows=(1, 3), contexts=(5, 60), sizes=(4,), gather_repeats=1)
    found = [(group["rows"], group["context"]) for group in benchmark.gather(subject, plan)]
    assert found == [(1, 5), (3, 5)]
    assert "note: 3 sequences of 60 tokens" in capsys.readouterr().out


def test_only_a_later_request_finds_the_system_prompt(results: Results) -> None:
    for row in results.rows("prefix"):
        hit, length = row.variant == HIT, TINY.system + TINY.own
        assert row["computed"] == [TINY.own if hit else length] * 2, row.variant
        assert row["proof"]["tokens"] == 2
        assert (benchmark.first_token_limit(row) < benchmark.first_token_limit(row.of(MISS))) == hit


def test_a_preempted_request_is_measured_each_way(subject: Subject) -> None:
    pools = [BlockPool(32, 4) for _ in range(2)]
    options: dict[str, Any] = {"max_sequences": 1, "token_budget": 64, "preemption": "swap"}
    engine = make(subject.model, pool=pools[0], swap_pool=pools[1], **options)
    for way, computed in ((benchmark.RECOMPUTE, 33), (benchmark.SWAP, 1), (benchmark.FOUND, 1)):
        engine.steps.clear()
        proof = benchmark.preempt(subject, engine, 32, 3, way)["proof"]
        assert proof["tokens"] == 5
        assert len(engine.steps) == 5  # the prompt, three plain ones, and the one measured
        assert engine.steps[-1].prefill_tokens + engine.steps[-1].decode_tokens == computed, way
    counts = engine.scheduler.counts
    assert (counts.recomputed, counts.swapped_out, counts.swapped_in) == (2, 1, 1)


def test_the_map_has_every_pass(results: Results) -> None:
    blocks = results["block_map"][0]["blocks"]
    assert len(blocks) == TINY.memory // TINY.block_size
    assert {sum(times for _, times in runs) for runs in blocks} == {TINY.frames}
    states = {state for runs in blocks for state, _ in runs}
    assert CACHED in states and max(states) > 2
