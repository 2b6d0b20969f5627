"""OpenVINO GenAI's pipeline of continuous batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

from . import BUDGET, SEQUENCES

PRECISION = {"float32": "f32", "bfloat16": "bf16"}


def exported(folder: Path) -> Path:
    """The model in OpenVINO's format, written at the first call."""
    out = folder / "openvino"
    if not (out / "openvino_model.bin").exists():
        from optimum.intel import OVModelForCausalLM

        half = folder / "openvino.part"
        model = OVModelForCausalLM.from_pretrained(
            folder, export=True, compile=False, load_in_8bit=False
        )
        model.save_pretrained(half)
        half.rename(out)
    return out


def load(folder: Path, dtype: str, threads: int) -> Any:
    scheduler = SchedulerConfig()
    scheduler.cache_size = 2  # GB
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = BUDGET, SEQUENCES
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
    kind = PRECISION[dtype]
    properties = {"INFERENCE_PRECISION_HINT": kind, "KV_CACHE_PRECISION": kind}
    properties["INFERENCE_NUM_THREADS"] = str(threads)
    pipeline = ContinuousBatchingPipeline(str(exported(folder)), scheduler, "CPU", properties)

    def answer(prompts: list[list[int]], count: int, emit: Any) -> None:
        config = GenerationConfig(max_new_tokens=count, ignore_eos=True, eos_token_id=0)
        handles = [
            pipeline.add_request(row, openvino.Tensor(np.array([ids], np.int64)), config)
            for row, ids in enumerate(prompts)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            new = [(row, each.read()) for row, each in enumerate(handles) if each.can_read()]
            emit(
                (row, token)
                for row, outputs in new
                for output in outputs.values()
                for token in output.generated_ids
            )

    return answer
