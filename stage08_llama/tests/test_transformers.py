"""Every family and every kind of rotary positions against transformers, in float64, from its own
folders, and through every engine."""

from __future__ import annotations

import json

import pytest
import torch

from shared import models, testing
from shared.peers import transformers_batch
from stage01_forward.attention import Recompute
from stage01_forward.params import SamplingParams
from stage08_llama.config import LlamaConfig
from stage08_llama.tests.folders import KINDS, save

LENGTH = 60  # tokens: most kinds of rotary positions agree on short prompts
# Kinds that differ for a cache, by heads and their width. The others differ in the model alone, and
# their logits tell.
CACHES = ["llama", "llama, one kv head", "llama, three heads", "llama, wide heads"]


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A kind's name, its folder, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("folder")
    return request.param, folder, save(folder, request.param)


def load(folder):
    loaded = models.load(str(folder))
    assert isinstance(loaded.config, LlamaConfig)
    return models.load_model(loaded)


@torch.inference_mode()
def test_logits_are_those_of_transformers(pair):
    """As far as a model with a sliding window reaches here, which is its window."""
    kind, folder, theirs = pair
    ours = load(folder)
    assert ours.config.parameter_count == theirs.num_parameters()
    length = min(LENGTH, ours.config.n_positions)
    assert (length < LENGTH) == kind.endswith(", window")
    ids = torch.randint(0, 101, (length,), generator=torch.Generator().manual_seed(1))
    want = theirs(ids[None]).logits[0]
    got = ours.logits(ours(ids, torch.arange(length), Recompute().attend))
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("pair", CACHES, indirect=True)
def test_every_engine_gives_the_tokens_of_transformers(pair):
    _, folder, theirs = pair
    model, params = load(folder), SamplingParams(max_tokens=14)
    prompts = [[7], [3, 1, 4, 1, 5], list(range(2, 40))]
    want = [transformers_batch(theirs, [prompt], 14)[0] for prompt in prompts]
    assert len({token for answer in want for token in answer}) > 6
    for name, make in testing.engines().items():
        assert [o.token_ids for o in make(model).generate(prompts, params)] == want, name


def test_older_spellings_of_rotary_positions(tmp_path):
    """rope_theta and rope_scaling, with rope_type or type, as transformers 4 wrote them."""
    for kind in ("theta", "linear", "llama3"):
        save(tmp_path, kind)
        path = tmp_path / "config.json"
        fields = json.loads(path.read_text())
        want = models.load(str(tmp_path)).config
        scaling = fields.pop("rope_parameters")
        fields["rope_theta"] = scaling.pop("rope_theta")
        for key in ("rope_type", "type"):
            scaling[key] = scaling.pop("rope_type", None) or scaling.pop("type")
            fields["rope_scaling"] = None if kind == "theta" else dict(scaling)
            path.write_text(json.dumps(fields))
            assert models.load(str(tmp_path)).config == want
