"""Linear layers: what all code needs of other kinds, and the fastest kind of this machine.

`Linear` is a layer in a format of its own, such as int8 with scales, and a `Conversion` makes such
layers. It has its place between loading a model and laying its weights out: `optimize`, the kernels
and the ranks of a later stage only meet what it made.

On a CPU, PyTorch hands `nn.Linear` to a library (MKL) that lays the weight out anew for each
product, and on many machines that library leaves much of the processor unused. Two things help, and
both come with PyTorch:

- oneDNN can lay the weight out once, at load (`pack`), and computes a GELU on the way out at no
  cost.
- One row is a special case, limited by reading the weight. In float32 MKL computes it as a batch of
  small products (`one_row`) or as one large product (`F.linear`). Which of the two comes nearer to
  the memory's bandwidth, and how near, depends on the machine, even among processors of one maker,
  so it is measured. Both also need the weight by rows, a second copy in memory. In bfloat16 oneDNN
  is up to a third faster with four rows than with one, so a single row is padded with three rows of
  zeros.

In 16 bits oneDNN needs a processor that computes in them (on x86 AVX-512, for bfloat16). Elsewhere
`widened_linear`, in float32 and a piece of the weight at a time, is faster from about 8 rows on.

On other processors the plain layer may win, so `optimize` measures and keeps the fastest. If the
measurements contradict each other, as they do beside other programs, it packs or widens, and
reports that.
Where neither exists (CUDA, MPS, float64, a build without oneDNN) the plain layer stays.
Only the order of the additions differs, so results agree to rounding (tested).
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import UserError

MODES = ("auto", "plain", "packed", "widened")
PACKED_DTYPES = (torch.float32, torch.bfloat16)
WIDENED_DTYPES = (torch.bfloat16, torch.float16)
FEWEST_ROWS = 4  # oneDNN takes up to a third longer for 1 to 3 rows than for 4: add rows of zeros
FEWEST_PAIRS, ENOUGH, MOST_PAIRS = 3, 5, 15  # comparisons of two kinds of layers
LONG = 3.0  # seconds, after which FEWEST_PAIRS must suffice
AGREE = 0.8  # of MOST_PAIRS: fewer decide nothing
CLEAR = 1.03  # times faster: less is no difference
STEADY = 1.5  # times the shortest time: a longer median was disturbed
PACKED_FOR_ROWS = 32  # oneDNN's layout for 32 rows was as good as any at 1 row, the best from 2 on
UNDECIDED = "packed (not measured)"
WIDENED_ROWS = 8  # fewer take less time in 16 bits
WIDENED = 2**19  # numbers of a weight in float32 at a time: 2 MiB, which caches hold


@runtime_checkable
class Linear(Protocol):
    """A linear layer in a format of its own: it packs and splits its weight itself. It is also an
    nn.Module; nn.Linear is no Linear. Tensors that its state_dict lacks it has in `numbers()`."""

    in_features: int
    out_features: int
    bias: Tensor | None  # (out,)

    @property
    def bytes(self) -> int:
        """Bytes that a product reads: those of the weight, and what belongs to it."""

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


def pack(weight: Tensor) -> Tensor:
    """`weight` (out, in) in oneDNN's blocked layout: an opaque tensor for `packed_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    """x (N, in) -> (N, out), followed by GPT-2's GELU if `gelu`."""
    return torch.ops.mkldnn._linear_pointwise(
        x, packed, bias, "gelu" if gelu else "none", [], "tanh" if gelu else ""
    )


def parts(out_features: int) -> int:
    """How many equal parts `one_row` cuts a weight into: the first divisor from 8 to 64, or 0."""
    return next((count for count in range(8, 65) if out_features % count == 0), 0)


def one_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (1, in) -> (1, out) as a batch of small products; `weight` (out, in) is stored by rows."""
    count = parts(len(weight))
    pieces = weight.view(count, -1, x.shape[1])  # (P, out / P, in)
    column = x.expand(count, 1, -1).transpose(1, 2)  # (P, in, 1), the same memory P times
    if bias is None:
        return torch.bmm(pieces, column).view(1, -1)
    return torch.baddbmm(bias.view(count, -1, 1), pieces, column).view(1, -1)


# x (1, in), weight (out, in) by rows, bias -> (1, out)
OneRow = Callable[[Tensor, Tensor, Tensor | None], Tensor]
ONE_ROW: tuple[OneRow, ...] = (one_row, F.linear)  # the faster one depends on the machine


