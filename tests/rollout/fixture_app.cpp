// SPDX-License-Identifier: Apache-2.0
// vpkl-fixture as its users run it. Every run has ten seconds.
#include "io/temporary_directory.hpp"

#include <vpkl/core/error.hpp>
#include <vpkl/rollout/fixture.hpp>

#include <sys/wait.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>

namespace {

using namespace vpkl;
using namespace vpkl::test;

struct Finished {
  int status;          ///< exit status; 124 after ten seconds, 128 + n after signal n
  std::string output;  ///< of both streams
};

Finished run_shell(std::string const& command) {
  FILE* const pipe = popen(("timeout 10 sh -c '" + command + "' 2>&1").c_str(), "r");
  if (pipe == nullptr) throw Error("cannot run a shell");
  Finished run{0, ""};
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe))
    run.output += static_cast<char>(c);
  int const status = pclose(pipe);
  run.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return run;
}

Finished run(std::string const& arguments) {
  return run_shell(std::string(VPKL_FIXTURE_APP) + " " + arguments);
}

class fixture_app : public testing::Test {
 protected:
  TemporaryDirectory directory;
  std::string path = directory / "x.h5";
};

TEST_F(fixture_app, make_verify_inspect) {
  Finished const made =
      run("make --samples 3 --sequence-length 20 --prompt-length 5 --max-response 12 "
          "--vocabulary-size 50 --hidden-student 8 --hidden-teacher 12 --type fp16 "
          "--seed 3 --output " +
          path);
  EXPECT_EQ(made.status, 0) << made.output;
  EXPECT_EQ(made.output, "wrote " + path + "\n") << "no progress outside a terminal";
  Finished const verified = run("verify " + path);
  EXPECT_EQ(verified.status, 0);
  EXPECT_TRUE(mentions(verified.output, path, "ok"));

  Finished const shown = run("inspect --json " + path);
  ASSERT_EQ(shown.status, 0);
  auto const json = nlohmann::json::parse(shown.output);
  EXPECT_EQ(json.at("samples"), 3);
  EXPECT_EQ(json.at("student_hidden_size"), 8);
  EXPECT_EQ(json.at("teacher_hidden_type"), "fp16");
  EXPECT_EQ(json.at("content_sha256"), RolloutFixture(path).content_sha256());
  EXPECT_TRUE(mentions(run("inspect " + path).output, "sequence_length", "20", "fp16"));

  RolloutFixture const fixture(path);
  EXPECT_EQ(fixture.info().seed, 3);
  for (std::int64_t const start : fixture.response_start(0, 3))
    EXPECT_EQ(start, 5);
  for (std::int64_t const length : fixture.length(0, 3)) {
    EXPECT_GE(length, 6);
    EXPECT_LE(length, 17);
  }
}

TEST_F(fixture_app, the_seed_decides_the_contents) {
  auto const sha = [&](std::string const& arguments) {
    EXPECT_EQ(run("make " + arguments + " --output " + path).status, 0);
    return RolloutFixture(path).content_sha256();
  };
  std::string const first = sha("--seed 5");
  EXPECT_EQ(sha("--seed 5"), first);
  EXPECT_NE(sha("--seed 6"), first);
}

TEST_F(fixture_app, the_student_is_near_the_teacher) {
  ASSERT_EQ(run("make --type fp32 --hidden-student 32 --hidden-teacher 32 --output " + path).status,
            0);
  RolloutFixture const fixture(path);
  std::vector<float> head[2], hidden[2];
  for (Side const side : {Side::student, Side::teacher}) {
    auto const i = static_cast<std::size_t>(side);
    head[i].resize(1031 * 32);
    hidden[i].resize(64 * 32);
    fixture.read_head(side, 0, 1031, head[i].data());
    fixture.read_hidden(side, 0, 1, hidden[i].data());
  }
  double kl = 0;
  double sums[2] = {0, 0};
  std::vector<double> logits[2];
  for (int i = 0; i < 2; ++i) {
    for (int v = 0; v < 1031; ++v) {
      double z = 0;
      for (int h = 0; h < 32; ++h)
        z += double{hidden[i][20 * 32 + h]} * head[i][v * 32 + h];
      logits[i].push_back(z);
      sums[i] += std::exp(z);
    }
  }
  for (std::size_t v = 0; v < 1031; ++v) {
    kl += std::exp(logits[1][v]) / sums[1] *
          (logits[1][v] - logits[0][v] - std::log(sums[1] / sums[0]));
  }
  EXPECT_GT(kl, 0.01);
  EXPECT_LT(kl, 2);
}

