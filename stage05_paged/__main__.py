"""Stage 05 on the command line: prompts arrive over time and share a pool of blocks."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from rich.text import Text

from shared import cli, live
from shared.errors import UserError
from stage01_forward.params import SamplingParams
from stage04_continuous.recorder import PassRecord
from stage04_continuous.request import Request
from stage04_continuous.scheduler import POLICIES

from . import blockmap
from .fork import add_samples
from .memory import (
    SEQUENCES,
    block_bytes,
    default_memory,
    free_memory,
    make_pool,
    parse_memory,
    size,
)

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
        '"Once upon a time" --samples 4 --temperature 0.8',
        "--prompts prompts.txt --kv-memory 8MiB",
    )
    parser = cli.generation_parser("stage05_paged", ABOUT, *examples)
    group = live.add_options(parser, "sequence", tuple(POLICIES))
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
        default=SEQUENCES,
        help="most answers generated at a time, if memory allows",
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
        "--swap-memory",
        type=memory,
        metavar="SIZE",
        help="CPU memory to which preempted prompts move, in the units of --kv-memory; default: "
        "none, and what they had is computed again",
    )
    group.add_argument(
        "--sanitize",
        action="store_true",
        help="check after every step that no block is lost or shared by mistake; slow",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    prompts = cli.read_prompts(options)
    sampling = SamplingParams(**cli.sampling_fields(options))
    if options.samples > 1 and sampling.temperature == 0:
        raise UserError(
            f"At temperature 0 all {options.samples} samples would be the same: give a "
            "--temperature such as 0.8, or leave --samples out."
        )
    loaded = cli.load_model_from(options)
    sampling.check_vocabulary(loaded.config.vocab_size)  # or each prompt would report the same
    engine = make_engine(loaded, options, prompts is None)
    if isinstance(prompts, str) and options.samples == 1:
        cli.speak(engine, loaded, prompts, sampling)
        return 0
    print(budget(engine, loaded.dtype), file=sys.stderr, flush=True)
    texts = [prompts] if isinstance(prompts, str) else prompts
    limits = [(text, sampling.max_tokens) for text in texts] if texts else PROMPTS
    show = Show(engine, loaded, limits, sampling, options.samples)
    return show.run(options, built_in=not prompts)


# ---- memory -------------------------------------------------------------------------------------


def make_engine(loaded: cli.Loaded, options: argparse.Namespace, built_in: bool) -> Engine:
    """The engine, with the memory that the options give. built_in: the prompts are this stage's
    own. Raises UserError if there is too little memory, and for invalid settings."""
    from .engine import make

    config, dtype = loaded.config, loaded.dtype
    sequences, free = options.max_num_seqs, free_memory(loaded.device)
    if options.kv_memory is not None:
        memory = parse_memory(options.kv_memory, free)
    elif built_in:
        memory = min(free, SHOWN * config.kv_bytes_per_token(dtype))
    else:
        memory = default_memory(config, dtype, sequences, free, options.block_size)
    pool = make_pool(memory, config, dtype, options.block_size)
    swap_pool = None
    if options.swap_memory is not None:
        swap = parse_memory(options.swap_memory, free_memory())
        swap_pool = make_pool(swap, config, dtype, options.block_size)
    return make(
        loaded.model,
        pool=pool,
        swap_pool=swap_pool,
        sanitize=options.sanitize,
        max_sequences=sequences,
        **live.scheduling(options, sequences),
    )


def budget(engine: Engine, dtype: torch.dtype) -> str:
    """One line: memory of the cache, its blocks, and the sequences that fit."""
    scheduler, config = engine.scheduler, engine.config
    pool, swap = scheduler.pool, scheduler.swap_pool
    whole = pool.count // pool.blocks_for(config.n_positions)
    block = block_bytes(config, dtype, pool.block_size)
    words = [
        f"KV cache: {size(pool.count * block)} in {pool.count} blocks of {pool.block_size} tokens",
        f"room for {whole} whole context{'' if whole == 1 else 's'} of {config.n_positions} tokens",
        f"at most {scheduler.max_sequences} sequences at a time",
        f"swap: {size(swap.count * block)} in {swap.count} blocks" if swap else "no swap",
    ]
    return f"[{'; '.join(words)}]"


# ---- the run ------------------------------------------------------------------------------------


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

    def count(self, record: PassRecord) -> None:
        super().count(record)
        self.peak = max(self.peak, record.memory)

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
            f"{newest.decode_tokens} decode tokens, {newest.memory} of {pool.count} blocks "
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
        records = {record.request_id: record for record in self.engine.steps[-1].shares}
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
            elif parent := scheduler.parents.get(request):
                states[request.id] = f"waits (for {parent.id})", "dim"
            elif request.output.token_ids:
                states[request.id] = "waits (again)", "dim"
        return states


if __name__ == "__main__":
    cli.run(main)
