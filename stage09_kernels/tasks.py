"""The tasks of this stage, for `python -m shared.course.exercise`."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="online.py",
        functions=("attend",),
        title="an online softmax over blocks",
        text="Compute the attention of one query to the first `tokens` tokens of the blocks in "
        "`table`, reading one block at a time. From block to block keep only the largest score, "
        "the sum of the weights and the weighted sum of the values. Divide scores by the square "
        "root of the width; the softmax must not overflow; read nothing after the last token.",
        points=35,
        hints=(
            "Of the last block, only `tokens` less what came before is valid.",
            "With a larger maximum, all earlier weights shrink by the same factor.",
            "That factor, exp(old maximum - new maximum), applies to both sums before a block is "
            "added. Divide the one by the other at the end.",
        ),
        tests=("tests/test_parts.py::test_an_online_softmax_reads_its_blocks_and_nothing_else",),
    ),
    Task(
        number=2,
        file="program.py",
        functions=("pack",),
        title="weights in the order they are read",
        text="Lay out weights (outputs, inputs), one after another, as (panels, inputs, 64): each "
        "panel has 64 outputs, input by input, so that multiplying one input by 64 weights reads "
        "one row. Zeros follow the last output.",
        points=20,
        hints=(
            "Output n is in panel n // 64, at n % 64 of every input's row.",
            "A weight may begin in the middle of a panel and end in another.",
        ),
        tests=("tests/test_parts.py::test_weights_are_packed_by_panels",),
    ),
    Task(
        number=3,
        file="program.py",
        functions=("interleave",),
        title="gates beside what they open",
        text="Interleave the rows of `gate` and `up` (F, ...), 32 of the one and 32 of the other, "
        "so that one panel of 64 outputs has both. Pad F with zeros to a multiple of 32.",
        points=15,
        hints=("Pad both, cut each into (pieces, 32), stack the pieces in turn and flatten.",),
        tests=("tests/test_parts.py::test_gates_are_beside_what_they_open",),
    ),
    Task(
        number=4,
        file="cache.py",
        functions=("cut",),
        title="work for threads",
        text="Cut shares of `counts` tokens into items of at most `most` tokens. Return a row for "
        "each item, in order: its share, its first token in the share, and its number of tokens.",
        points=15,
        hints=(
            "A share of n tokens has ceil(n / most) items; repeat_interleave gives each its share.",
            "An item's place in its share is its own index less that of the share's first item.",
        ),
        tests=("tests/test_parts.py::test_a_pass_is_cut_into_items_of_a_few_tokens",),
    ),
    Task(
        number=5,
        file="library.py",
        functions=("levels",),
        title="what this processor can do",
        text="Return the levels in LEVELS whose instructions this processor has, the best first. A "
        "processor that is not x86_64 has only `plain`.",
        points=15,
        hints=(
            "torch.cpu.get_capabilities() maps names to True or False; a level needs all of its "
            "names.",
        ),
        tests=("tests/test_parts.py::test_the_best_level_that_the_processor_has_comes_first",),
    ),
)
