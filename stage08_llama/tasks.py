"""The tasks of this stage, for `python -m shared.course.exercise`."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="rope.py",
        functions=("rotation", "rotate"),
        title="turn the pairs",
        text="`rotation`: the cosines and sines by which the pairs of each position turn, "
        "(..., 1, D / 2) in float32, times `scale`. `rotate`: turn each pair of channels (i, i + D "
        "/ 2) of x (..., H, D) by them. Compute in float32 at least, and return the dtype of x.",
        points=20,
        hints=(
            "Write a pair as a complex number. What does a turn by an angle do to it?",
            "Positions have any leading shape. Which axes must be added, so that every head of a "
            "token turns alike?",
            "Which channels are the first of their pairs, and where do the two results go? Try "
            "position 0 and position 1.",
        ),
        tests=("tests/test_layers.py::test_a_pair_turns_as_a_complex_number",),
    ),
    Task(
        number=2,
        file="rope.py",
        functions=("frequencies",),
        title="stretch a context",
        text="Return the angle by which one position turns each pair, (D / 2,) in float32, "
        "on the CPU whatever the default device: theta^(-2i / D), stretched by the rules of the "
        "five kinds. Here dynamic is the same as default. llama3 blends by how often a pair turns "
        "within the trained context, yarn by its place between two pairs.",
        points=15,
        hints=(
            "A pair turns trained * f / (2 pi) times within the trained context. llama3 keeps "
            "pairs that turn at least high_factor times and divides by `factor` those that turn at "
            "most low_factor times; in between it interpolates linearly over the turns.",
            "The pair that turns n times within the trained context is number D ln(trained / (2 pi "
            "n)) / (2 ln theta), a real number. yarn keeps pairs up to the one for `fast` and "
            "stretches those from the one for `slow` on; in between it interpolates linearly over "
            "the pair's number. With truncate, the first is rounded down and the second up.",
            "Can one of the two ends lie outside of 0 to D - 1? Where must it be then?",
        ),
        tests=(
            "tests/test_layers.py::test_a_stretched_context_slows_the_slow_pairs",
            "tests/test_layers.py::test_angles_are_computed_where_weights_are_not",
            "tests/test_config.py::test_llama_3_2_keeps_blends_and_stretches_pairs",
        ),
    ),
    Task(
        number=3,
        file="model.py",
        functions=("RMSNorm.forward",),
        title="a norm without a mean",
        text="Return x (..., C) divided by its root mean square, with epsilon under the root, "
        "times the weight. Divide in float32 for every dtype; cast back to the dtype of x before "
        "you multiply by the weight.",
        points=10,
        hints=(
            "rsqrt(mean(x^2) + epsilon), with the mean over the last axis.",
            "x and the weight are multiplied in the dtype of x. Which of the two was in float32 "
            "before, and from where on?",
        ),
        tests=("tests/test_layers.py::test_the_norm_divides_in_float32_and_weighs_in_the_dtype",),
    ),
    Task(
        number=4,
        file="model.py",
        functions=("Attention.heads",),
        title="queries, keys and values",
        text="Make q (..., H, D), k and v (..., K, D) from x (..., C): project and cut into heads, "
        "norm queries and keys where the model has norms, then turn them by `rotation`.",
        points=15,
        hints=(
            "unflatten(-1, (-1, self.head_dim)) cuts any number of heads.",
            "self.q_norm and self.k_norm do nothing where a model has none. A norm has a weight "
            "for each channel: does it matter whether it comes before the turn?",
        ),
        tests=("tests/test_layers.py::test_heads_are_normed_then_turned_and_values_are_neither",),
    ),
    Task(
        number=5,
        file="numpy_llama.py",
        functions=("rotate", "attention"),
        title="the page: turned and grouped",
        text="Write attention on the page. `rotate` turns the pairs of x (H, T, D) by the "
        "position times theta^(-2i / D). `attention` projects x (T, C) to H heads of queries and K "
        "of keys and values, norms queries and keys if there are weights for it, turns them, lets "
        "query head h read head h // (H / K), each token only itself and those before it, and "
        "projects. Biases may be missing.",
        points=25,
        hints=(
            "Compare with stage01_forward/numpy_gpt2.py. Which lines change, and which stay?",
            "Weights are (out, in) here. What does that change in a product?",
            "H / K neighbours among the queries share a head of keys. Repeating is one way; giving "
            "the queries one axis more is another. Which of the two copies nothing?",
        ),
        tests=(
            "tests/test_page.py::test_the_page_is_the_model",
            "tests/test_page.py::test_neighbouring_queries_share_a_head_of_keys",
            "tests/test_page.py::test_only_distances_count",
        ),
    ),
    Task(
        number=6,
        file="model.py",
        functions=("MLP.forward", "Layer.forward"),
        title="a gate, and a layer",
        text="`MLP.forward`: one projection of x, through SiLU, is the gate of the other; a third "
        "one goes back to the residual stream. `Layer.forward`: attention, with `attend` passed "
        "in, and the MLP, each after its norm and added to its input.",
        points=15,
        hints=(
            "Which of the three projections opens the gate? The names of the checkpoint say it.",
            "Compare with Block.forward of stage 01. What does `heads` do that c_attn did not?",
            "Attention returns heads. What does o_proj take?",
        ),
        tests=(
            "tests/test_page.py::test_a_gate_multiplies",
            "tests/test_page.py::test_a_layer_adds_twice",
        ),
    ),
)
