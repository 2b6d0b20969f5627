"""Stage 09 on the command line: `python -m stage09_kernels "Once upon a time"`."""

from __future__ import annotations

from shared import cli

ABOUT = (
    "Stage 09, kernels: continue a text on stage 05's engine, with each step in one call of C that "
    "reads keys and values where they are."
)


def main(argv: list[str] | None = None) -> int:
    parser = cli.generation_parser("stage09_kernels", ABOUT)
    cli.add_format_options(parser)
    options = parser.parse_args(argv)
    prompt = cli.read_prompt(options)
    from stage01_forward.params import SamplingParams

    from .engine import make

    sampling = SamplingParams(**cli.sampling_fields(options))
    options.linear = "plain"  # this stage lays the weights out itself
    loaded = cli.load_model_from(options)
    formats = cli.cache_options(options.kv_dtype)
    engine = make(loaded.model, contexts=1, insist=True, release=True, **formats)
    cli.speak(engine, loaded, prompt, sampling)
    return 0


if __name__ == "__main__":
    cli.run(main)
