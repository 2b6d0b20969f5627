"""The story grammar, what the embedded models were trained on, and that they keep to it."""

from __future__ import annotations

import itertools
import math
import random
import re
from functools import partial
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from shared import chat_template, checkpoint, models, testing
from shared.stories import conversations, grammar
from shared.stories.conversations import KEPT, SEQUELS, request
from shared.stories.evaluate import card
from shared.stories.train import COPY_WEIGHT, Chat, Draft, Stories, train
from shared.tokenizer import load_tokenizer
from stage01_forward.engine import Engine
from stage01_forward.params import SamplingParams

GRAMMAR = grammar.load()


@pytest.fixture(scope="module")
def stories():
    return list(itertools.islice(grammar.stories("tests"), 400))


def test_every_story_reads_well_and_a_seed_repeats_it(stories):
    assert list(itertools.islice(grammar.stories("tests"), 20)) == stories[:20]
    assert all(len(set(words)) == len(words) for words in GRAMMAR.words.values())
    assert {story.plot for story in stories} == {plot.name for plot in GRAMMAR.plots}
    for story in stories:
        text = story.text
        hero, friend = story.fillings["hero"], story.fillings.get("friend")
        opening = text.split(".")[0]
        assert text.endswith("The end.") and hero in text.split("\n")[0]
        assert not re.search(r"[{}\[\]|~]|  | [.,!?]|\.\.", text), text
        assert text.count('"') % 2 == 0 and not re.search(r"\ba [aeio]", text), text
        assert '"' in text or not re.search(r"(?:^|[.!?\n] )[a-z]", text), text
        assert ("girl" in opening) == (GRAMMAR.gender[hero] == "girl"), opening
        assert friend is None or GRAMMAR.gender[friend] != GRAMMAR.gender[hero]


def test_every_story_has_one_derivation_with_its_own_probability(stories):
    """So -ln p is the information in the text, and the entropy is the floor, not only a bound. And
    every answer, given what its request demands, or what a second story keeps of the first."""
    rng, cut = random.Random(0), 0
    texts: list[Any] = [(story, ()) for story in stories[:200]]
    for asked in [request(rng, full=True) for _ in range(60)]:
        demands = asked.fillings, asked.plots
        texts.append((GRAMMAR.sample(rng, *demands), demands))
        stranger = {**asked.fillings, "hero": "Nobody", "gender": "boy"}
        assert not GRAMMAR.read(texts[-1][0].text, stranger, asked.plots)
    for first, *more in itertools.islice(conversations.conversations("tests"), 120):
        for second in more if first.whole else ():
            kept = {name: word for name, word in first.story.fillings.items() if name in KEPT}
            texts.append((second.story, (kept, (), SEQUELS)))
        for second in () if first.whole else more:  # half an answer, and its rest
            assert first.answer + second.answer == first.story.text
            cut += 1
    assert cut > 10 and len(texts) > 270
    for story, demands in texts:
        (reading,) = GRAMMAR.read(story.text, *demands)
        assert reading.fillings == story.fillings
        if len(demands) < 3:  # a second story has another plot, one of fewer
            assert reading.log_probability == pytest.approx(story.log_probability)


@pytest.mark.parametrize("kind", ["girl", "boy", "animal", "food"])
def test_one_wrong_word_anywhere_makes_a_story_unreadable(stories, kind):
    """One mention of a word is replaced by another word of its kind."""
    rng, tried = random.Random(kind), 0
    for story in stories[:150]:
        text, used = story.text, story.fillings.values()
        others = [word for word in GRAMMAR.words[kind] if word not in used]
        for word in used:
            mentions = [match.start() for match in re.finditer(rf"\b{re.escape(word)}\b", text)]
            if word in GRAMMAR.words[kind] and len(mentions) > 1:
                at = rng.choice(mentions)
                tried += 1
                assert not GRAMMAR.read(text[:at] + rng.choice(others) + text[at + len(word) :])
    assert tried >= 10


