"""Shapes of published models, for --random-weights, which need no network."""

from __future__ import annotations

from dataclasses import replace

from .config import LlamaConfig
from .rope import Rope

LLAMA3, QWEN = Rope(500_000.0, "llama3", 32.0, 8192), Rope(1e6)
SHAPES = {  # by their config.json, and litgpt's config.py
    "HuggingFaceTB/SmolLM2-135M": LlamaConfig(
        49152, 8192, 576, 30, 9, 3, n_inner=1536, rope=Rope(1e5), eos_ids=(0,)
    ),
    "Qwen/Qwen2.5-0.5B": LlamaConfig(
        151936, 32768, 896, 24, 14, 2, 64, 1e-6, (151643,), n_inner=4864, rope=QWEN, qkv_bias=True
    ),
    "Qwen/Qwen3-0.6B": LlamaConfig(
        151936, 40960, 1024, 28, 16, 8, 128, 1e-6, (151645, 151643), n_inner=3072, rope=QWEN,
        qk_norm=True,
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": LlamaConfig(
        32000, 2048, 2048, 22, 32, 4, 64, 1e-5, (2,), False, n_inner=5632
    ),
    "meta-llama/Llama-3.2-1B": LlamaConfig(
        128256, 131072, 2048, 16, 32, 8, 64, 1e-5, (128001,), n_inner=8192, rope=LLAMA3
    ),
}  # fmt: skip
PRESETS = {name: replace(config, name=name) for name, config in SHAPES.items()}
