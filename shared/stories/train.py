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

How far copying gets varies from run to run all the same: a run of 6,500 steps on one thread had
still not learnt to carry a trait or a number across a whole story. Judge a model before it is used
(`python -m shared.stories.evaluate`), and let it go on if it needs more (`--start`).

Deterministic: the same seed, thread count and kind of processor give the same weights.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

from .. import cli, measure
from ..errors import UserError
from . import grammar

VOCABULARY = 2048  # 256 bytes, 1,791 merges, <|endoftext|>
END_OF_TEXT = "<|endoftext|>"
POSITIONS = 1024
TOKENS_PER_MICRO_BATCH = (
    2048  # logits of 16 MB: larger ones leave the cache and pay a page fault a page
)
MICRO_BATCHES = 2
WINDOW = 512
FULL_WINDOW_SHARE = 0.15  # of the steps, at the end
COPYING_STEPS = 500  # at the start: one story three times in a window
EMBEDDING_SPREAD = 0.1  # GPT-2's own 0.02 is made for 768 channels, ours are 192
PEAK_LEARNING_RATE = 3e-3
EMBEDDING_LEARNING_RATE_SHARE = 0.4
SECOND_LEARNING_RATE_SHARE = (
    1 / 3
)  # of the peak, for a model that goes on from another: it knows nearly all already
WARMUP_STEPS = 100


def train_tokenizer(count: int = 20_000) -> Tokenizer:
    """A byte-level BPE in GPT-2's format. Special tokens last, so that ids 0..255 are the bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    texts = (story.text for story in itertools.islice(grammar.stories("tokenizer"), count))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}: the "
            "grammar has too little text"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.model.save(str(folder))
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    vocabulary[END_OF_TEXT] = VOCABULARY - 1
    ordered = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    (folder / "vocab.json").write_text(json.dumps(ordered, ensure_ascii=False), encoding="utf-8")
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": POSITIONS,
        "add_prefix_space": False,
        **names,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )


def windows(
    tokenizer: Tokenizer, length: int, rng: random.Random, supply: Iterator[grammar.Story]
) -> Iterator[list[int]]:
    """Windows of `length` + 1 tokens that open with a whole story; every second one without
    <|endoftext|> before it, as a user's prompt comes without it."""
    end = VOCABULARY - 1
    while True:
        window: list[int] = [] if rng.random() < 0.5 else [end]
        while len(window) <= length:
            window += tokenizer.encode(next(supply).text).ids + [end]
        yield window[: length + 1]


