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
INTERLUDE_PROBABILITY = 0.5
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


@dataclass(frozen=True)
class Phrase:
    """`[big|large|huge]`: one of several ways to say the same, drawn at each mention and then
    forgotten."""

    options: tuple[str, ...]


Template = tuple[str | Slot | Phrase, ...]
Beat = tuple[Template, ...]


@dataclass(frozen=True)
class Plot:
    name: str
    before: tuple[Beat, ...]  # the beats before the place where an interlude may stand
    after: tuple[Beat, ...]


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
    parts: list[str | Slot | Phrase] = []
    for literal, phrase, name, form in re.findall(
        r"([^{}\[\]]+)|\[([^]]+)\]|\{(\w+)(?:\.(\w+))?\}", source
    ):
        if literal:
            parts.append(literal)
        elif phrase:
            parts.append(Phrase(tuple(phrase.split("|"))))
        else:
            capital = (form or name)[0].isupper()
            parts.append(Slot(name.lower(), form.lower(), capital))
    return tuple(parts)


def parse_beat(line: str) -> Beat:
    return tuple(parse_template(variant.strip()) for variant in line.split(" | "))


def insert_synonyms(text: str, synonyms: str) -> str:
    """Turn every phrase that opens a line of `synonyms` into `[phrase|other|...]`, wherever it
    occurs in `text` below its headings."""
    lines = [
        line.split(" | ") for line in synonyms.splitlines() if line and not line.startswith("#")
    ]
    marked = {options[0]: "[" + "|".join(options) + "]" for options in lines}
    if not marked:
        return text
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
            if line[3:] in sections:
                raise ValueError(f"two headings '{line[3:]}': give one of them another name")
            current = sections.setdefault(line[3:], [])
        elif line and not line.startswith("#"):
            current.append(line)
    return sections


def capitalise(word: str) -> str:
    return word[0].upper() + word[1:]


