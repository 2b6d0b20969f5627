"""Checkpoints: from a folder or the hub, or seeded random weights. Safetensors, never pickle.

The tensors always have the names and shapes of `Config.shapes`, however the file spells them.
Anything that does not fit raises one UserError, which says what is wrong and what to do. Values are
not checked: NaN passes.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch.overrides import TorchFunctionMode

from . import catalog
from .catalog import EMBEDDED as EMBEDDED
from .catalog import PRESETS, Found, Opened
from .config import Config, read_config
from .errors import UserError
from .files import read_json
from .tokenizer import has_tokenizer

if TYPE_CHECKING:
    from .conversion import Conversion
    from .tokenizer import AnyTokenizer

log = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")


@dataclass
class Checkpoint:
    """A config and its tensors by name. folder: where the tokenizer's files are; None without any.
    unused: rows of the vocabulary without a token, if the tokenizer tells. conversion: of the
    linear layers, once the model is made. declared: the tensors that it declares, by layer. files:
    with the weights; none for random ones."""

    config: Config
    tensors: dict[str, torch.Tensor]
    folder: Path | None = None
    unused: Sequence[int] = ()
    conversion: Conversion | None = None
    declared: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    files: Sequence[Path] = ()


def load(
    name: str,
    random_weights: bool = False,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    conversion: Conversion | None = None,
) -> Checkpoint:
    """Load a model by name: an embedded one, a folder, a file in a format that `catalog` knows, or
    a hub name: "gpt2", "owner/name".

    The names of known shapes mean those; write "./gpt2" for a folder of that name.
    random_weights: take only the shape, from a preset or a folder's config.json; this needs no
    weights and no network. dtype: convert all tensors; None keeps the file's. conversion: of the
    linear layers; the tensors that it declares keep their dtype.
    Tensors that need no conversion are mapped from the file, not copied: they stay valid while they
    are referenced, and the file must not change meanwhile.
    Raises UserError for an invalid name, folder or file, and for network errors.
    """
    if random_weights:
        checkpoint = _random_checkpoint(name, seed, dtype)
    else:
        opened = _open(name, _find(name))
        conversion = opened.conversion or conversion
        tensors, declared = _checked(opened, conversion)
        checkpoint = Checkpoint(opened.config, tensors, opened.folder, declared=declared)
        checkpoint.files = opened.files
    checkpoint.conversion = conversion
    if dtype is not None:
        checkpoint.tensors = {key: tensor.to(dtype) for key, tensor in checkpoint.tensors.items()}
    return checkpoint


class _SkipInit(TorchFunctionMode):
    """Makes torch.nn.init return its tensor unchanged."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def without_weights() -> Iterator[None]:
    """Modules made here are on the device "meta": they take no memory, and no time for random
    values.

    To draw random values on "meta", PyTorch would also import 800 modules that nothing else needs.
    """
    with torch.device("meta"), _SkipInit():
        yield


def check_vocabulary(tokenizer: AnyTokenizer, config: Config) -> None:
    """Raise UserError unless every id is a row of the model's embedding; warn unless both end a
    text with the same token. The model's counts, as in transformers.

    A model may have more rows than the tokenizer has tokens: some are padded to a round number.
    """
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"The tokenizer has {tokenizer.vocab_size} tokens and the model {config.name} only "
            f"{config.vocab_size}: use the vocabulary of the checkpoint that the weights come from."
        )
    ours, theirs = tokenizer.eos_id, config.eos_ids
    if ours is not None and theirs and ours not in theirs:
        listed = " or ".join(map(str, theirs))
        log.warning(
            "The tokenizer ends a text with token %d and the model %s with %s: the model's counts.",
            ours,
            config.name,
            listed,
        )


# ---- the folder ----


def _find(name: str) -> Found:
    """Where the checkpoint is, downloaded first if the name is a hub name."""
    if location := catalog.find(name):
        return location
    if name == "tiny":
        raise UserError(
            "The model tiny exists only with random weights: add --random-weights, or choose "
            "another model."
        )
    if name in PRESETS:
        return Found(_download(name, f"openai-community/{name}"))
    return Found(_download(name, catalog.checked(name)))


