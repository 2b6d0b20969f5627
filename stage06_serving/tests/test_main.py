"""The command line, the environment, what is told at the start, keys, and how the server ends."""

from __future__ import annotations

import gc
import json
import signal
import socket
import sys
from typing import Any

import httpx2
import psutil
import pytest

from shared import cli
from shared.errors import UserError
from stage05_paged.sanitizer import Sanitizer
from stage06_serving import __main__ as stage
from stage06_serving.settings import PREFIX, Settings, parse
from stage06_serving.tests.conftest import Running

BODY = {"prompt": "Once upon a time", "max_tokens": 2, "temperature": 0}
KEY = {"Authorization": "Bearer first-key"}
OPEN = ("/", "/health")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings from the environment of whoever runs the tests."""
    for name in Settings.model_fields:
        monkeypatch.delenv(PREFIX + name.upper(), raising=False)


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str]:
    """Exit status and standard error of a command line that starts nothing."""
    with pytest.raises(SystemExit) as exit:
        cli.run(stage.main, list(arguments))
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return exit.value.code, out + err


# ---- settings -------------------------------------------------------------------------------------------------------


def test_the_defaults_are_safe():
    settings = parse([])
    assert (settings.host, settings.port, settings.model) == ("127.0.0.1", 8000, "stories")
    assert settings.keys == [] and not settings.open_to_all and settings.max_queue == 64


def test_every_option_is_a_variable_too_and_the_command_line_wins(monkeypatch):
    values: dict[str, tuple[str, Any]] = {  # what is written, and what it means
        "model": ("gpt2", "gpt2"),
        "served_model_name": ("mine", "mine"),
        "random_weights": ("true", True),
        "device": ("cpu", "cpu"),
        "dtype": ("float64", "float64"),
        "linear": ("plain", "plain"),
        "threads": ("3", 3),
        "engine": ("static", "static"),
        "host": ("::1", "::1"),
        "port": ("81", 81),
        "api_key": ("a, b,,", "a, b,,"),
        "max_sequences": ("5", 5),
        "token_budget": ("77", 77),
        "kv_memory": ("1GB", "1GB"),
        "block_size": ("8", 8),
        "swap_memory": ("2MB", "2MB"),
        "preemption": ("swap", "swap"),
        "prefix_caching": ("false", False),
        "sanitize": ("1", True),
        "max_queue": ("0", 0),
        "request_timeout": ("1.5", 1.5),
        "grace": ("0", 0),
        "chat_template": ("none", "none"),
    }
    for name, (written, _) in values.items():
        monkeypatch.setenv(PREFIX + name.upper(), written)
    settings = parse([])
    assert settings.model_dump() == {name: meant for name, (_, meant) in values.items()}
    assert all(
        getattr(settings, name) != field.default for name, field in Settings.model_fields.items()
    )
    assert settings.keys == ["a", "b"]
    changed = parse(["--port", "82", "--prefix-caching", "--no-sanitize", "--model", "stories"])
    assert (changed.port, changed.prefix_caching, changed.sanitize, changed.model) == (
        82,
        True,
        False,
        "stories",
    )
    assert changed.block_size == 8


@pytest.mark.parametrize(
    ("host", "key", "open_to_all"),
    [
        ("127.0.0.1", "", False),
        ("localhost", "", False),
        ("::1", "", False),
        ("0.0.0.0", "", True),
        ("::", "", True),
        ("192.168.1.5", "", True),
        ("0.0.0.0", " , ", True),
        ("0.0.0.0", "secret", False),
    ],
)
def test_open_to_all(host, key, open_to_all):
    assert parse(["--host", host, "--api-key", key]).open_to_all == open_to_all


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("port", value) for value in ("-1", "65536", "http", "", "1.5")],
        *[("max-sequences", value) for value in ("0", "5000", "many")],
        *[("max-queue", value) for value in ("-1", "x")],
        *[("request-timeout", value) for value in ("0", "-1", "nan", "inf", "soon")],
        *[("grace", value) for value in ("-1", "nan", "4000")],
        *[("block-size", value) for value in ("0", "2000")],
        *[("threads", value) for value in ("-1", "x")],
        ("dtype", "int8"),
        ("device", "tpu"),
        ("preemption", "never"),
        ("engine", "fastest"),
    ],
)
def test_bad_values_are_refused_in_one_sentence(capsys, monkeypatch, option, value):
    variable = PREFIX + option.upper().replace("-", "_")
    status, said = ended(capsys, f"--{option}={value}")
    assert (
        status == 2
        and said.startswith(f"error: --{option}: ")
        and said.count("\n") == 1
        and "--help" in said
    )
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=f"^{variable}: "):
        parse([])


@pytest.mark.parametrize(
    "arguments", [("--prot", "8000"), ("--port",), ("something",), ("--sanitize=maybe",)]
)
def test_options_that_do_not_exist(capsys, arguments):
    status, said = ended(capsys, *arguments)
    assert status == 2 and said.startswith("error: ") and "--help" in said


def test_help_shows_every_option_and_its_variable(capsys):
    status, said = ended(capsys, "--help")
    assert status == 0
    for name in Settings.model_fields:
        assert "--" + name.replace("_", "-") in said and PREFIX + name.upper() in said
    assert "python -m stage06_serving --port 8080" in said


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = ended(capsys, "--port", str(port))
    assert status == 2 and f"Port {port} on 127.0.0.1 cannot be opened" in said and "--port" in said


def test_a_template_that_is_none_stops_the_start(capsys, tmp_path):
    status, said = ended(capsys, "--chat-template", str(tmp_path / "absent.json"))
    assert (
        status == 2 and said.startswith("error: --chat-template") and "choose simple, none" in said
    )


def test_a_start_that_fails_gives_the_port_back(tmp_path, monkeypatch):
    """The port is opened before the model is loaded. A program that catches the error and tries again must get it."""
    opened = []
    listen = stage.listen

    def keep(host: str, port: int) -> socket.socket:
        opened.append(listen(host, port))
        return opened[-1]

    monkeypatch.setattr(stage, "listen", keep)
    with pytest.raises(UserError, match="nothing-here"):
        stage.main(["--port", "0", "--model", str(tmp_path / "nothing-here")])
    assert [each.fileno() for each in opened] == [-1]  # closed


def test_a_model_that_is_not_there_stops_the_start(capsys):
    status, said = ended(capsys, "--port", "0", "--model", "./nothing-here")
    assert (
        status == 2
        and said.startswith("error: ")
        and "nothing-here" in said
        and "serves" not in said
    )


def test_what_the_libraries_have_made_is_no_garbage(tiny_folder, monkeypatch):
    """A body of many small lists made the collector look at all of PyTorch several times: half a second on the event loop."""
    frozen = []

    def run(serving: Any) -> None:
        serving.close()
        frozen.append(gc.get_freeze_count())

    monkeypatch.setattr(stage.asyncio, "run", run)
    interval = sys.getswitchinterval()
    try:
        stage.main(
            [
                "--port",
                "0",
                "--model",
                str(tiny_folder),
                "--linear",
                "plain",
                "--kv-memory",
                "64KiB",
            ]
        )
        assert frozen[0] > 100_000 and len(gc.get_objects()) < frozen[0] / 10
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    ("memory", "words"), [("lots", "not a valid size"), ("1KiB", "block"), ("100TB", "free")]
)
def test_memory_that_there_is_not_stops_the_start(tiny_folder, memory, words):
    for option in ("--kv-memory", "--swap-memory") if memory != "1KiB" else ("--kv-memory",):
        with pytest.raises(UserError, match=words):
            stage.make_engine(
                parse(["--model", str(tiny_folder), "--linear", "plain", option, memory])
            )


def test_the_engine_is_as_the_settings_say(tiny_folder):
    engine: Any
    options = (
        "--max-sequences",
        "3",
        "--block-size",
        "8",
        "--kv-memory",
        "64KiB",
        "--swap-memory",
        "8KiB",
        "--dtype",
        "float64",
    )
    arguments = ["--model", str(tiny_folder), "--linear", "plain", *options]
    engine, loaded = stage.make_engine(
        parse([*arguments, "--no-prefix-caching", "--preemption", "swap", "--sanitize"])
    )
    scheduler = engine.engine.scheduler
    assert scheduler.swap_pool is not None
    assert (scheduler.pool.count, scheduler.pool.block_size, scheduler.swap_pool.count) == (
        16,
        8,
        2,
    )
    assert (scheduler.max_sequences, scheduler.token_budget, scheduler.preemption) == (
        3,
        stage.BUDGET,
        "swap",
    )

    def sanitized() -> bool:
        return any(isinstance(observer, Sanitizer) for observer in engine.engine.observers)

    assert not scheduler.prefix_caching and sanitized() and loaded.config.name == "tiny"
    assert engine.steps.maxlen == stage.RECORDS
    engine, _ = stage.make_engine(parse([*arguments, "--token-budget", "50"]))
    scheduler = engine.engine.scheduler
    assert scheduler.token_budget == 50 and scheduler.prefix_caching and not sanitized()


# ---- a server that is open to others --------------------------------------------------------------------------------


def test_start_and_end_of_an_open_server(interruptible, serve, tiny_folder, tmp_path):
    """From the environment alone; the plan, the warning, a template from a file, and the end at Ctrl-C."""
    path = tmp_path / "chat.json"
    path.write_text(
        json.dumps({"roles": {"user": "<{content}>"}, "start": "=", "stops": ["aaa"]}),
        encoding="utf-8",
    )
    values = {
        "MODEL": str(tiny_folder), "SERVED_MODEL_NAME": "mine", "HOST": "0.0.0.0", "MAX_SEQUENCES": "3", "MAX_QUEUE": "5",
        "KV_MEMORY": "64KiB", "CHAT_TEMPLATE": str(path),
    }  # fmt: skip
    with serve(env={PREFIX + name: value for name, value in values.items()}) as running:
        said = running.stderr()
        assert said.startswith(
            "WARNING: --host 0.0.0.0 opens the server to every machine that can reach this one"
        )
        assert f"Staircase serves mine at http://0.0.0.0:{running.port}\n" in said
        assert "\n  model   tiny, float32 on cpu" in said and "\n  engine  paged\n" in said
        assert (
            "\n  memory  64.0 KiB in 16 blocks of 16 tokens: 1 whole context of 256; at most 3 sequences at a time, 5 more in the queue"
            in said
        )
        assert (
            f"\n  try     curl -N http://0.0.0.0:{running.port}/v1/completions -H 'Content-Type: application/json' -d '"
            in said
        )
        url = f"http://127.0.0.1:{running.port}/v1"
        assert (
            httpx2.get(f"{url}/models", trust_env=False, timeout=60, verify=False).json()["data"][
                0
            ]["id"]
            == "mine"
        )
        bias = {str(ord("a")): 100}  # the model says nothing else
        chat = {
            "messages": [{"role": "user", "content": "hi"}],
            "logit_bias": bias,
            "max_tokens": 9,
        }
        spoken = httpx2.post(
            f"{url}/chat/completions", json=chat, trust_env=False, timeout=60, verify=False
        ).json()
        assert (
            spoken["choices"][0]["message"]["content"] == ""
            and spoken["choices"][0]["stop_reason"] == "aaa"
        )
        assert spoken["usage"] == {
            "prompt_tokens": len("<hi>="),
            "completion_tokens": 3,
            "total_tokens": 8,
        }
        chat["messages"] = [{"role": "user", "content": "hi"}, {"role": "critic", "content": "no"}]
        spoken = httpx2.post(
            f"{url}/chat/completions",
            json=chat | {"stop": "aa"},
            trust_env=False,
            timeout=60,
            verify=False,
        ).json()
        assert spoken["choices"][0]["stop_reason"] == "aa" and spoken["usage"][
            "prompt_tokens"
        ] == len("<hi>Critic: no\n=")
        assert not psutil.Process(running.process.pid).children(
            recursive=True
        )  # nobody is left if it is killed
        assert running.stop(signal.SIGINT) == 130
        assert (
            running.stderr().strip() == said.strip()
        )  # nothing was said of any prompt, and nothing went wrong


# ---- keys -----------------------------------------------------------------------------------------------------------


def test_a_server_without_a_template_has_no_chats(locked):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    answer = httpx2.post(
        f"{locked.url}/v1/chat/completions",
        json=chat,
        headers=KEY,
        trust_env=False,
        timeout=60,
        verify=False,
    )
    assert answer.status_code == 400 and "no chat template" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages"


def routes(running: Running) -> list[tuple[str, str]]:
    """All operations that the server tells of, and some that it does not."""
    paths = httpx2.get(
        f"{running.url}/openapi.json", headers=KEY, trust_env=False, timeout=60, verify=False
    ).json()["paths"]
    told = [
        (method.upper(), path.replace("{model_id}", "tiny"))
        for path, methods in paths.items()
        for method in methods
    ]
    assert len(told) >= 11
    hidden = [
        "/openapi.json",
        "/docs",
        "/redoc",
        "/nothing",
        "/health/",
        "/healthz",
        "//health",
        "/v1",
    ]
    return [
        *told,
        *(("GET", path) for path in hidden),
        ("OPTIONS", "/v1/completions"),
        ("HEAD", "/metrics"),
    ]


def status(running: Running, method: str, path: str, headers: dict[str, Any]) -> int:
    body: dict[str, Any] = {"json": {}} if method == "POST" else {}
    url = f"{running.url}{path}"
    with httpx2.stream(
        method, url, headers=headers, trust_env=False, verify=False, timeout=20, **body
    ) as answer:  # /live has no end
        return answer.status_code


def test_every_route_but_two_needs_a_key(locked):
    asked = routes(locked)
    assert (
        ("GET", "/live") in asked
        and ("POST", "/generate") in asked
        and ("GET", "/metrics") in asked
    )
    for method, path in asked:
        wanted = path not in OPEN
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer first-key,"},
        ):
            assert (status(locked, method, path, headers) == 401) == wanted, (method, path, headers)
        assert status(locked, method, path, KEY) != 401, (method, path)
    assert (
        status(locked, "GET", "/v1/models", {"Authorization": "Bearer zweiter-schlüssel".encode()})
        == 200
    )
    assert status(locked, "GET", "/", {}) != 401


def test_without_a_key_nothing_is_told(locked):
    answer = httpx2.post(
        f"{locked.url}/v1/completions",
        json={"model": "secret-name"},
        trust_env=False,
        timeout=60,
        verify=False,
    )
    assert (
        answer.status_code == 401
        and "secret-name" not in answer.text
        and "first" not in answer.text
    )
    assert answer.json()["error"]["type"] == "AuthenticationError"
    assert (
        "first" not in locked.stderr()
        and '-H "Authorization: Bearer $STAIRCASE_API_KEY"' in locked.stderr()
    )
