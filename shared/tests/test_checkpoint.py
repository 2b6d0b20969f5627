"""Checkpoints that transformers wrote, every spelling of them that we accept, and each way a folder or name can be wrong."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from shared import checkpoint
from shared.checkpoint import (
    PRESETS,
    STORIES,
    WEIGHTS,
    Config,
    check_vocabulary,
    expected_shapes,
    load,
    random_tensors,
)
from shared.errors import UserError
from shared.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

Tensors = dict[str, torch.Tensor]
SIZES = {"vocab_size": 101, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 3}


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    """Random weights, none of them 0 or 1, so that a tensor in the wrong place shows."""
    config = GPT2Config(**SIZES, bos_token_id=100, eos_token_id=100)
    generator = torch.Generator().manual_seed(0)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return model


@pytest.fixture(scope="module")
def expected(model: GPT2LMHeadModel) -> Tensors:
    return dict(model.transformer.state_dict())


@pytest.fixture(scope="module")
def original(model: GPT2LMHeadModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Save the weights again as `change` leaves them."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in change(tensors).items()},
        folder / WEIGHTS,
    )


def configure(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8"
    )


def assert_same(ours: Tensors, theirs: Tensors) -> None:
    assert list(ours) == list(theirs)  # in the model's order, too
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def refusal(call: Callable[[], object]) -> str:
    """The message of the UserError that `call` must end in: one line."""
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
    return str(caught.value)


# ---- what transformers wrote ------------------------------------------------------------------------------------


def test_a_folder_of_transformers(
    original: Path, model: GPT2LMHeadModel, expected: Tensors
) -> None:
    loaded = load(str(original))
    assert_same(loaded.tensors, expected)
    assert loaded.config == Config(
        **SIZES, layer_norm_epsilon=1e-5, eos_ids=(100,), name=original.name
    )
    assert loaded.config.parameter_count == model.num_parameters()
    assert loaded.config.head_dim == 8
    assert loaded.folder == original


def test_shards(model: GPT2LMHeadModel, expected: Tensors, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, max_shard_size="12KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 and not (tmp_path / WEIGHTS).exists()
    assert_same(load(str(tmp_path)).tensors, expected)


def to_openai(tensors: Tensors) -> Tensors:
    """The names and shapes of OpenAI's release: model/h0/attn/c_attn/w of shape (1, in, out)."""
    renamed = {}
    for name, tensor in tensors.items():
        *path, last = name.removeprefix("transformer.").replace("h.", "h").split(".")
        if path in (["wte"], ["wpe"]):
            renamed[f"model/{path[0]}"] = tensor
        elif tensor.ndim == 2:
            renamed["/".join(["model", *path, "w"])] = tensor[None]
        else:
            renamed["/".join(["model", *path, "b" if last == "bias" else "g"])] = tensor
    return renamed


def with_buffers(tensors: Tensors) -> Tensors:
    """The attention masks that checkpoints of 2019 carry."""
    mask = torch.tril(torch.ones(1, 1, 32, 32)).to(torch.uint8)
    buffers = {f"h.{layer}.attn.bias": mask for layer in range(2)} | {
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)
    }
    return tensors | buffers


def without_prefix(tensors: Tensors) -> Tensors:
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


