"""Compiling, and what there is no kernel for: one sentence each, and stage 05's engine."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from shared.config import Config
from shared.errors import UserError
from shared.models import load_model
from shared.testing import random_checkpoint
from stage01_forward.params import SamplingParams
from stage05_paged.cache import PagedCache
from stage06_serving.__main__ import plan
from stage06_serving.loading import make_engine
from stage06_serving.settings import parse
from stage06_serving.tests.conftest import checkpoint
from stage09_kernels import library
from stage09_kernels.backend import NoKernels
from stage09_kernels.cache import FAST, KernelCache
from stage09_kernels.engine import make
from stage09_kernels.runner import KernelRunner

SMALL = Config(11, 64, 32, 1, 2)
DEFINES = ("REAL=4", "WEIGHT=4", "CACHE=4")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache folder; what was compiled and loaded before is forgotten."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.load.cache_clear()
    yield tmp_path / "staircase" / "kernels"
    library.load.cache_clear()


def test_what_there_is_no_kernel_for():
    for width, dtype, words in (
        (32, torch.float16, "do not support float16: choose float32 or bfloat16"),
        (1026, torch.float32, "heads of at most 512 channels, and .* has 513"),
    ):
        with pytest.raises(NoKernels, match=words):
            KernelCache(Config(11, 64, width, 1, 2), 4, dtype=dtype)


def test_weights_and_cache_compute_in_one_dtype():
    """Other pairs would read numbers of another size."""
    model = load_model(random_checkpoint(SMALL), dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(NoKernels, match="torch.float64 weights with a cache of"):
            KernelRunner(model, KernelCache(model.config, 4, dtype=dtype))


def test_without_kernels_stage_05_answers_and_a_warning_tells(fresh, monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    model = load_model(random_checkpoint(SMALL), dtype=torch.float32)
    engine = make(model, 1)
    assert isinstance(getattr(engine.runner, "cache", None), PagedCache)
    assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].token_ids) == 4
    assert "cannot be compiled" in caplog.text and "as stage 05 does" in caplog.text
    with pytest.raises(NoKernels):
        make(model, 1, insist=True)


def test_a_library_is_compiled_once_for_all_that_is_in_it(fresh, tmp_path):
    source, header, written = tmp_path / "one.c", tmp_path / "number.h", []
    source.write_text('#include "number.h"\nint one(void) { return NUMBER + MORE; }\n')
    for number, more in ((1, 0), (1, 0), (2, 0), (2, 3)):
        header.write_text(f"#define NUMBER {number}\n")
        library.load.cache_clear()
        assert library.load(source, (f"MORE={more}",)).one() == number + more
        written.append({(file, file.stat().st_mtime_ns) for file in fresh.iterdir()})
    assert written[0] == written[1] < written[2] < written[3] and len(written[3]) == 3


def test_a_compiler_that_fails_is_named_with_its_reason(fresh, tmp_path, monkeypatch):
    script = tmp_path / "fake.py"
    script.write_text(
        "import sys\nif '-o' in sys.argv:\n"
        "    print('a note', file=sys.stderr); sys.exit('error: no space left')\n"
    )
    monkeypatch.setenv("CC", f"{sys.executable} {script}")
    with pytest.raises(NoKernels, match=r"compiled \(.*fake.py: error: no space left\)"):
        library.load(FAST, DEFINES)
    assert not list(fresh.glob("building-*"))


def test_without_any_compiler(fresh, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoKernels, match="No C compiler was found .* install one"):
        library.load(FAST, DEFINES)


def test_the_best_level_comes_first_and_refused_tiles_are_one_line(monkeypatch, caplog):
    """Tiles that the system refuses, or a processor that has none; asked once."""
    narrow = "avx2", "fma3", "f16c"
    wide = (*narrow, "avx512_f", "avx512_bw", "avx512_dq", "avx512_vl")
    every = *wide, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"

    def levels(*has):
        monkeypatch.setattr(library, "capabilities", lambda: dict.fromkeys(has, True))
        return library.levels()

    for answer, words in ((2, "the system refuses"), (1, "a flag and no tiles"), (0, "")):
        allowed = SimpleNamespace(permission=lambda answer=answer: answer)
        monkeypatch.setattr(library, "load", lambda *_, allowed=allowed, **__: allowed)
        library.may_use_tiles.cache_clear()
        caplog.clear()
        assert levels(*every) == levels(*every) == list(library.LEVELS)[answer > 0 :]
        assert [words in record.getMessage() for record in caplog.records] == [True] * bool(words)
    library.may_use_tiles.cache_clear()
    assert levels(*every[:-1]) == list(library.LEVELS)[1:]
    assert levels(*wide) == ["avx512", "avx2", "plain"]
    assert levels(*narrow) == levels(*wide[:-1]) == ["avx2", "plain"]
    assert levels() == ["plain"]


def test_a_blank_cache_takes_no_memory_before_it_is_written():
    """To clear that of 32 contexts of SmolLM2, six gigabytes, took half a minute at the start."""
    before = psutil.Process().memory_info().rss
    zeros = library.blank((2**14, 2**15), torch.bfloat16)  # a gigabyte
    assert psutil.Process().memory_info().rss - before < 2**28
    zeros[5, 7] = 3
    assert zeros[5].sum() == 3 == zeros[5, 7] and not zeros[-1].any()


# ---- the choice of kernels, and the server's


def test_the_kernels_are_chosen_where_they_compile(fresh, monkeypatch):
    def selected(*words):
        return make_engine(parse(["--kv-memory", "2MiB", *words])).selection

    assert [selected(*words).name for words in ((), ("--engine", "paged"))] == ["kernels", "paged"]
    library.load.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    selection = selected()
    assert selection.name == "paged" and "cannot be compiled" in selection.reason
    with pytest.raises(UserError, match="cannot be compiled .*--engine auto"):
        selected("--engine", "kernels")


def test_a_model_that_the_kernels_do_not_support_gets_another_engine(tmp_path):
    """And the start says which, and why."""
    folder = checkpoint(tmp_path / "wide", n_embd=1040, n_head=1, n_layer=1)
    settings = parse(["--model", str(folder), "--kv-memory", "1MiB"])
    served = make_engine(settings)
    assert type(served.engine.runner.cache) is PagedCache
    shown = plan(settings, served, "http://here")
    assert "\n  engine   paged, float32 " in shown and "\n  faster   The kernels " in shown
    with pytest.raises(UserError, match="kernels"):
        make_engine(parse(["--model", str(folder), "--engine", "kernels"]))
