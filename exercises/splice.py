"""Take the functions of a task out of what was handed in, and put them into the reference.

Signatures, decorators and all other code stay the reference's. What a hand-in adds under names
that the reference lacks comes along: functions, classes, constants and imports of the module,
methods and attributes of the same class. All else is left behind, and named.

Python is moved as a syntax tree and written again, so indentation, line ends and tabs of a hand-in
do not matter. Of C, the text between the braces is moved, and nothing else.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Collection, Iterator

from shared.errors import UserError

Function = ast.FunctionDef | ast.AsyncFunctionDef
Import = ast.Import | ast.ImportFrom


class Refused(UserError):
    """Why functions cannot be taken, in one line that the student can act on."""


def parse(source: str) -> ast.Module:
    """Raises Refused, with the line, for what is not Python."""
    try:
        return ast.parse(source.replace("\r\n", "\n").removeprefix("\ufeff"))
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Refused(f"line {getattr(error, 'lineno', 1)}: not Python ({error})") from None


def find(tree: ast.Module, name: str) -> Function | None:
    """A function by its qualified name, "Plan.tokens"; of a property the getter."""
    *classes, last = name.split(".")
    body = tree.body
    for part in classes:
        owners = (node for node in body if isinstance(node, ast.ClassDef) and node.name == part)
        body = [node for owner in owners for node in owner.body]
    return next((n for n in body if isinstance(n, Function) and n.name == last), None)


def find_c(source: str, name: str) -> tuple[int, int]:
    """Where the body of a C function begins and ends: before a brace in column 0."""
    head = rf"^\w[^;{{}}#]*?\b{name}\([^;{{}}]*\)\s*\{{\n"
    if not (match := re.search(rf"{head}(.*?)^\}}", source, re.M | re.S)):
        raise Refused(f"{name} is missing")
    return match.span(1)


def with_body(file: str, source: str, name: str, body: str) -> str:
    """`source` of `file` with another body for one function, whose docstring stays."""
    if not file.endswith(".py"):
        start, end = find_c(source, name)
        return source[:start] + textwrap.indent(body + "\n", "    ") + source[end:]
    node, lines = find(parse(source), name), source.split("\n")
    assert node, f"{file} has no {name}"
    documented = ast.get_docstring(node) is not None
    start = node.body[0].end_lineno or 0 if documented else node.body[0].lineno - 1
    lines[start : node.end_lineno] = textwrap.indent(body, " " * (node.col_offset + 4)).split("\n")
    return "\n".join(lines)


def splice(
    file: str, reference: str, submitted: str, functions: Collection[str], others: Collection[str]
) -> tuple[str, list[str]]:
    """The reference of `file` with the bodies of `functions` from `submitted`, and what was left
    behind. others: functions of other tasks, which are judged apart. Raises Refused."""
    if not file.endswith(".py"):
        return _splice_c(reference, submitted.replace("\r\n", "\n"), functions)
    ours, theirs = parse(reference), parse(submitted)
    before = ast.dump(ours)
    for name in functions:
        new, old = find(theirs, name), find(ours, name)
        if new is not None:
            if _parameters(new) != _parameters(old):
                raise Refused(f"line {new.lineno}: the signature of {name} is another one")
            old.body = new.body
        elif name.rpartition(".")[2].startswith("_"):
            # A design without this function. The reference's must not help it.
            old.body = parse("raise NotImplementedError('not handed in')").body
        else:
            raise Refused(f"{name} is missing")
    if ast.dump(ours) == before:
        raise Refused("not done: its functions are the project's")
    notes = list(_add_new(ours, theirs, {*functions, *others}))
    return ast.unparse(ours) + "\n", notes


def _splice_c(reference: str, submitted: str, functions: Collection[str]) -> tuple[str, list[str]]:
    spliced = reference
    for name in functions:
        (start, end), (first, last) = find_c(spliced, name), find_c(submitted, name)
        spliced = spliced[:start] + submitted[first:last] + spliced[end:]
    if spliced == reference:
        raise Refused("not done: its functions are the project's")
    lines = enumerate(zip(spliced.splitlines(), submitted.splitlines(), strict=False), 1)
    return spliced, [f"line {n}: your change is not taken" for n, (x, y) in lines if x != y][:1]


def _parameters(node: Function) -> list[str]:
    """Its kind and the names of its parameters. Annotations and defaults are the reference's."""
    arguments = (inner for inner in ast.walk(node.args) if isinstance(inner, ast.arg))
    return [type(node).__name__, *(argument.arg for argument in arguments)]


def _add_new(
    ours: ast.Module | ast.ClassDef, theirs: ast.AST, judged: Collection[str], prefix: str = ""
) -> Iterator[str]:
    """Add to a module or a class the names that it lacks; yields what is not taken."""
    classes = {node.name: node for node in ours.body if isinstance(node, ast.ClassDef)}
    names = {name for node in ours.body for name in _bound(node)}
    known = {ast.dump(node) for node in ours.body}
    # New imports go behind the first, which may be of __future__: methods' decorators use them.
    start = next((at for at, node in enumerate(ours.body, 1) if isinstance(node, Import)), 1)
    for node in theirs.body:
        if isinstance(node, Import):  # what is new of it
            node.names = [alias for alias in node.names if not _bound(alias) & names]
        bound = _bound(node)
        if isinstance(node, ast.ClassDef) and node.name in classes:
            yield from _add_new(classes[node.name], node, judged, f"{prefix}{node.name}.")
        elif bound and not bound & names:
            ours.body.insert(start if isinstance(node, Import) else len(ours.body), node)
        elif bound and ast.dump(node) not in known:
            name = prefix + ", ".join(sorted(bound))
            if name not in judged:
                yield f"line {node.lineno}: your change of {name} is not taken"


def _bound(node: ast.stmt | ast.alias) -> set[str]:
    """The names that a statement of a module or a class binds, or a part of an import."""
    if isinstance(node, ast.alias):
        return {node.asname or node.name.partition(".")[0]}
    if isinstance(node, Function | ast.ClassDef):
        return {node.name}
    inner = [*ast.walk(node)]
    stored = {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored.union(*(_bound(n) for n in inner[1:] if isinstance(n, ast.alias)))
