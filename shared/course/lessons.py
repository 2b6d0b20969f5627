"""Checks what the lessons show: `python -m shared.course.lessons`.

The lessons are README.md, lesson 00, each stage's README.md and the last page; a stage may have a
REFERENCE.md beside its own. The first word of a fenced block decides how it is checked:

- `console` shows commands, each after `$ `, and their output. The commands run, and the output is
  compared: `...` in a line matches any text, `...` on a line of its own any lines, and a number
  after `~` any number.
- `sh` lists commands to try. They do not run, but every option must be one that the module has.
- `python` and `c` quote code of the stage, of an earlier one, or of `shared`; `...` on a line of
  its own leaves lines out.

Further words say how: `console slow` takes more than a moment, and a default run of the tests
leaves it out; `console server` and `python server` run while a server of stage 06 answers at
127.0.0.1:8000 (the check uses another port and replaces it in the command), and the Python there is
a whole program that must exit with status 0.

The table of a stage's exercises, between `<!-- tasks -->` and `<!-- /tasks -->`, is made from its
tasks.py by `--write`; hours.py makes the hours of reading and of the tasks.

Commands are `python`, `pytest` and `curl`, without a shell: no pipes and no redirections. They run
in the root of the repository, offline, with standard error mixed into standard output, and must
leave no file behind.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .. import cli, paths
from ..errors import UserError
from ..server import own_server
from . import hours, links, markdown, mine

LESSON, REFERENCE = "README.md", "REFERENCE.md"
PROMPT, CONTINUED = "$ ", "\\"
SLOW, SERVER = "slow", "server"
ADDRESS = "127.0.0.1:8000"
ANY = "..."
NUMBER = re.compile(r" *~\d[\d,]*(?:\.\d+)? *")  # with its spaces: columns are as wide as numbers
LIMIT = 300  # seconds for one command
OPTION = re.compile(r"--[a-z][\w-]*")
TASKS = re.compile(r"^<!-- tasks -->$.*?^<!-- /tasks -->$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a lesson. `line` is that of its first fence, from 1."""

    path: Path
    line: int
    kind: str  # the first word after the fence
    words: tuple[str, ...]  # those after it
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{paths.shown(self.path)}:{self.line}"


def lessons() -> list[Path]:
    """All texts to check, in reading order."""
    course = paths.ROOT / "shared" / "course"
    first, last = [paths.ROOT / LESSON, course / "LESSON_00.md"], course / "BEYOND.md"
    return [path for path in (*first, *stage_lessons(), last) if path.exists()]


def stage_lessons() -> list[Path]:
    """The stages' lessons. A stage that is being written may have none yet."""
    files = [paths.ROOT / name / LESSON for name in paths.discover()]
    return [path for path in files if path.exists()]


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of the file, in order."""
    fenced = []
    for fence in markdown.parse(path.read_text(encoding="utf-8")).fences:
        kind, *words = fence.info.split() or [""]
        fenced.append(Block(path, fence.line, kind, tuple(words), fence.lines))
    return fenced


def checked() -> list[Block]:
    """The blocks of all lessons, and of the reference pages, that can be checked."""
    kinds = ("console", "sh", "python", "c")
    texts = [*lessons(), *sorted(paths.ROOT.glob(f"stage*/{REFERENCE}"))]
    return [block for path in texts for block in blocks(path) if block.kind in kinds]


def check(block: Block, address: str = "") -> list[str]:
    """The problems of a block. address: "127.0.0.1:1234", of a server for blocks that need one.

    Raises UserError for a malformed block.
    """
    if SERVER in block.words and not address:
        raise UserError(f"{block} needs a server: give its address.")
    if block.kind == "sh":
        return [problem for line in block.lines for problem in _check_options(line)]
    if block.kind == "python" and SERVER in block.words:
        program = "\n".join(block.lines).replace(ADDRESS, address)
        status, output = run([sys.executable, "-c", program])
        return [f"the program ended with status {status}:\n{output}"] if status else []
    if block.kind in ("python", "c"):
        return _check_quote(block)
    return [
        problem
        for command, shown in commands(block)
        for problem in _check_command(command, shown, address)
    ]


# ---- commands and their output ------------------------------------------------------------------


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """The commands of a console block with the output shown for each.

    Raises UserError if the block does not begin with a command.
    """
    shown: list[tuple[str, list[str]]] = []
    continued = False
    for line in block.lines:
        if continued:
            shown[-1] = (shown[-1][0].removesuffix(CONTINUED) + line.strip(), [])
            continued = line.endswith(CONTINUED)
        elif line.startswith(PROMPT):
            shown.append((line.removeprefix(PROMPT), []))
            continued = line.endswith(CONTINUED)
        elif not shown:
            raise UserError(f"{block} begins with output: begin with a command after '{PROMPT}'.")
        else:
            shown[-1][1].append(line)
    return shown


def arguments(command: str) -> list[str]:
    """The command as a list for subprocess. Raises UserError if it cannot run here."""
    words = shlex.split(command, comments=True)
    known = bool(words) and words[0] in ("python", "pytest", "curl")
    if not known or {"|", ">", "<", "&", "&&", ";"} & set(words):
        raise UserError(
            f"'{command}' is not python, pytest or curl alone: show it in a block of sh."
        )
    if words[0] == "curl":
        return words
    return [sys.executable, *(["-m", "pytest"] if words[0] == "pytest" else []), *words[1:]]


def matches(shown: Sequence[str], output: Sequence[str]) -> bool:
    """Whether the lines of an output match the lines that a lesson shows."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == ANY else _pattern(line) + r"\n" for line in _trimmed(shown)
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _trimmed(output))) is not None


