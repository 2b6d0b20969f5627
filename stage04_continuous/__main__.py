"""Stage 04 on the command line: `python -m stage04_continuous`. Prompts arrive over time, and share a few slots."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
from rich.text import Text

from shared import cli, live
from shared.errors import UserError
from stage01_forward.model import load_model
from stage01_forward.sampling import SamplingParams

from .engine import Engine
from .request import Request
from .scheduler import POLICIES, Scheduler

ABOUT = "Stage 04, continuous batching: texts arrive over time, share a few slots, and leave as soon as they have ended."
SLOTS, BUDGET, EVERY = 4, 64, 6
MOST_SLOTS = 4096
URGENT, NORMAL = 0, 1
MOST_NAMED = 50  # prompts in one line of the live view
PAUSE = (
    0.02  # seconds after a step: the built-in prompts would be over before anybody has seen them
)
# With the most tokens that each may get, so that slots fall free at different times.
PROMPTS = (
    ("Once upon a time", 120),
    ("Long ago, in a village under the cliffs, there lived a girl whose name was", 60),
    ("There was once a merry boy named", 200),
    ("In a house on the hill lived", 30),
    (
        "Once there was a village under the cliffs, and in it lived a girl called Willow. People said that she was "
        "bold, and they were right. Willow always wore a sky blue pair of socks, even on hot days. The wind blew hard "
        "one day, so Willow raced to the hill with a white kite. The kite flew higher and higher, until the string "
        "broke with a snap. Willow looked behind every bush close to the hill, but the white kite was gone.",
        80,
    ),
    ("Once upon a time there lived a polite girl. Her name was", 150),
    ("Once upon a time, in a village by the sea, there lived", 40),
    ("There was once a brave girl named Rosa, and", 100),
    ("Long ago, in a", 25),
    ("In a village by the sea lived Hugo, a merry boy with muddy shoes.", 140),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that only this stage has."""
    group = parser.add_argument_group("several prompts")
    cli.add_prompts(group)
    group.add_argument(
        "--slots",
        type=cli.whole_number(1, MOST_SLOTS),
        metavar="N",
        help=f"how many answers grow at a time; each takes memory for the whole context; default {SLOTS}, and 1 for one prompt",
    )
    group.add_argument(
        "--budget",
        type=cli.whole_number(1, cli.MOST_TOKENS),
        metavar="N",
        help=f"most tokens computed in a step, at least one a slot; default {BUDGET}, or the number of slots if that is more",
    )
    chunks = group.add_mutually_exclusive_group()
    chunks.add_argument(
        "--max-chunk",
        type=cli.whole_number(1, cli.MOST_TOKENS),
        metavar="N",
        help="most tokens of one prompt in a step; default is what the budget has left",
    )
    chunks.add_argument(
        "--no-chunks",
        action="store_true",
        help="compute a prompt whole or not at all, so that none may be longer than the budget",
    )
    group.add_argument(
        "--policy",
        choices=POLICIES,
        default=POLICIES[0],
        help="who gets a free slot: fcfs is first come, first served; with priority, every third prompt is urgent, marked !, and "
        "goes before the others; default %(default)s",
    )
    group.add_argument(
        "--every",
        type=cli.whole_number(1, cli.MOST_TOKENS),
        default=EVERY,
        metavar="N",
        help="a new prompt arrives every N steps, and at once where nothing is left to do; default %(default)s",
    )
    group.add_argument(
        "--pause",
        type=cli.number(0, 60),
        metavar="SECONDS",
        help=f"wait after each step, to watch; it does not count as time; default 0, and {PAUSE:g} for the built-in prompts on a "
        "terminal",
    )
    group.add_argument("--gantt", metavar="FILE.svg", help="draw the slots by steps, as a chart")
    group.add_argument(
        "--trace",
        metavar="FILE.json",
        help="write every step, for ui.perfetto.dev or chrome://tracing",
    )


