"""Take the functions of a task out of what was handed in, and put them into the reference.

Signatures, decorators and all other code stay the reference's. What a hand-in adds under names
that the reference lacks comes along: functions, classes, constants and imports of the module,
methods and attributes of the same class. All else is left behind, and named.

Python is moved as a syntax tree and written again, so indentation, line ends and tabs of a hand-in
do not matter.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence

Function = ast.FunctionDef | ast.AsyncFunctionDef
ALLOWED = {*sys.stdlib_module_names, "torch", "numpy", "triton"}  # what a hand-in may import


class Refused(Exception):
    """Why functions cannot be taken, in one line that the student can act on."""


def parse(source: str) -> ast.Module:
    """Raises Refused, with the line, for what is not Python."""
    try:
        return ast.parse(source.replace("\r\n", "\n").removeprefix("\ufeff"))
    except SyntaxError as error:
        raise Refused(f"line {error.lineno}: not Python ({error.msg})") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Refused(f"not Python ({type(error).__name__})") from None


def find(tree: ast.Module, name: str) -> Function | None:
    """A function by its qualified name, "Plan.tokens"; of a property the getter."""
    body = tree.body
    *classes, last = name.split(".")
    for part in classes:
        owners = (node for node in body if isinstance(node, ast.ClassDef) and node.name == part)
        body = next((owner.body for owner in owners), [])
    functions = [node for node in body if isinstance(node, Function) and node.name == last]
    return functions[0] if functions else None


def segment(source: str, name: str) -> str | None:
    """The source of one function; None if it is not there."""
    node = find(parse(source), name)
    lines = source.replace("\r\n", "\n").split("\n")
    return None if node is None else "\n".join(lines[node.lineno - 1 : node.end_lineno])


def with_body(source: str, name: str, body: str) -> str:
    """`source` with another body for one function, whose docstring stays."""
    node, lines = find(parse(source), name), source.split("\n")
    if node is None:
        raise Refused(f"{name} is missing")
    first = node.body[0]
    if first.lineno == node.lineno:
        raise Refused(f"{name} is written on one line: give its body lines of its own")
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    decorators = getattr(first, "decorator_list", [])
    start = first.end_lineno if documented else min(x.lineno for x in [first, *decorators]) - 1
    written = textwrap.indent(body, " " * (node.col_offset + 4))
    lines[start : node.end_lineno] = written.split("\n")
    return "\n".join(lines)


def splice(
    reference: str, submitted: str, functions: Sequence[str], others: Collection[str] = ()
) -> tuple[str, list[str]]:
    """The reference with the bodies of `functions` from `submitted`, and what was left behind.
    others: functions of other tasks, which are judged there. Raises Refused."""
    ours, theirs = parse(reference), parse(submitted)
    for name in functions:
        new, old = find(theirs, name), find(ours, name)
        if old is None:
            raise LookupError(f"{name} is not in the reference")
        if new is not None:
            if _parameters(new) != _parameters(old):
                raise Refused(f"line {new.lineno}: the signature of {name} is another one")
            old.body = new.body
        elif name.rpartition(".")[2].startswith("_"):
            # A design without this function. The reference's must not help it.
            old.body = parse("raise NotImplementedError('not handed in')").body
        else:
            raise Refused(f"{name} is missing")
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
    names = {name for node in ours.body for name in _binds(node)}
    known = {ast.dump(node) for node in ours.body}
    start = 0  # new imports go behind a docstring and what is imported from __future__
    while start < len(ours.body) and (
        isinstance(ours.body[start], ast.Expr)
        or getattr(ours.body[start], "module", "") == "__future__"
    ):
        start += 1
    for node in (single for statement in theirs.body for single in _single_imports(statement)):
        bound = _binds(node)
        text = ", ".join(sorted(bound))
        if isinstance(node, ast.ClassDef) and node.name in classes:
            inner = f"{prefix}{node.name}."
            yield from _add_new(classes[node.name], node, judged, inner)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if not bound <= names:
                module = getattr(node, "module", None) or node.names[0].name
                if getattr(node, "level", 0) or module.partition(".")[0] not in ALLOWED:
                    yield f"line {node.lineno}: not taken: {ast.unparse(node)}"
                else:
                    ours.body.insert(start, node)
        elif bound and not bound & names:
            ours.body.append(node)
        elif bound and ast.dump(node) not in known and f"{prefix}{text}" not in judged:
            yield f"line {node.lineno}: your change of {prefix}{text} is not taken"


def _binds(node: ast.stmt) -> set[str]:
    """The names that a statement of a module or a class binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, Function | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)]
        return {inner.id for inner in names if isinstance(inner.ctx, ast.Store)}
    return set()


def _single_imports(node: ast.stmt) -> Iterator[ast.stmt]:
    """An import of several names as several imports; any other statement as it is."""
    if isinstance(node, ast.Import):
        yield from (ast.copy_location(ast.Import([alias]), node) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield ast.copy_location(ast.ImportFrom(node.module, [alias], node.level), node)
    else:
        yield node
