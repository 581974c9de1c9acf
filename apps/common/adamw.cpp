// SPDX-License-Identifier: Apache-2.0
#include "adamw.hpp"

#include <cmath>

namespace vpkl::apps {

namespace {

template <class T>
struct CopyToMasters {
  T const* weights;
  float* masters;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    masters[i] = ElementTraits<T>::to_float(weights[i]);
  }
};

template <class T>
struct Step {
  float rate, decay, beta1, beta2, epsilon;
  float first_correction, second_correction;
  float const* gradient;
  float *master, *first, *second;
  T* weight;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    float const g = gradient[i];
    first[i] = beta1 * first[i] + (1.0f - beta1) * g;
    second[i] = beta2 * second[i] + (1.0f - beta2) * g * g;
    float const direction =
        first[i] * first_correction / (std::sqrt(second[i] * second_correction) + epsilon);
    master[i] = master[i] * (1.0f - rate * decay) - rate * direction;
    weight[i] = ElementTraits<T>::from_float(master[i]);
  }
};

template <class ExecutionSpace>
using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

}  // namespace

template <class ExecutionSpace>
AdamW<ExecutionSpace>::AdamW(ExecutionSpace const& exec, Options options, void const* weights,
                             ElementType type, std::int64_t count)
    : options_(options),
      type_(type),
      masters_("vpkl::apps::AdamW::masters", count),
      first_("vpkl::apps::AdamW::first_moment", count),
      second_("vpkl::apps::AdamW::second_moment", count) {
  dispatch(type, [&](auto element) {
    using T = decltype(element);
    Kokkos::parallel_for("vpkl::apps::AdamW::masters", Range<ExecutionSpace>(exec, 0, count),
                         CopyToMasters<T>{static_cast<T const*>(weights), masters_.data()});
  });
}

template <class ExecutionSpace>
void AdamW<ExecutionSpace>::step(ExecutionSpace const& exec, float const* gradient, void* weights) {
  ++steps_;
  auto const correction = [this](double beta) {
    return static_cast<float>(1.0 / (1.0 - std::pow(beta, static_cast<double>(steps_))));
  };
  dispatch(type_, [&](auto element) {
    using T = decltype(element);
    Step<T> step;
    step.rate = static_cast<float>(options_.learning_rate);
    step.decay = static_cast<float>(options_.weight_decay);
    step.beta1 = static_cast<float>(options_.beta1);
    step.beta2 = static_cast<float>(options_.beta2);
    step.epsilon = static_cast<float>(options_.epsilon);
    step.first_correction = correction(options_.beta1);
    step.second_correction = correction(options_.beta2);
    step.gradient = gradient;
    step.master = masters_.data();
    step.first = first_.data();
    step.second = second_.data();
    step.weight = static_cast<T*>(weights);
    Kokkos::parallel_for("vpkl::apps::AdamW::step",
                         Range<ExecutionSpace>(exec, 0, static_cast<std::int64_t>(masters_.size())),
                         step);
  });
}

template class AdamW<Kokkos::DefaultExecutionSpace>;

}  // namespace vpkl::apps
