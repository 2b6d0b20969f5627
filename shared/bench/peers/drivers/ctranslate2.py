"""CTranslate2's generator. It takes tokens as texts: those of the checkpoint's own vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ctranslate2 import Generator, get_supported_compute_types
from ctranslate2.converters import TransformersConverter


def load(folder: Path, dtype: str, threads: int) -> Any:
    if dtype not in get_supported_compute_types("cpu"):
        raise SystemExit(f"it does not compute in {dtype} on this processor")
    converted = folder / "ctranslate2"
    if not (converted / "model.bin").exists():
        TransformersConverter(str(folder)).convert(str(converted), force=True)
    generator = Generator(str(converted), compute_type=dtype, intra_threads=threads)
    names = json.loads((converted / "vocabulary.json").read_text(encoding="utf-8"))

    def answer(prompts: list[list[int]], count: int, emit: Any) -> None:
        generator.generate_batch(
            [[names[id] for id in ids] for ids in prompts],
            max_batch_size=0,
            max_length=count,
            min_length=count,
            sampling_topk=1,
            end_token=[],
            include_prompt_in_result=False,
            callback=lambda step: emit([(step.batch_id, step.token_id)]),
        )

    return answer
