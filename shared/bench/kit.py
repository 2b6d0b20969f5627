"""The bench kit: a benchmark is a list of cases, tables of columns, charts, and a few measurements
of its own.

    FULL = kit.plan(models=("gpt2",), dtypes=kit.BOTH, lengths=(1, 32, 512))
    BENCHMARK = kit.Benchmark(STAGE, __doc__, FULL, kit.cases(...), TABLES, CHARTS, headline)

A case takes a `Subject` (a model in a dtype) and returns groups of results (see `rows`). `compare`
is the usual one: it runs a workload through several engines in turn and proves every answer that
was timed. Nothing is written if a token differs. The machine's limits are measured in the same run,
and in a full one beside every group (`measure.Ruler`).
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from functools import cache, partial
from itertools import groupby, product
from typing import Any

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from shared import checkpoint, cli, linear, measure, models, profiling
from shared.checkpoint import EMBEDDED, Checkpoint
from shared.parity import near_tie, random_prompt
from shared.peers import transformers_model
from shared.roofline import Lengths
from stage01_forward.attention import Recompute
from stage01_forward.generation import Output
from stage01_forward.model import GPT2
from stage01_forward.params import SamplingParams

from . import rows
from .rows import Draw, Picture, Results

Group = dict[str, Any]
BOTH = ("float32", "bfloat16")
SUBJECTS = ("models", "dtypes", "subjects")  # of a plan
# Requests that arrive together, with answers of very different lengths, half of them shorter than
# `middle`. The budget is per pass; the repeats are the stage's and the others'.
CROWD: dict[str, Any] = {
    "requests": 72, "prompts": (16, 64), "answers": (8, 256), "middle": 48,
    "budget": 256, "repeats": (2, 1),
}  # fmt: skip


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


def run_lengths(values: Iterable[Any]) -> list[list[Any]]:
    """[7, 7, 3] as [[7, 2], [3, 1]]: a value, and how often it comes in a row."""
    return [[value, len(list(same))] for value, same in groupby(values)]


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def packed(lengths: Lengths) -> list[list[int]]:
    """Lengths as results keep them: tokens of prompt and answer, and how many requests in a row
    have them."""
    return [[*pair, times] for pair, times in run_lengths(lengths)]


# ---- what is measured, and the proof that comes first -------------------------------------------


def plan(**sizes: Any) -> Any:
    """The sizes to measure and how often, by name. Lengths are in tokens."""
    return make_dataclass("Plan", sizes, frozen=True)(**sizes)


def quick(plan: Any, **changes: Any) -> Any:
    """A plan for `--quick`: the first model and dtype, a quarter of every whole number, but at
    least 1, and `changes`."""

    def quarter(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: quarter(field) for name, field in value.items()}
        if isinstance(value, tuple):
            return tuple(map(quarter, value))
        return max(1, value // 4) if type(value) is int else value

    sizes = vars(plan).items()
    few = {name: size[:1] if name in SUBJECTS else quarter(size) for name, size in sizes}
    return replace(plan, **few | changes)


def crowd(plan: Any) -> Lengths:
    """The CROWD of a plan: prompts of any length within bounds, and lognormal answers, most of them
    short and a few very long. With equal lengths, a scheduler would have nothing to gain."""
    rng, lengths, (least, most) = random.Random("lengths of stage 04"), [], plan.answers
    for _ in range(plan.requests):
        answer = round(rng.lognormvariate(math.log(plan.middle), 1.0))
        lengths.append((rng.randint(*plan.prompts), min(max(answer, least), most)))
    return lengths


def shape(name: str) -> Checkpoint:
    """The model of a benchmark: an embedded one, or a shape with random weights."""
    return models.load(name, random_weights=name not in EMBEDDED)


def server_options(model: str, dtype: str, contexts: int, **more: object) -> list[str]:
    """The command line of our server for a benchmark's model, with memory for `contexts` whole
    contexts: `max_queue=9` is --max-queue 9."""
    config, threads = checkpoint.PRESETS[model], torch.get_num_threads()
    memory = contexts * config.n_positions * config.kv_bytes_per_token(getattr(torch, dtype))
    options = {"model": model, "dtype": dtype, "kv_memory": memory, "threads": threads} | more
    words = [w for name, value in options.items() for w in (f"--{name.replace('_', '-')}", value)]
    return [*map(str, words), *([] if model == "stories" else ["--random-weights"])]


@torch.inference_mode()
def prove(scores: torch.Tensor, taken: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Prove from the oracle's logits (N, V) that it would choose each of the tokens `taken` (N,)
    too.

    Raises AssertionError at a difference that is not a near tie; near ties are counted, with the
    widest gap.
    """
    best, differs = scores.amax(-1), scores.argmax(-1) != taken
    below = best - scores.gather(1, taken[:, None])[:, 0]  # (N,)
    gaps = below[differs].tolist()
    for highest, gap in zip(best[differs].tolist(), gaps, strict=True):
        if gap >= near_tie(dtype, highest):
            raise AssertionError(
                f"an engine took a token whose logit lies {gap:.3g} below the best, {highest:.3g}"
            )
    return {"tokens": len(taken), "near_ties": len(gaps), "widest_gap": max(gaps, default=0.0)}


