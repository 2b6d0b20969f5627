"""Runs in llama.cpp's environment: its logits behind some tokens of a text.

    python logits.py FOLDER WEIGHTS THREADS     FOLDER: a checkpoint; WEIGHTS: of llama.FILES

A line of standard input is {"ids": the text, "first": the place from which logits are wanted}; the
answer is float32, (ids - first, V), on standard output.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import llama_cpp as c
import numpy as np

LONGEST = 1024  # tokens
llama: Any = import_module("llama")  # beside this file, which is run by its path


def main(folder: str, weights: str, threads: str) -> None:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the library prints
    c.llama_backend_init()
    file = str(llama.quantized(Path(folder), weights)).encode()
    model = c.llama_model_load_from_file(file, c.llama_model_default_params())
    vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    options = c.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = options.n_outputs_max = LONGEST
    options.type_k = options.type_v = llama.Kind.F32
    options.n_threads = options.n_threads_batch = int(threads)
    context = c.llama_init_from_model(model, options)
    batch = c.llama_batch_init(LONGEST, 0, 1)
    for line in sys.stdin:
        text = json.loads(line)
        c.llama_memory_clear(c.llama_get_memory(context), False)
        for place, token in enumerate(text["ids"]):
            batch.token[place], batch.pos[place] = token, place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = place >= text["first"]
        batch.n_tokens = len(text["ids"])
        if c.llama_decode(context, batch):
            raise SystemExit("it could not decode a batch")
        shape = len(text["ids"]) - text["first"], vocabulary
        out.write(np.ctypeslib.as_array(c.llama_get_logits(context), shape).tobytes())
        out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
