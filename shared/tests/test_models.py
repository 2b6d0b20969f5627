"""Names of models, and formats that a stage adds to those that are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared import catalog, checkpoint
from shared.checkpoint import Opened
from shared.config import read_config
from shared.errors import UserError


class Sealed:
    """A format of files that end in .sealed, around the embedded model."""

    KIND = "a .sealed file"

    def __init__(self, file: Path) -> None:
        self.NAMES = {"secret": lambda: file, "lost": self.lost}

    def lost(self) -> Path:
        raise UserError("The model lost is in a package that is not installed.")

    def reads(self, path: Path) -> bool:
        return path.suffix == ".sealed"

    def open(self, path):
        config = read_config(catalog.STORIES, path.stem)
        tensors = checkpoint.read_tensors(catalog.STORIES)
        return Opened(config, tensors, catalog.STORIES, [path])


@pytest.fixture
def file(tmp_path, monkeypatch):
    file = tmp_path / "model.sealed"
    file.touch()
    monkeypatch.setattr(catalog, "formats", lambda: [Sealed(file)])
    return file


def test_a_file_and_a_known_name_are_models(file):
    for name in (str(file), "secret"):
        assert catalog.checked(name) == name
        assert catalog.stored_dtype(name) == ""
        for random in (False, True):
            loaded = checkpoint.load(name, random_weights=random)
            assert loaded.config.name == ("secret" if name == "secret" else "model")
            assert (list(loaded.files), loaded.folder) == ([file] * (not random), catalog.STORIES)


def test_what_no_format_reads_is_refused_with_what_is_read(file, tmp_path):
    other = tmp_path / "model.bin"
    other.touch()
    for name, message in (
        (str(other), "give a .sealed file, or the folder"),
        ("lost", "is not installed"),
        ("nonsense", "tiny, secret, lost, a checkpoint folder"),
    ):
        with pytest.raises(UserError, match=message):
            catalog.checked(name)