def main(argv: list[str] | None = None) -> int:
    parser = cli.generation_parser(
        "stage04_continuous",
        ABOUT,
        "--slots 2 --gantt slots.svg",
        "--prompts prompts.txt --every 1",
    )
    add_options(parser)
    options = parser.parse_args(argv)
    outputs: dict[str, Path] = {}
    for name, suffix in (("gantt", ".svg"), ("trace", ".json")):
        if getattr(options, name) is not None:
            outputs[name] = cli.output_file(getattr(options, name), suffix)
    prompts = cli.read_prompts(options)
    sampling = SamplingParams(**cli.sampling_fields(options))
    slots = options.slots or (1 if isinstance(prompts, str) else SLOTS)
    scheduler = Scheduler(
        slots,
        options.budget or max(BUDGET, slots),
        options.policy,
        options.max_chunk,
        chunked=not options.no_chunks,
    )
    loaded = cli.load_model_from(options, load_model)
    sampling.check_vocabulary(loaded.config.vocab_size)  # or each prompt would report the same
    engine = make_engine(loaded, scheduler, slots)
    status = 0
    if isinstance(prompts, str):
        cli.speak(engine, loaded, prompts, sampling)
    else:
        show = Show(engine, loaded, slots, prompts, sampling)
        status = show.run(options)
    write(engine, outputs, slots)
    return status


def make_engine(loaded: cli.Loaded, scheduler: Scheduler, slots: int) -> Engine:
    """The engine. Raises UserError if there is no memory for its slots."""
    config = loaded.config
    need = slots * config.n_positions * config.kv_bytes_per_token(loaded.dtype)
    free = psutil.virtual_memory().available
    if (
        loaded.device.type == "cpu" and need > free
    ):  # some systems do not refuse: they kill the process later
        raise UserError(
            f"{slots} slots of {config.name} take {need / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free: give a "
            "smaller --slots."
        )
    return Engine(loaded.model, scheduler=scheduler)


class Show:
    """A run of several prompts: `run` makes the steps, `view` draws what the slots are doing."""

    def __init__(
        self,
        engine: Engine,
        loaded: cli.Loaded,
        slots: int,
        prompts: Sequence[str] | None,
        sampling: SamplingParams,
    ) -> None:
        self.engine, self.loaded, self.slots = engine, loaded, slots
        self.built_in = prompts is None
        limits = (
            [sampling.max_tokens] * len(prompts) if prompts else [limit for _, limit in PROMPTS]
        )
        self.answers = [
            live.Answer(number, prompt, loaded)
            for number, prompt in enumerate(prompts or [text for text, _ in PROMPTS], 1)
        ]
        self.params = [
            replace(cli.sampling_of(sampling, index), max_tokens=min(limit, sampling.max_tokens))
            for index, limit in enumerate(limits)
        ]
        self.coming = deque(self.answers)
        self.steps, self.rows, self.seconds = (
            0,
            0,
            0.0,
        )  # of all steps; the engine forgets the oldest some day

    def run(self, options: argparse.Namespace) -> int:
        """Answer all prompts, show and print them; returns the exit status, 2 if a prompt was unfit."""
        unprinted = list(self.answers)
        with live.Screen(self.view) as screen:
            pause = (
                options.pause
                if options.pause is not None
                else PAUSE
                if self.built_in and screen.shown
                else 0
            )
            while self.step(options.every):
                screen.refresh()
                if not screen.shown and any(
                    each.finish_reason for each in self.engine.steps[-1].slots
                ):
                    unprinted = print_ended(unprinted)
                time.sleep(pause)
        print_ended(unprinted)
        print(live.summary(self.answers, self.steps, self.seconds, self.loaded), file=sys.stderr)
        print(f"[{self.slots} slots, {self.occupancy():.1f} % in use]", file=sys.stderr)
        return cli.EXIT_ERROR if any(answer.error for answer in self.answers) else 0

    def step(self, every: int) -> bool:
        """Let a prompt arrive if it is time, and make one step; False if nothing is left to do."""
        due = self.steps % every == 0
        while self.coming and (due or not self.engine.scheduler.unfinished):
            self.arrive(self.coming.popleft())
            due = False
        if not self.engine.scheduler.unfinished:
            return False
        self.engine.step()
        newest = self.engine.steps[-1]
        self.steps, self.rows, self.seconds = (
            self.steps + 1,
            self.rows + newest.rows,
            self.seconds + newest.seconds,
        )
        return True

    def arrive(self, answer: live.Answer) -> None:
        if answer.error:
            return
        priority = (
            URGENT if answer.number % 3 == 0 else NORMAL
        )  # the policy "fcfs" does not look at it
        request = Request(answer.ids, self.params[answer.number - 1], str(answer.number), priority)
        try:
            answer.output = self.engine.add(request).output
        except UserError as error:
            answer.refuse(error)

    def occupancy(self) -> float:
        """Percent of the slots that took part in a step, over all steps."""
        return 100 * self.rows / (self.slots * self.steps or 1)

    def view(self, width: int, height: int) -> list[Text]:
        """What the terminal shows: a line on the step, one for each slot, who waits, and who has ended."""
        if not self.steps:
            return []
        newest, scheduler = self.engine.steps[-1], self.engine.scheduler
        tokens = sum(answer.tokens for answer in self.answers)
        head = (
            f"step {self.steps}: {newest.rows} of {self.slots} slots, {newest.prefill_tokens} prefill and {newest.decode_tokens} "
            f"decode tokens; so far {tokens / self.seconds:.1f} tok/s, slots {self.occupancy():.0f} % in use"
        )
        shown = self.slots if self.slots <= height - 4 else max(1, height - 5)
        drawn = [
            live.line(width, (head, width, "")),
            row(width, "slot", "prompt", "state", "tokens", "text", "bold"),
        ]
        tenants = {
            each.slot: (each.id, "no room in budget", "yellow") for each in scheduler.running
        }
        for each in newest.slots:
            state, look = (
                (f"prefill {each.prefill_tokens}", "yellow")
                if each.prefill_tokens
                else ("decode", "green")
            )
            if each.finish_reason:
                state, look = f"ended: {each.finish_reason}", "dim"
            tenants[each.slot] = each.request_id, state, look
        for slot in range(shown):
            if slot in tenants:
                name, state, look = tenants[slot]
                answer = self.answers[int(name) - 1]
                drawn.append(
                    row(width, str(slot), name, state, str(answer.tokens), answer.text(), look)
                )
            else:
                drawn.append(row(width, str(slot), "", "free", "", "", "dim"))
        if shown < self.slots:
            drawn.append(live.line(width, (f"and {self.slots - shown} more slots", width, "dim")))
        urgent = "!" if scheduler.policy == "priority" else ""
        waiting = ", ".join(
            each.id + urgent * (each.priority == URGENT) for each in scheduler.waiting[:MOST_NAMED]
        )
        ended = [
            f"{answer.number} {answer.finish_reason}"
            for answer in self.answers
            if answer.finish_reason
        ]
        drawn.append(
            live.line(
                width,
                (f"waiting: {waiting or 'nobody'}; {len(self.coming)} still to come", width, ""),
            )
        )
        drawn.append(live.line(width, ("ended: ", 7, ""), text=", ".join(ended[-MOST_NAMED:])))
        return drawn