class PackedLinear(nn.Module):
    """`nn.Linear` with its weight packed once, and after `by_rows` also stored by rows. The
    original may be freed.

    `gelu` True applies GPT-2's GELU to the result.
    """

    def __init__(self, plain: nn.Linear, gelu: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features, self.gelu = plain.in_features, plain.out_features, gelu
        # No parameters and no buffers: a state_dict cannot store the packed layout.
        self.bias = None if plain.bias is None else plain.bias.detach()
        self.packed, self.dtype = pack(plain.weight.detach()), plain.weight.dtype
        self.single: OneRow | None = None
        self.rows: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """The weight (out, in), recovered exactly by applying the layer to the unit matrix."""
        if self.rows is not None:
            return self.rows
        unit = torch.eye(self.in_features, dtype=self.dtype)
        return packed_linear(unit, self.packed, None).t()

    def by_rows(self, rows: Tensor, single: OneRow) -> PackedLinear:
        """A copy that shares the packed weight, and runs `single` on the weight by rows (out, in)
        for inputs of one row."""
        layer = copy.copy(self)
        if single is not one_row or parts(self.out_features):
            layer.single, layer.rows = single, rows
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        flat = x.reshape(-1, self.in_features)
        if self.single is not None and self.rows is not None and len(flat) == 1:
            y = self.single(flat, self.rows, self.bias)
            y = F.gelu(y, approximate="tanh") if self.gelu else y
        else:
            y = self.by_packed(flat)
        return y.view(*x.shape[:-1], self.out_features)

    def by_packed(self, x: Tensor) -> Tensor:
        """(N, in) -> (N, out)."""
        if len(x) < FEWEST_ROWS:
            padded = F.pad(x, (0, 0, 0, FEWEST_ROWS - len(x)))
            return packed_linear(padded, self.packed, self.bias, self.gelu)[: len(x)]
        return packed_linear(x, self.packed, self.bias, self.gelu)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, by_rows={self.rows is not None}, gelu={self.gelu}"
        )


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (N, in), weight (out, in) -> (N, out), in their dtype; computed in float32."""
    wide, y = x.float(), x.new_empty(len(x), len(weight))
    size = max(1, WIDENED // weight.shape[1])  # outputs at a time
    for start in range(0, len(weight), size):
        piece = slice(start, start + size)
        y[:, piece] = F.linear(
            wide, weight[piece].float(), None if bias is None else bias[piece].float()
        )
    return y


class WidenedLinear(nn.Module):
    """`nn.Linear` in 16 bits that computes in float32 from WIDENED_ROWS rows on. For fewer it needs
    the weight by rows: as a transposed view PyTorch reads it up to 30 times as slowly."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        rows = plain.weight.detach().contiguous()
        self.weight = nn.Parameter(rows, requires_grad=False)
        self.bias = plain.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        flat = x.reshape(-1, self.in_features)
        if len(flat) < WIDENED_ROWS:
            return F.linear(x, self.weight, self.bias)
        return widened_linear(flat, self.weight, self.bias).view(*x.shape[:-1], -1)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch packs weights of `dtype` for `device`, by a trial."""
    if device.type != "cpu" or dtype not in PACKED_DTYPES:
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        ones = torch.ones(2, 8, dtype=dtype)
        probe = packed_linear(ones, pack(torch.eye(8, dtype=dtype)), None, gelu=True)
        return torch.allclose(probe.float(), F.gelu(ones.float(), approximate="tanh"), atol=0.01)
    except (AttributeError, RuntimeError, NotImplementedError):  # operators that this build lacks
        return False


Layers = Sequence[tuple[int, Callable[[Tensor], Tensor]]]  # width of the input, and the layer


@torch.inference_mode()
def faster(first: Layers, second: Layers, rows: Sequence[int], dtype: torch.dtype) -> bool | None:
    """Whether `second` takes less time than `first` on inputs of `rows`; None if no
    comparison is clear, because both are equally fast or other programs interfere.

    The first ENOUGH comparisons must agree, or most of MOST_PAIRS; for slow layers, FEWEST_PAIRS.
    All layers run once, one after another, as in a model: one layer repeated would be read from the
    processor's cache.
    """

    def seconds(layers: Layers) -> float:
        inputs = [[torch.ones(n, width, dtype=dtype) for width, _ in layers] for n in rows]
        started = time.perf_counter()
        for batch in inputs:
            for x, (_, layer) in zip(batch, layers, strict=True):
                layer(x)
        return time.perf_counter() - started

    seconds(first), seconds(second)  # warm up
    begun = time.perf_counter()
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(1, MOST_PAIRS + 1):
        for place in (0, 1) if pair % 2 else (1, 0):
            times[place].append(seconds((first, second)[place]))
        late = time.perf_counter() - begun > LONG
        if pair in (ENOUGH, MOST_PAIRS) or late and pair >= FEWEST_PAIRS:
            pairs = list(zip(*times, strict=True))
            won = sum(other * CLEAR < left for left, other in pairs)
            lost = sum(left * CLEAR < other for left, other in pairs)
            steady = all(statistics.median(series) < STEADY * min(series) for series in times)
            if steady and max(won, lost) >= (AGREE if pair == MOST_PAIRS else 1) * pair:
                return won > lost
            if late:
                break
    return None


def followed_by_gelu(model: nn.Module) -> dict[str, str]:
    """Names of linear layers whose next sibling is GPT-2's GELU, with the name of that GELU."""
    pairs = {}
    for prefix, module in model.named_modules():
        children = list(module.named_children())
        for (name, layer), (following, activation) in zip(children, children[1:], strict=False):
            gelu = type(activation) is nn.GELU and activation.approximate == "tanh"
            if type(layer) is nn.Linear and gelu:
                pairs[f"{prefix}.{name}".lstrip(".")] = f"{prefix}.{following}".lstrip(".")
    return pairs


