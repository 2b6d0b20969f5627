"""Stage 05 on the command line: `python -m stage05_paged`. Prompts arrive over time, and share a pool of blocks."""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.text import Text

from shared import cli, live
from shared.errors import UserError
from stage01_forward.generation import Token
from stage01_forward.model import load_model
from stage01_forward.sampling import SamplingParams
from stage04_continuous.__main__ import (
    BUDGET,
    EVERY,
    MOST_NAMED,
    NORMAL,
    PAUSE,
    URGENT,
    print_ended,
)
from stage04_continuous.request import Request
from stage04_continuous.scheduler import POLICIES

from . import blockmap
from .blocks import BlockPool
from .engine import SEQUENCES, Engine
from .memory import (
    block_bytes,
    default_memory,
    free_memory,
    make_pool,
    most_sequences,
    parse_memory,
    size,
)
from .scheduler import PREEMPTIONS, Scheduler

ABOUT = "Stage 05, paged cache: memory is taken a block at a time, shared where texts begin alike, and given back."
MOST_SEQUENCES = 4096
MOST_SAMPLES = 256
SHOWN = 640  # tokens that the pool holds for the built-in prompts: too few for all of them, so that somebody must give way
MOST_CELLS = 4_000_000  # blocks times passes in a picture; one of more could not be opened
BEGINNING = (
    "In a house on the hill lived Hugo, a merry boy with muddy shoes. Hugo collected feathers and kept them in a wooden chest. "
    "One morning Hugo met a mouse on the path to the garden. It carried a tiny bag and looked very tired. "
    '"Why are you so sad?" asked Hugo. "Last night the water took my house," said the mouse, "and I have nowhere to sleep."'
)
# With the most tokens that each may get. Those with the same beginning meet while it is in use, and again when it is only kept.
PROMPTS = (
    (BEGINNING, 120),
    ("Once upon a time", 200),
    (BEGINNING + ' "Come with me," said', 60),
    ("There was once a merry boy named", 150),
    (BEGINNING + " Hugo laughed.", 90),
    ("Long ago, in a village under the cliffs, there lived a girl whose name was", 180),
    ("Once upon a time there lived a polite girl. Her name was", 160),
    ("In a village by the sea lived", 40),
    (BEGINNING + " Hugo thought about this for a long time.", 100),
    ("There was once a brave girl named Rosa, and", 140),
    ("Long ago, in a", 25),
    (BEGINNING + ' "That is sad," said Hugo', 80),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that only this stage has."""
    group = parser.add_argument_group("several prompts")
    cli.add_prompts(group)
    group.add_argument(
        "--samples",
        type=cli.whole_number(1, MOST_SAMPLES),
        default=1,
        metavar="N",
        help="N answers to each prompt, which is computed once and shared; as if each stood there N times; needs a --temperature "
        "above 0; default %(default)s",
    )
    group.add_argument(
        "--sequences",
        type=cli.whole_number(1, MOST_SEQUENCES),
        metavar="N",
        help=f"most answers that grow at a time, if there is memory for them; default {SEQUENCES}, and 1 for one prompt",
    )
    group.add_argument(
        "--budget",
        type=cli.whole_number(1, cli.MOST_TOKENS),
        metavar="N",
        help=f"most tokens computed in a step, at least one a sequence; default {BUDGET}, or the number of sequences if that is "
        "more",
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
        help="who is let in first, and keeps memory longest: fcfs is first come, first served; with priority, every third prompt "
        "is urgent, marked !, and goes before the others; default %(default)s",
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
    group.add_argument(
        "--map",
        metavar="FILE.svg",
        help="draw the blocks by steps: who had which, shared and cached ones",
    )
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--kv-memory",
        metavar="SIZE",
        help="memory for keys and values: 512MiB, 2GB, or 25%% for a share of what is free; default is enough for --sequences "
        f"whole contexts, but at most half of what is free, and only {SHOWN} tokens for the built-in prompts",
    )
    group.add_argument(
        "--block-size",
        type=cli.whole_number(1, cli.MOST_TOKENS),
        default=16,
        metavar="N",
        help="tokens in a block; default %(default)s",
    )
    group.add_argument(
        "--watermark",
        type=cli.number(0, 0.99),
        default=0.01,
        metavar="SHARE",
        help="share of the blocks that stays free when a prompt is let in beside others, so that these can grow; "
        "default %(default)g",
    )
    group.add_argument(
        "--preemption",
        choices=PREEMPTIONS,
        default=PREEMPTIONS[0],
        help="when memory runs out, whoever came last gives theirs back: recompute throws the keys and values away, swap moves "
        "them to the CPU's memory, and auto takes what costs less time here; default %(default)s",
    )
    group.add_argument(
        "--swap-memory",
        metavar="SIZE",
        help="CPU memory to swap to, given as --kv-memory is; 0 is none; default is as much as the cache has, or half of what is "
        "free if that is less, and none for one prompt, which nobody disturbs",
    )
    group.add_argument(
        "--no-prefix-cache",
        action="store_true",
        help="do not look for blocks that hold the same beginning, and keep none",
    )
    group.add_argument(
        "--sanitize",
        action="store_true",
        help="check after every step that no block is lost or shared by mistake; slow",
    )


def main(argv: list[str] | None = None) -> int:
    examples = (
        "--map blocks.svg",
        '"Once upon a time" --samples 4 --temperature 0.8',
        "--prompts prompts.txt --kv-memory 8MiB",
    )
    parser = cli.generation_parser("stage05_paged", ABOUT, *examples)
    add_options(parser)
    options = parser.parse_args(argv)
    path = None if options.map is None else cli.output_file(options.map, ".svg")
    prompts = cli.read_prompts(options)
    sampling = SamplingParams(**cli.sampling_fields(options))
    if options.samples > 1 and sampling.temperature == 0:
        raise UserError(
            f"At temperature 0 all {options.samples} samples would be the same: give a --temperature such as 0.8, or leave "
            "--samples out."
        )
    alone = isinstance(prompts, str) and options.samples == 1
    loaded = cli.load_model_from(options, load_model)
    sampling.check_vocabulary(loaded.config.vocab_size)  # or each prompt would report the same
    engine = make_engine(loaded, options, alone, prompts is None)
    film = Film(engine) if path else None
    status = 0
    if isinstance(prompts, str) and alone:
        cli.speak(film or engine, loaded, prompts, sampling)
    else:
        print(plan(engine), file=sys.stderr, flush=True)
        show = Show(
            engine,
            loaded,
            [prompts] if isinstance(prompts, str) else prompts,
            sampling,
            options.samples,
            film,
        )
        status = show.run(options)
    if film and path:
        film.write(path)
    return status


# ---- memory -----------------------------------------------------------------------------------------------------


def make_engine(
    loaded: cli.Loaded, options: argparse.Namespace, alone: bool, built_in: bool
) -> Engine:
    """The engine, with the memory that was asked for. `alone`: there is one prompt, and one answer to it; `built_in`: the
    prompts are this stage's own.

    Raises UserError for memory that is not there, and for settings that cannot work.
    """
    config, dtype = loaded.config, loaded.dtype
    sequences = options.sequences or (1 if alone else SEQUENCES)
    free = free_memory(loaded.device)
    if options.kv_memory is not None:
        memory = parse_memory(options.kv_memory, free)
    elif built_in:
        memory = min(free, SHOWN * config.kv_bytes_per_token(dtype))
    else:
        memory = default_memory(config, dtype, sequences, free, options.block_size)
    pool = make_pool(memory, config, dtype, options.block_size)
    scheduler = Scheduler(
        pool,
        sequences,
        options.budget or max(BUDGET, sequences),
        options.policy,
        options.max_chunk,
        chunked=not options.no_chunks,
        prefix_caching=not options.no_prefix_cache,
        watermark=options.watermark,
        preemption=options.preemption,
        swap_pool=swap_pool(loaded, options, pool, alone),
    )
    try:
        return Engine(loaded.model, scheduler=scheduler, sanitize=options.sanitize)
    except (
        MemoryError,
        RuntimeError,
    ) as error:  # PyTorch says the latter, of a CPU's memory and of a GPU's
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        raise UserError(
            f"{size(memory)} of memory for the cache cannot be had: give a smaller --kv-memory, or a smaller --swap-memory."
        ) from None


def swap_pool(
    loaded: cli.Loaded, options: argparse.Namespace, pool: BlockPool, alone: bool
) -> BlockPool | None:
    """The blocks to swap to; None where nobody will."""
    if options.preemption == "recompute":
        if options.swap_memory is not None:
            raise UserError(
                "With --preemption recompute nothing is swapped: leave --swap-memory out, or choose swap or auto."
            )
        return None
    if options.swap_memory is None and alone and options.preemption == "auto":
        return None
    config, dtype, block_size = loaded.config, loaded.dtype, options.block_size
    free = free_memory()
    if loaded.device.type != "cuda":  # the cache is to be in the same memory
        free = max(0, free - pool.count * block_bytes(config, dtype, block_size))
    each = block_bytes(config, dtype, block_size)
    if options.swap_memory is None:
        memory = min(pool.count * each, free // 2)
    else:
        memory = parse_memory(options.swap_memory, free)
        if 0 < memory < each:
            raise UserError(
                f"A block takes {size(each)}, and --swap-memory is {size(memory)}: give more, or 0 for none."
            )
    return make_pool(memory, config, dtype, block_size) if memory >= each else None


def plan(engine: Engine) -> str:
    """One line: how much memory the cache has, in how many blocks, and how many sequences that is enough for."""
    scheduler, config, dtype = engine.scheduler, engine.model.config, engine.model.dtype
    pool, swap = scheduler.pool, scheduler.swap_pool
    whole = most_sequences(pool, config.n_positions)
    bytes_a_block = block_bytes(config, dtype, pool.block_size)
    words = [
        f"KV cache: {size(pool.count * bytes_a_block)} in {pool.count} blocks of {pool.block_size} tokens",
        f"room for {whole} whole context{'' if whole == 1 else 's'} of {config.n_positions} tokens",
        f"at most {scheduler.max_sequences} sequences at a time",
        f"swap: {size(swap.count * bytes_a_block)} in {swap.count} blocks" if swap else "no swap",
    ]
    return f"[{'; '.join(words)}]"


# ---- the run ----------------------------------------------------------------------------------------------------


class Film:
    """The map of the blocks after each step, for a picture at the end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.frames: list[array[int]] = []
        self.seen = 0
        self.room = max(1, MOST_CELLS // engine.scheduler.pool.count)

    def take(self) -> None:
        """Keep the map as it is now, if there is room for one more."""
        self.seen += 1
        if self.seen <= self.room:
            self.frames.append(array("i", blockmap.blockmap(self.engine.scheduler)))

    def stream(self, prompt: Sequence[int], sampling: SamplingParams, /) -> Iterator[Token]:
        """As the engine's, with a frame taken after every step."""
        request = self.engine.add(Request(prompt, sampling))
        while self.engine.scheduler.unfinished:
            tokens = self.engine.step()
            self.take()
            yield from (token for _, token in tokens)
        if request.output.error is not None:
            raise UserError(request.output.error)

    def write(self, path: Path) -> None:
        """Draw it. Raises UserError if the file cannot be written."""
        if not self.frames:
            print("[no step was made, so no map is written]", file=sys.stderr)
            return
        from shared import charts

        pool, shown = self.engine.scheduler.pool, len(self.frames)
        passes = f"the first {shown} of {self.seen}" if shown < self.seen else f"{shown}"
        title = f"{pool.count} blocks of {pool.block_size} tokens, {passes} passes"
        try:
            path.write_bytes(charts.render(blockmap.picture(self.frames, title)))
        except OSError as error:
            raise UserError(
                f"{path} cannot be written ({error.strerror}): name another place."
            ) from None
        print(f"[written: {path}]", file=sys.stderr)


class Show:
    """A run of several prompts: `run` makes the steps, `view` draws what the blocks and the sequences are doing."""

    def __init__(
        self,
        engine: Engine,
        loaded: cli.Loaded,
        prompts: Sequence[str] | None,
        sampling: SamplingParams,
        samples: int = 1,
        film: Film | None = None,
    ) -> None:
        self.engine, self.loaded, self.film = engine, loaded, film
        self.built_in = prompts is None
        texts = [(text, sampling.max_tokens) for text in prompts] if prompts else PROMPTS
        self.answers: list[live.Answer] = []
        self.params: list[SamplingParams] = []
        self.coming: deque[list[live.Answer]] = deque()  # the samples of a prompt arrive together
        for text, limit in texts:
            group = [
                live.Answer(len(self.answers) + number, text, loaded)
                for number in range(1, samples + 1)
            ]
            for answer in group:
                params = cli.sampling_of(sampling, answer.number - 1)
                self.params.append(replace(params, max_tokens=min(limit, sampling.max_tokens)))
            self.answers += group
            self.coming.append(group)
        self.asked: dict[str, tuple[live.Answer, Request]] = {}  # by the request's id
        self.groups = 0  # prompts that have arrived
        self.steps, self.peak, self.seconds = (
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
                    each.finish_reason for each in self.engine.steps[-1].sequences
                ):
                    unprinted = print_ended(unprinted)
                time.sleep(pause)
        print_ended(unprinted)
        print(live.summary(self.answers, self.steps, self.seconds, self.loaded), file=sys.stderr)
        print(self.memory_summary(), file=sys.stderr)
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
        self.steps, self.seconds = self.steps + 1, self.seconds + newest.seconds
        self.peak = max(self.peak, newest.owned_blocks)
        if self.film:
            self.film.take()
        return True

    def arrive(self, group: Sequence[live.Answer]) -> None:
        """Hand the samples of a prompt to the engine."""
        self.groups += 1
        if group[0].error:  # it could not be cut into tokens
            return
        try:
            requests = self.engine.add_samples(
                group[0].ids, [self.params[answer.number - 1] for answer in group]
            )
        except UserError as error:
            for answer in group:
                answer.refuse(error)
            return
        for answer, request in zip(group, requests, strict=True):
            request.priority = (
                URGENT if self.groups % 3 == 0 else NORMAL
            )  # the policy "fcfs" does not look at it
            answer.output = request.output
            self.asked[request.id] = answer, request

    def memory_summary(self) -> str:
        """One line: blocks in use, what was found, and what was taken away; what is still owned at the end is lost."""
        pool, swap = self.engine.scheduler.pool, self.engine.scheduler.swap_pool
        leaked = pool.owned + (swap.owned if swap else 0)
        return f"[at most {self.peak} of {pool.count} blocks in use; {self.counts()}; {leaked} blocks leaked]"

    def counts(self) -> str:
        """What has happened to the blocks so far."""
        counts, evictions = self.engine.scheduler.counts, self.engine.scheduler.pool.evictions
        return (
            f"hit rate {100 * counts.hit_rate:.1f} %, {counts.copies} copied, {evictions} evicted; {counts.preemptions} "
            f"preemptions, {counts.recomputed} to recompute and {counts.swapped_out} swapped"
        )

    # ---- what the terminal shows ------------------------------------------------------------------------------------

    def view(self, width: int, height: int) -> list[Text]:
        """A line on the step, one on the counts, the map, a line for each sequence, who waits, and who has ended."""
        if not self.steps:
            return []
        newest, scheduler = self.engine.steps[-1], self.engine.scheduler
        tokens = sum(answer.tokens for answer in self.answers)
        head = (
            f"step {self.steps}: {newest.rows} sequences, {newest.prefill_tokens} prefill and {newest.decode_tokens} decode "
            f"tokens, {newest.owned_blocks} of {scheduler.pool.count} blocks in use; so far {tokens / self.seconds:.1f} tok/s"
        )
        drawn = [live.line(width, (head, width, "")), live.line(width, (self.counts(), width, ""))]
        room = max(2, height - 6)  # for map and sequences
        drawn += blockmap.lines(blockmap.blockmap(scheduler), width, max(1, room // 2))
        drawn.append(live.line(width, (f"({blockmap.KEY})", width, "dim")))
        sequences = self.sequences(width)
        room -= len(drawn) - 3
        drawn.append(row(width, " ", "prompt", "state", "tokens", "blocks", "text", "bold"))
        cut = len(sequences) > room
        drawn += sequences[: max(0, room - 1) if cut else room]
        if cut:
            drawn.append(
                live.line(
                    width, (f"and {len(sequences) - max(0, room - 1)} more sequences", width, "dim")
                )
            )
        # Or what is below would jump up and down as they come and go.
        drawn += [Text() for _ in range(min(room, scheduler.max_sequences) - len(sequences))]
        drawn.append(
            live.line(
                width,
                (
                    f"waiting: {self.waiting()}; {sum(map(len, self.coming))} still to come",
                    width,
                    "",
                ),
            )
        )
        ended = [
            f"{answer.number} {answer.finish_reason}"
            for answer in self.answers
            if answer.finish_reason
        ]
        drawn.append(live.line(width, ("ended: ", 7, ""), text=", ".join(ended[-MOST_NAMED:])))
        return drawn

    def sequences(self, width: int) -> list[Text]:
        """A line for each request that runs or took part in the last step, by arrival."""
        scheduler = self.engine.scheduler
        states = {each.id: ("no room in budget", "yellow") for each in scheduler.running}
        for id in states:
            if (request := self.asked[id][1]).output.token_ids and request.remaining == 1:
                states[id] = (
                    "prompt is shared",
                    "green",
                )  # a sample: another one has just computed it
        for each in self.engine.steps[-1].sequences:
            states[each.request_id] = (
                (f"prefill {each.prefill_tokens}", "yellow")
                if each.prefill_tokens
                else ("decode", "green")
            )
            if each.finish_reason:
                states[each.request_id] = f"ended: {each.finish_reason}", "dim"
        drawn = []
        for id in sorted(states, key=lambda id: self.asked[id][1].arrival):
            (answer, request), (state, style) = self.asked[id], states[id]
            blocks = (
                str(len(scheduler.tables[request].blocks)) if request in scheduler.tables else "-"
            )
            sign, colour = blockmap.mark(request.arrival), blockmap.look(request.arrival)
            drawn.append(
                row(
                    width,
                    sign,
                    str(answer.number),
                    state,
                    str(answer.tokens),
                    blocks,
                    answer.text(),
                    style,
                    colour,
                )
            )
        return drawn

    def waiting(self) -> str:
        """Who waits, and for what."""
        scheduler = self.engine.scheduler
        urgent = "!" if scheduler.policy == "priority" else ""
        first = {
            sample: leader for leader, samples in scheduler.samples.items() for sample in samples
        }
        named = []
        for request in [*scheduler.waiting, *first][:MOST_NAMED]:
            why = ""
            if request in scheduler.swapped:
                why = " (swapped out)"
            elif request in first:
                why = f" (for {self.asked[first[request].id][0].number})"
            elif request.output.token_ids:
                why = " (again)"
            named.append(
                f"{self.asked[request.id][0].number}{urgent * (request.priority == URGENT)}{why}"
            )
        return ", ".join(named) or "nobody"


def row(
    width: int,
    sign: str,
    name: str,
    state: str,
    tokens: str,
    blocks: str,
    text: str,
    look: str,
    colour: str = "",
) -> Text:
    """A line of the table of sequences."""
    cells = (
        (sign, 1, colour),
        (f"{name:>7}", 9, "bold"),
        (state, 19, look),
        (f"{tokens:>6}", 8, ""),
        (f"{blocks:>6}", 8, ""),
    )
    return live.line(width, *cells, text=text, style=look if look in ("dim", "bold") else "")


if __name__ == "__main__":
    cli.run(main)
