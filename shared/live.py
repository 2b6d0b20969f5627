"""Several prompts on the command line: run them, show their answers as they grow, print them.

Stages 03, 04 and 05 print their answers with it. `Show` is a run in which prompts arrive over time,
for engines with `add` and `step`, as in stages 04 and 05. On a terminal it draws a line an answer.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from . import cli
from .errors import UserError

FRAME = 1 / 12  # seconds at least: while one is drawn, for milliseconds, no token is computed
BUDGET, EVERY = 64, 6  # defaults: tokens a step, steps from one arrival to the next
PAUSE = 0.02  # seconds after a step: without it, the built-in prompts end before a reader sees them
URGENT, NORMAL = 0, 1  # priorities
COLOURS = ("green", "yellow", "blue", "magenta", "cyan", "red")
WAITS, UNPLANNED = ("waits", "dim"), ("no budget left", "yellow")

State = tuple[str, str]  # what an answer's request does, and the style to show it in


# ---- answers ------------------------------------------------------------------------------------


class Answer:
    """One of several prompts, and its answer so far.

    number: counted from 1, the prompt's name in output and errors. ids: the prompt's tokens.
    output: the engine's, with `token_ids`, `finish_reason` and `error`; None until an engine has
    the prompt.
    """

    def __init__(self, number: int, prompt: str, loaded: cli.Loaded) -> None:
        self.number, self.urgent = number, False
        self.params: Any = None  # of its sampling
        self.output: Any = None
        self.ids: list[int] = loaded.tokenizer.encode(prompt)
        self._text = loaded.tokenizer.decode(self.ids)
        self._decoder = cli.AnswerDecoder(loaded)
        self._read = 0

    @property
    def error(self) -> str | None:
        """Why there is no answer, or no complete one."""
        return self.output.error if self.output else None

    @property
    def finish_reason(self) -> str | None:
        """The engine's finish reason, or "error"; None while the answer waits or grows."""
        return "error" if self.error else self.output.finish_reason if self.output else None

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.output.token_ids) if self.output else 0

    def text(self) -> str:
        """Prompt and answer so far."""
        if self.output:
            new = self.output.token_ids[self._read :]
            self._read += len(new)
            self._text += "".join(map(self._decoder.push, new))
            self._text += self._decoder.flush() if self.finish_reason else ""
        return self._text

    def print(self) -> None:
        """Print the whole text under its number; or the error, on standard error."""
        if self.error:
            print(f"error: prompt {self.number}: {self.error}", file=sys.stderr, flush=True)
        else:
            print(f"--- prompt {self.number} ---\n{self.text()}\n", flush=True)


def summary(answers: Sequence[Answer], steps: int, seconds: float, loaded: cli.Loaded) -> str:
    """One line: tokens, steps, seconds and tokens per second, finish reasons, and the machine.

    seconds: of the engine's steps alone, without the drawing.
    """
    tokens = sum(answer.tokens for answer in answers)
    reasons = Counter(answer.finish_reason or "unfinished" for answer in answers)
    ended = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    count = f"{len(answers)} prompt{'s' if len(answers) > 1 else ''}"
    rate = f"{tokens / (seconds or 1):.1f} tok/s"
    speed = f"{tokens} tokens in {steps} steps and {seconds:.2f} s, {rate}"
    return f"[{count}, {speed}, finish reasons: {ended}; {loaded}]"


# ---- a run --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser, row: str, policies: Sequence[str]) -> Any:
    """Add the options of a `Show`; returns their group, for the stage's own options.

    row: "slot" or "sequence". policies: of the scheduler, the default first.
    """
    group = parser.add_argument_group("several prompts")
    cli.add_prompts(group)
    option, whole = group.add_argument, cli.whole_number(1, cli.MOST_TOKENS)
    about = f"most tokens computed in a step, at least one per {row}; default: {BUDGET}, or the "
    about += f"number of {row}s if that is more"
    option("--max-num-batched-tokens", type=whole, metavar="N", help=about)
    about = "most tokens of one prompt in a step; default: the rest of the budget"
    option("--max-chunk", type=whole, metavar="N", help=about)
    about = "order of the waiting prompts: fcfs is first come, first served; priority makes every "
    about += "third prompt urgent, marked !, and takes those first"
    option("--policy", choices=policies, default=policies[0], help=about)
    about = "a prompt arrives every N steps, and at once if the engine is idle"
    option("--every", type=whole, default=EVERY, metavar="N", help=about)
    return group


