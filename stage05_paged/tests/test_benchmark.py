"""The benchmark measures a tiny model for real, its workloads are worth measuring, and its
predictions are exact where they count passes and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.bench.forecast import Part, Watch, simulate
from shared.bench.kit import Subject, greedy, prove
from shared.bench.rows import Results, Row
from shared.bench.tests.tools import check_drawn, measured
from shared.checkpoint import PRESETS, Checkpoint
from shared.parity import random_prompt
from stage04_continuous import benchmark as continuous
from stage04_continuous.cache import SlotCache
from stage04_continuous.make import make as make_slots
from stage05_paged import benchmark
from stage05_paged.benchmark import FULL, HIT, MISS, OURS, QUICK, WIN, Cold, Pair
from stage05_paged.blockmap import CACHED
from stage05_paged.blocks import BlockPool
from stage05_paged.cache import PagedCache
from stage05_paged.make import make
from stage05_paged.scheduler import Scheduler

TINY = replace(
    FULL, models=("tiny",), memory=128, block_size=4, budget=16, requests=14, prompts=(2, 6),
    answers=(2, 40), middle=16, repeats=(1, 1), null=(5, 56, 8), null_repeats=1,
    singles=((4, 3), (40, 4)), single_repeats=1, rows=(1, 3), contexts=(5, 30), sized=20,
    gather_repeats=2, sizes=(1, 4, 16), batches=(1, 3, 40), table=(60, 4, 10), system=16, own=5,
    prefix_repeats=2, preempted=(8, 32), preemption_repeats=1, frames=25,
)  # fmt: skip


@pytest.fixture(scope="module")
def results() -> Results:
    return Results(measured(benchmark.BENCHMARK, TINY))


@pytest.fixture
def subject(tiny: Checkpoint) -> Subject:
    return Subject(tiny, torch.float32)


def capacity(results: Results, case: str) -> Row:
    return results.groups("capacity", case=case)[0]


def test_everything_is_drawn(results: Results) -> None:
    assert check_drawn(benchmark.BENCHMARK, dict(results.content)) == {
        "limits": 1, "capacity": 4, "capacity_memory": 4, "grid": 4, "lose": 12,
        "waste": 5, "memory": 4, "gather": 4, "gather_all": 12, "prefix": 4,
        "preemption": 2, "parts": 4, "profile": 6,
    }  # fmt: skip


def test_the_winning_workload_is_that_of_stage_04_and_fills_the_memory() -> None:
    assert benchmark.workload(FULL) == continuous.workload(continuous.FULL)
    pool = BlockPool(FULL.memory // FULL.block_size, FULL.block_size)
    scheduler = Scheduler(pool, pool.count, FULL.budget)
    watch = simulate(scheduler, benchmark.workload(FULL))
    assert FULL.requests > max(map(len, watch.passes)) > FULL.memory // PRESETS["gpt2"].n_positions
    assert scheduler.counts.preemptions > 0  # so all blocks were owned at some time


@pytest.mark.parametrize("plan", [FULL, QUICK])
def test_the_plans_can_show_what_they_are_for(plan: Any) -> None:
    config = PRESETS[plan.models[0]]
    assert plan.memory % config.n_positions == plan.memory % plan.block_size == 0
    assert plan is QUICK or plan.null[1] + plan.null[2] == config.n_positions
    assert max(plan.contexts) < config.n_positions >= max(map(sum, plan.singles))
    assert max(plan.preempted) + plan.plain_steps + 1 <= config.n_positions
    assert not any(length % plan.block_size for length in (plan.system, *plan.preempted))
    assert plan.sized in plan.contexts


def test_passes_and_rows_are_predicted_to_the_last_one(results: Results) -> None:
    each = PRESETS["tiny"].kv_bytes_per_token(torch.float32)
    assert capacity(results, WIN).of(OURS)["preemptions"] > 0
    for row in results.rows("capacity"):
        assert len(benchmark.pass_times(row)) == row["passes"], row.variant
        if row.variant != benchmark.STATIC:
            assert row["bytes"] == TINY.memory * each
            assert [len(parts) for parts in benchmark.passes(row).passes] == [
                rows for rows, times in row["rows"] for _ in range(times)
            ]


def test_memory_is_predicted_too(results: Results, subject: Subject) -> None:
    """Reserved and used, in every pass of the real engines."""
    ours, slots = Cold(subject, TINY, 16).engine, make_slots(subject.model, 2, token_budget=16)
    reserved = {
        OURS: lambda: ours.scheduler.pool.owned * 4,
        benchmark.CONTINUOUS: lambda: len(slots.scheduler.running) * 64,
    }
    for name, engine in ((OURS, ours), (benchmark.CONTINUOUS, slots)):
        row = capacity(results, WIN).of(name)
        engine.observers.append(watch := Watch(engine.scheduler, reserved[name]))
        prompts = subject.prompts([prompt for prompt, _ in row.lengths])
        engine.generate(prompts, [greedy(answer) for _, answer in row.lengths])
        assert watch.memory == benchmark.passes(row).memory


def test_blocks_hold_more_sequences_unless_all_are_as_long_as_a_slot(results: Results) -> None:
    (win, slots), (null, full) = (
        (group.of(OURS), group.of(benchmark.CONTINUOUS))
        for group in (capacity(results, WIN), capacity(results, benchmark.NULL))
    )
    assert benchmark.most_rows(win) > benchmark.most_rows(slots) == win["slots"] == 2
    assert win["crowded"] > 2 >= slots["crowded"]
    assert benchmark.most_rows(null) == benchmark.most_rows(full) == 2
    assert {sum(pair) for pair in null.lengths} == {PRESETS["tiny"].n_positions}


def test_every_answer_was_proved_and_is_the_same_in_all_engines(results: Results) -> None:
    for row in results.groups("capacity"):
        assert {proof["tokens"] for proof in row["proof"].values()} == {row.tokens}
        assert set(row["same"].values()) == {row.requests}
    for row in results.groups("single"):
        assert list(row["seconds"]) == [benchmark.SINGLE, benchmark.CONTINUOUS, OURS]
        assert {proof["tokens"] for proof in row["proof"].values()} == {row.tokens}
    for row in results.groups("gather"):
        assert row["proof"]["tokens"] == row["rows"]
        parts = [Part(number, row["context"], 1) for number in range(row["rows"])]
        assert row["bytes"] == benchmark.gathered(row, parts)


def test_an_engine_starts_cold_and_takes_static_batches_to_their_end(subject: Subject) -> None:
    engine = Cold(subject, TINY, budget=16, batch=2)
    pool = engine.engine.scheduler.pool
    prompts = [random_prompt(3, subject.config, i) for i in range(4)]
    outputs = engine.generate(prompts, [greedy(count) for count in (2, 6, 3, 1)])
    assert [len(output.token_ids) for output in outputs] == [2, 6, 3, 1]
    assert [step.rows for step in engine.steps] == [2, 2, 1, 1, 1, 1] + [2, 1, 1]
    prompt = random_prompt(13, subject.config, "again")
    for _ in range(2):  # the second finds nothing of the first
        engine.generate([prompt], [greedy(2)])
        assert sum(step.prefill_tokens for step in engine.steps) == 13
    assert pool.cached
    benchmark.start_cold(pool)
    assert not pool.cached and not pool.found and len(pool.free) == pool.count


def test_more_is_unused_in_larger_blocks_and_most_in_whole_contexts(results: Results) -> None:
    found = {row["name"]: row["memory"] for row in results.groups("waste")}
    shares = {name: benchmark.unused(memory) for name, memory in found.items()}
    whole, exact = (
        shares.pop(f"contiguous, {name}") for name in ("whole context", "exact length known")
    )
    assert list(shares.values()) == sorted(shares.values())
    assert max(shares.values()) < exact < whole < 1
    assert len({used for _, used in found.values()}) == 1  # the same passes, another memory


def test_reserved_and_used_are_counted_in_every_pass() -> None:
    for size, reserved in ((64, 5 * 64), (0, 5 * 7)):  # passes with 3, 4, 5, 6 and 7 keys
        assert benchmark.in_slots(2, size, 8, [(3, 5)]).memory == [reserved, 25]
    assert benchmark.in_blocks(8, 4, 8, [(3, 5)]).memory == [32, 25]


def test_memory_by_arithmetic_is_what_the_caches_take(results: Results) -> None:
    config, count = PRESETS["tiny"], TINY.table[0]
    each = benchmark.block_bytes(config, torch.float32, 4)
    assert PagedCache(config, count, 4).bytes == count * each
    fixed = count * 4 // config.n_positions + 1
    below, above = (SlotCache(config, slots).bytes for slots in (fixed - 1, fixed))
    assert below <= PagedCache(config, count, 4).bytes < above
    *_, many, last = (list(line.values()) for line in benchmark.memory_lines(results))
    assert many[0] == "40" and many[3] == "15 (100% of it)"  # 4 blocks of 60 each
    assert last[2] == last[4] == "from 1 on"
    plan = {"plan": {"block_size": 16, "table": FULL.table, "batches": FULL.batches}}
    *_, line = benchmark.memory_lines(Results({**results.content, "configuration": plan}))
    assert list(line.values())[2] == "from 30 on"  # between 24 and 32, as the reference found


def test_a_pair_holds_the_same_and_is_noticed_if_it_does_not(subject: Subject) -> None:
    pair = Pair(subject, 3, 30, 4)
    flat = sum(pair.tables, [])
    assert sorted(flat) == list(range(3 * 8)) != flat
    scores = pair.contiguous().float()
    assert torch.allclose(scores, pair.paged(), atol=1e-4)
    assert prove(scores, pair.paged().argmax(-1), torch.float32)["tokens"] == 3
    pair.shares.reverse()
    with pytest.raises(AssertionError, match="below the best"):
        prove(scores, pair.paged().argmax(-1), torch.float32)


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
        found: Any = benchmark.COLUMNS["found in the cache"]
        assert found(row) == ("76%" if hit else "0%")
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


def test_the_map_has_every_pass_and_the_parts_make_the_whole(results: Results) -> None:
    blocks = results["block_map"][0]["blocks"]
    assert len(blocks) == TINY.memory // TINY.block_size
    assert {sum(times for _, times in runs) for runs in blocks} == {TINY.frames}
    states = {state for runs in blocks for state, _ in runs}
    assert CACHED in states and max(states) > 2
    selected = {}
    for row in results.groups("profile"):
        parts = benchmark.parts_of(row["operators"])
        seconds = sum(one["seconds"] for one in row["operators"])
        assert sum(parts.values()) == pytest.approx(seconds * 1e3) and min(parts.values()) > 0
        calls = [one["calls"] for one in row["operators"] if one["operator"] == "index_select"]
        selected[row["name"]] = sum(calls)
    assert selected["paged"] >= selected["contiguous"] + PRESETS["tiny"].n_layer
