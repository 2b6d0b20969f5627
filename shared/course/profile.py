"""Where the time of a stage goes: `python -m shared.course.profile stage02_kv_cache "Once upon a
time"`.

Runs the stage's engine under PyTorch's profiler and prints the dominant operators: their share of
the time, how often they ran, and for each product with a weight whether it multiplies a matrix or a
single vector, the weight's bytes per second, and the operations per second. `--trace FILE.json`
writes every call for https://ui.perfetto.dev.
"""

from __future__ import annotations

import sys
from typing import Any

from .. import cli
from . import stages


def table(operators: list[dict[str, Any]]) -> str:
    """`operators` as text, one line each."""
    lines = [
        f"{'share':>6} {'calls':>7}  {'operator':<42} {'rows x in -> out':<24} {'kind':<14} "
        f"{'GB/s':>7} {'GFLOP/s':>8}"
    ]
    for operator in operators:
        line = f"{operator['share']:>6.1%} {operator['calls']:>7}  {operator['operator']:<42} "
        line += f"{operator['product'] or '':<24} {operator['kind']:<14}"
        if operator["product"] and operator["gb_s"]:
            line += f" {operator['gb_s']:>7.1f} {operator['gflops']:>8.1f}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        "shared.course.profile",
        "Shows which operators a stage spends its time in, and whether they multiply matrices or "
        "vectors.",
        '  python -m shared.course.profile stage01_forward "Once upon a time"\n'
        '  python -m shared.course.profile stage02_kv_cache "Once upon a time" --max-tokens 64 '
        "--trace decode.trace.json\n"
        '  python -m shared.course.profile stage02_kv_cache "Hello" --model gpt2 --random-weights '
        "--dtype bfloat16",
    )
    parser.add_argument(
        "stage",
        choices=list(stages.offers()),
        help="the stage whose engine runs: %(choices)s",
        metavar="STAGE",
    )
    cli.add_prompt(parser)
    parser.add_argument(
        "--rows", type=cli.whole_number(1, 1000), default=12, metavar="N", help="how many to show"
    )
    parser.add_argument(
        "--trace", metavar="FILE.json", help="write every call, to be opened at ui.perfetto.dev"
    )
    cli.add_sampling_options(parser, max_tokens=32)
    cli.add_model_options(parser)
    options = parser.parse_args(argv)
    if options.trace:
        cli.output_file(options.trace, ".json")
    prompt = cli.read_prompt(options)
    from .. import profiling

    loaded = cli.load_model_from(options, stages.families())
    engine = stages.engines()[options.stage](loaded.model)
    ids = loaded.tokenizer.encode(prompt)
    sampling = stages.sampling_params()(**cli.sampling_fields(options))
    recorded = profiling.record(lambda: engine.generate([ids], sampling))
    print(
        f"{options.stage}: {len(engine.steps)} forward passes after a prompt of {len(ids)} "
        f"tokens; {loaded}\n"
    )
    print(table(profiling.dominant(recorded, loaded.dtype, options.rows)))
    if options.trace:
        recorded.export_chrome_trace(options.trace)
        print(
            f"\n{options.trace} holds every call: open it at https://ui.perfetto.dev",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    cli.run(main, loads=True)
