/* Attention of a few queries per row over keys and values that lie in a cache, each row as far as it reaches.

   A product of matrices rearranges the keys before it reads them once, which for so few queries takes longer than reading
   does. Here a key or value, once loaded, meets up to four queries, and those further on are fetched meanwhile.

   query (rows, heads, queries, WIDTH), key and value (rows, heads, slots, WIDTH), mask (rows, queries, slots) additive,
   reach (rows,), out (rows, heads, queries, WIDTH) contiguous. Steps count elements along those axes, but for the last,
   where they are 1. scores: (threads, TOGETHER, longest), longest being a multiple of LANES, and slots no more than that.
   WIDTH, a multiple of 16, comes from the compiler's command line. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 8
#define TOGETHER 4 /* queries */
#define PARTS (WIDTH / LANES)
#define AHEAD 16 /* keys or values */
#define HELD 2 /* parts of a value that are summed up at a time: with TOGETHER queries, what registers hold */
#define INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t bits __attribute__((vector_size(4 * LANES)));

int omp_get_thread_num(void);

INLINE lanes load(const float *from) {
  lanes out;
  memcpy(&out, from, sizeof out);
  return out;
}

INLINE void store(float *to, lanes x) { memcpy(to, &x, sizeof x); }

INLINE lanes choose(bits which, lanes yes, lanes no) { return (lanes)(((bits)yes & which) | ((bits)no & ~which)); }

#ifdef __clang__
#define PICK(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define PICK(x, y, ...) __builtin_shuffle(x, y, (bits){__VA_ARGS__})
#endif

