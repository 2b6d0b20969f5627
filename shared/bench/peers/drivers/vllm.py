"""vLLM's engine in this process, with prompts as token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from . import BUDGET, SEQUENCES


def load(folder: Path, dtype: str, threads: int) -> Any:
    engine = LLM(
        model=str(folder),
        dtype=dtype,
        skip_tokenizer_init=True,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=BUDGET,
        max_model_len=1024,
        enable_prefix_caching=False,
    ).llm_engine

    def answer(prompts: list[list[int]], count: int, emit: Any) -> None:
        params = SamplingParams(
            temperature=0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for row, ids in enumerate(prompts):
            engine.add_request(str(row), {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            new = [(out.request_id, out.outputs[0].token_ids) for out in engine.step()]
            emit((int(row.partition("-")[0]), token) for row, ids in new for token in ids)

    return answer
