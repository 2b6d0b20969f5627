"""The tasks of this stage, for `python -m shared.course.exercise`."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="numpy_gpt2.py",
        functions=("layer_norm", "gelu", "softmax"),
        title="three formulas",
        text="Write layer_norm, gelu and softmax from their formulas. All three take arrays of any "
        "shape; layer_norm and softmax work along the last axis. softmax must not overflow for "
        "large scores.",
        points=10,
        hints=(
            "Mean, variance, maximum and sum run over the last axis, and keep it: keepdims=True.",
            "gelu is 0.5 * x * (1 + tanh(...)), with tanh of sqrt(2 / pi) * (x + 0.044715 * x^3). "
            "The variance is divided by n, and epsilon is added to it before the square root.",
            "softmax: subtract the maximum of the row, take exp, divide by the sum of the row. The "
            "subtracted constant cancels.",
        ),
        tests=("tests/test_model.py::test_numpy_page_matches_the_model",),
    ),
    Task(
        number=2,
        file="generation.py",
        functions=("finish_reason",),
        title="when a sequence ends",
        text="Return why a sequence ends with its newest token: 'stop' for the end of text or a "
        "stop token, 'length' when max_tokens or the context is reached, None if it does not end. "
        "'stop' goes before 'length'; Respect min_tokens and ignore_eos.",
        points=10,
        hints=(
            "Only the newest token can end a sequence; the older ones were checked before.",
            "A stop counts only once there are at least min_tokens tokens. ignore_eos applies to "
            "the end of text, not to stop tokens.",
            "Two tests of 'stop' under one condition come first; then one line compares the number "
            "of tokens with max_tokens, and prompt and output together with n_positions, both with "
            ">=.",
        ),
        tests=(
            "tests/test_engine.py::test_end_of_text_on_the_last_allowed_token_is_a_stop",
            "tests/test_engine.py::test_stops_at_its_ends_unless_they_are_ignored",
            "tests/test_engine.py::test_prompt_and_answer_fill_the_context_and_no_more",
        ),
    ),
    Task(
        number=3,
        file="numpy_gpt2.py",
        functions=("attention",),
        title="causal attention by hand",
        text="Write attention for a whole sequence: project x (T, C) to queries, keys and values, "
        "split them into heads, let each token attend to itself and those before it, put the heads "
        "together again, and project. `prefix` names the weights.",
        points=20,
        hints=(
            "The names are c_attn and c_proj behind the prefix, each with .weight and .bias. "
            "c_attn gives q, k and v side by side: (T, 3C).",
            "Bring heads to the front: (T, C) -> (T, H, D) -> (H, T, D). Scores are q times k "
            "transposed, over the square root of D: (H, T, T). Row i attends to columns 0 to i.",
            "np.where puts -inf where np.tril of ones is false; softmax; times v; swap the axes "
            "back and reshape to (T, C) before c_proj.",
        ),
        tests=("tests/test_model.py::test_numpy_page_generates_what_transformers_generates",),
    ),
    Task(
        number=4,
        file="model.py",
        functions=("Block.forward",),
        title="one block, attention passed in",
        text="Write a block: norm, projections, attention and the network, each added to what came "
        "in. Attention itself is the argument `attend`, and x may have any leading shape: (T, C), "
        "(B, T, C) or packed (N, C).",
        points=20,
        hints=(
            "Compare with `block` in numpy_gpt2.py: the same two lines, with attention lifted out.",
            "self.attn.c_attn gives (..., 3C), and self.attn.split_heads makes q, k, v of it, each "
            "(..., H, D). attend takes the number of the layer first.",
            "attend returns (..., H, D): flatten the last two axes before self.attn.c_proj. Both "
            "halves are x + something(norm(x)).",
        ),
        tests=(
            "tests/test_engine.py::test_greedy_tokens_are_those_of_transformers",
            "tests/test_model.py::test_leading_shape_is_the_callers_business",
        ),
    ),
    Task(
        number=5,
        file="sampling.py",
        functions=("_filtered",),
        title="min_p, top_k and top_p",
        text="Drop unlikely tokens: set their weights to 0, and return float64. weights is (V,), "
        "and the largest is 1. min_p drops what is below min_p, top_k what is below the k-th "
        "largest of the rest, top_p what has top_p of the rest or more in heavier tokens. Tokens "
        "of equal weight are kept or dropped together.",
        points=15,
        hints=(
            "One sort, descending, serves top_k and top_p. Each of the three judges what the one "
            "before it kept.",
            "top_k: the limit is place k - 1 of the sorted weights, and k may be larger than the "
            "vocabulary. A weight that equals the limit stays. Drop what is below it from the "
            "sorted weights too.",
            "top_p: the running sum of the sorted weights without its own place is the weight of "
            "the heavier ones. Count the places where that is less than top_p of the sum; the last "
            "of them is the limit.",
        ),
        tests=(
            "tests/test_sampling.py::test_what_the_filters_keep",
            "tests/test_sampling.py::test_frequencies_follow_the_softmax",
            "tests/test_sampling.py::test_the_fast_sampler_takes_the_tokens_of_the_plain_one",
        ),
    ),
    Task(
        number=6,
        file="engine.py",
        functions=("Engine._tokens",),
        title="the naive engine's loop",
        text="Write the generator that continues one prompt: until there is a finish reason, run "
        "the whole sequence again, sample the next token, record the step in self.steps, and yield "
        "a Token.",
        points=25,
        hints=(
            "Each round is: self._forward over prompt and output, sample, finish_reason, a "
            "StepRecord, yield.",
            "sample works on rows: logits[None], and lists of one for the options, the history "
            "(prompt, output so far) and the generator. Create it once, before the loop.",
            "StepRecord(rows, prefill tokens, decode tokens, seconds): 1 row, the prompt, and the "
            "output that was computed again (all but the new token). The last Token carries the "
            "reason, and the others None.",
        ),
        tests=(
            "tests/test_engine.py::test_every_step_computes_everything_again",
            "tests/test_engine.py::test_a_request_has_one_generator_and_a_whole_history",
            "tests/test_engine.py::test_stream_is_generate_token_by_token",
            "tests/test_engine.py::test_one_sampling_for_all_or_one_each",
        ),
    ),
)
