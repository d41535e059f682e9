// The C interface of the CPU kernels, called by ctypes from kernels.py. Sizes are in float32 elements, except of packed
// weights.

#include "attention.h"
#include "linear.h"
#include "thread_pool.h"

using namespace specdec;

namespace {

constexpr int64_t kParallelFlops = 1 << 15;  // below, waking threads costs more than it saves

}  // namespace

extern "C" {

int specdec_lanes() { return kLanes; }
int specdec_max_head_dim() { return kMaxHeadDim; }

void* specdec_pool_create(int num_threads) { return new ThreadPool(num_threads); }
void specdec_pool_destroy(void* pool) { delete static_cast<ThreadPool*>(pool); }

// y [num_rows, num_outputs] = x [num_rows, depth] * weight^T + bias (or null)
void specdec_linear(void* pool_handle, const PackedWeight* weight, const float* bias, const float* x,
                    int64_t num_rows, int64_t depth, int64_t num_outputs, float* y) {
  const auto task = [&](int thread, int num_threads) {
    const Share panels(num_panels(num_outputs), thread, num_threads);
    multiply(*weight, panels.begin, panels.end, x, depth, num_rows, depth,
             [&](int64_t panel, int64_t first_row, int rows, const Vec* sums) {
               write_panel<false>(sums, rows, panel, bias, num_outputs, y + first_row * num_outputs, num_outputs);
             });
  };
  if (num_rows * depth * num_outputs < kParallelFlops)
    task(0, 1);
  else
    static_cast<ThreadPool*>(pool_handle)->run(task);
}

// Writes the rows' keys and values to their slots, then attends. Element (row, head, i) of query, key and value is at
// row * strides[0] + head * strides[1] + i. out: [num_rows, num_heads, value_dim].
void specdec_attention(void* pool_handle, const BatchView* batch, const AttentionView* layer, const float* query,
                       const int64_t* query_strides, const float* key, const int64_t* key_strides, const float* value,
                       const int64_t* value_strides, float* out) {
  for (int64_t row = 0; row < batch->num_rows; ++row)
    for (int64_t head = 0; head < layer->num_kv_heads; ++head) {
      const int64_t slot = batch->slot_mapping[row];
      std::memcpy(slot_address(layer->keys, slot, head, layer->num_kv_heads, batch->block_size, layer->key_dim),
                  key + row * key_strides[0] + head * key_strides[1], layer->key_dim * sizeof(float));
      std::memcpy(slot_address(layer->values, slot, head, layer->num_kv_heads, batch->block_size, layer->value_dim),
                  value + row * value_strides[0] + head * value_strides[1], layer->value_dim * sizeof(float));
    }
  static_cast<ThreadPool*>(pool_handle)->run([&](int thread, int num_threads) {
    attend_rows(*batch, *layer, Rows{query, query_strides[0], query_strides[1], out}, thread, num_threads);
  });
}

}  // extern "C"
