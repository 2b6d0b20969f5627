"""Measures what each kernel buys: `python -m stage09_kernels.benchmark`.

Products of one layer, attention over blocks, a decode step, a prompt, and whole answers, each
beside stage 05 with PyTorch's fastest layers. Every step is checked against stage 05's logits, and
every answer against stage 01.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from shared import charts, cli, linear, measure, models
from shared.bench import kit, rows
from shared.bench.claims import Claim, closing, faster, takes
from shared.bench.kit import Case, Group, Subject
from shared.bench.rows import Results, Row, first
from shared.roofline import Cost, block_weights, forward_cost
from stage01_forward.params import SamplingParams
from stage04_continuous import engine as stage04
from stage04_continuous.request import Request
from stage04_continuous.runner import Runner
from stage05_paged.blocks import BlockPool
from stage05_paged.cache import PagedCache
from stage05_paged.engine import make as make_paged

from . import library
from .cache import KernelCache
from .engine import make
from .operations import ATTEND, LINEAR, NORM, Linear, Operation, Pass
from .program import lay_out
from .runner import KernelRunner
from .sample import sample_tokens

PAGED, ATTENTION, KERNELS = "paged", "attention in place", "one call"
IN_ORDER = "blocks in order"
PLAIN, PACKED, OURS, AVX2 = "F.linear", "oneDNN, packed", "ours", "ours, AVX2"
ALL, WITHOUT = "with", "without"
PAIRS, LAST = "bfloat16 products in pairs", "only the wanted rows in the last layer"
PREFETCH = "prefetch of the next block of a cache"  # in bfloat16 alone
CONSTANTS = {  # what takes a technique away, and nothing else
    "a register tile of 6 rows": ("MR=1",),
    "weights in pieces that stay in L1": ("KC=1048576",),
    "8 queries share their keys": ("MAX_QUERIES=1",),
    "4 vectors of keys at a time": ("UNROLL=1",),
    PREFETCH: ("PREFETCH=0",),
    "prefetch of the next weights": ("LINEAR_PREFETCH=0",),
}
PARTS = ("products", "head", "attention", "norms", "tables")
SMOL = "HuggingFaceTB/SmolLM2-135M"
BLOCK = 16
DRAWN: dict[str, Any] = {
    "greedy": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
}
STARTED = 150 * 7.5e-6  # seconds to start the operators of a step, as the lesson counts them


FULL = kit.plan(
    models=("gpt2", SMOL), dtypes=kit.BOTH, repeats=5,
    rows=(1, 8, 32), contexts=(128, 256, 1000), prompt=512,
    counts=(1, 8, 32, 512),  # rows of a product
    requests=(1, 8, 32), lengths=(64, 64), whole_repeats=2,
)  # fmt: skip
FEW = {"rows": (1, 8), "counts": (1, 8), "contexts": (128,), "requests": (8,)}


# ---- measurements -------------------------------------------------------------------------------


def products(subject: Subject, plan: Any) -> Iterator[Group]:
    """One linear layer: PyTorch's, oneDNN's with the weight packed, and linear.c, with the best
    instructions of this processor and, where these are better than AVX2, with AVX2."""
    config, dtype = subject.config, subject.dtype
    width = config.n_embd
    levels = {OURS: "", AVX2: "avx2"} if "avx2" in library.levels()[1:] else {OURS: ""}
    kernels = {
        name: KernelCache(config, 1, dtype=dtype, level=level).library(dtype)
        for name, level in levels.items()
    }
    for name, outputs in (("MLP up", 4 * width), ("head", config.vocab_size)):
        weight = (torch.randn(outputs, width) / width**0.5).to(dtype)
        mine, theirs = lay_out([weight], dtype), linear.pack(weight)
        strides = {"x_stride": width, "out_stride": outputs, "inputs": width, "outputs": outputs}
        for count in plan.counts:
            x = torch.randn(count, width).to(dtype)
            used = {"x": x, "out": torch.empty(count, outputs), "weights": mine}
            places = {name: tensor.data_ptr() for name, tensor in used.items()}
            operation = Operation(LINEAR)
            operation.of.linear = Linear(**places, **strides)
            call = ctypes.byref(operation), 1, ctypes.byref(Pass(n_rows=count))
            ways: dict[str, Any] = {
                PLAIN: partial(F.linear, x, weight),
                PACKED: partial(linear.packed_linear, x, theirs, None),
            }
            for ours, kernel in kernels.items():
                ways[ours] = partial(library.call, kernel.step, *call)
            about = {"layer": name, "shape": [outputs, width], "count": count}
            yield about | {"seconds": measure.alternate(ways, plan.repeats)}


def filled(subject: Subject, plan: Any) -> tuple[PagedCache, KernelCache]:
    """Both caches with the same random numbers, and room for every step of `plan`."""
    config, dtype = subject.config, subject.dtype
    blocks = max(plan.rows) * -(-(max(plan.contexts) + 1) // BLOCK)
    paged = PagedCache(config, blocks, BLOCK, dtype=dtype)
    kernel = KernelCache(config, blocks, BLOCK, dtype=dtype)
    paged.kv.normal_(generator=torch.Generator().manual_seed(0))
    pairs = 2 if dtype == torch.bfloat16 else 1  # rows of keys that are interleaved
    for layer in range(config.n_layer):  # the same in the kernels' layout, a layer at a time
        keys, values = paged.kv[layer]  # each (H, blocks, block, D)
        turned = keys.transpose(2, 3).unflatten(2, (-1, pairs)).transpose(3, 4)
        both = torch.cat((turned.flatten(2), values.flatten(2)), 2)
        kernel.kv[layer] = both.transpose(0, 1)
    return paged, kernel


def decode(paged: PagedCache, count: int, context: int, anywhere: bool = True) -> list[Any]:
    """The shares of a decode step of `count` sequences, in blocks anywhere or one after the other,
    as in a contiguous cache."""
    size, order = -(-(context + 1) // BLOCK), list(range(paged.blocks))
    if anywhere:
        order = torch.randperm(paged.blocks, generator=torch.Generator().manual_seed(0)).tolist()
    return [(order[row * size : (row + 1) * size], context, 1) for row in range(count)]


def judge_of(subject: Subject, paged: PagedCache) -> Runner:
    """A judge that rounds less than all it judges: the same weights and cache in float32."""
    model = models.load_model(subject.shape, dtype=subject.dtype).float()
    exact = PagedCache(subject.config, paged.blocks, BLOCK)
    exact.kv.copy_(paged.kv)
    return Runner(model, exact)


def steps(subject: Subject, plan: Any) -> Iterator[Group]:
    """A decode step: stage 05, stage 05 with attention in place, and the whole step as one call;
    then the parts of that call, each alone."""
    plain = models.load_model(subject.shape, dtype=subject.dtype)
    paged, kernel = filled(subject, plan)
    judge = judge_of(subject, paged)
    runners: dict[str, Any] = {
        PAGED: Runner(subject.model, paged),
        ATTENTION: Runner(subject.model, kernel),
        KERNELS: KernelRunner(plain, kernel),
    }
    for count, context in product(plan.rows, plan.contexts):
        inputs = [7] * count, decode(paged, count, context), list(range(count))
        ways = {name: partial(runner.run, *inputs) for name, runner in runners.items()}
        logits = judge.run(*inputs)
        proofs = {
            name: kit.prove(logits, way().argmax(-1), subject.dtype) for name, way in ways.items()
        }
        shares = decode(paged, count, context, anywhere=False)
        written = [table[-1] for table, _, _ in shares]  # which other sequences read next
        kept = kernel.kv[:, written]
        if count == max(plan.rows):
            ways[IN_ORDER] = partial(runners[KERNELS].run, inputs[0], shares, inputs[2])
        ways |= parts(runners[KERNELS], *inputs[1:])
        taken = measure.alternate(ways, plan.repeats)
        kernel.kv[:, written] = kept
        ways[KERNELS]()  # the part "attention" has written keys and values of its own
        yield {"count": count, "context": context, "seconds": taken, "proof": proofs}


def parts(runner: KernelRunner, shares: list[Any], rows: list[int]) -> dict[str, Any]:
    """The operations of each kind in a step, and what Python prepares for them."""
    operations = list(runner.program.array)
    kinds = {
        "norms": [operation for operation in operations if operation.kind == NORM],
        "products": [operation for operation in operations[:-1] if operation.kind == LINEAR],
        "head": operations[-1:],
        "attention": [operation for operation in operations if operation.kind == ATTEND],
    }
    whole = runner.cache.extend(shares)
    return {"tables": partial(runner.cache.extend, shares)} | {
        name: partial(runner.program.call, (Operation * len(chosen))(*chosen), whole, rows)
        for name, chosen in kinds.items()
    }


def techniques(subject: Subject, plan: Any) -> Iterator[Group]:
    """A pass with all techniques, and with each of them taken away, over the same blocks."""
    plain = models.load_model(subject.shape, dtype=subject.dtype)
    paged, kernel = filled(subject, plan)
    without: dict[str, tuple[tuple[str, ...], str]] = {
        name: (defines, "") for name, defines in CONSTANTS.items()
    }
    if subject.dtype != torch.bfloat16:
        del without[PREFETCH]
    elif library.levels()[0] == "avx512_bf16":
        without[PAIRS] = (), "avx512"
    runners: dict[str, Any] = {}
    for name, (defines, level) in {ALL: ((), ""), **without}.items():
        kernel.defines, kernel.level = defines, level
        runners[name] = KernelRunner(plain, kernel)
    kernel.defines, kernel.level = (), ""
    for count, context in [*product(plan.rows, plan.contexts), (plan.prompt, 0)]:
        if context:
            inputs = [7] * count, decode(paged, count, context), list(range(count))
        else:
            inputs = [7] * count, [(list(range(-(-count // BLOCK))), 0, count)], [count - 1]
        ways = {name: partial(runner.run, *inputs) for name, runner in runners.items()}
        if not context:
            ways[LAST] = partial(runners[ALL].run, *inputs[:2], list(range(count)))
        seconds = measure.alternate(ways, plan.repeats)
        for name in list(seconds)[1:]:
            both = {ALL: seconds[ALL], WITHOUT: seconds[name]}
            yield {"technique": name, "count": count, "context": context, "seconds": both}


def best_cells(results: Results) -> list[Row]:
    """For each technique and dtype, the pass in which it gains most."""
    best: dict[tuple[str, str], Row] = {}
    measured = "techniques" in results.content["results"]  # older results lack them
    for row in results.groups("techniques") if measured else []:
        key = row["technique"], row["dtype"]
        if key == (PREFETCH, "float32"):  # results of code that measured nothing twice
            continue
        if key not in best or row.gain(WITHOUT, ALL) > best[key].gain(WITHOUT, ALL):
            best[key] = row
    return list(best.values())


def the_pass(row: Row) -> str:
    return f"{row['count']} at {row['context']:,}" if row["context"] else "prompt"


def gains(results: Results) -> list[dict[str, str]]:
    """What each technique gains at most, and in which pass, for the lesson."""
    lines: dict[str, dict[str, str]] = {}
    for row in best_cells(results):
        line = lines.setdefault(
            row["technique"], {"technique": row["technique"], "float32": "", "bfloat16": ""}
        )
        line[row["dtype"]] = f"{row.gain(WITHOUT, ALL):.2f}x, {the_pass(row)}"
    return list(lines.values())


def attention(subject: Subject, plan: Any) -> Iterator[Group]:
    """Attention of all layers in a decode step: gathered, and in place."""
    config = subject.config
    paged, kernel = filled(subject, plan)
    for count, context in product(plan.rows, plan.contexts):
        heads = (config.n_head, config.n_kv_head, config.n_kv_head)
        inputs = [torch.randn(count, n, config.head_dim).to(subject.dtype) for n in heads]
        shares = decode(paged, count, context)
        ways = {
            name: partial(all_layers, cache.extend(shares), config.n_layer, inputs)
            for name, cache in ((PAGED, paged), (ATTENTION, kernel))
        }
        read = count * context * config.kv_bytes_per_token(subject.dtype)
        taken = measure.alternate(ways, plan.repeats)
        yield {"count": count, "context": context, "bytes": read, "seconds": taken}


def all_layers(whole: Any, layers: int, inputs: list[Tensor]) -> None:
    for layer in range(layers):
        whole.attend(layer, *inputs)


def prefill(subject: Subject, plan: Any) -> Iterator[Group]:
    """One prompt."""
    plain = models.load_model(subject.shape, dtype=subject.dtype)
    (ids,) = subject.prompts([plan.prompt], "prefill")
    blocks = -(-len(ids) // BLOCK)
    options: dict[str, Any] = {"block_size": BLOCK, "dtype": subject.dtype}
    inputs = ids, [(list(range(blocks)), 0, len(ids))], [len(ids) - 1]
    paged = PagedCache(subject.config, blocks, **options)
    judge = judge_of(subject, paged)
    runners: dict[str, Any] = {
        PAGED: Runner(subject.model, paged),
        KERNELS: KernelRunner(plain, KernelCache(subject.config, blocks, **options)),
    }
    ways = {name: partial(runner.run, *inputs) for name, runner in runners.items()}
    proof = kit.prove(judge.run(*inputs), ways[KERNELS]().argmax(-1), subject.dtype)
    seconds = measure.alternate(ways, plan.repeats)
    yield {"count": len(ids), "context": 0, "seconds": seconds, "proof": proof}


def answers(subject: Subject, plan: Any) -> Iterator[Group]:
    """Whole answers by both engines, scheduling and sampling included."""
    plain = models.load_model(subject.shape, dtype=subject.dtype)
    for count in plan.requests:
        blocks = count * -(-sum(plan.lengths) // BLOCK)
        options: dict[str, Any] = {"max_sequences": count, "prefix_caching": False}
        engines = {
            PAGED: make_paged(subject.model, pool=BlockPool(blocks, BLOCK), **options),
            KERNELS: make(plain, pool=BlockPool(blocks, BLOCK), **options),
        }
        lengths = [plan.lengths] * count
        group, runs = kit.compare(subject, engines, lengths, plan.whole_repeats)
        group["bookkeeping"] = {
            name: [step.bookkeeping_seconds for step in run.steps[-1] if not step.prefill_tokens]
            for name, run in runs.items()
        }
        yield group


def drawn(subject: Subject, plan: Any) -> Iterator[Group]:
    """The next tokens of a step of many rows, from scores spread like those of a trained model."""
    count = max(plan.rows)
    scores = 3 * torch.randn(count, subject.config.vocab_size)
    for name, options in DRAWN.items():
        params = SamplingParams(temperature=0.8 if options else 0, seed=1, **options)
        requests = [Request([1], params) for _ in range(count)]
        copies = [scores.clone() for _ in range(2 * plan.repeats + 4)]  # they are overwritten

        def once(sampler: Any, requests: Any = requests, copies: Any = copies) -> None:
            sampler(requests, copies.pop(), ())

        ways = {PAGED: partial(once, stage04.sample_tokens), KERNELS: partial(once, sample_tokens)}
        yield {"options": name, "count": count, "seconds": measure.alternate(ways, plan.repeats)}


# ---- tables and charts --------------------------------------------------------------------------


def bound(row: Row) -> float:
    """The least seconds that a pass can take, by bytes, operations and the machine's limits."""
    new = 1 if row["context"] else row["count"]
    count = row["count"] if row["context"] else 1
    return row.least([forward_cost(row.config, row.kind, new, row["context"], rows=count)])


