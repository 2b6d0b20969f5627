"""What can be set, on the command line and in the environment."""

from __future__ import annotations

import argparse
import ipaddress
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.cli import Parser
from shared.errors import UserError

PREFIX = "STAIRCASE_"


class Settings(BaseSettings):
    """The server's options. Each is also an environment variable, STAIRCASE_ and its name in capitals; the command line wins."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", protected_namespaces=())

    model: Annotated[
        str, Field(description="embedded model 'stories', a name on the hub, or a folder")
    ] = "stories"
    served_model_name: Annotated[
        str, Field(description="what clients call the model; default is its name")
    ] = ""
    random_weights: Annotated[
        bool,
        Field(description="seeded random weights in place of the model's own, for speed tests"),
    ] = False
    device: Annotated[
        Literal["auto", "cpu", "cuda", "mps"], Field(description="where to compute")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "float64"],
        Field(description="kind of number"),
    ] = "auto"
    linear: Annotated[
        Literal["auto", "plain", "packed"], Field(description="layout of the weights on a CPU")
    ] = "auto"
    threads: Annotated[
        int, Field(ge=0, le=1024, description="CPU threads; 0 is PyTorch's choice")
    ] = 0

    engine: Annotated[
        Literal["paged", "continuous", "static", "sequential", "transformers"],
        Field(
            description="an earlier stage's engine in place of stage 05's, or transformers, for comparison"
        ),
    ] = "paged"

    host: Annotated[
        str, Field(description="address to listen on; 0.0.0.0 is open to everybody")
    ] = "127.0.0.1"
    port: Annotated[
        int, Field(ge=0, le=65535, description="port to listen on; 0 takes a free one")
    ] = 8000
    api_key: Annotated[
        str, Field(description="clients must send it; several with commas between; none by default")
    ] = ""

    max_sequences: Annotated[
        int, Field(ge=1, le=4096, description="most answers that grow at a time")
    ] = 32
    token_budget: Annotated[
        int, Field(ge=0, le=1_000_000, description="most tokens computed in a step; 0 chooses")
    ] = 0
    kv_memory: Annotated[
        str,
        Field(
            description="memory for keys and values: 512MiB, 2GB, 25%% of what is free; '' chooses"
        ),
    ] = ""
    block_size: Annotated[int, Field(ge=1, le=1024, description="tokens in a block")] = 16
    swap_memory: Annotated[
        str, Field(description="memory to swap preempted requests to; '' is none")
    ] = ""
    preemption: Annotated[
        Literal["auto", "recompute", "swap"], Field(description="what happens when memory runs out")
    ] = "auto"
    prefix_caching: Annotated[
        bool, Field(description="find the common beginnings of prompts again")
    ] = True
    sanitize: Annotated[bool, Field(description="check the memory after every step; slow")] = False

    max_queue: Annotated[
        int, Field(ge=0, le=100_000, description="most sequences that wait; the surplus gets 503")
    ] = 64
    request_timeout: Annotated[
        float, Field(gt=0, le=86400, description="seconds until a request gets 504")
    ] = 300.0
    grace: Annotated[
        float,
        Field(
            ge=0, le=3600, description="seconds for what is in hand when the server is told to stop"
        ),
    ] = 10.0
    chat_template: Annotated[
        str,
        Field(
            description="how a chat becomes a prompt: simple, none (chats are refused), or a JSON file"
        ),
    ] = "simple"

    @property
    def keys(self) -> list[str]:
        return [key for key in (part.strip() for part in self.api_key.split(",")) if key]

    @property
    def open_to_all(self) -> bool:
        """Whether others can reach the server, and nothing keeps them out."""
        try:
            local = ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            local = self.host == "localhost"
        return not local and not self.keys


def parse(argv: list[str] | None) -> Settings:
    """The settings of a command line and the environment. Raises UserError for values that cannot be."""
    parser = Parser(
        "stage06_serving",
        "Stage 06, serving: the engine behind HTTP, for OpenAI's clients, LangChain, curl, and a browser.",
        "  python -m stage06_serving\n"
        "  python -m stage06_serving --port 8080 --max-sequences 8 --kv-memory 256MiB\n"
        f"  {PREFIX}API_KEY=secret python -m stage06_serving --host 0.0.0.0",
    )
    for name, field in Settings.model_fields.items():
        about = f"{field.description}; default {field.default if field.default != '' else 'none'}; also {PREFIX}{name.upper()}"
        option = "--" + name.replace("_", "-")
        if field.annotation is bool:
            parser.add_argument(
                option, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=about
            )
        else:
            parser.add_argument(option, default=argparse.SUPPRESS, metavar="VALUE", help=about)
    given: dict[str, Any] = vars(parser.parse_args(argv))
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        source = "--" + name.replace("_", "-") if name in given else PREFIX + name.upper()
        raise UserError(
            f"{source}: {first['msg'][:1].lower()}{first['msg'][1:]}; --help lists every option."
        ) from None
