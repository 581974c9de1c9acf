// SPDX-License-Identifier: Apache-2.0
#include "runner.hpp"

#include "numa.hpp"
#include "remedies.hpp"

#include <receipt.hpp>

#include <vpkl/core/allocate.hpp>
#include <vpkl/core/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace vpkl::transfer {

namespace {

constexpr char const* not_measured = "the transfer itself was not measured";

nlohmann::json node_or_null(int node) { return node < 0 ? nlohmann::json() : nlohmann::json(node); }

/// Uses after which what was paid once is earned; null where it never is.
nlohmann::json uses_until(double paid, double slow, double fast) {
  if (slow <= fast || fast <= 0) return nullptr;
  return static_cast<std::int64_t>(std::ceil(paid / (slow - fast)));
}

nlohmann::json speed(Timing const& timing, std::size_t bytes) {
  return {{"microseconds", timing.microseconds()},
          {"gigabytes_per_second", gigabytes_per_second(bytes, timing.median)}};
}

/// What was moved and is not as sent fails the case.
void note_wrong(nlohmann::json& record, std::int64_t wrong, std::string const& what) {
  record["wrong_" + what] = wrong;
  if (wrong == 0) return;
  record["status"] = "failed";
  record["reason"] = fmt::format("{} {} did not arrive as sent", wrong, what);
}

}  // namespace

Runner::Runner(Options const& options, Device* device, std::string why_no_device, Sink sink,
               Progress progress)
    : options_(options),
      device_(device),
      why_no_device_(std::move(why_no_device)),
      sink_(std::move(sink)),
      progress_(std::move(progress)) {
  if (!device_) return;
  watch_ = std::make_unique<DeviceWatch>(device_->pci_address());
  pinned_node_ = device_->numa_node_of_pinned();
  device_node_ = node_of_pci(device_->pci_address());
}

Runner::~Runner() = default;

void Runner::run() {
  host_record();
  grid();
  if (options_.sizes) sizes();
  if (options_.all_gpus) all_gpus();
  // Last: a process that CUPTI has once watched may be slower for good.
  if (options_.attribution)
    for (auto const& [work, seconds] : measured_)
      attribute(work, seconds);
}

bool Runner::out_of_time() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count() >=
         options_.time_limit;
}

std::string Runner::why_waived(bool needs_device) const {
  if (needs_device && !device_) return why_no_device_;
  if (out_of_time())
    return fmt::format("--time-limit of {} s was reached before it began", options_.time_limit);
  return {};
}

void Runner::emit(nlohmann::json record, std::string const& waived) {
  record["schema"] = schema;
  if (!waived.empty()) {
    record["status"] = "waived";
    record["reason"] = waived;
  } else if (!record.contains("status")) {
    record["status"] = "ok";
  }
  failures_ += record["status"] == "failed" ? 1 : 0;
  sink_(record);
}

template <class Body>
void Runner::attempt(nlohmann::json record, bool needs_device, Body&& body) {
  std::string const waived = why_waived(needs_device);
  if (!waived.empty()) return emit(std::move(record), waived);
  try {
    body(record);
  } catch (Error const& error) {
    record["status"] = "failed";
    record["reason"] = error.what();
  }
  emit(std::move(record));
}

void Runner::host_record() {
  nlohmann::json record = {{"type", "host"},
                           {"host", apps::describe_host()},
                           {"configuration", options_.describe()},
                           {"numa_nodes", numa_nodes()},
                           {"numa_node_of_thread", node_or_null(node_of_this_thread())},
                           {"available_bytes", available_host_memory()},
                           {"device", nullptr}};
  if (device_) {
    record["device"] = device_->describe();
    record["device"].update(watch_->describe());
    record["numa_node_of_pinned_memory"] = node_or_null(pinned_node_);
    bool const known = pinned_node_ >= 0 && device_node_ >= 0;
    record["pinned_memory_is_remote"] =
        known ? nlohmann::json(pinned_node_ != device_node_) : nlohmann::json();
  } else {
    record["device_reason"] = why_no_device_;
  }
  emit(std::move(record));
}

void Runner::grid() {
  if (options_.engines.empty()) return;
  for (std::int64_t const vocabulary : options_.vocabularies)
    for (ElementType const type : options_.types) {
      Shape const shape{options_.batch, options_.length, vocabulary, type};
      pageable_seconds_ = pinned_seconds_ = 0;
      for (Direction const direction : options_.directions)
        for (Pattern const pattern : options_.patterns) {
          if (pattern == Pattern::rows) {
            for (std::string const& engine : options_.engines)
              measure(rows_work(engine, direction, shape, options_.scattered_rows));
            continue;
          }
          for (std::int64_t const width : options_.chunk_widths)
            for (std::string const& engine : options_.engines)
              measure(chunk_work(engine, direction, shape, width));
        }
      pinning(shape);
    }
}

