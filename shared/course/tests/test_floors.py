"""The two floors of `shared`: what stages import reaches no stage."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

from shared import paths

DOOR = "shared/tour.py"  # the one module below that may import from above
ABOVE = ("shared.course", "shared.bench")


def imported(path: Path) -> Iterator[str]:
    """Dotted names of all modules that a file imports, wherever the statement stands."""
    package = ".".join(path.relative_to(paths.ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_the_ground_reaches_no_stage_and_no_floor_above():
    files = {path.relative_to(paths.ROOT): path for path in (paths.ROOT / "shared").rglob("*.py")}
    above = {"tests", "course", "bench"}
    ground = {name.as_posix(): files[name] for name in files if not above & set(name.parts)}
    assert DOOR in ground and len(ground) > 10
    for name, path in ground.items():
        names = list(imported(path))
        assert not [each for each in names if re.match(r"stage\d", each)], name
        assert name == DOOR or not [each for each in names if each.startswith(ABOVE)], name
        # Names are no way around it.
        source = path.read_text(encoding="utf-8")
        assert "import_module" not in source and "__import__" not in source, name
    # So do stages, except in what they measure and test.
    for path in paths.ROOT.glob("stage*/*.py"):
        names = [] if path.name in ("benchmark.py", "crosscheck.py") else list(imported(path))
        assert not [each for each in names if each.startswith(ABOVE)], path
