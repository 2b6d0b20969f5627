"""Each family's style of calls: templates, answers and readers, with tiny models of the family.

Their weights are random, so answers are about form. The templates are short ones of our own, which
take and refuse what those of the family's true folders do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from shared import cli
from shared.tests.test_json_tokenizer import KINDS, llama3, sentencepiece
from shared.tokenizer import load_tokenizer
from stage01_forward.params import SamplingParams
from stage04_continuous.request import Request
from stage05_paged.engine import make
from stage06_serving.chat import own_template
from stage06_serving.engines import Paged
from stage06_serving.tests.conftest import serving
from stage08_llama.tests.folders import save
from stage11_speculative.forms import ChatForm, Forms
from stage11_speculative.grammar import Form, Grammars, literal, of_schema, start
from stage11_speculative.tools import HERMES, LLAMA, MISTRAL, Reader, Style

from .test_forms import CHAT, SAMPLED, TOOLS, called, formed
from .test_schemas import byte_grammars

LLAMA_TEMPLATE = """{{ bos_token }}
{%- if tools %}{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("one call at once") }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}}
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
MISTRAL_TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
{%- if message.role == "user" %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- "[INST]" + message.content + "[/INST]" }}
{%- elif message.tool_calls %}[TOOL_CALLS][
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ ", " if not loop.last }}
{%- endfor %}]{{ eos_token }}
{%- elif message.role == "tool" %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- else %}{{ message.content + eos_token }}{% endif %}
{%- endfor %}"""
MISTRAL_CONTROL = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALLS = [("weather", '{"city": "}\\"]", "days": 1}'), ("noon", "{}")]
STYLES = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}


@dataclass
class Family:
    """A folder, and its tokenizer as transformers has it."""

    folder: Path
    theirs: Any
    style: Style
    client: Any = None  # of its server

    def ask(self, messages: Any = CHAT, **fields: Any) -> Any:
        options = {"model": self.folder.name, "messages": messages, **SAMPLED, **fields}
        return self.client.chat.completions.create(**options)

    def bias(self, *tokens: str) -> dict[str, int]:
        """A logit_bias by which the model always writes one of these tokens where it may."""
        ids = self.theirs.convert_tokens_to_ids([*tokens])
        return {str(id): 100 for id in ids if id is not None}


def write(folder: Path, kind: str, tokenizer: Tokenizer, template: str, **ends: str) -> Family:
    from transformers import PreTrainedTokenizerFast  # here: it takes seconds to load

    end = tokenizer.token_to_id(ends["eos_token"])
    rows = max(tokenizer.get_vocab().values()) + 1
    save(folder, kind, vocab_size=rows, max_position_embeddings=4096, eos_token_id=end)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.dumps({"chat_template": template, **ends})
    (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **ends)
    return Family(folder, theirs, STYLES[kind])


def written(folder: Path, name: str, template: str | None = None) -> Family:
    if name == "llama":
        tokenizer = llama3()
        tokenizer.add_special_tokens(["<|python_tag|>"])
        ends = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
        return write(folder, name, tokenizer, template or LLAMA_TEMPLATE, **ends)
    tokenizer = sentencepiece(False)
    tokenizer.add_special_tokens([*MISTRAL_CONTROL, "[TOOL_RESULTS]", "[/TOOL_RESULTS]"])
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    return write(folder, name, tokenizer, template or MISTRAL_TEMPLATE, **ends)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def family(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """A folder that a server runs."""
    family = written(tmp_path_factory.mktemp(request.param), request.param)
    with serving("--model", str(family.folder), "--kv-memory", "2MiB") as running:
        url = f"{running.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            family.client = client
            yield family


def prompt(family: Family, messages: Any, **fields: Any) -> Any:
    """The ids of the prompt that the server makes of a chat."""
    options = cli.generation_parser("x", "").parse_args(["--model", str(family.folder)])
    loaded = cli.load_model_from(options)
    template = own_template(loaded)
    assert template is not None
    forms = Forms(Paged(make(loaded.model, contexts=1)), loaded, template)
    body = ChatForm.model_validate({"messages": messages, **fields})
    return template.prompt(*forms.conversation(body))


def history(ids: tuple[str, ...], together: bool) -> list[dict[str, Any]]:
    """Two calls, of one message or of two, and what the tools have answered."""
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, (name, arguments) in zip(ids, CALLS, strict=True)
    ]
    messages: list[dict[str, Any]] = [*CHAT]
    for some in [calls] if together else [calls[:1], calls[1:]]:
        messages.append({"role": "assistant", "content": None, "tool_calls": some})
        answers = [{"role": "tool", "tool_call_id": it["id"], "content": "sunny"} for it in some]
        messages += answers
    return [*messages, {"role": "user", "content": "And tomorrow?"}]


def test_calls_are_made_where_they_must_be(family):
    for choice in ("required", NAMED):
        answer = family.ask(tools=TOOLS, tool_choice=choice).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        calls = called(answer.message)
        assert calls and (choice == "required" or {name for name, _ in calls} == {"weather"})
    some = family.ask(tools=TOOLS, tool_choice="required", n=4).choices
    counts = {len(called(choice.message)) for choice in some}
    assert counts == {1} if family.style.single else max(counts) > 1
    one = family.ask(tools=TOOLS, tool_choice="required", n=4, parallel_tool_calls=False).choices
    assert {len(called(choice.message)) for choice in one} == {1}


def test_auto_is_text_or_calls(family):
    (begin,) = {"{"} if family.style.single else {"[TOOL_CALLS]"}
    for choice in family.ask(tools=TOOLS, logit_bias=family.bias(begin), n=4).choices:
        assert choice.finish_reason == "tool_calls" and called(choice.message)
        assert choice.message.content is None
    text = family.ask(tools=TOOLS, logit_bias=family.bias("a"), max_completion_tokens=9).choices[0]
    assert (text.message.content, text.message.tool_calls) == ("a" * 9, None)
    free = family.ask(tools=TOOLS, tool_choice="none", logit_bias=family.bias("{", "<0x7B>"))
    assert (
        free.choices[0].message.content.startswith("{{") and not free.choices[0].message.tool_calls
    )


def test_calls_are_streamed_as_they_are_whole(family):
    options: Any = {"tools": TOOLS, "tool_choice": "required"}
    counts = []
    for seed in range(3):
        whole = family.ask(**options, seed=seed).choices[0]
        chunks = [chunk.choices[0] for chunk in family.ask(**options, seed=seed, stream=True)]
        parts = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
        begins = [part for part in parts if part.id]
        assert [part.index for part in begins] == list(range(len(begins)))
        assert len({part.id for part in begins}) == len(begins)
        assert all((len(part.id) == 9) == family.style.short_ids for part in begins)
        streamed = [
            (begin.function.name, "".join(p.function.arguments for p in parts if p.index == index))
            for index, begin in enumerate(begins)
        ]
        functions = [call.function for call in whole.message.tool_calls]
        assert streamed == [(function.name, function.arguments) for function in functions]
        assert not any(chunk.delta.content for chunk in chunks)
        assert [c.finish_reason for c in chunks if c.finish_reason] == [whole.finish_reason]
        counts.append(len(begins))
    assert max(counts) == 1 if family.style.single else max(counts) > 1


def test_an_answer_in_json_beside_tools_is_content(family):
    """It may begin as a call of Llama's does: {"name": ..."""
    properties = {"name": {"enum": ["Pim"]}, "age": {"enum": [3]}}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    form = formed(schema | {"additionalProperties": False})
    options: Any = {"tools": TOOLS, "response_format": form}
    options["logit_bias"] = family.bias("{", "<0x7B>", "P", "<0x50>")
    whole = family.ask(**options).choices[0]
    assert (whole.message.content, whole.message.tool_calls) == ('{"name": "Pim", "age": 3}', None)
    chunks = [chunk.choices[0] for chunk in family.ask(**options, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].finish_reason == whole.finish_reason == "stop"
    calls = family.ask(**options, tool_choice="required").choices[0].message
    assert called(calls) and calls.content is None


def test_what_a_tool_answers_goes_into_the_template_s_places(family):
    """The prompt of two calls and their answers is, token by token, that of transformers."""
    together = not family.style.single
    answer = family.ask(tools=TOOLS, tool_choice="required", n=2, parallel_tool_calls=False)
    ids = tuple(choice.message.tool_calls[0].id for choice in answer.choices)
    messages = history(ids, together)
    decoded = json.loads(json.dumps(messages))
    for message in decoded:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        message["content"] = message["content"] or ""
    want = family.theirs.apply_chat_template(
        decoded, tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    ours = prompt(family, messages, tools=TOOLS)
    assert family.theirs.decode(ours) == want
    if family.style is MISTRAL:
        calls = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "}\\"]", "days": 1}, "id": '
        assert calls in want and '}, {"name": "noon", "arguments": {}, "id": ' in want
        assert ours.count(family.theirs.convert_tokens_to_ids("[TOOL_CALLS]")) == 1
    else:
        assert '{"name": "weather", "parameters": {"city": "}\\"]", "days": 1}}<|im_end|>' in want
        assert '{"name": "noon", "parameters": {}}<|im_end|>' in want
    used = family.ask(messages, tools=TOOLS, max_completion_tokens=1).usage.prompt_tokens
    assert used == len(ours)


def test_a_history_that_the_template_refuses_is_the_client_s_error(family):
    ids = ("a" * 9, "b" * 9) if family.style.single else ("call_1", "call_2")
    words = "one call at once" if family.style.single else "nine characters"
    with pytest.raises(openai.BadRequestError, match=words):
        family.ask(history(ids, True), tools=TOOLS)


@pytest.mark.parametrize(
    "name, calls",
    [
        (
            "llama",
            '{"name": "weather", "parameters": {"city": "}\\"]", "days": 1}}\n'
            '{"name": "noon", "parameters": {}}',
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "}\\"]", "days": 1}}, '
            '{"name": "noon", "arguments": {}}]',
        ),
        (
            "hermes",
            '<tool_call>\n{"name": "weather", "arguments": {"city": "}\\"]", "days": 1}}\n'
            '</tool_call>\n<tool_call>\n{"name": "noon", "arguments": {}}\n</tool_call>',
        ),
    ],
)
def test_a_template_without_tools_gets_calls_as_the_model_writes_them(name, calls):
    style = STYLES[name]
    body = ChatForm.model_validate({"messages": history(("a", "b"), True), "tools": TOOLS})
    about, user, turn, first, *_ = style.written(body.messages, body.tools or ())
    assert (about.role, user.text, turn.role) == ("system", CHAT[0]["content"], "assistant")
    assert '"days"' in about.text and about.text.endswith(style.text([("NAME", "{...}")]))
    assert turn.text == calls
    assert (first.role, first.text) == ("user", "<tool_response>\nsunny\n</tool_response>")
    if not style.single:  # and as the grammar has them
        assert read(style, [calls]) == ("", CALLS)
        matcher = byte_grammars().compile(style.grammar(body.tools or (), None, True)).deep_copy()
        data = list(calls.encode())
        assert matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def test_auto_never_lets_a_call_begin_as_free_text():
    """Spelled in letters, Mistral's control token would be read as a call that no schema binds."""
    body = ChatForm.model_validate({"messages": CHAT, "tools": TOOLS})
    source = replace(MISTRAL, token=7).grammar(body.tools or (), "", True)
    matcher = byte_grammars().compile(source).deep_copy()
    text = b"a [TOOL_CALLS"
    assert matcher.try_consume_tokens(list(text + b"]")) == len(text) and matcher.is_accepting()
    for style in (HERMES, LLAMA):
        matcher = byte_grammars().compile(style.grammar(body.tools or (), "", True)).deep_copy()
        begin = style.first.encode()
        assert matcher.try_consume_tokens(list(begin + b"moon")) == len(begin)


