"""The tasks of this stage, for `python -m shared.course.exercise`."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="by_hand.py",
        functions=("one_head",),
        title="attention in C, for one head",
        text="Return the C source of `attend`: one query attends to the first `tokens` tokens of "
        "the blocks in `table`. Each block has `block` keys, then `block` values, of `width` "
        "numbers each. Divide scores by the square root of the width; the softmax must not "
        "overflow; read nothing after the last token.",
        points=35,
        hints=(
            "Token t is in block table[t / block], at t % block. Block b begins 2 * b * block * "
            "width numbers into the cache.",
            "Three loops over the tokens: scores and their maximum; weights expf(score - maximum) "
            "and their sum; values. The second and the third can be one.",
            "Divide the output by the sum at the end.",
        ),
        tests=("tests/test_by_hand.py::test_one_head_by_hand_reads_its_blocks_and_nothing_else",),
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
        tests=("tests/test_by_hand.py::test_weights_are_packed_by_panels",),
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
        tests=("tests/test_by_hand.py::test_gates_are_beside_what_they_open",),
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
        tests=("tests/test_by_hand.py::test_a_pass_is_cut_into_items_of_a_few_tokens",),
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
        tests=("tests/test_by_hand.py::test_the_best_level_that_the_processor_has_comes_first",),
    ),
)
