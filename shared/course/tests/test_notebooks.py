"""The labs' runner, on small notebooks and real kernels: failures are named, outputs are kept."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest

from shared import paths
from shared.course import notebooks
from shared.errors import UserError

GOOD = (
    "import pathlib, sys\nprint(pathlib.Path('beside.txt').read_text())",
    "sys.executable",
    "for i in range(3): print(i)",
)
BROKEN = ("before = 41", "before / 0", "print('never')")
DEAD = ("import os\nos._exit(1)",)
ENDLESS = ("import time\nwhile True: time.sleep(0.1)",)


def save(path: Path, cells: Sequence[str]) -> None:
    """A notebook with a heading, these cells, and traces of an earlier run."""
    kernel = {"display_name": "mine", "name": "mine"}
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel, "widgets": {}})
    old = {"metadata": {"execution": {"iopub.status.busy": "2026-01-01"}}, "execution_count": 9}
    notebook.cells = [nbformat.v4.new_markdown_cell("# A lab")]
    for index, source in enumerate(cells):
        cell = nbformat.v4.new_code_cell(source, **old)
        cell.id = f"cell-{index}"
        notebook.cells.append(cell)
    nbformat.write(notebook, path)


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """The command in another process, which takes its kernels, sockets and event loops with it."""
    return subprocess.run(
        [sys.executable, "-m", "shared.course.notebooks", *map(str, arguments)],
        cwd=paths.ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labs")
    (folder / "beside.txt").write_text("found beside")
    for name, cells in (("good", GOOD), ("broken", BROKEN), ("dead", DEAD), ("endless", ENDLESS)):
        save(folder / f"{name}.ipynb", cells)
    return folder


@pytest.fixture(scope="module")
def written(folder: Path) -> subprocess.CompletedProcess[str]:
    return run("--write", *(folder / f"{name}.ipynb" for name in ("broken", "good", "dead")))


def test_each_notebook_is_run_and_each_failure_named(
    folder: Path, written: subprocess.CompletedProcess[str]
) -> None:
    assert written.returncode == 1
    for line in (
        "broken.ipynb: cell 2 failed:",
        "ZeroDivisionError",
        "good.ipynb: 4 cells in ",  # in spite of the failure before it
        "dead.ipynb: cell 1 ended the whole process",
    ):
        assert line in written.stdout
    assert "\x1b[" not in written.stdout and "never" not in written.stdout
    assert "2 failed" in written.stderr and "Traceback" not in written.stderr
    # A failed notebook stays as it was.
    assert nbformat.read(folder / "broken.ipynb", as_version=4).cells[1].execution_count == 9
    stopped = run("--limit", "1", folder / "endless.ipynb")
    assert stopped.returncode == 1
    assert "endless.ipynb: cell 1 was still running after the limit of 1 s" in stopped.stdout


def test_outputs_are_kept_without_what_changes(
    folder: Path, written: subprocess.CompletedProcess[str]
) -> None:
    notebook = nbformat.read(folder / "good.ipynb", as_version=4)
    _, first, second, third = notebook.cells
    assert first.outputs[0].text == "found beside\n"  # it ran in its own folder
    assert second.outputs[0].data["text/plain"] == repr(sys.executable)  # on this Python
    assert [output.text for output in third.outputs] == ["0\n1\n2\n"]
    assert [cell.execution_count for cell in (first, second, third)] == [1, 2, 3]
    assert notebook.metadata.kernelspec.name == "python3" and "widgets" not in notebook.metadata
    assert not any(cell.metadata for cell in notebook.cells)
    before = (folder / "good.ipynb").read_bytes()
    assert run("--write", folder / "good.ipynb").returncode == 0
    assert (folder / "good.ipynb").read_bytes() == before


def test_a_missing_or_invalid_lab_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lab.ipynb"
    for content in (None, "", "{}", "not json"):
        if content is not None:
            path.write_text(content)
        with pytest.raises(UserError, match="is not a valid notebook"):
            notebooks.main([str(path)])
    assert [path.parent.name for path in notebooks.labs()] == paths.discover()
    (tmp_path / "stage01_first").mkdir()
    (tmp_path / "stage01_first" / "__init__.py").write_text("")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    with pytest.raises(UserError, match=r"stage01_first has no lab.ipynb"):
        notebooks.main([])
