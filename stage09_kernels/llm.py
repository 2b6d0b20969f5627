"""The engine in a program of your own: `LLM("stories").generate([...])`, in the manner of vLLM.

from stage09_kernels import LLM, SamplingParams

llm = LLM("stories")
for output in llm.generate(["Once upon a time", "Long ago"], SamplingParams(max_tokens=50)):
    print(output.prompt + output.text)
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
    """A prompt and the model's continuation, both as texts and as token ids."""

    prompt: str
    text: str  # without the end-of-text token
    output: Output


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
        parser.set_defaults(random_weights=False, linear="plain")
        parsed = parser.parse_args([f"--model={model}", *words])
        self.loaded = cli.load_model_from(parsed)
        formats = cli.cache_options(parsed.kv_dtype)
        self.engine = make(self.loaded.model, release=True, **formats, **options)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Answer]:
        """Continue one text, or many texts and lists of token ids, at once; the answers are in the
        order of the prompts.

        params: for all prompts, or one for each. Raises UserError for a prompt or options that do
        not fit the model, before anything is computed.
        """
        several = [prompts] if isinstance(prompts, str) else prompts
        encode, params = self.loaded.tokenizer.encode, params or SamplingParams()
        ids = [encode(prompt) if isinstance(prompt, str) else [*prompt] for prompt in several]
        for pair in zip(ids, sampling_per_prompt(ids, params), strict=True):
            self.engine.check(*pair)
        return list(map(self._answer, self.engine.generate(ids, params)))

    def _answer(self, output: Output) -> Answer:
        decoder = self.loaded.decoder()
        text = "".join(map(decoder.push, output.token_ids)) + decoder.flush()
        return Answer(self.loaded.tokenizer.decode(output.prompt_ids), text, output)
