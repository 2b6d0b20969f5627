"""The server's settings, from the command line and the environment."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

from shared import catalog, cli, registry
from shared.catalog import AUTO
from shared.cli import MOST_TOKENS
from shared.errors import UserError

PREFIX = "STAIRCASE_"
PAGED, KERNELS = "paged", "kernels"  # engines, by their names in registry.ENGINES
OFF = "off"  # no drafts
ABOUT_ENGINE = "auto is the newest that runs correctly on this machine"
ABOUT_DRAFTS = "what drafts the next tokens, which a step then verifies"
ANYWHERE = ("0.0.0.0", "::")
LOCAL = ("127.0.0.1", "localhost", "::1")


def one_of(names: Collection[str], about: str) -> Any:
    """A field with one of `names`, which a registry or a list has."""
    return Field(pattern=f"^({'|'.join(names)})$", description=f"{about}: {', '.join(names)}")


class Settings(BaseSettings):
    """The engine behind HTTP. Each option is also STAIRCASE_ and its name in the environment."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="ignore",
        protected_namespaces=(),
        use_attribute_docstrings=True,
        cli_prog_name="python -m stage06_serving",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_show_env_vars=True,
        cli_exit_on_error=False,
    )

    model: str = "stories"
    """'stories' or 'stories-chat', embedded; a name on the hub; a folder or a .gguf file"""
    random_weights: bool = False
    """seeded random weights, for speed tests"""
    max_model_len: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 0
    """maximum tokens of a prompt and its answer; 0: the model's context"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """number format of the weights"""
    weights: Annotated[str, one_of(cli.WEIGHT_FORMATS, cli.ABOUT_WEIGHTS)] = AUTO
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads; 0 is PyTorch's choice"""

    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0 lets other machines in"""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """port to listen on; 0 takes a free one"""
    allowed_host: str = ""
    """more names to accept in the Host header, with commas between; * is any"""
    api_key: Annotated[str, Field(pattern=r"^$|[^,\s]")] = ""
    """keys, with commas between; clients must send one of them; set them in the environment: every
    user of the machine can read a command line"""
    log_requests: bool = False
    """log each request in a line on standard error"""

    engine: Annotated[str, one_of([AUTO, PAGED, KERNELS], ABOUT_ENGINE)] = AUTO
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 32
    """maximum sequences running at a time"""
    max_num_batched_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """maximum tokens computed per step; 0: automatic"""
    kv_memory: str = ""
    """memory for keys and values: 512MiB, 2GB, 25% of free; '': automatic"""
    kv_dtype: Annotated[str, one_of(cli.KV_FORMATS, cli.ABOUT_KV)] = AUTO
    enable_prefix_caching: bool = True
    """reuse the blocks of common prefixes"""
    sanitize: bool = False
    """check the memory after every step; slow"""

    speculate: Annotated[str, one_of([OFF, *registry.DRAFTS], ABOUT_DRAFTS)] = OFF
    num_speculative_tokens: Annotated[int, Field(ge=1, le=64)] = 4
    """maximum drafts of a sequence in a step"""
    speculative_model: str = ""
    """model for --speculate draft: a name, such as stories-draft, or a folder"""

    max_queue: Annotated[int, Field(ge=0, le=100_000)] = 1024
    """maximum waiting sequences; more get 503"""
    request_timeout: Annotated[float, Field(gt=0, le=86400)] = 300.0
    """seconds after which a request gets 504"""
    grace: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """seconds for requests to finish at shutdown"""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """of requests that do not choose it; null: the model's, as for the next two"""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] | None = None

    @field_validator("model")
    @classmethod
    def _may_exist(cls, name: str) -> str:
        return catalog.checked(name)

    @property
    def keys(self) -> list[str]:
        return parts_of(self.api_key)

    @property
    def hosts(self) -> list[str]:
        """The names of this server, in Host headers; any, if it listens on all addresses."""
        names = parts_of(self.allowed_host)
        if self.host in ANYWHERE and not names:
            return ["*"]
        return ["localhost", "127.0.0.1", "[::1]", self.host, *names]

    @property
    def open_to_all(self) -> bool:
        """Whether other machines can reach the server without a key."""
        return self.host not in LOCAL and not self.keys


def parts_of(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def parse(argv: list[str] | None) -> Settings:
    """The settings of a command line and the environment. Raises UserError for invalid values."""
    try:
        return CliApp.run(Settings, argv)
    except SettingsError as error:
        reason = str(error).removeprefix("error parsing CLI: ")
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        reason = f"--{option}: {first['msg'].removeprefix('Value error, ')}"
    raise UserError(f"{reason}; --help lists every option.")
