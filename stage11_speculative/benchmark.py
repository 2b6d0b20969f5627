"""Drafts of a known quality, by an oracle that is wrong as often as its dial says; of prompts that
were answered before; of small models. Every answer is plain decode's, whose tokens are proved."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from shared import charts, cli, kit, models
from shared.catalog import EMBEDDED
from shared.kit import Results, Row, Subject
from shared.tokenizer import Tokenizer
from stage09_kernels.engine import make as make_plain

from .draft_model import first_layers
from .engine import with_draft_model, with_drafts
from .proposers import NGram, Recorded
from .suffix import Suffix

PLAIN, FIXED = "plain", "four drafts"
TRAINED, LAYER, DRAFTS = "stories-draft", "its first layer", 4
PROMPT, ANSWER, LONG = 16, 32, 64  # tokens


def plain_of(subject: Subject, sequences: int) -> Any:
    """Plain decode; engines with drafts are made around its parts, so weights are there once."""
    model = models.load_model(subject.shape, "cpu", subject.dtype)
    contexts = max(2, -(-sequences * 192 // subject.config.n_positions))
    sizes: Any = {"max_sequences": sequences, "token_budget": 1024}
    return make_plain(model, contexts, release=True, prefix_caching=False, **sizes)


def compare(
    bench: kit.Bench, case: str, subject: Subject, engines: dict[str, Any], prompts: Any,
    answer: int, **about: Any,
) -> None:  # fmt: skip
    """The engines in turn. All tokens must be plain decode's, which are proved."""
    answers: dict[str, list[list[int]]] = {}

    def run(name: str) -> dict[str, Any]:
        (engine := engines[name]).steps.clear()  # which the engines may share
        answers[name] = [out.token_ids for out in engine.generate(prompts, kit.greedy(answer))]
        counts = getattr(engine.scheduler, "draft_counts", None)
        accepted = counts.accepted / max(1, counts.proposed) if counts else 0.0
        return {"passes": len(engine.steps), "accepted": accepted}

    def proof() -> dict[str, Any]:
        if any(tokens != answers[PLAIN] for tokens in answers.values()):
            raise AssertionError("an answer differs from plain decode's")
        return subject.prove(prompts[:4], answers[PLAIN][:4])

    ways = {name: partial(run, name) for name in engines}
    about |= {"tokens": answer * len(prompts), "rows": len(prompts)}
    bench.row(case, ways, prove=proof, **subject.about, **about)


def measure(bench: kit.Bench) -> None:
    for subject in bench.subjects(("gpt2", "float32")):
        most = 1 if bench.quick else 32
        plain, prompts = plain_of(subject, most), subject.prompts([PROMPT] * most)
        outputs = plain.generate(prompts, kit.greedy(ANSWER))
        known = {tuple(prompt): out.token_ids for prompt, out in zip(prompts, outputs, strict=True)}
        for alpha in bench.sizes(0.7, 0.0):
            for rows in bench.sizes(1, 4, 32):
                dial = Recorded(known, alpha, subject.config.vocab_size)
                engines = {PLAIN: plain, FIXED: with_drafts(plain, dial, DRAFTS)}
                compare(bench, "oracle", subject, engines, prompts[:rows], ANSWER, alpha=alpha)
        engines = {PLAIN: plain, "n-gram": with_drafts(plain, NGram(), 2 * DRAFTS)}
        engines["suffix"] = with_drafts(plain, Suffix(), 2 * DRAFTS)
        compare(bench, "again", subject, engines, subject.prompts([32], "again"), LONG)
    for subject in bench.subjects(("stories", "float32")):
        opening = Tokenizer.from_folder(EMBEDDED["stories"]).encode("Once upon a time")
        plain = plain_of(subject, 2)
        for name, shape in bench.sizes((TRAINED, models.load(TRAINED)), (LAYER, subject.shape)):
            draft = models.load_model(shape, "cpu", subject.dtype)
            draft = first_layers(draft, 1) if name == LAYER else draft
            engines = {PLAIN: plain, FIXED: with_draft_model(plain, draft, DRAFTS)}
            compare(bench, "draft", subject, engines, [opening], LONG, draft=name)


def predicted(row: Row) -> float:
    """By the formula: tokens of a pass with drafts, over what such a pass takes longer."""
    tokens = sum(row["alpha"] ** place for place in range(DRAFTS + 1))
    plain, drafted = (row.bound(1, PROMPT, row["rows"] * count) for count in (1, DRAFTS + 1))
    return tokens * plain / drafted


def tables(results: Results) -> kit.Tables:
    oracle = [
        {
            "drafts right": f"{row['alpha']:.0%}", "rows": row["rows"], "plain, ms": row.ms(PLAIN),
            "four drafts": f"{row.gain(PLAIN, FIXED):.2f}x", "predicted": f"{predicted(row):.2f}x",
        }
        for row in results.rows("oracle")
    ]  # fmt: skip
    drafts = [
        {
            "model": row["model"], "drafts from": row.get("draft", name),
            "plain, ms": row.ms(PLAIN), "gain": f"{row.gain(PLAIN, name):.2f}x",
            "drafts accepted": f"{row.median(name, 'accepted'):.0%}",
            "passes": f"{row.median(name, 'passes'):.0f} for {row.median(PLAIN, 'passes'):.0f}",
        }
        for case in ("again", "draft") for row in results.rows(case)
        for name in row["seconds"] if name != PLAIN
    ]  # fmt: skip
    return {"oracle": oracle, "drafts": drafts, "claims": claims(results)}


def claims(results: Results) -> Iterator[dict[str, str]]:
    expected = {
        1: (2.77, "five rows take longer than one, as eight do in stage 09's table"),
        4: (1.4, "20 rows are further from their limit than 4"),
        32: (0.55, "160 rows are nearer to their limit than 32"),
    }
    for row in results.rows("oracle", model="gpt2", alpha=0.7):
        rows, gain = row["rows"], row.gain(PLAIN, FIXED)
        what, (by_hand, why) = f"four drafts over none, {rows} rows", expected[rows]
        yield kit.claim(what, by_hand, predicted(row), gain, "x", why)
    for row in results.rows("oracle", model="gpt2", alpha=0.0, rows=1):
        what, why = "the same, all drafts wrong, 1 rows", "five rows take longer than one"
        yield kit.claim(what, 1.0, predicted(row), row.gain(PLAIN, FIXED), why=why)


def chart(results: Results) -> charts.Figure:
    rows = results.rows("oracle", alpha=0.7)
    figure = charts.bars(
        "Four drafts, seven of ten right: a gain for few requests",
        "times plain decode's tok/s (GPT-2 124M shape, float32)",
        ["1 request" if row["rows"] == 1 else f"{row['rows']} requests" for row in rows],
        {FIXED: [row.gain(PLAIN, FIXED) for row in rows]},
        digits=2,
    )
    figure.axes[0].axvline(1.0, color=charts.COLOURS[2], linestyle="--", linewidth=1.5)  # no gain
    return figure


def headline(results: Results) -> Iterator[str]:
    gains = {row["rows"]: row.gain(PLAIN, FIXED) for row in results.rows("oracle", alpha=0.7)}
    shown = ", ".join(f"{gain:.2f}x for {rows}" for rows, gain in gains.items())
    if gains:
        yield f"four drafts, 70 % right: {shown}"


if __name__ == "__main__":
    cli.run(partial(kit.main, "stage11_speculative", __doc__, measure, tables))
