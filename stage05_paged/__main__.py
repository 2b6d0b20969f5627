"""Stage 05 on the command line: prompts arrive over time and share a pool of blocks."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

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
MAPPED = 64  # blocks that a line shows at most
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
    option = live.add_options(parser, "sequence", tuple(POLICIES)).add_argument
    whole = cli.whole_number
    about = "answers to each prompt, which is computed once and shared; the same answers as for "
    about += "N equal prompts; needs a --temperature above 0"
    option("--samples", type=whole(1, MOST_SAMPLES), default=1, metavar="N", help=about)
    about = "most answers generated at a time, if memory allows"
    most = whole(1, MOST_SEQUENCES)
    option("--max-num-seqs", type=most, metavar="N", default=SEQUENCES, help=about)
    option = parser.add_argument_group("memory").add_argument
    about = "memory for keys and values: 512MiB, 2GB, or 25%% for a share of the free memory; "
    about += "default: enough for --max-num-seqs whole contexts, but at most half of the free "
    about += f"memory, and only {SHOWN} tokens for the built-in prompts"
    option("--kv-memory", type=memory, metavar="SIZE", help=about)
    most = whole(1, cli.MOST_TOKENS)
    option("--block-size", type=most, default=16, metavar="N", help="tokens in a block")
    about = "CPU memory to which preempted prompts move, in the units of --kv-memory; default: "
    about += "none, and what they had is computed again"
    option("--swap-memory", type=memory, metavar="SIZE", help=about)
    about = "check after every step that no block is lost or shared by mistake; slow"
    option("--sanitize", action="store_true", help=about)
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
    show = Show(engine, loaded, limits, sampling)
    show.samples = options.samples
    return show.run(options.every)


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

    key = f"blocks: {blockmap.KEY}"
    peak = 0  # most blocks owned in a step
    samples = 1  # of each prompt

    def add(
        self, ids: list[int], params: SamplingParams, number: int, priority: int
    ) -> list[Request]:
        numbers = range(number, number + self.samples)
        each = [cli.sampling_of(params, index - 1) for index in numbers]
        requests = add_samples(self.engine, ids, each, list(map(str, numbers)))
        for request in requests:
            request.priority = priority
        return requests

    def count(self, record: PassRecord) -> None:
        super().count(record)
        self.peak = max(self.peak, record.memory)

    def report(self) -> str:
        # After the run no request owns a block: any block still owned was lost.
        scheduler = self.engine.scheduler
        pool, swap, counts = scheduler.pool, scheduler.swap_pool, scheduler.counts
        leaked = pool.owned + (swap.owned if swap else 0)
        return (
            f"[at most {self.peak} of {pool.count} blocks in use; hit rate "
            f"{100 * counts.hit_rate:.1f} %, {counts.copies} copied, {pool.evictions} evicted; "
            f"{counts.preemptions} preemptions, {counts.recomputed} to recompute and "
            f"{counts.swapped_out} swapped; {leaked} blocks leaked]"
        )

    def line(self) -> str:
        newest, states = self.engine.steps[-1], blockmap.blockmap(self.engine.scheduler)
        blocks = "".join(map(blockmap.mark, states[:MAPPED]))
        words = f"{newest.prefill_tokens} prefill and {newest.decode_tokens} decode tokens"
        return f" {blocks} | {newest.rows} sequences, {words}"


if __name__ == "__main__":
    cli.run(main)
