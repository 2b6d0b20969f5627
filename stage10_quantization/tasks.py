"""The tasks of this stage, for `python -m shared.course.exercise`."""

from __future__ import annotations

from shared.task import Task

QUANTIZER = "tests/test_quantizer.py::"
TASKS = (
    Task(
        number=1,
        file="numpy_quant.py",
        functions=("symmetric", "asymmetric"),
        title="eight bits and four",
        text="Quantize the matrix w (N, K) in groups of `group` columns. `symmetric` returns codes "
        "from -Q to Q, with Q = 2^(bits - 1) - 1, and scales; `asymmetric` codes from 0 to "
        "2^bits - 1, scales and minima. Scales and minima are float32 with values of `dtype`, "
        "rounded outwards before the codes are computed, so that no weight is off by more than "
        "half a scale. A group of zeros has scale 0 and codes 0; one that holds NaN or infinity, "
        "or has no finite scale, has scale NaN (minimum 0) and codes 0.",
        points=30,
        hints=(
            "`up` rounds to a dtype, never downwards. Which way must a minimum be rounded?",
            "Once scale and minimum are known, `_codes` does the rest for both. What does it need?",
            "Work in float64 until a scale is rounded: where would float32 lose a weight?",
        ),
        tests=(
            f"{QUANTIZER}test_no_weight_is_off_by_more_than_half_a_scale",
            f"{QUANTIZER}test_half_a_scale_is_nearly_reached",
            f"{QUANTIZER}test_unusual_groups_are_marked_or_right",
        ),
    ),
    Task(
        number=2,
        file="numpy_quant.py",
        functions=("pack_nibbles", "unpack_nibbles"),
        title="two codes a byte",
        text="Pack codes (N, K) of four bits, from -8 or from 0, into bytes (N, K / 2), the first "
        "of two neighbours in the low half; and unpack them. signed: whether they are from -8.",
        points=10,
        hints=(
            "What do the low four bits of -1 look like, and which codes have the same ones?",
            "A code above 7 stands for a negative one if there are any.",
        ),
        tests=(f"{QUANTIZER}test_every_pair_of_nibbles_is_packed_and_unpacked",),
    ),
    Task(
        number=3,
        file="layers.py",
        functions=("multiply",),
        title="a product of whole numbers",
        text="Multiply x (R, K) by a QuantizedMatrix: round x by groups (`quantize_activations`), "
        "sum the products of the codes of each group exactly, and add the groups in order, in "
        "float32: first sum * (scale * scale of x), then, with a minimum, minimum * (sum of the "
        "codes of x * scale of x).",
        points=25,
        hints=(
            "Which products are the same for all codes of a group, so that they leave the sum?",
            "A minimum is added to every weight of its group: by what is it multiplied?",
            "How large can the sum of a group become, and which dtype holds it exactly?",
        ),
        tests=(
            f"{QUANTIZER}test_sums_of_whole_numbers_are_exact_at_both_ends",
            f"{QUANTIZER}test_one_row_of_nan_shows_in_its_outputs_alone",
            "tests/test_by_hand.py::test_a_product_is_that_of_its_definition",
        ),
    ),
    Task(
        number=4,
        file="gptq.py",
        functions=("gptq",),
        title="let the next columns make up for it",
        text="Quantize a weight (N, K) column by column. After each, change the columns that are "
        "still floats so that the outputs change least, by the Hessian of the inputs. Scales of a "
        "group are those of its weights when its first column is reached. Inputs that are always 0 "
        "get weight 0. act_order: take the columns by falling diagonal, with the groups' scales as "
        "they were at first. `_upper` has the factor.",
        points=25,
        hints=(
            "Let the matrix of floats be in the order of the columns. Which column is which then?",
            "`fit` and `codes_of` quantize any part of a group. When does a group's scale change?",
            "The error of a column, over its diagonal, times a row of the factor: which part?",
        ),
        tests=(
            "tests/test_calibration.py::test_gptq_is_least_squares_column_by_column",
            "tests/test_calibration.py::test_independent_inputs_leave_the_nearest_codes",
            "tests/test_calibration.py::test_inputs_that_are_always_zero_and_too_few_samples",
        ),
    ),
    Task(
        number=5,
        file="formats/blocks.py",
        functions=("q4_k", "_eight_scales"),
        title="a block of Q4_K",
        text="Read blocks of 144 bytes with 256 codes: two float16, twelve bytes with eight scales "
        "and eight minima of six bits each, and 128 bytes of nibbles. Return codes (B, 256), and "
        "scales and minima (B, 8). `_eight_scales` has the layout in its text.",
        points=10,
        hints=(
            "Groups 4 to 7 have their low four bits in one place and their high two in another.",
            "32 bytes of nibbles hold two groups. Which halves are the first one's?",
        ),
        tests=("tests/test_by_hand.py::test_blocks_of_q4_k_by_their_definition",),
    ),
)