void Runner::measure(Work const& work) {
  progress_(work.key());
  bool const on_host = runs_on_host(work.engine);
  std::unique_ptr<Series> series;
  Timing timing;
  nlohmann::json base = work.describe();
  base["type"] = "transfer";
  attempt(base, !on_host, [&](nlohmann::json& record) {
    series = on_host ? open_on_host(work) : device_->open(work);
    timing = measure_series(*series, work, record);
  });
  if (timing.median > 0 && work.direction == Direction::h2d && work.pattern == Pattern::chunk) {
    if (work.engine == "pageable") pageable_seconds_ = timing.median;
    if (work.engine == "pinned_2d") pinned_seconds_ = timing.median;
  }
  if (on_host) return;
  // A series that could not be measured has its reason in its own record.
  Series* const measured = timing.median > 0 ? series.get() : nullptr;
  measured_.emplace_back(work, timing.median);
  if (options_.interference) disturb(measured, work, timing.median);
}

Timing Runner::measure_series(Series& series, Work const& work, nlohmann::json& record) {
  std::vector<double> seconds, reference;
  std::int64_t wrong = 0;
  bool const watched = watch_ && !runs_on_host(work.engine);
  if (watched) watch_->start();
  for (std::int64_t i = 0; i < options_.warmup + options_.repetitions; ++i) {
    // In turn, so that both meet the same machine.
    Sample const contiguous = series.contiguous(), sample = series.transfer();
    wrong += contiguous.wrong + sample.wrong;
    if (i < options_.warmup) continue;
    reference.push_back(contiguous.seconds);
    seconds.push_back(sample.seconds);
  }
  Timing const timing = timing_of(seconds), contiguous = timing_of(reference);
  record.update(speed(timing, work.bytes()));
  record["repetitions"] = options_.repetitions;
  record["reference"] = speed(contiguous, work.bytes());
  record["reference"]["name"] = watched ? "pinned_contiguous" : "memcpy";
  record["ratio_to_reference"] = timing.median > 0 ? contiguous.median / timing.median : 0;
  record["verified_transfers"] = 2 * (options_.warmup + options_.repetitions);
  note_wrong(record, wrong, "elements");
  if (watched) record["device_state"] = watch_->stop();
  return timing;
}

void Runner::attribute(Work const& work, double seconds) {
  progress_("attribution " + work.key());
  nlohmann::json base = {{"type", "attribution"}, {"key", work.key()}, {"range", work.key()}};
  if (device_ && !device_->attribution_waived().empty())
    return emit(base, device_->attribution_waived());
  if (device_ && seconds == 0) return emit(base, not_measured);
  attempt(base, true, [&](nlohmann::json& record) {
    std::unique_ptr<Series> const series = device_->open(work);
    std::vector<Traffic> const traffic = device_->attribute(*series);
    double busy = 0;
    record["activities"] = nlohmann::json::array();
    for (Traffic const& t : traffic) {
      busy += t.seconds;
      record["activities"].push_back({{"what", t.what},
                                      {"kind", t.copy ? "copy" : "kernel"},
                                      {"synchronous", t.synchronous},
                                      {"in_range", t.in_range},
                                      {"count", t.count},
                                      {"bytes", t.bytes},
                                      {"device_microseconds", t.seconds * 1e6}});
    }
    record["device_microseconds"] = busy * 1e6;
    record["caller_microseconds"] = seconds * 1e6;
    record["remedies"] = remedies(work, traffic, seconds);
  });
}

void Runner::disturb(Series* series, Work const& work, double undisturbed) {
  nlohmann::json const base = {{"type", "interference"}, {"key", work.key()}};
  if (device_ && !series) return emit(base, not_measured);
  attempt(base, true, [&](nlohmann::json& record) {
    std::vector<double> seconds, kernel, alone;
    std::int64_t wrong = 0, covered = 0;
    for (std::int64_t i = 0; i < options_.repetitions; ++i) {
      Disturbed const d = device_->disturbed(*series);
      seconds.push_back(d.sample.seconds);
      kernel.push_back(d.kernel_seconds);
      alone.push_back(d.kernel_alone_seconds);
      wrong += d.sample.wrong;
      covered += d.covered ? 1 : 0;
    }
    Timing const timing = timing_of(seconds);
    record.update(speed(timing, work.bytes()));
    record["repetitions"] = options_.repetitions;
    record["covered_repetitions"] = covered;
    record["slowdown"] = timing.median / undisturbed;
    record["kernel_slowdown"] = timing_of(kernel).median / timing_of(alone).median;
    note_wrong(record, wrong, "elements");
  });
}

