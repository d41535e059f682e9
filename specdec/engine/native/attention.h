// Attention of one row and one key/value head over the paged cache. Keys are read in order of position, in tiles of
// kTile positions that start at multiples of kTile. Within a tile every sum has a fixed order; online softmax folds
// tiles from left to right. So a row's bits depend on its own keys only, not on their slots or on the batch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <new>

#include "simd.h"

namespace specdec {

constexpr int kTile = 16;
constexpr int kMaxHeadDim = 512;
constexpr int64_t kMaxStates = 24;  // rows times heads that share a pass over a tile

// Floats per query or running sum: whole vectors if the head's size is known at compile time.
template <int fixed>
constexpr int kStateWidth = fixed > 0 ? fixed * kLanes : kMaxHeadDim;

// Batch metadata, as in specdec/engine/batch.py. Mirrored by a ctypes structure in kernels.py.
struct BatchView {
  int64_t num_rows, num_logits, max_blocks, block_size;
  const int64_t* input_ids;
  const int64_t* position_ids;
  const int64_t* slot_mapping;
  const int32_t* row_seq;
  const int32_t* context_lens;
  const int32_t* path_offsets;
  const int32_t* path_slots;
  const int32_t* block_tables;
  const int64_t* logits_indices;
  const int64_t* tap_layers = nullptr;  // [num_taps] numbers of layers, or kFinalNorm
  int64_t num_taps = 0;
  float* tapped = nullptr;  // [num_rows, num_taps, hidden]
};

constexpr int64_t kFinalNorm = -1;  // after all layers and the final norm, mirrored by FINAL in tap.py

// One layer's cache and rules. Mirrored in kernels.py.
struct AttentionView {
  float* keys;    // [block, kv head, slot, key_dim]
  float* values;  // [block, kv head, slot, value_dim]
  const float* sinks;  // [num_heads] or null
  int64_t num_heads, num_kv_heads, key_dim, value_dim;
  int64_t sliding_window;  // 0: none
  float scaling, softcap;  // softcap 0: none
};

inline float* slot_address(float* store, int64_t slot, int64_t head, int64_t num_heads, int64_t block_size, int64_t dim) {
  return store + ((slot / block_size * num_heads + head) * block_size + slot % block_size) * dim;
}

inline int64_t slot_of_position(const BatchView& batch, int64_t row, int64_t position) {
  const int64_t context = batch.context_lens[row];
  if (position >= context) return batch.path_slots[batch.path_offsets[row] + position - context];
  const int32_t* table = batch.block_tables + batch.row_seq[row] * batch.max_blocks;
  return table[position / batch.block_size] * batch.block_size + position % batch.block_size;
}

// Addresses of the keys and values of one tile.
struct TileAddresses {
  const float *keys[kTile], *values[kTile];

