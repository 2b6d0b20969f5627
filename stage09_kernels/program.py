"""A model as a list of operations that one C call runs.

The list is built once, when the model is loaded, and the weights are laid out for linear.c, beside
the model's own or in their place. A pass fills in only what changes: the number of rows and a few
pointers.

    GPT-2, a layer: norm, q k v, attend, projection + residual, norm, up + GELU, down + residual
    Llama, a layer: norm, q k v, (norms of q and k), turn, attend, projection + residual, norm,
                    gate and up, down + residual
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stage01_forward.model import GPT2
from stage08_llama.model import Llama
from stage08_llama.rope import rotation

from . import library
from .cache import Attention, KernelAttention, KernelCache

PANEL = 64  # as in linear.c
LINE = 64  # bytes of a cache line
NORM, LINEAR, TURN, ATTEND = range(4)  # as in step.c
ALL, WANTED, PICKED = range(3)
PLAIN, GELU, GATED = range(3)  # as in linear.c


def _fields(pointers: str, numbers: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in pointers.split()] + [
        (name, ctypes.c_int64) for name in numbers.split()
    ]


class Norm(ctypes.Structure):
    _fields_ = [
        *_fields("x out gain bias", "x_stride out_stride width heads rows centred feeds"),
        ("epsilon", ctypes.c_double),
    ]


class Linear(ctypes.Structure):
    _fields_ = _fields(
        "x out weights bias residual chosen",
        "x_stride out_stride residual_stride inputs outputs rows way feeds steps",
    )


class Turn(ctypes.Structure):
    _fields_ = _fields("x cosines sines", "stride width heads rows")


class _Any(ctypes.Union):
    _fields_ = [("norm", Norm), ("linear", Linear), ("turn", Turn), ("attention", Attention)]


class Operation(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int64), ("over", ctypes.c_int64), ("of", _Any)]


def pack(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Weights (outputs, inputs), one after the other, as (panels, inputs, 64) of `dtype`."""
    outputs, inputs = sum(len(weight) for weight in weights), weights[0].shape[1]
    panels = torch.zeros(-(-outputs // PANEL), inputs, PANEL, dtype=dtype)
    row = 0
    for weight in weights:  # piece by piece: no second copy of all
        for piece in weight.split(PANEL - row % PANEL if row % PANEL else PANEL):
            done = 0
            while done < len(piece):
                panel, place = divmod(row, PANEL)
                some = min(PANEL - place, len(piece) - done)
                panels[panel, :, place : place + some] = piece[done : done + some].t()
                done, row = done + some, row + some
    return panels


def lay_out(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """`pack`, in bfloat16 with inputs interleaved in pairs: (panels, inputs / 2, 64, 2)."""
    panels = pack(weights, dtype)
    if dtype != torch.bfloat16:
        return panels
    even = nn.functional.pad(panels, (0, 0, 0, panels.shape[1] % 2))
    return even.unflatten(1, (-1, 2)).transpose(2, 3).contiguous()


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """32 rows of `gate` and 32 of `up` (F, ...) in turn, padded with zeros."""
    half = PANEL // 2
    count = -(-len(gate) // half) * half
    parts = []
    for part in (gate, up):
        whole = part.new_zeros(count, *part.shape[1:])
        whole[: len(part)] = part
        parts.append(whole.unflatten(0, (-1, half)))
    return torch.stack(parts, 1).flatten(0, 2)


class Laid(nn.Module):
    """A linear layer whose weight is kept as `lay_out` made it, with its outputs at `places`."""

    def __init__(self, layer: Any, laid: Tensor, places: Tensor) -> None:
        super().__init__()
        self.laid, self.places, self.bias = laid, places, layer.bias
        self.in_features = layer.weight.shape[1]

    @property
    def weight(self) -> Tensor:
        """The weight (outputs, inputs), put together again: a copy."""
        panels = self.laid if self.laid.ndim == 3 else self.laid.transpose(2, 3).flatten(1, 2)
        panel, place = self.places // PANEL, self.places % PANEL
        return panels[panel, : self.in_features, place]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Program:
    """The operations of a model over the keys and values in `cache`.

    release: the model drops its own copy of the weights that are laid out. It still computes, but
    slowly, because it must put each weight together again.
    """

    def __init__(self, model: Any, cache: KernelCache, release: bool = False) -> None:
        if type(model) not in BUILDERS:
            raise library.NoKernels(f"The kernels do not support a {type(model).__name__}.")
        self.model, self.cache, self.config = model, cache, model.config
        self.dtype = model.dtype  # of the weights
        self.real = cache.real
        if self.dtype != cache.real and (self.dtype, cache.real) != (torch.bfloat16, torch.float32):
            raise library.NoKernels(
                f"The kernels do not support {self.dtype} weights with a cache of {cache.kv.dtype}."
            )
        self.library = cache.library(self.dtype)
        self.kept: list[Tensor] = []  # tensors that operations point to
        named = model.named_modules() if release else ()
        self.names = {layer: name for name, layer in named if type(layer) is nn.Linear}
        self.operations: list[Operation] = []
        self.places: list[dict[str, Any]] = []  # of each: its buffers, by name, and where in them
        self.buffers: dict[str, Tensor] = {}
        self.widths: dict[str, int] = {}
        self.inputs: set[str] = set()  # buffers that products read, in the dtype of the weights
        self.rows = 0
        self.over = ALL  # the rows that the next operation covers
        self.stream = self.buffer("stream", self.config.n_embd)
        BUILDERS[type(model)](self, model)
        self.array = (Operation * len(self.operations))(*self.operations)

    # ---- building

    def keep(self, tensor: Tensor) -> int:
        self.kept.append(library.large_pages(tensor))
        return self.kept[-1].data_ptr()

    def vector(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self.keep(tensor.detach().to(self.real))

    def buffer(self, name: str, width: int) -> str:
        """Reserve a matrix with `width` numbers for each row of a pass."""
        self.widths[name] = max(width, self.widths.get(name, 0))
        return name

    def norm(self, layer: Any, x: str, out: str, heads: int = 1, **place: int) -> None:
        """Add a norm. `layer`: LayerNorm or RMSNorm."""
        operation = Operation(NORM)
        centred = isinstance(layer, nn.LayerNorm)
        epsilon = layer.eps if isinstance(layer, nn.LayerNorm) else layer.epsilon
        operation.of.norm = Norm(
            gain=self.vector(layer.weight),
            bias=self.vector(getattr(layer, "bias", None)),
            width=len(layer.weight),
            heads=heads,
            centred=centred,
            epsilon=epsilon,
        )
        self._add(operation, x=x, out=out, **place)

    def linear(
        self, layers: Sequence[Any], x: str, out: str, way: int = PLAIN, **residual: str
    ) -> None:
        """Add a product with `layers` side by side; for GATED, the gate and what it opens."""
        weights = [layer.weight.detach() for layer in layers]
        biases = [layer.bias for layer in layers]
        outputs = sum(map(len, weights))
        bias = None
        if any(each is not None for each in biases):
            bias = torch.cat(
                [
                    torch.zeros(len(weight), dtype=self.real)
                    if each is None
                    else each.to(self.real)
                    for each, weight in zip(biases, weights, strict=True)
                ]
            )
        if way == GATED:
            outputs = len(weights[0])
            weights = [interleave(*weights)]
            bias = None if bias is None else interleave(*bias.chunk(2))
        if bias is not None:
            padding = -len(bias) % PANEL
            bias = torch.cat((bias, bias.new_zeros(padding)))
        operation, packed = Operation(LINEAR), self.keep(lay_out(weights, self.dtype))
        places = torch.arange(outputs)
        if way == GATED:
            half = PANEL // 2
            gates = places // half * PANEL + places % half
            places = torch.cat((gates, gates + half))
        sizes = [len(layer.weight) for layer in layers]
        for layer, own in zip(layers, places.split(sizes), strict=True):
            if layer in self.names:
                laid = Laid(layer, self.kept[-1], own)
                self.model.set_submodule(self.names.pop(layer), laid)
        operation.of.linear = Linear(
            weights=packed,
            bias=self.vector(bias),
            inputs=weights[0].shape[1],
            outputs=outputs,
            way=way,
        )
        self.buffer(out, outputs)
        self.inputs.add(x)
        self._add(operation, x=x, out=out, **residual)

    def add(self, layer: Any, x: str) -> None:
        """Add a linear layer's output to the stream, which after the last attention has only the
        rows whose logits are wanted."""
        before = self.stream
        if self.over:
            self.stream = "wanted"
            self.over = PICKED if before != self.stream else WANTED
        self.linear([layer], x, self.stream, residual=before)
        self.over = min(self.over, WANTED)

    def turn(self, x: str, heads: int) -> None:
        operation = Operation(TURN)
        operation.of.turn = Turn(width=self.config.head_dim, heads=heads)
        self._add(operation, x=x)

    def attend(self, layer: int, x: str, out: str) -> None:
        operation = Operation(ATTEND)
        operation.of.attention = self.cache.attention(layer)
        if layer == self.config.n_layer - 1:
            self.over = WANTED
        self._add(operation, x=x, out=out)

    def _add(self, operation: Operation, **places: Any) -> None:
        operation.over = self.over
        self.operations.append(operation)
        self.places.append(places)

    # ---- running

    def _make_room(self, rows: int) -> None:
        """Allocate buffers for `rows` rows, and point the operations to them."""
        if rows <= self.rows:
            return
        self.rows = max(rows, 2 * self.rows)
        for name, width in self.widths.items():
            dtype = self.dtype if name in self.inputs else self.real
            line = LINE // dtype.itemsize
            width = (-(-width // line) | 1) * line  # odd, so that rows differ in their place in it
            zeros = torch.zeros((), dtype=dtype).expand(self.rows, width)
            self.buffers[name] = library.large_pages(zeros)
        for operation, places in zip(self.array, self.places, strict=True):
            x = self.buffers[places["x"]]
            start = x.data_ptr() + places.get("first", 0) * x.itemsize
            if operation.kind == TURN:
                operation.of.turn.x, operation.of.turn.stride = start, x.stride(0)
                continue
            out = self.buffers[places["out"]]
            out_start = out.data_ptr() + places.get("first", 0) * out.itemsize
            if operation.kind == ATTEND:
                one = operation.of.attention
                width = one.width * x.itemsize
                heads = one.heads * one.group
                one.q, one.k, one.v = (start + width * at for at in (0, heads, heads + one.heads))
                one.q_stride = one.k_stride = one.v_stride = x.stride(0)
                one.out, one.out_stride = out_start, out.stride(0)
            else:
                one = operation.of.norm if operation.kind == NORM else operation.of.linear
                one.feeds = places["out"] in self.inputs
                one.x, one.x_stride = start, x.stride(0)
                one.out, one.out_stride = out_start, out.stride(0)
                if "residual" in places:
                    residual = self.buffers[places["residual"]]
                    one.residual, one.residual_stride = residual.data_ptr(), residual.stride(0)

    def run(
        self, ids: Tensor, positions: Tensor, attention: KernelAttention, rows: Tensor
    ) -> Tensor:
        """Logits (R, V) of `rows` (R,) of a pass over the tokens `ids` (N,) at `positions` (N,)."""
        model, count = self.model, len(ids)
        self._make_room(max(count, len(rows)))
        cosines = sines = None
        if isinstance(model, GPT2):
            hidden = model.wte(ids) + model.wpe(positions)
        else:
            hidden = model.embed_tokens(ids)
            turns = rotation(positions, model.frequencies, self.config.rope.scale)
            cosines, sines = (each.to(self.real).contiguous() for each in turns)
        self.buffers["stream"][:count, : hidden.shape[1]] = hidden
        self.call(self.array, attention, rows, cosines, sines)
        return self.buffers["logits"][: len(rows), : self.config.vocab_size]

    def call(
        self,
        operations: ctypes.Array[Operation],
        attention: KernelAttention,
        rows: Tensor,
        cosines: Tensor | None = None,
        sines: Tensor | None = None,
    ) -> None:
        """Run `operations`, all or some of the program's, on what is in the buffers."""
        lists = ctypes.byref(attention.call), len(attention.shares), len(attention.items)
        attention.ask(rows.numpy())
        given = map(library.address, (cosines, sines, rows))
        counts = len(attention.order), len(rows)
        library.call(self.library.step, operations, len(operations), *lists, *given, *counts)


def _gpt2(p: Program, model: Any) -> None:
    width = p.config.n_embd
    normed = p.buffer("normed", width)
    for layer, block in enumerate(model.h):
        p.norm(block.ln_1, p.stream, normed)
        p.linear([block.attn.c_attn], normed, "qkv")
        p.attend(layer, "qkv", p.buffer("mixed", width))
        p.add(block.attn.c_proj, "mixed")
        p.norm(block.ln_2, p.stream, normed)
        p.linear([block.mlp.c_fc], normed, "inner", way=GELU)
        p.add(block.mlp.c_proj, "inner")
    p.norm(model.ln_f, p.stream, normed)
    p.linear([model.lm_head], normed, "logits")


def _llama(p: Program, model: Any) -> None:
    config = p.config
    normed = p.buffer("normed", config.n_embd)
    heads, width = config.n_head, config.head_dim
    for number, layer in enumerate(model.layers):
        own = layer.self_attn
        p.norm(layer.input_layernorm, p.stream, normed)
        p.linear([own.q_proj, own.k_proj, own.v_proj], normed, "qkv")
        if config.qk_norm:
            p.norm(own.q_norm, "qkv", "qkv", heads)
            p.norm(own.k_norm, "qkv", "qkv", config.n_kv_head, first=heads * width)
        p.turn("qkv", heads + config.n_kv_head)
        p.attend(number, "qkv", p.buffer("mixed", heads * width))
        p.add(own.o_proj, "mixed")
        p.norm(layer.post_attention_layernorm, p.stream, normed)
        p.linear([layer.mlp.gate_proj, layer.mlp.up_proj], normed, "inner", way=GATED)
        p.add(layer.mlp.down_proj, "inner")
    p.norm(model.norm, p.stream, normed)
    p.linear([model.lm_head], normed, "logits")


BUILDERS: dict[Any, Callable[[Program, Any], None]] = {GPT2: _gpt2, Llama: _llama}
