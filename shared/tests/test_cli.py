"""The command lines: what they print and what they refuse. Every stage runs the same tests."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shared import cli, testing
from shared.errors import UserError
from shared.testing import FIELDS, make_folder

MAINS = {name: importlib.import_module(f"{name}.__main__").main for name in testing.engines()}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("cli") / "model")


def refuses(result: tuple[int, str, str], words: str) -> None:
    """One sentence on standard error that holds `words`, nothing on standard output, status 2."""
    status, out, err = result
    assert (status, out) == (2, ""), err
    assert err.startswith("error: ") and err.endswith(".\n") and err.count("\n") == 1, err
    assert re.search(words, err), err


def test_stages_say_the_same_and_count_it(run, folder):
    options = ["--model", str(folder), "--dtype", "float64", "--max-model-len", "14"]
    speed = r"9 tokens in \d+\.\d\d s, \d+\.\d tok/s, finish reason length"
    machine = r"model, float64 on cpu, 3 threads, plain linear layers"
    before = torch.get_num_threads()
    said = [run(main, "hello", *options, "--threads", "3") for main in MAINS.values()]
    torch.set_num_threads(before)
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


def options(*arguments: str) -> argparse.Namespace:
    return cli.generation_parser("a_stage", "About.").parse_args(arguments)


def test_weights_in_bfloat16_stay_so_where_the_processor_computes_in_it(monkeypatch, tmp_path):
    def dtype(*arguments: str) -> torch.dtype:
        chosen = options("--model", str(tmp_path), "--device=cpu", *arguments)
        return cli.device_and_dtype(chosen)[1]

    for stored in ("bfloat16", "float16"):
        (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": stored}))
        for known in ({"avx512_bf16": True}, {"avx512_f": True}):
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda known=known: known)
            native = stored == "bfloat16" and "avx512_bf16" in known
            assert dtype() == (torch.bfloat16 if native else torch.float32)
            assert dtype("--dtype", "float64") == torch.float64


def test_prompts_come_from_the_argument_standard_input_or_a_file(monkeypatch, tmp_path):
    def read(data: bytes, prompt: str | None = None, prompts: Path | None = None) -> Any:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
        return cli.read_prompts(argparse.Namespace(prompt=prompt, prompts=prompts))

    for data, argument, expected in (
        (b"Long ago\r\n", None, "Long ago"),
        (b"two\nlines\n\n", None, "two\nlines\n"),  # only the last newline is echo's
        *(("\ufeffcafé 😀".encode(), None, "café 😀"), (b"caf\xe9", None, "caf\ufffd")),
        *((b"", None, None), (b"not read", "an argument\n", "an argument\n")),
    ):
        assert read(data, argument) == expected
    monkeypatch.setattr(sys, "stdin", None)  # closed
    assert cli.read_prompt(argparse.Namespace(prompt=None), "default") == "default"
    (file := tmp_path / "prompts").write_bytes("\ufeffone\r\n\n two \x0c\u2028x\n\n".encode())
    assert read(b"", None, file) == ["one", "", " two \x0c\u2028x", ""]  # only \n ends a line
    pytest.raises(UserError, read, b"", "hello", file).match("both a prompt and --prompts")
    file.write_bytes(b"caf\xe9\n")
    pytest.raises(UserError, read, b"", None, file).match("cannot be read")
    pytest.raises(UserError, read, b"", None, tmp_path / "none").match("none is missing")


BAD_OPTIONS = {  # the parser is the same for all stages
    "--max-tokens -3": "--max-tokens.*'-3'.*from 1 to 1000000",
    "--temperature nan": "--temperature.*'nan'.*from 0 to 2",
    "--top-p 0": "--top-p.*above 0 to 1",
    "--max-token 9": "unrecognized arguments: --max-token 9; --help",
    "--max-model-len 9999": "9999 is more than the .* positions",
    "--top-k 301": "top_k.*300",
}


def test_options_prompts_and_models_that_do_not_fit(run, folder, tmp_path):
    main, model = MAINS["stage01_forward"], ("--model", str(folder))
    for options, words in BAD_OPTIONS.items():
        refuses(run(main, "hello", *model, *options.split()), f"(?i){words}")
    refuses(run(main, "a" * 48, *model), "48 tokens.*47 tokens")
    other = make_folder(tmp_path / "m", 302)
    refuses(run(main, "hello", "--model", str(other)), "302.*300")  # tokens, rows of the model
    (other / "vocab.json").unlink()
    refuses(run(main, "hello", "--model", str(other)), "vocab.json is missing")
    refuses(run(main, "hello", "--model", "no-such-model"), "no-such-model.*stories-draft, gpt2")


def raising(error: BaseException) -> Callable[[list[str] | None], int]:
    def main(_: list[str] | None) -> int:
        raise error

    return main


def test_exit_status(run):
    for error, status, words in (
        (UserError("Bad thing: do better."), 2, "error: Bad thing: do better.\n"),
        *((KeyboardInterrupt(), 130, "\n"), (MemoryError(), 2, "error: There is not")),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB"), 2, "error: There"),
        (RuntimeError("DefaultCPUAllocator: you tried to allocate 9 bytes."), 2, "error: There is"),
    ):
        code, _, err = run(raising(error))
        assert code == status and err.startswith(words)
    assert (run(lambda _: 1)[0], run(lambda _: None)[0]) == (1, 0)
    for bug in (RuntimeError("shapes differ"), FileNotFoundError()):
        with pytest.raises(type(bug)):  # a bug keeps its traceback
            cli.run(raising(bug))
