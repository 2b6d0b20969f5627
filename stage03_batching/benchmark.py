"""What a batch buys, where it buys nothing, and what its padding costs: `python -m stage03_batching.benchmark`.

Writes reports/<machine>/stage03_batching.json; `python -m shared.bench.report` turns it into tables and charts. This engine, that
of stage 02 and `transformers` run in turn on the same weights, dtype, threads and prompts.

Every answer of this engine that was timed is proved: one pass over prompt and answer alone, without cache, batch or padding,
must choose the same tokens. An answer, or the beginning of one, that was proved before for the same prompt in another batch
is not run again. Nothing is written if one differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import psutil
import torch
from tqdm import tqdm

from shared import charts as draw
from shared import checkpoint, cli, measure, roofline
from shared.bench import benchmarks, profile
from shared.bench.tables import label, limits_of, limits_table, median, milliseconds, profile_table
from shared.parity import random_prompt
from shared.peers import transformers_batch, transformers_model
from stage01_forward.generation import Output, Sampling
from stage02_kv_cache.benchmark import greedy, packed_model, proof_text, prove, shape_of
from stage02_kv_cache.engine import Engine as SingleEngine

from .engine import Engine

STAGE = "stage03_batching"
MODEL = "gpt2"
DTYPES = (torch.float32, torch.bfloat16)
PROMPT, TOKENS = 64, 32  # of every sequence, where nothing else is said
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
# Prompts of 512 sequences alone take half a minute, and their proof as long. With 8 tokens each they add less than two
# minutes to a run for both dtypes, where 32 would take three.
WIDE, WIDE_TOKENS = 512, 8
PEERS = {8: 3, 32: 3, 64: 2}  # sequences -> repeats
SINGLE = {1: 5, 32: 2}  # against stage 02, sequences -> repeats: the null control, and the win
WASTE_ROWS, SHORT, LONG_ANSWER, LONG_PROMPT = 32, 16, 256, 512  # all rows short but one
PROFILE = (32, 8, 64)  # sequences, prompt, new tokens: nearly all of it decode


class Subject:
    """The model of one dtype, this stage's engine, and what has been proved of it."""

    def __init__(self, shape: checkpoint.Checkpoint, dtype: torch.dtype) -> None:
        self.config = shape.config
        self.model, linear = packed_model(shape, dtype)
        self.engine = Engine(self.model, max_batch=WIDE)
        self.about = {"model": shape.config.name, "dtype": label(dtype), "linear": linear}
        self.proved: dict[
            tuple[int, ...], list[tuple[list[int], dict[str, Any]]]
        ] = {}  # prompt -> answers and their proofs
        self.engine.generate(self.prompts(2), greedy(2))  # warms up

    def prompts(self, count: int, length: int = 0) -> list[list[int]]:
        """The first `count` prompts: those of a small batch are among those of a large one."""
        return [random_prompt(length or PROMPT, self.config, f"row {row}") for row in range(count)]

    def prove(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """stage 02's `prove` for a whole batch: tokens, near ties and the widest gap of all its rows together."""
        found = [self._prove(output.prompt_ids, output.token_ids) for output in outputs]
        return {
            "tokens": sum(each["tokens"] for each in found),
            "near_ties": sum(each["near_ties"] for each in found),
            "widest_gap": max(each["widest_gap"] for each in found),
        }

    def _prove(self, prompt: list[int], answer: list[int]) -> dict[str, Any]:
        known = self.proved.setdefault(tuple(prompt), [])
        for longer, proof in known:
            if longer == answer:
                return proof
            if longer[: len(answer)] == answer and not proof["near_ties"]:
                return {**proof, "tokens": len(answer)}
        proof = prove(self.model, prompt, answer)
        known.append((list(answer), proof))
        return proof


class Runs:
    """One workload of this engine, as often as it is called: its answers, and the record of every pass."""

    def __init__(
        self, subject: Subject, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> None:
        self.subject, self.prompts, self.sampling = subject, prompts, sampling
        self.outputs: list[Output] = []  # of all runs
        self.steps: list[list[Any]] = []  # a run -> StepRecords

    def __call__(self) -> None:
        self.outputs += self.subject.engine.generate(self.prompts, self.sampling)
        self.steps.append(list(self.subject.engine.steps))

    def proof(self) -> dict[str, Any]:
        """Every run's answers are proved; what is told is of one run."""
        for start in range(0, len(self.outputs), len(self.prompts)):
            proof = self.subject.prove(self.outputs[start : start + len(self.prompts)])
        return proof


def fits(config: checkpoint.Config, dtype: torch.dtype, batch: int, new: int) -> bool:
    """Whether a batch leaves half of the free memory free: its cache, its prefill (12 C numbers a token) and its logits."""
    cache = batch * (PROMPT + new - 1) * config.kv_bytes_per_token(dtype)
    numbers = batch * (PROMPT * 12 * config.n_embd + 2 * config.vocab_size)
    return cache + numbers * dtype.itemsize < psutil.virtual_memory().available / 2


def measure_scaling(
    subject: Subject, batches: Sequence[int], wide: int, count: int, repeats: int, bar: tqdm
) -> list[Any]:
    """Seconds of every pass for batches of equal rows. `wide` rows run once, a few tokens long, where memory allows; 0: no."""
    runs = {str(batch): Runs(subject, subject.prompts(batch), greedy(count)) for batch in batches}
    cache_bytes: dict[str, int] = {}

    def progress(name: str) -> None:
        cache_bytes[name] = subject.engine.cache_bytes
        bar.update()

    measure.alternate(runs, repeats, warmup=0, progress=progress)
    if wide and fits(subject.config, subject.model.dtype, wide, WIDE_TOKENS):
        runs[str(wide)] = Runs(subject, subject.prompts(wide), greedy(WIDE_TOKENS))
        runs[str(wide)]()
        progress(str(wide))
    elif wide:
        bar.write(
            f"note: {wide} sequences in {subject.about['dtype']} are left out, since too little memory is free"
        )
    return [
        {
            **subject.about,
            "batch": len(run.prompts),
            "prompt": PROMPT,
            "tokens": len(run.outputs[0].token_ids),
            "cache_bytes": cache_bytes[name],
            "prefill": [steps[0].seconds for steps in run.steps],
            "decode": [[step.seconds for step in steps[1:]] for steps in run.steps],
            "proof": run.proof(),
        }
        for name, run in runs.items()
    ]


def measure_single(subject: Subject, workloads: dict[int, int], count: int, bar: tqdm) -> list[Any]:
    """Seconds from prompts to the last of `count` tokens each: as one batch, and one after the other by stage 02."""
    single = SingleEngine(subject.model)
    single.generate(subject.prompts(1), greedy(2))  # warms up
    rows = []
    for batch, repeats in workloads.items():
        ours = Runs(subject, subject.prompts(batch), greedy(count))
        variants: dict[str, Callable[[], object]] = {
            "batch": ours,
            "single": partial(single.generate, ours.prompts, greedy(count)),
        }
        seconds = measure.alternate(variants, repeats, warmup=0, progress=lambda _: bar.update())
        rows.append(
            {
                **subject.about,
                "batch": batch,
                "prompt": PROMPT,
                "tokens": count,
                "proof": ours.proof(),
                "seconds": seconds,
            }
        )
    return rows


def measure_peers(
    shape: checkpoint.Checkpoint, subject: Subject, workloads: dict[int, int], count: int, bar: tqdm
) -> list[dict[str, Any]]:
    """This engine beside `transformers.generate` (both its attentions): 1 token, and `count`, after the same prompts.

    "same": how many rows of a peer's long answer are ours to the last token.
    """
    peers = {
        f"transformers, {kind}": transformers_model(shape, subject.model.dtype, kind)
        for kind in ("sdpa", "eager")
    }
    for peer in peers.values():
        transformers_batch(peer, subject.prompts(2), 2)  # warms up
    rows = []
    for batch, repeats in workloads.items():
        prompts = subject.prompts(batch)
        found: dict[str, Any] = {**subject.about, "batch": batch, "prompt": PROMPT, "tokens": count}
        answers: dict[str, list[list[int]]] = {}
        for name, new in (("short", 1), ("long", count)):
            ours = Runs(subject, prompts, greedy(new))
            variants: dict[str, Callable[[], object]] = {"ours": ours}
            for peer_name, peer in peers.items():
                variants[peer_name] = partial(_keep_answers, answers, peer_name, peer, prompts, new)
            found[name] = measure.alternate(
                variants, repeats, warmup=0, progress=lambda _: bar.update()
            )
            found["proof"] = ours.proof()
        said = [output.token_ids for output in ours.outputs[-batch:]]
        found["same"] = {
            name: sum(a == b for a, b in zip(said, theirs, strict=True))
            for name, theirs in answers.items()
        }
        rows.append(found)
    return rows


def _keep_answers(
    answers: dict[str, list[list[int]]], name: str, peer: Any, prompts: list[list[int]], count: int
) -> None:
    answers[name] = transformers_batch(peer, prompts, count)


Lengths = list[tuple[int, int]]  # tokens of prompt and answer of each row


def waste_cases(rows: int, long_answer: int, long_prompt: int) -> dict[str, dict[str, Lengths]]:
    """One row unlike the others, and the same number of tokens spread evenly over the rows."""

    def spread(total: int) -> list[int]:
        return [(total + row) // rows for row in range(rows)]

    others, count = [(SHORT, SHORT)] * (rows - 1), SHORT * (rows - 1)
    return {
        "answers": {
            "equal answers": [(SHORT, each) for each in spread(count + long_answer)],
            "one long answer": [*others, (SHORT, long_answer)],
        },
        "prompts": {
            "equal prompts": [(each, SHORT) for each in spread(count + long_prompt)],
            "one long prompt": [*others, (long_prompt, SHORT)],
        },
    }


def measure_waste(
    subject: Subject, workloads: dict[str, dict[str, Lengths]], repeats: int, bar: tqdm
) -> list[Any]:
    """Rows of unlike lengths beside rows of equal lengths: seconds, and what went through the model for nobody."""
    rows = []
    for pair, cases in workloads.items():
        runs = {}
        for name, lengths in cases.items():
            prompts = [
                random_prompt(length, subject.config, f"waste {row}")
                for row, (length, _) in enumerate(lengths)
            ]
            runs[name] = Runs(subject, prompts, [greedy(count) for _, count in lengths])
        seconds = measure.alternate(runs, repeats, warmup=0, progress=lambda _: bar.update())
        for name, run in runs.items():
            steps = run.steps[-1]
            rows.append(
                {
                    **subject.about,
                    "pair": pair,
                    "case": name,
                    "lengths": cases[name],
                    "passes": len(steps),
                    "useful": sum(step.prefill_tokens + step.decode_tokens for step in steps),
                    "wasted": sum(step.wasted_tokens for step in steps),
                    "seconds": seconds[name],
                    "proof": run.proof(),
                }
            )
    return rows


def run(quick: bool) -> tuple[dict[str, Any], dict[str, Any], measure.Limits]:
    """Measure everything: configuration, results, limits. `quick` leaves out what takes minutes."""
    shape = checkpoint.load(MODEL, random_weights=True)
    limits = measure.limits(refresh=True)
    batches, wide, count, repeats = (BATCHES[::3], 0, 8, 1) if quick else (BATCHES, WIDE, TOKENS, 2)
    peers, single = ({min(PEERS): 2}, {1: 2, min(PEERS): 1}) if quick else (PEERS, SINGLE)
    smaller = 4 if quick else 1
    waste = waste_cases(WASTE_ROWS // smaller, LONG_ANSWER // smaller, LONG_PROMPT // smaller)
    profile_rows, profile_prompt, profile_new = PROFILE
    results: dict[str, Any] = {"scaling": [], "single": [], "peers": [], "waste": [], "profile": {}}
    total = len(DTYPES) * (
        len(batches) * repeats + bool(wide) + 6 * sum(peers.values()) + 2 * sum(single.values())
    )
    with tqdm(total=total + repeats * sum(map(len, waste.values())), unit="run") as bar:
        for dtype in DTYPES:
            subject = Subject(shape, dtype)
            results["scaling"] += measure_scaling(subject, batches, wide, count, repeats, bar)
            results["peers"] += measure_peers(shape, subject, peers, count, bar)
            results["single"] += measure_single(subject, single, count, bar)
            if dtype == torch.float32:
                results["waste"] += measure_waste(subject, waste, repeats, bar)
            decode = partial(
                subject.engine.generate,
                subject.prompts(profile_rows, profile_prompt),
                greedy(profile_new // smaller),
            )
            results["profile"][label(dtype)] = profile.profile(
                decode, rows=6, dtype=dtype, warmup=0
            )
    configuration = {
        "quick": quick, "models": [f"{MODEL} shape, random weights"], "prompt": PROMPT, "new tokens": count,
        "repeats": {"scaling": repeats, "single": single, "peers": peers, "waste": repeats},
    }  # fmt: skip
    return configuration, results, limits


# ---- predictions ------------------------------------------------------------------------------------------------------


def decode_cost(row: dict[str, Any]) -> roofline.Cost:
    """Of the decode step in the middle of an answer: one new token of each row."""
    cached = row["prompt"] + (row["tokens"] - 2) // 2
    return roofline.forward_cost(
        shape_of(row["model"]), getattr(torch, row["dtype"]), 1, cached, rows=row["batch"]
    )


def predicted_seconds(
    limits: measure.Limits, model: str, dtype: str, lengths: Sequence[tuple[int, int]]
) -> float:
    """The least seconds for one batch of rows (prompt, new tokens), all as wide as the longest and as long as the last."""
    config, kind = shape_of(model), getattr(torch, dtype)
    width, rows = max(prompt for prompt, _ in lengths), len(lengths)
    passes = [roofline.forward_cost(config, kind, width, rows=rows)]
    for done in range(1, max(new for _, new in lengths)):
        alive = sum(new > done for _, new in lengths)
        passes.append(roofline.forward_cost(config, kind, 1, width + done - 1, alive, rows))
    return sum(cost.seconds(limits, kind) for cost in passes)


# ---- from results to tables and charts ----------------------------------------------------------------------------------


def step_seconds(row: dict[str, Any]) -> measure.Summary:
    """The median of all decode steps, with the range of the repeats' own medians."""
    own = [median(run) for run in row["decode"]]
    return measure.Summary(
        median([seconds for run in row["decode"] for seconds in run]), min(own), max(own)
    )


def scaling_table(results: dict[str, Any]) -> str:
    lines = [
        "| dtype | batch | decode, tok/s | limit, tok/s | step, ms | bound by | of bandwidth (MBU) | of peak (MFU) "
        "| cache, MB | by formula, MB | same tokens |",
        "|---|--:|--:|--:|--:|---|--:|--:|--:|--:|---|",
    ]
    limits = limits_of(results)
    for row in results["results"]["scaling"]:
        kind, cost, taken, batch = (
            getattr(torch, row["dtype"]),
            decode_cost(row),
            step_seconds(row),
            row["batch"],
        )
        formula = (
            batch
            * (row["prompt"] + row["tokens"] - 1)
            * shape_of(row["model"]).kv_bytes_per_token(kind)
        )
        step = measure.Summary(taken.median * 1e3, taken.low * 1e3, taken.high * 1e3)
        lines.append(
            f"| {row['dtype']} | {batch} | {batch / taken.median:,.1f} | {batch / cost.seconds(limits, kind):,.0f} "
            f"| {step.show()} | {cost.bound(limits, kind)} "
            f"| {cost.bytes / taken.median / 1e9 / limits.bandwidth_gb_s:.0%} "
            f"| {cost.flops / taken.median / 1e9 / limits.gflops[row['dtype']]:.0%} "
            f"| {row['cache_bytes'] / 1e6:,.1f} | {formula / 1e6:,.1f} | {proof_text(row['proof'])} |"
        )
    return "\n".join(lines)


def decode_rate(row: dict[str, Any], name: str) -> float:
    """Tokens per second of all rows, without their first: by the medians of long answers and of those of one token."""
    return (
        row["batch"]
        * (row["tokens"] - 1)
        / (median(row["long"][name]) - median(row["short"][name]))
    )


def peers_table(results: dict[str, Any]) -> str:
    lines = [
        "| dtype | batch | engine | first tokens, ms | prefill, tok/s | decode, tok/s | GB/s | of bandwidth | GFLOP/s | of peak "
        "| same tokens |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    limits = limits_of(results)
    for row in results["results"]["peers"]:
        cost, batch = decode_cost(row), row["batch"]
        prefill = {
            name: batch * row["prompt"] / median(seconds) for name, seconds in row["short"].items()
        }
        decode = {name: decode_rate(row, name) for name in row["short"]}
        for name, seconds in row["short"].items():
            steps = decode[name] / batch  # a second
            speed, work = steps * cost.bytes / 1e9, steps * cost.flops / 1e9
            same = (
                proof_text(row["proof"])
                if name == "ours"
                else f"{row['same'][name]} of {batch} answers as ours"
            )
            lines.append(
                f"| {row['dtype']} | {batch} | {name} | {milliseconds(seconds, 0)} | {prefill[name]:,.0f} | {decode[name]:,.1f} "
                f"| {speed:.1f} | {speed / limits.bandwidth_gb_s:.0%} | {work:,.0f} | {work / limits.gflops[row['dtype']]:.0%} "
                f"| {same} |"
            )
        gains = [
            rates["ours"] / max(rate for name, rate in rates.items() if name != "ours")
            for rates in (prefill, decode)
        ]  # each against the peer that is faster at it
        lines.append(
            f"| {row['dtype']} | {batch} | **ours against the faster transformers** | | {gains[0]:.2f}x | {gains[1]:.2f}x "
            "| | | | | |"
        )
    return "\n".join(lines)


def single_table(results: dict[str, Any], alone: bool) -> str:
    """Against stage 02: a batch of one if `alone`, or else the larger ones."""
    lines = [
        "| dtype | sequences | one after the other (stage 02), ms | as a batch, ms | as a batch, tok/s | gain | predicted gain "
        "| same tokens |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    limits = limits_of(results)
    for row in results["results"]["single"]:
        if (row["batch"] == 1) != alone:
            continue
        lengths, seconds = [(row["prompt"], row["tokens"])], row["seconds"]
        single, batch = (
            predicted_seconds(limits, row["model"], row["dtype"], lengths * n)
            for n in (1, row["batch"])
        )
        lines.append(
            f"| {row['dtype']} | {row['batch']} | {milliseconds(seconds['single'])} | {milliseconds(seconds['batch'])} "
            f"| {row['batch'] * row['tokens'] / median(seconds['batch']):,.1f} "
            f"| {median(seconds['single']) / median(seconds['batch']):.2f}x | {row['batch'] * single / batch:.2f}x "
            f"| {proof_text(row['proof'])} |"
        )
    return "\n".join(lines)


def new_tokens(row: dict[str, Any]) -> int:
    return sum(new for _, new in row["lengths"])


def waste_table(results: dict[str, Any]) -> str:
    """Each case of unlike rows below its case of equal rows."""
    lines = [
        "| dtype | rows | new tokens | passes | tokens computed | of them wasted | new tok/s | against equal rows | predicted "
        "| same tokens |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    limits = limits_of(results)
    equal: dict[
        str, tuple[float, float]
    ] = {}  # pair -> measured and predicted tok/s of its first case
    for row in results["results"]["waste"]:
        rate = measure.summarize(row["seconds"]).of(new_tokens(row))
        limit = new_tokens(row) / predicted_seconds(
            limits, row["model"], row["dtype"], row["lengths"]
        )
        ratios = ""
        if row["pair"] in equal:
            measured, predicted = equal[row["pair"]]
            ratios = f"{rate.median / measured:.2f}x | {limit / predicted:.2f}x"
        equal.setdefault(row["pair"], (rate.median, limit))
        lines.append(
            f"| {row['dtype']} | {len(row['lengths'])}, {row['case']} | {new_tokens(row)} | {row['passes']} "
            f"| {row['useful'] + row['wasted']:,} | {wasted_share(row):.0%} | {rate.show()} | {ratios or ' | '} "
            f"| {proof_text(row['proof'])} |"
        )
    return "\n".join(lines)


def wasted_share(row: dict[str, Any]) -> float:
    return row["wasted"] / (row["useful"] + row["wasted"])


def profile_tables(results: dict[str, Any]) -> str:
    return "\n\n".join(
        f"In {dtype}:\n\n{profile_table(found)}"
        for dtype, found in results["results"]["profile"].items()
    )


def tables(results: dict[str, Any]) -> dict[str, str]:
    return {
        "limits": limits_table(results),
        "scaling": scaling_table(results),
        "peers": peers_table(results),
        "win": single_table(results, alone=False),
        "null": single_table(results, alone=True),
        "waste": waste_table(results),
        "profile": profile_tables(results),
    }


def scaling_chart(results: dict[str, Any]) -> Any:
    rows, limits = results["results"]["scaling"], limits_of(results)
    batches = sorted({row["batch"] for row in rows})
    series: dict[str, list[float]] = {}
    for dtype in map(label, DTYPES):
        own = {row["batch"]: row for row in rows if row["dtype"] == dtype}
        kind = getattr(torch, dtype)
        rates = {batch: batch / step_seconds(row).median for batch, row in own.items()}
        bounds = {
            batch: batch / decode_cost(row).seconds(limits, kind) for batch, row in own.items()
        }
        series[dtype] = [rates.get(batch, math.nan) for batch in batches]
        series[f"limit, {dtype}"] = [bounds.get(batch, math.nan) for batch in batches]
    return draw.lines(
        "More rows in a pass cost little, until the processor has enough to do",
        "sequences in the batch (GPT-2 124M shape)",
        "decode, tok/s",
        batches,
        series,
        dashed=[name for name in series if name.startswith("limit")],
        log_x=True,
        log_y=True,
    )


def roofline_chart(results: dict[str, Any]) -> Any:
    limits = limits_of(results)
    points: dict[str, list[tuple[float, float, str]]] = {}
    for row in results["results"]["scaling"]:
        cost = decode_cost(row)
        rate = cost.flops / step_seconds(row).median / 1e9
        points.setdefault(row["dtype"], []).append((cost.intensity, rate, str(row["batch"])))
    return draw.roofline(
        "Batches climb the memory's slope, until arithmetic is the limit",
        "GPT-2 124M shape; the numbers are batches",
        limits.bandwidth_gb_s,
        limits.gflops,
        points,
    )


def waste_chart(results: dict[str, Any]) -> Any:
    rows = results["results"]["waste"]
    return draw.bars(
        "One longer row, and most of the work is for nobody",
        f"tokens that went through the model, {len(rows[0]['lengths'])} rows",
        [row["case"] for row in rows],
        {"useful": [row["useful"] for row in rows], "wasted": [row["wasted"] for row in rows]},
        digits=0,
    )


def charts(results: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    return {
        "roofline": lambda: roofline_chart(results),
        "scaling": lambda: scaling_chart(results),
        "waste": lambda: waste_chart(results),
    }


def headline(results: dict[str, Any]) -> str:
    row = max(
        (row for row in results["results"]["single"] if row["dtype"] == "float32"),
        key=lambda row: row["batch"],
    )
    gain = median(row["seconds"]["single"]) / median(row["seconds"]["batch"])
    return f"{row['batch']} prompts as one batch: {gain:.1f}x one after the other (GPT-2 124M shape, float32)"


def main(argv: list[str] | None = None) -> None:
    about = "Measures batches of many sizes on this CPU, beside the stage before and transformers, and proves every answer."
    benchmarks.main(STAGE, about, run, tables, argv)


if __name__ == "__main__":
    cli.run(main)
