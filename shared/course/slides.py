"""Slides for the lectures, made from the lessons: `python -m shared.course.slides stage05`.

The slides show a lesson's question and answer, its trace before and after, each picture under its
heading, and the closing table. All of it comes from the README, so slides and lesson agree. The
deck is one HTML file with the pictures in it, for any browser: the arrow keys turn the slides, and
printing makes a PDF with one slide per page.
"""

from __future__ import annotations

import html
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from .. import cli, paths
from . import mine

OUT = "slides.html"
ABOUT = "Makes slides of the lessons' questions, pictures and closing tables: one HTML file."
EXAMPLES = """\
  python -m shared.course.slides                    all stages
  python -m shared.course.slides stage05 stage06 --out week5.html"""
TRACE, CLOSING = "Before and after", "prediction"  # a heading; the first cell of a closing table
MEASURED = "Predicted, and measured"


def slides(lesson: Path) -> Iterator[str]:
    """The slides of a lesson, as HTML sections. Raises OSError for a picture that is missing."""
    markdown = MarkdownIt("commonmark").enable("table")
    for rule in ("link_open", "link_close"):  # relative links lead nowhere from a slide
        markdown.add_render_rule(rule, lambda *_: "")
    heading, place = "", f"<footer>{html.escape(lesson.parent.name)}</footer>"

    def slide(content: str, title: str = "", kind: str = "") -> str:
        title = title and f"<h2>{title}</h2>"
        return f'<section class="{kind}">{title}{content}{place}</section>'

    def rendered(tokens: Sequence[Token]) -> str:
        return markdown.renderer.render(tokens, markdown.options, {})

    parts = list(_parts(markdown.parse(lesson.read_text(encoding="utf-8"))))
    yield slide("".join(map(rendered, parts[:3])), kind="first")  # title, question, answer
    for part in parts[3:]:
        inline = part[1] if len(part) > 1 else part[0]
        image = next((child for child in inline.children or () if child.type == "image"), None)
        if part[0].type == "heading_open":
            heading = re.sub("</?h[1-6]>", "", rendered(part))
        elif image is not None:
            yield slide(_figure(lesson.parent / str(image.attrs["src"]), image.content), heading)
        elif part[0].type == "fence" and heading.startswith(TRACE):
            yield slide(rendered(part), heading)
        elif part[0].type == "table_open" and _first_cell(part) == CLOSING:
            yield slide(rendered(part), MEASURED)


def _parts(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """The blocks of a text: each from its first token to its last."""
    part: list[Token] = []
    for token in tokens:
        part.append(token)
        if token.level == 0 and token.nesting <= 0:
            yield part
            part = []


def _first_cell(table: Sequence[Token]) -> str:
    return next(token.content for token in table if token.type == "inline")


def _figure(picture: Path, caption: str) -> str:
    data = b64encode(picture.read_bytes()).decode()
    words = html.escape(caption)
    image = f'<img alt="{words}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{words}</figcaption></figure>"


def deck(stages: Sequence[str]) -> str:
    """The HTML page with the slides of `stages`."""
    lessons = [paths.ROOT / stage / "README.md" for stage in stages]
    sections = "\n".join(section for lesson in lessons for section in slides(lesson))
    title = "Staircase: " + ", ".join(stages)
    style, keys = (mine.read(Path(__file__).with_suffix(end)).strip() for end in (".css", ".js"))
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{style}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n'
        f"<body>{sections}<script>{keys}</script></body></html>\n"
    )


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser("shared.course.slides", ABOUT, EXAMPLES)
    parser.add_argument("stages", nargs="*", help="which stages; default: all")
    parser.add_argument("--out", metavar="FILE", default=OUT, help="an .html file to write")
    options = parser.parse_args(argv)
    stages = [mine.find_stage(name) for name in options.stages] or paths.discover()
    cli.write_file(cli.output_file(options.out, ".html"), deck(stages).encode())
    return 0


if __name__ == "__main__":
    cli.run(main)
