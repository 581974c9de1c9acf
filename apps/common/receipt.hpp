// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Receipts: what one rank read, ran on and wrote, with SHA-256.
#pragma once

#include <nlohmann/json.hpp>

#include <map>
#include <string>

namespace vpkl::apps {

/// \brief Versions of library, Kokkos and compiler, host and CPU. Needs no Kokkos that runs.
nlohmann::json describe_host();

/// \brief As describe_host, with backend and threads of the running Kokkos.
nlohmann::json describe_environment();

/// \brief `<results>.rank<r>.receipt.json`
std::string receipt_path(std::string const& results, int rank);

/// \brief Writes a receipt through a temporary name; an existing one is replaced.
/// \param[in] facts anything; `inputs` and `outputs` are added: path and SHA-256 of each file
/// \throws FileError
void write_receipt(std::string const& path, nlohmann::json facts,
                   std::map<std::string, std::string> const& inputs,
                   std::map<std::string, std::string> const& outputs);

/// \brief Reads the receipts of all ranks back and compares every file they name.
/// \return number of receipts
/// \throws FileError naming what is missing or differs
int verify_receipts(std::string const& results);

}  // namespace vpkl::apps
