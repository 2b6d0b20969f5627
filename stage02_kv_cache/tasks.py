"""The tasks of this stage, for `python -m shared.course.exercise`."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="cache.py",
        functions=("KVCache.__init__", "KVCache.crop", "KVCache.extend"),
        title="allocate, take slots, forget them",
        text="Allocate the cache once, and write its bookkeeping: capacity (by default the "
        "context; UserError unless it is from 1 to the context), kv, length. `extend` takes the "
        "next slots and returns the attention of the step that fills them; `crop` forgets all "
        "tokens from a position on and erases nothing. Given impossible arguments, both raise "
        "ValueError and change nothing.",
        points=25,
        hints=(
            "kv is (layers, 2, H_kv, capacity, D); the other sizes are in the config. The state is "
            "one number: self.length.",
            "Check first, change afterwards. extend refuses fewer than 1 token and more than fit "
            "the capacity; crop refuses a length below 0 or above what the cache holds. Each "
            "message gives both numbers.",
            "CachedAttention takes the tensor, the start and the end of the step. Which two "
            "values of self.length are these?",
        ),
        tests=(
            "tests/test_cache.py::test_the_cache_refuses_more_than_it_holds",
            "tests/test_cache.py::test_positions_go_on_where_the_cache_ends",
            "tests/test_cache.py::test_cropped_slots_are_never_read_again",
        ),
    ),
    Task(
        number=2,
        file="cache.py",
        functions=("CachedAttention.__init__",),
        title="what a step writes and sees",
        text="Compute what is the same in every layer of a step over positions start..end-1: the "
        "views `new` and `seen`, the `positions`, whether the step is `square`, and the `mask` "
        "where one is needed.",
        points=25,
        hints=(
            "kv is (layers, 2, H_kv, capacity, D), and slicing makes views: `new` is where this "
            "step writes, `seen` all that it reads.",
            "A step from position 0 is square: is_causal handles it. A single token sees "
            "everything and needs no mask. That leaves a chunk with a past: its row i sees start + "
            "i + 1 columns.",
            "Which columns does a position see? Of the two ranges that say so, which one must be "
            "a column, so that comparing them gives (T, end)?",
        ),
        tests=(
            "tests/test_cache.py::test_a_chunk_sees_all_before_it_and_nothing_after",
            "tests/test_cache.py::test_attention_reads_the_cache_in_place",
            "tests/test_cache.py::test_any_cutting_into_passes_gives_the_hidden_states_of_one_pass",
            "tests/test_cache.py::test_the_cache_may_have_a_dtype_of_its_own",
        ),
    ),
    Task(
        number=3,
        file="cache.py",
        functions=("CachedAttention.attend",),
        title="write, then attend",
        text="Write the keys and values of the new tokens into the cache, and return the attention "
        "of their queries over all keys seen. q, k, v and the result are (T, H, D); the cache has "
        "heads first, and a dtype of its own. Use `attention`, or compute scores, mask, softmax "
        "and sum by hand.",
        points=25,
        hints=(
            "Write before you read: a token sees itself.",
            "self.new[layer, 0] takes the keys and [layer, 1] the values, with T and H exchanged. "
            "self.seen[layer] holds both.",
            "`attention` takes four axes, (1, H, T, D), self.mask and self.square. By hand: a "
            "square step has no mask, but what must its queries not see?",
        ),
        tests=(
            "tests/test_cache.py::test_one_decode_step_is_explicit_attention_over_all_keys",
            "tests/test_engine.py::test_nothing_of_the_request_before_is_visible",
        ),
    ),
    Task(
        number=4,
        file="engine.py",
        functions=("Engine._tokens",),
        title="prefill once, then one token per step",
        text="Write stage 01's loop for a cache: the first step runs the prompt, each later one "
        "only the newest token. Every request reuses the cache, so it must begin empty. A stream "
        "raises RuntimeError if another request has taken the cache.",
        points=25,
        hints=(
            "Compare with stage01_forward/engine.py: self._forward gets only what is not in the "
            "cache yet.",
            "Before the loop, empty the cache and set its owner (self._owner, any new object). "
            "Before each step, check that the owner is still the same.",
            "Which tokens does the cache lack after sampling? The record counts the prompt as "
            "prefill in the first step and 1 decode token in each later one: which step is a "
            "prompt of one token?",
        ),
        tests=(
            "tests/test_engine.py::test_one_prefill_then_one_token_a_step",
            "tests/test_engine.py::test_prompt_and_answer_fill_the_context_and_no_more",
            "tests/test_engine.py::test_two_streams_at_once_are_an_error_not_a_wrong_text",
        ),
    ),
)
