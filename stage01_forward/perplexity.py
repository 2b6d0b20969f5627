"""Perplexity of a text file: `python -m stage01_forward.perplexity FILE`.

Perplexity is exp of the mean cross-entropy: how many tokens the model wavers between, on average,
at each token. A text longer than the context is read in overlapping windows. Each token is judged
once, in the first window that reaches it, so a smaller stride gives every token more context (and a
lower, fairer figure) for more work. The first token has no context and is not judged.
"""

from __future__ import annotations

from pathlib import Path

from tqdm import tqdm

from shared import cli, files
from shared.errors import UserError


def read_text(name: str) -> str:
    """The file's text. Raises UserError if it cannot be read as UTF-8."""
    try:
        return files.read_text(Path(name))
    except UnicodeDecodeError:
        raise UserError(f"{name} is not UTF-8 text: save or convert it as UTF-8.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{name} cannot be read ({reason}): give the name of a text file."
        ) from None


def main(argv: list[str] | None = None) -> None:
    parser = cli.Parser(
        "stage01_forward.perplexity",
        "How well a model predicts a text: the lower the perplexity, the better.",
        "  python -m stage01_forward.perplexity story.txt\n"
        "  python -m stage01_forward.perplexity story.txt --stride 64 --model gpt2",
    )
    parser.add_argument("file", help="a text file in UTF-8")
    parser.add_argument(
        "--stride",
        type=cli.whole_number(1, cli.MOST_TOKENS),
        metavar="N",
        help="tokens from one window to the next; fewer give each token more context and take "
        "longer; default: half a window",
    )
    cli.add_model_options(parser)
    options = parser.parse_args(argv)
    text = read_text(options.file)
    from . import scoring

    loaded = cli.load_model_from(options)
    ids = loaded.tokenizer.encode(text)
    with tqdm(total=max(len(ids) - 1, 0), unit=" tokens", disable=None) as bar:
        result = scoring.perplexity(loaded.model, ids, options.stride, bar.update)
    print(f"perplexity     {result['perplexity']:.4f}")
    print(f"cross-entropy  {result['cross_entropy']:.4f} nats per token")
    print(f"tokens         {result['tokens']}")


if __name__ == "__main__":
    cli.run(main)
