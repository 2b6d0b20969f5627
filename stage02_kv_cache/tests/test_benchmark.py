"""The benchmark measures a tiny model for real; what it interpolates and predicts is arithmetic."""

from __future__ import annotations

from dataclasses import replace

from shared.bench.rows import Results
from shared.bench.tests.tools import LIMITS, check_drawn, measured
from shared.checkpoint import PRESETS
from shared.roofline import forward_cost
from stage02_kv_cache import benchmark
from stage02_kv_cache.benchmark import CACHED, NAIVE

TINY = replace(
    benchmark.FULL, models=("tiny", "tiny"), growth=(5, 12), stride=4, prompts=(4, 9), answer=5,
    repeats={NAIVE: 1, CACHED: 1}, null_prompts=(3,), null_repeats=1, profiled=(1, 4, 3),
)  # fmt: skip


def test_everything_is_measured_proved_and_drawn() -> None:
    content = measured(benchmark.BENCHMARK, TINY)
    counts = {"limits": 1, "growth": 8, "prompts": 8, "null": 2, "profile": 6, "claims": 6}
    assert check_drawn(benchmark.BENCHMARK, content) == counts
    results = Results(content)
    for row in results.groups("prompts") + results.groups("null"):
        assert {proof["tokens"] for proof in row["proof"].values()} == {row.tokens}
        assert row["passes"] == {NAIVE: row.tokens, CACHED: row.tokens}
        assert row["bytes"][NAIVE] == 0 < row["bytes"][CACHED]
    for row in results.groups("growth"):
        assert row["proof"]["tokens"] == 12 and row["places"] == [0, 4, 8, 11]
        assert [len(run) for run in row["steps"][CACHED]] == [12]


def test_naive_passes_that_were_not_run_are_interpolated() -> None:
    steps = {NAIVE: [[1.0, 5.0, 9.0]], CACHED: [[2.0] + [1.0] * 8]}
    group = {"model": "tiny", "dtype": "float32", "prompt": 5, "counts": [3, 9]}
    group |= {"places": [0, 4, 8], "steps": steps}
    about = {"configuration": {}, "limits": vars(LIMITS), "results": {"growth": [group]}}
    few, many = benchmark.counted(Results(about))
    assert few["seconds"] == {NAIVE: [1.0 + 2.0 + 3.0], CACHED: [4.0]} and few.tokens == 3
    assert many["seconds"] == {NAIVE: [sum(range(1, 10))], CACHED: [10.0]}
    config = PRESETS["tiny"]
    naive = [forward_cost(config, few.kind, n) for n in (5, 6, 7)]
    cached = [naive[0], *(forward_cost(config, few.kind, 1, n) for n in (5, 6))]
    assert benchmark.predicted(few.of(NAIVE)) == few.least(naive)
    assert benchmark.predicted(few.of(CACHED)) == few.least(cached)
