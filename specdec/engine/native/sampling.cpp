// Sampling over a large vocabulary on the CPU: the best tokens of scores plus Gumbel noise, and the cuts of top-k,
// top-p and min-p. Rows are computed one by one, so that no row's result depends on other rows. Same results as
// sampling/perturbed_top.py and logit_processors.cut_: hashes are integers, scores are single IEEE operations (compile
// without -ffast-math and contraction), and bounds only skip tokens that cannot win.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 512;

// ---- noise (sampling/noise.py) -------------------------------------------------------------------------------

inline uint32_t hash_u32(uint32_t token_id, uint32_t key_0, uint32_t key_1) {
  uint32_t x = token_id ^ key_0;
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  x ^= x >> 16;
  x ^= key_1;
  x ^= x >> 16;
  x *= 0x21F0AAADu;
  x ^= x >> 15;
  x *= 0xD35A2D97u;
  x ^= x >> 15;
  return x;
}

inline float gumbel_from_bits(uint32_t h) {
  const double u = (static_cast<double>(h) + 0.5) * 0x1p-32;
  return static_cast<float>(-std::log(-std::log1p(-u)));
}

// An upper bound of gumbel_from_bits(h) by a few vector instructions: -log(-log1p(-u)) <= -log(u), and log2 of a float
// is at least its exponent plus its mantissa. For small u it is at most 0.06 too high. The slack of 0.001 far exceeds
// the rounding of scores that can still win (within 30 of the best).
inline float gumbel_bound(uint32_t h) {
  const float x = static_cast<float>(static_cast<int32_t>(h >> 1)) + 0.25f;  // 2^31 u, rounded
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const float log2_at_least = static_cast<float>(bits) * 0x1p-23f - 127.0f;
  return (31.0f - log2_at_least) * 0.69314718f + 0.001f;
}

// ---- best tokens of score + noise -----------------------------------------------------------------------------

// The num_top best (score, token id), best first, ties to the lower id. Offer tokens in ascending order of id.
class Top {
 public:
  explicit Top(int64_t size) : scores_(size, -kInfinity), token_ids_(size, 0) {}

  float threshold() const { return scores_.back(); }

  void offer(float score, int64_t token_id) {
    if (!(score > threshold())) return;
    size_t i = scores_.size() - 1;
    for (; i > 0 && score > scores_[i - 1]; --i) {
      scores_[i] = scores_[i - 1];
      token_ids_[i] = token_ids_[i - 1];
    }
    scores_[i] = score;
    token_ids_[i] = token_id;
  }

  // Marks the row as one without a token to sample.
  void spoil() { std::fill(scores_.begin(), scores_.end(), std::numeric_limits<float>::quiet_NaN()); }

  const std::vector<float>& scores() const { return scores_; }
  const std::vector<int64_t>& token_ids() const { return token_ids_; }

 private:
  std::vector<float> scores_;
  std::vector<int64_t> token_ids_;
};

constexpr int64_t kLanes = 32;

// Uses lanes, as a single running maximum is not vectorised without -ffast-math. Ignores NaN.
inline float best_of(const float* values, int64_t n) {
  float best[kLanes];
  std::fill(best, best + kLanes, -kInfinity);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) best[j] = values[i + j] > best[j] ? values[i + j] : best[j];
  }
  for (; i < n; ++i) best[0] = values[i] > best[0] ? values[i] : best[0];
  return *std::max_element(best, best + kLanes);
}

// Notes NaN and plus infinity, lane by lane; minus infinity only marks a forbidden token.
class Poison {
 public:
  // best_of, which also notes NaN and plus infinity.
  float best_of(const float* values, int64_t n) {
    float best[kLanes];
    std::fill(best, best + kLanes, -kInfinity);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      for (int64_t j = 0; j < kLanes; ++j) {
        best[j] = values[i + j] > best[j] ? values[i + j] : best[j];
        lanes_[j] |= !(values[i + j] < kInfinity);
      }
    }
    for (; i < n; ++i) {
      best[0] = values[i] > best[0] ? values[i] : best[0];
      lanes_[0] |= !(values[i] < kInfinity);
    }
    return *std::max_element(best, best + kLanes);
  }

  bool any() const {
    return std::any_of(lanes_, lanes_ + kLanes, [](int32_t lane) { return lane != 0; });
  }

 private:
  int32_t lanes_[kLanes] = {};
};

void top_plain(const float* logits, int64_t vocab_size, Top& top) {
  Poison poison;
  for (int64_t begin = 0; begin < vocab_size; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, vocab_size);
    if (!(poison.best_of(logits + begin, end - begin) > top.threshold())) continue;
    for (int64_t i = begin; i < end; ++i) top.offer(logits[i], i);
  }
  if (poison.any() || top.scores().front() == -kInfinity) top.spoil();
}

