"""The profile counts what really ran: every product of every layer and step, and tells matrices
from vectors."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from shared import linear, profiling
from shared.checkpoint import PRESETS, Checkpoint
from shared.course import profile, stages
from shared.testing import make_folder

PROMPT, NEW = [1, 2, 3, 4, 5], 6
LAYERS, WIDTH, WORDS = PRESETS["tiny"].n_layer, PRESETS["tiny"].n_embd, PRESETS["tiny"].vocab_size


def products(tiny: Checkpoint, stage: str, packed: bool) -> dict[str, dict[str, Any]]:
    """What a profile of `stage` says of the products, by their shape: a prompt of 5 tokens, 6 new
    ones. The packed layer may run one row as the fewest rows that it is quick with."""
    model = stages.load_model(tiny, dtype=torch.float32)
    if packed:
        linear.optimize(model, "packed")
    engine = stages.engines()[stage](model)
    sampling = stages.sampling_params()(max_tokens=NEW, ignore_eos=True)
    found = profiling.profile(lambda: engine.generate([PROMPT], sampling), rows=1000)
    assert sum(each["share"] for each in found) == pytest.approx(1)
    seconds = [each["seconds"] for each in found]
    assert seconds == sorted(seconds, reverse=True)
    named = [each for each in found if each["product"]]
    return {re.sub(rf"^{linear.FEWEST_ROWS} x", "1 x", each["product"]): each for each in named}


PACKED = [False, *([True] if linear.can_pack(torch.device("cpu"), torch.float32) else [])]


@pytest.mark.parametrize("packed", PACKED)
def test_the_naive_engine_multiplies_matrices_and_the_cached_one_vectors(tiny, packed):
    naive = products(tiny, "stage01_forward", packed)
    every_step = naive[f"{len(PROMPT)}..{len(PROMPT) + NEW - 1} x {WIDTH} -> {4 * WIDTH}"]
    assert (every_step["kind"], every_step["calls"]) == ("matrix-matrix", LAYERS * NEW)
    cached = products(tiny, "stage02_kv_cache", packed)
    prefill = cached[f"{len(PROMPT)} x {WIDTH} -> {4 * WIDTH}"]
    assert (prefill["kind"], prefill["calls"]) == ("matrix-matrix", LAYERS)
    decode = cached[f"1 x {WIDTH} -> {4 * WIDTH}"]
    assert (decode["kind"], decode["calls"]) == ("matrix-vector", LAYERS * (NEW - 1))
    for found in (naive, cached):  # logits for one row a step, in both
        logits = found[f"1 x {WIDTH} -> {WORDS}"]
        assert (logits["kind"], logits["calls"]) == ("matrix-vector", NEW)


def test_rates_are_bytes_and_operations_over_time_and_an_operator_is_a_line():
    layer, x = torch.nn.Linear(64, 96), torch.randn(8, 64)
    found = profiling.profile(
        lambda: [layer(x).softmax(-1) for _ in range(3)], rows=5, dtype=torch.bfloat16
    )
    (each,) = [each for each in found if each["product"]]
    assert (each["product"], each["calls"]) == ("8 x 64 -> 96", 3)
    assert each["gb_s"] * each["seconds"] * 1e9 == pytest.approx(3 * 64 * 96 * 2)
    assert each["gflops"] * each["seconds"] * 1e9 == pytest.approx(3 * 2 * 8 * 64 * 96)
    assert json.loads(json.dumps(found)) == found
    lines = profile.table(found).splitlines()
    assert len(lines) == 1 + len(found) == 6
    assert any("8 x 64 -> 96" in line and "matrix-matrix" in line for line in lines)


def test_command_prints_the_operators_and_writes_a_trace(tmp_path, capsys):
    model, trace = make_folder(tmp_path / "model"), tmp_path / "decode.trace.json"
    words = f"stage02_kv_cache Once --model {model} --max-tokens 4 --rows 500 --linear plain"
    assert profile.main([*words.split(), "--trace", str(trace)]) == 0
    output = capsys.readouterr().out
    assert "stage02_kv_cache: 4 forward passes after a prompt of 4 tokens" in output
    assert "1 x 16 -> 64" in output and "matrix-vector" in output and "attention" in output
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event.get("name") == "aten::addmm" for event in events) > 2 * 4
