"""A run survives writing and reading, and damage is reported with its place."""

from __future__ import annotations

import json
import math
import os
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from pytest import approx

from shared.errors import UserError
from stage07_loadtest import metrics, results
from stage07_loadtest.metrics import Slo, summarize
from stage07_loadtest.results import Writer
from stage07_loadtest.tests.helpers import SMALL_RUN, broken, counters, point, record, refused

SLO = Slo(ttft=1.0)


def writer(folder: Path, **options: Any) -> Writer:
    return Writer(folder, {"workload": "short"}, slo=SLO, seed=7, **options)


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    points = [
        point([record(0, 0.123456), refused(1), broken(2, 0.1)], users=2, server=counters(5)),
        point([record(0)], users=None),
    ]
    written, folder = writer(tmp_path / "new" / "run"), tmp_path / "new" / "run"
    for number, one in enumerate(points, 1):
        assert results.to_json(written.add(one)) == results.to_json(summarize(one, SLO))
        run = results.load(folder)  # a run that is cut short keeps what it had
        assert len(run.points) == len(results.load_requests(folder)) == number
    assert run.points == written.summaries  # to the last digit, so charts are equal
    assert run.points[0].at(metrics.TTFT, 95, adjusted=True) == math.inf
    for found, one in zip(results.load_requests(folder), points, strict=True):
        assert [vars(item) for item in found] == [results.encode(vars(a)) for a in one.records]
    assert results.encode({"a": [math.inf, 0.1234567, None]}) == {"a": ["inf", 0.123457, None]}
    with pytest.raises(ValueError, match="NaN"):
        results.encode([math.nan])
    about = run.about
    assert (about["schema"], about["seed"], about["configuration"]) == (1, 7, {"workload": "short"})
    assert about.keys() >= {"command", "commit", "dirty", "versions", "machine"}


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path, monkeypatch) -> None:
    writer(tmp_path / "old").add(point([record()]))
    with pytest.raises(UserError, match="already holds a run: name another folder"):
        writer(tmp_path / "old")
    (tmp_path / "file").write_text("", encoding="utf-8")
    for folder in (tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(UserError, match="cannot be made .* name another one with --out"):
            writer(folder)
    gone = writer(tmp_path / "run")
    (tmp_path / "run").rmdir()
    with pytest.raises(UserError, match="cannot be written to"):
        gone.add(point([record()]))
    assert gone.summaries == []
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(UserError, match="is not writable: name another folder with --out"):
        writer(tmp_path)


def test_a_key_is_not_written() -> None:
    for key in ("--api-key 's3cret key'", "'--api-key=s3cret key'"):
        command = results.without("s3cret key", f"loadtest {key} --out a")
        assert "s3cret" not in command and "hidden" in command and command.endswith("--out a")
    assert results.without("", "python -m x --out ''") == "python -m x --out ''"


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("schema", 99, "schema 99"),
        ("kind", "stage02_kv_cache", "is not of a load test"),
        ("results", {}, "is not of a load test"),
        ("results.1.users", ..., r"results\[1\]\.users is missing"),
        ("results.0.extra", 1, r"results\[0\]\.extra is unknown"),
        ("results.0.requests", True, r"results\[0\]\.requests is not an int"),
        ("results.0.latency.tpot.mean", None, r"latency\.tpot\.mean is not a float"),
        ("results.0.latency.itl.curve.3", "x", r"latency\.itl\.curve\[3\] is not a float"),
    ],
)
def test_a_damaged_summary_is_rejected_with_its_place(
    tmp_path: Path, path: str, value: Any, problem: str
) -> None:
    content = json.loads((SMALL_RUN / "summary.json").read_text(encoding="utf-8"))
    *parents, last = [int(name) if name.isdigit() else name for name in path.split(".")]
    place: Any = reduce(getitem, parents, content)
    if value is ...:
        del place[last]
    else:
        place[last] = value
    (tmp_path / "summary.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=problem):
        results.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda line: json.dumps(line)[:-9], ""),
        (lambda line: json.dumps(line | {"sent": "now"}), "request.sent is not a float"),
        (lambda line: json.dumps(line | {"chunks": [None]}), r"request.chunks\[0\] is not a"),
        (lambda line: json.dumps(line | {"point": 2}), "point 2 does not follow point 0"),
    ],
)
def test_a_damaged_request_is_rejected_with_its_line(tmp_path: Path, change, problem: str) -> None:
    lines = (SMALL_RUN / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    lines[2] = change(json.loads(lines[2]))
    (tmp_path / "requests.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(UserError, match=f"line 3 is damaged .*{problem}"):
        results.load_requests(tmp_path)


def test_a_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        results.load(tmp_path)
    with pytest.raises(UserError, match="requests.jsonl cannot be read"):
        results.load_requests(tmp_path)
    (tmp_path / "summary.json").write_text('{"schema": 1', encoding="utf-8")
    with pytest.raises(UserError, match="damaged"):
        results.load(tmp_path)


def test_the_summary_of_a_real_run_follows_from_its_requests() -> None:
    run, requests = results.load(SMALL_RUN), results.load_requests(SMALL_RUN)
    loads = ["1 user", "2 users", "4 users", "poisson, 4/s", "poisson, 8/s", "poisson, 12/s"]
    assert [stored.load for stored in run.points] == loads
    for stored, records in zip(run.points, requests, strict=True):
        found = summarize(point(records, users=stored.users, duration=stored.seconds), stored.slo)
        for name, values in found.latency.items():  # but for the digits that are not written
            assert values.percentiles == approx(stored.latency[name].percentiles, abs=1e-5)
        assert (found.requests, found.succeeded, found.completion_tokens) == (8, 8, 400)
        assert found.goodput == approx(stored.goodput, rel=1e-4)
        assert stored.tokens_match is True and stored.blocks_back is True
