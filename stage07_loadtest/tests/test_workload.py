"""What is asked: exact lengths, the same ones for the same seed, no prompt twice, and traces that are read or refused by line."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from shared.errors import UserError
from stage07_loadtest import workload
from stage07_loadtest.workload import WORKLOADS, Ask, load_trace, make

GOOD = {"prompt": "Once upon a time", "max_tokens": 3, "at": 0.5}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_says_everything(name: str):
    asks = make(name, 50, 3)
    assert asks == make(name, 50, 3)
    assert asks != make(name, 50, 4)
    assert asks[:20] == make(name, 20, 3)  # more requests are the same ones, and then others


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_prompt_comes_twice_and_ids_are_in_the_vocabulary(name: str):
    asks = make(name, 300, 0, vocab=101)
    prompts = [ask.prompt for ask in asks]
    assert len({tuple(prompt) for prompt in prompts}) == 300
    assert {each for prompt in prompts for each in prompt} == set(range(101))


def test_no_prompt_comes_twice_even_if_few_are_possible(monkeypatch):
    monkeypatch.setitem(workload.LENGTHS, "short", 3)
    assert sorted(ask.prompt for ask in make("short", 8, 0, vocab=2)) == [
        [a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)
    ]


@pytest.mark.parametrize(("name", "length"), [("short", 8), ("medium", 32), ("long", 64)])
def test_fixed_lengths_are_exact(name: str, length: int):
    assert {(len(ask.prompt), ask.max_tokens, ask.at) for ask in make(name, 40, 0)} == {
        (length, 50, None)
    }


def test_mixed_lengths_are_lognormal_and_bounded():
    asks = make("mixed", 4000, 0)
    for lengths, (median, _, least, most) in (
        ([len(ask.prompt) for ask in asks], workload.MIXED_PROMPT),
        ([ask.max_tokens for ask in asks], workload.MIXED_ANSWER),
    ):
        assert min(lengths) >= least and max(lengths) <= most
        assert statistics.median(lengths) == pytest.approx(median, rel=0.1)
        assert (
            statistics.mean(lengths) > 1.15 * median
        )  # a long tail to the right; of a normal distribution they would be the same


def test_shared_prompts_begin_alike_and_then_differ():
    asks = make("shared", 60, 0)
    assert len({tuple(ask.prompt[: workload.SYSTEM]) for ask in asks}) == 1
    questions = [len(ask.prompt) - workload.SYSTEM for ask in asks]
    assert (
        min(questions) >= workload.QUESTION[0]
        and max(questions) <= workload.QUESTION[1]
        and len(set(questions)) > 5
    )


@pytest.mark.parametrize("name", WORKLOADS)
def test_what_does_not_fit_is_refused_and_what_just_fits_is_not(name: str):
    with pytest.raises(UserError, match="choose another one") as error:
        make(name, 1, 0, longest=20)
    need = int(str(error.value).split(" takes ")[1].split()[0])
    assert len(make(name, 200, 0, longest=need)) == 200
    with pytest.raises(UserError, match="choose another one"):
        make(name, 1, 0, longest=need - 1)


def test_an_unknown_workload_is_refused_with_those_there_are():
    with pytest.raises(UserError, match="no workload 'huge'.*short, medium, long, mixed, shared"):
        make("huge", 1, 0)


# ---- traces ---------------------------------------------------------------------------------------------------------


def write(path: Path, *lines: Any) -> Path:
    file = path / "trace.jsonl"
    file.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines),
        encoding="utf-8",
    )
    return file


def test_a_trace_is_read_in_the_order_of_its_times(tmp_path):
    file = write(
        tmp_path,
        {"prompt": [7, 8], "max_tokens": 5, "at": 2},
        "",
        {"prompt": "Müller", "max_tokens": 3, "at": 0.25, "who": "ignored"},
        {"prompt_tokens": 9, "max_tokens": 1, "at": 1},
    )
    first, second, third = load_trace(file)
    assert first == Ask("Müller", 3, 0.25)
    assert (len(second.prompt), second.max_tokens, second.at) == (9, 1, 1.0)
    assert third == Ask([7, 8], 5, 2.0)


def test_lengths_alone_become_prompts_that_the_seed_chooses(tmp_path):
    file = write(tmp_path, *[{"prompt_tokens": 12, "max_tokens": 1, "at": 0}] * 2)
    one, two = load_trace(file, 1)
    assert one.prompt != two.prompt
    assert load_trace(file, 1) == [one, two] != load_trace(file, 2)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "it is no JSON"),
        ("[1]", "it is no JSON object"),
        ({"max_tokens": 3, "at": 0}, "one of 'prompt' and 'prompt_tokens'"),
        (GOOD | {"prompt_tokens": 3}, "one of 'prompt' and 'prompt_tokens'"),
        (GOOD | {"prompt": ""}, "'prompt' must be"),
        (GOOD | {"prompt": []}, "'prompt' must be"),
        (GOOD | {"prompt": [1, -1]}, "'prompt' must be"),
        (GOOD | {"prompt": [True]}, "'prompt' must be"),
        (GOOD | {"prompt": 3}, "'prompt' must be"),
        ({"prompt_tokens": 0, "max_tokens": 3, "at": 0}, "'prompt_tokens' must be"),
        ({"prompt_tokens": 2.5, "max_tokens": 3, "at": 0}, "'prompt_tokens' must be"),
        (GOOD | {"max_tokens": 0}, "'max_tokens' must be"),
        (GOOD | {"max_tokens": True}, "'max_tokens' must be"),
        (GOOD | {"max_tokens": "3"}, "'max_tokens' must be"),
        ({"prompt": "Once", "at": 0}, "'max_tokens' must be"),
        (GOOD | {"at": -1}, "'at' must be"),
        (GOOD | {"at": None}, "'at' must be"),
        (GOOD | {"at": True}, "'at' must be"),
        ('{"prompt": "Once", "max_tokens": 3, "at": NaN}', "'at' must be"),
        ('{"prompt": "Once", "max_tokens": 3, "at": Infinity}', "'at' must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line: Any, why: str):
    file = write(tmp_path, GOOD, line, GOOD)
    with pytest.raises(UserError) as error:
        load_trace(file)
    assert (
        f"{file}, line 2: " in str(error.value)
        and why in str(error.value)
        and '"at": 0.5' in str(error.value)
    )


def test_files_that_are_no_traces(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="cannot be read"):
        load_trace(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match="cannot be read"):
        load_trace(tmp_path)
    with pytest.raises(UserError, match="is empty"):
        load_trace(write(tmp_path, "", " "))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "M\xfcller", "max_tokens": 3, "at": 0}\n')
    with pytest.raises(UserError, match="line 1: it is not UTF-8"):
        load_trace(tmp_path / "latin.jsonl")
    monkeypatch.setattr(workload, "MOST_TRACE_BYTES", 10)
    with pytest.raises(UserError, match="split it"):
        load_trace(write(tmp_path, GOOD))
