"""The common part of all command lines: options, prompt, loading, streaming, and error messages.

PyTorch takes seconds to import. So this module imports it only when a model is loaded, and a
program imports its engine only after checking its options: a wrong option is reported within a
second.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import catalog, models, registry
from .catalog import AUTO
from .config import Config
from .errors import UserError
from .files import read_text
from .tokenizer import AnyTokenizer, IncrementalDecoder, JsonTokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16", "float64")
WEIGHT_FORMATS = (AUTO, *registry.WEIGHTS)
KV_FORMATS = (AUTO, "float32", "bfloat16", *(kind for kind, _ in registry.KERNEL_CACHES))
ABOUT_WEIGHTS = "format of the weights; auto is the file's; a number format is also the --dtype"
ABOUT_KV = "format of keys and values in memory; auto is the --dtype"
MOST_TOKENS = 1_000_000
MOST_THREADS = max(64, os.cpu_count() or 1)  # thousands of threads exhaust the system
EXIT_ERROR, EXIT_INTERRUPTED, EXIT_PIPE = 2, 130, 141  # 130, 141: SIGINT, SIGPIPE in a shell


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, and what was chosen on the way."""

    model: Any
    tokenizer: AnyTokenizer
    config: Config
    linear: str  # "packed", "widened" or "plain"
    device: torch.device
    dtype: torch.dtype
    folder: Path | None = None  # of the tokenizer's files
    weights: str = "auto"  # --weights, or "quantized" for a file that has such
    kv: str = "auto"  # --kv-dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return cache_options(self.kv).get("dtype", self.dtype)

    @property
    def machine(self) -> str:
        """Number format, device and threads, and formats that are not those of the dtype."""
        import torch

        count = torch.get_num_threads()
        words = f"{self.dtype} on {self.device.type}".removeprefix("torch.")
        if self.device.type == "cpu":
            words += f", {count} thread{'s' if count > 1 else ''}"
        words += "" if self.weights == "auto" else f", {self.weights} weights"
        return words + ("" if self.kv == "auto" else f", keys and values in {self.kv}")

    def decoder(self) -> IncrementalDecoder:
        """For an answer, without the tokens that end a text."""
        return IncrementalDecoder(self.tokenizer, self.config.eos_ids)

    def __str__(self) -> str:
        return f"{self.config.name}, {self.machine}, {self.linear} linear layers"


# ---- options ------------------------------------------------------------------------------------