def scheduling(options: argparse.Namespace, rows: int) -> dict[str, Any]:
    """The scheduler's settings in the options of `add_options`, for `rows` rows at a time."""
    budget = options.max_num_batched_tokens or max(BUDGET, rows)
    return {"token_budget": budget, "policy": options.policy, "max_chunk": options.max_chunk}


class Show:
    """A run of several prompts that arrive over time: makes the steps, shows and prints answers.

    engine: has `step()`, a record of each step in `steps`, and unfinished `requests`. prompts: the
    text and the most tokens of each; each is answered `samples` times.

    A stage's subclass has `add(answers, params, priority)`, which passes the samples of one prompt
    to the engine under their numbers and returns their requests, or raises UserError; `head()`,
    lines on the last step; `states()`, what requests did in it, by their ids (others wait); and
    `report()`, a line about the whole run.
    """

    add: Callable[..., list[Any]]
    head: Callable[[], str]
    states: Callable[[], dict[str, State]]
    report: Callable[[], str]

    def __init__(
        self,
        engine: Any,
        loaded: cli.Loaded,
        prompts: Sequence[tuple[str, int]],
        sampling: Any,
        samples: int = 1,
    ) -> None:
        self.engine, self.loaded = engine, loaded
        self.answers: list[Answer] = []
        self.coming: deque[list[Answer]] = deque()  # the samples of a prompt arrive together
        for text, limit in prompts:
            first = len(self.answers)
            group = [Answer(first + n, text, loaded) for n in range(1, samples + 1)]
            for answer in group:
                params = cli.sampling_of(sampling, answer.number - 1)
                answer.params = replace(params, max_tokens=min(limit, params.max_tokens))
            self.answers += group
            self.coming.append(group)
        self.arrived = 0  # prompts
        self.steps, self.seconds = 0, 0.0  # of the whole run; the engine keeps recent records only

    def count(self, record: Any) -> None:
        """Add the record of a step to the totals."""
        self.steps, self.seconds = self.steps + 1, self.seconds + record.seconds

    def run(self, options: argparse.Namespace, built_in: bool = False) -> int:
        """Answer all prompts, show and print them. Returns the exit status: 2 if one failed, 130
        after Ctrl-C, which ends the run with a summary.

        built_in: the prompts are the stage's own. Their answers are too short to be worth reading,
        so on a terminal they are not printed, and PAUSE follows each step.
        """
        unprinted, drawn, interrupted = list(self.answers), 0.0, False
        console = Console(highlight=False)
        shown = console.is_terminal and not console.is_dumb_terminal
        # auto_refresh: a drawing thread would take its time from a running step
        screen = Live(console=console, auto_refresh=False, transient=True)
        with screen if shown else nullcontext():
            try:
                while self.step(options.every):
                    if not shown:
                        unprinted = print_ended(unprinted)
                    elif (now := time.perf_counter()) >= drawn + FRAME:
                        width, height = console.size
                        lines = self.view(width, height - 1)[: height - 1]  # the cursor is below
                        screen.update(Group(*lines), refresh=True)
                        drawn = now
                    if shown and built_in:
                        time.sleep(PAUSE)
            except KeyboardInterrupt:
                interrupted = True
        if not (built_in and shown):
            print_ended(unprinted)
        print(summary(self.answers, self.steps, self.seconds, self.loaded), file=sys.stderr)
        if interrupted:  # unfinished requests still hold their memory: nothing to report
            return cli.EXIT_INTERRUPTED
        print(self.report(), file=sys.stderr)
        return cli.EXIT_ERROR if any(answer.error for answer in self.answers) else 0

    def step(self, every: int) -> bool:
        """Let a prompt arrive if one is due, then make a step; False if nothing is left to do."""
        requests, due = self.engine.requests, self.steps % every == 0
        while self.coming and (due or not requests):
            self.arrive(self.coming.popleft())
            due = False
        if requests_left := bool(requests):
            self.engine.step()
            self.count(self.engine.steps[-1])
        return requests_left

    def arrive(self, answers: list[Answer]) -> None:
        """Pass the samples of a prompt to the engine; every third prompt is urgent."""
        self.arrived += 1
        params, urgent = [answer.params for answer in answers], self.arrived % 3 == 0
        try:
            requests = self.add(answers, params, URGENT if urgent else NORMAL)
        except UserError as error:
            for answer in answers:
                answer.output = SimpleNamespace(token_ids=[], error=str(error))
            return
        for answer, request in zip(answers, requests, strict=True):
            answer.output = request.output
            answer.urgent = urgent and self.engine.scheduler.policy == "priority"

    def view(self, width: int, height: int) -> list[Text]:
        """Lines for the terminal; none before the first step: the head, and a line for each answer
        with its number, marked if it is urgent, state, tokens, and newest text. If not all fit,
        those that ended are left out first."""
        if not self.steps:
            return []
        answers = [answer for answer in self.answers if answer.error or answer.output]
        tokens = sum(answer.tokens for answer in answers)
        rate = f"{tokens / self.seconds:.1f} tok/s; {sum(map(len, self.coming))} still to come"
        lines = [line(width, (words, width, "")) for words in (*self.head().split("\n"), rate)]
        room, states = max(0, height - len(lines)), self.states()
        alive = sorted(answers, key=lambda answer: answer.finish_reason is not None)[:room]
        for answer in [answer for answer in answers if answer in alive]:
            words, look = states.get(str(answer.number), WAITS)
            if answer.finish_reason:
                words, look = f"ended: {answer.finish_reason}", "dim"
            number = f"{answer.number:>4}{'!' * answer.urgent}"
            cells = (number, 6, "bold"), (words, 28, look), (f"{answer.tokens:>5}", 7, look)
            lines.append(line(width, *cells, text=answer.error or answer.text()))
        return lines


