"""Checks what the lessons show: `python -m shared.course.lessons`.

The lessons are README.md and each stage's README.md. A fenced block in one of them is checked by its first word:

- `console` shows commands, each behind `$ `, and what they print. They are run, and the output is compared: `...` in a line
  stands for any text, `...` on a line of its own for any lines, and a number behind `~` for any number, because it varies.
- `sh` is a list of commands to try. They are not run, but every option in it must be one that the module has.
- `python` quotes the code of the stage, or of what it stands on, line by line; `...` on a line of its own leaves lines out.

More words say how: `console slow` takes more than a moment, so that a default run of the tests leaves it out; `console server`
and `python server` are run while a server of stage 06 answers at 127.0.0.1:8000 (the check takes another port, and says so to
the command), and the Python there is a whole program that must end well.

Between `<!-- tasks -->` and `<!-- /tasks -->` stands the table of a stage's exercises, made from its tasks.py by `--write`.

Commands are `python`, `pytest` and `curl`, without a shell: no pipes and no redirections. They run in the root of the
repository, offline, with standard error behind standard output, and must leave no file behind.
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
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from .. import cli, paths
from ..errors import UserError
from . import links, mine

LESSON = "README.md"
PROMPT, CONTINUED = "$ ", "\\"
SLOW, SERVER = "slow", "server"
ADDRESS = "127.0.0.1:8000"
ANY = "..."
NUMBER = re.compile(
    r" *~\d[\d,]*(?:\.\d+)? *"
)  # with the spaces around it: a column is as wide as its numbers
LIMIT = 300  # seconds for one command
STARTING = 120.0  # seconds for the server
OPTION = re.compile(r"--[a-z][\w-]*")
TASKS = re.compile(r"^<!-- tasks -->$.*?^<!-- /tasks -->$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a lesson. `line` is that of its first fence, from 1."""

    path: Path
    line: int
    kind: str  # the first word behind the fence
    words: tuple[str, ...]  # those after it
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path.relative_to(paths.ROOT).as_posix()}:{self.line}"


def lessons() -> list[Path]:
    """All texts that are checked, in reading order. A stage that is being written may have none yet."""
    found = [paths.ROOT / LESSON, *(paths.ROOT / name / LESSON for name in paths.discover())]
    return [path for path in found if path.exists()]


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of the file, in order."""
    found, fence, start, info, inside = [], "", 0, "", list[str]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        mark = links.FENCE.match(line)
        if not fence and mark:
            fence, start, info, inside = mark[1], number, line.strip().strip(mark[1][0]), []
        elif fence and mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
            kind, *words = info.split() or [""]
            found.append(Block(path, start, kind, tuple(words), tuple(inside)))
            fence = ""
        elif fence:
            inside.append(line)
    return found


def checked() -> list[Block]:
    """The blocks of all lessons that say something to check."""
    return [
        block
        for path in lessons()
        for block in blocks(path)
        if block.kind in ("console", "sh", "python")
    ]


def check(block: Block, address: str = "") -> list[str]:
    """What is wrong in the block. `address` ("127.0.0.1:1234") is where a server answers, for blocks that want one.

    Raises UserError for a block that is not written as it should be.
    """
    if SERVER in block.words and not address:
        raise UserError(f"{block} wants a server: give the address of one.")
    if block.kind == "sh":
        return [each for line in block.lines for each in _check_options(line)]
    if block.kind == "python" and SERVER in block.words:
        code, said = run([sys.executable, "-c", "\n".join(block.lines).replace(ADDRESS, address)])
        return [f"the program ended with {code}:\n{said}"] if code else []
    if block.kind == "python":
        return _check_quote(block)
    return [
        each
        for command, shown in commands(block)
        for each in _check_command(command, shown, address)
    ]


# ---- commands and their output ----------------------------------------------------------------------------------


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """The commands of a console block, and the lines shown for each. UserError if it does not begin with a command."""
    found: list[tuple[str, list[str]]] = []
    continued = False
    for line in block.lines:
        if continued:
            found[-1] = (found[-1][0].removesuffix(CONTINUED) + line.strip(), [])
            continued = line.endswith(CONTINUED)
        elif line.startswith(PROMPT):
            found.append((line.removeprefix(PROMPT), []))
            continued = line.endswith(CONTINUED)
        elif not found:
            raise UserError(f"{block} begins with output: begin with a command behind '{PROMPT}'.")
        else:
            found[-1][1].append(line)
    return found


def arguments(command: str) -> list[str]:
    """The command as a list for subprocess. UserError if it is none that can be run here."""
    words = shlex.split(command, comments=True)
    if (
        not words
        or words[0] not in ("python", "pytest", "curl")
        or {"|", ">", "<", "&", "&&", ";"} & set(words)
    ):
        raise UserError(
            f"'{command}' is not python, pytest or curl alone: show it in a block of sh."
        )
    if words[0] == "curl":
        return words
    return [sys.executable, *(["-m", "pytest"] if words[0] == "pytest" else []), *words[1:]]


def matches(shown: Sequence[str], said: Sequence[str]) -> bool:
    """Whether the lines `said` are what `shown` shows."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == ANY else _pattern(line) + r"\n" for line in _trimmed(shown)
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _trimmed(said))) is not None


