// SPDX-License-Identifier: Apache-2.0
// What the injected probe hands to the test that loads it, across a C boundary.
#pragma once

#include <cstdint>

namespace vpkl::test {

struct ProbeEvent {
  enum Kind : std::int32_t { domain, string, category, push, pop } kind;
  char text[32];             ///< name of the domain, string or category; of a push its message
  char domain_name[32];      ///< domain that it belongs to
  std::int32_t category_id;  ///< of a category or push
  bool registered;           ///< push: the message is a registered string of the same domain
  bool is_int64;             ///< push: the payload's type
  std::int64_t payload;
};

/// \brief Events recorded so far; the pointer is valid until the next one.
using ProbeEvents = ProbeEvent const* (*)(std::int64_t* count);

}  // namespace vpkl::test
