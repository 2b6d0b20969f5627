"""Checkpoints whose matrices are stored as whole numbers, for `checkpoint.load`."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shared.checkpoint import Checkpoint, Opened
from shared.config import Config

from .convert import FORMATS, Quantize
from .formats.folder import FolderModel
from .formats.gguf_model import PROJECTIONS, GGUFModel
from .gguf_tokenizer import tokenizer_folder
from .layers import QuantizedEmbedding, QuantizedLinear, QuantizedMatrix

POSITIONS = "wpe.weight"  # GPT-2's: a table that is added, and never a matrix of whole numbers


class Model(Protocol):
    """A model in files, one tensor at a time. names: those of config.shapes. in_rows: whether
    `read` takes the `rows` (R,) of a QuantizedMatrix that are wanted, and unpacks no others."""

    config: Config
    names: list[str]
    in_rows: bool

    def is_quantized(self, name: str) -> bool: ...

    def read(self, name: str, rows: Tensor | None = None) -> Tensor | QuantizedMatrix: ...


class FileMatrix:
    """A QuantizedMatrix in a file. The kernels lay it out some rows at a time, and then nothing
    else needs it in memory. What needs all of it keeps it, until `forget`."""

    def __init__(self, model: Model, name: str) -> None:
        self._model, self._name = model, name
        self._kept: QuantizedMatrix | None = None
        shape = model.config.shapes()[name]
        self.shape = shape[::-1] if name.endswith(PROJECTIONS) else shape

    def _read(self, rows: Tensor | None = None) -> QuantizedMatrix:
        matrix = self._model.read(self._name, rows)
        assert isinstance(matrix, QuantizedMatrix)
        return matrix

    @property
    def bytes(self) -> int:  # of one row: whether a layer is a `Linear` asks for it
        return self._read(torch.tensor([0])).bytes * self.shape[0]

    def rows(self, index: Tensor) -> QuantizedMatrix:
        if self._kept is None and self._model.in_rows:
            return self._read(index)
        return self.keep().rows(index)

    def keep(self) -> QuantizedMatrix:
        if self._kept is None:
            self._kept = self._read()
        return self._kept

    def forget(self) -> None:
        self._kept = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kept or self._read(), name)


class StoredLinear(QuantizedLinear):
    """A layer over a FileMatrix. The slow product keeps it in memory."""

    def forward(self, x: Tensor) -> Tensor:
        keep(self.matrix)
        return super().forward(x)

    def product(self, layers: Sequence[Any], *arguments: Any) -> Any:
        slow: Any = super()
        product = slow.product(layers, *arguments)
        for layer in layers:
            if isinstance(layer.matrix, FileMatrix):
                layer.matrix.forget()
        trim()
        return product


def trim() -> None:
    """Give memory that is free back to the system: glibc keeps what lies between blocks in use,
    which would be as much as the model once all its layers are laid out."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def keep(matrix: Any) -> None:
    """Keep a matrix that is in a file in memory."""
    if isinstance(matrix, FileMatrix):
        matrix.keep()


class StoredTable(QuantizedEmbedding):
    """A table over a FileMatrix, which it keeps in memory unless the kernels have laid it out."""

    def forward(self, ids: Tensor) -> Tensor:
        keep(self.matrix)
        return super().forward(ids)

    def head(self) -> QuantizedLinear:
        return StoredLinear(self.matrix, None, self.activations)


class Stored:
    """The Conversion of a `Model`: layers over the matrices that it stores as whole numbers."""

    def __init__(self, model: Model, activations: str) -> None:
        self.model, self.activations = model, activations

    def declares(self, name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        return {"weight": shape} if self.declared(f"{name}.weight") else {}

    def declared(self, name: str) -> bool:
        return self.model.is_quantized(name) and name != POSITIONS

    def tensors(self, plain: bool = False) -> dict[str, Tensor]:
        """All tensors of the model; those that are declared are only a shape, unless all are to be
        `plain` ones."""
        tensors = {}
        for name, shape in self.model.config.shapes().items():
            if self.declared(name) and not plain:
                tensors[name] = torch.zeros((), dtype=torch.int8).expand(shape)
                continue
            tensor = self.model.read(name)
            if isinstance(tensor, QuantizedMatrix):
                weight = tensor.dequantized()
                tensor = weight.t() if name.endswith(PROJECTIONS) else weight
            tensors[name] = tensor
        return tensors

    def matrix(self, name: str) -> Any:
        return FileMatrix(self.model, f"{name}.weight")

    def layer(self, name: str, plain: nn.Linear, tensors: Mapping[str, Tensor]) -> nn.Module:
        if not tensors:
            return plain
        return StoredLinear(self.matrix(name), plain.bias, self.activations)

    def embedding(
        self, name: str, plain: nn.Embedding, tensors: Mapping[str, Tensor]
    ) -> nn.Embedding | QuantizedEmbedding:
        if not tensors:
            return plain
        return StoredTable(self.matrix(name), plain.weight.dtype, self.activations)


def change(checkpoint: Checkpoint, weights: str) -> None:
    """Change the checkpoint so that its model has `weights`, of --weights, whatever its own are.
    Whole numbers are replaced by what they stand for, and rounded anew if `weights` are of
    others."""
    if isinstance(checkpoint.conversion, Stored):
        checkpoint.tensors = checkpoint.conversion.tensors(plain=True)
        checkpoint.declared, checkpoint.conversion = {}, None
    if weights in FORMATS:
        checkpoint.conversion = Quantize(weights)


@cache
def notice(text: str) -> None:
    """Print a line on standard error, once."""
    print(f"[{text}]", file=sys.stderr, flush=True)


def open_file(path: Path) -> Opened:
    """The model in a GGUF file, whose activations stay floats. Raises UserError."""
    model = GGUFModel(path)
    metadata = model.metadata
    folder = tokenizer_folder(metadata, model.file.error)
    if license := metadata.get("general.license"):
        maker = metadata.get("general.organization")
        notice(f"{path.name}{f', by {maker}' if maker else ''}: license {license}")
    for key in [key for key in metadata if key.startswith("tokenizer.")]:
        del metadata[key]  # megabytes, in the files now
    stored = Stored(model, "float")
    return Opened(model.config, stored.tensors(), folder, [path], stored)


def open_folder(path: Path) -> Opened:
    """The quantized model in a folder. Raises UserError."""
    model = FolderModel(path)
    files = sorted(path.glob("*.safetensors"))
    stored = Stored(model, activations_of(model.options))
    return Opened(model.config, stored.tensors(), path, files, stored)


def activations_of(options: Mapping[str, Any]) -> str:
    """How layers read their input: rounded to int8 only if the quantization_config says so."""
    groups = options.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    rounded = [isinstance(scheme, dict) and scheme.get("input_activations") for scheme in schemes]
    return "int8" if rounded and all(rounded) else "float"
