"""Random lives of an engine on ranks, beside the naive engine: GPT-2 on two; by -m slow a Llama on
three, more than it has heads of keys and values."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from shared.testing import wide_norm
from stage04_continuous.tests import oracle
from stage04_continuous.tests.lives import live
from stage05_paged.cache import PagedCache
from stage05_paged.tests import test_contract as paged
from stage08_llama.model import RMSNorm
from stage08_llama.tests.test_contract import GROUPED
from stage12_distributed.tensor.group import RankRunner, Setup
from stage12_distributed.tensor.shard import heads_of
from stage12_distributed.tests.parts import close_groups, group_of, random_model

LLAMA = replace(GROUPED, layer_norm_epsilon=3e-5)  # no other test gets the answers of `wide_norm`


@pytest.fixture(
    autouse=True, params=[oracle.CONFIG, pytest.param(LLAMA, marks=pytest.mark.slow)], ids=str
)
def shape(request):
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, oracle.shape(request.param):
        torch.set_num_threads(1)
        patch.setattr(RMSNorm, "forward", wide_norm)
        yield
    torch.set_num_threads(threads)
    close_groups()


def ranks_of(config: Any) -> int:
    return 3 if config == LLAMA else 2


def make_cache(config: Any, *rest: Any) -> PagedCache:
    """Rank 0's part of the cache."""
    queries, kv = heads_of(config, 0, ranks_of(config))
    return PagedCache(replace(config, n_head=len(queries), n_kv_head=len(kv)), *rest)


def make_runner(model: Any, cache: PagedCache) -> RankRunner:
    """The runner of the ranks with `model`, which is whole here: the oracle runs it, too."""
    load = partial(random_model, model.config)
    group = group_of(Setup(load, ranks_of(model.config), timeout=20.0))
    return RankRunner(group.model, cache)


class RanksLife(paged.PagedLife):
    def make(self, sequences, token_budget, **options):
        ranks: Any = {"make_cache": make_cache, "make_runner": make_runner}
        return super().make(sequences, token_budget, **ranks, **options)


@pytest.mark.parametrize("examples", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_lives_of_fifty_calls(examples):
    """Preemption, swapping, prefix hits, samples and forks."""
    live(RanksLife, examples)
