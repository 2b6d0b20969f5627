"""Redraws the pictures of the lessons: `python -m reports.figures`."""

from __future__ import annotations

from shared import charts, cli, paths

from . import pictures


def main(argv: list[str] | None = None) -> int:
    about = "Redraws the pictures of the lessons: the same bytes for the same code."
    cli.Parser("reports.figures", about, "  python -m reports.figures").parse_args(argv)
    for name, draw in pictures().items():
        charts.save(draw(), paths.ROOT / "reports/figures" / f"{name}.svg")
    print(f"{len(pictures())} pictures drawn.")
    return 0


if __name__ == "__main__":
    cli.run(main)