SPELLINGS = {
    "with transformer.": lambda tensors: {
        f"transformer.{name}": tensor for name, tensor in without_prefix(tensors).items()
    },
    "without": without_prefix,
    "old buffers": with_buffers,
    "lm_head": lambda tensors: tensors | {"lm_head.weight": tensors["transformer.wte.weight"]},
    "OpenAI": to_openai,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_gives_the_same_tensors(
    folder: Path, expected: Tensors, spelling: str
) -> None:
    rewrite(folder, SPELLINGS[spelling])
    assert_same(load(str(folder)).tensors, expected)


@pytest.mark.parametrize("dtype", checkpoint.DTYPES)
def test_dtypes_of_the_file_are_kept_or_converted(
    folder: Path, expected: Tensors, dtype: torch.dtype
) -> None:
    rewrite(folder, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    stored = {name: tensor.to(dtype) for name, tensor in expected.items()}
    assert_same(load(str(folder)).tensors, stored)
    assert {tensor.dtype for tensor in load(str(folder)).tensors.values()} == {dtype}
    assert_same(
        load(str(folder), dtype=torch.float64).tensors,
        {name: tensor.double() for name, tensor in stored.items()},
    )


RESIDENT = """
import sys, psutil
from shared.checkpoint import load
before = psutil.Process().memory_info().rss
loaded = load(sys.argv[1])
print(psutil.Process().memory_info().rss - before, sum(tensor.nbytes for tensor in loaded.tensors.values()))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows counts mapped pages in another way")
def test_loading_maps_the_file_and_copies_nothing(tmp_path: Path) -> None:
    config = Config(vocab_size=60_000, n_positions=8, n_embd=256, n_layer=1, n_head=1)
    save_file(random_tensors(config), tmp_path / WEIGHTS)
    fields = {
        name: getattr(config, name)
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    }
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    command = [sys.executable, "-c", RESIDENT, str(tmp_path)]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(checkpoint.__file__).parent.parent,
    )
    grown, size = map(int, run.stdout.split())
    assert size > 60e6
    assert grown < size / 4


def test_writing_to_a_loaded_tensor_leaves_the_file_alone(folder: Path) -> None:
    before = (folder / WEIGHTS).read_bytes()
    load(str(folder)).tensors["wte.weight"].zero_()
    assert (folder / WEIGHTS).read_bytes() == before


def test_stories_opens_in_transformers_with_the_same_tensors() -> None:
    """Needs the embedded model's folder."""
    loaded = load("stories")
    assert_same(
        loaded.tensors, dict(AutoModelForCausalLM.from_pretrained(STORIES).transformer.state_dict())
    )
    assert loaded.config == PRESETS["stories"]
    assert loaded.config.name == "stories"
    assert loaded.folder == STORIES


def test_stories_model_and_vocabulary_agree() -> None:
    """Needs the embedded model's folder."""
    loaded = load("stories")
    tokenizer = load_tokenizer(loaded.folder)
    check_vocabulary(tokenizer, loaded.config)
    assert tokenizer.vocab_size == loaded.config.vocab_size
    assert (tokenizer.eos_id,) == loaded.config.eos_ids
    assert loaded.config.n_positions == 1024
    assert sum(path.stat().st_size for path in STORIES.iterdir()) < 12e6


# ---- folders that are wrong -------------------------------------------------------------------------------------


def change(
    name: str, value: Callable[[torch.Tensor], torch.Tensor] | None
) -> Callable[[Path], None]:
    """Change one tensor of the file; None leaves it out."""

    def apply(tensors: Tensors) -> Tensors:
        full = f"transformer.{name}"
        if value is None:
            return {key: tensor for key, tensor in tensors.items() if key != full}
        return tensors | {full: value(tensors[full])}

    return lambda folder: rewrite(folder, apply)


def add(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda tensors: tensors | {name: tensor})


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def only(name: str) -> Callable[[Path], object]:
    """A folder whose weights are in another format."""
    return lambda folder: (folder / WEIGHTS).rename(folder / name)


def shard(index: object, *files: str) -> Callable[[Path], None]:
    """An index in place of the single file; `files` are made from it."""

    def apply(folder: Path) -> None:
        for name in files:
            shutil.copy(folder / WEIGHTS, folder / name)
        (folder / WEIGHTS).unlink()
        (folder / checkpoint.INDEX).write_text(json.dumps(index), encoding="utf-8")

    return apply


def half(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def as_directory(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


ZEROS = torch.zeros(2)
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "config cut": (write("config.json", b'{"n_embd": 24'), "cannot be read as JSON"),
    "config binary": (write("config.json", b"\x80\x04\x95"), "cannot be read as JSON"),
    "config a list": (write("config.json", b"[]"), "no JSON object"),
    "config too deep": (write("config.json", b"[" * 100_000), "cannot be read as JSON"),
    "config a folder": (as_directory, "cannot be read as JSON"),
    "no weights": (
        lambda folder: (folder / WEIGHTS).unlink(),
        "has no model.safetensors: give a folder with weights",
    ),
    "pickle": (
        only("pytorch_model.bin"),
        "pytorch_model.bin but no model.safetensors, and pickles",
    ),
    "pickle .pt": (only("gpt2.pt"), "gpt2.pt but no model.safetensors, and pickles"),
    "h5": (only("tf_model.h5"), "convert it with transformers"),
    "half": (half, "truncated, corrupt or not safetensors"),
    "empty": (write(WEIGHTS, b""), "truncated, corrupt or not safetensors"),
    "no safetensors": (
        write(WEIGHTS, b"PK\x03\x04" * 100),
        "truncated, corrupt or not safetensors",
    ),
    "LFS pointer": (
        write(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        "run git lfs pull",
    ),
    "missing": (change("h.1.ln_2.bias", None), "missing h.1.ln_2.bias;"),
    "unexpected": (add("h.2.ln_1.bias", ZEROS), "unexpected h.2.ln_1.bias;"),
    "misshapen": (
        change("h.0.attn.c_attn.weight", lambda tensor: tensor.T),
        "misshapen h.0.attn.c_attn.weight (72, 24) instead of (24, 72);",
    ),
    "flat": (
        change("wte.weight", lambda tensor: tensor.flatten()),
        "misshapen wte.weight (2424,) instead of (101, 24);",
    ),
    "another rank": (
        change("h.0.mlp.c_fc.weight", lambda tensor: tensor[None]),
        "misshapen h.0.mlp.c_fc.weight (1, 24, 96)",
    ),
    "whole numbers": (
        change("h.0.ln_1.bias", lambda tensor: tensor.to(torch.int8)),
        "h.0.ln_1.bias (torch.int8)",
    ),
    "config of another size": (
        lambda folder: configure(folder, n_layer=5),
        "missing h.2.ln_1.weight, h.2.ln_1.bias",
    ),
    "many": (lambda folder: configure(folder, n_layer=5), "and 33 more"),
    "another vocabulary": (
        lambda folder: configure(folder, vocab_size=200),
        "misshapen wte.weight (101, 24) instead of (200,",
    ),
    "two names": (add("wpe.weight", torch.zeros(32, 24)), "hold wpe.weight under two names"),
    "untied head": (add("lm_head.weight", torch.zeros(101, 24)), "lm_head.weight"),
    "head of another size": (add("lm_head.weight", ZEROS), "differs from wte.weight"),
    "index corrupt": (shard([]), "no JSON object"),
    "index empty": (shard({}), "no weight_map"),
    "index of numbers": (shard({"weight_map": {"wte.weight": 1}}), "no weight_map"),
    "index outside": (
        shard({"weight_map": {"wte.weight": "../a.safetensors"}}),
        "not a file of its own folder",
    ),
    "index outside on Windows": (
        shard({"weight_map": {"wte.weight": "..\\a.safetensors"}}),
        "not a file of its own folder",
    ),
    "shard lost": (
        shard({"weight_map": {"wte.weight": "a.safetensors"}}),
        "a.safetensors is missing although",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_folder_is_one_sentence(folder: Path, fault: str) -> None:
    spoil, said = FAULTS[fault]
    spoil(folder)
    assert said in refusal(lambda: load(str(folder)))


def test_several_faults_are_named_together(folder: Path) -> None:
    change("ln_f.bias", None)(folder)
    add("extra", ZEROS)(folder)
    message = refusal(lambda: load(str(folder)))
    assert "missing ln_f.bias; unexpected extra" in message


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_damaged_file_never_gives_another_error_or_another_shape(
    folder: Path, original: Path, data: st.DataObject
) -> None:
    """Cut anywhere, or with any bytes of its header or size changed."""
    content = bytearray((original / WEIGHTS).read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, header + 100) | st.integers(0, len(content) - 1)) :]
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, 7) | st.integers(8, header - 1))] = data.draw(
                st.integers(0, 255)
            )
    (folder / WEIGHTS).unlink()  # a file that is still mapped must not be written over
    (folder / WEIGHTS).write_bytes(content)
    try:
        loaded = load(str(folder))
    except UserError:
        return
    assert {
        name: tuple(tensor.shape) for name, tensor in loaded.tensors.items()
    } == expected_shapes(loaded.config)


# ---- config.json ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, value, said",
    [
        *[
            (field, value, f"{field} in config.json must be")
            for field in SIZES
            for value in (None, 0, -1, 2.0, "24", True)
        ],
        ("n_head", 5, "n_embd in config.json must be a multiple of n_head, which is 5, not 24."),
        ("n_inner", 100, "n_inner to 100"),
        ("layer_norm_epsilon", 0, "layer_norm_epsilon"),
        ("layer_norm_epsilon", math.nan, "layer_norm_epsilon"),
        ("layer_norm_epsilon", "1e-5", "layer_norm_epsilon"),
        (
            "eos_token_id",
            101,
            "eos_token_id in config.json must be a token id from 0 to 100, not 101.",
        ),
        ("eos_token_id", -1, "from 0 to 100, not -1."),
        ("eos_token_id", [1, 101], "from 0 to 100, not [1, 101]."),
        ("eos_token_id", True, "from 0 to 100, not True."),
        ("activation_function", "relu", "activation_function to 'relu'; only gelu_new"),
        ("activation_function", ["gelu_new"], "activation_function to ['gelu_new']"),
        ("model_type", "llama", "model_type to 'llama'"),
        ("scale_attn_weights", False, "scale_attn_weights"),
        ("scale_attn_by_inverse_layer_idx", True, "scale_attn_by_inverse_layer_idx"),
        ("reorder_and_upcast_attn", True, "reorder_and_upcast_attn"),
        ("add_cross_attention", True, "add_cross_attention"),
        ("tie_word_embeddings", False, "tie_word_embeddings"),
    ],
)
def test_configs_that_are_refused(field: str, value: object, said: str) -> None:
    assert said in refusal(lambda: Config.from_dict({"model_type": "gpt2", **SIZES, field: value}))


