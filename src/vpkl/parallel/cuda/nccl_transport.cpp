// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/allocate.hpp>
#include <vpkl/core/cuda/check.hpp>
#include <vpkl/core/cuda/pinned_pool.hpp>
#include <vpkl/parallel/agreement.hpp>
#include <vpkl/parallel/communicator_state.hpp>
#include <vpkl/parallel/cuda/device_transport.hpp>
#include <vpkl/parallel/poll.hpp>

#include <link.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 14, 0)
#error "vpkl needs NCCL 2.14 or later, the first with communicators that do not block"
#endif

namespace vpkl {

namespace {

using impl::DeviceTransport;
using impl::cuda::Event;
using impl::cuda::PinnedBlock;
using std::chrono::milliseconds;

/// Each copy of NCCL has connections and an order of work of its own; a communicator handed to the
/// other copy is no communicator there. Copies linked statically have no name to be found by.
void refuse_two_copies() {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* object, std::size_t, void* out) {
        std::string const path = object->dlpi_name;
        if (path.compare(path.rfind('/') + 1, 10, "libnccl.so") == 0)
          static_cast<std::vector<std::string>*>(out)->push_back(path);
        return 0;
      },
      &paths);
  if (paths.size() > 1)
    throw Error(fmt::format(
        "NCCL: this process has loaded {} and {}, expected one copy; build or start the program "
        "with that of the framework it works with",
        paths[0], paths[1]));
}

int kokkos_device() { return Kokkos::Cuda().cuda_device(); }

void check_current_device() {
  int device = 0;
  VPKL_CHECK_CUDA(cudaGetDevice(&device));
  if (device != kokkos_device())
    throw InvalidArgument(fmt::format("NCCL: the current CUDA device is {}, expected Kokkos' {}",
                                      device, kokkos_device()));
}

using GpuId = std::array<char, sizeof(cudaUUID_t)>;

GpuId gpu_id() {
  cudaDeviceProp properties;
  VPKL_CHECK_CUDA(cudaGetDeviceProperties(&properties, kokkos_device()));
  GpuId id;
  std::memcpy(id.data(), &properties.uuid, sizeof id);
  return id;
}

/// What a failure or a destructor waits, at most, for a communicator's end. That takes milliseconds
/// on an idle device, but frees memory there, which waits for whatever runs: maybe for long work,
/// maybe for a collective of another communicator that nobody ends.
constexpr milliseconds patience = std::chrono::seconds(5);

