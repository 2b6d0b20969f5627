"""What grading calls in the tasks of this stage: see shared/course/driver.py."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import torch

from shared.course.driver import now, tensors, tiny
from shared.tokenizer import ByteTokenizer
from stage01_forward.generation import Token
from stage01_forward.params import SamplingParams
from stage04_continuous.drivers import options_of
from stage04_continuous.request import Request
from stage05_paged.blocks import BlockPool
from stage05_paged.drivers import state_of
from stage05_paged.engine import make

from . import grammar, rejection
from .drafts import Counts
from .engine import with_drafts
from .lengths import PATIENCE, Adaptive, Fixed, PassTimes
from .proposers import NGram, Recorded


def grown(request: Request, *ids: int) -> None:
    for id in ids:
        request.output.append(Token(id, None, None))


# ---- tasks ----


def n_grams(draw: Random) -> Any:
    """Texts of few different tokens that grow, some of them beside each other. At times what is
    known of a text is dropped: a call adds only what is new, so later ones find nothing older."""
    seen: list[Any] = []
    for _ in range(8):
        longest, few = draw.randint(1, 5), range(draw.randint(2, 4))
        shortest = draw.randint(1, longest)
        proposer = NGram(longest, shortest)
        prompts = [draw.choices(few, k=draw.randint(1, 20)) for _ in range(2)]
        requests = [Request(prompt, SamplingParams()) for prompt in prompts]
        for _ in range(25):
            request, count = draw.choice(requests), draw.randint(0, 6)
            grown(request, *draw.choices(few, k=draw.choice([0, 1, 1, 2, 7])))
            text = request.tokens(0, request.token_count)
            call = f"NGram({longest}, {shortest})._of {text}, at most {count}"
            seen.append({"call": call, "drafts": proposer._of(request, count)})
            if draw.random() < 0.1 and count:  # for no drafts, a call need not look
                if request not in proposer.ends and len(text) > shortest:
                    raise LookupError("after a call, `ends` must have a dictionary of the n-grams")
                proposer.ends.get(request, {}).clear()
    return seen


def accepted(draw: Random) -> Any:
    """Probabilities and darts in 64ths, of which no quotient is rounded across a dart; and tokens
    without a chance. One that only q gives none cannot be drawn, and is not tried."""
    seen: list[Any] = []
    for _ in range(60):
        p, q = (torch.tensor(_sixty_fourths(draw), dtype=torch.float64) for _ in range(2))
        for draft in range(4):
            if p[draft] and not q[draft]:
                continue
            limit = float(p[draft] / q[draft]) if q[draft] else 0.0
            near = [int(64 * limit) + place for place in (-1, 0, 1)]
            darts = [place / 64 for place in [0, 63, draw.randrange(64), *near] if 0 <= place < 64]
            call = f"accept of {draft}, p {p.tolist()}, q {q.tolist()}, darts {darts}"
            yes = [bool(rejection.accept(p.clone(), q.clone(), draft, dart)) for dart in darts]
            seen.append({"call": call, "accepted": yes})
    return seen


def _sixty_fourths(draw: Random) -> list[float]:
    """A distribution of four tokens, some of which have no chance."""
    ends = sorted([0, 64, *(draw.choice([0, 1, 8, 32, draw.randrange(65)]) for _ in range(3))])
    return [(high - low) / 64 for low, high in zip(ends, ends[1:], strict=False)]


def residuals(draw: Random) -> Any:
    """Distributions that are the same, or that differ by much more than a rounding."""
    seen: list[Any] = []
    for _ in range(40):
        size = draw.choice([2, 5, 60])
        p, q = (2 * tensors(draw, 2, size)).softmax(1)
        hidden = draw.sample(range(size), draw.randrange(size))
        q = q.index_fill(0, torch.tensor(hidden, dtype=torch.int64), 0.0)
        q = p if draw.random() < 0.2 else q / q.sum()
        call = f"residual of p {p.tolist()}, q {q.tolist()}"
        seen.append({"call": call, "residual": rejection.residual(p.clone(), q.clone())})
    return seen


class Noted(Fixed):
    """Keeps what a scheduler notes. In which order it does is its own affair."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, int, int]] = []

    def note(self, request: Request, count: int, accepted: int) -> None:
        self.notes.append((request.id, count, accepted))


