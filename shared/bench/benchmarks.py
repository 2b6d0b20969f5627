"""What the benchmarks of all stages have in common: the command line, and where the results go.

A stage's `benchmark.py` measures in `run`, turns what was measured into markdown in `tables`, and ends with

    def main(argv: list[str] | None = None) -> None:
        benchmarks.main(STAGE, "Measures ...", run, tables, argv)


    if __name__ == "__main__":
        cli.run(main)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import cli, measure


def main(
    stage: str,
    about: str,
    run: Callable[[bool], tuple[dict[str, Any], dict[str, Any], measure.Limits]],
    tables: Callable[[dict[str, Any]], Mapping[str, str]],
    argv: list[str] | None = None,
) -> None:
    """`python -m <stage>.benchmark`: measure and write reports/<machine>/<stage>.json; with --quick show the tables instead.

    `run(quick)` measures, and returns the configuration, the results and the machine's limits; `tables` takes what
    `measure.load` returns, and gives markdown by name.
    """
    module = f"{stage}.benchmark"
    parser = cli.Parser(
        module,
        about,
        f"  python -m {module} --quick\n  python -m {module} && python -m shared.bench.report",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a smaller grid, in a minute or two; tables are shown and not kept",
    )
    quick = parser.parse_args(argv).quick
    configuration, results, limits = run(quick)
    if quick:
        for name, text in tables(unsaved(configuration, results, limits)).items():
            print(f"\n{name}\n\n{text}")
        return
    path = measure.results_file(stage)
    measure.save(path, stage, configuration, results, seed=0, limits=limits)
    print(f"Written: {path.relative_to(measure.ROOT).as_posix()}. Next: python -m shared.bench.report")


def unsaved(
    configuration: Mapping[str, Any], results: Mapping[str, Any], limits: measure.Limits
) -> dict[str, Any]:
    """What `measure.save` would write of a run that is only shown, as far as tables need it."""
    return {
        "configuration": configuration,
        "results": results,
        "limits": vars(limits),
        "machine": measure.machine(),
        "versions": measure.versions(),
        "threads": torch.get_num_threads(),
    }
