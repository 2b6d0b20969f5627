"""Judge stories-chat: does an answer keep to its request, stay straight, and go on when asked?

The grammar reads every answer, as it reads the other model's stories. Here it also gets the hero,
the creature, the trait and the plots that the request demands: an answer counts only if the grammar
could have written all of it for this request.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from tqdm import tqdm

from . import grammar
from .conversations import KEPT, phrases, request, sequels

LONGEST_ANSWER = 600  # tokens
BATCH = 50

Messages = list[dict[str, str]]


def judge(
    model: Any, tokenizer: Any, count: int, temperature: float, top_p: float
) -> dict[str, Any]:
    """Ask for `count` stories, then for their sequels, then for the other halves of `count`
    stories."""
    rng, source = random.Random("evaluation"), grammar.load()

    def answer(chats: list[Messages], what: str) -> list[str]:
        return answers(model, tokenizer, chats, what, temperature, top_p)

    def asked(text: str, reply: str) -> Messages:
        question = rng.choice(phrases()["go on"])
        return [
            {"role": "user", "content": text},
            {"role": "assistant", "content": reply},
            {"role": "user", "content": question},
        ]

    requests = [request(rng, full=True) for _ in range(count)]
    firsts = answer([[{"role": "user", "content": wish.text}] for wish in requests], "stories")
    readings = [
        source.read(text, wish.fillings, wish.plots)
        for wish, text in zip(requests, firsts, strict=True)
    ]
    right = [at for at, stories in enumerate(readings) if stories]
    invented = [
        at for at, wish in enumerate(requests) if wish.fillings["hero"] not in source.gender
    ]

    seconds = answer([asked(requests[at].text, firsts[at]) for at in right], "going on")
    gone_on = 0
    for at, text in zip(right, seconds, strict=True):
        (story, *_) = readings[at]
        kept = {name: story.fillings[name] for name in KEPT if name in story.fillings}
        others = [plot for plot in source.plots if plot.name != story.plot]
        gone_on += bool(source.read(text, kept, others, sequels(), habits=False))

    halves = []
    for wish in requests:
        text = source.sample(rng, wish.fillings, wish.plots).text
        halves.append((wish, text[: rng.choice([i for i, c in enumerate(text) if c == " "])]))
    rests = answer([asked(wish.text, half) for wish, half in halves], "other halves")
    completed = sum(
        bool(source.read(half + rest, wish.fillings, wish.plots))
        for (wish, half), rest in zip(halves, rests, strict=True)
    )
    return {
        "requests": count,
        "temperature": temperature,
        "top_p": top_p,
        "kept": len(right),
        "invented_names": len(invented),
        "kept_invented_names": len(set(invented) & set(right)),
        "went_on": gone_on,
        "halves": count,
        "completed": completed,
        "example": {"question": requests[right[0]].text, "answer": firsts[right[0]]}
        if right
        else None,
    }


def answers(
    model: Any, tokenizer: Any, chats: list[Messages], what: str, temperature: float, top_p: float
) -> list[str]:
    """The sampled answer to each conversation."""
    torch.manual_seed(0)
    tokenizer.padding_side = "left"
    texts: list[str] = []
    for start in tqdm(range(0, len(chats), BATCH), unit="batch", desc=what):
        prompts = tokenizer.apply_chat_template(
            chats[start : start + BATCH],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        rows = model.generate(
            **prompts,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=top_p,
            max_new_tokens=LONGEST_ANSWER,
            pad_token_id=tokenizer.pad_token_id,
        )
        width = prompts["input_ids"].shape[1]
        texts += [tokenizer.decode(row[width:], skip_special_tokens=True) for row in rows]
    return texts
