"""Several prompts on the command line: run them, and print the steps and the answers.

Stages 03, 04 and 05 print their answers with it. `Show` is a run in which prompts arrive over time,
for engines with `add` and `step`, as in stages 04 and 05.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from . import cli
from .errors import UserError

BUDGET, EVERY = 64, 6  # defaults: tokens a step, steps from one arrival to the next


def print_answer(number: int, output: Any, loaded: cli.Loaded) -> None:
    """Print prompt and answer under their number, counted from 1; or the error, on standard
    error. output: the engine's, which has ended."""
    if output.error:
        print(f"error: prompt {number}: {output.error}", file=sys.stderr, flush=True)
        return
    answer = [id for id in output.token_ids if id not in loaded.config.eos_ids]
    text = loaded.tokenizer.decode([*output.prompt_ids, *answer])
    print(f"--- prompt {number} ---\n{text}\n", flush=True)


def summary(outputs: Sequence[Any], steps: int, seconds: float, loaded: cli.Loaded) -> str:
    """One line: tokens, steps and their seconds, tokens per second, finish reasons, and the
    machine."""
    tokens = sum(len(output.token_ids) for output in outputs)
    reasons = Counter(output.finish_reason for output in outputs)
    ended = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    count = f"{len(outputs)} prompt{'s' if len(outputs) > 1 else ''}"
    rate = f"{tokens / (seconds or 1):.1f} tok/s"
    speed = f"{tokens} tokens in {steps} steps and {seconds:.2f} s, {rate}"
    return f"[{count}, {speed}, finish reasons: {ended}; {loaded}]"


def add_options(parser: argparse.ArgumentParser, row: str, policies: Sequence[str]) -> Any:
    """Add the options of a `Show`; returns their group, for the stage's own options.

    row: "slot" or "sequence". policies: of the scheduler, the default first.
    """
    group = parser.add_argument_group("several prompts")
    cli.add_prompts(group)
    option, whole = group.add_argument, cli.whole_number(1, cli.MOST_TOKENS)
    about = f"most tokens computed in a step; default: {BUDGET}, or one per {row} if that is more"
    option("--max-num-batched-tokens", type=whole, metavar="N", help=about)
    about = "most tokens of one prompt in a step; default: the rest of the budget"
    option("--max-chunk", type=whole, metavar="N", help=about)
    about = "order of the waiting prompts: first come, first served; or every third goes first"
    option("--policy", choices=policies, default=policies[0], help=about)
    about = "a prompt arrives every N steps, and at once if the engine is idle"
    option("--every", type=whole, default=EVERY, metavar="N", help=about)
    return group


def scheduling(options: argparse.Namespace, rows: int) -> dict[str, Any]:
    """The scheduler's settings in the options of `add_options`, for `rows` rows at a time."""
    budget = options.max_num_batched_tokens or max(BUDGET, rows)
    return {"token_budget": budget, "policy": options.policy, "max_chunk": options.max_chunk}


class Show:
    """A run of several prompts that arrive over time: makes the steps, and prints the answers; on a
    terminal each step, too.

    engine: has `step()`, a record of each step in `steps`, and unfinished `requests`. prompts: the
    text and the most tokens of each.

    A stage's subclass has `add(ids, params, number, priority)`, which passes a prompt to the engine
    as request `number`, or its samples from that number on, and returns the requests, or raises
    UserError; `line()`, about the last step; `key`, which explains the lines; and `report()`, a
    line about the whole run.
    """

    add: Callable[..., list[Any]]
    line: Callable[[], str]
    report: Callable[[], str]
    key: str

    def __init__(
        self, engine: Any, loaded: cli.Loaded, prompts: Sequence[tuple[str, int]], sampling: Any
    ) -> None:
        self.engine, self.loaded, self.sampling = engine, loaded, sampling
        self.coming, self.arrived = deque(prompts), 0
        self.outputs: list[Any] = []  # of the prompts that have arrived
        self.unprinted: dict[int, Any] = {}  # some of them by their number
        self.steps, self.seconds = 0, 0.0  # of the whole run; the engine keeps recent records only

    def count(self, record: Any) -> None:
        """Add the record of a step to the totals."""
        self.steps, self.seconds = self.steps + 1, self.seconds + record.seconds

    def run(self, every: int) -> int:
        """Answer all prompts, one more of which arrives every `every` steps, and at once if none is
        left to do; print each answer when it ends. Returns the exit status: 2 if one failed."""
        shown, requests = sys.stderr.isatty(), self.engine.requests
        if shown:
            print(f"({self.key})", file=sys.stderr)
        while self.coming or requests:
            due = self.steps % every == 0
            while self.coming and (due or not requests):
                self.arrive(*self.coming.popleft())
                due = False
            if requests:
                self.engine.step()
                self.count(self.engine.steps[-1])
                if shown:
                    print(f"step {self.steps:>4} |{self.line()}", file=sys.stderr)
            for number in [n for n, output in self.unprinted.items() if output.finish_reason]:
                print_answer(number, self.unprinted.pop(number), self.loaded)
        print(summary(self.outputs, self.steps, self.seconds, self.loaded), file=sys.stderr)
        print(self.report(), file=sys.stderr)
        return cli.EXIT_ERROR if any(output.error for output in self.outputs) else 0

    def arrive(self, text: str, limit: int) -> None:
        """Pass a prompt to the engine; every third one is urgent."""
        self.arrived += 1
        number = len(self.outputs) + 1
        priority = 0 if self.arrived % 3 == 0 else 1  # 0 is urgent
        params = replace(self.sampling, max_tokens=min(limit, self.sampling.max_tokens))
        try:
            ids = self.loaded.tokenizer.encode(text)
            outputs: list[Any] = [r.output for r in self.add(ids, params, number, priority)]
        except UserError as error:
            outputs = [SimpleNamespace(token_ids=[], finish_reason="error", error=str(error))]
        self.outputs += outputs
        self.unprinted |= enumerate(outputs, number)
