"""One workload through every stage, and through `transformers`: `python -m shared.bench.staircase`.

Some requests, all there at the start, with prompts and answers of different lengths. Each stage works through them in a process
of its own, as a user of it would have to: one prompt after the other where it takes one, as many together as it can in the same
memory where it takes several; the server over HTTP. The processes run in turn, several rounds of them. Every token is compared
with stage 01's, and nothing is written if one differs without a near tie.

Writes reports/<machine>/staircase.json; `python -m shared.bench.report` draws the chart that the main README opens with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import aiohttp
import torch
from tqdm import tqdm

from .. import charts as draw
from .. import checkpoint, cli, measure, parity, paths
from ..checkpoint import PRESETS
from ..course import stages
from ..errors import UserError
from ..linear import optimize
from ..peers import transformers_batch, transformers_greedy, transformers_model
from ..server import MODULE, own_server
from .tables import limits_table, median

KIND = "staircase"
FIRST = paths.discover()[0]
ONE_BY_ONE, BATCH = "transformers", "transformers, a batch"
TITLES = {ONE_BY_ONE: "transformers, one by one", BATCH: "transformers, one batch"}


@dataclass(frozen=True)
class Plan:
    """The workload, and how often it is measured. Lengths are in tokens."""

    model: str = "gpt2"
    dtype: str = "float32"
    device: str = "cpu"
    requests: int = 24
    prompts: tuple[int, int] = (8, 64)
    answers: tuple[int, int] = (8, 64)
    contexts: int = 8  # memory for keys and values: so many whole contexts, where a stage takes several sequences at a time
    rounds: int = 2


QUICK = Plan(requests=8, answers=(4, 32), contexts=2, rounds=1)


def read_plan(fields: Mapping[str, Any]) -> Plan:
    """What `asdict` and JSON made of a plan, as it was."""
    known: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
    }
    return Plan(**known)


def workload(plan: Plan) -> tuple[list[list[int]], list[int]]:
    """Prompts (token ids), and how many tokens each is to be answered with: seeded, the same for all."""
    rng = random.Random("staircase")
    config = PRESETS[plan.model]
    prompts = [
        parity.random_prompt(rng.randint(*plan.prompts), config, number)
        for number in range(plan.requests)
    ]
    return prompts, [rng.randint(*plan.answers) for _ in prompts]


# ---- one run, in a process of its own -------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a variant said, and when: seconds from the start, at which every answer was whole."""

    seconds: float = 0.0
    ends: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    server_bytes: int = 0  # peak memory of the server's process, where there is one


@dataclass(frozen=True)
class Job:
    """What a process is to do."""

    variant: str  # a stage, or one of TITLES, or a server's name with `url`
    plan: Plan
    threads: int
    url: str = ""


def work(job: Job) -> Run:
    """Do it, after a short warm-up: libraries choose their kernels at the first call."""
    prompts, counts = workload(job.plan)
    if job.url or job.variant == MODULE:
        return asyncio.run(over_http(job, prompts, counts))
    torch.set_num_threads(job.threads)
    dtype, device = getattr(torch, job.plan.dtype), torch.device(job.plan.device)
    weights = checkpoint.load(job.plan.model, random_weights=job.plan.model != "stories")
    if job.variant in TITLES:
        return by_transformers(
            job.variant, transformers_model(weights, dtype).to(device), prompts, counts
        )
    model = stages.load_model(weights, dtype=dtype, device=device)
    weights.tensors.clear()
    optimize(model)
    engine = stages.engines()[job.variant](model, job.plan.contexts)
    params = stages.sampling_params()
    warm_up = [params(max_tokens=2, ignore_eos=True)] * 2
    for _ in stages.answer(job.variant, engine, prompts[:2], warm_up):
        pass
    run = Run(ends=[0.0] * len(prompts), tokens=[[] for _ in prompts])
    measure.synchronize(device)
    started = time.perf_counter()
    for place, token in stages.answer(
        job.variant, engine, prompts, [params(max_tokens=count, ignore_eos=True) for count in counts]
    ):
        run.tokens[place].append(token.id)
        run.ends[place] = time.perf_counter() - started
    run.seconds = time.perf_counter() - started
    return run