def test_llama_s_answer_in_json_may_begin_as_a_call():
    """The lexer takes the longest literal: one for `{"name": "` left no other object."""
    body = ChatForm.model_validate({"messages": CHAT, "tools": TOOLS})
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "note": {"const": 1}},
        "additionalProperties": False,
    }
    source = LLAMA.grammar(body.tools or (), of_schema(schema), True)
    cases = [
        ('{"name": "Pim"}', True),
        ('{"name": "weather", "note": 1}', True),
        ('{"note": 1}', True),
        ('{"name": "weather", "parameters": {"city": "a", "days": 1}}', True),
        ('{"name": "noon", "parameters": {}}', True),
        ('{"name": "weather", "parameters": {}}', False),
        ('{"name": "moon", "parameters": {}}', False),
        ('{"nine": 1}', False),
    ]
    for text, valid in cases:
        matcher, data = byte_grammars().compile(source).deep_copy(), list(text.encode())
        accepted = matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
        assert accepted == valid, text


@pytest.mark.parametrize("name", KINDS)
def test_forced_text_has_its_own_bytes(name, tmp_path):
    """A tokenizer puts a space before a text, or composes letters: no such token is in the form."""
    build, end = KINDS[name]
    build().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    tokenizer = load_tokenizer(tmp_path)
    forms = Grammars(tokenizer, tokenizer.vocab_size, (tokenizer.eos_id or 0,))
    for text in ('[{"name": "', "e\u0301 x", " a b", "the fox"):
        request = Request([1], SamplingParams())
        Form(forms, start(literal(text)))(request)
        row: Any = request.row
        output = request.output.token_ids
        while output[-1:] != [tokenizer.eos_id]:
            ids = row.mask.nonzero()[:, 0].tolist()
            assert ids, row.error
            output.append(ids[0])
        assert tokenizer.decode_bytes(output[:-1]).decode() == text


