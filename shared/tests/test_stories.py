"""The story grammar, what the embedded models were trained on, and that they keep to it."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer as Encoder

from shared import chat_template, checkpoint, models, testing
from shared.stories import conversations, grammar
from shared.stories.conversations import KEPT, request, sequels
from shared.stories.evaluate import write_card
from shared.stories.train import COPY_WEIGHT, Chat, Draft, Stories, train
from shared.tokenizer import Tokenizer, load_tokenizer

GRAMMAR = grammar.load()
CHAT = checkpoint.EMBEDDED["stories-chat"]


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
            texts.append((second.story, (kept, (), sequels())))
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


def test_entropy_is_a_sum_of_choices():
    """Counted by hand: 2 names a gender, 1 plot, 2 variants, an interlude or none."""
    plots = "## one\n{hero} ran. | {hero} [hid|slept].\n~\nSo {hero.he} saw the {place}.\n"
    small = grammar.Grammar(WORDS + "## place\nwell\nmill\n", "rested | lay\n", FRAME, plots)
    expected = math.log(4) + 3.5 * math.log(2)  # the phrase's choice exists in one variant of two
    rng = random.Random(0)
    drawn = [small.sample(rng) for _ in range(4000)]
    mean = -sum(story.log_probability for story in drawn) / 4000
    assert mean == pytest.approx(expected, abs=0.03)
    chances = {story.text: math.exp(story.log_probability) for story in drawn}
    assert len(chances) == 4 * 3 * 2 * 2 and sum(chances.values()) == pytest.approx(1)


def test_only_answers_are_learnt_and_copied_words_weigh_more():
    encoder = Encoder.from_file(str(CHAT / "tokenizer.json"))
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
    rng, folder = random.Random("answers"), checkpoint.EMBEDDED[name]
    assert sum(file.stat().st_size for file in folder.iterdir()) < 12_000_000
    tokenizer: Any = load_tokenizer(CHAT)
    template: Any = chat_template.load(CHAT, tokenizer.control)
    demands: list[Any] = [request(rng, full=True) for _ in range(8)]
    messages = [template.render([{"role": "user", "content": one.text}]) for one in demands]
    prompts, given = [tokenizer.encode_chat(one) for one in messages], {"top_p": 0.95}
    if name == "stories":
        tokenizer, given = Tokenizer.from_folder(folder), {}
        prompts = [[tokenizer.eos_id]] * 8
    loaded = models.load(name)
    engine = testing.engines()["stage09_kernels"](models.load_model(loaded))
    params = testing.sampling_params()
    each = [params(max_tokens=600, temperature=0.8, seed=seed, **given) for seed in range(8)]
    outputs = engine.generate(prompts, each)
    assert {output.finish_reason for output in outputs} == {"stop"}
    texts = [tokenizer.decode(output.token_ids[:-1]) for output in outputs]
    told = [(one.fillings, one.plots) if given else () for one in demands]
    right = [bool(GRAMMAR.read(text, *own)) for text, own in zip(texts, told, strict=True)]
    assert len(set(texts)) == 8 and sum(right) >= 6, texts


@pytest.mark.parametrize("name", checkpoint.EMBEDDED)
def test_the_card_is_written_from_the_measurements(tmp_path, name):
    """No number in the card was typed by hand: written again from its data, it is the same."""
    folder = checkpoint.EMBEDDED[name]
    for file in ("model.safetensors", "README.md"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    evaluation, training = (
        json.loads((folder / f"{part}.json").read_text(encoding="utf-8"))
        for part in ("evaluation", "training")
    )
    before = (tmp_path / "README.md").read_text(encoding="utf-8")
    write_card(tmp_path, evaluation, training, transformers.AutoConfig.from_pretrained(folder))
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == before


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [Stories, Draft, Chat])
def test_training_is_deterministic(tmp_path, recipe):
    torch.set_num_threads(2)
    for name in ("first", "again"):
        train(recipe, tmp_path / name, steps=12, size=(48, 2, 2))
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again")]
    assert weights[0] == weights[1]
    engine = testing.oracle(models.load_model(models.load(str(tmp_path / "first"))))
    prompt = load_tokenizer(tmp_path / "first").encode("Once upon a time")
    assert engine.generate([prompt], testing.sampling_params()(max_tokens=2))
