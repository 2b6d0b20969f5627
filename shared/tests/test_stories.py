"""The story grammar and the model that learnt it."""

from __future__ import annotations

import itertools
import json
import math
import random
import re

import pytest
import torch

from shared import checkpoint
from shared.course import stages
from shared.errors import UserError
from shared.stories import grammar
from shared.tokenizer import Tokenizer

GRAMMAR = grammar.load()


@pytest.fixture(scope="module")
def stories():
    return list(itertools.islice(grammar.stories("tests"), 400))


# ---- the grammar ----------------------------------------------------------------------------------------------------


def test_there_is_variety():
    names_things_places = (
        "girl",
        "boy",
        "animal",
        "pet",
        "petkind",
        "toy",
        "tool",
        "treasure",
        "food",
        "place",
        "home",
    )
    assert len(GRAMMAR.plots) >= 40
    assert sum(len(GRAMMAR.words[kind]) for kind in names_things_places) >= 150
    assert all(len(set(words)) == len(words) for words in GRAMMAR.words.values())


def test_the_same_seed_tells_the_same_stories_and_another_seed_others():
    first, again, other = (list(itertools.islice(grammar.stories(seed), 20)) for seed in (7, 7, 8))
    assert first == again
    assert not {story.text for story in first} & {story.text for story in other}


def test_every_story_reads_well(stories):
    assert {story.plot for story in stories} == {plot.name for plot in GRAMMAR.plots}
    for story in stories:
        assert story.text.endswith("The end.")
        assert story.fillings["hero"] in story.text.split("\n")[0]
        assert not re.search(r"[{}\[\]|~]|  | [.,!?]|\.\.", story.text), story.text
        assert story.text.count('"') % 2 == 0, story.text
        assert not re.search(r"\ba [aeio]", story.text), story.text
        assert (
            not re.search(r"(?:^|[.!?\n] )[a-z]", story.text.replace('"', "")) or '"' in story.text
        ), story.text


def test_every_story_has_one_derivation_with_its_own_probability(stories):
    """So -ln p is the information in the text, and the entropy is the floor and not merely a bound."""
    for story in stories:
        (reading,) = GRAMMAR.read(story.text)
        assert reading.log_probability == pytest.approx(story.log_probability)
        assert reading.fillings == story.fillings


def test_pronouns_agree_with_the_hero(stories):
    for story in stories:
        hero = story.fillings["hero"]
        opening = story.text.split(".")[0] + "."
        assert ("girl" in opening) == (GRAMMAR.gender[hero] == "girl"), opening
        if "friend" in story.fillings:
            assert GRAMMAR.gender[story.fillings["friend"]] != GRAMMAR.gender[hero]


def test_a_slot_is_named_before_its_pronouns():
    """In every plot, `{friend.he}` comes only after `{friend}` itself, whichever variants were drawn before."""
    for plot in GRAMMAR.plots:
        sure = {"hero"}
        for beat in plot.before + plot.after:
            named = []
            for template in beat:
                known = set(sure)
                for part in template:
                    if isinstance(part, grammar.Slot):
                        assert part.name in known or not part.form, f"{plot.name}: {part}"
                        known.add(part.name)
                named.append(known)
            sure = set.intersection(*named)


@pytest.mark.parametrize("kind", ["girl", "boy", "animal", "place", "food", "colour", "home"])
def test_one_wrong_word_anywhere_makes_a_story_unreadable(stories, kind):
    """The checker must be able to say no: swap one mention of a word for another of its kind, and it does."""
    rng, refused, tried = random.Random(kind), 0, 0
    for story in stories[:150]:
        for name, word in story.fillings.items():
            mentions = [
                match.start() for match in re.finditer(rf"\b{re.escape(word)}\b", story.text)
            ]
            if word not in GRAMMAR.words[kind] or len(mentions) < 2:
                continue
            at = rng.choice(mentions)
            other = rng.choice(
                [each for each in GRAMMAR.words[kind] if each not in story.fillings.values()]
            )
            tried += 1
            refused += not GRAMMAR.read(story.text[:at] + other + story.text[at + len(word) :])
            assert name
    assert tried >= 10
    assert refused == tried


def test_readable_until_finds_the_place(stories):
    text = stories[0].text
    cut = len(text) // 2
    assert GRAMMAR.readable_until(text) == len(text)
    assert 0 < GRAMMAR.readable_until(text[:cut] + "#" + text[cut:]) <= cut


def test_entropy_is_a_sum_of_choices():
    """A grammar small enough to count by hand: 2 names a gender, 1 plot, 2 variants, an interlude or none."""
    words = "## girl\nAnn\nEve\n## boy\nBob\nTom\n## elder_woman\naunt\n## elder_man\nuncle\n## place\nwell\nmill\n"
    frame = "## openings\n{hero} sat.\n## habits\n{hero} hums.\n## interludes\nRain.\n## endings\nThe end.\n"
    plots = "## one\n{hero} ran. | {hero} [hid|slept].\n~\nSo {hero.he} saw the {place}.\n"
    small = grammar.Grammar(words, "# none\n", frame, plots)
    expected = (
        math.log(4)
        + 0.5 * math.log(2)
        + 0.5 * (math.log(2) + math.log(2))
        + math.log(2)
        + math.log(2)
    )
    rng = random.Random(0)
    drawn = [small.sample(rng) for _ in range(4000)]
    assert -sum(story.log_probability for story in drawn) / 4000 == pytest.approx(
        expected, abs=0.03
    )
    assert len({story.text for story in drawn}) == 4 * 3 * 2 * 2
    assert sum(
        math.exp(p) for p in {story.text: story.log_probability for story in drawn}.values()
    ) == pytest.approx(1)


