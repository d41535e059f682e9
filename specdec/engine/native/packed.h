// Layout of a weight [N, K]: adjacent panels of kPanel outputs, padded with zeros. A format holds float32 numbers
// exactly, and products add them in the same order, so that their bits do not depend on the format.
//
//   kFloat32    [K][kPanel] numbers
//   kBfloat16   [K][kPanel / 2] words of two outputs that are kLanes apart: a shift and a mask make two vectors of one
//   kInt8       [kPanel] scales, [K][kPanel] signed bytes: a number is its byte times its output's scale
//   kInt4       for each group of kGroup inputs: [kPanel] scales as a bfloat16 column, then words of eight nibbles, vectors
//               of an input next to each other: a number is its nibble minus 8, times the scale of its output and group
#pragma once

#include "simd.h"

namespace specdec {

// Mirrored by WeightFormat in packing.py.
enum Format : int64_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3 };

constexpr int kGroup = 32;  // inputs that share a scale in kInt4, mirrored in packing.py

// Mirrored by WeightView in packing.py.
struct PackedWeight {
  const uint8_t* panels;
  int64_t format;
};

typedef uint32_t WordVec __attribute__((vector_size(kLanes * 4), may_alias));

template <typename V>
inline V load_as(const uint8_t* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline int64_t num_panels(int64_t num_outputs) { return (num_outputs + kPanel - 1) / kPanel; }

// Reads a panel. enter(start, k) prepares a segment of kSegment inputs from k on; 0: one segment for all. Inputs are
// read in chunks of kChunk (about a cache line) or kLeastChunk: column(begin, step, out) gives the weights of input
// begin + step of the chunk at offset(begin).
template <Format format>
struct Panel;

template <>
struct Panel<kFloat32> {
  static constexpr int kSegment = 0, kChunk = 1, kLeastChunk = 1;
  static constexpr int64_t offset(int64_t k) { return k * kPanel * 4; }
  static int64_t num_bytes(int64_t depth) { return offset(depth); }

  const uint8_t* panel;
  void enter(const uint8_t* start, int64_t) { panel = start; }
  void column(int64_t begin, int64_t step, Vec* out) const {
    for (int j = 0; j < kPanelVectors; ++j) out[j] = load_as<Vec>(panel + offset(begin + step) + j * kLanes * 4);
  }
};

template <>
struct Panel<kBfloat16> {
  static constexpr int kSegment = 0, kChunk = kPanel < 32 ? 2 : 1, kLeastChunk = 1;
  static constexpr int64_t offset(int64_t k) { return k * kPanel * 2; }
  static int64_t num_bytes(int64_t depth) { return offset(depth); }

  const uint8_t* panel;
  void enter(const uint8_t* start, int64_t) { panel = start; }
  void column(int64_t begin, int64_t step, Vec* out) const {
    for (int j = 0; j < kPanelVectors; j += 2) {
      const WordVec words = load_as<WordVec>(panel + offset(begin + step) + j * kLanes * 2);
      out[j] = (Vec)(words << 16);
      out[j + 1] = (Vec)(words & 0xffff0000u);
    }
  }
};

template <>
struct Panel<kInt8> {
  static constexpr int kSegment = 0, kChunk = 64 / kPanel, kLeastChunk = 1;
  static constexpr int64_t offset(int64_t k) { return kPanel * 4 + k * kPanel; }
  static int64_t num_bytes(int64_t depth) { return offset(depth); }

  const uint8_t* panel;
  Vec scales[kPanelVectors];
  void enter(const uint8_t* start, int64_t) {
    panel = start;
    for (int j = 0; j < kPanelVectors; ++j) scales[j] = load_as<Vec>(start + j * kLanes * 4);
  }
  void column(int64_t begin, int64_t step, Vec* out) const {
    for (int j = 0; j < kPanelVectors; ++j) out[j] = load_bytes(panel + offset(begin + step) + j * kLanes) * scales[j];
  }
};

template <>
struct Panel<kInt4> {
  static constexpr int kSegment = kGroup, kChunk = 8 / kPanelVectors, kLeastChunk = kChunk;  // nibbles of a word
  static constexpr int kScaleBytes = kPanel * 2, kGroupBytes = kScaleBytes + kPanel * kGroup / 2;
  static constexpr int64_t offset(int64_t k) { return k / kGroup * kGroupBytes + kScaleBytes + k % kGroup / 2 * kPanel; }
  static int64_t num_bytes(int64_t depth) { return (depth + kGroup - 1) / kGroup * kGroupBytes; }

  const uint8_t* panel;
  Vec factors[kPanelVectors], shifts[kPanelVectors];
  void enter(const uint8_t* start, int64_t k) {
    panel = start;
    Panel<kBfloat16> scales{start + k / kGroup * kGroupBytes};
    scales.column(0, 0, factors);
    for (int j = 0; j < kPanelVectors; ++j) {
      shifts[j] = factors[j] * splat(-24.0f);
      factors[j] = factors[j] * splat(16.0f);
    }
  }
  // A nibble n in the upper bits of a mantissa is 1 + n / 16; times 16 s, minus 24 s, it is exactly (n - 8) s.
  void column(int64_t begin, int64_t step, Vec* out) const {
    const WordVec words = load_as<WordVec>(panel + offset(begin));
    for (int j = 0; j < kPanelVectors; ++j) {
      const int at = 4 * static_cast<int>(step * kPanelVectors + j);
      const WordVec nibbles = (at < 19 ? words << (19 - at) : words >> (at - 19)) & (15u << 19);
      out[j] = fma((Vec)(nibbles | 0x3f800000u), factors[j], shifts[j]);
    }
  }
};

// Calls body<format>() for a format known at run time.
template <typename Body>
inline auto with_format(int64_t format, const Body& body) {
  switch (format) {
    case kInt4:
      return body.template operator()<kInt4>();
    case kInt8:
      return body.template operator()<kInt8>();
    case kBfloat16:
      return body.template operator()<kBfloat16>();
    default:
      return body.template operator()<kFloat32>();
  }
}

inline int64_t panel_bytes(int64_t format, int64_t depth) {
  return with_format(format, [&]<Format f>() { return Panel<f>::num_bytes(depth); });
}

}  // namespace specdec
