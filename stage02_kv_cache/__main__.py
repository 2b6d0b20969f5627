"""Stage 02 on the command line: `python -m stage02_kv_cache "Once upon a time"`."""

from __future__ import annotations

from shared import cli
from stage01_forward.params import SamplingParams

ABOUT = "Stage 02, the engine with a KV cache: continue a text, computing each token once."


def main(argv: list[str] | None = None) -> None:
    options = cli.generation_parser("stage02_kv_cache", ABOUT).parse_args(argv)
    prompt = cli.read_prompt(options)
    sampling = SamplingParams(**cli.sampling_fields(options))

    from .engine import Engine

    loaded = cli.load_model_from(options)
    cli.speak(Engine(loaded.model), loaded, prompt, sampling)


if __name__ == "__main__":
    cli.run(main)
