"""A model as a list of operations that one C call runs.

The list is built once, when the model is loaded, and the weights are laid out for the kernels,
beside the model's own or in their place. A pass fills in only what changes: which rows, and where.

    Both: embed; then the layers; then norm, head
    GPT-2, a layer: norm, q k v, attend, projection + residual, norm, up + GELU, down + residual
    Llama, a layer: norm, q k v, (norms of q and k), RoPE, attend, projection + residual, norm,
                    gate and up, down + residual
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from shared.conversion import Linear as OwnLinear
from shared.errors import UserError
from stage01_forward.model import GPT2
from stage08_llama.model import Llama
from stage08_llama.rope import rotation

from . import library
from .backend import NoKernels
from .cache import KernelAttention, KernelCache
from .library import LINE
from .operations import (
    ALL_ROWS,
    ATTEND,
    BODIES,
    EMBED,
    GELU,
    K_PAD,
    LINEAR,
    NORM,
    OUT_ROWS,
    PANEL,
    PLAIN,
    ROPE,
    SILU_MUL,
    Embed,
    Linear,
    Norm,
    Operation,
    Rope,
)

Place = tuple[str, int]  # a buffer, and a column of it
Embedding = tuple[nn.Module, nn.Embedding | None]  # tables: of tokens, of positions


def pack(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Weights (outputs, inputs), one after the other, as (panels, inputs, 64) of `dtype`."""
    outputs, inputs = sum(len(weight) for weight in weights), weights[0].shape[1]
    panels = torch.zeros(-(-outputs // PANEL), inputs, PANEL, dtype=dtype)
    row = 0
    for weight in weights:  # piece by piece: no second copy of all
        start = 0
        while start < len(weight):
            panel, column = divmod(row, PANEL)
            piece = weight[start : start + PANEL - column]
            panels[panel, :, column : column + len(piece)] = piece.t()
            start, row = start + len(piece), row + len(piece)
    return panels


def lay_out(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """`pack`, in bfloat16 with inputs interleaved in pairs and padded with zeros to whole tiles:
    (panels, inputs / 2, 64, 2)."""
    panels = pack(weights, dtype)
    if dtype != torch.bfloat16:
        return panels
    whole = nn.functional.pad(panels, (0, 0, 0, -panels.shape[1] % K_PAD))
    return whole.unflatten(1, (-1, 2)).transpose(2, 3).contiguous()


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """32 rows of `gate` and 32 of `up` (F, ...) in turn, padded with zeros."""
    half = PANEL // 2
    padding = (0, 0) * (gate.ndim - 1) + (0, -len(gate) % half)
    parts = [nn.functional.pad(part, padding).unflatten(0, (-1, half)) for part in (gate, up)]
    return torch.stack(parts, 1).flatten(0, 2)


def side_by_side(layers: Sequence[Any]) -> Tensor | None:
    """The biases of layers as one; zeros for a layer without; None if none has one."""
    like = next((layer.bias for layer in layers if layer.bias is not None), None)
    if like is None:
        return None
    parts = (like.new_zeros(x.out_features) if x.bias is None else x.bias for x in layers)
    return torch.cat([part.detach() for part in parts])


class Product(Protocol):
    """A product with weights in the format of another stage. A layer offers it as
    `product(layers, epilogue, cache, dtype)`, for itself and those beside it; None if C cannot
    compute theirs as one."""

    linear: Linear  # its product, format, inputs, outputs and epilogue
    bias: Tensor | None  # (panels * 64)
    bytes: int  # of the weights
    scratch: int  # bytes of memory that it needs for each row of a pass

    def reader(self, table: nn.Module) -> tuple[int | None, int] | None:
        """The C function that reads rows of an embedding `table` with the same weights, and what it
        reads (`struct embed`); None if the table has others."""

    def release(self, model: nn.Module) -> None:
        """Let `model` drop its own copy of the weights."""


class Program:
    """The operations of a model over the keys and values in `cache`.

    release: the model drops its own copy of the weights that are laid out, and computes no more.
    """

    def __init__(self, model: Any, cache: KernelCache, release: bool = False) -> None:
        if type(model) not in BUILDERS:
            raise NoKernels(f"The kernels do not support a {type(model).__name__}.")
        self.model, self.cache, self.config = model, cache, model.config
        self.dtype = model.dtype  # of the weights
        self.real = cache.real
        if self.dtype != cache.real and (self.dtype, cache.real) != (torch.bfloat16, torch.float32):
            raise NoKernels(
                f"The kernels do not support {self.dtype} weights with a cache of {cache.kv.dtype}."
            )
        self.library = cache.library(self.dtype)
        self.kept: list[Tensor] = []  # tensors that operations point to
        self.release = release
        self.formats: list[Product] = []
        self.operations: list[Operation] = []
        self.places: list[dict[str, Place]] = []  # of each, by the name of the pointer to it
        self.buffers: dict[str, Tensor] = {}
        self.widths: dict[str, int] = {}
        self.operands: set[str] = set()  # buffers that products read, in the dtype of the weights
        self.room = 0  # rows in the buffers
        self.turns: list[Tensor] = []  # cosines and sines by position, (positions, 1, head_dim / 2)
        self.rows = ALL_ROWS  # that the next operation covers
        self.stream = self.buffer("stream", self.config.n_embd)
        self.embedding = BUILDERS[type(model)](self, model)
        self.embeds = self._add_embedding(*self.embedding)
        self.array = (Operation * len(self.operations))(*self.operations)

    @property
    def bytes(self) -> int:
        """Bytes of the matrices, which a pass reads."""
        plain = sum(tensor.nbytes for tensor in self.kept if tensor.ndim > 1)
        return plain + sum(product.bytes for product in self.formats)

    # ---- building

    def keep(self, tensor: Tensor) -> int:
        self.kept.append(library.blank(tensor.shape, tensor.dtype).copy_(tensor))
        return self.kept[-1].data_ptr()

    def vector(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self.keep(tensor.detach().to(self.real))

    def buffer(self, name: str, width: int) -> str:
        """Reserve a matrix with `width` numbers for each row of a pass."""
        self.widths[name] = max(width, self.widths.get(name, 0))
        return name

    def _add_embedding(self, table: nn.Module, positions: nn.Embedding | None) -> bool:
        """Begin with the tokens' rows of `table`, and those of their positions. A table may have a
        format of its own; if no product reads that, `run` embeds tokens in Python."""
        readers = (product.reader(table) for product in self.formats)
        body = Embed(width=self.config.n_embd)
        if reader := next((reader for reader in readers if reader), None):
            body.read_row, body.format = reader
        elif isinstance(table, nn.Embedding):
            body.table = table.weight.data_ptr()
        else:
            return False
        if positions is not None:
            body.positions = positions.weight.data_ptr()
        operation = Operation(EMBED, ALL_ROWS)
        operation.of.embed = body
        self.operations.insert(0, operation)
        self.places.insert(0, {"out": ("stream", 0)})
        return True

    def norm(self, layer: Any, x: str, out: str, heads: int = 1, first: int = 0) -> None:
        """Add a norm, from column `first` on. `layer`: LayerNorm or RMSNorm."""
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
        self._add(operation, x=(x, first), out=(out, first))

    def linear(
        self,
        layers: Sequence[Any],
        x: str,
        out: str,
        epilogue: int = PLAIN,
        residual: str | None = None,
        column: int = 0,
    ) -> None:
        """Add a product with `layers` side by side, whose outputs begin at `column`; for SILU_MUL,
        with the gate and what it scales. Layers whose formats differ become several operations.

        Raises NoKernels for a format that brings no Product, and for a gate in another format than
        what it scales; UserError once weights were released.
        """
        operation, bias = Operation(LINEAR), None
        if not any(isinstance(layer, OwnLinear) for layer in layers):
            operation.of.linear, bias = self._laid_out(layers, epilogue)
            self.operands.add(x)
        elif product := self._product(layers, epilogue):
            operation.of.linear, bias = product.linear, product.bias
        elif len(layers) > 1 and epilogue != SILU_MUL:
            self.buffer(out, sum(layer.out_features for layer in layers))
            for layer in layers:
                self.linear([layer], x, out, epilogue, residual, column)
                column += layer.out_features
            return
        else:
            names = " and ".join(sorted({type(layer).__name__ for layer in layers}))
            released = self.release and any(o.kind == LINEAR for o in self.operations)
            error = UserError if released else NoKernels  # no engine can take over then
            raise error(f"There is no kernel for the product of {names} in {self.real}.")
        operation.of.linear.bias = self.vector(bias)
        self.buffer(out, operation.of.linear.outputs)
        places = {"residual": (residual, 0)} if residual else {}
        self._add(operation, x=(x, 0), out=(out, column), **places)

    def _product(self, layers: Sequence[Any], epilogue: int) -> Product | None:
        if not all(hasattr(layer, "product") for layer in layers):
            return None
        product: Product | None = layers[0].product(layers, epilogue, self.cache, self.dtype)
        if product is not None:
            self.formats.append(product)
            if self.release:
                product.release(self.model)
        return product

    def _laid_out(self, layers: Sequence[Any], epilogue: int) -> tuple[Linear, Tensor | None]:
        """The product with the weights of `layers`, laid out for the kernels, and its bias."""
        weights = [layer.weight.detach() for layer in layers]
        bias = side_by_side(layers)
        outputs = sum(map(len, weights))
        if epilogue == SILU_MUL:
            outputs = len(weights[0])
            weights = [interleave(*weights)]
            bias = None if bias is None else interleave(*bias.chunk(2))
        if bias is not None:
            bias = nn.functional.pad(bias, (0, -len(bias) % PANEL))
        packed = self.keep(lay_out(weights, self.dtype))
        for layer in layers:
            if self.release and type(layer) is nn.Linear:
                layer.weight = nn.Parameter(layer.weight.to("meta"), requires_grad=False)
        inputs = weights[0].shape[1]
        return Linear(weights=packed, inputs=inputs, outputs=outputs, epilogue=epilogue), bias

    def add(self, layer: Any, x: str) -> None:
        """Add a linear layer's output to the stream, which after the last attention has only the
        rows whose logits are wanted."""
        before = self.stream
        if self.rows == OUT_ROWS:
            self.stream = "wanted"
        self.linear([layer], x, self.stream, residual=before)
        self.operations[-1].of.linear.residual_of_all = before != self.stream

    def rope(self, x: str, heads: int) -> None:
        operation = Operation(ROPE)
        operation.of.rope = Rope(head_dim=self.config.head_dim, heads=heads)
        self._add(operation, x=(x, 0))

    def attend(self, layer: int, x: str, out: str) -> None:
        operation = Operation(ATTEND)
        operation.of.attention = self.cache.attention(layer)
        self.operands.add(out)
        if layer == self.config.n_layer - 1:
            self.rows = OUT_ROWS
        queries = self.config.n_head * self.config.head_dim
        values = queries + self.config.n_kv_head * self.config.head_dim
        self._add(operation, q=(x, 0), k=(x, queries), v=(x, values), out=(out, 0))

    def _add(self, operation: Operation, **places: Place) -> None:
        operation.rows = self.rows
        self.operations.append(operation)
        self.places.append(places)

    # ---- running

    def _make_room(self, rows: int) -> None:
        """Allocate buffers for `rows` rows, and point the operations to them."""
        if rows <= self.room:
            return
        self.room = max(rows, 2 * self.room)
        scratch = self.room * max((product.scratch for product in self.formats), default=0)
        self.scratch = torch.empty(scratch, dtype=torch.uint8)
        for name, width in self.widths.items():
            dtype = self.dtype if name in self.operands else self.real
            line = LINE // dtype.itemsize
            width = (-(-width // line) | 1) * line  # odd, so that rows differ in their place in it
            self.buffers[name] = library.blank((self.room, width), dtype)
        for operation, places in zip(self.array, self.places, strict=True):
            body = getattr(operation.of, BODIES[operation.kind])
            for name, (buffer, column) in places.items():
                tensor = self.buffers[buffer]
                setattr(body, name, tensor.data_ptr() + column * tensor.itemsize)
                setattr(body, f"{name}_stride", tensor.stride(0))
                if hasattr(body, f"{name}_is_operand"):
                    setattr(body, f"{name}_is_operand", buffer in self.operands)
            if operation.kind == LINEAR:
                body.scratch = self.scratch.data_ptr()

    def run(self, ids: Sequence[int], attention: KernelAttention, rows: Sequence[int]) -> Tensor:
        """Logits (R, V) of `rows` (R,) of a pass over the tokens `ids` (N,). Raises IndexError for
        a token or a position that the model does not have."""
        count = len(ids)
        if min(ids) < 0 or max(ids) >= self.config.vocab_size:
            raise IndexError(f"a token outside the vocabulary of {self.config.vocab_size}")
        table, positions = self.embedding
        if attention.end > self.config.n_positions:
            raise IndexError(f"a position outside the {self.config.n_positions} of the model")
        self._make_room(max(count, len(rows)))
        this_pass = attention.wanting(rows)
        if self.embeds:
            tokens = np.array(ids, np.int64)
            this_pass.ids = tokens.ctypes.data
        else:
            hidden = table(torch.tensor(ids))
            if positions is not None:
                hidden = hidden + positions(attention.positions)
            self.buffers["stream"][:count, : hidden.shape[1]] = hidden
        if self.turns:
            this_pass.cosines, this_pass.sines = (turn.data_ptr() for turn in self.turns)
        library.call(self.library.step, self.array, len(self.array), ctypes.byref(this_pass))
        return self.buffers["logits"][: len(rows), : self.config.vocab_size]


def _gpt2(p: Program, model: Any) -> Embedding:
    width = p.config.n_embd
    normed = p.buffer("normed", width)
    for layer, block in enumerate(model.h):
        p.norm(block.ln_1, p.stream, normed)
        p.linear([block.attn.c_attn], normed, "qkv")
        p.attend(layer, "qkv", p.buffer("mixed", width))
        p.add(block.attn.c_proj, "mixed")
        p.norm(block.ln_2, p.stream, normed)
        p.linear([block.mlp.c_fc], normed, "inner", epilogue=GELU)
        p.add(block.mlp.c_proj, "inner")
    p.norm(model.ln_f, p.stream, normed)
    p.linear([model.lm_head], normed, "logits")
    return model.wte, model.wpe


def _llama(p: Program, model: Any) -> Embedding:
    config = p.config
    normed = p.buffer("normed", config.n_embd)
    heads, width = config.n_head, config.head_dim
    turns = rotation(torch.arange(config.n_positions), model.frequencies)
    p.turns = [turn.to(p.real).contiguous() for turn in turns]
    for number, layer in enumerate(model.layers):
        attn = layer.self_attn
        p.norm(layer.input_layernorm, p.stream, normed)
        p.linear([attn.q_proj, attn.k_proj, attn.v_proj], normed, "qkv")
        if config.qk_norm:
            p.norm(attn.q_norm, "qkv", "qkv", heads)
            p.norm(attn.k_norm, "qkv", "qkv", config.n_kv_head, first=heads * width)
        p.rope("qkv", heads + config.n_kv_head)
        p.attend(number, "qkv", p.buffer("mixed", heads * width))
        p.add(attn.o_proj, "mixed")
        p.norm(layer.post_attention_layernorm, p.stream, normed)
        p.linear([layer.mlp.gate_proj, layer.mlp.up_proj], normed, "inner", epilogue=SILU_MUL)
        p.add(layer.mlp.down_proj, "inner")
    p.norm(model.norm, p.stream, normed)
    p.linear([model.lm_head], normed, "logits")
    return model.embed_tokens, None


# They add the operations after the embedding, and return its tables.
BUILDERS: dict[Any, Callable[[Program, Any], Embedding]] = {GPT2: _gpt2, Llama: _llama}