def kept(draw: Random) -> Any:
    """Engines with little memory, and drafts of which some are right. No text occurs twice, so that
    it does not matter whose block is published first."""
    model, seen = tiny(draw), list[Any]()
    for alpha in (0.0, 0.7, 1.0):
        sequences, common = draw.randint(1, 4), draw.choices(range(100), k=8)
        prompts = [
            [*common[: draw.choice([0, 4, 8])], place, *draw.choices(range(100), k=9)]
            for place in range(6)
        ]
        options = [options_of(draw, 24) for _ in prompts]
        answers = make(model, pool=BlockPool(99, 4)).generate(prompts, options)
        known = {tuple(p): a.token_ids for p, a in zip(prompts, answers, strict=True)}
        pool = BlockPool(draw.randint(12, 24), draw.choice([2, 4, 5]))
        while pool.count * pool.block_size < 48:
            pool = BlockPool(2 * pool.count, pool.block_size)
        plain = make(model, pool=pool, max_sequences=sequences, token_budget=draw.randint(8, 40))
        drafts, notes = Recorded(known, alpha, 101, draw.randrange(99)), Noted()
        engine = with_drafts(plain, drafts, draw.randint(1, 7), notes)
        scheduler = engine.scheduler
        requests = [
            engine.add(Request(ids, params, f"r{place}"))
            for place, (ids, params) in enumerate(zip(prompts, options, strict=True))
        ]
        for step in range(60):
            if not engine.requests:
                break
            call = f"step {step} of an engine, {alpha:.0%} of the drafts right"
            now(call)
            notes.notes.clear()
            entry: dict[str, Any] = {"call": call, "tokens": engine.step()}
            seen.append(entry | {"notes": sorted(notes.notes), **state_of(scheduler.pool)})
            seen[-1]["counts"] = counted(scheduler.draft_counts)
            seen[-1]["histories"] = {r.id: counted(c) for r, c in scheduler.histories.items()}
            seen[-1]["tables"] = {r.id: len(table.blocks) for r, table in scheduler.tables.items()}
            seen[-1]["computed"] = [request.computed for request in requests]
            seen[-1]["hits"] = scheduler.counts.hit_tokens
    return seen


def counted(counts: Counts) -> list[int]:
    """As they are now: they go on counting."""
    return [counts.passes, counts.proposed, counts.accepted, *counts.per_position]


def chosen(draw: Random) -> Any:
    """Times of passes that rise, with a knee or steps; and requests with rates of their own, but
    for at most one: between two of the same rate, either choice is as good."""
    seen: list[Any] = []
    for _ in range(12):
        seconds = [1.0]
        for _ in range(5):
            seconds.append(seconds[-1] * draw.choice([1.01, 1.2, 1.9, draw.uniform(1, 2)]))
        adaptive = Adaptive(PassTimes((1, 2, 4, 8, 16, 32), tuple(seconds)))
        adaptive.common = draw.uniform(0.05, 0.95)
        requests = [Request([1], SamplingParams()) for _ in range(draw.randint(1, 5))]
        for request in requests[draw.randint(0, 1) :]:
            adaptive.rates[request] = draw.choice([draw.uniform(0.02, 0.2), draw.uniform(0.5, 1)])
        rates = [adaptive.rates.get(request, adaptive.common) for request in requests]
        for _ in range(draw.choice([5, 2 * PATIENCE + 20])):
            proposed = [draw.choice([0, 1, 4, draw.randint(0, 9)]) for _ in requests]
            rows = len(requests) + draw.choice([0, 0, 0, 3, 20])
            call = f"choose of {proposed} in {rows} rows, rates {rates}, seconds {seconds}"
            seen.append({"call": call, "lengths": adaptive.choose(requests, proposed, rows)})
    return seen


class Pairs(ByteTokenizer):
    """Bytes, and tokens of several. Ids from 256 on: the end, and WORDS."""

    eos_id: int | None = 256

    def decode_bytes(self, ids: Any) -> bytes:
        words = dict(enumerate(WORDS, 257))
        return b"".join(words.get(id) or super(Pairs, self).decode_bytes([id]) for id in ids)


WORDS = (b'":', b'", "', b"12", b"007", b"a1", b"1a", b"ab", b"aba", b'{"', b"}]", b", ", b"9,")
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["ab", "a1a"]}},
    "required": ["a"],
    "additionalProperties": False,
}


@cache
def grammars(size: int) -> grammar.Grammars:
    return grammar.Grammars(Pairs(), size, (256,))


def masks(draw: Random) -> Any:
    """Walks through grammars, by the masks that they give; some end in a parser that has failed.
    Which words say why is the submission's affair."""
    seen: list[Any] = []
    most = grammar.MOST_DIGITS
    sources = {
        "[ab1]*x": grammar.regex("[ab1]*x"),
        "digits, no other end": grammar.regex(f"a[0-9]{{{most + 8}}}b?"),
        "digits": grammar.regex("([0-9]+a?)+"),
        "an object": grammar.start(grammar.of_schema(OBJECT)),
        "an array": grammar.start(grammar.of_schema({"items": {"type": "number"}, "maxItems": 3})),
    }
    for name, source in sources.items():
        size = 257 + len(WORDS) + draw.randint(0, 8)
        form = grammar.Form(grammars(size), source)
        request, length = Request([1], SamplingParams(max_tokens=1000)), draw.randint(5, 60)
        form(request)
        row = request.row
        assert isinstance(row, grammar.FormRow)
        fails = draw.randrange(length) if draw.random() < 0.4 else length
        digits = draw.random() < 0.7
        for place in range(length):
            if place == fails:
                grown(request, 255)  # which none of them allows
            text = bytes(Pairs().decode_bytes(row.output))
            call = f"the mask of {name}, {size} ids, behind {text!r}"
            now(call)
            mask = row.mask
            assert mask is not None
            seen.append({"call": call, "mask": mask, "failed": bool(row.error)})
            ids = mask.nonzero()[:, 0].tolist()
            likely = [id for id in ids if digits and Pairs().decode_bytes([id])[:1].isdigit()]
            if not ids or (token := draw.choice(likely or ids)) == 256:
                break
            grown(request, token)
    return seen


DRIVERS = {1: n_grams, 2: accepted, 3: residuals, 4: kept, 5: chosen, 6: masks}
