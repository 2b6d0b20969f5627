"""The pytest plugin of the project: models that the tests of all stages share, and what a default run leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from . import stages
from .checkpoint import PRESETS, Checkpoint, Config, random_tensors
from .parity import random_prompt

# Shapes for comparison with `transformers`: head counts, depths, odd vocabularies and contexts, and the 124M shape.
SHAPES = {
    "one head, one layer": Config(vocab_size=61, n_positions=32, n_embd=16, n_layer=1, n_head=1, name="one"),
    "odd sizes": Config(vocab_size=101, n_positions=77, n_embd=36, n_layer=3, n_head=4, name="odd"),
    "deep and narrow": Config(vocab_size=257, n_positions=128, n_embd=40, n_layer=8, n_head=5, name="deep"),
    "wide": Config(vocab_size=999, n_positions=100, n_embd=256, n_layer=2, n_head=8, name="wide"),
    "124M": PRESETS["gpt2"],
}


def pytest_report_header(config: pytest.Config) -> str:
    chosen = config.getoption("markexpr")
    return f"chosen: -m '{chosen}' (to add what is left out, give -m of your own: slow, gpu, weights)"


def random_checkpoint(config: Config, seed: int = 0, spread: float = 4.0) -> Checkpoint:
    """Seeded random weights, `spread` times as wide as a fresh GPT-2's and with biases that are not zero.

    Fresh weights are so small that every layer hardly changes its input: a model whose layers matter shows a mistake.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    tensors = random_tensors(config, seed)
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
        elif not name.startswith("w"):
            tensor *= spread
    return Checkpoint(config, tensors)


@pytest.fixture(scope="session")
def tiny() -> Checkpoint:
    """A model small enough for hundreds of prompts: 3 layers, 2 heads, 64 positions, 101 words."""
    return random_checkpoint(PRESETS["tiny"], spread=16.0)  # at 4 it says nearly the same word again and again


@pytest.fixture(scope="session")
def tiny_model(tiny: Checkpoint) -> Any:
    """`tiny` in float64, where all stages must agree to the last token."""
    return stages.load_model(tiny, dtype=torch.float64)


@pytest.fixture(scope="session")
def prompts() -> Callable[..., list[list[int]]]:
    """prompts(config, count, longest): seeded random prompts of 1 to `longest` tokens."""

    def make(config: Config, count: int, longest: int) -> list[list[int]]:
        return [random_prompt(1 + i * 7 % longest, config, i) for i in range(count)]

    return make