TEST_F(fixture_app, one_head_for_both) {
  ASSERT_EQ(run("make --shared-head --output " + path).status, 0);
  std::string const two = directory / "two.h5";
  ASSERT_EQ(run("make --output " + two).status, 0);
  EXPECT_EQ(run("verify " + path).status, 0);
  EXPECT_LT(std::filesystem::file_size(path), std::filesystem::file_size(two) - 100'000);
}

TEST_F(fixture_app, bad_flags_are_named_with_what_was_expected) {
  struct Case {
    std::string arguments;
    std::vector<std::string> mentioned;
  };
  for (Case const& c : std::vector<Case>{
           {"", {"subcommand"}},
           {"frobnicate", {"subcommand"}},
           {"make", {"--output"}},
           {"make --output x.h5 --no-such-flag", {"--no-such-flag"}},
           {"make --output x.h5 --samples 0", {"--samples", "0", "[1, "}},
           {"make --output x.h5 --samples -1", {"--samples", "-1", "[1, "}},
           {"make --output x.h5 --samples 1.5", {"--samples", "1.5", "integer"}},
           {"make --output x.h5 --samples many", {"--samples", "many", "integer"}},
           {"make --output x.h5 --samples 99999999999999999999", {"--samples", "integer"}},
           {"make --output x.h5 --samples", {"--samples"}},
           {"make --output x.h5 --samples 1000000 --sequence-length 1000000",
            {"--samples", "--sequence-length"}},
           {"make --output x.h5 --sequence-length 1", {"--sequence-length", "[2, "}},
           {"make --output x.h5 --sequence-length 8 --prompt-length 8",
            {"--prompt-length 8", "at least"}},
           {"make --output x.h5 --max-response 60", {"--max-response 60", "at least"}},
           {"make --output x.h5 --vocabulary-size 3", {"--vocabulary-size", "[4, "}},
           {"make --output x.h5 --hidden-student 0", {"--hidden-student", "[1, "}},
           {"make --output x.h5 --hidden-teacher x", {"--hidden-teacher", "integer"}},
           {"make --output x.h5 --type fp8", {"--type", "fp8", "bf16"}},
           {"make --output x.h5 --seed -3", {"--seed", "-3"}},
           {"make --output x.h5 --shared-head --hidden-teacher 32", {"--shared-head", "32"}},
           {"make --output x.hdf5", {"x.hdf5", ".h5"}},
           {"inspect", {"file"}},
           {"verify a.h5 b.h5", {"b.h5"}},
       }) {
    Finished const result =
        run_shell("cd " + directory.path() + " && " + VPKL_FIXTURE_APP + " " + c.arguments);
    EXPECT_EQ(result.status, 2) << c.arguments;
    for (std::string const& part : c.mentioned)
      EXPECT_TRUE(mentions(result.output, part)) << c.arguments;
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST_F(fixture_app, help_is_no_error) {
  EXPECT_EQ(run("--help").status, 0);
  EXPECT_TRUE(mentions(run("make --help").output, "--vocabulary-size", "--output"));
}

TEST_F(fixture_app, files_that_are_no_fixture) {
  write_file(directory / "text", "version https");
  write_file(directory / "empty", "");
  for (std::string const command : {"inspect", "verify"}) {
    for (std::string const& file : {directory / "missing", directory / "text", directory / "empty",
                                    directory.path(), std::string("/dev/null")}) {
      Finished const result = run(command + " " + file);
      EXPECT_EQ(result.status, 1) << file;
      EXPECT_TRUE(mentions(result.output, file));
    }
  }
}

TEST_F(fixture_app, verify_finds_damage_that_inspect_need_not) {
  ASSERT_EQ(run("make --output " + path).status, 0);
  std::string bytes = read_file(path);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 4);
  write_file(path, bytes);
  Finished const result = run("verify " + path);
  EXPECT_EQ(result.status, 1);
  EXPECT_TRUE(mentions(result.output, path));
}

TEST_F(fixture_app, targets_that_cannot_be_written) {
  write_file(directory / "file", "");
  for (std::string const& target : {directory / "file/x.h5", std::string("/proc/none/x.h5")}) {
    Finished const result = run("make --output " + target);
    EXPECT_EQ(result.status, 1);
    EXPECT_TRUE(mentions(result.output, target));
  }
}

TEST_F(fixture_app, a_full_disk_is_found_before_writing) {
  std::string const huge =
      "make --samples 1000 --sequence-length 1000 --hidden-teacher 1000000 --output " + path;
  Finished const result = run(huge);
  EXPECT_EQ(result.status, 1);
  EXPECT_TRUE(mentions(result.output, "x.h5", "bytes", "available"));
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));

  // A small file system of its own, where the system lets us have one.
  std::string const mount =
      "unshare --user --map-root-user --mount sh -c \"mount -t tmpfs -o size=1m none " +
      directory.path();
  if (run_shell(mount + "\"").status != 0) GTEST_SKIP() << "cannot mount a small file system";
  for (std::string const hidden : {"200", "400", "2000"}) {
    Finished const small = run_shell(mount + " && " + VPKL_FIXTURE_APP + " make --hidden-student " +
                                     hidden + " --hidden-teacher " + hidden + " --output " + path +
                                     "; code=\\$?; ls -A " + directory.path() + "; exit \\$code\"");
    EXPECT_EQ(small.status, 1) << hidden << small.output;
    EXPECT_TRUE(mentions(small.output, "x.h5", "bytes", "available"));
    EXPECT_EQ(small.output.find('\n'), small.output.size() - 1) << "left a file: " << small.output;
  }
}

}  // namespace
