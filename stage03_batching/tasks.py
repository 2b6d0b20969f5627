"""The tasks of this stage, for `python -m shared.course.exercise`."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="cache.py",
        functions=("PaddedCache.__init__", "PaddedCache.extend"),
        title="one allocation, columns for all rows",
        text="Allocate keys and values for all rows and columns, and store each row's padding: kv, "
        "padding (B,), columns, last_position (of the model's context) and length. "
        "`extend` takes the next columns, the same for every row, and returns the attention of the "
        "step that fills them. If fewer are left, or for a count below 1, it raises ValueError and "
        "changes nothing.",
        points=15,
        hints=(
            "kv is stage 02's, with an axis for rows after the 2. The longest prompt has no "
            "padding.",
            "Check first. The message gives the columns that cannot be added, those taken, and the "
            "cache's total. The state is one number: self.length.",
            "PaddedAttention takes the tensor, the padding of the rows, the old length, the new "
            "one, and the last position. Which of these must be read before it changes?",
        ),
        tests=("tests/test_cache.py::test_the_cache_refuses_more_than_it_holds",),
    ),
    Task(
        number=2,
        file="attention.py",
        functions=("masked_attention",),
        title="masked attention by hand",
        text="Write attention over a cache, without PyTorch's kernel. masked_attention takes "
        "queries (B, H, T, D), keys and values (B, H, S, D) of any dtype, and a mask (B, 1, T, S), "
        "True where a query sees a key. Where the mask is None, `causal` says whether a query "
        "sees only the keys up to its own.",
        points=20,
        hints=(
            "The sum is two matrix products with a softmax over the keys in between. Divide the "
            "scores by the square root of D. Hidden keys get -inf before the softmax.",
            "The mask has one axis of 1 for all heads. The causal mask is a lower triangle.",
            "Which dtype must the softmax have if q is bfloat16, and which if it is float64 "
            "(torch.promote_types)? Which dtype has the result?",
        ),
        tests=(
            "tests/test_attention.py::test_a_query_sees_what_its_mask_says",
            "tests/test_attention.py::test_hidden_keys_and_values_may_hold_any_finite_number",
            "tests/test_attention.py::test_rows_do_not_meet",
        ),
    ),
    Task(
        number=3,
        file="cache.py",
        functions=("PaddedAttention.__init__",),
        title="positions and mask",
        text="Undo the padding. For a step over columns start..end-1: the views `new` and `seen`, "
        "the `positions` (B, T), counted from a row's first real token and always valid, and the "
        "`mask` (B, 1, T, end): a query sees the real columns up to its own. No query may be left "
        "with nothing to see.",
        points=25,
        hints=(
            "Row b begins after padding[b] columns: its position in column c is c minus that. "
            "Elsewhere this is the cumulative sum of the mask, minus one.",
            "Padding has no position, and a row past the end of the context has none either: clamp "
            "to 0..last_position. The mask combines two comparisons: a column is not after the "
            "query, and not before the row begins.",
            "A padding query would see nothing, and the softmax of nothing is NaN: which column "
            "may every query see, real or not? Which shapes of queries, columns and padding "
            "broadcast to (B, T, end), and which axis is missing then?",
        ),
        tests=(
            "tests/test_cache.py::test_positions_are_the_cumulative_mask_minus_one",
            "tests/test_cache.py::test_every_pass_hides_the_padding",
            "tests/test_cache.py::test_no_query_is_left_with_nothing_to_see",
            "tests/test_cache.py::test_a_row_at_the_end_of_the_context_keeps_a_valid_position",
            "tests/test_cache.py::test_a_plain_softmax_makes_no_nan_of_padding",
            "tests/test_cache.py::test_attention_reads_the_cache_in_place",
        ),
    ),
    Task(
        number=4,
        file="cache.py",
        functions=("PaddedAttention.attend",),
        title="write, then attend, by rows",
        text="Write the keys and values of the new columns into the cache and return the attention "
        "of their queries: q and the result are (B, T, H, D), k and v (B, T, H_kv, D). No row may "
        "see another row's keys.",
        points=10,
        hints=(
            "It is stage 02's attend with one more axis in front.",
            "self.new[layer, 0] and [layer, 1] take k and v with T and H exchanged; "
            "self.seen[layer] holds keys and values.",
            "masked_attention wants heads before tokens. Which axes change places on the way in, "
            "and which on the way out?",
        ),
        tests=(
            "tests/test_cache.py::test_each_row_is_what_it_is_alone",
            "tests/test_cache.py::test_nothing_passes_from_row_to_row",
        ),
    ),
    Task(
        number=5,
        file="engine.py",
        functions=("Engine._tokens", "Engine._forward"),
        title="a batch to its last row",
        text="Write the loop of a static batch: one padded prefill, then one token per row and "
        "step, until every row has ended; `_forward` runs one step and scores the rows that are "
        "alive. Append each Token to its output, and yield (row, Token). A row that has ended "
        "emits nothing more but stays in the rectangle. A row whose scores are not finite ends "
        "alone (finite_rows). Record every step, with its wasted tokens, and in cache_bytes the "
        "largest cache of all batches.",
        points=20,
        hints=(
            "State: the ids to run next, one list per row; which rows are alive; each row's output "
            "ids. The cache needs room for the longest prompt and the longest answer less one "
            "token, because an answer's last token is never run.",
            "Pad on the left, with any id. self._forward takes the rows that are alive and returns "
            "logits for them only: sample with the same rows. A Row (options, prompt, output) "
            "serves for a whole answer.",
            "The waste is the whole rectangle less what was real: all prompt tokens in the "
            "prefill, a token per live row in a decode. What can a row run that has ended, and "
            "what if it has no token at all?",
        ),
        tests=(
            "tests/test_engine.py::test_a_batch_gives_the_tokens_of_one_at_a_time",
            "tests/test_engine.py::test_each_request_has_its_own_sampling",
            "tests/test_engine.py::test_end_of_text_in_one_row_ends_that_row_alone",
            "tests/test_engine.py::test_a_row_that_has_ended_emits_nothing_more",
            "tests/test_engine.py::test_rows_end_at_the_end_of_the_context_while_others_go_on",
            "tests/test_engine.py::test_a_record_of_every_pass",
            "tests/test_engine.py::test_the_records_add_up",
            "tests/test_engine.py::test_scores_that_are_not_finite_end_one_row",
        ),
    ),
    Task(
        number=6,
        file="engine.py",
        functions=("Engine.run",),
        title="cut batches, set invalid prompts aside",
        text="Continue the prompts of `outputs`, at most max_batch at a time, and yield (index of "
        "the output, Token). An invalid prompt fails alone and takes no place in a batch. Raise "
        "UserError if there are no prompts at all. Reset the records and cache_bytes.",
        points=10,
        hints=(
            "sampling_per_prompt makes a list of options. check_request raises UserError: pass the "
            "error to output.fail and go on.",
            "Collect the indices of the valid ones, and cut that list into batches.",
            "self._tokens numbers the rows of its batch. Which output is row 0 of the second "
            "batch, if an invalid prompt came first?",
        ),
        tests=(
            "tests/test_engine.py::test_an_unfit_prompt_fails_alone_and_takes_no_seat",
            "tests/test_engine.py::test_calls_that_are_errors",
        ),
    ),
)
