"""The common part of all command lines: options, prompt, loading, streaming, and error messages.

A program's `__main__.py` stays a few lines: parse, load, speak. `shared` imports no stage, so a
stage passes in its engine, and interprets `sampling_fields` itself.

PyTorch takes seconds to import. So this module imports it only when a model is loaded, and a
program imports its engine only after checking its options: a wrong option is reported within a
second.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from urllib.parse import urlsplit

from . import catalog, models, registry
from .catalog import AUTO
from .config import Config
from .errors import UserError, advised
from .files import read_bytes
from .tokenizer import AnyTokenizer, IdTokenizer, IncrementalDecoder, has_tokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16", "float64")
KV_DTYPES = ("float32", "bfloat16")  # that need no cache of a later stage
ABOUT_WEIGHTS = (
    "format of the weights; auto is that of the file; a number format is also the --dtype, and "
    "computes what whole numbers in the file stand for; others round while the model loads"
)
ABOUT_KV = "format of keys and values in memory; auto is the --dtype"
LINEAR = ("auto", "plain")  # as in linear.py, which imports PyTorch
PROMPT = "Once upon a time"  # where none is given
MOST_TOKENS = 1_000_000
MOST_THREADS = max(64, os.cpu_count() or 1)  # thousands of threads exhaust the system
MOST_PROMPT_BYTES = 2**18  # twice what 1,024 of GPT-2's longest tokens (128 bytes) hold
MOST_FILE_BYTES = 2**22  # of --prompts: thousands of prompts, but no disk image
EXIT_ERROR, EXIT_INTERRUPTED, EXIT_PIPE = 2, 130, 141  # 130, 141: SIGINT, SIGPIPE in a shell


class Streaming(Protocol):
    """The part of an engine that the command line needs."""

    def stream(self, prompt: Sequence[int], sampling: Any, /) -> Iterator[Any]:
        """Yields tokens with `id` and `finish_reason`; only the last one has a reason."""
        ...


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
    files: Sequence[Path] = ()  # with the weights; none for random ones
    weights: str = "auto"  # --weights, or "quantized" for a file that has such
    kv: str = "auto"  # --kv-dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        dtype: torch.dtype = cache_options(self.kv).get("dtype", self.dtype)
        return dtype

    @property
    def formats(self) -> str:
        """The formats of the weights, keys and values, where they are not those of the dtype."""
        words = [] if self.weights == "auto" else [f"{self.weights} weights"]
        words += [] if self.kv == "auto" else [f"keys and values in {self.kv}"]
        return "".join(f", {word}" for word in words)

    @property
    def machine(self) -> str:
        """Number format, device and threads, in words."""
        import torch

        count = torch.get_num_threads()
        threads = f", {count} thread{'s' if count > 1 else ''}" if self.device.type == "cpu" else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} on {self.device.type}{threads}{self.formats}"

    def __str__(self) -> str:
        return f"{self.config.name}, {self.machine}, {self.linear} linear layers"


def with_default(text: str, default: object) -> str:
    """An option's help with its default added, unless the help already names one."""
    if "default" in text or default in (None, "", argparse.SUPPRESS):
        return text
    if isinstance(default, bool):
        return f"{text}; {'on' if default else 'off'} by default"
    value = f"{default:g}" if isinstance(default, float) else str(default)
    return f"{text}; default: {value.replace('%', '%%')}"


class Help(argparse.RawDescriptionHelpFormatter):
    """Help that ends each option with its default."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        plain = action.option_strings and isinstance(default, (bool, int, float, str))
        return with_default(text, default) if plain else text


class Parser(argparse.ArgumentParser):
    """argparse that reports a wrong option as a UserError: one sentence without the usage, and the
    option that was probably meant. Of the options in `once` the last does not win: a second one is
    refused."""

    once: Sequence[str] = ()

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
        known, word = list(self._option_string_actions), ""
        if match := re.match(r"unrecognized arguments: .*?(--[^\s=]+)", message):
            word = match[1]
        elif match := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            word, known = match[1], re.findall(r"[\w.-]+", match[2])
        advice = advised("--help lists every option.", word, known)
        raise UserError(f"{message[:1].upper()}{message[1:]}; {advice}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        names = [word.partition("=")[0] for word in words]
        if twice := [name for name in self.once if names.count(name) > 1]:
            raise UserError(f"{twice[0]} has several values, and only one counts: give it once.")
        return super().parse_known_args(words, namespace)


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"'{text[:40]}' is not a whole number from {low} to {high}"
            )
        return value

    return parse


def number(low: float, high: float, above: bool = False) -> Callable[[str], float]:
    """An argparse type: a number from `low` to `high`, or above `low` and up to `high`. NaN is
    refused."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low < value <= high if above else low <= value <= high):
            raise argparse.ArgumentTypeError(
                f"'{text[:40]}' is not a number {'above' if above else 'from'} {low:g} to {high:g}"
            )
        return value

    return parse


def checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """An argparse type: the text unchanged, unless `check` raises UserError for it."""

    def parse(text: str) -> str:
        try:
            check(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from None
        return text

    return parse


def address(text: str) -> str:
    """An argparse type: a server's address, without the path of the API."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # invalid port or IPv6 address
        good = False
    if not good or parts.username is not None or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(
            f"invalid address '{text[:80]}': write it as http://127.0.0.1:8000"
        )
    return text.rstrip("/").removesuffix("/v1")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options of a model and of the machine that runs it."""
    group = parser.add_argument_group("model and machine")
    group.add_argument(
        "--model",
        type=catalog.checked,
        default="stories",
        metavar="NAME",
        help="stories or stories-chat (embedded, work offline), a folder with config.json and "
        f"safetensors{catalog.others()}, or a name on the Hugging Face hub such as gpt2 or "
        "gpt2-medium, downloaded once",
    )
    group.add_argument(
        "--random-weights",
        action="store_true",
        help="random numbers in place of the weights: nothing is downloaded, the text is noise, "
        "and the speed is real",
    )
    group.add_argument(
        "--max-model-len",
        type=whole_number(2, MOST_TOKENS),
        metavar="N",
        help="most tokens of a prompt and its answer together; default: the model's own context",
    )
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda", "mps"),
        default="auto",
        help="where to compute; auto takes a CUDA GPU if there is one, else the CPU, and never mps "
        "(Apple)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="number format; auto is bfloat16 for weights stored so, if the processor has "
        "instructions for it, else float32; bfloat16 and float16 halve the memory to read, but "
        "their rounding may choose another token; float64 is slow and settles whether two engines "
        "agree",
    )
    group.add_argument(
        "--linear",
        choices=LINEAR,
        default="auto",
        help="linear layers on a CPU; auto lays the weights out once for this processor (packed), "
        "or computes 16 bits without instructions in float32 (widened)",
    )
    group.add_argument(
        "--threads",
        type=whole_number(1, MOST_THREADS),
        metavar="N",
        help="CPU threads; default: PyTorch's choice, one per core; set it to leave cores free or "
        "to compare two machines",
    )
    group.add_argument(
        "--seed",
        type=whole_number(0, 2**63 - 1),
        metavar="N",
        help="the same seed repeats the sampled text and the --random-weights; default: a new one "
        "for each text, and 0 for the weights",
    )


def weight_formats() -> list[str]:
    """The values of --weights."""
    return [AUTO, *registry.WEIGHTS]


def kv_formats() -> list[str]:
    """The values of --kv-dtype."""
    return [AUTO, *KV_DTYPES, *registry.CACHES]


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """--weights and --kv-dtype: formats that later stages add."""
    group = parser.add_argument_group("formats")
    group.add_argument("--weights", choices=weight_formats(), default=AUTO, help=ABOUT_WEIGHTS)
    group.add_argument("--kv-dtype", choices=kv_formats(), default=AUTO, help=ABOUT_KV)


def add_max_tokens(parser: argparse._ActionsContainer, default: int) -> None:
    """--max-tokens alone, for programs without sampling."""
    parser.add_argument(
        "--max-tokens",
        type=whole_number(1, MOST_TOKENS),
        default=default,
        metavar="N",
        help="stop after N new tokens, unless the text ends or fills the model's context first",
    )


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int = 400) -> None:
    """--max-tokens, --temperature, --top-k, --top-p."""
    group = parser.add_argument_group("text")
    add_max_tokens(group, max_tokens)
    group.add_argument(
        "--temperature",
        type=number(0, 2),
        default=0.0,
        metavar="T",
        help="0 always takes the likeliest token, so that every run gives the same text; 0.8 "
        "varies the story; above 1 it gets wild",
    )
    group.add_argument(
        "--top-k",
        type=whole_number(0, MOST_TOKENS),
        default=0,
        metavar="K",
        help="sample among the K likeliest tokens only; 0 is all",
    )
    group.add_argument(
        "--top-p",
        type=number(0, 1, above=True),
        default=1.0,
        metavar="P",
        help="sample among the fewest tokens that together have probability P, a cut that adapts "
        "to the context; 1 is all",
    )


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """The positional prompt, which `read_prompt` reads."""
    parser.add_argument(
        "prompt",
        nargs="?",
        help="the text to continue, in quotes; read from standard input if it is -, or if text is "
        "piped in instead; default: a built-in one",
    )