def _trimmed(lines: Sequence[str]) -> list[str]:
    """Without space at the ends of lines, and without empty lines at the end."""
    return "\n".join(line.rstrip() for line in lines).rstrip("\n").split("\n")


def _pattern(line: str) -> str:
    """The regular expression of one shown line."""
    varying = NUMBER.findall(line)
    fixed = [
        ".*?".join(re.escape(part) for part in piece.split(ANY)) for piece in NUMBER.split(line)
    ]
    # Where the lesson shows a space beside the number, there is one or more; elsewhere none.
    wild = [
        " +" * each.startswith(" ") + r"[-+]?\d[\d,]*(?:\.\d+)?" + " +" * each.endswith(" ")
        for each in varying
    ]
    return "".join(a + b for a, b in zip(fixed, [*wild, ""], strict=True))


def _check_command(command: str, shown: list[str], address: str) -> list[str]:
    words = arguments(command.replace(ADDRESS, address) if address else command)
    if not shutil.which(words[0]):
        return []  # some systems have no curl
    code, said = run(words)
    said = said.replace(address, ADDRESS) if address else said
    if matches(shown, said.splitlines()):
        return []
    return [
        "\n".join(
            [
                f"$ {command}",
                "-- shown:",
                *shown,
                f"-- printed, with exit status {code}:",
                *said.splitlines(),
            ]
        )
    ]


def environment() -> dict[str, str]:
    """Offline, and as wide and as plain everywhere."""
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "PYTHONUTF8": "1",
    }


