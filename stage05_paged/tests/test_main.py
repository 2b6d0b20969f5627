"""The command of stage 05: prompts that share memory, and the map of the blocks."""

from __future__ import annotations

import re
import sys

from stage01_forward.params import SamplingParams
from stage03_batching.tests.commands import CommandContract, answers
from stage04_continuous.tests.test_main import loaded
from stage05_paged import __main__ as stage
from stage05_paged.tests.engines import engine_of

SMALL = ("--block-size", "4", "--kv-memory", "28KiB", "--every", "1")  # 14 blocks of 2 KiB
HAPPENED = {  # options, and what is counted then
    (): "",
    ("--block-size", "1", "--max-num-seqs", "2", "--every", "100"): "hits",
    SMALL: "preemptions recomputed evicted",
    (*SMALL, "--swap-memory", "28KiB", "--max-chunk", "3"): "preemptions swapped",
    (*SMALL, "--swap-memory", "4KiB"): "preemptions",
}


def numbers(err: str) -> dict[str, float]:
    """The last line of a run: what it reports on memory. No block may leak."""
    match = re.search(
        r"\n\[at most (?P<peak>\d+) of (?P<blocks>\d+) blocks in use; hit rate (?P<hits>[\d.]+) %, "
        r"(?P<copies>\d+) copied, (?P<evicted>\d+) evicted; (?P<preemptions>\d+) preemptions, "
        r"(?P<recomputed>\d+) to recompute and (?P<swapped>\d+) swapped; 0 blocks leaked\]\n$",
        err,
    )
    assert match, err
    return {name: float(value) for name, value in match.groupdict().items()}


class TestCommand(CommandContract):
    stage = stage
    always = ("--sanitize",)
    runs = tuple(HAPPENED)
    refused = {
        "--kv-memory 900000GB": "900000GB of memory is more than the .* free",
        "--kv-memory 0": "A block of 16 tokens of model takes 8.0 KiB.* has 0 bytes",
        "--kv-memory 20KB --block-size 100": "A block of 100 tokens.* smaller blocks",
        "--swap-memory 1KB": "A block of 16 tokens of model takes 8.0 KiB.* has 1000 bytes",
        "--samples 2": "temperature 0 all 2 samples would be the same.*--temperature",
    }

    def check_run(self, err, options):
        counts = numbers(err)
        assert all(counts[name] for name in HAPPENED[options].split()), counts
        assert 0 < counts["peak"] <= counts["blocks"]

    def check_story(self, err):
        """Sharing, eviction and preemption with the default memory."""
        counts = numbers(err)
        assert counts["hits"] > 25 and counts["evicted"] > 5 and counts["preemptions"] > 2

    def test_the_first_line_has_bytes_blocks_and_whole_contexts(self, call):
        err = call(["hello"], *SMALL)[2]
        room = "room for 1 whole context of 48 tokens; at most 8 sequences at a time"
        assert err.startswith(f"[KV cache: 28.0 KiB in 14 blocks of 4 tokens; {room}; no swap]\n")

    def test_samples_are_what_as_many_equal_prompts_would_be(self, call):
        options = ("--temperature", "1", "--max-tokens", "9", "--seed", "5", "--block-size", "4")
        status, out, err = call(["hello you!", "a"], *options, "--every", "4", "--samples", "3")
        apart = call(["hello you!"] * 3 + ["a"] * 3, *options)[1]
        assert status == 0 and answers(out) == answers(apart)
        assert len(set(answers(out).values())) == 6
        # The last block of the first prompt is half full and shared by three: two of them copy it.
        assert numbers(err)["copies"] == 2


def test_a_terminal_shows_the_blocks_of_each_step(tiny_model, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    prompts = ["a" * 20, "b", "a" * 19 + "c", "d", "ab", "cd", "dd", "ac"]
    engine = engine_of(6, 10, tiny_model, 16, swap_blocks=16, policy="priority")
    sampling = SamplingParams(25, ignore_eos=True)
    run = stage.Show(engine, loaded(tiny_model), [(text, 25) for text in prompts], sampling)
    assert run.run(1) == 0
    err, owned = capsys.readouterr().err, [step.memory for step in engine.steps]
    lines = re.findall(r"^step +\d+ \| (.{16}) \| \d+ sequences, ", err, re.MULTILINE)
    assert len(lines) == run.steps and {*"".join(lines)} > {*"#+.a"} and "#" in run.key
    assert run.peak == max(owned) > owned[-1]
