"""Train the embedded model: `python -m shared.stories.train`.

The stories never end and never repeat: each training window is packed with stories fresh from the
grammar, so there is no data set to store and nothing to memorise but the grammar itself. The model
is `transformers`' GPT-2, not ours: our forward pass is judged by weights that it never touched.

How the 1,024 positions are learnt cheaply: nearly all windows are 512 tokens long, at a random
offset into the positions; a last phase at the full 1,024 teaches attention to reach that far.

How names are learnt at all: a first run wrote fluently after 5 million tokens and still drew a new
name at each mention after 8. Words that no context can tell apart get embeddings that nothing can
tell apart, and then there is nothing to copy. So embeddings start wide (their directions differ
from the first step) and move slowly, and the first steps tell the beginning of one story three
times over, which is the cheapest lesson in copying.

Even so, how far copying gets varies from run to run: a run of 6,500 steps on one thread had still
not learnt to carry a trait or a number across a whole story. stories-chat took 14,000. Judge a
model before it is used: `python -m shared.stories.evaluate`.

In a model's folder, tokenizer_config.json and chat_template.jinja are written by hand; all else is
made here and by evaluate.py. The template leaves out what the model was not trained on, such as
system prompts.

Deterministic: the same thread count and kind of processor give the same weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from .. import cli, measure
from . import conversations, grammar

VOCABULARY = 2048  # 256 bytes, merges, and the control tokens at the end
END_OF_TEXT = "<|endoftext|>"
TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"  # as Qwen and SmolLM2 write a conversation
POSITIONS = 1024
# logits of 16 MB: larger ones leave the cache and pay a page fault per page
TOKENS_PER_MICRO_BATCH = 2048
MICRO_BATCHES = 2
WINDOW = 512
# Weight of a token that repeats a filling, in the chat model's loss. It fades to 1 with the
# learning rate: names are learnt sooner, and the model does not end up seeing repetitions
# everywhere.
COPY_WEIGHT = 3.0
PLAIN_SHARE = 0.25  # of the chat model's documents: stories without a conversation
EMBEDDING_SPREAD = 0.1  # GPT-2's own 0.02 is made for 768 channels, ours are 192
PEAK_LEARNING_RATE = 3e-3
EMBEDDING_LEARNING_RATE_SHARE = 0.4
WARMUP_STEPS = 100
SEED, THREADS = 0, 2  # the weights depend on both

Document = list[tuple[int, float]]  # token ids, and the weight of each in the loss


class Stories:
    """What is particular to `stories`: a GPT-2 that continues a text."""

    folder = grammar.FOLDER / "model"
    steps = 6000
    size = 192, 4, 3  # width, layers, heads
    copying_steps = 500  # at the start: one story three times in a window
    control: tuple[str, ...] = (END_OF_TEXT,)
    full_window_share = 0.15  # of the steps, at the end

    @staticmethod
    def texts(seed: int | str) -> Iterator[str]:
        return (story.text for story in grammar.stories(seed))

    @staticmethod
    def documents(tokenizer: Tokenizer, seed: int | str) -> Iterator[Document]:
        for story in grammar.stories(seed):
            yield even([*tokenizer.encode(story.text).ids, VOCABULARY - 1])

    @staticmethod
    def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
        """In GPT-2's format, vocab.json and merges.txt."""
        tokenizer.model.save(str(folder))
        ordered = dict(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
        text = json.dumps(ordered, ensure_ascii=False)
        (folder / "vocab.json").write_text(text, encoding="utf-8")

    @staticmethod
    def config(width: int, layers: int, heads: int) -> transformers.PretrainedConfig:
        end = VOCABULARY - 1
        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": POSITIONS}
        return transformers.GPT2Config(
            **sizes,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            vocab_size=VOCABULARY,
            bos_token_id=end,
            eos_token_id=end,
            activation_function="gelu_pytorch_tanh",  # GPT-2's own curve as one operator
        )


class Draft(Stories):
    """What is particular to `stories-draft`, which drafts for `stories`: its tokens, and one layer,
    which learns no copying. That takes two."""

    folder = grammar.FOLDER / "draft-model"
    steps = 4000
    size = 96, 1, 3
    copying_steps = 0


class Chat(Stories):
    """What is particular to `stories-chat`: a Llama that answers requests for stories.

    It keeps keys and values for one head, a third of what `stories` keeps.
    """

    folder = grammar.FOLDER / "chat-model"
    steps = 14_000
    control = (TURN, END_OF_TURN, END_OF_TEXT)
    full_window_share = 0.35  # a second answer often lies beyond 512 tokens

    @staticmethod
    def texts(seed: int | str) -> Iterator[str]:
        for turns in conversations.conversations(seed):
            for turn in turns:
                yield f"user\n{turn.question}"
                yield f"assistant\n{turn.answer}"

    @staticmethod
    def documents(tokenizer: Tokenizer, seed: int | str) -> Iterator[Document]:
        """Conversations and, between them, plain stories. Questions weigh nothing, nor does the end
        of an answer that was cut."""
        rng = random.Random(f"documents {seed}")
        plain, chats = grammar.stories(seed), conversations.conversations(seed)
        turn, end_of_turn, end = range(VOCABULARY - len(Chat.control), VOCABULARY)
        line, assistant = (tokenizer.encode(text).ids for text in ("\n", "assistant\n"))
        while True:
            if rng.random() < PLAIN_SHARE:
                story = next(plain)
                yield [*weighted(tokenizer, story.text, story, 0), (end, 1.0)]
                continue
            document: Document = []
            for exchange in next(chats):
                question = tokenizer.encode(f"user\n{exchange.question}").ids
                document += even([turn, *question, end_of_turn, *line, turn, *assistant], 0.0)
                document += weighted(tokenizer, exchange.answer, exchange.story, exchange.start)
                document += [(end_of_turn, float(exchange.whole)), *even(line, 0.0)]
            yield [*document, (end, 0.0)]

    @staticmethod
    def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
        tokenizer.save(str(folder / "tokenizer.json"), pretty=False)

    @staticmethod
    def config(width: int, layers: int, heads: int) -> transformers.PretrainedConfig:
        return transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=POSITIONS,
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=1,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=[VOCABULARY - 2, VOCABULARY - 1],
            pad_token_id=None,
        )