def test_a_plot_without_a_pause_is_refused():
    with pytest.raises(ValueError, match="exactly one line '~'"):
        grammar.Grammar("## girl\nAnn\n## boy\nBob\n## elder_woman\na\n## elder_man\nb\n", "# none\n",
                        "## openings\nx\n## habits\nx\n## interludes\nx\n## endings\nx\n", "## one\nonly this\n")  # fmt: skip


# ---- the model ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded():
    return checkpoint.load("stories")


def test_the_folder_is_complete_and_small():
    names = {path.name for path in checkpoint.STORIES.iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "vocab.json",
        "merges.txt",
        "tokenizer_config.json",
        "README.md",
    } <= names
    assert sum(path.stat().st_size for path in checkpoint.STORIES.iterdir()) <= 12e6
    assert checkpoint.PRESETS["stories"].n_positions == 1024


def test_transformers_opens_the_folder_and_agrees_token_for_token(loaded, stories):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, their_tokenizer = (
        kind.from_pretrained(checkpoint.STORIES) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    theirs = theirs.double().eval()
    ours = Tokenizer.from_folder(checkpoint.STORIES)
    engine = stages.oracle(stages.load_model(loaded, dtype=torch.float64))
    for story in stories[:50]:
        assert ours.encode(story.text) == their_tokenizer.encode(story.text)
    for prompt in ("Once upon a time", "Long ago, in a hut"):
        ids = ours.encode(prompt)
        (output,) = engine.generate([ids], stages.sampling_params()(max_tokens=60))
        inputs = torch.tensor([ids])
        reply = theirs.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=60,
            do_sample=False,
            pad_token_id=0,
        )
        assert reply[0, len(ids) :].tolist() == output.token_ids


def test_sampled_stories_stay_straight(loaded):
    """The full count, 200 stories, is in the card; 8 of them here, as one static batch."""
    tokenizer = Tokenizer.from_folder(checkpoint.STORIES)
    engine = stages.engines()["stage03_batching"](stages.load_model(loaded, dtype=torch.float32))
    params = [
        stages.sampling_params()(max_tokens=600, temperature=0.8, seed=seed) for seed in range(8)
    ]
    outputs = engine.generate([[tokenizer.eos_id]] * 8, params)
    texts = [tokenizer.decode(output.token_ids[:-1]) for output in outputs]
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert len(set(texts)) == 8
    assert sum(bool(GRAMMAR.read(text)) for text in texts) >= 6


def test_the_card_is_what_the_measurements_say(tmp_path):
    """Nothing in the card was typed by hand: written again from its data, it is the same."""
    from transformers import AutoConfig

    from shared.stories.evaluate import write_card

    for name in ("model.safetensors", "README.md"):
        (tmp_path / name).write_bytes((checkpoint.STORIES / name).read_bytes())
    evaluation, training = (
        json.loads((checkpoint.STORIES / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("evaluation", "training")
    )
    before = (tmp_path / "README.md").read_text(encoding="utf-8")
    write_card(tmp_path, evaluation, training, AutoConfig.from_pretrained(checkpoint.STORIES))
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == before


@pytest.mark.slow
def test_training_is_deterministic_and_learns(tmp_path):
    from shared.stories.train import train

    torch.set_num_threads(2)
    for name in ("first", "second"):
        train(tmp_path / name, steps=12, seed=3, width=48, layers=2, heads=2)
    first, second = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")
    )
    assert first == second


@pytest.mark.slow
def test_training_goes_on_from_an_earlier_result(tmp_path):
    """The same vocabulary, weights that begin where they were, and both runs in the facts."""
    from shared.stories.evaluate import runs_of
    from shared.stories.train import load_start, train

    facts = train(tmp_path / "first", steps=2, seed=3, width=48, layers=2, heads=2)
    (tmp_path / "first" / "training.json").write_text(json.dumps(facts), encoding="utf-8")
    model, tokenizer, before = load_start(tmp_path / "first")
    assert before == facts and tokenizer.get_vocab_size() == model.config.vocab_size
    assert (
        Tokenizer.from_folder(tmp_path / "first").encode("Once upon a time")
        == tokenizer.encode("Once upon a time").ids
    )
    more = train(
        tmp_path / "second", steps=1, seed=3, width=0, layers=0, heads=0, start=tmp_path / "first"
    )
    assert [run["steps"] for run in runs_of(more)] == [2, 1]
    assert (tmp_path / "second" / "vocab.json").read_bytes() == (
        tmp_path / "first" / "vocab.json"
    ).read_bytes()
    with pytest.raises(UserError, match="no folder that this command wrote"):
        load_start(tmp_path)
