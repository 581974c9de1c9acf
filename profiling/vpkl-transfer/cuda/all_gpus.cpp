// SPDX-License-Identifier: Apache-2.0
#include "all_gpus.hpp"

#include "../numa.hpp"
#include "../pages.hpp"
#include "buffers.hpp"
#include "kernels.hpp"

#include <vpkl/teacher/row_store.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

namespace vpkl::transfer {

namespace {

using Clock = std::chrono::steady_clock;

/// Threads leave wait() together.
class Barrier {
 public:
  explicit Barrier(std::size_t threads) : threads_(threads) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    std::size_t const generation = generation_;
    if (++arrived_ == threads_) {
      arrived_ = 0;
      ++generation_;
      all_here_.notify_all();
    } else {
      all_here_.wait(lock, [&] { return generation_ != generation; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  std::size_t threads_, arrived_ = 0, generation_ = 0;
};

/// The chunk on one device; belongs to the thread that made it.
class Lane {
 public:
  Lane(Work const& work, int device) : work_(work) {
    VPKL_CHECK_CUDA(cudaSetDevice(device));
    int const node = node_of_pci(pci_address_of(device));
    try {
      if (node >= 0 && !cpus_of_node(node).empty()) bind_to_node(node);
    } catch (Error const&) {
      // A container or a job's CPU set may forbid it: the buffers then lie where they lie.
    }
    std::int64_t const row_bytes = static_cast<std::int64_t>(work.shape.row_bytes());
    pitch_ = static_cast<std::size_t>(impl::row_pitch(work.shape.vocabulary, work.shape.type)) *
             size_of(work.shape.type);
    require_host_memory("pinned tensor", static_cast<std::size_t>(work.shape.rows()) * pitch_);
    tensor_.emplace(static_cast<std::size_t>(work.shape.rows()) * pitch_);
    out_.emplace(work.bytes());
    stream_.emplace();
    for (std::int64_t const row : work.rows)
      fill_pattern(tensor_->data() + static_cast<std::size_t>(row) * pitch_, row_bytes,
                   row * row_bytes);
  }

  void prepare() {
    VPKL_CHECK_CUDA(cudaMemsetAsync(out_->data(), 0xa5, work_.bytes(), stream_->get()));
    stream_->wait();
  }

  void move() {
    std::size_t const row_bytes = work_.shape.row_bytes();
    std::size_t const rows = static_cast<std::size_t>(work_.chunk_width);
    for (std::size_t first = 0; first < work_.rows.size(); first += rows)
      VPKL_CHECK_CUDA(
          cudaMemcpy2DAsync(out_->data() + first * row_bytes, row_bytes,
                            tensor_->data() + static_cast<std::size_t>(work_.rows[first]) * pitch_,
                            pitch_, row_bytes, rows, cudaMemcpyHostToDevice, stream_->get()));
    stream_->wait();
  }

  std::int64_t wrong() {
    return wrong_elements(stream_->get(), out_->data(), work_.rows,
                          static_cast<std::int64_t>(work_.shape.row_bytes()),
                          static_cast<std::int64_t>(size_of(work_.shape.type)));
  }

 private:
  Work const& work_;
  std::size_t pitch_ = 0;
  // After the device has been set.
  std::optional<Pinned> tensor_;
  std::optional<DeviceBytes> out_;
  std::optional<Stream> stream_;
};

/// What a thread saw of a round.
struct Part {
  Clock::time_point start, end;
  std::int64_t wrong = 0;
};

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

Round round_of(std::vector<std::vector<Part>> const& parts, std::size_t number) {
  Round round;
  Clock::time_point first = Clock::time_point::max(), last = Clock::time_point::min();
  for (auto const& of_device : parts) {
    Part const& part = of_device[number];
    first = std::min(first, part.start);
    last = std::max(last, part.end);
    round.device_seconds.push_back(seconds(part.end - part.start));
    round.wrong += part.wrong;
  }
  round.seconds = seconds(last - first);
  return round;
}

}  // namespace

std::string pci_address_of(int device) {
  char text[32] = {};
  VPKL_CHECK_CUDA(cudaDeviceGetPCIBusId(text, sizeof text, device));
  return text;
}

std::vector<Round> copy_together(Work const& work, std::vector<int> const& devices, int rounds) {
  std::size_t const count = devices.size();
  // The first round is not counted: it loads what is loaded once.
  std::vector<std::vector<Part>> parts(count,
                                       std::vector<Part>(static_cast<std::size_t>(rounds) + 1));
  std::vector<std::exception_ptr> errors(count);
  Barrier barrier(count);
  auto const run = [&](std::size_t d) {
    std::optional<Lane> lane;
    // A thread that failed keeps coming to the barrier, where the others wait for it.
    auto const step = [&](auto&& f) {
      if (!errors[d]) try {
          f();
        } catch (...) {
          errors[d] = std::current_exception();
        }
    };
    step([&] { lane.emplace(work, devices[d]); });
    for (Part& part : parts[d]) {
      step([&] { lane->prepare(); });
      barrier.wait();
      part.start = Clock::now();
      step([&] { lane->move(); });
      part.end = Clock::now();
      barrier.wait();
      step([&] { part.wrong = lane->wrong(); });
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t d = 0; d < count; ++d)
    threads.emplace_back(run, d);
  for (std::thread& thread : threads)
    thread.join();
  for (std::exception_ptr const& error : errors)
    if (error) std::rethrow_exception(error);
  std::vector<Round> results;
  for (std::size_t number = 1; number <= static_cast<std::size_t>(rounds); ++number)
    results.push_back(round_of(parts, number));
  return results;
}

}  // namespace vpkl::transfer