def together(proofs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Several proofs as one."""
    listed = list(proofs)
    sums = {key: sum(proof[key] for proof in listed) for key in ("tokens", "near_ties")}
    return sums | {"widest_gap": max((proof["widest_gap"] for proof in listed), default=0.0)}


@torch.inference_mode()
def prove_answer(model: GPT2, prompt: Sequence[int], answer: Sequence[int]) -> dict[str, Any]:
    """Prove that stage 01 would choose every token of `answer`, given those before it: one pass
    over prompt and answer alone, without cache or neighbours."""
    ids = torch.tensor([*prompt, *answer[:-1]], device=model.device)
    places, taken = torch.arange(len(ids), device=ids.device), ids.new_tensor(answer)
    hidden = model(ids, places, Recompute().attend)[len(prompt) - 1 :]  # (answer, C)
    return together(
        prove(model.logits(rows).float(), answers, model.dtype)
        for rows, answers in zip(hidden.split(128), taken.split(128), strict=True)
    )


class Subject:
    """A model in a dtype with its linear layers chosen, and what was proved of it."""

    def __init__(self, shape: Checkpoint, dtype: torch.dtype, device: str = "cpu") -> None:
        self.shape, self.config, self.dtype = shape, shape.config, dtype
        self.model: GPT2 = models.load_model(shape, dtype=dtype, device=torch.device(device))
        chosen = linear.optimize(self.model)
        kind = str(dtype).removeprefix("torch.")
        self.about = {"model": shape.config.name, "dtype": kind, "linear": chosen}
        self.peer = cache(lambda attention: transformers_model(shape, dtype, attention))
        self._proof = cache(lambda prompt, answer: prove_answer(self.model, prompt, answer))

    def prompts(self, lengths: Iterable[int], name: str = "request") -> list[list[int]]:
        """Random prompts; those of a small workload are among those of a large one."""
        return [random_prompt(n, self.config, f"{name} {i}") for i, n in enumerate(lengths)]

    def prove(self, outputs: Iterable[Any]) -> dict[str, Any]:
        """`prove_answer` of all `outputs` together. An answer already proved is not run again."""
        return together(self._proof(tuple(out.prompt_ids), tuple(out.token_ids)) for out in outputs)

    def prove_lengths(
        self, prompts: Sequence[list[int]], answers: Sequence[list[int]], counts: Sequence[int]
    ) -> dict[str, Any]:
        """The same for `answers` to `prompts`; each answer must have its count of tokens."""
        if (lengths := list(map(len, answers))) != list(counts):
            raise AssertionError(f"answers have another length than requested: {lengths}")
        return self.prove(map(Output, prompts, answers))


@dataclass
class Peer:
    """transformers with the shape of our engines: `answer` takes prompts and the length of each
    answer, and returns the answers; `passes` returns how many passes the last call took, or 0."""

    answer: Callable[..., list[list[int]]]
    passes: Callable[[], int] = int
    steps: Sequence[Any] = ()

    def generate(self, prompts: list[list[int]], sampling: Sequence[SamplingParams]) -> list[Any]:
        answers = self.answer(prompts, [params.max_tokens for params in sampling])
        return [Output(prompt, ids) for prompt, ids in zip(prompts, answers, strict=True)]


def by_variant(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Group:
    """The results of some runs: for each key a mapping from the variant to its value in every run,
    but only the last proof."""
    keys = next(iter(results.values()))[0]
    group = {
        key: {name: [run[key] for run in runs] for name, runs in results.items()} for key in keys
    }
    if "proof" in keys:
        group["proof"] = {name: proofs[-1] for name, proofs in group["proof"].items()}
    return group


class Runs:
    """One engine's workload, run at every call; keeps the answers and records of each run."""

    def __init__(self, engine: Any, prompts: list[list[int]], counts: Iterable[int]) -> None:
        self.engine, self.prompts = engine, prompts
        self.sampling = [greedy(count) for count in counts]
        self.outputs: list[list[Any]] = []
        self.steps: list[list[Any]] = []
        self.bytes = 0  # of the cache
        engine.generate(prompts[:2], [greedy(2)] * len(prompts[:2]))  # warms up

    def __call__(self) -> None:
        self.outputs.append(self.engine.generate(self.prompts, self.sampling))
        self.steps.append(list(self.engine.steps))
        held = getattr(self.engine, "runner", self.engine)
        self.bytes = held.cache.bytes if hasattr(held, "cache") else getattr(held, "cache_bytes", 0)

    @property
    def answers(self) -> list[list[int]]:
        return [output.token_ids for output in self.outputs[-1]]

    def fields(self, subject: Subject) -> dict[str, Any]:
        """What is kept of the last run; every run's answers are proved. "busy": places of passes
        that computed for a request."""
        if isinstance(self.engine, Peer):
            busy = sum(map(len, self.answers))
            return {"passes": self.engine.passes(), "busy": busy}
        rows = [step.rows for step in self.steps[-1]]
        proofs = [subject.prove(outputs) for outputs in self.outputs]
        about = {"passes": len(rows), "busy": sum(rows), "rows": run_lengths(rows)}
        return about | {"bytes": self.bytes, "proof": proofs[-1]}


def compare(
    subject: Subject,
    engines: Mapping[str, Any],
    lengths: Lengths,
    repeats: int | Mapping[str, int],
    name: str = "request",
    like: str = "",
    **fields: Any,
) -> tuple[Group, dict[str, Runs]]:
    """One workload by several engines in turn, every answer of ours proved.

    "same": answers equal to those of the engine `like`, by default the first. Raises AssertionError
    for a wrong token.
    """
    prompts = subject.prompts([prompt for prompt, _ in lengths], name)
    counts = [count for _, count in lengths]
    runs = {name: Runs(engine, prompts, counts) for name, engine in engines.items()}
    seconds = measure.alternate(runs, repeats, warmup=0)
    kept = {name: timed.fields(subject) for name, timed in runs.items()}
    same = runs[like or next(iter(runs))].answers
    keys = ("passes", "busy", "rows", "bytes", "proof")
    group = {**fields, "lengths": packed(lengths), "seconds": seconds}
    group |= {key: {name: run[key] for name, run in kept.items() if key in run} for key in keys}
    group["same"] = {n: sum(map(list.__eq__, timed.answers, same)) for n, timed in runs.items()}
    return group, runs


def profile(engines: Mapping[str, Any], warmup: int = 1) -> Any:
    """A case: where the time of each of the `engines` goes. The plan's `profiled` is how many
    requests, and the tokens of each prompt and answer. An engine is made from a model; its name is
    a title, in which {dtype} is the subject's."""

    def profile(subject: Subject, plan: Any) -> Iterator[Group]:
        count, prompt, answer = plan.profiled
        prompts = subject.prompts([prompt] * count, "profile")
        for title, engine in engines.items():
            run = partial(engine(subject.model).generate, prompts, greedy(answer))
            operators = profiling.profile(run, rows=6, dtype=subject.dtype, warmup=warmup)
            yield {"title": title.format_map(subject.about), "operators": operators}

    return profile


# ---- a benchmark --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Measures groups of results, named like the function, for each subject: the plan's first
    `models` models and `dtypes` dtypes; None: all. Each group begins with what is known about the
    subject."""

    run: Callable[[Subject, Any], Iterable[Group]]
    models: int | None = 1
    dtypes: int | None = None


def beside(groups: Iterable[Group]) -> Iterator[Group]:
    """The groups as they are measured, each with what a ruler saw of the machine beside it."""
    ruler = measure.RULER.get() or measure.Ruler()
    ruler.seen = {}
    for group in groups:
        yield group | ({"beside": ruler.seen} if ruler.seen else {})


def cases(*listed: Case) -> Callable[[Any], dict[str, Any]]:
    """Runs the cases, model by model."""

    def run(plan: Any) -> dict[str, Any]:
        results: dict[str, Any] = {case.run.__name__: [] for case in listed}
        todo = list(product(enumerate(plan.dtypes), enumerate(plan.models)))
        with tqdm(total=len(todo) * len(listed), unit="case") as bar:
            for (at, dtype), (place, model) in todo:
                subject = Subject(shape(model), getattr(torch, dtype))
                for case, groups in zip(listed, results.values(), strict=True):
                    bar.set_postfix_str(f"{case.run.__name__}, {model}, {dtype}")
                    if place < (case.models or 99) and at < (case.dtypes or 99):
                        groups += beside(subject.about | group for group in case.run(subject, plan))
                    bar.update()
        return results

    return run


@dataclass(frozen=True)
class Benchmark:
    """`python -m <stage>.benchmark`, and what the reports draw from its results."""

    stage: str
    about: str | None  # the docstring of the module
    full: Any
    work: Callable[[Any], dict[str, Any]]  # measures a plan
    draw: Mapping[str, Draw]
    pictures: Mapping[str, Picture]
    line: Callable[[Results], str]
    few: Mapping[str, Any] = field(default_factory=dict)  # changes to the plan for --quick
    module: str = ""  # "": that of the stage
    options: Mapping[str, Any] = field(default_factory=dict)  # more: name -> arguments of argparse

    @property
    def quick(self) -> Any:
        return quick(self.full, **self.few)

    def tables(self, content: Mapping[str, Any]) -> dict[str, str]:
        """Markdown by name."""
        draws, results = {"limits": rows.limits} | dict(self.draw), Results(content)
        return {name: draw(results) for name, draw in draws.items()}

    def charts(self, content: Mapping[str, Any]) -> dict[str, Callable[[], Figure]]:
        results = Results(content)
        return {name: partial(draw, results) for name, draw in self.pictures.items()}

    def headline(self, content: Mapping[str, Any]) -> str:
        """One line, for the table of stages."""
        return self.line(Results(content))

    def run(self, plan: Any, device: str = "cpu") -> dict[str, Any]:
        """The results of a run, as `measure.load` would read them."""
        print("Measuring the limits of this machine, then each case.", file=sys.stderr, flush=True)
        limits = measure.limits(device, refresh=True)
        about = {"plan": asdict(plan)}
        return measure.content(self.stage, about, self.work(plan), limits, device)

    def main(self, argv: list[str] | None = None) -> None:
        """Measure and write reports/<machine>/<stage>.json; with --quick show the tables
        instead."""
        name = self.module or f"{self.stage}.benchmark"
        examples = f"  python -m {name} --quick\n  python -m {name} && python -m reports.draw"
        parser = cli.Parser(name, self.about or "", examples)
        parser.add_argument(
            "--quick",
            action="store_true",
            help="smaller sizes, once: about two minutes on an idle machine, with a progress bar; "
            "shows the tables and keeps nothing",
        )
        for option, how in self.options.items():  # each is a field of the plan
            parser.add_argument(f"--{option}", **how)
        options = vars(parser.parse_args(argv))
        few = options.pop("quick")
        device = cli.choose_device(options.get("device", "cpu")).type
        plan = replace(self.quick if few else self.full, **options)
        with nullcontext() if few or device != "cpu" else measure.ruled():
            content = self.run(plan, device)
        if few:
            for table, text in self.tables(content).items():
                if text.count("\n") > 1:  # some cases are in full runs only
                    print(f"\n{table}\n\n{text}")
            return
        path = measure.results_file(self.stage, device)
        measure.save(path, content)
        place = path.relative_to(measure.ROOT).as_posix()
        print(f"Written: {place}. Next: python -m reports.draw")
