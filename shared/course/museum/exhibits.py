"""The exhibits: bugs that real projects shipped, each as one edit of a stage's code.

An exhibit is a number, an edit whose old text occurs once in the reference and whose new text
occurs once afterwards, a symptom from symptoms.py that then prints something else, and tests that
fail. The museum's tests prove this for every exhibit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.errors import UserError

from . import symptoms


@dataclass(frozen=True)
class Exhibit:
    """One bug.

    title: the user's complaint. symptom: prints it, see symptoms.py.
    hint: where to look, not what to write. bug: the cause, in one line.
    story: what happened, and why it was hard to see. seen: where.
    tests: pytest ids within the stage of the tests that catch it; they start no process.
    """

    number: int
    stage: str
    file: str
    title: str
    old: str
    new: str
    symptom: Callable[[], None]
    hint: str
    bug: str
    story: str
    seen: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.number:02}"


def find(number: int) -> Exhibit:
    """Raises UserError if there is no such exhibit."""
    for exhibit in EXHIBITS:
        if exhibit.number == number:
            return exhibit
    raise UserError(f"There is no exhibit {number}: see `python -m shared.course.museum list`.")


EXHIBITS = (
    Exhibit(
        number=1,
        stage="stage02_kv_cache",
        file="cache.py",
        title=(
            "the story loses its thread at the second word, and the benchmark has never looked "
            "better"
        ),
        old="self.seen = kv[:, :, :, :end]  #",
        new="self.seen = kv[:, :, :, start:end]  #",
        symptom=symptoms.a_story,
        hint=(
            "The first new word is right, and all later ones are not. What does the second step "
            "read that the first one did not?"
        ),
        bug="the decode step attends to the newest token alone",
        story=(
            "A project announced fifteen times the speed of its naive baseline. In its decode "
            "step, the prompt's cache never reached attention: each new token saw itself and "
            "nothing before it. A step that reads nothing is very fast, so the number looked like "
            "success. The text raised no alarm: a model that sees a single token still continues "
            "with words that sound like language. The author found the bug later, and the README "
            "states what the fix cost: some 460 tok/s became 80. A comparison with the tokens of "
            "the engine without a cache shows it at once."
        ),
        seen="aman-singh315/LLM-Inference-Engine, at the commit of its article",
        tests=(
            "tests/test_cache.py::test_one_decode_step_is_explicit_attention_over_all_keys",
            "tests/test_cache.py::test_any_cutting_into_passes_gives_the_hidden_states_of_one_pass",
        ),
    ),
    Exhibit(
        number=2,
        stage="stage02_kv_cache",
        file="cache.py",
        title="the stories read well, but they differ from those of the engine without a cache",
        old="self.positions = torch.arange(start, end, device=kv.device)",
        new="self.positions = torch.arange(end - start, device=kv.device)",
        symptom=symptoms.a_story,
        hint=(
            "The cache holds the right keys. What else does the model get for each token, "
            "besides its id?"
        ),
        bug="positions begin at 0 again on every decode step",
        story=(
            "Without a cache, positions are 0, 1, 2, ... up to the length of the input, and that "
            "line of code is right for years. With a cache, the input is one token, so the same "
            "line gives position 0 to every new token. Nearly every first KV cache has this bug. "
            "It hides well: the prompt's keys are right, so names and things from the beginning "
            "still come up, and the text reads well. Only a comparison with the engine without a "
            "cache shows the difference."
        ),
        seen="a first KV cache, again and again",
        tests=(
            "tests/test_cache.py::test_positions_go_on_where_the_cache_ends",
            "tests/test_cache.py::test_any_cutting_into_passes_gives_the_hidden_states_of_one_pass",
        ),
    ),
    Exhibit(
        number=3,
        stage="stage02_kv_cache",
        file="cache.py",
        title="after the prompt, the same few words over and over",
        old="self.mask, self.square)",
        new="self.mask, self.mask is None)",
        symptom=symptoms.a_story,
        hint="A causal mask is a triangle. Where is its corner with one query and fifty keys?",
        bug=(
            "is_causal, which assumes as many queries as keys, is used for a single query over "
            "many keys"
        ),
        story=(
            "PyTorch's is_causal=True draws its triangle from the first row and the first column. "
            "Where queries and keys are the same tokens, that is the causal mask. On a decode "
            "step, the only query is the last token, and the triangle's first row lets it see the "
            "first key and nothing else. The pull request that brought a KV cache to a "
            "vision-language model in pure PyTorch names this flag as one of two things to get "
            "right: on for a whole sequence, off for a single query. No shape is wrong, and "
            "nothing raises an error; one sentence of the documentation defines where the triangle "
            "begins."
        ),
        seen="nanoVLM, pull request 69",
        tests=(
            "tests/test_cache.py::test_one_decode_step_is_explicit_attention_over_all_keys",
            "tests/test_cache.py::test_any_cutting_into_passes_gives_the_hidden_states_of_one_pass",
        ),
    ),
    Exhibit(
        number=4,
        stage="stage01_forward",
        file="generation.py",
        title="a long conversation ends with a crash instead of an answer",
        old="full = len(row.prompt) + length >= config.n_positions",
        new="full = length >= config.n_positions",
        symptom=symptoms.the_end_of_the_context,
        hint=(
            "The content does not matter, only the length. Which code decides that an answer has "
            "ended?"
        ),
        bug="the context limit is compared with the answer alone: the prompt is not counted",
        story=(
            "GPT-2 has 1,024 positions and not one more. Wrappers that look only at max_tokens "
            "work in every demonstration, and fail for the first user who talks long enough: with "
            "an index error from deep inside the embedding, or, where positions are taken modulo "
            "the context, with no error and a text that forgets its beginning. The bug is hard to "
            "see because no test of ordinary length comes near it."
        ),
        seen="wrappers around GPT-2",
        tests=("tests/test_engine.py::test_prompt_and_answer_fill_the_context_and_no_more",),
    ),
    Exhibit(
        number=5,
        stage="stage03_batching",
        file="cache.py",
        title=(
            "in a batch, the longest prompt gets the right answer and the shorter ones get odd ones"
        ),
        old="self.positions = (columns[start:] - padding[:, None]).clamp(0, last_position)  "
        "# (B, T)",
        new="self.positions = columns[start:].clamp(0, last_position).expand(len(padding), "
        "-1)  # (B, T)",
        symptom=symptoms.a_batch,
        hint=(
            "The longest row has no padding. What must change for a shorter row, so that its "
            "padding does not count?"
        ),
        bug=(
            "left padding is counted: positions are 0, 1, 2, ... from the first column instead "
            "of the first real token"
        ),
        story=(
            "To batch prompts of different lengths, short ones are padded on the left. If "
            "positions are then counted from the left edge, a short prompt's first word lands at "
            "position 7 or 20, where the model has never seen a beginning. The output is fluent "
            "but worse, and only in rows shorter than the longest; with one prompt, or prompts of "
            "equal length, all is well. Users of the most popular library ran into this for years, "
            "and its answer has become a formula: position is the cumulative sum of the mask, "
            "minus one."
        ),
        seen="transformers, issues 3021 and 21080 and pull request 7552; nnsight, pull request 673",
        tests=(
            "tests/test_cache.py::test_positions_are_the_cumulative_mask_minus_one",
            "tests/test_engine.py::test_a_batch_gives_the_tokens_of_one_at_a_time",
        ),
    ),
    Exhibit(
        number=6,
        stage="stage03_batching",
        file="cache.py",
        title="in a batch, the longest prompt is answered well, and the shorter ones fall apart",
        old="        self.mask = ((columns <= queries) & real | (columns == queries))[:, "
        "None]  # (B, 1, T, end)",
        new="        self.mask = None\n        if end - start > 1:  # (B, 1, T, end)\n"
        "            self.mask = ((columns <= queries) & real | (columns == queries))[:, None]",
        symptom=symptoms.a_batch,
        hint=(
            "The first word of every answer is right. What did the step that made it have that the "
            "later ones lack?"
        ),
        bug="the padding mask is applied at prefill and dropped on decode steps",
        story=(
            "On a decode step, every row has one query, which may see everything before it. So "
            "causality needs no mask, and the padding mask is dropped along with the causal one. "
            "From then on, a short row attends to its padding, the more so the shorter its prompt. "
            "The longest row has none and stays right; here, most of the shortest row is padding, "
            "and its text falls apart after the first word. A few padding tokens among hundreds of "
            "real ones do less harm: the answers are only a little worse, and the bug is hard to "
            "see. One project applied the mask only in the first step, and noticed worse answers "
            "for batches of unlike prompts. In another, the mask never reached one model's "
            "attention: the same prompt, alone and in a batch, gave different scores."
        ),
        seen="OpenNMT-py, pull request 2532; similarly mlx-lm, issue 1906",
        tests=(
            "tests/test_cache.py::test_every_pass_hides_the_padding",
            "tests/test_engine.py::test_a_batch_gives_the_tokens_of_one_at_a_time",
        ),
    ),
    Exhibit(
        number=7,
        stage="stage03_batching",
        file="cache.py",
        title="on another machine, the same batch ends with scores that are not numbers",
        old="self.mask = ((columns <= queries) & real | (columns == queries))[:, None]",
        new="self.mask = ((columns <= queries) & real)[:, None]",
        symptom=symptoms.a_batch_by_hand,
        hint="Softmax divides by a sum. Which query could have nothing to sum over?",
        bug="a query of padding sees no key at all, and the softmax of nothing is NaN",
        story=(
            "A query in the padding has nothing before it but padding. If the mask hides all of "
            "that, every score is minus infinity, and softmax computes 0/0. That query's output is "
            "never read, so is it harmless? No: the next layer makes keys and values from it, and "
            "a weight of zero times NaN is NaN, so the whole row is lost. The bug is hard to see "
            "because some kernels return zeros for such a query and others NaN: it works on the "
            "author's machine."
        ),
        seen="several projects that batch with padding",
        tests=(
            "tests/test_cache.py::test_no_query_is_left_with_nothing_to_see",
            "tests/test_cache.py::test_a_plain_softmax_makes_no_nan_of_padding",
        ),
    ),
    Exhibit(
        number=8,
        stage="stage03_batching",
        file="engine.py",
        title="some stories in a batch break off in the middle of a sentence",
        old="        while alive:\n",
        new="        while len(alive) == len(prompts):\n",
        symptom=symptoms.answers_that_end,
        hint="One answer is whole. Compare the lengths of the others with its length.",
        bug="the first row to end ends the whole batch",
        story=(
            "A loop over a batch must end at some point, and 'when a row generates end-of-text' is "
            "the first condition that comes to mind. The other common mistake, never to check, "
            "lets rows that have ended go on generating. Where all answers have the same length, "
            "as in a benchmark with a fixed number of tokens, neither shows. Each row needs an end "
            "of its own, and the batch ends with the last."
        ),
        seen="several projects that batch",
        tests=("tests/test_engine.py::test_end_of_text_in_one_row_ends_that_row_alone",),
    ),
    Exhibit(
        number=9,
        stage="stage04_continuous",
        file="scheduler.py",
        title="all answers are right, and the server is no faster for many users than for one",
        old="while self.waiting and self.free_slots:",
        new="while self.waiting and not self.running:",
        symptom=symptoms.slots,
        hint=(
            "No test of the text can see this one. Look at how many rows each step has, and at "
            "when requests are admitted."
        ),
        bug=(
            "a request is admitted only when none runs: it is called batching, but requests are "
            "served one after another"
        ),
        story=(
            "Two projects that claim continuous batching had no batch at all. One made a forward "
            "pass for each request in a loop, the other ran each request to its end before it "
            "looked at the next. Every answer was right, and there was a queue, a scheduler and a "
            "class named after batching. Neither the text nor a name proves a batch. The record of "
            "how many rows each forward pass had does."
        ),
        seen=(
            "SuStackx0/llm-serving-engine and achi9629/llm-inference-engine, at their published "
            "versions"
        ),
        tests=(
            ("tests/test_contract.py::TestSlots::test_the_whole_record_of_a_small_crowd"),
            "tests/test_contract.py::TestSlots::test_the_whole_record_of_a_small_crowd",
        ),
    ),
    Exhibit(
        number=10,
        stage="stage04_continuous",
        file="cache.py",
        title="the same question gets a different answer when other requests run beside it",
        old="if not causal and (count > 1 or min(ends) < end):",
        new="if not causal and count > 1:",
        symptom=symptoms.neighbours,
        hint=(
            "Alone, the answer is right. Neighbours of unlike lengths attend in one call: how far "
            "does each of them see?"
        ),
        bug=(
            "a short sequence sees its slot beyond its own end: an earlier sequence's keys, or "
            "zeros"
        ),
        story=(
            "Slots are reused, and the memory after a sequence's last token is unused, or holds an "
            "earlier sequence. Everything depends on each row's own length: if one length is used "
            "for a whole batch, or the earlier sequence's length stays, a row reads keys that are "
            "not its own. The bug shows only with neighbours of unlike lengths, and in a server it "
            "makes one user's text depend on another's. With the slot wiped, as here, the row "
            "reads zeros. That is harder still to see, since a zero key has a weight too."
        ),
        seen="several engines with slots",
        tests=(
            "tests/test_cache.py::test_groups_of_a_pass",
            "tests/test_cache.py::test_any_packing_is_explicit_attention_of_each_sequence",
        ),
    ),
    Exhibit(
        number=11,
        stage="stage04_continuous",
        file="request.py",
        title="an answer that had to be computed a second time goes wrong",
        old="return self.token_count - self.computed",
        new="return 1 if self.output.token_ids else len(self.output.prompt_ids) - self.computed",
        symptom=symptoms.computed_again,
        hint=(
            "A request has generated tokens and then lost its memory: what must it compute? And "
            "what does the code assume?"
        ),
        bug="whether a request is in prefill or decode is inferred from whether it has an answer",
        story=(
            "A request without an answer is in prefill, and one with an answer decodes a token per "
            "step. In a simple engine that is always true, so the code tests for an answer when it "
            "means the phase. Then memory runs out, and a preempted request comes back with an "
            "answer and nothing computed. It is taken for a decode, computes one token, and "
            "attends to memory that was never written. This takes a full machine, and then looks "
            "like a poor model. One engine used this test when it packed a request for its other "
            "GPUs: with one GPU all was well; with several, a request that came back arrived "
            "without its tokens."
        ),
        seen="nano-vllm, issue 144 and pull request 103",
        tests=("tests/test_request.py::test_remaining_is_what_there_is_less_what_is_computed",),
    ),
    Exhibit(
        number=12,
        stage="stage05_paged",
        file="blocks.py",
        title="every few tokens, a request briefly holds more memory than its tokens need",
        old="return -(-tokens // self.block_size)",
        new="return tokens // self.block_size + 1",
        symptom=symptoms.block_borders,
        hint="Count at the border: how many blocks do 7, 8 and 9 tokens need, if a block holds 8?",
        bug=(
            "a block is taken one token early: as soon as the last one is full, before any token "
            "needs room"
        ),
        story=(
            "'A new block every 16 tokens' can be written in several ways that differ by one, and "
            "which is right depends on whether the token that was just sampled already counts. If "
            "the block is taken too late, its first token overwrites another's or falls off the "
            "table. If it is taken too early, memory is wasted, requests that would have fitted "
            "are preempted, and a full prompt is not admitted. One small engine asked for a free "
            "block as soon as the last one was full, a token early, and did not ask when it needed "
            "one. Another engine gets it right, yet four of its readers opened issues, and others "
            "pull requests, because they thought it wrong: they had counted that token at another "
            "moment. So state in the code when the token is counted, and test the border itself."
        ),
        seen=(
            "MinivLLM, issue 75 and pull request 85; disputed, though correct, in nano-vllm, "
            "issues 30, 91, 150 and 240"
        ),
        tests=("tests/test_engine.py::test_the_whole_memory_of_a_small_crowd",),
    ),
    Exhibit(
        number=13,
        stage="stage05_paged",
        file="scheduler.py",
        title="a question that was asked before brings the engine down",
        old="known = request.token_count - 1  # the last token is always computed: it gives "
        "the next one",
        new="known = request.token_count  # tokens that the cache may hold",
        symptom=symptoms.asked_twice,
        hint=(
            "The whole prompt is found in the cache. What is left to compute, and what is the next "
            "token sampled from?"
        ),
        bug=(
            "a prompt that is found whole leaves nothing to compute, and so nothing to sample from"
        ),
        story=(
            "A prefix cache that works too well. If every block of a prompt is found, zero tokens "
            "remain; but the next token is sampled from the last token's hidden state, which is "
            "not kept. The engine runs a step of length zero, or fails in it, or waits forever for "
            "a request that has nothing to do. It happens only to prompts whose length is a "
            "multiple of the block size, asked a second time: with blocks of 16, that is one "
            "prompt in sixteen, so it looks like chance."
        ),
        seen="nano-vllm, issues 114 and 144, pull request 199",
        tests=("tests/test_scheduler.py::test_a_common_beginning_is_found",),
    ),
    Exhibit(
        number=14,
        stage="stage05_paged",
        file="blocks.py",
        title="a question that was asked long ago is answered with another user's story",
        old="            self.unpublish(block)\n            self.evictions += 1",
        new="            self.digests[block] = None\n            self.evictions += 1",
        symptom=symptoms.a_small_prefix_cache,
        hint=(
            "Two records say which block holds what. Are both updated when a block is taken for "
            "other tokens?"
        ),
        bug="an evicted block can still be found by the digest of its old content",
        story=(
            "The prefix cache is a map from the digest of some tokens to a block, and each block "
            "knows its digest. When a block is evicted and used for other tokens, both must "
            "forget. If only the block does, the map still leads to it, and a request that begins "
            "like the old one adopts memory full of another conversation. Nothing crashes. It "
            "takes a full cache and an old prompt that comes back, so it happens after hours and "
            "never in a test; and what leaks is another user's text. The engine in the report had "
            "a second guard: it compares the tokens themselves before it adopts a block, so the "
            "old entries only piled up."
        ),
        seen="nano-vllm, issue 163",
        tests=(
            "tests/test_blocks.py::"
            "test_the_least_recently_used_block_is_evicted_first_and_after_the_free_ones",
        ),
    ),
    Exhibit(
        number=15,
        stage="stage05_paged",
        file="scheduler.py",
        title="an answer that was preempted comes back as nonsense, or not at all",
        old="            request.computed = 0\n            self.counts.recomputed += 1",
        new="            self.counts.recomputed += 1",
        symptom=symptoms.resumed,
        hint="Between preemption and resumption, what does the request's state claim is in memory?",
        bug=(
            "a preempted request keeps its old count of computed tokens, though its memory now "
            "holds fewer"
        ),
        story=(
            "A preempted request gives up its blocks, and when it comes back, some of them may "
            "still be in the prefix cache. Three numbers matter then: what it had computed, what "
            "was found, and what it must compute now. One engine worked out the third before it "
            "looked up the second: the step began after the found tokens but was as long as if "
            "none had been found, so it ran past the last token, with an IndexError under heavy "
            "load. Here the first number stands where the second should: the request resumes at a "
            "length that its memory does not have, with a hole in between. Both bugs need a "
            "preemption and a hit at once, which takes a full machine and a bit of bad luck."
        ),
        seen="nano-vllm, pull requests 211 and 233",
        tests=(
            (
                "tests/test_scheduler.py::"
                "test_without_chunks_a_recompute_longer_than_the_budget_still_runs"
            ),
        ),
    ),
    Exhibit(
        number=16,
        stage="stage05_paged",
        file="blocks.py",
        title="after one question, the next one with the same beginning ends with an error",
        old="            if self.digests[block] is None:\n                "
        "self.free.append(block)\n            else:\n"
        "                self.cached[block] = None",
        new="            self.free.append(block)",
        symptom=symptoms.a_block_given_back,
        hint=(
            "A block can be free, cached or owned. In how many of these states is a block after "
            "its request has ended?"
        ),
        bug="a block is freed while the prefix cache still points at it",
        story=(
            "Several places may refer to a block: the tables of requests, and the prefix cache, "
            "which finds it for the next one. Code that frees it must account for all of them. One "
            "engine, about to cache a prefix that was cached already, freed the request's own copy "
            "while the request's table still pointed there: its later steps read memory that "
            "others might have taken. Here the cache goes on pointing at a block on the free list: "
            "the next request finds its beginning there, and the one after takes the same block as "
            "a free one. Reference counts look right all the time, because each of the two ways to "
            "get a block keeps its own books. Here the pool refuses to share a free block, so the "
            "bug fails loudly."
        ),
        seen="mini-sglang, pull request 142",
        tests=(
            (
                "tests/test_blocks.py::"
                "test_a_published_block_is_kept_when_no_table_holds_it_and_can_be_shared_again"
            ),
        ),
    ),
    Exhibit(
        number=17,
        stage="stage05_paged",
        file="sanitizer.py",
        title="the integrity check has been green for months, and memory keeps shrinking",
        old='        raise SanitizerError(f"step {self.scheduler.step}{where}: {what}; '
        'sequences: {names}")',
        new='        message = f"step {self.scheduler.step}{where}: {what}; sequences: {names}"\n'
        "        assert message, SanitizerError(message)",
        symptom=symptoms.a_loss_to_be_found,
        hint="Has this check ever been seen to fail?",
        bug="the integrity check finds the fault, and does not raise",
        story=(
            "An engine checks the integrity of its memory whenever it is idle. It added up the "
            "free pages and the cached ones, then asked the prefix cache to check itself, and the "
            "body of that method was `pass`. It never failed. A check that has never been seen to "
            "fail is a comment. So each rule of a sanitizer needs a test that breaks the rule and "
            "expects the error."
        ),
        seen="mini-sglang, issue 149",
        tests=("tests/test_sanitizer.py::test_every_rule_when_broken_is_named",),
    ),
    Exhibit(
        number=18,
        stage="stage05_paged",
        file="scheduler.py",
        title="a reader receives the beginning of the story twice",
        old="            request.computed = 0\n            self.counts.recomputed += 1",
        new="            request.computed = 0\n"
        "            request.output.token_ids.clear()\n"
        "            self.counts.recomputed += 1",
        symptom=symptoms.what_the_client_has_heard,
        hint=(
            "When a request loses its memory, what may be dropped, and what has already been sent?"
        ),
        bug="preemption clears tokens that the client has already received",
        story=(
            "To preempt a request by recomputation, one engine reset it to its prompt, the "
            "simplest valid state. But its tokens were already on their way to the client. With "
            "greedy sampling the stream repeats itself; with a temperature, the second telling is "
            "another story. Nothing is wrong inside the engine, and its final output is whole: "
            "only the stream shows the bug. Generated tokens must stay: they become part of what "
            "is computed again."
        ),
        seen="SuStackx0/llm-serving-engine, the preemption of its scheduler",
        tests=(
            "tests/test_scheduler.py::"
            "test_without_chunks_a_recompute_longer_than_the_budget_still_runs",
            "tests/test_scheduler.py::test_the_most_junior_gives_its_memory_back",
        ),
    ),
    Exhibit(
        number=19,
        stage="stage05_paged",
        file="scheduler.py",
        title="a story changes when another request continues the same beginning",
        old='plan.moves.append(Move("copy", *table.replace(known)))',
        new="table.replace(known)",
        symptom=symptoms.a_fork,
        hint=(
            "Two sequences share a block until one of them writes. What must be in the writer's "
            "own block by then?"
        ),
        bug=(
            "before the first write to a shared block, a new one replaces it, and nothing is "
            "copied into it"
        ),
        story=(
            "A fork shares its parent's blocks, and the last one is not full. The next writer must "
            "get a block of its own, with a copy of the shared one's content. Engines differ in "
            "what they leave out: some write in place, which changes the sibling's past; others "
            "put in an empty block, which loses the writer's own past. Most engines have no test "
            "for this: it takes a fork, a block that is not full, and a look at both texts."
        ),
        seen="hardly any engine tests it",
        tests=(
            (
                "tests/test_scheduler.py::"
                "test_a_copy_comes_from_the_parents_last_block_and_waits_for_one_of_its_own"
            ),
        ),
    ),
    Exhibit(
        number=20,
        stage="stage05_paged",
        file="scheduler.py",
        title="all memory is free, and yet no request is admitted",
        old="needed = self.pool.blocks_for(request.token_count) - len(blocks)",
        new="most = len(request.output.prompt_ids) + request.sampling.max_tokens\n"
        "        needed = self.pool.blocks_for(most) - len(blocks)",
        symptom=symptoms.who_is_let_in,
        hint=(
            "What must be free before a request may run? Memory that most requests will never "
            "need is not the answer."
        ),
        bug=(
            "a request is admitted only when memory is free for the longest answer that it may have"
        ),
        story=(
            "Most answers are far shorter than they may be. A scheduler that reserves memory for "
            "the longest possible answer admits a few requests, leaves most of the memory empty, "
            "and keeps the rest waiting: forever, if the longest answer does not fit at all. One "
            "that reserves nothing must preempt running requests when memory is short, and if it "
            "preempts the wrong ones, they preempt each other and none makes progress. One engine "
            "had the first problem: a pull request showed what its cautious estimate cost in empty "
            "memory and in waiting, and another proposed a bolder estimate, with running requests "
            "preempted where it fails. What works: room for the tokens that exist now, a small "
            "reserve, and an order in which the earliest arrival is never preempted."
        ),
        seen="mini-sglang, pull requests 81 and 97",
        tests=("tests/test_scheduler.py::test_the_watermark_stays_free_beside_others",),
    ),
    Exhibit(
        number=21,
        stage="stage06_serving",
        file="text.py",
        title="letters with accents, and all of Chinese, arrive as question marks",
        old="else self._decoder.push(token_id)",
        new="else self._decoder.push(token_id) + self._decoder.flush()",
        symptom=symptoms.letters,
        hint="A token is a few bytes. Is it a few letters?",
        bug="every token is decoded by itself, though a character may be spread over several",
        story=(
            "GPT-2's tokens are strings of bytes, and a character in UTF-8 takes up to four bytes. "
            "A server that streams decode([token]) for each token sends U+FFFD for each piece of a "
            "character. English never shows the bug; the first emoji does. Three servers had it. "
            "An answer that is decoded whole, at its end, is right, so tests that do not stream "
            "are green."
        ),
        seen=(
            "vllm-mlx, pull request 109; exo, pull request 1691; tt-inference-server, issue 2586 "
            "and pull request 2594"
        ),
        tests=("tests/test_text.py::test_a_text_is_sent_unchanged",),
    ),
    Exhibit(
        number=22,
        stage="stage06_serving",
        file="app.py",
        title="clients that want one answer in one piece cannot read what they get",
        old="        if streams:\n",
        new="        if streams is not None:\n",
        symptom=symptoms.no_stream,
        hint="A client has three ways to set `stream`: true, false, and not at all.",
        bug='"stream": false is ignored: every answer is a stream',
        story=(
            "A server answered every request with a stream. The official client sends stream: "
            "false, or nothing at all, waits for a JSON body, and gets a list of events that it "
            "cannot parse. A client that streams sees nothing wrong. A flag with three states, "
            "true, false and absent, is just where `if flag is not None` slips in."
        ),
        seen="mini-sglang, issue 51 and pull requests 69 and 125",
        tests=("tests/test_inside.py::test_an_answer_is_a_stream_only_where_one_was_asked_for",),
    ),
    Exhibit(
        number=23,
        stage="stage06_serving",
        file="app.py",
        title="users close the window, and the server goes on computing",
        old="            return await unless_gone(request, answer())\n",
        new="            return await answer()\n",
        symptom=symptoms.a_client_that_leaves,
        hint=(
            "A stream notices that its client has left when it sends. What notices where nothing "
            "is sent until the end?"
        ),
        bug="the server never checks whether the client of a whole answer is still connected",
        story=(
            "A web framework runs a request's handler to its end, whether a client is waiting or "
            "not. For a page that costs a millisecond, that does not matter; an answer of a "
            "thousand tokens holds its memory and its share of every step for half a minute. Users "
            "who wait too long reload, and then two answers are computed. Several servers had this "
            "bug, and some lost the slot for good. No answer shows it, only memory that is owned "
            "while no client is connected."
        ),
        seen="several servers",
        tests=("tests/test_inside.py::test_a_client_that_leaves_before_its_answer_ends_it",),
    ),
    Exhibit(
        number=24,
        stage="stage06_serving",
        file="async_engine.py",
        title="after a few timeouts, the server has no room left",
        old="            ticket.reason = ticket.reason or reason\n            "
        "self._command(partial(self._abort, ticket.id))",
        new="            self._end(ticket, reason, None)",
        symptom=symptoms.too_late,
        hint="The client has its answer. What else must end?",
        bug="a request that timed out ends for its client, but is never aborted in the engine",
        story=(
            "A server sent 504 in time and went on generating: the handler stopped waiting, but "
            "did not abort the request in the engine. Its slot stayed taken until the answer's "
            "natural end, and a client that retried, as good clients do, took the next one. So the "
            "time limit made an overload worse. From outside, all is right: the status, the "
            "message, the time."
        ),
        seen="achi9629/llm-inference-engine, in the versions that were read",
        tests=(
            "tests/test_async_engine.py::test_an_abort_is_heard_within_two_steps",
            "tests/test_inside.py::test_a_late_answer_ends_in_the_engine_too",
        ),
    ),
    Exhibit(
        number=25,
        stage="stage06_serving",
        file="service.py",
        title=(
            "now and then every stream stops for a moment, and the load balancer takes the "
            "server for dead"
        ),
        old="                return await asyncio.to_thread(self.loaded.tokenizer.encode, text)\n",
        new="                return self.loaded.tokenizer.encode(text)\n",
        symptom=symptoms.is_it_alive,
        hint="One thread serves all connections. What does it do with a very long text?",
        bug="long texts are tokenized on the event loop",
        story=(
            "An event loop serves all connections in turn, so a computation of 300 ms on it makes "
            "all of them wait for 300 ms: streams, new requests, and /health. An orchestrator may "
            "then restart a server that is only busy. `async def` does not help, because a "
            "computation never awaits, and a thread helps only if the library releases Python's "
            "lock. With one user the bug is hard to see: that user waits for the answer anyway."
        ),
        seen=(
            "achi9629/llm-inference-engine, whose loop on the event loop runs each request to "
            "its end; several servers"
        ),
        tests=("tests/test_inside.py::test_long_texts_are_tokenized_off_the_event_loop",),
    ),
    Exhibit(
        number=26,
        stage="stage06_serving",
        file="writer.py",
        title="half of an answer arrives, and every program takes it for a whole one",
        old="        except Exception as error:  # the status is sent already: report the "
        "error in the stream\n"
        "            events.append(self.fail(error))\n"
        '        return b"".join(events) + (DONE if self.ended else b"")\n',
        new="        except Exception:\n            self.ended = True\n"
        '        return b"".join(events)\n',
        symptom=symptoms.half_an_answer,
        hint="The status was sent long ago. How can a client tell the stream's end from a break?",
        bug="a stream that fails just ends, without an error, a finish reason or [DONE]",
        story=(
            "When a stream breaks, the status 200 has long been sent. If the server just closes "
            "the connection, the official Python client ends its loop as if the answer were "
            "complete: measured with openai 3.52.0, it raises nothing for a stream without a "
            "finish reason and without [DONE]. So programs and benchmarks count a truncated answer "
            "as a success. Only the stream itself can report the failure, with an error event."
        ),
        seen="measured with the official client, openai 3.52.0",
        tests=("tests/test_inside.py::test_a_stream_that_fails_has_an_error_event",),
    ),
    Exhibit(
        number=27,
        stage="stage07_loadtest",
        file="load.py",
        title="a server that batches is measured, and batching seems to buy nothing",
        old="group.create_task(self._user(turns))",
        new="await self._user(turns)",
        symptom=symptoms.in_hand,
        hint="How many requests does the server see at once, and how many users should there be?",
        bug=(
            "the users take turns: one of them sends all requests, and the rest find nothing "
            "left to send"
        ),
        story=(
            "A table said that one engine was eleven times as fast as another. The slow side got "
            "one request at a time and the fast side all at once: the ratio was that of batching, "
            "which both could do. The same mistake has a quieter form in the load generator: with "
            "a pool of one connection, or users who wait for each other, the batch to be measured "
            "never forms. So count the requests in flight at the server, and report them beside "
            "the result."
        ),
        seen="achi9629/llm-inference-engine, its comparison '11.1x'",
        tests=("tests/test_load.py::test_a_closed_loop_has_as_many_requests_in_hand_as_users",),
    ),
    Exhibit(
        number=28,
        stage="stage07_loadtest",
        file="workload.py",
        title="in the load test, continuous batching is hardly better than static batching",
        old="return 0, prompt, answer",
        new="return 0, prompt, Lengths(ANSWER, ANSWER)",
        symptom=symptoms.lengths,
        hint=(
            "What does an engine gain by letting requests come and go, if all of them end together?"
        ),
        bug="every request asks for the same number of tokens",
        story=(
            "A benchmark of continuous batching found a gain of 0.8 %. All its requests asked for "
            "exactly the same number of tokens, so all rows of a batch ended in the same pass, and "
            "no slot came free early to be filled. The number was true, and said nothing about the "
            "engine. A workload must have what the optimization is for; run one without it as a "
            "control."
        ),
        seen="achi9629/llm-inference-engine, its benchmark of continuous batching",
        tests=("tests/test_workload.py::test_mixed_lengths_are_lognormal_and_bounded",),
    ),
    Exhibit(
        number=29,
        stage="stage07_loadtest",
        file="load.py",
        title="the load generator froze for half a second, and its report does not show it",
        old="group.create_task(self._one(index, ask, start))",
        new="group.create_task(self._one(index, ask, self.clock()))",
        symptom=symptoms.a_frozen_client,
        hint=(
            "When does a user's wait begin: when the request was due, or when the program sent it?"
        ),
        bug=(
            "latencies count from when a request was sent, not from when it was due: coordinated "
            "omission"
        ),
        story=(
            "A load generator that falls behind sends its requests late, and if it starts the "
            "clock only then, no number contains its own delay. The same happens when the server "
            "is slow and the generator waits for it: the requests that would have suffered are "
            "never sent. Gil Tene named this coordinated omission, and wrote a load generator to "
            "show that a second of silence can vanish from a 99th percentile. Times must count "
            "from a schedule that was made before the first request."
        ),
        seen=(
            "wrk2, which was written for it; arXiv 2605.24217 finds it in benchmarks of language "
            "models"
        ),
        tests=("tests/test_ruler.py::test_pitfall_latencies_from_the_late_send",),
    ),
    Exhibit(
        number=30,
        stage="stage07_loadtest",
        file="client.py",
        title="one of two servers is faster, and generates less",
        old="elif record.completion_tokens != record.asked_tokens:",
        new="elif record.completion_tokens is None:",
        symptom=symptoms.who_says_less,
        hint="Both sides were asked for the same. Did both give it?",
        bug="an answer with fewer tokens than were asked for counts as a success",
        story=(
            "A table compared two engines, and in the data beneath it, one side had generated 133 "
            "tokens and the other 80. Fewer tokens finish sooner, so the shorter side wins every "
            "latency. The cause is a stop token that one side obeys, a default limit, or a failure "
            "that looks like an end, and the counts are not printed. A load test must request an "
            "exact number of tokens, check it, and count everything else as a failure."
        ),
        seen="SuStackx0/llm-serving-engine, the table of its README",
        tests=("tests/test_ruler.py::test_pitfall_two_sides_that_say_different_numbers_of_tokens",),
    ),
    Exhibit(
        number=31,
        stage="stage08_llama",
        file="rope.py",
        title="a Llama with converted weights goes wrong from the second token on",
        old="first, second = x.chunk(2, dim=-1)",
        new="first, second = x[..., ::2], x[..., 1::2]",
        symptom=symptoms.a_page_and_a_model,
        hint=(
            "The first position is right. By what angle does position 0 turn, and by what do the "
            "others?"
        ),
        bug="rotation pairs neighbouring channels, but the weights are for pairs half a head apart",
        story=(
            "There are two conventions. Meta's files turn channels 2i and 2i + 1 together; Hugging "
            "Face's turn i and i + D / 2, and a converter permutes the rows of the query and key "
            "weights so that both give the same scores. Under the wrong convention, every shape "
            "fits and the first token is right, because position 0 turns nothing; then the text "
            "dissolves. The bug came back when models got fewer key heads than query heads: the "
            "keys' rows were permuted with the number of query heads."
        ),
        seen="llama.cpp, issue 3364; transformers, pull request 31788",
        tests=("tests/test_layers.py::test_a_pair_turns_as_a_complex_number",),
    ),
    Exhibit(
        number=32,
        stage="stage08_llama",
        file="model.py",
        title="one model of the family answers well, and another, read the same way, at random",
        old='state.setdefault("lm_head.weight", state["embed_tokens.weight"])',
        new='state["lm_head.weight"] = state["embed_tokens.weight"]',
        symptom=symptoms.a_page_and_a_model,
        hint="The hidden states are the page's. What turns them into scores of tokens?",
        bug="the output layer is the embedding even where the file has one of its own",
        story=(
            "In small models the output layer is the embedding again, which saves a quarter of the "
            "weights; in larger ones it has weights of its own. A loader written for the first "
            "kind always ties them. Then nothing is missing and every shape fits: one tensor is "
            "simply never read. The reverse is as bad: a head that is absent stays random. "
            "Checking every tensor's name catches the second bug, not the first."
        ),
        seen="mlx-examples, pull request 564",
        tests=("tests/test_transformers.py::test_logits_are_those_of_transformers",),
    ),
    Exhibit(
        number=33,
        stage="stage08_llama",
        file="rope.py",
        title="short prompts are answered well, and long ones lose the order of their words",
        old="positions[..., None, None].float() * frequencies",
        new="positions[..., None, None].bfloat16() * frequencies",
        symptom=symptoms.far_positions,
        hint="What is the first whole number that bfloat16 cannot represent?",
        bug="the angles are computed from positions in bfloat16, which cannot count past 256",
        story=(
            "bfloat16 has eight bits of precision: above 256 it has every second whole number, "
            "above 512 every fourth. A model that is cast to it, buffers and all, computes its "
            "angles in it too, and then neighbours have the same position. Scores at the beginning "
            "of a text are right, so short tests pass; with long texts the model is a little "
            "worse, and no error says why. Nothing in the forward pass names the dtype: one cast "
            "of the whole model, far away, decides it."
        ),
        seen="transformers, pull request 29285; vLLM, pull request 863",
        tests=("tests/test_config.py::test_rotation_keeps_lengths_and_sees_distances_alone",),
    ),
    Exhibit(
        number=34,
        stage="stage08_llama",
        file="rope.py",
        title="Llama 3.2 is right on every test prompt and useless with a book",
        old='if rope.kind in ("default", "dynamic"):',
        new='if rope.kind in ("default", "dynamic", "llama3"):',
        symptom=symptoms.a_stretched_context,
        hint="Which pairs turn at all within a short prompt?",
        bug="the rule that stretches the context of Llama 3.1 and 3.2 is ignored",
        story=(
            "Llama 3.1 came with a new entry in config.json, and loaders that did not know it "
            "ignored it. The stretched pairs are the slow ones, which hardly move in a few hundred "
            "tokens, so all short prompts looked right, though perplexity was a little worse. Long "
            "ones fell apart. Two of the most popular projects shipped the bug in the first days. "
            "A loader must refuse an option that it does not know, not skip it."
        ),
        seen="llama.cpp, pull request 8676; unsloth, issue 6197",
        tests=(
            "tests/test_config.py::test_llama_3_2_keeps_blends_and_stretches_pairs",
            "tests/test_layers.py::test_a_stretched_context_slows_the_slow_pairs",
        ),
    ),
    Exhibit(
        number=35,
        stage="stage08_llama",
        file="config.py",
        title="the loader refuses a good model: its matrices have the wrong shape",
        old='head_dim = fields.size("head_dim", width // heads)',
        new="head_dim = width // heads",
        symptom=symptoms.two_configs,
        hint="How wide is a head? Two options could say, and they need not agree.",
        bug="a head is assumed to be C / H channels wide, and head_dim is not read",
        story=(
            "For years a head was C / H channels wide, so code divides where it should read. "
            "Mistral Nemo has 32 heads of 128 in a stream of 5,120, and Qwen3-0.6B 16 heads of 128 "
            "in one of 1,024. Here the loader notices, because it checks shapes. Where the "
            "projection is reshaped to whatever fits, the heads are cut at the wrong places, and "
            "the scale of the scores is wrong too."
        ),
        seen="candle, issue 2358; mistral.rs, issue 643",
        tests=("tests/test_config.py::test_a_qwen_is_read_from_its_options",),
    ),
    Exhibit(
        number=36,
        stage="stage08_llama",
        file="config.py",
        title="a Qwen forgets what was said more than a few thousand tokens ago",
        old='if not fields.flag("use_sliding_window") or fields',
        new='if "sliding_window" not in fields.values or fields',
        symptom=symptoms.two_configs,
        hint="The file has a number for the window. Does it also say that there is one?",
        bug="the sliding window is used although use_sliding_window is false",
        story=(
            "Qwen2's config.json has sliding_window, like Mistral's, and max_window_layers, and a "
            "third option that switches both off. A reader written for Mistral takes the number "
            "and never looks at the switch. Within the window all is well; past it, the model no "
            "longer sees the beginning, and invents one. No error is raised, and no test of "
            "ordinary length comes near."
        ),
        seen="lorax, issue 532",
        tests=("tests/test_config.py::test_a_qwen_is_read_from_its_options",),
    ),
    Exhibit(
        number=37,
        stage="stage09_kernels",
        file="online.py",
        title="after an hour of traffic, an answer is NaN; asked again, it is right",
        old="weights @ values[index, :count]",
        new="torch.nn.functional.pad(weights, (0, block - count)) @ values[index]",
        symptom=symptoms.memory_that_had_an_owner,
        hint="A token that must not be seen has weight 0. What is 0 times infinity?",
        bug="values after the last token are read, with weight 0",
        story=(
            "Whole blocks are simpler to read than parts of one, and a weight of 0 seems to hide "
            "what lies past the end. It hides every finite number. New memory holds zeros, so all "
            "tests pass. Used memory holds what its owner left, and where that had overflowed, 0 * "
            "inf is NaN, in another request's answer. The bug has come back in one engine after "
            "another, most recently when a warm-up run began to leave NaN in blocks that went to "
            "the first user. Set the values to zero as they are read, or do not read them."
        ),
        seen="vLLM, pull requests 936 and 47305; flash-attention, issue 1745",
        tests=("tests/test_parts.py::test_an_online_softmax_reads_its_blocks_and_nothing_else",),
    ),
    Exhibit(
        number=38,
        stage="stage09_kernels",
        file="library.py",
        title="a kernel was fixed, and the fix does nothing until the cache is deleted",
        old='sorted({*source.parent.glob("*.[ch]"), *source.parent.parent.glob("*.h")})',
        new="[source]",
        symptom=symptoms.an_edited_header,
        hint="What decides whether a library is compiled again? Does that cover all of its source?",
        bug=(
            "the name of a compiled library depends on its source, but not on the files it includes"
        ),
        story=(
            "Compiling takes seconds, so a library is kept and found again by a digest of its "
            "source. But the source is one file that includes others, and an edit there does not "
            "change the digest. The old library loads silently: a faster loop is no faster, and a "
            "bug that was fixed is still there. The advice in the issues is to add a space to the "
            "outer file, or to delete the cache. What a file includes is part of it, and so are "
            "the flags and the compiler."
        ),
        seen="PyTorch, issue 47557; exllama, issue 209",
        tests=("tests/test_library.py::test_a_library_is_compiled_once_for_all_that_is_in_it",),
    ),
    Exhibit(
        number=39,
        stage="stage09_kernels",
        file="library.py",
        title="on the new server all is well, and on an older one: illegal instruction",
        old="if all(can.get(n) for n in needed)]",
        new="if all(can.get(n) for n in needed[:1])]",
        symptom=symptoms.some_processors,
        hint=(
            "AVX-512 is not one set of instructions. Which of its sets are checked, and which are "
            "used?"
        ),
        bug="one instruction set of several is checked, and the others are taken for granted",
        story=(
            "AVX-512 came in pieces: F, then BW, DQ and VL, then VNNI and BF16, and a virtual "
            "machine may hide any of them. A compiler that may use five pieces will use five. A "
            "check for the first alone picks the fast library on a machine that has only that one, "
            "and the process dies at some instruction deep in a loop, without a message or a "
            "traceback. The author's machine has all of them, so only others find out. Check for "
            "every set that the compiler may use."
        ),
        seen="manticoresoftware/columnar, issue 168; OpenBLAS, pull request 1949",
        tests=("tests/test_parts.py::test_the_best_level_that_the_processor_has_comes_first",),
    ),
    Exhibit(
        number=40,
        stage="stage09_kernels",
        file="program.py",
        title="GPT-2 is right with the kernels, and a Llama talks nonsense",
        old="torch.stack(parts, 1).flatten(0, 2)",
        new="torch.cat(parts).flatten(0, 1)",
        symptom=symptoms.a_chat_with_kernels,
        hint="What does a Llama's MLP have that GPT-2's lacks, and in which order is it read?",
        bug="all gates lie before what they open, but the kernel expects the two interleaved",
        story=(
            "A Llama's MLP multiplies two products number by number, and a fast kernel computes "
            "both at once, from one matrix in which their rows are interleaved. Others put one "
            "after the other. Both layouts have the same shape, so nothing complains: each gate "
            "opens the wrong number, and the text is garbage. One engine's CPU kernel expected one "
            "order while the loader left the other, only for one model, whose checkpoint is laid "
            "out differently. A layout that two files must agree on needs a test that reads both."
        ),
        seen="vLLM, pull request 29273",
        tests=("tests/test_parts.py::test_gates_are_beside_what_they_open",),
    ),
    Exhibit(
        number=41,
        stage="stage12_distributed",
        file="router/routing.py",
        title="four replicas are alike, and one of them does all the work",
        old="return tokens - cached[replica] + replica.tokens, self.random.random()  # ties",
        new="return tokens - cached[replica] + replica.tokens, 0.0",
        symptom=symptoms.equal_replicas,
        hint="All four are equally good. Which one does `min` return?",
        bug="among equal replicas, the first in the list is always chosen",
        story=(
            "A router computes a score for each replica and takes the best. When a fleet has just "
            "started, or every replica has the same popular prompt, many scores are equal, and an "
            "accident decides: the order of a list. Every router of the fleet has that list, so "
            "all of them choose the same replica until its load makes the scores differ. A test "
            "with different scores finds nothing wrong. Break ties at random, or in turn."
        ),
        seen="llm-d router, issue 2515",
        tests=("tests/test_routing.py::test_ties_are_broken_at_random",),
    ),
    Exhibit(
        number=42,
        stage="stage12_distributed",
        file="router/routing.py",
        title="when one conversation is busy, all the others slow down",
        old="[*(r for r in able if cached[r]), *pair]",
        new=("pair if any(r.requests for r in able) else [*(r for r in able if cached[r]), *pair]"),
        symptom=symptoms.a_busy_neighbour,
        hint="The other conversations have not changed. What do they have to do with the load?",
        bug="as soon as the load is uneven, every request ignores prefixes",
        story=(
            "A policy that follows prefixes needs a way out: a popular prefix must not fill a "
            "replica. Here the way out applied to all requests. When the gap between the busiest "
            "and the least busy replica passed a limit, the router went by load alone, and all "
            "other users' prefixes were computed again on replicas that had never seen them. That "
            "made those busier, and the gap stayed. One hot replica ended affinity for the whole "
            "fleet. The limit must apply only to the replica that is too busy, and to the requests "
            "that would go there."
        ),
        seen="vllm router, issue 238",
        tests=("tests/test_routing.py::test_one_hot_prefix_does_not_end_affinity_for_all",),
    ),
    Exhibit(
        number=43,
        stage="stage12_distributed",
        file="disaggregated/leases.py",
        title="status 200, and the answer is to another user's question",
        old=(
            "valid &= self.cache.generations[list(lease.blocks)].tolist() == "
            "list(lease.generations)"
        ),
        new="assert len(lease.blocks) == len(lease.generations)",
        symptom=symptoms.a_late_copy,
        hint="What may the owner of a block do when its lease has expired? Who would notice?",
        bug="blocks whose lease has expired are copied as if they were still what was leased",
        story=(
            "One machine computed prompts; others took the keys and values from its memory and "
            "went on. If nothing took them for some time, the memory went to other requests, so "
            "that it would not leak. But a late reader never learned of that. It read what was "
            "there by then, and answered with status 200 and a text that continued another prompt. "
            "Under load, that was eight answers of forty-two. Nothing in the answer shows it, and "
            "neither side logs an error. A lease needs a number that changes when its object does, "
            "and that number must be read after the copy."
        ),
        seen="vLLM, issue 21570; awslabs/aws-do-eks, issue 84",
        tests=("tests/test_leases.py::test_no_answer_comes_from_blocks_that_were_freed",),
    ),
)
