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
            "Mean, variance, maximum and sum run along the last axis and keep it: keepdims=True.",
            "gelu is 0.5 * x * (1 + tanh(...)), with tanh of sqrt(2 / pi) * (x + 0.044715 * x^3). "
            "The variance is divided by n, and epsilon is added to it before the square root.",
            "softmax: exp overflows for large scores. Which number may be subtracted from all "
            "scores of a row without a change of the result, and with which one is no exp above "
            "1?",
        ),
        tests=("tests/test_model.py::test_numpy_page_matches_the_model",),
    ),
    Task(
        number=2,
        file="generation.py",
        functions=("finish_reason",),
        title="when a sequence ends",
        text="Return why the newest token ends a sequence: 'stop' for the end of text or a stop "
        "token, 'length' when max_tokens or the context is reached, None if the sequence goes on. "
        "'stop' takes precedence over 'length'. Respect min_tokens and ignore_eos.",
        points=5,
        hints=(
            "Only the newest token can end a sequence; the older ones have been checked already.",
            "A stop counts only once the output has at least min_tokens tokens. ignore_eos applies "
            "to the end of text, not to stop tokens.",
            "Which of the two reasons must be looked for first? How many tokens has the output "
            "with the newest, and does a limit end a sequence when it is reached, or when it is "
            "passed?",
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
        functions=("attention", "block", "gpt2"),
        title="the page: attention, a block, the model",
        text="Write GPT-2. `attention`: project x (T, C) to queries, keys and values, split them "
        "into heads, let each token attend to itself and those before it, merge the heads, and "
        "project; `prefix` names the weights. `block` adds attention and MLP, each after its norm. "
        "`gpt2` embeds ids and positions, runs the blocks and the last norm, and scores every row "
        "against the output layer, which may be the embedding.",
        points=20,
        hints=(
            "After the prefix come c_attn and c_proj, each with .weight and .bias. c_attn gives q, "
            "k and v side by side: (T, 3C).",
            "Bring the heads to the front: (T, C) -> (T, H, D) -> (H, T, D). Scores are q times k "
            "transposed, divided by the square root of D: (H, T, T). Row i attends to columns 0 to "
            "i.",
            "The prefixes are h.0, h.1, ... each followed by .attn or .mlp. Which score gives a "
            "weight of 0, and where does np.tril of ones say that it belongs? In which order are "
            "the axes after the product with v, and in which does c_proj need them?",
        ),
        tests=("tests/test_model.py::test_numpy_page_generates_what_transformers_generates",),
    ),
    Task(
        number=4,
        file="model.py",
        functions=("Block.forward", "GPT2.forward"),
        title="the model, attention passed in",
        text="Write a block (attention with its projections, then the MLP; each is normed first "
        "and added to its input) and the pass through all blocks, from ids to hidden states. "
        "Attention itself is the argument `attend`; x may have any leading shape: (T, C), (B, T, "
        "C) or packed (N, C).",
        points=15,
        hints=(
            "Compare with `block` and `gpt2` in numpy_gpt2.py: the same lines, with attention "
            "lifted out, and no logits at the end.",
            "self.attn.c_attn gives (..., 3C), which self.attn.split_heads turns into q, k and v, "
            "each (..., H, D). The first argument of attend is the layer's number.",
            "attend returns (..., H, D): what does self.attn.c_proj take? Both halves have one "
            "form: what is added to what?",
        ),
        tests=(
            "tests/test_engine.py::test_greedy_tokens_are_those_of_transformers",
            "tests/test_model.py::test_leading_shape_is_the_callers_business",
        ),
    ),
    Task(
        number=5,
        file="sampling.py",
        functions=("sample", "distribution", "_filtered", "draw"),
        title="sampling by one sort",
        text="`sample`: edit a copy of each row of logits (edit), in float64 or float32; refuse "
        "a row whose highest score is not finite. A greedy row takes its highest score; any other, "
        "a draw from its distribution, with one dart. Log probabilities are those of the "
        "unmodified logits. `distribution`: divide by the temperature, filter the weights, scaled "
        "so that the largest is 1, and divide by their sum. `_filtered`: min_p drops weights below "
        "min_p; top_k, those below the k-th largest of the rest; top_p, those with top_p of the "
        "rest or more in heavier tokens. Equal weights are kept or dropped together, and the "
        "result is float64. `draw`: the token that the dart hits.",
        points=20,
        hints=(
            "Subtract the row's maximum before exp. A temperature below MIN_TEMPERATURE is raised "
            "to it. One sort, descending, serves top_k and top_p. Each of the three filters judges "
            "only what the one before it kept.",
            "top_k: the limit is the sorted weight at index k - 1, and k may exceed the "
            "vocabulary. A weight equal to the limit stays. Drop those below it from the sorted "
            "weights too.",
            "top_p: at each place, the running sum of the sorted weights less the place's own is "
            "the weight of all heavier tokens. At which places is that less than top_p of the "
            "total, and what is the limit then? To draw, lay the probabilities end to end "
            "(cumsum): on which side of a border is a dart that falls on it (searchsorted)? If "
            "rounding carries it past the end, which is the last token that has weight?",
        ),
        tests=(
            "tests/test_sampling.py::test_what_the_filters_keep",
            "tests/test_sampling.py::test_greedy_takes_the_lowest_id_of_a_tie_and_no_random_number",
            "tests/test_sampling.py::"
            "test_scores_that_are_not_finite_and_rows_that_do_not_match_are_refused",
            "tests/test_sampling.py::test_frequencies_follow_the_softmax",
            "tests/test_sampling.py::test_a_seed_repeats_and_another_seed_differs",
            "tests/test_sampling.py::test_logprobs_are_those_of_the_unmodified_logits",
            "tests/test_sampling.py::test_a_dart_at_either_end_hits_a_token_that_has_weight",
            "tests/test_sampling.py::test_a_tiny_temperature_is_raised_to_a_hundredth",
        ),
    ),
    Task(
        number=6,
        file="engine.py",
        functions=("Engine._tokens",),
        title="the naive engine's loop",
        text="Write the generator that continues one prompt. Until there is a finish reason, run "
        "the whole sequence again, sample the next token, append it to the output as a Token, "
        "record the step in self.steps, and yield the Token.",
        points=20,
        hints=(
            "Each round is: self._forward over prompt and output, sample, finish_reason, a Token, "
            "a StepRecord, yield.",
            "sample works on rows: pass logits[None] and a list of one Row. Create the Row once, "
            "before the loop: it holds the generator, and the output list that grows.",
            "StepRecord(rows, prefill tokens, decode tokens, seconds): 1 row, the prompt, and the "
            "output that was computed again (all but the new token). The last Token carries the "
            "reason, the others None.",
        ),
        tests=(
            "tests/test_engine.py::test_every_step_computes_everything_again",
            "tests/test_engine.py::test_a_request_has_one_generator_and_a_whole_history",
            "tests/test_engine.py::test_stream_is_generate_token_by_token",
            "tests/test_engine.py::test_one_sampling_for_all_or_one_each",
        ),
    ),
    Task(
        number=7,
        file="scoring.py",
        functions=("perplexity",),
        title="judge a model",
        text="Judge every token of a text except the first by the tokens before it, in windows of "
        "n_positions tokens that begin `stride` apart; each token is judged in the first window "
        "that reaches it. Return perplexity, cross_entropy (nats per token) and tokens. Raise "
        "UserError for fewer than two tokens or an impossible stride.",
        points=10,
        hints=(
            "One forward pass per window gives the scores at all its positions: row i scores token "
            "i + 1.",
            "Keep count of the tokens judged so far. Each next window reaches exactly one stride "
            "further, so only its last rows are new.",
            "Run the output layer on ROWS rows at a time, in float32 or better. Parts and windows "
            "differ in length: what of each may be added up, its sum or its mean, and when is it "
            "divided?",
        ),
        tests=("tests/test_perplexity.py::test_overlapping_windows",),
    ),
)
