// SPDX-License-Identifier: Apache-2.0
#include "attribution.hpp"

#include <vpkl/core/error.hpp>

namespace vpkl::transfer {

std::string why_no_attribution() { return "this build has VPKL_ENABLE_CUPTI off"; }

std::vector<Traffic> attributed(std::function<void()> const&) { throw Error(why_no_attribution()); }

}  // namespace vpkl::transfer
