"""The Llama family, for all engines."""

from __future__ import annotations

from stage01_forward.families import Family

from .config import READERS, LlamaConfig
from .model import load_model
from .shapes import PRESETS

FAMILY = Family(LlamaConfig, READERS, PRESETS, load_model)
