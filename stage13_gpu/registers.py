"""What the compiler makes of each kernel, without a GPU: `python -m stage13_gpu.registers`.

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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shared import catalog, cli
from shared.config import Config
from shared.paths import ROOT

CAPABILITIES = {80: "A100", 89: "L4", 90: "H100"}
MODELS = ("gpt2", "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-0.6B")
KINDS = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32",
    torch.int8: "i8", torch.uint8: "u8",
}  # fmt: skip
QUANTIZED = ((8, None, "int8"), (4, 32, "int8"), (4, 128, "float"))  # bits, group, activations
USAGE = re.compile(r"REG:(\d+) STACK:(\d+).*LOCAL:(\d+)")


def compiled(models: tuple[str, ...] = MODELS) -> list[dict[str, Any]]:
    """The report on all kernels of the models, from a process in which kernels are compiled."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "stage13_gpu.registers", *models]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


def launched(config: Config, dtype: torch.dtype) -> Iterator[tuple[Any, tuple, dict[str, Any]]]:
    """Each different launch of a prompt, a short and a long decode step, and of products with
    quantized weights: kernel, arguments, constants."""
    from stage01_forward.model import GPT2
    from stage08_llama.config import LlamaConfig
    from stage08_llama.model import Llama
    from stage10_quantization.matrix import QuantizedMatrix

    from . import launch as launching
    from .cache import GpuAttention, GpuCache
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
    table = list(range(64))
    launching.WATCHERS.append(watch)
    for shares in ([(table, 0, 90)], [(table, 9, 1)] * 2, [(table, 999, 1)] * 2):
        shape = cache.shape(shares, 1)
        numbers = cache.numbers(shape, shares).to("meta")
        with torch.inference_mode():
            runner.compute(GpuAttention(cache, shape, numbers))
    width = getattr(config, "n_inner", 4 * config.n_embd)
    for bits, group, activations in QUANTIZED:
        scales = torch.ones(64, width // (group or width))
        codes = torch.zeros(64, width, dtype=torch.int8)
        matrix = QuantizedMatrix(codes, scales, scales if group else None, bits)
        layer = KernelLinear(GpuMatrix.of(matrix, codes.device), None, activations)
        for count in (1, 90):
            layer(torch.zeros(count, width, dtype=dtype))
    launching.WATCHERS.pop()
    yield from seen.values()


def reports(name: str, config: Config, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """A line for each kernel and kind of GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for kernel, arguments, constants in launched(config, dtype):
        constants = dict(constants)
        options = {"num_warps": constants.pop("num_warps", 4)}
        if "enable_fp_fusion" in constants:
            options["enable_fp_fusion"] = constants.pop("enable_fp_fusion")
        names = kernel.arg_names[: len(arguments)]
        signature = {n: _kind(value) for n, value in zip(names, arguments, strict=True)}
        signature |= dict.fromkeys(constants, "constexpr")
        aligned = [i for i, value in enumerate(arguments) if _aligned(value)]
        attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
        source = ASTSource(kernel, signature, constants, attributes)
        for capability, gpu in CAPABILITIES.items():
            target = GPUTarget("cuda", capability, 32)
            binary = triton.compile(source, target=target, options=options)
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(binary.asm["cubin"])
                file.flush()
                words = [str(tool), "--dump-resource-usage", file.name]
                shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            usage = USAGE.search(shown)
            assert usage is not None, shown
            registers, stack, local = map(int, usage.groups())
            yield {
                "model": name, "dtype": str(dtype).removeprefix("torch."),
                "kernel": kernel.__name__, "gpu": gpu, "registers": registers,
                "spilled": stack + local, "shared": binary.metadata.shared,
            }  # fmt: skip


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{KINDS[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def _aligned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or isinstance(value, int) and value % 16 == 0


def main(argv: list[str] | None = None) -> int:
    about = "Compiles all kernels for GPUs that are not here, and prints what they need."
    parser = cli.Parser("stage13_gpu.registers", about, "  python -m stage13_gpu.registers gpt2")
    parser.add_argument("models", nargs="*", help="known shapes; by default three")
    for name in parser.parse_args(argv).models or MODELS:
        for dtype in (torch.float32, torch.bfloat16):
            for line in reports(name, catalog.presets()[name], dtype):
                print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    cli.run(main)
