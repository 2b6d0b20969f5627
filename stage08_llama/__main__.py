"""Stage 08 on the command line: `python -m stage08_llama "Once upon a time" --model FOLDER`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from shared import cli
from shared.errors import UserError

if TYPE_CHECKING:
    from stage01_forward.params import SamplingParams
    from stage05_paged.engine import Engine
    from stage06_serving.loading import Selection

ABOUT = (
    "Stage 08, the Llama family: continue a text, or chat, on the fastest engine. The default is "
    "the embedded stories-chat; --model takes Llama 2 and 3, TinyLlama, SmolLM2, Mistral, Qwen2, "
    "Qwen2.5 and Qwen3."
)


def main(argv: list[str] | None = None) -> int:
    parser = cli.generation_parser("stage08_llama", ABOUT, "--chat")
    parser.set_defaults(model="stories-chat")
    about = (
        "chat instead of continuing one prompt, by default at temperature 0.8, top-p 0.95 and 600 "
        "tokens per answer; the model's folder must have a chat template"
    )
    parser.add_argument("--chat", action="store_true", help=about)
    cli.add_format_options(parser)
    options = parser.parse_args(argv)
    if not options.chat:
        return speak(options, cli.read_prompt(options))
    if options.prompt is not None:
        raise UserError("--chat reads your messages as you type them: leave the prompt out.")
    parser.set_defaults(temperature=0.8, top_p=0.95, max_tokens=600)
    return talk(parser.parse_args(argv))


def load(options: argparse.Namespace) -> tuple[Selection, Engine, SamplingParams]:
    """The model and how its engine was selected, this engine for one context, and the sampling
    options."""
    from stage01_forward.params import SamplingParams
    from stage06_serving.loading import select

    sampling = SamplingParams(**cli.sampling_fields(options))
    selection = select(options)
    return selection, selection.make(contexts=1), sampling


def speak(options: argparse.Namespace, prompt: str) -> int:
    selection, engine, sampling = load(options)
    cli.speak(engine, selection.loaded, prompt, sampling)
    return 0


def talk(options: argparse.Namespace) -> int:
    from shared import chat_template

    from .chat import Chat

    selection, engine, sampling = load(options)
    loaded = selection.loaded
    name, control = loaded.config.name, getattr(loaded.tokenizer, "control", None)
    template = chat_template.load(loaded.folder, control) if control else None
    if template is None:
        raise UserError(
            f"{name} has no chat template and was not trained to chat: give it a prompt, or choose "
            "a model with one."
        )
    print(f"[{name}, engine {selection.name}, {loaded.machine}]", file=sys.stderr)
    if name == "stories-chat":
        print("[this small model knows only its own stories: ask it for one]", file=sys.stderr)
    return Chat(engine, loaded, template, sampling).run()


if __name__ == "__main__":
    cli.run(main)