def by_transformers(
    variant: str, model: Any, prompts: Sequence[list[int]], counts: Sequence[int]
) -> Run:
    """transformers' `generate`, as its users call it. A batch says as many tokens to everybody as the longest answer has."""
    transformers_batch(model, list(prompts[:2]), 2)
    run = Run()
    started = time.perf_counter()
    if variant == BATCH:
        said = transformers_batch(model, list(prompts), max(counts))
        run.ends = [time.perf_counter() - started] * len(prompts)
        run.tokens = [ids[:count] for ids, count in zip(said, counts, strict=True)]
    else:
        for prompt, count in zip(prompts, counts, strict=True):
            run.tokens.append(transformers_greedy(model, prompt, count))
            run.ends.append(time.perf_counter() - started)
    run.seconds = time.perf_counter() - started
    return run


async def over_http(job: Job, prompts: Sequence[list[int]], counts: Sequence[int]) -> Run:
    """All requests at once, to the server at `job.url`, or to ours, started for it."""
    if job.url:
        return await ask_all(job.url, prompts, counts)
    plan = job.plan
    weights = [] if plan.model == "stories" else ["--random-weights"]
    options = [
        "--model",
        plan.model,
        *weights,
        "--dtype",
        plan.dtype,
        "--device",
        plan.device,
        "--threads",
        str(job.threads),
    ]
    config = PRESETS[plan.model]
    memory = (
        plan.contexts * config.n_positions * config.kv_bytes_per_token(getattr(torch, plan.dtype))
    )
    options += ["--kv-memory", str(memory), "--max-sequences", str(plan.requests)]
    with own_server(options, quiet=True) as server:
        run = await ask_all(server.url, prompts, counts)
        run.server_bytes = measure.peak_so_far(server.pid)
        return run


