// SPDX-License-Identifier: Apache-2.0
// The pretrained fixture's losses and head gradients against what PyTorch computed from the same
// data, through every route, at every number of ranks.
#include <gemm.hpp>
#include <support/environment.hpp>

#include <vpkl/divergence/gather.hpp>
#include <vpkl/io/hdf5.hpp>
#include <vpkl/rollout/fixture.hpp>
#include <vpkl/rollout/response_mask.hpp>
#include <vpkl/training/streamed_loss.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

namespace {

using namespace vpkl;
using Exec = Kokkos::DefaultExecutionSpace;
using Bytes = Kokkos::View<unsigned char*, Exec::memory_space>;

Bytes to_device(std::vector<unsigned char> const& host) {
  Bytes device("vpkl_test::bytes", host.size());
  auto const mirror = Kokkos::create_mirror_view(device);
  std::copy(host.begin(), host.end(), mirror.data());
  Kokkos::deep_copy(device, mirror);
  return device;
}

struct Expected {
  double loss;
  std::vector<std::int64_t> rows;  ///< ids whose gradient rows are recorded
  std::vector<double> values;      ///< [rows, H]
  std::vector<double> norms;       ///< [V]
};

template <class T>
std::vector<T> read(impl::Hdf5File const& file, std::string const& name) {
  auto const dataset = file.open_dataset(name);
  std::size_t count = 1;
  for (auto extent : dataset.dims())
    count *= extent;
  std::vector<T> values(count);
  dataset.read(impl::Extents(dataset.dims().size(), 0), dataset.dims(), values.data());
  return values;
}

class PyTorch : public testing::TestWithParam<std::tuple<Route, Divergence, int>> {
 protected:
  RolloutFixture fixture{std::string(VPKL_FIXTURE_DIR) + "/smollm2-135m.h5"};
  Communicator comm = test::world();

  Expected expected(DivergenceOptions const& options) const {
    auto const file = impl::Hdf5File::open(fixture.path());
    std::string const group = "/expected/fp32_logits/" +
                              std::string(to_string(options.divergence)) + "/temperature_" +
                              std::to_string(static_cast<int>(options.temperature));
    return {file.read_double_attribute(group, "loss"),
            read<std::int64_t>(file, "/expected/gradient_rows"),
            read<double>(file, group + "/gradient_values"),
            read<double>(file, group + "/gradient_row_norms")};
  }
};

TEST_P(PyTorch, loss_and_head_gradient) {
  auto const [route, divergence, temperature] = GetParam();
  Exec const exec;
  FixtureInfo const& info = fixture.info();
  std::int64_t const samples = info.samples, length = info.sequence_length,
                     vocabulary = info.vocabulary_size, rows = samples * length;
  Communicator const tensor = route == Route::dense ? Communicator::self() : comm;
  // Not a structured binding: a lambda captures them, which is C++20.
  std::int64_t begin, end;
  std::tie(begin, end) = even_range(vocabulary, tensor.size(), tensor.rank());
  std::int64_t const width = end - begin;
  auto const shard = route == Route::dense
                         ? VocabShard::whole(vocabulary)
                         : VocabShard::make(tensor, {vocabulary, begin, end, width, width, {}});

  auto const logits_of = [&](Side side) {
    FixtureModel const& model = fixture.model(side);
    std::vector<unsigned char> hidden(rows * model.hidden_size * size_of(model.hidden_type));
    std::vector<unsigned char> head(width * model.hidden_size * size_of(fixture.head_type(side)));
    fixture.read_hidden(side, 0, samples, hidden.data());
    fixture.read_head(side, begin, width, head.data());
    Bytes const h = to_device(hidden), w = to_device(head);
    Bytes logits("vpkl_test::logits", rows * width * sizeof(float));
    apps::head_forward(exec, {h.data(), model.hidden_type, rows, model.hidden_size},
                       {w.data(), fixture.head_type(side), width, model.hidden_size},
                       {logits.data(), ElementType::fp32, rows, width});
    exec.fence();
    return logits;
  };
  auto const as_rows = [&](Bytes const& logits, std::int64_t columns) {
    return Rows{logits.data(), ElementType::fp32, columns, RowIndex::strided(rows, columns)};
  };

  Bytes teacher = logits_of(Side::teacher);
  std::int64_t teacher_width = width;
  if (route == Route::gathered) {
    Bytes const whole("vpkl_test::whole", rows * vocabulary * sizeof(float));
    VocabularyGather<Exec>(exec, tensor, shard, ElementType::fp32, rows)
        .execute(exec, as_rows(teacher, width), as_rows(whole, vocabulary));
    exec.fence();
    teacher = whole;
    teacher_width = vocabulary;
  }
  TeacherCache<Exec> cache(tensor, {});
  cache.store(exec, as_rows(teacher, teacher_width), samples, length);

  auto const mask =
      response_mask(length, fixture.response_start(0, samples), fixture.attention_mask(0, samples));
  StreamedLoss<Exec>::Options options;
  options.divergence.divergence = divergence;
  options.divergence.temperature = temperature;
  options.route = route;
  options.chunk_width = 16;
  StreamedLoss<Exec> loss(tensor, shard, options);
  Bytes const student = logits_of(Side::student);
  LossResult const result =
      loss.compute(exec, as_rows(student, width), cache, {mask.data(), samples, length, 0}, {},
                   as_rows(student, width));
  Expected const want = expected(options.divergence);
  EXPECT_NEAR(result.loss, want.loss, 1e-6 * want.loss);

  FixtureModel const& model = fixture.model(Side::student);
  std::vector<unsigned char> hidden(rows * model.hidden_size * size_of(model.hidden_type));
  fixture.read_hidden(Side::student, 0, samples, hidden.data());
  Bytes const h = to_device(hidden);
  Kokkos::View<float*, Exec::memory_space> gradient("vpkl_test::gradient",
                                                    width * model.hidden_size);
  apps::head_backward(exec, {student.data(), ElementType::fp32, rows, width},
                      {h.data(), model.hidden_type, rows, model.hidden_size},
                      {gradient.data(), ElementType::fp32, width, model.hidden_size});
  exec.fence();
  auto const got = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), gradient);

  double error = 0, scale = 0;
  for (std::size_t i = 0; i < want.rows.size(); ++i) {
    std::int64_t const id = want.rows[i];
    for (std::int64_t c = 0; c < model.hidden_size; ++c) {
      double const value = want.values[i * model.hidden_size + c];
      scale += value * value;
      if (id < begin || id >= end) continue;
      double const difference = got((id - begin) * model.hidden_size + c) - value;
      error += difference * difference;
    }
  }
  EXPECT_LT(std::sqrt(error), 1e-5 * std::sqrt(scale));
  double largest = 0, norm_error = 0;
  for (double norm : want.norms)
    largest = std::max(largest, norm);
  for (std::int64_t id = begin; id < end; ++id) {
    double sum = 0;
    for (std::int64_t c = 0; c < model.hidden_size; ++c)
      sum += std::pow(got((id - begin) * model.hidden_size + c), 2);
    norm_error = std::max(norm_error, std::abs(std::sqrt(sum) - want.norms[id]));
  }
  EXPECT_LT(norm_error, 1e-5 * largest);
}

INSTANTIATE_TEST_SUITE_P(Fixture, PyTorch,
                         testing::Combine(testing::Values(Route::dense, Route::gathered,
                                                          Route::vocab_parallel),
                                          testing::Values(Divergence::forward_kl,
                                                          Divergence::reverse_kl, Divergence::jsd),
                                          testing::Values(1, 2)));

}  // namespace
