// Float vectors of the CPU's width. Every operation is exact or correctly rounded per lane and compiled with
// -ffp-contract=off, so that a lane's result never depends on other lanes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace specdec {

#if defined(__AVX512F__)
constexpr int kLanes = 16;          // floats per vector
constexpr int kPanelVectors = 2;    // vectors per weight panel
constexpr int kMaxRows = 12;        // rows per block, so that pointers and accumulators stay in registers
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8;
constexpr int kPanelVectors = 2;
constexpr int kMaxRows = 6;
#else
constexpr int kLanes = 4;
constexpr int kPanelVectors = 4;
constexpr int kMaxRows = 4;
#endif
constexpr int kPanel = kLanes * kPanelVectors;  // outputs per weight panel

typedef float Vec __attribute__((vector_size(kLanes * 4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4), may_alias));

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline Vec splat(float x) { return x - Vec{}; }

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// kLanes signed bytes as floats.
inline Vec load_bytes(const void* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
#else
  int32_t word;
  std::memcpy(&word, p, sizeof word);
#if defined(__SSE2__)
  const __m128i bytes = _mm_cvtsi32_si128(word), pairs = _mm_unpacklo_epi8(bytes, bytes);
  return (Vec)_mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpacklo_epi16(pairs, pairs), 24));
#elif defined(__aarch64__)
  const int16x8_t pairs = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(word)));
  return (Vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(pairs)));
#else
  int8_t bytes[kLanes];
  std::memcpy(bytes, p, sizeof bytes);
  return Vec{float(bytes[0]), float(bytes[1]), float(bytes[2]), float(bytes[3])};
#endif
#endif
}

inline Vec select(IntVec mask, Vec a, Vec b) { return (Vec)(((IntVec)a & mask) | ((IntVec)b & ~mask)); }

inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }

// Loads n < kLanes floats, followed by zeros.
inline Vec load_head(const float* p, int n) {
  float buffer[kLanes] = {};
  std::memcpy(buffer, p, n * sizeof(float));
  return load(buffer);
}

inline void store_head(float* p, Vec v, int n) { std::memcpy(p, &v, n * sizeof(float)); }

// v with lane l moved to l - step, the first `step` lanes to the end.
template <int step>
inline Vec rotated(Vec v) {
  IntVec from;
  for (int l = 0; l < kLanes; ++l) from[l] = (l + step) % kLanes;
#if defined(__clang__)
  Vec out;
  for (int l = 0; l < kLanes; ++l) out[l] = v[from[l]];
  return out;
#else
  return __builtin_shuffle(v, from);
#endif
}

template <int step = kLanes / 2, typename Op>
inline float fold(Vec v, Op op) {  // lanes l and l + step, halving: a fixed tree
  if constexpr (step == 0)
    return v[0];
  else
    return fold<step / 2>(op(v, rotated<step>(v)), op);
}

inline float sum(Vec v) {
  return fold(v, [](Vec a, Vec b) { return a + b; });
}

inline float maximum(Vec v) {
  return fold(v, [](Vec a, Vec b) { return max(a, b); });
}

// One level of a transposing sum: lanes whose index lacks bit `step` get a's pair sums, the others b's.
template <int step>
inline Vec add_pairs(Vec a, Vec b) {
  IntVec low, high;
  for (int l = 0; l < kLanes; ++l) {
    low[l] = (l & step) ? kLanes + l - step : l;
    high[l] = (l & step) ? kLanes + l : l + step;
  }
#if defined(__clang__)
  Vec x, y;
  for (int l = 0; l < kLanes; ++l) {
    x[l] = low[l] < kLanes ? a[low[l]] : b[low[l] - kLanes];
    y[l] = high[l] < kLanes ? a[high[l]] : b[high[l] - kLanes];
  }
  return x + y;
#else
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
#endif
}

template <int step, int count>
inline Vec transposing_sum_level(Vec* v) {
  if constexpr (step == kLanes) {
    return v[0];
  } else {
    for (int i = 0; i < count / 2; ++i) v[i] = add_pairs<step>(v[2 * i], v[2 * i + 1]);
    return transposing_sum_level<step * 2, count / 2>(v);
  }
}

// Lane l of the result is the sum of the lanes of v[l]; v[0 .. kLanes) is overwritten.
inline Vec transposing_sum(Vec* v) { return transposing_sum_level<1, kLanes>(v); }

// e^x for x <= 88, within 2 ulp; 0 below -87.3 (and for -inf), NaN for NaN.
inline Vec exp(Vec x) {
  const Vec clamped = max(x, splat(-87.3f));
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const Vec shifted = fma(clamped, splat(1.44269504088896341f), magic);
  const Vec n = shifted - magic;
  Vec r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  const IntVec exponent = ((IntVec)shifted - (IntVec)magic) << 23;
  const Vec result = (Vec)((IntVec)p + exponent);
  return select(x < splat(-87.3f), splat(0.0f), select(x == x, result, x));
}

// x / (1 + e^-x)
inline Vec silu(Vec x) {
  const Vec cut = splat(-87.0f);  // below, e^-x would overflow; the result is 0 to 36 digits
  return x / (splat(1.0f) + exp(-max(x, cut)));
}

}  // namespace specdec
