"""The engine in a program of your own: `LLM("stories").generate([...])`, in the manner of vLLM.

from stage09_kernels import LLM, SamplingParams

llm = LLM("stories")
for output in llm.generate(["Once upon a time", "Long ago"], SamplingParams(max_tokens=50)):
    print(output.prompt + output.text)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from shared import chat_template, cli
from shared.errors import UserError
from stage01_forward.generation import Output, sampling_per_prompt
from stage01_forward.params import SamplingParams

from .engine import make

Prompt = str | Sequence[int]  # text, or token ids
OPTIONS = ("dtype", "weights", "kv_dtype", "device", "threads", "max_model_len")


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

    model: an embedded model, a folder, a file, or a name on the hub. options: OPTIONS as on the
    command line, and those of the scheduler, such as max_sequences. Raises UserError for a model
    that cannot be loaded, and for invalid options.
    """

    def __init__(self, model: str = "stories", random_weights: bool = False, **options: Any):
        chosen = {name: options.pop(name) for name in OPTIONS if options.get(name) is not None}
        words = [
            f"--{name.replace('_', '-')}={str(value).removeprefix('torch.')}"
            for name, value in chosen.items()
        ]
        parser = cli.Parser("stage09_kernels", "", "")  # which checks them
        cli.add_model_options(parser)
        cli.add_format_options(parser)
        parser.set_defaults(random_weights=random_weights, linear="plain")
        parsed = parser.parse_args([f"--model={model}", *words])
        self.loaded = cli.load_model_from(parsed)
        formats = cli.cache_options(parsed.kv_dtype)
        try:
            self.engine = make(self.loaded.model, release=True, **formats, **options)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise UserError(f"No engine has the options {options}: {error}.") from error

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Answer]:
        """Continue one prompt, or many at once; the answers are in the order of the prompts.

        params: for all prompts, or one for each. Raises UserError for a prompt or options that do
        not fit the model, before anything is computed.
        """
        encode = self.loaded.tokenizer.encode
        try:
            several: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
            if several and isinstance(several[0], int):
                several = [several]
            ids = [encode(p) if isinstance(p, str) else [index(id) for id in p] for p in several]
        except TypeError:
            raise UserError("Prompts must be texts, or lists of token ids.") from None
        return self._answers(ids, params or SamplingParams())

    def chat(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None
    ) -> Answer:
        """The answer to a conversation, by the template in the model's folder. Raises UserError if
        it has none, and for messages that do not fit the model or its template."""
        tokenizer: Any = self.loaded.tokenizer
        control = getattr(tokenizer, "control", None)  # of a tokenizer.json
        template = chat_template.load(self.loaded.folder, control) if control else None
        if template is None:
            name = self.loaded.config.name
            raise UserError(f"{name} has no chat template: use generate, or a chat model.")
        ids = tokenizer.encode_chat(template.render([dict(message) for message in messages]))
        return self._answers([ids], params or SamplingParams(max_tokens=600))[0]

    def _answers(
        self, prompts: list[list[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Answer]:
        for pair in zip(prompts, sampling_per_prompt(prompts, params), strict=True):
            self.engine.check(*pair)
        return list(map(self._answer, self.engine.generate(prompts, params)))

    def _answer(self, output: Output) -> Answer:
        decoder = cli.AnswerDecoder(self.loaded)
        text = "".join(map(decoder.push, output.token_ids)) + decoder.flush()
        prompt, ids = self.loaded.tokenizer.decode(output.prompt_ids), output.token_ids
        return Answer(prompt, output.prompt_ids, text, ids, output.finish_reason, output.error)
