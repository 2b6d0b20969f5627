"""GGUF, the files of llama.cpp: a header, then tensors, one after another.

    "GGUF" | version | number of tensors | number of values
    values   key | type | value                              metadata, the tokenizer's too
    tensors  name | number of sizes | sizes | type | offset  innermost size first
    padding to the alignment
    data     each tensor at its offset from here

Whole numbers are little-endian, a text is its length in 8 bytes and UTF-8. The file is mapped, and
a number from it is compared with what is left of the file before it is used: a file with any bytes
gives tensors or a UserError, and takes no more memory than it has bytes. The file must not change
while it is open.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.errors import UserError

from ..layers import QuantizedMatrix
from .blocks import FORMATS

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = (  # of the types, by number
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS "
    "IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 "
    "Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 IQ4_NL_4_8 IQ4_NL_8_8 MXFP4 NVFP4 Q1_0"
)
TYPES = dict(enumerate(NAMES.split()))
NUMBERS = {name: number for number, name in TYPES.items()}
VALUES = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}  # of metadata, as in struct
TEXT, ARRAY = 8, 9
MOST_ENTRIES = 2**20  # values, tensors, or texts in an array: the largest have half of that
CHUNK = 2**22  # values that are unpacked at a time


@dataclass(frozen=True)
class Info:
    """A tensor of the file: shape as in PyTorch, place in bytes."""

    kind: str
    shape: tuple[int, ...]
    start: int
    size: int


class GGUF:
    """An open file. metadata: key -> number, text, list of texts, or array. infos: by name."""

    def __init__(self, path: str | Path) -> None:
        """Raises UserError if the file is not GGUF, is corrupt, or has a tensor of another type."""
        self.path = Path(path)
        try:
            if not self.path.is_file():
                raise self.error("it is no file")
            with self.path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise self.error(str(error)) from None
        header = _Header(self)
        if header.take(4) != b"GGUF":
            raise self.error("it does not begin with GGUF")
        if (version := header.number("I")) not in (2, 3):
            raise self.error(f"its version is {version}, not 2 or 3")
        tensors, values = header.count("Q"), header.count("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(values):
            key = header.text()
            if key in self.metadata:
                raise self.error(f"{key[:99]!r} is there twice")
            self.metadata[key] = header.value()
        self.infos = self._tensors(header, tensors)

    def error(self, reason: str) -> UserError:
        return UserError(
            f"{self.path} cannot be opened as a GGUF file: {reason}; download it again, or choose "
            "another file."
        )

    def tensor_error(self, name: str, reason: str) -> UserError:
        return self.error(f"the tensor {name[:99]!r} {reason}")

    def _tensors(self, header: _Header, count: int) -> dict[str, Info]:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & alignment - 1:
            raise self.error(f"its alignment is {alignment!r}, not a power of two")
        infos: dict[str, Info] = {}
        for _ in range(count):
            name = header.text()
            if name in infos:
                raise self.tensor_error(name, "is there twice")
            infos[name] = self._info(header, name, alignment)
        data = -(-header.at // alignment) * alignment
        end, before = data, ""
        for name, info in sorted(infos.items(), key=lambda item: item[1].start):
            start = data + info.start
            if start + info.size > len(self._data):
                raise self.tensor_error(name, "ends after the file, which may be cut")
            if start < end:
                raise self.error(f"the tensors {before[:99]!r} and {name[:99]!r} overlap")
            end, before = start + info.size, name
            infos[name] = Info(info.kind, info.shape, start, info.size)
        return infos

    def _info(self, header: _Header, name: str, alignment: int) -> Info:
        """With the offset from the data in place of the start."""
        dimensions = header.number("I")
        if not 1 <= dimensions <= 4:
            raise self.tensor_error(name, f"has {dimensions} dimensions")
        sizes = [header.number("Q") for _ in range(dimensions)]
        number, offset = header.number("I"), header.number("Q")
        kind = TYPES.get(number, f"number {number}")
        if kind in FLOATS:
            values, size = 1, FLOATS[kind].itemsize
        elif kind in FORMATS:
            values, size = FORMATS[kind].values, FORMATS[kind].size
        else:
            known = ", ".join([*FLOATS, *FORMATS])
            raise self.tensor_error(name, f"has the type {kind}, which is not {known}")
        if 0 in sizes or sizes[0] % values:
            raise self.error(
                f"the tensor {name[:99]!r} has the sizes {sizes}, not blocks of {kind}"
            )
        if offset % alignment:
            raise self.tensor_error(name, f"is at {offset}, off the alignment")
        return Info(kind, tuple(sizes[::-1]), offset, math.prod(sizes) // values * size)

    def read(self, name: str, chosen: Tensor | None = None) -> Tensor | QuantizedMatrix:
        """The tensor `name` of the file: floats as they are stored, mapped; of other types the
        matrix (all sizes but the last, the last). chosen: (R,), its rows that are read; None for
        all. Raises UserError if a scale is not finite."""
        info = self.infos[name]
        if info.kind in FLOATS:
            count = math.prod(info.shape)
            flat = torch.frombuffer(
                self._data, dtype=FLOATS[info.kind], count=count, offset=info.start
            )
            tensor = flat.view(info.shape)
            return tensor if chosen is None else tensor[chosen]
        kind, width = FORMATS[info.kind], info.shape[-1]
        rows, blocks = math.prod(info.shape[:-1]), width // kind.values  # blocks of a row
        stored = np.frombuffer(self._data, np.uint8, info.size, info.start)
        stored = stored.reshape(rows, blocks, kind.size)
        if chosen is not None:
            stored, rows = stored[chosen.numpy()], len(chosen)
        codes = torch.empty(rows, width, dtype=torch.int8)
        planes: list[list[np.ndarray]] = [[], []]
        step = max(1, CHUNK // width)
        for row in range(0, rows, step):
            with np.errstate(invalid="ignore", over="ignore"):
                part, *scales = kind.read(stored[row : row + step].reshape(-1, kind.size))
            codes[row : row + step] = torch.from_numpy(part).reshape(-1, width)
            for plane, values in zip(planes, scales, strict=True):
                if values is not None:
                    plane.append(values.reshape(-1, blocks * values.shape[1]))
        self._forget(info)
        scale, minimum = (torch.from_numpy(np.concatenate(p)) if p else None for p in planes)
        assert scale is not None
        if not scale.isfinite().all() or minimum is not None and not minimum.isfinite().all():
            raise self.tensor_error(name, "has a scale that is not finite")
        return QuantizedMatrix(codes, scale, minimum, kind.bits)

    def _forget(self, info: Info) -> None:
        """Give the memory of the mapped pages back: they were copied."""
        page = mmap.PAGESIZE
        first, last = -(-info.start // page) * page, (info.start + info.size) // page * page
        if hasattr(mmap, "MADV_DONTNEED") and last > first:
            self._data.madvise(mmap.MADV_DONTNEED, first, last - first)


class _Header:
    """Reads one value of the header after another."""

    def __init__(self, file: GGUF) -> None:
        self.file, self.data, self.at = file, file._data, 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise self.file.error("it ends within its header")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str) -> Any:
        (number,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return number

    def count(self, code: str) -> int:
        count: int = self.number(code)
        if count > MOST_ENTRIES:
            raise self.file.error(f"its header has a list of {count} entries")
        return count

    def text(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError:
            raise self.file.error("its header has a text that is not UTF-8") from None

    def value(self) -> Any:
        if (kind := self.number("I")) != ARRAY:
            return self.scalar(kind)
        kind = self.number("I")
        if kind in VALUES:
            size = struct.calcsize("<" + VALUES[kind])
            data = self.take(self.number("Q") * size)
            return np.frombuffer(data, np.dtype(VALUES[kind]).newbyteorder("<"))
        return [self.scalar(kind) for _ in range(self.count("Q"))]

    def scalar(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind not in VALUES:
            raise self.file.error(f"its header has a value of the unknown type {kind}")
        number = self.number(VALUES[kind])
        # Of float32 the shortest decimal: 1e-05 and not 9.99999974737875e-06.
        return float(str(np.float32(number))) if VALUES[kind] == "f" else number
