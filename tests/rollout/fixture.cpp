// SPDX-License-Identifier: Apache-2.0
#include "io/temporary_directory.hpp"

#include <vpkl/core/error.hpp>
#include <vpkl/io/hdf5.hpp>
#include <vpkl/io/sha256.hpp>
#include <vpkl/rollout/fixture.hpp>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <functional>

// HDF5 1.10 never returns some memory once it has met damaged metadata.
extern "C" char const* __lsan_default_suppressions();
extern "C" char const* __lsan_default_suppressions() { return "leak:libhdf5\n"; }

namespace {

using namespace vpkl;
using namespace vpkl::test;
using impl::Hdf5File;
using impl::Hdf5Type;

constexpr std::int64_t samples = 3, width = 6, vocabulary = 11, hidden = 4;
using Words = std::vector<std::uint16_t>;

/// Words that cover signs, subnormals, infinities and NaN payloads.
Words words_of(std::int64_t count, std::uint16_t first) {
  Words words(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < words.size(); ++i) {
    words[i] = static_cast<std::uint16_t>(first + i * 7919);
  }
  Words const special{0x3f95, 0x8000, 0x0001, 0x7f80, 0x7fc1, 0xff81};
  std::copy(special.begin(), special.end(), words.begin());
  return words;
}

RowSource rows_of(Words words, std::int64_t row_words) {
  return [words = std::move(words), row_words](std::int64_t first, std::int64_t count, void* out) {
    std::memcpy(out, words.data() + first * row_words,
                static_cast<std::size_t>(count * row_words) * 2);
  };
}

struct Model {
  Words hidden_words = words_of(samples * width * hidden, 1);
  Words head_words = words_of(vocabulary * hidden, 2);

  ModelContent content() const {
    ModelContent model;
    model.hidden_size = hidden;
    model.hidden_type = ElementType::bf16;
    model.head_type = ElementType::fp16;
    model.hidden = rows_of(hidden_words, width * hidden);
    model.head = rows_of(head_words, hidden);
    return model;
  }
};

RolloutContent small_rollout() {
  RolloutContent content;
  content.info.samples = samples;
  content.info.sequence_length = width;
  content.info.vocabulary_size = vocabulary;
  content.info.bos_token_id = 1;
  content.info.eos_token_id = 2;
  content.info.pad_token_id = 2;
  content.info.seed = -5;
  content.info.generator = "test";
  content.info.tokenizer_fingerprint = "abc";
  content.info.student_name = "small µ";
  content.info.teacher_name = "";
  content.tokens = {1, 7, 2, 9, 2, 2, 1, 10, 4, 5, 6, 7, 2, 2, 2, 2, 2, 2};
  content.attention_mask = {1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0};
  content.response_start = {3, 2, 0};
  content.prompt_text = {"one", "two\nlines", "µ"};
  content.vocabulary_ids = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 2000};
  content.student = Model{}.content();
  content.teacher = Model{}.content();
  content.shared_head = true;
  return content;
}

/// Everything a fixture gives out, read whole.
struct Contents {
  std::vector<std::int32_t> tokens, vocabulary_ids;
  std::vector<std::uint8_t> attention_mask;
  std::vector<std::int64_t> response_start, length;
  std::vector<std::string> text;
  std::vector<Words> words;

  explicit Contents(RolloutFixture const& f) {
    FixtureInfo const& info = f.info();
    tokens = f.tokens(0, info.samples);
    attention_mask = f.attention_mask(0, info.samples);
    response_start = f.response_start(0, info.samples);
    length = f.length(0, info.samples);
    vocabulary_ids = f.vocabulary_ids();
    text = f.prompt_text(0, info.samples);
    text.insert(text.end(), {info.generator, info.tokenizer_fingerprint, info.student_name,
                             info.teacher_name, f.content_sha256()});
    for (Side const side : {Side::student, Side::teacher}) {
      if (!f.has_model(side)) continue;
      std::int64_t const size = f.model(side).hidden_size;
      words.emplace_back(static_cast<std::size_t>(info.samples * info.sequence_length * size));
      f.read_hidden(side, 0, info.samples, words.back().data());
      words.emplace_back(static_cast<std::size_t>(info.vocabulary_size * size));
      f.read_head(side, 0, info.vocabulary_size, words.back().data());
    }
  }