@pytest.mark.parametrize(
    "extra", [{}, {"activation_function": "gelu_pytorch_tanh"}, {"n_inner": 96}, {"n_inner": None}]
)
def test_configs_that_are_accepted(extra: dict[str, Any]) -> None:
    config = Config.from_dict({**SIZES, **extra}, "mine")
    assert (config.name, config.vocab_size, config.layer_norm_epsilon) == ("mine", 101, 1e-5)


@pytest.mark.parametrize("value, eos_ids", [(None, ()), (0, (0,)), ([1, 2], (1, 2))])
def test_a_config_lists_the_ids_that_end_a_text(value: object, eos_ids: tuple[int, ...]) -> None:
    assert Config.from_dict({**SIZES, "eos_token_id": value}).eos_ids == eos_ids


def test_heads_of_keys_are_a_field_of_their_own() -> None:
    plain = Config(101, 64, 24, 3, 2)
    assert (plain.n_kv_head, plain.head_dim) == (2, 12)
    grouped = Config(101, 64, 24, 3, n_head=4, n_kv_head=2, head_dim=10)
    assert (grouped.n_kv_head, grouped.head_dim) == (2, 10)
    assert grouped.kv_bytes_per_token(torch.bfloat16) == 3 * 2 * 2 * 10 * 2
    with pytest.raises(ValueError, match="4 query heads"):
        Config(101, 64, 24, 3, n_head=4, n_kv_head=3)


