"""llama.cpp through its C interface, one sequence a row, all rows in one batch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as c
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

FILES = {"q8_0": 7, "q4_0": 2}  # of the format, numbers of its mixtures of types
KINDS = {"float32": Kind.F32, "bfloat16": Kind.BF16}  # of the weights
CACHE = {"float32": Kind.F32, "bfloat16": Kind.F16}  # of keys and values; F16 is its default
FIELDS = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "head_count": "n_head",
    "layer_norm_eps": "layer_norm_epsilon",
}


def converted(folder: Path, dtype: str) -> Path:
    """GPT-2 in llama.cpp's format, without a vocabulary, written at the first call."""
    out = folder / f"{dtype}.gguf"
    if out.exists():
        return out
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    half = out.with_suffix(".part")
    writer = gguf.GGUFWriter(half, "gpt2")
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_feed_forward_length(4 * config["n_embd"])
    for theirs, ours in FIELDS.items():
        getattr(writer, f"add_{theirs}")(config[ours])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config["n_layer"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new, f"GGUF has no name for {name}"
        values = tensor.T if ".c_" in name and tensor.ndim == 2 else tensor
        plain = tensor.ndim == 1 or new.startswith("position_embd")
        kind = Kind.F32 if plain else KINDS[dtype]
        values = gguf.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(new, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return half.rename(out)


def quantized(folder: Path, weights: str) -> Path:
    """The model in one of FILES, written at the first call by llama.cpp itself."""
    out, half = folder / f"{weights}.gguf", folder / f"{weights}.part"
    if out.exists():
        return out
    how = c.llama_model_quantize_default_params()
    how.ftype = FILES[weights]
    plain = converted(folder, "float32")
    if c.llama_model_quantize(str(plain).encode(), str(half).encode(), c.ctypes.byref(how)):
        raise SystemExit(f"it could not quantize to {weights}")
    return half.rename(out)


@c.llama_log_callback
def only_errors(level: int, text: bytes, _: Any) -> None:
    if level >= 4:  # GGML_LOG_LEVEL_ERROR
        print(text.decode(errors="replace"), end="", file=sys.stderr)


def load(folder: Path, dtype: str, threads: int, budget: int, weights: str) -> Any:
    """An engine as `drivers.py` describes it, with `budget` tokens per pass. weights: of FILES; "":
    those of the `dtype`."""
    c.llama_log_set(only_errors, None)  # the rest would hide the reason of an end
    c.llama_backend_init()
    path = quantized(folder, weights) if weights else converted(folder, dtype)
    model = c.llama_model_load_from_file(str(path).encode(), c.llama_model_default_params())
    vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    batch = c.llama_batch_init(budget, 0, 1)

    def context_of(rows: int, tokens: int) -> Any:
        """For `rows` sequences of `tokens` each, which share no memory."""
        options = c.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.n_outputs_max = rows * tokens, rows, rows
        options.n_batch, options.type_k, options.type_v = budget, CACHE[dtype], CACHE[dtype]
        options.n_threads = options.n_threads_batch = threads
        return c.llama_init_from_model(model, options)

    def decode(context: Any, rows: list[list[int]], start: int) -> list[int]:
        """The next token of each row, after `rows` of equal length at the positions from
        `start`."""
        at = 0
        for row, ids in enumerate(rows):
            for position, id in enumerate(ids, start):
                batch.token[at], batch.pos[at] = id, position
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
                batch.logits[at] = position == start + len(ids) - 1
                at += 1
        batch.n_tokens = at
        if c.llama_decode(context, batch):
            raise SystemExit("it could not decode a batch")
        logits = np.ctypeslib.as_array(c.llama_get_logits(context), (len(rows), vocabulary))
        return [int(id) for id in logits.argmax(1)]

    contexts: dict[tuple[int, int], Any] = {}

    def answer(prompts: list[list[int]], count: int, emit: Any) -> None:
        size = len(prompts), len(prompts[0]) + count
        if size not in contexts:
            contexts[size] = context_of(*size)
        c.llama_memory_clear(c.llama_get_memory(contexts[size]), False)
        rows, start = prompts, 0
        for _ in range(count):
            new = decode(contexts[size], rows, start)
            emit(enumerate(new))
            start += len(rows[0])
            rows = [[id] for id in new]

    return answer
