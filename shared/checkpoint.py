"""Checkpoints: from a folder or the hub, or seeded random weights. Safetensors, never pickle.

The tensors always have the names and shapes of `Config.shapes`, however the file spells them.
Anything that does not fit raises one UserError, which says what is wrong and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch.overrides import TorchFunctionMode

from . import catalog
from .catalog import EMBEDDED as EMBEDDED
from .catalog import PRESETS
from .config import Config, read_config
from .errors import UserError
from .files import read_json
from .tokenizer import FILES

if TYPE_CHECKING:
    from .conversion import Conversion
    from .tokenizer import AnyTokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass
class Checkpoint:
    """A config and its tensors by name. folder: where the tokenizer's files are; None without any.
    unused: rows of the vocabulary without a token, if the tokenizer tells. conversion: of the
    linear layers, once the model is made."""

    config: Config
    tensors: dict[str, torch.Tensor]
    folder: Path | None = None
    unused: Sequence[int] = ()
    conversion: Conversion | None = None


def load(name: str, random_weights: bool = False, seed: int = 0) -> Checkpoint:
    """Load a model by name: an embedded one, a folder, a file in a format that `catalog` knows, or
    a hub name: "gpt2", "owner/name".

    The names of known shapes mean those; write "./gpt2" for a folder of that name.
    random_weights: take only the shape, from a preset or a folder's config.json; this needs no
    weights and no network. Tensors are mapped from the file, not copied: they stay valid while they
    are referenced, and the file must not change meanwhile.
    Raises UserError for an invalid name, folder or file, and for network errors.
    """
    if random_weights:
        return _random_checkpoint(name, seed)
    path = catalog.find(name)
    if path is None:
        repository = f"openai-community/{name}" if name in PRESETS else catalog.checked(name)
        path = _download(name, repository)
    opened = _open(name, path)
    opened.tensors = _checked(opened, path)
    return opened


class _SkipInit(TorchFunctionMode):
    """Makes torch.nn.init return its tensor unchanged."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def without_weights() -> Iterator[None]:
    """Modules made here are on the device "meta": they take no memory and no time. To draw random
    values on "meta", PyTorch would import 800 modules that nothing else needs."""
    with torch.device("meta"), _SkipInit():
        yield


def check_vocabulary(tokenizer: AnyTokenizer, config: Config) -> None:
    """Raise UserError unless every id is a row of the model's embedding. A model may have more
    rows than the tokenizer has tokens: some are padded to a round number."""
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"The tokenizer has {tokenizer.vocab_size} tokens and the model {config.name} only "
            f"{config.vocab_size}: use the vocabulary of the checkpoint that the weights come from."
        )


# ---- the folder ----


def _open(name: str, path: Path, weights: bool = True) -> Checkpoint:
    """The files. weights: of a plain folder, too."""
    format = catalog.quantized()
    if format.reads(path):
        opened: Checkpoint = format.open(path)
        if name in format.NAMES:
            opened.config = replace(opened.config, name=name)
        return opened
    config = read_config(path, name if name in (*EMBEDDED, *PRESETS) else None)
    return Checkpoint(config, read_tensors(path) if weights else {}, path)


def _download(name: str, repository: str) -> Path:
    """The folder with the files in this machine's hub cache. Cached files need no network."""
    import huggingface_hub as hub  # here, because offline users should not pay for its import

    wanted = ["*config.json", "model*.safetensors", INDEX, "chat_template.jinja"]
    wanted += ["vocab.json", "merges.txt", "tokenizer.json"]
    try:
        return Path(hub.snapshot_download(repository, allow_patterns=wanted))
    except Exception as error:  # no such name, gated, timed out, disk full
        raise UserError(
            f"{name} cannot be downloaded from the hub ({type(error).__name__}): check the name "
            "and the network, log in with `hf auth login` if the model is gated, or use the "
            "embedded one with --model stories."
        ) from None


# ---- the files ----


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors under the file's names, from one file or from the shards of an index."""
    names = [WEIGHTS]
    present = sorted(path.name for path in folder.iterdir())
    if WEIGHTS not in present and INDEX in present:
        names = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
        absent = [name for name in names if name not in present]
        if absent or not names:  # an index must not reach out of its folder
            raise UserError(
                f"{folder / INDEX} names {_some(absent) or 'no file'}, which is not in its folder: "
                "copy or download it again."
            )
    elif WEIGHTS not in present:
        raise UserError(
            f"{folder} has no {WEIGHTS} and no {INDEX}, only {_some(present)}: other formats may "
            "run code and are not opened; convert them with transformers (from_pretrained, then "
            "save_pretrained), or add --random-weights."
        )
    return {key: tensor for name in names for key, tensor in read_file(folder / name).items()}


def read_file(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one safetensors file, mapped into memory rather than read."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(
            f"{path} is truncated, corrupt or not safetensors ({error}): copy or download it "
            "again, or run git lfs pull if it is a Git LFS pointer."
        ) from None


def _checked(opened: Checkpoint, source: Path) -> dict[str, torch.Tensor]:
    """The tensors under their canonical names, in the model's order, without the matrices that the
    conversion has. Raises UserError if they are not exactly these."""
    config = opened.config
    stored = opened.conversion.stored if opened.conversion else ()
    shapes = {name: shape for name, shape in config.shapes().items() if name not in stored}
    named = ((config.tensor_name(name), tensor) for name, tensor in opened.tensors.items())
    tensors = {name: tensor for name, tensor in named if name is not None}
    head = tensors.pop("lm_head.weight", None) if config.tied else None
    problems = {
        "missing": [name for name in shapes if name not in tensors],
        "unexpected": [name for name in tensors if name not in shapes],
        "misshapen": [
            f"{name} {tuple(tensors[name].shape)} instead of {shape}"
            for name, shape in shapes.items()
            if name in tensors and tensors[name].shape != shape
        ],
        "not of a floating-point type": [
            name for name in shapes if name in tensors and not tensors[name].is_floating_point()
        ],
    }
    if any(problems.values()):
        listed = "; ".join(f"{what} {_some(names)}" for what, names in problems.items() if names)
        raise UserError(
            f"The weights in {source} do not fit its config.json: {listed}; get both from the same "
            "checkpoint."
        )
    embedding = next(iter(config.shapes()))
    if head is not None and embedding in shapes and not torch.equal(head, tensors[embedding]):
        raise UserError(
            f"lm_head.weight in {source} differs from {embedding}, but config.json ties them: set "
            "tie_word_embeddings to false, or choose another checkpoint."
        )
    return {name: tensors[name] for name in shapes}


def _some(names: Sequence[str]) -> str:
    """The first three names, and the number of the others."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


# ---- random weights ----


def _random_checkpoint(name: str, seed: int) -> Checkpoint:
    if path := catalog.find(name):
        opened = _open(name, path, weights=False)
        config, folder = opened.config, opened.folder
        if folder is not None and not any((folder / file).exists() for file in FILES):
            folder = None
    elif name in (presets := catalog.presets()):
        config, folder = presets[name], None
    else:
        raise catalog.unknown(name)
    return Checkpoint(config, random_tensors(config, seed), folder)


def random_tensors(config: Config, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights as at the start of GPT-2's training, in float32: normal, biases 0, norms 1. The same
    seed gives the same weights."""
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
        tensors[name] = tensor
    return tensors