void top_perturbed(const float* logits, int64_t vocab_size, float temperature, uint32_t key_0, uint32_t key_1, Top& top) {
  Poison poison;
  const float best_logit = poison.best_of(logits, vocab_size);
  if (poison.any() || best_logit == -kInfinity) {
    top.spoil();
    return;
  }
  float bounds[kBlock];
  for (int64_t begin = 0; begin < vocab_size; begin += kBlock) {
    const int64_t count = std::min(kBlock, vocab_size - begin);
    const float* block = logits + begin;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t h = hash_u32(static_cast<uint32_t>(begin + i), key_0, key_1);
      bounds[i] = (block[i] - best_logit) / temperature + gumbel_bound(h);
    }
    if (!(best_of(bounds, count) > top.threshold())) continue;
    for (int64_t i = 0; i < count; ++i) {
      if (!(bounds[i] > top.threshold())) continue;
      const float g = gumbel_from_bits(hash_u32(static_cast<uint32_t>(begin + i), key_0, key_1));
      top.offer((block[i] - best_logit) / temperature + g, begin + i);
    }
  }
}

// ---- cuts -----------------------------------------------------------------------------------------------------

constexpr double kWeightOne = 0x1p42;
constexpr int kNumBins = 1 << 11;
constexpr float kNoWeight = -30.0f;  // exp of less is under 2^-42

// Scores are at most 0, so the bits of their magnitude order them, best first.
inline uint32_t magnitude_bits(float score) {
  const float magnitude = std::fabs(score);
  uint32_t bits;
  std::memcpy(&bits, &magnitude, sizeof bits);
  return bits;
}

// 8 bins per power of two.
inline int bin_of(float score) { return static_cast<int>(magnitude_bits(score) >> 20); }

// 2048 bins per coarse bin.
inline int fine_bin_of(float score) { return static_cast<int>((magnitude_bits(score) >> 9) & (kNumBins - 1)); }

// The last kept token, in descending order of score and ascending order of id.
struct Cut {
  float score;
  int64_t token_id;

  bool keeps(float other_score, int64_t other_id) const {
    return other_score > score || (other_score == score && other_id <= token_id);
  }
};

// Without branches, as membership in the bin is unpredictable.
std::vector<int64_t> tokens_of_bin(const float* scores, int64_t vocab_size, int bin) {
  std::vector<int64_t> token_ids(vocab_size);
  int64_t count = 0;
  for (int64_t i = 0; i < vocab_size; ++i) {
    token_ids[count] = i;
    count += bin_of(scores[i]) == bin;
  }
  token_ids.resize(count);
  return token_ids;
}

// The k-th best score; all tokens with this score stay.
float top_k_score(const float* scores, int64_t vocab_size, int64_t k) {
  if (k <= 0 || k >= vocab_size) return -kInfinity;
  std::vector<int64_t> counts(kNumBins, 0);
  for (int64_t i = 0; i < vocab_size; ++i) ++counts[bin_of(scores[i])];
  int bin = 0;
  for (; counts[bin] < k; ++bin) k -= counts[bin];
  std::vector<float> candidates;
  candidates.reserve(counts[bin]);
  for (int64_t i = 0; i < vocab_size; ++i) {
    if (bin_of(scores[i]) == bin) candidates.push_back(scores[i]);
  }
  std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end(), std::greater<float>());
  return candidates[k - 1];
}

// exp(score) in units of 2^-42, rounded down, from the same single operations as logit_processors.integer_weights.
// score: -64 to 0.
inline int64_t integer_weight(float score) {
  const double x = static_cast<double>(score);
  const int64_t n = static_cast<int64_t>(x * 1.4426950408889634 - 0.5);  // at most 0
  const double r = x - static_cast<double>(n) * 0.6931471805599453;
  double y = 1.0 / 39916800.0;  // the Taylor series of exp, to the 11th power
  y = y * r + 1.0 / 3628800.0;
  y = y * r + 1.0 / 362880.0;
  y = y * r + 1.0 / 40320.0;
  y = y * r + 1.0 / 5040.0;
  y = y * r + 1.0 / 720.0;
  y = y * r + 1.0 / 120.0;
  y = y * r + 1.0 / 24.0;
  y = y * r + 1.0 / 6.0;
  y = y * r + 0.5;
  y = y * r + 1.0;
  y = y * r + 1.0;
  return static_cast<int64_t>(y * kWeightOne) >> std::min<int64_t>(-n, 63);  // shifts of 64 and more are undefined
}

// The weights of up to kBlock scores; 0 below the k-th score. Three loops, each of which is vectorised.
void fill_weights(const float* scores, int64_t count, float kth_score, int64_t* weights) {
  float clamped[kBlock];
  for (int64_t i = 0; i < count; ++i) clamped[i] = scores[i] > -64.0f ? scores[i] : -64.0f;
  for (int64_t i = 0; i < count; ++i) weights[i] = integer_weight(clamped[i]);
  if (kth_score == -kInfinity) return;
  for (int64_t i = 0; i < count; ++i) weights[i] = scores[i] >= kth_score ? weights[i] : 0;
}

