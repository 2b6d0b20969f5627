"""Judge the embedded model and write its card: `python -m shared.stories.evaluate`.

Three questions, each against the grammar, which knows the right answer:
- How near is the model's cross-entropy to the floor, the entropy of the stories themselves?
- Does it hold when a story begins far behind position 512, where training windows seldom reached?
- Of 200 sampled stories, in how many does everything stay straight? A story counts only if the
  grammar could have written every character of it: then each name, pronoun and thing is the one it
  was in the first line.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from .. import cli
from ..errors import UserError
from . import grammar

TEMPERATURE = 0.8
TOP_P = 0.95  # common in servers; without it the tail of every distribution is sampled too
LONGEST_STORY = 600  # tokens; the grammar's longest are under 500


def text_nats(model: Any, ids: list[int], start: int = 0) -> float:
    """-ln p of ids[start + 1:] given what stands before them, in nats."""
    logits = model(torch.tensor([ids])).logits[0, start:-1].float()  # (T, V)
    return float(
        torch.nn.functional.cross_entropy(logits, torch.tensor(ids[start + 1 :]), reduction="sum")
    )


def held_out(model: Any, tokenizer: Any, count: int) -> dict[str, Any]:
    """Model and floor on the same `count` unseen stories, with an end-of-text on both sides."""
    end = tokenizer.eos_token_id
    nats, floor, tokens = 0.0, 0.0, 0
    stories = itertools.islice(grammar.stories("held out"), count)
    for story in tqdm(stories, total=count, unit="story", desc="held out"):
        ids = [end, *tokenizer.encode(story.text), end]
        nats += text_nats(model, ids)
        floor -= story.log_probability
        tokens += len(ids) - 1
    return {
        "stories": count,
        "tokens": tokens,
        "cross_entropy": nats / tokens,
        "floor": floor / tokens,
        "excess": nats / floor - 1,
    }


def far_out(model: Any, tokenizer: Any, count: int) -> dict[str, Any]:
    """The same for stories that begin behind position 512, with other stories before them."""
    end, supply = tokenizer.eos_token_id, grammar.stories("far out")
    nats, floor, tokens = 0.0, 0.0, 0
    for _ in tqdm(range(count), unit="story", desc="far out"):
        ids = [end]
        while len(ids) <= 512:
            ids += [*tokenizer.encode(next(supply).text), end]
        story = next(supply)
        whole = [*ids, *tokenizer.encode(story.text), end]
        if len(whole) > model.config.n_positions:
            continue
        nats += text_nats(model, whole, start=len(ids) - 1)
        floor -= story.log_probability
        tokens += len(whole) - len(ids)
    return {
        "tokens": tokens,
        "cross_entropy": nats / tokens,
        "floor": floor / tokens,
        "excess": nats / floor - 1,
    }


def sampled(
    model: Any, tokenizer: Any, count: int, top_p: float, batch: int = 50
) -> dict[str, Any]:
    """Sample `count` stories, and count those that the grammar can read. Keeps three others."""
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    texts: list[str] = []
    for _ in tqdm(range(count // batch), unit="batch", desc="sampling"):
        prompt = torch.full((batch, 1), end)
        rows = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            top_p=top_p,
            max_new_tokens=LONGEST_STORY,
            pad_token_id=end,
        )
        texts += [tokenizer.decode(row[1:], skip_special_tokens=True) for row in rows]
    broken = [text for text in texts if not grammar.load().read(text)]
    return {
        "stories": len(texts),
        "temperature": TEMPERATURE,
        "top_p": top_p,
        "straight": len(texts) - len(broken),
        "different": len(set(texts)),
        "broken": [
            {"text": text, "readable_until": text[: grammar.load().readable_until(text)][-60:]}
            for text in broken[:3]
        ],
        "example": texts[0],
    }


def entropy_facts(tokenizer: Any, count: int = 20_000) -> dict[str, Any]:
    """The grammar's entropy: nats a story, its standard error, and nats a token."""
    nats, error = grammar.entropy(count)
    texts = [story.text for story in itertools.islice(grammar.stories("entropy"), 2000)]
    tokens = sum(len(tokenizer.encode(text)) + 1 for text in texts) / len(
        texts
    )  # and the token that ends the story
    return {
        "stories": count,
        "nats": nats,
        "standard_error": error,
        "tokens_per_story": tokens,
        "nats_per_token": nats / tokens,
    }


