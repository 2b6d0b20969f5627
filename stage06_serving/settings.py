"""The server's settings, from the command line and the environment."""

from __future__ import annotations

import argparse
import ipaddress
import sys
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import (
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared import catalog, cli, registry
from shared.catalog import AUTO
from shared.cli import MOST_TOKENS, Parser, with_default
from shared.errors import UserError, advised
from shared.files import read_text
from stage05_paged.memory import parse_memory

PREFIX = "STAIRCASE_"
PAGED = "paged"  # runs everywhere
ENGINES = PAGED, "kernels"  # for --engine, the newest last; names in registry.ENGINES
OFF = "off"  # no drafts
MOST_KEY_BYTES = 2**20
GROUPS = {  # of the help, by their first options
    "model": "model and machine",
    "host": "address and access",
    "engine": "engine and memory",
    "max_queue": "requests",
}


class Settings(BaseSettings):
    """The server's options. Each is also an environment variable, STAIRCASE_ and its name in
    capitals; the command line wins."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", protected_namespaces=())
    _faster: str = PrivateAttr("")  # what would be faster, once the engine is made

    model: str = Field(
        default="stories",
        description="the embedded model 'stories' or 'stories-chat', a name on the hub, or a "
        f"folder{catalog.others()}",
    )
    chat: bool = Field(
        default=False,
        description="chat on the page, with 'stories-chat' unless --model names another",
    )
    served_model_name: str = Field(
        default="", description="name of the model for clients; default: its own"
    )
    random_weights: bool = Field(
        default=False, description="seeded random weights instead of the model's, for speed tests"
    )
    max_model_len: int = Field(
        default=0,
        ge=0,
        le=MOST_TOKENS,
        description="maximum tokens of a prompt and its answer together; 0: the model's context",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        default="auto", description="device to compute on"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = Field(
        default="auto", description="number format of the weights"
    )
    weights: str = Field(
        default=AUTO, description=f"{cli.ABOUT_WEIGHTS}: {', '.join(cli.weight_formats())}"
    )
    linear: Literal["auto", "plain"] = Field(default="auto", description="linear layers on a CPU")
    threads: int = Field(default=0, ge=0, le=1024, description="CPU threads; 0 is PyTorch's choice")

    host: str = Field(
        default="127.0.0.1", description="address to listen on; 0.0.0.0 lets other machines in"
    )
    port: int = Field(
        default=8000, ge=0, le=65535, description="port to listen on; 0 takes a free one"
    )
    allowed_host: str = Field(
        default="",
        description="more names to accept in the Host header, with commas between; * is any; "
        "default: none",
    )
    api_key: str = Field(
        default="",
        description="keys, with commas between; clients must send one of them; set them in the "
        "environment: every user of the machine can read a command line; default: none",
    )
    api_key_file: str = Field(
        default="", description="file with API keys, one per line; default: none"
    )
    log_requests: bool = Field(
        default=False, description="log each request in a line on standard error"
    )

    engine: str = Field(
        default=AUTO,
        description=f"engine of a stage: {', '.join(ENGINES)}; {AUTO} is the newest one that "
        "runs correctly on this machine",
    )
    max_num_seqs: int = Field(
        default=32, ge=1, le=4096, description="maximum number of sequences running at a time"
    )
    max_num_batched_tokens: int = Field(
        default=0, ge=0, le=1_000_000, description="maximum tokens computed per step; 0: automatic"
    )
    kv_memory: str = Field(
        default="",
        description="memory for keys and values: 512MiB, 2GB, 25%% of free; default: automatic",
    )
    kv_dtype: str = Field(
        default=AUTO, description=f"{cli.ABOUT_KV}: {', '.join(cli.kv_formats())}"
    )
    block_size: int = Field(default=16, ge=1, le=1024, description="tokens in a block")
    swap_memory: str = Field(
        default="", description="memory to swap preempted sequences to; default: none"
    )
    preemption: Literal["auto", "recompute", "swap"] = Field(
        default="auto", description="how a preempted sequence gives up its memory"
    )
    enable_prefix_caching: bool = Field(
        default=True, description="reuse the blocks of common prompt prefixes"
    )
    sanitize: bool = Field(default=False, description="check the memory after every step; slow")

    speculate: str = Field(
        default=OFF,
        description="what drafts the next tokens, which a step then verifies together: "
        f"{', '.join([OFF, *registry.DRAFTS])}; the tokens stay those of off",
    )
    num_speculative_tokens: int = Field(
        default=4, ge=1, le=64, description="maximum drafts of a sequence in a step"
    )
    speculative_model: str = Field(
        default="",
        description="model that makes the drafts of --speculate draft: a name, such as "
        "stories-draft, or a folder",
    )
    drawn_drafts: bool = Field(
        default=False,
        description="sample the drafts of --speculate draft, too, and verify them by rejection: a "
        "seed then fixes how answers are distributed, not their tokens",
    )

    max_queue: int = Field(
        default=1024, ge=0, le=100_000, description="maximum waiting sequences; more get 503"
    )
    request_timeout: float = Field(
        default=300.0, gt=0, le=86400, description="seconds after which a request gets 504"
    )
    grace: float = Field(
        default=10.0, ge=0, le=3600, description="seconds for requests to finish at shutdown"
    )
    generation_config: Literal["auto", "none"] = Field(
        default="auto",
        description="sampling of requests that do not choose it: auto is that of the model's "
        "generation_config.json, and else OpenAI's; none is OpenAI's, which is temperature 1",
    )
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="temperature of requests that do not choose it"
    )
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="top_p of requests that do not choose it"
    )
    top_k: int | None = Field(
        default=None, ge=0, le=1_000_000, description="top_k of requests that do not choose it"
    )
    chat_template: Literal["auto", "simple", "none"] = Field(
        default="auto",
        description="template for chats: auto is the model's own, else simple; none refuses chats",
    )

    @field_validator("model")
    @classmethod
    def _may_exist(cls, name: str) -> str:
        return catalog.checked(name)

    @field_validator("max_model_len")
    @classmethod
    def _room_for_an_answer(cls, tokens: int) -> int:
        if tokens == 1:
            raise ValueError("1 leaves no token for an answer: give at least 2, or 0")
        return tokens

    @field_validator("engine", "weights", "kv_dtype", "speculate")
    @classmethod
    def _known(cls, name: str, field: ValidationInfo) -> str:
        known = {
            "engine": [AUTO, *ENGINES],
            "weights": cli.weight_formats(),
            "kv_dtype": cli.kv_formats(),
            "speculate": [OFF, *registry.DRAFTS],
        }
        names = known[str(field.field_name)]
        if name not in names:
            raise ValueError(advised(f"choose one of {', '.join(names)}", name, names))
        return name

    @field_validator("chat_template")
    @classmethod
    def _for_chats(cls, name: str, others: ValidationInfo) -> str:
        if name == "none" and others.data.get("chat"):
            raise ValueError("--chat needs a template: leave one of the two options out")
        return name

    @model_validator(mode="after")
    def _a_model_to_chat_with(self) -> Settings:
        if self.chat and "model" not in self.model_fields_set:
            self.model = "stories-chat"
        return self

    @field_validator("kv_memory", "swap_memory")
    @classmethod
    def _a_size(cls, text: str) -> str:
        try:
            parse_memory(text or "0", sys.maxsize)  # how much is free is known later
        except UserError as error:
            raise ValueError(str(error).removesuffix(".")) from None
        return text

    @field_validator("api_key")
    @classmethod
    def _has_a_key(cls, text: str) -> str:
        if text and not any(map(str.strip, text.split(","))):  # the server would be open
            raise ValueError("it has no key: write one, or leave the option out")
        return text

    @field_validator("api_key_file")
    @classmethod
    def _has_keys(cls, file: str) -> str:
        try:
            if file and not any(_keys_in(file)):
                raise ValueError(f"{file} has no key: write one into it")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ValueError(f"{file} cannot be read ({why})") from None
        return file

    @property
    def keys(self) -> list[str]:
        in_file = _keys_in(self.api_key_file) if self.api_key_file else ()
        return [key for key in (*map(str.strip, self.api_key.split(",")), *in_file) if key]

    @property
    def hosts(self) -> list[str]:
        """The names of this server, in Host headers."""
        return [name for name in map(str.strip, [self.host, *self.allowed_host.split(",")]) if name]

    @property
    def open_to_all(self) -> bool:
        """Whether other machines can reach the server without a key."""
        try:
            local = ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            local = self.host == "localhost"
        return not local and not self.keys


@cache
def _keys_in(file: str) -> tuple[str, ...]:
    """The lines of a file with keys. Read once: <(pass show key) is a pipe, which would have no key
    the second time. Raises OSError, UnicodeDecodeError."""
    return tuple(map(str.strip, read_text(Path(file), MOST_KEY_BYTES).splitlines()))


def parse(argv: list[str] | None) -> Settings:
    """The settings of a command line and the environment. Raises UserError for invalid values."""
    parser = Parser(
        "stage06_serving",
        "Stage 06, serving: the engine behind HTTP, for OpenAI's clients, LangChain, curl, and a "
        "browser.",
        "  python -m stage06_serving\n"
        "  python -m stage06_serving --port 8080 --max-num-seqs 8 --kv-memory 256MiB\n"
        f"  {PREFIX}API_KEY=secret python -m stage06_serving --host 0.0.0.0",
    )
    parser.once = ("--speculate",)
    group: Any = parser
    for name, field in Settings.model_fields.items():
        if name in GROUPS:
            group = parser.add_argument_group(GROUPS[name])
        about = (
            f"{with_default(str(field.description), field.default)}; also {PREFIX}{name.upper()}"
        )
        option = "--" + name.replace("_", "-")
        if field.annotation is bool:
            action: Any = argparse.BooleanOptionalAction
            group.add_argument(option, action=action, default=argparse.SUPPRESS, help=about)
        else:
            choices = ",".join(map(str, get_args(field.annotation)))
            choices = "" if field.default is None else choices
            shown = f"{{{choices}}}" if choices else "VALUE"
            group.add_argument(option, default=argparse.SUPPRESS, metavar=shown, help=about)
    options: dict[str, Any] = vars(parser.parse_args(argv))
    if any(map(str.strip, options.get("api_key", "").split(","))):
        print(
            "WARNING: every user of this machine can read --api-key in the process list: use "
            f"--api-key-file or {PREFIX}API_KEY.",
            file=sys.stderr,
        )
    try:
        return Settings(**options)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        source = "--" + name.replace("_", "-") if name in options else PREFIX + name.upper()
        reason = first["msg"].removeprefix("Value error, ")
        reason = reason[:1].lower() + reason[1:]
        if first["type"] == "literal_error":
            values = get_args(Settings.model_fields[name].annotation)
            reason = advised(reason, str(first["input"]), values)
        raise UserError(f"{source}: {reason}; --help lists every option.") from None
