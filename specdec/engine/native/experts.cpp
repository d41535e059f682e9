// Mixtures of experts as functions of their own (experts.h), called by ctypes from experts.py.

#include "experts.h"

#include "thread_pool.h"

using namespace specdec;

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
    experts.add_up<false>(products, out, thread, num_threads);
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
    experts.add_up<false>(memory, out, thread, num_threads);
  });
}

}  // extern "C"
