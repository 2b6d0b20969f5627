"""The labs' runner, on small notebooks and real kernels: failures are named, outputs are kept."""

from __future__ import annotations

import base64
import io
import random
import sys

import nbformat
import pytest
from PIL import Image

from shared import paths
from shared.course import notebooks
from shared.course.testing import python
from shared.errors import UserError

READ = "import pathlib, sys\nprint(pathlib.Path('beside.txt').read_text())"
LABS = {
    "good": (READ, "sys.executable", "for i in range(3): print(i)"),
    "broken": ("before = 41", "before / 0", "print('never')"),
    "dead": ("import os\nos._exit(1)",),
    "endless": ("import time\nwhile True: time.sleep(0.1)",),
}
# One process for both commands: its start takes seconds.
PROGRAM = """
import sys
from shared.course import notebooks
*written, endless = sys.argv[1:]
print(notebooks.main(["--write", *written]), notebooks.main(["--limit=1", endless]))
"""


def test_each_lab_runs_a_failure_is_named_and_outputs_are_kept(tmp_path):
    (tmp_path / "beside.txt").write_text("found beside")
    earlier = {"metadata": {"execution": {"iopub.status.busy": "2026"}}, "execution_count": 9}
    for name, sources in LABS.items():
        kernel = {"display_name": "mine", "name": "mine"}
        lab = nbformat.v4.new_notebook(metadata={"kernelspec": kernel, "widgets": {}})
        cells = [nbformat.v4.new_code_cell(source, **earlier) for source in sources]
        lab.cells = [nbformat.v4.new_markdown_cell("# A lab"), *cells]
        nbformat.write(lab, tmp_path / f"{name}.ipynb")
    names = ("broken", "good", "dead", "endless")
    done = python("-c", PROGRAM, *(tmp_path / f"{name}.ipynb" for name in names))
    for line in (
        "broken.ipynb: cell 2 failed:",
        "ZeroDivisionError",
        "good.ipynb: 4 cells in ",  # in spite of the failure before it
        "dead.ipynb: cell 1 ended the whole process",
        "endless.ipynb: cell 1 was still running after the limit of 1 s",
    ):
        assert line in done.stdout
    assert "\x1b[" not in done.stdout and "never" not in done.stdout
    assert done.stdout.endswith("\n1 1\n") and "2 failed" in done.stderr
    assert "Traceback" not in done.stderr.partition("2 failed")[0]  # later: a kernel is ended
    # A failed notebook stays as it was.
    assert nbformat.read(tmp_path / "broken.ipynb", as_version=4).cells[1].execution_count == 9
    lab = nbformat.read(tmp_path / "good.ipynb", as_version=4)
    _, first, second, third = lab.cells
    assert first.outputs[0].text == "found beside\n"  # it ran in its own folder
    assert second.outputs[0].data["text/plain"] == repr(sys.executable)  # on this Python
    assert [output.text for output in third.outputs] == ["0\n1\n2\n"]
    assert [cell.execution_count for cell in (first, second, third)] == [1, 2, 3]
    assert lab.metadata.kernelspec.name == "python3" and "widgets" not in lab.metadata
    assert not any(cell.metadata for cell in lab.cells)


def test_a_chart_keeps_its_size_and_nearly_its_colours():
    file = io.BytesIO()
    shades = random.Random(0).choices([(i, i, i) for i in range(256)], k=40 * 30)
    chart = Image.new("RGBA", (40, 30))
    chart.putdata(shades)
    chart.save(file, "png")
    before = base64.b64encode(file.getvalue()).decode()
    image = Image.open(io.BytesIO(base64.b64decode(notebooks.smaller(before))))
    assert image.size == (40, 30) and image.getcolors(64)
    pairs = zip(shades, image.convert("L").tobytes(), strict=True)
    assert max(abs(shade - kept) for (shade, *_), kept in pairs) <= 4


def test_a_missing_or_invalid_lab_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "lab.ipynb"
    for content in (None, "", "{}", "not json"):
        if content is not None:
            path.write_text(content)
        pytest.raises(UserError, notebooks.main, [str(path)]).match("is not a valid notebook")
    assert [path.parent.name for path in notebooks.labs()] == paths.discover()
    (tmp_path / "stage01_first").mkdir()
    (tmp_path / "stage01_first" / "__init__.py").touch()
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    pytest.raises(UserError, notebooks.main, []).match(r"stage01_first has no lab.ipynb")
