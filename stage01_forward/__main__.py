"""Stage 01 on the command line: `python -m stage01_forward "Once upon a time"`."""

from __future__ import annotations

from shared import cli

from .params import SamplingParams

ABOUT = "Stage 01, the naive engine: continue a text, recomputing everything for each token."


def main(argv: list[str] | None = None) -> None:
    parser = cli.generation_parser("stage01_forward", ABOUT)
    parser.set_defaults(linear="plain")  # the model as model.py has it, with nothing laid out anew
    options = parser.parse_args(argv)
    prompt = cli.read_prompt(options)
    sampling = SamplingParams(**cli.sampling_fields(options))

    from .engine import Engine

    loaded = cli.load_model_from(options)
    cli.speak(Engine(loaded.model), loaded, prompt, sampling)


if __name__ == "__main__":
    cli.run(main)