WORDS = "## girl\nAnn\nEve\n## boy\nBob\nTom\n## elder_woman\naunt\n## elder_man\nuncle\n"
FRAME = "## openings\n{hero} sat.\n## habits\n{hero} hums.\n## interludes\nRain.\n"
FRAME += "## endings\nThe end.\n"


def test_probabilities_are_products_of_choices_and_add_up_to_one():
    """4 names, 3 sentences, 2 places, an interlude or none: 48 texts, and no other."""
    plots = "## one\n{hero} ran. | {hero} [hid|slept].\n~\nSo {hero.he} saw the {place}.\n"
    small = grammar.Grammar(WORDS + "## place\nwell\nmill\n", "rested | lay\n", FRAME, plots)
    rng = random.Random(0)
    drawn = [small.sample(rng) for _ in range(4000)]
    chances = {story.text: math.exp(story.log_probability) for story in drawn}
    assert len(chances) == 4 * 3 * 2 * 2 and sum(chances.values()) == pytest.approx(1)


def test_only_answers_are_learnt_and_copied_words_weigh_more():
    encoder = Tokenizer.from_file(str(checkpoint.EMBEDDED["stories-chat"] / "tokenizer.json"))
    learnt = []
    for document in itertools.islice(Chat.documents(encoder, "tests"), 40):
        text = encoder.decode([i for i, w in document if w], skip_special_tokens=False)
        assert "user" not in text and "<|im_start|>" not in text
        copied = encoder.decode([i for i, w in document if w == COPY_WEIGHT])
        learnt.append(len(copied) / len(text))
    assert 0.05 < sum(learnt) / len(learnt) < 0.4


@pytest.mark.parametrize("name", ["stories", "stories-chat"])
def test_what_a_model_writes_keeps_to_the_grammar(name):
    """8 texts; the model's card has the count of 200."""
    folder = checkpoint.EMBEDDED[name]
    tokenizer: Any = load_tokenizer(folder)
    prompts, options = [[tokenizer.eos_id]] * 8, dict[str, Any](temperature=0.8)
    demands: list[Any] = [()] * 8
    if name == "stories-chat":
        rng = random.Random("answers")
        template: Any = chat_template.load(folder, tokenizer.control)
        wishes = [request(rng, full=True) for _ in range(8)]
        chats = [template.render([{"role": "user", "content": wish.text}]) for wish in wishes]
        prompts, options["top_p"] = [*map(tokenizer.encode_chat, chats)], 0.95
        demands = [(wish.fillings, wish.plots) for wish in wishes]
    engine = testing.engines()["stage09_kernels"](models.load_model(models.load(name)))
    params = partial(SamplingParams, max_tokens=600, **options)
    outputs = engine.generate(prompts, [params(seed=seed) for seed in range(8)])
    texts = [tokenizer.decode(output.token_ids[:-1]) for output in outputs]
    read = [bool(GRAMMAR.read(text, *asked)) for text, asked in zip(texts, demands, strict=True)]
    assert len(set(texts)) == 8 and sum(read) >= 6, texts


@pytest.mark.parametrize("name", checkpoint.EMBEDDED)
def test_a_card_is_written_from_the_measurements_and_a_model_is_small(name):
    """No number in the card was typed by hand: written again from its data, it is the same."""
    folder = checkpoint.EMBEDDED[name]
    assert card(folder) == (folder / "README.md").read_text(encoding="utf-8")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 12_000_000


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [Stories, Draft, Chat])
def test_training_is_deterministic(tmp_path, recipe):
    torch.set_num_threads(2)
    for name in ("first", "again"):
        train(recipe, tmp_path / name, steps=12, size=(48, 2, 2))
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again")]
    assert weights[0] == weights[1]
    engine = Engine(models.load_model(models.load(str(tmp_path / "first"))))
    prompt = load_tokenizer(tmp_path / "first").encode("Once upon a time")
    assert engine.generate([prompt], SamplingParams(max_tokens=2))
