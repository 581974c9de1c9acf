// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Runs every case that the flags ask for and makes a record of each.
#pragma once

#include "backend.hpp"
#include "device_watch.hpp"
#include "options.hpp"
#include "statistics.hpp"

#include <nlohmann/json.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace vpkl::transfer {

constexpr char const* schema = "vpkl-transfer/1";

class Runner {
 public:
  using Sink = std::function<void(nlohmann::json const& record)>;
  using Progress = std::function<void(std::string const& text)>;

  /// \param[in] device null where there is none, for the reason given
  Runner(Options const& options, Device* device, std::string why_no_device, Sink sink,
         Progress progress);
  ~Runner();

  void run();
  /// \brief Cases that failed: data arrived wrong, or memory could not be had.
  int failures() const { return failures_; }

 private:
  void host_record();
  void grid();
  void measure(Work const& work);
  Timing measure_series(Series& series, Work const& work, nlohmann::json& record);
  void attribute(Work const& work, double seconds);
  void disturb(Series* series, Work const& work, double undisturbed);
  void pinning(Shape const& shape);
  void sizes();
  void size(std::size_t bytes, std::string const& memory, Direction direction);
  void all_gpus();

  bool out_of_time() const;
  std::string why_waived(bool needs_device) const;
  /// \brief Writes the record, with status and reason when there is one, and counts failures.
  void emit(nlohmann::json record, std::string const& waived = {});
  /// \brief Runs `body`; memory that cannot be had makes the record a failed one.
  template <class Body>
  void attempt(nlohmann::json record, bool needs_device, Body&& body);

  Options const& options_;
  Device* device_;
  std::string why_no_device_;
  Sink sink_;
  Progress progress_;
  std::unique_ptr<DeviceWatch> watch_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  int pinned_node_ = -1, device_node_ = -1;
  int failures_ = 0;
  std::vector<std::pair<Work, double>>
      measured_;  ///< on a device, and its seconds; 0: not measured
  // What the cost of pinning is weighed against: the last fetch or copy of either kind.
  double pageable_seconds_ = 0, pinned_seconds_ = 0;
};

}  // namespace vpkl::transfer
