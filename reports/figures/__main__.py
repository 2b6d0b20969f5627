"""Redraws the pictures of the lessons: `python -m reports.figures`."""

from __future__ import annotations

from shared import charts, cli

from . import FOLDER, pictures, place


def main(argv: list[str] | None = None) -> int:
    usage = "  python -m reports.figures             the same bytes for the same code"
    about = f"Redraws the pictures of the lessons, in {FOLDER.as_posix()}/."
    cli.Parser("reports.figures", about, usage).parse_args(argv)
    for name, draw in pictures().items():
        charts.save(draw(), place(name))
    print(f"{len(pictures())} pictures drawn.")
    return 0


if __name__ == "__main__":
    cli.run(main)
