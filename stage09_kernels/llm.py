"""The engine in a program of your own: `LLM("stories").generate([...])`, in the manner of vLLM.

from stage09_kernels import LLM, SamplingParams

llm = LLM("stories")
for output in llm.generate(["Once upon a time", "Long ago"], SamplingParams(max_tokens=50)):
    print(output.prompt + output.text)
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tqdm import tqdm

from shared import chat_template, cli
from shared.errors import UserError
from stage01_forward import families
from stage01_forward.generation import Output, sampling_per_prompt
from stage01_forward.offer import AUTO
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request

from . import OFFER
from .make import make

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
        dtype: str = "auto",
        weights: str = AUTO,
        kv_dtype: str = AUTO,
        device: str = "auto",
        threads: int | None = None,
        random_weights: bool = False,
        max_model_len: int | None = None,
        **engine: Any,
    ) -> None:
        options = argparse.Namespace(
            model=model,
            dtype=dtype,
            weights=weights,
            device=device,
            threads=threads,
            random_weights=random_weights,
            max_model_len=max_model_len,
            linear=OFFER.linear,
            seed=None,
        )
        self.loaded = cli.load_model_from(options, families)
        formats = cli.cache_options(kv_dtype)
        self.engine = make(self.loaded.model, **formats, **OFFER.alone, **engine)

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
        single = isinstance(prompts, str) or bool(prompts) and isinstance(prompts[0], int)
        texts: Sequence[Any] = [prompts] if single else prompts
        encode = self.loaded.tokenizer.encode
        ids = [encode(text) if isinstance(text, str) else list(text) for text in texts]
        return self._answers(ids, params, progress)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams = SamplingParams(max_tokens=600),  # noqa: B008
    ) -> Answer:
        """The answer to a conversation, by the template in the model's folder. Raises UserError if
        it has none, and for messages that do not fit the model or its template."""
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
        options = sampling_per_prompt(prompts, params)
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
