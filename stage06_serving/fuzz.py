"""Bad requests by the thousand: `python -m stage06_serving.fuzz`. None may be answered with 500 or more, hang, or get an error
of another form than all errors have.

Two makers of requests: schemathesis, from what the server says of itself at /openapi.json, both what that allows and what it does
not; and bodies of raw bytes, bent from good ones. Answers are kept short: the time shall go into requests and not into tokens.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx2
from pydantic import ValidationError

from shared import cli
from shared.server import own_server

from .protocol import ErrorBody

PATIENCE = 5.0  # seconds: what takes longer hangs
LARGEST_ERROR = 2048  # bytes
SHORT = 8  # tokens of an answer
SHOWN = 200  # characters of a request that found something
ENDLESS = "/live"  # an event stream for the page: it ends with the server
JSON = {"Content-Type": "application/json"}


@dataclass
class Findings:
    """What was asked, how it was answered, and what must not be."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)  # by operation
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, status: int, problem: str | None, request: Any) -> None:
        self.statuses.setdefault(name, Counter())[status] += 1
        if problem is not None:
            self.problems.append(f"{name}: {problem}; the request was {repr(request)[:SHOWN]}")

    def table(self) -> str:
        lines = [f"{'requests to':<34}{'':>8}  statuses"]
        for name, statuses in self.statuses.items():
            told = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
            lines.append(f"{name:<34}{statuses.total():>8}  {told}")
        return "\n".join(lines)


def problem_of(status: int, kind: str, content: bytes, seconds: float) -> str | None:
    """What is wrong with an answer, if anything is. `kind` is its content type; status 0: none came."""
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
            return f"status {status} with an error object that says {error.code}"
        if len(content) > LARGEST_ERROR:
            return f"an error of {len(content)} bytes"
    elif kind.startswith("text/event-stream"):
        if not content.endswith(b"data: [DONE]\n\n"):
            return "a stream without its end"
        if b'data: {"error"' in content:
            return "a stream with an error"
    return None


def ask(
    client: httpx2.Client, findings: Findings, name: str, request: httpx2.Request, told: Any
) -> None:
    """Send a request, and write down what comes."""
    started = time.monotonic()
    status, kind, content = 0, "", b""
    try:
        response = client.send(request)
        status, kind, content = (
            response.status_code,
            response.headers.get("content-type", ""),
            response.content,
        )
    except httpx2.TimeoutException:
        pass
    findings.add(name, status, problem_of(status, kind, content, time.monotonic() - started), told)


def short(body: Any) -> Any:
    """The same body, but its answer has a few tokens at most. What is wrong with it stays wrong."""
    if not isinstance(body, dict):
        return body
    body = dict(body)
    for name in ("max_tokens", "max_completion_tokens"):
        if type(body.get(name)) is int and body[name] > SHORT:
            body[name] = SHORT
    if (
        "messages" in body
        and body.get("max_tokens") is None
        and body.get("max_completion_tokens") is None
    ):
        body["max_completion_tokens"] = SHORT
    return body


# ---- from the schema ------------------------------------------------------------------------------------------------


def fuzz_schema(client: httpx2.Client, examples: int, findings: Findings) -> None:
    """At least `examples` requests to each operation of /openapi.json."""
    import schemathesis  # takes a second to load

    schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json()).exclude(
        path=ENDLESS
    )
    for found in schema.get_all_operations():
        fuzz_operation(client, found.ok(), examples, findings)  # type: ignore[union-attr]  # a schema that is wrong raises


