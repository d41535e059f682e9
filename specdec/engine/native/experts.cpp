// Mixtures of experts: products of rows with the weights of the experts that a router chose for each row. Pairs of a
// row and an expert are sorted by expert, so that a weight is read once for all of its rows. A row's result adds its
// experts in ascending order of their numbers, so that its bits do not depend on the batch.

#include <vector>

#include "linear.h"
#include "thread_pool.h"

using namespace specdec;

extern "C" {

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

}  // extern "C"

namespace {

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

  // out [rows, hidden] = each row's weighted sum, in order of experts
  void add_up(const float* products, float* out, int thread, int num_threads) const {
    const Share own(routing_.num_rows, thread, num_threads);
    std::vector<int64_t> places(routing_.per_row);
    for (int64_t row = own.begin; row < own.end; ++row) {
      const int64_t* chosen = plan_.place.data() + row * routing_.per_row;
      places.assign(chosen, chosen + routing_.per_row);
      std::sort(places.begin(), places.end());
      float* sums = out + row * view_.hidden;
      std::fill(sums, sums + view_.hidden, 0.0f);
      for (const int64_t place : places) {
        if (place < 0) continue;
        const float weight = routing_.weights[plan_.pair[place]];
        const float* terms = products + place * view_.hidden;
        for (int64_t i = 0; i < view_.hidden; ++i) sums[i] += weight * terms[i];
      }
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

}  // namespace

extern "C" {

// All of a gated SiLU mixture: x and out [num_rows, hidden]. memory: num_rows * per_row * (2 * hidden + inner) floats.
void specdec_experts(void* pool_handle, const ExpertsView* view, const RoutingView* routing, const float* x,
                     float* memory, float* out) {
  ThreadPool& pool = *static_cast<ThreadPool*>(pool_handle);
  const Experts experts(*view, *routing);
  float *sorted = memory, *products = sorted + experts.num_pairs() * view->hidden,
        *inner = products + experts.num_pairs() * view->hidden;
  pool.run([&](int thread, int num_threads) {
    experts.gather(x, sorted, thread, num_threads);
    pool.barrier();
    experts.multiply_gate(sorted, inner, thread, num_threads);
    pool.barrier();
    experts.multiply_down(inner, products, thread, num_threads);
    pool.barrier();
    experts.add_up(products, out, thread, num_threads);
  });
}

// The first half of a mixture with another activation: up [pairs, up_width], sorted by expert. Returns the number of
// pairs. memory: num_rows * per_row * hidden floats.
int64_t specdec_experts_up(void* pool_handle, const ExpertsView* view, const RoutingView* routing, const float* x,
                           float* memory, float* up) {
  ThreadPool& pool = *static_cast<ThreadPool*>(pool_handle);
  const Experts experts(*view, *routing);
  pool.run([&](int thread, int num_threads) {
    experts.gather(x, memory, thread, num_threads);
    pool.barrier();
    experts.multiply_up(memory, up, thread, num_threads);
  });
  return experts.num_pairs();
}

// The second half: inner [pairs, inner] in the order of the first, out [num_rows, hidden]. memory: as for the first.
void specdec_experts_down(void* pool_handle, const ExpertsView* view, const RoutingView* routing, const float* inner,
                          float* memory, float* out) {
  ThreadPool& pool = *static_cast<ThreadPool*>(pool_handle);
  const Experts experts(*view, *routing);
  pool.run([&](int thread, int num_threads) {
    experts.multiply_down(inner, memory, thread, num_threads);
    pool.barrier();
    experts.add_up(memory, out, thread, num_threads);
  });
}

}  // extern "C"