void Runner::pinning(Shape const& shape) {
  std::size_t const bytes = static_cast<std::size_t>(shape.rows()) * shape.row_bytes();
  attempt({{"type", "pinning"},
           {"element_type", vpkl::to_string(shape.type)},
           {"batch", shape.batch},
           {"length", shape.length},
           {"vocabulary", shape.vocabulary},
           {"chunk_width", options_.chunk_widths.back()},
           {"bytes", bytes}},
          true, [&](nlohmann::json& record) {
            auto const [pin, unpin] = device_->pinning(bytes);
            record["pin_seconds"] = pin;
            record["unpin_seconds"] = unpin;
            record["pays_after_chunk_fetches"] =
                uses_until(pin + unpin, pageable_seconds_, pinned_seconds_);
            if (record["pays_after_chunk_fetches"].is_null())
              record["pays_reason"] =
                  pageable_seconds_ > 0 && pinned_seconds_ > 0
                      ? "pageable was no slower"
                      : "needs pageable and pinned_2d, direction h2d, pattern chunk";
          });
}

void Runner::sizes() {
  for (std::int64_t bytes = options_.smallest_size;;
       bytes = std::min(bytes * 4, options_.largest_size)) {
    for (char const* memory : {"host_fresh", "host_touched"})
      size(static_cast<std::size_t>(bytes), memory, Direction::h2d);
    for (Direction const direction : options_.directions)
      for (char const* memory : {"pageable", "pinned"})
        size(static_cast<std::size_t>(bytes), memory, direction);
    if (bytes == options_.largest_size) return;
  }
}

void Runner::size(std::size_t bytes, std::string const& memory, Direction direction) {
  bool const on_host = memory == "host_fresh" || memory == "host_touched";
  progress_(fmt::format("{} bytes, {}", bytes, memory));
  if (memory == "pageable") pageable_seconds_ = 0;
  nlohmann::json const base = {{"type", "size"},
                               {"memory", memory},
                               {"direction", on_host ? "h2h" : to_string(direction)},
                               {"bytes", bytes}};
  attempt(base, !on_host, [&](nlohmann::json& record) {
    std::vector<double> seconds, allocate;
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < options_.size_repetitions; ++i) {
      SizeSample const s = on_host ? host_size_sample(bytes, memory == "host_fresh")
                                   : device_->size_sample(bytes, memory == "pinned", direction);
      seconds.push_back(s.seconds);
      allocate.push_back(s.allocate_seconds);
      wrong += s.wrong;
    }
    double const allocated = timing_of(allocate).median, copied = timing_of(seconds).median;
    record.update(speed(timing_of(seconds), bytes));
    record["allocate_microseconds"] = allocated * 1e6;
    record["repetitions"] = options_.size_repetitions;
    note_wrong(record, wrong, "bytes");
    if (memory == "pageable") pageable_seconds_ = copied;
    if (memory == "pinned")
      record["pays_after_uses"] = uses_until(allocated, pageable_seconds_, copied);
  });
}

void Runner::all_gpus() {
  progress_("all GPUs");
  Shape const shape{options_.batch, options_.length, options_.vocabularies[0], options_.types[0]};
  Work const work = chunk_work("pinned_2d", Direction::h2d, shape, options_.chunk_widths[0]);
  nlohmann::json base = work.describe();
  base["type"] = "all_gpus";
  attempt(base, true, [&](nlohmann::json& record) {
    std::vector<int> every(static_cast<std::size_t>(device_->devices()));
    std::iota(every.begin(), every.end(), 0);
    int const rounds = static_cast<int>(options_.repetitions);
    double sum_alone = 0;
    std::int64_t wrong = 0;
    auto const median_of = [&](std::vector<int> const& devices, std::vector<double>* of_device) {
      std::vector<double> seconds;
      std::vector<std::vector<double>> each(devices.size());
      for (Round const& round : device_->together(work, devices, rounds)) {
        seconds.push_back(round.seconds);
        wrong += round.wrong;
        for (std::size_t d = 0; d < devices.size(); ++d)
          each[d].push_back(round.device_seconds[d]);
      }
      if (of_device)
        for (auto const& samples : each)
          of_device->push_back(timing_of(samples).median);
      return timing_of(seconds).median;
    };
    std::vector<double> alone, beside;
    for (int const d : every)
      alone.push_back(median_of({d}, nullptr));
    double const together = median_of(every, &beside);
    for (int const d : every) {
      double const rate = gigabytes_per_second(work.bytes(), alone[static_cast<std::size_t>(d)]);
      sum_alone += rate;
      record["devices"].push_back(
          {{"device", d},
           {"alone_gigabytes_per_second", rate},
           {"together_gigabytes_per_second",
            gigabytes_per_second(work.bytes(), beside[static_cast<std::size_t>(d)])}});
    }
    // All bytes over the time from the first start to the last end.
    double const total = gigabytes_per_second(work.bytes() * every.size(), together);
    record["total_gigabytes_per_second"] = total;
    record["sum_of_alone_gigabytes_per_second"] = sum_alone;
    record["scaling"] = total / sum_alone;
    note_wrong(record, wrong, "elements");
  });
}

}  // namespace vpkl::transfer
