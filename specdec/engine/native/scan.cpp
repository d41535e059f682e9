// Recurrences of a matrix per head over committed states (specdec/engine/recurrent/scans.py). A token is one step of
// the same operations in the same order in any batch, so that its bits do not depend on it: every value of a state, and
// every output, has a lane of its own, whose operations do not depend on the tile it is in.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "simd.h"
#include "thread_pool.h"

using namespace specdec;

namespace {

constexpr int kTile = 4;  // vectors of values at a time, so that sums over keys stay in registers

struct Scan {
  int64_t num_heads, num_key_heads, key_dim, value_dim, decays_per_key, is_delta, width;
  const float* rates;  // [heads, key_dim] or null
  float* states;       // [slots, heads, key_dim, value_dim] or null
  float* kept;         // [rows, width] or null
};

struct Span {
  int64_t read_slot, write_slot, save_after, first_repeated, num_repeated, first_row, num_new, first_node, num_nodes;
};

// One head's part of a token.
struct Token {
  const float *key, *value, *decay, *query;  // query: null for a token without output
  float strength;
  float* out;
};

// Values [first, first + N * kLanes) of a state, or the `count` < kLanes of the last vector: next = the state after it.
template <int N, bool partial>
void advance_tile(const Scan& scan, const Token& token, const float* state, float* next, int64_t first, int count) {
  const auto get = [count](const float* p) { return partial ? load_head(p, count) : load(p); };
  const auto put = [count](float* p, Vec v) { partial ? store_head(p, v, count) : store(p, v); };
  const int64_t width = scan.value_dim;
  const int64_t decays = scan.decays_per_key ? 1 : 0;
  Vec values[N], sums[N] = {};
  for (int n = 0; n < N; ++n) values[n] = get(token.value + first + n * kLanes);
  if (scan.is_delta) {
    Vec held[N] = {};
    for (int64_t k = 0; k < scan.key_dim; ++k) {
      const Vec factor = splat(token.decay[k * decays]), key = splat(token.key[k]);
      for (int n = 0; n < N; ++n) {
        const int64_t at = k * width + first + n * kLanes;
        const Vec decayed = get(state + at) * factor;
        put(next + at, decayed);
        held[n] = held[n] + decayed * key;
      }
    }
    for (int n = 0; n < N; ++n) values[n] = (values[n] - held[n]) * splat(token.strength);
  }
  for (int64_t k = 0; k < scan.key_dim; ++k) {
    const Vec factor = splat(token.decay[k * decays]), key = splat(token.key[k]);
    const Vec query = splat(token.query == nullptr ? 0.0f : token.query[k]);
    for (int n = 0; n < N; ++n) {
      const int64_t at = k * width + first + n * kLanes;
      const Vec decayed = scan.is_delta ? get(next + at) : get(state + at) * factor;
      const Vec after = decayed + key * values[n];
      put(next + at, after);
      sums[n] = sums[n] + after * query;
    }
  }
  if (token.query != nullptr)
    for (int n = 0; n < N; ++n) put(token.out + first + n * kLanes, sums[n]);
}

// A state of one value per head (Mamba 1), whose decays have rates by key.
void advance_narrow(const Scan& scan, const Token& token, const float* rates, const float* state, float* next) {
  Vec sums = {};
  for (int64_t k = 0; k < scan.key_dim; k += kLanes) {
    const int count = static_cast<int>(std::min<int64_t>(kLanes, scan.key_dim - k));
    const Vec factor = exp(load_head(rates + k, count) * splat(token.decay[0]));
    const Vec after = load_head(state + k, count) * factor + load_head(token.key + k, count) * splat(token.value[0]);
    store_head(next + k, after, count);
    if (token.query != nullptr) sums = sums + after * load_head(token.query + k, count);
  }
  if (token.query != nullptr) token.out[0] = sum(sums);
}

void advance(const Scan& scan, int64_t head, const float* row, const float* state, float* next, const float* query,
             float* out) {
  const int64_t keys = scan.key_dim, width = scan.value_dim, group = head / (scan.num_heads / scan.num_key_heads);
  const int64_t num_decays = scan.decays_per_key ? keys : 1;
  const float* values = row + scan.num_key_heads * keys;
  const float* decays = values + scan.num_heads * width;
  const float strength = scan.is_delta ? decays[scan.num_heads * num_decays + head] : 0.0f;
  const Token token{row + group * keys,         values + head * width, decays + head * num_decays,
                    query, strength, out};
  if (scan.rates != nullptr) {
    advance_narrow(scan, token, scan.rates + head * keys, state, next);
    return;
  }
  int64_t first = 0;
  for (; first + kTile * kLanes <= width; first += kTile * kLanes)
    advance_tile<kTile, false>(scan, token, state, next, first, 0);
  for (; first + kLanes <= width; first += kLanes) advance_tile<1, false>(scan, token, state, next, first, 0);
  if (first < width) advance_tile<1, true>(scan, token, state, next, first, static_cast<int>(width - first));
}

// x [size] times `scale` over its length.
void normalize(const float* x, float* out, int64_t size, bool normalizes, float scale) {
  if (normalizes) {
    Vec squares = {};
    for (int64_t k = 0; k < size; k += kLanes) {
      const Vec part = load_head(x + k, static_cast<int>(std::min<int64_t>(kLanes, size - k)));
      squares = squares + part * part;
    }
    scale *= 1.0f / std::sqrt(sum(squares) + 1e-6f);
  }
  for (int64_t k = 0; k < size; ++k) out[k] = x[k] * scale;
}

}  // namespace

