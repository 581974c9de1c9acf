// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

namespace vpkl::test {

/// A directory of its own for each test, removed at the end.
class TemporaryDirectory {
 public:
  TemporaryDirectory() : path_((std::filesystem::temp_directory_path() / "vpkl.XXXXXX").string()) {
    if (mkdtemp(path_.data()) == nullptr) throw std::runtime_error("cannot make " + path_);
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(TemporaryDirectory const&) = delete;
  TemporaryDirectory& operator=(TemporaryDirectory const&) = delete;

  std::string operator/(std::string const& name) const { return path_ + "/" + name; }
  std::string const& path() const { return path_; }

 private:
  std::string path_;
};

inline std::string read_file(std::string const& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

inline void write_file(std::string const& path, std::string const& bytes) {
  std::ofstream stream(path, std::ios::binary);
  stream << bytes;
  if (!stream.flush()) throw std::runtime_error("cannot write " + path);
}

/// Whether `text` holds all of `parts`; a failure shows the text.
template <class... Parts>
testing::AssertionResult mentions(std::string const& text, Parts const&... parts) {
  for (std::string const& part : {std::string(parts)...}) {
    if (text.find(part) == std::string::npos) {
      return testing::AssertionFailure() << "\"" << part << "\" is not in: " << text;
    }
  }
  return testing::AssertionSuccess();
}

/// The message of the exception of class E that `action` throws; a failure if it throws none.
template <class E, class Action>
std::string message_of(Action const& action) {
  try {
    action();
  } catch (E const& error) {
    return error.what();
  } catch (std::exception const& error) {
    ADD_FAILURE() << "threw another class: " << error.what();
    return error.what();
  }
  ADD_FAILURE() << "threw nothing";
  return {};
}

}  // namespace vpkl::test
