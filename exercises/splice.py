"""Take the functions of a task out of what was handed in, and put them into the reference.

Signatures, decorators and all other code stay the reference's. What a hand-in adds under names
that the reference lacks comes along: functions, classes, constants and imports of the module,
methods and attributes of the same class. All else is left behind, and named.

Code is moved as a syntax tree and written again, so indentation, line ends and tabs of a hand-in
do not matter.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence

Function = ast.FunctionDef | ast.AsyncFunctionDef
Import = ast.Import | ast.ImportFrom
ALLOWED = {*sys.stdlib_module_names, "torch", "numpy", "triton"}  # what a hand-in may import


class Refused(Exception):
    """Why functions cannot be taken, in one line that the student can act on."""


def parse(source: str) -> ast.Module:
    """Raises Refused, with the line, for what is not Python."""
    try:
        return ast.parse(source.replace("\r\n", "\n").removeprefix("\ufeff"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
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
    reference: str, submitted: str, functions: Sequence[str], others: Collection[str] = ()
) -> tuple[str, list[str]]:
    """The reference with the bodies of `functions` from `submitted`, and what was left behind.
    others: functions of other tasks, which are judged there. Raises Refused."""
    ours, theirs = parse(reference), parse(submitted)
    changed = False
    for name in functions:
        new, old = find(theirs, name), find(ours, name)
        assert old, f"{name} is not in the reference"
        changed |= new is None or ast.dump(new) != ast.dump(old)
        if new is not None:
            if _parameters(new) != _parameters(old):
                raise Refused(f"line {new.lineno}: the signature of {name} is another one")
            old.body = new.body
        elif name.rpartition(".")[2].startswith("_"):
            # A design without this function. The reference's must not help it.
            old.body = parse("raise NotImplementedError('not handed in')").body
        else:
            raise Refused(f"{name} is missing")
    if not changed:
        raise Refused("not done: its functions are the project's")
    notes = list(_add_new(ours, theirs, {*functions, *others}))
    try:
        return ast.unparse(ast.fix_missing_locations(ours)) + "\n", notes
    except RecursionError:
        raise Refused("its expressions are nested too deeply") from None


def _parameters(node: Function) -> list[str]:
    """Its kind and the names of its parameters. Annotations and defaults are the reference's."""
    a = node.args
    names = [argument.arg for argument in [*a.posonlyargs, *a.args, *a.kwonlyargs]]
    rest = [argument.arg if argument else "" for argument in (a.vararg, a.kwarg)]
    return [type(node).__name__, *names, *rest]


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
    # New imports go behind a docstring and what is imported from __future__.
    future = [getattr(node, "module", "") == "__future__" for node in ours.body]
    start = future.index(True) + 1 if True in future else 1
    for node in theirs.body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            yield from _add_new(classes[node.name], node, judged, f"{prefix}{node.name}.")
        elif isinstance(node, Import):
            new = [x for x in node.names if (x.asname or x.name.partition(".")[0]) not in names]
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules = modules or [alias.name for alias in new]
            if new and (
                getattr(node, "level", 0) or {m.partition(".")[0] for m in modules} - ALLOWED
            ):
                yield f"line {node.lineno}: not taken: {ast.unparse(node)}"
            elif new:
                node.names = new
                ours.body.insert(start, node)
        elif (bound := _bound(node)) and not bound & names:
            ours.body.append(node)
        elif bound and ast.dump(node) not in known:
            name = prefix + ", ".join(sorted(bound))
            if name not in judged:
                yield f"line {node.lineno}: your change of {name} is not taken"


def _bound(node: ast.stmt) -> set[str]:
    """The names that a statement of a module or a class binds."""
    if isinstance(node, Import):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, Function | ast.ClassDef):
        return {node.name}
    names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)]
    return {inner.id for inner in names if isinstance(inner.ctx, ast.Store)}
