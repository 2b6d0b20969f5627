"""Checkpoints whose matrices are stored as whole numbers, for `checkpoint.load`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from shared.checkpoint import Checkpoint, Opened

from .convert import FORMATS, Quantize
from .folder import FolderModel
from .layers import QuantizedEmbedding, QuantizedLinear
from .matrix import PROJECTIONS, QuantizedMatrix

if TYPE_CHECKING:
    from .gguf_file import GGUFModel


class Stored:
    """The Conversion of a model in files: layers over the matrices that it stores as whole numbers,
    which are read when their layer is made."""

    def __init__(self, model: FolderModel | GGUFModel, activations: str) -> None:
        self.model, self.activations = model, activations
        self.stored = model.quantized

    def tensors(self, plain: bool = False) -> dict[str, Tensor]:
        """The tensors of the model that are no codes; or all of them as `plain` ones."""
        tensors = {}
        for name in self.model.config.shapes():
            if name in self.stored and not plain:
                continue
            tensor = self.model.read(name)
            if isinstance(tensor, QuantizedMatrix):
                weight = tensor.dequantized()
                tensor = weight.t() if name.endswith(PROJECTIONS) else weight
            tensors[name] = tensor
        return tensors

    def matrix(self, name: str) -> QuantizedMatrix:
        matrix = self.model.read(f"{name}.weight")
        assert isinstance(matrix, QuantizedMatrix)
        return matrix

    def layer(self, name: str, plain: nn.Linear) -> nn.Module:
        if f"{name}.weight" not in self.stored:
            return plain
        return QuantizedLinear(self.matrix(name), plain.bias, self.activations)

    def embedding(self, name: str, plain: nn.Embedding) -> nn.Embedding | QuantizedEmbedding:
        if f"{name}.weight" not in self.stored:
            return plain
        return QuantizedEmbedding(self.matrix(name), plain.weight.dtype, self.activations)


def change(checkpoint: Checkpoint, weights: str) -> None:
    """Change the checkpoint so that its model has `weights`, of --weights, whatever its own are.
    Whole numbers are replaced by what they stand for, and rounded anew if `weights` are of
    others."""
    if isinstance(checkpoint.conversion, Stored):
        checkpoint.tensors = checkpoint.conversion.tensors(plain=True)
        checkpoint.conversion = None
    if weights in FORMATS:
        checkpoint.conversion = Quantize(weights)


def open_file(path: Path) -> Opened:
    """The model in a GGUF file, whose activations stay floats. Without a tokenizer in the file, one
    beside it counts. Raises UserError."""
    from .gguf_file import GGUFModel
    from .gguf_tokenizer import tokenizer_folder

    model = GGUFModel(path)
    folder = tokenizer_folder(model.metadata, model.error) or path.parent
    model.metadata.clear()  # megabytes, in the files now
    stored = Stored(model, "float")
    return Opened(model.config, stored.tensors(), folder, stored)


def open_folder(path: Path) -> Opened:
    """The quantized model in a folder, whose activations are rounded to int8 only if all groups of
    its quantization_config say so. Raises UserError."""
    model = FolderModel(path)
    schemes = model.options.get("config_groups", {}).values()
    rounded = [bool(scheme.get("input_activations")) for scheme in schemes]
    stored = Stored(model, "int8" if rounded and all(rounded) else "float")
    return Opened(model.config, stored.tensors(), path, stored)
