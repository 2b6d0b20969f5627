"""A run survives writing and reading, and damage is reported with its place."""

from __future__ import annotations

import json
import math
import os
import re

import pytest

from shared.errors import UserError
from stage07_loadtest import metrics, results
from stage07_loadtest.metrics import Slo, summarize
from stage07_loadtest.results import Writer

from .helpers import SMALL_RUN, broken, counters, point, record, refused

SLO = Slo(ttft=1.0)


def writer(folder):
    return Writer(folder, {"workload": "short"}, slo=SLO, seed=7)


def test_a_run_is_read_as_it_was_written(tmp_path):
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


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path, monkeypatch):
    writer(tmp_path / "old").add(point([record()]))
    with pytest.raises(UserError, match="already holds a run: name another folder"):
        writer(tmp_path / "old")
    (tmp_path / "file").write_text("", encoding="utf-8")
    for folder in (tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(UserError, match="cannot be created .* name another one with --out"):
            writer(folder)
    gone = writer(tmp_path / "run")
    (tmp_path / "run").rmdir()
    with pytest.raises(UserError, match="cannot be written to"):
        gone.add(point([record()]))
    assert gone.summaries == []
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(UserError, match="is not writable: name another folder with --out"):
        writer(tmp_path)


def test_a_key_is_not_written():
    for key in ("--api-key 's3cret key'", "'--api-key=s3cret key'"):
        command = results.without("s3cret key", f"loadtest {key} --out a")
        assert "s3cret" not in command and "hidden" in command and command.endswith("--out a")
    assert results.without("", "python -m x --out ''") == "python -m x --out ''"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda run: run.update(schema=99), "schema 99"),
        (lambda run: run.update(kind="stage02_kv_cache"), "is not from a load test"),
        (lambda run: run.update(results={}), "is not from a load test"),
        (lambda run: run["results"][1].pop("users"), "results[1].users is missing"),
        (lambda run: run["results"][0].update(extra=1), "results[0].extra is unknown"),
        (lambda run: run["results"][0].update(requests=True), "results[0].requests is not an int"),
        (lambda run: run["results"][0]["latency"]["itl"]["curve"].insert(3, "x"), "itl.curve[3]"),
    ],
)
def test_a_damaged_summary_is_rejected_with_its_place(tmp_path, change, problem):
    with pytest.raises(UserError, match="holds no run"):
        results.load(tmp_path)
    content = json.loads((SMALL_RUN / "summary.json").read_text(encoding="utf-8"))
    change(content)
    for text, words in ((json.dumps(content), problem), ('{"schema": 1', "damaged")):
        (tmp_path / "summary.json").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=re.escape(words)):
            results.load(tmp_path)


def test_a_damaged_request_is_rejected_with_its_line(tmp_path):
    with pytest.raises(UserError, match="requests.jsonl cannot be read"):
        results.load_requests(tmp_path)
    lines = (SMALL_RUN / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    good = json.loads(lines[2])
    for line, problem in (
        (lines[2][:-9], ""),
        (json.dumps(good | {"sent": "now"}), "request.sent is not a float"),
        (json.dumps(good | {"chunks": [None]}), r"request.chunks\[0\] is not a"),
        (json.dumps(good | {"point": 2}), "point 2 does not follow point 0"),
    ):
        text = "\n".join([*lines[:2], line, *lines[3:]])
        (tmp_path / "requests.jsonl").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=f"line 3 is damaged .*{problem}"):
            results.load_requests(tmp_path)
