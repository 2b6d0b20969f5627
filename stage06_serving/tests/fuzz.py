"""Bad requests by the thousand: `python -m stage06_serving.tests.fuzz`.

None may be answered with 500 or more, hang, or get an error in a form of its own. Requests have two
sources: schemathesis makes valid and invalid ones from /openapi.json, and raw bodies are mutated
from good ones. Answers are kept short: the time is for requests, not tokens.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx2
from pydantic import ValidationError

from shared import cli
from shared.server import own_server
from stage06_serving.protocol import ErrorBody

PATIENCE = 5.0  # seconds: an answer that takes longer counts as hanging
LARGEST_ERROR = 2048  # bytes
SHORT = 8  # tokens of an answer
SHOWN = 200  # characters of a request that found a problem
ENDLESS = "/live"  # the event stream of the page ends with the server
JSON = {"Content-Type": "application/json"}


@dataclass
class Findings:
    """The statuses of all answers, and the problems in them."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)  # by operation
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, status: int, problem: str | None, request: Any) -> None:
        self.statuses.setdefault(name, Counter())[status] += 1
        if problem is not None:
            self.problems.append(f"{name}: {problem}; the request was {repr(request)[:SHOWN]}")

    def table(self) -> str:
        lines = [f"{'requests to':<34}{'':>8}  statuses"]
        for name, statuses in self.statuses.items():
            counts = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
            lines.append(f"{name:<34}{statuses.total():>8}  {counts}")
        return "\n".join(lines)


def problem_of(status: int, kind: str, content: bytes, seconds: float) -> str | None:
    """The problem of an answer, if it has one. kind: its content type; status 0: none arrived."""
    if seconds > PATIENCE or not status:
        return f"no answer within {PATIENCE:g} s"
    if status >= 500:
        return f"status {status}"
    if status >= 400:
        try:
            error = ErrorBody.model_validate_json(content).error
        except ValidationError:
            return f"status {status} without an error object"
        if error.code != status:
            return f"status {status} with the code {error.code} in its error object"
        if len(content) > LARGEST_ERROR:
            return f"an error of {len(content)} bytes"
    elif kind.startswith("text/event-stream"):
        if not content.endswith(b"data: [DONE]\n\n"):
            return "a stream without its end"
        if b'data: {"error"' in content:
            return "a stream with an error"
    return None


def ask(
    client: httpx2.Client, findings: Findings, name: str, request: httpx2.Request, shown: Any
) -> None:
    """Send a request and note its answer; `shown` describes the request in a problem."""
    started = time.monotonic()
    status, kind, content = 0, "", b""
    try:
        response = client.send(request)
        status, content = response.status_code, response.content
        kind = response.headers.get("content-type", "")
    except httpx2.TimeoutException:
        pass
    problem = problem_of(status, kind, content, time.monotonic() - started)
    findings.add(name, status, problem, shown)


def short(body: Any) -> Any:
    """The same body, but asking for a short answer. Invalid fields stay invalid."""
    if not isinstance(body, dict):
        return body
    body = dict(body)
    limits = ("max_tokens", "max_completion_tokens")
    for name in limits:
        if type(body.get(name)) is int and body[name] > SHORT:
            body[name] = SHORT
    if "messages" in body and all(body.get(name) is None for name in limits):
        body["max_completion_tokens"] = SHORT
    return body


# ---- from the schema ----------------------------------------------------------------------------


def fuzz_schema(client: httpx2.Client, examples: int, findings: Findings) -> None:
    """At least `examples` requests to each operation of /openapi.json."""
    import schemathesis  # takes a second to load

    document = client.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document).exclude(path=ENDLESS)
    for result in schema.get_all_operations():
        operation = result.ok()  # type: ignore[union-attr]  # raises if the schema is invalid
        fuzz_operation(client, operation, examples, findings)


