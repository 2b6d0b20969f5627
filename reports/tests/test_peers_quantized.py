"""Other engines' weights of 8 and 4 bits beside ours: formats, proofs and the table of aims."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reports.peers import compare, drivers, process, quantized
from reports.peers.install import QUANTIZED
from reports.peers.quantized import BENCHMARK
from shared.bench import kit
from shared.bench.tests.tools import check_drawn, lines, measured


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (compare, process):
        monkeypatch.setattr(module, "HOME", tmp_path)
    return tmp_path


def test_the_folder_for_vllm_is_within_half_a_scale(home: Path) -> None:
    place = compare.checkpoint("stories")
    plain, stored = (
        load_file(folder / "model.safetensors") for folder in (place, drivers.int8_folder(place))
    )
    name = "transformer.h.1.mlp.c_fc.weight"
    codes, scale = stored[name], stored[f"{name}_scale"].t()
    assert codes.dtype == torch.int8 and codes.abs().amax(0).eq(127).all()
    assert ((codes * scale - plain[name]).abs() <= 0.501 * scale).all()
    assert stored["transformer.wte.weight"].dtype == torch.bfloat16
    config = json.loads((place / "int8" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"] and config["n_embd"]


@pytest.mark.slow
def test_ours_are_proved_by_their_own_format_and_aims_can_miss(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name in QUANTIZED if name.startswith("ours")]
    theirs = {"theirs, q8_0": "ours, int8", "theirs, q4_0": "ours, int4"}
    for name, like in theirs.items():
        monkeypatch.setitem(QUANTIZED, name, QUANTIZED[like])
    monkeypatch.setitem(QUANTIZED, "lost, q8_0", replace(QUANTIZED["ours, int8"], options=("?",)))
    monkeypatch.setattr(compare, "machine", lambda dtype: {"bandwidth": 30.0, "gflops": 100.0})
    plan = replace(
        quantized.FULL, models=("stories",), rounds=(2, 2, 2), tries=1, prefills=(16,), context=8,
        engines=(*names, *theirs, "lost, q8_0"), answers=((1, 4), (3, 4)),
    )  # fmt: skip
    content = measured(BENCHMARK, plan)
    results = content["results"]
    for cell in results["cells"]:
        ((_, answer, rows),) = cell["lengths"]
        assert set(cell["seconds"]) == {*names, *theirs} and set(cell["proof"]) == set(names)
        assert {proof["tokens"] for proof in cell["proof"].values()} == {rows * answer}
    sizes = results["bytes"]
    tensors = kit.shape("stories").tensors
    plain = sum(x.nbytes for name, x in tensors.items() if x.ndim > 1 and name != "wpe.weight")
    assert 0.25 < sizes["ours, int8"] / plain < 0.27 and sizes["ours, int4"] < sizes["ours, int8"]
    counts = check_drawn(BENCHMARK, content)
    assert counts["int8"] == 4 and counts["int4"] == 3 and counts["conditions"] == 3
    tables = BENCHMARK.tables(content)
    (lost,) = [line for line in lines(tables["int8"]) if line[0].startswith("lost, q8_0: ")]
    assert "No module" in lost[0] and lost[1:] == [""] * 4
    assert [line[0] for line in lines(tables["aims"])] == [
        "int8, decode, 1 row: over theirs, q8_0",
        "int8, decode, 1 row: of the memory's bandwidth",
        "int8, decode, 3 rows: over theirs, q8_0",
        "int8, prefill 16: over theirs, q8_0",
        "int4, decode, 1 row: over theirs, q4_0",
        "int4, decode, 1 row: over theirs, q4_0, at equal bytes",
        "int4, decode, 1 row: of the memory's bandwidth",
        "int4, decode, 3 rows: over theirs, q4_0",
    ]
    for first, result in ((0.5, "**missed**"), (8.0, "held")):
        (cell,) = [cell for cell in results["cells"] if cell["lengths"] == [[8, 4, 1]]]
        cell["first"] = {name: [0.0] * 2 for name in cell["seconds"]}
        cell["seconds"] = {name: [first] * 2 for name in cell["seconds"]}
        cell["seconds"]["ours, int8"] = cell["seconds"]["ours, int4"] = [1.0] * 2
        content["results"]["bytes"] |= {"ours, int4": 8000, "theirs, q4_0": 6400}
        shown = lines(BENCHMARK.tables(content)["aims"])
        assert [shown[0][2:], shown[4][2:]] == [[f"{first:.2f}x", result]] * 2
        assert shown[5][2] == f"{1.25 * first:.2f}x"
    assert (
        BENCHMARK.headline(content) == "one row: int8 8.00x theirs, q8_0, int4 8.00x theirs, q4_0"
    )
