"""The command line of stage 05: prompts that share memory, the map of the blocks, and errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from shared import live
from shared.course.testing import make_folder
from stage01_forward.params import SamplingParams
from stage03_batching.tests.test_main import (
    answered_as_alone,
    answers,
    caller,
    told_without_a_prompt,
)
from stage04_continuous.tests.test_main import ALONE, check_bad_prompts, check_error, loaded
from stage05_paged import __main__ as stage
from stage05_paged.blockmap import mark
from stage05_paged.tests.engines import engine_of

SMALL = ("--block-size", "4", "--kv-memory", "28KiB", "--every", "1")  # 14 blocks of 2 KiB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("stage05") / "model")


@pytest.fixture
def call(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    run = caller(stage.main, folder, capsys)
    return lambda lines, *options: run(lines, "--sanitize", *options)


def show(
    model: Any, prompts: list[str], blocks: int = 100, most: int = 9, samples: int = 1, **more: Any
) -> stage.Show:
    engine = engine_of(**{"sequences": 6, "budget": 64} | more, model=model, blocks=blocks)
    sampling = SamplingParams(most, temperature=float(samples > 1), seed=1, ignore_eos=True)
    return stage.Show(engine, loaded(model), [(text, most) for text in prompts], sampling, samples)


def numbers(err: str) -> dict[str, float]:
    """The last line of a run: what it reports on memory."""
    match = re.search(
        r"\n\[at most (?P<peak>\d+) of (?P<blocks>\d+) blocks in use; hit rate (?P<hits>[\d.]+) %, "
        r"(?P<copies>\d+) copied, (?P<evicted>\d+) evicted; (?P<preemptions>\d+) preemptions, "
        r"(?P<recomputed>\d+) to recompute and (?P<swapped>\d+) swapped; "
        r"(?P<leaked>\d+) blocks leaked\]\n$",
        err,
    )
    assert match, err
    return {name: float(value) for name, value in match.groupdict().items()}


@pytest.mark.parametrize(
    ("options", "happened"),
    [
        ((), ()),
        (("--block-size", "1", "--sequences", "2", "--every", "100"), ("hits",)),
        ((*SMALL, "--preemption", "recompute"), ("preemptions", "recomputed", "evicted")),
        ((*SMALL, "--preemption", "swap", "--max-chunk", "3"), ("preemptions", "swapped")),
        ((*SMALL, "--swap-memory", "4KiB"), ("preemptions",)),
        ((*SMALL, "--no-prefix-cache", "--watermark", "0.5"), ()),
        (("--no-chunks", "--budget", "20", "--sequences", "3", "--kv-memory", "0.003%"), ()),
    ],
)
def test_every_prompt_is_answered_as_it_would_be_alone(call, options, happened):
    counts = numbers(answered_as_alone(call, [*ALONE, "hello"], *options))
    assert counts["leaked"] == 0 and all(counts[name] for name in happened), counts
    assert 0 < counts["peak"] <= counts["blocks"]
    if "--no-prefix-cache" in options:
        assert (counts["hits"], counts["evicted"]) == (0, 0)


def test_the_first_line_has_bytes_blocks_and_whole_contexts(call):
    err = call(["hello"], *SMALL, "--preemption", "recompute")[2]
    room = "room for 1 whole context of 48 tokens; at most 8 sequences at a time"
    assert err.startswith(f"[KV cache: 28.0 KiB in 14 blocks of 4 tokens; {room}; no swap]\n")
    err = call(["hello"], "--block-size", "100", "--sequences", "2")[2]  # longer than a context
    room = "room for 2 whole contexts of 48 tokens; at most 2 sequences at a time"
    swap = "swap: 100.0 KiB in 2 blocks"
    assert err.startswith(f"[KV cache: 100.0 KiB in 2 blocks of 100 tokens; {room}; {swap}]\n")


def test_samples_are_what_as_many_equal_prompts_would_be(call):
    options = ("--temperature", "1", "--max-tokens", "9", "--seed", "5", "--block-size", "4")
    status, out, err = call(["hello you!", "a"], *options, "--every", "4", "--samples", "3")
    _, apart, plain = call(["hello you!"] * 3 + ["a"] * 3, *options, "--no-prefix-cache")
    assert status == 0 and answers(out) == answers(apart) and len(set(answers(out).values())) == 6
    # The last block of the first prompt is half full and shared by three: two of them copy it.
    assert numbers(err)["copies"] == 2 and numbers(plain)["copies"] == numbers(err)["leaked"] == 0
    _, out, err = call("hello!", *options, "--samples", "2")
    assert list(answers(out)) == [1, 2] and numbers(err)["copies"] == 1


def test_the_built_in_prompts_show_sharing_eviction_and_preemption(capsys, monkeypatch):
    """With the default memory for them."""
    counts = numbers(told_without_a_prompt(stage, monkeypatch, capsys))
    assert counts["leaked"] == 0 and counts["peak"] <= counts["blocks"]
    assert counts["hits"] > 25 and counts["evicted"] > 5 and counts["preemptions"] > 2


@pytest.mark.parametrize(("width", "height"), [(110, 30), (60, 10), (30, 3), (5, 1)])
def test_the_view_shows_records_and_tables(tiny_model, width, height):
    prompts = ["a" * 20, "b", "a" * 19 + "c", "d", "ab", "cd", "dd", "ac"]
    run = show(tiny_model, prompts, 16, 25, swap_blocks=16, budget=10, policy="priority")
    assert run.view(width, height) == []
    scheduler, seen = run.engine.scheduler, set()
    while run.step(1):
        view = run.view(width, height)
        text = [line.plain for line in view]
        assert all(line.cell_len <= width for line in view) and (height < 8 or len(view) <= height)
        newest = run.engine.steps[-1]
        assert text[0].startswith(f"step {run.steps}: {newest.rows} sequences"[:width])
        if height < 30:
            continue
        assert f"{newest.owned_blocks} of 16 blocks in use" in text[0]
        assert f"{scheduler.counts.preemptions} preemptions" in text[1]
        blocks = text[2].removeprefix(" 0 ").strip()
        assert len(blocks) == 16 and text[4].split()[:2] == ["prompt", "state"]
        records = {record.request_id: record for record in newest.sequences}
        drawn = {*scheduler.running, *map(run.requests.__getitem__, records)}
        rows = []
        for request in sorted(drawn, key=lambda request: request.arrival):
            record, table = records.get(request.id), scheduler.tables.get(request)
            state = live.state(record)[0] if record else "no room in budget"
            owned = len(table.blocks) if table else 0
            sign, count = mark(request.arrival), len(request.output.token_ids)
            assert blocks.count(sign) <= owned
            rows.append(f"{sign} {request.id} {state} {count} {owned if table else '-'}".split())
            seen.add(state.split()[0])
        lines = [line.split() for line in text[5:-2] if line]
        assert [line[: len(row)] for line, row in zip(lines, rows, strict=True)] == rows
        waiting, ended = text[-2:]
        assert f"{len(run.coming)} still to come" in waiting and ended.startswith("ended: ")
        assert ("waiting: none;" in waiting) == (newest.waiting == 0)
        assert waiting.count("(swapped out)") == newest.swapped
        seen.update(sign for sign in ("swapped out", "!") if sign in waiting)
        seen.update(sign for sign in "#+." if sign in blocks)
    assert run.peak == max(step.owned_blocks for step in run.engine.steps) > newest.owned_blocks
    if height == 30:
        assert seen >= {"prefill", "decode", "ended:", "swapped out", "!", "#", "+", "."}
        assert "1 length" in text[-1]


def test_the_view_tells_samples_and_recomputed_requests(tiny_model):
    run = show(tiny_model, ["a" * 30, "b" * 9], 14, 12, samples=3, sequences=4, budget=8)
    words = {"(for 1)", "(for 4)", "(again)"}
    seen: set[str] = set()
    while run.step(2):
        text = "\n".join(line.plain for line in run.view(100, 30))
        seen.update(word for word in words if word in text)
    assert seen == words
    assert run.engine.scheduler.counts.recomputed and not run.engine.scheduler.pool.owned


def test_more_sequences_than_lines_are_counted(tiny_model):
    run = show(tiny_model, ["ab"] * 12, sequences=12)
    while run.coming:
        run.arrive(run.coming.popleft())
    assert run.step(1) and len(run.engine.steps[-1].sequences) == 12
    text = [line.plain.strip() for line in run.view(80, 12)]
    drawn = sum(bool(re.match(r"[a-z] ", line)) for line in text)
    assert len(text) == 12 and 0 < drawn < 12 and f"and {12 - drawn} more sequences" in text


@pytest.mark.parametrize(
    ("lines", "cells", "words"),
    [
        (["hello", "a", "b"], 10**6, r"24 blocks of 16 tokens, {} steps"),
        ("hello there", 10**6, "3 blocks of 16 tokens, 11 steps"),  # 3 for the prompt
        (["hello"], 24 * 5, "the first 5 of 10 steps"),
    ],
)
def test_the_map_is_written(call, tmp_path, monkeypatch, lines, cells, words):
    monkeypatch.setattr(stage, "MOST_CELLS", cells)
    path, options = tmp_path / "blocks.svg", ("--max-tokens", "9", "--max-chunk", "4")
    status, out, err = call(lines, *options, "--map", str(path))
    assert status == 0 and err.endswith(f"[written: {path}]\n")
    assert out == call(lines, *options)[1]
    steps = re.search(r"in (\d+) steps", err)
    assert words.format(steps and steps[1]) in path.read_text("utf-8")
    assert ElementTree.fromstring(path.read_bytes()).tag.endswith("svg")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-memory", "lots"], "'lots' is not a valid size"),
        (["--kv-memory", "900000GB"], "900000GB of memory is more than the .* free"),
        (["--kv-memory", "0"], "A block of 16 tokens of model takes 8.0 KiB.* has 0 bytes"),
        (["--kv-memory", "20KB", "--block-size", "100"], "A block of 100 tokens.* smaller blocks"),
        (["--watermark", "1"], "--watermark.*'1'.*from 0 to 0.99"),
        (["--preemption", "swap", "--swap-memory", "0"], "no memory to swap to"),
        (["--preemption", "recompute", "--swap-memory", "1MB"], "nothing is swapped.*swap-memory"),
        (["--swap-memory", "1KB"], "A block takes 8.0 KiB.*-memory is 1000 bytes.*0 for none"),
        (["--samples", "2"], "temperature 0 all 2 samples would be the same.*--temperature"),
        (["--sequences", "8", "--budget", "7"], "budget of 7 .* too small for 8 sequences"),
        (["--map", "blocks.png"], "ends in .svg"),
    ],
)
def test_bad_options_are_one_sentence_before_any_text(call, options, words):
    check_error(call(["hello", "a"], *options), words)


def test_a_bad_prompt_is_an_error_of_its_own(call):
    assert numbers(check_bad_prompts(call))["leaked"] == 0


def test_a_prompt_that_never_fits_is_refused_with_all_its_samples(call):
    options = ("--block-size", "4", "--kv-memory", "10KiB", "--samples", "2", "--temperature", "1")
    status, out, err = call(["hello", "a" * 20], *options, "--max-tokens", "9")
    assert status == 2 and sorted(answers(out)) == [1, 2]  # as they end
    assert len(re.findall("error: prompt [34]: .* takes 7 blocks of 4 tokens", err)) == 2


def test_memory_that_the_system_does_not_give(call, monkeypatch):
    monkeypatch.setattr(stage, "free_memory", lambda device="cpu": 2**60)  # beyond any address
    options = ("--block-size", "1000000", "--preemption", "recompute")
    result = call(["a"], "--kv-memory", "900000GB", *options)
    check_error(result, r"\d+ GiB of memory .* cannot be allocated: give a smaller ")
