"""A small model that drafts for a large one. It has keys and values of its own, at the same
addresses.

The small model's cache has the same blocks as the large one's. Before each pass it does the same
moves and reads the same tokens, so what holds for the one cache holds for the other: a block found
by its digest, copied, swapped out and in has the keys and values of both. To draft, it goes on from
there token by token. What it writes then is overwritten by the next pass, and tokens past the end
of a table go to blocks of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shared.errors import UserError
from stage01_forward.generation import Row
from stage01_forward.sampling import distribution, draw, edit
from stage04_continuous.request import Request
from stage04_continuous.runner import AnyRunner, Runner
from stage05_paged.blocks import BlockPool, BlockTable, Move
from stage05_paged.cache import PagedCache
from stage09_kernels.backend import NoKernels, backend_of

from .drafts import DraftPlan, Drafts
from .rejection import Draws


def first_layers(model: Any, count: int) -> Any:
    """A draft model for nothing: copies of the first layers of `model`, its embeddings and head."""
    draft = copy.copy(model)
    (name,) = (name for name, kind in model.named_children() if isinstance(kind, nn.ModuleList))
    layers = nn.ModuleList(list(getattr(model, name))[:count])
    draft._modules = copy.deepcopy(model._modules | {name: layers})
    draft.config = replace(model.config, n_layer=count)
    return draft


class DraftModel:
    """Proposes what `model` would say; at the same time an observer of the engine's passes.

    pool, tables: those of the target's scheduler. most, sequences: of drafts of a request, and of
        requests in a pass. draws: whether sampling requests get drafts drawn from the model's
        distribution, which `drawn` keeps for `Rejection`; else its likeliest tokens.
    eos_ids: end ids, for requests with min_tokens.
    Raises UserError if the models have other vocabularies.
    """

    def __init__(
        self,
        model: Any,
        target: Any,
        pool: BlockPool,
        tables: Mapping[Request, BlockTable],
        most: int,
        sequences: int,
        swap_blocks: int = 0,
        draws: bool = False,
        eos_ids: Sequence[int] = (),
    ) -> None:
        ours, theirs = model.config.vocab_size, target.vocab_size
        if ours != theirs:
            raise UserError(
                f"The draft model {model.config.name} has {ours} tokens and {target.name} "
                f"{theirs}: choose one with the same vocabulary."
            )
        if model.config.n_positions < target.n_positions:
            raise UserError(
                f"The draft model {model.config.name} sees {model.config.n_positions} tokens and "
                f"{target.name} {target.n_positions}: lower --max-model-len, or choose another."
            )
        self.pool, self.tables, self.draws, self.eos_ids = pool, tables, draws, eos_ids
        self.spare = -(-most // pool.block_size)  # blocks past the end of a table
        count = pool.count + self.spare * min(sequences, pool.count)
        self.runner = _runner(model, count, pool.block_size, swap_blocks, model.dtype, model.device)
        self.drawn: dict[Request, Draws] = {}  # of this pass
        self.generators: dict[Request, torch.Generator] = {}
        self.moved = 0  # moves of the plan that are done

    def prepare(self, moves: Sequence[Move]) -> None:
        """Do a plan's moves, among whose blocks drafts are read and written."""
        self.runner.move(moves)
        self.moved = len(moves)

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[Drafts]:
        self.drawn.clear()
        drafts: list[Drafts] = [[] for _ in requests]
        going = [
            index
            for index, (request, count) in enumerate(zip(requests, most, strict=True))
            if count and request.decoding  # a prompt's last tokens are not read yet
        ]
        while going:
            ids, shares = [], []
            for index in going:  # the newest token of each, at its place
                request, last = requests[index], requests[index].token_count - 1
                ids.append((request.tokens(last, 1) + drafts[index])[-1])
                shares.append((self._table(index, request), last + len(drafts[index]), 1))
            logits = self.runner.run(ids, shares, list(range(len(going))))
            for index, scores in zip(going, logits, strict=True):
                scores = scores.to("cpu", torch.float64, copy=True)
                drafts[index].append(self._token(requests[index], drafts[index], scores))
            going = [index for index in going if len(drafts[index]) < most[index]]
        return drafts

    def before(self, plan: DraftPlan) -> None:
        """Prepare the same memory and read the same tokens as the target."""
        self.runner.move(plan.moves[self.moved :])  # those of the drafts' blocks
        ids, shares, _ = plan.tokens()
        if ids:
            self.runner.run(ids, shares, [])

    def after(self, plan: DraftPlan) -> None:
        """Nothing to do."""

    def forget(self, request: Request) -> None:
        self.generators.pop(request, None)

    def _table(self, index: int, request: Request) -> list[int]:
        first = self.pool.count + index * self.spare
        return self.tables[request].blocks + list(range(first, first + self.spare))

    def _token(self, request: Request, drafts: Drafts, scores: Tensor) -> int:
        # The request's options hold for its drafts, too: without them fewer would be accepted.
        output = request.output.token_ids
        row = Row(request.sampling, request.prompt_ids, [*output, *drafts])
        edit(scores, row, self.eos_ids)
        if not self.draws or request.sampling.greedy:
            return int(scores.argmax())
        draws = self.drawn.setdefault(request, Draws(len(output), drafts, []))
        draws.q.append(distribution(scores, request.sampling))
        generator = self.generators.get(request)
        if generator is None:
            # Others than those that accept the drafts, which must not depend on what was drawn.
            generator = self.generators[request] = request.sampling.generator()
            generator.manual_seed((generator.initial_seed() ^ 0x9E3779B9) % 2**63)
        return draw(draws.q[-1], float(torch.rand((), dtype=torch.float64, generator=generator)))


def _runner(model: Any, *memory: Any) -> AnyRunner:
    """A runner over a cache of this memory, as PagedCache takes it: with kernels, where there are
    some for the model."""
    try:
        kernels = backend_of(model.device)
        return kernels.runner(model, kernels.cache(model.config, *memory))
    except NoKernels:
        return Runner(model, PagedCache(model.config, *memory))
