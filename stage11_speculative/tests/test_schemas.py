"""Schemas at random, and those of the official test suite: nothing invalid is ever accepted."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from shared.errors import UserError
from stage11_speculative import grammar

from .test_grammar import TOKENIZER, at_once, byte_grammars, grammars

__all__ = ["at_once"]

# By draft of the suite: its files, the schemas that no grammar enforces, which may only fall, and
# the values that are judged right, which may only rise.
COUNTS = {
    "draft4": (43, 52, 640),
    "draft6": (52, 95, 720),
    "draft7": (63, 125, 820),
    "draft2019-09": (77, 225, 920),
    "draft2020-12": (77, 240, 900),
}
# What a text of the module names: formats and patterns are those of letters, and notes are notes.
KNOWN = re.compile("leap|February|zero-width whitespace|base64|JSON document")
LONGEST = 400  # tokens of a random answer


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    low, count = rng.randint(-999, 999), rng.randint(0, 2)
    leaves: list[dict[str, Any]] = [
        {"type": rng.choice(["integer", "number", "boolean", "null"])},
        {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randint(2, 5000)},
        {"type": "string", "minLength": count, "maxLength": count + rng.randint(0, 6)},
        {"type": "string", "pattern": rng.choice(["^[a-f]{2,5}$", "^(x|yy)+z?$", "^\\d{3}$"])},
        {"enum": rng.sample([1, -2.5, "a", 'q"\\', None, True, [1, {"k": "v"}], {}], 3)},
    ]
    if not depth or rng.random() < 0.5:
        return rng.choice(leaves)
    names = rng.sample(["a", "b b", 'c"', "d\n", "é", "f"], rng.randint(0, 4))
    properties = {name: random_schema(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    inner = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    items = {"items": inner[0], "minItems": count, "maxItems": count + rng.randint(0, 2)}
    fields = {"properties": properties, "required": required, "additionalProperties": False}
    nested: list[Any] = [{"type": "array", **items}, {"type": "object", **fields}, {"anyOf": inner}]
    return rng.choice(nested)


def random_answer(source: str, rng: random.Random) -> str | None:
    """A text by tokens that the masks allow, all equally likely; None: it did not end."""
    constraint, output = grammar.Constraint(grammars(), grammars().compile(source)), list[int]()
    while len(output) < LONGEST:
        ids = constraint.mask(output).nonzero()[:, 0].tolist()
        assert ids, "no token may come next"
        output.append(rng.choice(ids))
        if output[-1] == TOKENIZER.eos_id:
            return TOKENIZER.decode(output[:-1])
    return None


def test_random_answers_to_random_schemas_are_valid():
    ended = refused = 0
    for seed in range(50):
        rng = random.Random(seed)
        schema = random_schema(rng)
        try:
            text = random_answer(grammar.start(grammar.of_schema(schema)), rng)
        except UserError:
            refused += 1
            continue
        if text is not None:
            ended += 1
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    assert ended >= 45 and refused <= 2, (ended, refused)


def accepts(matcher: Any, value: Any) -> bool:
    """Whether JSON of the value, in either spelling, is a text of the grammar."""
    for ascii in (False, True):
        copy = matcher.deep_copy()
        data = list(json.dumps(value, ensure_ascii=ascii).encode("utf-8", "surrogatepass"))
        if copy.try_consume_tokens(data) == len(data) and copy.is_accepting():
            return True
    return False


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> Path:
    """The official suite: it is in the source package of jsonschema, downloaded here."""
    folder = tmp_path_factory.mktemp("suite")
    wanted = ["--no-deps", "--no-binary", "jsonschema", "-d", str(folder), "jsonschema==4.26.0"]
    command = [sys.executable, "-m", "pip", "download", "-q", *wanted]
    if subprocess.run(command, capture_output=True, timeout=300).returncode:
        pytest.skip("no package index can be reached")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("*/json/tests"))


@pytest.mark.slow
@pytest.mark.parametrize("draft", COUNTS)
def test_nothing_is_accepted_that_the_official_suite_calls_invalid(draft, suite):
    refused, right = 0, 0
    wrong: list[tuple[str, str]] = []
    strict: list[tuple[str, str]] = []
    files = sorted((suite / draft).glob("*.json")) + sorted(
        (suite / draft).glob("optional/**/*.json")
    )
    for group in (group for file in files for group in json.loads(file.read_text("utf-8"))):
        schema = group["schema"]
        if not isinstance(schema, dict):
            continue
        try:
            matcher = byte_grammars().compile(grammar.start(grammar.of_schema(schema)))
        except UserError:
            refused += 1
            continue
        for case in group["tests"]:
            accepted = accepts(matcher, case["data"])
            right += accepted == case["valid"]
            if accepted != case["valid"]:
                kind = strict if case["valid"] else wrong
                kind.append((group["description"], case["description"]))
    print(f"{refused} schemas refused, {right} right, {len(strict)} wrongly refused: {strict}")
    assert not [names for names in wrong if not KNOWN.search(names[1])]
    least_files, most_refused, least_right = COUNTS[draft]
    assert len(files) >= least_files
    assert refused <= most_refused and right >= least_right