def add_prompt_ids(parser: argparse.ArgumentParser) -> None:
    """--prompt-ids, which `read_prompt` and `load_model_from` read."""
    parser.add_argument(
        "--prompt-ids",
        type=checked(IdTokenizer(None).encode),
        metavar="1,2,3",
        help="the prompt as token ids; a model without a tokenizer answers in ids too",
    )


def add_prompts(parser: argparse._ActionsContainer) -> None:
    """--prompts, which `read_prompts` reads."""
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="continue every line of a UTF-8 text file, all at once; without this and without a "
        "prompt, built-in prompts",
    )


def generation_parser(module: str, about: str, *examples: str) -> Parser:
    """The parser of `python -m <stage>`: a prompt, and all options. `examples` are arguments."""
    parser = Parser(
        module,
        about,
        f'  python -m {module} "Once upon a time"\n'
        f'  python -m {module} "Once upon a time" --temperature 0.8 --seed 7\n'
        f"  echo Long ago | python -m {module} --max-tokens 50\n"
        f"  python -m {module} --prompt-ids 31,7,12 --model FOLDER\n"
        f'  python -m {module} "The meaning of life is" --model gpt2 --top-k 40 --temperature 0.9'
        + "".join(f"\n  python -m {module} {example}" for example in examples),
    )
    add_prompt(parser)
    add_prompt_ids(parser)
    add_sampling_options(parser)
    add_model_options(parser)
    return parser


def sampling_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling options as fields of SamplingParams."""
    return {
        name: getattr(options, name)
        for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")
    }


def read_prompt(options: argparse.Namespace) -> str:
    """The prompt of the command line or of standard input, or the built-in one: see `_given`."""
    text = _given(options)
    return PROMPT if text is None else text


def read_prompts(options: argparse.Namespace) -> str | list[str] | None:
    """The lines of --prompts, or one prompt as `read_prompt` takes it, or None for built-in ones.

    A newline at the end of the file begins no prompt; an empty line among others is an empty
    prompt, which engines refuse. Raises UserError for a file that cannot be read as text or has no
    prompt, for --prompts together with a prompt, and when `_given` does.
    """
    if options.prompts is None:
        return _given(options)
    if options.prompt is not None or getattr(options, "prompt_ids", None) is not None:
        raise UserError("Found both a prompt and --prompts: give one of them.")
    return _lines(options.prompts)


def _given(options: argparse.Namespace) -> str | None:
    """The prompt of the command line, or of standard input if it is '-' or a text is piped in.

    None if nothing was given: a terminal is read only for '-', or the program would wait in
    silence. The newline that `echo` or an editor adds is dropped. --prompt-ids are returned as they
    are, for the tokenizer of `load_model_from`. Raises UserError if the prompt is empty, too long
    or not UTF-8.
    """
    ids: str | None = getattr(options, "prompt_ids", None)
    if ids is not None:
        if options.prompt is not None:
            raise UserError("Found both a prompt and --prompt-ids: give one of them.")
        return ids
    terminal = sys.stdin is not None and sys.stdin.isatty()
    if options.prompt not in (None, "-"):
        data = options.prompt.encode("utf-8", "replace")
    elif options.prompt is None and (terminal or sys.stdin is None or not _more(sys.stdin.buffer)):
        return None
    elif sys.stdin is None:
        raise UserError(f'Standard input is closed: give the prompt in quotes, such as "{PROMPT}".')
    else:
        if terminal:
            end = "Ctrl-Z and Enter" if sys.platform == "win32" else "Ctrl-D"
            print(f"[type a text; end it with Enter and {end}]", file=sys.stderr, flush=True)
        # Bytes, because the text layer of some systems is not UTF-8.
        data = sys.stdin.buffer.read(MOST_PROMPT_BYTES + 1)
    if len(data) > MOST_PROMPT_BYTES:
        raise UserError(
            f"The prompt is over {MOST_PROMPT_BYTES // 1024} KiB, more than any model here can "
            "read: shorten it."
        )
    text = _decoded(data)
    if text is None:
        raise UserError(
            "The prompt on standard input is not UTF-8 text: save or convert it as UTF-8."
        )
    if options.prompt in (None, "-"):
        text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise UserError(f'The prompt is empty: give some text, such as "{PROMPT}".')
    return text


def _decoded(data: bytes) -> str | None:
    """UTF-8 as text, without the byte order mark that PowerShell puts first; None if it is not."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _more(stream: Any) -> bool:
    """Whether standard input has bytes; it consumes none."""
    return bool(stream.peek(1))


