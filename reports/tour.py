"""The tour of all stages: `python -m reports.tour`.

The only module on the ground floor of `shared` that imports from the floor above, so that the
README's first command stays short. No other imports `course`, `bench` or a stage. The options are
here, not in course/tour.py, which imports PyTorch, so that a wrong one is reported at once.
"""

from __future__ import annotations

from shared import cli


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        "reports.tour",
        "Runs all stages on the same prompts, checks that their tokens agree, and shows how fast "
        "each of them is. On a slow or busy machine it takes fewer and shorter stories, to end "
        "within two minutes.",
        "  python -m reports.tour\n"
        "  python -m reports.tour --model gpt2 --max-tokens 32\n"
        "  python -m reports.tour --dtype float64 --threads 1",
    )
    cli.add_max_tokens(parser, default=128)
    cli.add_model_options(parser)
    options = parser.parse_args(argv)
    print(f"All stages, one workload. Loading {options.model} ...", flush=True)
    from . import tour_run

    return tour_run.run(options)


if __name__ == "__main__":
    cli.run(main)