class NcclTransport final : public DeviceTransport {
 public:
  /// Joins the ranks that hold `id`. \param[in] host carries host messages, or null
  NcclTransport(std::unique_ptr<Transport> host, ncclUniqueId const& id, int rank, int size,
                milliseconds timeout)
      : host_(std::move(host)), rank_(rank), size_(size), owned_(true), timeout_(timeout) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    try {
      settle(ncclCommInitRankConfig(&comm_, size, id, rank, &config), "ncclCommInitRankConfig",
             timeout);
    } catch (...) {
      abort();
      throw;
    }
  }

  /// Borrows `comm`.
  explicit NcclTransport(ncclComm_t comm) : comm_(comm) {
    ncclResult_t state = ncclSuccess;
    int device = 0;
    for (auto const& [code, call] :
         {std::pair{ncclCommGetAsyncError(comm, &state), "ncclCommGetAsyncError"},
          std::pair{ncclCommCount(comm, &size_), "ncclCommCount"},
          std::pair{ncclCommUserRank(comm, &rank_), "ncclCommUserRank"},
          std::pair{ncclCommCuDevice(comm, &device), "ncclCommCuDevice"}})
      if (code != ncclSuccess || state != ncclSuccess)
        throw InvalidArgument(fmt::format("NCCL communicator: {}: {}, expected one that works",
                                          call, text(code != ncclSuccess ? code : state)));
    if (device != kokkos_device())
      throw InvalidArgument(
          fmt::format("NCCL communicator: its CUDA device is {}, expected Kokkos' {}", device,
                      kokkos_device()));
  }

  ~NcclTransport() override {
    // Once Kokkos is gone the process may be exiting, and the driver with it.
    bool const gone = Kokkos::is_finalized();
    bool const ended = !gone && !aborted_ && (!owned_ || end(How::finished));
    if (!ended) {
      leak_staging();
      return;
    }
    exec_.reset();
    if (stream_) (void)cudaStreamDestroy(stream_);
  }

  char const* name() const override { return "nccl"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  // Device memory ---------------------------------------------------------------------------------

  void enqueue_all_gather(cudaStream_t stream, void const* local, void* gathered, std::size_t bytes,
                          milliseconds timeout) override {
    if (bytes == 0) return;
    enqueue(stream, "ncclAllGather", timeout,
            [&] { return ncclAllGather(local, gathered, bytes, ncclUint8, comm_, stream); });
  }

  void enqueue_all_reduce(cudaStream_t stream, float* data, std::int64_t count, Reduction reduction,
                          milliseconds timeout) override {
    ncclRedOp_t const op = reduction == Reduction::sum ? ncclSum : ncclMax;
    enqueue(stream, "ncclAllReduce", timeout, [&] {
      return ncclAllReduce(data, data, static_cast<std::size_t>(count), ncclFloat32, op, comm_,
                           stream);
    });
  }

  void enqueue_broadcast(cudaStream_t stream, void* data, std::size_t bytes, int root,
                         milliseconds timeout) override {
    if (bytes == 0) return;
    enqueue(stream, "ncclBroadcast", timeout,
            [&] { return ncclBroadcast(data, data, bytes, ncclUint8, root, comm_, stream); });
  }

  void check() override {
    ncclResult_t state = ncclSuccess;
    ncclResult_t const code = ncclCommGetAsyncError(comm_, &state);
    if (code != ncclSuccess) state = code;
    if (state != ncclSuccess && state != ncclInProgress)
      throw CommunicationError(fmt::format("NCCL failed on rank {}: {}", rank_, text(state)));
  }

  // Host memory -----------------------------------------------------------------------------------

  void all_gather(void const* local, void* gathered, std::size_t bytes,
                  milliseconds timeout) override {
    begin(timeout);
    if (host_) return host_->all_gather(local, gathered, bytes, timeout);
    std::size_t const all = bytes * static_cast<std::size_t>(size_);
    std::size_t const own = bytes * static_cast<std::size_t>(rank_);
    staged(local, own, bytes, gathered, all, timeout, [&](unsigned char* device) {
      enqueue_all_gather(stream_, device + own, device, bytes, timeout);
    });
  }

  void all_reduce(float* data, std::int64_t count, Reduction reduction,
                  milliseconds timeout) override {
    begin(timeout);
    if (host_) return host_->all_reduce(data, count, reduction, timeout);
    std::size_t const bytes = static_cast<std::size_t>(count) * sizeof(float);
    staged(data, 0, bytes, data, bytes, timeout, [&](unsigned char* device) {
      enqueue_all_reduce(stream_, reinterpret_cast<float*>(device), count, reduction, timeout);
    });
  }

  void broadcast(void* data, std::size_t bytes, int root, milliseconds timeout) override {
    begin(timeout);
    if (host_) return host_->broadcast(data, bytes, root, timeout);
    staged(data, 0, bytes, data, bytes, timeout, [&](unsigned char* device) {
      enqueue_broadcast(stream_, device, bytes, root, timeout);
    });
  }

  std::unique_ptr<Transport> split(int color, int key) override {
    return joined(*this, host_ ? host_->split(color, key) : nullptr, color, key, timeout_);
  }

  void abort() noexcept override {
    aborted_ = true;
    if (host_) host_->abort();
    if (owned_) end(How::aborted);
  }

  /// \brief Collective over `records`: the ranks of equal `color`, ordered by `key`, with an NCCL
  /// communicator of their own. A fresh unique id rather than ncclCommSplit, which a communicator
  /// of the caller's may block in, and which waits for what is enqueued.
  /// \param[in] host carries their host messages, or null
  static std::unique_ptr<Transport> joined(Transport& records, std::unique_ptr<Transport> host,
                                           int color, int key, milliseconds timeout);

 private:
  std::string text(ncclResult_t code) const {
    return fmt::format("{} ({})", ncclGetErrorString(code), ncclGetLastError(comm_));
  }

  void begin(milliseconds timeout) {
    timeout_ = timeout;
    check();
  }

  /// \brief Waits for the outcome of a call that answered `code`; it replaces ncclInProgress.
  /// \return false when `timeout` passes first
  static bool settled(ncclComm_t comm, ncclResult_t& code, milliseconds timeout) {
    return impl::poll(
        [&] {
          if (code == ncclInProgress) {
            ncclResult_t const asked = ncclCommGetAsyncError(comm, &code);
            if (asked != ncclSuccess) code = asked;
          }
          return code != ncclInProgress;
        },
        timeout);
  }

  /// \brief Waits for the device to reach `event`, unless NCCL fails before.
  /// \return false when `timeout` passes first
  bool reached(Event const& event, milliseconds timeout) {
    return impl::poll(
        [&] {
          check();
          return event.done();
        },
        timeout);
  }

  /// \brief Waits until what a call began has been handed to the device.
  void settle(ncclResult_t code, char const* call, milliseconds timeout) {
    timeout_ = timeout;
    if (!settled(comm_, code, timeout))
      throw CommunicationError(fmt::format(
          "{} over {} ranks did not end within {} ms on rank {}: another rank failed or "
          "never made the call",
          call, size_, timeout.count(), rank_));
    if (code != ncclSuccess)
      throw CommunicationError(fmt::format("{} failed on rank {}: {}", call, rank_, text(code)));
  }

  template <class Call>
  void enqueue(cudaStream_t stream, char const* name, milliseconds timeout, Call&& call) {
    // A driver's queue has room for about a thousand kernels, copies and marks; behind a collective
    // that never ends a launch into a full one would not return either. It is shared with the work
    // between collectives: some sixty entries for each of these keep within it.
    Event& oldest = in_flight_[next_++ % in_flight_.size()];
    if (!oldest.done()) {
      ++impl::host_waits;
      if (!reached(oldest, timeout))
        throw CommunicationError(fmt::format(
            "a collective before {} did not end within {} ms on rank {}: another rank failed or "
            "never made the call",
            name, timeout.count(), rank_));
    }
    settle(call(), name, timeout);
    oldest.record(stream);
  }

  /// Host memory through the device: `collective` gets device memory as large as `out`, with `in`
  /// at `offset`, and leaves the result in it.
  template <class F>
  void staged(void const* in, std::size_t offset, std::size_t in_bytes, void* out,
              std::size_t out_bytes, milliseconds timeout, F&& collective) {
    if (out_bytes == 0) return;
    if (!exec_) {
      check_current_device();
      VPKL_CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
      exec_ = std::make_unique<Kokkos::Cuda>(stream_);
    }
    if (device_.size() < out_bytes) {
      device_ = {};
      device_ = impl::allocate_bytes(*exec_, "vpkl::Communicator::nccl::staging", out_bytes);
      pinned_ = PinnedBlock(out_bytes, PinnedBlock::User::host);
    }
    std::memcpy(pinned_.data() + offset, in, in_bytes);
    VPKL_CHECK_CUDA(cudaMemcpyAsync(device_.data() + offset, pinned_.data() + offset, in_bytes,
                                    cudaMemcpyHostToDevice, stream_));
    collective(device_.data());
    VPKL_CHECK_CUDA(cudaMemcpyAsync(pinned_.data(), device_.data(), out_bytes,
                                    cudaMemcpyDeviceToHost, stream_));
    Event arrived;
    arrived.record(stream_);
    pinned_.used_by(stream_);
    if (!reached(arrived, timeout))
      throw CommunicationError(fmt::format(
          "a host message of {} bytes over {} ranks did not end within {} ms on rank {}: "
          "another rank failed or never made the call",
          in_bytes, size_, timeout.count(), rank_));
    std::memcpy(out, pinned_.data(), out_bytes);
  }

  enum class How { finished, aborted };

  /// \brief Ends the communicator; `finished` lets what is enqueued end first, until the time-out.
  /// In a thread of its own, which goes on when patience has run out.
  /// \return whether it has ended
  bool end(How how) noexcept {
    ncclComm_t const comm = std::exchange(comm_, nullptr);
    if (!comm) return true;
    try {
      auto const done = std::make_shared<std::promise<void>>();
      std::future<void> const ended = done->get_future();
      std::thread([=, device = kokkos_device(), timeout = timeout_] {
        (void)cudaSetDevice(device);
        bool const finished = how == How::finished && finish(comm, timeout);
        (void)(finished ? ncclCommDestroy(comm) : ncclCommAbort(comm));
        done->set_value();
      }).detach();
      return ended.wait_for(patience) == std::future_status::ready;
    } catch (...) {
      // Without a thread there is no safe way to end it.
      return false;
    }
  }

  static bool finish(ncclComm_t comm, milliseconds timeout) {
    ncclResult_t state = ncclCommFinalize(comm);
    return settled(comm, state, timeout) && state == ncclSuccess;
  }

  /// A collective that was given up may still use it.
  void leak_staging() noexcept {
    (void)exec_.release();
    if (device_.size() > 0) impl::leak<Kokkos::Cuda>(device_);
    pinned_.abandon();
  }

  ncclComm_t comm_ = nullptr;
  std::unique_ptr<Transport> host_;
  int rank_ = 0;
  int size_ = 1;
  bool owned_ = false;
  bool aborted_ = false;
  milliseconds timeout_ = std::chrono::minutes(10);  ///< the last one asked for
  std::array<Event, 16> in_flight_;                  ///< behind the latest collectives
  std::size_t next_ = 0;

  // Host messages without a `host_`.
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Kokkos::Cuda> exec_;
  ByteView<Kokkos::Cuda> device_;
  PinnedBlock pinned_;
};

