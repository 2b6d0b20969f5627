"""Measures what drafts buy and cost: `python -m stage11_speculative.benchmark`.

The time of a pass by its rows, from which everything else is predicted; drafts of a known quality,
by an oracle that is wrong as often as its dial says; repeated prompts; drafts in other formats of
the weights; a small draft model. And what answers in a given form cost and save. Every answer is
compared with plain decode's, token by token.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, product
from string import ascii_letters, digits
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from shared import charts, cli, measure, models
from shared.bench import kit, rows
from shared.bench.claims import Claim, closing
from shared.bench.kit import Case, Group, Subject
from shared.bench.rows import Results, Row
from shared.conversion import convert
from shared.errors import UserError
from shared.models import EMBEDDED
from shared.tokenizer import Tokenizer, load_tokenizer
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request
from stage09_kernels.engine import make as make_plain
from stage10_quantization.convert import Quantize

from . import grammar
from .draft_model import first_layers
from .engine import with_draft_model, with_drafts
from .proposers import NGram, Recorded
from .suffix import Suffix
from .switch import Measured

PLAIN, FIXED, ADAPTIVE = "plain", "fixed", "adaptive"
TRAINED, REAL = "stories-draft", "smollm2"
FULL = kit.plan(
    models=("gpt2", "stories"), dtypes=("float32",), repeats=3,
    drafts=4, alphas=(0.7, 0.0), rows=(1, 4, 32), passes=(1, 2, 4, 8, 16, 32, 64, 160),
    lengths=(16, 32), long=(32, 64),  # of a prompt and its answer
    again=(1, 4), formats=("float32", "bfloat16", "int8", "int4"),
    masked=32, forced=(1, 4),  # requests in a form
)  # fmt: skip
FEW = {"rows": (1, 32), "alphas": (0.7,), "passes": (1, 5, 32, 160), "formats": ("float32", "int8")}


def expected(alpha: float, count: int) -> float:
    """Tokens of a pass with `count` drafts, each accepted with the probability alpha: the sum of
    alpha^0 to alpha^count."""
    return sum(alpha**place for place in range(count + 1))


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a pass by its rows: measured for `rows`, and on the line between two of them."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, rows: int) -> float:
        return float(np.interp(rows, self.rows, self.seconds))


def measure_passes(engine: Any, rows: Sequence[int]) -> PassTimes:
    """Times of decode passes, a row a block. Longer passes never count as faster than shorter ones,
    which would be noise. Each round runs all sizes once, so that a program that takes the processor
    for a moment slows no size in all rounds."""
    shares = [([block], 0, 1) for block in range(max(rows))]
    runs = [partial(engine.runner.run, [0] * n, shares[:n], list(range(n))) for n in rows]
    rounds, until = list[list[float]](), time.perf_counter() + 0.1
    while len(rounds) < 4 or time.perf_counter() < until:
        rounds.append(list(map(measure.seconds, runs)))
    best = accumulate(map(min, zip(*rounds[1:], strict=True)), max)
    return PassTimes(tuple(rows), tuple(best))


def engine_of(model: Any, sequences: int) -> Any:
    """Plain decode; engines with drafts are made around its parts, so weights are there once."""
    config, options = model.config, {"prefix_caching": False, "insist": True, "release": True}
    contexts = max(2, -(-sequences * 192 // config.n_positions))
    return make_plain(model, contexts, max_sequences=sequences, token_budget=1024, **options)


def fresh(subject: Subject) -> Any:
    """A model that its engine may consume."""
    return models.load_model(subject.shape, dtype=subject.dtype)


def answered(engine: Any, prompts: Any, count: int, form: Any = None) -> list[list[int]]:
    """Answers of at most `count` tokens, in a form if there is one."""
    params = kit.greedy(count) if form is None else SamplingParams(max_tokens=count, temperature=0)
    requests = [Request(prompt, params) for prompt in prompts]
    for request in requests:
        if form is not None:
            form_of(engine, form)(request)
        engine.add(request)
    for _ in engine.run():
        pass
    return [request.output.token_ids for request in requests]


def compare(
    engines: Mapping[str, Any], prompts: Any, count: int, repeats: int, form: Any = None
) -> Group:
    """Seconds of each engine in turn, and passes, of which the last is kept. Raises AssertionError
    for a token that is not plain decode's."""
    answers: dict[str, list[list[int]]] = {}
    passes: dict[str, int] = {}

    def run(name: str) -> None:
        engines[name].steps.clear()  # which the engines may share
        answers[name] = answered(engines[name], prompts, count, form)
        passes[name] = len(engines[name].steps)

    seconds = measure.alternate({name: partial(run, name) for name in engines}, repeats)
    if any(tokens != answers[PLAIN] for tokens in answers.values()):
        raise AssertionError("an answer differs from plain decode's")
    counts = {
        name: engine.scheduler.draft_counts for name, engine in engines.items() if name != PLAIN
    }
    accepted = {name: c.accepted / max(1, c.proposed) for name, c in counts.items()}
    drafts = {name: c.proposed for name, c in counts.items()}
    return {"seconds": seconds, "passes": passes, "accepted": accepted, "drafts": drafts}