def test_presets_are_the_published_models() -> None:
    counts = {
        name: PRESETS[name].parameter_count
        for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
    }
    assert counts == {
        "gpt2": 124_439_808,
        "gpt2-medium": 354_823_168,
        "gpt2-large": 774_030_080,
        "gpt2-xl": 1_557_611_200,
    }
    assert {PRESETS[name].head_dim for name in counts} == {64}


def test_cache_bytes_per_token() -> None:
    assert PRESETS["gpt2"].kv_bytes_per_token(torch.float32) == 12 * 2 * 768 * 4
    assert PRESETS["gpt2"].kv_bytes_per_token(torch.bfloat16) == 12 * 2 * 768 * 2


# ---- random weights ---------------------------------------------------------------------------------------------


def test_random_weights_of_a_preset() -> None:
    first, again, other = (load("tiny", random_weights=True, seed=seed) for seed in (7, 7, 8))
    assert first.config == PRESETS["tiny"]
    assert first.folder is None
    assert {name: tuple(tensor.shape) for name, tensor in first.tensors.items()} == expected_shapes(
        first.config
    )
    assert_same(first.tensors, again.tensors)
    assert not torch.equal(first.tensors["wte.weight"], other.tensors["wte.weight"])


def test_random_weights_are_spread_as_when_gpt2_training_begins() -> None:
    tensors = random_tensors(
        Config(vocab_size=500, n_positions=200, n_embd=128, n_layer=8, n_head=2)
    )
    residual = 0.02 / 4  # 2 * 8 layers add to the residual stream
    spreads = {"wte": 0.02, "wpe": 0.01, "h.7.attn.c_attn": 0.02, "h.7.mlp.c_fc": 0.02}
    spreads |= {"h.0.attn.c_proj": residual, "h.7.mlp.c_proj": residual}
    for name, spread in spreads.items():
        assert tensors[f"{name}.weight"].std().item() == pytest.approx(spread, rel=0.03)
        assert abs(tensors[f"{name}.weight"].mean().item()) < spread / 20
    assert all(not tensor.any() for name, tensor in tensors.items() if name.endswith("bias"))
    assert all(
        (tensor == 1).all()
        for name, tensor in tensors.items()
        if name.endswith("weight") and tensor.ndim == 1
    )