  bool operator==(Contents const& o) const { return text == o.text && same_numbers(o); }
  bool same_numbers(Contents const& o) const {
    return tokens == o.tokens && vocabulary_ids == o.vocabulary_ids &&
           attention_mask == o.attention_mask && response_start == o.response_start &&
           length == o.length && words == o.words;
  }
};

class fixture : public testing::Test {
 protected:
  std::string refusal(FixtureCheck check = FixtureCheck::metadata) const {
    return message_of<FileError>([&] { RolloutFixture(path, check); });
  }

  TemporaryDirectory directory;
  std::string path = directory / "rollout.h5";
};

TEST_F(fixture, round_trip) {
  RolloutContent content = small_rollout();
  std::uint64_t last_done = 0, last_total = 0;
  content.progress = [&](std::uint64_t done, std::uint64_t total) {
    EXPECT_GE(done, last_done);
    last_done = done;
    last_total = total;
  };
  write_fixture(path, content);
  EXPECT_EQ(last_done, last_total);
  RolloutFixture const f(path, FixtureCheck::content);
  EXPECT_EQ(f.path(), path);
  EXPECT_EQ(f.info().samples, samples);
  EXPECT_EQ(f.info().sequence_length, width);
  EXPECT_EQ(f.info().vocabulary_size, vocabulary);
  EXPECT_EQ(f.info().pad_token_id, 2);
  EXPECT_EQ(f.info().seed, -5);
  EXPECT_EQ(f.info().student_name, "small µ");
  Contents const all(f);
  EXPECT_EQ(all.tokens, content.tokens);
  EXPECT_EQ(all.attention_mask, content.attention_mask);
  EXPECT_EQ(all.response_start, content.response_start);
  EXPECT_EQ(all.length, (std::vector<std::int64_t>{5, 6, 0}));
  EXPECT_EQ(all.vocabulary_ids, content.vocabulary_ids);
  EXPECT_EQ(f.model(Side::student).hidden_type, ElementType::bf16);
  EXPECT_EQ(f.head_type(Side::student), ElementType::fp16);
  EXPECT_EQ(all.words, (std::vector<Words>{Model{}.hidden_words, Model{}.head_words,
                                           Model{}.hidden_words, Model{}.head_words}));

  EXPECT_EQ(f.tokens(1, 1), (std::vector<std::int32_t>{1, 10, 4, 5, 6, 7}));
  EXPECT_EQ(f.length(2, 1), (std::vector<std::int64_t>{0}));
  EXPECT_EQ(f.prompt_text(1, 2), (std::vector<std::string>{"two\nlines", "µ"}));
  EXPECT_TRUE(f.tokens(3, 0).empty());
  Words part(2 * hidden);
  f.read_head(Side::teacher, 9, 2, part.data());
  EXPECT_TRUE(std::equal(part.begin(), part.end(), Model{}.head_words.begin() + 9 * hidden));
}

TEST_F(fixture, the_same_content_has_the_same_hash_however_it_is_stored) {
  write_fixture(path, small_rollout());
  RolloutContent twice = small_rollout();
  twice.shared_head = false;
  write_fixture(directory / "twice.h5", twice);
  std::string const sha = RolloutFixture(path).content_sha256();
  EXPECT_EQ(RolloutFixture(directory / "twice.h5", FixtureCheck::content).content_sha256(), sha);
  twice.info.seed = 6;
  write_fixture(directory / "twice.h5", twice);
  EXPECT_NE(RolloutFixture(directory / "twice.h5").content_sha256(), sha);
}

TEST_F(fixture, without_models_and_text) {
  RolloutContent content = small_rollout();
  content.student.reset();
  content.teacher.reset();
  content.shared_head = false;
  content.prompt_text.clear();
  content.vocabulary_ids.clear();
  write_fixture(path, content);
  RolloutFixture const f(path, FixtureCheck::content);
  EXPECT_FALSE(f.has_model(Side::student));
  EXPECT_TRUE(f.prompt_text(0, 3).empty());
  EXPECT_TRUE(
      mentions(message_of<InvalidArgument>([&] { f.model(Side::teacher); }), path, "no teacher"));
}

