/* What the kernels share: rows of numbers, and the thread pool. */

#include <stdint.h>

#define PART 16384  /* numbers: the least that is worth a part of its own */

struct rows {  /* one row of consecutive numbers per token, `stride` numbers apart */
    float *first;
    int64_t stride;
};

typedef void compute_part(const void *job, int64_t part);

/* Computes the parts 0 to parts - 1 of a job, each once, in any order, on up to `threads` threads (thread_pool.c). */
void compute_parts(compute_part *compute, const void *job, int64_t parts, int threads);
