"""The command line, the environment, keys, and the start and the end of the server."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from itertools import product
from typing import Any

import httpx2
import pytest

from shared import cli, paths
from shared.errors import UserError
from shared.server import free_ports, python, stop
from stage05_paged.sanitizer import Sanitizer
from stage06_serving import __main__ as stage
from stage06_serving.settings import PREFIX, Settings, parse

from .asking import HANG, bearer, get, post, until
from .conftest import environment, serving

VALUES: dict[str, Any] = {"model": "gpt2", "served_model_name": "mine", "random_weights": True}
VALUES |= {"device": "cpu", "dtype": "float64", "linear": "plain", "threads": 3, "engine": "paged"}
VALUES |= {"host": "::1", "port": 81, "api_key": "a, b,,", "max_num_seqs": 5}
VALUES |= {"max_num_batched_tokens": 77, "max_model_len": 99}
VALUES |= {"kv_memory": "1GB", "block_size": 8, "swap_memory": "2MB", "preemption": "swap"}
VALUES |= {"enable_prefix_caching": False, "sanitize": True, "max_queue": 0, "request_timeout": 1.5}
VALUES |= {"grace": 0, "chat_template": "simple", "chat": True, "log_requests": True}
VALUES |= {"allowed_host": "here", "api_key_file": __file__, "temperature": 0.5}
VALUES |= {"top_p": 0.9, "top_k": 40, "generation_config": "none"}
VALUES |= {"weights": "float32", "kv_dtype": "bfloat16"}
VALUES |= {"speculate": "ngram", "num_speculative_tokens": 6, "speculative_model": "small"}
VALUES |= {"drawn_drafts": True}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in Settings.model_fields:
        monkeypatch.delenv(PREFIX + name.upper(), raising=False)


def ended(capsys, *arguments):
    """Exit status and output of a command line that starts nothing."""
    with pytest.raises(SystemExit) as exit:
        cli.run(stage.main, list(arguments))
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return exit.value.code, out + err


def test_every_option_is_a_variable_too_and_the_command_line_wins(monkeypatch):
    for name, value in VALUES.items():
        monkeypatch.setenv(PREFIX + name.upper(), str(value))
    settings = parse([])
    assert settings.model_dump() == VALUES
    assert all(Settings.model_fields[name].default != value for name, value in VALUES.items())
    assert settings.keys[:2] == ["a", "b"] and "import pytest" in settings.keys
    words = "--port 82 --enable-prefix-caching --no-sanitize --model stories"
    changed = parse(words.split())
    assert (changed.port, changed.enable_prefix_caching, changed.sanitize) == (82, True, False)
    assert (changed.model, changed.block_size) == ("stories", 8)


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("--engine pagd", "did you mean paged? Choose one of"),
        ("--dtype float23", "did you mean float32? Input should be"),
        ("--model storys", "did you mean stories? Choose"),
        ("STAIRCASE_ENGINE=kernls", "STAIRCASE_ENGINE: did you mean kernels?"),
    ],
)
def test_a_mistyped_value_gets_a_hint(source, meant, capsys, monkeypatch):
    name, equals, value = source.partition("=")
    if equals:
        monkeypatch.setenv(name, value)
    status, shown = ended(capsys, *([] if equals else source.split()))
    assert status == 2 and meant in shown and shown.count("\n") == 1


def test_the_defaults_are_safe_and_what_is_open_to_all():
    settings = parse([])
    assert (settings.host, settings.port, settings.model) == ("127.0.0.1", 8000, "stories")
    assert settings.keys == [] and not settings.open_to_all and settings.max_queue == 1024
    for host, key, open_to_all in (
        *((host, "", False) for host in ("127.0.0.1", "localhost", "::1")),
        *((host, "", True) for host in ("0.0.0.0", "::", "192.168.1.5")),
        ("0.0.0.0", "secret", False),
    ):
        assert parse(["--host", host, "--api-key", key]).open_to_all == open_to_all


@pytest.mark.parametrize(
    ("option", "values"),
    [
        *(("port", "-1 65536 http 1.5"), ("max-num-seqs", "0 5000 many"), ("max-queue", "-1 x")),
        *(("request-timeout", "0 -1 nan inf soon"), ("grace", "-1 nan 4000")),
        *(("block-size", "0 2000"), ("threads", "-1 x"), ("dtype", "int8"), ("device", "tpu")),
        *(("preemption", "never"), ("engine", "fastest"), ("max-model-len", "1 -1")),
    ],
)
def test_invalid_values_are_an_error_of_one_sentence(capsys, monkeypatch, option, values):
    variable = PREFIX + option.upper().replace("-", "_")
    for value in values.split():
        status, shown = ended(capsys, f"--{option}={value}")
        assert status == 2 and shown.startswith(f"error: --{option}: ")
        assert shown.count("\n") == 1 and "--help" in shown
        monkeypatch.setenv(variable, value)
        with pytest.raises(UserError, match=f"^{variable}: "):
            parse([])
        monkeypatch.delenv(variable)


def test_help_shows_every_option_and_its_variable(capsys):
    for arguments in (["--prot", "8000"], ["--port"], ["something"], ["--sanitize=maybe"]):
        status, shown = ended(capsys, *arguments)
        assert status == 2 and shown.startswith("error: ") and "--help" in shown
    status, shown = ended(capsys, "--help")
    assert status == 0
    for name in Settings.model_fields:
        assert "--" + name.replace("_", "-") in shown and PREFIX + name.upper() in shown


def test_what_stops_the_start(capsys, tmp_path, monkeypatch):
    """A missing model, a host that is elsewhere or unknown. The port is opened before the model is
    loaded, and closed on failure: a program that catches the error and tries again must get it."""
    for host in ("nowhere.invalid", "192.0.2.1"):
        status, shown = ended(capsys, "--port", "0", "--host", host)
        assert status == 2 and f"--host {host} is not an address of this machine" in shown
    opened = stage.listen("127.0.0.1", 0)
    monkeypatch.setattr(stage, "listen", lambda *where: opened)
    status, shown = ended(capsys, "--port", "0", "--model", str(tmp_path))
    assert status == 2 and "\nerror: " in shown and "config.json is missing" in shown
    assert "serves" not in shown and opened.fileno() == -1  # closed


def test_the_libraries_objects_are_not_collected(interruptible, tiny_folder, monkeypatch):
    """A body of many small lists made the collector look at all of PyTorch several times: half a
    second on the event loop."""
    frozen = []

    def plan(*about):  # the model is loaded, and the server is ready
        frozen.append(gc.get_freeze_count())
        signal.raise_signal(signal.SIGINT)
        return ""

    def interrupt(*signal):
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "plan", plan)
    signal.signal(signal.SIGINT, interrupt)
    often, interval = gc.get_threshold(), sys.getswitchinterval()
    options = "--port 0 --linear plain --kv-memory 64KiB"
    try:
        with pytest.raises(KeyboardInterrupt):
            stage.main([*options.split(), "--model", str(tiny_folder)])
        assert frozen[0] > 100_000 and len(gc.get_objects()) < frozen[0] / 10
    finally:
        gc.unfreeze()
        gc.set_threshold(*often)
        sys.setswitchinterval(interval)


def interrupted(ready, seconds=0.0):
    """Start a server whose model takes long to load, wait until ready(url), interrupt it `seconds`
    later, and return its status and the last of its errors."""
    (port,) = free_ports(1)
    arguments = f"-m stage06_serving --port {port} --model gpt2 --random-weights"
    with python(arguments.split(), environment()) as server:
        ready(f"http://127.0.0.1:{port}")
        time.sleep(seconds)
        server.process.send_signal(signal.SIGINT)
        return server.process.wait(HANG), server.stderr()[-500:]


@pytest.mark.skipif(sys.platform == "win32", reason="there Ctrl-C would reach this process too")
def test_ctrl_c_while_the_model_loads(interruptible):
    """The interpreter ended under the thread that loads, and the process aborted."""

    def loading(url):
        with contextlib.suppress(httpx2.TransportError):
            return httpx2.get(f"{url}/health", trust_env=False).status_code == 503

    status, shown = interrupted(lambda url: until(lambda: loading(url)))
    assert status == -signal.SIGINT and shown.startswith("Loading ") and shown.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no disk that is always full")
def test_a_log_on_a_full_disk_stops_no_server():
    """Its first line did, with SIGABRT."""
    (port,) = free_ports(1)
    command = [sys.executable, *f"-m stage06_serving --port {port} --engine paged".split()]

    def ready():
        assert server.poll() is None
        with contextlib.suppress(httpx2.TransportError):
            url = f"http://127.0.0.1:{port}/ready"
            return httpx2.get(url, trust_env=False).status_code == 200

    with open("/dev/full", "w") as full:
        server = subprocess.Popen(command, cwd=paths.ROOT, stderr=full, env=environment())
    try:
        until(ready)
    finally:
        stop(server)
    assert server.returncode == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there Ctrl-C would reach this process too")
def test_ctrl_c_at_every_moment_of_the_start(interruptible):
    for moment in range(160):
        status, shown = interrupted(lambda url: None, moment / 20)
        assert status in (-signal.SIGINT, cli.EXIT_INTERRUPTED), (moment, shown)
        assert "Traceback" not in shown and "terminate" not in shown, (moment, shown)


def test_the_engine_has_the_settings(tiny_folder):
    """Memory that the machine lacks stops the start."""
    options = "--max-num-seqs 3 --block-size 8 --kv-memory 64KiB --swap-memory 8KiB"
    arguments = ["--model", str(tiny_folder), *options.split(), "--dtype", "float64"]

    def made(*more):
        engine = stage.make_engine(parse([*arguments, "--linear", "plain", *more])).engine
        sanitized = any(isinstance(observer, Sanitizer) for observer in engine.observers)
        return engine.scheduler, sanitized

    scheduler, sanitized = made("--no-enable-prefix-caching", "--preemption", "swap", "--sanitize")
    sizes = scheduler.pool.count, scheduler.pool.block_size, scheduler.swap_pool.count
    assert sizes == (16, 8, 2)
    assert (scheduler.max_sequences, scheduler.token_budget) == (3, stage.BUDGET)
    assert scheduler.preemption == "swap" and not scheduler.prefix_caching and sanitized
    for option, (memory, words) in product(
        ("--kv-memory", "--swap-memory"),
        (("lots", "not a valid size"), ("100TB", "free"), ("1KiB", "block")),
    ):
        with pytest.raises(UserError, match=words):
            made(option, memory)
    scheduler, sanitized = made("--max-num-batched-tokens", "50")
    assert scheduler.token_budget == 50 and scheduler.prefix_caching and not sanitized


def test_start_and_end_of_an_open_server(interruptible, tiny_folder):
    """From the environment alone; the plan, the warning, and Ctrl-C."""
    values = {"MODEL": str(tiny_folder), "SERVED_MODEL_NAME": "mine", "HOST": "0.0.0.0"}
    values |= {"MAX_NUM_SEQS": "3", "MAX_QUEUE": "5", "KV_MEMORY": "64KiB"}
    with serving(env={PREFIX + name: value for name, value in values.items()}) as running:
        shown, address = running.stderr(), f"http://0.0.0.0:{running.port}"
        assert shown.startswith("WARNING: --host 0.0.0.0 opens the server to every machine")
        for line in (
            f"Staircase serves mine at {address}\n",
            "\n  model    tiny, context of 256 tokens\n",
            "\n  engine   paged, float32 on cpu, 1 thread\n",
            "\n  faster   --engine auto ",
            "\n  memory   64.0 KiB in 16 blocks of 16 tokens: 1 whole context of 256; at most 3",
            f"\n  try      curl -N {address}/v1/completions -H 'Content-Type: application/json' -d",
        ):
            assert line in shown
        running.url = f"http://127.0.0.1:{running.port}"
        assert get(running, "/v1/models").json()["data"][0]["id"] == "mine"
        assert running.stop(signal.SIGINT) == -signal.SIGINT
        assert running.stderr().strip() == shown.strip()  # no prompt in it, and no error


KEY = bearer("first-key")


def test_a_server_without_a_template_has_no_chats(locked):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    answer = post(locked, "/v1/chat/completions", json=chat, headers=KEY)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert "no chat template" in error["message"]
    assert '-H "Authorization: Bearer $STAIRCASE_API_KEY"' in locked.stderr()  # how to try it


def test_every_route_but_three_needs_a_key(locked):
    """The routes in the schema."""
    paths = get(locked, "/openapi.json").json()["paths"]
    routes = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    assert {("GET", "/live"), ("POST", "/generate"), ("GET", "/metrics")} <= {*routes}
    keys = ("", "Bearer wrong", "Bearer first-key,", KEY["Authorization"])
    with httpx2.Client(trust_env=False, timeout=20) as client:
        for (method, path), key in product([*routes, ("HEAD", "/metrics")], keys):
            url = locked.url + path.replace("{name}", "tiny")
            body: Any = {} if method == "POST" else None
            status = client.request(method, url, json=body, headers={"Authorization": key})
            allowed = path in ("/health", "/ready") or key == KEY["Authorization"]
            assert (status.status_code != 401) == allowed, path
