// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/element_type.hpp>
#include <vpkl/core/error.hpp>

namespace vpkl {

char const* to_string(ElementType type) {
  switch (type) {
    case ElementType::bf16: return "bf16";
    case ElementType::fp16: return "fp16";
    case ElementType::fp32: break;
  }
  return "fp32";
}

ElementType element_type_from_string(std::string const& text) {
  for (ElementType type : {ElementType::fp32, ElementType::bf16, ElementType::fp16})
    if (text == to_string(type)) return type;
  throw InvalidArgument("element type is '" + text + "', expected fp32, bf16 or fp16");
}

}  // namespace vpkl
