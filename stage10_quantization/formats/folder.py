"""Folders of Hugging Face whose config.json has a quantization_config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shared.checkpoint import DTYPES, read_tensors
from shared.config import Reader, read_config
from shared.errors import UserError
from shared.files import read_json

from ..layers import QuantizedMatrix
from .gguf_model import PROJECTIONS
from .packed import METHODS, Unfit

OPTION = "quantization_config"
FORMATS = ("pack-quantized", "int-quantized")  # of compressed-tensors
UNREAD = ("kv_cache_scheme", "sparsity_config", "transform_config")


class FolderModel:
    """A model in a folder. config: as without a quantization. names: of all tensors, as in
    config.shapes. `read` unpacks one tensor at a time; the files are mapped."""

    in_rows = False

    def __init__(self, folder: str | Path) -> None:
        """Raises UserError for a method that is not read, and for tensors that are missing or
        unexpected."""
        self.folder = Path(folder)
        options = read_json(self.folder / "config.json").get(OPTION)
        if not isinstance(options, dict):
            raise self._error(f"its {OPTION} is not an object")
        self.options: dict[str, Any] = options
        self.method = str(self.options.get("quant_method"))
        self._check_method()
        self.config = read_config(self.folder, ignored=(OPTION,))
        shapes = self.config.shapes()
        self.names = list(shapes)
        self._parts: dict[str, dict[str, Tensor]] = {name: {} for name in shapes}
        for stored, tensor in read_tensors(self.folder).items():
            name = self.config.tensor_name(stored)
            if name is None or name == "lm_head.weight" and self.config.tied:
                continue
            if name in shapes and not name.endswith(".weight"):
                self._parts[name][""] = tensor
                continue
            layer, _, kind = (
                name.partition(".weight.") if ".weight." in name else name.rpartition(".")
            )
            if f"{layer}.weight" not in shapes:
                raise self._error(f"the tensor {stored} is none of the model")
            self._parts[f"{layer}.weight"][kind] = tensor
        for name, parts in self._parts.items():
            if not parts:
                raise self._error(f"it has no tensor for {name}")

    def _error(self, reason: str) -> UserError:
        return UserError(
            f"{self.folder} cannot be opened as a quantized model: {reason}; download it again, or "
            "choose another model."
        )

    def _check_method(self) -> None:
        """Raises UserError for what is not read."""
        if self.method not in METHODS:
            known = ", ".join(METHODS)
            raise self._error(
                f"its quant_method is {self.method[:40]!r}, and only {known} are read"
            )
        if self.method != "compressed-tensors":
            return
        if self.options.get("format") not in FORMATS:
            raise self._error(
                f"its format is {str(self.options.get('format'))[:40]!r}, and only "
                f"{' and '.join(FORMATS)} are read"
            )
        for name in UNREAD:
            if self.options.get(name):
                raise self._error(f"it has a {name}, which is not read")

    def is_quantized(self, name: str) -> bool:
        """Whether `read` returns a QuantizedMatrix."""
        return isinstance(self.read(name), QuantizedMatrix)

    def read(self, name: str, rows: Tensor | None = None) -> Tensor | QuantizedMatrix:
        """A tensor of config.shapes by its name: floats in that shape, of the file's dtype or
        unpacked to float32; or a QuantizedMatrix (out, in), GPT-2's projections too, and of it
        the `rows` (R,) alone. Raises UserError if the stored tensors do not fit."""
        shape, parts = self.config.shapes()[name], self._parts[name]
        plain = parts.get("", parts.get("weight"))
        if len(parts) == 1 and plain is not None and plain.dtype in DTYPES:
            if tuple(plain.shape) != shape:
                raise self._error(f"{name} has the shape {tuple(plain.shape)} instead of {shape}")
            return plain
        if len(shape) != 2:
            raise self._error(f"{name} is stored as {', '.join(sorted(parts))}")
        transposed = name.endswith(PROJECTIONS)  # GPT-2 alone has these names
        outputs, inputs = shape[::-1] if transposed else shape
        unpack, kinds = METHODS[self.method]
        try:
            if unknown := sorted(parts.keys() - kinds):
                raise Unfit(f"{unknown[0]} is not read")
            matrix = unpack(parts, (outputs, inputs), self.options)
        except Unfit as error:
            layer = name.removesuffix(".weight")
            raise self._error(f"the tensors of {layer} are no {self.method}: {error}") from None
        if isinstance(matrix, QuantizedMatrix):
            return matrix if rows is None else matrix.rows(rows)
        return matrix.t() if transposed else matrix


def without(reader: Reader) -> Reader:
    """The reader of a config.json, for one with a quantization_config."""

    def read(fields: Mapping[str, Any], name: str, source: str) -> Any:
        plain = {key: value for key, value in fields.items() if key != OPTION}
        return reader(plain, name, source)

    return read