def gathering(row: Row) -> float:
    """The same, plus what stage 05 copies and the start of its operators, for its own steps."""
    if row.variant != PAGED:
        return bound(row)
    copied = 2 * row["count"] * row["context"] * row.config.kv_bytes_per_token(row.kind)
    return bound(row) + copied / row.bandwidth + STARTED


def claims(results: Results) -> Iterator[Claim]:
    """What the lesson predicts, for the GPT-2 124M shape and 256 tokens of context."""
    pair = (PAGED, KERNELS)
    for row in results.groups("steps", model="gpt2", context=256):
        if (row["dtype"], row["count"]) in (("float32", 32), ("float32", 1), ("bfloat16", 1)):
            what = f"{kit.counted(row['count'], 'row')}, {row['dtype']}"
            late = (1e3 * (row.of(name).median - bound(row)) for name in pair)
            why = "stage 05's step takes {:.1f} ms longer than its bound, ours {:.1f}".format(*late)
            yield faster(f"gain: {what}", row, pair, gathering, why)
            yield takes(f"a step: {what}", row.of(KERNELS), bound, late_parts(row))
    for row in results.groups("prefill", model="gpt2", dtype="float32"):
        what = f"a prompt of {row['count']}"
        late = (1e3 * (row.of(name).median - bound(row)) for name in pair)
        why = "stage 05's pass takes {:.0f} ms longer than its bound, ours {:.0f}".format(*late)
        yield faster(f"gain: {what}", row, pair, bound, why)
        why = "softmax, norms and GELU are not counted"
        yield takes(what, row.of(KERNELS), bound, why)


