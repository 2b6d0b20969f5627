"""Schemas that refer to themselves without an end: `{"c": {"$ref": "#"}}` with a required `c` is an
object in an object in an object, up to `max_tokens`. llguidance accepts them.

Which references have a finite text is a least fixpoint: none at first, then those whose schema has
one if the references so far have. What this module does not know of a schema counts as finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from shared.errors import UserError

MOST_ROUNDS = 20  # a schema that needs more is let through


def check(schema: dict[str, Any]) -> None:
    """Raises UserError if a reference in the schema has no finite text."""
    targets = {name: target(schema, name) for name in references(schema)}
    finite: set[str] = set()
    for _ in range(MOST_ROUNDS):
        known: dict[int, bool] = {}
        rest = targets.keys() - finite
        more = {name for name in rest if ends(targets[name], finite, known)}
        if not more:
            break
        finite |= more
    else:
        return
    if never := sorted(targets.keys() - finite):
        raise UserError(
            f"The form cannot be enforced: {never[0][:100]!r} in the schema needs itself, so that "
            "no text of it ends: make a property optional, or allow null."
        )


def references(schema: Any) -> Iterator[str]:
    """Every local $ref in it."""
    for part in objects(schema):
        name = part.get("$ref")
        if isinstance(name, str) and (name == "#" or name.startswith("#/")):
            yield name


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object in it, schemas and others."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def target(schema: Any, name: str) -> Any:
    """The schema that a local $ref names; True, which anything satisfies, if there is none."""
    for key in unquote(name).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        elif isinstance(schema, dict) and key in schema:
            schema = schema[key]
        else:
            return True
    return schema


def ends(schema: Any, finite: set[str], known: dict[int, bool]) -> bool:
    """Whether the schema has a finite text, if of all references those in `finite` have. known: the
    answers so far, by the schema's `id`."""
    if not isinstance(schema, dict) or "enum" in schema or "const" in schema:
        return True
    if id(schema) not in known:
        known[id(schema)] = _ends(schema, finite, known)
    return known[id(schema)]


def _ends(schema: dict[str, Any], finite: set[str], known: dict[int, bool]) -> bool:
    name = schema.get("$ref")
    if isinstance(name, str) and name[:1] == "#" and name[1:2] in ("", "/") and name not in finite:
        return False
    for kind, enough in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        parts = schema.get(kind)
        if (
            isinstance(parts, list)
            and parts
            and not enough(ends(it, finite, known) for it in parts)
        ):
            return False
    needed = schema.get("type")
    parts = []
    if needed == "object" and isinstance(schema.get("properties"), dict):
        names = schema.get("required")
        names = names if isinstance(names, list) else []
        parts = [schema["properties"].get(it, True) for it in names if isinstance(it, str)]
    elif needed == "array" and isinstance(least := schema.get("minItems"), int) and least > 0:
        first = schema.get("prefixItems")
        parts = list(first[:least]) if isinstance(first, list) else []
        if least > len(parts):
            parts.append(schema.get("items", True))
    return all(ends(it, finite, known) for it in parts)
