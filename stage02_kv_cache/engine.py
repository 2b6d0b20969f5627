"""Stage 02: the engine with a KV cache. The prompt is computed once (prefill), then each token on its own (decode).

One request at a time, as before. One cache is allocated when the engine is made and used again by every request.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from shared.records import StepRecord
from stage01_forward.generation import (
    Output,
    Sampling,
    Token,
    check_request,
    finish_reason,
    sampling_per_prompt,
)
from stage01_forward.model import GPT2
from stage01_forward.sampling import SamplingParams, sample

from .cache import KVCache


class Engine:
    """Generates with `model`, one prompt after the other. `eos_ids` None: those of the model's config."""

    def __init__(self, model: GPT2, eos_ids: Sequence[int] | None = None) -> None:
        self.model, self.config = model, model.config
        self.eos_ids = tuple(model.config.eos_ids if eos_ids is None else eos_ids)
        self.steps: list[StepRecord] = []  # one a forward pass, of the last call
        self.cache = KVCache(model.config, dtype=model.dtype, device=model.device)
        self._owner: object = None  # the request whose tokens the cache holds

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Output]:
        """Continue every prompt (token ids) to its end. Raises UserError before any work if one of them is unfit."""
        params = sampling_per_prompt(prompts, sampling)
        for prompt, each in zip(prompts, params, strict=True):
            check_request(prompt, each, self.config)
        outputs = [Output(list(prompt)) for prompt in prompts]
        self.steps = []
        for output, each in zip(outputs, params, strict=True):
            for token in self._tokens(output.prompt_ids, each):
                output.append(token)
        return outputs

    def stream(self, prompt: Sequence[int], sampling: SamplingParams) -> Iterator[Token]:
        """Continue one prompt, each token as soon as it is there; the last one carries the finish reason."""
        check_request(prompt, sampling, self.config)
        self.steps = []
        yield from self._tokens(list(prompt), sampling)

    def _tokens(self, prompt: list[int], params: SamplingParams) -> Iterator[Token]:
        output_ids: list[int] = []
        generator = params.generator()
        reason = None
        self.cache.crop(0)  # the slots of the request before are free again
        self._owner = owner = object()
        fresh = prompt  # what the cache has not seen yet: first the prompt, then one token a pass
        while reason is None:
            if self._owner is not owner:
                raise RuntimeError(
                    "another request has taken this engine's cache: read one stream to its end before the next"
                )
            started = time.perf_counter()
            logits = self._forward(fresh)
            ids, logprobs = sample(
                logits[None], [params], [(prompt, output_ids)], [generator], self.eos_ids
            )
            output_ids.append(int(ids[0]))
            reason = finish_reason(output_ids, len(prompt), params, self.config, self.eos_ids)
            prefill, decode = (len(fresh), 0) if fresh is prompt else (0, 1)
            self.steps.append(StepRecord(1, prefill, decode, time.perf_counter() - started))
            fresh = output_ids[-1:]
            yield Token(output_ids[-1], logprobs[0], reason)

    @torch.inference_mode()
    def _forward(self, ids: list[int]) -> torch.Tensor:
        """Logits (V,) for the token after `ids` (T,), which follow what the cache holds."""
        tokens = torch.tensor(ids, device=self.model.device)  # (T,)
        attention = self.cache.extend(len(ids))
        hidden = self.model(tokens, attention.positions, attention.attend)  # (T,) -> (T, C)
        return self.model.logits(hidden[-1])  # (C,) -> (V,)
