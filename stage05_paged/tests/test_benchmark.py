"""The benchmark measures a tiny model through and through, its workloads are worth measuring, and its predictions are exact
where they count passes and memory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from shared import charts, measure
from shared.bench import benchmarks
from shared.checkpoint import PRESETS, Checkpoint
from shared.parity import random_prompt
from stage02_kv_cache.benchmark import greedy
from stage03_batching import benchmark as static_benchmark
from stage04_continuous import benchmark as continuous_benchmark
from stage04_continuous.cache import SlotCache
from stage04_continuous.request import Request
from stage05_paged import benchmark
from stage05_paged.benchmark import (
    CONTINUOUS,
    FULL,
    HIT,
    NULL,
    OURS,
    QUICK,
    SINGLE,
    STATIC,
    WIN,
    Paged,
    Pair,
    Part,
    Plan,
    Subject,
)
from stage05_paged.blockmap import CACHED, blockmap
from stage05_paged.blocks import BlockPool
from stage05_paged.cache import PagedCache
from stage05_paged.engine import Engine
from stage05_paged.scheduler import Scheduler

TINY = Plan(
    model="tiny", small="tiny", budget_tokens=128, block_size=4, budget=16, win_dtypes=("float32", "bfloat16"), requests=14,
    prompts=(2, 6), answers=(2, 40), middle=16, win_repeats=1, null_requests=5, null_prompt=56, null_answer=8, null_repeats=1,
    singles=((4, 3), (40, 4)), single_repeats=1, rows=(1, 3), contexts=(5, 30), sized_context=20, gather_repeats=2,
    sizes=(1, 4, 16), batches=(1, 3, 40), table_blocks=60, table_prompt=4, table_answer=10, system=16, own=5, prefix_repeats=2,
    preempted=(8, 30), preemption_repeats=1, frames=25,
)  # fmt: skip
LIMITS = measure.Limits("cpu", 1, 30.0, {"float32": 100.0, "bfloat16": 200.0})


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "FULL", TINY)
        patch.setattr(static_benchmark, "PROMPT", 6)
        patch.setattr(measure, "limits", lambda **_: LIMITS)
        measured = benchmarks.unsaved(*benchmark.run(quick=False))
    return json.loads(json.dumps(measured, allow_nan=False))  # as it will be read back


@pytest.fixture
def subject(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setattr(static_benchmark, "PROMPT", 6)
    return Subject(tiny, torch.float32)


def capacity(results: dict[str, Any], case: str) -> dict[str, Any]:
    return next(row for row in results["results"]["capacity"] if row["case"] == case)


def test_every_table_is_whole(results: dict[str, Any]) -> None:
    found = benchmark.tables(results)
    assert list(found) == [
        "limits", "capacity", "grid", "lose", "waste", "memory", "gather", "prefix", "preemption", "profile"
    ]  # fmt: skip
    for name, text in found.items():
        for block in text.split("\n\n"):
            assert len({line.count("|") for line in block.splitlines()}) == 1, name
    rows = {
        name: [len(block.splitlines()) - 2 for block in text.split("\n\n")]
        for name, text in found.items()
    }
    assert (rows["capacity"], rows["grid"], rows["lose"], rows["waste"]) == ([6], [4, 2], [12], [5])
    assert (rows["memory"], rows["gather"], rows["prefix"], rows["preemption"]) == (
        [4],
        [8, 3],
        [8],
        [4, 2],
    )
    assert rows["profile"] == [4, 6]


def test_every_chart_is_drawn_and_the_headline_has_its_number(results: dict[str, Any]) -> None:
    drawn = benchmark.charts(results)
    assert list(drawn) == ["capacity", "waste", "blocks"]
    for function in drawn.values():
        assert charts.render(function()).endswith(b"</svg>\n")
    assert f"in the memory of {TINY.slots} slots, " in benchmark.headline(results)


def test_the_winning_workload_is_that_of_stage_04_and_fills_the_memory() -> None:
    """With fewer requests all of them would run at once, and their number would pass for what the memory holds."""
    assert FULL.lengths == continuous_benchmark.workload(continuous_benchmark.FULL)
    blocks = FULL.budget_tokens // FULL.block_size
    pool = BlockPool(blocks, FULL.block_size)
    scheduler = Scheduler(pool, blocks, FULL.budget)
    passes = benchmark.simulate(scheduler, FULL.lengths, lambda: pool.owned)
    assert max(len(each.parts) for each in passes) < FULL.requests
    assert max(each.reserved for each in passes) == blocks and scheduler.counts.preemptions > 0


def test_both_have_the_same_memory(results: dict[str, Any]) -> None:
    each = PRESETS["tiny"].kv_bytes_per_token(torch.float32)
    for row in results["results"]["capacity"]:
        size = each * getattr(torch, row["dtype"]).itemsize // torch.float32.itemsize
        assert set(row["cache_bytes"].values()) == {TINY.budget_tokens * size}


def test_passes_and_memory_are_predicted_to_the_last_one(results: dict[str, Any]) -> None:
    """Preemptions and what they find again included."""
    assert capacity(results, WIN)["preemptions"][OURS] > 0
    for row in results["results"]["capacity"]:
        for name in row["seconds"]:
            assert benchmark.predicted(results, row, name)[0] == row["passes"][name], (
                row["case"],
                name,
            )
            if name != STATIC:
                passes = benchmark.passes_of(row, name)
                assert [
                    sum(each.reserved for each in passes),
                    sum(each.used for each in passes),
                ] == row["memory"][name]
                assert (
                    benchmark.run_lengths([len(each.parts) for each in passes]) == row["rows"][name]
                )


def test_blocks_hold_more_sequences_unless_all_are_as_long_as_a_slot(
    results: dict[str, Any],
) -> None:
    win, null = capacity(results, WIN), capacity(results, NULL)
    assert benchmark.most_rows(win, OURS) > benchmark.most_rows(win, CONTINUOUS) == TINY.slots
    assert win["crowded"][OURS] > TINY.slots >= win["crowded"][CONTINUOUS]
    assert benchmark.most_rows(null, OURS) == benchmark.most_rows(null, CONTINUOUS) == TINY.slots
    assert all(sum(lengths) == PRESETS["tiny"].n_positions for lengths in null["lengths"])
    for plan in (FULL, QUICK):
        assert plan.null_prompt + plan.null_answer == PRESETS[plan.model].n_positions


def test_every_answer_was_proved_and_is_the_same_in_all_engines(results: dict[str, Any]) -> None:
    for row in results["results"]["capacity"]:
        tokens = sum(count for _, count in row["lengths"])
        assert {proof["tokens"] for proof in row["proof"].values()} == {tokens}
        if row["dtype"] == "float32":
            assert set(row["same"].values()) == {len(row["lengths"])}
    for row in results["results"]["single"]:
        assert list(row["seconds"]) == [SINGLE, CONTINUOUS, OURS]
        assert {proof["tokens"] for proof in row["proof"].values()} == {row["lengths"][0][1]}
    for row in results["results"]["gather"] + results["results"]["sizes"]:
        assert row["proof"]["tokens"] == row["rows"]


def test_a_wrong_token_stops_the_benchmark(subject: Subject) -> None:
    engine = Paged(subject.model, BlockPool(8, 4), 8)
    runs = benchmark.Runs(engine, [random_prompt(3, subject.config, i) for i in range(3)], [5] * 3)
    runs()
    assert runs.proof(subject)["tokens"] == 15
    taken = runs.outputs[0][1].token_ids
    taken[2] = (taken[2] + 1) % subject.config.vocab_size
    with pytest.raises(AssertionError, match="below the best"):
        runs.proof(subject)


def test_a_paged_engine_in_static_batches_waits_for_the_last_of_each(subject: Subject) -> None:
    engine = Paged(subject.model, BlockPool(32, 4), 16, batch=2)
    prompts = [random_prompt(3, subject.config, i) for i in range(4)]
    outputs = engine.generate(prompts, [greedy(count) for count in (2, 6, 3, 1)])
    assert [len(output.token_ids) for output in outputs] == [2, 6, 3, 1]
    assert [step.rows for step in engine.steps] == [2, 2, 1, 1, 1, 1] + [2, 1, 1]


def test_no_run_finds_what_another_has_left(subject: Subject) -> None:
    engine = Paged(subject.model, BlockPool(16, 4), 16)
    prompt = random_prompt(13, subject.config, "again")
    computed = []
    for _ in range(2):
        engine.generate([prompt], greedy(2))
        computed.append(sum(step.prefill_tokens for step in engine.steps))
    assert computed == [13, 13]
    pool = engine.engine.scheduler.pool
    assert pool.cached
    benchmark.start_cold(pool)
    assert not pool.cached and not pool.found and len(pool.free) == pool.count


def test_more_is_unused_in_larger_blocks_and_most_in_whole_contexts(
    results: dict[str, Any],
) -> None:
    for waste in (results["results"]["waste"], benchmark.measure_waste(FULL)):
        shares = {name: benchmark.unused(memory) for name, memory in waste.items()}
        whole, exact = (
            shares.pop("contiguous, whole context"),
            shares.pop("contiguous, exact length known"),
        )
        assert list(shares.values()) == sorted(shares.values())
        assert max(shares.values()) < exact < whole < 1
        assert (
            len({used for _, used in waste.values()}) == 1
        )  # the same passes, only the memory differs


def test_reserved_and_used_are_counted_in_every_pass() -> None:
    """A prompt of 3 tokens and an answer of 5: after its passes it has 3, 4, 5, 6 and 7 keys, and the last token needs none."""
    whole, exact = (benchmark.simulate_slots([(3, 5)], 2, 8, tokens) for tokens in (64, None))
    assert [each.used for each in whole] == [each.used for each in exact] == [3, 4, 5, 6, 7]
    assert [each.reserved for each in whole] == [64] * 5 and [each.reserved for each in exact] == [
        7
    ] * 5
    blocks = benchmark.simulate_blocks([(3, 5)], 8, 4, 8)
    assert [(each.reserved, each.used) for each in blocks] == [
        (4, 3),
        (4, 4),
        (8, 5),
        (8, 6),
        (8, 7),
    ]


def test_memory_by_arithmetic_is_what_the_caches_take(results: dict[str, Any]) -> None:
    config, size = PRESETS["tiny"], benchmark.block_bytes(PRESETS["tiny"], torch.float32, 4)
    assert PagedCache(config, TINY.table_blocks, 4).bytes == TINY.table_blocks * size
    pool = BlockPool(TINY.table_blocks, 4)
    fixed = benchmark.crossover(pool.count, 4, config.n_positions)
    assert (
        SlotCache(config, fixed - 1).bytes
        <= PagedCache(config, pool.count, 4).bytes
        < SlotCache(config, fixed).bytes
    )
    last = benchmark.memory_table(results).splitlines()[-1]
    assert f"from {fixed} sequences on" in last and "from 1 on" in last
    row = benchmark.memory_table(results).splitlines()[-2].split("|")
    tokens = TINY.table_prompt + TINY.table_answer - 1
    assert int(row[4]) == pool.count // pool.blocks_for(tokens) < int(row[1])
    assert benchmark.crossover(1900, 16, 1024) == 30  # between 24 and 32, as the reference found


def test_both_caches_of_a_pair_hold_the_same(subject: Subject) -> None:
    pair = Pair(subject, 3, 9, 4)
    assert (
        sorted(block for table in pair.tables for block in table)
        == list(range(9))
        != sum(pair.tables, [])
    )
    for row, table in enumerate(pair.tables):
        for position in range(9):
            there = pair.blocks.kv[:, :, :, table[position // 4], position % 4]
            assert torch.equal(pair.slots.kv[:, :, row, :, position], there)
    assert torch.allclose(pair.contiguous(), pair.paged(), atol=1e-4)
    assert pair.prove()["tokens"] == 3


def test_a_pair_whose_blocks_are_mixed_up_is_noticed(subject: Subject) -> None:
    pair = Pair(subject, 3, 30, 4)
    pair.tables.reverse()
    with pytest.raises(AssertionError, match="the paged pass took a token"):
        pair.prove()


def test_the_bytes_of_a_gather_are_those_of_whole_blocks(results: dict[str, Any]) -> None:
    for row in results["results"]["gather"] + results["results"]["sizes"]:
        parts = [Part(number, row["context"], 1, True) for number in range(row["rows"])]
        kind = getattr(torch, row["dtype"])
        assert row["gathered_bytes"] == benchmark.gathered_bytes(
            PRESETS["tiny"], kind, parts, row["block_size"]
        )
    gpt2 = PRESETS["gpt2"]
    assert (
        benchmark.gathered_bytes(gpt2, torch.float32, [Part(0, 255, 1, True)] * 32, 16)
        == 32 * 256 * 73_728
    )
    assert (
        benchmark.gathered_bytes(gpt2, torch.float32, [Part(0, 0, 200, True)], 16) == 0
    )  # a whole prompt needs nothing


def test_too_little_memory_leaves_a_pair_out_and_says_so(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bar:
        lines: list[str] = []

        def write(self, line: str) -> None:
            self.lines.append(line)

        def update(self) -> None:
            pass

    monkeypatch.setattr(benchmark, "free_memory", lambda: 100_000)
    bar: Any = Bar()
    found = benchmark.measure_gather(subject, [(3, 60, 4), (1, 5, 4)], 1, bar)
    assert [row["rows"] for row in found] == [1]
    assert len(bar.lines) == 1 and "3 sequences of 60 tokens" in bar.lines[0]


def test_only_a_later_request_finds_the_system_prompt(results: dict[str, Any]) -> None:
    for row in results["results"]["prefix"]:
        length = TINY.system + TINY.own
        assert row["computed"] == {
            benchmark.MISS: [length] * 2, HIT: [TINY.own] * 2, benchmark.FRESH_ON: [length] * 2, benchmark.FRESH_OFF: [length] * 2
        }  # fmt: skip
        assert row["hit_rate"][HIT] == [TINY.system / length] * 2
        assert all(each == [0, 0] for name, each in row["hit_rate"].items() if name != HIT)
        assert {proof["tokens"] for proof in row["proof"].values()} == {2}


def test_a_preempted_request_is_measured_each_way(subject: Subject) -> None:
    """Recompute computes everything again, swap moves every block out and in, and own blocks are found but the last tokens."""
    pool, swap_pool = BlockPool(32, 4), BlockPool(32, 4)
    engine = Engine(
        subject.model, scheduler=Scheduler(pool, 1, 64, preemption="swap", swap_pool=swap_pool)
    )
    steps = {}
    for way in (benchmark.RECOMPUTE, benchmark.SWAP, benchmark.FOUND):
        engine.steps.clear()
        _, proof = benchmark.preempted_seconds(subject, engine, 30, 3, way)
        assert proof["tokens"] == 5
        assert len(engine.steps) == 5  # the prompt, three plain ones, and the one that is measured
        steps[way] = engine.steps[-1]
    computed = {way: step.prefill_tokens + step.decode_tokens for way, step in steps.items()}
    assert computed == {benchmark.RECOMPUTE: 31, benchmark.SWAP: 1, benchmark.FOUND: 31 - 28}
    kinds = [move.kind for move in steps[benchmark.SWAP].moves]
    assert (kinds.count("out"), kinds.count("in")) == (8, 8)
    assert engine.scheduler.counts.recomputed == 2 and engine.scheduler.counts.swapped_in == 1


def test_the_crossing_lies_where_the_lines_meet() -> None:
    assert benchmark.crossing([10, 20, 30], [1.0, 2.0, 5.0], [2.0, 3.0, 4.0]) == "from 25 tokens"
    assert benchmark.crossing([10, 20], [1.0, 1.0], [2.0, 2.0]) == "never, up to 20"
    assert benchmark.crossing([10, 20], [2.0, 2.0], [1.0, 1.0]) == "always, from 10"
    assert (
        benchmark.crossing([10, 20, 30, 40], [3.0, 1.0, 2.0, 4.0], [2.0, 2.0, 2.0, 2.0])
        == "from 30 tokens"
    )


def test_the_map_is_the_winning_run_pass_by_pass(results: dict[str, Any], subject: Subject) -> None:
    frames = benchmark.unpacked(results["results"]["map"])
    assert len(frames) == TINY.frames and len(frames[0]) == TINY.budget_tokens // TINY.block_size
    engine = Engine(subject.model, scheduler=Scheduler(BlockPool(32, 4), 16, 16), sanitize=True)
    for i, (prompt, count) in enumerate(TINY.lengths):
        engine.add(Request(random_prompt(prompt, subject.config, f"request {i}"), greedy(count)))
    for frame in frames:
        engine.step()
        assert [min(state, 0) for state in frame] == [
            min(state, 0) for state in blockmap(engine.scheduler)
        ]
    assert any(CACHED in frame for frame in frames)
    assert benchmark.unpacked(benchmark.packed(frames)) == frames
    assert benchmark.packed([[-1, 7], [-1, 7], [12, -3]]) == ["-1x2 12x1", "7x2 -3x1"]


def test_the_parts_of_a_pass_make_the_whole(results: dict[str, Any]) -> None:
    for name, operators in results["results"]["profile"]["operators"].items():
        parts = benchmark.profile_parts(operators)
        assert sum(parts.values()) == pytest.approx(
            sum(each["seconds"] for each in operators) * 1e3
        )
        assert min(parts.values()) > 0, name  # the embedding is looked up by index_select too
    selected = {
        name: sum(each["calls"] for each in operators if each["operator"] == "index_select")
        for name, operators in results["results"]["profile"]["operators"].items()
    }
    assert selected["paged"] >= selected["contiguous"] + PRESETS["tiny"].n_layer


def test_the_progress_bar_knows_how_many_runs_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []

    class Counting(benchmark.tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            bars.append(self)

    monkeypatch.setattr(benchmark, "tqdm", Counting)
    monkeypatch.setattr(static_benchmark, "PROMPT", 6)
    monkeypatch.setattr(measure, "limits", lambda **_: LIMITS)
    plan = replace(TINY, win_dtypes=("float32",), requests=6, null_requests=2)
    benchmark.measure_all(plan)
    assert [bar.n for bar in bars] == [plan.runs]


def test_the_quick_plan_is_the_smaller_one() -> None:
    assert QUICK.runs < FULL.runs / 2
    for plan in (FULL, QUICK):
        config = PRESETS[plan.model]
        assert plan.slots * config.n_positions == plan.budget_tokens
        assert (
            max(plan.contexts) < config.n_positions
            and max(map(sum, plan.singles)) <= config.n_positions
        )
        assert max(plan.preempted) + plan.plain_steps + 1 <= config.n_positions
        assert plan.system % plan.block_size == 0 and plan.sized_context in plan.contexts
    few, many = (sum(count for _, count in plan.lengths) for plan in (QUICK, FULL))
    assert few < many / 10
