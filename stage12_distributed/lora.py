"""LoRA: many fine-tuned models in one batch, as one model plus small differences.

To a layer y = W x, an adapter adds the product of two thin matrices: y += s * B (A x), where A is
(r, in) and B is (out, r). W is read once for all rows of a pass; then each adapter's A and B are
applied to its own rows. Hu et al., "LoRA" (2021); Chen et al., "Punica" (2023).

The salt of a request's table of blocks ends with the digest of its adapter's bytes: keys and values
depend on the adapter, and one that is loaded again with other bytes finds none of its predecessor's
blocks. Before each pass `Adapters`, an observer of the engine, sets the number of each share's
adapter; the cache's `extend` knows the order of the rows. Adapters are read from folders as PEFT
writes them; an option that is not implemented is refused by name.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared.checkpoint import read_file
from shared.config import Config
from shared.errors import UserError
from shared.files import read_json
from stage04_continuous.plan import Plan
from stage04_continuous.request import Request
from stage05_paged.blocks import BlockTable

from .tensor.shard import Shard

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SIZE = hashlib.sha256().digest_size
BASE = -1  # in place of an adapter's number: none
# PEFT's options and the values that work. Other initializations change the model's own weights.
WORKS: dict[str, tuple[Any, ...]] = {"peft_type": ("LORA",), "bias": ("none",)}
WORKS["init_lora_weights"] = (True, False, None, "gaussian", "eva")
# PEFT's options that do not change the arithmetic, and those that `_scale` reads; any other one is
# refused. A, B and their shapes are the same for Conv1D layers (fan_in_fan_out).
HARMLESS = {
    *("auto_mapping", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode"),
    *("layers_pattern", "layers_to_transform", "lora_dropout", "megatron_config", "megatron_core"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules"),
    *("task_type", "base_model_name_or_path", "lora_alpha", "r"),
}


def _scale(fields: Mapping[str, Any], source: Path, model: str) -> tuple[int, float]:
    """The rank and the factor of B A. Raises UserError for what is not implemented, and for an
    adapter of another model than `model`."""
    # A hub's "owner/name", or a folder on the machine that trained it: the last part is the name.
    base = fields.get("base_model_name_or_path") or model
    if re.split(r"[/\\]", str(base).rstrip("/\\"))[-1].lower() != model.lower():
        raise UserError(f"{source} is for the base model {base}, not {model}: serve that.")
    wrong = [name for name, values in WORKS.items() if fields.get(name, values[0]) not in values]
    wrong += [name for name in fields if fields[name] and name not in HARMLESS | WORKS.keys()]
    alpha: Any = fields.get("lora_alpha")
    wrong += [] if type(alpha) in (int, float) and math.isfinite(alpha) else ["lora_alpha"]
    wrong += [] if type(fields.get("r")) is int and fields["r"] > 0 else ["r"]
    for name in wrong:
        what = f"{source} sets {name} to {fields.get(name)}"
        raise UserError(f"{what}, which is not implemented: train the adapter without it.")
    return fields["r"], alpha / fields["r"]


def read(
    folder: Path, config: Config, shapes: Mapping[str, tuple[int, int]]
) -> tuple[bytes, dict[str, tuple[Tensor, Tensor]]]:
    """The adapter in `folder`, for a model whose layers have these `shapes` (out, in): its digest,
    and A (r, in) and B (out, r) by layer, B scaled already. Raises UserError for another model's
    adapter, damaged files, and options that are not implemented."""
    fields, path = read_json(folder / CONFIG), folder / WEIGHTS
    rank, scale = _scale(fields, folder / CONFIG, config.name)
    if not path.is_file():
        raise UserError(f"{folder} has no {WEIGHTS}: save the adapter as safetensors.")
    matrices: dict[str, dict[str, Tensor]] = {}  # by layer and kind
    for key, tensor in read_file(path).items():
        layer, _, kind = key.removeprefix("base_model.model.").rpartition(".lora_")
        name = (config.tensor_name(f"{layer}.weight") or "").removesuffix(".weight")
        if kind not in ("A.weight", "B.weight") or name not in shapes:
            why = f"{path} has the tensor {key[:100]}, but {config.name} has no such layer"
            raise UserError(f"{why}: choose an adapter of this model's attention and MLP.")
        out, width = shapes[name]
        wanted = (rank, width) if kind[0] == "A" else (out, rank)
        if tuple(tensor.shape) != wanted or not tensor.is_floating_point():
            why = f"{key[:100]} in {path} is {tuple(tensor.shape)} instead of {wanted}"
            raise UserError(f"{why}: the adapter is of another rank, or of another model.")
        if not tensor.isfinite().all():
            why = f"{key[:100]} in {path} has NaN or infinite numbers"
            raise UserError(f"{why}: its training has failed; choose an earlier checkpoint.")
        matrices.setdefault(name, {})[kind[0]] = tensor
    if half := [name for name, pair in matrices.items() if len(pair) < 2]:
        raise UserError(f"{path} has one of two matrices for {half[0]}: save the adapter again.")
    data = (folder / CONFIG).read_bytes() + path.read_bytes()
    pairs = {name: (pair["A"], scale * pair["B"].double()) for name, pair in matrices.items()}
    return hashlib.sha256(data).digest(), pairs


class Batch:
    """Which rows of a pass take which adapter. adapters: the number of each share's adapter in the
    next pass; empty for none."""

    def __init__(self) -> None:
        self.adapters: Sequence[int] = ()
        self.groups: list[tuple[int, Tensor]] = []  # numbers, and rows (n,) of the packed tokens

    def begin(self, shares: Sequence[Any], order: Tensor) -> None:
        """Divide the rows of a pass over `shares`, which the model sees in `order` (N,)."""
        numbers, self.adapters, self.groups = torch.tensor(self.adapters), (), []
        if any(numbers != BASE):
            counts = torch.tensor([count for _, _, count in shares])
            owners = numbers.repeat_interleave(counts)[order]  # (N,)
            for number in set(numbers.tolist()) - {BASE}:
                self.groups.append((number, (owners == number).nonzero()[:, 0].to(order.device)))


class LoraLinear(nn.Module):
    """A linear layer, or a rank's part of one, plus the adapters' products."""

    def __init__(self, base: nn.Module, batch: Batch) -> None:
        super().__init__()
        self.base, self.batch = base, batch
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """(N, in) -> (N, out)."""
        y = self.base(x)
        for number, rows in self.batch.groups:
            if number in self.pairs:
                a, b = self.pairs[number]
                y.index_add_(0, rows, x[rows] @ a.t() @ b.t())
        return y


class Ordered:
    """A cache for stage 04's Runner, which tells `batch` the order of each pass."""

    def __init__(self, cache: Any, batch: Batch) -> None:
        self.cache, self.batch, self.move = cache, batch, cache.move

    def extend(self, shares: Sequence[Any]) -> Any:
        attention = self.cache.extend(shares)
        self.batch.begin(shares, attention.order)
        return attention