class Grammar:
    """The grammar in words.txt (what fills a slot), synonyms.txt, frame.txt (what stands around a
    plot) and plots.txt."""

    def __init__(self, words: str, synonyms: str, frame: str, plots: str) -> None:
        self.words = parse_headings(words)
        frame, plots = insert_synonyms(frame, synonyms), insert_synonyms(plots, synonyms)
        self.gender = {
            w: g
            for g, kinds in (("girl", ("girl", "elder_woman")), ("boy", ("boy", "elder_man")))
            for k in kinds
            for w in self.words[k]
        }
        sections = parse_headings(frame)
        self.openings = parse_beat(sections["openings"][0])
        self.habits: Beat = tuple(parse_template(line) for line in sections["habits"])
        self.interludes: Beat = tuple(parse_template(line) for line in sections["interludes"])
        self.endings: Beat = tuple(parse_template(line) for line in sections["endings"])
        self.plots: list[Plot] = []
        for name, lines in parse_headings(plots).items():
            if lines.count("~") != 1:
                raise ValueError(
                    f"plot '{name}' needs exactly one line '~', the place where an interlude may "
                    "stand"
                )
            pause = lines.index("~")
            self.plots.append(
                Plot(
                    name,
                    tuple(parse_beat(line) for line in lines[:pause]),
                    tuple(parse_beat(line) for line in lines[pause + 1 :]),
                )
            )

    def candidates(self, slot: Slot, fillings: dict[str, str]) -> list[str]:
        """What an unfilled slot may become: two slots of one kind differ, and friend is of the
        other gender than hero."""
        if slot.kind == "hero":
            return self.hero_names()
        if slot.kind == "friend":
            return self.words["boy" if self.hero_gender(fillings) == "girl" else "girl"]
        if slot.kind == "elder":
            return self.words["elder_woman"] + self.words["elder_man"]
        taken = {word for name, word in fillings.items() if name.rstrip("0123456789") == slot.kind}
        return [word for word in self.words[slot.kind] if word not in taken]

    def hero_names(self) -> list[str]:
        return self.words["girl"] + self.words["boy"]

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
        return capitalise(text) if slot.capital else text

    # ---- writing ---------------------------------------------------------------------------------

    def sample(
        self,
        rng: random.Random,
        fixed: Mapping[str, str] | None = None,
        plots: Sequence[Plot] = (),
        openings: Beat = (),
        habits: bool = True,
    ) -> Story:
        """One story, drawn with `rng`: with the fillings in `fixed`, one of `plots`, an opening out
        of `openings` (all of the grammar's, if empty). Its probability is that of what was drawn.
        """
        fillings = dict(fixed or {})
        copies: list[tuple[int, int]] = []
        text, log_probability = "", 0.0

        def choose(options):
            nonlocal log_probability
            log_probability -= math.log(len(options))
            return options[rng.randrange(len(options))]

        def write(beat: Beat, joint: str) -> None:
            nonlocal text
            text += joint
            for part in choose(beat):
                if isinstance(part, Phrase):
                    text += choose(part.options)
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
        write(openings or self.openings, "")
        if habits:
            write(self.habits, " ")
        for beat in plot.before:
            write(beat, " ")
        with_interlude = rng.random() < INTERLUDE_PROBABILITY
        log_probability += math.log(
            INTERLUDE_PROBABILITY if with_interlude else 1 - INTERLUDE_PROBABILITY
        )
        after = [self.interludes, *plot.after] if with_interlude else plot.after
        for number, beat in enumerate(after):
            write(beat, " " if number else "\n")
        write(self.endings, "\n")
        return Story(text, plot.name, fillings, log_probability, tuple(copies))

    # ---- reading ---------------------------------------------------------------------------------

    def read(
        self,
        text: str,
        fixed: Mapping[str, str] | None = None,
        plots: Sequence[Plot] = (),
        openings: Beat = (),
        habits: bool = True,
    ) -> list[Story]:
        """Every derivation of `text`, with the arguments of `sample`; an empty list if this grammar
        cannot have written it."""
        plots = plots or self.plots
        frame = [("", openings or self.openings)] + [(" ", self.habits)] * habits
        return [
            Story(text, plot.name, fillings, log_p - math.log(len(plots)))
            for plot in plots
            for end, fillings, log_p in self._read_plot(plot, text, frame, dict(fixed or {}))
            if end == len(text)
        ]

    def _read_plot(
        self, plot: Plot, text: str, frame: list[tuple[str, Beat]], fixed: dict[str, str]
    ) -> Iterator[tuple[int, dict[str, str], float]]:
        plain = [*frame, *((" ", beat) for beat in plot.before)]
        no, yes = math.log(1 - INTERLUDE_PROBABILITY), math.log(INTERLUDE_PROBABILITY)
        for end, fillings, log_p in self._read_beats(plain, text, 0, fixed):
            rest = [(" ", beat) for beat in plot.after]
            without = [("\n", plot.after[0]), *rest[1:], ("\n", self.endings)]
            within = [("\n", self.interludes), *rest, ("\n", self.endings)]
            for chance, beats in ((no, without), (yes, within)):
                for last, filled, more in self._read_beats(beats, text, end, fillings):
                    yield last, filled, log_p + chance + more

    def _read_beats(
        self, beats: list[tuple[str, Beat]], text: str, start: int, fillings: dict[str, str]
    ) -> Iterator[tuple[int, dict[str, str], float]]:
        if not beats:
            yield start, fillings, 0.0
            return
        (joint, beat), rest = beats[0], beats[1:]
        if not text.startswith(joint, start):
            return
        for template in beat:
            for end, filled, log_p in self._read_template(
                template, text, start + len(joint), fillings
            ):
                for last, all_filled, more in self._read_beats(rest, text, end, filled):
                    yield last, all_filled, log_p + more - math.log(len(beat))

    def _read_template(
        self, template: Template, text: str, start: int, fillings: dict[str, str]
    ) -> Iterator[tuple[int, dict[str, str], float]]:
        if not template:
            yield start, fillings, 0.0
            return
        part, rest = template[0], template[1:]
        if isinstance(part, str):
            if text.startswith(part, start):
                yield from self._read_template(rest, text, start + len(part), fillings)
            return
        if isinstance(part, Phrase):
            for option in part.options:
                if text.startswith(option, start):
                    for end, filled, log_p in self._read_template(
                        rest, text, start + len(option), fillings
                    ):
                        yield end, filled, log_p - math.log(len(part.options))
            return
        known = part.name in fillings
        options = [fillings[part.name]] if known else self.candidates(part, fillings)
        for word in options:
            filled = fillings if known else {**fillings, part.name: word}
            spelled = self.spell(part, filled)
            if text.startswith(spelled, start):
                for end, all_filled, log_p in self._read_template(
                    rest, text, start + len(spelled), filled
                ):
                    yield end, all_filled, log_p - math.log(len(options))


@cache
def load() -> Grammar:
    """The grammar of this folder."""
    return Grammar(
        *(
            FOLDER.joinpath(name).read_text(encoding="utf-8")
            for name in ("words.txt", "synonyms.txt", "frame.txt", "plots.txt")
        )
    )


def stories(seed: int | str) -> Iterator[Story]:
    """Endless stories; the same seed gives the same stories on every machine."""
    rng = random.Random(f"stories {seed}")
    while True:
        yield load().sample(rng)


def entropy(count: int = 20_000, seed: int | str = "entropy") -> tuple[float, float]:
    """Entropy of a story in nats, as the mean of -ln p over `count` stories, and the standard error
    of that mean."""
    draws = [-story.log_probability for _, story in zip(range(count), stories(seed), strict=False)]
    mean = sum(draws) / count
    return mean, math.sqrt(sum((d - mean) ** 2 for d in draws) / count / count)
