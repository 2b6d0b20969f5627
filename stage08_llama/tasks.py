"""The tasks of this stage, for `python -m shared.course.exercise`."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="rope.py",
        functions=("rotate",),
        title="turn the pairs",
        text="Turn each pair of channels (i, i + D / 2) of x (..., H, D) by its angle, given as "
        "cosines and sines (..., 1, D / 2) in float32. Compute in float32 at least, and return the "
        "dtype of x.",
        points=10,
        hints=(
            "A pair (a, b) turned by an angle is (a cos - b sin, b cos + a sin).",
            "chunk(2, dim=-1) gives the first and the second channels of all pairs; cat puts the "
            "results back in that order.",
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
        points=20,
        hints=(
            "A pair turns trained * f / (2 pi) times within the trained context. llama3 keeps "
            "pairs that turn at least high_factor times and divides by `factor` those that turn at "
            "most low_factor times; in between it interpolates linearly over the turns.",
            "The pair that turns n times within the trained context is number D ln(trained / (2 pi "
            "n)) / (2 ln theta), a real number. yarn keeps pairs up to the one for `fast` and "
            "stretches those from the one for `slow` on; in between it interpolates linearly over "
            "the pair's number. With truncate, the first is rounded down and the second up.",
            "Both ends stay between 0 and D - 1.",
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
            "float() first, to(x.dtype) before the weight.",
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
            "self.q_norm and self.k_norm do nothing where a model has none. Norm before turning.",
        ),
        tests=("tests/test_layers.py::test_heads_are_normed_then_turned_and_values_are_neither",),
    ),
    Task(
        number=5,
        file="repeated.py",
        functions=("RepeatedHeads.__call__",),
        title="keys repeated, the older way",
        text="Run the model with an attend of your own, which repeats the keys and values of each "
        "head for all query heads that share it and calls the given attend: (..., K, D) becomes "
        "(..., H, D), and query head h reads what was head h // (H / K).",
        points=15,
        hints=(
            "repeat_interleave, along the axis of the heads: each head's copies are neighbours.",
            "The model has its own number of heads of keys in self.model.config.n_kv_head.",
        ),
        tests=("tests/test_layers.py::test_repeated_heads_are_an_oracle_of_every_engine",),
    ),
    Task(
        number=6,
        file="config.py",
        functions=("qwen2", "qwen3", "_qwen_window"),
        title="read a config.json",
        text="Make the config of a Qwen2 and of a Qwen3 from the fields of its config.json. _read "
        "does what all families have in common. A Qwen2 has biases for q, k and v, which no option "
        "names. A Qwen3 norms queries and keys; its attention_bias is for q, k, v and o; its heads "
        "have 128 channels unless head_dim is given. _qwen_window finds the layers with a window.",
        points=15,
        hints=(
            "Each option that a reader knows must be named in its call of _read, or the file is "
            "refused: WINDOWS for both, attention_bias for a Qwen3. Files without "
            "num_key_value_heads have 32. dataclasses.replace changes fields of a config.",
            "There is no window unless use_sliding_window is true and fields.window is not None. "
            "If layer_types is given, it decides: a list with one of LAYERS for each layer. "
            "Otherwise layers from max_window_layers (by default 28) on have the window.",
            "_windowed(config, fields, layers) takes a list of bools. fields.refuse(name, value, "
            "wanted) makes the error for an invalid list.",
        ),
        tests=("tests/test_config.py::test_a_qwen_is_read_from_its_options",),
    ),
    Task(
        number=7,
        file="chatml.py",
        functions=("render",),
        title="a chat template",
        text="Write ChatML by hand. For each message: <|im_start|>, the role, a newline, the "
        "content without space around it, <|im_end|> and a newline; then the beginning of an "
        "answer, if `start`. Return pieces: a control word (in `control`) in a role or a content "
        "is a piece of its own and stays text; in all other pieces, control words are tokens.",
        points=15,
        hints=(
            "re.split with a capturing group keeps what it splits at: every second part is a "
            "control word.",
            "Of two control words that begin alike, the longer one must come first in the pattern.",
            "itertools.groupby joins neighbours of one kind. Drop empty pieces first.",
        ),
        tests=("tests/test_chat.py::test_chatml_by_hand_is_the_template",),
    ),
)
