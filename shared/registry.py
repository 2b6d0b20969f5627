"""What is found by name: tables of strings, and one import, as in transformers' auto classes.

An entry reads "module:name". The module is imported only when its entry is loaded, so `shared`
stands below all stages, and an early stage runs a model, a format or kernels of a later one without
knowing it. A type checker does not see through the strings: shared/tests/test_registry.py loads
every one of them and checks what it finds.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

ENGINES = {
    # Each is make(model, contexts=None, **options) -> engine, with memory for `contexts` whole
    # contexts. An engine has generate(prompts, sampling); from stage 04 on also add, abort, step.
    "forward": "stage01_forward.engine:make",
    "kv_cache": "stage02_kv_cache.engine:make",
    "batching": "stage03_batching.engine:make",
    "continuous": "stage04_continuous.engine:make",
    "paged": "stage05_paged.engine:make",
    "kernels": "stage09_kernels.engine:make",
    "speculative": "stage11_speculative.engine:make",
}
SAMPLING = "stage01_forward.params:SamplingParams"  # what every engine's generate takes
CONFIGS = {  # model_type in config.json -> reader(fields, name of the model, source) -> Config
    "gpt2": "shared.config:Config.from_dict",
    "llama": "stage08_llama.config:llama",
    "mistral": "stage08_llama.config:mistral",
    "qwen2": "stage08_llama.config:qwen2",
    "qwen3": "stage08_llama.config:qwen3",
}
MODELS = {  # Config.family -> load_model(checkpoint, device, dtype) -> model
    "gpt2": "stage01_forward.model:load_model",
    "llama": "stage08_llama.model:load_model",
}
SHAPES = "stage08_llama.shapes:PRESETS"  # of that family, beside catalog.PRESETS: name -> config
# What reads checkpoints beside folders of floating-point numbers. KIND is what it reads, in words;
# NAMES: known names -> what finds their files, or raises UserError; reads(path) -> bool;
# open(path) -> shared.checkpoint.Checkpoint, which alone imports PyTorch.
QUANTIZED = "stage10_quantization.files"
# --weights -> change(checkpoint, value), after which its model has such weights
WEIGHTS = dict.fromkeys(
    ("float32", "bfloat16", "int8", "int8-g32", "int4"), "stage10_quantization.convert:change"
)
KERNELS = {  # type of device -> a stage09_kernels.backend.Backend
    "cpu": "stage09_kernels.engine:BACKEND",
    "cuda": "stage13_gpu.backend:BACKEND",
}
# dtype of keys and values, type of device -> cache that only kernels read, with the arguments of
# stage 05's PagedCache
KERNEL_CACHES = {("int8", "cpu"): "stage10_quantization.cache:Int8KernelCache"}
# engine -> unsupported_reason(dtype, device) -> "" if the machine can run it
TRIALS = {"kernels": "stage09_kernels.backend:unsupported_reason"}
# --speculate -> speculate(engine, value, count, draft model, drawn) -> engine
DRAFTS = dict.fromkeys(("ngram", "suffix", "draft"), "stage11_speculative.engine:speculate")
FORMS = {"json": "stage11_speculative.forms:Forms"}  # of answers: see stage06_serving.service.Forms


def load(entry: str) -> Any:
    """What an entry names: "module:name", or a whole module."""
    module, _, names = entry.partition(":")
    value: Any = import_module(module)
    for name in filter(None, names.split(".")):
        value = getattr(value, name)
    return value
