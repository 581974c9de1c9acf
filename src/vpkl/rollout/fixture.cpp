// SPDX-License-Identifier: Apache-2.0
#include <vpkl/rollout/fixture.hpp>

#include <vpkl/core/error.hpp>
#include <vpkl/io/atomic_file.hpp>
#include <vpkl/io/hdf5.hpp>
#include <vpkl/io/safetensors.hpp>
#include <vpkl/io/sha256.hpp>
#include <vpkl/trace/range.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <string_view>
#include <utility>

namespace vpkl {
namespace {

using impl::Extents;
using impl::Hdf5Dataset;
using impl::Hdf5File;
using impl::Hdf5Type;

constexpr char const* format_name = "vpkl-rollout-fixture";
constexpr std::int64_t schema_version = 1;
constexpr std::uint64_t block_bytes = std::uint64_t{4} << 20;
/// For attributes, index structures and chunk headers beside the datasets' own bytes.
constexpr std::uint64_t metadata_bytes = std::uint64_t{1} << 20;

constexpr std::array<std::pair<char const*, std::int64_t FixtureInfo::*>, 5> integer_attributes{{
    {"vocabulary_size", &FixtureInfo::vocabulary_size},
    {"bos_token_id", &FixtureInfo::bos_token_id},
    {"eos_token_id", &FixtureInfo::eos_token_id},
    {"pad_token_id", &FixtureInfo::pad_token_id},
    {"seed", &FixtureInfo::seed},
}};
constexpr std::array<std::pair<char const*, std::string FixtureInfo::*>, 4> string_attributes{{
    {"generator", &FixtureInfo::generator},
    {"tokenizer_fingerprint", &FixtureInfo::tokenizer_fingerprint},
    {"student_name", &FixtureInfo::student_name},
    {"teacher_name", &FixtureInfo::teacher_name},
}};
constexpr std::array<std::pair<char const*, std::string HeadReference::*>, 3> reference_attributes{{
    {"head_path", &HeadReference::path},
    {"head_sha256", &HeadReference::sha256},
    {"head_tensor", &HeadReference::tensor},
}};

std::uint64_t as_unsigned(std::int64_t value) { return static_cast<std::uint64_t>(value); }

std::string group_of(Side side) { return std::string("/") + to_string(side); }

char const* type_tag(Hdf5Type type) {
  switch (type) {
    case Hdf5Type::int32: return "i4";
    case Hdf5Type::uint8: return "u1";
    case Hdf5Type::int64: return "i8";
    case Hdf5Type::fp64: return "f8";
    case Hdf5Type::fp32: return "f4";
    case Hdf5Type::bf16: return "bf16";
    case Hdf5Type::fp16: return "f2";
    case Hdf5Type::string: break;
  }
  return "str";
}

// ---- content hash

/// Hashes the elements of [start, start + count) on axis `axis`, at the given outer indices.
void hash_block(Hdf5Dataset const& dataset, Extents const& start, Extents const& count, Sha256& sha,
                std::vector<char>& buffer) {
  if (dataset.type() == Hdf5Type::string) {
    for (std::string const& text : dataset.read_strings(start[0], count[0])) {
      sha.update(text.c_str(), text.size() + 1);
    }
    return;
  }
  std::uint64_t bytes = impl::size_of(dataset.type());
  for (std::uint64_t const extent : count)
    bytes *= extent;
  buffer.assign(bytes, 0);
  dataset.read(start, count, buffer.data());
  sha.update(buffer.data(), buffer.size());
}

/// Hashes a dataset in C order, in blocks of about block_bytes.
void hash_dataset(Hdf5Dataset const& dataset, Sha256& sha) {
  Extents const& dims = dataset.dims();
  if (dims.empty() || (dataset.type() == Hdf5Type::string && dims.size() != 1)) {
    throw FileError(fmt::format("{}: has {} dimensions", dataset.where(), dims.size()));
  }
  dataset.require_intact(false);
  // A block takes everything within `axis`, a range on it and one index on every axis before.
  std::size_t axis = dims.size() - 1;
  std::uint64_t inner_bytes = impl::size_of(dataset.type());
  while (axis > 0 && inner_bytes * dims[axis] <= block_bytes)
    inner_bytes *= dims[axis--];
  std::uint64_t step =
      std::max<std::uint64_t>(block_bytes / std::max<std::uint64_t>(inner_bytes, 1), 1);
  // Whole chunks are read once; parts of one would be checked and unpacked again.
  if (!dataset.chunk().empty() && step > dataset.chunk()[axis])
    step -= step % dataset.chunk()[axis];

  if (std::find(dims.begin(), dims.end(), 0) != dims.end()) return;
  Extents start(dims.size(), 0);
  std::vector<char> buffer;
  for (;;) {
    Extents count = dims;
    std::fill(count.begin(), count.begin() + static_cast<std::ptrdiff_t>(axis), 1);
    count[axis] = std::min(step, dims[axis] - start[axis]);
    hash_block(dataset, start, count, sha, buffer);
    start[axis] += count[axis];
    for (std::size_t i = axis; i > 0 && start[i] == dims[i]; --i) {
      start[i] = 0;
      ++start[i - 1];
    }
    if (start[0] == dims[0]) return;
  }
}

std::string content_digest(Hdf5File const& file) {
  Sha256 sha;
  for (std::string const& name : file.attribute_names("/")) {
    if (name == "content_sha256" || name == "complete") continue;
    sha.update(name + "=" + file.attribute_text("/", name) + "\n");
  }
  for (std::string const& path : file.dataset_paths()) {
    if (path == "/expected" || path.rfind("/expected/", 0) == 0) continue;
    Hdf5Dataset const dataset = file.open_dataset(path);
    sha.update(fmt::format("{}\n{}\n{}\n", path, type_tag(dataset.type()),
                           fmt::join(dataset.dims(), ",")));
    hash_dataset(dataset, sha);
  }
  for (Side const side : {Side::student, Side::teacher}) {
    std::string const group = group_of(side);
    if (!file.exists(group)) continue;
    for (auto const& attribute : reference_attributes) {
      if (!file.has_attribute(group, attribute.first)) continue;
      sha.update(fmt::format("{}@{}={}\n", group, attribute.first,
                             file.read_string_attribute(group, attribute.first)));
    }
  }
  return sha.hex_digest();
}

// ---- consistency, the same for reader and writer

struct Problem {
  std::string where;  ///< attribute or dataset
  std::string text;
};

std::optional<Problem> find_problem(FixtureInfo const& info) {
  constexpr std::int64_t max_size = std::numeric_limits<std::int32_t>::max();
  if (info.vocabulary_size < 1 || info.vocabulary_size > max_size) {
    return Problem{"vocabulary_size",
                   fmt::format("{}, expected one in [1, {}]", info.vocabulary_size, max_size)};
  }
  if (info.samples < 1 || info.sequence_length < 1) {
    return Problem{"/tokens", fmt::format("[{}, {}], expected positive extents", info.samples,
                                          info.sequence_length)};
  }
  for (auto const& [name, member] : integer_attributes) {
    std::int64_t const value = info.*member;
    bool const is_id = std::string_view(name).find("token_id") != std::string_view::npos;
    if (is_id && (value < -1 || value >= info.vocabulary_size)) {
      return Problem{name,
                     fmt::format("{}, expected -1 or one in [0, {})", value, info.vocabulary_size)};
    }
  }
  return {};
}

/// Checks samples from `first` on.
std::optional<Problem> find_problem(FixtureInfo const& info, std::int64_t first,
                                    std::vector<std::int32_t> const& tokens,
                                    std::vector<std::uint8_t> const& attention_mask,
                                    std::vector<std::int64_t> const& response_start,
                                    std::vector<std::int64_t> const& length) {
  auto const width = static_cast<std::size_t>(info.sequence_length);
  for (std::size_t i = 0; i < response_start.size(); ++i) {
    auto const at = [&](std::size_t t) {
      return fmt::format("[{}, {}]", first + static_cast<std::int64_t>(i), t);
    };
    std::int64_t attended = 0;
    for (std::size_t t = 0; t < width; ++t) {
      std::int32_t const token = tokens[i * width + t];
      std::uint8_t const mask = attention_mask[i * width + t];
      if (token < 0 || token >= info.vocabulary_size) {
        return Problem{"/tokens", fmt::format("{} at {}, expected one in [0, {})", token, at(t),
                                              info.vocabulary_size)};
      }
      if (mask > 1)
        return Problem{"/attention_mask", fmt::format("{} at {}, expected 0 or 1", mask, at(t))};
      attended += mask;
    }
    std::int64_t const sample = first + static_cast<std::int64_t>(i);
    if (response_start[i] < 0 || response_start[i] > info.sequence_length) {
      return Problem{"/response_start",
                     fmt::format("{} of sample {}, expected one in [0, {}]", response_start[i],
                                 sample, info.sequence_length)};
    }
    if (length[i] != attended) {
      return Problem{"/length", fmt::format("{} of sample {}, its attention mask has {}", length[i],
                                            sample, attended)};
    }
  }
  return {};
}

std::optional<Problem> find_problem(std::vector<std::int32_t> const& vocabulary_ids) {
  std::int32_t last = -1;
  for (std::size_t i = 0; i < vocabulary_ids.size(); ++i) {
    if (vocabulary_ids[i] <= last) {
      return Problem{"/vocabulary_ids", fmt::format("{} at {} after {}, expected ascending ids",
                                                    vocabulary_ids[i], i, last)};
    }
    last = vocabulary_ids[i];
  }
  return {};
}

// ---- reading

void require_shape(Hdf5Dataset const& dataset, Hdf5Type type, Extents const& dims) {
  if (dataset.type() != type || dataset.dims() != dims) {
    throw FileError(fmt::format("{}: is {} [{}], expected {} [{}]", dataset.where(),
                                impl::to_string(dataset.type()), fmt::join(dataset.dims(), ", "),
                                impl::to_string(type), fmt::join(dims, ", ")));
  }
  dataset.require_intact(dims.size() >= 2);
}

Extents require_rank(Hdf5Dataset const& dataset, std::size_t rank) {
  if (dataset.dims().size() != rank) {
    throw FileError(fmt::format("{}: has {} dimensions, expected {}", dataset.where(),
                                dataset.dims().size(), rank));
  }
  return dataset.dims();
}

ElementType float_type(Hdf5Dataset const& dataset) {
  switch (dataset.type()) {
    case Hdf5Type::fp32: return ElementType::fp32;
    case Hdf5Type::bf16: return ElementType::bf16;
    case Hdf5Type::fp16: return ElementType::fp16;
    default: break;
  }
  throw FileError(fmt::format("{}: is {}, expected bf16, fp16 or fp32", dataset.where(),
                              impl::to_string(dataset.type())));
}

struct OpenModel {
  FixtureModel model;
  std::optional<Hdf5Dataset> hidden;
  std::optional<Hdf5Dataset> head;
  std::optional<SafetensorsFile> external_head;
};

OpenModel open_model(Hdf5File const& file, Side side, FixtureInfo const& info) {
  std::string const group = group_of(side);
  OpenModel result;
  result.hidden = file.open_dataset(group + "/hidden");
  FixtureModel& model = result.model;
  model.hidden_size = static_cast<std::int64_t>(require_rank(*result.hidden, 3)[2]);
  model.hidden_type = float_type(*result.hidden);
  require_shape(*result.hidden, result.hidden->type(),
                {as_unsigned(info.samples), as_unsigned(info.sequence_length),
                 as_unsigned(model.hidden_size)});

  bool const inside = file.exists(group + "/head");
  if (inside == file.has_attribute(group, "head_path")) {
    throw FileError(
        fmt::format("{}: group {}: expected either a dataset head or the attribute "
                    "head_path",
                    file.path(), group));
  }
  if (inside) {
    result.head = file.open_dataset(group + "/head");
    float_type(*result.head);
    require_shape(*result.head, result.head->type(),
                  {as_unsigned(info.vocabulary_size), as_unsigned(model.hidden_size)});
  } else {
    model.head_reference.emplace();
    for (auto const& [name, member] : reference_attributes) {
      (*model.head_reference).*member = file.read_string_attribute(group, name);
    }
  }
  return result;
}

}  // namespace

char const* to_string(Side side) { return side == Side::student ? "student" : "teacher"; }

struct RolloutFixture::Impl {
  Hdf5File file;
  FixtureInfo info;
  std::string content_sha256;
  std::optional<Hdf5Dataset> tokens, attention_mask, response_start, length, prompt_text;
  std::vector<std::int32_t> vocabulary_ids;
  std::array<std::optional<OpenModel>, 2> models;

