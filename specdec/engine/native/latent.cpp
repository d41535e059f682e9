// Attention over latents (MLA): all query heads share one key per position, and its first numbers are the value. Sums
// are those of attention.h: tiles of kTile positions from left to right, a fixed order within a tile. A tile is copied
// once for a block of heads, and registers hold some heads times some keys at once.

#include <vector>

#include "attention.h"
#include "linear.h"
#include "thread_pool.h"

using namespace specdec;

namespace {

constexpr int kHeads = kLanes == 16 ? 4 : 2;  // heads whose sums are in registers
constexpr int kAtOnce = 4;                    // keys, or vectors of a value, whose sums are in registers
constexpr int64_t kBlockHeads = 32;           // heads that share a copy of a tile

class HeadBlock {
 public:
  HeadBlock(const BatchView& batch, const AttentionView& layer, const Rows& rows)
      : batch_(batch), layer_(layer), rows_(rows), key_shape_(layer.key_dim), value_shape_(layer.value_dim),
        width_(key_shape_.chunks * kLanes), memory_((2 * kBlockHeads + kTile) * width_) {}

  // Attends for heads [first_head, first_head + count) of one row; count <= kBlockHeads.
  void attend(int64_t row, int64_t first_head, int64_t count) {
    const int64_t position = batch_.position_ids[row];
    const int64_t first = layer_.sliding_window > 0 ? std::max<int64_t>(0, position - layer_.sliding_window + 1) : 0;
    std::vector<Softmax> softmax;
    for (int64_t h = 0; h < count; ++h) {
      const float* source = rows_.query + row * rows_.row_stride + (first_head + h) * rows_.head_stride;
      for (int c = 0; c < key_shape_.chunks; ++c) store(query(h) + c * kLanes, key_shape_.load_chunk(source, c));
      std::fill(sums(h), sums(h) + width_, 0.0f);
      softmax.emplace_back(layer_.sinks == nullptr ? nullptr : layer_.sinks + first_head + h);
    }
    for (int64_t tile = first / kTile * kTile; tile <= position; tile += kTile) {
      const TileAddresses addresses(batch_, layer_, row, 0, tile, first, position);
      for (int j = 0; j < kTile; ++j)
        for (int c = 0; c < key_shape_.chunks; ++c)
          store(key(j) + c * kLanes, key_shape_.load_chunk(addresses.keys[j], c));
      for (int64_t h = 0; h < count; h += kHeads)
        if (h + kHeads <= count) {
          fold<kHeads>(h, tile, first, position, softmax.data());
        } else {
          for (int64_t single = h; single < count; ++single) fold<1>(single, tile, first, position, softmax.data());
        }
    }
    for (int64_t h = 0; h < count; ++h) {
      float* out = rows_.out + (row * layer_.num_heads + first_head + h) * layer_.value_dim;
      const Vec total = splat(sum(softmax[h].total));
      for (int c = 0; c < value_shape_.chunks; ++c)
        value_shape_.store_chunk(out, c, load(sums(h) + c * kLanes) / total);
    }
  }

 private:
  float* query(int64_t head) { return memory_.data() + head * width_; }
  float* sums(int64_t head) { return memory_.data() + (kBlockHeads + head) * width_; }
  float* key(int64_t j) { return memory_.data() + (2 * kBlockHeads + j) * width_; }

  template <int heads>
  void fold(int64_t head, int64_t tile, int64_t first, int64_t position, Softmax* softmax) {
    float scores[heads][kTile], decay[heads];
    score<heads>(head, scores);
    for (int h = 0; h < heads; ++h) {
      const float largest = mask_tile(scores[h], layer_, tile, first, position);
      decay[h] = softmax[head + h].fold_tile(scores[h], largest);
    }
    for (int c = 0; c < value_shape_.chunks; c += kAtOnce)
      if (c + kAtOnce <= value_shape_.chunks) {
        weigh<heads, kAtOnce>(head, c, scores, decay);
      } else {
        for (int single = c; single < value_shape_.chunks; ++single) weigh<heads, 1>(head, single, scores, decay);
      }
  }

