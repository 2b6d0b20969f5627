"""The story grammar: writes stories, knows how probable each one is, and reads them back.

A story is drawn in this order: a plot, an opening, a habit of the hero, the beats of the plot,
perhaps with an interlude at one place in the middle, an ending. Each beat has a few variants; each
variant has slots (`{hero}`, `{toy}`); a slot is filled at its first mention and keeps its filling
to the end of the story. All choices are uniform and independent, so the probability of a story is a
product of 1/n, and the entropy of the grammar follows without a model: H = E[-ln p(story)]. `read`
runs the grammar backwards: it finds every derivation of a text. A text with none is not a story of
this grammar: somewhere a name, a pronoun or a thing went astray. Sampled stories have exactly one
derivation (tested), so -ln p is the true information in the text, not only an upper bound.

This file is the grammar and nothing else: no tokens, no model. The words are in words.txt,
synonyms.txt, frame.txt and plots.txt.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
CREATURE = "animal0"  # the filling of a hero that is an animal: no other animal is of its kind

FORMS = ("he", "him", "his", "himself", "girl", "boy")
PRONOUNS = {
    "girl": dict(zip(FORMS, ("she", "her", "her", "herself", "girl", "girl"), strict=True)),
    "boy": dict(zip(FORMS, ("he", "him", "his", "himself", "boy", "boy"), strict=True)),
}


@dataclass(frozen=True)
class Slot:
    """`{friend.He}` is name "friend", form "he", capital. `{food2}` is name "food2", of kind
    "food"."""

    name: str
    form: str  # "" for the word itself, else a key of PRONOUNS
    capital: bool

    @property
    def kind(self) -> str:
        return self.name.rstrip("0123456789")


# A beat is one of several templates, drawn anew wherever it stands. `[big|large|huge]`, ways to say
# the same, is a beat within a template.
Template = tuple["str | Slot | Beat", ...]
Beat = tuple[Template, ...]


@dataclass(frozen=True)
class Plot:
    name: str
    before: tuple[Beat, ...]  # the beats before the place where an interlude may stand
    after: tuple[Beat, ...]


def chain(joint: str, beats: Sequence[Beat]) -> Template:
    """The beats with a space between them, after `joint`."""
    joints = [joint, *[" "] * (len(beats) - 1)]
    return tuple(part for pair in zip(joints, beats, strict=True) for part in pair)


@dataclass(frozen=True)
class Story:
    """A text, the plot it follows, what fills its slots, and ln p(text) in nats.

    copies: where the text repeats a filling, as (start, end); a story that was read has none.
    """

    text: str
    plot: str
    fillings: dict[str, str]
    log_probability: float
    copies: tuple[tuple[int, int], ...] = ()

    def copied(self, start: int, end: int) -> bool:
        """Whether a character of text[start:end] repeats a filling."""
        return any(first < end and start < last for first, last in self.copies)


def parse_template(source: str) -> Template:
    parts: list[str | Slot | Beat] = []
    for literal, phrase, name, form in re.findall(
        r"([^{}\[\]]+)|\[([^]]+)\]|\{(\w+)(?:\.(\w+))?\}", source
    ):
        if literal:
            parts.append(literal)
        elif phrase:
            parts.append(tuple((option,) for option in phrase.split("|")))
        else:
            capital = (form or name)[0].isupper()
            parts.append(Slot(name.lower(), form.lower(), capital))
    return tuple(parts)


def parse_beat(line: str) -> Beat:
    return tuple(parse_template(variant.strip()) for variant in line.split(" | "))


def insert_synonyms(text: str, synonyms: str) -> str:
    """Turn every phrase that opens a line of `synonyms` into `[phrase|other|...]`, wherever it
    occurs in `text` below its headings."""
    lines = [line for line in synonyms.splitlines() if line and line[0] != "#"]
    marked = {line.split(" | ")[0]: f"[{line.replace(' | ', '|')}]" for line in lines}
    longest_first = sorted(marked, key=len, reverse=True)
    pattern = r'(?<!["\w{.])(?:' + "|".join(map(re.escape, longest_first)) + r")(?![\w-])"
    return "\n".join(
        line if line.startswith("#") else re.sub(pattern, lambda match: marked[match[0]], line)
        for line in text.splitlines()
    )


def parse_headings(text: str) -> dict[str, list[str]]:
    """Lines under their `## heading`; `# ...` lines and empty ones are left out."""
    sections: dict[str, list[str]] = {}
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("## "):
            current = sections[line[3:]] = []
        elif line and not line.startswith("#"):
            current.append(line)
    return sections


class Grammar:
    """The grammar in words.txt (what fills a slot), synonyms.txt, frame.txt (what stands around a
    plot) and plots.txt."""

    def __init__(self, words: str, synonyms: str, frame: str, plots: str) -> None:
        self.words = parse_headings(words)
        frame, plots = insert_synonyms(frame, synonyms), insert_synonyms(plots, synonyms)
        self.heroes = self.words["girl"] + self.words["boy"]
        self.gender = dict.fromkeys(self.words["girl"] + self.words["elder_woman"], "girl")
        self.gender |= dict.fromkeys(self.words["boy"] + self.words["elder_man"], "boy")
        sections = parse_headings(frame)
        self.openings = parse_beat(sections["openings"][0])
        self.habits, self.interludes, self.endings = (
            tuple(map(parse_template, sections[name]))
            for name in ("habits", "interludes", "endings")
        )
        self.plots: list[Plot] = []
        for name, lines in parse_headings(plots).items():
            pause = lines.index("~")  # an interlude may stand there
            before, after = map(parse_beat, lines[:pause]), map(parse_beat, lines[pause + 1 :])
            self.plots.append(Plot(name, tuple(before), tuple(after)))

    def outline(self, plot: Plot, openings: Beat) -> tuple[Template, ...]:
        """A story up to where an interlude may stand, and its end without one and with one."""
        before = [openings] if openings else [self.openings, self.habits]
        ways = plot.after, (self.interludes, *plot.after)
        ends = (chain("\n", way) + ("\n", self.endings) for way in ways)
        return chain("", [*before, *plot.before]), *ends

    def candidates(self, slot: Slot, fillings: dict[str, str]) -> list[str]:
        """What an unfilled slot may become: two slots of one kind differ, and friend is of the
        other gender than hero."""
        if slot.kind == "hero":
            return self.heroes
        if slot.kind == "friend":
            return self.words["boy" if self.hero_gender(fillings) == "girl" else "girl"]
        if slot.kind == "elder":
            return self.words["elder_woman"] + self.words["elder_man"]
        taken = {word for name, word in fillings.items() if name.rstrip("0123456789") == slot.kind}
        return [word for word in self.words[slot.kind] if word not in taken]

    def hero_gender(self, fillings: Mapping[str, str]) -> str:
        """ "girl" or "boy": the given gender, else that of the name."""
        return fillings.get("gender") or self.gender[fillings["hero"]]

    def spell(self, slot: Slot, fillings: Mapping[str, str]) -> str:
        """The slot's text; its filling is in `fillings`."""
        word = text = fillings[slot.name]
        if slot.form:
            hero = slot.name == "hero"
            text = PRONOUNS[self.hero_gender(fillings) if hero else self.gender[word]][slot.form]
            if hero and slot.form == "girl":
                text = fillings.get(CREATURE, text)
        return text[0].upper() + text[1:] if slot.capital else text

    # ---- writing ---------------------------------------------------------------------------------

    def sample(
        self,
        rng: random.Random,
        fixed: Mapping[str, str] | None = None,
        plots: Sequence[Plot] = (),
        openings: Beat = (),
    ) -> Story:
        """One story, drawn with `rng`: with the fillings in `fixed`, one of `plots` (any, if none),
        and one of `openings` in place of the grammar's own and the hero's habit. Its probability is
        that of what was drawn."""
        fillings = dict(fixed or {})
        copies: list[tuple[int, int]] = []
        text, log_probability = "", 0.0

        def choose(options):
            nonlocal log_probability
            log_probability -= math.log(len(options))
            return options[rng.randrange(len(options))]

        def write(template: Template) -> None:
            nonlocal text
            for part in template:
                if isinstance(part, tuple):
                    write(choose(part))
                elif isinstance(part, Slot):
                    known = part.name in fillings
                    if not known:
                        fillings[part.name] = choose(self.candidates(part, fillings))
                    start = len(text)
                    text += self.spell(part, fillings)
                    if known:
                        copies.append((start, len(text)))
                else:
                    text += part

        plot = choose(plots or self.plots)
        before, *ends = self.outline(plot, openings)
        write(before)
        log_probability -= math.log(2)  # an interlude or none
        write(ends[rng.random() < 0.5])
        return Story(text, plot.name, fillings, log_probability, tuple(copies))

    # ---- reading ---------------------------------------------------------------------------------

    def read(
        self,
        text: str,
        fixed: Mapping[str, str] | None = None,
        plots: Sequence[Plot] = (),
        openings: Beat = (),
    ) -> list[Story]:
        """Every derivation of `text`, with the arguments of `sample`; an empty list if this grammar
        cannot have written it."""
        plots, stories = plots or self.plots, []
        for plot in plots:
            before, *ends = self.outline(plot, openings)
            whole: Template = (*before, tuple(ends))  # a choice like any other
            stories += [
                Story(text, plot.name, fillings, log_p - math.log(len(plots)))
                for fillings, log_p in self._read(whole, text, 0, dict(fixed or {}))
            ]
        return stories

    def _read(
        self, template: Template, text: str, at: int, fillings: dict[str, str]
    ) -> Iterator[tuple[dict[str, str], float]]:
        """The fillings, and ln p of the choices, of every way to read text[at:] as `template`."""
        if not template:
            if at == len(text):
                yield fillings, 0.0
            return
        part, rest = template[0], template[1:]
        if isinstance(part, str):
            if text.startswith(part, at):
                yield from self._read(rest, text, at + len(part), fillings)
            return
        choices: list[tuple[Template, dict[str, str]]]
        if isinstance(part, Slot):
            known = part.name in fillings
            words = [fillings[part.name]] if known else self.candidates(part, fillings)
            filled = [{**fillings, part.name: word} for word in words]
            choices = [((self.spell(part, after), *rest), after) for after in filled]
        else:
            choices = [((*option, *rest), fillings) for option in part]
        for choice, after in choices:
            for reading, log_p in self._read(choice, text, at, after):
                yield reading, log_p - math.log(len(choices))


@cache
def load() -> Grammar:
    """The grammar of this folder."""
    names = ("words.txt", "synonyms.txt", "frame.txt", "plots.txt")
    return Grammar(*(FOLDER.joinpath(name).read_text(encoding="utf-8") for name in names))


def stories(seed: int | str) -> Iterator[Story]:
    """Endless stories; the same seed gives the same stories on every machine."""
    rng = random.Random(f"stories {seed}")
    while True:
        yield load().sample(rng)
