"""For all stages: what goes into an engine, what comes out, when a sequence ends. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.config import Config
from shared.errors import UserError

from .params import SamplingParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Sampling = SamplingParams | Sequence[SamplingParams]
NOT_FINITE = (
    "The model's scores are NaN or infinite, so there is no next token: use another --dtype "
    "(float16 overflows easily), or check the weights."
)


@dataclass
class Row:
    """One sequence as a sampler sees it.

    output: the ids so far; the list that grows, so one row serves for a whole answer.
    generator: of its random numbers; None: `dart` makes it, from the seed in `params`.
    """

    params: SamplingParams
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    generator: torch.Generator | None = None

    def dart(self) -> float:
        """The row's next random number, at least 0 and below 1. A drawn token takes one."""
        import torch  # here, because schedulers import this module

        if self.generator is None:
            self.generator = self.params.generator()
        return torch.rand((), dtype=torch.float64, generator=self.generator).item()


@dataclass
class Logprobs:
    """Log probabilities (natural) at one position, before any option changes the scores."""

    token: float  # of the token that was taken
    top: list[tuple[int, float]]  # (id, logprob) of the likeliest; a tie goes to the lower id
    highest: float  # the highest logit itself: log probabilities hide how large logits are


@dataclass(frozen=True)
class Token:
    """One generated token. finish_reason: why the sequence ended with it, None if it did not."""

    id: int
    logprobs: Logprobs | None
    finish_reason: str | None


@dataclass
class Output:
    """One prompt and its output, including the end-of-text token if that ended it.

    finish_reason: "stop" (end of text or a stop token), "length" (max_tokens or a full context) or
    "error": engines for several requests explain it in `error`, and the other requests continue.
    """

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    tokens: list[Token] = field(default_factory=list)  # `token_ids`, each with what came with it
    error: str | None = None

    @property
    def logprobs(self) -> list[Logprobs]:
        """Of each token, if they were requested."""
        return [token.logprobs for token in self.tokens if token.logprobs is not None]

    def append(self, token: Token) -> None:
        self.token_ids.append(token.id)
        self.tokens.append(token)
        self.finish_reason = token.finish_reason

    def fail(self, error: UserError) -> None:
        """End with the reason "error"."""
        self.finish_reason, self.error = "error", str(error)


def check_request(prompt: Sequence[int], params: SamplingParams, config: Config) -> None:
    """Raise UserError for a prompt or sampling options that do not fit the model."""
    if not prompt:
        raise UserError(
            "The prompt is empty: give at least one token, for instance 'Once upon a time'."
        )
    if len(prompt) >= config.n_positions:
        raise UserError(
            f"The prompt has {len(prompt)} tokens, but {config.name} sees {config.n_positions}, "
            f"answer included: shorten the prompt to {config.n_positions - 1} tokens or fewer."
        )
    if min(prompt) < 0 or max(prompt) >= config.vocab_size:
        wrong = next(i for i in prompt if not 0 <= i < config.vocab_size)
        raise UserError(
            f"Token id {wrong} is not in the vocabulary: ids go from 0 to {config.vocab_size - 1}."
        )
    params.check_vocabulary(config.vocab_size, config.eos_ids)


def finite_rows(logits: Tensor, outputs: Sequence[Output]) -> list[int]:
    """The rows of logits (R, V) that are finite. The outputs of the others end with an error."""
    finite = logits.amax(-1).isfinite().tolist()
    for output, good in zip(outputs, finite, strict=True):
        if not good:
            output.fail(UserError(NOT_FINITE))
    return [row for row, good in enumerate(finite) if good]


def sampling_per_prompt(
    prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[SamplingParams]:
    """One SamplingParams for each prompt, from one for all or from a list of equal length."""
    if isinstance(sampling, SamplingParams):
        return [sampling] * len(prompts)
    if len(sampling) != len(prompts):
        raise UserError(
            f"There are {len(prompts)} prompts and {len(sampling)} sampling settings: give one for "
            "all, or one for each."
        )
    return list(sampling)


def finish_reason(token_id: int, row: Row, config: Config, eos_ids: Sequence[int]) -> str | None:
    """Why the sequence ends with `token_id`, the next of its output; None if it does not end.

    "stop" precedes "length", as in vLLM: an end of text as the last allowed token is a stop.
    """
    params, length = row.params, len(row.output) + 1
    if length >= params.min_tokens:
        if token_id in eos_ids and not params.ignore_eos:
            return "stop"
        if token_id in params.stop_token_ids:
            return "stop"
    full = len(row.prompt) + length >= config.n_positions
    if length >= params.max_tokens or full:
        return "length"
    return None
