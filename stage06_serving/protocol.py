"""What clients may send, field by field: OpenAI's names, vLLM's extras, and bounds on everything.

A body is read strictly: `true` is not a number, "yes" is not a boolean, and NaN is invalid. null is
as if the field were absent. Unknown fields are ignored, as clients send many; those that are known
to change the answer elsewhere, and that this server does not have, are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stage01_forward.params import SamplingParams

MOST_PROMPTS = 1024
MOST_SAMPLES = 16
MOST_STOPS, LONGEST_STOP = 4, 256
MOST_BIASES = 300
MOST_LOGPROBS = 20
MOST_MESSAGES = 1000
TEXT_ONLY = "this model reads and writes text, not images or audio: leave it out"
NO_FORMAT = "this server cannot constrain an answer so: send a 'response_format' in a chat"
UNSUPPORTED = "this server does not support it: leave it out"
# Each would change the answer, or run a client's program. The values are the reasons.
REFUSED = {
    "functions": "it is deprecated: send 'tools'",
    "function_call": "it is deprecated: send 'tool_choice'",
    "stop_sequences": "send 'stop'",
    "min_new_tokens": "send 'min_tokens'",
    "repeat_penalty": "send 'repetition_penalty'",
    "do_sample": "send 'temperature', 0 for the likeliest tokens",
    "best_of": "send 'n', and choose among the samples yourself",
}
for names, reason in (
    ("audio modalities images prompt_embeds", TEXT_ONLY),
    ("guided_json guided_regex guided_choice guided_grammar guided_decoding", NO_FORMAT),
    ("grammar regex ebnf json_schema structured_outputs", NO_FORMAT),
    ("max_new_tokens max_length n_predict num_predict", "send a limit as 'max_tokens'"),
    ("response_format tools tool_choice", UNSUPPORTED),  # see `Forms`
    ("chat_template chat_template_kwargs continue_final_message suffix", UNSUPPORTED),
    ("prediction documents", UNSUPPORTED),
    ("add_generation_prompt add_special_tokens skip_special_tokens", UNSUPPORTED),
    ("spaces_between_special_tokens include_stop_str_in_output use_beam_search", UNSUPPORTED),
    ("allowed_token_ids bad_words logits_processors prompt_logprobs", UNSUPPORTED),
    ("truncate_prompt_tokens length_penalty typical_p tfs_z top_a", UNSUPPORTED),
    ("mirostat dynatemp_range dry_multiplier xtc_probability samplers", UNSUPPORTED),
    ("reasoning_effort thinking verbosity web_search_options num_beams", UNSUPPORTED),
):
    REFUSED |= dict.fromkeys(names.split(), reason)
# The values that ask for nothing more than this server does.
NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
HARMLESS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("best_of", "num_beams", "repeat_penalty", "length_penalty"), (*NOTHING, 1)),
    **dict.fromkeys(("typical_p", "tfs_z"), (*NOTHING, 1)),
    **dict.fromkeys(("tool_choice", "function_call"), (*NOTHING, "none", "auto")),
    **dict.fromkeys(("add_generation_prompt", "add_special_tokens", "do_sample"), (None, True)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (None, True)),
    "modalities": (*NOTHING, ["text"]),
    "response_format": (*NOTHING, {"type": "text"}),
    "reasoning_effort": (*NOTHING, "none"),
    "verbosity": (*NOTHING, "medium"),
}
# Fields that the engine takes as they are.
SAME = (
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
# pydantic's name for a text with half a surrogate pair, which JSON can hold and UTF-8 cannot.
NOT_UNICODE = "string_unicode"
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
BiasId = Annotated[int, Field(strict=False, ge=0, le=2**31 - 1)]  # a key of JSON, so a text
Bias = Annotated[float, Field(ge=-100, le=100)]


class WrongField(ValueError):
    """An error in one field of a body whose fields are all valid by themselves."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


# A limit on its length, which the body's is below, makes pydantic read a text as Unicode.
Text = Annotated[str, Field(max_length=2**20)]
Stop = Annotated[Text, Field(min_length=1, max_length=LONGEST_STOP)]
Item = TypeVar("Item")
# One error is enough: half a million of them from one body keep the event loop busy for seconds.
Many = Annotated[list[Item], Field(fail_fast=True)]
Ids = Annotated[Many[TokenId], Field(min_length=1)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        for name in data if isinstance(data, dict) and not cls._read_later(data) else ():
            own = name in cls.model_fields  # a later stage may have it
            if name in REFUSED and not own and data[name] not in HARMLESS.get(name, NOTHING):
                raise WrongField(name, REFUSED[name])
        return data

    @classmethod
    def _read_later(cls, data: dict[str, Any]) -> bool:
        """Whether another body will check the fields."""
        return False


Prompts = (
    Text
    | Ids
    | Annotated[Many[Text], Field(min_length=1, max_length=MOST_PROMPTS)]
    | Annotated[Many[Ids], Field(min_length=1, max_length=MOST_PROMPTS)]
)


class StreamOptions(Body):
    include_usage: bool | None = None


class SamplingBody(Body):
    """The options of all endpoints that generate."""

    max_tokens: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[BiasId, Bias], Field(max_length=MOST_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[Many[Stop], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[Many[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _fit_together(self) -> SamplingBody:
        if self.max_tokens == 0 and not getattr(self, "echo", None):
            raise WrongField("max_tokens", "it must be at least 1, or 0 with 'echo': true")
        if self.stream_options is not None and not self.stream:
            raise WrongField("stream_options", "it needs 'stream': true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def params(
        self, max_tokens: int, logprobs: int | None, sample: int, defaults: Mapping[str, Any]
    ) -> SamplingParams:
        """The options of sample number `sample` of a prompt; `defaults` are the server's. With a
        seed, each sample has a seed of its own. Raises UserError."""
        seed = self.seed
        if seed not in (None, -1) and sample:  # -1 is random
            seed = (seed + sample) % 2**63
        options: dict[str, Any] = {**defaults, "seed": seed}
        options |= {name: value for name in SAME if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            options["logit_bias"] = self.logit_bias
        if self.stop_token_ids is not None:
            options["stop_token_ids"] = tuple(self.stop_token_ids)
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **options)


class GenerateBody(SamplingBody):
    """POST /generate."""

    prompt: Annotated[Text, Field(min_length=1)]


class OpenAIBody(SamplingBody):
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] | None = None


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each a text or token ids."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if single else list(self.prompt)


class TextPart(Body):
    type: Literal["text"]
    text: Text | None = None


class Message(Body):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text | Annotated[Many[TextPart], Field(max_length=MOST_MESSAGES)] | None = None
    name: Annotated[str, Field(max_length=64)] | None = None

    @property
    def plain(self) -> dict[str, Any]:
        """The message for a chat template."""
        return {"role": self.role, "content": self.text}

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text or "" for part in self.content or ())


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: Annotated[Many[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise WrongField("top_logprobs", "it needs 'logprobs': true")
        return self


class TokenizeBody(Body):
    """POST /tokenize: of a prompt, or of a chat, with all that a chat takes."""

    model_config = ConfigDict(extra="allow")

    prompt: Text | None = None
    messages: list[Any] | None = None
    model: str | None = None
    return_token_strs: bool | None = None

    @classmethod
    def _read_later(cls, data: dict[str, Any]) -> bool:
        return data.get("messages") is not None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise WrongField("prompt", "send either 'prompt' or 'messages'")
        return self
