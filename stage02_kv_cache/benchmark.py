"""What the KV cache buys, where it buys nothing, and what it costs: `python -m stage02_kv_cache.benchmark`.

Writes reports/<machine>/stage02_kv_cache.json; `python -m shared.bench.report` turns it into tables and charts. The naive
engine, this one and `transformers` run in turn on the same weights, dtype, threads and prompts, and their tokens are
compared before anything is written.

The naive engine needs minutes for a thousand tokens, and its passes grow smoothly. So of its passes over a long answer
every 25th is run and timed, and those between are interpolated. The proof costs one pass: what the naive engine would
say at each place of the cached engine's answer stands in the rows of a single pass over all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from shared import charts as draw
from shared import checkpoint, cli, linear, measure, roofline
from shared.bench import benchmarks, profile
from shared.bench.tables import label, limits_of, limits_table, median, milliseconds, profile_table
from shared.parity import near_tie, random_prompt
from shared.peers import transformers_greedy, transformers_model
from stage01_forward.attention import Recompute
from stage01_forward.engine import Engine as NaiveEngine
from stage01_forward.model import GPT2, load_model
from stage01_forward.params import SamplingParams

from .engine import Engine

STAGE = "stage02_kv_cache"
DTYPES = (torch.float32, torch.bfloat16)
GROWTH = (200, 500, 1000)  # new tokens after a prompt of 5
STRIDE = 25  # of the naive engine's passes over a long answer, every so many are run
PROMPTS = (64, 256, 512)  # tokens before 50 new ones
NULL_PROMPTS = (5, 64, 512)  # tokens before a single new one


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


def packed_model(shape: checkpoint.Checkpoint, dtype: torch.dtype) -> tuple[GPT2, str]:
    model = load_model(shape, dtype=dtype)
    return model, linear.optimize(model, "auto")


@torch.inference_mode()
def prove(model: GPT2, prompt: list[int], answer: list[int]) -> dict[str, Any]:
    """That a pass over everything at once would choose each token of `answer` too, given those before it.

    Raises AssertionError at a difference that is no near tie; near ties are counted, with the widest gap.
    """
    ids = torch.tensor([*prompt, *answer[:-1]])
    hidden = model(ids, torch.arange(len(ids)), Recompute().attend)[
        len(prompt) - 1 :
    ]  # (answer, C)
    gaps: list[float] = []
    for rows, taken in zip(hidden.split(128), torch.tensor(answer).split(128), strict=True):
        logits = model.logits(rows).float()
        best, differs = logits.amax(-1), logits.argmax(-1) != taken
        below = best - logits.gather(1, taken[:, None])[:, 0]  # (rows,)
        for highest, gap in zip(best[differs].tolist(), below[differs].tolist(), strict=True):
            if gap >= near_tie(model.dtype, highest):
                raise AssertionError(
                    f"the cached engine took a token whose logit lies {gap:.3g} below the best, {highest:.3g}"
                )
            gaps.append(gap)
    return {"tokens": len(answer), "near_ties": len(gaps), "widest_gap": max(gaps, default=0.0)}


def measure_growth(
    shape: checkpoint.Checkpoint, dtype: torch.dtype, most: int, repeats: int, bar: tqdm
) -> dict[str, Any]:
    """Seconds of every pass of the cached engine over `most` new tokens after 5, and of every 25th of the naive one."""
    model, chosen = packed_model(shape, dtype)
    naive, cached = NaiveEngine(model), Engine(model)
    prompt = random_prompt(5, shape.config, "growth")
    (output,) = cached.generate([prompt], greedy(most))
    places = [*range(0, most, STRIDE), most - 1]  # tokens generated before the pass
    steps: dict[str, list[list[float]]] = {"naive": [], "cached": []}

    def run_naive() -> None:
        taken = []
        for done in places:
            naive.generate([prompt + output.token_ids[:done]], greedy(1))
            taken.append(naive.steps[0].seconds)
        steps["naive"].append(taken)

    def run_cached() -> None:
        cached.generate([prompt], greedy(most))
        steps["cached"].append([step.seconds for step in cached.steps])

    measure.alternate(
        {"naive": run_naive, "cached": run_cached},
        repeats,
        warmup=0,
        progress=lambda _: bar.update(),
    )
    return {
        "model": shape.config.name,
        "dtype": label(dtype),
        "linear": chosen,
        "prompt": len(prompt),
        "proof": prove(model, prompt, output.token_ids),
        "places": places,
        "steps": steps,
    }


def measure_prompts(
    shape: checkpoint.Checkpoint,
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    count: int,
    repeats: int,
    bar: tqdm,
) -> list[dict[str, Any]]:
    """Seconds from prompt to the last of `count` new tokens, naive and cached, in turn."""
    model, chosen = packed_model(shape, dtype)
    naive, cached = NaiveEngine(model), Engine(model)
    rows = []
    for length in lengths:
        prompt = random_prompt(length, shape.config, "prompts")
        variants: dict[str, Callable[[], object]] = {
            "naive": lambda prompt=prompt: naive.generate([prompt], greedy(count)),  # type: ignore[misc]
            "cached": lambda prompt=prompt: cached.generate([prompt], greedy(count)),  # type: ignore[misc]
        }
        cached.generate([prompt], greedy(2))
        seconds = measure.alternate(variants, repeats, warmup=0, progress=lambda _: bar.update())
        proof = prove(model, prompt, cached.generate([prompt], greedy(count))[0].token_ids)
        rows.append(
            {"model": shape.config.name, "dtype": label(dtype), "linear": chosen, "prompt": length, "tokens": count,
             "proof": proof, "seconds": seconds}
        )  # fmt: skip
    return rows


def measure_peers(
    shape: checkpoint.Checkpoint, dtype: torch.dtype, count: int, repeats: int, bar: tqdm
) -> dict[str, Any]:
    """This engine beside `transformers.generate` (both its attentions): a prompt of 512, and decoding after 64."""
    model, chosen = packed_model(shape, dtype)
    engine = Engine(model)
    peers = {
        f"transformers, {kind}": transformers_model(shape, dtype, kind)
        for kind in ("sdpa", "eager")
    }
    found: dict[str, Any] = {
        "model": shape.config.name,
        "dtype": label(dtype),
        "linear": chosen,
        "tokens": count,
    }
    for name, length, new in (("prefill", 512, 1), ("short", 64, 1), ("long", 64, count)):
        prompt = random_prompt(length, shape.config, "peers")
        variants: dict[str, Callable[[], object]] = {
            "ours": lambda prompt=prompt, new=new: engine.generate([prompt], greedy(new))  # type: ignore[misc]
        }
        for peer_name, peer in peers.items():
            variants[peer_name] = lambda peer=peer, prompt=prompt, new=new: transformers_greedy(
                peer, prompt, new
            )  # type: ignore[misc]
        found[name] = measure.alternate(variants, repeats, progress=lambda _: bar.update())
    return found


def peak(naive: bool) -> int:
    """Peak memory in bytes of a fresh process: a stage's own command line on a prompt that nearly fills the context.

    Without a tokenizer of its own the model reads bytes: a thousand letters are a thousand tokens.
    """
    options = ["--model", "gpt2", "--random-weights", "--linear", "plain", "--max-tokens", "2"]
    return measure.peak_memory("stage01_forward" if naive else STAGE, ["x" * 1000, *options])


def run(quick: bool) -> tuple[dict[str, Any], dict[str, Any], measure.Limits]:
    """Measure everything: configuration, results, limits. `quick` leaves out what takes minutes."""
    big, small = checkpoint.load("gpt2", random_weights=True), checkpoint.load("stories")
    limits = measure.limits(refresh=True)
    growth_most = {"gpt2": 60 if quick else max(GROWTH), "stories": 200 if quick else max(GROWTH)}
    growth_repeats = {"gpt2": 1 if quick else 2, "stories": 1 if quick else 3}
    lengths, prompt_count, prompt_repeats = ((64,), 10, 1) if quick else (PROMPTS, 50, 2)
    null_repeats, peer_count, peer_repeats = (3, 16, 2) if quick else (5, 128, 3)
    total = len(DTYPES) * (
        2 * sum(growth_repeats.values()) + 2 * 2 * len(lengths) * prompt_repeats + 9 * (peer_repeats + 1)
        + 2 * len(NULL_PROMPTS) * null_repeats
    ) + (0 if quick else 2)  # fmt: skip
    results: dict[str, Any] = {
        "growth": [],
        "prompts": [],
        "null": [],
        "peers": [],
        "memory": [],
        "profile": {},
    }
    with tqdm(total=total, unit="run") as bar:
        for dtype in DTYPES:
            results["peers"].append(measure_peers(big, dtype, peer_count, peer_repeats, bar))
            results["null"] += measure_prompts(big, dtype, NULL_PROMPTS, 1, null_repeats, bar)
            for shape in (big, small):
                results["prompts"] += measure_prompts(
                    shape, dtype, lengths, prompt_count, prompt_repeats, bar
                )
                name = shape.config.name
                results["growth"].append(
                    measure_growth(shape, dtype, growth_most[name], growth_repeats[name], bar)
                )
        model, _ = packed_model(big, torch.float32)
        prompt = random_prompt(64, big.config, "profile")
        engines: dict[str, Any] = {"before": NaiveEngine(model), "after": Engine(model)}
        for name, engine in engines.items():
            results["profile"][name] = profile.profile(
                partial(engine.generate, [prompt], greedy(16)), rows=6
            )
        if not quick:
            for naive in (True, False):
                name = "naive" if naive else "cached"
                results["memory"].append({"engine": name, "peak_bytes": peak(naive)})
                bar.update()
    configuration = {
        "quick": quick, "models": ["gpt2 124M shape, random weights", "stories"], "prompt new tokens": prompt_count,
        "repeats": {"growth": growth_repeats, "prompts": prompt_repeats, "null": null_repeats, "peers": peer_repeats},
    }  # fmt: skip
    return configuration, results, limits


# ---- predictions ------------------------------------------------------------------------------------------------------


def shape_of(name: str) -> checkpoint.Config:
    return checkpoint.PRESETS[name]


def predicted_seconds(
    results: dict[str, Any], model: str, dtype: str, prompt: int, count: int, cached: bool
) -> float:
    """The least seconds for `count` new tokens after `prompt`, by operations, bytes and the machine's limits."""
    config, kind, limits = shape_of(model), getattr(torch, dtype), limits_of(results)
    passes = [roofline.forward_cost(config, kind, prompt)]
    for done in range(1, count):
        length = prompt + done
        passes.append(
            roofline.forward_cost(config, kind, 1, length - 1)
            if cached
            else roofline.forward_cost(config, kind, length)
        )
    return sum(cost.seconds(limits, kind) for cost in passes)


