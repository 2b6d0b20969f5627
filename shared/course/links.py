"""Checks all links, paths and commands in the texts: `python -m shared.course.links`.

In every *.md file of the repository:
- a relative link or image leads to an existing file or folder, its #anchor to a heading or line;
- a path in code, such as `shared/cli.py`, exists, and a test named after `::` is in its file;
- `python -m module` names a module that can be run;
- a web link is well formed, and none names a package registry: each pip has its own index.

The check needs no network, so it cannot tell whether a web page still exists.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .. import cli, paths
from .markdown import Text, parse

LINKS = (
    re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)"),  # [words](target), also images
    re.compile(r"^ {0,3}\[[^\]]+\]:\s+(\S+)"),  # [words]: target
    re.compile(r"""<(?:a|img)\b[^>]*?\b(?:href|src)=["']([^"']+)["']"""),
)
BARE = re.compile(r"(?<![(\"'<\w])https?://[^\s<>)\]]+|<(https?://[^>]+)>")
MODULE = re.compile(r"\bpython[\d.]*(?:\.exe)? -m ([\w.]+)")
PATH = re.compile(r"(\.?\w[\w.-]*(?:/[\w.-]+)*/?)(?:::([\w.:\[\]-]+)|:\d+(?:-\d+)?)?")
REGISTRY = re.compile(
    r"\b(pypi|pythonhosted|npmjs|crates|rubygems|anaconda)\.(org|com|io)\b|\bdownload\.pytorch\b"
)
OURS = re.compile(r"shared|stage\d\d_\w+")  # the first part of every path and module of ours
UNTRACKED = {".venv", ".cache", "mine"}  # made on each machine


def texts(root: Path) -> list[Path]:
    """Every Markdown file below `root`, except in hidden folders and virtual environments."""
    files = []
    for folder, below, names in os.walk(root):
        below[:] = [
            name
            for name in below
            if name[0] != "." and not (Path(folder) / name / "pyvenv.cfg").exists()
        ]
        files += [Path(folder) / name for name in names if name.endswith(".md")]
    return sorted(files)


def problems(root: Path) -> list[str]:
    """Everything in the texts below `root` that leads nowhere, as `file, line N: problem`."""
    parsed = {path: parse(path.read_text(encoding="utf-8")) for path in texts(root)}
    wrong = set()
    for path, text in parsed.items():
        name = path.relative_to(root).as_posix()
        checks = [(number, _check_prose(line, path, root, parsed)) for number, line in text.prose]
        checks += [(number, _check_code(line, path, root)) for number, line in text.code]
        checks += [(number, _check_host(line)) for number, line in text.prose + text.code]
        wrong |= {(name, number, problem) for number, several in checks for problem in several}
    return [f"{name}, line {number}: {problem}" for name, number, problem in sorted(wrong)]


def _check_host(line: str) -> Iterator[str]:
    if registry := REGISTRY.search(line):
        yield f"{registry[0]} is a package registry: name the package, not its host"


def _check_prose(line: str, path: Path, root: Path, parsed: dict[Path, Text]) -> Iterator[str]:
    targets = [match for pattern in LINKS for match in pattern.findall(line)]
    targets += [match[1] or match[0].rstrip(".,;:!?") for match in BARE.finditer(line)]
    for target in targets:
        scheme = urlsplit(target).scheme
        if scheme in ("http", "https"):
            host = urlsplit(target).hostname or ""
            if not re.fullmatch(r"([\w-]+\.)+[a-z]{2,}|localhost|127\.0\.0\.1", host):
                yield f"{target} is not a well-formed web address"
        elif not scheme:
            yield from _check_link(target, path, root, parsed)
        elif scheme != "mailto":
            yield f"{target} is neither a web address nor a path"


def _check_link(target: str, path: Path, root: Path, parsed: dict[Path, Text]) -> Iterator[str]:
    """A file must exist, in the repository, with the same case, and have the anchor."""
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
            yield f"{target}: this kind of file has no such anchor"
        else:
            count = len(place.read_text(encoding="utf-8").splitlines())
            if max(int(line) for line in lines.groups() if line) > count:
                yield f"{target}: the file has only {count} lines"


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
        if first in UNTRACKED or not (places or OURS.fullmatch(first)):
            continue  # a path elsewhere, or no path at all
        existing = [folder / name for folder in places if _exists(folder / name, root)]
        if not existing:
            yield f"`{name}` does not exist"
        elif test and not has_test(existing[0], test):
            yield f"`{name}` has no {test}"


def _exists(place: Path, root: Path) -> bool:
    """Whether a file has exactly this name: some systems take Readme.md for README.md."""
    steps = place.relative_to(root).parts if place.is_relative_to(root) else ()
    for depth, step in enumerate(steps):
        folder = root.joinpath(*steps[:depth])
        if not folder.is_dir() or step not in os.listdir(folder):
            return False
    return place.exists()


def is_test(name: str) -> bool:
    """Whether a pytest id, or the file or folder of one, exists in the project."""
    file, _, inner = name.partition("::")
    place = paths.ROOT / file
    return has_test(place, inner) if inner else place.exists()


def has_test(place: Path, test: str) -> bool:
    """Whether a file defines every name of `Class::test_name[case]`. A method may be inherited from
    a class in a file beside it."""
    *classes, name = re.sub(r"\[.*", "", test).split("::")
    beside = place.parent.glob("*.py") if classes else [place]
    return all(_defines(place, kind) for kind in classes) and any(
        _defines(path, name) for path in beside
    )


def _defines(path: Path, name: str) -> bool:
    source = path.read_text(encoding="utf-8") if path.is_file() else ""
    definition = rf"^\s*(?:(?:async )?def|class) {re.escape(name)}\b"
    return re.search(definition, source, re.MULTILINE) is not None


def runnable(module: str) -> bool:
    """Whether `python -m module` has something to run."""
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
        "Checks every link, file name and command in the Markdown files.",
        "  python -m shared.course.links             exit status 1 if anything leads nowhere",
    )
    parser.parse_args(argv)
    sys.path.insert(0, str(paths.ROOT))
    wrong = problems(paths.ROOT)
    for problem in wrong:
        print(problem)
    count = len(texts(paths.ROOT))
    print(f"{len(wrong)} wrong" if wrong else f"All links of {count} texts lead somewhere.")
    return 1 if wrong else 0


if __name__ == "__main__":
    cli.run(main)
