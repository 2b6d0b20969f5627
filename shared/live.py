"""Several texts that grow at once: kept, shown in the terminal while they grow, and printed at the end.

The stages that run more than one prompt share this. What an engine is doing differs from stage to stage, so a stage draws
its own lines; here is what keeps them on the screen: one line each, cut to the width, never more than the terminal is high.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.text import Text

from . import cli
from .errors import UserError

FRAMES = 12  # drawn a second, at most: each takes milliseconds, in which no token is made

Draw = Callable[[int, int], Sequence[Text]]


class Answer:
    """One of several prompts, and what has come of it.

    number: its place in the line, from 1, by which it is named. output: the engine's, with `token_ids`, `finish_reason` and
    `error`; None until an engine has the prompt, and for ever if the prompt cannot be cut into tokens.
    """

    def __init__(self, number: int, prompt: str, loaded: cli.Loaded) -> None:
        self.number = number
        self.output: Any = None
        self.ids: list[int] = []  # of the prompt
        self._unfit: str | None = None
        try:
            self.ids = loaded.tokenizer.encode(prompt)
        except UserError as error:
            self.refuse(error)
        self._text = loaded.tokenizer.decode(self.ids)
        self._decoder = cli.AnswerDecoder(loaded)
        self._read = 0

    def refuse(self, error: UserError) -> None:
        """The prompt gets no answer."""
        self._unfit = str(error)

    @property
    def error(self) -> str | None:
        """Why there is no answer, or no more of it."""
        return self._unfit or (self.output.error if self.output else None)

    @property
    def finish_reason(self) -> str | None:
        """As the engine gave it, or "error"; None while the answer waits or grows."""
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
            self._text += "".join(map(self._decoder.push, new)) + (
                self._decoder.flush() if self.finish_reason else ""
            )
        return self._text

    def print(self) -> None:
        """All of the text, under its number, on standard output; or the error, on standard error."""
        if self.error:
            print(f"error: prompt {self.number}: {self.error}", file=sys.stderr, flush=True)
        else:
            print(f"--- prompt {self.number} ---\n{self.text()}\n", flush=True)


def summary(answers: Sequence[Answer], steps: int, seconds: float, loaded: cli.Loaded) -> str:
    """One line: tokens, steps, seconds and tokens per second, why the answers ended, and what it ran on.

    seconds: those of the engine's steps. The drawing is not its fault.
    """
    tokens = sum(answer.tokens for answer in answers)
    reasons = Counter(answer.finish_reason for answer in answers)
    ended = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items(), key=str))
    count = f"{len(answers)} prompt{'s' if len(answers) > 1 else ''}"
    speed = (
        f"{tokens} tokens in {steps} steps and {seconds:.2f} s, {tokens / (seconds or 1):.1f} tok/s"
    )
    return f"[{count}, {speed}, finish reasons: {ended}; {loaded}]"


# ---- the screen -------------------------------------------------------------------------------------------------


class Screen:
    """A part of the terminal that is drawn over and over, and is gone at the end.

    draw: (width, height) -> lines made by `line`. What is more than the terminal's height is cut off. Where standard output
    is no terminal, `shown` is False and nothing is ever drawn.
    """

    def __init__(self, draw: Draw) -> None:
        self.shown = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._next = 0.0
        self._live = Live(
            _View(draw),
            console=Console(force_terminal=True, highlight=False)
            if self.shown
            else Console(quiet=True),
            auto_refresh=False,  # a thread that draws when it likes would take its time from the step that is running
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )

    def __enter__(self) -> Screen:
        if self.shown:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            self._live.stop()

    def refresh(self) -> None:
        """Draw anew, if the last time is long enough ago. Cheap, so that it may be called after every token."""
        if self.shown and (now := time.perf_counter()) >= self._next:
            self._live.refresh()
            self._next = now + 1 / FRAMES


class _View:
    """Asks for the lines at the moment of drawing: the terminal may have changed its size since the last time."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = max(
            1, console.size.height - 1
        )  # the cursor stands below the last line, and must not make the screen scroll
        yield Group(*self.draw(options.max_width, height)[:height])


def line(width: int, *cells: tuple[str, int, str], text: str = "", style: str = "") -> Text:
    """One line: cells of (words, width, style), then as much of the end of `text` as there is room for."""
    drawn = Text(no_wrap=True, overflow="crop")
    for words, size, look in cells:
        drawn.append(set_cell_size(_clean(words), max(0, min(size, width - drawn.cell_len))), look)
    drawn.append(tail(text, width - drawn.cell_len), style)
    return drawn


def tail(text: str, width: int) -> str:
    """The end of a text, at most `width` cells of it, on one line and harmless to the terminal."""
    if width < 1:
        return ""
    end = _clean(text[-width:])
    while cell_len(end) > width:  # letters of some scripts are two cells wide
        end = end[1:]
    return end


def visible(answers: Sequence[Answer], room: int) -> list[Answer]:
    """At most `room` of the answers, in their order: those that have ended give way first, then those at the end."""
    ended = [answer for answer in answers if answer.finish_reason]
    gone = set(ended[: max(0, len(answers) - room)])
    return [answer for answer in answers if answer not in gone][: max(0, room)]


def _clean(text: str) -> str:
    # A model may say any character: an escape sequence must not reach the terminal, and a newline must not make two lines.
    return "".join(letter if letter.isprintable() else " " for letter in text)
