"""A runner whose passes are launches of kernels: cuBLAS' products, and ours between them.

    GPT-2, a layer: add + norm, q k v, store, attend, projection, add + norm, up, GELU, down
    Llama, a layer: add + norm, q k v, norm and rotate and store, attend, projection,
                    add + norm, gate and up, gate, down

Nothing in a pass asks the GPU for a number, so Python is ahead of it until the tokens are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shared.config import Config
from stage01_forward.model import GPT2
from stage08_llama.model import Llama
from stage08_llama.rope import rotation
from stage09_kernels.backend import NoKernels

from .cache import GpuAttention, GpuCache
from .graphs import Graphs
from .layers import add_norm, joined_product, silu_mul, to_kernels

Forward = Callable[[GpuAttention], tuple[Tensor, Tensor]]  # stream and what is to be added, (N, C)


class GpuRunner:
    """Runs passes of `model` over the keys and values in `cache`, as stage 04's Runner does.

    The model's quantized layers become kernels, and projections that read the same input views of
    one weight, in place. release: has no effect, because there is no second copy of any weight.
    Raises NoKernels for a model that is neither GPT-2 nor a Llama.
    """

    def __init__(self, model: Any, cache: GpuCache, release: bool = False) -> None:
        if type(model) not in FORWARDS:
            raise NoKernels(f"The kernels of stage 13 do not support a {type(model).__name__}.")
        self.model, self.cache = model, cache
        self.config: Config = model.config
        to_kernels(model)
        self.forward, self.norm = FORWARDS[type(model)](model)
        self.graphs = Graphs(cache, self.compute) if cache.device.type == "cuda" else None

    def move(self, moves: Sequence[Any]) -> None:
        self.cache.move(moves)

    @torch.inference_mode()
    def run(self, ids: Sequence[int], shares: Sequence[Any], rows: Sequence[int]) -> Tensor:
        """Logits (R, V) of one pass over N packed tokens, valid until the next pass."""
        if not ids:
            return torch.empty(0, self.config.vocab_size, device=self.cache.device)
        if self.graphs and (size := self.graphs.shape(shares, rows)):
            return self.graphs.run(size, ids, shares)
        return self.compute(self.cache.extend(shares, ids, rows))

    def compute(self, attention: GpuAttention) -> Tensor:
        """Logits (R, V) of the rows that a pass wants."""
        stream, added = self.forward(attention)
        wanted = attention.input["wanted"]
        logits: Tensor = self.model.logits(add_norm(stream[wanted], added[wanted], self.norm))
        return logits


def gpt2(model: GPT2) -> tuple[Forward, Any]:
    """The forward pass of `model` up to its last norm, and that norm."""
    heads = model.config.n_head
    layers: list[Any] = list(model.h)

    def forward(attention: GpuAttention) -> tuple[Tensor, Tensor]:
        x = model.wte(attention.input["ids"]) + model.wpe(attention.input["positions"])  # (N, C)
        added: Any = None
        for layer, block in enumerate(layers):
            qkv = block.attn.c_attn(add_norm(x, added, block.ln_1))  # (N, 3C)
            q, k, v = qkv.unflatten(1, (3, heads, -1)).unbind(1)  # each (N, H, D)
            added = block.attn.c_proj(attention.attend(layer, q, k, v).flatten(1))
            added = block.mlp(add_norm(x, added, block.ln_2))
        return x, added

    return forward, model.ln_f


def llama(model: Llama) -> tuple[Forward, Any]:
    """The forward pass of `model` up to its last norm, and that norm. Joins its projections."""
    config = model.config
    counts = config.n_head, config.n_kv_head, config.n_kv_head
    layers: list[Any] = list(model.layers)
    projections = "q_proj", "k_proj", "v_proj"
    qkvs = [joined_product(*map(layer.self_attn.get_submodule, projections)) for layer in layers]
    gates = [joined_product(layer.mlp.gate_proj, layer.mlp.up_proj) for layer in layers]
    frequencies = model.frequencies.to(model.device)

    def forward(attention: GpuAttention) -> tuple[Tensor, Tensor]:
        x = model.embed_tokens(attention.input["ids"])  # (N, C)
        turns = rotation(attention.input["positions"], frequencies)
        added: Any = None
        for number, (layer, project, open_) in enumerate(zip(layers, qkvs, gates, strict=True)):
            attn = layer.self_attn
            qkv = project(add_norm(x, added, layer.input_layernorm))
            q, k, v = qkv.unflatten(1, (-1, config.head_dim)).split(counts, 1)  # (N, heads, D)
            norms = (attn.q_norm, attn.k_norm) if config.qk_norm else None
            attention.store(number, q, k, v, turns, norms)
            added = attn.o_proj(attention.read(number, q).flatten(1))
            gated = silu_mul(open_(add_norm(x, added, layer.post_attention_layernorm)))
            added = layer.mlp.down_proj(gated)
        return x, added

    return forward, model.norm


FORWARDS: dict[Any, Callable[[Any], tuple[Forward, Any]]] = {GPT2: gpt2, Llama: llama}
