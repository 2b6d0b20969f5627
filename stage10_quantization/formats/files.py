"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import UserError


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A new folder beside `path`. What is written there at `path.name` gets its place at the end,
    and nothing if there is an error. Raises UserError if it cannot be written, or if there is a
    folder with files already; a file is replaced."""
    try:
        if path.is_dir() and any(path.iterdir()):
            raise UserError(f"{path} has files already: choose another name, or remove it.")
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            yield folder / path.name
            (folder / path.name).replace(path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}): choose another place."
        ) from None
