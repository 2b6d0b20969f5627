"""The engine in a program of your own: `LLM("stories").generate([...])`, in the manner of vLLM.

from stage09_kernels import LLM, SamplingParams

llm = LLM("stories")
for output in llm.generate(["Once upon a time", "Long ago"], SamplingParams(max_tokens=50)):
    print(output.prompt + output.text)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from operator import index
from typing import Any

import torch
from tqdm import tqdm

from shared import chat_template, cli
from shared.errors import UserError
from shared.models import AUTO
from stage01_forward.generation import Output, sampling_per_prompt
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request

from .engine import make

Prompt = str | Sequence[int]  # text, or token ids
Message = Mapping[str, str]  # "role" and "content"


@dataclass(frozen=True)
class Answer:
    """A prompt and the model's continuation. `text` is without the end-of-text token."""

    prompt: str
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str | None  # "stop", "length" or "error"
    error: str | None = None


def is_message(message: object) -> bool:
    """Whether it has a role and a content, and all its fields are texts."""
    return (
        isinstance(message, Mapping)
        and {"role", "content"} <= message.keys()
        and all(isinstance(text, str) for text in message.values())
    )


class LLM:
    """A model and its engine: this stage's, or stage 05's where the kernels do not run.

    model: an embedded model, a folder, a file, or a name on the hub.
    dtype, weights, kv_dtype, device, threads, random_weights, max_model_len: as on the command
        line.
    engine: options of the scheduler, such as max_sequences, and of `make`.
    Raises UserError for a model that cannot be loaded, and for invalid options.
    """

    def __init__(
        self,
        model: str = "stories",
        *,
        dtype: str | torch.dtype = "auto",
        weights: str = AUTO,
        kv_dtype: str = AUTO,
        device: str = "auto",
        threads: int | None = None,
        random_weights: bool = False,
        max_model_len: int | None = None,
        **engine: Any,
    ) -> None:
        values: dict[str, object] = {
            "model": model,
            "dtype": str(dtype).removeprefix("torch."),
            "weights": weights,
            "kv-dtype": kv_dtype,
            "device": device,
            "threads": threads,
            "max-model-len": max_model_len,
        }
        parser = cli.Parser("stage09_kernels", "", "")  # which checks them
        cli.add_model_options(parser)
        cli.add_format_options(parser)
        parser.set_defaults(random_weights=random_weights, linear="plain")
        words = [f"--{name}={value}" for name, value in values.items() if value is not None]
        options = parser.parse_args(words)
        self.loaded = cli.load_model_from(options)
        formats = cli.cache_options(options.kv_dtype)
        try:
            self.engine = make(self.loaded.model, release=True, **formats, **engine)
        except (TypeError, ValueError, ArithmeticError, AttributeError, MemoryError) as error:
            raise UserError(f"No engine has the options {engine}: {error!r}.") from error

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008
        *,
        progress: bool = True,
    ) -> list[Answer]:
        """Continue one prompt, or many at once; the answers are in the order of the prompts.

        params: for all prompts, or one for each. Raises UserError for a prompt or options that do
        not fit the model, before anything is computed.
        """
        try:
            rows: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
            if rows and isinstance(rows[0], Integral):
                rows = [rows]
            ids = list(map(self._ids, rows))
            if isinstance(prompts, bytes | Mapping):  # of which `list` makes something else
                raise TypeError
        except TypeError:
            raise UserError("Prompts must be texts, or lists of token ids.") from None
        return self._answers(ids, params, progress)

    def _ids(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt. Raises TypeError if it is none."""
        if isinstance(prompt, str):
            return self.loaded.tokenizer.encode(prompt)
        return [index(token) for token in prompt]

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams = SamplingParams(max_tokens=600),  # noqa: B008
    ) -> Answer:
        """The answer to a conversation, by the template in the model's folder. Raises UserError if
        it has none, and for messages that do not fit the model or its template."""
        if not messages or not all(map(is_message, messages)):
            raise UserError('Messages must be a list of {"role": TEXT, "content": TEXT}.')
        tokenizer: Any = self.loaded.tokenizer
        template = self._template
        if template is None:
            raise UserError(
                f"{self.loaded.config.name} has no chat template: use generate, or a chat model."
            )
        rendered = template.render([dict(message) for message in messages])
        (answer,) = self._answers([tokenizer.encode_chat(rendered)], params, progress=False)
        return answer

    @cached_property
    def _template(self) -> chat_template.FolderTemplate | None:
        control = getattr(self.loaded.tokenizer, "control", None)  # of a tokenizer.json
        return chat_template.load(self.loaded.folder, control) if control else None

    def _answers(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        progress: bool,
    ) -> list[Answer]:
        try:
            options = sampling_per_prompt(prompts, params)
            if not all(isinstance(option, SamplingParams) for option in options):
                raise TypeError
        except TypeError:
            raise UserError("params must be SamplingParams, or a list of them.") from None
        requests = [Request(*pair) for pair in zip(prompts, options, strict=True)]
        for request in requests:
            self.engine.check(request.prompt_ids, request.sampling)
        try:
            for request in requests:
                self.engine.enqueue(request)
            with tqdm(total=len(requests), unit="prompt", disable=not progress) as bar:
                for _, token in self.engine.run():
                    bar.update(token.finish_reason is not None)
        finally:  # Ctrl-C: the engine stays usable
            for request in requests:
                if request.id in self.engine.requests:
                    self.engine.abort(request.id)
        return [self._answer(request.output) for request in requests]

    def _answer(self, output: Output) -> Answer:
        decoder = cli.AnswerDecoder(self.loaded)
        text = "".join(map(decoder.push, output.token_ids)) + decoder.flush()
        prompt, ids = self.loaded.tokenizer.decode(output.prompt_ids), output.token_ids
        return Answer(prompt, output.prompt_ids, text, ids, output.finish_reason, output.error)