CARD = """---
license: mit
language: en
library_name: transformers
tags: [gpt2, stories, education]
---

# stories

A GPT-2 small enough to travel with its repository: {layers} layers, {width} wide, {heads} heads,
{vocabulary:,} tokens, 1,024 positions, {parameters:,} parameters, {megabytes:.1f} MB in float32. It
writes children's stories, which it learnt from a grammar of {plots} plots, {variants} sentence
variants and {words} words that fill their slots (`shared/stories`).

| what | figure |
|---|--:|
| entropy of the grammar | \
{nats:.2f} nats a story (standard error {error:.2f}), {per_token:.4f} nats a token |
| cross-entropy on {held} held-out stories ({held_tokens:,} tokens) | {cross:.4f} nats a token |
| floor on the same stories | {floor:.4f} nats a token |
| above the floor | {excess:.1%} |
| the same for stories that begin behind position 512 | \
{far_cross:.4f}, {far_excess:.1%} above their floor |
| sampled at temperature {temperature}, straight from first to last line | \
{straight} of {sampled} stories |
| the same with top-p {top_p} | {straight_top_p} of {sampled} stories |
| trained on | {train_tokens:,} tokens, every story new, {steps:,} steps |
| training time | {minutes:.0f} minutes, {threads} threads |

**How the floor is computed.** Every choice of the grammar is uniform and independent, so the
probability of a story is a product of 1/n over its choices, and its information is -ln of that. The
entropy is the mean of this over {draws:,} stories. It is the entropy of the text itself, not only a
bound, because a text has exactly one derivation (the grammar reads its own stories back; a test
counts the derivations). No model can do better on average. The held-out figures compare model and
grammar on the same stories, including the token that ends each.

**How straightness is counted.** The grammar reads each sampled story. It counts only if the grammar
could have written every character of it: one wrong name, pronoun, thing or sentence anywhere, and
it does not.

**How it was trained.** {runs} The grammar may have changed between two runs; all figures above are
for the grammar as it is.

**Train it again:** `python -m shared.stories.train`, then `python -m shared.stories.evaluate`. The
exact weights depend on torch, transformers, the number of threads and the kind of processor, and so
does how soon the model learns to copy.

A sampled story, at temperature {temperature}:

> {example}

It is a model to test inference engines with, and knows only its {plots} plots.
"""


def runs_of(training: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The run that made a model, and those that it went on from, the first one first."""
    return [] if training is None else [*runs_of(training.get("before")), training]


def write_card(
    folder: Path, evaluation: dict[str, Any], training: dict[str, Any], config: Any
) -> None:
    """Write README.md of the checkpoint folder, from the two JSON files and the grammar."""
    source = grammar.load()
    weights = folder / "model.safetensors"
    beats = [beat for plot in source.plots for beat in plot.before + plot.after]
    variants = sum(map(len, beats)) + sum(
        map(len, (source.openings, source.habits, source.interludes, source.endings))
    )
    runs = runs_of(training)
    commands = [
        f"Run {number}: `{run['command']}`, {run['tokens']:,} tokens in {run['seconds'] / 60:.0f} "
        f"minutes on {run['processor']}, "
        f"with torch {run['torch']} and transformers {run['transformers']}."
        for number, run in enumerate(runs, 1)
    ]
    held, far, drawn, floor = (
        evaluation[name] for name in ("held_out", "far_out", "sampled", "entropy")
    )
    text = CARD.format(
        layers=config.n_layer,
        width=config.n_embd,
        heads=config.n_head,
        vocabulary=config.vocab_size,
        parameters=training["parameters"],
        megabytes=weights.stat().st_size / 1e6,
        plots=len(source.plots),
        variants=variants,
        words=sum(map(len, source.words.values())),
        nats=floor["nats"],
        error=floor["standard_error"],
        per_token=floor["nats_per_token"],
        draws=floor["stories"],
        held=held["stories"],
        held_tokens=held["tokens"],
        cross=held["cross_entropy"],
        floor=held["floor"],
        excess=held["excess"],
        far_cross=far["cross_entropy"],
        far_excess=far["excess"],
        temperature=drawn["temperature"],
        straight=drawn["straight"],
        top_p=TOP_P,
        straight_top_p=evaluation["sampled_top_p"]["straight"],
        sampled=drawn["stories"],
        train_tokens=sum(run["tokens"] for run in runs),
        steps=sum(run["steps"] for run in runs),
        runs=" ".join(commands),
        minutes=sum(run["seconds"] for run in runs) / 60,
        threads=training["threads"],
        example=drawn["example"].replace("\n", "\n>\n> "),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = cli.Parser(
        "shared.stories.evaluate",
        "Judges a trained story model and writes its card: about two minutes.",
        "  python -m shared.stories.evaluate\n  python -m shared.stories.evaluate --folder "
        "my-model --stories 100",
    )
    folder = grammar.FOLDER / "model"
    parser.add_argument(
        "--folder", type=Path, default=folder, help="the checkpoint; default: the embedded one"
    )
    parser.add_argument(
        "--stories", type=cli.whole_number(10, 100_000), default=1000, help="held-out stories"
    )
    options = parser.parse_args(argv)
    if not (options.folder / "training.json").exists():
        raise UserError(
            f"{options.folder} has no training.json: train a model there with python -m "
            "shared.stories.train."
        )
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    model = AutoModelForCausalLM.from_pretrained(options.folder).eval()
    started = time.perf_counter()
    with torch.inference_mode():
        evaluation: dict[str, Any] = {
            "entropy": entropy_facts(tokenizer),
            "held_out": held_out(model, tokenizer, options.stories),
            "far_out": far_out(model, tokenizer, options.stories // 10),
            "sampled": sampled(model, tokenizer, 200, top_p=1.0),
            "sampled_top_p": sampled(model, tokenizer, 200, top_p=TOP_P),
        }
    evaluation["seconds"] = round(time.perf_counter() - started, 1)
    (options.folder / "evaluation.json").write_text(
        json.dumps(evaluation, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    training = json.loads((options.folder / "training.json").read_text(encoding="utf-8"))
    write_card(options.folder, evaluation, training, model.config)
    held, drawn = evaluation["held_out"], evaluation["sampled"]
    loss, floor = held["cross_entropy"], held["floor"]
    print(
        f"{loss:.4f} nats a token, {held['excess']:.1%} above the floor of {floor:.4f} (perplexity "
        f"{math.exp(loss):.3f}); {drawn['straight']} of {drawn['stories']} stories straight"
    )


if __name__ == "__main__":
    cli.run(main)
