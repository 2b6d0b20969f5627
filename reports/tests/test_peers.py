"""Other engines beside ours: the protocol with a real one, and every failure is named."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from reports.peers import compare, drive, install, process, served, shapes
from reports.peers.compare import BENCHMARK, title
from reports.peers.install import ENGINES, OURS, Engine, python
from reports.peers.process import Driver
from reports.peers.served import Load
from shared import charts
from shared.bench import kit
from shared.bench.tests.tools import lines, measured
from shared.errors import UserError
from shared.models import STORIES
from shared.parity import random_prompt
from stage01_forward.generation import Output

READY = "print('{\"versions\": {}}', flush=True)\n"


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_an_engine_in_its_process_answers_as_ours_and_says_when() -> None:
    """Takes seconds: it starts a program that imports PyTorch and transformers."""
    subject = kit.Subject(kit.shape("stories"), torch.float32)
    prompts = [random_prompt(5, subject.config, row) for row in range(3)]
    engine = ENGINES["transformers"]
    command = engine.command(Path(sys.executable), STORIES, "float32", 1)
    with Driver(command, engine.environment(1)) as driver:
        about = driver.ready()
        assert {"torch", "transformers"} <= set(about["versions"])
        assert about["bytes"] == sum(x.nbytes for x in subject.shape.tensors.values())
        (one,) = driver.ask(prompts[:1], 1)["tokens"]
        found = process.calm(partial(driver.ask, prompts, 4), driver.process.pid, tries=1)
    assert found["tokens"][0][0] == one[0]
    assert [len(ids) for ids in found["tokens"]] == [4] * 3
    assert subject.prove(map(Output, prompts, found["tokens"]))["tokens"] == 12
    assert 0 < found["first"] < found["seconds"] and found["begun"] == 3 and found["others"] >= 0
    assert driver.process.poll() is not None


@pytest.mark.parametrize(
    "text, reason",
    [
        ("raise SystemExit('there is no such engine')", "^there is no such engine$"),
        ("import os; os._exit(7)", "ended with status 7"),
        ("1 / 0", "^ZeroDivisionError: division by zero$"),
        (READY + "input(); raise SystemExit('lost')", "^lost$"),
        (READY + "input(); import time; time.sleep(60)", "not answer within 0.5 s"),
        (READY + "input(); print('{\"tokens\": [[1]]}')", r"answers of \[1\] tokens instead of 2"),
    ],
)
def test_an_engine_that_ends_hangs_or_stops_early_is_ended_with_its_reason(
    text: str, reason: str
) -> None:
    with Driver(program(text)) as driver, pytest.raises(UserError, match=reason):
        driver.ready(20)
        driver.ask([[1, 2]], 2, seconds=0.5 if "sleep" in text else 20)
    assert driver.process.poll() is not None


def test_the_first_tokens_are_there_when_every_row_has_one() -> None:
    def answer(prompts: list[list[int]], count: int, emit: Any) -> None:
        for row in (0, 0, 1, 1):
            emit([(row, 7)])

    found = drive.asked(answer, [[1], [2]], 2)
    assert found["begun"] == 3 and found["tokens"] == [[7, 7]] * 2


def test_what_an_engine_has_started_ends_with_it() -> None:
    sleeper = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    start = f"import subprocess, sys; subprocess.Popen({sleeper})\n"
    with Driver(program(start + READY + "input()")) as driver:
        driver.ready(20)
        (child,) = psutil.Process(driver.process.pid).children()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_run_beside_other_programs_is_repeated_and_the_calmest_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = iter([0.0, 5.0, 5.0, 6.0, 6.0, 6.01, 7.0, 9.0, 9.0, 10.0])
    monkeypatch.setattr(process, "CALM", 0.0)
    monkeypatch.setattr(process, "busy", lambda: next(busy))
    monkeypatch.setattr(process, "used", lambda pid: 0.0)
    runs = iter(range(9))

    def run() -> dict[str, Any]:
        return {"seconds": 1.0, "number": next(runs)}

    calmest = process.calm(run, 1, tries=3)
    assert calmest["number"] == 2 and calmest["others"] == pytest.approx(0.01)
    assert process.calm(run, 1, tries=2)["number"] == 4  # none was calm: 2 seconds, then 1


@pytest.mark.slow
def test_an_environment_is_installed_once_and_pips_reason_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes seconds: it makes an environment with pip in it."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wheel = tmp_path / "peer-1.0-py3-none-any.whl"
    about = {"METADATA": "Metadata-Version: 2.1\nName: peer\nVersion: 1.0\n", "RECORD": ""}
    about["WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("peer.py", "import psutil\nprint('here')\n")
        for name, text in about.items():
            file.writestr(f"peer-1.0.dist-info/{name}", text)
    engine = Engine("a", packages=(str(wheel),), unwanted=("absent",))
    runs = python(engine, tmp_path)
    assert subprocess.run([runs, "-c", "import peer"], capture_output=True).stdout == b"here\n"
    wheel.unlink()
    assert python(engine, tmp_path) == runs  # nothing is installed again
    monkeypatch.setattr(install.venv, "create", lambda *_, **__: None)  # it takes seconds
    with pytest.raises(UserError, match=r"^pip install failed: .*no-such-engine==1\.0"):
        python(Engine("a", packages=("no-such-engine==1.0",)), tmp_path)
    assert "no-such-engine" not in (tmp_path / "a" / "installed.json").read_text()
    assert python(Engine("c"), tmp_path) == Path(sys.executable)


@pytest.mark.slow
def test_a_whole_measurement_names_who_did_not_take_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (compare, process):
        monkeypatch.setattr(module, "HOME", tmp_path)
    monkeypatch.setitem(ENGINES, "lost", Engine("no_such_driver"))
    monkeypatch.setattr(compare, "machine", lambda dtype: {"bandwidth": 30.0, "gflops": 100.0})
    plan = replace(
        compare.FULL, models=("stories",), dtypes=("float32",), rounds=(2, 2, 2), tries=1,
        engines=(OURS, "transformers", "lost"), load=Load(2, 4, 8, 4),
        prefills=(16,), context=8, answers=((1, 4), (2, 4)),
    )  # fmt: skip
    content = measured(BENCHMARK, plan)
    cells = content["results"]["cells"]
    assert [cell["lengths"] for cell in cells] == [[[16, 1, 1]], [[8, 4, 1]], [[8, 4, 2]]]
    for cell in cells:
        ((_, answer, rows),) = cell["lengths"]
        assert set(cell["seconds"]) == {OURS, "transformers"} and len(cell["seconds"][OURS]) == 2
        assert cell["same"] == {OURS: rows, "transformers": rows}
        assert cell["proof"][OURS]["tokens"] == rows * answer
        assert not {"tokens", "prompts", "answers"} & set(cell)
    (failed,) = content["results"]["failed"]
    assert failed["engine"] == "lost" and "no_such_driver" in failed["reason"]
    (group,) = content["results"]["served"]
    assert list(group["seconds"]) == [served.OFFLINE, OURS] and len(group["seconds"][OURS]) == 2
    tables = BENCHMARK.tables(content)
    assert not any("nan" in text for text in tables.values())
    assert lines(tables["entrants"])[-1] == ["lost", "", "0 of 0", f"float32: {failed['reason']}"]
    shown = [title("transformers"), title(OURS), "the machine's bound"]
    assert sorted(line[0] for line in lines(tables["float32"])) == sorted(shown)
    assert "no instructions" in tables["bfloat16"]
    assert [line[1] for line in lines(tables["ours"])] == [
        "prefill 16",
        "decode, 1 row",
        "decode, 2 rows",
    ]
    assert "of 3 cells" in BENCHMARK.headline(content)
    assert len(lines(shapes.BENCHMARK.tables(content)["larger"])) == 6
    assert "x transformers" in shapes.BENCHMARK.headline(content)
    (picture,) = BENCHMARK.charts(content).values()
    assert charts.render(picture()).endswith(b"</svg>\n")