template <class T>
std::vector<T> gathered(Transport& records, T const& own, milliseconds timeout) {
  std::vector<T> all(static_cast<std::size_t>(records.size()));
  records.all_gather(&own, all.data(), sizeof own, timeout);
  return all;
}

std::unique_ptr<Transport> NcclTransport::joined(Transport& records,
                                                 std::unique_ptr<Transport> host, int color,
                                                 int key, milliseconds timeout) {
  struct Seat {
    int color, key;
    GpuId gpu;
    ErrorKind error;
    char message[512];
  } seat{color, key, {}, ErrorKind::none, ""};
  try {
    refuse_two_copies();
    check_current_device();
    seat.gpu = gpu_id();
  } catch (std::exception const& error) {
    seat.error = error_kind(std::current_exception());
    fmt::format_to_n(seat.message, sizeof seat.message - 1, "{}", error.what());
  }
  std::vector<Seat> const seats = gathered(records, seat, timeout);
  std::vector<int> members;
  for (int r = 0; r < records.size(); ++r) {
    if (seats[r].error != ErrorKind::none)
      throw_error(seats[r].error, fmt::format("rank {}: {}", r, seats[r].message));
    for (int other = 0; other < r; ++other)
      if (seats[other].color == seats[r].color && seats[other].gpu == seats[r].gpu)
        throw InvalidArgument(
            fmt::format("NCCL: ranks {} and {} share a GPU, expected one for each rank", other, r));
    if (seats[r].color == color) members.push_back(r);
  }
  std::stable_sort(members.begin(), members.end(),
                   [&](int a, int b) { return seats[a].key < seats[b].key; });

  struct Invitation {
    ncclResult_t status;
    ncclUniqueId id;
  } own{};
  if (members[0] == records.rank()) own.status = ncclGetUniqueId(&own.id);
  std::vector<Invitation> const invitations = gathered(records, own, timeout);
  Invitation const& invitation = invitations[members[0]];
  if (invitation.status != ncclSuccess)
    throw CommunicationError(fmt::format("ncclGetUniqueId failed on rank {}: {}", members[0],
                                         ncclGetErrorString(invitation.status)));
  int const rank =
      static_cast<int>(std::find(members.begin(), members.end(), records.rank()) - members.begin());
  return std::make_unique<NcclTransport>(std::move(host), invitation.id, rank,
                                         static_cast<int>(members.size()), timeout);
}

}  // namespace

