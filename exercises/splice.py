"""Take the functions of a task out of what was handed in, and put them into the reference.

Signature, decorators and all other code stay the reference's. What the new bodies use comes along
if the reference has no such name: functions, classes, constants and imports of the module, new
methods and attributes of the same class. All else is left behind, and named.

Python is moved as a syntax tree and written again, so indentation, line ends and tabs of a hand-in
do not matter. In C a function begins and ends in column 0.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef
ALLOWED = {*sys.stdlib_module_names, "torch", "numpy", "triton"}  # what a hand-in may import
_C_FUNCTION = re.compile(
    r"^(?P<head>[A-Za-z_][^;{}#]*?\b(?P<name>\w+)\s*\([^;{}]*\)\s*)\{(?P<body>.*?)^\}", re.M | re.S
)


class Refused(Exception):
    """Why functions cannot be taken, in one line that the student can act on."""


@dataclass
class Spliced:
    """A reference's source with the functions of a hand-in, and what of it was left behind."""

    source: str = ""
    notes: list[str] = field(default_factory=list)


def emptied(file: str, source: str, functions: Sequence[str], message: str) -> str:
    """`source` in which these functions keep signature and docstring, and do nothing else.

    Raises Refused if one is missing.
    """
    if not file.endswith(".py"):
        for name in functions:
            old = _c_function(source, name)
            source = source[: old.start("body")] + "\n    abort();\n" + source[old.end("body") :]
        return source
    for name in functions:
        lines, node = source.split("\n"), find(parse(source), name)
        if node is None:
            raise Refused(f"{name} is missing")
        indent = " " * (node.col_offset + 4)
        first = node.body[0]
        kept = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        # A body on the line of its `def` ends there: the line is written again.
        if first.lineno == node.lineno:
            raise Refused(f"{name} is written on one line: give its body lines of its own")
        start = first.end_lineno or 0
        body = f"{indent}raise NotImplementedError({message!r})".split("\n")
        lines[start if kept else _first_line(first) - 1 : node.end_lineno] = body
        source = "\n".join(lines)
    return source


def with_body(source: str, name: str, body: str) -> str:
    """`source` with another body for one function."""
    tree = parse(source)
    node = find(tree, name)
    if node is None:
        raise Refused(f"{name} is missing")
    (written,) = parse(f"async def f():\n{_indented(body)}").body
    assert isinstance(written, ast.AsyncFunctionDef)
    node.body = written.body
    return ast.unparse(tree)


def splice(
    file: str,
    reference: str,
    submitted: str,
    functions: Sequence[str],
    others: Collection[str] = (),
) -> Spliced:
    """The reference with the bodies of `functions` from `submitted`. others: functions of other
    tasks, which are judged there. Raises Refused."""
    if not file.endswith(".py"):
        return _splice_c(reference, submitted, functions)
    ours, theirs = parse(reference), parse(submitted)
    spliced, taken = Spliced(), list[ast.AST]()
    for name in functions:
        new, old = find(theirs, name), find(ours, name)
        if old is None:
            raise LookupError(f"{name} is not in the reference")
        if new is not None:
            if _signature(new) != _signature(old):
                raise Refused(f"line {new.lineno}: the signature of {name} is another one")
            old.body = new.body
            taken += new.body
        elif name.rpartition(".")[2].startswith("_"):
            # A design without this function. The reference's must not help it.
            old.body = parse("raise NotImplementedError('not handed in')").body
        else:
            raise Refused(f"{name} is missing")
    helpers = _add_helpers(ours, theirs, taken, spliced.notes)
    inside = {inner for helper in helpers for inner in ast.walk(helper)}
    known = {ast.dump(node) for node in ast.walk(parse(reference)) if isinstance(node, Function)}
    for qualified, node in _functions(theirs):
        judged = qualified in functions or qualified in others or node in inside
        if not judged and ast.dump(node) not in known:
            spliced.notes.append(f"line {node.lineno}: your change of {qualified} is not taken")
    try:
        spliced.source = ast.unparse(ast.fix_missing_locations(ours)) + "\n"
        parse(spliced.source)
    except RecursionError:
        raise Refused("its expressions are nested too deeply") from None
    return spliced


def same(file: str, reference: str, submitted: str, functions: Sequence[str]) -> bool:
    """Whether these functions are the reference's, to the letter: then nothing was done."""
    return all(segment(file, reference, f) == segment(file, submitted, f) for f in functions)


def segment(file: str, source: str, name: str) -> str | None:
    """The source of one function; None if it is not there."""
    if not file.endswith(".py"):
        return next((m[0] for m in _C_FUNCTION.finditer(source) if m["name"] == name), None)
    node = find(parse(source), name)
    lines = source.replace("\r\n", "\n").split("\n")
    return None if node is None else "\n".join(lines[node.lineno - 1 : node.end_lineno])


def parse(source: str) -> ast.Module:
    """Raises Refused, with the line, for what is not Python."""
    try:
        return ast.parse(source.replace("\r\n", "\n").removeprefix("\ufeff"))
    except SyntaxError as error:
        raise Refused(f"line {error.lineno}: not Python ({error.msg})") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Refused(f"not Python ({type(error).__name__})") from None


