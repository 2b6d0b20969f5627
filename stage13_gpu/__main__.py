"""Stage 13 on the command line: `python -m stage13_gpu "Once upon a time"`."""

from __future__ import annotations

import sys

from shared import cli

ABOUT = (
    "Stage 13, GPU: continue a text on the engine of stage 05 with kernels in Triton. Without a "
    "GPU they run in Triton's interpreter, for a few tokens of a small model."
)


def main(argv: list[str] | None = None) -> int:
    parser = cli.generation_parser("stage13_gpu", ABOUT)
    cli.add_format_options(parser)
    options = parser.parse_args(argv)
    prompt = cli.read_prompt(options)
    from stage01_forward.params import SamplingParams
    from stage05_paged.engine import make

    from . import layers
    from .backend import BACKEND
    from .launch import INTERPRETED

    sampling = SamplingParams(**cli.sampling_fields(options))
    options.linear = "plain"
    loaded = cli.load_model_from(options)
    formats = cli.cache_options(options.kv_dtype)
    if INTERPRETED:
        print("No GPU: the kernels run in Triton's interpreter, slowly.", file=sys.stderr)
        layers.OUTPUTS = 1024, 1024  # there, a program takes nearly as long for 32
    cache, runner = BACKEND.cache, BACKEND.runner
    engine = make(loaded.model, contexts=1, make_cache=cache, make_runner=runner, **formats)
    cli.speak(engine, loaded, prompt, sampling)
    return 0


if __name__ == "__main__":
    cli.run(main)