TEST_F(fixture, ranges_outside_are_refused) {
  write_fixture(path, small_rollout());
  RolloutFixture const f(path);
  for (auto const& [first, count] : {std::pair{0, 4}, {-1, 1}, {3, 1}, {0, -1}}) {
    auto const refused = [&, a = first, b = count](auto const& read) {
      EXPECT_TRUE(mentions(message_of<InvalidArgument>([&] { read(a, b); }), path,
                           "[" + std::to_string(a)));
    };
    refused([&](int a, int b) { f.tokens(a, b); });
    refused([&](int a, int b) { f.prompt_text(a, b); });
    refused([&](int a, int b) { f.read_hidden(Side::student, a, b, nullptr); });
  }
  EXPECT_TRUE(
      mentions(message_of<InvalidArgument>([&] { f.read_head(Side::student, 11, 1, nullptr); }),
               "head rows"));
}

// ---- heads outside the fixture

class external_head : public fixture {
 protected:
  external_head() {
    std::string const header =
        R"({"model.embed_tokens.weight":{"dtype":"BF16","shape":[2001,4],"data_offsets":[0,16008]}})";
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(header.size());
    bytes += header;
    bytes.append(reinterpret_cast<char const*>(table.data()), table.size() * 2);
    std::filesystem::create_directory(directory / "models");
    write_file(model_path, bytes);
    content.shared_head = false;
    content.student->head = nullptr;
    content.student->head_reference =
        HeadReference{"models/m.safetensors", sha256_file(model_path), "model.embed_tokens.weight"};
  }

  Words table = words_of(2001 * hidden, 3);
  std::string model_path = directory / "models/m.safetensors";
  RolloutContent content = small_rollout();
};

TEST_F(external_head, first_rows_of_the_tensor) {
  write_fixture(path, content);
  RolloutFixture const f(path, FixtureCheck::content);
  EXPECT_EQ(f.head_type(Side::student), ElementType::bf16);
  EXPECT_EQ(f.model(Side::student).head_reference->tensor, "model.embed_tokens.weight");
  Words rows(2 * hidden);
  f.read_head(Side::student, 9, 2, rows.data());
  EXPECT_TRUE(std::equal(rows.begin(), rows.end(), table.begin() + 9 * hidden));
}

TEST_F(external_head, absolute_path) {
  content.student->head_reference->path = model_path;
  write_fixture(path, content);
  EXPECT_NO_THROW(RolloutFixture(path, FixtureCheck::content));
}

TEST_F(external_head, another_file_or_none) {
  write_fixture(path, content);
  std::string const bytes = read_file(model_path);
  std::string damaged = bytes;
  damaged.back() = static_cast<char>(damaged.back() ^ 1);
  write_file(model_path, damaged);
  std::uint16_t word = 0;
  EXPECT_TRUE(mentions(
      message_of<FileError>([&] { RolloutFixture(path).read_head(Side::student, 0, 1, &word); }),
      model_path, "SHA-256", content.student->head_reference->sha256));
  EXPECT_TRUE(mentions(refusal(FixtureCheck::content), model_path, "SHA-256"));
  std::filesystem::remove(model_path);
  EXPECT_NO_THROW(RolloutFixture(path).tokens(0, 1));
  EXPECT_TRUE(mentions(refusal(FixtureCheck::content), model_path, "No such file"));
}

TEST_F(external_head, a_tensor_of_another_shape) {
  content.student->hidden_size = 2;
  content.student->hidden = rows_of(words_of(samples * width * 2, 1), width * 2);
  write_fixture(path, content);
  EXPECT_TRUE(
      mentions(refusal(FixtureCheck::content), model_path, "[2001, 4]", "at least 11 rows of 2"));
}

// ---- damage (case 29)

TEST_F(fixture, every_cut_is_refused) {
  write_fixture(path, small_rollout());
  std::string const whole = read_file(path);
  for (std::size_t size = 0; size < whole.size();
       size += size < 200 || size + 20 > whole.size() ? 1 : 61) {
    write_file(path, whole.substr(0, size));
    EXPECT_TRUE(mentions(refusal(), path)) << size << " bytes";
  }
}

TEST_F(fixture, a_flipped_byte_never_gives_other_contents) {
  write_fixture(path, small_rollout());
  std::string const whole = read_file(path);
  Contents const original{RolloutFixture(path)};
  std::size_t refused = 0, survived = 0;
  for (std::size_t at = 0; at < whole.size(); at += 11) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ (at % 2 == 0 ? 0xff : 0x01));
    write_file(path, damaged);
    for (FixtureCheck const check : {FixtureCheck::metadata, FixtureCheck::content}) {
      try {
        Contents const read{RolloutFixture(path, check)};
        // Checksums guard numbers; only the content hash guards strings.
        EXPECT_TRUE(check == FixtureCheck::content ? read == original : read.same_numbers(original))
            << "byte " << at;
        ++survived;
      } catch (FileError const& error) {
        EXPECT_TRUE(mentions(error.what(), path)) << "byte " << at;
        ++refused;
      }
    }
  }
  RecordProperty("refused", static_cast<int>(refused));
  RecordProperty("survived", static_cast<int>(survived));
  EXPECT_GT(refused, survived / 4);
}