def test_random_weights_are_the_same_in_every_dtype() -> None:
    single = load("tiny", random_weights=True, seed=3).tensors
    for dtype in (torch.float64, torch.bfloat16):
        converted = load("tiny", random_weights=True, seed=3, dtype=dtype).tensors
        assert_same(converted, {name: tensor.to(dtype) for name, tensor in single.items()})


def test_random_weights_of_a_folder_need_its_config_alone(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    loaded = load(str(folder), random_weights=True)
    assert loaded.config.n_embd == 24
    assert loaded.folder is None  # no tokenizer there
    (folder / "vocab.json").write_text("{}", encoding="utf-8")
    assert load(str(folder), random_weights=True).folder == folder


def test_random_weights_of_what_does_not_exist(tmp_path: Path) -> None:
    assert "No model and no folder is called 'gpt5'" in refusal(
        lambda: load("gpt5", random_weights=True)
    )
    assert "No model and no folder" in refusal(
        lambda: load("owner/name", random_weights=True)
    )  # would need the network
    assert "config.json is missing" in refusal(lambda: load(str(tmp_path), random_weights=True))


# ---- names and the network --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "",
        "gpt5",
        "./nowhere",
        "../a/b",
        "/no/such/folder",
        "a/b/c",
        "nul\0",
        "~nobody-here/x",
        "x" * 5000,
    ],
    ids=str,
)
def test_unknown_names_are_told_what_is_known(name: str) -> None:
    message = refusal(lambda: load(name))
    assert all(known in message for known in ("stories", "gpt2-medium", "owner/name"))
    assert len(message) < 400