  // Entries of positions outside [first, position] repeat the nearest one inside.
  TileAddresses(const BatchView& batch, const AttentionView& layer, int64_t row, int64_t kv_head, int64_t tile,
                int64_t first, int64_t position) {
    const int64_t low = std::max<int64_t>(first - tile, 0), high = std::min<int64_t>(position - tile, kTile - 1);
    if (batch.block_size % kTile == 0 && tile + high < batch.context_lens[row]) {  // one block, adjacent slots
      const int64_t slot = slot_of_position(batch, row, tile);
      const float* key = slot_address(layer.keys, slot, kv_head, layer.num_kv_heads, batch.block_size, layer.key_dim);
      const float* value =
          slot_address(layer.values, slot, kv_head, layer.num_kv_heads, batch.block_size, layer.value_dim);
      for (int64_t j = 0; j < kTile; ++j) {
        const int64_t at = std::min(std::max(j, low), high);
        keys[j] = key + at * layer.key_dim;
        values[j] = value + at * layer.value_dim;
      }
      return;
    }
    for (int64_t j = 0; j < kTile; ++j) {
      const int64_t slot = slot_of_position(batch, row, tile + std::min(std::max(j, low), high));
      keys[j] = slot_address(layer.keys, slot, kv_head, layer.num_kv_heads, batch.block_size, layer.key_dim);
      values[j] = slot_address(layer.values, slot, kv_head, layer.num_kv_heads, batch.block_size, layer.value_dim);
    }
  }
};

// chunks: number of vectors that cover a head; tail: lanes used of the last one.
struct HeadShape {
  explicit HeadShape(int64_t dim)
      : chunks(static_cast<int>((dim + kLanes - 1) / kLanes)), tail(static_cast<int>(dim - (chunks - 1) * kLanes)) {}
  int chunks, tail;
  Vec load_chunk(const float* p, int c) const {
    return c + 1 < chunks || tail == kLanes ? load(p + c * kLanes) : load_head(p + c * kLanes, tail);
  }
  void store_chunk(float* p, int c, Vec v) const {
    if (c + 1 < chunks || tail == kLanes)
      store(p + c * kLanes, v);
    else
      store_head(p + c * kLanes, v, tail);
  }
};

// The 16 scores of one query against a tile. fixed > 0: the query has that many whole vectors.
template <int fixed>
inline void score_tile(const float* query, const float* const* keys, const HeadShape& shape, float* scores) {
  const int chunks = fixed > 0 ? fixed : shape.chunks;
  for (int base = 0; base < kTile; base += kLanes) {
    Vec partial[kLanes];
    for (int j = 0; j < kLanes; ++j) {
      const float* key = keys[base + j];
      Vec acc{};
      if constexpr (fixed > 0) {
#pragma GCC unroll 16
        for (int c = 0; c < fixed; ++c) acc = fma(load(query + c * kLanes), load(key + c * kLanes), acc);
      } else {
        for (int c = 0; c < chunks; ++c) acc = fma(load(query + c * kLanes), shape.load_chunk(key, c), acc);
      }
      partial[j] = acc;
    }
    store(scores + base, transposing_sum(partial));
  }
}

// out = out * decay + sum over the tile of weight * value, in order; for `heads` heads that share the values.
template <int fixed, int heads>
inline void weigh_tile(const float (*weights)[kTile], const float* const* values, const HeadShape& shape,
                       const float* decay, float (*out)[kStateWidth<fixed>]) {
  if constexpr (fixed > 0) {
    Vec acc[heads][fixed];
    for (int h = 0; h < heads; ++h)
      for (int c = 0; c < fixed; ++c) acc[h][c] = load(out[h] + c * kLanes) * splat(decay[h]);
#pragma GCC unroll 2
    for (int j = 0; j < kTile; ++j) {
      Vec weight[heads];
      for (int h = 0; h < heads; ++h) weight[h] = splat(weights[h][j]);
#pragma GCC unroll 16
      for (int c = 0; c < fixed; ++c) {
        const Vec value = load(values[j] + c * kLanes);
#pragma GCC unroll 4
        for (int h = 0; h < heads; ++h) acc[h][c] = fma(weight[h], value, acc[h][c]);
      }
    }
    for (int h = 0; h < heads; ++h)
      for (int c = 0; c < fixed; ++c) store(out[h] + c * kLanes, acc[h][c]);
  } else {
    for (int h = 0; h < heads; ++h)
      for (int c = 0; c < shape.chunks; ++c) {
        Vec acc = load(out[h] + c * kLanes) * splat(decay[h]);
        for (int j = 0; j < kTile; ++j) acc = fma(splat(weights[h][j]), shape.load_chunk(values[j], c), acc);
        store(out[h] + c * kLanes, acc);
      }
  }
}

// weigh_tile for any number of heads, as many at once as registers hold.
template <int fixed>
inline void weigh_heads(const float (*weights)[kTile], const float* const* values, const HeadShape& shape,
                        const float* decay, float (*out)[kStateWidth<fixed>], int64_t heads) {
  constexpr int kAtOnce = fixed == 0 ? 1 : std::max(1, std::min(4, (kLanes == 16 ? 24 : 8) / fixed));
  int64_t h = 0;
  for (; h + kAtOnce <= heads; h += kAtOnce)
    weigh_tile<fixed, kAtOnce>(weights + h, values, shape, decay + h, out + h);
  if constexpr (kAtOnce > 3)
    for (; h + 3 <= heads; h += 3) weigh_tile<fixed, 3>(weights + h, values, shape, decay + h, out + h);
  if constexpr (kAtOnce > 2)
    for (; h + 2 <= heads; h += 2) weigh_tile<fixed, 2>(weights + h, values, shape, decay + h, out + h);
  for (; h < heads; ++h) weigh_tile<fixed, 1>(weights + h, values, shape, decay + h, out + h);
}

constexpr int kTileVectors = kTile / kLanes;

// Scales, caps and masks the scores of one query; returns the largest.
inline float mask_tile(float* scores, const AttentionView& layer, int64_t tile, int64_t first, int64_t position) {
  if (layer.softcap > 0) {
    for (int j = 0; j < kTile; ++j) scores[j] = layer.softcap * std::tanh(scores[j] * layer.scaling / layer.softcap);
  } else {
    for (int i = 0; i < kTileVectors; ++i)
      store(scores + i * kLanes, load(scores + i * kLanes) * splat(layer.scaling));
  }
  for (int64_t j = 0; j < first - tile; ++j) scores[j] = -std::numeric_limits<float>::infinity();
  for (int64_t j = position - tile + 1; j < kTile; ++j) scores[j] = -std::numeric_limits<float>::infinity();
  Vec top = load(scores);
  for (int i = 1; i < kTileVectors; ++i) top = max(top, load(scores + i * kLanes));
  return maximum(top);
}

// The running softmax of one query: the largest score so far, and the sum of weights, lane by lane.
struct Softmax {
  float peak;
  Vec total;

