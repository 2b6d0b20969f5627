"""The figures of quality: by their definitions, and nothing for a model that is the same."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from shared.errors import UserError
from shared.linear import convert
from shared.models import load, load_model
from shared.stories import grammar
from shared.tokenizer import load_tokenizer
from stage01_forward.attention import Recompute
from stage01_forward.scoring import perplexity
from stage10_quantization import quality
from stage10_quantization.convert import Quantize


@pytest.fixture(scope="module")
def models():
    checkpoint = load("stories")
    model = load_model(checkpoint)
    quantized = copy.deepcopy(model)
    convert(quantized, Quantize("int4", "float"), {})  # kernels round less than a code
    return model, quantized, load_tokenizer(checkpoint.folder), checkpoint.folder


@pytest.fixture(scope="module")
def engines(models):
    return tuple(map(quality.engine_of, models[:2]))


def test_nats_are_the_cross_entropy_of_each_story_and_their_floor_the_grammars(models, engines):
    model, quantized, tokenizer, folder = models
    nats = quality.held_out(engines[0], engines[1], tokenizer, 5)
    stream, tokens, floor, both = grammar.stories("held out"), 0, 0.0, [0.0, 0.0]
    differences = []
    for story in (next(stream) for _ in range(5)):
        ids = [2047, *tokenizer.encode(story.text), 2047]
        results = [perplexity(m, ids) for m in (model, quantized)]
        judged = results[0]["tokens"]
        tokens, floor = tokens + int(judged), floor - story.log_probability
        both = [n + r["cross_entropy"] * judged for n, r in zip(both, results, strict=True)]
        differences.append(results[1]["cross_entropy"] - results[0]["cross_entropy"])
    assert (nats.stories, nats.tokens) == (5, tokens)
    expected = pytest.approx([floor / tokens, both[0] / tokens, both[1] / tokens], rel=1e-5)
    assert [nats.floor, nats.float_model, nats.quantized] == expected
    assert min(differences) < nats.low < nats.difference < nats.high < max(differences)
    card = json.loads((folder / "evaluation.json").read_text())["held_out"]
    assert nats.floor == pytest.approx(card["floor"], rel=0.1)  # of other stories among them
    assert f"difference {nats.difference:+.5f}" in str(nats)


@pytest.mark.parametrize("name", ["stories", "stories-chat"])
def test_stories_are_read_as_the_model_learnt_them(name):
    """In float it is as near to the floor as its card says."""
    checkpoint = load(name)
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint.folder)
    engine = quality.engine_of(model)
    nats = quality.held_out(engine, engine, tokenizer, 10)
    assert checkpoint.folder
    card = json.loads((checkpoint.folder / "evaluation.json").read_text())["held_out"]
    assert abs((nats.float_model - nats.floor) - (card["cross_entropy"] - card["floor"])) < 2e-3


def test_the_divergence_is_that_of_the_second_half_of_whole_windows(models, engines):
    model, quantized, tokenizer, _ = models
    ids = quality.text_ids(tokenizer, 2047, 2 * 512 + 300, None, "judged")
    found = quality.divergence(engines[0], engines[1], ids)
    assert (found.windows, found.tokens) == (2, 2 * 255)
    kl, lost, same = [], [], 0
    for start in (0, 512):
        window = torch.tensor(ids[start : start + 512])
        with torch.inference_mode():
            hidden = [m(window, torch.arange(512), Recompute().attend) for m in (model, quantized)]
            rows = [model.logits(hidden[0]), quantized.logits(hidden[1])]
        p, q = (r.double().softmax(-1)[256:511] for r in rows)
        lost.append((p / q).log().gather(1, window[257:, None]).sum().item())
        kl += torch.nn.functional.kl_div(q.log(), p, reduction="none").sum(-1).tolist()
        same += sum(a == b for a, b in zip(p.argmax(-1), q.argmax(-1), strict=True))
    assert found.mean == pytest.approx(sum(kl) / 510, rel=1e-3)
    assert found.highest == pytest.approx(max(kl), rel=1e-3) and found.top_1 == same / 510
    assert sorted(kl)[-3] < found.percentile <= found.highest
    assert found.difference == pytest.approx(sum(lost) / 510, rel=1e-3)
    assert min(lost) / 255 <= found.low + 1e-6 < found.high <= max(lost) / 255 + 1e-6
    assert "windows of 512, second half scored" in str(found)
    with pytest.raises(UserError, match="511 tokens.* window has 512"):
        quality.divergence(engines[0], engines[1], ids[:511])


def test_a_model_differs_in_nothing_from_itself(models, engines):
    tokenizer, (model, quantized) = models[2], engines
    nats = quality.held_out(model, model, tokenizer, 2)
    assert nats.difference == nats.low == nats.high == 0
    found = quality.divergence(model, model, list(range(600)))
    assert (found.mean, found.percentile, found.highest, found.top_1) == (0, 0, 0, 1)
    prompts = [tokenizer.encode("Once upon a time"), tokenizer.encode("Long ago")]
    assert quality.first_differences(model, model, prompts, 20) == [None, None]
    params = quality.SamplingParams(max_tokens=60)
    places = quality.first_differences(model, quantized, prompts, 60)
    answers = [m.generate(prompts, params) for m in (model, quantized)]
    for place, want, have in zip(places, *answers, strict=True):
        assert want.token_ids[:place] == have.token_ids[:place]
        assert place is None or want.token_ids[place] != have.token_ids[place]
    assert any(place is not None for place in places)


def test_keys_and_values_in_int8_cost_something(models, engines):
    """The model is the same; what an engine keeps of it is not."""
    model, _, tokenizer, _ = models
    ids = quality.text_ids(tokenizer, 2047, 512, None, "judged")
    found = quality.divergence(engines[0], quality.engine_of(model, dtype=torch.int8), ids)
    assert 0 < found.mean < 1e-3


def test_the_command_prints_each_figure_with_its_protocol(capsys, tmp_path):
    quality.main(["--weights", "int8", "--stories", "2", "--windows", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "2 held-out stories",
        "1 windows of 512",
        lines[2].split(",")[0],
    ]
    assert lines[2].startswith("first difference of 1 greedy answers")
    short = tmp_path / "short.txt"
    short.write_text("Once upon a time.")
    with pytest.raises(UserError, match="window has 512"):
        quality.main(["--stories", "0", "--text", str(short)])
    with pytest.raises(UserError, match="calibration text has"):
        quality.main(["--gptq", "2", "--text", str(short)])
