"""The benchmark on a model that is small, under the name of the one that it measures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.bench.rows import Results
from shared.bench.tests.tools import check_drawn, lines, measured
from stage08_llama import benchmark
from stage08_llama.benchmark import BENCHMARK, FULL, SMOL
from stage08_llama.shapes import PRESETS

TINY = replace(
    FULL, models=(SMOL,), dtypes=("float32",), rows=(1, 2), contexts=(4, 1024), repeats=1,
    tokens=(1, 2), piece_repeats=1, lengths=((4, 1), (4, 3)), whole_repeats=1, story=(4, 8),
)  # fmt: skip


def test_everything_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(PRESETS[SMOL], vocab_size=64, n_layer=1, n_embd=18, head_dim=2, n_inner=8)
    monkeypatch.setitem(PRESETS, SMOL, small)
    content = measured(BENCHMARK, TINY)
    assert check_drawn(BENCHMARK, content) == {
        "limits": 1, "heads": 4, "pieces": 2, "whole": 2, "twin": 2, "far": 2,
        "published": 5, "claims": 3,
    }  # fmt: skip
    gpt2, llama = lines(BENCHMARK.tables(content)["twin"])
    assert (gpt2[0], llama[0]) == ("stories", "stories-chat")
    assert int(gpt2[2].replace(",", "")) == 3 * int(llama[2].replace(",", ""))
    win = next(iter(benchmark.claims(Results(content))))
    assert "2 x 1,024 tokens" in win.what and win.predicted > 1
