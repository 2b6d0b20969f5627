"""The two floors of `shared`: what stages import reaches no stage."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import paths

DOOR = "shared/tour.py"  # the one module below that may import from above
ABOVE = ("shared.course", "shared.bench")


def imported(path: Path) -> Iterator[str]:
    """Dotted names of all modules that a file imports, wherever the statement stands."""
    package = path.relative_to(paths.ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_the_ground_reaches_no_stage_and_no_floor_above() -> None:
    files = {path.relative_to(paths.ROOT): path for path in (paths.ROOT / "shared").rglob("*.py")}
    above = {"tests", "course", "bench"}
    ground = {name.as_posix(): files[name] for name in files if not above & set(name.parts)}
    assert DOOR in ground and len(ground) > 10
    for name, path in ground.items():
        names = list(imported(path))
        assert not [each for each in names if each.startswith("stage0")], name
        assert name == DOOR or not [each for each in names if each.startswith(ABOVE)], name
        # Names are no way around it.
        source = path.read_text(encoding="utf-8")
        assert "import_module" not in source and "__import__" not in source, name


def test_a_stage_imports_the_ground_alone_except_in_what_it_measures_and_tests() -> None:
    for stage in paths.discover():
        for path in (paths.ROOT / stage).glob("*.py"):
            if path.name not in ("benchmark.py", "crosscheck.py"):
                found = [name for name in imported(path) if name.startswith(ABOVE)]
                assert not found, path


def test_imports_are_seen_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    path = tmp_path / "shared" / "x.py"
    path.parent.mkdir()
    path.write_text(
        "def f():\n    from .course import a\n    from . import bench\n    import b.c\n"
    )
    assert set(imported(path)) == {
        "shared.course", "shared.course.a", "shared", "shared.bench", "b.c",
    }  # fmt: skip
