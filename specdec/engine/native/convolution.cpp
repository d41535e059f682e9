// Short causal convolutions over the inputs of a sequence's last tokens (specdec/engine/recurrent/convolution.py). An
// output is a sum in the order of its window, in a lane of its own, so that its bits do not depend on the batch.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "simd.h"
#include "thread_pool.h"

using namespace specdec;

namespace {

struct Convolution {
  int64_t channels, before, is_silu;
  const float *taps, *bias;  // [before + 1, channels]; [channels] or null
  float *states, *kept;      // [slots, before, channels]; [rows, channels]; or null
};

// Of a pass; see StatePlan.
struct Windows {
  int64_t num_spans, num_repeated, num_rows, num_saved, num_kept;
  const int64_t *read, *repeated, *window, *saved, *written, *kept_rows, *kept_places;
};

}  // namespace

extern "C" {

// rows [num_rows, channels], `stride` apart; out [num_rows, channels].
void specdec_convolve(void* pool, const Convolution* convolution, const Windows* windows, const float* rows,
                      int64_t stride, float* out) {
  const Convolution& c = *convolution;
  const Windows& w = *windows;
  const int64_t first_repeated = w.num_spans * c.before, first_row = first_repeated + w.num_repeated;
  // The inputs that an index of a window names; null: zeros before a sequence's start.
  const auto source = [&](int64_t index) -> const float* {
    if (index >= first_row) return rows + (index - first_row) * stride;
    if (index >= first_repeated) return c.kept + w.repeated[index - first_repeated] * c.channels;
    const int64_t slot = w.read[index / c.before];
    return c.states == nullptr || slot < 0 ? nullptr : c.states + (slot * c.before + index % c.before) * c.channels;
  };
  static_cast<ThreadPool*>(pool)->run([&](int thread, int num_threads) {
    const Share vectors((c.channels + kLanes - 1) / kLanes, thread, num_threads);
    const int64_t begin = vectors.begin * kLanes, end = std::min(vectors.end * kLanes, c.channels);
    if (begin >= end) return;
    std::vector<const float*> from(c.before);
    for (int64_t row = 0; row < w.num_rows; ++row) {
      for (int64_t place = 0; place < c.before; ++place) from[place] = source(w.window[row * c.before + place]);
      for (int64_t at = begin; at < end; at += kLanes) {
        const int count = static_cast<int>(std::min<int64_t>(kLanes, end - at));
        const auto get = [&](const float* p) { return count == kLanes ? load(p + at) : load_head(p + at, count); };
        Vec sum = get(rows + row * stride) * get(c.taps + c.before * c.channels);
        for (int64_t place = 0; place < c.before; ++place)
          if (from[place] != nullptr) sum = sum + get(from[place]) * get(c.taps + place * c.channels);
        if (c.bias != nullptr) sum = sum + get(c.bias);
        store_head(out + row * c.channels + at, c.is_silu ? silu(sum) : sum, count);
      }
    }
    // A state is written after it was read; places ascend, as its own later inputs move to the front.
    const int64_t bytes = (end - begin) * sizeof(float);
    for (int64_t state = 0; state < w.num_saved; ++state)
      for (int64_t place = 0; place < c.before; ++place) {
        float* to = c.states + (w.written[state] * c.before + place) * c.channels + begin;
        const float* input = source(w.saved[state * c.before + place]);
        if (input == nullptr)
          std::memset(to, 0, bytes);
        else
          std::memmove(to, input + begin, bytes);
      }
    for (int64_t index = 0; index < w.num_kept; ++index)
      std::memcpy(c.kept + w.kept_places[index] * c.channels + begin, rows + w.kept_rows[index] * stride + begin, bytes);
  });
}

}  // extern "C"
