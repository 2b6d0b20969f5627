"""GPT-2 in PyTorch: the page of numpy_gpt2.py with attention lifted out into an argument.

Tokens meet only in attention; everything else treats each token alone. So the model is written
once, here, and every later stage passes in its own `attend`. The model knows nothing of batches,
caches or masks: `ids` and `positions` may have any leading shape, (T,), (B, T) or packed (N,).

`attend(layer, q, k, v)` takes the new queries, keys and values, each (..., H, D), stores the keys
and values wherever its stage keeps them, and returns the attention output (..., H, D). It never
returns K and V: a paged or fused kernel has no dense K and V to return.

Shapes: H heads of D channels, C = H * D, V tokens in the vocabulary. Module names are those of the
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from shared.checkpoint import Checkpoint, without_weights
from shared.config import Config

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Model(Protocol):
    """What engines use of a model, of any family."""

    @property
    def config(self) -> Config: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Attention(nn.Module):
    """The two projections around attention; `attend` comes between them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def split_heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """(..., 3C) -> q, k, v, each (..., H, D); views, no copy."""
        return x.unflatten(-1, (3, self.n_head, -1)).unbind(-3)


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.act = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))  # (..., C) -> (..., 4C) -> (..., C)


class Block(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.attn.split_heads(self.attn.c_attn(self.ln_1(x)))  # each (..., H, D)
        x = x + self.attn.c_proj(attend(self.layer, q, k, v).flatten(-2))  # (..., H, D) -> (..., C)
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states (..., C) for `ids` and `positions`, both (...,) int64."""
        x = self.wte(ids) + self.wpe(positions)  # (...,) -> (..., C)
        for block in self.h:
            x = block(x, attend)
        return self.ln_f(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., C) -> (..., V). For sampled rows only: it reads a third of GPT-2's weights."""
        return self.lm_head(hidden)

    @property
    def device(self) -> torch.device:
        return self.ln_f.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.ln_f.weight.dtype


def load_model(
    checkpoint: Checkpoint, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> GPT2:
    """The model with the weights of `checkpoint`, ready for inference.

    GPT-2 stores its four projections as (in, out), nn.Linear as (out, in): they are transposed, as
    views. A tied output layer is the input embedding itself. `dtype` None: the checkpoint's.
    """
    with without_weights():
        model = GPT2(checkpoint.config)
    state = {
        name: (
            tensor.t()
            if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
            else tensor
        ).to(device, dtype)
        for name, tensor in checkpoint.tensors.items()
    }
    if "wte.weight" in state:
        state.setdefault("lm_head.weight", state["wte.weight"])
    model.load_state_dict(state, assign=True, strict=checkpoint.conversion is None)
    return model.requires_grad_(False).eval()
