"""The shards of a model: ranks that are threads give the logits of the whole, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from shared.errors import UserError
from shared.tests.int8 import Int8, Int8Linear
from stage08_llama.tests.test_contract import GROUPED
from stage12_distributed.tensor.collectives import Collectives
from stage12_distributed.tensor.shard import shard
from stage12_distributed.tests.parts import ODD, in_threads, logits_of, random_model

UNTIED = replace(ODD, tied=False)
BIASED = replace(GROUPED, qkv_bias=True, n_inner=41)
LLAMA3 = replace(GROUPED, n_head=3, n_kv_head=1)


def parameters(model) -> int:
    """Numbers kept in memory: views share theirs."""
    storages = {}
    for tensor in model.state_dict().values():
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes() // tensor.itemsize
    return sum(storages.values())


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "config", [ODD, UNTIED, GROUPED, BIASED, LLAMA3], ids=["gpt2", "untied", "llama", "biases", "3"]
)
def test_the_logits_of_all_ranks_are_those_of_the_whole(config, ranks):
    """Nonzero biases, 3 heads on 2 ranks, an odd vocabulary, copied KV heads."""
    ids = [5, 17, 3, 99, 41, 8, 8, 60]
    whole = random_model(config)
    parts, want = in_threads(config, ranks, ids), logits_of(whole, ids)
    got = parts[0][1]
    assert got.shape == want.shape == (8, 101)
    assert (got - want).abs().max() < 1e-10 * want.abs().max()
    if ranks > 1:
        sizes = [parameters(model) for model, _ in parts]
        assert max(sizes) < parameters(whole) * (0.8 if ranks == 2 else 0.7)
        for model, _ in parts:  # tied, an output layer takes no memory; else that of its part
            weight = model.lm_head.part.weight
            assert (weight.untyped_storage().nbytes() > weight.nbytes) == config.tied


@pytest.mark.parametrize("config", [ODD, BIASED], ids=["gpt2", "llama"])
def test_layers_of_another_format_split_themselves(config):
    make = partial(random_model, conversion=Int8())
    ids, whole = [5, 17, 3, 99, 41], make(config)
    (first, got), (second, _) = in_threads(config, 2, ids, make)
    want = logits_of(whole, ids)
    assert (got - want).abs().max() < 1e-10 * want.abs().max()
    sizes = [
        [layer.weight.numel() for layer in model.modules() if isinstance(layer, Int8Linear)]
        for model in (whole, first, second)
    ]
    assert all(a + b == both for both, a, b in zip(*sizes, strict=True)) and len(sizes[0]) > 8


def test_what_a_part_cannot_do_is_refused():
    for config, ranks in ((ODD, 4), (GROUPED, 7)):
        with pytest.raises(UserError, match=f"too few for {ranks} ranks: choose fewer"):
            shard(random_model(config), Collectives(0, ranks))
