"""The names of models: embedded ones, known shapes, folders, the hub's, and those in formats that a
later stage reads. Imports no torch before it opens one: a misspelt name is refused at once."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import registry
from .config import Config, read_config
from .errors import UserError, advised
from .files import read_json

if TYPE_CHECKING:
    from torch import Tensor

    from .conversion import Conversion

AUTO = "auto"  # of --weights: as the checkpoint stores them
STORIES = Path(__file__).parent / "stories" / "model"
EMBEDDED = {
    "stories": STORIES,
    "stories-chat": STORIES.with_name("chat-model"),
    "stories-draft": STORIES.with_name("draft-model"),  # which drafts for stories in stage 11
}


def _gpt2(name: str, width: int, layers: int, heads: int) -> Config:
    return Config(50257, 1024, width, layers, heads, eos_ids=(50256,), name=name)


PRESETS = {
    "stories": read_config(STORIES, "stories"),
    "gpt2": _gpt2("gpt2", 768, 12, 12),
    "gpt2-medium": _gpt2("gpt2-medium", 1024, 24, 16),
    "gpt2-large": _gpt2("gpt2-large", 1280, 36, 20),
    "gpt2-xl": _gpt2("gpt2-xl", 1600, 48, 25),
    "tiny": Config(101, 64, 24, 3, 2, name="tiny"),  # for tests: it has no weights
}


@dataclass(frozen=True)
class Opened:
    """The files of a checkpoint. folder: of the tokenizer's files; None without any. tensors: under
    the names of the model's family. conversion: if matrices are stored in a format of their own."""

    config: Config
    tensors: dict[str, Tensor]
    folder: Path | None
    conversion: Conversion | None = None


def formats() -> list[Any]:
    return [registry.load(entry) for entry in registry.FORMATS.values()]


def presets() -> dict[str, Config]:
    """The known shapes of all families, by name."""
    tables = map(registry.load, registry.SHAPES.values())
    return {name: config for table in tables for name, config in table.items()}


def others() -> str:
    """The formats and their known names, for a list in a text."""
    return "".join(f", {', '.join([format.KIND, *format.NAMES])}" for format in formats())


@dataclass(frozen=True)
class Found:
    """A model on this machine. format: what reads it, of registry.FORMATS; None for a plain
    folder."""

    path: Path
    format: Any = None


def find(name: str) -> Found | None:
    """The model of this name, if it is on this machine. Raises UserError for a file in an unknown
    format, and for a known name whose file is not installed."""
    known = {name: finder for format in formats() for name, finder in format.NAMES.items()}
    if name in known:
        path = known[name]()
    elif not name or name in PRESETS.keys() - EMBEDDED.keys():
        return None
    else:
        path = EMBEDDED.get(name) or Path(os.path.expanduser(name))
    if not os.path.exists(path):  # unlike Path.exists, it raises for no name
        return None
    format = next((format for format in formats() if format.reads(path)), None)
    if format is None and not path.is_dir():
        kinds = "".join(f"{format.KIND}, or " for format in formats())
        raise UserError(
            f"{name} is a file: give {kinds}the folder that holds config.json and "
            "model.safetensors."
        )
    return Found(path, format)


def checked(name: str) -> str:
    """The name, if a model may have it: a known one, a folder's or file's, or owner/name, as on the
    hub. Other families name their shapes as the hub does. Raises UserError."""
    hub = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII)
    if name in PRESETS or find(name) or hub:
        return name
    raise unknown(name)


def stored_dtype(name: str) -> str:
    """The number format that a plain folder's config.json has, such as "bfloat16"; "" for another
    format, and where none is known without a download."""
    location = find(name)
    if location is None or location.format is not None:
        return ""
    fields = read_json(location.path / "config.json")
    return str(fields.get("dtype") or fields.get("torch_dtype"))


def unknown(name: str) -> UserError:
    others = [name for format in formats() for name in format.NAMES]
    known = dict.fromkeys([*EMBEDDED, *PRESETS, *others])
    shown = repr(name if len(name) <= 100 else name[:100] + "...")
    advice = f"choose {', '.join(known)}, a checkpoint folder, or a hub name owner/name."
    advice = advised(advice, name[:100], known)
    return UserError(f"There is no model or folder called {shown}: {advice}")