def _open(name: str, location: Found, weights: bool = True) -> Opened:
    """The files. weights: of a plain folder, too."""
    known = name if catalog.is_known(name) else None
    if location.format:
        opened = location.format.open(location.path)
        return replace(opened, config=replace(opened.config, name=known or opened.config.name))
    config = read_config(location.path, known)
    tensors = read_tensors(location.path) if weights else {}
    return Opened(config, tensors, location.path, sorted(location.path.glob("*.safetensors")))


def _download(name: str, repository: str) -> Path:
    """The folder with the files in this machine's hub cache. Cached files need no network."""
    import huggingface_hub as hub  # here, because offline users should not pay for its import
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    wanted = ["config.json", "model*.safetensors", INDEX]
    wanted += ["vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"]
    wanted += ["generation_config.json", "chat_template.jinja"]
    try:
        return Path(hub.snapshot_download(repository, allow_patterns=wanted))
    except GatedRepoError:  # a kind of RepositoryNotFoundError
        raise UserError(
            f"The model {name} is gated: accept its licence on its page of the hub and log in "
            "with `hf auth login`, or give a local folder."
        ) from None
    except (HFValidationError, RepositoryNotFoundError):
        raise UserError(
            f"Neither a folder nor a public model on the hub is called {name}: check the name."
        ) from None
    except Exception as error:  # refused, gated, timed out, disk full
        raise UserError(
            f"{name} cannot be downloaded from the hub ({type(error).__name__}): connect to the "
            "network, give a local folder, or use the embedded model with --model stories."
        ) from None