def row(width: int, slot: str, name: str, state: str, tokens: str, text: str, look: str) -> Text:
    """A line of the table of slots."""
    cells = (
        (f"{slot:>4}", 6, ""),
        (f"{name:>6}", 8, "bold"),
        (state, 19, look),
        (f"{tokens:>6}", 8, ""),
    )
    return live.line(width, *cells, text=text, style=look if look in ("dim", "bold") else "")


def print_ended(answers: Sequence[live.Answer]) -> list[live.Answer]:
    """Print those that have ended, and return the others."""
    for answer in answers:
        if answer.finish_reason:
            answer.print()
    return [answer for answer in answers if not answer.finish_reason]


def write(engine: Engine, outputs: dict[str, Path], slots: int) -> None:
    """Write the chart and the trace that were asked for. Raises UserError where a file cannot be written."""
    if not outputs:
        return
    if not engine.steps:
        print("[no step was made, so no chart and no trace are written]", file=sys.stderr)
        return
    from shared import charts

    from .timeline import gantt, perfetto

    steps = list(engine.steps)
    for name, path in outputs.items():
        if name == "gantt":
            used = 100 * sum(step.rows for step in steps) / (slots * len(steps))
            data = charts.render(
                gantt(steps, f"{len(steps)} steps, slots {used:.0f} % in use", slots)
            )
        else:
            data = json.dumps(perfetto(steps)).encode()
        try:
            path.write_bytes(data)
        except OSError as error:
            raise UserError(
                f"{path} cannot be written ({error.strerror}): name another place."
            ) from None
        print(f"[written: {path}]", file=sys.stderr)


if __name__ == "__main__":
    cli.run(main)
