"""The Llama family in PyTorch, through stage 01's seam: `attend(layer, q, k, v)`.

Five things differ from GPT-2. Positions rotate queries and keys instead of being added to the
embedding (rope.py). Several query heads share a head of keys and values. Norms divide by the root
mean square and subtract nothing. The MLP has a gate. Layers have no biases, but for those of
Qwen2's queries, keys and values. One class serves the whole family: the config sets its switches
when a model is made, and no model is named here.

Shapes: H query heads and K heads of keys and values, of D channels; C channels in the residual
stream, F in the MLP, V tokens. Module names are those of the checkpoint, without "model.".
Papers: Touvron et al., "LLaMA" (2023); Ainslie et al., "GQA" (2023); Zhang and Sennrich, "Root Mean
Square Layer Normalization" (2019); Shazeer, "GLU Variants Improve Transformer" (2020).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.checkpoint import Checkpoint, without_weights
from stage01_forward.model import Attend

from .config import LlamaConfig
from .rope import frequencies, rotate, rotation

Rotation = tuple[Tensor, Tensor]  # cosines and sines of the positions of a pass


class RMSNorm(nn.Module):
    """x / rms(x) * weight. The division is in float32 for every dtype, as these models were
    trained; the weight multiplies the result in the dtype of x."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.empty(width)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * (wide * scale).to(x.dtype)


class Attention(nn.Module):
    """The projections around attention; `attend` comes between them."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, heads = config.n_embd, config.n_head * config.head_dim
        kv_heads = config.n_kv_head * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(width, heads, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, kv_heads, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, kv_heads, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads, width, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.layer_norm_epsilon)
            self.k_norm = RMSNorm(config.head_dim, config.layer_norm_epsilon)

    def heads(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """(..., C) -> q (..., H, D), and k and v (..., K, D), ready for `attend`."""
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in projected)
        return rotate(self.q_norm(q), *rotation), rotate(self.k_norm(k), *rotation), v


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, inner = config.n_embd, config.n_inner
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gated = F.silu(self.gate_proj(x)) * self.up_proj(x)  # (..., C) -> (..., F)
        return self.down_proj(gated)


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.input_layernorm = RMSNorm(config.n_embd, config.layer_norm_epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        q, k, v = self.self_attn.heads(self.input_layernorm(x), rotation)
        x = x + self.self_attn.o_proj(attend(self.layer, q, k, v).flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A model of the family, as engines use it: they call it, then its `logits`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.unused: Tensor | None = None  # rows of the vocabulary that are no token
        self.embed_tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.layer_norm_epsilon)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        # Computed, never read from a file: on "meta", where the weights are made, they would stay
        # empty.
        self.frequencies = frequencies(config.rope, config.head_dim)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states (..., C) for `ids` and `positions`, both (...,) int64."""
        x = self.embed_tokens(ids)
        turns = rotation(positions, self.frequencies.to(x.device))
        for layer in self.layers:
            x = layer(x, turns, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., C) -> (..., V), for sampled rows only. Rows that are no token are never sampled."""
        logits = self.lm_head(hidden)
        return logits if self.unused is None else logits.index_fill(-1, self.unused, -torch.inf)

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype


class RepeatedHeads:
    """`model` with the keys and values of each head copied for all queries that share it, before
    attention: what grouped attention replaces. It is right on every engine, because caches see a
    model with as many heads of keys as of queries, and so it serves as an oracle; but its cache is
    H / K times as large, and takes H / K times as long to read."""

    def __init__(self, model: Llama) -> None:
        self.model, self.logits = model, model.logits
        self.device, self.dtype = model.device, model.dtype
        self.config = replace(model.config, n_kv_head=model.config.n_head)

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states (..., C), as `Llama` gives them."""
        group = self.config.n_head // self.model.config.n_kv_head

        def repeat(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(group, -2) for x in (k, v))  # (..., K, D) -> (..., H, D)
            return attend(layer, q, k, v)

        return self.model(ids, positions, repeat)


def load_model(
    checkpoint: Checkpoint, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Llama:
    """The model with the weights of `checkpoint`, ready for inference. If `dtype` is the
    checkpoint's, or None, there is no second copy of them. A tied head is the embedding itself."""
    config = checkpoint.config
    assert isinstance(config, LlamaConfig)
    with without_weights():
        model = Llama(config)
    state = {name: tensor.to(device, dtype) for name, tensor in checkpoint.tensors.items()}
    if "embed_tokens.weight" in state:
        state.setdefault("lm_head.weight", state["embed_tokens.weight"])
    model.load_state_dict(state, assign=True, strict=checkpoint.conversion is None)
    if checkpoint.unused:
        model.unused = torch.tensor(checkpoint.unused, device=device)
    return model.requires_grad_(False).eval()