def fuzz_operation(
    client: httpx2.Client, operation: Any, examples: int, findings: Findings
) -> None:
    """Half of them as the schema allows and half, where there is a body, as it does not."""
    import hypothesis
    from schemathesis import GenerationMode

    name = f"{operation.method.upper()} {operation.path}"
    asked = findings.statuses.setdefault(name, Counter())

    def send(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body = short(case.body)
            if asked.total() % 2:  # with the name of another model, it would get no further
                case.body.pop("model", None)
        given = case.as_transport_kwargs(base_url=str(client.base_url).rstrip("/"))
        content = json.dumps(given["json"]).encode() if "json" in given else given.get("data")
        request = client.build_request(
            given["method"],
            given["url"],
            params=given["params"],
            headers=dict(given["headers"]),
            content=content,
        )
        ask(client, findings, name, request, (str(request.url), content))

    modes = [GenerationMode.POSITIVE]
    if operation.method == "post":  # a path may be anything
        modes.append(GenerationMode.NEGATIVE)
    for mode in modes:
        settings = hypothesis.settings(
            max_examples=-(-examples // len(modes)), database=None, deadline=None, derandomize=True,
            phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        settings(hypothesis.given(operation.as_strategy(generation_mode=mode))(send))()
    while asked.total() < examples:  # where there is little to vary, little is made
        ask(client, findings, name, client.build_request(operation.method, operation.path), name)


# ---- raw bodies -----------------------------------------------------------------------------------------------------

GOOD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/generate", {"prompt": "Once", "max_tokens": 2, "temperature": 0.5, "stream": True}),
    ("/v1/completions", {"prompt": ["Once", "Long"], "max_tokens": 2, "n": 2, "stop": ["a", "b"], "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 2, "logit_bias": {"5": 1.5}, "seed": 7, "stream": True}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": 0, "echo": True, "logprobs": 1}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "max_tokens": 2, "stream": True,
         "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2},
    ),
    ("/tokenize", {"prompt": "Once upon a time", "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
)  # fmt: skip
# What a value or a few bytes may turn into.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, "", " ", "a" * 70, "😀", "\x00", "NaN",
    [], [[]], [None], {}, {"": ""}, {"a": 1}, [True], [[[5]]], [2047], [2048], ["", ""], [0.5],
)  # fmt: skip
PIECES = (
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"9" * 400, b"9" * 5000, b"\\ud83d", b"\\udc00\\ud83d", b"\\u0000",
    b"\xff", b"\xed\xa0\xbd", b"\xef\xbb\xbf", b"\x00", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"null", b"[" * 3000,
    b'{"a":' * 3000, b"//", b"\n", b"\x1b[31m", b"%s%n", b"{{7*7}}", b"'", b"\\u", b"1.", b"-", b"\xf0\x9f\x98",
)  # fmt: skip


def bodies(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """`count` paths and bodies, most of them no longer good."""
    chance = random.Random(seed)
    makers: tuple[Callable[[random.Random, dict[str, Any]], bytes], ...] = (
        _values,
        _values,
        _pieces,
        _cut,
        _noise,
    )
    for _ in range(count):
        path, good = chance.choice(GOOD)
        yield path, _kept_short(chance.choice(makers)(chance, good))


def _kept_short(content: bytes) -> bytes:
    """As `short`, where it can be read at all."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return content
    kept = short(body)
    return content if kept == body else json.dumps(kept).encode()


def _values(chance: random.Random, good: dict[str, Any]) -> bytes:
    """Some fields have other values, or are gone, or new."""
    body = json.loads(json.dumps(good))
    for _ in range(chance.randint(1, 3)):
        name = chance.choice(
            [
                *good,
                "n",
                "stop",
                "best_of",
                "model",
                "user",
                "top_p",
                "min_tokens",
                "stop_token_ids",
                "seed",
            ]
        )
        inside = body.get(name)
        if isinstance(inside, list) and inside and chance.random() < 0.5:
            inside[chance.randrange(len(inside))] = copy.deepcopy(chance.choice(VALUES))
        elif chance.random() < 0.2:
            body.pop(name, None)
        else:
            body[name] = copy.deepcopy(chance.choice(VALUES))
    return json.dumps(body, ensure_ascii=chance.random() < 0.5).encode()


def _pieces(chance: random.Random, good: dict[str, Any]) -> bytes:
    """Some bytes are replaced by pieces that parsers have stumbled over."""
    content = json.dumps(good).encode()
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(len(content) + 1)
        content = content[:start] + chance.choice(PIECES) + content[start + chance.randrange(4) :]
    return content


def _cut(chance: random.Random, good: dict[str, Any]) -> bytes:
    """The beginning, the end, or one after the other."""
    content = json.dumps(good).encode()
    at = chance.randrange(len(content))
    return chance.choice(
        (content[:at], content[at:], content[at:] + content[:at], content + content)
    )


def _noise(chance: random.Random, good: dict[str, Any]) -> bytes:
    return chance.randbytes(chance.choice((0, 1, 2, 10, 100, 10_000)))


def fuzz_bodies(client: httpx2.Client, count: int, seed: int, findings: Findings) -> None:
    """`count` raw bodies to the endpoints that take one."""
    for path, content in bodies(count, seed):
        request = client.build_request("POST", path, content=content, headers=JSON)
        ask(client, findings, f"POST {path} (raw)", request, content)


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        "stage06_serving.fuzz",
        "Stage 06, bad requests by the thousand: no answer of 500 or more, no hang, every error in the form of all errors.",
        "  python -m stage06_serving.fuzz\n"
        "  python -m stage06_serving --max-queue 1000  # and in another terminal:\n"
        "  python -m stage06_serving.fuzz --url http://127.0.0.1:8000 --examples 1000",
    )
    parser.add_argument(
        "--url",
        metavar="URL",
        help="address of a server with a long queue; default is one of its own",
    )
    parser.add_argument(
        "--examples",
        type=cli.whole_number(0, 10**6),
        default=200,
        metavar="N",
        help="an operation; default 200",
    )
    parser.add_argument(
        "--bodies",
        type=cli.whole_number(0, 10**7),
        default=2000,
        metavar="N",
        help="raw ones; default 2000",
    )
    parser.add_argument(
        "--seed",
        type=cli.whole_number(0, 2**31),
        default=0,
        metavar="N",
        help="of the raw ones; default 0",
    )
    options = parser.parse_args(argv)
    # In a queue of its own nothing is refused; and the sanitizer turns a mistake in the memory into a 500.
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
    print(
        f"{sum(each.total() for each in findings.statuses.values())} requests, {len(findings.problems)} problems"
    )
    return 1 if findings.problems else 0


if __name__ == "__main__":
    cli.run(main)
