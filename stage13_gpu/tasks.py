"""The tasks of this stage, for `python -m shared.course.exercise`."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="naive.py",
        functions=("slots_of",),
        title="the address of a paged key",
        text="Return the slots of `positions` (T,) of a sequence whose blocks of `block` tokens "
        "are in `table`, as one tensor: what each thread of a kernel works out for its own key.",
        points=20,
        hints=(
            "A position is a block of the table, and a place in it: which operator gives each?",
        ),
        tests=("tests/test_naive.py::test_a_slot_is_that_of_the_table",),
    ),
    Task(
        number=2,
        file="naive.py",
        functions=("online",),
        title="a tile of an online softmax",
        text="Take T keys into the softmax of M queries and return the new state. Scores are "
        "scaled by the root of the width and in powers of 2; a query may see no key of the tile, "
        "or none so far, and nothing may become NaN.",
        points=45,
        hints=(
            "2 ** (x * log2(e)) is exp(x). What must be subtracted before it is computed?",
            "A larger maximum shrinks everything that was added before, by the same factor.",
            "-inf minus -inf is NaN: by what can a row that has seen nothing be shifted?",
        ),
        tests=("tests/test_naive.py::test_tiles_of_any_size_give_one_softmax",),
    ),
    Task(
        number=3,
        file="naive.py",
        functions=("merge",),
        title="split keys, merged",
        text="Add up the states of programs that have read different keys, in their order, and "
        "return the attention output (M, D).",
        points=35,
        hints=(
            "Each state is relative to its own maximum. Which one do all have to be relative to?",
            "When is the total complete by which the sum is divided?",
        ),
        tests=("tests/test_naive.py::test_pieces_of_a_softmax_add_up",),
    ),
)