// The token at which the cumulated mass reaches top_p of the mass that top-k kept.
Cut top_p_cut(const float* scores, int64_t vocab_size, double top_p, float kth_score) {
  std::vector<int64_t> bin_weights(kNumBins, 0);
  int64_t weights[kBlock];
  for (int64_t begin = 0; begin < vocab_size; begin += kBlock) {
    const int64_t count = std::min(kBlock, vocab_size - begin);
    const float* block = scores + begin;
    if (!(best_of(block, count) >= kNoWeight)) continue;
    fill_weights(block, count, kth_score, weights);
    for (int64_t i = 0; i < count; ++i) bin_weights[bin_of(block[i])] += weights[i];
  }
  int64_t total = 0;
  for (const int64_t weight : bin_weights) total += weight;
  const int64_t limit = std::max<int64_t>(1, static_cast<int64_t>(std::ceil(static_cast<double>(total) * top_p)));
  const auto skip_bins = [limit](const std::vector<int64_t>& of_bins, int64_t& reached) {
    int bin = 0;
    for (; bin < kNumBins - 1 && reached + of_bins[bin] < limit; ++bin) reached += of_bins[bin];
    return bin;
  };
  int64_t reached = 0;
  std::vector<int64_t> token_ids = tokens_of_bin(scores, vocab_size, skip_bins(bin_weights, reached));
  std::fill(bin_weights.begin(), bin_weights.end(), 0);
  const int64_t num_tokens = static_cast<int64_t>(token_ids.size());
  for (int64_t begin = 0; begin < num_tokens; begin += kBlock) {
    const int64_t count = std::min(kBlock, num_tokens - begin);
    float block[kBlock];
    for (int64_t i = 0; i < count; ++i) block[i] = scores[token_ids[begin + i]];
    fill_weights(block, count, kth_score, weights);
    for (int64_t i = 0; i < count; ++i) bin_weights[fine_bin_of(block[i])] += weights[i];
  }
  const int fine_bin = skip_bins(bin_weights, reached);
  const auto elsewhere = [scores, fine_bin](int64_t i) { return fine_bin_of(scores[i]) != fine_bin; };
  token_ids.erase(std::remove_if(token_ids.begin(), token_ids.end(), elsewhere), token_ids.end());
  std::sort(token_ids.begin(), token_ids.end(), [scores](int64_t a, int64_t b) {
    return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
  });
  for (const int64_t token_id : token_ids) {
    int64_t weight;
    fill_weights(scores + token_id, 1, kth_score, &weight);
    reached += weight;
    if (reached >= limit) return {scores[token_id], token_id};
  }
  return {-kInfinity, vocab_size};  // rounding put the limit above the total
}

void cut_row(float* row, int64_t vocab_size, int64_t top_k, double top_p, double min_score) {
  if (std::isnan(row[0])) return;  // sorting NaN is undefined
  const float kth_score = top_k_score(row, vocab_size, top_k);
  // The higher of the two cuts by score decides; the best token, at 0, always stays.
  const float lowest = std::min(0.0f, std::max(kth_score, static_cast<float>(min_score)));
  Cut last{-kInfinity, vocab_size};
  if (top_p < 1.0) last = top_p_cut(row, vocab_size, top_p, kth_score);
  for (int64_t i = 0; i < vocab_size; ++i) {
    if (!(row[i] >= lowest && last.keeps(row[i], i))) row[i] = -kInfinity;
  }
}

}  // namespace

extern "C" {

// From logits (row r at r * row_stride), temperatures [R] (0 is greedy) and keys [R, 2] to token_ids and scores [R,
// num_top], 1 <= num_top <= vocab_size. A row's scores are NaN if it holds NaN or plus infinity, or nothing above minus
// infinity.
void specdec_perturbed_top(const float* logits, int64_t num_rows, int64_t vocab_size, int64_t row_stride,
                           const float* temperatures, const uint32_t* keys, int64_t num_top, int64_t* token_ids,
                           float* scores) {
  for (int64_t r = 0; r < num_rows; ++r) {
    Top top(num_top);
    const float* row = logits + r * row_stride;
    if (temperatures[r] == 0.0f) {
      top_plain(row, vocab_size, top);
    } else {
      top_perturbed(row, vocab_size, temperatures[r], keys[2 * r], keys[2 * r + 1], top);
    }
    std::copy(top.token_ids().begin(), top.token_ids().end(), token_ids + r * num_top);
    std::copy(top.scores().begin(), top.scores().end(), scores + r * num_top);
  }
}

// Writes minus infinity to scores [R, vocab_size] (contiguous, best 0 in each row) that top_k, top_p and min_score [R]
// cut off. A row of NaN stays unchanged.
void specdec_cut(float* scores, int64_t num_rows, int64_t vocab_size, const int64_t* top_k, const double* top_p,
                 const double* min_score) {
  for (int64_t r = 0; r < num_rows; ++r) cut_row(scores + r * vocab_size, vocab_size, top_k[r], top_p[r], min_score[r]);
}

// For tests: the Gumbel noise of `count` hashes from `first` on, `stride` apart.
void specdec_gumbel(uint32_t first, uint32_t stride, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = gumbel_from_bits(first + static_cast<uint32_t>(i) * stride);
}

}  // extern "C"
