"""A Markdown text taken apart, for the checks of links and of lessons."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
COMMENT = re.compile(r"<!--.*?-->")
WEB_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?https?://[^)]*\)")  # whole, with its words
HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$")
NAMED = re.compile(r"""<a\b[^>]*\b(?:id|name)=["']([^"']+)["']""")


@dataclass(frozen=True)
class Fence:
    """A fenced block. line: of its first fence. info: what follows that fence."""

    line: int
    info: str
    lines: tuple[str, ...]


@dataclass
class Text:
    """Lines are counted from 1."""

    prose: list[tuple[int, str]] = field(default_factory=list)  # without code and comments
    code: list[tuple[int, str]] = field(default_factory=list)  # spans, and lines of fenced blocks
    fences: list[Fence] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)


def parse(content: str) -> Text:
    """Take a Markdown text apart. A block that is never closed is not a fence, only code."""
    text, times = Text(), dict[str, int]()
    fence, start, info, inside = "", 0, "", list[str]()
    for number, line in enumerate(content.splitlines(), 1):
        mark = FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
                text.fences.append(Fence(start, info, tuple(inside)))
                fence = ""
            else:
                text.code.append((number, line))
                inside.append(line)
            continue
        if mark:
            fence, start, info, inside = mark[1], number, line.strip().strip(mark[1][0]), []
            continue
        line = COMMENT.sub("", line)
        text.anchors |= set(NAMED.findall(line))
        if heading := HEADING.match(line):
            slug = anchor(heading[1])
            text.anchors.add(f"{slug}-{times[slug]}" if slug in times else slug)
            times[slug] = times.get(slug, 0) + 1
        # Code inside a web link names a file of another project.
        text.code += [(number, span[2].strip()) for span in CODE.finditer(WEB_LINK.sub("", line))]
        text.prose.append((number, CODE.sub("", line)))
    return text


def anchor(heading: str) -> str:
    """The anchor that a code host makes of a heading: "What `x` costs" -> "what-x-costs"."""
    words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def slug(heading: str, separator: str = "-") -> str:
    """The same, as the book's generator calls it."""
    return anchor(heading)
