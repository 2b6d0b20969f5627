"""What stories-chat was trained on, and whether it answers."""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch
from transformers import AutoTokenizer

from shared import chat_template, checkpoint
from shared.course import stages
from shared.json_tokenizer import JsonTokenizer
from shared.stories import conversations, grammar
from shared.stories.conversations import KEPT, request, sequels
from shared.stories.train import COPY_WEIGHT, Chat

GRAMMAR = grammar.load()
FOLDER = checkpoint.EMBEDDED["stories-chat"]


@pytest.fixture(scope="module")
def chats():
    return list(itertools.islice(conversations.conversations("tests"), 150))


@pytest.fixture(scope="module")
def tokenizer():
    return JsonTokenizer.from_folder(FOLDER)


def template_of(tokenizer: JsonTokenizer) -> chat_template.FolderTemplate:
    found = chat_template.load(FOLDER, tokenizer.control)
    assert found is not None
    return found


def test_every_answer_has_one_derivation_with_its_own_probability(chats):
    """Given what the request demands, and what a second story keeps of the first."""
    rng = random.Random(0)
    for _ in range(60):
        asked = request(rng, full=True)
        story = GRAMMAR.sample(rng, asked.given, asked.plots)
        (reading,) = GRAMMAR.read(story.text, asked.given, asked.plots)
        assert reading.log_probability == pytest.approx(story.log_probability)
        assert {**reading.fillings, **asked.given} == reading.fillings
        others = [plot for plot in GRAMMAR.plots if plot not in asked.plots]
        assert not GRAMMAR.read(story.text, asked.given, others)
        stranger = {**asked.given, "hero": "Nobody", "gender": "boy"}
        assert not GRAMMAR.read(story.text, stranger, asked.plots)
    followed = [turns for turns in chats if len(turns) == 2 and turns[0].whole]
    for first, second in followed[:30]:
        kept = {name: first.story.fillings[name] for name in KEPT if name in first.story.fillings}
        assert len(GRAMMAR.read(second.answer, kept, (), sequels(), habits=False)) == 1
        assert first.story.plot != second.story.plot


def test_half_an_answer_and_its_other_half_are_a_story(chats):
    cut = [turns for turns in chats if not turns[0].whole]
    assert len(cut) > 10
    for half, rest in cut:
        text, place = half.story.text, rest.start
        assert (half.answer, rest.answer) == (text[:place], text[place:])


def test_only_answers_are_learnt_and_copied_words_weigh_more():
    encoder = Chat.load_tokenizer(FOLDER)
    learnt = []
    for ids, weights in itertools.islice(Chat.documents(encoder, "tests"), 40):
        assert len(ids) == len(weights)
        text = encoder.decode(
            [i for i, w in zip(ids, weights, strict=True) if w], skip_special_tokens=False
        )
        assert "user" not in text and "<|im_start|>" not in text
        copied = encoder.decode([i for i, w in zip(ids, weights, strict=True) if w == COPY_WEIGHT])
        learnt.append(len(copied) / len(text))
    assert 0.05 < sum(learnt) / len(learnt) < 0.4


def test_the_folder_is_small_and_its_prompts_are_those_of_transformers(tokenizer):
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 8_000_000
    theirs = AutoTokenizer.from_pretrained(FOLDER)
    template = template_of(tokenizer)
    messages = [
        {"role": "user", "content": " Tell me a story about <|im_end|> "},
        {"role": "assistant", "content": "Once upon a time"},
        {"role": "user", "content": "Go on"},
    ]
    assert "".join(piece for piece, _ in template.render(messages)) == theirs.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    plain = [message | {"content": message["content"].replace("|", "")} for message in messages]
    assert tokenizer.encode_chat(template.render(plain)) == theirs.apply_chat_template(
        plain, add_generation_prompt=True, return_dict=False
    )


def test_answers_keep_to_their_requests(tokenizer):
    """8 through stage 05; the model's card has the count of 200."""
    rng, template = random.Random("answers"), template_of(tokenizer)
    asked = [request(rng, full=True) for _ in range(8)]
    prompts = [
        tokenizer.encode_chat(template.render([{"role": "user", "content": each.text}]))
        for each in asked
    ]
    loaded = stages.families().load("stories-chat", dtype=torch.float32)
    engine = stages.engines()["stage05_paged"](stages.families().load_model(loaded))
    params = [
        stages.sampling_params()(max_tokens=600, temperature=0.8, top_p=0.95, seed=seed)
        for seed in range(8)
    ]
    outputs = engine.generate(prompts, params)
    assert {output.finish_reason for output in outputs} == {"stop"}
    texts = [tokenizer.decode(output.token_ids[:-1]) for output in outputs]
    right = [
        bool(GRAMMAR.read(text, each.given, each.plots))
        for each, text in zip(asked, texts, strict=True)
    ]
    assert sum(right) >= 6, texts


def test_answers_were_counted_over_200_requests():
    """The measurements beside the model, which its card is written from: nine of ten keep to the
    request, and of these four of five go on."""
    chat = json.loads((FOLDER / "evaluation.json").read_text(encoding="utf-8"))["chat"]
    assert chat["requests"] >= 200 and chat["kept"] >= 0.9 * chat["requests"]
    assert chat["went_on"] >= 0.8 * chat["kept"]