def even(ids: list[int], weight: float = 1.0) -> Document:
    return [(token_id, weight) for token_id in ids]


def weighted(tokenizer: Tokenizer, text: str, story: grammar.Story, start: int) -> Document:
    """The tokens of `text`, story.text from `start` on, where copies weigh more."""
    encoding = tokenizer.encode(text)
    places = ((start + first, start + last) for first, last in encoding.offsets)
    weights = [COPY_WEIGHT if story.copied(*place) else 1.0 for place in places]
    return list(zip(encoding.ids, weights, strict=True))


def train_tokenizer(recipe: type[Stories]) -> Tokenizer:
    """A byte-level BPE, or the one whose tokens the draft model shares. Control tokens last, so
    that ids 0..255 are the bytes."""
    if recipe is Draft:
        return transformers.AutoTokenizer.from_pretrained(Stories.folder).backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(recipe.control),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.islice(recipe.texts("tokenizer"), 20_000), trainer)
    tokenizer.add_special_tokens(list(recipe.control))
    return tokenizer


def windows(length: int, rng: random.Random, documents: Iterator[Document]) -> Iterator[Document]:
    """Windows of `length` + 1 tokens that open with a whole document; every second one without
    <|endoftext|> before it, like a user's prompt."""
    while True:
        window = [] if rng.random() < 0.5 else [(VOCABULARY - 1, 0.0)]
        while len(window) <= length:
            window += next(documents)
        yield window[: length + 1]