  explicit Impl(std::string const& path) : file(Hdf5File::open(path)) {
    read_attributes();
    open_datasets();
    check_samples();
  }

  [[noreturn]] void fail(Problem const& problem) const {
    throw FileError(fmt::format("{}: {} is {}", file.path(), problem.where, problem.text));
  }

  void read_attributes() {
    std::string const format = file.read_string_attribute("/", "format");
    if (format != format_name) {
      fail({"attribute format", fmt::format("\"{}\", expected \"{}\"", format, format_name)});
    }
    std::int64_t const schema = file.read_integer_attribute("/", "schema_version");
    if (schema != schema_version) {
      fail({"schema_version", fmt::format("{}, expected {}", schema, schema_version)});
    }
    if (!file.has_attribute("/", "complete") || file.read_integer_attribute("/", "complete") != 1) {
      throw FileError(file.path() + ": is incomplete: its writer did not finish");
    }
    for (auto const& [name, member] : integer_attributes) {
      info.*member = file.read_integer_attribute("/", name);
    }
    for (auto const& [name, member] : string_attributes) {
      info.*member = file.read_string_attribute("/", name);
    }
    content_sha256 = file.read_string_attribute("/", "content_sha256");
  }

  void open_datasets() {
    tokens = file.open_dataset("/tokens");
    Extents const dims = require_rank(*tokens, 2);
    info.samples = static_cast<std::int64_t>(dims[0]);
    info.sequence_length = static_cast<std::int64_t>(dims[1]);
    if (auto const problem = find_problem(info)) fail(*problem);
    require_shape(*tokens, Hdf5Type::int32, dims);
    attention_mask = file.open_dataset("/attention_mask");
    require_shape(*attention_mask, Hdf5Type::uint8, dims);
    response_start = file.open_dataset("/response_start");
    require_shape(*response_start, Hdf5Type::int64, {dims[0]});
    length = file.open_dataset("/length");
    require_shape(*length, Hdf5Type::int64, {dims[0]});
    if (file.exists("/prompt_text")) {
      prompt_text = file.open_dataset("/prompt_text");
      require_shape(*prompt_text, Hdf5Type::string, {dims[0]});
    }
    if (file.exists("/vocabulary_ids")) {
      Hdf5Dataset const ids = file.open_dataset("/vocabulary_ids");
      std::uint64_t const size = as_unsigned(info.vocabulary_size);
      require_shape(ids, Hdf5Type::int32, {size});
      vocabulary_ids.resize(size);
      ids.read({0}, {size}, vocabulary_ids.data());
      if (auto const problem = find_problem(vocabulary_ids)) fail(*problem);
    }
    for (Side const side : {Side::student, Side::teacher}) {
      if (file.exists(group_of(side))) {
        models[static_cast<std::size_t>(side)] = open_model(file, side, info);
      }
    }
  }