class Help(argparse.RawDescriptionHelpFormatter):
    """Ends an option's help with its default, unless there is none, or the help names one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        absent = default is None or default is False or default in ("", argparse.SUPPRESS)
        return text if absent or "default" in text else f"{text}; default: {default}"


class Parser(argparse.ArgumentParser):
    """argparse that reports a wrong option as a UserError: one sentence without the usage."""

    def __init__(self, module: str, about: str, examples: str) -> None:
        """`module` follows `python -m`; `examples` are shown below the options unchanged."""
        super().__init__(
            prog=f"python -m {module}",
            description=about,
            epilog=f"examples:\n{examples}",
            formatter_class=Help,
            allow_abbrev=False,  # a new option must not change what an abbreviation means
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:]}; --help lists every option.")


def number(low: float, high: float, above: bool = False, kind: Any = float) -> Callable[..., Any]:
    """An argparse type: a number from `low` to `high`, or above `low` and up to `high`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if low < value <= high or (value == low and not above):
            return value
        words = f"{'whole ' * (kind is int)}number {'above' if above else 'from'} {low} to {high}"
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is not a {words}")

    return parse


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` to `high`."""
    return number(low, high, kind=int)


def address(text: str) -> str:
    """An argparse type: a server's address, without the path of the API."""
    if not re.fullmatch(r"https?://([\w.-]+|\[[\da-fA-F:]+\])(:\d{1,5})?(/[\w./-]*)?", text):
        message = f"invalid address '{text[:80]}': write it as http://127.0.0.1:8000"
        raise argparse.ArgumentTypeError(message)
    return text.rstrip("/").removesuffix("/v1")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options of a model and of the machine that runs it."""
    option = parser.add_argument_group("model and machine").add_argument
    format = catalog.quantized()
    about = f"stories or stories-chat (embedded), a folder, {format.KIND}, "
    about += f"{', '.join(format.NAMES)}, or a name on the hub"
    option("--model", type=catalog.checked, default="stories", metavar="NAME", help=about)
    about = "random numbers in place of the weights: the text is noise, and the speed is real"
    option("--random-weights", action="store_true", help=about)
    about = "most tokens of a prompt and its answer together; default: the model's own context"
    option("--max-model-len", type=whole_number(2, MOST_TOKENS), metavar="N", help=about)
    about = "where to compute; auto takes a CUDA GPU if there is one"
    option("--device", choices=("auto", "cpu", "cuda"), default="auto", help=about)
    about = "number format; auto is bfloat16 for weights stored so, if the processor has "
    about += "instructions for it, else float32"
    option("--dtype", choices=("auto", *DTYPES), default="auto", help=about)
    about = "linear layers on a CPU; auto lays the weights out for this processor"
    option("--linear", choices=(AUTO, "plain"), default="auto", help=about)
    about = "CPU threads; default: one per core"
    option("--threads", type=whole_number(1, MOST_THREADS), metavar="N", help=about)
    about = "repeats sampled text and --random-weights; default: a new one, and 0 for the weights"
    option("--seed", type=whole_number(0, 2**63 - 1), metavar="N", help=about)


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """--weights and --kv-dtype: formats that later stages add."""
    group = parser.add_argument_group("formats")
    group.add_argument("--weights", choices=WEIGHT_FORMATS, default=AUTO, help=ABOUT_WEIGHTS)
    group.add_argument("--kv-dtype", choices=KV_FORMATS, default=AUTO, help=ABOUT_KV)


def add_max_tokens(parser: argparse._ActionsContainer, default: int) -> None:
    """--max-tokens alone, for programs without sampling."""
    about = "stop after N new tokens, unless the text ends or fills the model's context first"
    whole = whole_number(1, MOST_TOKENS)
    parser.add_argument("--max-tokens", type=whole, default=default, metavar="N", help=about)


def add_prompts(parser: argparse._ActionsContainer) -> None:
    """--prompts, which `read_prompts` reads."""
    about = "continue every line of a text file; without it and without a prompt, built-in prompts"
    parser.add_argument("--prompts", metavar="FILE", help=about)


def generation_parser(module: str, about: str, *examples: str) -> Parser:
    """The parser of `python -m <stage>`: a prompt, and all options. `examples` are arguments."""
    common = '"Once upon a time" --temperature 0.8 --seed 7'
    lines = (f"  python -m {module} {example}" for example in (common, *examples))
    parser = Parser(module, about, "\n".join(lines))
    parser.add_argument("prompt", nargs="?", help="the text to continue, in quotes; or piped in")
    group = parser.add_argument_group("text")
    add_max_tokens(group, 400)
    option = group.add_argument
    about = "0 always takes the likeliest token; 0.8 varies the story; above 1 it gets wild"
    option("--temperature", type=number(0, 2), default=0.0, metavar="T", help=about)
    about = "sample among the K likeliest tokens only; 0 is all"
    option("--top-k", type=whole_number(0, MOST_TOKENS), default=0, metavar="K", help=about)
    about = "sample among the fewest tokens that together have probability P; 1 is all"
    option("--top-p", type=number(0, 1, above=True), default=1.0, metavar="P", help=about)
    add_model_options(parser)
    return parser


def sampling_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling options as fields of SamplingParams."""
    names = ("max_tokens", "temperature", "top_k", "top_p", "seed")
    return {name: getattr(options, name) for name in names}


# ---- what is read and written -------------------------------------------------------------------


def read_prompt(options: argparse.Namespace, default: Any = "Once upon a time") -> Any:
    """The prompt of the command line, or the UTF-8 text that is piped in, without the newline that
    `echo` adds; else `default`."""
    if options.prompt is not None:
        return options.prompt
    # bytes: the text layer of some systems is not UTF-8
    data = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read()
    return data.decode("utf-8-sig", "replace").removesuffix("\n").removesuffix("\r") or default


def read_prompts(options: argparse.Namespace) -> str | list[str] | None:
    """The lines of --prompts, or one prompt as `read_prompt` takes it, or None for built-in ones.
    Raises UserError for a file that cannot be read, and for --prompts together with a prompt."""
    if options.prompts is None:
        return read_prompt(options, None)
    if options.prompt is not None:
        raise UserError("Found both a prompt and --prompts: give one of them.")
    return read_text(Path(options.prompts)).removesuffix("\n").split("\n")


def sampling_of(sampling: Any, index: int) -> Any:
    """The options for prompt `index` of several, with its own seed, so that equal prompts get
    different answers."""
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + index) % 2**63)


# ---- the model ----------------------------------------------------------------------------------


def device_and_dtype(options: Any) -> tuple[torch.device, torch.dtype]:
    """For --device, --dtype, --weights and the model. A number format of --weights is the dtype;
    "auto" is bfloat16 where the model's weights are stored so and the device has instructions for
    it, else float32. Raises UserError for a missing GPU."""
    import torch

    weights, gpu = getattr(options, "weights", AUTO), torch.cuda.is_available()
    if options.device == "cuda" and not gpu:
        raise UserError(
            "PyTorch finds no GPU that it can use: use --device cpu, or install what is missing."
        )
    device = torch.device("cuda" if gpu and options.device != "cpu" else "cpu")
    name = weights if weights in DTYPES else options.dtype
    if name == AUTO:
        stored = weights == AUTO and not options.random_weights
        stored = stored and catalog.stored_dtype(options.model) == "bfloat16"
        name = "bfloat16" if stored and has_bfloat16(device) else "float32"
    return device, getattr(torch, name)


def has_bfloat16(device: torch.device) -> bool:
    """Whether `device` has instructions for products in bfloat16."""
    import torch

    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    known: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(map(known.get, ("avx512_bf16", "amx_bf16", "bf16")))


def cache_options(kv_dtype: str) -> dict[str, Any]:
    """--kv-dtype as an option of stage 05's `make`, or of a later one; none for "auto"."""
    import torch

    return {} if kv_dtype == AUTO else {"dtype": getattr(torch, kv_dtype)}


def load_model_from(options: argparse.Namespace) -> Loaded:
    """Load the model of the options. Raises UserError for a missing device, for a context longer
    than the model's, and for anything wrong with the checkpoint."""
    import torch

    from . import checkpoint, linear

    device, dtype = device_and_dtype(options)
    weights, kv = (getattr(options, name, AUTO) for name in ("weights", "kv_dtype"))
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    seed = options.seed or 0
    loaded = models.load(options.model, options.random_weights, seed=seed, weights=weights)
    config = loaded.config
    longest = getattr(options, "max_model_len", None) or config.n_positions
    if longest > config.n_positions:
        raise UserError(
            f"--max-model-len {longest} is more than the {config.n_positions} positions of "
            f"{config.name}: give at most that, or leave the option out."
        )
    tokenizer = load_tokenizer(loaded.folder)
    checkpoint.check_vocabulary(tokenizer, config)
    if isinstance(tokenizer, JsonTokenizer):
        loaded.unused = tokenizer.unused(config.vocab_size)
    model = models.load_model(loaded, device=device, dtype=dtype)
    loaded.tensors.clear()  # a second reference to the weights would keep them after packing
    kind = linear.optimize(model, options.linear)
    model.config = config = replace(config, n_positions=longest)
    if weights == AUTO and loaded.conversion is not None:
        weights = "quantized"
    return Loaded(model, tokenizer, config, kind, device, dtype, loaded.folder, weights, kv)


# ---- text ---------------------------------------------------------------------------------------


def speak(engine: Any, loaded: Loaded, prompt: str, sampling: Any) -> None:
    """Print the prompt and its continuation, each token as soon as it is sampled; then one line on
    standard error: tokens, seconds, tokens per second, finish reason, machine."""
    ids = loaded.tokenizer.encode(prompt)
    tokens, reason = 0, None
    started = time.perf_counter()
    for token, text in with_text(engine.stream(ids, sampling), loaded):
        # The engine has accepted the prompt: an error precedes any text.
        print(text if tokens else prompt + text, end="", flush=True)
        tokens, reason = tokens + 1, token.finish_reason
    seconds = time.perf_counter() - started
    print(flush=True)
    speed = f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tok/s"
    print(f"[{speed}, finish reason {reason}; {loaded}]", file=sys.stderr)


def with_text(tokens: Iterator[Any], loaded: Loaded) -> Iterator[tuple[Any, str]]:
    """Each token, and the text that it completes."""
    decoder = loaded.decoder()
    for token in tokens:
        yield token, decoder.push(token.id) + (decoder.flush() if token.finish_reason else "")


def run(main: Callable[[list[str] | None], int | None], argv: list[str] | None = None) -> NoReturn:
    """Run a program's `main` and exit with its status. A UserError becomes `error: ...` on standard
    error; Ctrl-C, and a closed pipe as in `... | head`, end the program without a message."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a system's pipes may not be UTF-8
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        status = main(argv) or 0
        print(end="", flush=True)  # unlike sys.stdout.flush, also where that is closed
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = EXIT_ERROR
    except (MemoryError, RuntimeError) as error:  # PyTorch's is a RuntimeError
        if isinstance(error, RuntimeError) and "tried to allocate" not in str(error).lower():
            raise
        advice = "use a smaller --model, or --dtype bfloat16."
        print(f"error: There is not enough memory: {advice}", file=sys.stderr)
        status = EXIT_ERROR
    except KeyboardInterrupt:
        print(file=sys.stderr)
        status = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The rest of the buffer would fail again, with a message, when Python closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_PIPE
    sys.exit(status)
