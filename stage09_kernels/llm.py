"""The engine in a program of your own, in the manner of vLLM.

from stage09_kernels.llm import LLM, SamplingParams

llm = LLM("stories")
for answer in llm.generate(["Once upon a time", "Long ago"], SamplingParams(max_tokens=50)):
    print(answer.prompt + answer.text)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared import cli
from stage01_forward.generation import Output, sampling_per_prompt
from stage01_forward.params import SamplingParams

from .engine import make

OPTIONS = ("dtype", "weights", "kv_dtype", "device", "threads", "max_model_len")


@dataclass(frozen=True)
class Answer:
    """A prompt and the model's continuation, without the end-of-text token."""

    prompt: str
    text: str
    output: Output  # with the token ids of both


class LLM:
    """A model and its engine: this stage's, or stage 05's where the kernels do not run.

    model: an embedded model, a folder, a file, or a name on the hub. options: OPTIONS as on the
    command line, and those of `make`, such as max_sequences. Raises UserError for a model that
    cannot be loaded, and for invalid OPTIONS.
    """

    def __init__(self, model: str = "stories", **options: Any) -> None:
        chosen = {name: options.pop(name) for name in OPTIONS if name in options}
        words = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]
        parser = cli.Parser("stage09_kernels", "", "")  # which checks them
        cli.add_model_options(parser)
        cli.add_format_options(parser)
        parsed = parser.parse_args([f"--model={model}", "--linear=plain", *words])
        self.loaded = cli.load_model_from(parsed)
        formats = cli.cache_options(parsed.kv_dtype)
        self.engine = make(self.loaded.model, release=True, **formats, **options)

    def generate(
        self,
        prompts: str | Sequence[str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Answer]:
        """Continue one text, or several at once. params: for all prompts, or one for each. Raises
        UserError for a prompt or params that do not fit the model, before anything is computed."""
        prompts = [prompts] if isinstance(prompts, str) else prompts  # not letter by letter
        ids = [self.loaded.tokenizer.encode(prompt) for prompt in prompts]
        params = sampling_per_prompt(ids, params or SamplingParams())
        for pair in zip(ids, params, strict=True):
            self.engine.check(*pair)
        answers = []
        for prompt, output in zip(prompts, self.engine.generate(ids, params), strict=True):
            text = "".join(text for _, text in cli.with_text(iter(output.tokens), self.loaded))
            answers.append(Answer(prompt, text, output))
        return answers