  void check_samples() const {
    auto const row_bytes = info.sequence_length * static_cast<std::int64_t>(sizeof(std::int32_t));
    std::int64_t const step =
        std::max<std::int64_t>(1, static_cast<std::int64_t>(block_bytes) / row_bytes);
    for (std::int64_t first = 0; first < info.samples; first += step) {
      std::int64_t const count = std::min(step, info.samples - first);
      auto const problem = find_problem(info, first, read<std::int32_t>(*tokens, first, count),
                                        read<std::uint8_t>(*attention_mask, first, count),
                                        read<std::int64_t>(*response_start, first, count),
                                        read<std::int64_t>(*length, first, count));
      if (problem) fail(*problem);
    }
  }

  /// Reads samples of a dataset [N] or [N, T].
  template <class T>
  std::vector<T> read(Hdf5Dataset const& dataset, std::int64_t first, std::int64_t count) const {
    require_range("samples", first, count, info.samples);
    Extents start(dataset.dims().size(), 0);
    Extents extents = dataset.dims();
    start[0] = as_unsigned(first);
    extents[0] = as_unsigned(count);
    std::uint64_t const width = extents.size() == 2 ? extents[1] : 1;
    std::vector<T> values(extents[0] * width);
    dataset.read(start, extents, values.data());
    return values;
  }