# ---- the files ----


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors under the file's names, from one file or from the shards of an index."""
    if (folder / WEIGHTS).is_file():
        return read_file(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    paths = folder.iterdir() if folder.is_dir() else ()
    if others := sorted(path.name for path in paths if path.suffix in OTHER_FORMATS):
        raise UserError(
            f"{folder} has {others[0]} but no {WEIGHTS}, and pickles and other formats are not "
            "opened because they can run code or hide their shapes: if you trust it, convert it "
            "with transformers (from_pretrained, then save_pretrained)."
        )
    if shards := sorted(path.name for path in folder.glob("*.safetensors")):
        raise UserError(
            f"{folder} has {shards[0]}, but neither {WEIGHTS} nor {INDEX}, which names the shards: "
            "copy or download it again."
        )
    raise UserError(
        f"{folder} has no {WEIGHTS}: give a folder with weights, or add --random-weights."
    )


def _read_shards(folder: Path) -> dict[str, torch.Tensor]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else [None]
    if not all(isinstance(name, str) for name in names):
        raise UserError(
            f"{folder / INDEX} has no weight_map from tensors to files: copy or download it again."
        )
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(set(names)):
        if Path(name).name != name or "\\" in name:  # an index must not reach out of its folder
            raise UserError(
                f"{folder / INDEX} names {name!r}, which is not a file of its own folder: copy or "
                "download it again."
            )
        if not (folder / name).is_file():
            raise UserError(
                f"{folder / name} is missing although {INDEX} names it: copy or download it again."
            )
        tensors |= read_file(folder / name)
    return tensors


def read_file(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one safetensors file, mapped into memory rather than read."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        remedy = "copy or download it again."
        if _is_pointer(path):
            remedy = "it is a Git LFS pointer, so run git lfs pull."
        raise UserError(
            f"{path} is truncated, corrupt or not safetensors ({error}): {remedy}"
        ) from None


def _is_pointer(path: Path) -> bool:
    """Whether the file is a Git LFS pointer, the usual reason for a corrupt clone."""
    try:
        with path.open("rb") as file:
            return file.read(20).startswith(b"version https://git")
    except OSError:
        return False


def _checked(
    opened: Opened, conversion: Conversion | None
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """The tensors under their canonical names, in the model's order; and by layer those that
    `conversion` declares.

    Raises UserError if they are not exactly the model's and the declared ones.
    """
    raw, config = opened.tensors, opened.config
    folder = opened.files[0].parent if opened.files else opened.folder
    names = {old: new for old in raw if (new := config.tensor_name(old)) is not None}
    doubled = [new for new, count in Counter(names.values()).items() if count > 1]
    if doubled:
        raise UserError(
            f"The weights in {folder} hold {_some(doubled)} under two names: keep one of them."
        )
    tensors = {new: raw[old] for old, new in names.items()}
    for old, new in names.items():
        openai = old.startswith("model/") and old.endswith("/w")
        if openai and tensors[new].ndim == 3 and len(tensors[new]) == 1:
            tensors[new] = tensors[new][0]  # (1, in, out), a convolution of width 1

    shapes, layers = config.shapes(), dict[str, str]()  # layers of declared tensors
    for name, shape in list(shapes.items()) if conversion else ():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and len(shape) == 2:
            assert conversion is not None
            stored = {f"{layer}.{kind}": s for kind, s in conversion.declares(layer, shape).items()}
            if stored:
                del shapes[name]
                shapes |= stored
                layers |= dict.fromkeys(stored, layer)
    head = tensors.pop("lm_head.weight", None) if config.tied else None
    problems = []
    if missing := [name for name in shapes if name not in tensors]:
        problems.append(f"missing {_some(missing)}")
    if unexpected := [name for name in tensors if name not in shapes]:
        problems.append(f"unexpected {_some(unexpected)}")
    present = {name: tensors[name] for name in shapes if name in tensors}
    if misshapen := [
        f"{name} {tuple(tensor.shape)} instead of {shapes[name]}"
        for name, tensor in present.items()
        if tuple(tensor.shape) != shapes[name]
    ]:
        problems.append(f"misshapen {_some(misshapen)}")
    if odd := [
        f"{name} ({tensor.dtype})"
        for name, tensor in present.items()
        if name not in layers and tensor.dtype not in DTYPES
    ]:
        problems.append(f"not of a floating-point type {_some(odd)}")
    if problems:
        raise UserError(
            f"The weights in {folder} do not fit its config.json: {'; '.join(problems)}; get both "
            "from the same checkpoint."
        )
    embedding = next(iter(shapes))
    if head is not None and not torch.equal(head, tensors[embedding]):
        raise UserError(
            f"lm_head.weight in {folder} differs from {embedding}, but config.json ties them: set "
            "tie_word_embeddings to false, or choose another checkpoint."
        )
    declared: dict[str, dict[str, torch.Tensor]] = {}
    for name, layer in layers.items():
        declared.setdefault(layer, {})[name.removeprefix(f"{layer}.")] = present.pop(name)
    return present, declared


def _some(names: Sequence[str]) -> str:
    """The first three names, and the number of the others."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


# ---- random weights ----


def _random_checkpoint(name: str, seed: int, dtype: torch.dtype | None) -> Checkpoint:
    folder, location = None, catalog.find(name)
    if location:
        opened = _open(name, location, weights=False)
        config, folder = opened.config, opened.folder
    elif name in (presets := catalog.presets()):
        config = presets[name]
    else:
        raise catalog.unknown(name)
    if not has_tokenizer(folder):
        folder = None
    return Checkpoint(config, random_tensors(config, seed, dtype), folder)


def random_tensors(
    config: Config, seed: int = 0, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Weights as at the start of GPT-2's training: normal, biases 0, norms 1. The same seed gives
    the same weights.

    They are drawn in float32 for every dtype: a float64 model has the values of the float32 one.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in config.shapes().items():
        if name.endswith(".bias"):
            tensor = torch.zeros(shape)
        elif len(shape) == 1:
            tensor = torch.ones(shape)
        else:
            std = 0.01 if name == "wpe.weight" else 0.02
            if name.endswith("c_proj.weight"):  # the residual stream sums 2 n_layer outputs
                std /= math.sqrt(2 * config.n_layer)
            tensor = torch.empty(shape).normal_(0.0, std, generator=generator)
        tensors[name] = tensor if dtype is None else tensor.to(dtype)
    return tensors
