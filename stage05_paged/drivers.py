"""What grading calls in the tasks of this stage: see shared/course/driver.py.

One free block is as good as another, so no number of a block is part of the data. Instead the moves
of a plan are carried out on a memory of labels, and what the tables then lead to is reported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from random import Random
from typing import Any

import torch

from shared.config import Config
from shared.course.driver import Entry, outcome, tensors, tiny
from stage04_continuous.drivers import Options, lives, options_of, prompt_of, whole_engine
from stage04_continuous.plan import Plan
from stage04_continuous.request import Request
from stage04_continuous.scheduler import POLICIES

from . import cache, engine
from .blocks import BlockPool, BlockTable, Move
from .scheduler import Scheduler

SMALL = Config(50, 256, 24, 2, 6, n_kv_head=3, name="small")


def state_of(pool: BlockPool) -> Entry:
    """A pool without the numbers of its blocks."""
    return {
        "free": len(pool.free),
        "cached": [pool.digests[block] for block in pool.cached],
        "references": sorted(pool.references),
        "shared": pool.shared,
        "evictions": pool.evictions,
        "available": pool.available,
        "known": sorted(digest.hex() for digest in pool.by_digest),
    }


def blocks(draw: Random, make: Callable[..., BlockPool] = BlockPool) -> Iterator[Entry]:
    for _ in range(6):
        pool, held = make(draw.randint(2, 7), 4), list[int]()  # a block for each reference
        for _ in range(60):
            name = draw.choice(
                ["take", "take", "share", "give_back", "give_back", "publish", "bad"]
            )
            # A block by its name, if it has one, or by the place of its first reference.
            block = draw.choice(held) if held else -1
            if name == "share" and pool.by_digest and draw.random() < 0.6:
                block = pool.by_digest[draw.choice(sorted(pool.by_digest))]
            names = list(pool.digests)
            entry: Entry = {"call": f"{name} in a pool of {pool.count}, {state_of(pool)}"}
            if name == "take":
                taken = outcome(pool.take)
                if isinstance(taken, Exception):
                    entry["result"] = taken
                else:
                    entry["result"] = {"evicted": names[taken], "owned before": taken in held}
                    held.append(taken)
            elif name == "share" and block >= 0:
                pool.share(block)
                held.append(block)
            elif name == "give_back" and held:
                pool.give_back(block)
                held.remove(block)
            elif name == "publish" and held:
                pool.publish(block, bytes([draw.randrange(9)]))
            elif name == "bad" and pool.free:
                free = draw.choice(sorted(pool.free))
                entry["result"] = [outcome(pool.share, free), outcome(pool.give_back, free)]
            yield entry | state_of(pool)


def names(draw: Random) -> Iterator[Entry]:
    for _ in range(5):
        size = draw.choice([1, 2, 4])
        pool = BlockPool(12, size)
        tables = [BlockTable(pool, draw.choice([b"", b"a"])) for _ in range(3)]
        texts = [[draw.randrange(2) for _ in range(size * 4)] for _ in range(2)]
        for table in tables:
            text = draw.choice(texts)
            while draw.random() < 0.9:
                tokens = text[len(table.digests) * size :][: draw.randint(0, 3 * size)]
                call = f"digest of {tokens}, {len(table.digests)} blocks before, size {size}"
                yield {"call": call, "digests": list(table.digest(tokens))}
            table.grow(len(table.digests) * size)
            for block, digest in zip(table.blocks, table.digests, strict=True):
                pool.publish(block, draw.choice([digest, digest, digest, b"x"]))
                pool.publish(block, bytes([draw.randrange(3)]))  # it may have a name already
            places = [pool.digests[block] for block in table.blocks]
            yield {"call": "publish", "digests": places, "known": sorted(pool.by_digest)}
            if draw.random() < 0.4:
                table.release(trusted=draw.random() < 0.7)
        for table in tables:
            chain = list(table.digests)
            if chain and draw.random() < 0.3:
                chain[draw.randrange(len(chain))] = b"unknown"
            matched = [pool.digests[block] for block in pool.match(iter(chain))]
            call = f"match of {len(chain)} digests"
            yield {"call": call, "blocks": matched, **state_of(pool)}


def shares_of(
    draw: Random, tables: list[list[int]], lengths: list[int], size: int
) -> list[cache.Share]:
    """A pass: some sequences in any order, each with new tokens after `lengths`, which grow."""
    shares = []
    for place in draw.sample(range(len(tables)), draw.randint(1, len(tables))):
        room = len(tables[place]) * size - lengths[place]
        if count := min(draw.choice([1, 1, 1, 2, 3, 7, 30]), room):
            shares.append((tables[place], lengths[place], count))
            lengths[place] += count
    return shares


def tables_of(draw: Random, count: int) -> list[list[int]]:
    numbers = draw.sample(range(40), 40)
    return [[numbers.pop() for _ in range(draw.randint(1, 8))] for _ in range(count)]


def places(draw: Random) -> Iterator[Entry]:
    for _ in range(10):
        size = draw.choice([1, 4, 5])
        tables = tables_of(draw, draw.randint(1, 5))
        lengths = [draw.randrange(len(table) * size) for table in tables]
        shares = shares_of(draw, tables, lengths, size)
        padded = cache.padded(shares)
        call = f"the pass {shares} (blocks, position, tokens), blocks of {size}"
        addresses = cache.addresses(padded, shares, size)
        yield {"call": call, "padded": padded, "addresses": addresses}


def attend(draw: Random) -> Iterator[Entry]:
    """Passes over a cache that is full of other numbers, in tiles of many sizes."""
    whole = cache.TILE
    for kind in (torch.float64, torch.float32, torch.bfloat16):
        size = draw.choice([2, 4])
        paged = cache.PagedCache(SMALL, 40, size, dtype=kind)
        paged.kv.copy_(tensors(draw, *paged.kv.shape, dtype=kind))
        tables = tables_of(draw, 5)
        lengths = [0] * 5
        for _ in range(4):
            shares = shares_of(draw, tables, lengths, size)
            if not shares:
                continue
            cache.TILE = draw.choice([whole, 300, 1000])
            step = paged.extend(shares)
            cache.TILE = whole
            tokens, layer = len(step.positions), draw.randrange(2)
            q, (k, v) = tensors(draw, tokens, 6, 4), tensors(draw, 2, tokens, 3, 4)
            order = step.order
            out = torch.empty_like(q)
            out[order] = step.attend(layer, q[order], k[order], v[order])
            table, start, count = draw.choice(shares)
            block, place = table[start // size], start % size
            call = f"attend in the pass {[(len(t), s, c) for t, s, c in shares]}, {kind}"
            written = paged.kv[layer, :, :, block, place : place + count]
            call = f"{call} (blocks, position, tokens)"
            yield {"call": call, "out": out.to(kind), "written": written}


class Labels:
    """A memory of labels in place of numbers: what moves and passes leave in each place."""

    def __init__(self, chosen: Scheduler) -> None:
        self.chosen, self.size = chosen, chosen.pool.block_size
        self.pool: dict[int, list[str]] = {}
        self.swap: dict[int, list[str]] = {}
        self.labels: dict[Request, list[str]] = {}  # of the beginnings of each request's text

    def move(self, moves: Iterable[Move]) -> None:
        wiped = ["0"] * self.size
        for move in moves:
            if move.kind == "wipe":
                self.pool[move.target] = list(wiped)
            else:
                source, target = self.pool, self.pool
                if move.kind == "out":
                    target = self.swap
                elif move.kind == "in":
                    source = self.swap
                target[move.target] = list(source.get(move.source, wiped))

    def run(self, plan: Plan) -> None:
        """Write, as a pass does, what a position's keys and values depend on: all before it."""
        for work in plan.work:
            labels = self.labels.setdefault(work.request, [""])
            for token in work.request.tokens(len(labels) - 1, work.start + work.count):
                digest = hashlib.sha256(f"{labels[-1]} {token}".encode())
                labels.append(digest.hexdigest()[:8])
            for position in range(work.start, work.start + work.count):
                place = self.pool[work.table[position // self.size]]
                place[position % self.size] = labels[position + 1]

    def of(self, request: Request) -> str:
        """What a running request's table leads to, as far as it was computed."""
        table = self.chosen.tables[request].blocks
        labels = [label for block in table for label in self.pool.get(block, ["?"])]
        return hashlib.sha256("".join(labels[: request.computed]).encode()).hexdigest()[:12]


def life(draw: Random, make: Callable[..., Scheduler], swaps: bool) -> Entry:
    """A scheduler that shares, preempts and swaps, in a memory of labels. swaps: prompts are cut
    into chunks, and swapped between them."""
    size = draw.choice([1, 2, 4])
    pool = BlockPool(draw.choice([30, 36, 44, 80]) // size, size)
    swap = BlockPool(draw.randint(2, 40), size) if draw.random() < 0.6 else None
    sequences = draw.randint(2, 8)
    often = draw.choice(["recompute", "auto"] + ["swap"] * 2 * (swap is not None))
    options: Options = {
        "max_sequences": sequences,
        "token_budget": max(sequences, draw.choice([8, 8, 25, 100])),
        "policy": draw.choice(POLICIES),
        "max_chunk": draw.choice([None, 3, 3]),
        "chunked": draw.random() < 0.7,
        "patience": draw.choice([2, 256]),
        "prefix_caching": draw.random() < 0.8,
        "watermark": draw.choice([0.0, 0.01, 0.2, 0.6]),
        "preemption": often,
        "cheaper": lambda tokens: "swap" if tokens % 3 else "recompute",
    }
    if swaps:
        options |= {"token_budget": 8, "max_chunk": 3, "chunked": True, "preemption": "swap"}
        options |= {"max_sequences": 6, "prefix_caching": False, "watermark": 0.0}
        swap = BlockPool(60, size)
    chosen = make(pool, swap_pool=swap, **options)
    labels, preempted = Labels(chosen), list[bool]()
    make_room = chosen._make_room

    def noted(plan: Plan) -> bool:
        preempted.append(bool(make_room(plan)))
        return preempted[-1]

    setattr(chosen, "_make_room", noted)  # noqa: B010

    def shown(chosen: Scheduler, plan: Plan) -> Entry:
        labels.move(plan.moves)
        labels.run(plan)
        kinds = [move.kind for move in plan.moves]
        running = [(r.id, r.computed, labels.of(r)) for r in chosen.running]
        return {
            "work": [(w.request.id, w.start, w.count, int(w.rows)) for w in plan.work],
            "preempts": preempted[-1],
            "moves": [(kind, kinds.count(kind)) for kind in ("copy", "out", "in")],
            # A block that is copied into needs no wipe.
            "written": len({move.target for move in plan.moves if move.kind != "out"}),
            "running": running,
            "tables": [(r.id, len(chosen.tables[r].blocks)) for r in chosen.running],
            "waiting": [(r.id, r.state, r.computed) for r in chosen.waiting],
            "parents": [r.id for r in chosen.tables if r.parent is not None],
            "preempted": sorted(r.id for r in chosen._preempted),
            "swapped": sorted((r.id, len(kept)) for r, kept in chosen.swapped.items()),
            "swap pool": chosen.swap_pool.available if chosen.swap_pool else None,
            "counts": chosen.counts,
            "pool": state_of(chosen.pool),
        }

    call = f"Scheduler({pool.count} blocks of {size}, {options})"
    crowd = draw.choice([(9, 0.35), (30, 0.5), (30, 0.6)])
    steps = list(lives(draw, chosen, shown, *crowd))  # with the counts as they are in the end
    return {"call": call, "steps": steps}


def several(draw: Random, make: Callable[..., Scheduler] = Scheduler) -> Iterator[Entry]:
    for number in range(5):
        yield life(draw, make, swaps=number == 0)


def common(draw: Random) -> Iterator[Entry]:
    """Whole engines in little memory, with texts that begin alike."""
    model = tiny(draw)
    beginnings = [prompt_of(draw, 20) for _ in range(2)]
    pool = BlockPool(draw.randint(16, 24), 4)
    swap = BlockPool(12, 4) if draw.random() < 0.5 else None
    options: Options = {"token_budget": draw.choice([8, 30]), "max_sequences": 6, "watermark": 0.1}
    options |= {"preemption": draw.choice(["recompute", "swap"]) if swap else "recompute"}
    built = engine.make(model, pool=pool, swap_pool=swap, **options)
    log = whole_engine(
        draw,
        built,
        lambda id: Request(
            draw.choice(beginnings) + prompt_of(draw, 9),
            options_of(draw, longest=20),
            id,
            salt=draw.choice([b"", b"", b"salt"]),
        ),
    )
    for entry in log:
        entry.pop("events", None)
        yield entry
    yield {"call": "in the end", "counts": built.scheduler.counts, "pool": state_of(pool)}


def room(draw: Random) -> Iterator[Entry]:
    yield from several(draw)
    yield from common(draw)


def variant(draw: Random) -> Iterator[Entry]:
    """The rules of a student's own: see shared/course/variant.py."""
    classes: Any = import_module("variant")
    sizes = [classes.VariantPool(3).block_size, classes.VariantPool(3, 4).block_size]
    yield {"call": "the size of a block", "sizes": sizes}
    yield {"call": "VariantPool", "steps": blocks(draw, classes.VariantPool)}
    for _ in range(8):
        count = draw.randint(60, 400)
        chosen = classes.VariantScheduler(classes.VariantPool(count, 4))
        yield {"call": f"the watermark of {count} blocks", "blocks": chosen.watermark}
    for _ in range(2):
        yield from several(draw, classes.VariantScheduler)


DRIVERS = {1: blocks, 2: names, 3: places, 4: attend, 5: room, 6: room, 7: variant}
