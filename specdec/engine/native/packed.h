// How a weight [N, K] lies in memory: in panels of kPanel outputs, one after the other, padded with zeros. All formats
// hold numbers of float32 exactly, and a product adds them in the same order: its bits do not depend on the format.
//
//   kFloat32    [K][kPanel] numbers
//   kBfloat16   [K][kPanel / 2] words of two outputs that are kLanes apart: a shift and a mask make two vectors of one
#pragma once

#include "simd.h"

namespace specdec {

// Mirrored by WeightFormat in packing.py.
enum Format : int64_t { kFloat32 = 0, kBfloat16 = 1 };

// Mirrored by WeightView in packing.py.
struct PackedWeight {
  const uint8_t* panels;
  int64_t format;
};

typedef uint32_t WordVec __attribute__((vector_size(kLanes * 4), may_alias));

inline WordVec load_words(const uint8_t* p) {
  WordVec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline int64_t num_panels(int64_t num_outputs) { return (num_outputs + kPanel - 1) / kPanel; }

// Reads a panel: column(panel, k, out) gives the kPanel weights of input k. kStepBytes: from one k to the next.
template <Format format>
struct Panel;

template <>
struct Panel<kFloat32> {
  static constexpr int kStepBytes = kPanel * 4;
  static int64_t num_bytes(int64_t depth) { return depth * kStepBytes; }
  static void column(const uint8_t* panel, int64_t k, Vec* out) {
    for (int j = 0; j < kPanelVectors; ++j) out[j] = (Vec)load_words(panel + k * kStepBytes + j * kLanes * 4);
  }
};

template <>
struct Panel<kBfloat16> {
  static constexpr int kStepBytes = kPanel * 2;
  static int64_t num_bytes(int64_t depth) { return depth * kStepBytes; }
  static void column(const uint8_t* panel, int64_t k, Vec* out) {
    for (int j = 0; j < kPanelVectors; j += 2) {
      const WordVec words = load_words(panel + k * kStepBytes + j * kLanes * 2);
      out[j] = (Vec)(words << 16);
      out[j + 1] = (Vec)(words & 0xffff0000u);
    }
  }
};

// Calls body<format>() for a format known at run time.
template <typename Body>
inline auto with_format(int64_t format, const Body& body) {
  return format == kBfloat16 ? body.template operator()<kBfloat16>() : body.template operator()<kFloat32>();
}

inline int64_t panel_bytes(int64_t format, int64_t depth) {
  return with_format(format, [&]<Format f>() { return Panel<f>::num_bytes(depth); });
}

}  // namespace specdec
