// SPDX-License-Identifier: Apache-2.0
// Reference values of the divergences, from their formulas in extended precision over a whole row
// of the vocabulary. Shares no code with the library, on purpose.
#pragma once

#include <vector>

namespace vpkl::test {

enum class OracleDivergence { forward_kl, reverse_kl, jsd };

struct OracleOptions {
  OracleDivergence divergence = OracleDivergence::forward_kl;
  double beta = 0.5;
  double temperature = 1;
};

// The scales are the same formulas with every term taken absolutely, those of the normalisers
// included: an error is small or large only in relation to them. A probability below e^-12 counts
// for more, since its exponent is itself a rounded number.
struct OracleRow {
  long double value = 0;
  long double value_scale = 0;
  std::vector<long double> gradient;
  std::vector<long double> gradient_scale;
  // The same without the probabilities: what an underflowing single-precision probability is worth.
  long double value_unit = 0;
  std::vector<long double> gradient_unit;
};

// Value times T² and the gradient of weight · value, for one row. A row of weight 0 is not looked
// at.
OracleRow oracle(std::vector<float> const& student, std::vector<float> const& teacher,
                 double weight, OracleOptions const& options);

}  // namespace vpkl::test
