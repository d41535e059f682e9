// Mixtures of experts: products of rows with the weights of the experts that a router chose for each row. Pairs of a
// row and an expert are sorted by expert, so that a weight is read once for all of its rows. A row's result adds its
// experts in ascending order of their numbers, so that its bits do not depend on the batch.
#pragma once

#include <vector>

#include "linear.h"

namespace specdec {

// Both are mirrored by ctypes structures in experts.py. Null: absent.
struct ExpertsView {
  const PackedWeight *up, *down;  // [num_experts]; if gated, panels of gate and up alternate in `up`
  const float *up_bias, *down_bias;  // [num_experts, outputs]
  int64_t num_experts, hidden, up_width, inner;  // up_width: outputs of `up`, of each of both if gated
};

struct RoutingView {
  const int64_t* experts;  // [num_rows, per_row]; numbers outside the experts add nothing
  const float* weights;    // likewise
  int64_t num_rows, per_row;
};

constexpr int64_t kPanelCost = 3;  // rows whose product takes as long as reading the weight

struct Plan {
  Plan(const ExpertsView& view, const RoutingView& routing)
      : begin(view.num_experts + 1), place(routing.num_rows * routing.per_row, -1) {
    const int64_t count = static_cast<int64_t>(place.size());
    for (int64_t i = 0; i < count; ++i)
      if (is_known(view, routing.experts[i])) ++begin[routing.experts[i] + 1];
    for (int64_t e = 0; e < view.num_experts; ++e) begin[e + 1] += begin[e];
    pair.resize(begin.back());
    std::vector<int64_t> next(begin.begin(), begin.end() - 1);
    for (int64_t i = 0; i < count; ++i)
      if (is_known(view, routing.experts[i])) {
        place[i] = next[routing.experts[i]]++;
        pair[place[i]] = i;
      }
  }

  static bool is_known(const ExpertsView& view, int64_t expert) { return expert >= 0 && expert < view.num_experts; }

  std::vector<int64_t> begin;  // [num_experts + 1] first place of each expert
  std::vector<int64_t> pair;   // by place: row * per_row + choice
  std::vector<int64_t> place;  // by pair; -1: no expert
};

// Calls body(expert, first panel, end panel) for this thread's panels of all experts with rows. Threads get equal costs.
template <typename Body>
void for_own_panels(const Plan& plan, int64_t num_experts, int64_t panels, int thread, int num_threads,
                    const Body& body) {
  int64_t total = 0;
  const auto cost = [&](int64_t e) {
    const int64_t rows = plan.begin[e + 1] - plan.begin[e];
    return rows == 0 ? 0 : rows + kPanelCost;
  };
  for (int64_t e = 0; e < num_experts; ++e) total += cost(e) * panels;
  const Share own(total, thread, num_threads);
  int64_t at = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t each = cost(e);
    if (each == 0) continue;
    const auto panel_from = [&](int64_t bound) {
      return std::min(panels, std::max<int64_t>(0, (bound - at + each - 1) / each));
    };
    const int64_t first = own.begin <= at ? 0 : panel_from(own.begin), end = own.end <= at ? 0 : panel_from(own.end);
    if (first < end) body(e, first, end);
    at += each * panels;
  }
}

// Chooses the per_row likeliest of num_experts by scores [num_experts], the first of equal ones, and their weights: the
// softmax over all, or over the chosen ones if normalized. buffer: num_experts floats, whole vectors.
inline void choose_experts(const float* scores, int64_t num_experts, int64_t per_row, bool is_normalized, float* buffer,
                           int64_t* experts, float* weights) {
  float largest = scores[0];
  for (int64_t e = 1; e < num_experts; ++e) largest = std::max(largest, scores[e]);
  Vec sums{};
  for (int64_t e = 0; e < num_experts; e += kLanes) {
    const int width = static_cast<int>(std::min<int64_t>(kLanes, num_experts - e));
    const Vec terms = exp((width == kLanes ? load(scores + e) : load_head(scores + e, width)) - splat(largest));
    store_head(buffer + e, terms, width);
    sums = sums + load_head(buffer + e, width);
  }
  float total = sum(sums), chosen = 0.0f;
  for (int64_t i = 0; i < per_row; ++i) {
    int64_t best = -1;
    for (int64_t e = 0; e < num_experts; ++e)
      if (std::find(experts, experts + i, e) == experts + i && (best < 0 || buffer[e] > buffer[best])) best = e;
    experts[i] = best;
    weights[i] = buffer[best];
    chosen += buffer[best];
  }
  if (is_normalized) total = chosen;
  for (int64_t i = 0; i < per_row; ++i) weights[i] /= total;
}

