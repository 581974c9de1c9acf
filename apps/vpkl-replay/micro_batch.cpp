// SPDX-License-Identifier: Apache-2.0
#include "micro_batch.hpp"

#include <vpkl/core/error.hpp>
#include <vpkl/rollout/response_mask.hpp>

#include <fmt/format.h>

#include <algorithm>

namespace vpkl::replay {

std::vector<std::int64_t> MicroBatch::counted_rows() const {
  return ChunkPlan(response_mask(), PlanKind::rows, std::max<std::int64_t>(length, 1)).rows();
}

Rollouts::Rollouts(std::string const& path) : fixture_(path) {
  for (Side side : {Side::student, Side::teacher})
    if (!fixture_.has_model(side))
      throw InvalidArgument(
          fmt::format("{}: no {} in the fixture, expected hidden states and heads of both models",
                      path, to_string(side)));
  tokens_ = fixture_.tokens(0, samples());
  mask_ = response_mask(length(), fixture_.response_start(0, samples()),
                        fixture_.attention_mask(0, samples()));
  response_tokens_ = ChunkPlan({mask_.data(), samples(), length(), 0}, PlanKind::rows, 1).tokens();
  student_ = read(Side::student);
  teacher_ = read(Side::teacher);
}

Rollouts::Model Rollouts::read(Side side) const {
  FixtureModel const& model = fixture_.model(side);
  Model m;
  m.hidden_size = model.hidden_size;
  m.type = model.hidden_type;
  m.hidden.resize(static_cast<std::size_t>(samples() * length() * m.hidden_size) * size_of(m.type));
  fixture_.read_hidden(side, 0, samples(), m.hidden.data());
  return m;
}

Hidden Rollouts::select(Exec const& exec, Model const& model,
                        std::vector<std::int64_t> const& samples) const {
  std::size_t const sample_bytes =
      static_cast<std::size_t>(length() * model.hidden_size) * size_of(model.type);
  Hidden out;
  out.bytes = Bytes(Kokkos::view_alloc(exec, "vpkl::replay::hidden", Kokkos::WithoutInitializing),
                    samples.size() * sample_bytes);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    Kokkos::View<unsigned char const*, Kokkos::HostSpace,
                 Kokkos::MemoryTraits<Kokkos::Unmanaged>> const from(model.hidden.data() +
                                                                         static_cast<std::size_t>(
                                                                             samples[i]) *
                                                                             sample_bytes,
                                                                     sample_bytes);
    Kokkos::deep_copy(
        exec, Kokkos::subview(out.bytes, std::make_pair(i * sample_bytes, (i + 1) * sample_bytes)),
        from);
  }
  exec.fence();
  out.matrix = {out.bytes.data(), model.type, static_cast<std::int64_t>(samples.size()) * length(),
                model.hidden_size};
  return out;
}

MicroBatch Rollouts::micro_batch(Exec const& exec, std::int64_t first, std::int64_t batch) const {
  MicroBatch m;
  m.batch = batch;
  m.length = length();
  std::vector<std::int64_t> chosen;
  for (std::int64_t i = 0; i < batch; ++i)
    chosen.push_back((first + i) % samples());
  for (std::int64_t sample : chosen) {
    auto const begin = sample * length(), end = begin + length();
    m.tokens.insert(m.tokens.end(), tokens_.begin() + begin, tokens_.begin() + end);
    m.mask.insert(m.mask.end(), mask_.begin() + begin, mask_.begin() + end);
  }
  m.student = select(exec, student_, chosen);
  m.teacher = select(exec, teacher_, chosen);
  return m;
}

}  // namespace vpkl::replay
