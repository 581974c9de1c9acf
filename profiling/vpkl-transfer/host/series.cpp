// SPDX-License-Identifier: Apache-2.0
// Packing and unpacking by one host thread, as `pageable` and `staged` do it.
#include "../backend.hpp"
#include "../clock.hpp"
#include "../pages.hpp"

#include <algorithm>
#include <cstring>
#include <optional>

namespace vpkl::transfer {

namespace {

constexpr int poison = 0xa5;

/// Never zero, what fresh pages hold; other bytes for another seed.
void fill(unsigned char* data, std::size_t bytes, std::uint64_t seed) {
  std::uint64_t state = 2 * seed + 1;
  for (std::size_t i = 0; i < bytes; i += sizeof state) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::uint64_t const word = state | 0x0101010101010101u;
    std::memcpy(data + i, &word, std::min(sizeof word, bytes - i));
  }
}

class HostSeries final : public Series {
 public:
  explicit HostSeries(Work const& work)
      : work_(work),
        row_bytes_(work.shape.row_bytes()),
        tensor_(checked(static_cast<std::size_t>(work.shape.rows()) * row_bytes_)),
        block_(work.bytes()),
        other_(work.bytes()) {
    // Rows that are not moved are never touched, so that they take no memory either.
    if (work.direction == Direction::h2d) {
      for (std::int64_t const row : work.rows)
        fill(at(row), row_bytes_, static_cast<std::uint64_t>(row));
      fill(other_.data(), other_.size(), 1);
    } else {
      fill(block_.data(), block_.size(), 1);
    }
  }

  Sample contiguous() override {
    Pages const& from = work_.direction == Direction::h2d ? other_ : block_;
    Pages const& to = work_.direction == Direction::h2d ? block_ : other_;
    std::memset(to.data(), poison, to.size());
    Sample sample;
    sample.seconds = seconds_of([&] { std::memcpy(to.data(), from.data(), from.size()); });
    sample.wrong =
        std::memcmp(to.data(), from.data(), from.size()) == 0 ? 0 : elements(from.size());
    return sample;
  }

  Sample transfer() override {
    bool const pack = work_.direction == Direction::h2d;
    if (!pack)
      for (std::int64_t const row : work_.rows)
        std::memset(at(row), poison, row_bytes_);
    else
      std::memset(block_.data(), poison, block_.size());
    if (work_.engine == "pack_fresh") return moved_through_fresh(pack);
    Sample sample;
    sample.seconds = seconds_of([&] { move(pack, block_.data()); });
    sample.wrong = wrong(block_.data());
    return sample;
  }

 private:
  /// Memory is taken and given back on the clock: that is what the caller pays.
  Sample moved_through_fresh(bool pack) {
    Sample sample;
    std::optional<Pages> fresh;
    sample.seconds = seconds_of([&] {
      fresh.emplace(block_.size());
      // In place of the device's copy into it.
      if (!pack) std::memcpy(fresh->data(), block_.data(), block_.size());
      move(pack, fresh->data());
    });
    sample.wrong = wrong(fresh->data());
    sample.seconds += seconds_of([&] { fresh.reset(); });
    return sample;
  }

  static std::size_t checked(std::size_t bytes) {
    require_host_memory("host tensor", bytes);
    return bytes;
  }

  void move(bool pack, unsigned char* block) {
    for (std::int64_t const row : work_.rows) {
      if (pack)
        std::memcpy(block, at(row), row_bytes_);
      else
        std::memcpy(at(row), block, row_bytes_);
      block += row_bytes_;
    }
  }

  std::int64_t wrong(unsigned char const* block) const {
    std::int64_t rows = 0;
    for (std::int64_t const row : work_.rows) {
      rows += std::memcmp(block, at(row), row_bytes_) != 0 ? 1 : 0;
      block += row_bytes_;
    }
    return rows * work_.shape.vocabulary;
  }

  unsigned char* at(std::int64_t row) const {
    return tensor_.data() + static_cast<std::size_t>(row) * row_bytes_;
  }
  std::int64_t elements(std::size_t bytes) const {
    return static_cast<std::int64_t>(bytes / size_of(work_.shape.type));
  }

  Work work_;
  std::size_t row_bytes_;
  Pages tensor_, block_, other_;
};

}  // namespace

bool runs_on_host(std::string const& engine) {
  return engine == "pack_fresh" || engine == "pack_reused";
}

std::unique_ptr<Series> open_on_host(Work const& work) {
  return std::make_unique<HostSeries>(work);
}

SizeSample host_size_sample(std::size_t bytes, bool fresh) {
  require_host_memory("host buffers", 2 * bytes);
  Pages const from(bytes), to(bytes);
  fill(from.data(), bytes, 1);
  SizeSample sample;
  if (!fresh) sample.allocate_seconds = seconds_of([&] { std::memset(to.data(), poison, bytes); });
  sample.seconds = seconds_of([&] { std::memcpy(to.data(), from.data(), bytes); });
  sample.wrong =
      std::memcmp(to.data(), from.data(), bytes) == 0 ? 0 : static_cast<std::int64_t>(bytes);
  return sample;
}

}  // namespace vpkl::transfer