  void require_range(char const* what, std::int64_t first, std::int64_t count,
                     std::int64_t size) const {
    if (first < 0 || count < 0 || first > size || count > size - first) {
      throw InvalidArgument(fmt::format("{}: {} [{}, {} + {}) asked, it has {}", file.path(), what,
                                        first, first, count, size));
    }
  }

  OpenModel& model(Side side) {
    auto& found = models[static_cast<std::size_t>(side)];
    if (!found) {
      throw InvalidArgument(fmt::format("{}: holds no {} model", file.path(), to_string(side)));
    }
    return *found;
  }

  /// The safetensors file of a head outside the fixture, opened and hashed on first use.
  SafetensorsFile& external_head(OpenModel& open) {
    if (!open.external_head) {
      HeadReference const& reference = *open.model.head_reference;
      auto const directory = std::filesystem::path(file.path()).parent_path();
      SafetensorsFile head((directory / reference.path).string(), reference.sha256);
      auto const& shape = head.tensor(reference.tensor).shape;
      head.element_type(reference.tensor);
      if (shape.size() != 2 || shape[0] < as_unsigned(info.vocabulary_size) ||
          shape[1] != as_unsigned(open.model.hidden_size)) {
        throw FileError(fmt::format("{}: tensor {} is [{}], expected at least {} rows of {}",
                                    head.path(), reference.tensor, fmt::join(shape, ", "),
                                    info.vocabulary_size, open.model.hidden_size));
      }
      open.external_head = std::move(head);
    }
    return *open.external_head;
  }

