"""SmoothQuant: move large activations into the weights, where they are harmless.

Xiao et al., "SmoothQuant" (2022). int8 activations share one scale a token, so a channel that is
a hundred times larger than the others leaves those with a code or two. But each channel of a
layer's input comes out of something linear: a norm's gain and bias, or a layer's own outputs. There
it can be divided by s, if the weights multiply it by s again:

    y = W x = (W diag(s)) (x / s)        s_j = max|x_j|^a / max|W_j|^(1 - a)

Each s is a power of two, so neither division nor multiplication rounds: the model computes the same
function, bit for bit. `plant` does the reverse, to make outliers in a model that has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stage01_forward.attention import Recompute
from stage01_forward.model import GPT2


@dataclass(frozen=True)
class Fold:
    """The J channels that the outputs from `first` on of `producer` make, and the layers that read
    them. channels: of each input of these layers; grouped heads read a channel several times."""

    producer: Any  # a norm, or a linear layer
    consumers: Sequence[nn.Linear]
    channels: Tensor  # (K,) of 0 to J - 1
    first: int = 0

    def apply(self, s: Tensor) -> None:
        """Divide what is produced by `s` (J,), and multiply the weights that read it."""
        for name in ("weight", "bias"):
            tensor = getattr(self.producer, name, None)
            if tensor is not None:
                scaled = tensor.detach().clone()
                channels = scaled[self.first : self.first + len(s)]
                channels /= s.to(scaled.dtype).view(-1, *[1] * (scaled.ndim - 1))
                setattr(self.producer, name, nn.Parameter(scaled, requires_grad=False))
        for layer in self.consumers:
            weight = layer.weight.detach() * s[self.channels].to(layer.weight.dtype)
            layer.weight = nn.Parameter(weight, requires_grad=False)

    def largest(self, inputs: Tensor) -> Tensor:
        """The largest of `inputs` (K,) of each channel, (J,)."""
        count = int(self.channels.max()) + 1
        return torch.zeros(count).scatter_reduce(0, self.channels, inputs.float(), "amax")


def folds(model: Any) -> Iterator[Fold]:
    """All that is exact: norms into the layers behind them, values into the projection behind
    attention, and a gated MLP's up into its down. Not across a GELU, nor into the head, whose
    weights are the embedding's."""
    config = model.config
    every = torch.arange(config.n_embd)
    if isinstance(model, GPT2):
        blocks: Any = model.h
        for block in blocks:
            attn, mlp = block.attn, block.mlp
            yield Fold(block.ln_1, [attn.c_attn], every)
            yield Fold(attn.c_attn, [attn.c_proj], every, first=2 * config.n_embd)
            yield Fold(block.ln_2, [mlp.c_fc], every)
    else:
        values = torch.arange(config.n_kv_head * config.head_dim).view(-1, config.head_dim)
        read = values.repeat_interleave(config.n_head // config.n_kv_head, 0).flatten()
        for layer in model.layers:
            attn, mlp = layer.self_attn, layer.mlp
            yield Fold(layer.input_layernorm, [attn.q_proj, attn.k_proj, attn.v_proj], every)
            yield Fold(attn.v_proj, [attn.o_proj], read)
            yield Fold(layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj], every)
            yield Fold(mlp.up_proj, [mlp.down_proj], torch.arange(mlp.up_proj.out_features))


@torch.inference_mode()
def maxima(model: Any, windows: Sequence[Tensor]) -> dict[nn.Linear, Tensor]:
    """max|x_j| (K,) of the input of every linear layer, over the token ids `windows`, each (T,)."""
    largest: dict[Any, Tensor] = {}

    def watch(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        seen = arguments[0].abs().flatten(0, -2).amax(0)
        largest[layer] = torch.maximum(seen, largest.get(layer, seen))

    layers = [m for m in model.modules() if type(m) is nn.Linear]
    hooks = [layer.register_forward_pre_hook(watch) for layer in layers]
    for ids in windows:
        model(ids, torch.arange(len(ids)), Recompute().attend)
    for hook in hooks:
        hook.remove()
    return largest


def smooth(model: Any, windows: Sequence[Tensor], alpha: float = 0.5) -> None:
    """Fold scales into a float `model`, in place, calibrated on the token ids `windows`."""
    largest = maxima(model, windows)
    for fold in folds(model):
        x = fold.largest(largest[fold.consumers[0]])  # (J,)
        columns = torch.stack([layer.weight.abs().amax(0) for layer in fold.consumers]).amax(0)
        w = fold.largest(columns)
        s = x**alpha / w ** (1 - alpha)
        s = torch.where((x > 0) & (w > 0), s, 1).log2().round().exp2()
        fold.apply(s)


def plant(model: Any, channels: Sequence[int], factor: float) -> None:
    """Make outliers, in place: `channels` of all norms' outputs are `factor` times as large, and
    the weights that read them as much smaller. factor: a power of two."""
    for fold in folds(model):
        if not isinstance(fold.producer, nn.Linear):
            s = torch.ones(len(fold.channels))
            s[list(channels)] = 1 / factor
            fold.apply(s)
