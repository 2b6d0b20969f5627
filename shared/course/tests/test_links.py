"""The check of the texts: what is right passes, and each problem is named with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.course import links, markdown

GOOD = Path(__file__).with_name("page.txt").read_text(encoding="utf-8")  # every kind of link


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small repository without a fault, but in a hidden folder and a virtual environment."""
    files = dict.fromkeys((".hidden/README.md", "env/README.md"), "[x](gone.md)\n")
    code = "class Class:\n    def test_in(self): ...\n\ndef test_it(): ...\n"
    files |= {"env/pyvenv.cfg": "", "README.md": GOOD, "stage01_first/code.py": code}
    lesson = "# A lesson\n\n`code.py`, [up](../README.md), `stage01_first/code.py`, `mine/gone`\n"
    files |= {"mine/own.py": ""}  # a student's copies come and go
    files |= {"stage01_first/chart.svg": "<svg/>\n", "stage01_first/README.md": lesson}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_a_text_without_fault(root):
    assert links.problems(root) == []


def test_each_problem_is_named(root):
    (root / "stage01_first" / "README.md").write_text("# A lesson\n", encoding="utf-8")
    for line, message in (
        ("[x](gone.md)", "gone.md does not exist"),
        ("![x](stage01_first/gone.svg)", "stage01_first/gone.svg does not exist"),
        ('<img src="gone.png">', "gone.png does not exist"),
        ("[x]: gone.md", "gone.md does not exist"),
        ("[`x`](gone.md)", "gone.md does not exist"),
        ("[x](readme.md)", "readme.md does not exist"),  # on a system that ignores case too
        ("[x](#gone)", "#gone: there is no such heading"),
        ("[x](stage01_first/README.md#gone)", "there is no such heading"),
        ("[x](stage01_first/code.py#L5)", "the file has only 4 lines"),
        ("[x](stage01_first/code.py#test_it)", "this kind of file has no such anchor"),
        ("[x](../README.md)", "leads out of the repository"),
        ("[x](/README.md)", "write a path from this file"),
        ("[x](stage01_first\\code.py)", "write a path from this file"),
        ("[x](https://)", "https:// is not a well-formed web address"),
        ("<https://nowhere>", "https://nowhere is not a well-formed web address"),
        ("[x](ftp://example.org)", "is neither a web address nor a path"),
        ("`stage01_first/gone.py`", "`stage01_first/gone.py` does not exist"),
        ("`shared/gone.py:12`", "`shared/gone.py` does not exist"),
        ("`cat stage01_first/gone.py`", "`stage01_first/gone.py` does not exist"),
        ("`stage01_first/code.py::test_gone`", "`stage01_first/code.py` has no test_gone"),
        ("`python -m shared.gone`", "python -m shared.gone: there is no such module"),
        ("```\npython -m gone.gone\n```", "python -m gone.gone: there is no such module"),
        ("`python -m shared`", "python -m shared: there is no such module"),  # has no __main__
        ("https://" + "npmjs" + ".com/x", "is a package registry"),
    ):
        (root / "README.md").write_text(f"# Title\n\n{line}\n", encoding="utf-8")
        (problem,) = links.problems(root)
        number = 4 if line.startswith("```") else 3
        assert problem.startswith(f"README.md, line {number}: ") and message in problem


def test_anchors_are_those_of_a_code_host():
    for heading, slug in (
        ("What `x` costs", "what-x-costs"),
        ("1. KV-cache: stage02_kv_cache!", "1-kv-cache-stage02_kv_cache"),
        ("A [link](x.md) in it", "a-link-in-it"),
        ("Before / after", "before--after"),
    ):
        assert markdown.anchor(heading) == slug
