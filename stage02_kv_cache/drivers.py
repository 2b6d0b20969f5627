"""What grading calls in the tasks of this stage: see shared/course/driver.py."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch
from torch import Tensor

from shared.config import Config
from shared.course.driver import Entry, outcome, tensors, tiny
from stage01_forward.drivers import counts_of, options_of, outputs_of, prompt_of

from . import cache
from .engine import Engine

SMALL = Config(50, 24, 24, 2, 6, n_kv_head=3, name="small")
KINDS = (torch.float64, torch.float32, torch.bfloat16)


def slots(draw: Random) -> Iterator[Entry]:
    for capacity in (None, draw.randint(1, 24), draw.choice([0, -1, 25, 24, 1])):
        kind = draw.choice(KINDS)
        kv_cache = outcome(cache.KVCache, SMALL, capacity, kind)
        call = f"KVCache(capacity={capacity}, dtype={kind})"
        if isinstance(kv_cache, Exception):
            yield {"call": call, "result": kv_cache}
            continue
        kv_cache.kv.zero_()  # new memory may hold anything
        yield {"call": call, "kv": kv_cache.kv, "bytes": kv_cache.bytes}
        for _ in range(30):
            name, count = draw.choice(["extend", "crop"]), draw.choice([-1, 0, 1, 2, 5, 8, 24, 25])
            if draw.random() < 0.3:
                count = kv_cache.capacity - kv_cache.length if name == "extend" else kv_cache.length
            before = kv_cache.length
            result = outcome(getattr(kv_cache, name), count)
            call = f"{name}({count}) of a cache with {before} of {kv_cache.capacity}"
            entry: Entry = {"call": call, "length": kv_cache.length, "capacity": kv_cache.capacity}
            if isinstance(result, Exception):
                entry["error"] = result
            elif name == "extend":
                result.new.fill_(draw.randint(1, 100))
                entry |= {"positions": result.positions, "seen": result.seen.shape}
            yield entry
        yield {"call": "the numbers in the end", "kv": kv_cache.kv}


def visible(attention: cache.CachedAttention, end: int) -> Tensor:
    """(T, end): what a step's queries see, however its mask is stated."""
    count = len(attention.positions)
    everything = torch.ones(count, end, dtype=torch.bool)
    if attention.mask is not None:
        return everything & attention.mask
    return everything.tril() if attention.square else everything


def views(draw: Random) -> Iterator[Entry]:
    for _ in range(12):
        kv = tensors(draw, 2, 2, 1, 24, 2, dtype=draw.choice(KINDS))
        start = draw.choice([0, 0, draw.randrange(23)])
        end = draw.choice([start + 1, draw.randint(start + 1, 24)])
        step = cache.CachedAttention(kv, start, end)
        call = f"CachedAttention over {start} to {end}"
        entry: Entry = {"call": call, "positions": step.positions, "visible": visible(step, end)}
        entry |= {"needed": step.mask is not None, "new": step.new.clone()}
        step.new[1] = 7
        kv[0, :, :, 0] = 8  # both are views of the same memory
        yield entry | {"kv": kv, "seen": step.seen}


def attend(draw: Random) -> Iterator[Entry]:
    for kind in KINDS:
        kv_heads = draw.choice([1, 2, 3, 6])
        kv_cache = cache.KVCache(SMALL, dtype=kind)
        kv_cache.kv = tensors(draw, 2, 2, kv_heads, 24, 4, dtype=kind)
        while kv_cache.length < 24:
            count = draw.choice([1, 1, 2, draw.randint(1, 24 - kv_cache.length)])
            count, start = min(count, 24 - kv_cache.length), kv_cache.length
            step, layer = kv_cache.extend(count), draw.randrange(2)
            q = tensors(draw, count, 6, 4).to(kind)
            k, v = tensors(draw, 2, count, kv_heads, 4).to(kind)
            out = step.attend(layer, q, k, v)
            call = f"attend, {count} tokens from {start} on, {kv_heads} heads of keys, {kind}"
            yield {"call": call, "out": out, "written": kv_cache.kv[layer, :, :, start:]}
        # The cache has a dtype of its own, such as half of the model's.
        kv_cache.crop(draw.randrange(24))
        q, (k, v) = tensors(draw, 1, 6, 4), tensors(draw, 2, 1, kv_heads, 4)
        result = kv_cache.extend(1).attend(1, q, k, v)
        yield {"call": f"queries in float64, a cache in {kind}", "out": result.to(kind)}


def loop(draw: Random) -> Iterator[Entry]:
    model, passes = tiny(draw), list[int]()
    model.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].numel()))
    engine = Engine(model, eos_ids=draw.sample(range(100), 4))
    prompts = [prompt_of(draw, 60) for _ in range(4)]
    params = [options_of(draw, longest=12) for _ in prompts]
    outputs = engine.generate(prompts, params)
    entry: Entry = {"call": f"generate {params}", "outputs": outputs_of(outputs)}
    yield entry | {"steps": counts_of(engine.steps), "passes": passes}
    lengths, tokens = [], []
    for token in engine.stream(prompts[0], options_of(draw, longest=9)):
        tokens.append(token)
        lengths.append(engine.cache.length)
    yield {"call": "a stream", "tokens": tokens, "lengths": lengths}
    long = options_of(draw, max_tokens=9, min_tokens=0, ignore_eos=True, stop_token_ids=())
    first, second = (engine.stream(prompt[:40], long) for prompt in prompts[:2])
    taken: list[object] = [next(first), next(first), next(second)]
    taken.append(outcome(next, first))
    taken += list(second)
    yield {"call": "two streams, one after the other", "taken": taken}


DRIVERS = {1: slots, 2: views, 3: attend, 4: loop}
