"""Judge the embedded model and write its card: `python -m shared.stories.evaluate`.

Two questions, each against the grammar, which knows the right answer:
- How near is the model's cross-entropy to the floor, the entropy of the stories themselves?
- Of 200 sampled stories, in how many does everything stay straight? A story counts only if the
  grammar could have written every character of it: then each name, pronoun and thing is the one it
  was in the first line.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jinja2
import torch
import transformers
from tqdm import tqdm

from .. import cli
from . import grammar
from .train import VOCABULARY, recipe_parser

TEMPERATURE = 0.8
TOP_P = 0.95  # common in servers; without it the tail of every distribution is sampled too
HELD_OUT, SAMPLED = 1000, 200  # stories
END = VOCABULARY - 1  # of a text
LONGEST_STORY = 600  # tokens; the grammar's longest are under 500
TEMPLATE = (grammar.FOLDER / "card.md.jinja").read_text(encoding="utf-8")
CARD = jinja2.Template(TEMPLATE, trim_blocks=True, keep_trailing_newline=True)


def held_out(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Model and floor on the same unseen stories, with an end-of-text on both sides."""
    nats, floor, tokens, copied, right = 0.0, 0.0, 0, 0, 0
    stories = itertools.islice(grammar.stories("held out"), HELD_OUT)
    for story in tqdm(stories, total=HELD_OUT, unit="story", desc="held out"):
        encoded = tokenizer(story.text, return_offsets_mapping=True)
        ids, places = encoded.input_ids, encoded.offset_mapping
        copies = [story.copied(*place) for place in places]  # in a word that repeats a filling
        targets = torch.tensor([*ids, END])  # (T,)
        logits = model(torch.tensor([[END, *ids]])).logits[0].float()  # (T, V)
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        nats += float(losses.sum())
        floor -= story.log_probability
        tokens += len(targets)
        copied += sum(copies)
        right += int((logits.argmax(-1) == targets)[:-1][torch.tensor(copies)].sum())
    return {
        "stories": HELD_OUT,
        "tokens": tokens,
        "cross_entropy": nats / tokens,
        "floor": floor / tokens,
        "excess": nats / floor - 1,
        "copied_tokens": copied,
        "copied_right": right / copied,
    }


def sampled(model: Any, tokenizer: Any, top_p: float) -> dict[str, Any]:
    """Sample stories, and count those that the grammar can read."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_return_sequences": SAMPLED, "max_new_tokens": LONGEST_STORY}
    options |= {"do_sample": True, "temperature": TEMPERATURE, "top_p": top_p, "top_k": 0}
    options |= {"attention_mask": torch.tensor([[1]]), "eos_token_id": END, "pad_token_id": END}
    rows = model.generate(torch.tensor([[END]]), **options)
    texts = [tokenizer.decode(row[1:], skip_special_tokens=True) for row in rows]
    straight = sum(bool(grammar.load().read(text)) for text in texts)
    about = {"stories": SAMPLED, "temperature": TEMPERATURE, "top_p": top_p}
    return about | {"straight": straight, "example": texts[0]}


def card(folder: Path) -> str:
    """The model card, README.md of its folder, from the JSON files there and the grammar."""
    evaluation, training = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("evaluation", "training")
    )
    source = grammar.load()
    beats = [beat for plot in source.plots for beat in plot.before + plot.after]
    beats += [source.openings, source.habits, source.interludes, source.endings]
    return CARD.render(
        evaluation,
        config=transformers.AutoConfig.from_pretrained(folder),
        training=training,
        runs=[run for run in (training.get("before"), training) if run],
        source=source,
        variants=sum(map(len, beats)),
        bytes=(folder / "model.safetensors").stat().st_size,
    )


def main(argv: list[str] | None = None) -> None:
    about = "Judges a trained story model and writes its card: about two minutes."
    folder = recipe_parser("shared.stories.evaluate", about).parse_args(argv).recipe.folder
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        evaluation: dict[str, Any] = {
            "held_out": held_out(model, tokenizer),
            "sampled": sampled(model, tokenizer, top_p=1.0),
            "sampled_top_p": sampled(model, tokenizer, top_p=TOP_P),
        }
    text = json.dumps(evaluation, indent=1, ensure_ascii=False) + "\n"
    (folder / "evaluation.json").write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(card(folder), encoding="utf-8")
    print(f"Written: {folder / 'README.md'}")


if __name__ == "__main__":
    cli.run(main)