extern "C" {

// query [T, key heads, key_dim], rows [T, width], out [T, heads, value_dim]. repeated: rows of kept inputs. nodes:
// pairs of a node and its depth, so that a node follows its parent or another child of it. Row keeping[0][i] of the
// batch is kept in row keeping[1][i].
void specdec_scan(void* pool, const Scan* scan, const Span* spans, int64_t num_spans, const int64_t* repeated,
                  const int64_t* nodes, int64_t max_depth, const int64_t* const* keeping, int64_t num_kept,
                  const float* query, const float* rows, float* out) {
  const int64_t size = scan->key_dim * scan->value_dim, groups = scan->num_heads / scan->num_key_heads;
  static_cast<ThreadPool*>(pool)->run([&](int thread, int num_threads) {
    std::vector<float> levels((max_depth + 1) * size);
    const Share share(num_spans * scan->num_heads, thread, num_threads);
    for (int64_t item = share.begin; item < share.end; ++item) {
      const Span& span = spans[item / scan->num_heads];
      const int64_t head = item % scan->num_heads;
      float* state = levels.data();
      if (scan->states != nullptr && span.read_slot >= 0)
        std::memcpy(state, scan->states + (span.read_slot * scan->num_heads + head) * size, size * sizeof(float));
      else
        std::memset(state, 0, size * sizeof(float));
      const auto query_of = [&](int64_t row) {
        return query + (row * scan->num_key_heads + head / groups) * scan->key_dim;
      };
      const auto out_of = [&](int64_t row) { return out + (row * scan->num_heads + head) * scan->value_dim; };
      for (int64_t step = 0; step < span.num_repeated + span.num_new; ++step) {
        const int64_t row = span.first_row + step - span.num_repeated;
        const bool is_new = step >= span.num_repeated;
        const float* inputs = is_new ? rows + row * scan->width
                                     : scan->kept + repeated[span.first_repeated + step] * scan->width;
        advance(*scan, head, inputs, state, state, is_new ? query_of(row) : nullptr, is_new ? out_of(row) : nullptr);
        if (scan->states != nullptr && span.write_slot >= 0 && step + 1 == span.save_after)
          std::memcpy(scan->states + (span.write_slot * scan->num_heads + head) * size, state, size * sizeof(float));
      }
      for (int64_t node = span.first_node; node < span.first_node + span.num_nodes; ++node) {
        const int64_t row = span.first_row + span.num_new + nodes[2 * node];
        float* below = levels.data() + nodes[2 * node + 1] * size;
        advance(*scan, head, rows + row * scan->width, below - size, below, query_of(row), out_of(row));
      }
    }
    const Share kept(num_kept, thread, num_threads);  // rows that no span of this pass repeats
    for (int64_t index = kept.begin; index < kept.end; ++index)
      std::memcpy(scan->kept + keeping[1][index] * scan->width, rows + keeping[0][index] * scan->width,
                  scan->width * sizeof(float));
  });
}

// The queries [T, key heads * key_dim] and rows [T, width] of a delta rule. sources: query, key, value, logarithms of
// decays, strengths; rows of each are `strides` apart.
void specdec_delta_rows(void* pool, const Scan* scan, const float* const* sources, const int64_t* strides,
                        int64_t normalizes, int64_t num_rows, float* query, float* rows) {
  const int64_t keys = scan->key_dim, num_keys = scan->num_key_heads * keys;
  const int64_t num_values = scan->num_heads * scan->value_dim;
  const int64_t num_decays = scan->num_heads * (scan->decays_per_key ? keys : 1);
  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(keys)));
  static_cast<ThreadPool*>(pool)->run([&](int thread, int num_threads) {
    const Share share(num_rows, thread, num_threads);
    for (int64_t row = share.begin; row < share.end; ++row) {
      const auto source = [&](int part) { return sources[part] + row * strides[part]; };
      float* place = rows + row * scan->width;
      for (int64_t at = 0; at < num_keys; at += keys) {
        normalize(source(0) + at, query + row * num_keys + at, keys, normalizes, 1.0f);
        for (int64_t k = at; k < at + keys; ++k) query[row * num_keys + k] *= scale;
        normalize(source(1) + at, place + at, keys, normalizes, 1.0f);
      }
      std::memcpy(place + num_keys, source(2), num_values * sizeof(float));
      for (int64_t at = 0; at < num_decays; at += kLanes) {
        const int count = static_cast<int>(std::min<int64_t>(kLanes, num_decays - at));
        store_head(place + num_keys + num_values + at, exp(load_head(source(3) + at, count)), count);
      }
      std::memcpy(place + num_keys + num_values + num_decays, source(4), scan->num_heads * sizeof(float));
    }
  });
}

}  // extern "C"
