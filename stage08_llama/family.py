"""The Llama family, for all engines."""

from __future__ import annotations

from stage01_forward.families import Family

from .config import PRESETS, READERS, LlamaConfig
from .model import load_model

FAMILY = Family(LlamaConfig, READERS, PRESETS, load_model)