def passes(subject: Subject, plan: Any) -> Iterator[Group]:
    """The time of a decode pass by its rows, as the engine measures it when it starts."""
    engine = engine_of(fresh(subject), max(plan.passes))
    many = [measure_passes(engine, plan.passes) for _ in range(plan.repeats)]
    for place, count in enumerate(plan.passes):
        yield {"count": count, "seconds": {PLAIN: [times.seconds[place] for times in many]}}


def oracle(subject: Subject, plan: Any) -> Iterator[Group]:
    """Drafts of a known quality: fixed lengths, and lengths that the engine chooses."""
    prompt, answer = plan.lengths
    plain = engine_of(fresh(subject), max(plan.rows))
    prompts = subject.prompts([prompt] * max(plan.rows))
    outputs = plain.generate(prompts, kit.greedy(answer))
    proof = subject.prove(outputs[:4])
    known = {tuple(output.prompt_ids): output.token_ids for output in outputs}
    for alpha, count in product(plan.alphas, plan.rows):
        dial = partial(Recorded, known, alpha, subject.config.vocab_size)
        engines = {
            PLAIN: plain,
            FIXED: with_drafts(plain, dial(), plan.drafts),
            ADAPTIVE: with_drafts(plain, dial(), plan.drafts, Measured()),
        }
        group = compare(engines, prompts[:count], answer, plan.repeats)
        yield {"alpha": alpha, "count": count, "proof": {PLAIN: proof}, **group}


def again(subject: Subject, plan: Any) -> Iterator[Group]:
    """Prompts that were answered before: drafts from past answers, and from the request alone."""
    prompt, answer = plan.long
    plain = engine_of(fresh(subject), max(plan.again))
    prompts = subject.prompts([prompt] * max(plan.again))
    for count in plan.again:
        engines = {
            PLAIN: plain,
            "n-gram": with_drafts(plain, NGram(), 2 * plan.drafts, Measured()),
            "suffix": with_drafts(plain, Suffix(), 2 * plan.drafts, Measured()),
        }
        yield {"count": count, **compare(engines, prompts[:count], answer, plan.repeats)}


def formats(subject: Subject, plan: Any) -> Iterator[Group]:
    """One request, with weights in fewer bytes: a row more costs more of a shorter step."""
    prompt, answer = plan.lengths
    prompts = subject.prompts([prompt])
    for weights in plan.formats:
        dtype = torch.bfloat16 if weights == "bfloat16" else torch.float32
        model = models.load_model(subject.shape, dtype=dtype)
        if weights.startswith("int"):
            convert(model, Quantize(weights), {})
        plain = engine_of(model, 2)
        (output,) = plain.generate(prompts, kit.greedy(answer))
        dial = Recorded(
            {tuple(prompts[0]): output.token_ids}, max(plan.alphas), subject.config.vocab_size
        )
        engines = {PLAIN: plain, FIXED: with_drafts(plain, dial, plan.drafts)}
        yield {"weights": weights, **compare(engines, prompts, answer, plan.repeats)}


