"""Stage 05 on the command line: prompts arrive over time and share a pool of blocks."""

from __future__ import annotations

import argparse
import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from shared import cli, live
from shared.errors import UserError
from stage01_forward.params import SamplingParams
from stage04_continuous.plan import Plan
from stage04_continuous.request import Request
from stage04_continuous.scheduler import POLICIES

from . import blockmap
from .blocks import BlockPool
from .fork import add_samples
from .memory import (
    SEQUENCES,
    block_bytes,
    default_memory,
    free_memory,
    make_pool,
    most_sequences,
    parse_memory,
    size,
)
from .recorder import BlocksRecord
from .scheduler import PREEMPTIONS, Scheduler

if TYPE_CHECKING:
    import torch

    from stage04_continuous.engine import Engine

ABOUT = (
    "Stage 05, paged cache: memory is taken a block at a time, shared by prompts with the same "
    "beginning, and given back."
)
MOST_SEQUENCES = 4096
MOST_SAMPLES = 256
SHOWN = 640  # tokens in the pool for the built-in prompts: too few for all, to show preemption
MOST_CELLS = 4_000_000  # blocks times steps in a picture; viewers cannot open a larger one
BEGINNING = (
    "In a house on the hill lived Hugo, a merry boy with muddy shoes. Hugo collected feathers and "
    "kept them in a wooden chest. One morning Hugo met a mouse on the path to the garden. It "
    'carried a tiny bag and looked very tired. "Why are you so sad?" asked Hugo. "Last night the '
    'water took my house," said the mouse, "and I have nowhere to sleep."'
)
# Each with the most tokens of its answer. Prompts with the same beginning find it while it is
# owned, and again when it is only cached.
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


def memory(text: str) -> str:
    """An argparse type: a size, which is read again when the free memory is known."""
    parse_memory(text, sys.maxsize)
    return text