TEST_F(fixture, every_dataset_is_guarded) {
  write_fixture(path, small_rollout());
  std::string const whole = read_file(path);
  RolloutContent const content = small_rollout();
  auto const bytes_of = [](auto const& values) {
    return std::string(reinterpret_cast<char const*>(values.data()),
                       values.size() * sizeof(values[0]));
  };
  std::vector<std::int64_t> const length{5, 6, 0};
  for (auto const& [name, bytes] :
       {std::pair<std::string, std::string>{"/tokens", bytes_of(content.tokens)},
        {"/attention_mask", bytes_of(content.attention_mask)},
        {"/response_start", bytes_of(content.response_start)},
        {"/length", bytes_of(length)},
        {"/vocabulary_ids", bytes_of(content.vocabulary_ids)},
        {"/hidden", bytes_of(Model{}.hidden_words).substr(0, 2 * width * hidden)},
        {"/head", bytes_of(Model{}.head_words)}}) {
    std::size_t const found = whole.find(bytes);
    ASSERT_NE(found, std::string::npos) << name;
    std::string damaged = whole;
    damaged[found + bytes.size() / 2] = static_cast<char>(damaged[found + bytes.size() / 2] ^ 0x02);
    write_file(path, damaged);
    EXPECT_TRUE(mentions(refusal(FixtureCheck::content), path, name));
  }
  std::string damaged = whole;
  damaged[whole.find("two\nlines")] = 'T';
  write_file(path, damaged);
  EXPECT_TRUE(mentions(refusal(FixtureCheck::content), path, "content SHA-256"));
}

