"""The tour visits every engine, and says which one differs."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest

from reports import staircase, tour
from shared import cli, registry
from stage02_kv_cache.engine import Engine


@pytest.mark.slow
def test_a_stage_with_a_wrong_token_is_named(monkeypatch: Any, capsys: Any) -> None:
    options = argparse.Namespace(max_tokens=8, random_weights=True)
    parser = cli.Parser("reports.tour", "", "")
    cli.add_model_options(parser)
    loaded = cli.load_model_from(parser.parse_args([]))
    monkeypatch.setattr(staircase, "ENGINES", ("forward", "kv_cache"))
    assert tour.visit(loaded, options) == 0 and "tokens, identical" in capsys.readouterr().out

    class Wrong(Engine):
        def generate(self, prompts: Any, sampling: Any) -> Any:
            outputs = super().generate(prompts, sampling)
            return [
                replace(out, token_ids=[out.token_ids[0] + 1, *out.token_ids[1:]])
                for out in outputs
            ]

    monkeypatch.setattr(registry, "load", lambda entry, load=registry.load: (
        (lambda model, contexts: Wrong(model)) if "kv_cache" in entry else load(entry)
    ))  # fmt: skip
    assert tour.visit(loaded, options) == 1 and "DIFFERENT" in capsys.readouterr().out
