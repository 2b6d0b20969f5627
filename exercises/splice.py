"""Take the functions of a task out of what was handed in, and put them into the reference.

Signatures, decorators and all other code stay the reference's. What a hand-in adds under names
that the reference lacks comes along: functions, classes, constants and imports of the module,
methods and attributes of the same class. All else is left behind, and named.

Code is moved as a syntax tree and written again, so indentation, line ends and tabs of a hand-in
do not matter.
"""

from __future__ import annotations

import ast
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
    except (SyntaxError, ValueError, MemoryError) as error:
        raise Refused(f"line {getattr(error, 'lineno', 1)}: not Python ({error})") from None


def find(tree: ast.Module, name: str) -> Function | None:
    """A function by its qualified name, "Plan.tokens"; of a property the getter."""
    *classes, last = name.split(".")
    body = tree.body
    for part in classes:
        owners = (node for node in body if isinstance(node, ast.ClassDef) and node.name == part)
        body = next((owner.body for owner in owners), [])
    return next((n for n in body if isinstance(n, Function) and n.name == last), None)


def with_body(source: str, name: str, body: str) -> str:
    """`source` with another body for one function, whose docstring stays."""
    node, lines = find(parse(source), name), source.split("\n")
    if node is None:
        raise Refused(f"{name} is missing")
    start = node.body[0].lineno - 1
    if ast.get_docstring(node) is not None:
        start = node.body[0].end_lineno or 0
    lines[start : node.end_lineno] = textwrap.indent(body, " " * (node.col_offset + 4)).split("\n")
    return "\n".join(lines)


def splice(
    reference: str, submitted: str, functions: Collection[str], others: Collection[str] = ()
) -> tuple[str, list[str]]:
    """The reference with the bodies of `functions` from `submitted`, and what was left behind.
    others: functions of other tasks, which are judged apart. Raises Refused."""
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


def _parameters(node: Function) -> list[str]:
    """Its kind and the names of its parameters. Annotations and defaults are the reference's."""
    arguments = (inner for inner in ast.walk(node.args) if isinstance(inner, ast.arg))
    return [type(node).__name__, *(argument.arg for argument in arguments)]


def _add_new(
    ours: ast.Module | ast.ClassDef,
    theirs: ast.Module | ast.ClassDef,
    judged: Collection[str],
    prefix: str = "",
) -> Iterator[str]:
    """Add to a module or a class the names that it lacks; yields what is not taken."""
    classes = {node.name: node for node in ours.body if isinstance(node, ast.ClassDef)}
    names = {name for node in ours.body for name in _bound(node)}
    known = {ast.dump(node) for node in ours.body}
    # New imports go behind the first one, which may be of __future__.
    start = next((n for n, node in enumerate(ours.body, 1) if isinstance(node, Import)), 1)
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
