"""What grading calls in the tasks of this stage: see shared/course/driver.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count as counting
from random import Random

import torch
from torch import Tensor

from shared.config import Config
from shared.course.driver import Entry, outcome, tensors, tiny
from stage01_forward.drivers import counts_of, options_of, outputs_of, prompt_of
from stage01_forward.generation import Output, Sampling, Token
from stage01_forward.params import SamplingParams

from . import attention, cache
from .engine import Engine

SMALL = Config(50, 24, 24, 2, 6, n_kv_head=3, name="small")
KINDS = (torch.float64, torch.float32, torch.bfloat16)


def columns(draw: Random) -> Iterator[Entry]:
    for _ in range(4):
        lengths = [draw.randint(1, 9) for _ in range(draw.randint(1, 4))]
        kind, count = draw.choice(KINDS), max(lengths) + draw.randint(0, 9)
        padded = cache.PaddedCache(SMALL, lengths, count, dtype=kind)
        padded.kv.zero_()  # new memory may hold anything
        call = f"PaddedCache({lengths}, {count})"
        entry: Entry = {"call": call, "kv": padded.kv, "bytes": padded.bytes}
        entry |= {"padding": padded.padding, "columns": padded.columns}
        yield entry | {"last": padded.last_position}
        for _ in range(12):
            wanted, before = draw.choice([-1, 0, 1, 1, 2, 5, count - padded.length]), padded.length
            step = outcome(padded.extend, wanted)
            call = f"extend({wanted}) of a cache with {before} of {count}"
            entry = {"call": call, "length": padded.length}
            if isinstance(step, Exception):
                entry["error"] = step
            else:
                step.new.fill_(draw.randint(1, 100))
                entry |= {"seen": step.seen.shape, "positions": step.positions}
            yield entry
        yield {"call": "the numbers in the end", "kv": padded.kv}


def by_hand(draw: Random) -> Iterator[Entry]:
    for kind in KINDS:
        for masked in (True, False):
            rows, heads, group = draw.randint(1, 3), draw.choice([1, 2, 3]), draw.choice([1, 1, 2])
            queries, keys = draw.randint(1, 6), draw.randint(1, 9)
            causal = not masked and draw.random() < 0.6
            keys = queries if causal else keys
            mask = None
            if masked:
                mask = torch.rand(rows, 1, queries, keys) < 0.5
                mask[..., draw.randrange(keys)] = True
            q = tensors(draw, rows, heads * group, queries, 4) * draw.choice([1, 30])
            k, v = tensors(draw, 2, rows, heads, keys, 4).to(kind)
            if mask is not None:  # what is hidden may hold any number
                hidden = ~mask.any(2)[..., None].expand_as(k)
                k[hidden], v[hidden] = 1e4, -1e4
            q = q.to(draw.choice([kind, torch.float64]))
            out = attention.masked_attention(q, k, v, mask, causal)
            shapes = f"q {list(q.shape)} {q.dtype}, keys {list(k.shape)} {kind}"
            call = f"masked_attention, {shapes}, {'mask' if masked else f'causal={causal}'}"
            yield {"call": call, "kind": out.dtype, "out": out.to(kind)}


def masks(draw: Random) -> Iterator[Entry]:
    """Positions and masks. Those of padding may be anything valid."""
    for _ in range(12):
        rows, last = draw.randint(1, 4), draw.randint(8, 20)
        padding = torch.tensor([0, *(draw.randint(0, 7) for _ in range(rows - 1))])
        kv = tensors(draw, 2, 2, rows, 1, 24, 1)
        start = draw.choice([0, 0, draw.randint(8, 20)])
        end = max(8, draw.choice([start + 1, draw.randint(start + 1, 24)]))
        step = cache.PaddedAttention(kv, padding, start, end, last)
        positions: list[list[int]] = step.positions.tolist()
        visible: list[list[list[bool]]] = step.mask.expand(rows, 1, end - start, end)[:, 0].tolist()
        for row, pads in enumerate(padding.tolist()):
            for place, column in enumerate(range(start, end)):
                if column < pads:
                    positions[row][place] = 0 <= positions[row][place] <= last
                    visible[row][place] = [any(visible[row][place])]
        call = f"columns {start} to {end}, padding {padding.tolist()}, last position {last}"
        entry: Entry = {"call": call, "positions": positions, "visible": visible}
        entry["new"] = step.new.clone()
        step.new[1] = 7
        kv[0, :, :, :, 0] = 8  # both are views of the same memory
        yield entry | {"kv": kv, "seen": step.seen}


def attend(draw: Random) -> Iterator[Entry]:
    for kind in KINDS:
        lengths = [draw.randint(1, 9) for _ in range(draw.randint(1, 4))]
        group, width = draw.choice([1, 2]), max(lengths)
        padded = cache.PaddedCache(SMALL, lengths, 24, dtype=kind)
        heads = 6 // group
        padded.kv = tensors(draw, 2, 2, len(lengths), heads, 24, 4, dtype=kind)
        for count in (width, 1, draw.randint(1, 5), 1):
            start = padded.length
            step, layer = padded.extend(count), draw.randrange(2)
            q = tensors(draw, len(lengths), count, 6, 4).to(kind)
            k, v = tensors(draw, 2, len(lengths), count, heads, 4).to(kind)
            out = step.attend(layer, q, k, v)
            real = [
                out[row, max(0, width - length - start) :] for row, length in enumerate(lengths)
            ]
            call = f"attend, columns {start} to {start + count}, prompts {lengths}, {kind}"
            yield {"call": call, "out": real, "kv": padded.kv[layer, ..., start:, :].clone()}


def crowd(draw: Random) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts with their options, some of which end at the end of the context."""
    prompts = [prompt_of(draw, draw.choice([9, 60])) for _ in range(draw.randint(1, 6))]
    return prompts, [options_of(draw, longest=12, top_k=draw.choice([0, 5])) for _ in prompts]


