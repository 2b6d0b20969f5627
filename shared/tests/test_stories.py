"""The story grammar, and the model that was trained on it."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from shared import checkpoint
from shared.course import stages
from shared.errors import UserError
from shared.peers import transformers_greedy
from shared.stories import grammar
from shared.stories.evaluate import runs_of, write_card
from shared.stories.train import Chat, Stories, load_start, train
from shared.tokenizer import Tokenizer, load_tokenizer

GRAMMAR = grammar.load()


@pytest.fixture(scope="module")
def stories():
    return list(itertools.islice(grammar.stories("tests"), 400))


def test_there_is_variety_and_a_seed_repeats_it():
    kinds = "girl boy animal pet petkind toy tool treasure food place home"
    assert len(GRAMMAR.plots) >= 40
    assert sum(len(GRAMMAR.words[kind]) for kind in kinds.split()) >= 150
    assert all(len(set(words)) == len(words) for words in GRAMMAR.words.values())
    first, again, other = (list(itertools.islice(grammar.stories(seed), 20)) for seed in (7, 7, 8))
    assert first == again
    assert not {story.text for story in first} & {story.text for story in other}


def test_every_story_reads_well(stories):
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
    """So -ln p is the information in the text, and the entropy is the floor, not only a bound."""
    for story in stories[:200]:
        (reading,) = GRAMMAR.read(story.text)
        assert reading.log_probability == pytest.approx(story.log_probability)
        assert reading.fillings == story.fillings


def test_a_slot_is_named_before_its_pronouns():
    """In every plot `{friend.he}` follows `{friend}`, whichever variants were drawn before."""
    for plot in GRAMMAR.plots:
        sure = {"hero"}
        for beat in plot.before + plot.after:
            named = []
            for template in beat:
                known = set(sure)
                for part in (part for part in template if isinstance(part, grammar.Slot)):
                    assert part.name in known or not part.form, f"{plot.name}: {part}"
                    known.add(part.name)
                named.append(known)
            sure = set.intersection(*named)


@pytest.mark.parametrize("kind", ["girl", "boy", "animal", "place", "food", "colour", "home"])
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


def test_readable_until_finds_the_first_mistake(stories):
    text = stories[0].text
    cut = len(text) // 2
    assert GRAMMAR.readable_until(text) == len(text)
    assert not GRAMMAR.read(text + " Rain.")
    assert 0 < GRAMMAR.readable_until(text[:cut] + "#" + text[cut:]) <= cut


WORDS = "## girl\nAnn\nEve\n## boy\nBob\nTom\n## elder_woman\naunt\n## elder_man\nuncle\n"
FRAME = "## openings\n{hero} sat.\n## habits\n{hero} hums.\n## interludes\nRain.\n"
FRAME += "## endings\nThe end.\n"


def test_entropy_is_a_sum_of_choices():
    """Counted by hand: 2 names a gender, 1 plot, 2 variants, an interlude or none."""
    plots = "## one\n{hero} ran. | {hero} [hid|slept].\n~\nSo {hero.he} saw the {place}.\n"
    small = grammar.Grammar(WORDS + "## place\nwell\nmill\n", "# none\n", FRAME, plots)
    expected = math.log(4) + 3.5 * math.log(2)  # the phrase's choice exists in one variant of two
    rng = random.Random(0)
    drawn = [small.sample(rng) for _ in range(4000)]
    mean = -sum(story.log_probability for story in drawn) / 4000
    assert mean == pytest.approx(expected, abs=0.03)
    chances = {story.text: math.exp(story.log_probability) for story in drawn}
    assert len(chances) == 4 * 3 * 2 * 2 and sum(chances.values()) == pytest.approx(1)
    with pytest.raises(ValueError, match="exactly one line '~'"):
        grammar.Grammar(WORDS, "# none\n", FRAME, "## one\nonly this\n")


@pytest.fixture(scope="module")
def loaded():
    return checkpoint.load("stories")


def test_transformers_gives_the_same_tokens(loaded, stories):
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint.STORIES).double().eval()
    their_tokenizer = AutoTokenizer.from_pretrained(checkpoint.STORIES)
    ours = Tokenizer.from_folder(checkpoint.STORIES)
    engine = stages.oracle(stages.load_model(loaded, dtype=torch.float64))
    for story in stories[:50]:
        assert ours.encode(story.text) == their_tokenizer.encode(story.text)
    for prompt in ("Once upon a time", "Long ago, in a hut"):
        ids = ours.encode(prompt)
        (output,) = engine.generate([ids], stages.sampling_params()(max_tokens=30))
        assert output.token_ids == transformers_greedy(theirs, ids, 30)


def test_sampled_stories_are_consistent(loaded):
    """8 as one static batch; the model card has the count of 200."""
    tokenizer, params_of = Tokenizer.from_folder(checkpoint.STORIES), stages.sampling_params()
    engine = stages.engines()["stage03_batching"](stages.load_model(loaded, dtype=torch.float32))
    params = [params_of(max_tokens=600, temperature=0.8, seed=seed) for seed in range(8)]
    outputs = engine.generate([[tokenizer.eos_id]] * 8, params)
    texts = {tokenizer.decode(output.token_ids[:-1]) for output in outputs}
    assert {output.finish_reason for output in outputs} == {"stop"} and len(texts) == 8
    assert sum(bool(GRAMMAR.read(text)) for text in texts) >= 6


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
    write_card(tmp_path, evaluation, training, AutoConfig.from_pretrained(folder))
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == before


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [Stories, Chat])
def test_training_is_deterministic_and_continues_from_an_earlier_result(tmp_path, recipe):
    """With its vocabulary and its weights; the facts have both runs."""
    torch.set_num_threads(2)
    first, again, second = (tmp_path / name for name in ("first", "again", "second"))
    small: dict[str, Any] = {"seed": 3, "width": 48, "layers": 2, "heads": 2}
    facts = [train(recipe, each, steps=12, **small) for each in (first, again)]
    weights = [(each / "model.safetensors").read_bytes() for each in (first, again)]
    assert weights[0] == weights[1]
    (first / "training.json").write_text(json.dumps(facts[0]), encoding="utf-8")
    model, tokenizer, before = load_start(recipe, first)
    assert before == facts[0] and tokenizer.get_vocab_size() == model.config.vocab_size
    prompt = "Once upon a time"
    assert load_tokenizer(first).encode(prompt) == tokenizer.encode(prompt).ids
    more = train(recipe, second, steps=1, **small, start=first)
    assert [run["steps"] for run in runs_of(more)] == [12, 1]
    with pytest.raises(UserError, match="no folder that this command wrote"):
        load_start(recipe, tmp_path)
