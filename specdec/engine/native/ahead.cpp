// Several tokens per call: sample from a row's logits, compute the token, sample again. Every sample equals specdec_cut
// followed by specdec_perturbed_top, every pass specdec_decoder_step. So tokens, scores, keys and values are those of
// single steps.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "attention.h"

using namespace specdec;

extern "C" {

struct Decoder;  // of decoder.cpp

int specdec_decoder_step(void* pool, const Decoder* decoder, const BatchView* batch, float* workspace, float* logits);
void specdec_perturbed_top(const float* logits, int64_t num_rows, int64_t vocab_size, int64_t row_stride,
                           const float* temperatures, const uint32_t* keys, int64_t num_top, int64_t* token_ids,
                           float* scores);
void specdec_cut(float* scores, int64_t num_rows, int64_t vocab_size, const int64_t* top_k, const double* top_p,
                 const double* min_score);

// Both are mirrored by ctypes structures in engine/drawing.
struct AheadRow {
  // Sampling.
  uint64_t seed;
  int64_t choice;
  const int64_t* ends;  // tokens that end the row
  int64_t num_ends;
  int64_t has_cuts, top_k;
  double top_p, min_score;
  float temperature;  // 0: greedy
  // Place.
  int64_t logits_row, position, num_rounds;  // position of the first sample; most samples
  const int32_t* blocks;                     // writable up to slot position + num_rounds - 2
  int64_t num_blocks;
  // When to stop; these estimates decide only how much is computed.
  double path_score, least_path_score;
  double least_fork_score;  // a runner-up with this path score ends all rows, as does this row's end if ends_all
  int64_t ends_all;
};

struct AheadCall {
  int64_t num_rows, num_top, max_rounds, vocab_size, num_logits, block_size;
  const AheadRow* rows;
  const float* first_logits;  // [*, first_stride], by sampled id
  int64_t first_stride;
  int64_t* token_ids;  // [num_rows, max_rounds, num_top]
  float* scores;       // the same
  int64_t* num_drawn;  // [num_rows]
  // Null unless sampled ids differ from the model's. [vocab_size] by sampled id: the model's input id, and the model's
  // id that gives the logit, or -1.
  const int32_t *inputs, *columns;
};

}  // extern "C"

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- noise keys (sampling/noise.py, _key64 with Purpose.PLAIN) ---------------------------------------------------

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;

inline uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

inline uint64_t noise_key(uint64_t seed, int64_t choice, int64_t position) {
  const uint64_t stream = mix64(mix64(seed + kGamma) + (static_cast<uint64_t>(choice) + 1) * kGamma);
  return mix64(stream + (4 * static_cast<uint64_t>(position) + 1) * kGamma);
}

// As logit_processors.temperature_scores: all NaN if the best is not finite.
void temperature_scores(const float* logits, int64_t vocab_size, float temperature, float* scores) {
  float best = -kInfinity;
  bool is_poisoned = false;
  for (int64_t i = 0; i < vocab_size; ++i) {
    is_poisoned |= !(logits[i] < kInfinity);
    best = logits[i] > best ? logits[i] : best;
  }
  if (is_poisoned || best == -kInfinity) best = std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 0; i < vocab_size; ++i) scores[i] = (logits[i] - best) / temperature;
}

class Rounds {
 public:
  explicit Rounds(const AheadCall& call) : call_(call), path_scores_(call.num_rows) {
    for (int64_t r = 0; r < call.num_rows; ++r) {
      path_scores_[r] = call.rows[r].path_score;
      max_blocks_ = std::max(max_blocks_, call.rows[r].num_blocks);
    }
  }

  // Returns 0, or the status of a pass that was refused.
  int run(void* pool, const Decoder* decoder, float* workspace, float* logits) {
    std::vector<int64_t> active(call_.num_rows);
    for (int64_t r = 0; r < call_.num_rows; ++r) active[r] = r;
    for (int64_t round = 0;; ++round) {
      bool goes_on = true;
      std::vector<int64_t> rest;
      for (size_t i = 0; i < active.size(); ++i) {
        const AheadRow& row = call_.rows[active[i]];
        const float* drawn_from = round == 0 ? call_.first_logits + row.logits_row * call_.first_stride
                                             : by_drawn_id(logits + i * call_.num_logits);
        const bool ends = draw(active[i], round, drawn_from, goes_on);
        if (!ends) rest.push_back(active[i]);
        if (ends && row.ends_all != 0) goes_on = false;
      }
      if (!goes_on || rest.empty()) return 0;
      active.swap(rest);
      if (const int status = compute(active, round, pool, decoder, workspace, logits)) return status;
    }
  }

