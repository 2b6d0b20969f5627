"""The command line, the environment, and the start and the end of the server."""

from __future__ import annotations

import signal
import sys
import time

import httpx2
import pytest

from shared.errors import UserError
from shared.server import own_server
from stage05_paged.sanitizer import Sanitizer
from stage06_serving import __main__ as stage
from stage06_serving.loading import BUDGET, make_engine
from stage06_serving.settings import PREFIX, Settings, parse

from .tools import HANG, until


def test_every_option_is_a_variable_too_and_the_command_line_wins(monkeypatch, run):
    status, shown, _ = run(stage.main, "--help")
    assert status == 0 and PREFIX in shown
    assert all("--" + name.replace("_", "-") in shown for name in Settings.model_fields)
    monkeypatch.setenv(f"{PREFIX}ENABLE_PREFIX_CACHING", "no")
    assert not parse([]).enable_prefix_caching
    assert parse(["--enable-prefix-caching"]).enable_prefix_caching
    monkeypatch.setenv(f"{PREFIX}PORT", "81")
    assert parse([]).port == 81 and parse(["--port", "82"]).port == 82


def test_the_defaults_are_safe_and_what_is_open_to_all():
    assert (parse([]).host, parse([]).keys) == ("127.0.0.1", [])
    for host in ("127.0.0.1", "localhost", "::1"):
        assert not parse(["--host", host]).open_to_all
    for host in ("0.0.0.0", "192.168.1.5"):
        assert parse(["--host", host]).open_to_all
        assert not parse(["--host", host, "--api-key", "secret"]).open_to_all


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        *(("port", "65536", "less than"), ("port", "http", "integer"), ("device", "tpu", "'cuda'")),
        *(("threads", "-1", "greater"), ("request-timeout", "0", "greater")),
        *(("api-key", ",", "match pattern"), ("engine", "pagd", "auto|paged|kernels")),
        ("prot", "80", "unrecognized"),
    ],
)
def test_invalid_values_are_an_error_of_one_sentence(run, option, value, words):
    status, _, shown = run(stage.main, f"--{option}={value}")
    assert status == 2 and shown.count("\n") == 1 and f"--{option}" in shown
    assert words in shown and "--help" in shown


def test_what_stops_the_start(run, tmp_path, monkeypatch):
    """A missing model, a host that is elsewhere or unknown. The port is opened before the model is
    loaded, and closed on failure: a program that catches the error and tries again must get it."""
    for model, words in (("storys", "did you mean stories?"), ("none.gguf", "There is no model")):
        status, _, shown = run(stage.main, "--model", model)
        assert status == 2 and words in shown and shown.count("\n") == 1
    opened = stage.bind("127.0.0.1", 0)
    opened.listen()
    for place in (("--host", "192.0.2.1"), ("--port", str(opened.getsockname()[1]))):
        status, _, shown = run(stage.main, *place)
        assert status == 2 and "cannot listen on" in shown and "free --port" in shown
    monkeypatch.setattr(stage, "bind", lambda *where: opened)
    status, _, shown = run(stage.main, "--port", "0", "--model", str(tmp_path))
    assert status == 2 and "\nerror: " in shown and "config.json is missing" in shown
    assert "serves" not in shown and opened.fileno() == -1  # closed


@pytest.mark.skipif(sys.platform == "win32", reason="there Ctrl-C would reach this process too")
def test_ctrl_c_while_the_model_loads(interruptible):
    """The interpreter ended under the thread that loads, and the process aborted."""
    arguments = ["--model", "gpt2", "--random-weights"]
    with own_server(arguments, quiet=True, wait=False) as server:
        until(lambda: "Loading " in server.stderr())
        time.sleep(0.5)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(HANG) == -signal.SIGINT
        shown = server.stderr()
    assert shown.startswith("Loading ") and shown.count("\n") == 1


def test_the_engine_has_the_settings(tiny_folder):
    """Memory that the machine lacks stops the start."""
    options = "--max-num-seqs 3 --engine paged --dtype float64 --kv-memory 64KiB --sanitize"
    arguments = ["--model", str(tiny_folder), *options.split()]
    engine = make_engine(parse([*arguments, "--no-enable-prefix-caching"])).engine
    scheduler = engine.scheduler
    assert (scheduler.pool.count, scheduler.pool.block_size) == (8, 16)
    assert (scheduler.max_sequences, scheduler.token_budget) == (3, BUDGET)
    assert any(isinstance(one, Sanitizer) for one in engine.observers)
    assert not scheduler.prefix_caching
    with pytest.raises(UserError, match="free"):
        make_engine(parse([*arguments, "--kv-memory", "100TB"]))


def test_a_process_from_its_start_to_its_end(interruptible, tiny_folder, monkeypatch):
    """From the environment alone: the plan, the warning, the log of requests, and Ctrl-C."""
    values = {"MODEL": str(tiny_folder), "HOST": "0.0.0.0", "LOG_REQUESTS": "1"}
    values |= {"MAX_NUM_SEQS": "3", "MAX_QUEUE": "5", "KV_MEMORY": "64KiB", "ENGINE": "paged"}
    for name, value in values.items():
        monkeypatch.setenv(PREFIX + name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with own_server(quiet=True) as running:
        shown, address = running.stderr(), running.url
        assert shown.startswith("WARNING: --host 0.0.0.0 opens the server to every machine")
        for line in (
            f"Staircase serves tiny at {address}\n",
            "\n  model    tiny, context of 256 tokens\n",
            "\n  engine   paged, float32 on cpu, 1 thread\n",
            "\n  memory   64.0 KiB in 16 blocks of 16 tokens; at most 3 sequences",
            f"\n  try      curl -N {address}/v1/completions -H 'Content-Type: application/json' -d",
        ):
            assert line in shown
        url = address.replace("0.0.0.0", "127.0.0.1")
        httpx2.get(f"{url}/nowhere%0aand", trust_env=False)
        until(lambda: '"GET /nowhere%0Aand HTTP/1.1" 404' in running.stderr())
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(HANG) == -signal.SIGINT
        assert running.stderr().count("\n") == shown.count("\n") + 1  # no error
