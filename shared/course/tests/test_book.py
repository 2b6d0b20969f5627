"""The pages of the book, and its widgets in headless Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By

from shared import paths
from shared.course import book
from shared.course.links import LINKS
from shared.errors import UserError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> book.Book:
    pytest.importorskip("nbconvert")
    pytest.importorskip("latex2mathml")
    return book.Book(paths.ROOT, tmp_path_factory.mktemp("book"))


def test_each_text_lab_and_linked_file_is_a_page_and_no_link_leaves_them(made: book.Book) -> None:
    """Links in code are no links; a text may quote one."""
    assert {"README.md", "stage05_paged/README.md", "stage05_paged/lab.md"} <= set(made.titles)
    assert "::: stage05_paged.blocks" in (made.docs / "stage05_paged/blocks.py.md").read_text()
    for page in made.titles:
        if page.endswith(".py.md"):
            continue
        content = re.sub(r"(?ms)^ *```.*?^ *```$|`[^`\n]+`", "", (made.docs / page).read_text())
        for target in LINKS[0].findall(content):
            if not re.match(r"\w+:|#", target):
                assert (made.docs / page).parent.joinpath(target.partition("#")[0]).exists(), page


def test_the_contents_name_each_page_once_and_the_stages_in_order(made: book.Book) -> None:
    def pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for inside in entry.values() if isinstance(entry, dict) else entry:
            if entry is not inside and not isinstance(entry, str):
                yield from pages(inside)

    listed = list(pages(made.contents()))
    assert sorted(listed) == sorted(made.titles)
    lessons = [name for name in listed if re.fullmatch(r"stage\d\d_\w+/README.md", name)]
    assert lessons == [f"{stage}/README.md" for stage in paths.discover()]


def test_each_widget_takes_the_place_of_one_picture(made: book.Book) -> None:
    texts = "".join(path.read_text() for path in made.docs.glob("stage*/README.md"))
    assert sorted(re.findall(r'data-widget="(\w+)"', texts)) == sorted(book.REPLACED.values())


def test_without_the_packages_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "NEEDED", ("no_such_package",))
    with pytest.raises(UserError, match="requirements-book.txt"):
        book.build(paths.ROOT, tmp_path)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, chromium: Any) -> Any:
    page = tmp_path_factory.mktemp("widgets") / "page.html"
    names = (*book.REPLACED.values(), "widgets")
    scripts = "".join(f'<script src="{book.WIDGETS / f"{name}.js"}"></script>' for name in names)
    places = "".join(f'<div data-widget="{name}">still</div>' for name in book.REPLACED.values())
    page.write_text(f'<meta charset="utf-8">{places}<div data-widget="none">still</div>{scripts}')
    chromium.get(page.as_uri())
    return chromium


def said(place: Any) -> str:
    return str(place.find_element(By.TAG_NAME, "output").text)


def press(place: Any, *words: str) -> str:
    """What a widget says after the buttons with these words were pressed."""
    for word in words:
        (button,) = place.find_elements(By.XPATH, f".//button[text()='{word}']")
        button.click()
    return said(place)


def place_of(browser: Any, name: str) -> Any:
    return browser.find_element(By.CSS_SELECTOR, f"[data-widget={name}]")


def test_a_picture_stays_where_there_is_no_widget(browser: Any) -> None:
    assert place_of(browser, "none").text == "still"
    assert "still" not in place_of(browser, "roofline").text


def test_the_roofline_has_the_numbers_of_the_lessons(browser: Any) -> None:
    """Stage 02's decode step, and stage 03's corner of ten rows."""
    place = place_of(browser, "roofline")
    assert said(place).startswith("Reading 12.4 ms, computing 1.24 ms: bound by memory.")
    move = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
    rows = place.find_element(By.CSS_SELECTOR, "input")
    for exponent, bound in ((3, "memory"), (4, "arithmetic")):
        browser.execute_script(move, rows, exponent)
        assert f"bound by {bound}" in said(place)


def test_blocks_are_taken_shared_copied_and_taken_away(browser: Any) -> None:
    place = place_of(browser, "blocks")
    press(place, "a new prompt of 6")
    assert "counted twice" in press(place, "fork A")
    assert "block 1 is shared, so it is copied to block 2 first" in press(place, "B: a token")
    assert "copied" not in press(place, "A: a token")
    press(place, "a new prompt of 6", "a new prompt of 6", *["A: a token"] * 5)
    assert "D came last, is preempted" in press(place, "A: a token")


def test_a_static_batch_waits_for_its_last_row(browser: Any) -> None:
    place = place_of(browser, "scheduler")
    assert "Waiting: none" in press(place, *["step"] * 3)
    press(place, "start again")
    place.find_element(By.CSS_SELECTOR, "input[type=checkbox]").click()
    assert "Waiting: C (" in press(place, *["step"] * 5)
