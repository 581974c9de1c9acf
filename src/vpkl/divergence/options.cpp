// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/error.hpp>
#include <vpkl/divergence/options.hpp>

#include <fmt/format.h>

#include <cmath>

namespace vpkl {

char const* to_string(Divergence divergence) {
  switch (divergence) {
    case Divergence::reverse_kl: return "reverse_kl";
    case Divergence::jsd: return "jsd";
    case Divergence::forward_kl: break;
  }
  return "forward_kl";
}

char const* to_string(Route route) {
  switch (route) {
    case Route::dense: return "dense";
    case Route::gathered: return "gathered";
    case Route::vocab_parallel: break;
  }
  return "vocab_parallel";
}

Divergence divergence_from_string(std::string const& text) {
  for (Divergence d : {Divergence::forward_kl, Divergence::reverse_kl, Divergence::jsd})
    if (text == to_string(d)) return d;
  throw InvalidArgument(
      fmt::format("divergence is '{}', expected forward_kl, reverse_kl or jsd", text));
}

Route route_from_string(std::string const& text) {
  for (Route r : {Route::dense, Route::gathered, Route::vocab_parallel})
    if (text == to_string(r)) return r;
  throw InvalidArgument(
      fmt::format("route is '{}', expected dense, gathered or vocab_parallel", text));
}

void check_options(DivergenceOptions const& options) {
  double const t = options.temperature;
  // T, 1/T and T² enter single-precision arithmetic.
  float const square = static_cast<float>(t * t), inverse = static_cast<float>(1.0 / t);
  if (!(t > 0) || !std::isnormal(square) || !std::isnormal(inverse))
    throw InvalidArgument(fmt::format(
        "temperature is {}, expected a finite number above 0 whose square is a normal float", t));
  double const beta = options.beta;
  if (options.divergence == Divergence::jsd &&
      !(beta > 0 && beta < 1 && std::isnormal(static_cast<float>(beta)) &&
        std::isnormal(static_cast<float>(1 - beta))))
    throw InvalidArgument(fmt::format("beta is {}, expected a number inside (0, 1)", beta));
  if (options.divergence < Divergence::forward_kl || options.divergence > Divergence::jsd)
    throw InvalidArgument(fmt::format("divergence is {}, expected forward_kl, reverse_kl or jsd",
                                      static_cast<int>(options.divergence)));
}

}  // namespace vpkl
