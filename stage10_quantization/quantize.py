"""`python -m stage10_quantization quantize`: write a folder with weights in whole numbers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared import cli
from shared.errors import UserError
from shared.files import read_json

from . import OPTION

if TYPE_CHECKING:
    from torch import Tensor

    from .matrix import QuantizedMatrix

CONFIG = "config.json"
WINDOWS = 32  # of a calibration text, at most
TOKENIZER = (  # what else belongs to a model in a folder
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "generation_config.json"),
)
ABOUT = """Stage 10, quantization: write a model with weights in whole numbers.

The result is a folder of safetensors with the names of compressed-tensors. Every command opens it
with --model."""


def make_parser() -> cli.Parser:
    module = "stage10_quantization quantize"
    example = f"  python -m {module} --model FOLDER --weights int4 --method gptq --out model-int4"
    parser = cli.Parser(module, ABOUT, example)
    about = "int8 with a scale for each row, int8-g32 with one for each 32 columns, or int4 with a "
    about += "scale and a zero for each 32; embedding and head are int8-g32 in all"
    formats = ("int8", "int8-g32", "int4")
    parser.add_argument("--weights", choices=formats, required=True, help=about)
    about = "round takes the nearest code of each weight; gptq reads a text, and makes up for each "
    about += "error in the columns to come"
    parser.add_argument("--method", choices=("round", "gptq"), default="round", help=about)
    about = "the text that gptq reads, UTF-8; default: stories"
    parser.add_argument("--text", metavar="FILE", help=about)
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="a new folder")
    cli.add_model_options(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    if options.text is not None and options.method == "round":
        raise UserError("--method round reads no text: leave --text out, or add --method gptq.")
    if options.dtype not in ("auto", "float32"):
        raise UserError("The weights are rounded from float32: leave --dtype out.")
    if options.out.exists():
        raise UserError(f"{options.out} exists already: choose another name, or remove it.")

    from shared.conversion import convert

    from .convert import FORMATS, INT4_ZERO, Quantize
    from .folder import write_folder
    from .gptq import WINDOW, calibrate, text_ids, windows_of

    plain = {"linear": "plain", "dtype": "float32", "weights": "float32"}
    loaded = cli.load_model_from(argparse.Namespace(**{**vars(options), **plain}))
    model, config, folder = loaded.model, loaded.config, loaded.folder
    if folder is None or not (folder / CONFIG).exists():
        raise UserError("Only a model in a folder with a config.json can be written anew.")
    format = INT4_ZERO if options.weights == "int4" else FORMATS[options.weights]
    if options.method == "gptq":
        size, end = min(WINDOW, config.n_positions), next(iter(config.eos_ids), 0)
        ids = text_ids(loaded.tokenizer, end, WINDOWS * size, options.text, "calibration")
        calibrate(model, windows_of(ids, size), format)
    else:
        convert(model, Quantize(format))
    fields = {key: value for key, value in read_json(folder / CONFIG).items() if key != OPTION}
    tensors = {name: tensor_of(model, name) for name in config.shapes()}
    copies = [folder / name for name in TOKENIZER if (folder / name).exists()]
    write_folder(options.out, fields, tensors, copies)
    return 0


def tensor_of(model: Any, name: str) -> Tensor | QuantizedMatrix:
    """A tensor of config.shapes."""
    layer, _, kind = name.rpartition(".")
    module = model.get_submodule(layer)
    matrix: QuantizedMatrix | None = getattr(module, "matrix", None)
    return matrix if kind == "weight" and matrix is not None else getattr(module, kind).detach()