def needs(row: Row, name: str) -> Cost:
    """What one part of a decode step computes and reads. Norms read their rows and write them."""
    count, config, size = row["count"], row.config, row.kind.itemsize
    blocks, head = block_weights(config), config.vocab_size * config.n_embd
    cached = count * row["context"] * config.kv_bytes_per_token(row.kind)
    return {
        "products": Cost(2 * count * blocks, size * blocks),
        "head": Cost(2 * count * head, size * head),
        "attention": Cost(2 * cached / size * config.n_head / config.n_kv_head, cached),
        "norms": Cost(0, (2 * config.n_layer + 1) * 2 * 4 * count * config.n_embd),
        "tables": Cost(0, 0),
    }[name]


def late_parts(row: Row) -> str:
    """How the limits of a step's parts, which run one after another, add up; and which part takes
    longest beyond its limit."""
    names = [name for name in WHY if name in row["seconds"]]
    least = {name: row.least([needs(row, name)]) for name in names}
    late = {name: 1e3 * (row.of(name).median - least[name]) for name in names}
    worst = max(names, key=late.__getitem__)
    total = 1e3 * sum(least.values())
    return f"the limits of its parts add up to {total:.1f} ms; {worst}: {late[worst]:.1f} ms more"


def part(name: str) -> rows.Column:
    """Milliseconds of one part of the call; in brackets what its bytes and operations predict."""
    return lambda row: (
        f"{row.of(name).median * 1e3:.2f} ({row.least([needs(row, name)]) * 1e3:.2f})"
    )