  explicit Softmax(const float* sink) : peak(sink == nullptr ? -1e30f : *sink), total{} {
    if (sink != nullptr) total[0] = 1.0f;  // e^(sink - peak)
  }

  // Turns a tile's scores, whose largest is given, into weights. Returns the factor for sums of earlier tiles.
  float fold_tile(float* scores, float largest) {
    const float before = peak;
    peak = std::max(peak, largest);
    const float decay = peak == before ? 1.0f : exp(splat(before - peak))[0];
    total = total * splat(decay);
    for (int i = 0; i < kTileVectors; ++i) {
      const Vec weight = exp(load(scores + i * kLanes) - splat(peak));
      total = total + weight;
      store(scores + i * kLanes, weight);
    }
    return decay;
  }
};

// Queries and results: head h of row r starts at r * row_stride + h * head_stride; out is dense.
struct Rows {
  const float* query;
  int64_t row_stride, head_stride;
  float* out;  // [rows, num_heads, value_dim]
};

// Attends for rows first_row .. first_row + num_rows of one sequence and query heads first_head .. first_head + count
// of one kv head. They share each tile while it is in the L1 cache.
template <int fixed_key, int fixed_value>
inline void attend_block(const BatchView& batch, const AttentionView& layer, const Rows& rows, int64_t first_row,
                         int64_t num_rows, int64_t first_head, int64_t count) {
  const HeadShape key_shape(layer.key_dim), value_shape(layer.value_dim);
  const int64_t kv_head = first_head / (layer.num_heads / layer.num_kv_heads);
  alignas(64) float queries[kMaxStates][kStateWidth<fixed_key>];
  alignas(64) float sums[kMaxStates][kStateWidth<fixed_value>];
  alignas(64) std::byte memory[kMaxStates * sizeof(Softmax)];
  Softmax* softmax = reinterpret_cast<Softmax*>(memory);
  int64_t first[kMaxStates], position[kMaxStates], begin = INT64_MAX, end = -1;
  for (int64_t r = 0; r < num_rows; ++r) {
    position[r] = batch.position_ids[first_row + r];
    first[r] = layer.sliding_window > 0 ? std::max<int64_t>(0, position[r] - layer.sliding_window + 1) : 0;
    begin = std::min(begin, first[r] / kTile * kTile);
    end = std::max(end, position[r]);
    for (int64_t h = 0; h < count; ++h) {
      const int64_t state = r * count + h;
      const float* source = rows.query + (first_row + r) * rows.row_stride + (first_head + h) * rows.head_stride;
      for (int c = 0; c < key_shape.chunks; ++c) store(queries[state] + c * kLanes, key_shape.load_chunk(source, c));
      for (int c = 0; c < value_shape.chunks; ++c) store(sums[state] + c * kLanes, Vec{});
      new (softmax + state) Softmax(layer.sinks == nullptr ? nullptr : layer.sinks + first_head + h);
    }
  }
  for (int64_t tile = begin; tile <= end; tile += kTile)
    for (int64_t r = 0; r < num_rows; ++r) {
      if (tile + kTile <= first[r] || tile > position[r]) continue;
      const TileAddresses addresses(batch, layer, first_row + r, kv_head, tile, first[r], position[r]);
      alignas(64) float scores[kMaxStates][kTile];
      float decay[kMaxStates];
      for (int64_t h = 0; h < count; ++h) {
        score_tile<fixed_key>(queries[r * count + h], addresses.keys, key_shape, scores[h]);
        const float largest = mask_tile(scores[h], layer, tile, first[r], position[r]);
        decay[h] = softmax[r * count + h].fold_tile(scores[h], largest);
      }
      weigh_heads<fixed_value>(scores, addresses.values, value_shape, decay, sums + r * count, count);
    }
  for (int64_t r = 0; r < num_rows; ++r)
    for (int64_t h = 0; h < count; ++h) {
      const int64_t state = r * count + h;
      float* out = rows.out + ((first_row + r) * layer.num_heads + first_head + h) * layer.value_dim;
      const Vec total = splat(sum(softmax[state].total));
      for (int c = 0; c < value_shape.chunks; ++c)
        value_shape.store_chunk(out, c, load(sums[state] + c * kLanes) / total);
    }
}

// attend_block for any number of rows and heads.
inline void attend(const BatchView& batch, const AttentionView& layer, const Rows& rows, int64_t first_row,
                   int64_t num_rows, int64_t first_head, int64_t count) {
  const int64_t heads = std::min<int64_t>(count, kMaxStates), rows_at_once = kMaxStates / heads;
  for (int64_t row = first_row; row < first_row + num_rows; row += rows_at_once)
    for (int64_t head = first_head; head < first_head + count; head += heads) {
      const int64_t some_rows = std::min(rows_at_once, first_row + num_rows - row);
      const int64_t some_heads = std::min(heads, first_head + count - head);
      if (layer.key_dim == 64 && layer.value_dim == 64)
        attend_block<64 / kLanes, 64 / kLanes>(batch, layer, rows, row, some_rows, head, some_heads);
      else if (layer.key_dim == 128 && layer.value_dim == 128)
        attend_block<128 / kLanes, 128 / kLanes>(batch, layer, rows, row, some_rows, head, some_heads);
      else if (layer.key_dim == 32 && layer.value_dim == 32)
        attend_block<32 / kLanes, 32 / kLanes>(batch, layer, rows, row, some_rows, head, some_heads);
      else
        attend_block<0, 0>(batch, layer, rows, row, some_rows, head, some_heads);
    }
}

// Number of rows from `row` on, at most `limit`, that belong to its sequence.
inline int64_t rows_of_sequence(const BatchView& batch, int64_t row, int64_t limit) {
  int64_t count = 1;
  while (count < limit && row + count < batch.num_rows && batch.row_seq[row + count] == batch.row_seq[row]) ++count;
  return count;
}

// Attention of all rows for kv heads [begin, end).
inline void attend_kv_heads(const BatchView& batch, const AttentionView& layer, const Rows& rows, int64_t begin,
                            int64_t end) {
  const int64_t group = layer.num_heads / layer.num_kv_heads;
  for (int64_t row = 0, count; row < batch.num_rows; row += count) {
    count = rows_of_sequence(batch, row, kMaxStates);
    for (int64_t kv_head = begin; kv_head < end; ++kv_head)
      attend(batch, layer, rows, row, count, kv_head * group, group);
  }
}

// This thread's part of the attention of all rows and heads: every num_threads-th block, which spreads the rising costs
// of a prefill's rows evenly.
inline void attend_rows(const BatchView& batch, const AttentionView& layer, const Rows& rows, int thread,
                        int num_threads) {
  const int64_t group = layer.num_heads / layer.num_kv_heads, pairs = batch.num_rows * layer.num_heads;
  int64_t heads = group;  // heads with the same keys stay together unless threads would idle
  while (heads % 2 == 0 && pairs / heads < num_threads) heads /= 2;
  if (pairs / heads < num_threads) heads = 1;
  const int64_t limit = std::min<int64_t>(kMaxStates, std::max<int64_t>(1, pairs / heads / (2 * num_threads)));
  int64_t item = 0;
  for (int64_t row = 0, count; row < batch.num_rows; row += count) {
    count = rows_of_sequence(batch, row, limit);
    for (int64_t head = 0; head < layer.num_heads; head += heads, ++item)
      if (item % num_threads == thread) attend(batch, layer, rows, row, count, head, heads);
  }
}

}  // namespace specdec
