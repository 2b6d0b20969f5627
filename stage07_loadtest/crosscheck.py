"""Do other load tests measure the same? `python -m stage07_loadtest.crosscheck` loads the mock and
our server by this stage, by guidellm and by vLLM's `bench serve` in turn, the same load each, in
several rounds.

The two are installed into an environment of their own in the cache folder, at pinned versions; they
share packages that this project has installed already, such as PyTorch. vLLM's wheel is built for
another PyTorch and for GPUs, so of its dependencies only those that its client imports are
installed. Both tools send texts as prompts, so our server has the embedded tokenizer, with random
weights in the shape of GPT-2 124M.

Two things would make tools differ even if they measured alike. A load test takes processors from a
server beside it: so the servers have one processor and the load tests the others, where the system
allows it (not on macOS). And a client reads a stream only as fast as it can: with the embedded
model, which makes over 1,500 tok/s, guidellm and vLLM needed over 1 ms for each chunk, and measured
that.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
from tqdm import tqdm

from reports.peers.install import environment
from shared import cli, measure, paths
from shared.bench import kit
from shared.bench.rows import Results, median, tables
from shared.errors import UserError
from shared.server import own_server

from . import metrics, mock, schedule
from .load import load
from .workload import Lengths, make

KIND = "stage07_crosscheck"
OURS, GUIDELLM, VLLM = "stage07", "guidellm", "vllm"
INSTALLED = (  # arguments of pip, one run each
    ("guidellm==0.8.1",),
    ("--no-deps", "vllm==0.33.0"),
    (
        *("blake3==1.0.11", "cachetools==8.0.1", "cbor2==6.2.1", "cloudpickle==3.1.2"),
        *("depyf==0.20.0", "einops==0.8.2", "gguf==0.19.0", "ijson==3.6.0", "msgspec==0.22.0"),
        *("openai-harmony==0.0.8", "orjson==3.13.0", "partial-json-parser", "pillow==13.0.0"),
        *("py-cpuinfo==9.0.0", "pybase64==1.5.1", "sentencepiece==0.2.3", "setproctitle==1.3.8"),
        *("llguidance==1.9.1", "watchfiles==1.3.0", "xgrammar==0.2.8"),
    ),
)
OPTIONS = ("--random-weights", "--device", "cpu", "--threads", "1")  # of our server
TOKENIZER = paths.ROOT / "shared" / "stories" / "model"
PERCENTILES = (50, 90, 99)
CLOSE = {50: 0.05, 90: 0.1, 99: 0.1}  # agreement: relative difference, or NEAR
NEAR = 0.005  # seconds, except for TPOT
# Its inter-token latency is our TPOT: (last - first) / (tokens - 1). See REPORT.md.
LATENCIES: Mapping[str, tuple[Callable[[Any], float | None], str, float]] = {
    "TTFT": (metrics.ttft, "time_to_first_token_ms", 1e-3),
    "TPOT": (metrics.tpot, "inter_token_latency_ms", 1e-3),
    "E2E": (metrics.e2e, "request_latency", 1.0),
}


FULL = kit.plan(
    users=8, requests=120, rounds=5,
    prompt=32, answer=50,  # tokens
    ttft=0.1, itl=0.02,  # seconds, of the mock
)  # fmt: skip
Figures = dict[str, Any]  # latency -> percentile -> seconds; "rate": output tok/s; "prompt": tokens


def python() -> str:
    """The Python that has both tools; the first call installs them. Raises UserError."""
    return str(environment(measure.cache_folder() / "crosscheck" / "tools", INSTALLED))


def called(command: list[str]) -> None:
    """Run a program. Raises UserError with its last line if it fails."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode:
        problem = last_line(ended.stderr or ended.stdout)
        raise UserError(f"This failed ({problem}): {' '.join(command)}")


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip()


