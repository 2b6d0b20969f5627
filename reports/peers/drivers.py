"""The program that runs in an engine's environment: it loads the engine, then reads requests from
standard input and writes replies to standard output, one JSON object per line.

    python drivers.py ENGINE FOLDER DTYPE THREADS [WEIGHTS]       ENGINE: a function of this file

`engine(folder, dtype, threads, weights)` loads a checkpoint, which some engines first convert into
the same folder, and returns `answer(prompts, count, emit)`: it continues prompts (token ids, all of
one length) by `count` tokens each, and calls `emit` with each step's pairs (row, token).

A request is {"prompts": [[ids]], "count": tokens of each answer}. The reply has "first": seconds
until every prompt had its first token, "begun": tokens at that time, "seconds": until the end, and
"tokens": the answers. A first line, {}, says that the engine is loaded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Emit = Callable[[Iterable[tuple[int, int]]], None]
Answer = Callable[[list[list[int]], int, Emit], None]

# The same limits for every engine: tokens of all sequences, sequences, tokens of one pass.
TOKENS, SEQUENCES, BUDGET = 16_384, 64, 4096
BLOCK = 16  # tokens, of ours


def ours(folder: Path, dtype: str, threads: int, weights: str) -> Answer:
    """Stage 09's engine, with weights of stage 10."""
    import torch

    from shared import models, registry
    from shared.kit import greedy
    from stage04_continuous.request import Request
    from stage05_paged.blocks import BlockPool
    from stage10_quantization.convert import Quantize

    torch.set_num_threads(threads)
    checkpoint = models.load(str(folder))
    if weights:
        checkpoint.conversion = Quantize(weights)
    model = models.load_model(checkpoint, dtype=getattr(torch, dtype))
    options = {"max_sequences": SEQUENCES, "token_budget": BUDGET, "prefix_caching": False}
    make = registry.load(registry.ENGINES["kernels"])
    engine = make(model, pool=BlockPool(TOKENS // BLOCK, BLOCK), release=True, **options)

    def answer(prompts: list[list[int]], count: int, emit: Emit) -> None:
        rows = {engine.add(Request(ids, greedy(count))).id: row for row, ids in enumerate(prompts)}
        while engine.requests:
            emit((rows[id], token.id) for id, token in engine.step())

    return answer


def transformers(folder: Path, dtype: str, threads: int, weights: str) -> Answer:
    """transformers' `generate`, with the attention that was faster on a CPU: eager in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteriaList

    torch.set_num_threads(threads)
    kind: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    kind["attn_implementation"] = "eager" if dtype == "bfloat16" else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(folder, **kind).eval()
    model.generation_config.eos_token_id = None

    def answer(prompts: list[list[int]], count: int, emit: Emit) -> None:
        def watch(ids: Any, scores: Any, **_: Any) -> Any:
            """Sees every step, and stops nothing."""
            emit(enumerate(ids[:, -1].tolist()))
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor(prompts)  # (rows, tokens)
        options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
        options["stopping_criteria"] = StoppingCriteriaList([watch])
        model.generate(ids, max_new_tokens=count, do_sample=False, **options)

    return answer


def llama_cpp(folder: Path, dtype: str, threads: int, weights: str) -> Answer:
    """llama.cpp through its C interface."""
    import llama  # type: ignore[import-not-found]  # beside this file, which is run by its path

    answer: Answer = llama.load(folder, dtype, threads, BUDGET, weights)
    return answer


def vllm(folder: Path, dtype: str, threads: int, weights: str) -> Answer:
    """vLLM's engine in this process, with prompts as token ids."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    folder = int8_folder(folder) if weights else folder
    engine = LLM(
        model=str(folder),
        dtype=dtype,
        skip_tokenizer_init=True,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=BUDGET,
        max_model_len=1024,
        enable_prefix_caching=False,
    ).llm_engine
    kind = {"detokenize": False, "output_kind": RequestOutputKind.DELTA}

    def answer(prompts: list[list[int]], count: int, emit: Emit) -> None:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **kind)
        for row, ids in enumerate(prompts):
            engine.add_request(str(row), {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            new = [(out.request_id, out.outputs[0].token_ids) for out in engine.step()]
            emit((int(row.partition("-")[0]), token) for row, ids in new for token in ids)

    return answer


def int8_folder(folder: Path) -> Path:
    """GPT-2 with int8 weights by output, and activations that will be rounded by token, written at
    the first call. Names are those of compressed-tensors, but the matrices stay transposed, as vLLM
    expects of this family alone, and the table of tokens a float one."""
    import torch
    from safetensors.torch import load_file, save_file

    out = folder / "int8"
    if (out / "config.json").exists():
        return out
    out.mkdir(exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in list(tensors.items()):
        tensors[name] = tensor.bfloat16()
        if ".c_" in name and name.endswith(".weight"):
            scale = tensor.abs().amax(0) / 127  # (outputs,), of (inputs, outputs)
            tensors[name] = (tensor / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale[:, None].contiguous()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    whole = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {"targets": ["Linear"], "weights": whole | {"strategy": "channel", "dynamic": False}}
    group["input_activations"] = whole | {"strategy": "token", "dynamic": True}
    how: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    how |= {"ignore": ["lm_head"], "config_groups": {"group_0": group}}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = how
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


def openvino(folder: Path, dtype: str, threads: int, weights: str) -> Answer:
    """OpenVINO GenAI's continuous-batching pipeline."""
    import numpy as np
    from openvino import Core, Tensor
    from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

    exported = folder / f"openvino{weights}"
    if not (exported / "openvino_model.bin").exists():
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

        half = folder / "openvino.part"
        how: dict[str, Any] = {"export": True, "compile": False, "load_in_8bit": False}
        if weights == "int8":  # with a minimum for each row
            how["load_in_8bit"] = True
        elif weights == "int4":  # with a minimum for each group, as ours; the table of tokens int8
            how["quantization_config"] = OVWeightQuantizationConfig(bits=4, group_size=32)
        OVModelForCausalLM.from_pretrained(folder, **how).save_pretrained(half)
        half.rename(exported)
    room = SchedulerConfig()
    room.cache_size = 2  # GB
    room.max_num_batched_tokens, room.max_num_seqs = BUDGET, SEQUENCES
    room.dynamic_split_fuse, room.enable_prefix_caching = True, False
    narrow = "BF16" in Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    kind = "bf16" if narrow and dtype == "bfloat16" else "f32"  # else it refuses such a cache
    properties = {"INFERENCE_PRECISION_HINT": kind, "KV_CACHE_PRECISION": kind}
    properties["INFERENCE_NUM_THREADS"] = str(threads)
    pipeline = ContinuousBatchingPipeline(str(exported), room, "CPU", properties)

    def answer(prompts: list[list[int]], count: int, emit: Emit) -> None:
        config = GenerationConfig(max_new_tokens=count, ignore_eos=True, eos_token_id=0)
        handles = [
            pipeline.add_request(row, Tensor(np.array([ids], np.int64)), config)
            for row, ids in enumerate(prompts)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            new = [(row, handle.read()) for row, handle in enumerate(handles) if handle.can_read()]
            outputs = [(row, output) for row, outputs_of in new for output in outputs_of.values()]
            emit((row, token) for row, output in outputs for token in output.generated_ids)

    return answer


def reply(answer: Answer, prompts: list[list[int]], count: int) -> dict[str, Any]:
    """The reply to one request."""
    tokens: list[list[int]] = [[] for _ in prompts]
    first: dict[str, Any] = {}
    started = time.perf_counter()

    def emit(new: Iterable[tuple[int, int]]) -> None:
        now = time.perf_counter() - started
        for row, token in new:
            tokens[row].append(int(token))
        if not first and all(tokens):
            first.update(first=now, begun=sum(map(len, tokens)))

    answer(prompts, count, emit)
    return first | {"seconds": time.perf_counter() - started, "tokens": tokens}


def main(engine: str, folder: str, dtype: str, threads: str, weights: str = "") -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print
    answer: Answer = globals()[engine](Path(folder), dtype, int(threads), weights)
    print("{}", file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(reply(answer, **json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
