"""What clients may send, field by field: OpenAI's names, vLLM's extras, and bounds on everything.

A body is read strictly: `true` is not a number, "yes" is not a boolean, and NaN is invalid. Unknown
fields are ignored, as clients send many; unsupported fields that would change the answer are
refused.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from stage01_forward.params import SamplingParams

MOST_PROMPTS = 1024
MOST_SAMPLES = 16
MOST_STOPS, LONGEST_STOP = 4, 256
MOST_BIASES = 300
MOST_LOGPROBS = 20
MOST_MESSAGES = 1000
DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it
# Each would change the answer, or run a client's program. The values are the reasons.
TEXT_ONLY = "this model reads and writes text, not images or audio"
NO_FORMAT = "this server cannot constrain an answer to a format"
NO_TOOLS = "this model cannot call functions"
REFUSED = {
    **dict.fromkeys(("tools", "functions"), NO_TOOLS),
    **dict.fromkeys(("audio", "prompt_embeds"), TEXT_ONLY),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), NO_FORMAT),
    "structured_outputs": NO_FORMAT,
    **dict.fromkeys(
        (
            *("chat_template", "chat_template_kwargs", "suffix", "prediction", "documents"),
            *("use_beam_search", "allowed_token_ids", "bad_words", "prompt_logprobs"),
            "truncate_prompt_tokens",
        ),
        "this server does not support it",
    ),
}
# The values that ask for nothing more than this server does, and why any other is refused.
HARMLESS: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("tool_choice", "function_call"), (("none", "auto"), NO_TOOLS)),
    "modalities": ((["text"],), TEXT_ONLY),
    "response_format": (({"type": "text"},), NO_FORMAT),
}
# Fields that the engine takes as they are.
SAME = (
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
# pydantic's name for a text with half a surrogate pair, which JSON can hold and UTF-8 cannot.
NOT_UNICODE = "string_unicode"
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


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


Prompts = (
    Text
    | Ids
    | Annotated[Many[Text], Field(min_length=1, max_length=MOST_PROMPTS)]
    | Annotated[Many[Ids], Field(min_length=1, max_length=MOST_PROMPTS)]
)


def as_list(prompts: Any) -> list[Any]:
    """A list of prompts, each a text or token ids."""
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


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
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[Many[Stop], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[Many[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MOST_BIASES:  # before any is validated
            raise ValueError(f"logit_bias can have at most {MOST_BIASES} ids")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _ids_and_bounds(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key, bias in (value or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError("the keys of logit_bias must be token ids, such as '50256'")
            if not -100 <= bias <= 100:
                raise ValueError("a logit_bias must be from -100 to 100")
        return value

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in data:
                if name in cls.model_fields:  # of a later stage's body
                    continue
                if name in REFUSED and data[name]:
                    raise WrongField(name, f"{REFUSED[name]}: leave it out")
                if name in HARMLESS:
                    values, reason = HARMLESS[name]
                    if data[name] not in (None, *values):
                        raise WrongField(name, f"{reason}: leave it out")
        return data

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise WrongField("stream_options", "it needs 'stream': true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def params(self, max_tokens: int, logprobs: int | None, sample: int) -> SamplingParams:
        """The options of sample number `sample` of a prompt. With a seed, each sample has a seed of
        its own. Raises UserError."""
        seed = self.seed
        if seed not in (None, -1) and sample:  # -1 is random
            seed = (seed + sample) % 2**63
        # OpenAI's default temperature is 1; the engine's is 0.
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed}
        options |= {name: value for name in SAME if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            options["logit_bias"] = {int(key): bias for key, bias in self.logit_bias.items()}
        if self.stop_token_ids is not None:
            options["stop_token_ids"] = tuple(self.stop_token_ids)
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **options)


class GenerateBody(SamplingBody):
    """POST /generate."""

    prompt: Annotated[Text, Field(min_length=1)]


class OpenAIBody(SamplingBody):
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] | None = None
    user: str | None = None
    mark_drafts: bool | None = None  # chunks of a stream with accepted drafts have "draft": true

    @model_validator(mode="after")
    def _samples(self) -> OpenAIBody:
        if (self.n or 1) > 1 and self.temperature == 0:
            raise WrongField(
                "n", "at temperature 0 all samples are the same: ask for 1, or raise 'temperature'"
            )
        return self


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _scores_are_all_the_same(self) -> CompletionBody:
        if self.max_tokens == 0 and (self.n or 1) > 1:
            raise WrongField("n", "with 'max_tokens' 0 all samples are the same: ask for 1")
        return self

    @property
    def prompts(self) -> list[Any]:
        return as_list(self.prompt)


class TextPart(Body):
    type: str
    text: Text

    @field_validator("type")
    @classmethod
    def _is_text(cls, kind: str) -> str:
        if kind != "text":
            raise ValueError(f"{TEXT_ONLY}: send parts of the type 'text'")
        return kind


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
        return "\n".join(part.text for part in self.content or ())


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
    """POST /tokenize: of a prompt, or of a chat by its template."""

    prompt: Text | None = None
    messages: Annotated[Many[Message], Field(min_length=1, max_length=MOST_MESSAGES)] | None = None
    model: str | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise WrongField("prompt", "send either 'prompt' or 'messages'")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Annotated[Many[TokenId], Field(max_length=100_000)]
    model: str | None = None


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: int


class ErrorBody(BaseModel):
    """The form of every error."""

    error: ErrorInfo