def between(variant: str) -> rows.Column:
    """Milliseconds of a decode step outside of the pass."""
    return lambda row: f"{rows.median(row['bookkeeping'][variant]) * 1e3:.2f}"


def product_rate(variant: str) -> rows.Column:
    """GB/s for one row, where reading the weight is the limit; GFLOP/s for more."""

    def text(row: Row) -> str:
        outputs, inputs = row["shape"]
        if variant not in row["seconds"]:
            return ""
        taken = row.of(variant).median
        if row["count"] == 1:
            return f"{outputs * inputs * row.kind.itemsize / taken / 1e9:,.0f} GB/s"
        return f"{2 * outputs * inputs * row['count'] / taken / 1e9:,.0f} GFLOP/s"

    return text


def attention_rate(variant: str) -> rows.Column:
    return lambda row: f"{row['bytes'] / row.of(variant).median / 1e9:.1f}"


WHY = {
    "products": "the first rows of a piece wait for memory; sums are put away after each piece",
    "head": "as for the other products",
    "attention": "memory rests while a softmax runs, and where a block begins on another page",
    "norms": "so short that it counts how long the threads take to meet",
}


def widest(results: Results) -> Row:
    """The float32 step with the most rows, of 256 tokens each if there is one."""
    return max(first("steps")(results), key=lambda row: (row["count"], row["context"] == 256))