def poisoned(logits: Callable[[Tensor], Tensor], row: int) -> Callable[[Tensor], Tensor]:
    """`logits`, whose second result is NaN in `row`, if it has that."""
    calls = counting(1)

    def spoilt(hidden: Tensor) -> Tensor:
        scores = logits(hidden)
        if next(calls) == 2 and 0 <= row < len(scores):
            scores = scores.clone()
            scores[row] = torch.nan
        return scores

    return spoilt


def batch(draw: Random) -> Iterator[Entry]:
    model, passes = tiny(draw), list[torch.Size]()
    model.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].shape))
    for spoilt in (False, False, True):
        engine = Engine(model, eos_ids=draw.sample(range(100), 4))
        engine.cache_bytes = draw.choice([0, 10**6])  # of an earlier batch
        prompts, params = crowd(draw)
        outputs = [Output(list(prompt)) for prompt in prompts]
        logits, broken = model.logits, draw.randrange(len(prompts) + 3) if spoilt else -1
        setattr(model, "logits", poisoned(logits, broken))  # noqa: B010
        events = [
            (row, token, len(outputs[row].tokens)) for row, token in engine._tokens(outputs, params)
        ]
        setattr(model, "logits", logits)  # noqa: B010
        call = f"_tokens of {[len(prompt) for prompt in prompts]} tokens, {params}"
        entry: Entry = {"call": call, "events": sorted(events, key=lambda e: (e[2], e[0]))}
        entry |= {"outputs": outputs_of(outputs), "errors": [o.error is None for o in outputs]}
        counts = counts_of(engine.steps)
        if spoilt:  # does a row count that ends with NaN?
            del counts[1:2]
        entry |= {"steps": counts, "passes": passes}
        yield entry | {"bytes": engine.cache_bytes}
        passes.clear()


def all_of(engine: Engine, outputs: list[Output], sampling: Sampling) -> list[tuple[int, Token]]:
    return list(engine.run(outputs, sampling))


def run(draw: Random) -> Iterator[Entry]:
    model, passes = tiny(draw), list[torch.Size]()
    model.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].shape))
    engine = Engine(model, max_batch=draw.randint(1, 3))
    for _ in range(3):
        prompts, params = crowd(draw)
        for place in range(len(prompts)):
            if draw.random() < 0.3:
                prompts[place] = draw.choice([[], [100], [-1, 3], [1] * 64])
        if draw.random() < 0.2:
            prompts, params = [], []
        outputs = [Output(list(prompt)) for prompt in prompts]
        sampling = params[0] if params and draw.random() < 0.3 else params
        if draw.random() < 0.15:
            sampling = [*params, options_of(draw)]
        call = f"run, at most {engine.max_batch}, {[len(prompt) for prompt in prompts]} tokens"
        events = outcome(all_of, engine, outputs, sampling)
        if isinstance(events, Exception):  # raised before the records were reset, or after
            engine.steps, engine.cache_bytes = [], 0
        entry: Entry = {"call": call, "events": events, "outputs": outputs_of(outputs)}
        entry |= {"errors": [o.error for o in outputs], "steps": counts_of(engine.steps)}
        yield entry | {"bytes": engine.cache_bytes, "passes": list(passes)}
        passes.clear()


DRIVERS = {1: columns, 2: by_hand, 3: masks, 4: attend, 5: batch, 6: run}
