/* Kernels for a decoder layer between its matrix products, in float32: see layers.py.

   Compiled when the engine starts, for its CPU. Each token is computed alone, in an order that depends only on the
   token: its result does not depend on the batch. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#define BLOCK 16  /* tokens, as BLOCK_SIZE in block_manager.py */

struct shape {  /* sizes and settings of a layer's attention */
    int64_t query_heads, key_heads, dim, window;
    float scaling, eps;
    const float *query_norm, *key_norm;  /* weights of the norm of each head, or null */
};

/* e^x within two units in the last place for results above 1e-37; a polynomial, so that compilers vectorize it.
   Adding 3 * 2^22 rounds to a whole number, which is then in the lowest bits. A conversion to an integer would be
   undefined for NaN, which stays NaN here. */
static inline float exponential(float x) {
    const float round = 12582912.0f;
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float rounded = x * 1.44269504f + round, twos = rounded - round;
    float rest = x - twos * 0.693359375f + twos * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    uint32_t bits;
    float power;
    memcpy(&bits, &rounded, sizeof bits);
    bits = (bits + 127) << 23;
    memcpy(&power, &bits, sizeof power);
    return sum * power;
}

static inline float inverse_root_mean_square(const float *x, int64_t width, float eps) {
    float sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / width + eps);
}

/* How many things of so many numbers are one part. */
static inline int64_t per_part(int64_t numbers) { return numbers < PART ? PART / numbers : 1; }

static inline void compute_tokens(compute_part *compute, const void *job, int64_t tokens, int64_t numbers,
                                  int threads) {
    int64_t together = per_part(numbers);
    compute_parts(compute, job, (tokens + together - 1) / together, threads);
}

/* Loops over the tokens of a part; a job has their number in `tokens`. */
#define FOR_TOKENS(numbers) \
    int64_t together = per_part(numbers), first = part * together, end = first + together; \
    if (end > job->tokens) end = job->tokens; \
    for (int64_t token = first; token < end; token++)

struct norm {
    float *hidden;
    struct rows added;
    const float *weight;
    float eps, *normed;
    int64_t tokens, width;
};

static void add_and_norm_part(const void *norm, int64_t part) {
    const struct norm *job = norm;
    int64_t width = job->width;
    FOR_TOKENS(width) {
        float *x = job->hidden + token * width;
        if (job->added.first) {
            const float *more = job->added.first + token * job->added.stride;
            for (int64_t i = 0; i < width; i++) x[i] += more[i];
        }
        if (!job->normed) continue;
        float scale = inverse_root_mean_square(x, width, job->eps), *out = job->normed + token * width;
        for (int64_t i = 0; i < width; i++) out[i] = x[i] * scale * job->weight[i];
    }
}

/* hidden += added, if given; normed, if given, = hidden / its root mean square * weight */
void add_and_norm(float *hidden, struct rows added, const float *weight, float eps, float *normed, int64_t tokens,
                  int64_t width, int threads) {
    struct norm job = {hidden, added, weight, eps, normed, tokens, width};
    compute_tokens(add_and_norm_part, &job, tokens, width, threads);
}

struct gate {
    struct rows gate, up;
    float *gated;
    int64_t tokens, width;
};

static void gate_part(const void *gate, int64_t part) {
    const struct gate *job = gate;
    int64_t width = job->width;
    FOR_TOKENS(width) {
        const float *g = job->gate.first + token * job->gate.stride, *u = job->up.first + token * job->up.stride;
        float *out = job->gated + token * width;
        #pragma omp simd
        for (int64_t i = 0; i < width; i++) out[i] = g[i] / (1.0f + exponential(-g[i])) * u[i];
    }
}

/* gated = silu(gate) * up */
void gate_with_silu(struct rows gate, struct rows up, float *gated, int64_t tokens, int64_t width, int threads) {
    struct gate job = {gate, up, gated, tokens, width};
    compute_tokens(gate_part, &job, tokens, width, threads);
}

/* Normalizes (if `weight` is given) and rotates one head. `rotated` may be `head`. */
static inline void rotate(const float *head, const float *weight, float eps, const float *cosine, const float *sine,
                          float *rotated, int64_t dim) {
    int64_t half = dim / 2;
    float scale = weight ? inverse_root_mean_square(head, dim, eps) : 1.0f;
    #pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float a = head[i] * scale, b = head[i + half] * scale;
        if (weight) a *= weight[i], b *= weight[i + half];
        rotated[i] = a * cosine[i] - b * sine[i];
        rotated[i + half] = b * cosine[i + half] + a * sine[i + half];
    }
}

struct rotation {
    const struct shape *shape;
    struct rows query, key, value;
    const float *cosine, *sine;
    const int64_t *slots;
    float *keys, *values;
    int64_t tokens, numbers;
};

static void rotate_part(const void *rotation, int64_t part) {
    const struct rotation *job = rotation;
    const struct shape *shape = job->shape;
    int64_t dim = shape->dim, width = shape->key_heads * dim;
    FOR_TOKENS(job->numbers) {
        const float *c = job->cosine + token * dim, *s = job->sine + token * dim;
        float *q = job->query.first + token * job->query.stride, *k = job->key.first + token * job->key.stride;
        for (int64_t head = 0; head < shape->query_heads; head++)
            rotate(q + head * dim, shape->query_norm, shape->eps, c, s, q + head * dim, dim);
        float *stored = job->keys + job->slots[token] * width;
        for (int64_t head = 0; head < shape->key_heads; head++)
            rotate(k + head * dim, shape->key_norm, shape->eps, c, s, stored + head * dim, dim);
        memcpy(job->values + job->slots[token] * width, job->value.first + token * job->value.stride,
               width * sizeof(float));
    }
}

