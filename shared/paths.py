"""The repository's root, and the stages in it: by name, never by import."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent


def shown(path: Path) -> str:
    """A path as a user types it in the project's folder."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def discover(root: Path | None = None) -> list[str]:
    """The stage packages in reading order: ["stage01_forward", "stage02_kv_cache", ...]."""
    return sorted(
        folder.name
        for folder in (root or ROOT).glob("stage[0-9][0-9]_*")
        if (folder / "__init__.py").exists()
    )