async def ask_all(url: str, prompts: Sequence[list[int]], counts: Sequence[int]) -> Run:
    """Raises UserError if the server does not answer, or not as OpenAI's does."""
    try:
        return await _ask_all(url, prompts, counts)
    except (aiohttp.ClientError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(
            f"{url} does not serve completions ({type(error).__name__}: {error}): ask it by hand first."
        ) from None


async def _ask_all(url: str, prompts: Sequence[list[int]], counts: Sequence[int]) -> Run:
    run = Run(ends=[0.0] * len(prompts), tokens=[[] for _ in prompts])
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        async with session.get(f"{url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]

        async def ask(place: int, prompt: list[int], count: int) -> None:
            body = {
                "model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True,
            }  # fmt: skip
            async with session.post(f"{url}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise UserError(
                        f"{url} answered {response.status}: {(await response.text())[:300]}"
                    )
                answer = await response.json()
            run.ends[place] = time.perf_counter() - started
            run.tokens[place] = answer["choices"][0].get("token_ids") or []
            if answer["usage"]["completion_tokens"] != count:
                raise UserError(
                    f"{url} gave {answer['usage']['completion_tokens']} tokens, and {count} were asked for."
                )

        started = time.perf_counter()
        await asyncio.gather(*(ask(0, prompt, 2) for prompt in prompts[:2]))  # to warm up
        started = time.perf_counter()
        await asyncio.gather(*map(ask, range(len(prompts)), prompts, counts))
        run.seconds = time.perf_counter() - started
    return run


# ---- all of them ----------------------------------------------------------------------------------------------------------


def variants(plan: Plan) -> list[str]:
    """In the order of the chart: transformers, and then the stages that answer prompts."""
    peers = [] if plan.device == "mps" else list(TITLES)
    return [*peers, *stages.engines(), MODULE]


@dataclass(frozen=True)
class Peer:
    """Another server, started by somebody else with the same model, threads and dtype: `command` says how."""

    name: str
    url: str
    command: str


def measure_all(
    plan: Plan, peers: Sequence[Peer] = ()
) -> tuple[dict[str, Any], dict[str, Any], measure.Limits]:
    """Configuration, results, limits. Raises ParityError for a token that differs, UserError for a run that fails, and for a peer
    that does not answer before anything is measured."""
    for each in peers:
        asyncio.run(ask_all(each.url, [[1, 2, 3]], [2]))
    limits = measure.limits(plan.device, refresh=True)
    names = variants(plan)
    urls = {peer.name: peer.url for peer in peers}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in [*names, *urls]}
    tokens: dict[str, list[list[int]]] = {}
    order = measure.rounds(list(runs), plan.rounds)
    with tqdm(total=sum(map(len, order)), unit="run") as bar:
        for name in (name for each in order for name in each):
            bar.set_postfix_str(name)
            job = Job(name, plan, torch.get_num_threads(), urls.get(name, ""))
            try:
                fresh = measure.run_fresh(f"shared.bench.{KIND}", ["--job", json.dumps(asdict(job))])
            except RuntimeError as error:
                raise UserError(f"{name} could not be measured: {error}") from None
            run = Run(**json.loads(fresh.output.splitlines()[-1]))
            runs[name].append(
                {
                    "seconds": run.seconds,
                    "ends": run.ends,
                    "bytes": run.server_bytes or fresh.peak_bytes,
                }
            )
            tokens.setdefault(name, run.tokens)
            bar.update()
    proof = {
        name: asdict(prove(plan, tokens[FIRST], said))
        for name, said in tokens.items()
        if name not in urls and name != FIRST
    }
    configuration = {"plan": asdict(plan), "peers": [asdict(peer) for peer in peers]}
    return configuration, {"runs": runs, "proof": proof}, limits


@dataclass
class Said:
    """An answer, with the names that `parity.compare` reads."""

    token_ids: list[int]
    finish_reason: str | None = None


def prove(plan: Plan, expected: Sequence[list[int]], got: Sequence[list[int]]) -> parity.Parity:
    """Compare with stage 01's tokens. Raises ParityError.

    How near a tie is, only stage 01 can say, and it is asked only about answers that differ.
    """
    found = parity.Parity()
    prompts, counts = workload(plan)
    engine = None
    dtype = getattr(torch, plan.dtype)
    for prompt, count, want, have in zip(prompts, counts, expected, got, strict=True):
        right: Any = Said(want)
        reason = None
        if want != have:
            if engine is None:
                weights = checkpoint.load(plan.model, random_weights=plan.model != "stories")
                engine = stages.oracle(
                    stages.load_model(weights, dtype=dtype, device=torch.device(plan.device))
                )
            params = stages.sampling_params()(
                max_tokens=count, ignore_eos=True, logprobs=parity.LIKELIEST
            )
            (right,) = engine.generate([prompt], params)
            reason = right.finish_reason
        parity.compare(KIND, [right], [Said(have, reason)], dtype, found)
    return found


# ---- from results to tables and charts ------------------------------------------------------------------------------------


def shown(name: str) -> str:
    return TITLES.get(name, name)


def rate(results: Mapping[str, Any], name: str) -> measure.Summary:
    """Output tok/s."""
    tokens = sum(workload(plan_of(results))[1])
    return measure.summarize([run["seconds"] for run in results["results"]["runs"][name]]).of(
        tokens
    )


def plan_of(results: Mapping[str, Any]) -> Plan:
    return read_plan(results["configuration"]["plan"])


def mark(results: Mapping[str, Any], name: str) -> str:
    """Whether the tokens are stage 01's."""
    if name == FIRST:
        return "the oracle"
    proof = results["results"]["proof"].get(name)
    if proof is None:
        return "not compared"
    ties = len(proof["near_ties"])
    return (
        "all equal"
        if not ties
        else f"equal, but {ties} of {proof['sequences']} answers part at a near tie"
    )


def steps_table(results: dict[str, Any]) -> str:
    """A line a variant."""
    lines = [
        "| | tok/s | over stage 01 | an answer takes, s (mean) | the slowest, s | peak memory, MiB | tokens |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    first = rate(results, FIRST).median
    for name, runs in results["results"]["runs"].items():
        found = rate(results, name)
        mean = median([statistics.fmean(run["ends"]) for run in runs])
        slowest = median([max(run["ends"]) for run in runs])
        cells = [
            shown(name), found.show(), f"{found.median / first:.1f}x", f"{mean:.1f}", f"{slowest:.1f}",
            f"{median([run['bytes'] for run in runs]) / 2**20:,.0f}", mark(results, name),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def workload_table(results: dict[str, Any]) -> str:
    """What was asked."""
    plan = plan_of(results)
    prompts, counts = workload(plan)
    return (
        "| model | dtype | requests | prompt tokens | answer tokens | memory, whole contexts | rounds |\n"
        "|---|---|--:|--:|--:|--:|--:|\n"
        f"| {plan.model}, random weights | {plan.dtype} | {plan.requests} | {sum(map(len, prompts))}: {plan.prompts[0]} to "
        f"{plan.prompts[1]} each | {sum(counts)}: {plan.answers[0]} to {plan.answers[1]} each | {plan.contexts} "
        f"| {plan.rounds} |"
    )


def tables(results: dict[str, Any]) -> dict[str, str]:
    return {
        "limits": limits_table(results),
        "workload": workload_table(results),
        "steps": steps_table(results),
    }


def steps_chart(results: dict[str, Any]) -> Any:
    """Bars that grow from stage to stage, beside transformers."""
    names = list(results["results"]["runs"])
    found = {name: rate(results, name) for name in names}
    best = max(
        (name for name in names if name in stages.engines()), key=lambda name: found[name].median
    )
    gain = found[best].median / found[FIRST].median
    return draw.bars(
        f"The staircase: {gain:.0f}x the naive engine's throughput",
        "output tok/s",
        [shown(name) for name in names],
        {"tok/s": [found[name].median for name in names]},
        spread={"tok/s": [(found[name].low, found[name].high) for name in names]},
        digits=0,
    )


def charts(results: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    return {"steps": partial(steps_chart, results)}


def headline(results: dict[str, Any]) -> str:
    """One line: the whole way."""
    last = list(stages.engines())[-1]
    return f"{rate(results, last).median / rate(results, FIRST).median:.0f}x from {FIRST} to {last}"


# ---- the command line -----------------------------------------------------------------------------------------------------


def peer(text: str) -> Peer:
    """An argparse type: NAME=URL=COMMAND."""
    parts = text.split("=", 2)
    if len(parts) != 3 or not all(parts) or not parts[1].startswith("http"):
        raise argparse.ArgumentTypeError(
            f"'{text[:80]}' is no peer: write NAME=URL=COMMAND, and the command is how that server was started"
        )
    return Peer(parts[0], parts[1].rstrip("/"), parts[2])


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        f"shared.bench.{KIND}",
        "Measures one workload through every stage and through transformers, for the chart that compares them all.",
        f"  python -m shared.{KIND} --quick\n"
        f"  python -m shared.{KIND} && python -m shared.bench.report\n"
        f"  python -m shared.{KIND} --peer 'llama.cpp=http://127.0.0.1:8080=llama-server -m gpt2-f32.gguf -t 2 -np 32'",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a smaller workload, once; the table is shown and not kept",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda", "mps"),
        default="cpu",
        help="where to compute; default cpu",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32"
    )
    parser.add_argument(
        "--peer", type=peer, action="append", default=[], metavar="NAME=URL=COMMAND",
        help="an OpenAI-style server that runs already, with the same model, and how it was started; may be given several times",
    )  # fmt: skip
    parser.add_argument("--job", help=argparse.SUPPRESS)  # what a process of ours is to do
    options = parser.parse_args(argv)
    if options.job:
        fields = json.loads(options.job)
        print(json.dumps(asdict(work(Job(**fields | {"plan": read_plan(fields["plan"])})))))
        return 0
    cli.choose_device(options.device)
    plan = replace(QUICK if options.quick else Plan(), device=options.device, dtype=options.dtype)
    configuration, results, limits = measure_all(plan, options.peer)
    content = {
        "configuration": configuration, "results": results, "limits": asdict(limits), "machine": measure.machine(plan.device),
        "versions": measure.versions(), "threads": torch.get_num_threads(),
    }  # fmt: skip
    print(steps_table(content))
    if not options.quick:
        path = measure.results_file(KIND, plan.device)
        measure.save(path, KIND, configuration, results, seed=0, limits=limits, device=plan.device)
        print(
            f"Written: {path.relative_to(measure.ROOT).as_posix()}. Next: python -m shared.bench.report"
        )
    return 0


if __name__ == "__main__":
    cli.run(main)