  void check_content() {
    std::string const actual = content_digest(file);
    if (actual != content_sha256) {
      fail({"content SHA-256", fmt::format("{}, expected {}", actual, content_sha256)});
    }
    for (auto& open : models) {
      if (open && open->model.head_reference) external_head(*open);
    }
  }
};

RolloutFixture::RolloutFixture(std::string const& path, FixtureCheck check)
    : impl_(std::make_unique<Impl>(path)) {
  if (check == FixtureCheck::content) impl_->check_content();
}

RolloutFixture::RolloutFixture(RolloutFixture&&) noexcept = default;
RolloutFixture& RolloutFixture::operator=(RolloutFixture&&) noexcept = default;
RolloutFixture::~RolloutFixture() = default;

std::string const& RolloutFixture::path() const { return impl_->file.path(); }
FixtureInfo const& RolloutFixture::info() const { return impl_->info; }
std::string const& RolloutFixture::content_sha256() const { return impl_->content_sha256; }

std::vector<std::int32_t> RolloutFixture::tokens(std::int64_t first, std::int64_t count) const {
  return impl_->read<std::int32_t>(*impl_->tokens, first, count);
}

std::vector<std::uint8_t> RolloutFixture::attention_mask(std::int64_t first,
                                                         std::int64_t count) const {
  return impl_->read<std::uint8_t>(*impl_->attention_mask, first, count);
}

std::vector<std::int64_t> RolloutFixture::response_start(std::int64_t first,
                                                         std::int64_t count) const {
  return impl_->read<std::int64_t>(*impl_->response_start, first, count);
}

std::vector<std::int64_t> RolloutFixture::length(std::int64_t first, std::int64_t count) const {
  return impl_->read<std::int64_t>(*impl_->length, first, count);
}

std::vector<std::string> RolloutFixture::prompt_text(std::int64_t first, std::int64_t count) const {
  impl_->require_range("samples", first, count, impl_->info.samples);
  if (!impl_->prompt_text) return {};
  return impl_->prompt_text->read_strings(as_unsigned(first), as_unsigned(count));
}

std::vector<std::int32_t> RolloutFixture::vocabulary_ids() const { return impl_->vocabulary_ids; }

bool RolloutFixture::has_model(Side side) const {
  return impl_->models[static_cast<std::size_t>(side)].has_value();
}

FixtureModel const& RolloutFixture::model(Side side) const { return impl_->model(side).model; }

std::optional<double> RolloutFixture::expected_loss(ElementType logits,
                                                    DivergenceOptions const& options) const {
  Hdf5File const& file = impl_->file;
  std::string const group = fmt::format("/expected/{}_logits/{}/temperature_{}", to_string(logits),
                                        to_string(options.divergence), options.temperature);
  if (!file.exists(group)) return std::nullopt;
  if (options.divergence == Divergence::jsd &&
      file.read_double_attribute("/expected", "beta") != options.beta)
    return std::nullopt;
  return file.read_double_attribute(group, "loss");
}

ElementType RolloutFixture::head_type(Side side) const {
  OpenModel& open = impl_->model(side);
  if (open.head) return float_type(*open.head);
  return impl_->external_head(open).element_type(open.model.head_reference->tensor);
}

void RolloutFixture::read_hidden(Side side, std::int64_t first, std::int64_t count,
                                 void* out) const {
  OpenModel const& open = impl_->model(side);
  impl_->require_range("samples", first, count, impl_->info.samples);
  trace::Range const range(trace::Phase::fetch, trace::Category::io,
                           count * impl_->info.sequence_length * open.model.hidden_size *
                               static_cast<std::int64_t>(size_of(open.model.hidden_type)));
  Extents extents = open.hidden->dims();
  extents[0] = as_unsigned(count);
  open.hidden->read({as_unsigned(first), 0, 0}, extents, out);
}

void RolloutFixture::read_head(Side side, std::int64_t first_row, std::int64_t rows,
                               void* out) const {
  OpenModel& open = impl_->model(side);
  impl_->require_range("head rows", first_row, rows, impl_->info.vocabulary_size);
  trace::Range const range(
      trace::Phase::fetch, trace::Category::io,
      rows * open.model.hidden_size * static_cast<std::int64_t>(size_of(head_type(side))));
  if (open.head) {
    open.head->read({as_unsigned(first_row), 0}, {as_unsigned(rows), open.head->dims()[1]}, out);
  } else {
    impl_->external_head(open).read_rows(open.model.head_reference->tensor, first_row, rows, out);
  }
}

// ---- writing

namespace {

[[noreturn]] void refuse(Problem const& problem) {
  throw InvalidArgument(fmt::format("rollout fixture: {} is {}", problem.where, problem.text));
}

std::vector<std::int64_t> attended_lengths(RolloutContent const& content) {
  auto const width = static_cast<std::size_t>(content.info.sequence_length);
  std::vector<std::int64_t> length;
  for (std::size_t n = 0; n < content.response_start.size(); ++n) {
    auto const row = content.attention_mask.begin() + static_cast<std::ptrdiff_t>(n * width);
    length.push_back(std::count(row, row + static_cast<std::ptrdiff_t>(width), 1));
  }
  return length;
}

void check_model(Side side, ModelContent const& model, bool shared_head) {
  std::string const where = to_string(side);
  if (model.hidden_size < 1) {
    refuse({where + ".hidden_size", fmt::format("{}, expected a positive one", model.hidden_size)});
  }
  if (!model.hidden) refuse({where + ".hidden", "unset, expected a source of hidden states"});
  bool const has_source = static_cast<bool>(model.head);
  if (!shared_head && has_source == model.head_reference.has_value()) {
    refuse({where + " head", fmt::format("given {}, expected either a source or a reference",
                                         has_source ? "twice" : "nowhere")});
  }
}

void check_content(RolloutContent const& content) {
  FixtureInfo const& info = content.info;
  if (auto const problem = find_problem(info)) refuse(*problem);
  std::uint64_t const samples = as_unsigned(info.samples);
  std::uint64_t const positions = samples * as_unsigned(info.sequence_length);
  auto const require_size = [](char const* what, std::size_t size, std::uint64_t expected,
                               bool optional) {
    if (size == expected || (optional && size == 0)) return;
    refuse({what, fmt::format("of {} values, expected {}", size, expected)});
  };
  require_size("tokens", content.tokens.size(), positions, false);
  require_size("attention_mask", content.attention_mask.size(), positions, false);
  require_size("response_start", content.response_start.size(), samples, false);
  require_size("prompt_text", content.prompt_text.size(), samples, true);
  require_size("vocabulary_ids", content.vocabulary_ids.size(), as_unsigned(info.vocabulary_size),
               true);
  auto problem = find_problem(info, 0, content.tokens, content.attention_mask,
                              content.response_start, attended_lengths(content));
  if (!problem) problem = find_problem(content.vocabulary_ids);
  if (problem) refuse(*problem);

  if (content.student) check_model(Side::student, *content.student, content.shared_head);
  if (content.teacher) check_model(Side::teacher, *content.teacher, false);
  bool const can_share = content.student && content.teacher && content.teacher->head &&
                         content.student->hidden_size == content.teacher->hidden_size;
  if (content.shared_head && !can_share) {
    refuse({"shared_head",
            "set, expected a student and a teacher of one hidden size, the teacher's "
            "head inside the file"});
  }
}

void write_attributes(Hdf5File& file, FixtureInfo const& info) {
  file.write_string_attribute("/", "format", format_name);
  file.write_int64_attribute("/", "schema_version", schema_version);
  for (auto const& [name, member] : integer_attributes) {
    file.write_int64_attribute("/", name, info.*member);
  }
  for (auto const& [name, member] : string_attributes) {
    file.write_string_attribute("/", name, info.*member);
  }
}

/// A dataset and the source of its rows (entries of the first dimension).
struct Pending {
  Hdf5Dataset dataset;
  RowSource source;
  std::uint64_t rows_at_once;
};

/// All datasets of a fixture, created before anything is written, so that the space is known.
class FixtureWriter {
 public:
  FixtureWriter(Hdf5File& file, RolloutContent const& content) : file_(file), content_(content) {
    FixtureInfo const& info = content.info;
    std::uint64_t const samples = as_unsigned(info.samples);
    std::uint64_t const width = as_unsigned(info.sequence_length);
    length_ = attended_lengths(content);
    add("/tokens", Hdf5Type::int32, {samples, width}, copy_of(content.tokens, width));
    add("/attention_mask", Hdf5Type::uint8, {samples, width},
        copy_of(content.attention_mask, width));
    add("/response_start", Hdf5Type::int64, {samples}, copy_of(content.response_start, 1));
    add("/length", Hdf5Type::int64, {samples}, copy_of(length_, 1));
    if (!content.vocabulary_ids.empty()) {
      add("/vocabulary_ids", Hdf5Type::int32, {content.vocabulary_ids.size()},
          copy_of(content.vocabulary_ids, 1));
    }
    if (content.teacher) add_model(Side::teacher, *content.teacher, false);
    if (content.student) add_model(Side::student, *content.student, content.shared_head);
  }

