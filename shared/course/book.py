"""Makes the book: `python -m shared.course.book` builds a web site from the repository's texts.

The texts stay where they are. Their pages, the labs and the linked source files are copied into a
folder of their own, links between them are turned, and MkDocs Material draws the site: contents, a
search that works offline, the pages before and after, a dark look, formulas, a print version. The
classes and functions of a Python file are listed from its docstrings. Contents come from the list
of stages; a link that leads nowhere ends the build.

It needs the packages in requirements-book.txt.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from .. import cli, paths
from ..errors import UserError
from .links import LINKS, texts
from .markdown import FENCE

COURSE = "shared/course"
WIDGETS = Path(__file__).parent / "widgets"
# The picture of a lesson that a widget takes the place of, in a browser with JavaScript.
REPLACED = {
    "stage02_roofline": "roofline",
    "stage05_tables": "blocks",
    "stage04_packed": "scheduler",
}
SHIM = "https://unpkg.com/iframe-worker/shim"
HEADING = re.compile(r"^# (.+)$", re.MULTILINE)
PICTURE = re.compile(r"^!\[[^\]]*\]\([^)\s]*/(\w+)\.svg\)$")
SUFFIXES = {".py": "python", ".c": "c", ".h": "c", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocs_print_site_plugin", "latex2mathml")


class Book:
    """The texts of `root` as pages in the folder `docs`, under the names that they have."""

    def __init__(self, root: Path, docs: Path) -> None:
        self.root, self.docs = root, docs
        self.titles: dict[str, str] = {}  # page -> title
        self.sources: list[str] = []  # linked files that are no pages, in the order of their links
        for path in texts(root):
            if path.relative_to(root).parts[0] != "mine":
                self._text(path)
        for name in paths.discover(root):
            self._lab(root / name / "lab.ipynb")
        for source in self.sources:
            self._source(root / source)

    def _write(self, page: str, content: str) -> None:
        title = HEADING.search(content)
        self.titles[page] = title[1].replace("`", "") if title else PurePosixPath(page).stem
        target = self.docs / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")

    def _text(self, path: Path) -> None:
        content = path.read_text(encoding="utf-8")
        self._write(path.relative_to(self.root).as_posix(), "".join(self._lines(content, path)))

    def _lines(self, content: str, path: Path) -> Iterator[str]:
        """The lines of a text with its links turned, its formulas drawn and its widgets placed."""
        fence, formula = "", list[str]()
        for line in content.splitlines(keepends=True):
            mark = FENCE.match(line)
            if fence:
                closes = bool(
                    mark and mark[1].startswith(fence) and not line.strip(f" \n{fence[0]}")
                )
                if fence == "math":
                    closes = line.strip() == "```"
                    formula.append("" if closes else line)
                    yield _formula("".join(formula)) if closes else ""
                else:
                    yield line
                fence = "" if closes else fence
            elif line.strip() == "```math":
                fence, formula = "math", []
            elif mark:
                fence = mark[1]
                # Only the first word of what follows a fence names a language.
                yield re.sub(r"^( *[`~]+\w*).*", r"\1", line)
            else:
                picture = PICTURE.match(line.strip())
                line = LINKS[0].sub(lambda link: self._turned(link, path), line)
                if picture and picture[1] in REPLACED:
                    place = f'<div class="widget" data-widget="{REPLACED[picture[1]]}" markdown>'
                    line = f"{place}\n\n{line}\n</div>\n"
                yield line

    def _turned(self, link: re.Match[str], path: Path) -> str:
        """A link to a file as one to its page."""
        target, _, anchor = link[1].partition("#")
        if not target or re.match(r"\w+:", target):
            return link[0]
        file = (path.parent / target).resolve()
        if not file.exists():
            return link[0]  # an output of a lab, or a mistake that MkDocs reports
        if file.is_dir():
            readme = (file / "README.md").exists()
            target = target.rstrip("/") + ("/README.md" if readme else ".md")
            file = file / "README.md" if readme else file
        name = file.relative_to(self.root).as_posix()
        if file.suffix == ".svg" or file.suffix == ".png":
            (self.docs / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, self.docs / name)
        elif file.suffix == ".ipynb":
            target = target.removesuffix(".ipynb") + ".md"
        elif file.suffix != ".md":
            if name not in self.sources:
                self.sources.append(name)
            target += ".md" if file.is_file() else ""
            anchor = ""
        return link[0].replace(link[1], f"{target}#{anchor}" if anchor else target)

    def _lab(self, path: Path) -> None:
        """A lab with its outputs."""
        from nbconvert import MarkdownExporter

        if not path.exists():
            return
        content, resources = MarkdownExporter().from_filename(str(path))
        page = path.relative_to(self.root).with_suffix(".md").as_posix()
        for name, image in resources["outputs"].items():
            file = (self.docs / page).parent / f"lab_files/{name}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(image)
            content = content.replace(f"]({name})", f"](lab_files/{name})")
        self._write(page, "".join(self._lines(content, path)))

    def _source(self, path: Path) -> None:
        """A file of code, after what it defines; a folder as the list of its files."""
        name = path.relative_to(self.root).as_posix()
        lines = [f"# `{name}`", ""]
        if path.is_dir():
            lines += [f"- `{file.name}`" for file in sorted(path.iterdir()) if file.is_file()]
        else:
            code = path.read_text(encoding="utf-8").rstrip("\n")
            if path.suffix == ".py" and (path.parent / "__init__.py").exists():
                module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                lines += [f"::: {module}", "", "## Source", ""]
            lines += [f"````{SUFFIXES.get(path.suffix, 'text')}", code, "````"]
        self._write(f"{name}.md", "\n".join(lines) + "\n")

    def contents(self) -> list[Any]:
        """The pages in reading order, as MkDocs takes them."""
        listed = set[str]()

        def pages(*names: str) -> list[Any]:
            fresh = [name for name in names if name in self.titles and name not in listed]
            listed.update(fresh)
            return [{self.titles[name]: name} for name in fresh]

        chapters = pages("README.md", f"{COURSE}/LESSON_00.md")
        for stage in paths.discover(self.root):
            inside = [name for name in self.titles if name.startswith(f"{stage}/")]
            named = pages(*(f"{stage}/{name}.md" for name in ("README", "lab", "REPORT")))
            title = self.titles[f"{stage}/README.md"]
            code = [name for name in inside if PurePosixPath(name).stem != "README"]
            rest = pages(*sorted(set(inside) - set(code)), *code)
            labels = {"lab": "Lab", "REPORT": "Report"}
            files = [name for page in named for name in page.values()]
            first = [{labels[PurePosixPath(name).stem]: name} for name in files[1:]]
            folder = {"Code": [_short(page, stage) for page in rest]}
            chapters.append({title: [*files[:1], *first, folder]})
        chapters.append({"Measured": pages("reports/README.md")})
        chapters.append({"Course": pages(*(n for n in self.titles if n.startswith(COURSE)))})
        chapters.append({"Project": pages(*self.titles)})
        return chapters


def _short(page: dict[str, str], stage: str) -> dict[str, str]:
    """A page of code under its name inside its stage."""
    ((title, name),) = page.items()
    return {title.removeprefix(f"{stage}/"): name}


def _formula(latex: str) -> str:
    from latex2mathml.converter import convert

    return f"\n{convert(latex.strip(), display='block')}\n\n"


def configuration(book: Book, site: Path) -> dict[str, Any]:
    """What MkDocs reads from mkdocs.yml."""
    look = {"primary": "indigo", "accent": "deep orange"}
    dark = look | {"scheme": "slate", "media": "(prefers-color-scheme: dark)"}
    light = look | {"scheme": "default", "media": "(prefers-color-scheme: light)"}
    features = ("navigation.footer", "navigation.indexes", "navigation.prune", "navigation.top",
                "search.highlight", "content.code.copy", "toc.follow")  # fmt: skip
    return {
        "site_name": "Staircase",
        "site_description": "An LLM inference engine from scratch, one step at a time",
        "docs_dir": str(book.docs),
        "site_dir": str(site),
        "use_directory_urls": False,  # so that it works from a folder, without a server
        "nav": book.contents(),
        "theme": {
            "name": "material",
            "font": False,
            "features": list(features),
            "palette": [
                light | {"toggle": {"icon": "material/weather-night", "name": "Dark"}},
                dark | {"toggle": {"icon": "material/weather-sunny", "name": "Light"}},
            ],
        },
        "extra_css": ["widgets/book.css"],
        "extra_javascript": [f"widgets/{name}.js" for name in (*REPLACED.values(), "widgets")],
        "plugins": [
            "search",
            "offline",
            "autorefs",
            {"mkdocstrings": {"handlers": {"python": {
                "paths": [str(book.root)],
                "options": {
                    "show_source": False, "show_root_heading": False, "heading_level": 2,
                    "show_root_toc_entry": False, "members_order": "source",
                    "docstring_style": None, "filters": ["!^_"],
                },
            }}}},
            {"print-site": {"exclude": [f"{name}.md" for name in book.sources]}},
        ],
        "markdown_extensions": [
            "attr_list", "md_in_html", "tables", "sane_lists",
            {"toc": {"permalink": True, "slugify": "ANCHOR"}},
            {"pymdownx.highlight": {"anchor_linenums": True}},
            "pymdownx.superfences",
        ],
        "validation": {"links": {"anchors": "warn", "absolute_links": "warn"},
                       "nav": {"omitted_files": "warn"}},
    }  # fmt: skip


def build(root: Path, site: Path) -> int:
    """Build the site, and return MkDocs' exit status: 0 only if no link leads nowhere."""
    if missing := [name for name in NEEDED if not importlib.util.find_spec(name)]:
        raise UserError(
            f"The book needs {missing[0]}: python -m pip install -r requirements-book.txt"
        )
    with tempfile.TemporaryDirectory() as folder:
        docs = Path(folder, "docs")
        book = Book(root, docs)
        shutil.copytree(WIDGETS, docs / "widgets", ignore=shutil.ignore_patterns("test*"))
        config = Path(folder, "mkdocs.yml")
        written = json.dumps(configuration(book, site.resolve()), indent=1)
        # YAML takes JSON, but for the one value that is a function.
        anchor = "!!python/name:shared.course.markdown.slug"
        config.write_text(written.replace('"ANCHOR"', anchor), encoding="utf-8")
        words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config)]
        status = subprocess.run(
            words, cwd=root, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
        ).returncode
    for page in site.rglob("*.html"):  # the theme would load this script from the network
        worker = os.path.relpath(site / "widgets" / "worker.js", page.parent).replace(os.sep, "/")
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace(SHIM, worker), encoding="utf-8")
    return status


def main(argv: list[str] | None = None) -> int:
    usage = "  python -m shared.course.book            then open book/index.html"
    about = "Builds the book: all lessons, labs, reports and code as a web site that works offline."
    parser = cli.Parser("shared.course.book", about, usage)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--out",
        type=Path,
        default=paths.ROOT / "book",
        help="folder of the site; default: book, in the project",
    )
    options = parser.parse_args(argv)
    if status := build(paths.ROOT, options.out):
        raise UserError("The book was not built: see the lines above.")
    print(f"Written: {options.out / 'index.html'}")
    return status


if __name__ == "__main__":
    cli.run(main)
