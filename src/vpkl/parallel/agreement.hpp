// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Ranks that agree, or fail together with the same typed error.
#pragma once

#include <vpkl/core/error.hpp>
#include <vpkl/parallel/communicator.hpp>

#include <array>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace vpkl {

/// What one rank brings to an exchange: named values that must be equal everywhere, values that
/// are only made known, and its own failure if it has one.
///
/// One all-gather of fixed-size records carries all of it. Every rank then throws the same typed
/// error: the failure of the lowest failing rank, or AgreementError naming the first value that
/// differs, both values and the rank.
class Agreement {
 public:
  static constexpr int max_fields = 24;    ///< values a record holds
  static constexpr int max_name = 40;      ///< bytes of a value's name, its end included
  static constexpr int max_message = 768;  ///< bytes of an error's text; longer ones are cut

  /// \param[in] subject what is agreed on, first words of the error message
  explicit Agreement(std::string_view subject);

  /// \brief An integer or enumerator that must be equal on every rank.
  template <class Integer, class = std::enable_if_t<std::is_integral<Integer>::value ||
                                                    std::is_enum<Integer>::value>>
  Agreement& equal(std::string_view name, Integer value) {
    return add(name, Kind::integer, static_cast<std::int64_t>(value));
  }
  /// \brief A number that must have the same bits on every rank.
  Agreement& equal(std::string_view name, double value);
  /// \brief Compares texts by a 64-bit hash.
  Agreement& equal(std::string_view name, std::string_view text);
  /// \brief A hash, shown as hexadecimal.
  Agreement& equal_hash(std::string_view name, std::uint64_t hash);
  /// \brief Made known to all ranks, not compared.
  Agreement& tell(std::string_view name, std::int64_t value);
  /// \brief This rank failed; every rank will throw.
  Agreement& fail(std::exception_ptr error);

  /// \brief Runs a local check and records what it throws.
  template <class F>
  Agreement& check(F&& local) {
    try {
      local();
    } catch (...) {
      fail(std::current_exception());
    }
    return *this;
  }

  /// \brief Collective over `comm`. A group of one makes no communication and rethrows its own
  /// failure as it is.
  /// \return told values, one entry a rank, in the order of tell()
  /// \throws the error class of the failing rank, AgreementError, CommunicationError
  std::vector<std::vector<std::int64_t>> exchange(Communicator const& comm);

 private:
  enum class Kind : std::int32_t { integer, real, hash, told };
  struct Field {
    char name[max_name];
    Kind kind;
    std::int64_t value;
  };
  struct Record {
    std::int32_t error;
    std::int32_t fields;
    char subject[64];
    char message[max_message];
    Field field[max_fields];
  };
  static_assert(std::is_trivially_copyable<Record>::value, "records travel as bytes");

  Agreement& add(std::string_view name, Kind kind, std::int64_t value);
  static std::string show(Field const& field);

  Record record_{};
  std::exception_ptr error_;
};

/// \brief FNV-1a over bytes; `seed` chains calls.
std::uint64_t hash_bytes(void const* data, std::size_t bytes,
                         std::uint64_t seed = 0xcbf29ce484222325ull);

}  // namespace vpkl