def _trimmed(lines: Sequence[str]) -> list[str]:
    """The lines without spaces at their ends, and without empty lines at the end."""
    return "\n".join(line.rstrip() for line in lines).rstrip("\n").split("\n")


def _pattern(line: str) -> str:
    """The regular expression of one shown line."""
    fixed = [".*?".join(map(re.escape, piece.split(ANY))) for piece in NUMBER.split(line)]
    # One or more spaces where the lesson shows any beside the number, else none.
    wild = [
        " +" * number.startswith(" ") + r"[-+]?\d[\d,]*(?:\.\d+)?" + " +" * number.endswith(" ")
        for number in NUMBER.findall(line)
    ]
    return "".join(a + b for a, b in zip(fixed, [*wild, ""], strict=True))


def _check_command(command: str, shown: list[str], address: str) -> list[str]:
    words = arguments(command.replace(ADDRESS, address) if address else command)
    if not shutil.which(words[0]):
        return []  # some systems have no curl
    status, output = run(words)
    output = output.replace(address, ADDRESS) if address else output
    if matches(shown, output.splitlines()):
        return []
    lines = [f"$ {command}", "-- shown:", *shown, f"-- printed, with exit status {status}:"]
    return ["\n".join([*lines, *output.splitlines()])]


def environment() -> dict[str, str]:
    """Offline, without colours, and equally wide on every machine."""
    fixed = {"HF_HUB_OFFLINE": "1", "COLUMNS": "100", "NO_COLOR": "1", "PYTHONUTF8": "1"}
    return os.environ | fixed


