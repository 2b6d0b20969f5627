"""Conversations about stories, for `stories-chat`: a request, a story that keeps to it, and on.

A request may name the hero, what kind of creature it is, a trait, and a thing that the story must
be about; the grammar draws what the request leaves open. The second turn asks to go on: a whole
story is followed by another about the same hero, half a story by its other half.

Half of the names are put together from syllables. No embedding can know these: the model must copy
them from the request, as it must copy the names that its users think of.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from . import grammar

FULL_SHARE = 0.7  # of the requests name everything
SECOND_SHARE = 0.5  # of the conversations have a second turn
HALF_SHARE = 0.4  # of those have a first answer that was cut
KEPT = ("hero", "gender", grammar.CREATURE, "trait", "home")  # what a sequel keeps
GRAMMAR = grammar.load()
PHRASES = grammar.parse_headings((grammar.FOLDER / "chat.txt").read_text(encoding="utf-8"))
SEQUELS = grammar.parse_beat(PHRASES["sequels"][0])  # openings of a second story of the same hero
THINGS: dict[str, list[grammar.Plot]] = {}  # that can be asked for, and the plots about them
for line in PHRASES["things"]:
    name, thing = line.split(": ")
    THINGS.setdefault(thing, []).extend(plot for plot in GRAMMAR.plots if plot.name == name)


@dataclass(frozen=True)
class Request:
    """A question, and what it demands of the story: fillings, and plots (none: any)."""

    text: str
    fillings: dict[str, str]
    plots: list[grammar.Plot]


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    story: what the answer is, or is a part of. start: where in the story's text the answer begins.
    whole: the answer ends where the story does; one that was cut has no end to learn.
    """

    question: str
    answer: str
    story: grammar.Story
    start: int = 0
    whole: bool = True


def invented_name(rng: random.Random) -> str:
    """A name of two or three syllables that the grammar does not have."""
    while True:
        syllables = rng.choices(PHRASES["syllables"][0].split(), k=rng.choice((1, 1, 2)))
        syllables.append(rng.choice(PHRASES["last syllables"][0].split()))
        name = "".join(syllables).capitalize()
        if name not in GRAMMAR.gender and len(name) < 9:
            return name


def request(rng: random.Random, full: bool) -> Request:
    """A request; `full`: one that names hero, creature, trait and thing."""
    template = rng.choice(PHRASES["full requests" if full else "short requests"])
    fixed: dict[str, str] = {}
    if "{hero}" in template:
        known = rng.random() < 0.5
        fixed["hero"] = rng.choice(GRAMMAR.heroes) if known else invented_name(rng)
        if not known:
            fixed["gender"] = rng.choice(("girl", "boy")) if "{kind}" in template else "boy"
    if "{kind}" in template:
        if rng.random() < 0.5:
            fixed[grammar.CREATURE] = rng.choice(GRAMMAR.words["animal"])
            if "gender" in fixed:
                fixed["gender"] = "boy"  # an animal with an invented name is a he
        elif "hero" not in fixed:
            fixed["hero"] = rng.choice(GRAMMAR.heroes)
    if "{trait}" in template:
        fixed["trait"] = rng.choice(GRAMMAR.words["trait"])
    thing = rng.choice(list(THINGS))
    kind = fixed.get(grammar.CREATURE) or (GRAMMAR.hero_gender(fixed) if "hero" in fixed else "")
    text = template.format(hero=fixed.get("hero"), kind=kind, trait=fixed.get("trait"), thing=thing)
    plots = THINGS[thing] if "{thing}" in template else []
    if rng.random() < 0.2:
        text = text[0].lower() + text[1:]
    return Request(text + rng.choice((".", ".", "")) * (text[-1] != "?"), fixed, plots)


def conversation(rng: random.Random) -> list[Turn]:
    """One or two turns."""
    wish = request(rng, rng.random() < FULL_SHARE)
    story = GRAMMAR.sample(rng, wish.fillings, wish.plots)
    first = Turn(wish.text, story.text, story)
    if rng.random() >= SECOND_SHARE:
        return [first]
    question = rng.choice(PHRASES["go on"])
    if rng.random() < HALF_SHARE:
        spaces = [place for place, letter in enumerate(story.text) if letter in " \n"]
        cut = rng.choice(spaces)
        return [
            Turn(wish.text, story.text[:cut], story, whole=False),
            Turn(question, story.text[cut:], story, start=cut),  # its first token has the space
        ]
    kept = {name: story.fillings[name] for name in KEPT if name in story.fillings}
    others = [plot for plot in GRAMMAR.plots if plot.name != story.plot]
    second = GRAMMAR.sample(rng, kept, others, SEQUELS)
    return [first, Turn(question, second.text, second)]


def conversations(seed: int | str) -> Iterator[list[Turn]]:
    """Endless conversations; the same seed gives the same ones on every machine."""
    rng = random.Random(f"conversations {seed}")
    while True:
        yield conversation(rng)
