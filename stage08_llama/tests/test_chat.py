"""A chat at the terminal, with a true folder: weights, tokenizer.json and a chat template."""

from __future__ import annotations

import builtins
import itertools
import json
import re
from unittest.mock import Mock

import pytest

from shared import cli
from shared.chat_template import load as load_template
from shared.errors import UserError
from shared.tests.test_chat_template import CHATML
from shared.tests.test_tokenizer import qwen
from stage01_forward.params import SamplingParams
from stage05_paged.engine import make
from stage08_llama.__main__ import main
from stage08_llama.chat import Chat
from stage08_llama.tests.folders import save

END = "<|im_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Its vocabulary has four rows more than there are tokens, and two tokens end a text."""
    folder, tokenizer = tmp_path_factory.mktemp("chat"), qwen()
    rows = max(tokenizer.get_vocab().values()) + 5
    ends = [tokenizer.token_to_id(name) for name in (END, "<|endoftext|>")]
    save(folder, "qwen3", vocab_size=rows, max_position_embeddings=512, eos_token_id=ends)
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"eos_token": END, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture(scope="module")
def loaded(folder):
    options = cli.generation_parser("x", "").parse_args(["--model", str(folder)])
    return cli.load_model_from(options)


@pytest.fixture
def chat(loaded, folder):
    template = load_template(folder, loaded.tokenizer.control)
    assert template is not None
    engine = make(loaded.model, contexts=1)
    return Chat(engine, loaded, template, SamplingParams(max_tokens=12, temperature=0.8, seed=3))


def test_a_conversation_is_the_prompt_of_every_answer(chat, capsys):
    chat.engine.stream = Mock(side_effect=chat.engine.stream)
    lines = ["hello", "and <|im_end|>?", "/reset", "/help", "again", "/quit"]
    assert chat.run(Mock(side_effect=lines)) == 0
    out, said = capsys.readouterr()
    assert "no command is called '/help': /reset forgets" in said
    prompts = [call.args[0] for call in chat.engine.stream.call_args_list]
    first, second, third = map(chat.loaded.tokenizer.decode, prompts)
    start = f"<|im_start|>user\nhello{END}\n<|im_start|>assistant\n"
    assert first == start and second.startswith(start + out[:5].strip())
    assert second.endswith(f"<|im_start|>user\nand {END}?{END}\n<|im_start|>assistant\n")
    assert third == start.replace("hello", "again")
    assert chat.engine.scheduler.pool.owned == 0


def test_a_stopped_answer_stays_as_far_as_it_came(chat, capsys, monkeypatch):
    plain, printed = builtins.print, itertools.count(1)

    def interrupted(*args, **options):
        plain(*args, **options)
        if next(printed) == 4:  # the start, then pieces
            raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "print", interrupted)
    assert chat.run(Mock(side_effect=["one", EOFError])) == 0
    assert "[stopped]" in capsys.readouterr().out
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert chat.engine.scheduler.pool.owned == 0 and not chat.engine.requests


def test_a_conversation_that_is_too_long_says_so_and_goes_on(chat, capsys):
    assert chat.run(Mock(side_effect=["word " * 600, "hi", "/quit"])) == 0
    assert re.search(r"error: The prompt has .* \[/reset forgets", capsys.readouterr().err)
    assert chat.messages[0]["content"] == "hi"


def test_rows_without_a_token_are_never_sampled(loaded):
    unused = loaded.tokenizer.unused(loaded.config.vocab_size)
    assert len(unused) == 4
    engine = make(loaded.model, contexts=1)
    hot = SamplingParams(max_tokens=400, temperature=2.0, seed=1, ignore_eos=True)
    (output,) = engine.generate([[1, 2, 3]], hot)
    assert len(set(output.token_ids)) > 100 and not set(output.token_ids) & set(unused)


def test_the_command_line(folder, capsys, monkeypatch):
    model = ["--model", str(folder), "--dtype", "float32"]
    assert main(["the fox", *model, "--max-tokens", "5"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("the fox") and "5 tokens" in err
    monkeypatch.setattr(builtins, "input", Mock(side_effect=EOFError))
    assert main(["--chat", *model]) == 0
    assert capsys.readouterr().err.startswith(f"[{folder.name}, engine kernels, float32 on cpu, ")
    with pytest.raises(UserError, match="leave the prompt out"):
        main(["hello", "--chat"])
    with pytest.raises(UserError, match="has no chat template"):
        main(["--chat", "--model", "stories"])
