"""Reads a submission, and remarks on code that solutions have no need for.

A courtesy to the instructor, and no protection: no list of forbidden Python is complete, and the
verdict does not depend on this one (judge.py makes it, in another process). A remark says where a
file does something unusual for its task, and so where to read first:

- imports beyond the reference's and a few harmless ones, or a module used as a value;
- names with two underscores, frames, `eval`, `open`, `setattr` and the like;
- special methods, or bases, that the reference does not have;
- attributes set on anything imported, or that a library's class has.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from .. import paths
from . import mine


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MODULES = _words(
    "__future__ abc bisect collections collections.abc contextlib copy dataclasses enum functools "
    "heapq itertools json math numbers operator random re statistics time typing"
)
NAMES = _words(
    "eval exec compile open input breakpoint globals locals vars setattr delattr help exit quit "
    "memoryview attrgetter methodcaller update_wrapper make_dataclass get_type_hints"
)
# Attributes that lead from an object to code, to frames, to other modules, or to a pickle.
ATTRIBUTES = NAMES | _words(
    "f_back f_builtins f_code f_globals f_locals gi_frame gi_code cr_frame cr_code ag_frame "
    "ag_code tb_frame tb_next mro modules load save fromfile memmap tofile dump set_default_dtype "
    "register_module_forward_hook register_module_forward_pre_hook"
)
LONGEST = 2**16  # bytes of a file: a longer one could be made to take minutes
BASES = _words("object Exception ValueError RuntimeError Enum NamedTuple Protocol ABC")


def remark(source: bytes, stage: str, file: str) -> str:
    """A sentence on the first unusual line of a submitted file; "" if there is none, or if the file
    is not Python."""
    if len(source) > LONGEST:
        return f"{file} is longer than {LONGEST // 1024} KiB: read this file."
    try:
        tree = mine.parse(source.decode("utf-8-sig"))
    except (SyntaxError, UnicodeDecodeError):
        return ""
    reference = mine.parse(mine.read(paths.ROOT / stage / file))
    try:
        problems = sorted(_Gate(stage, file, reference).problems(tree))
    except RecursionError:
        problems = [(1, "code that is nested too deeply")]
    if not problems:
        return ""
    line, problem = problems[0]
    return f"{file}, line {line}: {problem}. Solutions need no such thing: read this file."


class _Gate:
    def __init__(self, stage: str, file: str, reference: ast.Module) -> None:
        self.module = f"{stage}.{mine.dotted(file)}"
        nodes = list(ast.walk(reference))
        self.imports = {imported[:2] for node in nodes for imported in self._imported(node)}
        self.names = {node.id for node in nodes if isinstance(node, ast.Name)}
        self.names |= {node.name for node in nodes if isinstance(node, mine.Function)}
        self.read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        self.set = {
            node.attr for node in nodes if isinstance(node, ast.Attribute) and _is_set(node)
        }
        self.bases = {ast.unparse(b) for n in nodes if isinstance(n, ast.ClassDef) for b in n.bases}
        self.chains = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        functions = [ast.dump(node) for node in nodes if isinstance(node, mine.Function)]
        self.functions = frozenset(functions)
        self.values: dict[str, Any] = {}  # what the imported names stand for

    def _imported(self, node: ast.AST) -> Iterator[tuple[str, str, str]]:
        """(module, name in it or "", name here) of an import."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, "", alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if node.level:
                module = importlib.util.resolve_name(module, self.module.rpartition(".")[0])
            for alias in node.names:
                yield module, alias.name, alias.asname or alias.name

    def problems(self, tree: ast.Module) -> Iterator[tuple[int, str]]:
        nodes = list(ast.walk(tree))
        for node in nodes:
            for problem in self._import(node):
                yield node.lineno, problem  # type: ignore[attr-defined]
        based = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        called = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
        # A function of the reference may look up attributes by names that it holds itself.
        same = {
            id(inner)
            for node in nodes
            if isinstance(node, mine.Function) and ast.dump(node) in self.functions
            for inner in ast.walk(node)
        }
        for node in nodes:
            if isinstance(node, ast.Name):
                unchanged = node.id == "getattr" and id(node) in same
                problem = (
                    "" if unchanged else self._name(node, id(node) in based, called.get(id(node)))
                )
            elif isinstance(node, ast.Attribute):
                problem = self._attribute(node, id(node) in based)
            elif isinstance(node, ast.ClassDef):
                problem = self._class(node)
            elif (
                isinstance(node, mine.Function)
                and _special(node.name)
                and (node.name not in self.names | {"__init__", "__post_init__"})
            ):
                problem = f"a special method, {node.name}"
            elif isinstance(node, ast.arg) and _special(node.arg):
                problem = f"the name {node.arg}"
            else:
                continue
            if problem:
                yield node.lineno, problem

    def _import(self, node: ast.AST) -> Iterator[str]:
        known = {module for module, _ in self.imports}
        for module, name, here in self._imported(node):
            shown = f"{module}.{name}" if name else module
            if module not in known | MODULES or name == "*":
                yield f"the import of {shown}"
                continue
            loaded = importlib.import_module(module)
            value = getattr(loaded, name, None) if name else loaded
            if name and isinstance(value, ModuleType) and (module, name) not in self.imports:
                yield f"the import of {shown}, a module"
            if name in NAMES or _special(name):
                yield f"the import of {shown}"
            # `import a.b` binds a.
            self.values[here.partition(".")[0] if not name else here] = (
                importlib.import_module(here.partition(".")[0]) if "." in here else value
            )

    def _name(self, node: ast.Name, based: bool, call: ast.Call | None) -> str:
        if node.id in NAMES or (_special(node.id) and node.id not in self.names | {"__name__"}):
            return f"the name {node.id}" if node.id not in self.names else ""
        if isinstance(self.values.get(node.id), ModuleType) and not based:
            return f"the module {node.id} as a value"
        if (
            node.id == "type"
            and isinstance(node.ctx, ast.Load)
            and not (call and len(call.args) == 1 and not call.keywords)
        ):
            return "type as a value"
        if node.id == "getattr":
            what = call.args[1] if call and len(call.args) in (2, 3) else None
            literal = isinstance(what, ast.Constant) and isinstance(what.value, str)
            if not literal or _special(what.value) or what.value in ATTRIBUTES:  # type: ignore
                return "getattr of a name that is not in the text"
        if node.id == "wraps" and not (call and len(call.args) == 1 and not call.keywords):
            return "wraps with more than a function"
        return ""

    def _attribute(self, node: ast.Attribute, based: bool) -> str:
        if node.attr in self.read and ast.unparse(node) in self.chains and not _is_set(node):
            return ""
        if _special(node.attr) and node.attr not in self.read | {"__init__", "__name__"}:
            return f"the attribute {node.attr}"
        if node.attr in ATTRIBUTES:
            return f"the attribute {node.attr}"
        chain, root = [node.attr], node.value
        while isinstance(root, ast.Attribute):
            chain, root = [root.attr, *chain], root.value
        known = isinstance(root, ast.Name) and root.id in self.values
        if _is_set(node):
            if known or not isinstance(root, ast.Name | ast.Subscript | ast.Call):
                return f"{ast.unparse(node)} is set"
            if node.attr not in self.set and any(
                hasattr(kind, node.attr) for kind in self._kinds()
            ):
                return f"the attribute {node.attr}, which classes of the libraries have, is set"
        if known:
            assert isinstance(root, ast.Name)
            value = self.values[root.id]
            for name in chain:
                base, value = value, getattr(value, name, None)
                modules = isinstance(base, ModuleType) and isinstance(value, ModuleType)
                if modules and not self._inside(value, base, name):
                    return f"the module {ast.unparse(node)}"
            if isinstance(value, ModuleType) and not based:
                return f"the module {ast.unparse(node)} as a value"
        return ""

    def _inside(self, module: Any, base: Any, name: str) -> bool:
        """Whether a submodule may be used: one of functions, or one that the reference uses."""
        inside = module.__name__ == f"{base.__name__}.{name}"
        return inside and (name in self.read or name in ("functional", "nn", "linalg", "special"))

    def _kinds(self) -> Iterator[Any]:
        import torch

        yield from (torch.Tensor, torch.nn.Module)
        yield from (value for value in self.values.values() if isinstance(value, type))

    def _class(self, node: ast.ClassDef) -> str:
        for base in node.bases:
            if ast.unparse(base) not in self.bases | BASES:
                return f"a class made from {ast.unparse(base)}"
        return "a class with a metaclass" if node.keywords else ""


def _special(name: str) -> bool:
    return name.startswith("__")


def _is_set(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
