"""Linear layers in other formats than floating-point numbers: what all code needs of them.

`Linear` is a layer in a format of its own, such as int8 with scales, and a `Conversion` makes such
layers. It has its place between loading a model and laying its weights out: `linear.optimize`, the
kernels and the ranks of a later stage only meet what it made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from .errors import UserError


@runtime_checkable
class Linear(Protocol):
    """A linear layer in a format of its own: it packs and splits its weight itself. It is also an
    nn.Module; nn.Linear is no Linear."""

    in_features: int
    out_features: int
    bias: Tensor | None  # (out,)

    def __call__(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), in the dtype of x."""

    def pack(self) -> nn.Module:
        """The layer in this machine's fastest layout; itself if it has that already."""

    def shard(self, rows: Tensor | None, columns: Tensor | None) -> nn.Module:
        """The layer with the outputs `rows` alone; or with the inputs `columns` alone, and then
        without a bias, which belongs to the sum of all parts. The other of the two is None."""


class Table(Protocol):
    """A table of embeddings in a format of its own. It is also an nn.Module."""

    def __call__(self, ids: Tensor) -> Tensor:
        """(...,) int64 -> (..., C)."""

    def head(self) -> nn.Module:
        """The output layer that shares the table, of a model that ties them."""


class Conversion(Protocol):
    """Makes other linear layers of a checkpoint's, and declares how the checkpoint stores them."""

    def declares(self, name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors, of any dtype, that the checkpoint has in place of the matrix
        `name`.weight of this shape, such as {"weight": shape, "scale": (8,)}; empty if it has the
        matrix itself."""

    def layer(self, name: str, plain: nn.Linear, tensors: Mapping[str, Tensor]) -> nn.Module:
        """The layer in the place of `plain`: a Linear, or `plain` itself. tensors: those declared;
        with them, the weight of `plain` has the model's dtype, and is on "meta"."""

    def embedding(
        self, name: str, plain: nn.Embedding, tensors: Mapping[str, Tensor]
    ) -> nn.Embedding | Table:
        """The table of the tokens' embeddings in the place of `plain`, or `plain` itself."""


def convert(
    model: Any, conversion: Conversion, declared: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Convert all linear layers of `model`, and its table of tokens, in place. declared: tensors by
    layer. A head that is tied to a table in a format of its own is the table's. At most one layer
    exists in both formats. Raises UserError for a model that is converted already."""
    from tqdm import tqdm  # here, because few conversions take long

    def tensors(name: str) -> dict[str, Tensor]:
        return {kind: x.to(model.device) for kind, x in declared.get(name, {}).items()}

    def plain(name: str) -> Any:
        layer = model.get_submodule(name)
        return layer.to(model.dtype) if name in declared else layer

    name = next(iter(model.config.shapes())).removesuffix(".weight")  # that of the tokens
    if not isinstance(model.get_submodule(name), nn.Embedding):
        raise UserError(
            f"{model.config.name} is converted already: load its checkpoint anew to convert it."
        )
    table = conversion.embedding(name, plain(name), tensors(name))
    if not isinstance(table, nn.Embedding):
        model.set_submodule(name, table)
        if model.config.tied:
            model.lm_head = table.head()
    names = [name for name, x in model.named_modules() if type(x) is nn.Linear]
    for name in tqdm(names, desc="converting", unit="layer", disable=None, delay=1):
        model.set_submodule(name, conversion.layer(name, plain(name), tensors(name)))
