/* A thread pool whose callers do not depend on its helpers.

   A helper takes parts of a job whenever it has a core. The caller takes parts as well, until none is left, and waits
   only for parts that helpers have begun. So a helper whose core is taken by another process delays nothing that it has
   not begun. OpenMP would wait for every thread at the end of every loop, and static halves of a loop for the slower
   half.

   A thread that waits spins for SPIN_NS and then sleeps: spinning uses up the share of a core that the system then
   withholds when there is work. */

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "kernels.h"

#define MAX_HELPERS 255
#define SPIN_NS 50000
#define PAUSES 16  /* between two looks at the clock */

static struct {
    /* Number of the job in the upper half, and how many of its parts are not taken in the lower. A thread reads this
       first, then the job, and takes a part by decrementing it: if that succeeds, the job has not changed meanwhile. */
    _Atomic uint64_t left;
    _Atomic(compute_part *) compute;
    _Atomic(const void *) job;
    _Atomic int job_helpers;
    _Atomic int64_t unfinished;  /* parts */
    _Atomic int sleeping_helpers, caller_sleeps;
    pthread_mutex_t mutex;
    pthread_cond_t published, finished;
    int helpers;  /* that were started; only the thread with `in_use` reads it */
} pool = {
    .mutex = PTHREAD_MUTEX_INITIALIZER,
    .published = PTHREAD_COND_INITIALIZER,
    .finished = PTHREAD_COND_INITIALIZER,
};
static atomic_flag in_use = ATOMIC_FLAG_INIT;

static int64_t clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void pause_briefly(void) {
    for (int i = 0; i < PAUSES; i++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
}

/* Takes and computes parts until none is left. */
static void compute_what_is_left(int helper) {
    for (;;) {
        uint64_t left = pool.left;
        compute_part *compute = pool.compute;
        const void *job = pool.job;
        if ((uint32_t)left == 0 || helper >= pool.job_helpers) return;
        if (!atomic_compare_exchange_weak(&pool.left, &left, left - 1)) continue;
        compute(job, (uint32_t)left - 1);
        if (atomic_fetch_sub(&pool.unfinished, 1) == 1 && pool.caller_sleeps) {
            pthread_mutex_lock(&pool.mutex);
            pthread_cond_signal(&pool.finished);
            pthread_mutex_unlock(&pool.mutex);
        }
    }
}

static void *help(void *number) {
    for (;;) {
        uint64_t seen = pool.left >> 32;
        compute_what_is_left((int)(intptr_t)number);
        int64_t until = clock_ns() + SPIN_NS;
        while (pool.left >> 32 == seen && clock_ns() < until) pause_briefly();
        if (pool.left >> 32 != seen) continue;
        pthread_mutex_lock(&pool.mutex);
        pool.sleeping_helpers++;
        while (pool.left >> 32 == seen) pthread_cond_wait(&pool.published, &pool.mutex);
        pool.sleeping_helpers--;
        pthread_mutex_unlock(&pool.mutex);
    }
    return NULL;
}

/* In a forked process, where there are no helpers. */
static void forget_helpers(void) {
    pool.helpers = 0;
    pool.sleeping_helpers = 0;
    pool.caller_sleeps = 0;
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_cond_init(&pool.published, NULL);
    pthread_cond_init(&pool.finished, NULL);
    atomic_flag_clear(&in_use);
}

static void start_helpers(int count) {
    static int handles_forks = 0;
    if (!handles_forks) handles_forks = !pthread_atfork(NULL, NULL, forget_helpers);
    for (pthread_t thread; pool.helpers < count; pool.helpers++) {
        if (pthread_create(&thread, NULL, help, (void *)(intptr_t)pool.helpers)) return;
        pthread_detach(thread);
    }
}

static void wait_for_helpers(void) {
    int64_t until = clock_ns() + SPIN_NS;
    while (pool.unfinished && clock_ns() < until) pause_briefly();
    if (!pool.unfinished) return;
    pthread_mutex_lock(&pool.mutex);
    pool.caller_sleeps = 1;
    while (pool.unfinished) pthread_cond_wait(&pool.finished, &pool.mutex);
    pool.caller_sleeps = 0;
    pthread_mutex_unlock(&pool.mutex);
}

void compute_parts(compute_part *compute, const void *job, int64_t parts, int threads) {
    if (threads < 2 || parts < 2 || parts > UINT32_MAX || atomic_flag_test_and_set(&in_use)) {
        for (int64_t part = 0; part < parts; part++) compute(job, part);
        return;
    }
    int helpers = threads - 1 < MAX_HELPERS ? threads - 1 : MAX_HELPERS;
    if (pool.helpers < helpers) start_helpers(helpers);
    pool.compute = compute;
    pool.job = job;
    pool.job_helpers = helpers;
    pool.unfinished = parts;
    pool.left = ((pool.left >> 32) + 1) << 32 | (uint64_t)parts;
    if (pool.sleeping_helpers) {
        pthread_mutex_lock(&pool.mutex);
        pthread_cond_broadcast(&pool.published);
        pthread_mutex_unlock(&pool.mutex);
    }
    compute_what_is_left(-1);
    if (pool.unfinished) wait_for_helpers();
    atomic_flag_clear(&in_use);
}
