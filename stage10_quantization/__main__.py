"""Stage 10 on the command line: `python -m stage10_quantization "Once upon a time"`."""

from __future__ import annotations

import sys

from shared import catalog, cli
from shared.catalog import AUTO

from . import files, quantize

ABOUT = (
    "Stage 10, quantization: continue a text on the fastest engine, with weights, keys and values "
    "in fewer bytes. The command `quantize` writes such a model; it has its own --help."
)
EXAMPLES = (
    "--weights int4 --kv-dtype int8",
    "quantize --weights int4 --out stories-int4",
    '"Once upon a time" --model stories-int4',
)


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["quantize"]:
        return quantize.main(words[1:])
    parser = cli.generation_parser("stage10_quantization", ABOUT, *EXAMPLES)
    cli.add_format_options(parser)
    options = parser.parse_args(words)
    path = catalog.find(options.model)
    if options.weights == AUTO and (path is None or not files.reads(path)):
        options.weights = "int8"  # what this stage is about; files keep their own
    prompt = cli.read_prompt(options)

    from stage08_llama.__main__ import speak

    return speak(options, prompt)


if __name__ == "__main__":
    cli.run(main)
