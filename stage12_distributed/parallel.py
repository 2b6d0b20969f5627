"""Tensor parallelism: every rank holds a part of every matrix, and collective calls combine the
parts of a result.

A layer that reads what all ranks have is cut by its outputs ("column parallel", after the math's
x W), and needs no call. The next layer, which reads what only this rank has, is cut by its inputs
("row parallel"): each rank has a partial sum of every output, and one all-reduce adds them up. So a
transformer block takes two sums, after attention and after the MLP. Heads are whole: a rank
attends with its own heads over its own part of the cache. Shoeybi et al., "Megatron-LM" (2019).

`shard` cuts a loaded model in place, before its layers are packed. The model's code is unchanged:
its config counts the rank's own heads, so the cache shrinks by itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shared.checkpoint import without_weights
from shared.config import Config
from shared.errors import UserError

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
MEETING = timedelta(seconds=30)  # for ranks to connect; all of them are ready by then
IDLE = timedelta(days=365)  # ranks wait for orders while the server has no work


class Peers:
    """Rank `rank` of `size`, and the collective calls of its layers. They need `connect` first;
    outside a pass of all ranks they raise UserError."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.passing = False  # whether the other ranks compute too
        self._orders: Any = None  # process groups
        self._sums: Any = None

    def connect(self, file: str, timeout: float, device: torch.device) -> None:
        """Meet the other ranks at `file`, which all can reach. Afterwards a sum, or an order of
        rank 0, that waits `timeout` seconds for another rank raises RuntimeError; if that rank has
        died, it raises at once."""
        store = dist.FileStore(file, self.size)
        sums, seconds = dist.PrefixStore("sums", store), timedelta(seconds=timeout)
        # Orders have a group of their own: a rank may wait for hours for an order, never for a sum.
        # Nor may rank 0 wait for a rank to take an order: that rank may hang between two passes.
        self._orders = self._gloo(dist.PrefixStore("orders", store))
        self._orders._set_default_timeout(IDLE if self.rank else seconds)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = seconds
            self._sums = dist.ProcessGroupNCCL(sums, self.rank, self.size, options)
        else:
            self._sums = self._gloo(sums)
            self._sums._set_default_timeout(seconds)

    def _gloo(self, store: Any) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = MEETING
        # No other machine may take part, whatever this one's name resolves to.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def disconnect(self) -> None:
        self._orders = self._sums = None

    def order(self, numbers: Tensor) -> Tensor:
        """Rank 0's `numbers`, int64 on the CPU, on all ranks, in place."""
        if self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._orders.broadcast([numbers], options).wait()
        return numbers

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, equal to the last bit on all of them; in place."""
        if self.size > 1:
            self._connected().allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """On rank 0, the x of every rank, all of one shape; on the other ranks, nothing."""
        if self.size == 1 or not x.numel():
            return [x] * self.size
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._connected().gather([parts] if parts else [], [x], options).wait()
        return parts

    def _connected(self) -> Any:
        if not self.passing:
            raise UserError(
                "This model is split over several ranks, which compute only in passes of their "
                "engine: use the engine, or one rank."
            )
        return self._sums


def split(count: int, parts: int, index: int) -> range:
    """Part `index` of range(count) cut into `parts` parts; any longer ones come first."""
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
        own = split(kv, ranks, rank)
        return range(own.start * group, own.stop * group), own
    owners = [each * kv // ranks for each in range(ranks)]
    if max(map(owners.count, owners)) > group:
        raise UserError(
            f"{config.name} has {queries} query heads and {kv} KV heads, too few for {ranks} "
            "ranks: choose fewer ranks."
        )
    head = owners[rank]
    part = split(group, owners.count(head), owners[:rank].count(head))
    return range(head * group + part.start, head * group + part.stop), range(head, head + 1)


@dataclass(frozen=True)
class Cut:
    """The part of a weight of this `shape` (out, in) that a rank holds: the indices of its rows and
    columns; None means all. One of the two is None."""

    shape: tuple[int, int]
    rows: Tensor | None = None
    columns: Tensor | None = None


def cuts(model: Any, rank: int, ranks: int) -> dict[str, Cut]:
    """The cut of each layer in LAYERS, by the layer's whole name in a model that is still whole."""
    config: Config = model.config
    head_dim = config.head_dim
    queries, kv = heads_of(config, rank, ranks)

    def channels(heads: range, first: int = 0) -> Tensor:
        return torch.arange(first + heads.start * head_dim, first + heads.stop * head_dim)

    def places(kind: str, count: int) -> Tensor | None:
        if not kind:
            return None
        if kind == "inner":
            part = split(count, ranks, rank)
            return torch.arange(part.start, part.stop)
        if kind == "qkv":  # [q | k | v]: the rank's heads of each third, not a third of the whole
            return torch.cat([channels(queries, third * count // 3) for third in range(3)])
        return channels(queries if kind == "q" else kv)

    found = {}
    for name, layer in model.named_modules():
        if kinds := LAYERS.get(".".join(name.split(".")[-2:])):
            out, width = layer.weight.shape
            found[name] = Cut((out, width), places(kinds[0], out), places(kinds[1], width))
    return found


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """The layer with `weight` (out, in)."""
    with without_weights():
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


class RowParallel(nn.Module):
    """A linear layer whose inputs are divided among the ranks. The bias is added once, to the sum:
    in `part`, every rank would add it."""

    def __init__(self, part: nn.Module, bias: Tensor | None, peers: Peers) -> None:
        super().__init__()
        self.part, self.peers = part, peers
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The rank's channels (..., in) -> the whole output (..., out)."""
        y = self.peers.sum(self.part(x).contiguous())
        return y if self.bias is None else y + self.bias


class Vocabulary(nn.Module):
    """The output layer, its rows divided among the ranks. All parts are padded to the longest one,
    because the rows need not divide evenly."""

    def __init__(self, whole: nn.Linear, tied: bool, peers: Peers) -> None:
        super().__init__()
        self.peers, self.size = peers, whole.out_features
        self.longest = -(-self.size // peers.size)
        first = peers.rank * self.longest
        rows = whole.weight[first : first + self.longest].detach()  # the last ranks may have none
        # These are rows of the embedding, which stays whole for the look-up: they take no more
        # memory.
        self.part = linear(rows if tied else rows.clone())
        self.missing = self.longest - len(rows)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., C) -> (..., V) on rank 0, and the rank's own part elsewhere."""
        part = F.pad(self.part(hidden), (0, self.missing)).contiguous()
        parts = self.peers.gather(part)
        return torch.cat(parts, -1)[..., : self.size] if parts else part


def shard(model: Any, peers: Peers) -> dict[str, Cut]:
    """Reduce `model` to the part of rank `peers.rank`. Returns where each layer was cut. Raises
    UserError if the model has too few heads."""
    config: Config = model.config
    found = cuts(model, peers.rank, peers.size)
    queries, kv = heads_of(config, peers.rank, peers.size)
    for name, cut in found.items():
        layer = model.get_submodule(name)
        weight, bias = layer.weight.detach(), layer.bias
        if cut.rows is not None:
            rows = cut.rows.to(weight.device)
            part: nn.Module = linear(weight[rows], None if bias is None else bias.detach()[rows])
        else:
            assert cut.columns is not None
            columns = linear(weight[:, cut.columns.to(weight.device)].contiguous())
            part = RowParallel(columns, None if bias is None else bias.detach(), peers)
        model.set_submodule(name, part)
    for module in model.modules():
        if hasattr(module, "n_head"):
            module.n_head = len(queries)
    model.lm_head = Vocabulary(model.lm_head, config.tied, peers)
    if peers.rank:
        model.unused = None  # of the whole vocabulary, which rank 0 alone has
    model.config = replace(config, n_head=len(queries), n_kv_head=len(kv))
    return found


def digest(model: Any) -> bytes:
    """What identifies a whole model: its config, and each of its numbers."""
    found = hashlib.sha256(repr(model.config).encode())
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.digest()