  std::uint64_t storage_bytes() const {
    std::uint64_t bytes = metadata_bytes;
    for (Pending const& pending : pending_) {
      std::uint64_t const stored = pending.dataset.storage_bytes();
      bytes += stored + stored / 64;  // chunk index and alignment
    }
    for (std::string const& text : content_.prompt_text)
      bytes += text.size() + 64;
    return bytes;
  }

  void write() {
    std::uint64_t done = 0;
    std::uint64_t const total = storage_bytes();
    std::vector<char> buffer;
    for (Pending& pending : pending_) {
      Hdf5Dataset& dataset = pending.dataset;
      Extents start(dataset.dims().size(), 0);
      Extents count = dataset.dims();
      std::uint64_t const row_bytes = bytes_of_row(dataset);
      for (; start[0] < dataset.dims()[0]; start[0] += count[0]) {
        count[0] = std::min(pending.rows_at_once, dataset.dims()[0] - start[0]);
        buffer.resize(count[0] * row_bytes);
        pending.source(static_cast<std::int64_t>(start[0]), static_cast<std::int64_t>(count[0]),
                       buffer.data());
        dataset.write(start, count, buffer.data());
        done += buffer.size();
        if (content_.progress) content_.progress(done, total);
      }
      dataset.close();
    }
    if (!content_.prompt_text.empty()) {
      Hdf5Dataset dataset =
          file_.create_dataset("/prompt_text", Hdf5Type::string, {content_.prompt_text.size()});
      dataset.write_strings(0, content_.prompt_text);
      dataset.close();
    }
    if (content_.progress) content_.progress(total, total);
  }

