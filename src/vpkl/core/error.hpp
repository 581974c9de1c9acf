// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Exceptions of vpkl. Every message names the offending value and what was expected.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

namespace vpkl {

/// Base of everything vpkl throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An argument is outside its documented domain.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// Ranks of one group were given arguments that must be equal but differ.
class AgreementError : public Error {
 public:
  using Error::Error;
};

/// A file is missing, damaged, of another schema, or could not be written. Names file and dataset.
class FileError : public Error {
 public:
  using Error::Error;
};

/// Memory could not be had. The message carries requested and available bytes.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

/// A collective failed or was missed by a rank. The communicator that threw it is dead.
class CommunicationError : public Error {
 public:
  using Error::Error;
};

/// The scores of a row have no defined answer (all -inf, or NaN among them).
class NumericalError : public Error {
 public:
  using Error::Error;
};

/// A stable code for each exception class, as it travels between ranks. 0 is "no error".
enum class ErrorKind : int {
  none = 0,
  invalid_argument = 1,
  agreement = 2,
  file = 3,
  out_of_memory = 4,
  communication = 5,
  numerical = 6,
  other = 7,
};

/// \brief Classifies an exception. `std::bad_alloc` counts as out_of_memory.
ErrorKind error_kind(std::exception_ptr const& error) noexcept;

/// \brief The exception's text ("unknown exception" when it does not derive from std::exception).
std::string error_message(std::exception_ptr const& error);

/// \brief Throws the exception class that `kind` stands for.
[[noreturn]] void throw_error(ErrorKind kind, std::string const& message);

}  // namespace vpkl
