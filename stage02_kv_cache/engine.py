"""Stage 02: the engine with a KV cache. One step over the prompt (prefill), then one for each token
(decode).

One request at a time, as before. The engine allocates one cache, and its requests use it in turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from shared.records import StepRecord
from stage01_forward.generation import (
    Output,
    Row,
    Sampling,
    Token,
    check_request,
    finish_reason,
    sampling_per_prompt,
)
from stage01_forward.model import GPT2
from stage01_forward.params import SamplingParams
from stage01_forward.sampling import sample

from .cache import KVCache


class Engine:
    """Generates with `model`, one prompt after the other. `eos_ids` None: the config's."""

    def __init__(self, model: GPT2, eos_ids: Sequence[int] | None = None) -> None:
        self.model, self.config = model, model.config
        self.eos_ids = tuple(model.config.eos_ids if eos_ids is None else eos_ids)
        self.steps: list[StepRecord] = []  # of the last call, one for each forward pass
        self.cache = KVCache(self.config, dtype=model.dtype, device=model.device)
        self._owner: Output | None = None  # of the request whose tokens the cache holds

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Output]:
        """Continue every prompt (token ids) to its end. Raises UserError if one is invalid, before
        any work."""
        params = sampling_per_prompt(prompts, sampling)
        for prompt, param in zip(prompts, params, strict=True):
            check_request(prompt, param, self.config)
        outputs = [Output(list(prompt)) for prompt in prompts]
        self.steps = []
        for output, param in zip(outputs, params, strict=True):
            for _ in self._tokens(output, param):
                pass
        return outputs

    def stream(self, prompt: Sequence[int], sampling: SamplingParams) -> Iterator[Token]:
        """Continue one prompt. Yields each token as soon as it is sampled; the last one carries the
        finish reason."""
        check_request(prompt, sampling, self.config)
        self.steps = []
        yield from self._tokens(Output(list(prompt)), sampling)

    def _tokens(self, output: Output, params: SamplingParams) -> Iterator[Token]:
        prompt, answer = output.prompt_ids, output.token_ids
        row = Row(params, prompt, answer)
        self.cache.length = 0  # the slots of the last request are free again
        self._owner = output
        fresh = prompt  # not in the cache yet: first the prompt, then one token a step
        while output.finish_reason is None:
            if self._owner is not output:
                raise RuntimeError("another stream has taken the cache: read one to its end first")
            started = time.perf_counter()
            logits = self._forward(fresh)
            (id,), (logprobs,) = sample(logits[None], [row], self.eos_ids)
            token = Token(id, logprobs, finish_reason(id, row, self.config, self.eos_ids))
            output.append(token)
            prefill, decode = (len(fresh), 0) if fresh is prompt else (0, 1)
            self.steps.append(StepRecord(1, prefill, decode, time.perf_counter() - started))
            fresh = answer[-1:]
            yield token

    @torch.inference_mode()
    def _forward(self, ids: list[int]) -> torch.Tensor:
        """Logits (V,) for the token after `ids` (T,), which follow what the cache holds."""
        tokens = torch.tensor(ids, device=self.model.device)  # (T,)
        attention = self.cache.extend(len(ids))
        hidden = self.model(tokens, attention.positions, attention.attend)  # (T,) -> (T, C)
        return self.model.logits(hidden[-1])  # (C,) -> (V,)


def make(model: GPT2, contexts: int | None = None, eos_ids: Sequence[int] | None = None) -> Engine:
    """An engine for `model`. It runs one sequence at a time, so `contexts` has no effect."""
    return Engine(model, eos_ids)
