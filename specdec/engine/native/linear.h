// Products with a packed weight. A weight [N, K] is packed as panels of kPanel outputs: [N / kPanel][K][kPanel],
// zero-padded. Each output is one accumulator that adds k = 0, 1, 2, ... in order by fused multiply-add, whatever
// the number of rows in its block: bits do not depend on the batch.
#pragma once

#include <algorithm>

#include "simd.h"

namespace specdec {

constexpr int64_t kPrefetchSteps = 64;  // how far ahead of the product the weight is asked for

inline int64_t num_panels(int64_t num_outputs) { return (num_outputs + kPanel - 1) / kPanel; }

// A block of accumulators, rows x one panel.
template <int rows>
struct Accumulators {
  Vec v[rows][kPanelVectors];
};

// Multiplies `rows` rows with `panels` neighbouring panels (each `panel_stride` floats after the last) and
// hands every panel's accumulators to sink(panel, accumulators).
template <int rows, int panels, typename Sink>
inline void multiply_panels(const float* weight, int64_t panel_stride, const float* x, int64_t x_stride, int64_t depth,
                            const Sink& sink) {
  Accumulators<rows> acc[panels];
  for (int p = 0; p < panels; ++p)
    for (int r = 0; r < rows; ++r)
      for (int j = 0; j < kPanelVectors; ++j) acc[p].v[r][j] = Vec{};
  for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 8
    for (int p = 0; p < panels; ++p) {
      const float* w = weight + p * panel_stride + k * kPanel;
      for (int line = 0; line < kPanel; line += 16) __builtin_prefetch(w + kPrefetchSteps * kPanel + line);
      Vec column[kPanelVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kPanelVectors; ++j) column[j] = load(w + j * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        const Vec value = splat(x[r * x_stride + k]);
#pragma GCC unroll 4
        for (int j = 0; j < kPanelVectors; ++j) acc[p].v[r][j] = fma(value, column[j], acc[p].v[r][j]);
      }
    }
  }
  for (int p = 0; p < panels; ++p) sink(p, acc[p]);
}

// Calls body<rows>() for a row count known at run time, 1 .. kMaxRows.
template <int rows = kMaxRows, typename Body>
inline void with_rows(int count, const Body& body) {
  if constexpr (rows > 1) {
    if (count < rows) {
      with_rows<rows - 1>(count, body);
      return;
    }
  }
  body.template operator()<rows>();
}

// Splits `num_rows` into blocks of nearly equal size, at most kMaxRows, and calls body<rows>(first_row).
template <typename Body>
inline void for_row_blocks(int64_t num_rows, const Body& body) {
  const int64_t num_blocks = (num_rows + kMaxRows - 1) / kMaxRows;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t first = num_rows * block / num_blocks, end = num_rows * (block + 1) / num_blocks;
    with_rows(static_cast<int>(end - first), [&]<int rows>() { body.template operator()<rows>(first); });
  }
}

// Multiplies rows x [num_rows, depth] with panels [begin, end); sink(panel, first_row, accumulators) takes the results.
template <typename Sink>
inline void multiply(const float* weight, int64_t begin, int64_t end, const float* x, int64_t x_stride,
                     int64_t num_rows, int64_t depth, const Sink& sink) {
  const int64_t stride = depth * kPanel;
  if (num_rows == 1) {  // several panels at once: one accumulator chain per vector would wait for itself
    constexpr int kTogether = 4;
    for (; begin + kTogether <= end; begin += kTogether)
      multiply_panels<1, kTogether>(weight + begin * stride, stride, x, x_stride, depth,
                                    [&](int p, const auto& acc) { sink(begin + p, int64_t{0}, acc); });
  }
  for (int64_t panel = begin; panel < end; ++panel)
    for_row_blocks(num_rows, [&]<int rows>(int64_t first) {
      multiply_panels<rows, 1>(weight + panel * stride, stride, x + first * x_stride, x_stride, depth,
                               [&](int, const auto& acc) { sink(panel, first, acc); });
    });
}

// Writes accumulators (plus bias, if any) to y, columns past num_outputs left out. With `add`, y is added to.
template <bool add, int rows>
inline void write_panel(const Accumulators<rows>& acc, int64_t panel, const float* bias, int64_t num_outputs, float* y,
                        int64_t y_stride) {
  for (int j = 0; j < kPanelVectors; ++j) {
    const int64_t column = panel * kPanel + j * kLanes;
    const int width = static_cast<int>(std::min<int64_t>(kLanes, num_outputs - column));
    if (width <= 0) return;
    const Vec shift = bias == nullptr ? Vec{} : width == kLanes ? load(bias + column) : load_head(bias + column, width);
    for (int r = 0; r < rows; ++r) {
      float* target = y + r * y_stride + column;
      Vec value = bias == nullptr ? acc.v[r][j] : acc.v[r][j] + shift;
      if (width == kLanes) {
        if constexpr (add) value = load(target) + value;
        store(target, value);
      } else {
        if constexpr (add) value = load_head(target, width) + value;
        store_head(target, value, width);
      }
    }
  }
}

}  // namespace specdec
