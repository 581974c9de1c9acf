// SPDX-License-Identifier: Apache-2.0
#include <vpkl/capi/communicator.hpp>

#ifdef VPKL_ENABLE_CUDA
#include <vpkl/parallel/cuda/device_transport.hpp>
#endif
#ifdef VPKL_ENABLE_MPI
#include <vpkl_mpi.h>
#endif
#ifdef VPKL_ENABLE_NCCL
#include <vpkl_nccl.h>
#endif

#include <fmt/format.h>

namespace vpkl::capi {

namespace {

void check(vpkl_comm_callbacks const& callbacks) {
  if (callbacks.size < 1 || callbacks.rank < 0 || callbacks.rank >= callbacks.size)
    throw InvalidArgument(fmt::format("communicator: rank is {} of {}, expected 0 <= rank < size",
                                      callbacks.rank, callbacks.size));
  if (!callbacks.all_gather) throw InvalidArgument("communicator: all_gather is null");
}

void check_status(int status, char const* callback, std::size_t bytes) {
  if (status != 0)
    throw CommunicationError(fmt::format(
        "{} of {} bytes: the caller's callback returned {}, expected 0", callback, bytes, status));
}

/// The caller's message layer.
/// \tparam Base Transport, or one that carries device memory, too
template <class Base>
class CallbackTransport : public Base {
 public:
  explicit CallbackTransport(vpkl_comm_callbacks const& callbacks) : callbacks_(callbacks) {}
  char const* name() const override { return "callbacks"; }
  int rank() const override { return callbacks_.rank; }
  int size() const override { return callbacks_.size; }

  void all_gather(void const* local, void* gathered, std::size_t bytes,
                  std::chrono::milliseconds timeout) override {
    check_status(callbacks_.all_gather(callbacks_.context, local, gathered, bytes, timeout.count()),
                 "all_gather", bytes);
  }

  std::unique_ptr<Transport> split(int, int) override {
    throw InvalidArgument(
        "communicator: one of callbacks cannot be split; make one for each group");
  }

 protected:
  vpkl_comm_callbacks callbacks_;
};

#ifdef VPKL_ENABLE_CUDA
class DeviceCallbackTransport final : public CallbackTransport<impl::DeviceTransport> {
 public:
  using CallbackTransport::CallbackTransport;

  void enqueue_all_gather(cudaStream_t stream, void const* local, void* gathered, std::size_t bytes,
                          std::chrono::milliseconds timeout) override {
    check_status(callbacks_.all_gather_device(callbacks_.context, local, gathered, bytes, stream,
                                              timeout.count()),
                 "all_gather_device", bytes);
  }
  // Nothing that the C interface offers sums or sends from one rank.
  void enqueue_all_reduce(cudaStream_t, float*, std::int64_t, Reduction,
                          std::chrono::milliseconds) override {
    throw InvalidArgument("communicator: one of callbacks only gathers");
  }
  void enqueue_broadcast(cudaStream_t, void*, std::size_t, int,
                         std::chrono::milliseconds) override {
    throw InvalidArgument("communicator: one of callbacks only gathers");
  }
  void check() override {}
};
#endif

std::unique_ptr<Transport> callback_transport(vpkl_comm_callbacks const& callbacks) {
  check(callbacks);
#ifdef VPKL_ENABLE_CUDA
  if (callbacks.all_gather_device) return std::make_unique<DeviceCallbackTransport>(callbacks);
#endif
  return std::make_unique<CallbackTransport<Transport>>(callbacks);
}

}  // namespace
}  // namespace vpkl::capi

using namespace vpkl;
using namespace vpkl::capi;

vpkl_status vpkl_comm_self(vpkl_comm** comm) {
  return guarded([&] {
    vpkl_comm*& made = deref(comm, "communicator");
    made = new vpkl_comm(Communicator::self());
  });
}

vpkl_status vpkl_comm_from_callbacks(const vpkl_comm_callbacks* callbacks, vpkl_comm** comm) {
  return guarded([&] {
    vpkl_comm*& made = deref(comm, "communicator");
    made = new vpkl_comm(
        Communicator::from_transport(callback_transport(deref(callbacks, "callbacks"))));
  });
}

#ifdef VPKL_ENABLE_MPI
vpkl_status vpkl_comm_from_mpi(MPI_Comm mpi_comm, vpkl_comm** comm) {
  return guarded([&] {
    vpkl_comm*& made = deref(comm, "communicator");
    made = new vpkl_comm(Communicator::mpi(mpi_comm));
  });
}
#endif

#ifdef VPKL_ENABLE_NCCL
vpkl_status vpkl_comm_from_nccl(ncclComm_t nccl_comm, vpkl_comm** comm) {
  return guarded([&] {
    vpkl_comm*& made = deref(comm, "communicator");
    ensure_kokkos();
    made = new vpkl_comm(Communicator::nccl(nccl_comm));
  });
}

vpkl_status vpkl_comm_from_nccl_id(const ncclUniqueId* id, int rank, int size, int64_t timeout_ms,
                                   vpkl_comm** comm) {
  return guarded([&] {
    vpkl_comm*& made = deref(comm, "communicator");
    ncclUniqueId const& shared = deref(id, "unique id");
    ensure_kokkos();
    made = new vpkl_comm(
        Communicator::nccl(shared, rank, size, std::chrono::milliseconds(timeout_ms)));
  });
}
#endif

vpkl_status vpkl_comm_set_timeout(vpkl_comm* comm, int64_t milliseconds) {
  return guarded([&] {
    deref(comm, "communicator").comm.set_timeout(std::chrono::milliseconds(milliseconds));
  });
}

void vpkl_comm_destroy(vpkl_comm* comm) { delete comm; }

vpkl_status vpkl_vocab_create(const vpkl_comm* comm, const vpkl_shard* shard, vpkl_vocab** vocab) {
  return guarded([&] {
    Communicator const& group = deref(comm, "communicator").comm;
    Agreement agreement("C interface");
    agreement.check([&] {
      deref(shard, "shard");
      deref(vocab, "vocabulary");
    });
    bool on_device = false;
#ifdef VPKL_ENABLE_CUDA
    on_device = group.stays_on_device();
#endif
    agreement.equal("collectives of device memory", on_device);
    agreement.exchange(group);
    VocabShard::Spec spec;
    spec.vocabulary = shard->vocabulary;
    spec.begin = shard->begin;
    spec.end = shard->end;
    spec.student_width = shard->student_width;
    spec.teacher_width = shard->teacher_width;
    *vocab = new vpkl_vocab(VocabShard::make(group, spec));
  });
}

vpkl_status vpkl_vocab_whole(int64_t vocabulary, int64_t student_width, int64_t teacher_width,
                             vpkl_vocab** vocab) {
  return guarded([&] {
    vpkl_vocab*& made = deref(vocab, "vocabulary");
    made = new vpkl_vocab(VocabShard::whole(vocabulary, student_width, teacher_width));
  });
}

void vpkl_vocab_destroy(vpkl_vocab* vocab) { delete vocab; }
