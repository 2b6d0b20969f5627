"""The story grammar: writes stories, knows how probable each one is, and reads them back.

A story is drawn in this order: a plot, an opening, a habit of the hero, the beats of the plot, at
one place in the middle perhaps an interlude, an ending. Each beat has a few variants; each variant
has slots (`{hero}`, `{toy}`); a slot is filled at its first mention and keeps its filling to the
end of the story. All choices are uniform and independent, so the probability of a story is a
product of 1/n, and the entropy of the grammar follows without a model: H = E[-ln p(story)]. `read`
runs the grammar backwards: it finds every derivation of a text. A text with none is not a story of
this grammar: somewhere a name, a pronoun or a thing went astray. Sampled stories have exactly one
derivation (tested), so -ln p is the true information in the text, not only an upper bound.

This file is the grammar and nothing else: no tokens, no model. The words are in words.txt,
synonyms.txt, frame.txt, plots.txt.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
INTERLUDE_PROBABILITY = 0.5

PRONOUNS = {
    "girl": {
        "he": "she",
        "him": "her",
        "his": "her",
        "himself": "herself",
        "girl": "girl",
        "boy": "girl",
    },
    "boy": {
        "he": "he",
        "him": "him",
        "his": "his",
        "himself": "himself",
        "girl": "boy",
        "boy": "boy",
    },
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
    """A text, the plot it follows, what fills its slots, and ln p(text) in nats."""

    text: str
    plot: str
    fillings: dict[str, str]
    log_probability: float


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
    stands in `text`."""
    lines = [
        line.split(" | ") for line in synonyms.splitlines() if line and not line.startswith("#")
    ]
    marked = {options[0]: "[" + "|".join(options) + "]" for options in lines}
    if not marked:
        return text
    longest_first = sorted(marked, key=len, reverse=True)
    pattern = r'(?<!["\w{.])(?:' + "|".join(map(re.escape, longest_first)) + r")(?![\w-])"
    return re.sub(pattern, lambda match: marked[match.group()], text)


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
    plot), plots.txt."""

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
        self.openings: Beat = tuple(t for line in sections["openings"] for t in parse_beat(line))
        self.habits: Beat = tuple(parse_template(line) for line in sections["habits"])
        self.interludes: Beat = tuple(parse_template(line) for line in sections["interludes"])
        self.endings: Beat = tuple(parse_template(line) for line in sections["endings"])
        self._furthest = (
            0  # where the last beat ended that `_read_beats` could read: how far a text is right
        )
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
            return self.words["girl"] + self.words["boy"]
        if slot.kind == "friend":
            return self.words["boy" if self.gender[fillings["hero"]] == "girl" else "girl"]
        if slot.kind == "elder":
            return self.words["elder_woman"] + self.words["elder_man"]
        taken = {word for name, word in fillings.items() if name.rstrip("0123456789") == slot.kind}
        return [word for word in self.words[slot.kind] if word not in taken]

    def spell(self, slot: Slot, word: str) -> str:
        """The slot's text once it is filled with `word`."""
        text = PRONOUNS[self.gender[word]][slot.form] if slot.form else word
        return capitalise(text) if slot.capital else text

    # ---- writing ---------------------------------------------------------------------------------

    def sample(self, rng: random.Random) -> Story:
        """One story, drawn with `rng`."""
        fillings: dict[str, str] = {}
        log_probability = 0.0

        def choose(options):
            nonlocal log_probability
            log_probability -= math.log(len(options))
            return options[rng.randrange(len(options))]

        def write(template: Template) -> str:
            text = ""
            for part in template:
                if isinstance(part, Phrase):
                    part = choose(part.options)
                elif isinstance(part, Slot):
                    if part.name not in fillings:
                        fillings[part.name] = choose(self.candidates(part, fillings))
                    part = self.spell(part, fillings[part.name])
                text += part
            return text

        plot = choose(self.plots)
        first = [write(choose(self.openings)), write(choose(self.habits))] + [
            write(choose(beat)) for beat in plot.before
        ]
        with_interlude = rng.random() < INTERLUDE_PROBABILITY
        log_probability += math.log(
            INTERLUDE_PROBABILITY if with_interlude else 1 - INTERLUDE_PROBABILITY
        )
        second = [write(choose(self.interludes))] if with_interlude else []
        second += [write(choose(beat)) for beat in plot.after]
        ending = write(choose(self.endings))
        return Story(
            "\n".join([" ".join(first), " ".join(second), ending]),
            plot.name,
            fillings,
            log_probability,
        )

    # ---- reading ---------------------------------------------------------------------------------

    def read(self, text: str) -> list[Story]:
        """Every derivation of `text`; an empty list if this grammar cannot have written it."""
        return [
            Story(text, plot.name, fillings, log_p - math.log(len(self.plots)))
            for plot in self.plots
            for end, fillings, log_p in self._read_plot(plot, text)
            if end == len(text)
        ]

    def readable_until(self, text: str) -> int:
        """How many characters of `text` agree with some story of the grammar, counted in whole
        beats."""
        self._furthest = 0
        self.read(text)
        return self._furthest

    def _read_plot(self, plot: Plot, text: str) -> Iterator[tuple[int, dict[str, str], float]]:
        plain = [("", self.openings), (" ", self.habits), *((" ", beat) for beat in plot.before)]
        no, yes = math.log(1 - INTERLUDE_PROBABILITY), math.log(INTERLUDE_PROBABILITY)
        for end, fillings, log_p in self._read_beats(plain, text, 0, {}):
            rest = [(" ", beat) for beat in plot.after]
            without = [("\n", plot.after[0]), *rest[1:], ("\n", self.endings)]
            within = [("\n", self.interludes), *rest, ("\n", self.endings)]
            for chance, beats in ((no, without), (yes, within)):
                for last, filled, more in self._read_beats(beats, text, end, fillings):
                    yield last, filled, log_p + chance + more

    def _read_beats(
        self, beats: list[tuple[str, Beat]], text: str, start: int, fillings: dict[str, str]
    ) -> Iterator[tuple[int, dict[str, str], float]]:
        self._furthest = max(self._furthest, start)
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
            spelled = self.spell(part, word)
            if text.startswith(spelled, start):
                filled = fillings if known else {**fillings, part.name: word}
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
    """Stories without end; the same seed gives the same stories on every machine."""
    rng = random.Random(f"stories {seed}")
    while True:
        yield load().sample(rng)


def entropy(count: int = 20_000, seed: int | str = "entropy") -> tuple[float, float]:
    """Entropy of a story in nats, as the mean of -ln p over `count` stories, and the standard error
    of that mean."""
    draws = [-story.log_probability for _, story in zip(range(count), stories(seed), strict=False)]
    mean = sum(draws) / count
    return mean, math.sqrt(sum((d - mean) ** 2 for d in draws) / count / count)
