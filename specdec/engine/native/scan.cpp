// Recurrences of a matrix per head over committed states (specdec/engine/recurrent/scans.py). A token is one step of
// the same operations in the same order in any batch, so that its bits do not depend on it.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "thread_pool.h"

using namespace specdec;

namespace {

struct Scan {
  int64_t num_heads, num_key_heads, key_dim, value_dim, decays_per_key, is_delta, width;
  const float* rates;  // [heads, key_dim] or null
  float* states;       // [slots, heads, key_dim, value_dim] or null
  const float* kept;   // [rows, width] or null
};

struct Span {
  int64_t read_slot, write_slot, save_after, first_repeated, num_repeated, first_row, num_new, first_node, num_nodes;
};

// One head's part of a token: next = the state after it.
void advance(const Scan& scan, int64_t head, const float* row, const float* state, float* next, float* values) {
  const int64_t keys = scan.key_dim, width = scan.value_dim;
  const int64_t num_decays = scan.decays_per_key ? keys : 1;
  const float* key = row + head / (scan.num_heads / scan.num_key_heads) * keys;
  const float* value = row + scan.num_key_heads * keys + head * width;
  const float* decay = row + scan.num_key_heads * keys + scan.num_heads * width + head * num_decays;
  const float* rate = scan.rates == nullptr ? nullptr : scan.rates + head * keys;
  if (scan.is_delta) std::memset(values, 0, width * sizeof(float));
  for (int64_t k = 0; k < keys; ++k) {
    const float factor = rate == nullptr ? decay[scan.decays_per_key ? k : 0] : std::exp(decay[0] * rate[k]);
    for (int64_t v = 0; v < width; ++v) next[k * width + v] = state[k * width + v] * factor;
    if (scan.is_delta)
      for (int64_t v = 0; v < width; ++v) values[v] += next[k * width + v] * key[k];
  }
  if (scan.is_delta) {
    const float strength =
        row[scan.num_key_heads * keys + scan.num_heads * width + scan.num_heads * num_decays + head];
    for (int64_t v = 0; v < width; ++v) values[v] = (value[v] - values[v]) * strength;
  } else {
    std::memcpy(values, value, width * sizeof(float));
  }
  for (int64_t k = 0; k < keys; ++k)
    for (int64_t v = 0; v < width; ++v) next[k * width + v] += key[k] * values[v];
}

void read(const Scan& scan, const float* query, const float* state, float* out) {
  std::memset(out, 0, scan.value_dim * sizeof(float));
  for (int64_t k = 0; k < scan.key_dim; ++k)
    for (int64_t v = 0; v < scan.value_dim; ++v) out[v] += state[k * scan.value_dim + v] * query[k];
}

}  // namespace

extern "C" {

// query [T, key heads, key_dim], rows [T, width], out [T, heads, value_dim]. repeated: rows of kept inputs. nodes:
// pairs of a node and its depth, so that a node follows its parent or another child of it.
void specdec_scan(void* pool, const Scan* scan, const Span* spans, int64_t num_spans, const int64_t* repeated,
                  const int64_t* nodes, int64_t max_depth, const float* query, const float* rows, float* out) {
  const int64_t size = scan->key_dim * scan->value_dim, groups = scan->num_heads / scan->num_key_heads;
  static_cast<ThreadPool*>(pool)->run([&](int thread, int num_threads) {
    std::vector<float> levels((max_depth + 1) * size), values(scan->value_dim);
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
        advance(*scan, head, inputs, state, state, values.data());
        if (is_new) read(*scan, query_of(row), state, out_of(row));
        if (scan->states != nullptr && span.write_slot >= 0 && step + 1 == span.save_after)
          std::memcpy(scan->states + (span.write_slot * scan->num_heads + head) * size, state, size * sizeof(float));
      }
      for (int64_t node = span.first_node; node < span.first_node + span.num_nodes; ++node) {
        const int64_t row = span.first_row + span.num_new + nodes[2 * node];
        float* below = levels.data() + nodes[2 * node + 1] * size;
        advance(*scan, head, rows + row * scan->width, below - size, below, values.data());
        read(*scan, query_of(row), below, out_of(row));
      }
    }
  });
}

}  // extern "C"
