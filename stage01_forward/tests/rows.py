"""Random rows for the samplers: all options mixed, many ties, short histories, forbidden ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from stage01_forward.attention import Recompute
from stage01_forward.generation import Logprobs, Row
from stage01_forward.model import GPT2
from stage01_forward.params import SamplingParams
from stage01_forward.sampling import logprobs_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@st.composite
def options(draw, vocabulary):
    rarely, ids = st.sampled_from([True, False, False]), st.integers(0, vocabulary - 1)

    def either(off, on):
        return draw(on) if draw(rarely) else off

    return SamplingParams(
        max_tokens=10,
        temperature=either(0.0, st.floats(0.005, 2)) or either(0.0, st.just(1.0)),
        top_k=either(0, st.integers(1, vocabulary)),
        top_p=either(1.0, st.floats(0.01, 0.999)),
        min_p=either(0.0, st.floats(0, 1)),
        repetition_penalty=either(1.0, st.floats(0.5, 2)),
        presence_penalty=either(0.0, st.floats(-2, 2)),
        frequency_penalty=either(0.0, st.floats(-2, 2)),
        logit_bias=either({}, st.dictionaries(ids, st.floats(-100, 100), max_size=4)),
        stop_token_ids=tuple(draw(st.lists(ids, max_size=1))),
        min_tokens=draw(st.integers(0, 4)),
        seed=draw(st.integers(0, 2**32)),
        logprobs=either(None, st.integers(0, 4)),
    )


@st.composite
def batches(draw, dtypes=DTYPES):
    """Logits (R, V), R rows that no sampler has seen, and the ids that end a text."""
    vocabulary = draw(st.sampled_from([4, 63, 64, 65, 200, 1000, 5000]))
    params = draw(st.lists(options(vocabulary), min_size=1, max_size=4))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = random.normal(0, draw(st.sampled_from([0.5, 3.0])), (len(params), vocabulary))
    if draw(st.booleans()):
        logits = logits.round()  # many ties
    # Short histories, some shorter than min_tokens; of few ids, so that some occur several times.
    ids = vocabulary if draw(st.booleans()) else 3
    eos_ids = draw(st.sampled_from([(), (0,), (0, vocabulary // 2)]))
    rows = list[Row]()
    for p in params:
        prompt, output = (random.integers(0, ids, n).tolist() for n in random.integers(0, 9, 2))
        if draw(st.booleans()):  # as a grammar leaves them
            forbidden = random.random(vocabulary) < 0.5
            forbidden[min({*range(4)} - {*eos_ids, *p.stop_token_ids})] = False
            logits[len(rows), forbidden] = -np.inf
        rows.append(Row(p, prompt, output))
    return torch.from_numpy(logits).to(draw(st.sampled_from(dtypes))), rows, eos_ids


class FixedDart(Row):
    """A row that throws the same dart each time."""

    fixed = 0.0

    def dart(self) -> float:
        return self.fixed


def fresh(rows: Sequence[Row]) -> list[Row]:
    """The same rows, for another sampler; their random numbers begin anew."""
    return [replace(row, generator=None) for row in rows]


def close(one: Logprobs | None, other: Logprobs | None, most: float = 1e-5) -> bool:
    """Whether two log probabilities are the same, up to float32."""
    if one is None or other is None:
        return one is other
    pairs = zip([(-1, one.token), *one.top], [(-1, other.token), *other.top], strict=True)
    same = (a == b or a[0] == b[0] and abs(a[1] - b[1]) <= most for a, b in pairs)
    return all(same)  # -inf is equal to itself, and its difference is not a number


@torch.inference_mode()
def prompt_logprobs(model: GPT2, ids: Sequence[int], top: int) -> list[Logprobs | None]:
    """The log probability of each prompt token, and of the `top` likeliest tokens in its place.
    None for the first token, which has no context."""
    hidden = model(torch.tensor(ids), torch.arange(len(ids)), Recompute().attend)  # (T, C)
    rows = zip(model.logits(hidden[:-1]), ids[1:], strict=True)
    return [None, *(logprobs_of(row, id, top) for row, id in rows)]
