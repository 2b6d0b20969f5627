"""What a forward pass costs, predicted and measured: `python -m stage01_forward.benchmark`.

Writes reports/<machine>/stage01_forward.json; `python -m shared.bench.report` turns it into tables and charts. Every timing
comes after a proof for the same weights, dtype and linear layers: the packed model against `transformers`' logits, the
engine against `transformers`' tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from shared import charts as draw
from shared import checkpoint, cli, linear, measure, roofline
from shared.bench import benchmarks, profile
from shared.bench.tables import label, limits_of, limits_table, median, milliseconds, profile_table
from shared.parity import LIKELIEST, Parity, compare, random_prompt
from shared.peers import transformers_greedy, transformers_model

from .attention import Recompute, explicit_attention, fused_attention
from .engine import Engine
from .generation import Output
from .model import GPT2, load_model
from .params import SamplingParams

STAGE = "stage01_forward"
LENGTHS = (1, 8, 32, 128, 512, 1023)
ATTENTION_LENGTHS = (16, 64, 256, 1024)
DTYPES = (torch.float32, torch.bfloat16)
LOGIT_BOUND = {
    torch.float32: 1e-4,
    torch.bfloat16: 0.1,
}  # against transformers in float32; bfloat16 keeps 8 bits


@torch.inference_mode()
def last_logits(model: GPT2, ids: list[int]) -> torch.Tensor:
    hidden = model(torch.tensor(ids), torch.arange(len(ids)), Recompute().attend)
    return model.logits(hidden[-1])


@torch.inference_mode()
def prove_logits(model: GPT2, peer: Any, ids: list[int], dtype: torch.dtype) -> float:
    """The largest difference from `transformers`' float32 logits; raises AssertionError above the bound."""
    difference = float(
        (last_logits(model, ids).float() - peer(torch.tensor([ids])).logits[0, -1]).abs().max()
    )
    if difference > LOGIT_BOUND[dtype]:
        raise AssertionError(
            f"{label(dtype)} logits differ from transformers by {difference}, more than {LOGIT_BOUND[dtype]}"
        )
    return difference


def prove_tokens(engine: Engine, peer: Any, prompt: list[int], count: int) -> dict[str, Any]:
    """The engine's greedy tokens are `transformers`' up to the first near tie; raises ParityError otherwise."""
    (output,) = engine.generate(
        [prompt], SamplingParams(max_tokens=count, ignore_eos=True, logprobs=LIKELIEST)
    )
    theirs = Output(
        prompt, transformers_greedy(peer, prompt, count, use_cache=False), output.finish_reason
    )
    found = Parity()
    compare("transformers", [output], [theirs], engine.model.dtype, found)
    parted = found.near_ties[0] if found.near_ties else {"token": count, "gap": None}
    return {"tokens": count, "equal": parted["token"], "gap": parted["gap"]}


def measure_forward(
    shape: checkpoint.Checkpoint, lengths: tuple[int, ...], repeats: int, bar: tqdm
) -> list[dict[str, Any]]:
    """Seconds of one pass over T tokens with logits for the last: packed, plain, and `transformers`."""
    rows = []
    reference = transformers_model(shape, torch.float32)
    for dtype in DTYPES:
        plain, fast = (load_model(shape, dtype=dtype) for _ in range(2))
        chosen = linear.optimize(fast, "auto")
        peer = reference if dtype == torch.float32 else transformers_model(shape, dtype)
        for length in lengths:
            ids = random_prompt(length, shape.config, "forward")
            difference = prove_logits(fast, reference, ids, dtype)
            tokens = torch.tensor([ids])
            variants: dict[str, Callable[[], object]] = {
                "ours": lambda ids=ids, model=fast: last_logits(model, ids),  # type: ignore[misc]
                "ours, plain": lambda ids=ids, model=plain: last_logits(model, ids),  # type: ignore[misc]
                "transformers": lambda tokens=tokens, peer=peer: peer(
                    tokens, use_cache=False, logits_to_keep=1
                ),  # type: ignore[misc]
            }
            with torch.inference_mode():
                seconds = measure.alternate(variants, repeats, progress=lambda _: bar.update())
            rows.append(
                {
                    "dtype": label(dtype),
                    "tokens": length,
                    "linear": chosen,
                    "difference": difference,
                    "seconds": seconds,
                }
            )
    return rows


