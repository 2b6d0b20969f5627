"""Tensor parallelism: every rank holds a shard of every matrix, and collective calls combine the
parts of a result.

A layer that reads what all ranks have is split by its outputs ("column parallel", after the math's
x W), and needs no call. The next layer, which reads what only this rank has, is split by its inputs
("row parallel"): each rank has a partial sum of every output, and one all-reduce adds them up. So a
transformer block takes two of them, after attention and after the MLP. Heads stay whole: a rank
attends with its own heads over its own part of the cache. Shoeybi et al., "Megatron-LM" (2019).

`shard` splits a loaded model in place, before its layers are packed. The model's code is unchanged:
its config counts the rank's own heads, so the cache shrinks by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.config import Config
from shared.conversion import Linear
from shared.errors import UserError

from .collectives import Collectives

# What a layer's outputs and inputs are: channels of query heads, of the heads of keys and values,
# or of the MLP; "" is the residual stream, which every rank holds whole.
LAYERS = {
    "attn.c_attn": ("qkv", ""),
    "attn.c_proj": ("", "q"),
    "mlp.c_fc": ("inner", ""),
    "mlp.c_proj": ("", "inner"),
    "self_attn.q_proj": ("q", ""),
    "self_attn.k_proj": ("kv", ""),
    "self_attn.v_proj": ("kv", ""),
    "self_attn.o_proj": ("", "q"),
    "mlp.gate_proj": ("inner", ""),
    "mlp.up_proj": ("inner", ""),
    "mlp.down_proj": ("", "inner"),
}


def split(count: int, parts: int, index: int) -> range:
    """Part `index` of range(count) split into `parts` parts; any longer ones come first."""
    small, longer = divmod(count, parts)
    start = index * small + min(index, longer)
    return range(start, start + small + (index < longer))


def heads_of(config: Config, rank: int, ranks: int) -> tuple[range, range]:
    """The query heads of a rank, and the heads of keys and values that they read.

    With a head of keys and values for every rank, each rank gets whole groups of query heads. With
    fewer, several ranks keep a copy of the same head and share its queries. Raises UserError if a
    rank would have no head.
    """
    queries, kv = config.n_head, config.n_kv_head
    group = queries // kv
    if kv >= ranks:
        heads = split(kv, ranks, rank)
        return range(heads.start * group, heads.stop * group), heads
    owners = [index * kv // ranks for index in range(ranks)]
    if max(map(owners.count, owners)) > group:
        raise UserError(
            f"{config.name} has {queries} query heads and {kv} KV heads, too few for {ranks} "
            "ranks: choose fewer ranks."
        )
    head = owners[rank]
    part = split(group, owners.count(head), owners[:rank].count(head))
    return range(head * group + part.start, head * group + part.stop), range(head, head + 1)


@dataclass(frozen=True)
class Shard:
    """The part of a weight of this `shape` (out, in) that a rank holds: the indices of its rows and
    columns; None means all. One of the two is None."""

    shape: tuple[int, int]
    rows: Tensor | None = None
    columns: Tensor | None = None


def shards(model: Any, rank: int, ranks: int) -> dict[str, Shard]:
    """The shard of each layer in LAYERS, by the layer's whole name in a model that is still
    whole."""
    config: Config = model.config
    head_dim = config.head_dim
    queries, kv = heads_of(config, rank, ranks)

    def channels(heads: range, first: int = 0) -> Tensor:
        return torch.arange(first + heads.start * head_dim, first + heads.stop * head_dim)

    def indices(kind: str, count: int) -> Tensor | None:
        if not kind:
            return None
        if kind == "inner":
            part = split(count, ranks, rank)
            return torch.arange(part.start, part.stop)
        if kind == "qkv":  # [q | k | v]: the rank's heads of each third, not a third of the whole
            return torch.cat([channels(queries, third * count // 3) for third in range(3)])
        return channels(queries if kind == "q" else kv)

    result = {}
    for name, layer in model.named_modules():
        if kinds := LAYERS.get(".".join(name.split(".")[-2:])):
            out, width = layer.out_features, layer.in_features
            result[name] = Shard((out, width), indices(kinds[0], out), indices(kinds[1], width))
    return result


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """The layer with `weight` (out, in)."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, "meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def cut(layer: Any, rows: Tensor | None = None, columns: Tensor | None = None) -> nn.Module:
    """A layer's part with the outputs `rows`, or with the inputs `columns` and without the bias."""
    if isinstance(layer, Linear):
        return layer.shard(rows, columns)
    weight, bias = layer.weight.detach(), layer.bias
    if rows is not None:
        rows = rows.to(weight.device)
        return linear(weight[rows], None if bias is None else bias[rows])
    assert columns is not None
    return linear(weight[:, columns.to(weight.device)].contiguous())


class RowParallel(nn.Module):
    """A linear layer whose inputs are divided among the ranks. The bias is added once, to the sum:
    in `part`, every rank would add it."""

    def __init__(self, part: nn.Module, bias: Tensor | None, collectives: Collectives) -> None:
        super().__init__()
        self.part, self.collectives = part, collectives
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The rank's channels (..., in) -> the whole output (..., out)."""
        y = self.collectives.all_reduce(self.part(x).contiguous())
        return y if self.bias is None else y + self.bias


class Vocabulary(nn.Module):
    """The output layer, its rows divided among the ranks. All parts are padded to the longest one,
    because the rows need not divide evenly."""

    def __init__(self, whole: Any, tied: bool, collectives: Collectives) -> None:
        super().__init__()
        self.collectives, self.size = collectives, whole.out_features
        self.longest = -(-self.size // collectives.size)
        first = collectives.rank * self.longest
        here = slice(first, first + self.longest)  # the last ranks may have none
        self.missing = self.longest - len(range(self.size)[here])
        if isinstance(whole, Linear):
            self.part = whole.shard(torch.arange(self.size)[here], None)
        else:
            rows = whole.weight[here].detach()
            # These are rows of the embedding, which stays whole for the look-up: they take no more
            # memory.
            self.part = linear(rows if tied else rows.clone())

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., C) -> (..., V) on rank 0, and the rank's own part elsewhere."""
        part = F.pad(self.part(hidden), (0, self.missing)).contiguous()
        parts = self.collectives.gather(part)
        return torch.cat(parts, -1)[..., : self.size] if parts else part


def shard(model: Any, collectives: Collectives) -> dict[str, Shard]:
    """Reduce `model` to the part of rank `collectives.rank`. Returns the shard of each layer that
    was split. Raises UserError if the model has too few heads."""
    config: Config = model.config
    rank, ranks = collectives.rank, collectives.size
    layers = shards(model, rank, ranks)
    queries, kv = heads_of(config, rank, ranks)
    for name, part in layers.items():
        layer = model.get_submodule(name)
        new = cut(layer, part.rows, part.columns)
        if part.columns is not None:
            new = RowParallel(new, layer.bias, collectives)
        model.set_submodule(name, new)
    for module in model.modules():
        if hasattr(module, "n_head"):
            module.n_head = len(queries)
    model.lm_head = Vocabulary(model.lm_head, config.tied, collectives)
    if rank:
        model.unused = None  # of the whole vocabulary, which rank 0 alone has
    model.config = replace(config, n_head=len(queries), n_kv_head=len(kv))
    return layers
