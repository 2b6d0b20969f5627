"""Judge the embedded model and write its card: `python -m shared.stories.evaluate`.

Three questions, each against the grammar, which knows the right answer:
- How near is the model's cross-entropy to the floor, the entropy of the stories themselves?
- Does that hold when a story begins far beyond position 512, where training windows seldom reached?
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

import jinja2
import torch
import transformers
from tqdm import tqdm

from .. import cli
from ..errors import UserError
from . import chat_evaluation, grammar, train
from .train import END_OF_TEXT

TEMPERATURE = 0.8
TOP_P = 0.95  # common in servers; without it the tail of every distribution is sampled too
LONGEST_STORY = 600  # tokens; the grammar's longest are under 500
CARD = jinja2.Template(
    (grammar.FOLDER / "card.md.jinja").read_text(encoding="utf-8"),
    trim_blocks=True,
    keep_trailing_newline=True,
)


def predictions(model: Any, ids: list[int], start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of ids[start + 1:], given what is before it: -ln p in nats, and whether it is the
    likeliest token; each (T,)."""
    logits = model(torch.tensor([ids])).logits[0, start:-1].float()  # (T, V)
    targets = torch.tensor(ids[start + 1 :])
    nats = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return nats, logits.argmax(-1) == targets


def end_of_text(tokenizer: Any) -> int:
    return int(tokenizer.convert_tokens_to_ids(END_OF_TEXT))


def copied_tokens(tokenizer: Any, story: grammar.Story) -> tuple[list[int], list[bool]]:
    """The tokens of a story, and whether each is in a word that repeats a filling."""
    encoded = tokenizer(story.text, return_offsets_mapping=True)
    return encoded.input_ids, [story.copied(*place) for place in encoded.offset_mapping]


def held_out(model: Any, tokenizer: Any, count: int) -> dict[str, Any]:
    """Model and floor on the same `count` unseen stories, with an end-of-text on both sides."""
    end = end_of_text(tokenizer)
    nats, floor, tokens, copied, right = 0.0, 0.0, 0, 0, 0
    stories = itertools.islice(grammar.stories("held out"), count)
    for story in tqdm(stories, total=count, unit="story", desc="held out"):
        ids, copies = copied_tokens(tokenizer, story)
        losses, likeliest = predictions(model, [end, *ids, end])
        nats += float(losses.sum())
        floor -= story.log_probability
        tokens += len(ids) + 1
        copied += sum(copies)
        right += int(likeliest[:-1][torch.tensor(copies)].sum())
    return {
        "stories": count,
        "tokens": tokens,
        "cross_entropy": nats / tokens,
        "floor": floor / tokens,
        "excess": nats / floor - 1,
        "copied_tokens": copied,
        "copied_right": right / copied,
    }


def far_out(model: Any, tokenizer: Any, count: int) -> dict[str, Any]:
    """The same for stories that begin beyond position 512, with other stories before them."""
    end, supply = end_of_text(tokenizer), grammar.stories("far out")
    nats, floor, tokens = 0.0, 0.0, 0
    for _ in tqdm(range(count), unit="story", desc="far out"):
        ids = [end]
        while len(ids) <= 512:
            ids += [*tokenizer.encode(next(supply).text), end]
        story = next(supply)
        whole = [*ids, *tokenizer.encode(story.text), end]
        if len(whole) > model.config.max_position_embeddings:
            continue
        nats += float(predictions(model, whole, start=len(ids) - 1)[0].sum())
        floor -= story.log_probability
        tokens += len(whole) - len(ids)
    return {
        "tokens": tokens,
        "cross_entropy": nats / tokens,
        "floor": floor / tokens,
        "excess": nats / floor - 1,
    }