 private:
  template <class T>
  static RowSource copy_of(std::vector<T> const& values, std::uint64_t width) {
    return [&values, width](std::int64_t first, std::int64_t count, void* out) {
      auto const begin = values.begin() + first * static_cast<std::int64_t>(width);
      std::copy_n(begin, as_unsigned(count) * width, static_cast<T*>(out));
    };
  }

  static std::uint64_t bytes_of_row(Hdf5Dataset const& dataset) {
    std::uint64_t bytes = impl::size_of(dataset.type());
    for (std::size_t i = 1; i < dataset.dims().size(); ++i)
      bytes *= dataset.dims()[i];
    return bytes;
  }

  void add(std::string const& path, Hdf5Type type, Extents const& dims, RowSource source) {
    Pending pending{file_.create_dataset(path, type, dims), std::move(source), 1};
    std::uint64_t const chunk_rows = pending.dataset.chunk()[0];
    pending.rows_at_once =
        std::max<std::uint64_t>(1, block_bytes / bytes_of_row(pending.dataset) / chunk_rows) *
        chunk_rows;
    pending_.push_back(std::move(pending));
  }

  void add_model(Side side, ModelContent const& model, bool shared_head) {
    FixtureInfo const& info = content_.info;
    std::string const group = group_of(side);
    std::uint64_t const hidden = as_unsigned(model.hidden_size);
    add(group + "/hidden", impl::hdf5_type(model.hidden_type),
        {as_unsigned(info.samples), as_unsigned(info.sequence_length), hidden}, model.hidden);
    if (shared_head) {
      file_.hard_link(group_of(Side::teacher) + "/head", group + "/head");
    } else if (model.head_reference) {
      for (auto const& [name, member] : reference_attributes) {
        file_.write_string_attribute(group, name, (*model.head_reference).*member);
      }
    } else {
      add(group + "/head", impl::hdf5_type(model.head_type),
          {as_unsigned(info.vocabulary_size), hidden}, model.head);
    }
  }

  Hdf5File& file_;
  RolloutContent const& content_;
  std::vector<std::int64_t> length_;
  std::vector<Pending> pending_;
};

}  // namespace

void write_fixture(std::string const& path, RolloutContent const& content) {
  if (std::filesystem::path(path).extension() != ".h5") {
    throw InvalidArgument(path + ": expected a fixture's name to end in .h5");
  }
  check_content(content);
  AtomicFile target(path);
  Hdf5File file = Hdf5File::create(target.temporary_path());
  write_attributes(file, content.info);
  {
    FixtureWriter writer(file, content);
    // HDF5 may crash or report success after a write that met a full disk: reserve the space first.
    target.reserve(writer.storage_bytes());
    writer.write();
  }
  file.flush();
  file.write_string_attribute("/", "content_sha256", content_digest(file));
  file.flush();
  file.write_uint8_attribute("/", "complete", 1);
  file.close();
  target.commit();
}

}  // namespace vpkl
