"""What is requested: prompts as token ids, exact in length for any tokenizer, and answer
lengths."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from shared.errors import UserError

LENGTHS = {"short": 8, "medium": 32, "long": 64}  # tokens of the prompt
WORKLOADS = (*LENGTHS, "mixed", "shared")
ANSWER = 50  # tokens
# Lognormal lengths, as of real conversations: median, spread of the logarithm, least and most.
MIXED_PROMPT = 64, 0.8, 4, 384
MIXED_ANSWER = 40, 0.8, 4, 200
SYSTEM = 256  # tokens that all prompts of "shared" begin with
QUESTION = 8, 32  # least and most tokens after them
VOCABULARY = 256  # every tokenizer has these ids
CONTEXT = 1024
MOST_TOKENS = 1_000_000
MOST_SPREAD = 5.0  # of the logarithm: more would be noise


@dataclass(frozen=True)
class Ask:
    """One request: the ids of its prompt, and the tokens that its answer must have."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Lengths:
    """How many tokens prompts or answers have, as the command line spells it: "128" is always 128,
    "16:256" any number between the two with equal probability, and "lognormal:64:0.8" a lognormal
    length with a median of 64 and a standard deviation of 0.8 in its logarithm. Real conversations
    look like that: most are short, a few very long."""

    least: int
    most: int | None  # None, only for lognormal lengths: whatever the context has room for
    median: float | None = None  # of lognormal lengths
    spread: float = 0.0

    def __str__(self) -> str:
        if self.median is not None:
            return f"lognormal:{self.median:g}:{self.spread:g}"
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"

    @property
    def need(self) -> int:
        """Tokens for which there must be room."""
        return self.most or round(self.median or 1)

    def draw(self, chance: random.Random, room: int) -> int:
        """One length, at most `room`."""
        most = min(self.most or room, room)
        if self.median is not None:
            drawn = round(chance.lognormvariate(math.log(self.median), self.spread))
            return min(max(drawn, self.least), most)
        return self.least if self.least == most else chance.randint(self.least, most)


def lengths(text: str) -> Lengths:
    """Read the spelling of `Lengths`. Raises ValueError."""
    kind, *values = text.split(":") if text.startswith("lognormal:") else ["", *text.split(":")]
    if kind:
        median, spread = map(float, values)
        if not (1 <= median <= MOST_TOKENS and 0 < spread <= MOST_SPREAD):
            raise ValueError
        return Lengths(1, None, median, spread)
    least, most = map(int, values * 2 if len(values) == 1 else values)
    if not 1 <= least <= most <= MOST_TOKENS:
        raise ValueError
    return Lengths(least, most)


def make(
    name: str,
    count: int,
    seed: int | str,
    *,
    vocab: int = VOCABULARY,
    longest: int = CONTEXT,
    prompts: Lengths | None = None,
    answers: Lengths | None = None,
) -> list[Ask]:
    """`count` requests of a workload; the same seed gives the same requests. If given, `prompts`
    and `answers` replace its lengths (of prompts in "shared": after the common beginning).

    No two prompts are equal, so that no cache answers for the model; those of "shared" have a
    common beginning, for a prefix cache. Ids are from 0 to `vocab` - 1, and prompt and answer
    together fit in `longest` tokens: lognormal lengths are cut to that.

    Raises UserError for an unknown name, for lengths that do not fit, and for prompts so short that
    there are too few different ones.
    """
    if name not in WORKLOADS:
        raise UserError(f"Unknown workload '{name}': choose one of {', '.join(WORKLOADS)}.")
    begin, usual, usual_answer = _lengths(name)
    prompt, answer = prompts or usual, answers or usual_answer
    if (need := begin + prompt.need + answer.need) > longest:
        what, instead = f"The workload '{name}' needs", "choose another one"
        if prompts or answers:
            what = f"Prompts of {begin + prompt.need} and answers of {answer.need} tokens need"
            instead = "ask for fewer tokens"
        raise UserError(f"{what} {need} tokens, but the model's context is {longest}: {instead}.")
    if vocab**prompt.need < count:
        raise UserError(
            f"There are fewer than {count:,} different prompts of {prompt} tokens: ask for longer "
            "ones."
        )
    chance = random.Random(f"{name} {seed}")
    system = [chance.randrange(vocab) for _ in range(begin)]
    asks: list[Ask] = []
    known: set[tuple[int, ...]] = set()
    while len(asks) < count:
        size = prompt.draw(chance, longest - begin - answer.need)
        tokens = answer.draw(chance, longest - begin - size)
        ids = [chance.randrange(vocab) for _ in range(size)]
        if tuple(ids) not in known:
            known.add(tuple(ids))
            asks.append(Ask(system + ids, tokens))
    return asks


def _lengths(name: str) -> tuple[int, Lengths, Lengths]:
    """A workload's tokens: in the common beginning, in prompts after it, and in answers."""
    if name == "mixed":
        prompt, answer = (
            Lengths(least, most, median, spread)
            for median, spread, least, most in (MIXED_PROMPT, MIXED_ANSWER)
        )
        return 0, prompt, answer
    fixed = Lengths(ANSWER, ANSWER)
    if name == "shared":
        return SYSTEM, Lengths(*QUESTION), fixed
    return 0, Lengths(LENGTHS[name], LENGTHS[name]), fixed
