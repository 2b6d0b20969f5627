"""The server's settings, from the command line and the environment."""

from __future__ import annotations

import argparse
import ipaddress
import sys
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared import catalog, cli, registry
from shared.catalog import AUTO
from shared.cli import MOST_TOKENS, Parser, with_default
from shared.errors import UserError, advised
from stage05_paged.memory import parse_memory

PREFIX = "STAIRCASE_"
PAGED = "paged"  # runs everywhere
ENGINES = PAGED, "kernels"  # for --engine, the newest last; names in registry.ENGINES
OFF = "off"  # no drafts
NAMES = {  # options whose values a registry or a list names
    "engine": [AUTO, *ENGINES],
    "weights": cli.weight_formats(),
    "kv_dtype": cli.kv_formats(),
    "speculate": [OFF, *registry.DRAFTS],
}


def described(default: Any, description: str, **bounds: Any) -> Any:
    return Field(default=default, description=description, **bounds)


class Settings(BaseSettings):
    """The server's options. Each is also an environment variable, STAIRCASE_ and its name in
    capitals; the command line wins."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", protected_namespaces=())

    model: str = described(
        "stories",
        "the embedded model 'stories' or 'stories-chat', a name on the hub, or a folder"
        + catalog.others(),
    )
    random_weights: bool = described(False, "seeded random weights instead, for speed tests")
    max_model_len: int = described(
        *(0, "maximum tokens of a prompt and its answer; 0: the model's context"),
        ge=0,
        le=MOST_TOKENS,
    )
    device: Literal["auto", "cpu", "cuda"] = described("auto", "device to compute on")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = described(
        "auto", "number format of the weights"
    )
    weights: str = described(AUTO, f"{cli.ABOUT_WEIGHTS}: {', '.join(NAMES['weights'])}")
    threads: int = described(0, "CPU threads; 0 is PyTorch's choice", ge=0, le=1024)

    host: str = described("127.0.0.1", "address to listen on; 0.0.0.0 lets other machines in")
    port: int = described(8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    allowed_host: str = described(
        "", "more names to accept in the Host header, with commas between; * is any; default: none"
    )
    api_key: str = described(
        "",
        "keys, with commas between; clients must send one of them; set them in the environment: "
        "every user of the machine can read a command line; default: none",
    )
    log_requests: bool = described(False, "log each request in a line on standard error")

    engine: str = described(
        AUTO,
        f"engine of a stage: {', '.join(ENGINES)}; {AUTO} is the newest one that runs correctly on "
        "this machine",
    )
    max_num_seqs: int = described(32, "maximum sequences running at a time", ge=1, le=4096)
    max_num_batched_tokens: int = described(
        0, "maximum tokens computed per step; 0: automatic", ge=0, le=1_000_000
    )
    kv_memory: str = described(
        "", "memory for keys and values: 512MiB, 2GB, 25%% of free; default: automatic"
    )
    kv_dtype: str = described(AUTO, f"{cli.ABOUT_KV}: {', '.join(NAMES['kv_dtype'])}")
    enable_prefix_caching: bool = described(True, "reuse the blocks of common prompt prefixes")
    sanitize: bool = described(False, "check the memory after every step; slow")

    speculate: str = described(
        OFF,
        "what drafts the next tokens, which a step then verifies together: "
        f"{', '.join(NAMES['speculate'])}; the tokens stay those of off",
    )
    num_speculative_tokens: int = described(
        4, "maximum drafts of a sequence in a step", ge=1, le=64
    )
    speculative_model: str = described(
        "", "model that drafts for --speculate draft: a name, such as stories-draft, or a folder"
    )
    drawn_drafts: bool = described(
        False,
        "sample the drafts of --speculate draft, too, and verify them by rejection: a seed then "
        "fixes how answers are distributed, not their tokens",
    )

    max_queue: int = described(1024, "maximum waiting sequences; more get 503", ge=0, le=100_000)
    request_timeout: float = described(
        300.0, "seconds after which a request gets 504", gt=0, le=86400
    )
    grace: float = described(10.0, "seconds for requests to finish at shutdown", ge=0, le=3600)
    temperature: float | None = described(
        *(None, "temperature of requests that do not choose it; default: the model's"), ge=0, le=2
    )
    top_p: float | None = described(None, "the same for top_p", gt=0, le=1)
    top_k: int | None = described(None, "the same for top_k", ge=0, le=1_000_000)

    @field_validator("model")
    @classmethod
    def _may_exist(cls, name: str) -> str:
        return catalog.checked(name)

    @field_validator(*NAMES)
    @classmethod
    def _known(cls, name: str, field: ValidationInfo) -> str:
        names = NAMES[str(field.field_name)]
        if name not in names:
            raise ValueError(advised(f"choose one of {', '.join(names)}", name, names))
        return name

    @field_validator("kv_memory")
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
        if text and not parts_of(text):  # the server would be open
            raise ValueError("it has no key: write one, or leave the option out")
        return text

    @property
    def keys(self) -> list[str]:
        return parts_of(self.api_key)

    @property
    def hosts(self) -> list[str]:
        """The names of this server, in Host headers."""
        return [self.host, *parts_of(self.allowed_host)]

    @property
    def open_to_all(self) -> bool:
        """Whether other machines can reach the server without a key."""
        try:
            local = ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            local = self.host == "localhost"
        return not local and not self.keys


def parts_of(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


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
    for name, field in Settings.model_fields.items():
        about = (
            f"{with_default(str(field.description), field.default)}; also {PREFIX}{name.upper()}"
        )
        choices = ",".join(map(str, get_args(field.annotation))) if field.default else ""
        more: dict[str, Any] = {"metavar": f"{{{choices}}}" if choices else "VALUE"}
        if field.annotation is bool:
            more = {"action": argparse.BooleanOptionalAction}
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, default=argparse.SUPPRESS, help=about, **more)
    options: dict[str, Any] = vars(parser.parse_args(argv))
    if "api_key" in options:
        print(
            "WARNING: every user of this machine can read --api-key in the process list: use "
            f"{PREFIX}API_KEY.",
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