def _lines(name: str) -> list[str]:
    try:
        data = read_bytes(Path(name), MOST_FILE_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            f"--prompts {name} cannot be read ({why}): name a text file with one prompt a line."
        ) from None
    text = _decoded(data)
    if text is None or "\0" in text:
        raise UserError(
            f"--prompts {name} is not UTF-8 text: save or convert it as UTF-8, one prompt a line."
        )
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if not any(lines):
        raise UserError(f"--prompts {name} is empty: write one prompt a line.")
    return lines


def sampling_of(sampling: Any, index: int) -> Any:
    """The options for prompt `index` of several, with its own seed, so that equal prompts get
    different answers."""
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + index) % 2**63)


def output_file(name: str, suffix: str) -> Path:
    """The path of a file to be written at the end.

    Raises UserError now if writing would fail, or if the name does not end in `suffix`.
    """
    path = Path(name)
    if path.is_dir():
        raise UserError(
            f"{path} is a folder: name a file in it, such as {path / ('steps' + suffix)}."
        )
    if path.suffix.lower() != suffix:
        raise UserError(
            f"{path} has the wrong ending for its content: give it a name that ends in {suffix}."
        )
    if not path.parent.is_dir():
        raise UserError(
            f"The folder {path.parent} does not exist: make it first, or name another one."
        )
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise _unwritable(path, error) from None
    return path


def write_file(path: Path, data: bytes) -> None:
    """Write a file of `output_file`, and report it on standard error. Raises UserError."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise _unwritable(path, error) from None
    print(f"[written: {path}]", file=sys.stderr)


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be written ({error.strerror}): name another place.")


def choose_device(name: str) -> torch.device:
    """The device for --device. Raises UserError if this machine lacks it."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "finds no GPU that it can use" if built else "is a build without CUDA"
        raise UserError(
            f"--device cuda is impossible because this PyTorch {why}: use --device cpu, or install "
            "what is missing."
        )
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError(
            "--device mps is impossible because PyTorch finds no Apple GPU: use --device cpu."
        )
    return torch.device(name)


def choose_dtype(
    name: str, device: torch.device, model: str | None = None, weights: str = "auto"
) -> torch.dtype:
    """The dtype for --dtype and --weights, which may name one, too. "auto" is bfloat16 where the
    weights of `model` are stored so and the device has instructions for it, else float32. Raises
    UserError if `device` lacks such numbers, or if the options name two dtypes.
    """
    if weights in DTYPES:
        if name not in ("auto", weights):
            raise UserError(
                f"--dtype {name} and --weights {weights} are two formats for one model: leave one "
                "of them out."
            )
        name = weights
    if name == "float64" and device.type == "mps":
        raise UserError("Apple GPUs have no float64: use --dtype float32, or --device cpu.")
    import torch

    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    stored = model is not None and weights == "auto" and catalog.stored_dtype(model) == "BF16"
    return torch.bfloat16 if stored and has_bfloat16(device) else torch.float32


def cache_options(kv_dtype: str) -> dict[str, Any]:
    """--kv-dtype as an option of stage 05's `make`, or of a later one; none for "auto"."""
    import torch

    return {} if kv_dtype == "auto" else {"dtype": getattr(torch, kv_dtype)}


def has_bfloat16(device: torch.device) -> bool:
    """Whether `device` has instructions for products in bfloat16."""
    import torch

    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    known: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type == "cpu" and any(map(known.get, ("avx512_bf16", "amx_bf16", "bf16")))


def device_and_dtype(options: Any) -> tuple[torch.device, torch.dtype]:
    """For --device, --dtype, --weights and the model. Raises UserError."""
    device = choose_device(options.device)
    stored = None if options.random_weights else options.model
    weights = getattr(options, "weights", "auto")
    return device, choose_dtype(options.dtype, device, stored, weights)