# ---- from results to tables and charts ----------------------------------------------------------------------------------


def proof_text(proof: dict[str, Any]) -> str:
    if not proof["near_ties"]:
        return f"all {proof['tokens']}"
    ties = f"{proof['near_ties']} near tie{'s' if proof['near_ties'] > 1 else ''}"
    return f"all {proof['tokens']} but {ties} (gap up to {proof['widest_gap']:.1g})"


def answer_seconds(row: dict[str, Any], name: str, count: int) -> list[float]:
    """Seconds for the first `count` tokens, one figure a repeat; naive passes that were not run are interpolated."""
    runs = row["steps"][name]
    if name == "cached":
        return [sum(run[:count]) for run in runs]
    return [float(np.interp(range(count), row["places"], run).sum()) for run in runs]


def growth_table(results: dict[str, Any]) -> str:
    lines = [
        "| model | dtype | new tokens | naive, tok/s | cached, tok/s | gain | predicted gain | same tokens |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for row in results["results"]["growth"]:
        most = len(row["steps"]["cached"][0])
        for count in [each for each in GROWTH if each <= most] or [most]:
            rate = {
                name: measure.summarize(answer_seconds(row, name, count)).of(count)
                for name in row["steps"]
            }
            predicted = {
                cached: predicted_seconds(
                    results, row["model"], row["dtype"], row["prompt"], count, cached
                )
                for cached in (False, True)
            }
            lines.append(
                f"| {row['model']} | {row['dtype']} | {count} | {rate['naive'].show()} | {rate['cached'].show()} "
                f"| {rate['cached'].median / rate['naive'].median:.1f}x | {predicted[False] / predicted[True]:.1f}x "
                f"| {proof_text(row['proof'])} |"
            )
    return "\n".join(lines)


def prompts_table(results: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | dtype | prompt | new tokens | naive, ms | cached, ms | gain | predicted gain | same tokens |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        naive, cached = (median(row["seconds"][name]) for name in ("naive", "cached"))
        slow, fast = (
            predicted_seconds(
                results, row["model"], row["dtype"], row["prompt"], row["tokens"], kept
            )
            for kept in (False, True)
        )
        lines.append(
            f"| {row['model']} | {row['dtype']} | {row['prompt']} | {row['tokens']} | {milliseconds(row['seconds']['naive'])} "
            f"| {milliseconds(row['seconds']['cached'])} | {naive / cached:.2f}x | {slow / fast:.2f}x "
            f"| {proof_text(row['proof'])} |"
        )
    return "\n".join(lines)


def decode_rate(row: dict[str, Any], name: str) -> float:
    """Tokens per second after the first, by the medians of the long answers and of those that end with their first token."""
    return (row["tokens"] - 1) / (median(row["long"][name]) - median(row["short"][name]))


def peers_table(results: dict[str, Any]) -> str:
    lines = [
        "| dtype | engine | prefill of 512, ms | prefill, tok/s | decode, tok/s | GB/s | of bandwidth | GFLOP/s | of peak |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    limits, config = limits_of(results), shape_of("gpt2")
    for row in results["results"]["peers"]:
        kind = getattr(torch, row["dtype"])
        prefill = roofline.forward_cost(config, kind, 512)
        step = roofline.forward_cost(config, kind, 1, 64 + row["tokens"] // 2)
        for name in row["prefill"]:
            seconds, rate = median(row["prefill"][name]), decode_rate(row, name)
            speed, work = rate * step.bytes / 1e9, prefill.flops / seconds / 1e9
            lines.append(
                f"| {row['dtype']} | {name} | {milliseconds(row['prefill'][name], 0)} | {512 / seconds:,.0f} | {rate:.1f} "
                f"| {speed:.1f} | {speed / limits.bandwidth_gb_s:.0%} | {work:,.0f} | {work / limits.gflops[row['dtype']]:.0%} |"
            )
        best = {
            "prefill": min(
                median(row["prefill"][name]) for name in row["prefill"] if name != "ours"
            ),
            "decode": max(decode_rate(row, name) for name in row["prefill"] if name != "ours"),
        }
        gain = best["prefill"] / median(row["prefill"]["ours"])
        lines.append(
            f"| {row['dtype']} | **ours against the faster transformers** | | {gain:.2f}x "
            f"| {decode_rate(row, 'ours') / best['decode']:.2f}x | | | | |"
        )
    return "\n".join(lines)


def memory_table(results: dict[str, Any]) -> str:
    """Arithmetic for both dtypes, and the peak of a fresh float32 process with 1,000 tokens of context."""
    config = shape_of("gpt2")
    lines = [
        "| dtype | weights, MB | cache a token, KiB | cache of 1,024 tokens, MB |",
        "|---|--:|--:|--:|",
    ]
    for dtype in DTYPES:
        each = config.kv_bytes_per_token(dtype)
        weights = config.parameter_count * dtype.itemsize
        lines.append(
            f"| {label(dtype)} | {weights / 1e6:.0f} | {each / 1024:.0f} | {each * config.n_positions / 1e6:.0f} |"
        )
    peaks = {row["engine"]: row["peak_bytes"] / 1e6 for row in results["results"]["memory"]}
    if peaks:
        lines += ["", "| peak of a fresh process, float32, 1,000 tokens | MB |", "|---|--:|"]
        lines += [f"| {name} engine | {value:,.0f} |" for name, value in peaks.items()]
    return "\n".join(lines)


def profile_tables(results: dict[str, Any]) -> str:
    found = results["results"]["profile"]
    return "\n\n".join(
        f"{title}\n\n{profile_table(found[name])}"
        for name, title in (
            ("before", "Before, the naive engine:"),
            ("after", "After, with the cache:"),
        )
    )


def tables(results: dict[str, Any]) -> dict[str, str]:
    return {
        "limits": limits_table(results),
        "growth": growth_table(results),
        "prompts": prompts_table(results, results["results"]["prompts"]),
        "null": prompts_table(results, results["results"]["null"]),
        "peers": peers_table(results),
        "memory": memory_table(results),
        "profile": profile_tables(results),
    }


def growth_chart(results: dict[str, Any]) -> Any:
    """Time of a pass by its place in the answer; for the cached engine the median of the passes around it."""
    row = next(
        row
        for row in results["results"]["growth"]
        if (row["model"], row["dtype"]) == ("gpt2", "float32")
    )
    limits, config, places = limits_of(results), shape_of("gpt2"), row["places"]
    naive = [median([run[i] for run in row["steps"]["naive"]]) * 1e3 for i in range(len(places))]
    cached = [
        median(
            [
                seconds
                for run in row["steps"]["cached"]
                for seconds in run[max(at - 12, 1) : at + 13]
            ]
        )
        * 1e3
        for at in places
    ]
    series = {"naive": naive, "cached": cached}
    series["limit, naive"] = [
        roofline.forward_cost(config, torch.float32, row["prompt"] + at).seconds(
            limits, torch.float32
        )
        * 1e3
        for at in places
    ]
    series["limit, cached"] = [
        roofline.forward_cost(config, torch.float32, 1, row["prompt"] + at).seconds(
            limits, torch.float32
        )
        * 1e3
        for at in places
    ]
    return draw.lines(
        "Without the cache each token costs more than the one before",
        "tokens already generated (GPT-2 124M shape, float32)",
        "milliseconds for the next token",
        places,
        series,
        dashed=("limit, naive", "limit, cached"),
    )


def prompts_chart(results: dict[str, Any]) -> Any:
    rows = [
        row
        for row in results["results"]["prompts"]
        if (row["model"], row["dtype"]) == ("gpt2", "float32")
    ]
    return draw.bars(
        "50 tokens after a prompt: the longer it is, the more the cache saves",
        "seconds (GPT-2 124M shape, float32)",
        [f"prompt of {row['prompt']}" for row in rows],
        {
            f"{name} engine": [median(row["seconds"][name]) for row in rows]
            for name in ("naive", "cached")
        },
        digits=2,
    )


def memory_chart(results: dict[str, Any]) -> Any:
    config = shape_of("gpt2")
    positions = [0, 256, 512, 768, 1024]
    weights = config.parameter_count * 4 / 1e6
    kept = {
        f"{label(dtype)} cache": [config.kv_bytes_per_token(dtype) * at / 1e6 for at in positions]
        for dtype in DTYPES
    }
    return draw.lines(
        f"One sequence: up to {kept['float32 cache'][-1]:.0f} MB beside {weights:.0f} MB of weights",
        "tokens of context (GPT-2 124M shape)",
        "MB of keys and values",
        positions,
        kept,
    )


def charts(results: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    return {
        "growth": lambda: growth_chart(results),
        "prompts": lambda: prompts_chart(results),
        "memory": lambda: memory_chart(results),
    }


def headline(results: dict[str, Any]) -> str:
    row = next(
        row
        for row in results["results"]["growth"]
        if (row["model"], row["dtype"]) == ("gpt2", "float32")
    )
    count = len(row["steps"]["cached"][0])
    gain = median(answer_seconds(row, "naive", count)) / median(
        answer_seconds(row, "cached", count)
    )
    return f"{gain:.1f}x the naive engine over {count} tokens (GPT-2 124M shape, float32)"


def main(argv: list[str] | None = None) -> None:
    about = "Measures the engine with and without KV cache on this CPU, beside transformers, after comparing their tokens."
    benchmarks.main(STAGE, about, run, tables, argv)


if __name__ == "__main__":
    cli.run(main)