def beyond(model: Any, tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """Cross-entropy by position over `count` texts of 2,048 tokens; training ended at 1,024."""
    end, supply = end_of_text(tokenizer), grammar.stories("beyond")
    nats = torch.zeros(2048)
    for _ in tqdm(range(count), unit="text", desc="beyond"):
        ids = [end]
        while len(ids) <= len(nats):
            ids += [*tokenizer.encode(next(supply).text), end]
        nats += predictions(model, ids[: len(nats) + 1])[0] / count
    edges = (512, 1024, 1152, 1280, 1536, 2048)
    return [
        {"from": first, "to": last, "cross_entropy": float(nats[first:last].mean())}
        for first, last in itertools.pairwise(edges)
    ]


def sampled(
    model: Any, tokenizer: Any, count: int, top_p: float, batch: int = 50
) -> dict[str, Any]:
    """Sample `count` stories, and count those that the grammar can read. Keeps three that it cannot
    read."""
    torch.manual_seed(0)
    end = end_of_text(tokenizer)
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
            eos_token_id=end,
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


def runs_of(training: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The runs that made a model, oldest first; each went on from the one before."""
    return [] if training is None else [*runs_of(training.get("before")), training]


def write_card(
    folder: Path, evaluation: dict[str, Any], training: dict[str, Any], config: Any
) -> None:
    """Write README.md of the checkpoint folder, from the two JSON files and the grammar."""
    source = grammar.load()
    beats = [beat for plot in source.plots for beat in plot.before + plot.after]
    beats += [source.openings, source.habits, source.interludes, source.endings]
    text = CARD.render(
        evaluation,
        config=config,
        training=training,
        runs=runs_of(training),
        source=source,
        variants=sum(map(len, beats)),
        bytes=(folder / "model.safetensors").stat().st_size,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = cli.Parser(
        "shared.stories.evaluate",
        "Judges a trained story model and writes its card: about two minutes.",
        "  python -m shared.stories.evaluate\n  python -m shared.stories.evaluate --folder "
        "my-model --stories 100",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--chat", action="store_true", help="judge stories-chat; default: stories, a GPT-2"
    )
    kind.add_argument("--draft", action="store_true", help="judge stories-draft")
    parser.add_argument(
        "--folder", type=Path, help="the checkpoint; default: the embedded one of its kind"
    )
    parser.add_argument(
        "--stories", type=cli.whole_number(10, 100_000), default=1000, help="held-out stories"
    )
    options = parser.parse_args(argv)
    recipe = train.Chat if options.chat else train.Draft if options.draft else train.Stories
    folder = options.folder or recipe.folder
    if not (folder / "training.json").exists():
        raise UserError(
            f"{folder} has no training.json: train a model there with python -m "
            "shared.stories.train."
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    started = time.perf_counter()
    with torch.inference_mode():
        evaluation: dict[str, Any] = {
            "entropy": entropy_facts(tokenizer),
            "held_out": held_out(model, tokenizer, options.stories),
            "far_out": far_out(model, tokenizer, options.stories // 10),
            "sampled": sampled(model, tokenizer, 200, top_p=1.0),
            "sampled_top_p": sampled(model, tokenizer, 200, top_p=TOP_P),
        }
        if model.config.model_type == "llama":
            evaluation["chat"] = chat_evaluation.judge(model, tokenizer, 200, TEMPERATURE, TOP_P)
            evaluation["beyond"] = beyond(model, tokenizer, 20)
    evaluation["seconds"] = round(time.perf_counter() - started, 1)
    (folder / "evaluation.json").write_text(
        json.dumps(evaluation, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    write_card(folder, evaluation, training, model.config)
    held, drawn = evaluation["held_out"], evaluation["sampled"]
    loss, floor = held["cross_entropy"], held["floor"]
    print(
        f"{loss:.4f} nats a token, {held['excess']:.1%} above the floor of {floor:.4f} (perplexity "
        f"{math.exp(loss):.3f}); {drawn['straight']} of {drawn['stories']} stories straight"
    )


if __name__ == "__main__":
    cli.run(main)
