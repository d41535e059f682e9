// Attention of one row and one key/value head over the paged cache.
//
// Keys are taken in the order of their positions, in tiles of kTile positions that start at multiples of kTile;
// within a tile every sum has a fixed order, and tiles are folded from left to right by online softmax. So a row's
// bits depend on its own keys only, not on which slots hold them or on what else is in the batch.
#pragma once

#include <algorithm>

#include "simd.h"

namespace specdec {

constexpr int kTile = 16;
constexpr int kMaxHeadDim = 512;

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
};

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

// out = out * decay + sum over the tile of weight * value, in order.
template <int fixed>
inline void weigh_tile(const float* weights, const float* const* values, const HeadShape& shape, float decay, float* out) {
  if constexpr (fixed > 0) {
    Vec acc[fixed];
#pragma GCC unroll 16
    for (int c = 0; c < fixed; ++c) acc[c] = load(out + c * kLanes) * splat(decay);
    for (int j = 0; j < kTile; ++j) {
      const Vec weight = splat(weights[j]);
#pragma GCC unroll 16
      for (int c = 0; c < fixed; ++c) acc[c] = fma(weight, load(values[j] + c * kLanes), acc[c]);
    }
#pragma GCC unroll 16
    for (int c = 0; c < fixed; ++c) store(out + c * kLanes, acc[c]);
  } else {
    for (int c = 0; c < shape.chunks; ++c) {
      Vec acc = load(out + c * kLanes) * splat(decay);
      for (int j = 0; j < kTile; ++j) acc = fma(splat(weights[j]), shape.load_chunk(values[j], c), acc);
      store(out + c * kLanes, acc);
    }
  }
}

// Scores (scaled, capped, masked) become weights; updates the running peak and total, returns the decay.
inline float soften_tile(float* scores, const AttentionView& layer, int64_t tile, int64_t first, int64_t position,
                         float* peak, float* total) {
  constexpr int kVectors = kTile / kLanes;
  Vec s[kVectors];
  Vec top = splat(-std::numeric_limits<float>::infinity());
  if (layer.softcap > 0)
    for (int j = 0; j < kTile; ++j) scores[j] = layer.softcap * std::tanh(scores[j] * layer.scaling / layer.softcap);
  const bool is_whole = tile >= first && tile + kTile - 1 <= position;
  for (int i = 0; i < kVectors; ++i) {
    s[i] = load(scores + i * kLanes);
    if (!(layer.softcap > 0)) s[i] = s[i] * splat(layer.scaling);
    if (!is_whole)
      for (int l = 0; l < kLanes; ++l) {
        const int64_t at = tile + i * kLanes + l;
        if (at < first || at > position) s[i][l] = -std::numeric_limits<float>::infinity();
      }
    top = max(top, s[i]);
  }
  const float new_peak = std::max(*peak, maximum(top));
  const float decay = new_peak == *peak ? 1.0f : exp(splat(*peak - new_peak))[0];
  Vec tile_total{};
  for (int i = 0; i < kVectors; ++i) {
    const Vec weight = exp(s[i] - splat(new_peak));
    tile_total = tile_total + weight;
    store(scores + i * kLanes, weight);
  }
  *total = *total * decay + sum(tile_total);
  *peak = new_peak;
  return decay;
}

