// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/error.hpp>

#include <new>

namespace vpkl {

ErrorKind error_kind(std::exception_ptr const& error) noexcept {
  if (!error) return ErrorKind::none;
  try {
    std::rethrow_exception(error);
  } catch (InvalidArgument const&) {
    return ErrorKind::invalid_argument;
  } catch (AgreementError const&) {
    return ErrorKind::agreement;
  } catch (FileError const&) {
    return ErrorKind::file;
  } catch (OutOfMemory const&) {
    return ErrorKind::out_of_memory;
  } catch (std::bad_alloc const&) {
    return ErrorKind::out_of_memory;
  } catch (CommunicationError const&) {
    return ErrorKind::communication;
  } catch (NumericalError const&) {
    return ErrorKind::numerical;
  } catch (...) {
    return ErrorKind::other;
  }
}

std::string error_message(std::exception_ptr const& error) {
  if (!error) return {};
  try {
    std::rethrow_exception(error);
  } catch (std::exception const& e) {
    return e.what();
  } catch (...) {
    return "unknown exception";
  }
}

void throw_error(ErrorKind kind, std::string const& message) {
  switch (kind) {
    case ErrorKind::invalid_argument: throw InvalidArgument(message);
    case ErrorKind::agreement: throw AgreementError(message);
    case ErrorKind::file: throw FileError(message);
    case ErrorKind::out_of_memory: throw OutOfMemory(message);
    case ErrorKind::communication: throw CommunicationError(message);
    case ErrorKind::numerical: throw NumericalError(message);
    case ErrorKind::none:
    case ErrorKind::other: break;
  }
  throw Error(message);
}

}  // namespace vpkl
