"""transformers' `generate`, with the attention that was faster on a CPU: eager in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class Watch(StoppingCriteria):
    """Sees every step, and stops nothing."""

    def __init__(self, emit: Any) -> None:
        self.emit = emit

    def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
        self.emit(enumerate(ids[:, -1].tolist()))
        return torch.zeros(len(ids), dtype=torch.bool)


def load(folder: Path, dtype: str, threads: int) -> Any:
    torch.set_num_threads(threads)
    attention = "eager" if dtype == "bfloat16" else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    ).eval()
    model.generation_config.eos_token_id = None

    def answer(prompts: list[list[int]], count: int, emit: Any) -> None:
        ids = torch.tensor(prompts)  # (rows, tokens)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([Watch(emit)]),
        )

    return answer
