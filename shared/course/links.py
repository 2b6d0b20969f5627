"""Checks what the texts point at: `python -m shared.course.links`.

In every *.md file of the repository:
- a relative link or image leads to a file or folder that exists, and its #anchor to a heading or a line there;
- a path in code, such as `shared/cli.py`, exists, and a test named after `::` is in its file;
- `python -m module` names a module that can be run;
- a link into the web is well formed, and none names a package registry: everybody's pip has an index of its own.

Nothing is fetched, so that the check needs no network: whether a web page is still there, it does not know.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .. import cli, paths

FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
COMMENT = re.compile(r"<!--.*?-->")
LINKS = (
    re.compile(
        r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)"
    ),  # [words](target) and ![words](target "title")
    re.compile(r"^ {0,3}\[[^\]]+\]:\s+(\S+)"),  # [words]: target
    re.compile(r"""<(?:a|img)\b[^>]*?\b(?:href|src)=["']([^"']+)["']"""),
)
BARE = re.compile(r"(?<![(\"'<\w])https?://[^\s<>)\]]+|<(https?://[^>]+)>")
WEB_TEXT = re.compile(
    r"!?\[[^\]]*\]\(\s*<?https?://[^)]*\)"
)  # a whole link into the web, with its words
HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$")
NAMED = re.compile(r"""<a\b[^>]*\b(?:id|name)=["']([^"']+)["']""")
MODULE = re.compile(r"\bpython[\d.]*(?:\.exe)? -m ([\w.]+)")
PATH = re.compile(r"(\.?\w[\w.-]*(?:/[\w.-]+)*/?)(?:::([\w.:\[\]-]+)|:\d+(?:-\d+)?)?")
REGISTRY = re.compile(
    r"\b(pypi|pythonhosted|npmjs|crates|rubygems|anaconda)\.(org|com|io)\b|\bdownload\.pytorch\b"
)
OURS = re.compile(
    r"shared|stage\d\d_\w+"
)  # a path that begins so is meant to be one of ours, there or not
UNKNOWN_HERE = {".venv", ".cache"}  # made on each machine, and not part of the repository


@dataclass
class Text:
    """A markdown file taken apart. Lines are counted from 1."""

    prose: list[tuple[int, str]] = field(default_factory=list)  # without code and comments
    code: list[tuple[int, str]] = field(default_factory=list)  # spans, and lines of fenced blocks
    anchors: set[str] = field(default_factory=set)


def texts(root: Path) -> list[Path]:
    """Every markdown file below `root` that is not in a hidden folder or a virtual environment."""
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [
            name
            for name in below
            if name[0] != "." and not (Path(folder) / name / "pyvenv.cfg").exists()
        ]
        found += [Path(folder) / name for name in names if name.endswith(".md")]
    return sorted(found)


def parse(content: str) -> Text:
    """Take a markdown text apart into prose, code and anchors."""
    text, fence, times = Text(), "", dict[str, int]()
    for number, line in enumerate(content.splitlines(), 1):
        mark = FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
            else:
                text.code.append((number, line))
            continue
        if mark:
            fence = mark[1]
            continue
        line = COMMENT.sub("", line)
        text.anchors |= set(NAMED.findall(line))
        if heading := HEADING.match(line):
            slug = anchor(heading[1])
            text.anchors.add(f"{slug}-{times[slug]}" if slug in times else slug)
            times[slug] = times.get(slug, 0) + 1
        # Another project's file is often named in code inside a link to it: the link says where it is.
        text.code += [(number, span[2].strip()) for span in CODE.finditer(WEB_TEXT.sub("", line))]
        text.prose.append((number, CODE.sub("", line)))
    return text


def anchor(heading: str) -> str:
    """The anchor that a code host makes of a heading: "What `x` costs" -> "what-x-costs"."""
    words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def problems(root: Path) -> list[str]:
    """Everything in the texts below `root` that leads nowhere, as `file, line N: what is wrong`."""
    parsed = {path: parse(path.read_text(encoding="utf-8")) for path in texts(root)}
    found = []
    for path, text in parsed.items():
        named = path.relative_to(root).as_posix()
        for number, line in text.prose:
            found += [(named, number, each) for each in _check_prose(line, path, root, parsed)]
        for number, line in text.code:
            found += [(named, number, each) for each in _check_code(line, path, root)]
        for number, line in text.prose + text.code:
            if registry := REGISTRY.search(line):
                found.append(
                    (
                        named,
                        number,
                        f"{registry[0]} is a package registry: name the package, not its host",
                    )
                )
    return [f"{name}, line {number}: {what}" for name, number, what in sorted(set(found))]


def _check_prose(line: str, path: Path, root: Path, parsed: dict[Path, Text]) -> Iterator[str]:
    targets = [match for pattern in LINKS for match in pattern.findall(line)]
    targets += [match[1] or match[0].rstrip(".,;:!?") for match in BARE.finditer(line)]
    for target in targets:
        scheme = urlsplit(target).scheme
        if scheme in ("http", "https"):
            host = urlsplit(target).hostname or ""
            if not re.fullmatch(r"([\w-]+\.)+[a-z]{2,}|localhost|127\.0\.0\.1", host):
                yield f"{target} is no well-formed web address"
        elif not scheme:
            yield from _check_link(target, path, root, parsed)
        elif scheme != "mailto":
            yield f"{target} is neither a web address nor a path"


def _check_link(target: str, path: Path, root: Path, parsed: dict[Path, Text]) -> Iterator[str]:
    """A link to a file: is it there, within the repository, spelt with the right case, and does its anchor exist?"""
    name, _, mark = unquote(target).partition("#")
    place = Path(os.path.normpath(path.parent / name)) if name else path
    if "\\" in name or name.startswith("/"):
        yield f"{target}: write a path from this file, with / between folders"
    elif not place.is_relative_to(root):
        yield f"{target} leads out of the repository"
    elif not _exists(place, root):
        yield f"{target} does not exist"
    elif mark and place in parsed:
        if mark not in parsed[place].anchors:
            yield f"{target}: there is no such heading"
    elif mark:
        lines = re.fullmatch(r"L(\d+)(?:-L(\d+))?", mark)
        if not lines or not place.is_file():
            yield f"{target}: such an anchor means nothing there"
        elif max(int(each) for each in lines.groups() if each) > len(
            place.read_text(encoding="utf-8").splitlines()
        ):
            yield f"{target}: the file has fewer lines"


def _check_code(code: str, path: Path, root: Path) -> Iterator[str]:
    for module in MODULE.findall(code):
        if not runnable(module.rstrip(".")):
            yield f"python -m {module}: there is no such module to run"
    for word in re.split(r"[\s\"'(),;=]+", code):
        match = PATH.fullmatch(word)
        if not match or "/" not in word:
            continue
        name, test = match.groups()
        first = name.split("/")[0]
        places = [folder for folder in (root, path.parent) if (folder / first).exists()]
        if first in UNKNOWN_HERE or not (places or OURS.fullmatch(first)):
            continue  # a path of somewhere else, or no path at all
        there = [folder / name for folder in places if _exists(folder / name, root)]
        if not there:
            yield f"`{name}` does not exist"
        elif test and not _has_test(there[0], test):
            yield f"`{name}` has no {test}"


def _exists(place: Path, root: Path) -> bool:
    """Whether a file is there under exactly this name: some systems take Readme.md for README.md, and others do not."""
    steps = place.relative_to(root).parts if place.is_relative_to(root) else ()
    for depth, step in enumerate(steps):
        folder = root.joinpath(*steps[:depth])
        if not folder.is_dir() or step not in os.listdir(folder):
            return False
    return place.exists()


def _has_test(place: Path, test: str) -> bool:
    """Whether the file defines every name of `Class::test_name[case]`."""
    names = test.partition("[")[0].split("::")
    source = place.read_text(encoding="utf-8") if place.is_file() else ""
    return all(
        re.search(rf"^\s*(?:def|class) {re.escape(name)}\b", source, re.MULTILINE) for name in names
    )


def runnable(module: str) -> bool:
    """Whether `python -m module` finds something to run."""
    try:
        spec: importlib.machinery.ModuleSpec | None = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        "shared.course.links",
        "Checks every link, file name and command in the markdown files.",
        "  python -m shared.course.links             exit status 1 if anything leads nowhere",
    )
    parser.parse_args(argv)
    sys.path.insert(0, str(paths.ROOT))
    found = problems(paths.ROOT)
    for problem in found:
        print(problem)
    print(
        f"{len(found)} wrong"
        if found
        else f"All links of {len(texts(paths.ROOT))} texts lead somewhere."
    )
    return 1 if found else 0


if __name__ == "__main__":
    cli.run(main)