/* Rotates queries in place; stores rotated keys and values in their slots of the cache. */
void rotate_and_store(const struct shape *shape, struct rows query, struct rows key, struct rows value,
                      const float *cosine, const float *sine, const int64_t *slots, float *keys, float *values,
                      int64_t tokens, int threads) {
    int64_t numbers = (shape->query_heads + 2 * shape->key_heads) * shape->dim;
    struct rotation job = {shape, query, key, value, cosine, sine, slots, keys, values, tokens, numbers};
    compute_tokens(rotate_part, &job, tokens, numbers, threads);
}

/* Finds four consecutive keys or values; past the last, the last one again. */
static inline void four(const float *states[4], const float *cached, const int64_t *blocks, int64_t first, int64_t last,
                        int64_t width) {
    for (int i = 0; i < 4; i++) {
        int64_t at = first + i < last ? first + i : last;
        states[i] = cached + (blocks[at / BLOCK] * BLOCK + at % BLOCK) * width;
    }
}

static void attend_to(const float *query, const float *keys, const float *values, const int64_t *blocks, int64_t first,
                      int64_t last, int64_t shared, int64_t dim, int64_t width, float scaling, float *weights,
                      float *out) {
    int64_t count = last - first + 1, padded = (count + 3) / 4 * 4;
    const float *k[4], *v[4];
    for (int64_t at = 0; at < count; at += 4) {
        four(k, keys, blocks, first + at, last, width);
        for (int64_t head = 0; head < shared; head++) {
            const float *q = query + head * dim, *k0 = k[0], *k1 = k[1], *k2 = k[2], *k3 = k[3];
            float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
            #pragma omp simd reduction(+ : s0, s1, s2, s3)
            for (int64_t i = 0; i < dim; i++) {
                s0 += q[i] * k0[i];
                s1 += q[i] * k1[i];
                s2 += q[i] * k2[i];
                s3 += q[i] * k3[i];
            }
            float *w = weights + head * padded + at;
            w[0] = s0 * scaling, w[1] = s1 * scaling, w[2] = s2 * scaling, w[3] = s3 * scaling;
        }
    }
    for (int64_t head = 0; head < shared; head++) {
        float *w = weights + head * padded, most = w[0], sum = 0;
        #pragma omp simd reduction(max : most)
        for (int64_t at = 0; at < count; at++) most = w[at] > most ? w[at] : most;
        #pragma omp simd reduction(+ : sum)
        for (int64_t at = 0; at < count; at++) sum += w[at] = exponential(w[at] - most);
        for (int64_t at = 0; at < count; at++) w[at] /= sum;
        for (int64_t at = count; at < padded; at++) w[at] = 0;
    }
    memset(out, 0, shared * dim * sizeof(float));
    for (int64_t at = 0; at < count; at += 4) {
        four(v, values, blocks, first + at, last, width);
        for (int64_t head = 0; head < shared; head++) {
            const float *w = weights + head * padded + at, *v0 = v[0], *v1 = v[1], *v2 = v[2], *v3 = v[3];
            float *o = out + head * dim, w0 = w[0], w1 = w[1], w2 = w[2], w3 = w[3];
            #pragma omp simd
            for (int64_t i = 0; i < dim; i++) o[i] += w0 * v0[i] + w1 * v1[i] + w2 * v2[i] + w3 * v3[i];
        }
    }
}

struct attention {
    const struct shape *shape;
    struct rows query;
    const float *keys, *values;
    const int64_t *tables;
    int64_t table_stride;
    const int64_t *owners, *positions;
    int64_t longest;
    float *out;
    int64_t count, together;  /* heads of keys: of all tokens, of a part */
};

static void attend_part(const void *attention, int64_t part) {
    const struct attention *job = attention;
    const struct shape *shape = job->shape;
    int64_t dim = shape->dim, heads = shape->key_heads, shared = shape->query_heads / heads;
    float *weights = malloc(shared * (job->longest + 3) * sizeof(float));
    for (int64_t i = part * job->together; i < (part + 1) * job->together && i < job->count; i++) {
        int64_t token = i / heads, head = i % heads, last = job->positions[token], first = 0;
        int64_t begin = head * shared * dim, at = head * dim;
        if (shape->window && last >= shape->window) first = last - shape->window + 1;
        attend_to(job->query.first + token * job->query.stride + begin, job->keys + at, job->values + at,
                  job->tables + job->owners[token] * job->table_stride, first, last, shared, dim, heads * dim,
                  shape->scaling, weights, job->out + token * shape->query_heads * dim + begin);
    }
    free(weights);
}

/* Causal attention of each token: position p of a request is in block p / BLOCK of its table. */
void attend(const struct shape *shape, struct rows query, const float *keys, const float *values,
            const int64_t *tables, int64_t table_stride, const int64_t *owners, const int64_t *positions,
            int64_t longest, float *out, int64_t tokens, int threads) {
    if (!tokens) return;
    int64_t count = tokens * shape->key_heads, together = per_part(longest * shape->dim);
    struct attention job = {shape, query, keys, values, tables, table_stride, owners, positions, longest, out, count,
                            together};
    compute_parts(attend_part, &job, (count + together - 1) / together, threads);
}
