"""Stage 04 on the command line: prompts arrive over time and share a few slots."""

from __future__ import annotations

from shared import cli, live
from stage01_forward.params import SamplingParams

from .recorder import PassRecord
from .request import Request
from .scheduler import POLICIES, Scheduler

ABOUT = (
    "Stage 04, continuous batching: prompts arrive over time, share a few slots, and leave as soon "
    "as their answers end."
)
SLOTS = 4
MOST_SLOTS = 4096
# Each with the most tokens of its answer, so that slots become free at different times.
PROMPTS = (
    ("Once upon a time", 120),
    ("Long ago, in a village under the cliffs, there lived a girl whose name was", 60),
    ("There was once a merry boy named", 200),
    ("In a house on the hill lived", 30),
    (
        "Once there was a village under the cliffs, and in it lived a girl called Willow. People "
        "said that she was bold, and they were right. Willow always wore a sky blue pair of socks, "
        "even on hot days. The wind blew hard one day, so Willow raced to the hill with a white "
        "kite. The kite flew higher and higher, until the string broke with a snap. Willow looked "
        "behind every bush close to the hill, but the white kite was gone.",
        80,
    ),
    ("Once upon a time there lived a polite girl. Her name was", 150),
    ("Once upon a time, in a village by the sea, there lived", 40),
    ("There was once a brave girl named Rosa, and", 100),
    ("Long ago, in a", 25),
    ("In a village by the sea lived Hugo, a merry boy with muddy shoes.", 140),
)


def make_parser() -> cli.Parser:
    examples = "--max-num-seqs 2 --max-chunk 8", "--prompts prompts.txt --every 1"
    parser = cli.generation_parser("stage04_continuous", ABOUT, *examples)
    group = live.add_options(parser, "slot", tuple(POLICIES))
    most = cli.whole_number(1, MOST_SLOTS)
    about = "answers generated at a time; each takes memory for a whole context; "
    about += f"default: {SLOTS}, and 1 for one prompt"
    group.add_argument("--max-num-seqs", type=most, metavar="N", help=about)
    return parser


def main(argv: list[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    prompts = cli.read_prompts(options)
    sampling = SamplingParams(**cli.sampling_fields(options))
    slots = options.max_num_seqs or (1 if isinstance(prompts, str) else SLOTS)
    scheduler = Scheduler(slots, **live.scheduling(options, slots))

    from .engine import make

    loaded = cli.load_model_from(options)
    sampling.check_vocabulary(loaded.config.vocab_size)  # or each prompt would report the same
    engine = make(loaded.model, scheduler=scheduler)
    if isinstance(prompts, str):
        cli.speak(engine, loaded, prompts, sampling)
        return 0
    texts = [(text, sampling.max_tokens) for text in prompts] if prompts else PROMPTS
    return Show(engine, loaded, texts, sampling).run(options.every)


class Show(live.Show):
    """A run that shows what each slot does."""

    key = "a column is a slot: the number of the prompt in it, with + in its prefill"
    rows = 0  # of all steps

    def add(
        self, ids: list[int], params: SamplingParams, number: int, priority: int
    ) -> list[Request]:
        params = cli.sampling_of(params, number - 1)
        return [self.engine.add(Request(ids, params, str(number), priority))]

    def count(self, record: PassRecord) -> None:
        super().count(record)
        self.rows += record.rows

    @property
    def slots(self) -> int:
        return self.engine.scheduler.max_sequences

    def report(self) -> str:
        share = 100 * self.rows / (self.slots * self.steps or 1)
        return f"[{self.slots} slots, {share:.1f} % in use]"

    def line(self) -> str:
        newest, cells = self.engine.steps[-1], ["."] * self.slots
        for slot, share in zip(newest.memory, newest.shares, strict=True):
            cells[slot] = share.request_id + "+" * (share.prefill_tokens > 0)
        slots = "".join(f"{cell:>4}" for cell in cells)
        return f"{slots} | {newest.prefill_tokens} prefill and {newest.decode_tokens} decode tokens"


if __name__ == "__main__":
    cli.run(main)