class Adapters:
    """The adapters of `model`, of whose layers this rank holds these `parts`. An observer of the
    model's engine. names: the digest of each adapter; a request's salt ends with it."""

    def __init__(self, model: Any, config: Config, parts: Mapping[str, Shard]) -> None:
        self.config, self.parts, self.batch = config, parts, Batch()
        self.place = model.device, model.dtype
        self.layers: dict[str, LoraLinear] = {}
        self.names: dict[str, bytes] = {}
        self.numbers: dict[bytes, int] = {}  # replaced adapters too
        self.tables: dict[Request, BlockTable] = {}  # of the engine's scheduler
        for name in parts:
            # Of a row-parallel layer its part: the products are summed with it.
            inner = f"{name}.part" if hasattr(model.get_submodule(name), "part") else name
            self.layers[name] = LoraLinear(model.get_submodule(inner), self.batch)
            model.set_submodule(inner, self.layers[name])

    def load_all(self, folder: Path) -> None:
        """Load all subfolders of `folder`. Raises UserError as `load` does, and for none."""
        folders = sorted(config.parent for config in folder.glob(f"*/{CONFIG}"))
        if not folders:
            raise UserError(f"{folder} has no subfolder with an adapter: give a folder of them.")
        for path in folders:
            self.load(path)

    def load(self, folder: Path) -> None:
        """Load the adapter in `folder` under the folder's name, in place of an older one, which
        stays for requests in flight. Raises UserError as `read` does."""
        shapes = {name: part.shape for name, part in self.parts.items()}
        digest, pairs = read(folder, self.config, shapes)
        if digest not in self.numbers:
            number = self.numbers[digest] = len(self.numbers)
            for name, (a, b) in pairs.items():
                part = self.parts[name]
                a = a if part.columns is None else a[:, part.columns]
                b = b if part.rows is None else b[part.rows]
                self.layers[name].pairs[number] = a.to(*self.place), b.to(*self.place)
        self.names[folder.name] = digest

    def before(self, plan: Plan) -> None:
        """Set the adapters of the next pass, by the salts of its requests."""
        salts = [self.tables[work.request].salt[-SIZE:] for work in plan.work]
        self.batch.adapters = [self.numbers.get(salt, BASE) for salt in salts]

    def after(self, plan: Plan) -> None:
        """Nothing to do."""