def known_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers that `optimize` may replace, by name: of the class nn.Linear itself, with a weight
    that is a plain tensor. All have one dtype and one device, preferably ones that can be
    packed."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and type(module.weight.data) is Tensor
    }
    kinds = {name: (layer.weight.device, layer.weight.dtype) for name, layer in layers.items()}
    distinct = dict.fromkeys(kinds.values())
    kind = next((kind for kind in distinct if can_pack(*kind)), next(iter(distinct), None))
    return {name: layer for name, layer in layers.items() if kinds[name] == kind}


def widen(model: nn.Module, layers: Mapping[str, nn.Linear], always: bool) -> str:
    """Put widened layers in the place of `layers` unless they are slower, or `always`. Returns
    "widened", with "(not measured)" if no measurement was clear, or "plain". Raises UserError if
    they must be, and are not in 16 bits on a CPU."""
    weight = next(iter(layers.values())).weight
    device, dtype = weight.device, weight.dtype
    if device.type == "cpu" and dtype in WIDENED_DTYPES:
        wide = {name: WidenedLinear(layer) for name, layer in layers.items()}
        shapes = {(layer.in_features, layer.out_features): name for name, layer in layers.items()}
        plain = [(width, layers[name]) for (width, _), name in shapes.items()]
        rival = [(width, wide[name]) for (width, _), name in shapes.items()]
        won = always or faster(plain, rival, (2 * WIDENED_ROWS,), dtype)
        if won is not False:  # a transposed view may be 40 times slower, a widened layer may not
            for name, layer in wide.items():
                model.set_submodule(name, layer)
            return "widened" if won else "widened (not measured)"
    elif always:
        raise UserError(
            f"Widened linear layers need bfloat16 or float16 on a CPU, not "
            f"{str(dtype).removeprefix('torch.')} on {device.type}: use --linear auto."
        )
    return "plain"


def optimize(model: nn.Module, mode: str = "auto") -> str:
    """Put the fastest linear layer into `model`, in place. Returns which: "packed", "widened" or
    "plain"; with "(not measured)" if no measurement was clear.

    mode: "auto" measures and keeps the fastest; "plain" changes nothing; the others put that kind.
    Only the layers of `known_layers` change, and a Linear, unless the mode is "plain", packs
    itself. All others stay as they are.
    Raises UserError for an unknown mode, or for one that this machine or the dtype does not allow.
    """
    if mode not in MODES:
        raise UserError(f"There is no linear layer '{mode}': choose one of {', '.join(MODES)}.")
    for name, layer in list(model.named_modules()) if mode != "plain" else ():
        if isinstance(layer, Linear):
            model.set_submodule(name, layer.pack())
    layers = known_layers(model)
    if mode == "plain" or not layers:
        return "plain"
    weight = next(iter(layers.values())).weight
    device, dtype = weight.device, weight.dtype
    if mode == "widened" or mode == "auto" and not can_pack(device, dtype):
        return widen(model, layers, always=mode == "widened")
    if not can_pack(device, dtype):
        asked, *known = (str(d).removeprefix("torch.") for d in (dtype, *PACKED_DTYPES))
        if asked in known and device.type == "cpu":
            raise UserError(
                f"PyTorch cannot pack linear layers in {asked} on this processor (x86 needs "
                "AVX-512 for bfloat16): use --linear auto."
            )
        raise UserError(
            f"Packed linear layers need a CPU build of PyTorch with oneDNN and "
            f"{' or '.join(known)}, not {asked} on {device.type}: use --linear auto."
        )
    gelus = followed_by_gelu(model)
    packed = {name: PackedLinear(layer, name in gelus) for name, layer in layers.items()}
    best: Layers = [(layer.in_features, layer.by_packed) for layer in packed.values()]
    rows = {name: layer.weight.detach().contiguous() for name, layer in layers.items()}
    for single in ONE_ROW:
        tried = {name: layer.by_rows(rows[name], single) for name, layer in packed.items()}
        layers_tried = [(layer.in_features, layer) for layer in tried.values()]
        if faster(best, layers_tried, (1,), dtype):
            packed, best = tried, layers_tried
    plain = [(layer.in_features, layer) for layer in layers.values()]
    kind = "packed"
    if mode == "auto":
        won = faster(plain, best, (1, 32), dtype)
        if won is False:
            return "plain"
        kind = "packed" if won else UNDECIDED
    for name, layer in packed.items():
        model.set_submodule(name, layer)
        if name in gelus:
            model.set_submodule(gelus[name], nn.Identity())
    return kind