def load_model_from(options: argparse.Namespace) -> Loaded:
    """Load the model of the options.

    With --prompt-ids the tokenizer reads ids, and a folder needs no tokenizer of its own. Raises
    UserError for a missing device, for a context longer than the model's, and for anything wrong
    with the checkpoint.
    """
    import torch

    from . import checkpoint, linear

    device, dtype = device_and_dtype(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    loaded = models.load(
        options.model,
        random_weights=options.random_weights,
        seed=options.seed or 0,
        weights=getattr(options, "weights", "auto"),
    )
    longest = getattr(options, "max_model_len", None) or loaded.config.n_positions
    if longest > loaded.config.n_positions:
        raise UserError(
            f"--max-model-len {longest} is more than the {loaded.config.n_positions} positions of "
            f"{loaded.config.name}: give at most that, or leave the option out."
        )
    tokenizer = _tokenizer(options, loaded.folder)
    checkpoint.check_vocabulary(tokenizer, loaded.config)
    if hasattr(tokenizer, "unused"):  # a JsonTokenizer
        loaded.unused = tokenizer.unused(loaded.config.vocab_size)
    model = models.load_model(loaded, device=device, dtype=dtype)
    for tensors in (loaded.tensors, loaded.declared):
        tensors.clear()  # a second reference to the weights would keep them after packing
    kind = linear.optimize(model, options.linear)
    model.config = config = replace(loaded.config, n_positions=longest)
    weights, kv = (getattr(options, name, "auto") for name in ("weights", "kv_dtype"))
    if weights == "auto" and loaded.conversion is not None:
        weights = "quantized"
    origin = loaded.folder, loaded.files
    return Loaded(model, tokenizer, config, kind, device, dtype, *origin, weights, kv)


def _tokenizer(options: argparse.Namespace, folder: Path | None) -> AnyTokenizer:
    if getattr(options, "prompt_ids", None) is not None:
        return IdTokenizer(load_tokenizer(folder) if has_tokenizer(folder) else None)
    try:
        return load_tokenizer(folder)
    except UserError as error:
        if has_tokenizer(folder) or not hasattr(options, "prompt_ids"):
            raise
        advice = "or give the prompt as token ids, with --prompt-ids 1,2,3."
        raise UserError(f"{str(error).removesuffix('.')}; {advice}") from None


def speak(engine: Streaming, loaded: Loaded, prompt: str, sampling: Any) -> None:
    """Print the prompt and its continuation, each token as soon as it is sampled.

    Then one line on standard error: tokens, seconds, tokens per second, finish reason, machine.
    That line follows Ctrl-C, too, and KeyboardInterrupt is raised again.
    """
    ids = loaded.tokenizer.encode(prompt)
    tokens, reason = 0, None
    started = time.perf_counter()
    try:
        for token, text in with_text(engine.stream(ids, sampling), loaded):
            if not tokens:  # the engine has accepted the prompt: an error precedes any text
                text = loaded.tokenizer.decode(ids) + text
            print(text, end="", flush=True)
            tokens, reason = tokens + 1, token.finish_reason
    except KeyboardInterrupt:
        reason = "interrupted"
        raise
    finally:
        if reason:
            seconds = time.perf_counter() - started
            print(flush=True)
            speed = f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tok/s"
            print(f"[{speed}, finish reason {reason}; {loaded}]", file=sys.stderr)


def with_text(tokens: Iterator[Any], loaded: Loaded) -> Iterator[tuple[Any, str]]:
    """Each token, with the text of `AnswerDecoder` for it."""
    decoder = AnswerDecoder(loaded)
    for token in tokens:
        yield token, decoder.push(token.id) + (decoder.flush() if token.finish_reason else "")


class AnswerDecoder(IncrementalDecoder):
    """The text of an answer without end-of-text tokens, in whole characters."""

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded.tokenizer)
        self._hidden = loaded.config.eos_ids

    def push(self, token_id: int) -> str:
        """The text that this id completes."""
        return "" if token_id in self._hidden else super().push(token_id)


def run(main: Callable[[list[str] | None], int | None], argv: list[str] | None = None) -> NoReturn:
    """Run a program's `main` and exit with its status.

    A UserError becomes `error: ...` on standard error and status 2; Ctrl-C is status 130; a closed
    pipe, as in `... | head`, ends the program without a message, and what is written to a closed
    output, as by `>&-`, is lost.

    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it is closed
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a system's pipes may not be UTF-8
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        status = main(argv) or 0
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = EXIT_ERROR
    except (MemoryError, RuntimeError) as error:  # a GPU's torch.OutOfMemoryError is a RuntimeError
        full = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        if not full and "tried to allocate" not in str(error):
            raise
        advice = "use a smaller --model, or --dtype bfloat16."
        print(f"error: There is not enough memory for this: {advice}", file=sys.stderr)
        status = EXIT_ERROR
    except KeyboardInterrupt:
        print(file=sys.stderr)
        status = EXIT_INTERRUPTED
    except OSError as error:
        full = error.errno == errno.ENOSPC
        windows = sys.platform == "win32" and error.errno == errno.EINVAL
        if not (isinstance(error, BrokenPipeError) or windows or full):
            raise
        if full:
            print(f"error: {error.strerror}.", file=sys.stderr)
        # The rest of the buffer would fail again, with a message, when Python closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_ERROR if full else EXIT_PIPE
    sys.exit(status)