def run(words: list[str]) -> tuple[int, str]:
    """Exit status and output of a command, run as a reader would."""
    try:
        done = subprocess.run(
            words, cwd=paths.ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 1, f"(no end after {LIMIT} s)"
    return done.returncode, done.stdout.decode("utf-8", "replace")


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """A server of stage 06, as its lesson starts it; yields its address. RuntimeError with its words if it does not start."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "stage06_serving", "--port", "0"],
            cwd=paths.ROOT,
            env=environment(),
            stdout=log,
            stderr=log,
        )
        try:
            deadline = time.monotonic() + STARTING
            while True:
                log.seek(0)
                said = log.read().decode("utf-8", "replace")
                if found := re.search(r" at http://(127\.0\.0\.1:\d+)\n", said):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"The server did not start: {said}")
                time.sleep(0.1)
            yield found[1]
        finally:
            process.kill()
            process.wait()


# ---- options and quotations -------------------------------------------------------------------------------------


def _check_options(line: str) -> Iterator[str]:
    """Options in a line of sh that its module does not have."""
    code = line.partition(" #")[0]
    for command in re.split(r"&&|[|;]", code):
        command = command.partition(" -- ")[0]  # what stands behind it is for another program
        module = links.MODULE.search(command)
        if module and links.OURS.match(module[1]):
            known = set(OPTION.findall(_help(module[1], command[module.end() :].split())))
            yield from (
                f"{module[0]} has no {option}"
                for option in OPTION.findall(command)
                if option not in known
            )


def _help(module: str, words: list[str]) -> str:
    """What --help prints, of the module and of the first of its arguments: that may be a command with options of its own."""
    found = importlib.import_module(module)
    program = importlib.import_module(f"{module}.__main__") if hasattr(found, "__path__") else found
    said = io.StringIO()
    for first in ([], [word for word in words[:1] if word[0] != "-"]):
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            program.main([*first, "--help"])
    return said.getvalue()


def _check_quote(block: Block) -> list[str]:
    """Whether the lines stand so in a file of the stage, of an earlier one, or of `shared`."""
    parts: list[list[str]] = [[]]
    for line in block.lines:
        if line.strip() == ANY:
            parts.append([])
        else:
            parts[-1].append(line)
    stage = block.path.parent.name
    folders = [name for name in reversed(paths.discover()) if name <= stage] + ["shared"]
    sources = [path for name in folders for path in sorted((paths.ROOT / name).glob("*.py"))]
    if any(_quotes(parts, path.read_text(encoding="utf-8").splitlines()) for path in sources):
        return []
    return ["no file has these lines:\n" + "\n".join(block.lines)]


def _quotes(parts: list[list[str]], source: list[str]) -> bool:
    """Whether all parts stand in the source, one after the other, indented as a whole as they like."""
    place = 0
    for part in parts:
        wanted, count = _dedented(part), len(part)
        starts = (
            at
            for at in range(place, len(source) - count + 1)
            if source[at].strip() == part[0].strip()
        )
        at = (
            next((at for at in starts if _dedented(source[at : at + count]) == wanted), None)
            if part
            else place
        )
        if at is None:
            return False
        place = at + count
    return True


def _dedented(lines: Sequence[str]) -> str:
    return textwrap.dedent("\n".join(lines))


# ---- exercises --------------------------------------------------------------------------------------------------


def with_tasks(path: Path) -> str:
    """The text of a stage's lesson with the table of its tasks as it should be. UserError if it has no place for one."""
    stage, text = path.parent.name, path.read_text(encoding="utf-8")
    tasks = mine.tasks(stage)
    if not tasks:
        return text
    if not TASKS.search(text):
        raise UserError(
            f"{stage}/{LESSON} has no place for its tasks: put <!-- tasks --> and <!-- /tasks --> on lines of their own."
        )
    rows = ["| task | what to write | where | points |", "|--:|---|---|--:|"]
    for task in tasks:
        functions = ", ".join(f"`{function}`" for function in task.functions)
        rows.append(
            f"| {task.number} | {task.title} | {functions} in [{task.file}]({task.file}) | {task.points} |"
        )
    table = "\n".join(["<!-- tasks -->", "", *rows, "", "<!-- /tasks -->"])
    return TASKS.sub(lambda found: table, text, count=1)


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        "shared.course.lessons",
        "Runs what the lessons show, and compares it with what they say of it.",
        "  python -m shared.course.lessons             exit status 1 if anything differs\n"
        "  python -m shared.course.lessons --slow      with what takes minutes\n"
        "  python -m shared.course.lessons --write     put the tables of tasks in first",
    )
    parser.add_argument("--slow", action="store_true", help="run the blocks marked slow, too")
    parser.add_argument(
        "--write", action="store_true", help="write the table of tasks into each lesson"
    )
    options = parser.parse_args(argv)
    sys.path.insert(0, str(paths.ROOT))
    wrong = 0
    for path in lessons()[1:]:
        text = with_tasks(path)
        if options.write:
            path.write_text(text, encoding="utf-8", newline="\n")
        elif text != path.read_text(encoding="utf-8"):
            wrong += 1
            print(
                f"{path.parent.name}/{LESSON}: the table of tasks is not that of tasks.py: write it with --write"
            )
    chosen = [block for block in checked() if options.slow or SLOW not in block.words]
    with contextlib.ExitStack() as stack:
        address = (
            stack.enter_context(serving()) if any(SERVER in block.words for block in chosen) else ""
        )
        for block in tqdm(chosen, desc="lessons", unit="block", disable=None):
            for problem in check(block, address if SERVER in block.words else ""):
                wrong += 1
                tqdm.write(f"{block}: {problem}")
    print(
        f"{wrong} wrong"
        if wrong
        else f"{len(chosen)} blocks of {len(lessons())} lessons show what is so."
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    cli.run(main)
