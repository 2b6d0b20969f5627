"""The sampling options of one request, checked when they are created. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.errors import UserError

if TYPE_CHECKING:
    import torch

# The allowed range of each numeric option. vLLM takes any positive repetition_penalty; values far
# from 1 turn scores into infinities.
RANGES = {
    "temperature": (0, 2),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}


@dataclass(frozen=True)
class SamplingParams:
    """The options of one request. The defaults mean greedy decoding.

    Raises UserError for a value of the wrong type or out of range, so any existing object is valid.
    """

    max_tokens: int = 64
    temperature: float = 0.0  # 0: greedy; 1: the model's own distribution
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None  # None or -1: a new one each time
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None  # None: off; n: of the sampled token and the n likeliest tokens

    def __post_init__(self) -> None:
        _check_integer("max_tokens", self.max_tokens, low=1)
        _check_integer("top_k", self.top_k, low=-1, hint=" (0 turns it off)")
        for name, (low, high) in RANGES.items():
            _check_number(name, getattr(self, name), low, high)
        _check_number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise UserError("top_p must be above 0 and at most 1, got 0.")
        if not isinstance(self.logit_bias, Mapping):
            raise UserError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}.")
        for token, bias in self.logit_bias.items():
            _check_integer("A token id in logit_bias", token, low=0)
            _check_number(f"logit_bias of token {token}", bias, -100, 100)
        if self.seed is not None:
            _check_integer("seed", self.seed, low=-(2**63), high=2**63 - 1)
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, Sequence):
            raise UserError(
                f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}."
            )
        for token in self.stop_token_ids:
            _check_integer("A token id in stop_token_ids", token, low=0)
        if not isinstance(self.ignore_eos, bool):
            raise UserError(f"ignore_eos must be True or False, got {self.ignore_eos!r}.")
        _check_integer("min_tokens", self.min_tokens, low=0)
        if self.min_tokens > self.max_tokens:
            raise UserError(
                f"min_tokens must be at most max_tokens, which is {self.max_tokens}, got "
                f"{self.min_tokens}."
            )
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, low=0)
        # Copies: the caller may change the list or the dictionary later, but the checked object
        # must not change.
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """Whether to take the token with the highest score, without a random number."""
        return self.temperature == 0

    def check_vocabulary(self, vocab_size: int, eos_ids: Collection[int] = ()) -> None:
        """Raise UserError if an option does not fit a model with this many tokens.

        eos_ids: the ids that end a text, which min_tokens suppresses, like stop_token_ids.
        """
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            largest = max(ids, default=0)  # a thousand prompts may share three hundred biases
            _check_integer(f"A token id in {name}", largest, 0, vocab_size - 1, " for this model")
        _check_integer("top_k", self.top_k, -1, vocab_size, " for this model (0 turns it off)")
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, vocab_size, " for this model")
        if self.min_tokens and len({*self.stop_token_ids, *eos_ids}) >= vocab_size:
            raise UserError(
                "min_tokens must be 0 if stop_token_ids names all tokens: no token could begin "
                "the answer."
            )

    def generator(self) -> torch.Generator:
        """A new generator, always on the CPU, so a seed gives the same numbers on every machine.

        torch's CPU generator uses the lowest 32 bits of a seed: seeds 2**32 apart give the same
        numbers.
        """
        import torch  # here, because schedulers import this module

        generator = torch.Generator()
        if self.seed is None or self.seed == -1:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def _check_integer(
    name: str, value: object, low: int, high: int | None = None, hint: str = ""
) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name} must be a whole number, got {value!r}.")
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise UserError(f"{name} must be {allowed}{hint}, got {value}.")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{name} must be a number from {low} to {high}, got {value!r}.")
    if not low <= value <= high:  # true of NaN too
        raise UserError(f"{name} must be from {low} to {high}, got {value}.")