 private:
  // A row of the model's logits by sampled id; the next call overwrites it.
  const float* by_drawn_id(const float* logits) {
    if (call_.columns == nullptr) return logits;
    ordered_.resize(call_.vocab_size);
    for (int64_t i = 0; i < call_.vocab_size; ++i) {
      const int32_t column = call_.columns[i];
      ordered_[i] = column < 0 ? -kInfinity : logits[column];
    }
    return ordered_.data();
  }

  // Samples a row's token; returns whether the row has ended.
  bool draw(int64_t r, int64_t round, const float* logits, bool& goes_on) {
    const AheadRow& row = call_.rows[r];
    int64_t* token_ids = call_.token_ids + (r * call_.max_rounds + round) * call_.num_top;
    float* scores = call_.scores + (r * call_.max_rounds + round) * call_.num_top;
    float temperature = row.temperature;
    if (row.has_cuts != 0 && temperature != 0.0f) {
      cut_scores_.resize(call_.vocab_size);
      temperature_scores(logits, call_.vocab_size, temperature, cut_scores_.data());
      specdec_cut(cut_scores_.data(), 1, call_.vocab_size, &row.top_k, &row.top_p, &row.min_score);
      logits = cut_scores_.data();
      temperature = 1.0f;
    }
    const uint64_t key = noise_key(row.seed, row.choice, row.position + round);
    const uint32_t keys[2] = {static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(key)};
    specdec_perturbed_top(logits, 1, call_.vocab_size, call_.vocab_size, &temperature, keys, call_.num_top, token_ids,
                          scores);
    call_.num_drawn[r] = round + 1;
    if (std::isnan(scores[0])) return true;
    double total = 0.0;
    for (int64_t i = 0; i < call_.num_top; ++i) total += std::exp(static_cast<double>(scores[i] - scores[0]));
    if (call_.num_top > 1) {
      const double runner_up = std::exp(static_cast<double>(scores[1] - scores[0])) / total;
      if (path_scores_[r] * runner_up >= row.least_fork_score) goes_on = false;
    }
    path_scores_[r] /= total;
    return round + 1 >= row.num_rounds || path_scores_[r] < row.least_path_score ||
           std::find(row.ends, row.ends + row.num_ends, token_ids[0]) != row.ends + row.num_ends;
  }

  // One pass over the tokens that `round` sampled for these rows; their logits are contiguous.
  int compute(const std::vector<int64_t>& active, int64_t round, void* pool, const Decoder* decoder, float* workspace,
              float* logits) {
    const int64_t num_rows = static_cast<int64_t>(active.size()), block_size = call_.block_size;
    if (tables_.empty()) {
      tables_.assign(call_.num_rows * max_blocks_, 0);
      for (int64_t r = 0; r < call_.num_rows; ++r)
        std::copy_n(call_.rows[r].blocks, call_.rows[r].num_blocks, tables_.data() + r * max_blocks_);
    }
    ids_.resize(num_rows), positions_.resize(num_rows), slots_.resize(num_rows), indices_.resize(num_rows);
    lines_.resize(num_rows), contexts_.resize(num_rows), offsets_.assign(num_rows + 1, 0);
    for (int64_t i = 0; i < num_rows; ++i) {
      const int64_t r = active[i], position = call_.rows[r].position + round;
      const int64_t drawn = call_.token_ids[(r * call_.max_rounds + round) * call_.num_top];
      ids_[i] = call_.inputs == nullptr ? drawn : call_.inputs[drawn];
      positions_[i] = position;
      slots_[i] = call_.rows[r].blocks[position / block_size] * block_size + position % block_size;
      indices_[i] = i;
      lines_[i] = static_cast<int32_t>(r);
      contexts_[i] = static_cast<int32_t>(position + 1);
    }
    const BatchView batch{num_rows, num_rows, max_blocks_, block_size, ids_.data(), positions_.data(), slots_.data(),
                          lines_.data(), contexts_.data(), offsets_.data(), nullptr, tables_.data(), indices_.data()};
    return specdec_decoder_step(pool, decoder, &batch, workspace, logits);
  }

  const AheadCall& call_;
  std::vector<double> path_scores_;
  int64_t max_blocks_ = 0;
  std::vector<float> cut_scores_, ordered_;
  std::vector<int64_t> ids_, positions_, slots_, indices_;
  std::vector<int32_t> lines_, contexts_, offsets_, tables_;
};

}  // namespace

extern "C" {

// Samples and computes for all rows of a call. Scratch: logits [num_rows, num_logits] and workspace
// (specdec_decoder_workspace of num_rows). Returns the status of specdec_decoder_step.
int specdec_decoder_ahead(void* pool, const Decoder* decoder, const AheadCall* call, float* workspace, float* logits) {
  return Rounds(*call).run(pool, decoder, workspace, logits);
}

}  // extern "C"