class Experts {
 public:
  Experts(const ExpertsView& view, const RoutingView& routing) : view_(view), routing_(routing), plan_(view, routing) {}

  int64_t num_pairs() const { return static_cast<int64_t>(plan_.pair.size()); }

  // sorted [pairs, hidden] = each pair's row of x
  void gather(const float* x, float* sorted, int thread, int num_threads) const {
    const Share own(num_pairs(), thread, num_threads);
    for (int64_t i = own.begin; i < own.end; ++i)
      std::memcpy(sorted + i * view_.hidden, x + plan_.pair[i] / routing_.per_row * view_.hidden,
                  view_.hidden * sizeof(float));
  }

  // up [pairs, up_width] = products of the gathered rows
  void multiply_up(const float* sorted, float* up, int thread, int num_threads) const {
    multiply_all(view_.up, view_.up_bias, sorted, view_.hidden, view_.up_width, up, thread, num_threads);
  }

  // inner [pairs, inner] = silu(gate) * up
  void multiply_gate(const float* sorted, float* inner, int thread, int num_threads) const {
    for_own_panels(plan_, view_.num_experts, num_panels(view_.inner), thread, num_threads,
                   [&](int64_t e, int64_t first, int64_t end) {
                     const int64_t row = plan_.begin[e];
                     multiply_gated(view_.up[e], Share(first, end), sorted + row * view_.hidden, plan_.begin[e + 1] - row,
                                    view_.hidden, view_.inner, nullptr, nullptr, inner + row * view_.inner);
                   });
  }

  // out [pairs, hidden] = products of the inner rows
  void multiply_down(const float* inner, float* out, int thread, int num_threads) const {
    multiply_all(view_.down, view_.down_bias, inner, view_.inner, view_.hidden, out, thread, num_threads);
  }

  // out [rows, hidden] = each row's weighted sum, in order of experts; with `add` the sum is added to out
  template <bool add>
  void add_up(const float* products, float* out, int thread, int num_threads) const {
    const Share own(routing_.num_rows, thread, num_threads);
    std::vector<int64_t> places(routing_.per_row);
    std::vector<float> sums(add ? view_.hidden : 0);
    for (int64_t row = own.begin; row < own.end; ++row) {
      const int64_t* chosen = plan_.place.data() + row * routing_.per_row;
      places.assign(chosen, chosen + routing_.per_row);
      std::sort(places.begin(), places.end());
      float* target = out + row * view_.hidden;
      if (add)
        std::fill(sums.begin(), sums.end(), 0.0f);
      else
        std::fill(target, target + view_.hidden, 0.0f);
      float* total = add ? sums.data() : target;
      for (const int64_t place : places) {
        if (place < 0) continue;
        const float weight = routing_.weights[plan_.pair[place]];
        const float* terms = products + place * view_.hidden;
        for (int64_t i = 0; i < view_.hidden; ++i) total[i] += weight * terms[i];
      }
      if (add)
        for (int64_t i = 0; i < view_.hidden; ++i) target[i] += total[i];
    }
  }

 private:
  void multiply_all(const PackedWeight* weights, const float* bias, const float* x, int64_t depth, int64_t num_outputs,
                    float* y, int thread, int num_threads) const {
    for_own_panels(plan_, view_.num_experts, num_panels(num_outputs), thread, num_threads,
                   [&](int64_t e, int64_t first, int64_t end) {
                     const int64_t row = plan_.begin[e];
                     const float* shift = bias == nullptr ? nullptr : bias + e * num_outputs;
                     multiply(weights[e], first, end, x + row * depth, depth, plan_.begin[e + 1] - row, depth,
                              [&](int64_t panel, int64_t first_row, int rows, const Vec* sums) {
                                write_panel<false>(sums, rows, panel, shift, num_outputs,
                                                   y + (row + first_row) * num_outputs, num_outputs);
                              });
                   });
  }

  const ExpertsView& view_;
  const RoutingView& routing_;
  const Plan plan_;
};

}  // namespace specdec