def make_parser() -> cli.Parser:
    examples = (
        "--map blocks.svg",
        '"Once upon a time" --samples 4 --temperature 0.8',
        "--prompts prompts.txt --kv-memory 8MiB",
    )
    parser = cli.generation_parser("stage05_paged", ABOUT, *examples)
    group = live.add_options(parser, "sequence", POLICIES)
    group.add_argument(
        "--samples",
        type=cli.whole_number(1, MOST_SAMPLES),
        default=1,
        metavar="N",
        help="answers to each prompt, which is computed once and shared; the same answers as for "
        "N equal prompts; needs a --temperature above 0",
    )
    group.add_argument(
        "--max-num-seqs",
        type=cli.whole_number(1, MOST_SEQUENCES),
        metavar="N",
        help="most answers generated at a time, if memory allows; "
        f"default: {SEQUENCES}, and 1 for one prompt",
    )
    group.add_argument(
        "--map", metavar="FILE.svg", help="draw the blocks step by step: owned, shared, cached"
    )
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--kv-memory",
        type=memory,
        metavar="SIZE",
        help="memory for keys and values: 512MiB, 2GB, or 25%% for a share of the free memory; "
        "default: enough for --max-num-seqs whole contexts, but at most half of the free memory, "
        f"and only {SHOWN} tokens for the built-in prompts",
    )
    group.add_argument(
        "--block-size",
        type=cli.whole_number(1, cli.MOST_TOKENS),
        default=16,
        metavar="N",
        help="tokens in a block",
    )
    group.add_argument(
        "--watermark",
        type=cli.number(0, 0.99),
        default=0.01,
        metavar="SHARE",
        help="share of the blocks that stays free when a prompt is admitted beside others, so "
        "that the others can grow",
    )
    group.add_argument(
        "--preemption",
        choices=PREEMPTIONS,
        default=PREEMPTIONS[0],
        help="when memory runs out, the last prompt in the order of --policy gives its blocks "
        "back: recompute discards its keys and values, swap moves them to the CPU's memory, auto "
        "takes the cheaper way",
    )
    group.add_argument(
        "--swap-memory",
        type=memory,
        metavar="SIZE",
        help="CPU memory to swap to, in the units of --kv-memory; 0 for none; default: the size "
        "of the cache, but at most half of the free memory, and none for one prompt, which is "
        "never preempted",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share the blocks of a common beginning, and keep them for later",
    )
    group.add_argument(
        "--sanitize",
        action="store_true",
        help="check after every step that no block is lost or shared by mistake; slow",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    path = None if options.map is None else cli.output_file(options.map, ".svg")
    prompts = cli.read_prompts(options)
    sampling = SamplingParams(**cli.sampling_fields(options))
    if options.samples > 1 and sampling.temperature == 0:
        raise UserError(
            f"At temperature 0 all {options.samples} samples would be the same: give a "
            "--temperature such as 0.8, or leave --samples out."
        )
    if options.preemption == "recompute" and options.swap_memory is not None:
        raise UserError(
            "With --preemption recompute nothing is swapped: leave --swap-memory out, or choose "
            "swap or auto."
        )
    alone = isinstance(prompts, str) and options.samples == 1

    loaded = cli.load_model_from(options)
    sampling.check_vocabulary(loaded.config.vocab_size)  # or each prompt would report the same
    engine = make_engine(loaded, options, alone, prompts is None)
    film = Film(engine.scheduler)
    if path:
        engine.observers.append(film)
    status = 0
    if isinstance(prompts, str) and alone:
        cli.speak(engine, loaded, prompts, sampling)
    else:
        print(budget(engine, loaded.dtype), file=sys.stderr, flush=True)
        texts = [prompts] if isinstance(prompts, str) else prompts
        limits = [(text, sampling.max_tokens) for text in texts] if texts else PROMPTS
        show = Show(engine, loaded, limits, sampling, options.samples)
        status = show.run(options, built_in=not prompts)
    if path:
        film.write(path)
    return status


# ---- memory -------------------------------------------------------------------------------------


def make_engine(
    loaded: cli.Loaded, options: argparse.Namespace, alone: bool, built_in: bool
) -> Engine:
    """The engine, with the memory that the options give.

    alone: there is one prompt with one answer. built_in: the prompts are this stage's own.
    Raises UserError if there is too little memory, and for invalid settings.
    """
    from .engine import make

    config, dtype = loaded.config, loaded.dtype
    sequences = options.max_num_seqs or (1 if alone else SEQUENCES)
    free = free_memory(loaded.device)
    if options.kv_memory is not None:
        memory = parse_memory(options.kv_memory, free)
    elif built_in:
        memory = min(free, SHOWN * config.kv_bytes_per_token(dtype))
    else:
        memory = default_memory(config, dtype, sequences, free, options.block_size)
    pool = make_pool(memory, config, dtype, options.block_size)
    swap = swap_pool(loaded, options, pool, alone)
    try:
        return make(
            loaded.model,
            pool=pool,
            swap_pool=swap,
            sanitize=options.sanitize,
            max_sequences=sequences,
            prefix_caching=options.enable_prefix_caching,
            watermark=options.watermark,
            preemption=options.preemption,
            **live.scheduling(options, sequences),
        )
    except (MemoryError, RuntimeError) as error:  # PyTorch raises the latter, on CPU and GPU
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        raise UserError(
            f"{size(memory)} of memory for the cache cannot be allocated: "
            "give a smaller --kv-memory, or a smaller --swap-memory."
        ) from None


def swap_pool(
    loaded: cli.Loaded, options: argparse.Namespace, pool: BlockPool, alone: bool
) -> BlockPool | None:
    """The blocks to swap to; None if no request will be swapped."""
    if options.preemption == "recompute":
        return None
    if options.swap_memory is None and alone and options.preemption == "auto":
        return None
    config, dtype, block_size = loaded.config, loaded.dtype, options.block_size
    block, free = block_bytes(config, dtype, block_size), free_memory()
    if loaded.device.type != "cuda":  # the cache will be in the same memory
        free = max(0, free - pool.count * block)
    if options.swap_memory is None:
        memory = min(pool.count * block, free // 2)
    else:
        memory = parse_memory(options.swap_memory, free)
        if 0 < memory < block:
            raise UserError(
                f"A block takes {size(block)}, but --swap-memory is {size(memory)}: "
                "give more, or 0 for none."
            )
    return make_pool(memory, config, dtype, block_size) if memory >= block else None


def budget(engine: Engine, dtype: torch.dtype) -> str:
    """One line: memory of the cache, its blocks, and the sequences that fit."""
    scheduler, config = engine.scheduler, engine.config
    pool, swap = scheduler.pool, scheduler.swap_pool
    whole = most_sequences(pool, config.n_positions)
    block = block_bytes(config, dtype, pool.block_size)
    words = [
        f"KV cache: {size(pool.count * block)} in {pool.count} blocks of {pool.block_size} tokens",
        f"room for {whole} whole context{'' if whole == 1 else 's'} of {config.n_positions} tokens",
        f"at most {scheduler.max_sequences} sequences at a time",
        f"swap: {size(swap.count * block)} in {swap.count} blocks" if swap else "no swap",
    ]
    return f"[{'; '.join(words)}]"


# ---- the run ------------------------------------------------------------------------------------


class Film:
    """An observer that keeps the map of the blocks after each step, for a picture at the end."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.frames: list[array[int]] = []
        self.seen = 0
        self.room = max(1, MOST_CELLS // scheduler.pool.count)

    def before(self, plan: Plan) -> None:
        """The map is taken after the step."""

    def after(self, plan: Plan) -> None:
        """Add the current map, if there is room for one more."""
        self.seen += 1
        if self.seen <= self.room:
            self.frames.append(array("i", blockmap.blockmap(self.scheduler)))

    def write(self, path: Path) -> None:
        """Draw the picture. Raises UserError if the file cannot be written."""
        if not self.frames:
            print("[no step ran, so no map is written]", file=sys.stderr)
            return
        from shared import charts

        pool, shown = self.scheduler.pool, len(self.frames)
        steps = f"the first {shown} of {self.seen}" if shown < self.seen else f"{shown}"
        title = f"{pool.count} blocks of {pool.block_size} tokens, {steps} steps"
        cli.write_file(path, charts.render(blockmap.picture(self.frames, title)))


class Show(live.Show):
    """A run that shows what blocks and sequences do."""

    peak = 0  # most blocks owned in a step

    def add(
        self, answers: list[live.Answer], params: list[SamplingParams], priority: int
    ) -> list[Request]:
        names = [str(answer.number) for answer in answers]
        requests = add_samples(self.engine, answers[0].ids, params, ids=names)
        for request in requests:
            request.priority = priority
        return requests

    def count(self, record: BlocksRecord) -> None:
        super().count(record)
        self.peak = max(self.peak, record.owned_blocks)

    def report(self) -> str:
        # After the run no request owns a block: any block still owned was lost.
        pool, swap = self.engine.scheduler.pool, self.engine.scheduler.swap_pool
        leaked = pool.owned + (swap.owned if swap else 0)
        peak = f"at most {self.peak} of {pool.count} blocks in use"
        return f"[{peak}; {self.counts()}; {leaked} blocks leaked]"

    def counts(self) -> str:
        """Counters since start."""
        counts, evictions = self.engine.scheduler.counts, self.engine.scheduler.pool.evictions
        return (
            f"hit rate {100 * counts.hit_rate:.1f} %, {counts.copies} copied, {evictions} evicted; "
            f"{counts.preemptions} preemptions, {counts.recomputed} to recompute and "
            f"{counts.swapped_out} swapped"
        )

    def head(self) -> str:
        newest, pool = self.engine.steps[-1], self.engine.scheduler.pool
        return (
            f"step {self.steps}: {newest.rows} sequences, {newest.prefill_tokens} prefill and "
            f"{newest.decode_tokens} decode tokens, {newest.owned_blocks} of {pool.count} blocks "
            f"in use\n{self.counts()}"
        )

    def view(self, width: int, height: int) -> list[Text]:
        """The map of the blocks, as many as fit into a third of the lines, above the answers."""
        if not self.steps:
            return []
        states = blockmap.blockmap(self.engine.scheduler)
        starts = range(0, len(states), max(1, width))[: height // 3]
        rows = [live.marks(states[start : start + width], blockmap.mark) for start in starts]
        missing = max(0, len(states) - len(starts) * width)
        key = f"({blockmap.KEY}{f'; {missing} blocks more' * bool(missing)})"
        rows.append(live.line(width, (key, width, "dim")))
        return rows + super().view(width, height - len(rows))

    def states(self) -> dict[str, live.State]:
        scheduler = self.engine.scheduler
        records = {record.request_id: record for record in self.engine.steps[-1].sequences}
        states = {}
        for request in scheduler.running:
            words, look = live.UNPLANNED
            if request.id in records:
                words, look = live.state(records[request.id])
            blocks = (
                f"{blockmap.mark(request.arrival)} {len(scheduler.tables[request].blocks)} blocks"
            )
            states[request.id] = f"{blocks}: {words}", look
        for request in scheduler.waiting:
            if request in scheduler.swapped:
                states[request.id] = "waits (swapped out)", "dim"
            elif request.parent:
                states[request.id] = f"waits (for {request.parent.id})", "dim"
            elif request.output.token_ids:
                states[request.id] = "waits (again)", "dim"
        return states


if __name__ == "__main__":
    cli.run(main)
