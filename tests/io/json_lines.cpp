// SPDX-License-Identifier: Apache-2.0
#include "io/temporary_directory.hpp"

#include <vpkl/core/error.hpp>
#include <vpkl/io/json_lines.hpp>

#include <sys/resource.h>

#include <clocale>
#include <csignal>
#include <limits>
#include <locale>

namespace {

using namespace vpkl;
using namespace vpkl::test;
using nlohmann::json;

constexpr double infinity = std::numeric_limits<double>::infinity();

TEST(json_number, has_a_reason_where_json_has_no_number) {
  json object;
  json_number(object, "a", 0.5);
  json_number(object, "b", std::numeric_limits<double>::quiet_NaN());
  json_number(object, "c", infinity);
  json_number(object, "d", -infinity);
  EXPECT_EQ(object, json::parse(R"({"a": 0.5, "b": null, "b_reason": "NaN", "c": null,
                                    "c_reason": "+inf", "d": null, "d_reason": "-inf"})"));
}

TEST(json_lines, appends_and_keeps_what_was_there) {
  TemporaryDirectory const directory;
  std::string const path = directory / "made/on/demand/results.jsonl";
  for (int run = 0; run < 2; ++run) {
    JsonLinesWriter writer(path);
    EXPECT_EQ(writer.torn_line(), "");
    writer.write({{"run", run}, {"text", "two\nlines"}});
    writer.close();
  }
  JsonLines const read = read_json_lines(path);
  ASSERT_EQ(read.records.size(), 2u);
  EXPECT_EQ(read.records[1], (json{{"run", 1}, {"text", "two\nlines"}}));
  EXPECT_EQ(read.torn_line, "");
}

// Case 39, the file's part: cut anywhere, the complete lines survive and the torn one is never
// merged with the next.
TEST(json_lines, a_file_cut_anywhere_resumes_at_the_torn_line) {
  TemporaryDirectory const directory;
  std::string const first = R"({"point":0,"value":0.25})"
                            "\n";
  std::string const second = R"({"point":1,"value":0.5})"
                             "\n";
  std::string const whole = first + second;
  for (std::size_t size = 0; size <= whole.size(); ++size) {
    std::string const path = directory / std::to_string(size);
    write_file(path, whole.substr(0, size));
    std::size_t const complete = (size >= first.size()) + (size == whole.size());
    std::string const torn = complete == 2   ? ""
                             : complete == 1 ? whole.substr(first.size(), size - first.size())
                                             : whole.substr(0, size);
    JsonLines const before = read_json_lines(path);
    EXPECT_EQ(before.records.size(), complete);
    EXPECT_EQ(before.torn_line, torn);

    JsonLinesWriter writer(path);
    EXPECT_EQ(writer.torn_line(), torn);
    writer.write({{"point", 2}});
    writer.close();
    JsonLines const after = read_json_lines(path);
    ASSERT_EQ(after.records.size(), complete + 1);
    EXPECT_EQ(after.records.back(), (json{{"point", 2}}));
    EXPECT_EQ(after.torn_line, "");
    EXPECT_EQ(read_file(path + ".torn"), torn.empty() ? "" : torn + "\n");
    EXPECT_EQ(std::filesystem::exists(path + ".torn"), !torn.empty());
  }
}

TEST(json_lines, a_torn_line_longer_than_a_block) {
  TemporaryDirectory const directory;
  std::string const torn = R"({"text":")" + std::string(200'000, 'x');
  write_file(directory / "x", "{\"a\":1}\n" + torn);
  EXPECT_EQ(read_json_lines(directory / "x").torn_line, torn);
  EXPECT_EQ(JsonLinesWriter(directory / "x").torn_line(), torn);
  EXPECT_EQ(read_file(directory / "x"), "{\"a\":1}\n");
}

TEST(json_lines, a_bad_line_in_the_middle_is_an_error) {
  TemporaryDirectory const directory;
  for (std::string const bad : {"{\"a\":", "", "[1]", "{\"a\":NaN}", "{\"a\":1,5}",
                                "{\"a\":1}{\"b\":2}", "{\"a\":1e999}", "\xff"}) {
    write_file(directory / "x", "{\"a\":1}\n" + bad + "\n{\"a\":2}\n");
    EXPECT_TRUE(mentions(message_of<FileError>([&] { read_json_lines(directory / "x"); }),
                         directory / "x", "line 2"))
        << bad;
  }
}

TEST(json_lines, another_kind_of_file_is_left_alone) {
  TemporaryDirectory const directory;
  write_file(directory / "x", "# notes");
  EXPECT_TRUE(mentions(message_of<FileError>([&] { JsonLinesWriter{directory / "x"}; }),
                       directory / "x", "not JSON Lines"));
  EXPECT_EQ(read_file(directory / "x"), "# notes");
}

TEST(json_lines, records_that_would_not_be_strict_are_refused) {
  TemporaryDirectory const directory;
  JsonLinesWriter writer(directory / "x");
  EXPECT_TRUE(mentions(message_of<InvalidArgument>([&] {
                         writer.write({{"a", {{"b", {1.0, infinity}}}}});
                       }),
                       "/a/b/1", "json_number"));
  EXPECT_TRUE(mentions(message_of<InvalidArgument>([&] { writer.write(json::array()); }), "array"));
  writer.write({{"path", "\xff"}});
  writer.close();
  EXPECT_EQ(read_json_lines(directory / "x").records.size(), 1u);
}

// Case 40.
TEST(json_lines, a_full_device_is_an_error) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  JsonLinesWriter writer("/dev/full");
  EXPECT_TRUE(mentions(message_of<FileError>([&] {
                         writer.write({{"a", 1}});
                       }),
                       "/dev/full", "No space left"));
}

TEST(json_lines, a_record_that_did_not_fit_is_taken_back) {
  TemporaryDirectory const directory;
  JsonLinesWriter writer(directory / "x");
  writer.write({{"a", 1}});
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  auto const handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit const small{20, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string const message = message_of<FileError>([&] {
    writer.write({{"text", std::string(100, 'x')}});
  });
  setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(mentions(message, directory / "x", "cannot write"));
  EXPECT_EQ(read_file(directory / "x"), "{\"a\":1}\n");
}

TEST(json_lines, unwritable_targets_are_named) {
  TemporaryDirectory const directory;
  write_file(directory / "file", "");
  for (std::string const& path : {directory / "file/x", directory.path()}) {
    EXPECT_TRUE(mentions(message_of<FileError>([&] { JsonLinesWriter{path}; }), path));
  }
}

struct DecimalComma : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(json_lines, the_locale_does_not_matter) {
  TemporaryDirectory const directory;
  std::locale const old = std::locale::global(std::locale(std::locale(), new DecimalComma));
  std::string const old_c = std::setlocale(LC_ALL, nullptr);
  for (char const* name : {"de_DE.UTF-8", "de_DE", "fr_FR.UTF-8"}) {
    if (std::setlocale(LC_ALL, name) != nullptr) break;
  }
  JsonLinesWriter writer(directory / "x");
  writer.write({{"a", 12345.5}, {"n", 1234567}});
  writer.close();
  json const back = read_json_lines(directory / "x").records.at(0);
  std::setlocale(LC_ALL, old_c.c_str());
  std::locale::global(old);
  EXPECT_EQ(read_file(directory / "x"), "{\"a\":12345.5,\"n\":1234567}\n");
  EXPECT_EQ(back, (json{{"a", 12345.5}, {"n", 1234567}}));
}

}  // namespace
