"""What the texts show is so: quoted code is the code, and links and commands lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from pathlib import Path
from urllib.parse import unquote

import pytest

from shared.paths import ROOT

FENCE = re.compile(r"^```(\w*) ?(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)")
MODULE = re.compile(r"\bpython3? -m ((?:shared|reports|exercises|stage\d\d)[\w.]*)")


def tracked(ending: str) -> list[Path]:
    """The project's files: no virtual environment, nothing that a reader made."""
    listed = subprocess.run(
        ["git", "ls-files", f"*{ending}"], cwd=ROOT, capture_output=True, text=True
    )
    files = listed.stdout.splitlines() or [str(path) for path in ROOT.rglob(f"*{ending}")]
    return [ROOT / name for name in files if (ROOT / name).is_file()]


def anchors(text: str) -> set[str]:
    """The anchors that a code host makes of headings: "What `x` costs" -> "what-x-costs"."""
    headings = re.findall(r"^#+ +(.*?) *$", FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    named = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    return named | {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


TEXTS = {path: path.read_text(encoding="utf-8") for path in tracked(".md")}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_links_and_commands_lead_somewhere(path: Path) -> None:
    text = TEXTS[path]
    wrong = []
    for target in LINK.findall(FENCE.sub("", text)):
        name, _, anchor = unquote(target).partition("#")
        file = Path(os.path.normpath(path.parent / name)) if name else path
        if not re.match(r"[a-z]+:", target) and not (
            file.exists() and (not anchor or file not in TEXTS or anchor in anchors(TEXTS[file]))
        ):
            wrong.append(target)
    for module in MODULE.findall(text):
        place = ROOT / module.rstrip(".").replace(".", "/")
        if not place.with_suffix(".py").exists() and not (place / "__main__.py").exists():
            wrong.append(f"python -m {module}")
    assert not wrong


def quotes(code: str, source: str) -> bool:
    """Whether the source has the code, with any indentation; a line of `...` is any lines."""
    parts = [part for part in re.split(r"^ *\.\.\.\n", code, flags=re.MULTILINE) if part.strip()]
    for number, part in enumerate(parts, 1):
        first, *others = map(re.escape, textwrap.dedent(part).rstrip().split("\n"))
        rest = [rf"\n\{number}(?:{line})$" if line else r"\n$" for line in others]
        parts[number - 1] = rf"^( *){first}$" + "".join(rest)
    return re.search("(?s:.*?)".join(parts), source, re.MULTILINE) is not None


SOURCES = {
    path: path.read_text(encoding="utf-8")
    for ending in (".py", ".c", ".h")
    for path in tracked(ending)
    if "tests" not in path.parts
}


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_quoted_code_is_the_code(path: Path) -> None:
    """Of the stage, of an earlier one, or of the ground, whose name sorts before theirs."""
    stage = path.relative_to(ROOT).parts[0]
    for kind, word, code in FENCE.findall(TEXTS[path]) if path.parent != ROOT else ():
        endings = {"python": (".py",), "c": (".c", ".h")}.get(kind, ())
        if endings and word != "server":  # which a reader runs beside one
            assert any(
                quotes(code, text)
                for source, text in SOURCES.items()
                if source.suffix in endings and source.relative_to(ROOT).parts[0] <= stage
            ), code
