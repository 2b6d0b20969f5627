"""A run survives writing and reading, and what is damaged is refused with its place.

`small_run` is a real one: python -m stage07_loadtest --users 1,2,4 --rates 4,8,12 --requests 8 --out <folder>.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.errors import UserError
from stage07_loadtest import metrics, results
from stage07_loadtest.metrics import Slo, Summary, summarize
from stage07_loadtest.results import Writer

from .test_metrics import broken, counters, point, record, refused

SMALL_RUN = Path(__file__).with_name("small_run")
SLO = Slo(ttft=1.0)


def near(found: Any, expected: Any) -> bool:
    """Equal but for the digits that are not written."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            near(found[name], expected[name]) for name in expected
        )
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(near, found, expected))
    return bool(
        found == pytest.approx(expected, abs=1e-5)
        if isinstance(expected, float)
        else found == expected
    )


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    points = [
        point([record(0), refused(1), broken(2, 0.1)], users=2, server=counters(5)),
        point([record(0)], users=None),
    ]
    writer = Writer(tmp_path / "new" / "run", {"workload": "short"}, slo=SLO, seed=7)
    for each in points:
        assert results.to_json(writer.add(each)) == results.to_json(summarize(each, SLO))
    run = results.load(tmp_path / "new" / "run")
    assert [results.to_json(each) for each in run.points] == [
        results.to_json(summarize(each, SLO)) for each in points
    ]
    assert all(isinstance(found, Summary) and found.slo == SLO for found in run.points)
    assert run.points[0].at(metrics.TTFT, 95, adjusted=True) == math.inf
    assert run.points[0].failures == {"http_503": 1, "reset": 1} and run.points[0].users == 2
    assert (
        run.points == writer.summaries
    )  # to the last digit: charts of the one are charts of the other
    records = results.load_requests(tmp_path / "new" / "run")
    for found, each in zip(records, points, strict=True):
        assert [vars(one) for one in found] == [results.encode(vars(one)) for one in each.records]


def test_what_must_be_known_of_a_run_is_written(tmp_path: Path) -> None:
    Writer(tmp_path, {"workload": "short"}, slo=SLO, seed=7).add(point([record()]))
    about = results.load(tmp_path).about
    assert (
        about["schema"] == 1
        and about["seed"] == 7
        and about["configuration"] == {"workload": "short"}
    )
    assert {"command", "commit", "dirty", "machine", "versions"} <= about.keys()
    assert "python" in about["versions"] and "processor" in about["machine"]


def test_a_run_that_was_cut_short_keeps_what_it_had(tmp_path: Path) -> None:
    writer = Writer(tmp_path, {}, slo=SLO, seed=0)
    writer.add(point([record()]))
    assert len(results.load(tmp_path).points) == len(results.load_requests(tmp_path)) == 1
    writer.add(point([record(), record(1)]))
    assert [each.requests for each in results.load(tmp_path).points] == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests.jsonl", "summary.json"]


