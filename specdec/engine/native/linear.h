// Products with a packed weight (packed.h). Each output is one accumulator that adds k = 0, 1, 2, ... in order by fused
// multiply-add, for any number of rows in its block, so that bits do not depend on the batch.
#pragma once

#include <algorithm>

#include "packed.h"
#include "thread_pool.h"

namespace specdec {

// Panels that a block of rows multiplies at once. With few rows, more panels keep accumulators from waiting for their
// last addition; with many rows, registers allow fewer panels.
constexpr int panels_together(int rows) {
  if (kLanes == 16) return rows <= 6 ? 2 : 1;
  if (kLanes == 8 && rows > 1) return rows <= 3 ? 2 : 1;
  return rows == 1 ? 4 : 1;
}

constexpr int kMostAccumulators = kMaxRows * kPanelVectors;  // of a block, over all its panels

// Multiplies a block of rows (x_stride apart) with adjacent panels (panel_stride bytes apart). out:
// [panels][rows][kPanelVectors].
using BlockProduct = void (*)(const uint8_t* panel, int64_t panel_stride, const float* x, int64_t x_stride,
                              int64_t depth, Vec* out);

// The product for a block of 1 .. kMaxRows rows and 1, 2 or 4 panels, at most panels_together(rows).
BlockProduct block_product(int64_t format, int rows, int panels);

// Calls body(first_row, rows) for blocks of nearly equal size, at most kMaxRows.
template <typename Body>
inline void for_row_blocks(int64_t num_rows, const Body& body) {
  const int64_t num_blocks = (num_rows + kMaxRows - 1) / kMaxRows;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t first = num_rows * block / num_blocks, end = num_rows * (block + 1) / num_blocks;
    body(first, static_cast<int>(end - first));
  }
}

// Multiplies rows x [num_rows, depth] with panels [begin, end). Calls sink(panel, first_row, rows, sums) with sums
// [rows][kPanelVectors].
template <typename Sink>
inline void multiply(const PackedWeight& weight, int64_t begin, int64_t end, const float* x, int64_t x_stride,
                     int64_t num_rows, int64_t depth, const Sink& sink) {
  const int64_t stride = panel_bytes(weight.format, depth);
  const int most = panels_together(static_cast<int>(std::min<int64_t>(num_rows, kMaxRows)));
  int together = most;
  for (int64_t panel = begin; panel < end; panel += together) {
    while (panel + together > end) together /= 2;
    for_row_blocks(num_rows, [&](int64_t first, int rows) {
      Vec sums[kMostAccumulators];
      block_product(weight.format, rows, together)(weight.panels + panel * stride, stride, x + first * x_stride,
                                                   x_stride, depth, sums);
      for (int p = 0; p < together; ++p) sink(panel + p, first, rows, sums + p * rows * kPanelVectors);
    });
  }
}

// Writes a panel's sums (plus bias, if any) to y, or adds them with `add`; skips columns past num_outputs.
template <bool add>
inline void write_panel(const Vec* sums, int rows, int64_t panel, const float* bias, int64_t num_outputs, float* y,
                        int64_t y_stride) {
  for (int j = 0; j < kPanelVectors; ++j) {
    const int64_t column = panel * kPanel + j * kLanes;
    const int width = static_cast<int>(std::min<int64_t>(kLanes, num_outputs - column));
    if (width <= 0) return;
    const Vec shift = bias == nullptr ? Vec{} : width == kLanes ? load(bias + column) : load_head(bias + column, width);
    for (int r = 0; r < rows; ++r) {
      float* target = y + r * y_stride + column;
      const Vec sum = sums[r * kPanelVectors + j];
      Vec value = bias == nullptr ? sum : sum + shift;
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

// y [num_rows, width] = silu(gate) * up, for pairs of panels of a weight in which panels of gate and up alternate.
// Biases, if any, are padded with zeros to whole panels.
inline void multiply_gated(const PackedWeight& weight, const Share& pairs, const float* x, int64_t num_rows,
                           int64_t depth, int64_t width, const float* gate_bias, const float* up_bias, float* y) {
  const int64_t stride = panel_bytes(weight.format, depth);
  const auto add_bias = [](Vec* sums, int rows, const float* bias, int64_t panel) {
    if (bias == nullptr) return;
    for (int i = 0; i < rows * kPanelVectors; ++i)
      sums[i] = sums[i] + load(bias + panel * kPanel + i % kPanelVectors * kLanes);
  };
  for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
    const uint8_t* panel = weight.panels + 2 * pair * stride;
    for_row_blocks(num_rows, [&](int64_t first, int rows) {
      const float* block = x + first * depth;
      Vec sums[2 * kMostAccumulators];
      Vec *gates = sums, *ups = sums + rows * kPanelVectors;
      const int together = std::min(panels_together(rows), 2);
      const BlockProduct product = block_product(weight.format, rows, together);
      product(panel, stride, block, depth, depth, gates);
      if (together == 1) product(panel + stride, stride, block, depth, depth, ups);
      add_bias(gates, rows, gate_bias, pair);
      add_bias(ups, rows, up_bias, pair);
      for (int i = 0; i < rows * kPanelVectors; ++i) gates[i] = silu(gates[i]) * ups[i];
      write_panel<false>(gates, rows, pair, nullptr, width, y + first * width, width);
    });
  }
}

}  // namespace specdec
