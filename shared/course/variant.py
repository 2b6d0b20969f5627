"""Variants of stage 05: `start stage05 --variant SEED`, then `grade stage05 --variant SEED`.

A seed, such as a student's id, gives four rules that differ from the reference's, in plain words,
their tests, and a solution for the judge. So a neighbour's is mostly another one.
The student writes the rules as two classes, in a separate folder of the copy; the other tasks stay
as they are. Equal seeds give equal bytes, and `grade` takes the seed from the instructor.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from .. import paths
from ..errors import UserError
from ..task import Task
from . import mine
from .judge import Extra

STAGE, FOLDER, FILE, POINTS = "stage05_paged", "variant", "variant.py", 20

# Each rule in words, and as the tests' models state it. None of them is the reference's rule.
EVICTIONS = {
    "the one that was published first": "known[each].published",
    "the one that was shared least often since it was published; of equals, the one least "
    "recently used": "(known[each].shares, known[each].used)",
    "the one most recently used": "-known[each].used",
}
SIZES = (8, 32)
SHARES = {"an eighth": 8, "a sixteenth": 16, "a thirty-second": 32}
ROUNDINGS = {"up": "ceil", "down": "floor"}
TIES = {
    "holds the most blocks": "each.blocks",
    "has computed the fewest tokens": "-each.blocks",  # whose prompts fill their blocks
    "may still get the most tokens": "each.answer",
}


def source(name: str) -> str:
    """A file of variants: "rules" in words, what students "start" with, or the "test"."""
    return mine.read(Path(__file__).with_name(f"variant_{name}.txt")).replace("\r\n", "\n")


SOURCE = source("start")
# A solution of each rule, in the order of the tables.
POOL = """
        self.shares = [0] * count

    def publish(self, block: int, digest: bytes) -> None:
        if self.digests[block] is None and digest not in self.by_digest:
            self.shares[block] = 0
        super().publish(block, digest)

    def share(self, block: int) -> None:
        super().share(block)
        self.shares[block] += 1

    def take(self) -> int:
        if self.cached and not self.free:
            self.cached.move_to_end({}, last=False)
        return super().take()
"""
VICTIMS = (
    "next(block for block in self.by_digest.values() if block in self.cached)",
    "min(self.cached, key=lambda block: self.shares[block])",
    "list(self.cached)[-1]",
)
SCHEDULER = """
        watermark = options.get("watermark", 1 / {})
        self.watermark = int(watermark * pool.count + {})

    def _rank(self, request: Request) -> Any:
        priority, arrival = super()._rank(request)
        return priority, {}, arrival
"""
ROUNDED = {"up": "0.999", "down": "0"}
RANKS = (
    "len(self.tables[request].blocks)",
    "-request.computed",
    "request.sampling.max_tokens - len(request.output.token_ids)",
)


@dataclass(frozen=True)
class Variant:
    """The rules of a seed, as keys of the tables above."""

    name: str
    number: int  # for the tests' random plans
    eviction: str
    size: int
    share: str
    rounding: str
    tie: str

    def text(self) -> str:
        """The rules in words."""
        folder = paths.shown(mine.folder(STAGE) / FOLDER)
        return Template(source("rules")).substitute(vars(self), folder=folder, points=POINTS)

    def tests(self) -> str:
        """The source of the tests."""
        rules = {"eviction": EVICTIONS[self.eviction], "tie": TIES[self.tie]}
        rules |= {"share": str(SHARES[self.share]), "rounding": ROUNDINGS[self.rounding]}
        return Template(source("test")).substitute(vars(self) | rules)

    def solution(self) -> str:
        """The source of right classes, for the judge."""
        victim = dict(zip(EVICTIONS, VICTIMS, strict=True))[self.eviction]
        rank = dict(zip(TIES, RANKS, strict=True))[self.tie]
        first = "super().__init__(count, block_size)\n"
        pool = SOURCE.replace("size: int = 16", f"size: int = {self.size}")
        pool = pool.replace(first, first + POOL.format(victim))
        rules = SCHEDULER.format(SHARES[self.share], ROUNDED[self.rounding], rank)
        return pool.replace("(pool, **options)\n", f"(pool, **options)\n{rules}")

    def extra(self) -> Extra:
        """The task, for grading."""
        title, file = f"the rules of variant {self.name}", f"{FOLDER}/{FILE}"
        number = len(mine.tasks(STAGE)) + 1
        task = Task(number, file, (), title, self.text(), POINTS, (), ())
        return Extra(STAGE, task, self.solution())


def seed(text: str) -> str:
    """An argparse type: letters, digits, ".", "_" and "-"; capitals do not matter."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,40}", text.strip()):
        raise argparse.ArgumentTypeError(
            f"'{text[:40]}' is not a seed: write 1 to 40 letters, digits, '.', '_' or '-'"
        )
    return text.strip().casefold()


def of(name: str) -> Variant:
    """The variant of a seed: always the same one, on every machine."""
    digest = hashlib.sha256(name.encode()).digest()
    options: tuple[Collection[Any], ...] = (EVICTIONS, SIZES, SHARES, ROUNDINGS, TIES)
    rules = [list(rule)[byte % len(rule)] for rule, byte in zip(options, digest, strict=False)]
    return Variant(name, int.from_bytes(digest[-4:], "big"), *rules)


def check(*stages: str) -> None:
    """Raises UserError unless the stage that has variants is among `stages`."""
    if STAGE not in stages:
        raise UserError(f"--variant is for {STAGE}: name that stage.")


def start(variant: Variant) -> Path:
    """Write the variant into the student's copy of its stage, and return its folder.

    Raises UserError if there is a variant already.
    """
    target = mine.existing(STAGE) / FOLDER
    if target.exists():
        raise UserError(f"There is a variant in {target} already: move it away to begin another.")
    target.mkdir()
    files = {"VARIANT.md": variant.text(), FILE: SOURCE, "test_variant.py": variant.tests()}
    for name, text in files.items():
        mine.write(target / name, text)
    return target
