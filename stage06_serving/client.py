"""A small client: `python -m stage06_serving.client "Once upon a time"` streams an answer.

It uses bare HTTP, to show that this is all there is: a POST, and lines that begin with "data: ".
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx2

from shared import cli
from shared.errors import UserError

ADDRESS = "http://127.0.0.1:8000"
CONNECT = 5.0  # seconds


def stream(
    address: str, body: dict[str, Any], key: str = "", timeout: float = 600.0
) -> Iterator[dict[str, Any]]:
    """The events of a streamed completion as they arrive. Raises UserError for every failure."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url, patience = (
        f"{address.rstrip('/')}/v1/completions",
        httpx2.Timeout(timeout, connect=CONNECT),
    )
    try:
        with (
            httpx2.Client(timeout=patience, headers=headers) as client,
            client.stream("POST", url, json={**body, "stream": True}) as response,
        ):
            if response.status_code != 200:
                response.read()
                message = _message(response.text)
                raise UserError(f"The server answered {response.status_code}: {message}")
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        message = event["error"]["message"]
                        raise UserError(f"The server ended the answer with an error: {message}")
                    yield event
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        why = re.sub(r"^\[Errno -?\d+\] ", "", str(error))
        raise UserError(
            f"{address} cannot be reached ({why}): start the server with "
            "python -m stage06_serving, or give its address with --url."
        ) from None
    except ValueError:
        raise UserError(
            f"{address} did not answer with a completion: give the address of a server with --url."
        ) from None
    raise UserError("The stream stopped before its end: the server may have been killed.")


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        "stage06_serving.client",
        "Stage 06, a client: continue a text on a server, and print the answer as it arrives.",
        '  python -m stage06_serving.client "Once upon a time"\n'
        '  python -m stage06_serving.client "Long ago" --temperature 0.8 --seed 7'
        " --url http://127.0.0.1:8080",
    )
    cli.add_prompt(parser)
    cli.add_sampling_options(parser, 200)
    parser.add_argument(
        "--seed",
        type=cli.whole_number(0, 2**63 - 1),
        metavar="N",
        help="the same seed gives the same text",
    )
    parser.add_argument("--url", type=cli.address, default=ADDRESS, help="address of the server")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("STAIRCASE_API_KEY", ""),
        metavar="KEY",
        help="default: the environment variable STAIRCASE_API_KEY",
    )
    options = parser.parse_args(argv)
    prompt = cli.read_prompt(options)
    body = {"prompt": prompt, **cli.sampling_fields(options)}
    started, first, finish = time.perf_counter(), 0.0, None
    usage = {"completion_tokens": 0}
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    try:
        for event in stream(options.url, body, options.api_key):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if not first:  # the prompt is shown once the server has accepted it
                    first = time.perf_counter() - started
                    print(prompt, end="")
                finish = choice["finish_reason"] or finish
                print(choice["text"], end="", flush=True)
    except KeyboardInterrupt:
        finish = "interrupted"
        raise
    finally:
        if first:  # after an error in the middle of an answer, too
            seconds, count = time.perf_counter() - started, usage["completion_tokens"]
            print(flush=True)
            speed = f"{count} tokens in {seconds:.2f} s, first after {first * 1000:.0f} ms"
            rate = f"{count / seconds:.1f} tok/s"
            print(f"[{speed}, {rate}, finish reason {finish}]", file=sys.stderr)
    return 0


if __name__ == "__main__":
    cli.run(main)