/// Runs `action` in a child process and returns its wait status.
int status_of_child(std::function<void()> const& action) {
  pid_t const child = fork();
  if (child == 0) {
    action();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

TEST_F(fixture, a_killed_writer_leaves_no_fixture) {
  for (int const calls : {1, 3, 5, 7, 8}) {
    int const status = status_of_child([&] {
      RolloutContent content = small_rollout();
      int left = calls;
      content.progress = [&](std::uint64_t, std::uint64_t) {
        if (--left == 0) std::raise(SIGKILL);
      };
      write_fixture(path, content);
    });
    ASSERT_TRUE(WIFSIGNALED(status)) << calls;
    EXPECT_FALSE(std::filesystem::exists(path));
    for (auto const& entry : std::filesystem::directory_iterator(directory.path())) {
      std::string const rest = entry.path().string();
      EXPECT_TRUE(mentions(message_of<FileError>([&] { RolloutFixture{rest}; }), rest));
      std::filesystem::remove(entry.path());
    }
  }
}

TEST_F(fixture, a_killed_writer_keeps_the_old_fixture) {
  write_fixture(path, small_rollout());
  std::string const before = read_file(path);
  int const status = status_of_child([&] {
    RolloutContent content = small_rollout();
    content.info.seed = 99;
    content.progress = [](std::uint64_t, std::uint64_t) { std::raise(SIGKILL); };
    write_fixture(path, content);
  });
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(read_file(path), before);
}

TEST_F(fixture, a_failing_source_leaves_no_file) {
  RolloutContent content = small_rollout();
  content.teacher->head = [](std::int64_t, std::int64_t, void*) { throw Error("source failed"); };
  EXPECT_EQ(message_of<Error>([&] { write_fixture(path, content); }), "source failed");
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

// ---- contents that do not fit together, written past the writer's own checks

class crafted : public fixture {
 protected:
  /// A small valid fixture (no models), changed by the arguments before it is marked complete.
  void craft(std::function<void(Hdf5File&)> const& extra = {}) {
    Hdf5File file = Hdf5File::create(path);
    file.write_string_attribute("/", "format", format);
    file.write_int64_attribute("/", "schema_version", schema);
    file.write_int64_attribute("/", "vocabulary_size", vocabulary_size);
    file.write_int64_attribute("/", "bos_token_id", -1);
    file.write_int64_attribute("/", "eos_token_id", eos);
    file.write_int64_attribute("/", "pad_token_id", -1);
    file.write_int64_attribute("/", "seed", 0);
    for (char const* name :
         {"generator", "tokenizer_fingerprint", "student_name", "teacher_name"}) {
      file.write_string_attribute("/", name, "x");
    }
    file.write_string_attribute("/", "content_sha256", std::string(64, '0'));
    write(file, "/tokens", Hdf5Type::int32, token_dims, tokens.data());
    write(file, "/attention_mask", Hdf5Type::uint8, {2, 3}, mask.data());
    write(file, "/response_start", Hdf5Type::int64, {2}, start.data());
    write(file, "/length", Hdf5Type::int64, length_dims, length.data());
    if (extra) extra(file);
    if (complete) file.write_uint8_attribute("/", "complete", 1);
    file.close();
  }

  static void write(Hdf5File& file, std::string const& name, Hdf5Type type,
                    impl::Extents const& dims, void const* data) {
    file.create_dataset(name, type, dims).write(impl::Extents(dims.size(), 0), dims, data);
  }

  std::string format = "vpkl-rollout-fixture";
  std::int64_t schema = 1, vocabulary_size = 5, eos = 2;
  bool complete = true;
  impl::Extents token_dims{2, 3}, length_dims{2};
  std::vector<std::int32_t> tokens{0, 1, 2, 3, 4, 0};
  std::vector<std::uint8_t> mask{1, 1, 1, 1, 0, 0};
  std::vector<std::int64_t> start{1, 3}, length{3, 1};
};

TEST_F(crafted, the_unchanged_one_opens) {
  craft();
  EXPECT_EQ(RolloutFixture(path).length(0, 2), length);
  EXPECT_TRUE(
      mentions(refusal(FixtureCheck::content), path, "content SHA-256", std::string(64, '0')));
}

TEST_F(crafted, another_format) {
  format = "something-else";
  craft();
  EXPECT_TRUE(mentions(refusal(), path, "format", "something-else"));
}

TEST_F(crafted, another_schema) {
  schema = 2;
  craft();
  EXPECT_TRUE(mentions(refusal(), path, "schema_version", "2, expected 1"));
}

TEST_F(crafted, incomplete) {
  complete = false;
  craft();
  EXPECT_TRUE(mentions(refusal(), path, "incomplete"));
}

TEST_F(crafted, ids_out_of_range) {
  for (std::int32_t const id : {5, -1}) {
    tokens[4] = id;
    craft();
    EXPECT_TRUE(mentions(refusal(), path, "/tokens", std::to_string(id) + " at [1, 1]", "[0, 5)"));
  }
}

TEST_F(crafted, special_id_out_of_range) {
  eos = 5;
  craft();
  EXPECT_TRUE(mentions(refusal(), path, "eos_token_id", "5"));
}

TEST_F(crafted, vocabulary_size) {
  vocabulary_size = 0;
  craft();
  EXPECT_TRUE(mentions(refusal(), path, "vocabulary_size", "0"));
}

TEST_F(crafted, mask_values) {
  mask[1] = 2;
  craft();
  EXPECT_TRUE(mentions(refusal(), path, "/attention_mask", "2 at [0, 1]"));
}

TEST_F(crafted, response_start) {
  start[0] = 4;
  craft();
  EXPECT_TRUE(mentions(refusal(), path, "/response_start", "4 of sample 0", "[0, 3]"));
}

TEST_F(crafted, length) {
  length[1] = 2;
  craft();
  EXPECT_TRUE(mentions(refusal(), path, "/length", "2 of sample 1", "has 1"));
}

TEST_F(crafted, shapes) {
  token_dims = {3, 2};
  craft();
  EXPECT_TRUE(mentions(refusal(), path, "/attention_mask", "[2, 3]", "[3, 2]"));
  token_dims = {6};
  craft();
  EXPECT_TRUE(mentions(refusal(), path, "/tokens", "1 dimensions"));
  token_dims = {2, 3};
  length_dims = {1};
  craft();
  EXPECT_TRUE(mentions(refusal(), path, "/length", "[1]", "[2]"));
}

TEST_F(crafted, models) {
  std::vector<float> const values(100);
  auto const hidden_of = [&](Hdf5File& file, Hdf5Type type, std::uint64_t n) {
    write(file, "/student/hidden", type, {n, 3, 2}, values.data());
  };
  craft([&](Hdf5File& f) { hidden_of(f, Hdf5Type::fp32, 2); });
  EXPECT_TRUE(mentions(refusal(), path, "/student", "head"));
  craft([&](Hdf5File& f) { hidden_of(f, Hdf5Type::fp32, 3); });
  EXPECT_TRUE(mentions(refusal(), path, "/student/hidden", "[3, 3, 2]", "[2, 3, 2]"));
  craft([&](Hdf5File& f) { hidden_of(f, Hdf5Type::fp64, 2); });
  EXPECT_TRUE(mentions(refusal(), path, "/student/hidden", "fp64"));
  craft([&](Hdf5File& f) {
    hidden_of(f, Hdf5Type::fp32, 2);
    write(f, "/student/head", Hdf5Type::fp32, {5, 3}, values.data());
  });
  EXPECT_TRUE(mentions(refusal(), path, "/student/head", "[5, 3]", "[5, 2]"));
  craft([&](Hdf5File& f) { write(f, "/teacher/head", Hdf5Type::fp32, {5, 2}, values.data()); });
  EXPECT_TRUE(mentions(refusal(), path, "/teacher/hidden", "missing"));
  craft([&](Hdf5File& f) {
    hidden_of(f, Hdf5Type::fp32, 2);
    f.write_string_attribute("/student", "head_path", "x.safetensors");
  });
  EXPECT_TRUE(mentions(refusal(), path, "head_sha256", "missing"));
  craft([&](Hdf5File& f) {
    auto dataset = f.create_dataset("/student/hidden", Hdf5Type::fp32, {2, 3, 2});
    dataset.write({0, 0, 0}, {1, 3, 2}, values.data());
    write(f, "/student/head", Hdf5Type::fp32, {5, 2}, values.data());
  });
  EXPECT_TRUE(mentions(refusal(), path, "/student/hidden", "1 of its 2 chunks"));
}

TEST_F(crafted, expected_values_are_not_hashed) {
  craft();
  std::string const with = refusal(FixtureCheck::content);
  craft([&](Hdf5File& f) { write(f, "/expected/loss", Hdf5Type::int32, {1}, tokens.data()); });
  EXPECT_EQ(refusal(FixtureCheck::content), with);
  craft([&](Hdf5File& f) { write(f, "/other/loss", Hdf5Type::int32, {1}, tokens.data()); });
  EXPECT_NE(refusal(FixtureCheck::content), with);
}

// ---- the writer's own refusals

TEST_F(fixture, the_writer_names_what_is_inconsistent) {
  auto const refused = [&](std::function<void(RolloutContent&)> const& change,
                           auto const&... parts) {
    RolloutContent content = small_rollout();
    change(content);
    EXPECT_TRUE(
        mentions(message_of<InvalidArgument>([&] { write_fixture(path, content); }), parts...));
  };
  refused([](auto& c) { c.info.samples = 0; }, "/tokens", "[0, 6]");
  refused([](auto& c) { c.info.vocabulary_size = 10; }, "vocabulary_ids", "11", "10");
  refused([](auto& c) { c.info.pad_token_id = 11; }, "pad_token_id", "11");
  refused([](auto& c) { c.tokens.pop_back(); }, "tokens", "17", "18");
  refused([](auto& c) { c.tokens[7] = 11; }, "/tokens", "11 at [1, 1]");
  refused([](auto& c) { c.attention_mask[2] = 3; }, "/attention_mask", "3 at [0, 2]");
  refused([](auto& c) { c.response_start[1] = 7; }, "/response_start", "7 of sample 1");
  refused([](auto& c) { c.prompt_text.pop_back(); }, "prompt_text", "2", "3");
  refused([](auto& c) { c.vocabulary_ids[3] = 2; }, "/vocabulary_ids", "2 at 3");
  refused([](auto& c) { c.student->hidden_size = 0; }, "student.hidden_size");
  refused([](auto& c) { c.student->hidden = nullptr; }, "student.hidden");
  refused([](auto& c) { c.teacher->head = nullptr; }, "teacher head", "nowhere");
  refused([](auto& c) { c.teacher->head_reference.emplace(); }, "teacher head", "twice");
  refused([](auto& c) { c.teacher.reset(); }, "shared_head");
  refused([](auto& c) { c.info.generator = std::string("a\0", 2); }, "generator", "NUL");
  EXPECT_TRUE(mentions(
      message_of<InvalidArgument>([&] { write_fixture(directory / "x.hdf5", small_rollout()); }),
      "x.hdf5", ".h5"));
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

}  // namespace