def find(tree: ast.Module, name: str) -> Function | None:
    """A function by its qualified name, "Plan.tokens"; of several the last, of a property the
    getter."""
    body: list[ast.stmt] = tree.body
    *classes, last = name.split(".")
    for part in classes:
        owner = [node for node in body if isinstance(node, ast.ClassDef) and node.name == part]
        if not owner:
            return None
        body = owner[0].body
    nodes = [node for node in body if isinstance(node, Function) and node.name == last]
    getters = [node for node in nodes if not _is_setter(node)]
    return getters[-1] if getters else None


def _is_setter(node: Function) -> bool:
    return any(getattr(item, "attr", "") in ("setter", "deleter") for item in node.decorator_list)


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))])


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.split("\n"))


def _signature(node: Function) -> list[str]:
    """Its kind and the names of its parameters. Annotations and defaults are the reference's."""
    a = node.args
    names = [argument.arg for argument in [*a.posonlyargs, *a.args, *a.kwonlyargs]]
    rest = [argument.arg if argument else "" for argument in (a.vararg, a.kwarg)]
    return [type(node).__name__, *names, *rest]


def _functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """The functions of a module and of its classes, by qualified name."""
    for node in tree.body:
        if isinstance(node, Function):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            methods = [inner for inner in node.body if isinstance(inner, Function)]
            yield from ((f"{node.name}.{inner.name}", inner) for inner in methods)


def _binds(node: ast.AST) -> set[str]:
    """The names that a statement of a module or a class binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, Function | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)]
        return {inner.id for inner in names if isinstance(inner.ctx, ast.Store)}
    return set()


def _uses(nodes: Sequence[ast.AST]) -> set[str]:
    """The names and attributes that occur in statements, and what they declare global."""
    names = set()
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Global):
            names |= {*node.names}
    return names


def _add_helpers(
    ours: ast.Module, theirs: ast.Module, taken: list[ast.AST], notes: list[str]
) -> set[ast.AST]:
    """Append to a module, and to its classes, what the taken statements use and it lacks."""
    classes = {node.name: node for node in ours.body if isinstance(node, ast.ClassDef)}
    places: list[tuple[ast.Module | ast.ClassDef, ast.stmt]] = []
    for node in theirs.body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            places += [(classes[node.name], inner) for inner in node.body]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            places += [(ours, single) for single in _single_imports(node)]
        else:
            places.append((ours, node))
    have = {place: {name for node in place.body for name in _binds(node)} for place, _ in places}
    left = [(p, node) for p, node in places if _binds(node) and not _binds(node) & have[p]]
    chosen: list[tuple[ast.Module | ast.ClassDef, ast.stmt]] = []
    while wanted := [pair for pair in left if _binds(pair[1]) & _uses(taken)]:
        for pair in wanted:
            left.remove(pair)
            if why := _import_refused(pair[1]):
                notes.append(why)
                continue
            chosen.append(pair)
            taken.append(pair[1])
    # A module's helpers come last, in their own order: bodies run later, and find them.
    chosen.sort(key=lambda pair: pair[1].lineno)
    for place, node in chosen:
        place.body.append(node)
    return {node for _, node in chosen}


def _single_imports(node: ast.Import | ast.ImportFrom) -> Iterator[ast.stmt]:
    for alias in node.names:
        single = ast.Import([alias])
        if isinstance(node, ast.ImportFrom):
            single = ast.ImportFrom(node.module, [alias], node.level)  # type: ignore[assignment]
        yield ast.copy_location(single, node)


def _import_refused(node: ast.stmt) -> str:
    """A note if a hand-in may not import this, else ""."""
    if isinstance(node, ast.Import):
        allowed = node.names[0].name.partition(".")[0] in ALLOWED
    elif isinstance(node, ast.ImportFrom):
        allowed = not node.level and (node.module or "").partition(".")[0] in ALLOWED
    else:
        return ""
    return "" if allowed else f"line {node.lineno}: not taken: {ast.unparse(node)}"


def _c_function(source: str, name: str) -> re.Match[str]:
    for match in _C_FUNCTION.finditer(source):
        if match["name"] == name:
            return match
    raise Refused(f"{name} is missing, or does not begin and end in column 0")


def _splice_c(reference: str, submitted: str, functions: Sequence[str]) -> Spliced:
    """As `splice`, for C. New functions go before the first one of the task."""
    submitted = submitted.replace("\r\n", "\n")
    known = {match["name"] for match in _C_FUNCTION.finditer(reference)}
    new = [match for match in _C_FUNCTION.finditer(submitted) if match["name"] not in known]
    spliced = Spliced(reference)
    for name in functions:
        theirs, ours = _c_function(submitted, name), _c_function(spliced.source, name)
        if theirs["head"].split() != ours["head"].split():
            raise Refused(f"the signature of {name} is another one")
        start, end = ours.span("body")
        spliced.source = spliced.source[:start] + theirs["body"] + spliced.source[end:]
    if any(line.lstrip().startswith("#") for m in new for line in m[0].splitlines()) or any(
        line.lstrip().startswith("#")
        for name in functions
        for line in _c_function(submitted, name)["body"].splitlines()
    ):
        raise Refused("a line for the preprocessor is inside a function")
    at = min(_c_function(spliced.source, name).start() for name in functions)
    helpers = "".join(f"{match[0]}\n\n" for match in new)
    spliced.source = spliced.source[:at] + helpers + spliced.source[at:]
    for match in _C_FUNCTION.finditer(submitted):
        changed = match["name"] in known - {*functions}
        if changed and match[0] != segment("x.c", reference, match["name"]):
            spliced.notes.append(f"your change of {match['name']} is not taken")
    return spliced
