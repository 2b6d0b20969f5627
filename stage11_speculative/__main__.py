"""Stage 11 on the command line: `python -m stage11_speculative "Once upon a time"`."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from shared import catalog, cli, models, registry
from shared.errors import UserError

if TYPE_CHECKING:
    from stage04_continuous.request import Request

    from .engine import Engine

ABOUT = (
    "Stage 11, speculative decoding: continue a text, with the next tokens drafted and verified "
    "together. Accepted drafts are shaded, or in brackets where the output is no terminal."
)
EXAMPLES = (
    "--speculate ngram --drafts 8",
    "--speculate draft --speculative-model stories-draft",
    "--temperature 1",
)


def make_parser() -> cli.Parser:
    parser = cli.generation_parser("stage11_speculative", ABOUT, *EXAMPLES)
    cli.add_format_options(parser)
    group = parser.add_argument_group("drafts")
    known = list(registry.DRAFTS)
    about = "where drafts come from: the text itself, past answers too, or the model's first layers"
    group.add_argument("--speculate", choices=known, default="suffix", help=about)
    whole, about = cli.whole_number(1, 64), "maximum drafts of a pass"
    group.add_argument("--drafts", type=whole, default=4, metavar="K", help=about)
    drafting = parser.add_argument_group("a model that drafts, with --speculate draft")
    about = "a name, such as stories-draft, or a folder; default: the model itself"
    drafting.add_argument("--speculative-model", default="", metavar="NAME", help=about)
    about = "only its first N layers draft; default: 1 of the model itself, all of another"
    drafting.add_argument("--layers", type=whole, metavar="N", help=about)
    about = "sample the drafts, too, and verify them by rejection: a seed then fixes how answers "
    about += "are distributed, not their tokens"
    drafting.add_argument("--drawn-drafts", action="store_true", help=about)
    return parser


def main(argv: list[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    prompt = cli.read_prompt(options)
    from stage01_forward.params import SamplingParams
    from stage04_continuous.request import Request
    from stage06_serving.loading import select

    from .draft_model import first_layers
    from .engine import speculate

    sampling = SamplingParams(**cli.sampling_fields(options))
    name = options.speculative_model
    if (name or options.drawn_drafts) and options.speculate != "draft":
        raise UserError("A model that drafts needs --speculate draft: give both or neither.")
    catalog.checked(name or options.model)
    selection = select(options)
    loaded, draft = selection.loaded, None
    if options.speculate == "draft":
        draft = loaded.model
        if name:
            draft = models.load_model(models.load(name), loaded.device, loaded.dtype)
        layers = options.layers or (draft.config.n_layer if name else 1)
        if layers > draft.config.n_layer:
            raise UserError(f"--layers {layers}: {draft.config.name} has {draft.config.n_layer}.")
        draft = first_layers(draft, layers)
    plain = selection.make(contexts=1)
    engine = speculate(plain, options.speculate, options.drafts, draft, options.drawn_drafts)
    show(engine, loaded, engine.add(Request(loaded.tokenizer.encode(prompt), sampling)))
    return 0


def show(engine: Engine, loaded: cli.Loaded, request: Request) -> None:
    """Print the prompt and its continuation, accepted drafts shaded; then what the drafts saved."""
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    shaded = ("\x1b[7m", "\x1b[27m") if coloured else ("[", "]")
    decoder, count, started = loaded.decoder(), 0, time.perf_counter()
    print(loaded.tokenizer.decode(request.prompt_ids), end="", flush=True)
    while engine.requests:
        tokens = [token for _, token in engine.step()]
        for place, token in enumerate(tokens):
            text = decoder.push(token.id) + (decoder.flush() if token.finish_reason else "")
            accepted = place < engine.plan.accepted.get(request, 0)
            print(text.join(shaded) if accepted and text else text, end="", flush=True)
        count += len(tokens)
        if request.output.error:
            raise UserError(request.output.error)
    seconds, counts = time.perf_counter() - started, engine.scheduler.draft_counts
    print(
        f"\n[{count} tokens in {len(engine.steps)} passes and {seconds:.2f} s, "
        f"{count / seconds:.1f} tok/s; {counts.accepted} of {counts.proposed} drafts accepted; "
        f"{loaded}]",
        file=sys.stderr,
    )


if __name__ == "__main__":
    cli.run(main)