def test_a_file_in_place_of_a_folder(folder: Path) -> None:
    assert "is a file: give the folder" in refusal(lambda: load(str(folder / WEIGHTS)))


def test_tiny_has_no_weights() -> None:
    assert "add --random-weights" in refusal(lambda: load("tiny"))


def test_a_preset_name_is_never_a_folder_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.rename(folder.parent / "tiny")
    monkeypatch.chdir(folder.parent)
    assert "add --random-weights" in refusal(lambda: load("tiny"))
    assert load("./tiny").config.n_embd == 24


class Hub(BaseHTTPRequestHandler):
    """A hub that knows no model, and another that is broken."""

    def do_GET(self) -> None:
        if "broken" in self.path:
            self.send_response(500)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *values: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The hub is a server on this machine, its cache a new folder, which is returned."""
    import huggingface_hub
    from huggingface_hub import constants

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        huggingface_hub.close_session()  # the next one sees the variables above
        yield tmp_path / "cache"
        huggingface_hub.close_session()
        server.shutdown()
        thread.join()


def test_a_name_that_the_hub_does_not_know(hub: Path) -> None:
    assert "Neither a folder nor a public model on the hub is called nobody/nothing" in refusal(
        lambda: load("nobody/nothing")
    )


def test_a_name_that_the_hub_does_not_allow(hub: Path) -> None:
    assert "Neither a folder nor a public model" in refusal(lambda: load("a..b/c"))


def test_a_broken_hub(hub: Path) -> None:
    assert "cannot be downloaded from the hub" in refusal(lambda: load("owner/broken"))


@pytest.mark.parametrize("how", ["unreachable", "switched off"])
def test_no_network(hub: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    from huggingface_hub import constants

    if how == "unreachable":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    else:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = refusal(lambda: load("gpt2"))
    assert "gpt2 cannot be downloaded" in message and "--model stories" in message


def test_no_network_but_a_copy_from_before(
    hub: Path, original: Path, expected: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached = hub / "models--openai-community--gpt2"
    shutil.copytree(original, cached / "snapshots" / "0123abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123abc", encoding="utf-8")
    loaded = load("gpt2")
    assert_same(loaded.tensors, expected)
    assert loaded.config.name == "gpt2"


# ---- vocabulary and model ---------------------------------------------------------------------------------------


def tokenizer(words: int, eos: int | None) -> Tokenizer:
    """A real tokenizer of 256 bytes and `words` - 256 special tokens."""
    special = {f"<{i}>": i for i in range(256, words)}
    return Tokenizer({bytes([i]): i for i in range(256)}, special, eos)


def config_of(size: int, eos: int | None) -> Config:
    return Config(
        vocab_size=size,
        n_positions=8,
        n_embd=4,
        n_layer=1,
        n_head=1,
        eos_ids=(eos,) if eos is not None else (),
        name="m",
    )


@pytest.mark.parametrize(
    "size, eos, model_eos", [(260, 259, 259), (300, 259, 259), (260, None, 259), (260, 259, None)]
)
def test_vocabularies_that_fit(size: int, eos: int | None, model_eos: int | None) -> None:
    check_vocabulary(tokenizer(260, eos), config_of(size, model_eos))


def test_vocabularies_that_do_not_fit() -> None:
    too_big = refusal(lambda: check_vocabulary(tokenizer(260, None), config_of(259, None)))
    assert "has 260 tokens and the model m only 259" in too_big
    other_end = refusal(lambda: check_vocabulary(tokenizer(260, 259), config_of(260, 0)))
    assert "with token 259 and the model m with 0" in other_end
    assert "has 256 tokens and the model tiny only 101" in refusal(
        lambda: check_vocabulary(ByteTokenizer(), PRESETS["tiny"])
    )
