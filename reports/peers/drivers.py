"""The program that runs in an engine's environment: it loads the engine, then reads requests from
standard input and writes replies to standard output, one JSON object per line.

    python drivers.py ENGINE FOLDER DTYPE THREADS [WEIGHTS]       ENGINE: a function of this file

`engine(folder, dtype, threads, weights)` loads a checkpoint, which some engines first convert into
the same folder, and returns `answer(prompts, count)`: it continues prompts (token ids, all of one
length) by `count` tokens each, and returns these.

A request is {"prompts": [[ids]], "count": tokens of each answer}; the reply has its "seconds" and
the "tokens" of the answers. A first line, {}, says that the engine is loaded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

Lists = list[list[int]]
Answer = Callable[[Lists, int], Lists]

# The same limits for every engine: tokens of all sequences, sequences, tokens of one pass.
TOKENS, SEQUENCES, BUDGET = 16_384, 64, 4096
BLOCK = 16  # tokens, of ours


def ours(folder: Path, dtype: str, threads: int, weights: str) -> Answer:
    """Stage 09's engine, with weights of stage 10."""
    import torch

    from shared import models, registry
    from shared.kit import greedy
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

    def answer(prompts: Lists, count: int) -> Lists:
        return [output.token_ids for output in engine.generate(prompts, greedy(count))]

    return answer


def transformers(folder: Path, dtype: str, threads: int, weights: str) -> Answer:
    """transformers' `generate`, with the attention that was faster on a CPU: eager in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    kind, attention = getattr(torch, dtype), "eager" if dtype == "bfloat16" else "sdpa"
    how: dict[str, Any] = {"dtype": kind, "attn_implementation": attention}
    model = AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    model.generation_config.eos_token_id = None

    def answer(prompts: Lists, count: int) -> Lists:
        ids = torch.tensor(prompts)  # (rows, tokens)
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        answers: Lists = model.generate(ids, max_new_tokens=count, **options).tolist()
        return [tokens[-count:] for tokens in answers]

    return answer


def llama_cpp(folder: Path, dtype: str, threads: int, weights: str) -> Answer:
    """llama.cpp through its C interface: a sequence a row, all rows in one batch."""
    import llama_cpp as c
    import numpy as np

    c.llama_backend_init()
    path = gguf_file(folder, dtype, weights)
    cpu, how = Path("/proc/cpuinfo"), c.llama_model_default_params()
    if cpu.exists() and "amx_int8" in cpu.read_text():
        how.use_extra_bufts = False  # its code for tiles ended with an illegal instruction
    model = c.llama_model_load_from_file(str(path).encode(), how)
    vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    batch = c.llama_batch_init(BUDGET, 0, 1)

    @cache
    def context_of(rows: int, tokens: int) -> Any:
        """For `rows` sequences of `tokens` each, which share no memory."""
        options = c.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.n_outputs_max = rows * tokens, rows, rows
        options.type_k = options.type_v = 0 if dtype == "float32" else 1  # 1: float16, its default
        options.n_batch, options.n_threads = BUDGET, threads
        options.n_threads_batch = threads
        return c.llama_init_from_model(model, options)

    def answer(prompts: Lists, count: int) -> Lists:
        answers: Lists = [[] for _ in prompts]
        context = context_of(len(prompts), len(prompts[0]) + count)
        c.llama_memory_clear(c.llama_get_memory(context), False)
        rows, start = prompts, 0  # rows of equal length, at the positions from `start`
        for _ in range(count):
            last = start + len(rows[0]) - 1
            places = [(row, at) for row in range(len(rows)) for at in range(start, last + 1)]
            for n, (row, at) in enumerate(places):
                batch.token[n], batch.pos[n] = rows[row][at - start], at
                batch.n_seq_id[n], batch.seq_id[n][0], batch.logits[n] = 1, row, at == last
            batch.n_tokens = len(places)
            if c.llama_decode(context, batch):
                raise SystemExit("it could not decode a batch")
            logits = np.ctypeslib.as_array(c.llama_get_logits(context), (len(rows), vocabulary))
            rows, start = logits.argmax(1)[:, None].tolist(), last + 1
            for tokens, new in zip(answers, rows, strict=True):
                tokens += new
        return answers

    return answer


def gguf_file(folder: Path, dtype: str, weights: str) -> Path:
    """GPT-2 in llama.cpp's format, without a vocabulary, written at the first call; `weights` of a
    format other than the dtype are rounded by llama.cpp."""
    import gguf
    import llama_cpp as c
    import numpy as np
    from safetensors.numpy import load_file

    out = folder / f"{weights or dtype}.gguf"
    half = out.with_suffix(".part")
    if out.exists():
        return out
    if weights:
        how, source = c.llama_model_quantize_default_params(), gguf_file(folder, "float32", "")
        how.ftype = {"q8_0": 7, "q4_0": 2}[weights]
        if c.llama_model_quantize(str(source).encode(), str(half).encode(), c.ctypes.byref(how)):
            raise SystemExit(f"it could not quantize to {weights}")
        return half.rename(out)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer, width = gguf.GGUFWriter(half, "gpt2"), config["n_embd"]
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(4 * width)
    writer.add_block_count(config["n_layer"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config["n_layer"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        new = str(names.get_name(name, try_suffixes=(".weight", ".bias")))
        values = np.ascontiguousarray(tensor.T if ".c_" in name and tensor.ndim == 2 else tensor)
        plain = dtype == "float32" or tensor.ndim == 1 or new.startswith("position_embd")
        kind = gguf.GGMLQuantizationType.F32 if plain else gguf.GGMLQuantizationType.BF16
        writer.add_tensor(new, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return half.rename(out)


def vllm(folder: Path, dtype: str, threads: int, weights: str) -> Answer:
    """vLLM's engine in this process, with prompts as token ids."""
    from vllm import LLM, SamplingParams

    folder = int8_folder(folder) if weights else folder
    options = {"max_num_seqs": SEQUENCES, "max_num_batched_tokens": BUDGET, "max_model_len": 1024}
    options |= {"skip_tokenizer_init": True, "enable_prefix_caching": False}
    engine = LLM(model=str(folder), dtype=dtype, **options)
    greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}

    def answer(prompts: Lists, count: int) -> Lists:
        params = SamplingParams(max_tokens=count, **greedy)
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = engine.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

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

    def answer(prompts: Lists, count: int) -> Lists:
        config = GenerationConfig(max_new_tokens=count, ignore_eos=True, eos_token_id=0)
        inputs = [Tensor(np.array([ids], np.int64)) for ids in prompts]
        outputs = pipeline.generate(inputs, [config] * len(inputs))
        return [output.m_generation_ids[0] for output in outputs]

    return answer


def main(engine: str, folder: str, dtype: str, threads: str, weights: str = "") -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print
    answer: Answer = globals()[engine](Path(folder), dtype, int(threads), weights)
    print("{}", file=replies, flush=True)
    for line in sys.stdin:
        request, started = json.loads(line), time.perf_counter()
        tokens = answer(request["prompts"], request["count"])
        reply = {"seconds": time.perf_counter() - started, "tokens": tokens}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
