"""Models, engines, folders and processes for the tests of all stages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from . import paths, registry
from .checkpoint import PRESETS, Checkpoint, Config, random_tensors
from .tokenizer import ALPHABET

# Shapes to compare with `transformers`: heads, depths, odd vocabularies and contexts, GPT-2 124M.
SHAPES = {  # tokens, positions, width, layers, heads
    "one head, one layer": Config(61, 32, 16, 1, 1, name="one"),
    "odd sizes": Config(101, 77, 36, 3, 4, name="odd"),
    "deep and narrow": Config(257, 128, 40, 8, 5, name="deep"),
    "wide": Config(999, 100, 256, 2, 8, name="wide"),
    "124M": PRESETS["gpt2"],
}

# The config.json of `make_folder`.
FIELDS: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 48, "n_embd": 16}
FIELDS |= {"n_layer": 2, "n_head": 2, "eos_token_id": 256}


def engines() -> dict[str, Any]:
    """The `make` of each stage with an engine of its own, by the name of its package."""
    entries = (entry for name, entry in registry.ENGINES.items() if name != "speculative")
    return {entry.partition(".")[0]: registry.load(entry) for entry in entries}


def random_checkpoint(config: Config, seed: int = 0, spread: float = 4.0) -> Checkpoint:
    """Seeded random weights, `spread` times as wide as a fresh GPT-2's, with nonzero biases.

    With fresh weights a layer hardly changes its input, and a mistake in it would not show.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    tensors = random_tensors(config, seed)
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
        elif not name.startswith("w"):
            tensor *= spread
    return Checkpoint(config, tensors)


def make_folder(folder: Path, vocabulary: int = 257) -> Path:
    """A complete checkpoint folder whose tokens are the bytes and <|endoftext|>."""
    folder.mkdir()
    save_file(random_tensors(Config.from_dict(FIELDS)), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(FIELDS), encoding="utf-8")
    tokens = ALPHABET | {f"<{i}>": i for i in range(256, vocabulary - 1)}
    tokens["<|endoftext|>"] = vocabulary - 1
    (folder / "vocab.json").write_text(json.dumps(tokens), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return folder


def python(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python words` in the project's folder, without input, and capture both outputs. options:
    for `subprocess.run`."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "input": ""}
    settings = {"cwd": paths.ROOT, "encoding": "utf-8", "timeout": 600, **pipes, **options}
    return subprocess.run([sys.executable, *map(str, words)], **settings)


def wide_norm(self: Any, x: Any) -> Any:
    """For RMSNorm.forward: the norm without its float32 island, which an engine in another language
    cannot copy to the last bit. Stage 08's own tests compare it with transformers."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)
    return self.weight * x * scale
