// The inner loops of products, one per format, number of rows and number of panels.

#include "linear.h"

namespace specdec {
namespace {

constexpr int64_t kPrefetchBytes = 16384;  // bytes of a weight that are prefetched
constexpr int kLineBytes = 64;

template <Format format, int rows, int panels>
void multiply_block(const uint8_t* panel, int64_t panel_stride, const float* x, int64_t x_stride, int64_t depth,
                    Vec* out) {
  using Reader = Panel<format>;
  // Few rows read whole cache lines; with more, unrolling costs registers, more than a second prefetch of a line.
  constexpr int kSteps = rows <= 2 ? Reader::kChunk : Reader::kLeastChunk;
  constexpr int kStepsBytes = Reader::offset(kSteps) - Reader::offset(0);
  Vec sums[panels][rows][kPanelVectors];
  for (int p = 0; p < panels; ++p)
    for (int r = 0; r < rows; ++r)
      for (int j = 0; j < kPanelVectors; ++j) sums[p][r][j] = Vec{};
  Reader readers[panels];
  const auto add = [&](int64_t begin, int64_t step) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int p = 0; p < panels; ++p) {
      Vec column[kPanelVectors];
      readers[p].column(begin, step, column);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        const Vec value = splat(x[r * x_stride + begin + step]);
#pragma GCC unroll 4
        for (int j = 0; j < kPanelVectors; ++j) sums[p][r][j] = fma(value, column[j], sums[p][r][j]);
      }
    }
  };
  constexpr int64_t kAhead = kPrefetchBytes / panels;
  const int64_t last = panel_stride - kAhead;  // from here on the next panels are prefetched
  for (int64_t k = 0, end = 0; k < depth; k = end) {
    end = Reader::kSegment == 0 ? depth : std::min(depth, k + Reader::kSegment);
#pragma GCC unroll 4
    for (int p = 0; p < panels; ++p) readers[p].enter(panel + p * panel_stride, k);
    for (; k + kSteps <= end; k += kSteps) {
      const int64_t at = Reader::offset(k), skipped = at < last ? 0 : (panels - 1) * panel_stride;
#pragma GCC unroll 4
      for (int p = 0; p < panels; ++p)
        for (int line = 0; line < kStepsBytes; line += kLineBytes)
          __builtin_prefetch(panel + p * panel_stride + at + skipped + kAhead + line);
#pragma GCC unroll 8
      for (int step = 0; step < kSteps; ++step) add(k, step);
    }
    for (int64_t step = 0; k + step < end; ++step) add(k, step);
  }
  for (int p = 0; p < panels; ++p)
    for (int r = 0; r < rows; ++r)
      for (int j = 0; j < kPanelVectors; ++j) out[(p * rows + r) * kPanelVectors + j] = sums[p][r][j];
}

template <Format format, int panels, int rows = kMaxRows>
BlockProduct for_rows(int count) {
  if constexpr (rows > 1) {
    if (count < rows) return for_rows<format, panels, rows - 1>(count);
  }
  if constexpr (panels <= panels_together(rows)) {
    static_assert(panels * rows * kPanelVectors <= kMostAccumulators);
    return multiply_block<format, rows, panels>;
  }
  return nullptr;
}

}  // namespace

BlockProduct block_product(int64_t format, int rows, int panels) {
  return with_format(format, [&]<Format f>() {
    return panels == 1 ? for_rows<f, 1>(rows) : panels == 2 ? for_rows<f, 2>(rows) : for_rows<f, 4>(rows);
  });
}

}  // namespace specdec
