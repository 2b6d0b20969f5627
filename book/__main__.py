"""Makes the book: `python -m book` builds a web site from the repository's texts, in book/site.

The texts stay where they are. This copies them to book/docs, with the labs as Markdown and a page
for each file of code, so that every link leads to a page; Zensical draws the site that
zensical.toml describes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from latex2mathml.converter import convert
from nbconvert import MarkdownExporter

HERE = Path(__file__).parent
ROOT, DOCS = HERE.parent, HERE / "docs"
LINK = re.compile(r"(\]\(<?)([^)\s>#]+)")
LANGUAGES = {".py": "python", ".c": "c", ".h": "c", ".txt": "text", ".yaml": "yaml", ".yml": "yaml"}
WIDGETS = {  # the picture that a widget stands below, in a browser with JavaScript
    "stage02_roofline": "roofline",
    "stage05_tables": "blocks",
    "stage04_static_continuous": "scheduler",
}


def turned(link: re.Match[str], folder: Path) -> str:
    """A link to a file or folder as one to its page."""
    start, target = link.groups()
    file = (folder / target).resolve()
    if re.match(r"[a-z]+:", target) or not file.exists():
        return link[0]
    if file.is_dir():
        target = target.rstrip("/") + "/README.md"
    elif file.suffix == ".ipynb":
        target = target.removesuffix("ipynb") + "md"
    elif file.suffix in LANGUAGES:
        target += ".md"
    return start + target


def prose(text: str, folder: Path) -> str:
    """A text with its links turned and its widgets placed."""
    text = LINK.sub(lambda link: turned(link, folder), text)
    for name, widget in WIDGETS.items():
        div = f'<div class="widget" data-widget="{widget}" markdown>'
        text = re.sub(rf"^!\[.*{name}\.svg\)$", rf"{div}\n\n\g<0>\n\n</div>", text, flags=re.M)
    return text


def page(text: str, folder: Path) -> str:
    """A text of the repository as one of the book: formulas are drawn, and of what follows a fence
    only the language stays."""
    pieces = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    for place, piece in enumerate(pieces):
        if piece.startswith("```math"):
            pieces[place] = convert(piece[7:-3].strip(), display="block")
        elif piece.startswith("```"):
            pieces[place] = re.sub(r"^(```\w*).*", r"\1", piece, count=1)
        else:
            pieces[place] = prose(piece, folder)
    return "".join(pieces)


def main() -> int:
    shutil.rmtree(DOCS, ignore_errors=True)
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        source, copy = ROOT / name, DOCS / name.removeprefix("book/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            copy.write_text(page(source.read_text(encoding="utf-8"), source.parent))
        elif source.suffix == ".ipynb":
            text, resources = MarkdownExporter().from_filename(str(source))
            copy.with_suffix(".md").write_text(page(text, source.parent))
            for output, data in resources["outputs"].items():
                copy.with_name(output).write_bytes(data)
        elif source.suffix in LANGUAGES:
            code = source.read_text(encoding="utf-8")
            code = f"# `{name}`\n\n````{LANGUAGES[source.suffix]}\n{code}````\n"
            copy.with_name(copy.name + ".md").write_text(code)
        elif source.suffix in (".svg", ".png", ".js", ".css"):
            shutil.copyfile(source, copy)
    for folder in [path for path in DOCS.rglob("*") if path.is_dir()]:
        if not (folder / "README.md").exists():
            names = sorted(path.name for path in folder.glob("*.md"))
            lines = [f"# {folder.name}", "", *(f"- [{name[:-3]}]({name})" for name in names)]
            (folder / "README.md").write_text("\n".join(lines))
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    return subprocess.run(command, cwd=HERE).returncode


if __name__ == "__main__":
    sys.exit(main())