Communicator Communicator::nccl(Communicator const& bootstrap) {
  std::unique_ptr<Transport> host;
  bootstrap.guarded([&](Transport& t) { host = t.split(0, t.rank()); });
  Transport& records = *host;
  Communicator comm = from_transport(
      NcclTransport::joined(records, std::move(host), 0, records.rank(), bootstrap.timeout()));
  comm.set_timeout(bootstrap.timeout());
  return comm;
}

Communicator Communicator::nccl(ncclUniqueId const& id, int rank, int size, milliseconds timeout) {
  if (size < 1 || rank < 0 || rank >= size)
    throw InvalidArgument(
        fmt::format("NCCL communicator: rank is {} of {}, expected 0 <= rank < size", rank, size));
  State::check_timeout(timeout);
  refuse_two_copies();
  check_current_device();
  Communicator comm =
      from_transport(std::make_unique<NcclTransport>(nullptr, id, rank, size, timeout));
  comm.set_timeout(timeout);
  return comm;
}

Communicator Communicator::nccl(ncclComm_t borrowed) {
  if (!borrowed) throw InvalidArgument("NCCL communicator: it is null");
  refuse_two_copies();
  check_current_device();
  return from_transport(std::make_unique<NcclTransport>(borrowed));
}

bool Communicator::has_gpu_for_each_rank(Communicator const& comm) {
  std::int64_t own[2] = {};
  static_assert(sizeof own == sizeof(GpuId), "an id is told as two numbers");
  Agreement agreement("GPUs");
  agreement.check([&] {
    GpuId const id = gpu_id();
    std::memcpy(own, id.data(), sizeof own);
  });
  auto all = agreement.tell("GPU", own[0]).tell("GPU", own[1]).exchange(comm);
  std::sort(all.begin(), all.end());
  return std::adjacent_find(all.begin(), all.end()) == all.end();
}

}  // namespace vpkl