def organs(results: Results) -> Iterator[Claim]:
    """What each part of a step takes, and Python beside it; in float32."""
    many = widest(results)
    for name, why in WHY.items():
        least = many.least([needs(many, name)]) * 1e3
        yield Claim(f"{name}, {many['count']} rows", least, many.of(name).median * 1e3, "ms", why)
    (*_, answer) = results.groups("answers", dtype="float32")
    what, python = "Python between passes", rows.median(answer["bookkeeping"][KERNELS]) * 1e3
    why = "scheduling, an object for each token, records, and the call that draws"
    yield Claim(f"{what}, {answer.requests} requests", 1.0, python, "ms", why, aim=True)


COLUMNS: dict[str, rows.Column] = {
    "rows": "count",
    "in place": rows.gain(PAGED, variant=ATTENTION),
    "one call more": rows.gain(ATTENTION, variant=KERNELS),
    "together": rows.gain(PAGED, variant=KERNELS),
    "of the bound": lambda row: f"{bound(row) / row.of(KERNELS).median:.0%}",
    "anywhere over in order": rows.gain(KERNELS, variant=IN_ORDER),
    "gathered, GB/s": attention_rate(PAGED),
    "in place, GB/s": attention_rate(ATTENTION),
    **{name: product_rate(name) for name in (PLAIN, PACKED, OURS, AVX2)},
    **{name: part(name) for name in PARTS},
    "stage 04, ms": rows.ms(PAGED, 2),
    "in C, ms": rows.ms(KERNELS, 2),
    "faster": rows.gain(PAGED, variant=KERNELS),
    "between passes, paged, ms": between(PAGED),
    "ours, ms": between(KERNELS),
    "requests": lambda row: row.requests,
    "pass": the_pass,
    "gain": rows.gain(WITHOUT, variant=ALL),
}
TABLES = rows.tables(
    COLUMNS,
    f"""
    steps: model | dtype | rows | context | paged, ms | {ATTENTION}, ms | {KERNELS}, ms | together
      | of the bound | same tokens
    few < main: rows | context | paged, ms | {KERNELS}, ms | together | of the bound
    parts < parts: dtype | rows | context | in place | one call more | together
    within < parts: dtype | rows | context | {" | ".join(PARTS)}
    order < order: model | dtype | context | {IN_ORDER}, ms | {KERNELS}, ms | anywhere over in order
    attention: dtype | rows | context | gathered, GB/s | in place, GB/s | in place
    products: dtype | layer | rows | {PLAIN} | {PACKED} | {OURS} | {AVX2}
    prefill: model | dtype | paged, ms | {KERNELS}, ms | together | of the bound
    answers: model | dtype | requests | paged, tok/s | {KERNELS}, tok/s | together
    between < answers: model | dtype | requests | between passes, paged, ms | ours, ms
    techniques < best: technique | dtype | pass | {WITHOUT}, ms | {ALL}, ms | gain
    drawn: options | rows | stage 04, ms | in C, ms | faster
    """,
    main=lambda results: [row for row in first("steps")(results) if row["context"] > 128],
    parts=lambda results: results.groups("steps", model="gpt2"),
    best=best_cells,
    gains=gains,
    order=lambda results: [row for row in results.groups("steps") if IN_ORDER in row["seconds"]],
    claims=closing(claims),
    each=closing(organs),
)


def steps_chart(results: Results) -> Figure:
    groups = first("steps", context=256)(results)
    names = (PAGED, ATTENTION, KERNELS)
    values = {name: [1e3 * row.of(name).median for row in groups] for name in names}
    return charts.bars(
        "A decode step: attention in place, then all of it in one call",
        "milliseconds (GPT-2 124M shape, float32)",
        [kit.counted(row["count"], "row") for row in groups],
        values | {"machine's limit": [1e3 * bound(row) for row in groups]},
    )


def headline(results: Results) -> str:
    row = widest(results)
    return (
        f"{row.gain(PAGED, KERNELS):.1f}x stage 05's decode step with {row['count']} rows of "
        f"{row['context']} tokens (GPT-2 124M shape, float32)"
    )


CHARTS = {"steps": steps_chart}
WORK = kit.cases(
    Case(steps, models=None),
    Case(techniques),
    Case(attention),
    Case(products),
    Case(prefill, models=None),
    Case(answers),
    Case(drawn, dtypes=1),
)
BENCHMARK = kit.Benchmark("stage09_kernels", __doc__, FULL, WORK, TABLES, CHARTS, headline, FEW)
main = BENCHMARK.main

if __name__ == "__main__":
    cli.run(main)
