// Packs weights into panels (packed.h); called by ctypes from packing.py.

#include <sys/mman.h>

#include <algorithm>
#include <cmath>

#include "packed.h"

using namespace specdec;

namespace {

constexpr float kLargestScale = 1e30f;  // its multiples do not overflow

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// One panel of up to kPanel outputs from weight [width, depth].
void pack_float32(const float* weight, int64_t width, int64_t depth, uint8_t* panel) {
  float column[kPanel] = {};
  for (int64_t k = 0; k < depth; ++k, panel += sizeof column) {
    for (int64_t n = 0; n < width; ++n) column[n] = weight[n * depth + k];
    std::memcpy(panel, column, sizeof column);
  }
}

void pack_bfloat16(const float* weight, int64_t width, int64_t depth, uint8_t* panel) {
  for (int64_t k = 0; k < depth; ++k) {
    uint32_t words[kPanel / 2] = {};
    for (int64_t n = 0; n < width; ++n) {
      const int64_t vector = n / kLanes, word = vector / 2 * kLanes + n % kLanes;
      words[word] |= vector % 2 == 0 ? bits_of(weight[n * depth + k]) >> 16 : bits_of(weight[n * depth + k]);
    }
    std::memcpy(panel, words, sizeof words);
    panel += sizeof words;
  }
}

// The scale of an output: its largest magnitude is 127 steps.
float int8_scale(const float* numbers, int64_t count) {
  float largest = 0.0f;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(numbers[i]));
  return largest / 127.0f;
}

// The scale of a group: its number of largest magnitude is -8 steps, so a scale may be negative.
float int4_scale(const float* numbers, int64_t count) {
  float largest = 0.0f;
  for (int64_t i = 0; i < count; ++i)
    if (std::fabs(numbers[i]) > std::fabs(largest)) largest = numbers[i];
  return largest / -8.0f;
}

// A number in steps of a scale.
int steps_to(float number, float scale) {
  return scale == 0.0f ? 0 : static_cast<int>(std::nearbyint(number / scale));
}

// Whether all numbers are whole steps in [least, most] of a scale.
bool are_steps(const float* numbers, int64_t count, float scale, int least, int most) {
  if (!(std::fabs(scale) <= kLargestScale)) return false;
  for (int64_t i = 0; i < count; ++i) {
    const int steps = steps_to(numbers[i], scale);
    if (steps < least || steps > most || static_cast<float>(steps) * scale != numbers[i]) return false;
  }
  return true;
}

bool fits_int8(const float* numbers, int64_t num_outputs, int64_t depth) {
  for (int64_t n = 0; n < num_outputs; ++n, numbers += depth)
    if (!are_steps(numbers, depth, int8_scale(numbers, depth), -127, 127)) return false;
  return true;
}

bool fits_int4(const float* numbers, int64_t num_outputs, int64_t depth) {
  for (int64_t n = 0; n < num_outputs; ++n)
    for (int64_t k = 0; k < depth; k += kGroup) {
      const int64_t count = std::min<int64_t>(kGroup, depth - k);
      const float* group = numbers + n * depth + k;
      const float scale = int4_scale(group, count);
      if ((bits_of(scale) & 0xffff) != 0 || !are_steps(group, count, scale, -8, 7)) return false;
    }
  return true;
}

// Whether all numbers are bfloat16: the lower halves of their bits are zero.
bool fits_bfloat16(const float* numbers, int64_t count) {
  constexpr int64_t kChunk = 4096;  // numbers between checks
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    uint32_t lower = 0;
    for (int64_t i = begin; i < std::min(begin + kChunk, count); ++i) lower |= bits_of(numbers[i]) << 16;
    if (lower != 0) return false;
  }
  return true;
}

void pack_int8(const float* weight, int64_t width, int64_t depth, uint8_t* panel) {
  float scales[kPanel] = {};
  for (int64_t n = 0; n < width; ++n) scales[n] = int8_scale(weight + n * depth, depth);
  std::memcpy(panel, scales, sizeof scales);
  for (int64_t k = 0; k < depth; ++k) {
    int8_t bytes[kPanel] = {};
    for (int64_t n = 0; n < width; ++n) bytes[n] = static_cast<int8_t>(steps_to(weight[n * depth + k], scales[n]));
    std::memcpy(panel + Panel<kInt8>::offset(k), bytes, sizeof bytes);
  }
}

void pack_int4(const float* weight, int64_t width, int64_t depth, uint8_t* panel) {
  constexpr int kChunk = Panel<kInt4>::kChunk;
  for (int64_t group = 0; group < depth; group += kGroup, panel += Panel<kInt4>::kGroupBytes) {
    const int64_t count = std::min<int64_t>(kGroup, depth - group);
    float scales[kPanel] = {};
    for (int64_t n = 0; n < width; ++n) scales[n] = int4_scale(weight + n * depth + group, count);
    pack_bfloat16(scales, kPanel, 1, panel);
    for (int64_t k = 0; k < count; k += kChunk) {
      uint32_t words[kLanes] = {};
      for (int64_t step = 0; step < std::min<int64_t>(kChunk, count - k); ++step)
        for (int64_t n = 0; n < width; ++n) {
          const uint32_t nibble = 8 + steps_to(weight[n * depth + group + k + step], scales[n]);
          words[n % kLanes] |= nibble << 4 * (step * kPanelVectors + n / kLanes);
        }
      std::memcpy(panel + Panel<kInt4>::offset(k), words, sizeof words);
    }
  }
}

}  // namespace

extern "C" {

// Requests large pages: a step reads all weights once, and small pages would cost a table walk every 4 KiB.
void specdec_advise_large_pages(void* memory, int64_t num_bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + num_bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// Whether a format holds all numbers of weight [num_outputs, depth] exactly.
int specdec_fits(const float* weight, int64_t num_outputs, int64_t depth, int64_t format) {
  switch (format) {
    case kInt4:
      return fits_int4(weight, num_outputs, depth);
    case kInt8:
      return fits_int8(weight, num_outputs, depth);
    case kBfloat16:
      return fits_bfloat16(weight, num_outputs * depth);
    default:
      return 1;
  }
}

int specdec_panel_width() { return kPanel; }

int64_t specdec_packed_bytes(int64_t num_outputs, int64_t depth, int64_t format) {
  return num_panels(num_outputs) * panel_bytes(format, depth);
}

// Packs weight [num_outputs, depth]. Outputs 0 .. kPanel go to `packed`, each further panel `panel_step` panels later
// (2 interleaves two weights). The format must fit.
void specdec_pack(const float* weight, int64_t num_outputs, int64_t depth, int64_t format, int64_t panel_step,
                  uint8_t* packed) {
  const auto pack = format == kInt4       ? pack_int4
                    : format == kInt8     ? pack_int8
                    : format == kBfloat16 ? pack_bfloat16
                                          : pack_float32;
  for (int64_t panel = 0; panel < num_panels(num_outputs); ++panel) {
    const int64_t first = panel * kPanel, width = std::min<int64_t>(kPanel, num_outputs - first);
    pack(weight + first * depth, width, depth, packed + panel * panel_step * panel_bytes(format, depth));
  }
}

}  // extern "C"
