"""The benchmark measures a tiny model for real, after proving it against `transformers`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shared.bench.kit import Subject
from shared.bench.rows import Results
from shared.bench.tests.tools import check_drawn, measured
from shared.checkpoint import Checkpoint
from shared.peers import transformers_model
from stage01_forward import benchmark

TINY = replace(
    benchmark.FULL, models=("tiny", "tiny"), lengths=(1, 5), attention=(4, 8), answer=6, repeats=2,
    generation_repeats=2, profiled=8,
)  # fmt: skip


def test_everything_is_measured_proved_and_drawn() -> None:
    content = measured(benchmark.BENCHMARK, TINY)
    counts = {"limits": 1, "forward": 4, "attention": 4, "linear": 4, "generation": 4, "profile": 6}
    counts["claims"] = 4
    assert check_drawn(benchmark.BENCHMARK, content) == counts
    results = Results(content)
    for row in results.groups("generation"):
        assert {proof["tokens"] for proof in row["proof"].values()} == {TINY.answer}
    for row in results.groups("forward") + results.groups("attention"):
        assert row["difference"] <= benchmark.LOGIT_BOUND[row.kind]
        assert {len(taken) for taken in row["seconds"].values()} == {TINY.repeats}
    assert [row["bytes"] for row in results.groups("attention", dtype="float32")] == [128, 512]


def test_wrong_logits_stop_the_benchmark(tiny: Checkpoint) -> None:
    peer = transformers_model(tiny, torch.float32)
    tensors = {name: tensor.clone() for name, tensor in tiny.tensors.items()}
    right = Subject(tiny, torch.float32).model
    assert benchmark.prove_logits(right, peer, [1, 2, 3]) < 1e-4
    tensors["wte.weight"][3, 0] += 0.5
    wrong = Subject(Checkpoint(tiny.config, tensors), torch.float32).model
    with pytest.raises(AssertionError, match="float32 logits differ from transformers' by"):
        benchmark.prove_logits(wrong, peer, [1, 2, 3])
