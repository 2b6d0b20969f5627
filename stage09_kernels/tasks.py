"""The tasks of this stage, for `python -m shared.course.exercise`."""

from __future__ import annotations

from shared.task import Task

PARTS = "tests/test_parts.py"

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
        points=30,
        hints=(
            "Of the last block, only `tokens` less what came before is valid.",
            "A block brings a larger maximum. What were all earlier weights divided by, and what "
            "should they have been divided by?",
            "What has to happen to the two sums before the new block is added, and what is left "
            "to do after the last one?",
        ),
        tests=(f"{PARTS}::test_an_online_softmax_reads_its_blocks_and_nothing_else",),
    ),
    Task(
        number=2,
        file="online.py",
        functions=("merge",),
        title="what several threads have read",
        text="The blocks of a long sequence are split among threads, and each has a part: the "
        "largest score, the sum of its weights, and its weighted sum of values. Put the parts "
        "together. A part may be empty (-inf, 0, zeros), and no part may overflow.",
        points=20,
        hints=(
            "Each part's weights are relative to a maximum of its own. Which one do they share?",
            "How does task 1 bring two blocks to one maximum? Do the same for all parts at once.",
            "What is exp(-inf)? And what is -inf - -inf, if you are not careful?",
        ),
        tests=(f"{PARTS}::test_parts_of_a_sequence_are_put_together",),
    ),
    Task(
        number=3,
        file="tile.py",
        functions=("product",),
        title="the register tile",
        text="Multiply x by weights in tiles of MR rows and NR columns of the result, from the "
        "first row and column on. A tile's sums stay in a small tensor until they are whole. For "
        "each input a tile loads its numbers of x and its weights once, and keeps none for the "
        "next tile: a weight is loaded once for every MR rows. Tiles at the edges are smaller, and "
        "nothing outside may be loaded.",
        points=30,
        hints=(
            "Three loops are around the sums. Which of them must be the innermost, if the sums "
            "are not to leave the registers?",
            "For one input, how many numbers does a tile need from each side, and how many "
            "products do they give?",
            "How high is the tile that begins at the last row?",
        ),
        tests=(
            f"{PARTS}::test_a_product_of_tiles_is_the_product",
            f"{PARTS}::test_a_tile_loads_each_number_once",
        ),
    ),
    Task(
        number=4,
        file="program.py",
        functions=("pack",),
        title="weights in the order they are read",
        text="Lay out weights (outputs, inputs), one after another, as (panels, inputs, 64): each "
        "panel has 64 outputs, input by input, so that multiplying one input by 64 weights reads "
        "one row. Zeros follow the last output.",
        points=20,
        hints=(
            "In which panel is output n, and where in every input's row?",
            "A weight may begin in the middle of a panel and end in another.",
        ),
        tests=(f"{PARTS}::test_weights_are_packed_by_panels",),
    ),
)
