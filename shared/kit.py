"""The kit of the benchmarks: variants in turn beside the machine's limits, proofs, results as JSON,
and tables.

A stage's benchmark.py has four functions: `measure(bench)` runs cases and keeps a row for each,
`tables(results)` and `chart(results)` turn the rows into lines of cells and a figure, and
`headline(results)` yields what the table of stages says of them, or nothing.

A row is what was measured together: the times of its variants, which ran in turn, and what memory
and arithmetic gave before and after. If these differ by more than MOVED, the row is measured again;
after TRIES times it is refused, and the tables do without it.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import cache, cached_property, partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from tqdm import tqdm

from . import catalog, cli, linear, measure, models, paths, registry
from .attention import attention
from .catalog import EMBEDDED
from .config import Config, read_config
from .errors import UserError
from .parity import near_tie, random_prompt
from .roofline import Cost, Limits, forward_cost

SCHEMA = 3
MOVED, TRIES = 0.15, 3
BLOCK = 16  # tokens of a block of keys and values
# The machine of round numbers, for which the lessons predict by hand.
ROUND = {"memory": 40.0, "float32": 200.0, "bfloat16": 400.0}
HELD = 1.25  # a measurement within this factor of the prediction made by hand: it held
UNMEASURED = "not measured yet"
NUMBER = re.compile(r"|[\d.,]+[%x]?( \(.*\))?")  # cells that stand right
Tables = Mapping[str, Iterable[Mapping[str, object]]]  # lines of cells, by the name of the table

# ---- what is measured, and its proof -------------------------------------------------------------


class Subject:
    """A model in a dtype, with its linear layers packed unless they are to stay `plain`. A name
    that is not embedded means a known shape with random weights: speed does not depend on them."""

    def __init__(self, name: str, dtype: str, device: str = "cpu", plain: bool = False) -> None:
        self.shape = models.load(name, random_weights=name not in EMBEDDED)
        self.config, self.dtype = self.shape.config, getattr(torch, dtype)
        self.model = models.load_model(self.shape, torch.device(device), self.dtype)
        if not plain:
            linear.optimize(self.model)
        self.about: dict[str, Any] = {"model": name, "dtype": dtype}
        self._proof = cache(lambda prompt, answer: prove_answer(self.model, prompt, answer))

    def prompts(self, lengths: Iterable[int], name: str = "request") -> list[list[int]]:
        """Random prompts of `lengths` in tokens."""
        return [random_prompt(n, self.config, f"{name} {i}") for i, n in enumerate(lengths)]

    def server_options(self, contexts: int) -> list[str]:
        """Of a server with this model, and memory for whole contexts."""
        name, dtype, threads = self.about["model"], self.about["dtype"], torch.get_num_threads()
        size = contexts * self.config.n_positions * self.config.kv_bytes_per_token(self.dtype)
        words = f"--model {name} --dtype {dtype} --kv-memory {size} --threads {threads}"
        return [*words.split(), *([] if name in EMBEDDED else ["--random-weights"])]

    def prove(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> dict[str, Any]:
        """Prove all answers (token ids). One that was proved before is not run again."""
        pairs = zip(map(tuple, prompts), map(tuple, answers), strict=True)
        return together(self._proof(*pair) for pair in pairs)


def greedy(count: int) -> Any:
    """Sampling parameters: exactly `count` tokens, the likeliest each time."""
    return registry.load(registry.SAMPLING)(max_tokens=count, ignore_eos=True)


def prove(scores: torch.Tensor, taken: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Prove from the oracle's logits (N, V) that it would choose each of the tokens `taken` (N,)
    too. Raises AssertionError at a difference that is not a near tie; near ties are counted."""
    best, differs = scores.amax(-1), scores.argmax(-1) != taken
    gaps = (best - scores.gather(1, taken[:, None])[:, 0])[differs].tolist()
    for highest, gap in zip(best[differs].tolist(), gaps, strict=True):
        if gap >= near_tie(dtype, highest):
            raise AssertionError(
                f"an engine took a token whose logit lies {gap:.3g} below the best, {highest:.3g}"
            )
    return {"tokens": len(taken), "near_ties": len(gaps)}


