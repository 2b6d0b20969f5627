"""What grading calls in the tasks of this stage: see shared/course/driver.py."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import torch
from torch import nn

from shared.checkpoint import without_weights
from shared.course.difference import difference
from shared.course.driver import Entry, arrays, tensors

from . import numpy_llama, rope
from .config import LlamaConfig
from .model import Attention, Layer, RMSNorm

KINDS = (torch.float64, torch.float32, torch.bfloat16)
HALVES = ("bfloat16", "float16")


def narrow(out: torch.Tensor) -> dict[str, Any]:
    """A result that was computed in float32, whatever its dtype."""
    return {"dtype of it": out.dtype, "out": out.float() if out.dtype == torch.float64 else out}


def rounded(expected: Any, result: Any) -> str:
    """`difference`, and whether the numbers in half dtypes were rounded where they should be: then
    a last bit of float32 changes few of them, and elsewhere a quarter differs."""
    if why := difference(expected, result):
        return why
    sides = ([e["out"] for e in entries if "out" in e] for entries in (expected, result))
    pairs = [
        pair
        for right, wrong in zip(*sides, strict=True)
        if right["dtype"] in HALVES
        for pair in zip(right["values"], wrong["values"], strict=True)
    ]
    differ = sum(right != wrong for right, wrong in pairs)
    if differ > 2 + len(pairs) / 20:
        return f"{differ} of {len(pairs)} numbers in half dtypes were rounded elsewhere on the way"
    return ""


def turned(draw: Random) -> Iterator[Entry]:
    """Angles, and pairs that are turned by them. Of few bits, so that float32 has them exactly."""
    for kind in (*KINDS, torch.float16):
        heads, pairs = draw.randint(1, 4), draw.choice([1, 2, 5])
        shape = draw.choice([(7,), (2, 3), (1,)])
        places = torch.tensor([draw.choice([0, 1, 2, 301, 3999]) for _ in range(7)])
        places = places[: torch.Size(shape).numel()].view(shape)
        turns, scale = tensors(draw, pairs).abs().bfloat16().float(), draw.choice([1.0, 1.0, 1.3])
        cos, sin = rope.rotation(places, turns, scale)
        call = f"rotation of {places.tolist()}, {pairs} pairs, scale {scale}"
        yield {"call": call, "cosines": cos, "sines": sin}
        x = tensors(draw, *shape, heads, 2 * pairs, dtype=kind)
        small = tensors(draw, *shape, 1, pairs).float()
        cosines, sines = small.cos(), small.sin()
        call = f"rotate x {list(x.shape)}, {kind}"
        yield {"call": call, **narrow(rope.rotate(x, cosines, sines))}


def stretched(draw: Random) -> Iterator[Entry]:
    for kind in rope.KINDS:
        for _ in range(3):
            options: dict[str, Any] = {"theta": draw.choice([100.0, 1e4, 5e5]), "kind": kind}
            if kind != "default":
                options |= {"factor": draw.choice([1.0, 4.0, 8.0]), "trained": 512}
            if kind == "llama3":
                options |= {"low_factor": 1.0, "high_factor": draw.choice([2.0, 4.0])}
            if kind == "yarn":
                slow, fast = draw.choice([(1.0, 32.0), (2.0, 16.0), (0.001, 500.0)])
                options |= {"slow": slow, "fast": fast, "truncate": draw.random() < 0.5}
            width = draw.choice([2, 16, 64])
            chosen = rope.Rope(**options)
            with without_weights():
                turns = rope.frequencies(chosen, width)
            call = f"frequencies({chosen}, {width})"
            entry: Entry = {"call": call, "device": str(turns.device), "found": turns}
            yield entry | {"logarithms": turns.double().log().tolist()}  # small ones count too


def norms(draw: Random) -> Iterator[Entry]:
    for kind in (*KINDS, torch.float16):
        for scale in (1, 1000 if kind == torch.float16 else 30, 1e-3):
            epsilon, width = draw.choice([1e-6, 1e-5, 0.5]), draw.choice([3, 24])
            norm = RMSNorm(width, epsilon).to(kind)
            norm.weight.data = tensors(draw, width, dtype=kind)
            x = (scale * (tensors(draw, *draw.choice([(5,), (2, 3)]), width) + 1)).to(kind)
            call = f"RMSNorm of x {list(x.shape)} times {scale}, {kind}, epsilon {epsilon}"
            yield {"call": call, **narrow(norm(x))}


def config_of(draw: Random) -> LlamaConfig:
    heads, kv = draw.choice([(6, 2), (4, 4), (4, 1), (6, 3)])
    flags = {name: draw.random() < 0.5 for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm")}
    sizes: dict[str, Any] = {
        "head_dim": draw.choice([4, 8]),
        "n_inner": draw.choice([4, 10]),
        **flags,
    }
    return LlamaConfig(11, 32, 24, 2, heads, kv, name="small", **sizes)


def filled(draw: Random, module: nn.Module) -> Any:
    """In float64, with random weights."""
    module = module.double()
    for parameter in module.parameters():
        parameter.data = tensors(draw, *parameter.shape) * 0.5
    return module


def heads(draw: Random) -> Iterator[Entry]:
    for _ in range(6):
        config = config_of(draw)
        layer = filled(draw, Attention(config))
        shape = draw.choice([(5,), (2, 3)])
        x = tensors(draw, *shape, 24)
        angles = tensors(draw, *shape, 1, config.head_dim // 2).float()
        q, k, v = layer.heads(x, (angles.cos(), angles.sin()))
        yield {"call": f"heads of x {list(x.shape)}, {config}", "q": q, "k": k, "v": v}


def page(draw: Random) -> Iterator[Entry]:
    """Attention on the page: turned, grouped, masked."""
    for _ in range(6):
        heads, kv = draw.choice([(6, 2), (4, 4), (4, 1), (6, 3)])
        width, tokens, channels = draw.choice([2, 4, 8]), draw.randint(1, 9), 10
        sizes = {"q": (heads, channels), "k": (kv, channels), "v": (kv, channels)}
        w = {f"a.{n}_proj.weight": arrays(draw, h * width, c) for n, (h, c) in sizes.items()}
        w["a.o_proj.weight"] = arrays(draw, channels, heads * width)
        for name, count in (("q", heads * width), ("v", kv * width), ("o", channels)):
            if draw.random() < 0.4:
                w[f"a.{name}_proj.bias"] = arrays(draw, count)
        if draw.random() < 0.4:
            w |= {f"a.{name}_norm.weight": arrays(draw, width) for name in "qk"}
        theta, epsilon, x = draw.choice([10.0, 1e4]), 1e-5, arrays(draw, tokens, channels)
        call = f"attention of {tokens} tokens, {heads} and {kv} heads of {width}, theta {theta}, "
        call += f"weights {sorted(w)}"
        out = numpy_llama.attention(x, w, "a", heads, kv, theta, epsilon)
        turned = numpy_llama.rotate(arrays(draw, heads, tokens, width), theta)
        yield {"call": call, "out": out}
        call = f"rotate ({heads}, {tokens}, {width}), theta {theta}"
        yield {"call": call, "out": turned}


def layers(draw: Random) -> Iterator[Entry]:
    """A layer around any attention, and its MLP."""
    for _ in range(6):
        config = config_of(draw)
        layer = filled(draw, Layer(config, draw.randrange(9)))
        shape, calls = draw.choice([(5,), (2, 3), (1, 2, 2)]), list[Any]()
        x = tensors(draw, *shape, 24)
        angles = tensors(draw, *shape, 1, config.head_dim // 2).float()

        def attend(number: int, q: Any, k: Any, v: Any, calls: list[Any] = calls) -> Any:
            calls.append((number, q.shape, k.shape, v.shape))
            group = q.shape[-2] // k.shape[-2]
            return q * 0.5 + (k * v).repeat_interleave(group, -2)

        out = layer(x.clone(), (angles.cos(), angles.sin()), attend)  # it may add in place
        call = f"a layer on x {list(x.shape)}, {config}"
        yield {"call": call, "out": out, "calls": calls, "mlp": layer.mlp(x)}


DRIVERS = {1: turned, 2: stretched, 3: norms, 4: heads, 5: page, 6: layers}
RULES = {1: rounded, 3: rounded}
TWINS = {
    5: {"stage08_llama/rope.py": ("rotate",), "stage08_llama/model.py": ("Attention.heads",)},
    6: {"stage08_llama/numpy_llama.py": ("mlp",)},
}
