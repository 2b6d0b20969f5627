"""Stage 01: the naive engine. Each new token costs a forward pass over the whole sequence.

It serves one request at a time and keeps nothing between steps. It is slow on purpose: it is the
oracle that every later engine must match token for token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from shared.records import StepRecord

from .attention import Recompute
from .generation import (
    Output,
    Row,
    Sampling,
    Token,
    check_request,
    finish_reason,
    sampling_per_prompt,
)
from .model import GPT2
from .params import SamplingParams
from .sampling import sample


class Engine:
    """Generates with `model`, one prompt after the other. `eos_ids` None: the config's."""

    def __init__(self, model: GPT2, eos_ids: Sequence[int] | None = None) -> None:
        self.model, self.config = model, model.config
        self.eos_ids = tuple(model.config.eos_ids if eos_ids is None else eos_ids)
        self.steps: list[StepRecord] = []  # of the last call, one for each forward pass

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
        while output.finish_reason is None:
            started, repeated = time.perf_counter(), len(answer)
            logits = self._forward(prompt + answer)  # all of it, again
            (id,), (logprobs,) = sample(logits[None], [row], self.eos_ids)
            token = Token(id, logprobs, finish_reason(id, row, self.config, self.eos_ids))
            output.append(token)
            self.steps.append(StepRecord(1, len(prompt), repeated, time.perf_counter() - started))
            yield token

    @torch.inference_mode()
    def _forward(self, ids: list[int]) -> torch.Tensor:
        """Logits (V,) for the token after `ids` (T,)."""
        tokens = torch.tensor(ids, device=self.model.device)  # (T,)
        positions = torch.arange(len(ids), device=self.model.device)
        hidden = self.model(tokens, positions, Recompute().attend)  # (T, C)
        return self.model.logits(hidden[-1])  # (C,) -> (V,)


def make(model: GPT2, contexts: int | None = None, eos_ids: Sequence[int] | None = None) -> Engine:
    """An engine for `model`. It has no cache, so `contexts` has no effect."""
    return Engine(model, eos_ids)
