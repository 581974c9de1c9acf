// SPDX-License-Identifier: Apache-2.0
#include <vpkl/parallel/agreement.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace vpkl {

namespace {

template <std::size_t N>
void copy_text(char (&to)[N], std::string_view from) {
  std::size_t const n = std::min(from.size(), N - 1);
  std::memcpy(to, from.data(), n);
  to[n] = '\0';
}

}  // namespace

std::uint64_t hash_bytes(void const* data, std::size_t bytes, std::uint64_t seed) {
  auto const* p = static_cast<unsigned char const*>(data);
  for (std::size_t i = 0; i < bytes; ++i)
    seed = (seed ^ p[i]) * 0x100000001b3ull;
  return seed;
}

Agreement::Agreement(std::string_view subject) { copy_text(record_.subject, subject); }

Agreement& Agreement::equal(std::string_view name, double value) {
  std::int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return add(name, Kind::real, bits);
}

Agreement& Agreement::equal(std::string_view name, std::string_view text) {
  return equal_hash(name, hash_bytes(text.data(), text.size()));
}

Agreement& Agreement::equal_hash(std::string_view name, std::uint64_t hash) {
  return add(name, Kind::hash, static_cast<std::int64_t>(hash));
}

Agreement& Agreement::tell(std::string_view name, std::int64_t value) {
  return add(name, Kind::told, value);
}

Agreement& Agreement::fail(std::exception_ptr error) {
  if (error_) return *this;
  error_ = std::move(error);
  record_.error = static_cast<std::int32_t>(error_kind(error_));
  copy_text(record_.message, error_message(error_));
  return *this;
}

Agreement& Agreement::add(std::string_view name, Kind kind, std::int64_t value) {
  if (record_.fields == max_fields)
    throw InvalidArgument(
        fmt::format("Agreement on {}: more than {} fields", record_.subject, max_fields));
  Field& field = record_.field[record_.fields++];
  copy_text(field.name, name);
  field.kind = kind;
  field.value = value;
  return *this;
}

std::string Agreement::show(Field const& field) {
  switch (field.kind) {
    case Kind::real: {
      double value;
      std::memcpy(&value, &field.value, sizeof value);
      return fmt::format("{}", value);
    }
    case Kind::hash: return fmt::format("{:#018x}", static_cast<std::uint64_t>(field.value));
    case Kind::integer:
    case Kind::told: break;
  }
  return fmt::format("{}", field.value);
}

std::vector<std::vector<std::int64_t>> Agreement::exchange(Communicator const& comm) {
  int const ranks = comm.size();
  std::vector<Record> records(static_cast<std::size_t>(ranks));
  if (ranks == 1) {
    if (error_) std::rethrow_exception(error_);
    records[0] = record_;
  } else {
    comm.exchange_record(&record_, records.data(), sizeof(Record));
  }

  for (int r = 0; r < ranks; ++r)
    if (records[r].error != 0)
      throw_error(static_cast<ErrorKind>(records[r].error),
                  fmt::format("rank {}: {}", r, records[r].message));

  Record const& first = records[0];
  for (int r = 1; r < ranks; ++r) {
    Record const& other = records[r];
    if (std::strcmp(first.subject, other.subject) != 0)
      throw AgreementError(fmt::format("rank 0 agrees on '{}' while rank {} agrees on '{}'",
                                       first.subject, r, other.subject));
    int const common = std::min(first.fields, other.fields);
    for (int i = 0; i < common; ++i) {
      Field const &a = first.field[i], &b = other.field[i];
      bool const same_field = std::strcmp(a.name, b.name) == 0 && a.kind == b.kind;
      if (same_field && (a.kind == Kind::told || a.value == b.value)) continue;
      throw AgreementError(same_field
                               ? fmt::format("{}: {} differ: {} on rank 0, {} on rank {}",
                                             first.subject, a.name, show(a), show(b), r)
                               : fmt::format("{}: rank 0 brings '{}' where rank {} brings '{}'",
                                             first.subject, a.name, r, b.name));
    }
    if (first.fields != other.fields)
      throw AgreementError(fmt::format("{}: {} values on rank 0, {} on rank {}", first.subject,
                                       first.fields, other.fields, r));
  }

  std::vector<std::vector<std::int64_t>> told(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r)
    for (int i = 0; i < records[r].fields; ++i)
      if (records[r].field[i].kind == Kind::told) told[r].push_back(records[r].field[i].value);
  return told;
}

}  // namespace vpkl
