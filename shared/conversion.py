"""Linear layers in other formats than floating-point numbers: what all code needs of them.

`Linear` is a layer in a format of its own, such as int8 with scales, and a `Conversion` makes such
layers. It has its place between loading a model and laying its weights out: `linear.optimize`, the
kernels and the ranks of a later stage only meet what it made.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class Linear(Protocol):
    """A linear layer in a format of its own: it splits its weight itself. It is also an nn.Module;
    nn.Linear is no Linear."""

    in_features: int
    out_features: int
    bias: Tensor | None  # (out,)

    def __call__(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), in the dtype of x."""

    def shard(self, rows: Tensor | None, columns: Tensor | None) -> nn.Module:
        """The layer with the outputs `rows` alone; or with the inputs `columns` alone, and then
        without a bias, which belongs to the sum of all parts. The other of the two is None."""


class Conversion(Protocol):
    """Makes other linear layers of a checkpoint's."""

    @property
    def stored(self) -> Collection[str]:
        """The names of the matrices that it has itself; all others are in the checkpoint."""

    def layer(self, name: str, plain: nn.Linear) -> nn.Module:
        """The layer `name` in the place of `plain`: a Linear, or `plain` itself. If the matrix is
        `stored`, the weight of `plain` has the model's dtype, and is on "meta"."""

    def embedding(self, name: str, plain: nn.Embedding) -> Any:
        """The table of the tokens' embeddings in the place of `plain`, or `plain` itself. Another
        table has `head()`, the output layer that shares it in a model that ties them."""


def convert(model: Any, conversion: Conversion) -> None:
    """Convert all linear layers of `model`, and its table of tokens, in place. A head that is tied
    to a table in a format of its own is the table's. At most one layer exists in both formats."""
    from tqdm import tqdm  # here, because few conversions take long

    name = next(iter(model.config.shapes())).removesuffix(".weight")  # that of the tokens
    table = conversion.embedding(name, model.get_submodule(name).to(model.dtype))
    if not isinstance(table, nn.Embedding):
        model.set_submodule(name, table)
        if model.config.tied:
            model.lm_head = table.head()
    names = [name for name, x in model.named_modules() if type(x) is nn.Linear]
    for name in tqdm(names, desc="converting", unit="layer", disable=None, delay=1):
        plain = model.get_submodule(name).to(model.dtype)
        model.set_submodule(name, conversion.layer(name, plain))