// Attends for query heads first_head .. first_head + count, which share a kv head. Head h has its query at
// query + h * query_stride and its result at out + h * value_dim, h counted from 0 over all heads.
template <int fixed_key, int fixed_value>
inline void attend_heads(const BatchView& batch, const AttentionView& layer, int64_t row, int64_t first_head,
                         int64_t count, const float* query, int64_t query_stride, float* out) {
  constexpr int64_t kHeadsAtOnce = 8;
  const HeadShape key_shape(layer.key_dim), value_shape(layer.value_dim);
  const int64_t kv_head = first_head / (layer.num_heads / layer.num_kv_heads);
  const int64_t position = batch.position_ids[row];
  const int64_t first = layer.sliding_window > 0 ? std::max<int64_t>(0, position - layer.sliding_window + 1) : 0;
  alignas(64) float queries[kHeadsAtOnce][kMaxHeadDim], sums[kHeadsAtOnce][kMaxHeadDim];
  for (int64_t start = first_head; start < first_head + count; start += kHeadsAtOnce) {
    const int64_t heads = std::min(kHeadsAtOnce, first_head + count - start);
    float peak[kHeadsAtOnce], total[kHeadsAtOnce];
    for (int64_t h = 0; h < heads; ++h) {
      const float* source = query + (start + h) * query_stride;
      for (int c = 0; c < key_shape.chunks; ++c) store(queries[h] + c * kLanes, key_shape.load_chunk(source, c));
      for (int c = 0; c < value_shape.chunks; ++c) store(sums[h] + c * kLanes, Vec{});
      peak[h] = layer.sinks == nullptr ? -1e30f : layer.sinks[start + h];
      total[h] = layer.sinks == nullptr ? 0.0f : 1.0f;
    }
    for (int64_t tile = first / kTile * kTile; tile <= position; tile += kTile) {
      const float *keys[kTile], *values[kTile];
      for (int j = 0; j < kTile; ++j) {
        const int64_t at = std::min(std::max(tile + j, first), position);  // masked lanes read some valid slot
        const int64_t slot = slot_of_position(batch, row, at);
        keys[j] = slot_address(layer.keys, slot, kv_head, layer.num_kv_heads, batch.block_size, layer.key_dim);
        values[j] = slot_address(layer.values, slot, kv_head, layer.num_kv_heads, batch.block_size, layer.value_dim);
      }
      for (int64_t h = 0; h < heads; ++h) {
        alignas(64) float scores[kTile];
        score_tile<fixed_key>(queries[h], keys, key_shape, scores);
        const float decay = soften_tile(scores, layer, tile, first, position, &peak[h], &total[h]);
        weigh_tile<fixed_value>(scores, values, value_shape, decay, sums[h]);
      }
    }
    for (int64_t h = 0; h < heads; ++h)
      for (int c = 0; c < value_shape.chunks; ++c)
        value_shape.store_chunk(out + (start + h) * layer.value_dim, c, load(sums[h] + c * kLanes) / splat(total[h]));
  }
}

inline void attend(const BatchView& batch, const AttentionView& layer, int64_t row, int64_t first_head, int64_t count,
                   const float* query, int64_t query_stride, float* out) {
  if (layer.key_dim == 64 && layer.value_dim == 64)
    attend_heads<64 / kLanes, 64 / kLanes>(batch, layer, row, first_head, count, query, query_stride, out);
  else if (layer.key_dim == 128 && layer.value_dim == 128)
    attend_heads<128 / kLanes, 128 / kLanes>(batch, layer, row, first_head, count, query, query_stride, out);
  else if (layer.key_dim == 32 && layer.value_dim == 32)
    attend_heads<32 / kLanes, 32 / kLanes>(batch, layer, row, first_head, count, query, query_stride, out);
  else
    attend_heads<0, 0>(batch, layer, row, first_head, count, query, query_stride, out);
}

// Attention of all rows and heads, of which this thread takes its part: every num_threads-th item, so that the rising
// costs of a prefill chunk's rows spread evenly. row_stride, head_stride: of the queries. out [rows, heads, value_dim].
inline void attend_rows(const BatchView& batch, const AttentionView& layer, const float* query, int64_t row_stride,
                        int64_t head_stride, float* out, int thread, int num_threads) {
  const int64_t group = layer.num_heads / layer.num_kv_heads;
  int64_t per_item = group;  // heads that read the same keys stay together, unless that leaves threads idle
  while (per_item % 2 == 0 && batch.num_rows * layer.num_heads / per_item < num_threads) per_item /= 2;
  if (batch.num_rows * layer.num_heads / per_item < num_threads) per_item = 1;
  const int64_t items_per_row = layer.num_heads / per_item;
  for (int64_t item = thread; item < batch.num_rows * items_per_row; item += num_threads) {
    const int64_t row = item / items_per_row;
    attend(batch, layer, row, item % items_per_row * per_item, per_item, query + row * row_stride, head_stride,
           out + row * layer.num_heads * layer.value_dim);
  }
}

}  // namespace specdec