def fuzz_operation(
    client: httpx2.Client, operation: Any, examples: int, findings: Findings
) -> None:
    """At least `examples` requests, half of them valid by the schema; the others, if there is a
    body, invalid."""
    import hypothesis
    from schemathesis import GenerationMode

    name = f"{operation.method.upper()} {operation.path}"
    statuses = findings.statuses.setdefault(name, Counter())

    def send(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body = short(case.body)
            if statuses.total() % 2:  # the name of another model ends a request early
                case.body.pop("model", None)
        sent = case.as_transport_kwargs(base_url=str(client.base_url).rstrip("/"))
        content = json.dumps(sent["json"]).encode() if "json" in sent else sent.get("data")
        request = client.build_request(
            sent["method"],
            sent["url"],
            params=sent["params"],
            headers=dict(sent["headers"]),
            content=content,
        )
        ask(client, findings, name, request, (str(request.url), content))

    modes = [GenerationMode.POSITIVE]
    if operation.method == "post":  # any path is valid
        modes.append(GenerationMode.NEGATIVE)
    for mode in modes:
        settings = hypothesis.settings(
            max_examples=-(-examples // len(modes)),
            database=None,
            deadline=None,
            derandomize=True,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        settings(hypothesis.given(operation.as_strategy(generation_mode=mode))(send))()
    while statuses.total() < examples:  # an operation with little to vary gets few examples
        ask(client, findings, name, client.build_request(operation.method, operation.path), name)


# ---- raw bodies ---------------------------------------------------------------------------------

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
TWO: dict[str, Any] = {"max_tokens": 2}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
GOOD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/generate", {"prompt": "Once", **TWO, "temperature": 0.5, "stream": True}),
    (
        TEXT,
        {"prompt": ["Once"] * 2, **TWO, "n": 2, "stop": ["a", "b"], "logprobs": 2, "echo": True},
    ),
    (TEXT, {"prompt": [[5, 6], [7]], **TWO, "logit_bias": {"5": 1.5}, "seed": 7, "stream": True}),
    (TEXT, {"prompt": "Once", "max_tokens": 0, "echo": True, "logprobs": 1}),
    (CHAT, {"messages": [HI], **TWO, **USAGE, "logprobs": True, "top_logprobs": 2}),
    ("/tokenize", {"prompt": "Once upon a time", "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
)
# Replacements for a value, and for a few bytes.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, "", " "),
    *("a" * 70, "😀", "\x00", "NaN", [], [[]], [None], {}, {"": ""}, {"a": 1}, [True], [[[5]]]),
    *([2047], [2048], ["", ""], [0.5]),
)
PIECES = (
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"9" * 400, b"9" * 5000, b"\\ud83d"),
    *(b"\\udc00\\ud83d", b"\\u0000", b"\xff", b"\xed\xa0\xbd", b"\xef\xbb\xbf", b"\x00"),
    *(b'"', b"{"),
    *(b"}", b"[", b"]", b",", b":", b"\\", b"null", b"[" * 3000, b'{"a":' * 3000, b"//", b"\n"),
    *(b"\x1b[31m", b"%s%n", b"{{7*7}}", b"'", b"\\u", b"1.", b"-", b"\xf0\x9f\x98"),
)
FIELDS = ("n", "stop", "best_of", "model", "user", "top_p", "min_tokens", "stop_token_ids", "seed")


def bodies(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """`count` paths and bodies, most of them invalid."""
    chance = random.Random(seed)
    makers = (_values, _values, _pieces, _cut, _noise)
    for _ in range(count):
        path, good = chance.choice(GOOD)
        yield path, _kept_short(chance.choice(makers)(chance, good))


def _kept_short(content: bytes) -> bytes:
    """`short` of a body that can be parsed; any other is unchanged."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return content
    kept = short(body)
    return content if kept == body else json.dumps(kept).encode()


def _values(chance: random.Random, good: dict[str, Any]) -> bytes:
    """Change, remove or add some fields."""
    body = json.loads(json.dumps(good))
    for _ in range(chance.randint(1, 3)):
        name = chance.choice([*good, *FIELDS])
        old = body.get(name)
        if isinstance(old, list) and old and chance.random() < 0.5:
            old[chance.randrange(len(old))] = copy.deepcopy(chance.choice(VALUES))
        elif chance.random() < 0.2:
            body.pop(name, None)
        else:
            body[name] = copy.deepcopy(chance.choice(VALUES))
    return json.dumps(body, ensure_ascii=chance.random() < 0.5).encode()


def _pieces(chance: random.Random, good: dict[str, Any]) -> bytes:
    """Replace some bytes by pieces that have broken parsers."""
    content = json.dumps(good).encode()
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(len(content) + 1)
        content = content[:start] + chance.choice(PIECES) + content[start + chance.randrange(4) :]
    return content


def _cut(chance: random.Random, good: dict[str, Any]) -> bytes:
    """The beginning, the end, both the wrong way round, or all of it twice."""
    content = json.dumps(good).encode()
    at = chance.randrange(len(content))
    head, tail = content[:at], content[at:]
    return chance.choice((head, tail, tail + head, content + content))


def _noise(chance: random.Random, good: dict[str, Any]) -> bytes:
    return chance.randbytes(chance.choice((0, 1, 2, 10, 100, 10_000)))


def fuzz_bodies(client: httpx2.Client, count: int, seed: int, findings: Findings) -> None:
    """Send `count` raw bodies to the endpoints that take one."""
    for path, content in bodies(count, seed):
        request = client.build_request("POST", path, content=content, headers=JSON)
        ask(client, findings, f"POST {path} (raw)", request, content)


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        "stage06_serving.tests.fuzz",
        "Stage 06, bad requests by the thousand: no status of 500 or above, no hang, and one form "
        "for all errors.",
        "  python -m stage06_serving.tests.fuzz\n"
        "  python -m stage06_serving --max-queue 1000  # and in another terminal:\n"
        "  python -m stage06_serving.tests.fuzz --url http://127.0.0.1:8000 --examples 1000",
    )
    parser.add_argument(
        "--url", metavar="URL", help="address of a server with a long queue; default: start one"
    )
    for option, most, default, about in (
        ("--examples", 10**6, 200, "requests for each operation, from the schema"),
        ("--bodies", 10**7, 2000, "raw bodies"),
        ("--seed", 2**31, 0, "seed of the raw bodies"),
    ):
        kind = cli.whole_number(0, most)
        parser.add_argument(option, type=kind, default=default, metavar="N", help=about)
    options = parser.parse_args(argv)
    # A long queue refuses nothing, and the sanitizer turns a memory error into a 500.
    server = own_server(
        ["--max-queue", "1000", "--kv-memory", "8MiB", "--sanitize", "--linear", "plain"]
    )
    findings = Findings()
    with ExitStack() as stack:
        url = options.url or stack.enter_context(server).url
        client = stack.enter_context(httpx2.Client(base_url=url, timeout=PATIENCE, trust_env=False))
        if options.examples:
            fuzz_schema(client, options.examples, findings)
        fuzz_bodies(client, options.bodies, options.seed, findings)
        ask(client, findings, "GET /health", client.build_request("GET", "/health"), "")
    print(findings.table())
    for problem in findings.problems:
        print(f"PROBLEM {problem}")
    total = sum(statuses.total() for statuses in findings.statuses.values())
    print(f"{total} requests, {len(findings.problems)} problems")
    return 1 if findings.problems else 0


if __name__ == "__main__":
    cli.run(main)
