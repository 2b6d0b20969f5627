"""The names of models: embedded ones, known shapes, folders, the hub's, and those in formats that a
later stage reads. Imports no torch before it opens one: a misspelt name is refused at once."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any

from . import registry
from .config import Config, read_config
from .errors import UserError
from .files import read_json

AUTO = "auto"  # of --weights: as the checkpoint stores them
STORIES = Path(__file__).parent / "stories" / "model"
EMBEDDED = {
    "stories": STORIES,
    "stories-chat": STORIES.with_name("chat-model"),
    "stories-draft": STORIES.with_name("draft-model"),  # which drafts for stories in stage 11
}


GPT2 = {"gpt2": (768, 12, 12), "gpt2-medium": (1024, 24, 16)}  # width, layers, heads
GPT2 |= {"gpt2-large": (1280, 36, 20), "gpt2-xl": (1600, 48, 25)}
PRESETS = {
    name: Config(50257, 1024, *shape, eos_ids=(50256,), name=name) for name, shape in GPT2.items()
}
PRESETS["stories"] = read_config(STORIES, "stories")
PRESETS["tiny"] = Config(101, 64, 24, 3, 2, name="tiny")  # for tests: it has no weights


def presets() -> dict[str, Config]:
    """The known shapes of all families, by name."""
    return PRESETS | registry.load(registry.SHAPES)


def quantized() -> Any:
    return registry.load(registry.QUANTIZED)


def find(name: str) -> Path | None:
    """The folder or file of this name, if it is on this machine. Raises UserError for a file in an
    unknown format, and for a known name whose file is not installed."""
    format = quantized()
    if name in format.NAMES:
        path: Path = format.NAMES[name]()
    elif not name or name in PRESETS.keys() - EMBEDDED.keys():
        return None
    else:
        path = EMBEDDED.get(name) or Path(os.path.expanduser(name))
    if not os.path.exists(path):  # unlike Path.exists, it raises for no name
        return None
    if not path.is_dir() and not format.reads(path):
        raise UserError(
            f"{name} is a file: give {format.KIND}, or the folder that holds config.json and "
            "model.safetensors."
        )
    return path


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
    path = find(name)
    if path is None or quantized().reads(path):
        return ""
    fields = read_json(path / "config.json")
    return str(fields.get("dtype") or fields.get("torch_dtype"))


def unknown(name: str) -> UserError:
    known = [*dict.fromkeys([*EMBEDDED, *PRESETS, *quantized().NAMES])]
    near = difflib.get_close_matches(name[:100], known, n=1)
    question = f"did you mean {near[0]}? Or " if near else ""
    return UserError(
        f"There is no model or folder called {name[:100]!r}: {question}choose {', '.join(known)}, "
        "a checkpoint folder, or a hub name owner/name."
    )
