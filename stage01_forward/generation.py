"""What goes into an engine, what comes out, and when a sequence ends: the same for every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shared.checkpoint import Config
from shared.errors import UserError

from .sampling import NOT_FINITE, Logprobs, SamplingParams

Sampling = SamplingParams | Sequence[SamplingParams]


@dataclass(frozen=True)
class Token:
    """One generated token, its log-probabilities if asked for, and why the sequence ended with it (None: it goes on)."""

    id: int
    logprobs: Logprobs | None
    finish_reason: str | None


@dataclass
class Output:
    """A finished sequence. `token_ids` holds the end-of-text token too if that is what ended it."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = (
        None  # "stop": end-of-text or a stop token; "length": max_tokens or the context is full
    )
    logprobs: list[Logprobs] = field(default_factory=list)
    error: str | None = (
        None  # engines that run several requests at once report a bad one here ("error"); the others go on
    )

    def append(self, token: Token) -> None:
        self.token_ids.append(token.id)
        self.finish_reason = token.finish_reason
        if token.logprobs is not None:
            self.logprobs.append(token.logprobs)

    def fail(self, error: UserError) -> None:
        """End with the reason "error"."""
        self.finish_reason, self.error = "error", str(error)


def check_request(prompt: Sequence[int], params: SamplingParams, config: Config) -> None:
    """Raise UserError for a prompt that `config` cannot continue, or sampling that does not fit its vocabulary."""
    if not prompt:
        raise UserError(
            "The prompt is empty: give at least one token, for instance the text 'Once upon a time'."
        )
    if len(prompt) >= config.n_positions:
        raise UserError(
            f"The prompt has {len(prompt)} tokens, and {config.name} sees {config.n_positions} with the answer "
            f"counted in: shorten the prompt to {config.n_positions - 1} tokens or fewer."
        )
    if min(prompt) < 0 or max(prompt) >= config.vocab_size:
        wrong = next(i for i in prompt if not 0 <= i < config.vocab_size)
        raise UserError(
            f"Token id {wrong} is not in the vocabulary: ids go from 0 to {config.vocab_size - 1}."
        )
    params.check_vocabulary(config.vocab_size)


def finite_rows(logits: Tensor, outputs: Sequence[Output]) -> list[int]:
    """The rows of logits (R, V) that can be sampled. The outputs of the others end with an error, and no neighbour does."""
    finite = logits.amax(-1).isfinite().tolist()
    for output, good in zip(outputs, finite, strict=True):
        if not good:
            output.fail(UserError(NOT_FINITE))
    return [row for row, good in enumerate(finite) if good]


def sampling_per_prompt(
    prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[SamplingParams]:
    """One SamplingParams a prompt, from one for all or from a list of equal length."""
    if isinstance(sampling, SamplingParams):
        return [sampling] * len(prompts)
    if len(sampling) != len(prompts):
        raise UserError(
            f"There are {len(prompts)} prompts and {len(sampling)} sampling settings: give one for all, or one each."
        )
    return list(sampling)


def finish_reason(
    output_ids: Sequence[int],
    prompt_length: int,
    params: SamplingParams,
    config: Config,
    eos_ids: Sequence[int],
) -> str | None:
    """Why the sequence ends with its newest token, or None if it goes on.

    "stop" goes before "length", as in vLLM: an end-of-text token on the last allowed place is still a stop.
    """
    newest = output_ids[-1]
    if len(output_ids) >= params.min_tokens:
        if newest in eos_ids and not params.ignore_eos:
            return "stop"
        if newest in params.stop_token_ids:
            return "stop"
    if (
        len(output_ids) >= params.max_tokens
        or prompt_length + len(output_ids) >= config.n_positions
    ):
        return "length"
    return None
