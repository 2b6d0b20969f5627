"""Do other load tests measure the same? `python -m stage07_loadtest.crosscheck` loads the mock and
our server by this stage and by guidellm in turn, the same load each, in several rounds.

guidellm is installed into an environment of its own in the cache folder, at a pinned version; what
this project has installed already, such as PyTorch, is used from there. It sends texts as prompts,
so the server has a tokenizer: the embedded model.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shared import cli, measure, paths
from shared.bench.kit import Benchmark, keep
from shared.bench.rows import Results, median, tables
from shared.errors import UserError
from shared.server import own_server

from . import metrics, mock, schedule
from .client import Target
from .load import run_point
from .workload import Lengths, make

KIND = "stage07_crosscheck"
OURS, THEIRS = "stage07", "guidellm"
REQUIREMENT = "guidellm==0.8.1"
TOKENIZER = paths.ROOT / "shared" / "stories" / "model"
PERCENTILES = (50, 90, 99)
CLOSE = {50: 0.05, 90: 0.1, 99: 0.1}  # agreement: relative difference, or NEAR
NEAR = 0.005  # seconds
# Its inter-token latency is our TPOT: (last - first) / (tokens - 1). See GLOSSARY.
LATENCIES: Mapping[str, tuple[Callable[[Any], float | None], str, float]] = {
    "TTFT": (metrics.ttft, "time_to_first_token_ms", 1e-3),
    "TPOT": (metrics.tpot, "inter_token_latency_ms", 1e-3),
    "E2E": (metrics.e2e, "request_latency", 1.0),
}


@dataclass(frozen=True)
class Plan:
    """The load of one run, and how often it is repeated."""

    users: int = 8
    requests: int = 200
    prompt: int = 32  # tokens
    answer: int = 50
    ttft: float = 0.1  # seconds, of the mock
    itl: float = 0.02
    rounds: int = 5


FULL = Plan()
QUICK = replace(FULL, requests=24, rounds=1)
Figures = dict[str, Any]  # latency -> percentile -> seconds; "rate": output tok/s; "prompt": tokens


def environment() -> Path:
    """The Python that has guidellm, installed at the first call. Raises UserError."""
    folder = measure.cache_folder() / "crosscheck" / REQUIREMENT
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    done = folder / "installed"
    if done.exists():
        return python
    print(f"Installing {REQUIREMENT} into {folder} ...", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / ("Lib" if os.name == "nt" else f"lib/{version}") / "site-packages"
    own = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (site / "project.pth").write_text("\n".join(sorted(own)) + "\n", encoding="utf-8")
    command = [str(python), "-m", "pip", "install", "-q", REQUIREMENT]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise UserError(
            f"{REQUIREMENT} cannot be installed ({last_line(ended.stderr)}): "
            f"try {' '.join(command)}"
        )
    done.touch()
    return python


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip()


def ours(url: str, plan: Plan, seed: int) -> Figures:
    prompt, answer = (Lengths(size, size) for size in (plan.prompt, plan.answer))
    asks = make("short", plan.users + plan.requests, seed, prompts=prompt, answers=answer)
    when = schedule.closed(plan.users, plan.requests)
    point = asyncio.run(run_point(Target(url), asks, when, warmup=plan.users))
    good = [record for record in point.records if metrics.succeeded(record)]
    if point.interrupted:
        raise KeyboardInterrupt
    if len(good) < plan.requests:
        raise UserError(f"{plan.requests - len(good)} requests to {url} failed: run it again.")
    values = {name: [of(one) or 0.0 for one in good] for name, (of, *_) in LATENCIES.items()}
    return {
        **{n: {f"p{p}": metrics.percentile(v, p) for p in PERCENTILES} for n, v in values.items()},
        "rate": plan.requests * plan.answer / point.duration,
        "prompt": median(record.prompt_tokens or 0 for record in good),
    }


def theirs(url: str, plan: Plan, seed: int) -> Figures:
    """Raises UserError if guidellm fails, or requests of it do."""
    data = f"prompt_tokens={plan.prompt},output_tokens={plan.answer}"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        options = {
            "backend": f"kind=openai_http,target={url},request_format=/v1/completions",
            "profile": f"kind=concurrent,streams={plan.users}",
            "constraint": f"kind=max_requests,count={plan.requests}",
            "data": f"kind=synthetic_text,{data}",
            "tokenizer": f"kind=huggingface_auto,model={TOKENIZER}",
            "seed": f"kind=static,value={seed}",
            "output": f"kind=json,path={out}",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        ended = subprocess.run(
            [environment(), "-m", "guidellm", "run", *words, "--disable-console"],
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        if ended.returncode or not out.exists():
            raise UserError(f"guidellm failed: {last_line(ended.stderr or ended.stdout)}")
        (benchmark,) = json.loads(out.read_text(encoding="utf-8"))["benchmarks"]
    return read(benchmark, plan)


def read(benchmark: Mapping[str, Any], plan: Plan) -> Figures:
    """The figures of one of guidellm's benchmarks, of the requests that succeeded."""
    good = {
        name: found["successful"]
        for name, found in benchmark["metrics"].items()
        if isinstance(found, dict) and "successful" in found
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


def run(plan: Plan) -> dict[str, Any]:
    """Every round loads both servers by both tools, in turn first."""
    environment()
    tools: dict[str, Callable[[str, Plan, int], Figures]] = {OURS: ours, THEIRS: theirs}
    known = ("--ttft", str(plan.ttft), "--itl", str(plan.itl))
    found: list[dict[str, Any]] = []
    with mock.process(*known) as mocked, own_server(["--device", "cpu"], quiet=True) as server:
        urls = {"mock": mocked, "our server": server.url}
        with tqdm(total=plan.rounds * len(urls) * len(tools), unit="run") as bar:
            for number in range(plan.rounds):
                order = list(tools) if number % 2 == 0 else list(reversed(tools))
                for name, url in urls.items():
                    for tool in order:
                        bar.set_postfix_str(f"{tool}, {name}")
                        figures = tools[tool](url, plan, number)
                        found.append({"server": name, "tool": tool, **figures})
                        bar.update()
    return {"runs": found, "requirement": REQUIREMENT}


def compared(results: Results) -> list[dict[str, str]]:
    """Medians of the rounds, and how far apart they are."""
    rows = []
    for server in dict.fromkeys(one["server"] for one in results["runs"]):
        by_tool = {
            tool: [one for one in results["runs"] if (one["server"], one["tool"]) == (server, tool)]
            for tool in (OURS, THEIRS)
        }
        for name in LATENCIES:
            for percent in PERCENTILES:
                mine, other = (
                    median(one[name][f"p{percent}"] for one in runs) for runs in by_tool.values()
                )
                close = math.isclose(mine, other, rel_tol=CLOSE[percent], abs_tol=NEAR)
                rows.append(
                    {
                        "server": server,
                        "figure": f"{name} p{percent}, ms",
                        OURS: f"{mine * 1e3:,.1f}",
                        THEIRS: f"{other * 1e3:,.1f}",
                        "difference": f"{other / mine - 1:+.1%}",
                        "agree": "yes" if close else "no",
                    }
                )
        mine, other = (median(one["rate"] for one in runs) for runs in by_tool.values())
        rows.append(
            {
                "server": server,
                "figure": "output tok/s",
                OURS: f"{mine:,.1f}",
                THEIRS: f"{other:,.1f}",
                "difference": f"{other / mine - 1:+.1%}",
                "agree": "yes" if math.isclose(mine, other, rel_tol=CLOSE[50]) else "no",
            }
        )
    return rows


def headline(results: Results) -> str:
    rows = compared(results)
    agree = sum(row["agree"] == "yes" for row in rows)
    return f"{OURS} and {THEIRS} agree in {agree} of {len(rows)} figures"


ABOUT = "Loads the mock and our server by this stage and by guidellm, and compares the figures."
TABLES = tables({}, "", crosscheck=compared)
BENCHMARK = Benchmark(KIND, ABOUT, FULL, QUICK, run, TABLES, {}, headline)


def main(argv: list[str] | None = None) -> None:
    module = "stage07_loadtest.crosscheck"
    parser = cli.Parser(module, ABOUT, f"  python -m {module} --quick\n  python -m {module}")
    parser.add_argument(
        "--quick", action="store_true", help="one short round; shows the table and keeps nothing"
    )
    if parser.parse_args(argv).quick:
        print(BENCHMARK.tables(BENCHMARK.run(QUICK))["crosscheck"])
    else:
        keep(BENCHMARK.run(FULL))


if __name__ == "__main__":
    cli.run(main)
