/* Loops that run one after the other, each divided among PyTorch's threads. */

#pragma once

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

typedef void (*body)(int64_t, int64_t, void *);
typedef int (*parallel_for)(int64_t, int64_t, int64_t, body, void *); /* PyTorch's own loop */

/* Wait for another thread. Most likely it is done in a moment; if not, it needs a processor. */
static inline void wait_a_moment(int turns) {
#if defined(__x86_64__)
    if (turns < 2000) {
        __builtin_ia32_pause();
        return;
    }
#endif
    sched_yield();
}

#define PARTS 128

/* A loop over items, which PyTorch's threads run. */
struct loop {
    body run;
    void *context;
    int64_t count, size;  /* items: in all, and in a part */
    _Atomic int64_t done; /* items finished */
    _Atomic char taken[PARTS];
};

struct loops { /* to run one after the other */
    struct loop *all;
    int64_t count;
};

/* Add a loop of `run` over `count` items. */
static void add_loop(struct loops *l, int64_t count, body run, void *context) {
    int64_t size = count < PARTS ? 1 : (count + PARTS - 1) / PARTS;
    l->all[l->count++] = (struct loop){run, context, count, size, 0, {0}};
}

/* One thread's work. Each thread gets an equal number of a loop's parts; when done, it takes parts
   that others have not started. A loop begins when all parts of the previous one are done. So
   no thread waits for another that a third program holds up, unless that is within a part. */
static void run_loops(int64_t first, int64_t last, void *context) {
    const struct loops *list = context;
    (void)last; /* `first`, out of PARTS, is where this thread's parts begin */
    for (struct loop *l = list->all; l < list->all + list->count; l++) {
        int64_t parts = (l->count + l->size - 1) / l->size, finished = 0;
        if (atomic_load(&l->done) == l->count) continue;
        for (int64_t i = 0; i < parts; i++) {
            int64_t part = (first * parts / PARTS + i) % parts, start = part * l->size;
            int64_t end = start + l->size < l->count ? start + l->size : l->count;
            _Atomic char *taken = l->taken + part * PARTS / parts;
            if (!atomic_load_explicit(taken, memory_order_relaxed) && !atomic_exchange(taken, 1)) {
                l->run(start, end, l->context);
                finished += end - start;
            }
        }
        atomic_fetch_add(&l->done, finished);
        for (int turns = 0; atomic_load(&l->done) < l->count; turns++) wait_a_moment(turns);
    }
}

static int run_all(struct loops *list, parallel_for threads) {
    int alone = list->count == 1 && list->all->count <= list->all->size;
    return threads(0, alone ? 1 : PARTS, 1, run_loops, list);
}