def read(style: Style, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a text that arrives in pieces."""
    reader, content, calls = Reader(style), "", list[list[str]]()
    for place, piece in enumerate(pieces):
        for delta in reader.push(piece, end=place == len(pieces) - 1):
            content += delta.get("content", "")
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    calls.append([part["function"]["name"], ""])
                calls[part["index"]][1] += part["function"]["arguments"]
    return content, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("name", STYLES)
def test_a_text_is_read_alike_in_any_pieces(name):
    style = STYLES[name]
    call = style.text(CALLS[:1])
    late = ("Well: ", CALLS[:1]) if style.trigger else (f"Well: {call}", [])
    cases = [
        (call, ("", CALLS[:1])) if style.single else (style.text(CALLS), ("", CALLS)),
        (f"Well: {call}", late),
        ("a {b} [TOOL_CALLS] <tool_call>", ("a {b} [TOOL_CALLS] <tool_call>", [])),
        (f"{style.first}Pim", (f"{style.first}Pim", [])),
        (f'{style.first}Pim", "age": 3}}', (f'{style.first}Pim", "age": 3}}', [])),
        (f"{call}\nAnd so on.", ("And so on.", CALLS[:1])),
        ("", ("", [])),
    ]
    for text, want in cases:
        assert read(style, [text]) == read(style, [*text, ""]) == want, text
        for place in range(len(text)):
            assert read(style, [text[:place], text[place:]]) == want, (text, place)