def measure_attention(
    heads: int, head_dim: int, lengths: tuple[int, ...], repeats: int, bar: tqdm
) -> list[dict[str, Any]]:
    """Seconds of attention alone, one layer: written out and fused."""
    rows = []
    for dtype in DTYPES:
        for length in lengths:
            q, k, v = torch.randn(
                3, heads, length, head_dim, generator=torch.Generator().manual_seed(length)
            ).to(dtype)
            difference = float((explicit_attention(q, k, v) - fused_attention(q, k, v)).abs().max())
            variants: dict[str, Callable[[], object]] = {
                "explicit": lambda q=q, k=k, v=v: explicit_attention(q, k, v),  # type: ignore[misc]
                "fused": lambda q=q, k=k, v=v: fused_attention(q, k, v),  # type: ignore[misc]
            }
            with torch.inference_mode():
                seconds = measure.alternate(
                    variants, repeats, warmup=2, progress=lambda _: bar.update()
                )
            scores = heads * length * length * dtype.itemsize
            rows.append(
                {
                    "dtype": label(dtype),
                    "tokens": length,
                    "score_bytes": scores,
                    "difference": difference,
                    "seconds": seconds,
                }
            )
    return rows


def measure_generation(
    shape: checkpoint.Checkpoint, count: int, repeats: int, bar: tqdm
) -> list[dict[str, Any]]:
    """Seconds for `count` tokens after 5, computing everything again for each: this engine, and `transformers` told to."""
    rows = []
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    for dtype in DTYPES:
        peer = transformers_model(shape, dtype)
        model = load_model(shape, dtype=dtype)
        chosen = linear.optimize(model, "auto")
        engine = Engine(model)
        prompt = random_prompt(5, shape.config, "generation")
        proof = prove_tokens(engine, peer, prompt, count)
        variants: dict[str, Callable[[], object]] = {
            "ours": lambda engine=engine, prompt=prompt: engine.generate([prompt], params),  # type: ignore[misc]
            "transformers": lambda peer=peer, prompt=prompt: transformers_greedy(
                peer, prompt, count, False
            ),  # type: ignore[misc]
        }
        seconds = measure.alternate(variants, repeats, warmup=0, progress=lambda _: bar.update())
        rows.append(
            {
                "model": shape.config.name,
                "dtype": label(dtype),
                "tokens": count,
                "linear": chosen,
                "proof": proof,
                "seconds": seconds,
            }
        )
    return rows


def run(quick: bool) -> tuple[dict[str, Any], dict[str, Any], measure.Limits]:
    """Measure everything: configuration, results, limits. `quick` takes fewer repeats and shorter texts."""
    repeats, count = (3, 8) if quick else (9, 50)
    lengths = (1, 32, 512) if quick else LENGTHS
    attention_lengths = (64, 256) if quick else ATTENTION_LENGTHS
    limits = measure.limits(refresh=True)
    big = checkpoint.load("gpt2", random_weights=True)
    small = checkpoint.load("stories")
    generation_repeats = max(2, repeats // 3)
    total = len(DTYPES) * (
        3 * len(lengths) * (repeats + 1)
        + 2 * len(attention_lengths) * (repeats + 2)
        + 2 * 2 * generation_repeats
    )
    with tqdm(total=total, unit="run") as bar:
        results: dict[str, Any] = {
            "forward": measure_forward(big, lengths, repeats, bar),
            "attention": measure_attention(
                big.config.n_head, big.config.head_dim, attention_lengths, repeats, bar
            ),
            "generation": [
                *measure_generation(big, count, generation_repeats, bar),
                *measure_generation(small, count, generation_repeats, bar),
            ],
        }
        model = load_model(big, dtype=torch.float32)
        linear.optimize(model, "auto")
        prompt = random_prompt(64, big.config, "profile")
        engine = Engine(model)
        results["profile"] = profile.profile(
            lambda: engine.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True)), rows=6
        )
    configuration = {
        "quick": quick,
        "repeats": repeats,
        "models": ["gpt2 124M shape, random weights", "stories"],
        "new tokens": count,
    }
    return configuration, results, limits


# ---- from results to tables and charts ------------------------------------------------------------------------------


def predicted_pass(results: dict[str, Any], dtype: str, tokens: int) -> float:
    """Seconds that the machine's limits allow for one pass over `tokens` tokens of the 124M shape."""
    kind = getattr(torch, dtype)
    return roofline.forward_cost(checkpoint.PRESETS["gpt2"], kind, tokens).seconds(
        limits_of(results), kind
    )


