"""Stage 08 on the command line: `python -m stage08_llama "Once upon a time" --model FOLDER`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from shared import cli
from shared.errors import UserError

if TYPE_CHECKING:
    from stage01_forward.params import SamplingParams
    from stage05_paged.engine import Engine
    from stage06_serving.choice import Choice

ABOUT = (
    "Stage 08, the Llama family: continue a text, or chat, on the fastest engine. The default is "
    "the embedded stories-chat; --model takes Llama 2 and 3, TinyLlama, SmolLM2, Mistral, Qwen2, "
    "Qwen2.5 and Qwen3."
)


def make_parser() -> cli.Parser:
    parser = cli.generation_parser("stage08_llama", ABOUT, "--chat")
    parser.set_defaults(model="stories-chat")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="chat instead of continuing one prompt, by default at temperature 0.8, top-p 0.95 and "
        "600 tokens per answer; the model's folder must have a chat template; off by default",
    )
    parser.add_argument(
        "--system", default="", metavar="TEXT", help="system prompt of the chat; default: none"
    )
    parser.add_argument(
        "--engine",
        choices=("auto", "paged", "kernels"),
        default="auto",
        help="paged is stage 05's engine, kernels stage 09's; auto takes the kernels where they "
        "are right",
    )
    cli.add_format_options(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.chat:
        parser.set_defaults(temperature=0.8, top_p=0.95, max_tokens=600)
        options = parser.parse_args(argv)
    if options.chat and options.prompt is not None:
        raise UserError("--chat reads your messages as you type them: leave the prompt out.")
    if options.system and not options.chat:
        raise UserError("--system is for a chat: add --chat, or leave it out.")
    prompt = "" if options.chat else cli.read_prompt(options)
    return talk(options) if options.chat else speak(options, prompt)


def load(options: argparse.Namespace) -> tuple[cli.Loaded, Engine, SamplingParams, Choice]:
    """The model, an engine for one context of it and how it was chosen, and the sampling
    options."""
    from stage01_forward.params import SamplingParams
    from stage06_serving.choice import choose

    sampling = SamplingParams(**cli.sampling_fields(options))
    device, dtype = cli.device_and_dtype(options)
    chosen = choose(options.engine, dtype, device)
    wanted, options.linear = options.linear, chosen.linear(options.linear)
    loaded = cli.load_model_from(options)
    formats = cli.cache_options(options.kv_dtype)
    return loaded, chosen.make(loaded, wanted, contexts=1, **formats), sampling, chosen


def speak(options: argparse.Namespace, prompt: str) -> int:
    loaded, engine, sampling, _ = load(options)
    cli.speak(engine, loaded, prompt, sampling)
    return 0


def talk(options: argparse.Namespace) -> int:
    from shared import chat_template
    from shared.json_tokenizer import JsonTokenizer
    from stage05_paged.memory import size
    from stage06_serving.choice import faster

    from .chat import Chat

    loaded, engine, sampling, chosen = load(options)
    tokenizer, template = loaded.tokenizer, None
    if isinstance(tokenizer, JsonTokenizer):
        template = chat_template.load(loaded.folder, tokenizer.control)
    if template is None:
        raise UserError(
            f"{loaded.config.name} has no chat template and was not trained to chat: give it a "
            "prompt, or choose a model with one."
        )
    config = loaded.config
    memory = size(config.n_positions * config.kv_bytes_per_token(loaded.kv_dtype))
    about = [
        f"{config.name}, engine {chosen.name}, {loaded.machine}",
        f"context of {config.n_positions:,} tokens, whose keys and values take {memory}",
    ]
    if hint := faster(chosen, loaded):
        about.append(f"faster: {hint}")
    return Chat(engine, loaded, template, sampling, options.system, about).run()


if __name__ == "__main__":
    cli.run(main)
