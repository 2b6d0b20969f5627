"""Stage 03: the engine for a static batch. One step serves all rows, until the last row ends.

A batch has up to `max_batch` prompts. A row that has ended stays in it and wastes its part of each
step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from shared.errors import UserError
from shared.records import StepRecord
from stage01_forward.generation import (
    Output,
    Row,
    Sampling,
    Token,
    check_request,
    finish_reason,
    finite_rows,
    sampling_per_prompt,
)
from stage01_forward.model import GPT2
from stage01_forward.params import SamplingParams
from stage01_forward.sampling import sample

from .cache import PaddedCache


class Engine:
    """Generates with `model`, in batches of `max_batch` prompts. `eos_ids` None: the config's."""

    def __init__(
        self, model: GPT2, eos_ids: Sequence[int] | None = None, max_batch: int = 64
    ) -> None:
        self.model, self.config = model, model.config
        self.eos_ids = tuple(model.config.eos_ids if eos_ids is None else eos_ids)
        self.steps: list[StepRecord] = []  # of the last call, one for each forward pass
        self.max_batch = max_batch
        self.cache_bytes = 0  # of the largest cache of the last call

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Output]:
        """Continue every prompt (token ids) to its end. An invalid one ends with the reason
        "error"."""
        outputs = [Output(list(prompt)) for prompt in prompts]
        for _ in self.run(outputs, sampling):
            pass
        return outputs

    def stream(self, prompt: Sequence[int], sampling: SamplingParams) -> Iterator[Token]:
        """Continue one prompt. Yields each token as soon as it is sampled; the last one carries the
        finish reason."""
        output = Output(list(prompt))
        for _, token in self.run([output], sampling):
            yield token
        if output.error is not None:
            raise UserError(output.error)

    def run(self, outputs: Sequence[Output], sampling: Sampling) -> Iterator[tuple[int, Token]]:
        """Continue the prompts of `outputs`. Yields (index of the output, token) as soon as each
        token is sampled."""
        params = sampling_per_prompt([output.prompt_ids for output in outputs], sampling)
        self.steps, self.cache_bytes = [], 0
        valid = []
        for index, (output, param) in enumerate(zip(outputs, params, strict=True)):
            try:
                check_request(output.prompt_ids, param, self.config)
                valid.append(index)
            except UserError as error:
                output.fail(error)
        for start in range(0, len(valid), self.max_batch):
            batch = valid[start : start + self.max_batch]
            tokens = self._tokens([outputs[i] for i in batch], [params[i] for i in batch])
            for row, token in tokens:
                yield batch[row], token

    def _tokens(
        self, outputs: list[Output], params: list[SamplingParams]
    ) -> Iterator[tuple[int, Token]]:
        rows = [
            Row(param, output.prompt_ids, output.token_ids)
            for output, param in zip(outputs, params, strict=True)
        ]
        lengths = [len(row.prompt) for row in rows]
        config, width = self.config, max(lengths)
        room = config.n_positions
        longest = max(min(row.params.max_tokens, room - len(row.prompt)) for row in rows)
        columns = width + longest - 1  # the last token of an answer is never run
        cache = PaddedCache(config, lengths, columns, self.model.dtype, self.model.device)
        self.cache_bytes = max(self.cache_bytes, cache.kv.nbytes)
        # B rows of T ids; any id may serve as padding
        fresh = [[0] * (width - len(output.prompt_ids)) + output.prompt_ids for output in outputs]
        alive = list(range(len(rows)))  # those that have not ended
        while alive:
            started = time.perf_counter()
            logits = self._forward(fresh, cache, alive)  # (rows alive, V)
            finite = finite_rows(logits, [outputs[row] for row in alive])
            if len(finite) < len(alive):
                alive, logits = [alive[row] for row in finite], logits[finite]
            ids, logprobs = sample(logits, [rows[row] for row in alive], self.eos_ids)
            tokens = []
            for row, id, logprob in zip(alive, ids, logprobs, strict=True):
                token = Token(id, logprob, finish_reason(id, rows[row], config, self.eos_ids))
                outputs[row].append(token)
                tokens.append((row, token))
            prefill, decode = (sum(lengths), 0) if cache.length == width else (0, len(alive))
            wasted = len(fresh) * len(fresh[0]) - prefill - decode
            seconds = time.perf_counter() - started
            self.steps.append(StepRecord(len(alive), prefill, decode, seconds, wasted))
            alive = [row for row, token in tokens if token.finish_reason is None]
            # (B, 1); a row that has ended runs its last token again
            fresh = [output.token_ids[-1:] or [0] for output in outputs]
            yield from tokens

    @torch.inference_mode()
    def _forward(self, ids: list[list[int]], cache: PaddedCache, alive: list[int]) -> torch.Tensor:
        """Logits (rows alive, V) for the token after the cached ones and `ids` (B, T)."""
        tokens = torch.tensor(ids, device=self.model.device)  # (B, T)
        attention = cache.extend(tokens.shape[1])
        hidden = self.model(tokens, attention.positions, attention.attend)  # (B, T) -> (B, T, C)
        return self.model.logits(hidden[alive, -1])  # (rows alive, C) -> (rows alive, V)


def make(model: GPT2, contexts: int | None = None, eos_ids: Sequence[int] | None = None) -> Engine:
    """An engine for `model` with at most `contexts` prompts in a batch; None: its default."""
    return Engine(model, eos_ids) if contexts is None else Engine(model, eos_ids, contexts)