def forward_table(results: dict[str, Any]) -> str:
    lines = [
        "| dtype | tokens | predicted, ms | ours, ms | share of the limit | plain layers, ms | transformers, ms | gain |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results["results"]["forward"]:
        predicted = predicted_pass(results, row["dtype"], row["tokens"])
        middle = {name: median(values) for name, values in row["seconds"].items()}
        lines.append(
            f"| {row['dtype']} | {row['tokens']} | {predicted * 1e3:.1f} | {milliseconds(row['seconds']['ours'])} "
            f"| {predicted / middle['ours']:.0%} | {milliseconds(row['seconds']['ours, plain'])} "
            f"| {milliseconds(row['seconds']['transformers'])} | {middle['transformers'] / middle['ours']:.2f}x |"
        )
    return "\n".join(lines)


def attention_table(results: dict[str, Any]) -> str:
    lines = [
        "| dtype | tokens | scores kept, MB | explicit, ms | fused, ms | gain |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in results["results"]["attention"]:
        explicit, fused = (median(row["seconds"][name]) for name in ("explicit", "fused"))
        lines.append(
            f"| {row['dtype']} | {row['tokens']} | {row['score_bytes'] / 1e6:.2f} "
            f"| {milliseconds(row['seconds']['explicit'], 3)} | {milliseconds(row['seconds']['fused'], 3)} "
            f"| {explicit / fused:.1f}x |"
        )
    return "\n".join(lines)


def linear_table(results: dict[str, Any]) -> str:
    """What packing the weights alone brings, by tokens in the pass."""
    lines = [
        "| dtype | tokens | chosen | plain, ms | chosen, ms | gain |",
        "|---|--:|---|--:|--:|--:|",
    ]
    for row in results["results"]["forward"]:
        plain, ours = (median(row["seconds"][name]) for name in ("ours, plain", "ours"))
        lines.append(
            f"| {row['dtype']} | {row['tokens']} | {row['linear']} | {plain * 1e3:.1f} | {ours * 1e3:.1f} | {plain / ours:.2f}x |"
        )
    return "\n".join(lines)


def generation_table(results: dict[str, Any]) -> str:
    lines = [
        "| model | dtype | new tokens | ours, tok/s | transformers without cache, tok/s | gain | tokens equal to transformers' |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    for row in results["results"]["generation"]:
        rate = {
            name: measure.summarize(values).of(row["tokens"])
            for name, values in row["seconds"].items()
        }
        proof = row["proof"]
        equal = (
            "all"
            if proof["gap"] is None
            else f"first {proof['equal']}, then a near tie (gap {proof['gap']:.1g})"
        )
        lines.append(
            f"| {row['model']} | {row['dtype']} | {row['tokens']} | {rate['ours'].show()} | {rate['transformers'].show()} "
            f"| {rate['ours'].median / rate['transformers'].median:.2f}x | {equal} |"
        )
    return "\n".join(lines)


def tables(results: dict[str, Any]) -> dict[str, str]:
    return {
        "limits": limits_table(results),
        "forward": forward_table(results),
        "attention": attention_table(results),
        "linear": linear_table(results),
        "generation": generation_table(results),
        "profile": profile_table(results["results"]["profile"]),
    }


def forward_chart(results: dict[str, Any]) -> Any:
    rows = [row for row in results["results"]["forward"] if row["dtype"] == "float32"]
    series = {
        name: [median(row["seconds"][key]) * 1e3 for row in rows]
        for name, key in (
            ("transformers", "transformers"),
            ("plain layers", "ours, plain"),
            ("packed layers", "ours"),
        )
    }
    series["machine's limit"] = [
        predicted_pass(results, "float32", row["tokens"]) * 1e3 for row in rows
    ]
    return draw.lines(
        "Eight tokens in one pass cost less than two passes of one token",
        "tokens in the pass (GPT-2 124M shape, float32)",
        "milliseconds",
        [row["tokens"] for row in rows],
        series,
        dashed=("machine's limit",),
        log_x=True,
        log_y=True,
    )


def attention_chart(results: dict[str, Any]) -> Any:
    rows = [row for row in results["results"]["attention"] if row["dtype"] == "float32"]
    series = {
        name: [median(row["seconds"][name]) * 1e3 for row in rows] for name in ("explicit", "fused")
    }
    return draw.lines(
        "Attention without storing the scores",
        "tokens (one layer, 12 heads of 64, float32)",
        "milliseconds",
        [row["tokens"] for row in rows],
        series,
        log_x=True,
        log_y=True,
    )


def charts(results: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    return {
        "forward": lambda: forward_chart(results),
        "attention": lambda: attention_chart(results),
    }


def headline(results: dict[str, Any]) -> str:
    row = next(row for row in results["results"]["generation"] if row["dtype"] == "float32")
    rate = measure.summarize(row["seconds"]["ours"]).of(row["tokens"])
    return f"{rate.median:.1f} tok/s over {row['tokens']} tokens: right, and slow (GPT-2 124M shape, float32)"


def main(argv: list[str] | None = None) -> None:
    about = "Measures the forward pass and the naive engine on this machine's CPU, after proving that they are right."
    benchmarks.main(STAGE, about, run, tables, argv)


if __name__ == "__main__":
    cli.run(main)