/* Of eight vectors each one's sum. */
INLINE lanes sums(const lanes *x) {
  lanes two[4], four[2];
  for (int i = 0; i < 4; i++)
    two[i] = PICK(x[2 * i], x[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) + PICK(x[2 * i], x[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  for (int i = 0; i < 2; i++)
    four[i] = PICK(two[2 * i], two[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) + PICK(two[2 * i], two[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  return PICK(four[0], four[1], 0, 1, 2, 3, 8, 9, 10, 11) + PICK(four[0], four[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

/* e^x for x <= 0, to 1 ulp, and 0 below -87: a power of two times the polynomial of Cephes (Moshier). */
INLINE lanes exponential(lanes x) {
  bits none = x < -87.0f;
  x = choose(none, (lanes){0}, x);
  bits power = __builtin_convertvector(x * 1.44269504f - 0.5f, bits);
  lanes whole = __builtin_convertvector(power, lanes);
  x = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  lanes y = x * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * x + 8.3334519073e-3f;
  y = y * x + 4.1665795894e-2f;
  y = y * x + 1.6666665459e-1f;
  y = y * x + 5.0000001201e-1f;
  y = y * x * x + x + 1.0f;
  return choose(none, (lanes){0}, y * (lanes)((power + 127) << 23));
}

/* Scores of `count` queries against the first `end` keys, LANES keys at a time; -inf beyond. */
INLINE void multiply(int count, const float *query, int64_t query_step, const float *key, int64_t key_step,
                     const float *mask, int64_t mask_step, int64_t end, int64_t longest, float scaling, float *scores) {
  for (int64_t first = 0; first < end; first += LANES) {
    const int64_t left = end - first;
    lanes products[TOGETHER][LANES];
    for (int j = 0; j < LANES; j++) {
      const float *row = key + (first + (j < left ? j : left - 1)) * key_step;
      for (int part = 0; part < PARTS; part += 2) __builtin_prefetch(row + AHEAD * key_step + LANES * part);
      for (int i = 0; i < count; i++) products[i][j] = load(query + i * query_step) * load(row);
      for (int part = 1; part < PARTS; part++) {
        lanes k = load(row + LANES * part);
        for (int i = 0; i < count; i++) products[i][j] += load(query + i * query_step + LANES * part) * k;
      }
    }
    for (int i = 0; i < count; i++) {
      float *to = scores + i * longest + first;
      const float *seen = mask + i * mask_step + first;
      lanes x = sums(products[i]) * scaling;
      if (left >= LANES) store(to, x + load(seen));
      else for (int j = 0; j < LANES; j++) to[j] = j < left ? x[j] + seen[j] : -INFINITY;
    }
  }
}

/* Scores to probabilities, undivided; returns what to divide them by. */
INLINE float weigh(float *scores, int64_t end) {
  lanes most = load(scores), total = {0};
  for (int64_t j = LANES; j < end; j += LANES) {
    lanes x = load(scores + j);
    most = choose(x > most, x, most);
  }
  float top = most[0], sum = 0;
  for (int j = 1; j < LANES; j++) top = most[j] > top ? most[j] : top;
  if (top == -INFINITY) top = 0; /* nothing may be seen */
  for (int64_t j = 0; j < end; j += LANES) {
    lanes x = exponential(load(scores + j) - top);
    store(scores + j, x);
    total += x;
  }
  for (int j = 0; j < LANES; j++) sum += total[j];
  return sum;
}

INLINE void mix(int count, const float *scores, int64_t longest, const float *totals, const float *value,
                int64_t value_step, int64_t end, float *out) {
  for (int part = 0; part < PARTS; part += HELD) {
    lanes mixed[TOGETHER][HELD] = {0};
    for (int64_t j = 0; j < end; j++) {
      __builtin_prefetch(value + (j + AHEAD) * value_step + LANES * part);
      for (int k = 0; k < HELD; k++) {
        lanes v = load(value + j * value_step + LANES * (part + k));
        for (int i = 0; i < count; i++) mixed[i][k] += scores[i * longest + j] * v;
      }
    }
    for (int i = 0; i < count; i++)
      for (int k = 0; k < HELD; k++)
        store(out + i * WIDTH + LANES * (part + k), totals[i] == 0 ? mixed[i][k] : mixed[i][k] / totals[i]);
  }
}

INLINE void attend_together(int count, const float *query, int64_t query_step, const float *key, int64_t key_step,
                            const float *value, int64_t value_step, const float *mask, int64_t mask_step, int64_t end,
                            int64_t longest, float scaling, float *scores, float *out) {
  float totals[TOGETHER];
  multiply(count, query, query_step, key, key_step, mask, mask_step, end, longest, scaling, scores);
  for (int i = 0; i < count; i++) totals[i] = weigh(scores + i * longest, end);
  mix(count, scores, longest, totals, value, value_step, end, out);
}

void attend(const float *query, const float *key, const float *value, const float *mask, const int64_t *reach,
            float *scores, float *out, int64_t rows, int64_t heads, int64_t queries, int64_t slots,
            int64_t longest, const int64_t *query_steps, const int64_t *key_steps, const int64_t *value_steps,
            const int64_t *mask_steps, float scaling, int threads) {
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
  for (int64_t row = 0; row < rows; row++)
    for (int64_t head = 0; head < heads; head++)
      for (int64_t first = 0; first < queries; first += TOGETHER) {
        const int64_t left = queries - first, end = reach[row] < slots ? reach[row] : slots;
        const int64_t q_step = query_steps[2], m_step = mask_steps[1];
        const float *q = query + row * query_steps[0] + head * query_steps[1] + first * q_step;
        const float *k = key + row * key_steps[0] + head * key_steps[1];
        const float *v = value + row * value_steps[0] + head * value_steps[1];
        const float *m = mask + row * mask_steps[0] + first * m_step;
        float *s = scores + omp_get_thread_num() * TOGETHER * longest;
        float *o = out + ((row * heads + head) * queries + first) * WIDTH;
#define CASE(count)                                                                                                \
  attend_together(count, q, q_step, k, key_steps[2], v, value_steps[2], m, m_step, end, longest, scaling, s, o)
        if (left >= TOGETHER) CASE(4);
        else if (left == 3) CASE(3);
        else if (left == 2) CASE(2);
        else CASE(1);
      }
}
