"""The museum: every bug fits, shows, is caught by its named tests, and leaves the student's work as it was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from shared import paths
from shared.course import mine
from shared.course.museum import planting, trials
from shared.course.museum.__main__ import main
from shared.course.museum.exhibits import EXHIBITS, Exhibit, find
from shared.course.museum.show import show
from shared.errors import UserError

NAMES = [each.name for each in EXHIBITS]
EXHIBIT = find(2)


def reference(exhibit: Exhibit) -> str:
    return mine.read(paths.ROOT / exhibit.stage / exhibit.file)


# ---- the exhibits ----


def test_there_are_enough_and_each_is_told() -> None:
    assert len(EXHIBITS) >= 20 and len(set(NAMES)) == len(NAMES)
    for exhibit in EXHIBITS:
        assert exhibit.tests and len(exhibit.story) > 250 and exhibit.hint and exhibit.seen
        assert exhibit.symptom.__doc__
        assert not exhibit.title.endswith(".") and not exhibit.bug.endswith(".")


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=NAMES)
def test_an_edit_fits_once_and_can_be_undone(exhibit: Exhibit) -> None:
    """Somebody who changes a stage is told here which exhibit must follow."""
    source = reference(exhibit)
    bug = planting.edit(source, exhibit.old, exhibit.new)
    assert bug is not None, (
        f"the old text of exhibit {exhibit.name} occurs {source.count(exhibit.old)} times"
    )
    compile(bug, exhibit.file, "exec")
    assert planting.edit(bug, exhibit.new, exhibit.old) == source


@pytest.fixture(scope="module")
def said() -> dict[str, dict[str, str]]:
    """What the named tests say: to each exhibit by its name, and to the reference by the stage. All in one process."""
    jobs: dict[str, dict[str, Any]] = {}
    for exhibit in EXHIBITS:
        jobs[exhibit.name] = {
            "stage": exhibit.stage, "files": {exhibit.file: planting.with_bug(exhibit)}, "tests": exhibit.tests
        }  # fmt: skip
        whole = jobs.setdefault(exhibit.stage, {"stage": exhibit.stage, "files": {}, "tests": []})
        whole["files"][exhibit.file] = reference(exhibit)
        whole["tests"] += [test for test in exhibit.tests if test not in whole["tests"]]
    return dict(zip(jobs, trials.outcomes(list(jobs.values()), 20), strict=True))


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=NAMES)
def test_each_is_caught_by_its_tests_and_the_reference_is_not(
    exhibit: Exhibit, said: dict[str, dict[str, str]]
) -> None:
    for test in exhibit.tests:
        with_bug, without = (
            [
                why
                for name, why in said[of].items()
                if name.partition("[")[0] == f"{exhibit.stage}/{test}"
            ]
            for of in (exhibit.name, exhibit.stage)
        )
        assert without and not any(without), f"{test} fails with the reference: {without}"
        assert any(with_bug), f"{test} passes with the bug"
        assert not any("skipped" in why for why in with_bug)


# ---- symptoms ----


def test_a_symptom_that_never_ends_is_stopped_and_what_it_said_is_kept(tmp_path: Path) -> None:
    exhibit = find(20)
    mine.write(tmp_path / exhibit.file, planting.with_bug(exhibit))
    (wrong,) = show(exhibit, [tmp_path], seconds=3)
    assert "0 run, 4 wait" in wrong and wrong.rstrip().endswith("stopped after 3 s.")


def test_a_copy_may_be_as_broken_as_it_likes(tmp_path: Path) -> None:
    exhibit = find(12)
    sources = {
        "no Python": "def (:",
        "ends": "import os; print('x' * 100_000, flush=True); os._exit(3)",
    }
    for name, source in sources.items():
        (tmp_path / name).mkdir()
        mine.write(tmp_path / name / exhibit.file, source)
    wrong = show(exhibit, [tmp_path / name for name in sources])
    assert all(each and len(each) < 5000 and "Traceback" not in each for each in wrong)


@pytest.mark.slow
@pytest.mark.parametrize("exhibit", EXHIBITS, ids=NAMES)
def test_every_symptom_shows(exhibit: Exhibit, tmp_path: Path) -> None:
    mine.write(tmp_path / exhibit.file, planting.with_bug(exhibit))
    right, wrong = show(exhibit, [None, tmp_path], seconds=10)
    assert right != wrong
    assert "stopped" not in right and "Error" not in right.replace("SanitizerError", "")


# ---- planting ----


def test_planting_makes_a_copy_and_clearing_leaves_nothing(home: Path) -> None:
    assert planting.plant(EXHIBIT) == []
    path = planting.place(EXHIBIT)
    assert mine.read(path) == planting.with_bug(EXHIBIT) and path.is_relative_to(home)
    now = planting.planted()
    assert now is not None and (now.number, now.own, now.backup) == (EXHIBIT.number, False, None)
    planting.clear()
    assert planting.planted() is None and not any(home.iterdir())
    assert planting.clear() == []


def test_a_bug_in_the_students_own_file_goes_and_the_work_stays(home: Path) -> None:
    folder = mine.folder(EXHIBIT.stage)
    folder.mkdir(parents=True)
    own = reference(EXHIBIT) + "\n# my own work\n"
    mine.write(folder / EXHIBIT.file, own)
    done = planting.plant(EXHIBIT)
    assert mine.read(folder / EXHIBIT.file) == planting.edit(own, EXHIBIT.old, EXHIBIT.new)
    assert "backups" in done[0] and len(list((home / "backups").iterdir())) == 1
    mine.write(folder / EXHIBIT.file, mine.read(folder / EXHIBIT.file) + "# more of it\n")
    planting.clear()
    assert mine.read(folder / EXHIBIT.file) == own + "# more of it\n"


def test_what_the_student_has_mended_is_left_as_it_is(home: Path) -> None:
    folder = mine.folder(EXHIBIT.stage)
    folder.mkdir(parents=True)
    mine.write(folder / EXHIBIT.file, reference(EXHIBIT) + "\n# mine\n")
    planting.plant(EXHIBIT)
    mended = mine.read(folder / EXHIBIT.file).replace(
        EXHIBIT.new, "self.positions = my_own_way(start, end)"
    )
    mine.write(folder / EXHIBIT.file, mended)
    planting.clear()
    assert mine.read(folder / EXHIBIT.file) == mended and planting.planted() is None


def test_what_was_put_away_comes_back_though_the_folder_is_gone(home: Path) -> None:
    folder = mine.start(EXHIBIT.stage)
    before = mine.read(folder / EXHIBIT.file)
    planting.plant(EXHIBIT, reference=True)
    shutil.rmtree(folder)
    planting.clear()
    assert mine.read(folder / EXHIBIT.file) == before


def test_a_fresh_exercise_has_no_room_for_the_bug_and_can_be_put_away(home: Path) -> None:
    folder = mine.start(EXHIBIT.stage)
    before = {path.name: mine.read(path) for path in folder.iterdir()}
    with pytest.raises(UserError, match="plant 02 --reference"):
        planting.plant(EXHIBIT)
    assert {
        path.name: mine.read(path) for path in folder.iterdir()
    } == before and planting.planted() is None
    planting.plant(EXHIBIT, reference=True)
    assert mine.read(folder / EXHIBIT.file) == planting.with_bug(EXHIBIT)
    planting.clear()
    assert {path.name: mine.read(path) for path in folder.iterdir()} == before


def test_one_bug_at_a_time_and_edits_are_kept(home: Path) -> None:
    planting.plant(EXHIBIT)
    path = planting.place(EXHIBIT)
    mine.write(path, mine.read(path) + "# a note of mine\n")
    with pytest.raises(RuntimeError):
        planting.plant(find(3))
    done = planting.clear()
    planting.plant(find(3))  # in the same file
    assert "was not as it was planted" in done[0]
    kept = list((home / "backups").rglob(EXHIBIT.file))
    assert [mine.read(each).endswith("# a note of mine\n") for each in kept] == [True]
    assert mine.read(path) == planting.with_bug(find(3))


def test_a_mended_file_of_the_museum_needs_no_backup(home: Path) -> None:
    planting.plant(EXHIBIT)
    mine.write(planting.place(EXHIBIT), reference(EXHIBIT))
    planting.clear()
    assert not any(home.iterdir())


@pytest.mark.parametrize("exhibit", [find(6), find(14)], ids=["06", "14"])
def test_line_ends_of_windows(exhibit: Exhibit) -> None:
    source = reference(exhibit).replace("\r\n", "\n").replace("\n", "\r\n")
    bug = planting.edit(source, exhibit.old, exhibit.new)
    assert bug is not None and bug.replace("\r\n", "\n") == planting.with_bug(exhibit).replace(
        "\r\n", "\n"
    )
    assert bug.count("\n") == bug.count("\r\n")


def test_notes_of_the_museum_that_make_no_sense_are_none(home: Path) -> None:
    home.mkdir()
    for junk in (
        "",
        "[]",
        '{"number": "x"}',
        '{"number": 99, "own": true, "digest": "", "backup": null}',
    ):
        (home / "museum.json").write_text(junk, encoding="utf-8")
        assert planting.planted() is None
        assert planting.plant(EXHIBIT) == []
        planting.clear()


# ---- as a student does ----


def test_a_visit(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """List, plant, hint, check, mend, check, reveal, clear."""
    exhibit = find(9)

    def visit(*arguments: str) -> tuple[int, str]:
        status = main(list(arguments)) or 0
        return status, " ".join(capsys.readouterr().out.split())

    assert all(each.title in visit("list")[1] for each in EXHIBITS)
    with pytest.raises(UserError, match="plant 09"):
        main(["check", "09"])
    status, said = visit("plant", "09")
    right, wrong = said.split("With the reference: ")[1].split("With your copy: ")
    assert status == 0 and "47 tokens in 13 passes" in right and "47 tokens in 47 passes" in wrong
    assert exhibit.bug not in said and exhibit.new not in said and exhibit.hint not in said
    assert f"09 {exhibit.title} (planted)" in visit("list")[1]
    assert visit("hint", "9") == (0, exhibit.hint)
    status, said = visit("check", "09")
    assert (
        status == 1
        and said.startswith("The bug is still there: ")
        and "test_tokens_through_the_model" in said
    )
    mine.write(planting.place(exhibit), "x = 1\ndef (:\n")
    with pytest.raises(UserError, match="no Python in line 2"):
        main(["check", "09"])
    mine.write(planting.place(exhibit), reference(exhibit))
    status, said = visit("check", "09")
    assert status == 0 and said.startswith("It is gone")
    status, said = visit("reveal", "09")
    assert exhibit.bug in said and exhibit.new in said and exhibit.seen in said
    assert visit("clear") == (0, "Exhibit 09 is cleared away, with its scheduler.py.")
    assert visit("clear") == (0, "Nothing is planted.")


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="no exhibit 99"):
        main(["plant", "99"])
    for number in ("0", "x", "100"):
        with pytest.raises(UserError, match="whole number from 1 to 99"):
            main(["plant", number])
    with pytest.raises(UserError):
        main([])