def state(record: Any) -> State:
    """What a request did in a step, by its record."""
    if record.prefill_tokens:
        return f"prefill {record.prefill_tokens}", "yellow"
    return "decode", "green"


def print_ended(answers: Sequence[Answer]) -> list[Answer]:
    """Print the answers that have ended; returns the others."""
    for answer in answers:
        if answer.finish_reason:
            answer.print()
    return [answer for answer in answers if not answer.finish_reason]


# ---- lines --------------------------------------------------------------------------------------


def line(width: int, *cells: tuple[str, int, str], text: str = "") -> Text:
    """One line: cells of (words, width, style), then as much of the end of `text` as fits."""
    drawn = Text(no_wrap=True, overflow="crop")
    for words, size, look in cells:
        drawn.append(set_cell_size(_clean(words), max(0, min(size, width - drawn.cell_len))), look)
    room = max(0, width - drawn.cell_len)
    end = _clean(text)[-room:] if room else ""
    while cell_len(end) > room:  # letters of some scripts are two cells wide
        end = end[1:]
    return drawn.append(end)


def marks(states: Sequence[int], mark: Callable[[int], str]) -> Text:
    """A character for each state, in a colour for each number that is not negative."""
    drawn = Text(no_wrap=True, overflow="crop")
    for state in states:
        drawn.append(mark(state), f"reverse {COLOURS[state % 6]}" if state >= 0 else "dim")
    return drawn


def _clean(text: str) -> str:
    # A model may emit any character: an escape sequence must not reach the terminal, and a newline
    # must not start another line.
    return "".join(letter if letter.isprintable() else " " for letter in text)
