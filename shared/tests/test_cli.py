"""The command lines: what they print and what they refuse. Every stage runs the same tests."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shared import cli, paths, testing
from shared.errors import UserError
from shared.testing import FIELDS, make_folder

MAINS = {name: importlib.import_module(f"{name}.__main__").main for name in testing.engines()}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """run(main, *arguments) -> (exit status, standard output, standard error)."""

    def call(main: Any, *arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit:
            cli.run(main, list(arguments))
        captured = capsys.readouterr()
        assert isinstance(exit.value.code, int)
        return exit.value.code, captured.out, captured.err

    return call


def refuses(result: tuple[int, str, str], words: str) -> None:
    """One sentence on standard error that holds `words`, nothing on standard output, status 2."""
    status, out, err = result
    assert (status, out) == (2, ""), err
    assert err.startswith("error: ") and err.endswith(".\n") and err.count("\n") == 1, err
    assert re.search(words, err), err


def test_stages_say_the_same_and_count_it(run, folder):
    options = ["--model", str(folder), "--dtype", "float64", "--max-model-len", "14"]
    speed = r"9 tokens in \d+\.\d\d s, \d+\.\d tok/s, finish reason length"
    machine = r"model, float64 on cpu, \d+ threads?, plain linear layers"
    said = [run(main, "hello", *options) for main in MAINS.values()]
    for status, _, err in said:
        assert status == 0 and re.fullmatch(rf"\[{speed}; {machine}\]\n", err)
    (text,) = {text for _, text, _ in said}
    assert text.startswith("hello")


@pytest.mark.parametrize("arguments", [["--temperature", "1"], ["--random-weights"]])
def test_a_seed_repeats_and_another_does_not(run, folder, tmp_path, arguments):
    if arguments == ["--random-weights"]:
        (folder := tmp_path).joinpath("config.json").write_text(json.dumps(FIELDS))
    main, model = MAINS["stage02_kv_cache"], ("hello", "--model", str(folder), "--max-tokens", "20")
    one, again, other = (run(main, *model, *arguments, "--seed", seed) for seed in "112")
    assert one[0] == 0 and one[1] == again[1] != other[1]


def test_a_long_answer_stops_where_the_context_ends_and_threads_are_set(run, folder):
    before = torch.get_num_threads()
    model = ("--model", str(folder), "--max-tokens", "1000000", "--threads", "3")
    status, _, err = run(MAINS["stage02_kv_cache"], "hello", *model)
    threads = torch.get_num_threads()
    torch.set_num_threads(before)
    assert status == 0 and "[43 tokens" in err and "finish reason length" in err
    assert threads == 3 and "3 threads" in err


def options(*arguments: str) -> argparse.Namespace:
    return cli.generation_parser("a_stage", "About.").parse_args(arguments)


def test_weights_in_bfloat16_stay_so_where_the_processor_computes_in_it(monkeypatch, tmp_path):
    def dtype(*arguments: str) -> torch.dtype:
        chosen = options("--model", str(tmp_path), "--device=cpu", *arguments)
        return cli.device_and_dtype(chosen)[1]

    for field, stored in (("dtype", "bfloat16"), ("torch_dtype", "bfloat16"), ("dtype", "float16")):
        (tmp_path / "config.json").write_text(json.dumps({field: stored}))
        for known in ({"avx512_bf16": True}, {"avx512_f": True}):
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda known=known: known)
            native = stored == "bfloat16" and "avx512_bf16" in known
            assert dtype() == (torch.bfloat16 if native else torch.float32)
            assert dtype("--dtype", "float64") == torch.float64


def test_prompt_from_argument_or_standard_input(monkeypatch):
    for data, argument, expected in (
        *((b"Long ago\n", None, "Long ago"), (b"Long ago\r\n", None, "Long ago")),
        (b"two\nlines\n\n", None, "two\nlines\n"),  # only the last newline is echo's
        *(("\ufeffcafé 😀".encode(), None, "café 😀"), (b"", None, cli.PROMPT)),
        (b"not read", "an argument\n", "an argument\n"),
        (b"caf\xe9", None, "caf\ufffd"),
    ):
        for read in (cli.read_prompt, cli.read_prompts):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
            got = read(argparse.Namespace(prompt=argument, prompts=None))
            assert (got or cli.PROMPT) == expected  # read_prompts leaves it to the stage


BAD_OPTIONS = {  # the parser is the same for all stages
    "--max-tokens -3": "--max-tokens.*'-3'.*from 1 to 1000000",
    "--temperature nan": "--temperature.*'nan'.*from 0 to 2",
    "--top-p 0": "--top-p.*above 0 to 1",
    "--max-token 9": "unrecognized arguments: --max-token 9; --help",
    "--max-model-len 9999": "9999 is more than the .* positions",
    "--top-k 301": "top_k.*300",
}


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_bad_options(run, folder, options):
    arguments = ("hello", "--model", str(folder), *options.split())
    refuses(run(MAINS["stage01_forward"], *arguments), f"(?i){BAD_OPTIONS[options]}")


def test_a_prompt_or_model_that_does_not_fit(run, folder, tmp_path):
    for main in (MAINS["stage01_forward"], MAINS["stage02_kv_cache"]):
        refuses(run(main, "a" * 48, "--model", str(folder)), "48 tokens.*47 tokens")
    model = make_folder(tmp_path / "m", 302)
    refuses(run(main, "hello", "--model", str(model)), "302.*300")  # tokens, rows of the model
    (model / "vocab.json").unlink()
    refuses(run(main, "hello", "--model", str(model)), "vocab.json is missing")
    refuses(run(main, "hello", "--model", "no-such-model"), "no-such-model.*stories-draft, gpt2")


def raising(error: BaseException) -> Callable[[list[str] | None], int]:
    def main(_: list[str] | None) -> int:
        raise error

    return main


def test_exit_status(run):
    for error, status, words in (
        (UserError("Bad thing: do better."), 2, "error: Bad thing: do better.\n"),
        *((KeyboardInterrupt(), 130, "\n"), (MemoryError(), 2, "error: There is not")),
        (torch.OutOfMemoryError(), 2, "error: There is not"),
        (RuntimeError("DefaultCPUAllocator: you tried to allocate 9 bytes."), 2, "error: There is"),
    ):
        code, _, err = run(raising(error))
        assert code == status and err.startswith(words)
    assert (run(lambda _: 1)[0], run(lambda _: None)[0]) == (1, 0)
    for bug in (RuntimeError("shapes differ"), FileNotFoundError()):
        with pytest.raises(type(bug)):  # a bug keeps its traceback
            cli.run(raising(bug))


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C would reach this process too")
def test_ctrl_c_ends_a_process_with_a_summary(folder, interruptible):
    (long := folder / "long").mkdir()
    config = FIELDS | {"n_positions": 20_000, "eos_token_id": None}
    (long / "config.json").write_text(json.dumps(config))
    noise = ("--model", str(long), "--random-weights", "--max-tokens", "1000000")
    command = [sys.executable, "-m", "stage01_forward", "Ein Tag", *noise]
    pipes: Any = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=paths.ROOT, **pipes) as process:
        assert process.stdout is not None and process.stdout.read(7) == b"Ein Tag"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and b"finish reason interrupted" in err, err
    assert b"Traceback" not in err
