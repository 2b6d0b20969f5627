"""What the compiler makes of each kernel, without a GPU: `python -m stage13_gpu.registers gpt2`.

Every launch of a pass, recorded on a model whose tensors have shapes but no memory, is compiled for
each kind of GPU. The assembler reports registers a thread, and bytes of the stack, which is memory:
above 0, a kernel spills. Prints JSON lines.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch

from shared import catalog
from shared.config import Config

CAPABILITIES = {80: "A100", 89: "L4", 90: "H100"}
MODELS = ("gpt2", "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-0.6B")
QUANTIZED = ((8, None, "int8"), (4, 32, "int8"), (4, 128, "float"))  # bits, group, activations
USAGE = re.compile(r"REG:(\d+) STACK:(\d+).*LOCAL:(\d+)")


def compiled(models: Sequence[str] = MODELS) -> Iterator[dict[str, Any]]:
    """The report on all kernels of the models, in a process that has not loaded them yet: Triton
    decides when it loads a kernel whether it compiles or interprets it."""
    os.environ["TRITON_INTERPRET"] = "0"
    for name in models:
        for dtype in (torch.float32, torch.bfloat16):
            yield from reports(name, catalog.presets()[name], dtype)


def launched(config: Config, dtype: torch.dtype) -> Iterator[tuple[Any, tuple, dict[str, Any]]]:
    """Each different launch of a prompt, a short and a long decode step, and of products with
    quantized weights: kernel, arguments, constants."""
    from stage01_forward.model import GPT2
    from stage08_llama.config import LlamaConfig
    from stage08_llama.model import Llama
    from stage10_quantization.matrix import QuantizedMatrix

    from . import launch as launching
    from .cache import GpuCache
    from .layers import GpuMatrix, KernelLinear
    from .runner import GpuRunner

    seen: dict[str, tuple[Any, tuple, dict[str, Any]]] = {}

    def watch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        key = f"{kernel.__name__} {constants}"
        seen.setdefault(key, (kernel, arguments, constants))

    config = replace(config, n_layer=1, vocab_size=64)
    with torch.device("meta"):
        model = Llama(config) if isinstance(config, LlamaConfig) else GPT2(config)
    model.to(dtype)
    cache = GpuCache(config, 100, dtype=dtype, device="meta")
    runner = GpuRunner(model, cache)
    table, width = list(range(64)), getattr(config, "n_inner", 4 * config.n_embd)
    with patch.object(launching, "run", watch), torch.inference_mode():
        for shares in ([(table, 0, 90)], [(table, 9, 1)] * 2, [(table, 999, 1)] * 2):
            runner.compute(cache.extend(shares, rows=[0]))
        for bits, group, activations in QUANTIZED:
            scales = torch.ones(64, width // (group or width))
            codes = torch.zeros(64, width, dtype=torch.int8)
            matrix = QuantizedMatrix(codes, scales, scales if group else None, bits=bits)
            layer = KernelLinear(GpuMatrix(matrix, codes.device), None, activations)
            for count in (1, 90):
                layer(torch.zeros(count, width, dtype=dtype))
    yield from seen.values()


def reports(name: str, config: Config, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """A line for each kernel and kind of GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for kernel, arguments, constants in launched(config, dtype):
        for capability, gpu in CAPABILITIES.items():
            driver = Mock()  # what Triton asks a GPU for, here for one that is not there
            driver.get_current_device.return_value = capability
            driver.get_current_target.return_value = GPUTarget("cuda", capability, 32)
            triton.runtime.driver.set_active(driver)
            binary = kernel.warmup(*arguments, grid=(1,), **constants)  # compiles it
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(binary.asm["cubin"])
                file.flush()
                words = [str(tool), "--dump-resource-usage", file.name]
                shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            registers, stack, local = map(int, USAGE.findall(shown)[0])
            yield {
                "model": name, "dtype": str(dtype).removeprefix("torch."),
                "kernel": kernel.__name__, "gpu": gpu, "registers": registers,
                "spilled": stack + local, "shared": binary.metadata.shared,
            }  # fmt: skip


if __name__ == "__main__":
    for line in compiled(sys.argv[1:] or MODELS):
        print(json.dumps(line), flush=True)