  template <int heads>
  void score(int64_t head, float (*scores)[kTile]) {
    Vec partial[heads][kTile];
    const float *q = query(head), *k = key(0);
    for (int j = 0; j < kTile; j += kAtOnce) {
      Vec acc[heads][kAtOnce] = {};
      for (int64_t i = 0; i < width_; i += kLanes) {
        Vec keys[kAtOnce];
        for (int n = 0; n < kAtOnce; ++n) keys[n] = load(k + (j + n) * width_ + i);
#pragma GCC unroll 4
        for (int h = 0; h < heads; ++h) {
          const Vec number = load(q + h * width_ + i);
#pragma GCC unroll 4
          for (int n = 0; n < kAtOnce; ++n) acc[h][n] = fma(number, keys[n], acc[h][n]);
        }
      }
      for (int h = 0; h < heads; ++h)
        for (int n = 0; n < kAtOnce; ++n) partial[h][j + n] = acc[h][n];
    }
    for (int h = 0; h < heads; ++h)
      for (int base = 0; base < kTile; base += kLanes) store(scores[h] + base, transposing_sum(partial[h] + base));
  }

  template <int heads, int vectors>
  void weigh(int64_t head, int chunk, const float (*weights)[kTile], const float* decay) {
    float *out = sums(head) + chunk * kLanes, *value = key(0) + chunk * kLanes;
    Vec acc[heads][vectors];
    for (int h = 0; h < heads; ++h)
      for (int n = 0; n < vectors; ++n) acc[h][n] = load(out + h * width_ + n * kLanes) * splat(decay[h]);
    for (int j = 0; j < kTile; ++j) {
      Vec values[vectors];
      for (int n = 0; n < vectors; ++n) values[n] = load(value + j * width_ + n * kLanes);
#pragma GCC unroll 4
      for (int h = 0; h < heads; ++h) {
        const Vec weight = splat(weights[h][j]);
#pragma GCC unroll 4
        for (int n = 0; n < vectors; ++n) acc[h][n] = fma(weight, values[n], acc[h][n]);
      }
    }
    for (int h = 0; h < heads; ++h)
      for (int n = 0; n < vectors; ++n) store(out + h * width_ + n * kLanes, acc[h][n]);
  }

  const BatchView& batch_;
  const AttentionView& layer_;
  const Rows& rows_;
  const HeadShape key_shape_, value_shape_;
  const int64_t width_;  // floats per query, sum and key: whole vectors
  std::vector<float> memory_;
};

}  // namespace

extern "C" {

// Writes the rows' latents to their slots, then attends. layer: one kv head, whose values are in its keys. Element
// (row, head, i) of query is at row * strides[0] + head * strides[1] + i; key: [num_rows, key_dim], rows key_stride
// apart. out: [num_rows, num_heads, value_dim].
void specdec_latent_attention(void* pool_handle, const BatchView* batch, const AttentionView* layer,
                              const float* query, const int64_t* strides, const float* key, int64_t key_stride,
                              float* out) {
  for (int64_t row = 0; row < batch->num_rows; ++row)
    std::memcpy(slot_address(layer->keys, batch->slot_mapping[row], 0, 1, batch->block_size, layer->key_dim),
                key + row * key_stride, layer->key_dim * sizeof(float));
  static_cast<ThreadPool*>(pool_handle)->run([&](int thread, int num_threads) {
    int64_t heads = kBlockHeads;  // fewer where threads would idle
    while (heads > kHeads && batch->num_rows * ((layer->num_heads + heads - 1) / heads) < 2 * num_threads) heads /= 2;
    const Rows rows{query, strides[0], strides[1], out};
    HeadBlock block(*batch, *layer, rows);
    int64_t item = 0;
    for (int64_t row = 0; row < batch->num_rows; ++row)
      for (int64_t head = 0; head < layer->num_heads; head += heads, ++item)
        if (item % num_threads == thread) block.attend(row, head, std::min(heads, layer->num_heads - head));
  });
}

// y = x * weight^T with a weight [num_outputs, depth] per head. Element (row, head, i) of x is at row * x_strides[0] +
// head * x_strides[1] + i, and y likewise.
void specdec_linear_heads(void* pool_handle, const PackedWeight* weights, int64_t num_heads, const float* x,
                          const int64_t* x_strides, int64_t num_rows, int64_t depth, int64_t num_outputs, float* y,
                          const int64_t* y_strides) {
  const int64_t panels = num_panels(num_outputs);
  static_cast<ThreadPool*>(pool_handle)->run([&](int thread, int num_threads) {
    const Share own(num_heads * panels, thread, num_threads);
    for (int64_t item = own.begin; item < own.end;) {
      const int64_t head = item / panels, end = std::min(own.end, (head + 1) * panels);
      multiply(weights[head], item - head * panels, end - head * panels, x + head * x_strides[1], x_strides[0],
               num_rows, depth, [&](int64_t panel, int64_t first_row, int rows, const Vec* sums) {
                 write_panel<false>(sums, rows, panel, nullptr, num_outputs,
                                    y + first_row * y_strides[0] + head * y_strides[1], y_strides[0]);
               });
      item = end;
    }
  });
}

}  // extern "C"