def draft(subject: Subject, plan: Any) -> Iterator[Group]:
    """Draft models of a story, each with a cache of its own: one that was trained for it, and the
    target's own first layers. All of them are the target itself: every draft is right, and nothing
    can be gained."""
    subject, (_, answer) = Subject(kit.shape("stories"), subject.dtype), plan.long
    opening = Tokenizer.from_folder(EMBEDDED["stories"]).encode("Once upon a time")
    plain = engine_of(fresh(subject), 2)
    whole = subject.config.n_layer
    drafters = {TRAINED: models.load_model(kit.shape(TRAINED), dtype=subject.dtype)}
    for layers in (1, whole // 2, whole):
        drafters[kit.counted(layers, "layer")] = first_layers(fresh(subject), layers)
    for name, model in drafters.items():
        engines = {PLAIN: plain, FIXED: with_draft_model(plain, model, plan.drafts)}
        about = {"model": "stories", "drafter": name}
        yield about | compare(engines, [opening], answer, plan.repeats)


def exits(subject: Subject, plan: Any) -> Iterator[Group]:
    """Early exit: SmolLM2 in 8 bits, drafted for by its own layers in 4, the first ones or all."""
    try:
        shape = models.load(REAL, weights="float32")
    except UserError as error:  # its package is not installed
        tqdm.write(f"{REAL} is left out: {error}", file=sys.stderr)
        return

    def converted(weights: str, layers: int | None = None) -> Any:
        model = models.load_model(shape, dtype=torch.float32)
        model = model if layers is None else first_layers(model, layers)
        convert(model, Quantize(weights), {})
        return model

    _, answer = plan.long
    question = load_tokenizer(shape.folder).encode("The first thing that a traveller needs is")
    plain, whole = engine_of(converted("int8-g32"), 2), shape.config.n_layer
    for layers in (whole // 4, whole // 2, whole):
        engine = with_draft_model(plain, converted("int4", layers), plan.drafts)
        engines = {PLAIN: plain, FIXED: engine}
        about = {"model": REAL, "weights": "int8-g32", "drafter": f"{layers} layers in int4"}
        yield about | compare(engines, [question], answer, plan.repeats)


# ---- forms --------------------------------------------------------------------------------------

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colour": {"enum": ["red", "green", "blue"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "hungry": {"type": "boolean"},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["name", "colour", "age", "hungry", "friends"],
    "additionalProperties": False,
}
WORDS = ["name", "colour", "red", "green", "blue", "age", "hungry", "friends", "true", "false"]


class Pieces:
    """A vocabulary as large as GPT-2's, which needs no file: bytes, signs of JSON in threes, words,
    and pieces of one to three letters or digits, behind a space or not."""

    eos_id: int | None

    def __init__(self, size: int) -> None:
        signs, letters = '{}[]":, ', ascii_letters + digits
        pieces = [
            *WORDS,
            *map("".join, product(signs, repeat=2)),
            *map("".join, product(signs, repeat=3)),
        ]
        pieces += [space + a + b for a, b in product(letters, repeat=2) for space in ("", " ")]
        pieces += [a + b + c for a, b, c in product(letters[:36], repeat=3)]
        self.tokens = [bytes([byte]) for byte in range(256)]
        self.tokens += [piece.encode() for piece in dict.fromkeys(pieces)][: size - 257] + [b""]
        self.vocab_size, self.eos_id = size, size - 1
        self.ids = {token: id for id, token in enumerate(self.tokens)}

    def encode(self, text: str) -> list[int]:
        """The longest token each time."""
        data, ids = text.encode(), list[int]()
        while data:
            size = next(size for size in range(8, 0, -1) if data[:size] in self.ids)
            ids.append(self.ids[data[:size]])
            data = data[size:]
        return ids

    def decode_bytes(self, ids: Any) -> bytes:
        return b"".join(self.tokens[id] for id in ids)

    def decode(self, ids: Any) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")


@cache
def grammars_of(size: int) -> grammar.Grammars:
    return grammar.Grammars(Pieces(size), size, (size - 1,))


def form_of(engine: Any, schema: Mapping[str, Any]) -> grammar.Form:
    if not isinstance(engine.sample_tokens, grammar.Masks):
        grammar.Masks(engine)
    grammars = grammars_of(engine.config.vocab_size)
    return grammar.Form(
        engine.sample_tokens, grammars, grammar.start(grammar.of_schema({**schema}))
    )


def forced(subject: Subject, plan: Any) -> Iterator[Group]:
    """Answers in JSON: drafts of what the grammar forces, and of nothing else."""
    prompt, answer = plan.long
    plain = engine_of(fresh(subject), max(plan.forced))
    prompts = subject.prompts([prompt] * max(plan.forced))
    for count in plan.forced:
        nothing = Recorded({}, 1.0, subject.config.vocab_size)
        engines = {PLAIN: plain, FIXED: with_drafts(plain, nothing, 2 * plan.drafts)}
        engines[ADAPTIVE] = with_drafts(plain, nothing, 2 * plan.drafts, Measured())
        yield {"count": count, **compare(engines, prompts[:count], answer, plan.repeats, PERSON)}


# ---- what is predicted --------------------------------------------------------------------------


def times_of(results: Results) -> PassTimes:
    groups = results.groups("passes")
    medians = tuple(row.of(PLAIN).median for row in groups)
    return PassTimes(tuple(row["count"] for row in groups), medians)


def predicted(results: Results, alpha: float, count: int, drafts: int) -> float:
    """The gain by the formula, from the measured time of a pass."""
    times = times_of(results)
    return expected(alpha, drafts) * times(count) / times(count * (1 + drafts))


def at(results: Results, alpha: float, count: int) -> list[Row]:
    return results.groups("oracle", alpha=alpha, count=count)


def claims(results: Results) -> Iterator[Claim]:
    """What the lesson predicts by hand, and what the formula predicts from measured passes."""
    drafts = FULL.drafts
    hand = {1: 2.77, 4: 1.4, 32: 0.55}
    for count in hand:
        for row in at(results, 0.7, count):
            what = f"four drafts over none, {kit.counted(count, 'row')}"
            formula = predicted(results, 0.7, count, drafts)
            why = "the passes before the answers' ends have fewer drafts, and sampling its cost"
            yield Claim(what, formula, row.gain(PLAIN, FIXED), "x", why, hand[count])
    for count in FULL.rows[-1:]:  # the lesson has no room for all
        for row in at(results, 0.0, count):
            what = f"adaptive over none, all drafts wrong, {kit.counted(count, 'row')}"
            gain = row.gain(PLAIN, ADAPTIVE)
            yield Claim(what, 1.0, gain, "x", "a request tries again now and then", 1.0)
    for row in results.groups("again", model="gpt2", count=1):
        steps = row["passes"]
        why = f"nearly every draft is right: {steps['suffix']} passes, and {steps[PLAIN]} without"
        yield Claim("a prompt again, from past answers", 3.0, row.gain(PLAIN, "suffix"), "x", why)
    for row in results.groups("forced", count=1):
        why = "names and numbers are short, so the grammar forces more of the text than was guessed"
        yield Claim("JSON by forced tokens, 1 row", 1.3, row.gain(PLAIN, FIXED), "x", why, 1.3)
    for row in results.groups("draft"):
        if row.group.get("drafter") != TRAINED:
            continue
        steps, right = row["passes"], f"{row['accepted'][FIXED]:.0%} of its drafts are right"
        why = f"{right}: {steps[FIXED]} passes, and {steps[PLAIN]} without"
        yield Claim("stories-draft drafts", 0.8, row.gain(PLAIN, FIXED), "x", why, 0.8)


def off(row: Row) -> str:
    if not row["alpha"]:
        return "-"
    formula = predicted(row.results, row["alpha"], row["count"], FULL.drafts)
    return f"{formula:.2f}x ({row.gain(PLAIN, FIXED) / formula - 1:+.0%})"


def share(variant: str) -> Any:
    return lambda row: f"{row['accepted'][variant]:.0%}"


COLUMNS: dict[str, rows.Column] = {
    "rows": "count",
    "a row, us": lambda row: f"{1e6 * row.of(PLAIN).median / row['count']:,.0f}",
    "over one row": lambda row: f"{row.of(PLAIN).median / times_of(row.results).seconds[0]:.2f}x",
    "alpha": "alpha:.1f",
    "four drafts": rows.gain(PLAIN, variant=FIXED),
    "by the formula (off by)": off,
    "as many as pay": rows.gain(PLAIN, variant=ADAPTIVE),
    "passes": lambda row: " / ".join(str(count) for count in row["passes"].values()),
    "vocabulary": "vocabulary:,",
    "n-gram": rows.gain(PLAIN, variant="n-gram"),
    "suffix": rows.gain(PLAIN, variant="suffix"),
    "accepted, n-gram": share("n-gram"),
    "accepted, suffix": share("suffix"),
    "accepted": share(FIXED),
    "draft model": lambda row: row.group.get("drafter") or kit.counted(row["layers"], "layer"),
}
TABLES = rows.tables(
    COLUMNS,
    f"""
    times < passes: rows | {PLAIN}, ms | a row, us | over one row
    oracle: alpha | rows | {PLAIN}, ms | four drafts | by the formula (off by)
      | as many as pay
    again: model | rows | {PLAIN}, ms | n-gram | suffix | passes
    formats: weights | {PLAIN}, ms | four drafts | passes
    forced: rows | {PLAIN}, ms | four drafts | as many as pay | accepted | passes
    draft: draft model | {PLAIN}, ms | four drafts | accepted | passes
    exits: draft model | {PLAIN}, ms | four drafts | accepted | passes
    """,
    claims=closing(claims),
)


def oracle_chart(results: Results) -> Figure:
    groups = results.groups("oracle", alpha=0.7)
    return charts.bars(
        "Drafts are free while rows are: 7 of 10 right, by the number of requests",
        "tok/s over plain decode's (GPT-2 124M shape, float32)",
        [kit.counted(row["count"], "row") for row in groups],
        {
            "four drafts": [row.gain(PLAIN, FIXED) for row in groups],
            "as many as pay": [row.gain(PLAIN, ADAPTIVE) for row in groups],
        },
    )


def headline(results: Results) -> str:
    (row,) = at(results, 0.7, 1)
    (crowd,) = at(results, 0.7, max(FULL.rows))
    return (
        f"four drafts, 7 of 10 right: {row.gain(PLAIN, FIXED):.1f}x plain decode with one request, "
        f"{crowd.gain(PLAIN, FIXED):.2f}x with {crowd['count']} (GPT-2 124M shape, float32)"
    )


CHARTS = {"oracle": oracle_chart}
WORK = kit.cases(
    Case(passes),
    Case(oracle),
    Case(again, models=None),
    Case(formats),
    Case(draft),
    Case(exits),
    Case(forced),
)
BENCHMARK = kit.Benchmark("stage11_speculative", __doc__, FULL, WORK, TABLES, CHARTS, headline, FEW)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
