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
MOST_LOGPROBS = 20
MOST_MESSAGES = 1000
UNSUPPORTED = "this server does not support it: leave it out"
# Each would change the answer, or run a client's program. The values say what to do instead.
REFUSED = {
    name: advice
    for names, advice in (
        ("functions", "it is deprecated: send 'tools'"),
        ("function_call", "it is deprecated: send 'tool_choice'"),
        ("stop_sequences", "send 'stop'"),
        ("min_new_tokens", "send 'min_tokens'"),
        ("repeat_penalty", "send 'repetition_penalty'"),
        ("do_sample", "send 'temperature', 0 for the likeliest tokens"),
        ("best_of", "send 'n', and choose among the samples yourself"),
        ("max_new_tokens max_length n_predict num_predict", "send a limit as 'max_tokens'"),
        ("audio modalities images prompt_embeds", "this model reads and writes text: leave it out"),
        ("guided_json guided_regex guided_choice guided_grammar guided_decoding grammar regex ebnf"
         " json_schema structured_outputs", "to constrain a chat, send 'response_format'"),
        ("response_format tools tool_choice", UNSUPPORTED),  # see `Forms`
        ("chat_template chat_template_kwargs continue_final_message suffix prediction documents"
         " add_generation_prompt add_special_tokens skip_special_tokens use_beam_search num_beams"
         " spaces_between_special_tokens include_stop_str_in_output allowed_token_ids bad_words"
         " logits_processors prompt_logprobs truncate_prompt_tokens length_penalty typical_p tfs_z"
         " top_a mirostat dynatemp_range dry_multiplier xtc_probability samplers reasoning_effort"
         " thinking verbosity web_search_options return_token_strs", UNSUPPORTED),
    )
    for name in names.split()
}  # fmt: skip
# The values that ask for nothing more than this server does.
NOTHING: tuple[Any, ...] = (False, 0, "", [], {})
HARMLESS: dict[str, tuple[Any, ...]] = {
    name: values
    for names, values in (
        ("best_of num_beams repeat_penalty length_penalty typical_p tfs_z", (*NOTHING, 1)),
        ("tool_choice function_call", (*NOTHING, "none", "auto")),
        ("reasoning_effort", (*NOTHING, "none")),
        ("add_generation_prompt add_special_tokens do_sample skip_special_tokens", (True,)),
        ("spaces_between_special_tokens", (True,)),
        ("modalities", (*NOTHING, ["text"])),
        ("response_format", (*NOTHING, {"type": "text"})),
        ("verbosity", (*NOTHING, "medium")),
    )
    for name in names.split()
}
# Fields that the engine takes as they are.
SAME = {
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "stop_token_ids"),
}
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
BiasId = Annotated[int, Field(strict=False, ge=0, le=2**31 - 1)]  # a key of JSON, so a text
Bias = Annotated[float, Field(ge=-100, le=100)]
Limit = Annotated[int, Field(ge=0, le=1_000_000)]  # tokens
# A limit on its length, which the body's is below, makes pydantic read a text as Unicode: half a
# surrogate pair, which JSON can hold and UTF-8 cannot, is refused.
Text = Annotated[str, Field(max_length=2**20)]
Stop = Annotated[Text, Field(min_length=1, max_length=256)]
Item = TypeVar("Item")
# One error is enough: half a million of them from one body keep the event loop busy for seconds.
Many = Annotated[list[Item], Field(fail_fast=True)]
Ids = Annotated[Many[TokenId], Field(min_length=1)]
Prompts = (
    Text
    | Ids
    | Annotated[Many[Text], Field(min_length=1, max_length=MOST_PROMPTS)]
    | Annotated[Many[Ids], Field(min_length=1, max_length=MOST_PROMPTS)]
)


class WrongField(ValueError):
    """An error in one field of a body whose fields are all valid by themselves."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls_and_refuse(cls, data: Any) -> Any:
        """A field that is declared is not refused: a later stage may have it."""
        if not isinstance(data, dict):
            return data
        data = {name: value for name, value in data.items() if value is not None}
        for name, value in data.items():
            wanted = name in REFUSED and value not in HARMLESS.get(name, NOTHING)
            if wanted and name not in cls.model_fields:
                raise WrongField(name, REFUSED[name])
        return data


class StreamOptions(Body):
    include_usage: bool = False


class SamplingBody(Body):
    """The options of all endpoints that generate."""

    max_tokens: Limit | None = None
    min_tokens: Limit = 0
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[BiasId, Bias], Field(max_length=300)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[Many[Stop], Field(max_length=4)] = []
    stop_token_ids: Annotated[Many[TokenId], Field(max_length=64)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _fit_together(self) -> SamplingBody:
        if self.max_tokens == 0 and not getattr(self, "echo", False):
            raise WrongField("max_tokens", "it must be at least 1, or 0 with 'echo': true")
        if self.stream_options is not None and not self.stream:
            raise WrongField("stream_options", "it needs 'stream': true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def params(
        self, max_tokens: int, logprobs: int | None, sample: int, defaults: Mapping[str, Any]
    ) -> SamplingParams:
        """The options of sample number `sample` of a prompt; `defaults` are the server's. With a
        seed, each sample has a seed of its own. Raises UserError."""
        seed = self.seed
        if seed not in (None, -1) and sample:  # -1 is random
            seed = (seed + sample) % 2**63
        sent = self.model_dump(include=SAME, exclude_unset=True)
        options: dict[str, Any] = {**defaults, **sent, "seed": seed}
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **options)


class GenerateBody(SamplingBody):
    """POST /generate."""

    prompt: Annotated[Text, Field(min_length=1)]


class OpenAIBody(SamplingBody):
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool = False
    return_token_ids: bool = False

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each a text or token ids."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if single else list(self.prompt)


class TextPart(Body):
    type: Literal["text"]
    text: Text = ""


class Message(Body):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text | Annotated[Many[TextPart], Field(max_length=MOST_MESSAGES)] = ""

    @property
    def plain(self) -> dict[str, Any]:
        """The message for a chat template."""
        return {"role": self.role, "content": self.text}

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: Annotated[Many[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise WrongField("top_logprobs", "it needs 'logprobs': true")
        return self


class TokenizeBody(Body):
    """POST /tokenize."""

    prompt: Text
    model: str | None = None