def repeating_windows(length: int, documents: Iterator[Document]) -> Iterator[Document]:
    """Windows of `length` + 1 tokens that have the beginning of one document three times."""
    while True:
        beginning = [token_id for token_id, _ in next(documents)[: length // 3]]
        yield even(([*beginning, VOCABULARY - 1] * 4)[: length + 1])


def micro_batch(
    source: Iterator[Document], length: int, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids and weights (B, length + 1), positions (B, length): one window in three starts at
    0, the others anywhere."""
    rows = TOKENS_PER_MICRO_BATCH // length
    offsets = [
        0 if rng.random() < 1 / 3 else rng.randint(0, POSITIONS - length) for _ in range(rows)
    ]
    batch = torch.tensor([next(source) for _ in range(rows)])  # (B, length + 1, 2)
    positions = torch.tensor(offsets)[:, None] + torch.arange(length)
    return batch[..., 0].long(), batch[..., 1], positions


def build_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embeddings, biases and norms."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        inside = parameter.ndim == 2 and (".h." in name or ".layers." in name)
        (matrices if inside else rest).append(parameter)
    peak, slow = PEAK_LEARNING_RATE, PEAK_LEARNING_RATE * EMBEDDING_LEARNING_RATE_SHARE
    return [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=slow, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def learning_rate_share(step: int, steps: int) -> float:
    """The share of the peak learning rate: linear warm-up, then linear decay to zero."""
    return min((step + 1) / WARMUP_STEPS, (steps - step) / max(1, steps - WARMUP_STEPS))


def train(
    recipe: type[Stories], out: Path, steps: int = 0, size: tuple[int, int, int] | None = None
) -> dict[str, Any]:
    """Train and save to `out`, by default as the recipe has it; returns the facts of the run for
    the model card."""
    out.mkdir(parents=True, exist_ok=True)
    steps, copying_steps = steps or recipe.steps, recipe.copying_steps
    torch.manual_seed(SEED)
    config = recipe.config(*(size or recipe.size))
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=EMBEDDING_SPREAD)
    tokenizer = train_tokenizer(recipe)
    recipe.save_tokenizer(tokenizer, out)
    rng = random.Random(SEED)
    documents = recipe.documents(tokenizer, f"training {SEED}")
    copying = repeating_windows(WINDOW, documents)
    sources = {length: windows(length, rng, documents) for length in (WINDOW, POSITIONS)}
    full_from = max(int(steps * (1 - recipe.full_window_share)), copying_steps)
    optimizers = build_optimizers(model)
    share = partial(learning_rate_share, steps=steps)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, share) for optimizer in optimizers]
    started = time.perf_counter()
    model.train()
    progress = tqdm(range(steps), unit="step", smoothing=0.05)
    for step in progress:
        length = POSITIONS if step >= full_from else WINDOW
        source = copying if step < copying_steps else sources[length]
        for _ in range(MICRO_BATCHES):
            ids, weights, positions = micro_batch(source, length, rng)
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(ids[:, :-1], position_ids=positions, use_cache=False).logits
            nats = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
            )
            weight = weights[:, 1:].flatten() ** share(step)
            loss = (nats * weight).sum() / weight.sum() / MICRO_BATCHES
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 20 == 19:
            progress.set_postfix_str(f"loss {MICRO_BATCHES * loss.item():.4f}")
    model.save_pretrained(out)
    return {
        "steps": steps,
        "tokens": steps * MICRO_BATCHES * TOKENS_PER_MICRO_BATCH,
        "seconds": round(time.perf_counter() - started, 1),
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": measure.processor(),
    }


def recipe_parser(program: str, about: str) -> argparse.ArgumentParser:
    """--chat and --draft, which choose the model as `recipe`; for evaluate.py, too."""
    parser = argparse.ArgumentParser(f"python -m {program}", description=about)
    parser.set_defaults(recipe=Stories)
    kind = parser.add_mutually_exclusive_group()
    for option, recipe in (("--chat", Chat), ("--draft", Draft)):
        about = f"stories-{option.strip('-')} in place of stories"
        kind.add_argument(option, action="store_const", const=recipe, dest="recipe", help=about)
    return parser


def main(argv: list[str] | None = None) -> None:
    about = "Trains an embedded model on stories fresh from the grammar: an hour or two."
    recipe = recipe_parser("shared.stories.train", about).parse_args(argv).recipe
    torch.set_num_threads(THREADS)
    facts = json.dumps(train(recipe, recipe.folder), indent=2)
    (recipe.folder / "training.json").write_text(facts + "\n", encoding="utf-8")
    print(f"Saved to {recipe.folder}. Next: evaluate it with the same option.")


if __name__ == "__main__":
    cli.run(main)
