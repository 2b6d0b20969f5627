"""The slides: they hold what the lessons hold, and each fits on its screen."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

from shared import paths
from shared.course import slides
from shared.errors import UserError

OVERFLOW = """return [...document.querySelectorAll("section")]
    .filter(s => s.scrollHeight > s.clientHeight || s.scrollWidth > s.clientWidth)
    .map(s => s.innerText)"""
BROKEN = "return [...document.images].filter(image => !image.naturalWidth).map(image => image.alt)"


@pytest.mark.parametrize("stage", paths.discover())
def test_a_lesson_gives_its_question_pictures_and_closing_table(stage: str) -> None:
    lesson = paths.ROOT / stage / "README.md"
    text, made = lesson.read_text(encoding="utf-8"), list(slides.slides(lesson))
    question = re.search(r"^\*\*(.+?)\*\*", text, re.MULTILINE | re.DOTALL)
    assert question and question[1].replace("\n", " ") in made[0].replace("\n", " ")
    captions = re.findall(r"^!\[(.*)\]", text, re.MULTILINE)
    shown = [re.search("<figcaption>(.*)</figcaption>", slide) for slide in made]
    assert [html.unescape(found[1]) for found in shown if found] == captions
    assert sum(f"<h2>{slides.MEASURED}</h2>" in slide for slide in made) == 1
    assert not any("<a " in slide or "<!--" in slide for slide in made)


def test_every_slide_fits_on_its_screen(tmp_path: Path, chromium: Any) -> None:
    slides.main(["--out", str(tmp_path / "deck.html")])
    chromium.get((tmp_path / "deck.html").as_uri())
    assert chromium.execute_script(OVERFLOW) == []
    assert chromium.execute_script(BROKEN) == []


def test_a_stage_that_is_unknown_and_a_wrong_ending_are_refused(tmp_path: Path) -> None:
    for words in (["stage99"], ["stage01", "--out", str(tmp_path / "deck.pdf")]):
        with pytest.raises(UserError):
            slides.main(words)