def repeating_windows(
    tokenizer: Tokenizer, length: int, supply: Iterator[grammar.Story]
) -> Iterator[list[int]]:
    """Windows of `length` + 1 tokens that tell the beginning of one story three times."""
    while True:
        beginning = tokenizer.encode(next(supply).text).ids[: length // 3] + [VOCABULARY - 1]
        yield (beginning * 4)[: length + 1]


def micro_batch(
    source: Iterator[list[int]], length: int, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, length + 1) and positions (B, length): one window in three starts at 0, the
    others anywhere."""
    rows = TOKENS_PER_MICRO_BATCH // length
    offsets = [
        0 if rng.random() < 1 / 3 else rng.randint(0, POSITIONS - length) for _ in range(rows)
    ]
    ids = torch.tensor([next(source) for _ in range(rows)])
    return ids, torch.tensor(offsets)[:, None] + torch.arange(length)


def build_model(width: int, layers: int, heads: int, seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    end = VOCABULARY - 1
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=POSITIONS,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end,
        eos_token_id=end,
        # GPT-2's own curve as one operator; saved under its old name below
        activation_function="gelu_pytorch_tanh",
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(config)
    torch.nn.init.normal_(model.transformer.wte.weight, std=EMBEDDING_SPREAD)
    return model


def build_optimizers(model: GPT2LMHeadModel, peak: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embeddings, biases and norms; `peak` is
    the learning rate."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".h." in name]
    rest = [p for name, p in model.named_parameters() if not (p.ndim == 2 and ".h." in name)]
    slow = peak * EMBEDDING_LEARNING_RATE_SHARE
    return [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=slow, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def learning_rate_share(step: int, steps: int) -> float:
    """The share of the peak learning rate: linear warm-up, then linear decay to zero."""
    return min((step + 1) / WARMUP_STEPS, (steps - step) / max(1, steps - WARMUP_STEPS))


def save_model(model: GPT2LMHeadModel, folder: Path) -> None:
    model.config.activation_function = "gelu_new"
    model.save_pretrained(folder)
    model.config.activation_function = "gelu_pytorch_tanh"


def load_start(folder: Path) -> tuple[GPT2LMHeadModel, Tokenizer, dict]:
    """Model, tokenizer and training facts of a folder that `train` wrote. Raises UserError if it is
    none."""
    try:
        before = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        vocabulary, merges = models.BPE.read_file(
            str(folder / "vocab.json"), str(folder / "merges.txt")
        )
        model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} is no folder that this command wrote ({error}): give one, or leave --start "
            "out."
        ) from None
    vocabulary.pop(END_OF_TEXT)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    for block in model.transformer.h:
        block.mlp.act = torch.nn.GELU(approximate="tanh")
    return model, tokenizer, before


def train(
    out: Path, steps: int, seed: int, width: int, layers: int, heads: int, start: Path | None = None
) -> dict:
    """Train and save to `out`; returns the facts of the run for the model card. `start`: go on from
    an earlier result."""
    if start is None:
        model, tokenizer, before = build_model(width, layers, heads, seed), train_tokenizer(), None
        optimizers = build_optimizers(model, PEAK_LEARNING_RATE)
    else:
        model, tokenizer, before = load_start(start)
        optimizers = build_optimizers(model, PEAK_LEARNING_RATE * SECOND_LEARNING_RATE_SHARE)
    save_tokenizer(tokenizer, out)
    model.train()
    copying_steps = COPYING_STEPS if start is None else 0
    rng = random.Random(seed)
    supply = grammar.stories(f"training {seed}" if start is None else f"training {seed} on")
    copying = repeating_windows(tokenizer, WINDOW, supply)
    sources = {length: windows(tokenizer, length, rng, supply) for length in (WINDOW, POSITIONS)}
    full_from = int(steps * (1 - FULL_WINDOW_SHARE))
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: learning_rate_share(step, steps))
        for each in optimizers
    ]
    started, smooth = time.perf_counter(), None
    progress = tqdm(range(steps), unit="step", smoothing=0.05)
    for step in progress:
        length = POSITIONS if step >= max(full_from, copying_steps) else WINDOW
        total = 0.0
        for _ in range(MICRO_BATCHES):
            ids, positions = micro_batch(
                copying if step < copying_steps else sources[length], length, rng
            )
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(
                    input_ids=ids[:, :-1], position_ids=positions, use_cache=False
                ).logits
            loss = (
                torch.nn.functional.cross_entropy(
                    logits.float().flatten(0, 1), ids[:, 1:].flatten()
                )
                / MICRO_BATCHES
            )
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        smooth = total if smooth is None else 0.98 * smooth + 0.02 * total
        if step % 20 == 19:
            progress.set_postfix_str(f"loss {smooth:.4f}")
        if step % 500 == 499 or step == steps - 1:
            save_model(model, out)
    return {
        "command": f"python -m shared.stories.train --seed {seed} --steps {steps}"
        + (" --start BEFORE" if start else ""),
        "before": before,
        "seed": seed,
        "steps": steps,
        "tokens": steps * MICRO_BATCHES * TOKENS_PER_MICRO_BATCH,
        "seconds": round(time.perf_counter() - started, 1),
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": measure.processor(),
    }


def main(argv: list[str] | None = None) -> None:
    parser = cli.Parser(
        "shared.stories.train",
        "Trains the embedded model on stories fresh from the grammar: about an hour on two cores.",
        "  python -m shared.stories.train --out my-model\n  python -m shared.stories.evaluate "
        "--folder my-model",
    )
    folder = grammar.FOLDER / "model"
    steps = cli.whole_number(1, 1_000_000)
    small = cli.whole_number(1, 4096)
    parser.add_argument(
        "--out",
        type=Path,
        default=folder,
        help="folder for the checkpoint; default: the embedded one",
    )
    parser.add_argument("--steps", type=steps, default=6000, help="optimizer steps of 4,096 tokens")
    parser.add_argument(
        "--start",
        type=Path,
        help="folder of an earlier result to go on from; its size and vocabulary are kept",
    )
    parser.add_argument(
        "--seed", type=cli.whole_number(0, 2**31), default=0, help="of weights and stories"
    )
    parser.add_argument("--threads", type=small, default=2, help="the exact weights depend on it")
    parser.add_argument("--width", type=small, default=192, help="width of the model")
    parser.add_argument("--layers", type=small, default=4, help="layers")
    parser.add_argument("--heads", type=small, default=3, help="attention heads")
    options = parser.parse_args(argv)
    if options.width % options.heads:
        raise UserError(
            f"A width of {options.width} cannot be shared by {options.heads} heads: choose a "
            "multiple."
        )
    torch.set_num_threads(options.threads)
    facts = train(
        options.out,
        options.steps,
        options.seed,
        options.width,
        options.layers,
        options.heads,
        options.start,
    )
    (options.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(f"Saved to {options.out}. Next: python -m shared.stories.evaluate --folder {options.out}")


if __name__ == "__main__":
    cli.run(main)
