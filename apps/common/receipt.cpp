// SPDX-License-Identifier: Apache-2.0
#include "receipt.hpp"

#include "runtime.hpp"

#include <vpkl/config.hpp>
#include <vpkl/core/error.hpp>
#include <vpkl/core/kokkos.hpp>
#include <vpkl/io/atomic_file.hpp>
#include <vpkl/io/sha256.hpp>

#include <fmt/format.h>
#include <unistd.h>

#include <fstream>

namespace vpkl::apps {

namespace {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  return "unknown";
}

nlohmann::json hashes(std::map<std::string, std::string> const& files) {
  nlohmann::json list = nlohmann::json::array();
  for (auto const& [path, sha256] : files)
    list.push_back({{"path", path}, {"sha256", sha256}});
  return list;
}

}  // namespace

nlohmann::json describe_host() {
  char host[256] = "unknown";
  gethostname(host, sizeof host - 1);
  return {{"vpkl", VPKL_VERSION_STRING},
          {"kokkos", fmt::format("{}.{}.{}", KOKKOS_VERSION / 10000, KOKKOS_VERSION / 100 % 100,
                                 KOKKOS_VERSION % 100)},
          {"compiler", __VERSION__},
          {"host", host},
          {"cpu", cpu_model()},
          {"usable_cpus", usable_cpus()}};
}

nlohmann::json describe_environment() {
  nlohmann::json environment = describe_host();
  environment["execution_space"] = Kokkos::DefaultExecutionSpace::name();
  environment["concurrency"] = Kokkos::DefaultExecutionSpace().concurrency();
  return environment;
}

std::string receipt_path(std::string const& results, int rank) {
  return fmt::format("{}.rank{}.receipt.json", results, rank);
}

void write_receipt(std::string const& path, nlohmann::json facts,
                   std::map<std::string, std::string> const& inputs,
                   std::map<std::string, std::string> const& outputs) {
  facts["inputs"] = hashes(inputs);
  facts["outputs"] = hashes(outputs);
  AtomicFile file(path);
  std::ofstream out(file.temporary_path());
  out << facts.dump(2) << '\n';
  out.close();
  if (!out) throw FileError(fmt::format("{}: cannot be written", path));
  file.commit();
}

int verify_receipts(std::string const& results) {
  int ranks = 1;
  nlohmann::json first;
  for (int rank = 0; rank < ranks; ++rank) {
    std::string const path = receipt_path(results, rank);
    std::ifstream file(path);
    if (!file) throw FileError(fmt::format("{}: cannot be opened, expected a receipt", path));
    nlohmann::json const receipt = nlohmann::json::parse(file, nullptr, false);
    if (!receipt.is_object() || receipt.value("rank", nlohmann::json()) != rank ||
        !receipt.value("ranks", nlohmann::json()).is_number_integer() || receipt["ranks"] < 1 ||
        receipt.value("inputs", nlohmann::json::array()).empty() ||
        (rank == 0 && receipt.value("outputs", nlohmann::json::array()).empty()))
      throw FileError(fmt::format(
          "{}: not the receipt of rank {}, expected rank, ranks, inputs and outputs", path, rank));
    if (rank == 0) first = receipt;
    for (char const* same : {"ranks", "configuration", "inputs"})
      if (receipt.value(same, nlohmann::json()) != first.value(same, nlohmann::json()))
        throw FileError(fmt::format("{}: {} differ from rank 0's, expected one run", path, same));
    ranks = receipt["ranks"];
    for (char const* list : {"inputs", "outputs"})
      for (auto const& entry : receipt.value(list, nlohmann::json::array())) {
        std::string const found = sha256_file(entry.at("path"));
        std::string const recorded = entry.at("sha256");
        if (found != recorded)
          throw FileError(fmt::format("{}: SHA-256 is {}, the receipt {} expects {}",
                                      entry.at("path").get<std::string>(), found, path, recorded));
      }
  }
  return ranks;
}

}  // namespace vpkl::apps
