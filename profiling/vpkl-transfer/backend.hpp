// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Where transfers are made: in host memory, or between host and device.
#pragma once

#include "work.hpp"

#include <nlohmann/json.hpp>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace vpkl::transfer {

/// Buffers of one Work, ready for transfers. Each transfer starts from a target that holds
/// something else, and is verified after the clock has stopped.
class Series {
 public:
  virtual ~Series() = default;
  /// \brief Copies as many bytes, contiguous at both ends, the best way there is.
  virtual Sample contiguous() = 0;
  virtual Sample transfer() = 0;
};

/// What a device did during a transfer.
struct Traffic {
  std::string what;          ///< "pageable to device", or a kernel's name
  bool copy = true;          ///< else a kernel
  bool synchronous = false;  ///< the copy held the caller up
  bool in_range = true;      ///< made inside the series' own range
  std::int64_t count = 0;
  std::int64_t bytes = 0;  ///< of copies
  double seconds = 0;      ///< on the device, summed
};

/// A transfer made while a kernel reads and writes device memory.
struct Disturbed {
  Sample sample;
  bool covered = false;  ///< the kernel lasted longer than the transfer
  double kernel_seconds = 0;
  double kernel_alone_seconds = 0;
};

struct SizeSample {
  double seconds = 0;
  double allocate_seconds = 0;  ///< of the fresh buffer, pages touched
  std::int64_t wrong = 0;       ///< bytes
};

/// One round of copies on all devices at once.
struct Round {
  double seconds = 0;  ///< from the first start to the last end
  std::vector<double> device_seconds;
  std::int64_t wrong = 0;
};

/// A device and its engines. Nothing of it is called where there is none.
class Device {
 public:
  virtual ~Device() = default;
  virtual std::unique_ptr<Series> open(Work const& work) = 0;
  /// \brief Name, driver, versions, PCI address.
  virtual nlohmann::json describe() const = 0;
  virtual std::string pci_address() const = 0;
  /// \brief NUMA node of memory that this thread pins now, or -1.
  virtual int numa_node_of_pinned() = 0;
  /// \brief Seconds to pin and to unpin fresh memory.
  virtual std::pair<double, double> pinning(std::size_t bytes) = 0;
  /// \brief One copy of contiguous bytes, from or to a fresh buffer.
  virtual SizeSample size_sample(std::size_t bytes, bool pinned, Direction direction) = 0;
  /// \brief One transfer of the open series beside a kernel.
  virtual Disturbed disturbed(Series& series) = 0;
  /// \brief What one transfer of the series does on the device.
  virtual std::vector<Traffic> attribute(Series& series) = 0;
  /// \brief Why attribute() cannot be called; empty if it can.
  virtual std::string attribution_waived() const = 0;
  virtual int devices() const = 0;
  /// \brief Contiguous and chunk copies of the work from pinned memory on `devices` at once.
  virtual std::vector<Round> together(Work const& work, std::vector<int> const& devices,
                                      int rounds) = 0;
};

/// \brief The device of this build, started; null with a reason where there is none.
std::unique_ptr<Device> make_device(std::string& why_none);

/// \brief Engines that need no device: `pack_fresh` and `pack_reused`, the host's part of
/// `pageable` and `staged` (unpacking for d2h).
std::unique_ptr<Series> open_on_host(Work const& work);
bool runs_on_host(std::string const& engine);

/// \brief Copies contiguous bytes in host memory to a fresh or a touched buffer.
SizeSample host_size_sample(std::size_t bytes, bool fresh);

}  // namespace vpkl::transfer