def together(proofs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Several proofs as one."""
    parts = list(proofs)
    return {key: sum(proof[key] for proof in parts) for key in ("tokens", "near_ties")}


@torch.inference_mode()
def prove_answer(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> dict[str, Any]:
    """Prove that the model would choose every token of `answer`, given those before it: one pass
    over prompt and answer, without cache or neighbours."""

    def attend(layer: int, *qkv: torch.Tensor) -> torch.Tensor:  # each (T, H, D)
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        return attention(q, k, v, causal=True)[0].transpose(0, 1)

    ids = torch.tensor([*prompt, *answer[:-1]], device=model.device)
    places, taken = torch.arange(len(ids), device=ids.device), ids.new_tensor(answer)
    hidden = model(ids, places, attend)[len(prompt) - 1 :]  # (answer, C)
    return prove(model.logits(hidden).float(), taken, model.dtype)


# ---- a run --------------------------------------------------------------------------------------


class Bench:
    """One run of a benchmark. `results`: rows by case. quick: one repeat, an embedded model, and
    only the first of each of `sizes`."""

    def __init__(self, quick: bool = False, device: str = "cpu") -> None:
        self.quick, self.device = quick, device
        self.results: dict[str, list[dict[str, Any]]] = {}
        self.bar = tqdm(unit="row", leave=False)

    def sizes(self, *values: Any) -> tuple[Any, ...]:
        return values[:1] if self.quick else values

    def subjects(
        self, *pairs: tuple[str, str], quick: str = "stories", plain: bool = False
    ) -> Iterator[Subject]:
        """Each model in its dtype, one after the other; with `quick` an embedded one."""
        for name, dtype in [(quick, "float32")] if self.quick else pairs:
            yield Subject(name, dtype, plain=plain)

    def row(
        self,
        case: str,
        ways: Mapping[str, Callable[[], Any]],
        repeats: int = 3,
        warmup: int = 1,
        prove: Callable[[], Mapping[str, Any]] | None = None,
        **about: Any,
    ) -> Row | None:
        """Run the ways in turn and keep a row with their times. A way that returns a dict has
        its fields kept beside them ("seconds" among them counts in place of the time of the call).
        prove: called afterwards; its proof is kept, and AssertionError ends the run. None: refused.
        """
        name = ", ".join(str(value) for value in about.values() if isinstance(value, (str, int)))
        self.bar.set_postfix_str(f"{case}: {name}"[:60])
        for attempt in range(1, TRIES + 1):
            before = measure.speeds(self.device)
            kept = turns(ways, 1 if self.quick else repeats, warmup)
            after = measure.speeds(self.device)
            row = about | {"limits": {"before": before, "after": after, "tries": attempt}}
            if self.quick or moved(row) <= MOVED:
                row |= kept
                break
        else:
            row["refused"] = moved(row)
            tqdm.write(f"refused: {case}, {name}: the machine moved by {moved(row):.0%}")
        if prove is not None:
            row["proof"] = prove()
        self.results.setdefault(case, []).append(row)
        self.bar.update()
        return None if "refused" in row else Row(row)

    def answers(
        self,
        case: str,
        subject: Subject,
        engines: Mapping[str, Any],
        lengths: Sequence[tuple[int, int]],
        repeats: int = 3,
        keep: Callable[[Any], Mapping[str, Any]] = lambda engine: {},
        **about: Any,
    ) -> Row | None:
        """Whole answers by engines in turn: each has generate(prompts, sampling). lengths: tokens
        of prompt and answer of each request. Every answer that was timed is proved. keep: more
        about an engine's last run."""
        tokens: list[list[int]] = []
        prompts = subject.prompts(prompt for prompt, _ in lengths)
        sampling = [greedy(answer) for _, answer in lengths]

        def run(engine: Any) -> dict[str, Any]:
            seconds, outputs = measure.timed(partial(engine.generate, prompts, sampling))
            tokens.extend(output.token_ids for output in outputs)
            return {"seconds": seconds, "passes": len(engine.steps), **keep(engine)}

        def proof() -> dict[str, Any]:
            times = len(tokens) // len(prompts)
            if [*map(len, tokens)] != [answer for _, answer in lengths] * times:
                raise AssertionError("an answer has another length than was asked for")
            return subject.prove(prompts * times, tokens)

        for engine in engines.values():  # libraries choose their kernels at the first call
            engine.generate(prompts[:2], [greedy(2)] * len(prompts[:2]))
        about = subject.about | about | {"lengths": packed(lengths)}
        ways = {name: partial(run, engine) for name, engine in engines.items()}
        return self.row(case, ways, repeats, 0, proof, **about)


def inputs(rows: int, context: int) -> tuple[list[int], list[Any], list[int]]:
    """Arguments of `Runner.run` for a decode step of `rows` sequences, whose blocks have no order;
    without a context, for a prompt of `rows` tokens."""
    size = -(-(context + 1 if context else rows) // BLOCK)
    if not context:
        return [7] * rows, [([*range(size)], 0, rows)], [rows - 1]
    order = torch.randperm(rows * size, generator=torch.Generator().manual_seed(0)).tolist()
    shares = [(order[row * size : (row + 1) * size], context, 1) for row in range(rows)]
    return [7] * rows, shares, [*range(rows)]


class Passes:
    """Watches an engine from stage 04 on; `costs`: operations and bytes of each pass, which reads
    the weights once, and each request's own cache."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.costs = subject, list[list[float]]()

    def before(self, plan: Any) -> None:
        cost = partial(forward_cost, self.subject.config, self.subject.dtype)
        weights = cost(0, sampled=sum(bool(work.rows) for work in plan.work))
        parts = [cost(work.count, work.start, sampled=0) for work in plan.work]
        read = weights.bytes + sum(part.bytes - weights.bytes for part in parts)
        self.costs.append([weights.flops + sum(part.flops for part in parts), read])

    def after(self, plan: Any) -> None: ...


def crowd(requests: int = 72) -> list[tuple[int, int]]:
    """Tokens of prompt and answer of requests that arrive together: half of the answers are shorter
    than 48 tokens, and a few have 256. With equal lengths, a scheduler would have nothing to gain.
    """
    rng, lengths = random.Random("lengths of stage 04"), []
    for _ in range(requests):
        answer = round(rng.lognormvariate(math.log(48), 1.0))
        lengths.append((rng.randint(16, 64), min(max(answer, 8), 256)))
    return lengths


def turns(
    ways: Mapping[str, Callable[[], Any]], repeats: int, warmup: int
) -> dict[str, dict[str, list[Any]]]:
    """Run the ways in turn, `repeats` times each after `warmup` rounds that do not count. Returns
    the values of each field by way: {"seconds": {"a": [1.0, ...]}}.

    Because they take turns, a slow minute of a shared machine affects all ways, not just one.
    Because the order rotates, no way always follows the same other.
    """
    names, values = list(ways), dict[str, dict[str, list[Any]]]()
    for number in range(-warmup, repeats):
        first = number % len(names)  # A B C, B C A, C A B, ...
        for name in names[first:] + names[:first]:
            seconds, result = measure.timed(ways[name])
            # Outputs of models are mappings, too.
            fields = {"seconds": seconds} | (result if type(result) is dict else {})
            if number >= 0:
                for key, value in fields.items():
                    values.setdefault(key, {}).setdefault(name, []).append(value)
    return values


def moved(row: Mapping[str, Any]) -> float:
    """By how much memory, or arithmetic in the row's dtype, changed while it was measured."""
    before, after = row["limits"]["before"], row["limits"]["after"]
    names = ("memory", "bfloat16" if row.get("dtype") == "bfloat16" else "float32")
    return max(abs(after[name] / before[name] - 1) for name in names)


def process(initial: Callable[..., object] | None = None, *arguments: Any) -> Executor:
    """A fresh process that runs what it is given, after `initial(*arguments)`."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, spawn, initial, arguments)


def peak_so_far(pid: int) -> int:
    """The most memory, in bytes, that a process has had so far; what it has now, if the system
    keeps no peak."""
    status = Path(f"/proc/{pid}/status")
    peak = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.exists() else None
    return int(peak[1]) * 1024 if peak else int(psutil.Process(pid).memory_info().rss)


def packed(lengths: Iterable[tuple[int, int]]) -> list[list[int]]:
    """[(5, 9), (5, 9), (2, 1)] as [[5, 9, 2], [2, 1, 1]]."""
    return [[*pair, len(list(same))] for pair, same in groupby(lengths)]


# ---- results ------------------------------------------------------------------------------------


class Row(dict[str, Any]):
    """A row of results."""

    @cached_property
    def limits(self) -> Limits:
        """What the machine gave beside it: the means of before and after."""
        before, after = self["limits"]["before"], self["limits"]["after"]
        return {name: (before[name] + after[name]) / 2 for name in before}

    @property
    def config(self) -> Config:
        name = self["model"]
        return catalog.presets().get(name) or read_config(EMBEDDED[name], name)

    @property
    def kind(self) -> torch.dtype:
        return getattr(torch, self.get("dtype", "float32"))

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Tokens of prompt and answer of each request."""
        return [(p, a) for p, a, times in self["lengths"] for _ in range(times)]

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(answer for _, answer in self.lengths)

    def median(self, variant: str, key: str = "seconds") -> float:
        return float(median(self[key][variant]))

    def gain(self, slow: str, fast: str, key: str = "seconds") -> float:
        """How many times as much the variant `slow` took as the variant `fast`."""
        return self.median(slow, key) / self.median(fast, key)

    def ms(self, variant: str, digits: int = 1) -> str:
        return spread((1e3 * seconds for seconds in self["seconds"][variant]), digits)

    def rate(self, variant: str, digits: int = 1) -> str:
        """Tokens of answers per second."""
        return spread((self.tokens / seconds for seconds in self["seconds"][variant]), digits)

    def least(self, costs: Cost | Iterable[Cost]) -> float:
        """The least seconds that passes can take, by the limits beside the row."""
        passes = [costs] if isinstance(costs, Cost) else costs
        return sum(cost.seconds(self.limits, self.kind) for cost in passes)

    def bound(self, new: int, cached: int = 0, rows: int = 1) -> float:
        """The least seconds of one pass, with one token sampled for each row."""
        return self.least(forward_cost(self.config, self.kind, new, cached, rows=rows))

    @property
    def proof(self) -> str:
        ties = self["proof"]["near_ties"]
        but = f", {ties} near tie{'s' if ties > 1 else ''}" if ties else ""
        return f"all {self['proof']['tokens']:,}{but}"


class Results:
    """What a run has measured: the content of its file."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content

    def rows(self, case: str, /, **where: Any) -> list[Row]:
        """The rows of a case whose fields have these values, without those that were refused."""
        rows = [Row(row) for row in self.content["results"].get(case, ()) if "refused" not in row]
        return [r for r in rows if all(r.get(key) == value for key, value in where.items())]


def spread(values: Iterable[float], digits: int = 1) -> str:
    """The median, followed by the range if it rests on three values or more."""
    known = sorted(values)
    low, middle, high = (f"{x:,.{digits}f}" for x in (known[0], median(known), known[-1]))
    return f"{middle} ({low} to {high})" if len(known) >= 3 else middle


def table(lines: Iterable[Mapping[str, object]]) -> str:
    """Markdown. The keys of the first line are the headings; columns of numbers stand right."""
    lines = list(lines)
    if not lines:
        return UNMEASURED
    names = list(lines[0])
    cells = [[str(line.get(name, "")) for name in names] for line in lines]
    columns = zip(*cells, strict=True)
    right = [all(NUMBER.fullmatch(text) for text in column) for column in columns]
    marks = "|".join("--:" if number else "---" for number in right)
    rows = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([f"| {' | '.join(names)} |", f"|{marks}|", *rows])


def claim(
    what: str, by_hand: float, here: float, measured: float, unit: str = "x", why: str = "not known"
) -> dict[str, str]:
    """A line of the table that closes a lesson. by_hand: the lesson's prediction, which alone is
    judged; here: the same from the limits measured beside the row."""

    def show(value: float) -> str:
        digits = max(0, 3 - len(f"{value:.0f}"))
        return f"{value:,.{digits}f}{unit if len(unit) < 2 else f' {unit}'}"

    held = 1 / HELD <= measured / by_hand <= HELD
    numbers = {"by hand": show(by_hand), "this machine": show(here), "measured": show(measured)}
    return {"prediction": what, **numbers, "result": "held" if held else "**missed**", "why": why}


def machine(results: Results) -> str:
    """One line: the machine, and what it gave beside all rows."""
    content, about = results.content, results.content["machine"]
    rows = [row for case in content["results"].values() for row in case if "limits" in row]
    ends = [row["limits"][when] for row in rows for when in ("before", "after")]

    def span(name: str) -> str:
        values = sorted(end[name] for end in ends)
        return f"{values[0]:,.0f} to {values[-1]:,.0f}" if values else UNMEASURED

    refused = sum("refused" in row for row in rows)
    return (
        f"{about['processor']} with {about['instructions']}, {about['cpus']} CPUs, "
        f"{content['threads']} threads, torch {content['versions']['torch']}, commit "
        f"{(content['commit'] or 'unknown')[:8]}. Beside {len(rows)} row{'s' * (len(rows) != 1)} "
        f"memory gave {span('memory')} GB/s, arithmetic {span('float32')} GFLOP/s in float32 and "
        f"{span('bfloat16')} in bfloat16; {refused} rows were refused because this moved by more "
        f"than {MOVED:.0%} in each of {TRIES} tries."
    )


# ---- a benchmark as a program -------------------------------------------------------------------


def content_of(stage: str, bench: Bench) -> dict[str, Any]:
    commit, dirty = measure.git_state()
    about: dict[str, Any] = {"schema": SCHEMA, "stage": stage}
    about |= {"command": shlex.join(["python", "-m", *sys.orig_argv[2:]])}
    about |= {"commit": commit, "dirty": dirty, "machine": measure.machine(bench.device)}
    about |= {"versions": measure.versions(), "threads": torch.get_num_threads(), "seed": 0}
    about |= {"order": "rotated rounds: A B C, B C A, C A B, ..."}
    return about | {"results": bench.results}


def results_file(stage: str, device: str = "cpu") -> Path:
    """Where the results of a stage on this machine belong: reports/<machine>/<stage>.json."""
    folder = paths.ROOT / "reports" / measure.slug(measure.machine(device))
    return folder / f"{stage}.json"


def clean_commit() -> None:
    """Raises UserError unless the code is that of a commit."""
    commit, dirty = measure.git_state()
    if commit is None or dirty:
        raise UserError(
            "Results are kept for a known commit alone: commit your changes first, or use --quick."
        )


def main(
    stage: str,
    about: str | None,
    run: Callable[[Bench], None],
    tables: Callable[[Results], Tables],
    argv: list[str] | None = None,
    device: str = "cpu",
) -> None:
    """Measure, and write reports/<machine>/<stage>.json; with --quick show the tables instead."""
    module = f"{stage}.benchmark" if stage.startswith("stage") else f"reports.{stage}"
    examples = f"  python -m {module} --quick\n  python -m {module}"
    parser = cli.Parser(module, about or "", examples)
    smallest = "the smallest sizes, once: shows the tables and keeps nothing"
    parser.add_argument("--quick", action="store_true", help=smallest)
    options = parser.parse_args(argv)
    if not options.quick:
        clean_commit()
    bench = Bench(options.quick, device)
    run(bench)
    bench.bar.close()
    content = content_of(stage, bench)
    if options.quick:
        print(f"\n{machine(Results(content))}")
        rows = [row for case in bench.results.values() for row in case if "limits" in row]
        if (most := max(map(moved, rows), default=0.0)) > MOVED:
            print(f"The machine is busy: beside a row its limits moved by {most:.0%}.")
        for name, lines in tables(Results(content)).items():
            # The reasons in a table's column "why" are of full runs.
            kept = ({key: line[key] for key in line if key != "why"} for line in lines)
            print(f"\n{name}\n\n{table(kept)}")
        return
    path, text = results_file(stage, device), json.dumps(content, allow_nan=False)
    short = json.loads(text, parse_float=lambda number: float(f"{float(number):.6g}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".part")  # results are written as a whole, or not at all
    half.write_text(json.dumps(short, separators=(",", ":")) + "\n", encoding="utf-8")
    half.replace(path)
    print(f"Written: {paths.shown(path)}. Next: python -m reports.draw")
