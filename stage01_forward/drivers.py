"""What grading calls in the tasks of this stage: see shared/course/driver.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.course.driver import Entry, arrays, outcome, tensors, tiny
from shared.records import StepRecord

from . import generation, numpy_gpt2, sampling, scoring
from .attention import Recompute
from .engine import Engine
from .generation import Output, Row
from .params import SamplingParams


def prompt_of(draw: Random, longest: int = 20) -> list[int]:
    count = draw.choice([1, *[draw.randint(1, longest)] * 5])
    return [draw.randrange(100) for _ in range(count)]


def options_of(draw: Random, longest: int = 9, **fixed: Any) -> SamplingParams:
    """Sampling options, most of them random."""
    tokens = draw.randint(1, longest)
    options = SamplingParams(
        max_tokens=tokens,
        min_tokens=draw.choice([0, 0, draw.randint(0, tokens)]),
        temperature=draw.choice([0, 0.005, 0.8, 1.5]),
        top_k=draw.choice([0, 0, -1, 1, 5, 100]),
        top_p=draw.choice([1.0, 1.0, 0.3, 0.9]),
        min_p=draw.choice([0.0, 0.0, 0.05, 0.5]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
        seed=draw.randrange(1000),
        stop_token_ids=tuple(draw.sample(range(100), draw.choice([0, 0, 15]))),
        ignore_eos=draw.random() < 0.5,
        logprobs=draw.choice([None, None, 0, 3]),
    )
    return replace(options, **fixed)


def counts_of(steps: Iterable[StepRecord]) -> list[tuple[int, ...]]:
    """Records without their times."""
    return [(s.rows, s.prefill_tokens, s.decode_tokens, s.wasted_tokens) for s in steps]


# ---- tasks ----


def formulas(draw: Random) -> Iterator[Entry]:
    for kind in ("float64", "float32"):
        for _ in range(3):
            shape = [draw.randint(1, 4) for _ in range(draw.randint(0, 2))] + [draw.randint(2, 9)]
            x, (weight, bias) = arrays(draw, *shape, kind=kind), arrays(draw, 2, shape[-1])
            x = x * draw.choice([1, 1, 3]) + draw.choice([0, 5])
            epsilon = draw.choice([1e-5, 0.1, 1.0])
            call = f"an array of shape {shape}, epsilon {epsilon}"
            large = draw.choice([-1e4, 1e4]) + 300 * x
            norm = numpy_gpt2.layer_norm(x, weight, bias, epsilon)  # x is the residual stream
            # These may work in place; and a constant of NumPy's makes numbers float64.
            gelu, soft = numpy_gpt2.gelu(x.copy()), numpy_gpt2.softmax(x.copy())
            yield {"call": call, "layer_norm": norm.astype(kind), "gelu": gelu.astype(kind)}
            large_soft = numpy_gpt2.softmax(large)
            yield {"call": call, "softmax": soft.astype(kind), "of large": large_soft.astype(kind)}


def ends(draw: Random) -> Iterator[Entry]:
    model = tiny(draw)
    for _ in range(60):
        params = options_of(draw)
        prompt, output = prompt_of(draw, 40), prompt_of(draw, 25)[1:]
        if draw.random() < 0.5:  # at the end of the context, one token more or less
            params = options_of(draw, max_tokens=64)
            prompt = [1] * (model.config.n_positions - len(output) - draw.choice([0, 1, 1, 2]))
        eos = tuple(draw.sample(range(100), 3))
        token = draw.choice([draw.randrange(100), *eos, *params.stop_token_ids])
        reason = generation.finish_reason(token, Row(params, prompt, output), model.config, eos)
        call = f"token {token} after {len(prompt)} + {len(output)} tokens, eos {eos}, {params}"
        yield {"call": call, "reason": reason}


def weights_of(draw: Random, layers: int, width: int, tied: bool) -> numpy_gpt2.Weights:
    shapes = {"wte": (31, width), "wpe": (16, width), "ln_f": (width,)}
    for layer in range(layers):
        inner = {"attn.c_attn": 3, "attn.c_proj": 1, "mlp.c_fc": 4}
        shapes |= {f"h.{layer}.{name}": (width, n * width) for name, n in inner.items()}
        shapes[f"h.{layer}.mlp.c_proj"] = (4 * width, width)
        shapes |= {f"h.{layer}.{name}": (width,) for name in ("ln_1", "ln_2")}
    weights = {f"{name}.weight": arrays(draw, *shape) for name, shape in shapes.items()}
    weights |= {f"{name}.bias": arrays(draw, shape[-1]) for name, shape in shapes.items()}
    if not tied:
        weights["lm_head.weight"] = arrays(draw, 31, width)
    return weights


def page(draw: Random) -> list[Entry]:
    heads = draw.choice([1, 2, 3])
    width, layers = heads * draw.choice([2, 4]), draw.randint(1, 3)
    weights = weights_of(draw, layers, width, draw.random() < 0.5)
    ids = [draw.randrange(31) for _ in range(draw.randint(1, 16))]
    x, epsilon = arrays(draw, len(ids), width), draw.choice([1e-5, 0.1])
    shapes = f"{len(ids)} tokens, {heads} heads, {layers} layers of {width} channels"
    out = numpy_gpt2.attention(x, weights, "h.0.attn", heads)
    block = numpy_gpt2.block(x, weights, layers - 1, heads, epsilon)
    return [
        {"call": f"attention of {shapes}", "result": out},
        {"call": f"block of {shapes}", "result": block},
        {
            "call": f"gpt2 of {shapes}",
            "result": numpy_gpt2.gpt2(ids, weights, layers, heads, epsilon),
        },
    ]


def model(draw: Random) -> Iterator[Entry]:
    """The model with attention, and with a function of each token alone for other shapes."""
    gpt2 = tiny(draw)
    config = gpt2.config
    ids = torch.tensor(prompt_of(draw, 30))
    hidden = gpt2(ids, torch.arange(len(ids)), Recompute().attend)
    yield {"call": f"the model on {len(ids)} tokens", "hidden": hidden}
    for shape in ((3,), (2, 3), (2, 1, 2)):
        calls: list[object] = []

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, calls: list[object] = calls
        ) -> Tensor:
            calls.append((layer, q.shape, k.shape, v.shape))
            return q * 0.5 + k * v * (1 + layer)

        ids = torch.tensor([draw.randrange(100) for _ in range(12)])[: np.prod(shape)].view(shape)
        places = torch.randperm(config.n_positions)[: ids.numel()].view(shape)
        hidden = gpt2(ids, places, attend)
        block = gpt2.h[-1](tensors(draw, *shape, config.n_embd), attend)
        call = f"the model on ids of shape {shape}"
        yield {"call": call, "hidden": hidden, "calls": calls, "block": block}


def samples(draw: Random) -> Iterator[Entry]:
    for _ in range(6):
        kind = draw.choice([torch.float64, torch.float32, torch.bfloat16])
        wide, count = draw.choice([1, 5, 100]), draw.randint(1, 4)
        logits = tensors(draw, count, 100) * 3
        if draw.random() < 0.4:
            logits = logits.round()  # ties
        logits = (logits if wide == 100 else logits * wide).to(kind)
        if draw.random() < 0.15:
            place = draw.randrange(count), draw.randrange(100)
            logits[place] = draw.choice([torch.nan, torch.inf, -torch.inf])
            if draw.random() < 0.3:
                logits[0] = -torch.inf
        rows = [
            Row(options_of(draw, longest=20), prompt_of(draw), prompt_of(draw)[1:])
            for _ in range(count)
        ]
        for row in rows:
            if draw.random() < 0.2:
                row.mask = torch.rand(100) < 0.3
                row.mask[draw.randrange(100)] = True
        before = logits.clone()
        drawn = outcome(sampling.sample, logits, rows, (3, 50))
        call = f"sample, {kind}, {[row.params for row in rows]}"
        same = torch.equal(before.nan_to_num(), logits.nan_to_num())
        yield {"call": call, "sampled": drawn, "unchanged": same}
        some = draw.choice([rows, rows[:1]])
        if isinstance(drawn, Exception):  # rows before the one refused may have thrown their darts
            continue
        again = outcome(sampling.sample, logits[: len(some)], some, (3, 50))
        yield {"call": f"again, {call}", "sampled": again}
    for _ in range(12):
        heat = draw.choice([0.9, 0.9, 0.002])  # which is below the least
        scores = tensors(draw, 40) * draw.choice([1, 4] if heat == 0.9 else [0.01])
        params = options_of(draw, temperature=heat)
        if draw.random() < 0.5 and heat == 0.9:
            scores = scores.round()
        if draw.random() < 0.5:
            scores = scores.float()
        call = f"distribution, {params}"
        # Weights may be in float64 from the start, or as long as the scores are in float32.
        yield {"call": call, "result": sampling.distribution(scores, params).to(scores)}
        weights = (scores - scores.max()).exp()
        if params.min_p and draw.random() < 0.5 and weights.dtype == torch.float64:
            weights[draw.randrange(40)] = params.min_p
        yield {
            "call": f"_filtered, {params}",
            "result": sampling._filtered(weights.clone(), params),
        }
        spread = weights.double() * (torch.rand(40) < 0.4)
        spread[draw.randrange(40)] = 1.0
        for dart in (0.0, draw.random(), draw.random(), 1 - 2**-53, 1.0):
            hit = sampling.draw(spread / spread.sum(), dart)
            yield {"call": f"draw with the dart {dart}", "token": hit}


def outputs_of(outputs: Iterable[Output]) -> list[object]:
    return [(o.token_ids, o.finish_reason, o.tokens) for o in outputs]


def loop(draw: Random) -> Iterator[Entry]:
    model, passes = tiny(draw), list[int]()
    model.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].numel()))
    engine = Engine(model, eos_ids=draw.sample(range(100), 4))
    prompts = [prompt_of(draw, 60) for _ in range(4)]
    params = [options_of(draw, longest=12) for _ in prompts]
    outputs = engine.generate(prompts, params)
    entry: Entry = {"call": f"generate {params}", "outputs": outputs_of(outputs)}
    yield entry | {"steps": counts_of(engine.steps), "passes": passes}
    tokens, output = [], Output(prompts[0])
    for token in engine._tokens(output, params[1]):
        tokens.append((token, len(output.tokens), len(passes)))
    yield {"call": f"stream {params[1]}", "tokens": tokens}


def judged(draw: Random) -> Iterator[Entry]:
    model = tiny(draw)
    for length in (draw.randint(0, 2), draw.randint(3, 64), draw.randint(65, 300)):
        ids = [draw.randrange(100) for _ in range(length)]
        stride = draw.choice(
            [None, 1 + length // 40, 64, draw.randint(1, 64), draw.choice([0, 65])]
        )
        judged = list[int]()
        result = outcome(scoring.perplexity, model, ids, stride, judged.append)
        if not isinstance(result, Exception):
            result = {name: float(number) for name, number in result.items()}
        call = f"perplexity of {length} tokens, stride {stride}"
        yield {"call": call, "result": result, "progress": judged}


DRIVERS = {1: formulas, 2: ends, 3: page, 4: model, 5: samples, 6: loop, 7: judged}
TWINS = {3: {"stage01_forward/model.py": ("Block.forward", "GPT2.forward")}}
