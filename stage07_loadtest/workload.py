"""What is requested: prompts as token ids, exact in length for any tokenizer, and answer
lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass

from shared.errors import UserError

# Tokens of prompts and answers by workload; of "mixed" the median, of "shared" after SYSTEM.
LENGTHS = {"fixed": (8, 50), "mixed": (64, 40), "shared": (20, 50)}
SPREAD, MOST = 0.8, 6  # lognormal lengths, as of real conversations: at most 6 times the median
SYSTEM = 256  # tokens that all prompts of "shared" begin with
VOCABULARY = 256  # every tokenizer has these ids
CONTEXT = 1024


@dataclass(frozen=True)
class Ask:
    """One request: the ids of its prompt, and the tokens that its answer must have."""

    prompt: list[int]
    max_tokens: int


def make(
    name: str,
    count: int,
    seed: int | str,
    *,
    prompt: int | None = None,
    answer: int | None = None,
    longest: int = CONTEXT,
) -> list[Ask]:
    """`count` requests of a workload; the same seed gives the same requests. If given, `prompt` and
    `answer` replace its lengths. Prompt and answer together fit in `longest` tokens.

    No two prompts are equal, so that no cache answers for the model; those of "shared" have a
    common beginning, for a prefix cache. Raises UserError for lengths that do not fit, and for
    prompts so short that there are too few different ones.
    """
    begin, most = SYSTEM if name == "shared" else 0, MOST if name == "mixed" else 1
    prompt, answer = prompt or LENGTHS[name][0], answer or LENGTHS[name][1]
    if (need := begin + most * (prompt + answer)) > longest:
        raise UserError(
            f"Prompts and answers of the workload '{name}' need up to {need} tokens, but the "
            f"model's context is {longest}: choose fewer tokens or another workload."
        )
    if VOCABULARY**prompt < count:
        raise UserError(f"There are fewer than {count:,} prompts of {prompt} tokens: choose more.")
    chance = random.Random(f"{name} {seed}")

    def length(usual: int) -> int:
        """Most real prompts and answers are short, and a few very long."""
        drawn = usual * chance.lognormvariate(0, SPREAD) if name == "mixed" else usual
        return min(max(1, round(drawn)), most * usual)

    system = chance.choices(range(VOCABULARY), k=begin)
    asks: list[Ask] = []
    known: set[tuple[int, ...]] = set()
    while len(asks) < count:
        ids, tokens = chance.choices(range(VOCABULARY), k=length(prompt)), length(answer)
        if tuple(ids) not in known:
            known.add(tuple(ids))
            asks.append(Ask(system + ids, tokens))
    return asks