def ours(url: str, plan: Any, seed: int) -> Figures:
    prompt, answer = (Lengths(size, size) for size in (plan.prompt, plan.answer))
    asks = make("short", plan.users + plan.requests, seed, prompts=prompt, answers=answer)
    when = schedule.closed(plan.users, plan.requests)
    point = load(url, asks, when, warmup=plan.users)
    good = [record for record in point.records if metrics.succeeded(record)]
    if len(good) < plan.requests:
        raise UserError(f"{plan.requests - len(good)} requests to {url} failed: run it again.")
    values = {name: [of(record) or 0.0 for record in good] for name, (of, *_) in LATENCIES.items()}
    return {
        **{n: {f"p{p}": metrics.percentile(v, p) for p in PERCENTILES} for n, v in values.items()},
        "rate": plan.requests * plan.answer / point.duration,
        "prompt": median(record.prompt_tokens or 0 for record in good),
    }


def guidellm(url: str, plan: Any, seed: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        options = {
            "backend": f"kind=openai_http,target={url},request_format=/v1/completions",
            "profile": f"kind=concurrent,streams={plan.users}",
            "constraint": f"kind=max_requests,count={plan.requests}",
            "data": f"kind=synthetic_text,prompt_tokens={plan.prompt},output_tokens={plan.answer}",
            "tokenizer": f"kind=huggingface_auto,model={TOKENIZER}",
            "seed": f"kind=static,value={seed}",
            "output": f"kind=json,path={out}",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        called([python(), "-m", "guidellm", "run", *words, "--disable-console"])
        (benchmark,) = json.loads(out.read_text(encoding="utf-8"))["benchmarks"]
    return read(benchmark, plan)


def vllm(url: str, plan: Any, seed: int) -> Figures:
    with urlopen(f"{url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    with tempfile.TemporaryDirectory() as folder:
        options = {
            **{"backend": "openai", "base-url": url, "endpoint": "/v1/completions"},
            **{"model": model, "tokenizer": TOKENIZER, "dataset-name": "random", "seed": seed},
            **{"random-input-len": plan.prompt, "random-output-len": plan.answer},
            **{"num-prompts": plan.requests, "max-concurrency": plan.users},
            **{"num-warmups": plan.users, "result-dir": folder, "result-filename": "out.json"},
            **{"percentile-metrics": "ttft,tpot,e2el", "metric-percentiles": "50,90,99"},
        }
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        module = "vllm.entrypoints.cli.main"
        flags = ["--ignore-eos", "--save-result"]
        called([python(), "-m", module, "bench", "serve", *words, *flags])
        result = json.loads((Path(folder) / "out.json").read_text(encoding="utf-8"))
    return read_vllm(result, plan)


def read_vllm(result: Mapping[str, Any], plan: Any) -> Figures:
    """The figures of one result from vLLM. Raises UserError if requests failed."""
    if missing := plan.requests - result["completed"]:
        raise UserError(f"{missing} requests of vLLM failed: run it again.")
    names = {"TTFT": "ttft", "TPOT": "tpot", "E2E": "e2el"}
    return {
        **{
            name: {f"p{p}": result[f"p{p}_{key}_ms"] / 1e3 for p in PERCENTILES}
            for name, key in names.items()
        },
        "rate": result["output_throughput"],
        "prompt": result["total_input_tokens"] / plan.requests,
    }


def read(benchmark: Mapping[str, Any], plan: Any) -> Figures:
    """The figures of one of guidellm's benchmarks. Raises UserError if requests failed."""
    good = {
        name: metric["successful"]
        for name, metric in benchmark["metrics"].items()
        if isinstance(metric, dict) and "successful" in metric
    }
    if (count := good["request_latency"]["count"]) < plan.requests:
        raise UserError(f"{plan.requests - count} requests of guidellm failed: run it again.")
    return {
        **{
            name: {f"p{p}": good[key]["percentiles"][f"p{p}"] * unit for p in PERCENTILES}
            for name, (_, key, unit) in LATENCIES.items()
        },
        "rate": good["output_tokens_per_second"]["mean"],
        "prompt": good["prompt_token_count"]["median"],
    }


def shape(folder: Path) -> str:
    """Write a model of GPT-2's shape into `folder`: the embedded vocabulary, and no weights."""
    shutil.copytree(TOKENIZER, folder, ignore=lambda *_: ["model.safetensors"], dirs_exist_ok=True)
    config = folder / "config.json"
    sizes = {"n_layer": 12, "n_embd": 768, "n_head": 12}
    config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | sizes))
    return str(folder)


@contextmanager
def processors() -> Iterator[Callable[[], None]]:
    """Processes started inside run on the first processor; after a call of the function that this
    yields, new ones run on the others. Does nothing with one processor, or where a process cannot
    choose."""
    process = psutil.Process()
    every = process.cpu_affinity() if hasattr(process, "cpu_affinity") else []
    if len(every) < 2:
        yield lambda: None
        return
    process.cpu_affinity(every[:1])
    try:
        yield lambda: process.cpu_affinity(every[1:])
    finally:
        process.cpu_affinity(every)


def run(plan: Any) -> dict[str, Any]:
    """Every round loads both servers with all tools, each time a different tool first."""
    python()
    tools: dict[str, Callable[[str, Any, int], Figures]]
    tools = {OURS: ours, GUIDELLM: guidellm, VLLM: vllm}
    known = ("--ttft", str(plan.ttft), "--itl", str(plan.itl))
    runs: list[dict[str, Any]] = []
    with (
        processors() as leave_the_first,
        tempfile.TemporaryDirectory() as folder,
        mock.process(*known) as mocked,
        own_server(["--model", shape(Path(folder)), *OPTIONS], quiet=True) as server,
    ):
        leave_the_first()
        urls = {"mock": mocked, "our server": server.url}
        with tqdm(total=plan.rounds * len(urls) * len(tools), unit="run") as bar:
            for number in range(plan.rounds):
                first = number % len(tools)
                order = [*tools][first:] + [*tools][:first]
                for name, url in urls.items():
                    for tool in order:
                        bar.set_postfix_str(f"{tool}, {name}")
                        figures = tools[tool](url, plan, number)
                        runs.append({"server": name, "tool": tool, **figures})
                        bar.update()
    return {"runs": runs, "installed": INSTALLED}


def compared(results: Results) -> Iterator[dict[str, str]]:
    """Medians of the rounds, and how far the others are from ours."""
    servers = dict.fromkeys(run["server"] for run in results["runs"])
    figures = [(name, percent) for name in LATENCIES for percent in PERCENTILES] + [("rate", 50)]
    for server, (name, percent) in product(servers, figures):
        values: dict[str, list[float]] = {OURS: [], GUIDELLM: [], VLLM: []}
        for run in results["runs"]:
            if run["server"] == server:
                value = run[name] if name == "rate" else run[name][f"p{percent}"]
                values[run["tool"]].append(value)
        mine, *others = map(median, values.values())
        near = NEAR if name in ("TTFT", "E2E") else 0
        limits = {"rel_tol": CLOSE[percent], "abs_tol": near}
        figure, unit = ("output tok/s", 1.0) if name == "rate" else (f"{name} p{percent}, ms", 1e3)
        shown = [f"{value * unit:,.1f}" for value in (mine, *others)]
        yield {
            "server": server,
            "figure": figure,
            **dict(zip(values, shown, strict=True)),
            "difference": ", ".join(f"{other / mine - 1:+.1%}" for other in others),
            "agree": ", ".join(
                "yes" if math.isclose(mine, other, **limits) else "no" for other in others
            ),
        }


def headline(results: Results) -> str:
    agree = ", ".join(row["agree"] for row in compared(results)).split(", ")
    return f"other load tests agree with {OURS} in {agree.count('yes')} of {len(agree)} figures"


TABLES = tables({}, "", crosscheck=compared)
FEW = {"users": FULL.users, "requests": 24, "prompt": FULL.prompt, "answer": FULL.answer}
BENCHMARK = kit.Benchmark(
    KIND, __doc__, FULL, run, TABLES, {}, headline, FEW, "stage07_loadtest.crosscheck"
)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
