"""The names of models: embedded ones, known shapes, folders, and the hub's. Imports no torch, so
that a misspelt name is refused at once."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

from .config import Config, read_config
from .errors import UserError

MOST_HEADER = 2**26  # bytes of a safetensors file
STORIES = Path(__file__).parent / "stories" / "model"
EMBEDDED = {"stories": STORIES, "stories-chat": STORIES.with_name("chat-model")}


def _gpt2(name: str, width: int, layers: int, heads: int) -> Config:
    return Config(50257, 1024, width, layers, heads, eos_ids=(50256,), name=name)


def _presets() -> dict[str, Config]:
    presets = {
        "gpt2": _gpt2("gpt2", 768, 12, 12),
        "gpt2-medium": _gpt2("gpt2-medium", 1024, 24, 16),
        "gpt2-large": _gpt2("gpt2-large", 1280, 36, 20),
        "gpt2-xl": _gpt2("gpt2-xl", 1600, 48, 25),
        "tiny": Config(vocab_size=101, n_positions=64, n_embd=24, n_layer=3, n_head=2, name="tiny"),
    }
    try:
        return {"stories": read_config(STORIES, "stories"), **presets}
    except UserError:  # an import must not fail: loading "stories" says what is wrong with it
        return presets


PRESETS: dict[str, Config] = _presets()  # "tiny" is for tests: it has no weights


def checked(name: str) -> str:
    """The name, if a model may have it: a known one, a folder's, or owner/name, as on the hub.
    Other families name their shapes as the hub does. Raises UserError."""
    hub = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII)
    if name in PRESETS or local_folder(name) or hub:
        return name
    raise unknown(name)


def local_folder(name: str) -> Path | None:
    """The existing folder of this name, or None. Raises UserError for a file."""
    if name in EMBEDDED:
        return EMBEDDED[name]
    if not name or name in PRESETS:
        return None
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path
        is_file = path.exists()
    except (OSError, RuntimeError, ValueError):  # too long, no such home, a NUL character
        return None
    if is_file:
        raise UserError(
            f"{name} is a file: give the folder that holds config.json and model.safetensors."
        )
    return None


def stored_dtype(name: str) -> str:
    """The number format of a local model's first tensor as safetensors names it, such as "BF16"; ""
    if it is not known without a download."""
    folder = local_folder(name)
    files = sorted(folder.glob("model*.safetensors")) if folder else []
    wrong = (LookupError, ValueError, TypeError, AttributeError, StopIteration)  # of a broken file
    with contextlib.suppress(OSError, *wrong):
        with files[0].open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, MOST_HEADER)))
        return str(next(entry["dtype"] for key, entry in header.items() if key[:2] != "__"))
    return ""


def unknown(name: str) -> UserError:
    known = ", ".join(dict.fromkeys([*EMBEDDED, *PRESETS]))
    shown = repr(name if len(name) <= 100 else name[:100] + "...")
    return UserError(
        f"There is no model or folder called {shown}: choose {known}, a checkpoint folder, or a "
        "hub name owner/name."
    )
