// Packs weights into panels (packed.h); called by ctypes from packing.py.

#include <sys/mman.h>

#include <algorithm>

#include "packed.h"

using namespace specdec;

namespace {

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

}  // namespace

extern "C" {

// Asks for large pages: a step reads all weights once, and small pages cost it a table walk every 4 KiB.
void specdec_advise_large_pages(void* memory, int64_t num_bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + num_bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// Whether all numbers have an exact bfloat16: the lower halves of their bits are zero.
int specdec_fits_bfloat16(const float* numbers, int64_t count) {
  constexpr int64_t kChunk = 4096;  // after each a look at what was found
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    uint32_t lower = 0;
    for (int64_t i = begin; i < std::min(begin + kChunk, count); ++i) lower |= bits_of(numbers[i]) << 16;
    if (lower != 0) return 0;
  }
  return 1;
}

int specdec_panel_width() { return kPanel; }

int64_t specdec_packed_bytes(int64_t num_outputs, int64_t depth, int64_t format) {
  return num_panels(num_outputs) * panel_bytes(format, depth);
}

// Packs weight [num_outputs, depth]. The panel of outputs 0 .. kPanel lies at packed, the next `panel_step` panels
// further on (2 interleaves two weights). What the format cannot hold is cut off.
void specdec_pack(const float* weight, int64_t num_outputs, int64_t depth, int64_t format, int64_t panel_step,
                  uint8_t* packed) {
  for (int64_t panel = 0; panel < num_panels(num_outputs); ++panel) {
    const int64_t first = panel * kPanel, width = std::min<int64_t>(kPanel, num_outputs - first);
    uint8_t* target = packed + panel * panel_step * panel_bytes(format, depth);
    if (format == kBfloat16)
      pack_bfloat16(weight + first * depth, width, depth, target);
    else
      pack_float32(weight + first * depth, width, depth, target);
  }
}

}  // extern "C"
