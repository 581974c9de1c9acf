// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/error.hpp>
#include <vpkl/parallel/communicator.hpp>
#include <vpkl/parallel/poll.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace vpkl {

namespace {

void check_mpi(int code, char const* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "unknown error";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw CommunicationError(fmt::format("{} failed: {}", call, text));
}

#define VPKL_CHECK_MPI(call) check_mpi((call), #call)

bool mpi_usable() {
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

/// One MPI datatype of exactly `bytes` bytes, so that counts beyond INT_MAX are one element.
class ByteBlock {
 public:
  explicit ByteBlock(std::size_t bytes) {
    constexpr std::size_t piece = std::size_t(1) << 30;
    std::size_t const whole = bytes / piece;
    int const rest = static_cast<int>(bytes % piece);
    MPI_Datatype large = MPI_DATATYPE_NULL;
    VPKL_CHECK_MPI(MPI_Type_contiguous(static_cast<int>(piece), MPI_BYTE, &large));
    int lengths[2] = {static_cast<int>(whole), rest};
    MPI_Aint offsets[2] = {0, static_cast<MPI_Aint>(whole * piece)};
    MPI_Datatype types[2] = {large, MPI_BYTE};
    int const code = MPI_Type_create_struct(2, lengths, offsets, types, &type_);
    MPI_Type_free(&large);
    VPKL_CHECK_MPI(code);
    VPKL_CHECK_MPI(MPI_Type_commit(&type_));
  }
  ~ByteBlock() {
    if (type_ != MPI_DATATYPE_NULL) MPI_Type_free(&type_);
  }
  ByteBlock(ByteBlock const&) = delete;
  ByteBlock& operator=(ByteBlock const&) = delete;
  MPI_Datatype type() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

using Bytes = std::vector<unsigned char>;

/// MPI may still write into buffers of an abandoned collective, even while the process ends.
void keep_for_ever(std::unique_ptr<Bytes> buffer) {
  static auto& kept = *new std::vector<std::unique_ptr<Bytes>>;
  kept.push_back(std::move(buffer));
}

/// Small messages go through buffers of the transport's own: MPI may write into them long after a
/// missed deadline, when the caller's memory is gone.
class MpiTransport final : public Transport {
 public:
  explicit MpiTransport(MPI_Comm owned) : comm_(owned) {
    VPKL_CHECK_MPI(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
    VPKL_CHECK_MPI(MPI_Comm_rank(comm_, &rank_));
    VPKL_CHECK_MPI(MPI_Comm_size(comm_, &size_));
  }
  ~MpiTransport() override {
    if (!mpi_usable()) return;
    // Freeing a communicator with a collective in flight is erroneous; a dead one is kept.
    if (abandoned_)
      keep_for_ever(std::move(staging_));
    else
      MPI_Comm_free(&comm_);
  }

  char const* name() const override { return "mpi"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void all_gather(void const* local, void* gathered, std::size_t bytes,
                  std::chrono::milliseconds timeout) override {
    if (bytes == 0) return;
    auto* const bytes_out = static_cast<unsigned char*>(gathered);
    bool const staged = bytes <= staging_limit;
    unsigned char* const target =
        staged ? staging(bytes * static_cast<std::size_t>(size_)) : bytes_out;
    unsigned char* const slot = target + bytes * static_cast<std::size_t>(rank_);
    if (local != slot) std::memmove(slot, local, bytes);
    MPI_Request request = MPI_REQUEST_NULL;
    if (bytes <= INT_MAX) {
      VPKL_CHECK_MPI(MPI_Iallgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, target,
                                    static_cast<int>(bytes), MPI_BYTE, comm_, &request));
      wait(request, timeout, "MPI_Iallgather");
    } else {
      ByteBlock const block(bytes);
      VPKL_CHECK_MPI(MPI_Iallgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, target, 1, block.type(),
                                    comm_, &request));
      wait(request, timeout, "MPI_Iallgather");
    }
    if (staged) std::memcpy(bytes_out, target, bytes * static_cast<std::size_t>(size_));
  }

  void all_reduce(float* data, std::int64_t count, Reduction reduction,
                  std::chrono::milliseconds timeout) override {
    std::size_t const bytes = static_cast<std::size_t>(count) * sizeof(float);
    bool const staged = bytes <= staging_limit;
    float* const target = staged ? reinterpret_cast<float*>(staging(bytes)) : data;
    if (staged) std::memcpy(target, data, bytes);
    constexpr std::int64_t piece = std::int64_t(1) << 28;
    for (std::int64_t begin = 0; begin < count; begin += piece) {
      int const n = static_cast<int>(std::min(piece, count - begin));
      MPI_Op const op = reduction == Reduction::sum ? MPI_SUM : MPI_MAX;
      MPI_Request request = MPI_REQUEST_NULL;
      VPKL_CHECK_MPI(
          MPI_Iallreduce(MPI_IN_PLACE, target + begin, n, MPI_FLOAT, op, comm_, &request));
      wait(request, timeout, "MPI_Iallreduce");
    }
    if (staged) std::memcpy(data, target, bytes);
  }

  void broadcast(void* data, std::size_t bytes, int root,
                 std::chrono::milliseconds timeout) override {
    bool const staged = bytes <= staging_limit;
    unsigned char* const target = staged ? staging(bytes) : static_cast<unsigned char*>(data);
    if (staged && bytes > 0) std::memcpy(target, data, bytes);
    constexpr std::size_t piece = std::size_t(1) << 30;
    for (std::size_t begin = 0; begin < bytes; begin += piece) {
      int const n = static_cast<int>(std::min(piece, bytes - begin));
      MPI_Request request = MPI_REQUEST_NULL;
      VPKL_CHECK_MPI(MPI_Ibcast(target + begin, n, MPI_BYTE, root, comm_, &request));
      wait(request, timeout, "MPI_Ibcast");
    }
    if (staged && bytes > 0) std::memcpy(data, target, bytes);
  }

  std::unique_ptr<Transport> split(int color, int key) override {
    MPI_Comm part = MPI_COMM_NULL;
    VPKL_CHECK_MPI(MPI_Comm_split(comm_, color, key, &part));
    return std::make_unique<MpiTransport>(part);
  }

  void abort() noexcept override { abandoned_ = true; }

 private:
  static constexpr std::size_t staging_limit = std::size_t(1) << 20;

  unsigned char* staging(std::size_t bytes) {
    if (staging_->size() < bytes) staging_->resize(bytes);
    return staging_->data();
  }

  void wait(MPI_Request& request, std::chrono::milliseconds timeout, char const* call) {
    bool const ended = impl::poll(
        [&] {
          int done = 0;
          int const code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
          if (code != MPI_SUCCESS) abandoned_ = true;
          check_mpi(code, call);
          return done != 0;
        },
        timeout);
    if (ended) return;
    abandoned_ = true;
    throw CommunicationError(
        fmt::format("{} over {} ranks did not end within {} ms on rank {}: another rank failed or "
                    "never made the call",
                    call, size_, timeout.count(), rank_));
  }

  MPI_Comm comm_;
  int rank_ = 0;
  int size_ = 1;
  bool abandoned_ = false;
  std::unique_ptr<Bytes> staging_ = std::make_unique<Bytes>();
};

}  // namespace

Communicator Communicator::mpi(MPI_Comm comm) {
  if (!mpi_usable())
    throw InvalidArgument("Communicator::mpi: MPI is not initialised, or already finalised");
  if (comm == MPI_COMM_NULL)
    throw InvalidArgument("Communicator::mpi: the communicator is MPI_COMM_NULL");
  MPI_Comm own = MPI_COMM_NULL;
  VPKL_CHECK_MPI(MPI_Comm_dup(comm, &own));
  return from_transport(std::make_unique<MpiTransport>(own));
}

}  // namespace vpkl
