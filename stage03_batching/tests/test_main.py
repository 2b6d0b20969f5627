"""The command of stage 03: prompts in one batch, and what was wasted."""

from __future__ import annotations

from stage03_batching import __main__ as stage

from .commands import CommandContract


class TestCommand(CommandContract):
    stage = stage
    refused = {"--top-k 301": "top_k", "--prompts no-such-file": "no-such-file is missing"}
    story = ("--max-tokens", "12", "--dtype", "float64")

    def check_run(self, err, options):
        """6 prompts of 16 columns, and 8 passes of 6 rows that end together."""
        wasted = "53 padded tokens in prefill and 0 idle row-steps in decode, 36.8 % of all 144"
        assert " in 9 steps and " in err and f"[wasted: {wasted}" in err

    def check_story(self, err):
        assert "[wasted: " in err

    def test_rows_that_end_early_idle_and_the_count_is_that_of_the_records(self, call):
        """The first row is at the end of the context after 2 tokens."""
        status, _, err = call(["a" * 46, "b"], "--max-tokens", "20")
        assert status == 0 and "of all 130 tokens" in err
        assert "[wasted: 45 padded tokens in prefill and 18 idle row-steps in decode" in err