def test_a_run_is_never_written_over(tmp_path: Path) -> None:
    Writer(tmp_path, {}, slo=SLO, seed=0).add(point([record()]))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match="holds a run already: name another folder"):
        Writer(tmp_path, {}, slo=SLO, seed=0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    for folder in (tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(UserError, match="cannot be made .* name another one with --out"):
            Writer(folder, {}, slo=SLO, seed=0)


def test_a_folder_that_nobody_may_write_to_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(UserError, match="cannot be written: name another folder with --out"):
        Writer(tmp_path, {}, slo=SLO, seed=0)


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", {}, slo=SLO, seed=0)
    (tmp_path / "run").rmdir()
    with pytest.raises(UserError, match="cannot be written to"):
        writer.add(point([record()]))
    assert writer.summaries == []


def test_a_key_is_not_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (
        ["--api-key", "s3cret key", "--out", "a"],
        ["--api-key=s3cret key", "--out", "a"],
    ):
        monkeypatch.setattr(sys, "argv", ["loadtest", *arguments])
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        Writer(folder, {}, slo=SLO, seed=0, secret="s3cret key").add(point([record()]))
        command = results.load(folder).about["command"]
        assert "s3cret" not in (folder / "summary.json").read_text(encoding="utf-8")
        assert "hidden" in command and command.endswith("--out a")
    assert results.without("", "python -m x --out ''") == "python -m x --out ''"


def test_nan_is_a_mistake_and_infinity_is_a_word() -> None:
    assert results.encode({"a": [math.inf, 0.1234567, 3, None, True]}) == {
        "a": ["inf", 0.123457, 3, None, True]
    }
    with pytest.raises(ValueError, match="not a number"):
        results.encode([math.nan])


# ---- damage


def edited(tmp_path: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the small run with its summary changed."""
    folder = tmp_path / "run"
    shutil.copytree(SMALL_RUN, folder)
    content = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    edit(content)
    (folder / "summary.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    r"schema 99": lambda content: content.update(schema=99),
    r"is not of a load test": lambda content: content.update(kind="stage02_kv_cache"),
    r"not of a load": lambda content: content.update(results={}),
    r"results\[1\]\.users is missing": lambda content: content["results"][1].pop("users"),
    r"results\[0\]\.extra is unknown": lambda content: content["results"][0].update(extra=1),
    r"results\[0\]\.requests is no int": lambda content: content["results"][0].update(requests=8.5),
    r"results\[0\]\.seconds is no float": lambda content: content["results"][0].update(seconds="1"),
    r"results\[0\]\.requests is no int ": lambda content: content["results"][0].update(
        requests=True
    ),
    r"results\[0\]\.latency\.tpot\.mean is no float": lambda content: content["results"][0][
        "latency"
    ]["tpot"].update(mean=None),
    r"results\[0\]\.latency\.itl\.curve\[3\] is no float": lambda content: content["results"][0][
        "latency"
    ]["itl"]["curve"].__setitem__(3, "x"),
    r"results\[0\]\.slo is no object": lambda content: content["results"][0].update(slo=[]),
    r"results\[0\]\.flags is no list": lambda content: content["results"][0].update(flags="none"),
    r"results\[0\]\.failures is no object": lambda content: content["results"][0].update(
        failures=[]
    ),
}


@pytest.mark.parametrize("problem", EDITS)
def test_a_damaged_summary_is_refused_with_its_place(problem: str, tmp_path: Path) -> None:
    folder = edited(tmp_path, EDITS[problem])
    with pytest.raises(UserError, match=problem.strip()):
        results.load(folder)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        results.load(tmp_path)
    with pytest.raises(UserError, match="requests.jsonl cannot be read"):
        results.load_requests(tmp_path)
    (tmp_path / "summary.json").write_text('{"schema": 1', encoding="utf-8")
    with pytest.raises(UserError, match="damaged"):
        results.load(tmp_path)


LINES: dict[str, Callable[[str], str]] = {
    "line 3 is damaged": lambda line: line[:-9],
    "it is no request": lambda line: "[]",
    "request.sent is no float": lambda line: json.dumps(json.loads(line) | {"sent": "now"}),
    r"request.chunks\[0\] is no float": lambda line: json.dumps(
        json.loads(line) | {"chunks": [None]}
    ),
    "request.speed is unknown": lambda line: json.dumps(json.loads(line) | {"speed": 1}),
    "point 2 does not follow point 0": lambda line: json.dumps(json.loads(line) | {"point": 2}),
    "point is no int": lambda line: json.dumps(
        {name: value for name, value in json.loads(line).items() if name != "point"}
    ),
}


@pytest.mark.parametrize("problem", LINES)
def test_a_damaged_request_is_refused_with_its_line(problem: str, tmp_path: Path) -> None:
    lines = (SMALL_RUN / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    lines[2] = LINES[problem](lines[2])
    (tmp_path / "requests.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(UserError, match=problem) as caught:
        results.load_requests(tmp_path)
    assert "line 3" in str(caught.value)


# ---- a real run


def test_the_summary_of_a_real_run_follows_from_its_requests() -> None:
    run, requests = results.load(SMALL_RUN), results.load_requests(SMALL_RUN)
    assert [each.load for each in run.points] == [
        "1 user", "2 users", "4 users", "poisson, 4/s", "poisson, 8/s", "poisson, 12/s",
    ]  # fmt: skip
    for stored, records in zip(run.points, requests, strict=True):
        again = point(records, users=stored.users, duration=stored.seconds)
        found = replace(summarize(again, stored.slo), kind=stored.kind)
        assert near(results.to_json(found)["latency"], results.to_json(stored)["latency"])
        assert (found.requests, found.succeeded, found.completion_tokens) == (8, 8, 400)
        assert found.goodput == pytest.approx(stored.goodput, rel=1e-4)
        assert stored.tokens_match is True and stored.blocks_back is True