def run(words: list[str]) -> tuple[int, str]:
    """Exit status and output of a command, run as a reader would."""
    try:
        done = subprocess.run(
            words,
            cwd=paths.ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return 1, f"(no end after {LIMIT} s)"
    return done.returncode, done.stdout.decode("utf-8", "replace")


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The address of a server of stage 06. Raises UserError if it does not start."""
    with own_server(quiet=True, environment=environment()) as server:
        yield server.url.removeprefix("http://")


# ---- options and quotations ---------------------------------------------------------------------


def _check_options(line: str) -> Iterator[str]:
    """Options in a line of sh that its module does not have."""
    for command in re.split(r"&&|[|;]", line.partition(" #")[0]):
        command = command.partition(" -- ")[0]  # what follows is for another program
        module = links.MODULE.search(command)
        if module and links.OURS.match(module[1]):
            known = set(OPTION.findall(_help(module[1], command[module.end() :].split())))
            unknown = [option for option in OPTION.findall(command) if option not in known]
            yield from (f"{module[0]} has no {option}" for option in unknown)


def _help(module: str, words: list[str]) -> str:
    """The --help of a module, and of its first argument, which may be a command with options."""
    output = io.StringIO()
    for first in ([], [word for word in words[:1] if word[0] != "-"]):
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            program(module).main([*first, "--help"])
    return output.getvalue()


def program(module: str) -> Any:
    """What `python -m module` runs."""
    loaded = importlib.import_module(module)
    return importlib.import_module(f"{module}.__main__") if hasattr(loaded, "__path__") else loaded


def _check_quote(block: Block) -> list[str]:
    """Whether a file of the stage, of an earlier one, or of `shared` has the lines."""
    parts: list[list[str]] = [[]]
    for line in block.lines:
        if line.strip() == ANY:
            parts.append([])
        else:
            parts[-1].append(line)
    stage = block.path.parent.name
    folders = [name for name in reversed(paths.discover()) if name <= stage] + ["shared"]
    ends = "*.py" if block.kind == "python" else "*.[ch]"
    sources = [
        path
        for name in folders
        for path in sorted((paths.ROOT / name).rglob(ends))
        if "tests" not in path.parts
    ]
    if any(_quotes(parts, path.read_text(encoding="utf-8").splitlines()) for path in sources):
        return []
    return ["no file has these lines:\n" + "\n".join(block.lines)]


def _quotes(parts: list[list[str]], source: list[str]) -> bool:
    """Whether the source has all parts in order, with any indentation of the whole."""
    place = 0
    for part in filter(None, parts):
        wanted, count = _dedented(part), len(part)
        for at in range(place, len(source) - count + 1):
            same_start = source[at].strip() == part[0].strip()
            if same_start and _dedented(source[at : at + count]) == wanted:
                place = at + count
                break
        else:
            return False
    return True


def _dedented(lines: Sequence[str]) -> str:
    return textwrap.dedent("\n".join(lines))


# ---- exercises ----------------------------------------------------------------------------------


def with_tasks(path: Path) -> str:
    """The text of a stage's lesson with the right table of tasks.

    Raises UserError if the lesson has no place for it.
    """
    stage, text = path.parent.name, path.read_text(encoding="utf-8")
    tasks = mine.tasks(stage)
    if not tasks:
        return text
    if not TASKS.search(text):
        raise UserError(
            f"{stage}/{LESSON} has no place for its tasks: "
            "put <!-- tasks --> and <!-- /tasks --> on lines of their own."
        )
    rows = ["| task | what to write | where | points |", "|--:|---|---|--:|"]
    for task in tasks:
        functions = ", ".join(f"`{function}`" for function in task.functions)
        where = f"{functions} in [{task.file}]({task.file})"
        rows.append(f"| {task.number} | {task.title} | {where} | {task.points} |")
    table = "\n".join(["<!-- tasks -->", "", *rows, "", "<!-- /tasks -->"])
    return TASKS.sub(lambda _: table, text, count=1)


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        "shared.course.lessons",
        "Runs what the lessons show, and compares the output.",
        "  python -m shared.course.lessons             exit status 1 if anything differs\n"
        "  python -m shared.course.lessons --slow      also what takes minutes\n"
        "  python -m shared.course.lessons --write     put tables of tasks, and hours, in first",
    )
    parser.add_argument("--slow", action="store_true", help="run the blocks marked slow, too")
    parser.add_argument(
        "--write", action="store_true", help="write tables of tasks, and hours, into the texts"
    )
    options = parser.parse_args(argv)
    sys.path.insert(0, str(paths.ROOT))
    wrong = 0
    updated = {path: with_tasks(path) for path in stage_lessons()} | hours.written()
    for path, text in updated.items():
        if options.write:
            path.write_text(text, encoding="utf-8", newline="\n")
        elif text != path.read_text(encoding="utf-8"):
            wrong += 1
            print(f"{paths.shown(path)}: stale tasks or hours: update them with --write")
    chosen = [block for block in checked() if options.slow or SLOW not in block.words]
    with contextlib.ExitStack() as stack:
        needed = any(SERVER in block.words for block in chosen)
        address = stack.enter_context(serving()) if needed else ""
        for block in tqdm(chosen, desc="lessons", unit="block", disable=None):
            for problem in check(block, address if SERVER in block.words else ""):
                wrong += 1
                tqdm.write(f"{block}: {problem}")
    good = f"{len(chosen)} blocks of {len(lessons())} lessons are right."
    print(f"{wrong} wrong" if wrong else good)
    return 1 if wrong else 0


if __name__ == "__main__":
    cli.run(main)
