// A fixed team of threads for kernels of microseconds to milliseconds. Idle workers spin for a short while, so that the
// next kernel of a step finds them awake, then sleep. A pool of one thread starts no thread and takes no lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace specdec {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Runs task(thread, num_threads) on the caller (thread 0) and all workers; returns when all are done.
  template <typename Task>
  void run(const Task& task) {
    if (num_threads_ == 1) {
      task(0, 1);
      return;
    }
    start([](const void* t, int thread, int count) { (*static_cast<const Task*>(t))(thread, count); }, &task);
  }

  // Waits until all threads of the running task have arrived. All of them must call it.
  void barrier();

 private:
  using Entry = void (*)(const void* task, int thread, int num_threads);
  void start(Entry entry, const void* task);
  void work(int thread);

  const int num_threads_;
  Entry entry_ = nullptr;
  const void* task_ = nullptr;
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int> num_busy_{0};
  alignas(64) std::atomic<int> num_arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

// One thread's part [begin, end) of count items.
struct Share {
  Share(int64_t first, int64_t last) : begin(first), end(last) {}
  Share(int64_t count, int thread, int num_threads)
      : begin(count * thread / num_threads), end(count * (thread + 1) / num_threads) {}
  int64_t begin, end;
};

}  // namespace specdec
