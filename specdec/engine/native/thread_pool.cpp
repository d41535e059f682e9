#include "thread_pool.h"

#include <chrono>

namespace specdec {
namespace {

constexpr auto kIdleSpin = std::chrono::microseconds(60);  // time that an idle worker spins before it sleeps
constexpr int kPausesPerCheck = 64;
constexpr int kSpinsBeforeYield = 512;

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until done(); after a while yields the core, which the awaited thread may need.
template <typename Done>
void spin_until(const Done& done) {
  for (int spins = 0; !done(); ++spins) {
    if (spins < kSpinsBeforeYield)
      pause_cpu();
    else
      std::this_thread::yield();
  }
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
  for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
  stopping_.store(true);
  generation_.fetch_add(1);
  generation_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::start(Entry entry, const void* task) {
  entry_ = entry;
  task_ = task;
  num_busy_.store(num_threads_ - 1, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  entry(task, 0, num_threads_);
  spin_until([this] { return num_busy_.load(std::memory_order_acquire) == 0; });
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  while (true) {
    const auto deadline = std::chrono::steady_clock::now() + kIdleSpin;
    while (generation_.load(std::memory_order_acquire) == seen) {
      for (int i = 0; i < kPausesPerCheck && generation_.load(std::memory_order_acquire) == seen; ++i) pause_cpu();
      if (std::chrono::steady_clock::now() > deadline) generation_.wait(seen, std::memory_order_acquire);
    }
    ++seen;
    if (stopping_.load()) return;
    entry_(task_, thread, num_threads_);
    num_busy_.fetch_sub(1, std::memory_order_release);
  }
}

void ThreadPool::barrier() {
  if (num_threads_ == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
    num_arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  spin_until([this, phase] { return phase_.load(std::memory_order_acquire) != phase; });
}

}  // namespace specdec
