"""`python -m stage10_quantization quantize`: write a model with weights in whole numbers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from shared import cli
from shared.config import Config
from shared.errors import UserError
from shared.files import read_json
from shared.tokenizer import has_tokenizer

from .files import OPTION

if TYPE_CHECKING:
    from torch import Tensor

    from .layers import QuantizedMatrix

    Tensors = Iterator[tuple[str, Tensor | QuantizedMatrix]]

METHODS = ("round", "gptq", "smoothquant+round", "smoothquant+gptq")
GGUF, CONFIG = ".gguf", "config.json"
TOKENIZER = (  # what else belongs to a model in a folder
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
ABOUT = """Stage 10, quantization: write a model with weights in whole numbers.

The result is a folder of safetensors as compressed-tensors names them, or a .gguf file, whichever
--out names. Every command opens it with --model."""


def make_parser() -> cli.Parser:
    module = "stage10_quantization quantize"
    parser = cli.Parser(
        module,
        ABOUT,
        f"  python -m {module} --weights int8 --out stories-int8\n"
        f"  python -m {module} --model FOLDER --weights int4 --method gptq --out model.gguf",
    )
    parser.add_argument(
        "--weights",
        choices=("int8", "int8-g32", "int4"),
        required=True,
        help="int8 with a scale for each row, int8-g32 with one for each 32 columns, or int4 with "
        "a scale and a minimum for each 32; embedding and head are int8-g32 in all",
    )
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="round",
        help="round takes the nearest code of each weight; gptq makes up for each error in the "
        "columns to come; smoothquant first moves outliers from activations into weights; all but "
        "round read a text",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="the text that gptq and smoothquant read, UTF-8; default: stories",
    )
    parser.add_argument(
        "--windows",
        type=cli.whole_number(1, 4096),
        default=32,
        metavar="N",
        help="how much of the text to read, in windows of at most 512 tokens",
    )
    parser.add_argument(
        "--out", required=True, type=place, metavar="NAME", help="a new folder, or NAME.gguf"
    )
    cli.add_model_options(parser)
    return parser


def place(name: str) -> Path:
    """Where to write. Raises UserError if something is there already."""
    path = Path(name).expanduser()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"--out {name} exists already: choose another name, or remove it.")
    return path


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.text is not None and options.method == "round":
        raise UserError("--method round reads no text: leave --text out, or choose another method.")
    if options.dtype not in ("auto", "float32"):
        raise UserError("The weights are rounded from float32: leave --dtype out.")
    quantize(options)
    return 0


def quantize(options: argparse.Namespace) -> None:
    from shared.linear import convert

    from .convert import FORMATS, INT4_ZERO, Quantize
    from .gptq import calibrate, windows_of
    from .quality import WINDOW, text_ids
    from .smoothquant import smooth

    plain = {"linear": "plain", "dtype": "float32", "weights": "float32"}
    loaded = cli.load_model_from(argparse.Namespace(**{**vars(options), **plain}))
    model, config = loaded.model, loaded.config
    steps, format = options.method.split("+"), FORMATS[options.weights]
    if format.minimum and options.out.suffix != GGUF:
        format = INT4_ZERO
    windows: list[Tensor] = []
    if steps != ["round"]:
        size, end = min(WINDOW, config.n_positions), next(iter(config.eos_ids), 0)
        ids = text_ids(loaded.tokenizer, end, options.windows * size, options.text, "calibration")
        windows = windows_of(ids, options.windows, size)
    if "smoothquant" in steps:
        smooth(model, windows)
    if "gptq" in steps:
        calibrate(model, windows, format)
    else:
        convert(model, Quantize(format), {})
    names = tqdm(config.shapes(), desc="writing", unit="tensor", disable=None)
    write(options, loaded, ((name, tensor_of(model, name)) for name in names))


def tensor_of(model: Any, name: str) -> Tensor | QuantizedMatrix:
    """A tensor of config.shapes."""
    layer, _, kind = name.rpartition(".")
    module = model.get_submodule(layer)
    matrix: QuantizedMatrix | None = getattr(module, "matrix", None)
    if kind == "weight" and matrix is not None:
        return matrix
    tensor: Tensor = getattr(module, kind)
    return tensor.detach()


def write(options: argparse.Namespace, loaded: cli.Loaded, tensors: Tensors) -> None:
    """Write the model as a folder or a GGUF file, with its tokenizer. Raises UserError."""
    from .formats.folder_writer import write_folder
    from .formats.gguf_vocabulary import tokenizer_metadata
    from .formats.gguf_writer import write_gguf

    config, folder, path = loaded.config, loaded.folder, options.out
    if path.suffix == GGUF:
        known = folder if has_tokenizer(folder) else None
        tokenizer = tokenizer_metadata(known, config) if known else None
        write_gguf(path, config, tensors, tokenizer)
        return
    copies = [folder / name for name in TOKENIZER if (folder / name).exists()] if folder else []
    write_folder(path, fields_of(config, folder), tensors, copies, options.weights == "int4")


def fields_of(config: Config, folder: Path | None) -> dict[str, Any]:
    """The fields of config.json: those in the `folder` that the model comes from, or new ones."""
    from stage08_llama.config import LlamaConfig, to_fields

    if folder and (folder / CONFIG).exists():
        return {key: x for key, x in read_json(folder / CONFIG).items() if key != OPTION}
    if isinstance(config, LlamaConfig):
        return to_fields(config)
    names = "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "layer_norm_epsilon"
    fields = {name: getattr(config, name) for name in names}
    ends = {"eos_token_id": list(config.eos_ids), "tie_word_embeddings": config.tied}
    return {"model_type": "gpt2", **fields, **ends}
