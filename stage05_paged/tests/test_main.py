"""The command line of stage 05: prompts that share memory, the map of the blocks, and what is refused."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from shared import cli, paths
from shared.tests.test_cli import make_folder
from shared.tokenizer import ByteTokenizer
from stage01_forward.sampling import SamplingParams
from stage03_batching.tests.test_main import answers
from stage05_paged import __main__ as stage
from stage05_paged.blockmap import mark
from stage05_paged.blocks import BlockPool
from stage05_paged.engine import Engine
from stage05_paged.scheduler import Scheduler

SMALL = (
    "--block-size",
    "4",
    "--kv-memory",
    "28KiB",
    "--every",
    "1",
)  # 14 blocks of 2 KiB, for the model of `folder`


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("stage05") / "model")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: Path) -> Any:
    """call(lines, *options) -> (status, standard output, standard error) of --prompts with these lines."""

    def run(lines: list[str], *options: str) -> tuple[int, str, str]:
        (tmp_path / "prompts.txt").write_text(
            "".join(f"{line}\n" for line in lines), encoding="utf-8"
        )
        arguments = [
            "--prompts",
            str(tmp_path / "prompts.txt"),
            "--model",
            str(folder),
            "--dtype",
            "float64",
            "--sanitize",
        ]
        with pytest.raises(SystemExit) as exit:
            cli.run(stage.main, [*arguments, *options])
        return (exit.value.code, *capsys.readouterr())  # type: ignore[return-value]

    return run


def show(
    model: Any, prompts: list[str], blocks: int = 100, sequences: int = 6, budget: int = 64, policy: str = "fcfs", most: int = 9,
    samples: int = 1, swap: int = 0,
) -> stage.Show:  # fmt: skip
    loaded = cli.Loaded(
        model, ByteTokenizer(), model.config, "plain", torch.device("cpu"), model.dtype
    )
    swap_pool = BlockPool(swap, 4) if swap else None
    preemption = "swap" if swap else "recompute"
    scheduler = Scheduler(
        BlockPool(blocks, 4), sequences, budget, policy, preemption=preemption, swap_pool=swap_pool
    )
    engine = Engine(model, eos_ids=(), scheduler=scheduler, sanitize=True)
    sampling = SamplingParams(
        max_tokens=most, ignore_eos=True, temperature=float(samples > 1), seed=1
    )
    return stage.Show(engine, loaded, prompts, sampling, samples)


def numbers(err: str) -> dict[str, float]:
    """The last line of a run: what it says of the memory."""
    found = re.search(
        r"\n\[at most (?P<peak>\d+) of (?P<blocks>\d+) blocks in use; hit rate (?P<hits>[\d.]+) %, (?P<copies>\d+) copied, "
        r"(?P<evicted>\d+) evicted; (?P<preemptions>\d+) preemptions, (?P<recomputed>\d+) to recompute and (?P<swapped>\d+) "
        r"swapped; (?P<leaked>\d+) blocks leaked\]\n$",
        err,
    )
    assert found, err
    return {name: float(value) for name, value in found.groupdict().items()}


# ---- what works -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "happened"),
    [
        ((), ()),
        (("--block-size", "1", "--sequences", "2", "--every", "100"), ("hits",)),
        ((*SMALL, "--preemption", "recompute"), ("preemptions", "recomputed", "evicted")),
        (
            (*SMALL, "--preemption", "swap", "--policy", "priority", "--max-chunk", "3"),
            ("preemptions", "swapped"),
        ),
        ((*SMALL, "--swap-memory", "4KiB"), ("preemptions",)),
        ((*SMALL, "--no-prefix-cache", "--watermark", "0.5"), ()),
        (("--no-chunks", "--budget", "20", "--sequences", "3", "--kv-memory", "0.003%"), ()),
    ],
)
def test_every_prompt_is_answered_as_it_would_be_alone(call, folder, capsys, options, happened):
    lines = ["hello", "a", "a longer prompt", "hello", "b", "a longer prompt!"]
    status, out, err = call(lines, "--max-tokens", "9", *options)
    assert status == 0 and sorted(answers(out)) == [1, 2, 3, 4, 5, 6]
    for number, line in enumerate(lines, 1):
        with pytest.raises(SystemExit):
            cli.run(
                stage.main,
                [
                    line,
                    "--model",
                    str(folder),
                    "--dtype",
                    "float64",
                    "--max-tokens",
                    "9",
                    "--sanitize",
                ],
            )
        assert capsys.readouterr().out == answers(out)[number] + "\n"
    speed = r"54 tokens in \d+ steps and \d+\.\d\d s, \d+\.\d tok/s"
    assert re.search(rf"\n\[6 prompts, {speed}, finish reasons: 6 length; model, float64", err)
    found = numbers(err)
    assert (
        found["leaked"] == 0
        and 0 < found["peak"] <= found["blocks"]
        and all(found[name] for name in happened)
    ), found
    if "--no-prefix-cache" in options:
        assert (found["hits"], found["evicted"]) == (0, 0)


def test_the_plan_says_bytes_blocks_and_whole_contexts(call):
    _, _, err = call(["hello"], *SMALL, "--preemption", "recompute")
    assert err.startswith(
        "[KV cache: 28.0 KiB in 14 blocks of 4 tokens; room for 1 whole context of 48 tokens; at most 8 sequences at a time; "
        "no swap]\n"
    )
    _, _, err = call(["hello"])  # 8 contexts of 3 blocks, 8 KiB each
    assert "192.0 KiB in 24 blocks of 16 tokens; room for 8 whole contexts of 48 tokens; " in err
    assert "; swap: 192.0 KiB in 24 blocks]\n" in err
    _, _, err = call(
        ["hello"], "--block-size", "100", "--sequences", "2"
    )  # blocks longer than a context
    assert (
        "in 2 blocks of 100 tokens; room for 2 whole contexts of 48 tokens; at most 2 sequences"
        in err
    )


@pytest.mark.parametrize("size", ["1", "3", "16", "47", "48", "100"])
def test_one_prompt_may_fill_its_context_whatever_the_block_size(folder, capsys, size):
    with pytest.raises(SystemExit):
        cli.run(
            stage.main,
            [
                "hello",
                "--model",
                str(folder),
                "--max-tokens",
                "1000",
                "--block-size",
                size,
                "--sanitize",
            ],
        )
    out, err = capsys.readouterr()
    assert out.startswith("hello") and err.startswith("[43 tokens in ") and err.count("\n") == 1


def test_samples_are_what_as_many_equal_prompts_would_be(call):
    options = (
        "--temperature",
        "1",
        "--max-tokens",
        "9",
        "--seed",
        "5",
        "--block-size",
        "4",
        "--every",
        "4",
    )
    status, out, err = call(["hello you", "a"], *options, "--samples", "3")
    apart = call(["hello you"] * 3 + ["a"] * 3, *options, "--no-prefix-cache")
    assert (
        status == 0 and answers(out) == answers(apart[1]) and len(set(answers(out).values())) == 6
    )
    # The last block of each prompt is begun and shared by three: two of them copy it.
    assert (
        numbers(err)["copies"] == 4 and numbers(apart[2])["copies"] == 0 == numbers(err)["leaked"]
    )


def test_samples_of_one_prompt(folder, capsys):
    arguments = [
        "hello",
        "--model",
        str(folder),
        "--max-tokens",
        "5",
        "--samples",
        "2",
        "--temperature",
        "1",
        "--sanitize",
    ]
    assert stage.main(arguments) == 0
    out, err = capsys.readouterr()
    assert list(answers(out)) == [1, 2] and numbers(err)["copies"] == 1


def test_prompts_arrive_one_at_a_time_and_samples_together(tiny_model):
    run = show(tiny_model, ["ab"] * 3, samples=2, most=30)
    arrived = []
    while run.step(5):
        arrived.append(sum(answer.output is not None for answer in run.answers))
    assert arrived[:12] == [2] * 5 + [4] * 5 + [6] * 2
    lonely = show(
        tiny_model, ["ab"] * 3, most=2
    )  # each has ended long before the next is due, and nobody waits for it
    while lonely.step(1000):
        pass
    assert lonely.steps == 6 and lonely.peak == 1


def test_urgent_prompts_go_first_under_the_policy_alone(tiny_model):
    for policy, order in (("fcfs", [1, 2, 3, 4, 5, 6]), ("priority", [1, 3, 6, 2, 4, 5])):
        run = show(tiny_model, ["ab"] * 6, sequences=1, policy=policy, most=10)
        while run.step(1):
            pass
        started = dict.fromkeys(
            each.request_id for step in run.engine.steps for each in step.sequences
        )
        assert [run.asked[id][0].number for id in started] == order


def test_a_seed_repeats_all_whatever_the_memory(call):
    options = ("--temperature", "1", "--max-tokens", "12", "--block-size", "4", "--seed")
    told = [
        answers(call(["hello"] * 4, *options, "5", "--kv-memory", memory)[1])
        for memory in ("10KiB", "20KiB", "100KiB")
    ]
    assert told[0] == told[1] == told[2] and len(set(told[0].values())) == 4
    assert answers(call(["hello"] * 4, *options, "9")[1]) != told[0]


# ---- the live view ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(110, 30), (60, 10), (30, 3), (5, 1)])
def test_the_view_shows_what_the_records_and_tables_say(tiny_model, width, height):
    prompts = ["a" * 20, "b", "a" * 19 + "c", "d", "ab", "cd", "dd", "ac"]
    run = show(tiny_model, prompts, blocks=16, budget=10, policy="priority", most=25, swap=16)
    assert run.view(width, height) == []
    seen: set[str] = set()
    while run.step(1):
        view = run.view(width, height)
        text = [line.plain for line in view]
        assert all(line.cell_len <= width for line in view) and (height < 8 or len(view) <= height)
        newest, scheduler = run.engine.steps[-1], run.engine.scheduler
        assert text[0].startswith(f"step {run.steps}: {newest.rows} sequences"[:width])
        if height < 30:
            continue
        assert (
            f"{newest.owned_blocks} of 16 blocks in use" in text[0]
            and f"{scheduler.counts.preemptions} preemptions" in text[1]
        )
        assert (
            text[2].startswith(" 0 ")
            and len(text[2].split()[1]) == 16
            and text[4].split()[:2] == ["prompt", "state"]
        )
        rows = [line for line in text[5:] if re.match(r"[a-z] ", line)]
        assert len(rows) == len(
            {*scheduler.running, *(run.asked[each.request_id][1] for each in newest.sequences)}
        )
        for each in newest.sequences:
            answer, request = run.asked[each.request_id]
            (line,) = [line for line in rows if line.startswith(mark(request.arrival))]
            number, *_ = line[1:].split()
            assert int(number) == answer.number and f" {answer.tokens} " in line
            if each.finish_reason:
                assert f"ended: {each.finish_reason}" in line
            else:
                assert (
                    f"prefill {each.prefill_tokens} " if each.prefill_tokens else "decode "
                ) in line
                assert f" {len(scheduler.tables[request].blocks)} " in line
                owned = text[2].split()[1].count(mark(request.arrival))
                assert owned <= len(scheduler.tables[request].blocks)
                seen.add("prefill" if each.prefill_tokens else "decode")
        waiting, ended = text[-2:]
        assert f"{len(run.coming)} still to come" in waiting and ended.startswith("ended: ")
        assert ("nobody" in waiting) == (newest.waiting == 0)
        assert waiting.count("(swapped out)") == newest.swapped
        seen.update(word for word in ("swapped out", "!") if word in waiting)
        seen.update(sign for sign in "#+." if sign in text[2].split()[1])
    if height == 30:
        assert seen == {"prefill", "decode", "swapped out", "!", "#", "+", "."}
        assert "1 length" in text[-1]


def test_the_view_tells_samples_and_those_who_compute_again(tiny_model):
    run = show(
        tiny_model, ["a" * 30, "b" * 9], blocks=14, sequences=4, budget=8, samples=3, most=12
    )
    seen: set[str] = set()
    while run.step(2):
        text = "\n".join(line.plain for line in run.view(100, 30))
        seen.update(
            words
            for words in ("(for 1)", "(for 4)", "prompt is shared", "(again)")
            if words in text
        )
    assert seen == {"(for 1)", "(for 4)", "prompt is shared", "(again)"}
    assert run.engine.scheduler.counts.recomputed and not run.engine.scheduler.pool.owned


def test_more_sequences_than_lines_are_counted(tiny_model):
    run = show(tiny_model, ["ab"] * 12, sequences=12)
    while run.coming:
        run.arrive(run.coming.popleft())
    assert run.step(1) and len(run.engine.steps[-1].sequences) == 12
    text = [line.plain.strip() for line in run.view(80, 12)]
    assert len(text) == 12
    (told,) = [line for line in text if line.endswith("more sequences")]
    named = sum(bool(re.match(r"[a-z] ", line)) for line in text)
    assert 0 < named < 12 and told == f"and {12 - named} more sequences"


@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminals")
def test_on_a_real_terminal_the_view_goes_and_the_texts_stay(folder, tmp_path):
    import pty

    (tmp_path / "prompts.txt").write_text("hello\n" * 30, encoding="utf-8")
    main, side = pty.openpty()  # type: ignore[attr-defined, unused-ignore]
    command = [
        sys.executable,
        "-m",
        "stage05_paged",
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--model",
        str(folder),
    ]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "60", "LINES": "12"}
    process = subprocess.Popen(
        [*command, "--sequences", "20", "--pause", "0.002", "--threads", "1", "--max-tokens", "9", "--sanitize"],
        cwd=paths.ROOT, env=environment, stdin=side, stdout=side, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(side)
    said = b""
    try:
        while chunk := os.read(main, 65536):
            said += chunk
    except OSError:  # so Linux reports the end
        pass
    finally:
        os.close(main)
    assert process.stderr is not None
    with process.stderr as stream:
        assert b"[30 prompts, " in stream.read() and process.wait(60) == 0
    drawn, _, texts = (
        said.decode().replace("\r\n", "\n").partition("\x1b[?25h")
    )  # the cursor comes back: the view is over
    frames = drawn.split("\x1b[1A")  # how the cursor goes back up
    assert (
        "step 1: " in drawn
        and "still to come" in drawn
        and max(frame.count("\n") for frame in frames) <= 11
    )
    assert list(answers(texts[texts.index("---") :])) == list(range(1, 31))


# ---- the map ----------------------------------------------------------------------------------------------------


def test_the_map_is_written(call, tmp_path):
    path = tmp_path / "blocks.svg"
    status, out, err = call(["hello", "a", "b"], "--max-tokens", "9", "--map", str(path))
    assert status == 0 and err.endswith(f"[written: {path}]\n")
    steps = re.search(r"in (\d+) steps", err)
    assert steps and f"24 blocks of 16 tokens, {steps[1]} passes" in path.read_text("utf-8")
    assert ElementTree.fromstring(path.read_bytes()).tag.endswith("svg")


def test_one_prompt_can_have_it_too_and_says_the_same(folder, tmp_path, capsys):
    arguments = [
        "hello there",
        "--model",
        str(folder),
        "--max-tokens",
        "5",
        "--max-chunk",
        "4",
        "--sanitize",
    ]
    assert stage.main(arguments) == 0
    plain = capsys.readouterr().out
    assert stage.main([*arguments, "--map", str(tmp_path / "a.svg")]) == 0
    assert capsys.readouterr().out == plain
    assert "3 blocks of 16 tokens, 7 passes" in (tmp_path / "a.svg").read_text(
        "utf-8"
    )  # 3 for the prompt


def test_a_long_run_is_cut_and_says_so(call, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "MOST_CELLS", 24 * 5)
    call(["hello"], "--max-tokens", "9", "--map", str(tmp_path / "a.svg"))
    assert "the first 5 of 9 passes" in (tmp_path / "a.svg").read_text("utf-8")


def test_nothing_is_written_where_nothing_was_run(call, tmp_path):
    status, out, err = call(["a" * 48], "--map", str(tmp_path / "a.svg"))
    assert (
        (status, out) == (2, "") and "no step was made" in err and not (tmp_path / "a.svg").exists()
    )


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-memory", "lots"], "'lots' is not a valid size"),
        (["--kv-memory", ""], "'' is not a valid size"),
        (["--kv-memory", "-1"], "'-1' is not a valid size"),
        (["--kv-memory", "900TB"], "'900TB' is not a valid size"),
        (["--kv-memory", "900000GB"], "900000GB of memory is more than the .* free"),
        (["--kv-memory", "101%"], "101% of memory is more than"),
        (["--kv-memory", "0"], "A block of 16 tokens of model takes 8.0 KiB.* has 0.0 KiB"),
        (["--kv-memory", "1KB"], "more memory, or choose smaller blocks"),
        (["--kv-memory", "20KB", "--block-size", "100"], "A block of 100 tokens"),
        (["--block-size", "0"], "--block-size.*'0'.*from 1"),
        (["--block-size", "1.5"], "--block-size"),
        (["--watermark", "1"], "--watermark.*'1'.*from 0 to 0.99"),
        (["--watermark", "nan"], "--watermark"),
        (["--preemption", "drop"], "--preemption.*drop.*auto.*recompute.*swap"),
        (["--preemption", "swap", "--swap-memory", "0"], "no memory to swap to"),
        (
            ["--preemption", "recompute", "--swap-memory", "1MB"],
            "nothing is swapped.*--swap-memory",
        ),
        (
            ["--swap-memory", "1KB"],
            "A block takes 8.0 KiB, and --swap-memory is 1.0 KiB.*0 for none",
        ),
        (["--swap-memory", "x"], "'x' is not a valid size"),
        (["--samples", "0"], "--samples.*'0'"),
        (["--samples", "2"], "temperature 0 all 2 samples would be the same.*--temperature"),
        (["--sequences", "0"], "--sequences.*'0'.*from 1 to 4096"),
        (["--sequences", "8", "--budget", "7"], "budget of 7 .* too small for 8 sequences"),
        (["--budget", "0"], "--budget"),
        (["--every", "0"], "--every.*'0'"),
        (["--max-chunk", "0"], "--max-chunk"),
        (["--max-chunk", "3", "--no-chunks"], "not allowed with"),
        (["--policy", "random"], "--policy.*random.*fcfs.*priority"),
        (["--pause", "-1"], "--pause"),
        (["--top-k", "301"], "top_k"),
        (["--map", "."], "is a folder"),
        (["--map", "no/such/blocks.svg"], "does not exist"),
        (["--map", "blocks.png"], "ends in .svg"),
        (["--prompts", "no-such-file"], "no-such-file cannot be read"),
    ],
)
def test_bad_options_are_one_sentence_before_any_text(call, options, words):
    status, out, err = call(["hello", "a"], *options)
    assert (
        (status, out) == (2, "")
        and err.startswith("error: ")
        and err.count("\n") == 1
        and err.endswith(".\n")
    ), err
    assert re.search(words, err), err


def test_a_bad_prompt_is_an_error_and_the_others_go_on(call):
    lines = ["hello", "", "a" * 48, "b", "c" * 30]
    status, out, err = call(lines, "--max-tokens", "4", "--no-chunks", "--budget", "20")
    assert status == 2 and sorted(answers(out)) == [1, 4]
    errors = {line.split(": ")[1]: line for line in err.splitlines() if line.startswith("error: ")}
    assert list(errors) == ["prompt 2", "prompt 3", "prompt 5"]
    assert (
        "empty" in errors["prompt 2"]
        and "48 tokens" in errors["prompt 3"]
        and "allow chunks" in errors["prompt 5"]
    )
    assert "3 error, 2 length" in err and numbers(err)["leaked"] == 0


def test_a_prompt_that_never_fits_is_refused_at_once_with_the_numbers(call, folder, capsys):
    status, out, err = call(
        ["hello", "a" * 20], "--block-size", "4", "--kv-memory", "10KiB", "--max-tokens", "9"
    )
    assert status == 2 and list(answers(out)) == [1]
    assert re.search(
        r"error: prompt 2: .* takes 7 blocks of 4 tokens, and there are 5: ask for at most 1 tokens",
        err,
    )
    status, out, err = call(
        ["a" * 20],
        "--block-size",
        "4",
        "--kv-memory",
        "10KiB",
        "--samples",
        "2",
        "--temperature",
        "1",
    )
    assert (status, out) == (2, "") and err.count("error: prompt") == 2 and "2 error" in err


def test_memory_that_the_system_does_not_give(call, monkeypatch):
    monkeypatch.setattr(
        stage, "free_memory", lambda device="cpu": 2**60
    )  # more than any address can name
    status, out, err = call(
        ["a"], "--kv-memory", "900000GB", "--block-size", "1000000", "--preemption", "recompute"
    )
    assert (status, out) == (2, "") and re.fullmatch(
        r"error: \d+ GiB of memory .* cannot be had: give a smaller .*\n", err
    ), err


def test_help_explains_the_options(call):
    status, out, _ = call([], "--help")
    own = {
        *(
            "--prompts",
            "--samples",
            "--sequences",
            "--budget",
            "--max-chunk",
            "--no-chunks",
            "--policy",
            "--every",
            "--pause",
        ),
        *(
            "--map",
            "--kv-memory",
            "--block-size",
            "--watermark",
            "--preemption",
            "--swap-memory",
            "--no-prefix-cache",
            "--sanitize",
        ),
    }
    assert (
        status == 0
        and own <= set(re.findall(r"--[a-z-]+", out))
        and "python -m stage05_paged --map blocks.svg" in out
    )


def test_the_built_in_prompts_show_sharing_eviction_and_preemption(capsys, monkeypatch):
    """With the embedded model, no prompt at all, and the memory that is chosen for that."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO())))
    assert stage.main(["--sanitize"]) == 0
    out, err = capsys.readouterr()
    told = answers(out)
    assert sorted(told) == list(range(1, 13))
    assert all(told[number].startswith(text) for number, (text, _) in enumerate(stage.PROMPTS, 1))
    found = numbers(err)
    assert found["leaked"] == 0 and found["peak"] <= found["blocks"]
    assert found["hits"] > 25 and found["evicted"] > 5 and found["preemptions"] > 2
