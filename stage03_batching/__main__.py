"""Stage 03 on the command line: `python -m stage03_batching --prompts FILE`, one prompt a line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shared import cli, live
from shared.records import StepRecord
from stage01_forward.params import SamplingParams

ABOUT = "Stage 03, static batching: continue several texts in the same steps."
PROMPTS = [
    "Once upon a time",
    "Long ago, in a village under the cliffs, there lived a girl whose name was",
    "There was once a merry boy named",
    "In a house on the hill lived",
    "Once there was a village by the sea, and in it lived a boy called Sam. People said that "
    "he was",
    "Once upon a time there lived a polite girl. Her name was",
]


def main(argv: list[str] | None = None) -> int:
    parser = cli.generation_parser(
        "stage03_batching", ABOUT, "--prompts prompts.txt", "--temperature 0.8 --seed 7"
    )
    cli.add_prompts(parser)
    options = parser.parse_args(argv)
    prompts = cli.read_prompts(options)
    sampling = SamplingParams(**cli.sampling_fields(options))

    from .engine import Engine

    loaded = cli.load_model_from(options)
    engine = Engine(loaded.model)
    if isinstance(prompts, str):
        cli.speak(engine, loaded, prompts, sampling)
        return 0
    sampling.check_vocabulary(loaded.config.vocab_size)  # or each prompt would report the same
    texts = prompts or PROMPTS
    params = [cli.sampling_of(sampling, index) for index in range(len(texts))]
    outputs = engine.generate([loaded.tokenizer.encode(text) for text in texts], params)
    for number, output in enumerate(outputs, 1):
        live.print_answer(number, output, loaded)
    seconds = sum(step.seconds for step in engine.steps)
    print(live.summary(outputs, len(engine.steps), seconds, loaded), file=sys.stderr)
    print(waste(engine.steps), file=sys.stderr)
    return cli.EXIT_ERROR if any(output.error for output in outputs) else 0


def waste(steps: Sequence[StepRecord]) -> str:
    """One line on the wasted tokens: padding in prefill, and idle rows in decode."""
    padded = sum(step.wasted_tokens for step in steps if step.prefill_tokens)
    idle = sum(step.wasted_tokens for step in steps if not step.prefill_tokens)
    total = padded + idle + sum(step.prefill_tokens + step.decode_tokens for step in steps)
    share = 100 * (padded + idle) / (total or 1)
    return (
        f"[wasted: {padded} padded tokens in prefill and {idle} idle row-steps in decode, "
        f"{share:.1f} % of all {total} tokens computed]"
    )


if __name__ == "__main__":
    cli.run(main)
