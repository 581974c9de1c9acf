/* SPDX-License-Identifier: Apache-2.0 */
/* The C interface from C, on any number of ranks; known values from faults of the field. */
#include <vpkl.h>

#ifdef TEST_WITH_MPI
#include <vpkl_mpi.h>
#endif
#ifdef TEST_WITH_NCCL
#include <vpkl_nccl.h>
#endif
#ifdef TEST_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures = 0;
static int rank = 0, size = 1;

static void expect(int holds, const char* what, int line) {
  if (holds) return;
  ++failures;
  fprintf(stderr, "rank %d, line %d: %s; last error: %s\n", rank, line, what, vpkl_last_error());
}
#define EXPECT(condition) expect((condition) != 0, #condition, __LINE__)
#define OK(call) expect((call) == VPKL_SUCCESS, #call, __LINE__)

/* The call has the status, and its text holds `text`. */
static void expect_refused(vpkl_status got, vpkl_status wanted, const char* text, int line) {
  if (got == wanted && strstr(vpkl_last_error(), text)) return;
  ++failures;
  fprintf(stderr, "rank %d, line %d: status %d and '%s', expected %d and '%s'\n", rank, line,
          (int)got, vpkl_last_error(), (int)wanted, text);
}
#define REFUSED(call, status, text) expect_refused((call), (status), (text), __LINE__)

static int near(double value, double expected, double tolerance) {
  return fabs(value - expected) <= tolerance;
}

static vpkl_rows flat(float* data, int64_t rows, int64_t width) {
  vpkl_rows r;
  memset(&r, 0, sizeof r);
  r.data = data;
  r.type = VPKL_FP32;
  r.width = width;
  r.rows = rows;
  r.row_stride = width;
  return r;
}

static const vpkl_divergence_options forward = {VPKL_FORWARD_KL, 0.5, 1.0};

/* Ids [begin, end) of this rank. */
static int64_t bound(int64_t vocabulary, int r) { return vocabulary * r / size; }

static vpkl_vocab* vocabulary_of(vpkl_comm* comm, int64_t vocabulary) {
  int64_t const begin = bound(vocabulary, rank), end = bound(vocabulary, rank + 1);
  vpkl_shard const shard = {vocabulary, begin, end, end - begin, end - begin};
  vpkl_vocab* vocab = NULL;
  OK(vpkl_vocab_create(comm, &shard, &vocab));
  return vocab;
}

/* F1: value and gradient of one row, over the shards. */
static void operator_on_shards(vpkl_comm* comm) {
  float student[4] = {0, 0, 0, 0}, teacher[4] = {2, 1, 0, -1};
  double const expected_value[2] = {0.438757397144, 0.553895337441};
  int64_t const begin = bound(4, rank), width = bound(4, rank + 1) - begin;
  vpkl_vocab* vocab = vocabulary_of(comm, 4);
  int d;
  for (d = 0; d < 2; ++d) {
    vpkl_divergence_options const options = {d == 0 ? VPKL_FORWARD_KL : VPKL_REVERSE_KL, 0.5, 1.0};
    vpkl_plan* plan = NULL;
    float value[1] = {-1}, gradient[4] = {9, 9, 9, 9};
    vpkl_rows const s = flat(student + begin, 1, width), t = flat(teacher + begin, 1, width),
                    g = flat(gradient, 1, width);
    OK(vpkl_plan_create(VPKL_HOST, NULL, comm, vocab, &options, VPKL_VOCAB_PARALLEL, VPKL_FP32,
                        VPKL_FP32, 1, &plan));
    OK(vpkl_plan_execute(plan, NULL, &s, &t, NULL, value, &g));
    EXPECT(near(value[0], expected_value[d], 1e-6));
    if (d == 0) {
      double sum = 0;
      int64_t i;
      for (i = 0; i < 4; ++i)
        sum += exp(teacher[i]);
      for (i = 0; i < width; ++i)
        EXPECT(near(gradient[i], 0.25 - exp(teacher[begin + i]) / sum, 1e-6));
    }
    /* Values alone. */
    value[0] = -1;
    OK(vpkl_plan_execute(plan, NULL, &s, &t, NULL, value, NULL));
    EXPECT(near(value[0], expected_value[d], 1e-6));
    /* A null pointer on the last rank is everybody's error, and the plan works on. */
    REFUSED(vpkl_plan_execute(plan, NULL, rank == size - 1 ? NULL : &s, &t, NULL, value, &g),
            VPKL_INVALID_ARGUMENT, "student logits");
    /* So is a stream, which the host has not. */
    REFUSED(vpkl_plan_execute(plan, rank == size - 1 ? &plan : NULL, &s, &t, NULL, value, &g),
            VPKL_INVALID_ARGUMENT, "stream");
    OK(vpkl_plan_execute(plan, NULL, &s, &t, NULL, value, &g));
    vpkl_plan_destroy(plan);
  }
  vpkl_vocab_destroy(vocab);
}

/* Response starts at 1, T = 3, V = 2: the last row never counts. */
static void streamed_loss(vpkl_comm* comm) {
  float student[6] = {0, 0, 0, 0, 0, 0}, teacher[6] = {1, 0, 0, 1, 9, -9};
  float local_student[6], local_teacher[6], gradient[6];
  uint8_t const mask[3] = {0, 1, 1};
  vpkl_normalization const mean = {VPKL_TOKEN_MEAN, 0, 1, 1};
  int64_t const begin = bound(2, rank), width = bound(2, rank + 1) - begin;
  vpkl_vocab* vocab = vocabulary_of(comm, 2);
  int kind, t, i;
  for (t = 0; t < 3; ++t)
    for (i = 0; i < width; ++i) {
      local_student[t * width + i] = student[t * 2 + begin + i];
      local_teacher[t * width + i] = teacher[t * 2 + begin + i];
    }
  for (kind = 0; kind < 4; ++kind) {
    vpkl_cache_options const statistics = {0, -1, 0, NULL, 1, width};
    vpkl_cache* cache = NULL;
    vpkl_loss* loss = NULL;
    vpkl_loss_result result = {0, 0, 0, 0};
    float row_values[3] = {-1, -1, -1};
    vpkl_rows const s = flat(local_student, 3, width), te = flat(local_teacher, 3, width),
                    g = flat(gradient, 3, width);
    for (i = 0; i < 6; ++i)
      gradient[i] = 9;
    OK(vpkl_cache_create(VPKL_HOST, comm, kind < 2 ? NULL : &statistics, &cache));
    OK(vpkl_loss_create(VPKL_HOST, comm, vocab, &forward, VPKL_VOCAB_PARALLEL,
                        kind % 2 == 0 ? VPKL_PLAN_ROWS : VPKL_PLAN_CHUNKS, 2, &loss));
    OK(vpkl_cache_store(cache, NULL, &te, 1, 3, NULL, 0));
    OK(vpkl_loss_compute(loss, NULL, &s, cache, mask, 1, 3, 0, &mean, &g, row_values, &result));
    EXPECT(near(result.loss, 0.110944071672, 1e-7));
    EXPECT(result.tokens == 2);
    EXPECT(near(row_values[0], 0.110944071672, 1e-7) && near(row_values[1], 0.110944071672, 1e-7));
    EXPECT(row_values[2] == 0);
    for (i = 0; i < width; ++i)
      EXPECT(gradient[2 * width + i] == 0);

    /* The rows come back as they went. */
    if (width > 0) {
      float back[6] = {9, 9, 9, 9, 9, 9};
      int64_t const listed[2] = {2, 0};
      vpkl_rows const out = flat(back, 2, width);
      EXPECT(vpkl_cache_bytes(cache) >= (size_t)(3 * width) * sizeof(float));
      OK(vpkl_cache_fetch_rows(cache, NULL, listed, 2, &out));
      EXPECT(back[0] == local_teacher[2 * width] && back[width] == local_teacher[0]);
      OK(vpkl_cache_fetch_chunk(cache, NULL, 1, 3, &out));
      EXPECT(back[0] == local_teacher[width] && back[width] == local_teacher[2 * width]);
      REFUSED(vpkl_cache_fetch_chunk(cache, NULL, 2, 4, &out), VPKL_INVALID_ARGUMENT, "chunk");
    }
    REFUSED(vpkl_cache_store(cache, rank == size - 1 ? &cache : NULL, &te, 1, 3, NULL, 0),
            VPKL_INVALID_ARGUMENT, "stream");
    OK(vpkl_cache_store(cache, NULL, &te, 1, 3, NULL, 0));
    REFUSED(vpkl_loss_compute(loss, rank == size - 1 ? &cache : NULL, &s, cache, mask, 1, 3, 0,
                              &mean, &g, NULL, NULL),
            VPKL_INVALID_ARGUMENT, "stream");
    EXPECT(vpkl_cache_bytes(cache) == 0);
    OK(vpkl_cache_store(cache, NULL, &te, 1, 3, NULL, 0));
    /* A failure frees the cache, on every rank. */
    REFUSED(vpkl_loss_compute(loss, NULL, &s, cache, mask, 1, 3, 0, rank == 0 ? NULL : &mean, &g,
                              NULL, NULL),
            VPKL_INVALID_ARGUMENT, "normalization");
    EXPECT(vpkl_cache_bytes(cache) == 0);
    REFUSED(vpkl_loss_compute(loss, NULL, &s, cache, mask, 1, 3, 0, &mean, &g, NULL, NULL),
            VPKL_INVALID_ARGUMENT, "cache");
    REFUSED(vpkl_loss_compute(loss, NULL, &s, NULL, mask, 1, 3, 0, &mean, &g, NULL, NULL),
            VPKL_INVALID_ARGUMENT, "teacher cache");
    vpkl_loss_destroy(loss);
    vpkl_cache_destroy(cache);
  }
  vpkl_vocab_destroy(vocab);
}

/* Equal maxima at ids 3 and 6: the smaller. */
static void greedy(vpkl_comm* comm) {
  float logits[8] = {0, 1, 2, 5, 4, 3, 5, -1};
  int64_t const begin = bound(8, rank), width = bound(8, rank + 1) - begin;
  int64_t token = -1;
  vpkl_vocab* vocab = vocabulary_of(comm, 8);
  vpkl_rows const rows = flat(logits + begin, 1, width);
  OK(vpkl_greedy_tokens(VPKL_HOST, NULL, comm, vocab, &rows, &token));
  EXPECT(token == 3);
  logits[0] = (float)NAN;
  REFUSED(vpkl_greedy_tokens(VPKL_HOST, NULL, comm, vocab, &rows, &token), VPKL_NUMERICAL_ERROR,
          "row 0");
  REFUSED(vpkl_greedy_tokens(VPKL_HOST, NULL, comm, vocab, &rows, rank == 0 ? NULL : &token),
          VPKL_INVALID_ARGUMENT, "tokens");
  REFUSED(vpkl_greedy_tokens(VPKL_HOST, rank == 0 ? &token : NULL, comm, vocab, &rows, &token),
          VPKL_INVALID_ARGUMENT, "stream");
  vpkl_vocab_destroy(vocab);
}

static void refusals(vpkl_comm* comm) {
  vpkl_vocab *vocab = vocabulary_of(comm, 4), *other = NULL;
  vpkl_plan* plan = NULL;
  vpkl_comm* bad = NULL;
  vpkl_cache* cache = NULL;
  vpkl_shard const whole = {4, 0, 4, 4, 4};
  vpkl_divergence_options cold = {VPKL_FORWARD_KL, 0.5, 0};
  vpkl_cache_options engine = {0, -1, 0, "warp", 0, 0};
  vpkl_comm_callbacks callbacks = {NULL, 2, 2, NULL, NULL};
  if (!(vpkl_features() & VPKL_FEATURE_CUDA))
    REFUSED(vpkl_plan_create(VPKL_CUDA, NULL, comm, vocab, &forward, VPKL_VOCAB_PARALLEL, VPKL_FP32,
                             VPKL_FP32, 1, &plan),
            VPKL_INVALID_ARGUMENT, "without CUDA");
  REFUSED(vpkl_plan_create((vpkl_space)7, NULL, comm, vocab, &forward, VPKL_VOCAB_PARALLEL,
                           VPKL_FP32, VPKL_FP32, 1, &plan),
          VPKL_INVALID_ARGUMENT, "space is 7");
  REFUSED(vpkl_plan_create(VPKL_HOST, rank == size - 1 ? &plan : NULL, comm, vocab, &forward,
                           VPKL_VOCAB_PARALLEL, VPKL_FP32, VPKL_FP32, 1, &plan),
          VPKL_INVALID_ARGUMENT, "stream");
  REFUSED(vpkl_plan_create(VPKL_HOST, NULL, comm, vocab, &cold, VPKL_VOCAB_PARALLEL, VPKL_FP32,
                           VPKL_FP32, 1, &plan),
          VPKL_INVALID_ARGUMENT, "temperature");
  REFUSED(
      vpkl_plan_create(VPKL_HOST, NULL, comm, vocab, &forward, VPKL_VOCAB_PARALLEL,
                       rank == size - 1 ? (vpkl_element_type)5 : VPKL_FP32, VPKL_FP32, 1, &plan),
      VPKL_INVALID_ARGUMENT, "type is 5");
  REFUSED(vpkl_plan_create(VPKL_HOST, NULL, comm, NULL, &forward, VPKL_VOCAB_PARALLEL, VPKL_FP32,
                           VPKL_FP32, 1, &plan),
          VPKL_INVALID_ARGUMENT, "vocabulary");
  EXPECT(plan == NULL);
  REFUSED(vpkl_plan_execute(NULL, NULL, NULL, NULL, NULL, NULL, NULL), VPKL_INVALID_ARGUMENT,
          "plan");
  if (size > 1) REFUSED(vpkl_vocab_create(comm, &whole, &other), VPKL_AGREEMENT_ERROR, "tile");
  REFUSED(vpkl_cache_create(VPKL_HOST, comm, &engine, &cache), VPKL_INVALID_ARGUMENT, "warp");
  REFUSED(vpkl_comm_from_callbacks(&callbacks, &bad), VPKL_INVALID_ARGUMENT, "rank is 2 of 2");
  callbacks.rank = 1;
  REFUSED(vpkl_comm_from_callbacks(&callbacks, &bad), VPKL_INVALID_ARGUMENT, "all_gather");
  REFUSED(vpkl_comm_set_timeout(comm, 0), VPKL_INVALID_ARGUMENT, "time-out");
  REFUSED(vpkl_comm_self(NULL), VPKL_INVALID_ARGUMENT, "communicator");
  vpkl_vocab_destroy(vocab);
}

static int failing_gather(void* context, const void* local, void* gathered, size_t bytes,
                          int64_t timeout_ms) {
  (void)local;
  (void)gathered;
  (void)bytes;
  *(int64_t*)context = timeout_ms;
  return 42;
}

static void failing_callback(void) {
  int64_t told = 0;
  vpkl_comm_callbacks const callbacks = {&told, 0, 2, failing_gather, NULL};
  vpkl_shard const half = {4, 0, 2, 2, 2};
  vpkl_comm* comm = NULL;
  vpkl_vocab* vocab = NULL;
  OK(vpkl_comm_from_callbacks(&callbacks, &comm));
  OK(vpkl_comm_set_timeout(comm, 1234));
  REFUSED(vpkl_vocab_create(comm, &half, &vocab), VPKL_COMMUNICATION_ERROR, "returned 42");
  EXPECT(told == 1234);
  REFUSED(vpkl_vocab_create(comm, &half, &vocab), VPKL_COMMUNICATION_ERROR, "dead");
  vpkl_comm_destroy(comm);
}

#ifdef TEST_WITH_MPI
static int mpi_gather(void* context, const void* local, void* gathered, size_t bytes,
                      int64_t timeout_ms) {
  char* const own = malloc(bytes ? bytes : 1);
  int status;
  (void)timeout_ms;
  memcpy(own, local, bytes);
  status =
      MPI_Allgather(own, (int)bytes, MPI_BYTE, gathered, (int)bytes, MPI_BYTE, *(MPI_Comm*)context);
  free(own);
  return status == MPI_SUCCESS ? 0 : 1;
}
#endif

#if defined(TEST_WITH_MPI) && defined(TEST_WITH_CUDA)
static int device_gathers = 0;
static int status_of_device_gather = 0;

/* What a message layer that only knows the host would do. */
static int mpi_gather_device(void* context, const void* local, void* gathered, size_t bytes,
                             void* cuda_stream, int64_t timeout_ms) {
  cudaStream_t const stream = (cudaStream_t)cuda_stream;
  char* const own = malloc(bytes + 1);
  char* const all_bytes = malloc(bytes * (size_t)size + 1);
  int status = 1;
  ++device_gathers;
  if (cudaMemcpyAsync(own, local, bytes, cudaMemcpyDeviceToHost, stream) == cudaSuccess &&
      cudaStreamSynchronize(stream) == cudaSuccess)
    status = mpi_gather(context, own, all_bytes, bytes, timeout_ms);
  if (cudaMemcpyAsync(gathered, all_bytes, bytes * (size_t)size, cudaMemcpyHostToDevice, stream) !=
          cudaSuccess ||
      cudaStreamSynchronize(stream) != cudaSuccess)
    status = 1;
  free(own);
  free(all_bytes);
  return status_of_device_gather ? status_of_device_gather : status;
}

static void* on_device(const void* from, size_t bytes) {
  void* to = NULL;
  EXPECT(cudaMalloc(&to, bytes + 1) == cudaSuccess);
  EXPECT(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
  return to;
}

/* F1 again, on the device: records stay there. */
static void device_callbacks(vpkl_comm_callbacks callbacks) {
  float student[4] = {0, 0, 0, 0}, teacher[4] = {2, 1, 0, -1}, value = -1, gradient[4];
  int64_t const begin = bound(4, rank), width = bound(4, rank + 1) - begin;
  size_t const bytes = (size_t)width * sizeof student[0];
  vpkl_comm* comm = NULL;
  vpkl_vocab* vocab = NULL;
  vpkl_plan* plan = NULL;
  cudaStream_t stream = NULL;
  vpkl_rows s, t;
  float* device_value;
  int devices = 0, i;
  double sum = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    if (rank == 0) printf("device callbacks not tested: no GPU\n");
    return;
  }
  if (size > 1) { /* on one rank alone */
    vpkl_shard const shard = {4, begin, begin + width, width, width};
    if (rank == 0) callbacks.all_gather_device = mpi_gather_device;
    OK(vpkl_comm_from_callbacks(&callbacks, &comm));
    REFUSED(vpkl_vocab_create(comm, &shard, &vocab), VPKL_AGREEMENT_ERROR, "device memory");
    vpkl_comm_destroy(comm);
  }
  callbacks.all_gather_device = mpi_gather_device;
  EXPECT(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  s = flat(on_device(student + begin, bytes), 1, width);
  t = flat(on_device(teacher + begin, bytes), 1, width);
  device_value = on_device(&value, sizeof value);
  OK(vpkl_comm_from_callbacks(&callbacks, &comm));
  vocab = vocabulary_of(comm, 4);
  OK(vpkl_plan_create(VPKL_CUDA, stream, comm, vocab, &forward, VPKL_VOCAB_PARALLEL, VPKL_FP32,
                      VPKL_FP32, 1, &plan));
  OK(vpkl_plan_execute(plan, stream, &s, &t, NULL, device_value, &s)); /* in place */
  EXPECT(cudaStreamSynchronize(stream) == cudaSuccess);
  EXPECT(cudaMemcpy(&value, device_value, sizeof value, cudaMemcpyDeviceToHost) == cudaSuccess);
  EXPECT(cudaMemcpy(gradient, s.data, bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
  EXPECT(near(value, 0.438757397144, 1e-6));
  for (i = 0; i < 4; ++i)
    sum += exp(teacher[i]);
  for (i = 0; i < width; ++i)
    EXPECT(near(gradient[i], 0.25 - exp(teacher[begin + i]) / sum, 1e-6));
  EXPECT(device_gathers == (size > 1 ? 1 : 0));
  if (size > 1) {
    status_of_device_gather = 43;
    REFUSED(vpkl_plan_execute(plan, stream, &s, &t, NULL, device_value, &s),
            VPKL_COMMUNICATION_ERROR, "all_gather_device");
    status_of_device_gather = 0;
  }
  vpkl_plan_destroy(plan);
  vpkl_vocab_destroy(vocab);
  vpkl_comm_destroy(comm);
  OK(vpkl_release_stream(stream));
  EXPECT(cudaStreamDestroy(stream) == cudaSuccess);
  cudaFree(s.data);
  cudaFree(t.data);
  cudaFree(device_value);
}
#endif

static void all(vpkl_comm* comm) {
  operator_on_shards(comm);
  streamed_loss(comm);
  greedy(comm);
  refusals(comm);
}

#ifdef TEST_WITH_NCCL
static ncclUniqueId unique_id(void) {
  ncclUniqueId id;
  if (rank == 0) EXPECT(ncclGetUniqueId(&id) == ncclSuccess);
#ifdef TEST_WITH_MPI
  MPI_Bcast(&id, (int)sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
#endif
  return id;
}

static void over_nccl(void) {
  ncclComm_t own = NULL;
  vpkl_comm* comm = NULL;
  ncclUniqueId id;
  int devices = 0;
  EXPECT(vpkl_features() & VPKL_FEATURE_NCCL);
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < size) {
    if (rank == 0) printf("NCCL not tested: %d ranks, %d GPUs\n", size, devices);
    return;
  }
  id = unique_id();
  REFUSED(vpkl_comm_from_nccl(NULL, &comm), VPKL_INVALID_ARGUMENT, "null");
  REFUSED(vpkl_comm_from_nccl_id(NULL, rank, size, 1000, &comm), VPKL_INVALID_ARGUMENT,
          "unique id");
  REFUSED(vpkl_comm_from_nccl_id(&id, size, size, 1000, &comm), VPKL_INVALID_ARGUMENT,
          "expected 0 <= rank < size");
  OK(vpkl_comm_from_nccl_id(&id, rank, size, 30000, &comm));
  all(comm);
  vpkl_comm_destroy(comm);
  id = unique_id();
  EXPECT(ncclCommInitRank(&own, size, id, rank) == ncclSuccess);
  OK(vpkl_comm_from_nccl(own, &comm));
  all(comm);
  vpkl_comm_destroy(comm);
  EXPECT(ncclCommDestroy(own) == ncclSuccess);
}
#endif

int main(int argc, char** argv) {
  vpkl_comm* comm = NULL;
#ifdef TEST_WITH_MPI
  MPI_Comm world = MPI_COMM_WORLD;
  vpkl_comm_callbacks callbacks = {NULL, 0, 1, mpi_gather, NULL};
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(world, &rank);
  MPI_Comm_size(world, &size);
  callbacks.context = &world;
  callbacks.rank = rank;
  callbacks.size = size;
#ifdef TEST_WITH_NCCL
  {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) == cudaSuccess && devices >= size) cudaSetDevice(rank);
  }
#endif
  EXPECT(vpkl_features() & VPKL_FEATURE_MPI);
  REFUSED(vpkl_comm_from_mpi(MPI_COMM_NULL, &comm), VPKL_INVALID_ARGUMENT, "MPI_COMM_NULL");
  REFUSED(vpkl_comm_from_mpi(world, NULL), VPKL_INVALID_ARGUMENT, "communicator");
  OK(vpkl_comm_from_mpi(world, &comm));
  all(comm);
  vpkl_comm_destroy(comm);
  OK(vpkl_comm_from_callbacks(&callbacks, &comm));
#else
  (void)argc;
  (void)argv;
  OK(vpkl_comm_self(&comm));
#endif
  all(comm);
#ifdef TEST_WITH_NCCL
  over_nccl();
#endif
#if defined(TEST_WITH_MPI) && defined(TEST_WITH_CUDA)
  device_callbacks(callbacks);
#endif
  failing_callback();
  EXPECT(strcmp(vpkl_version(), "") != 0);
  REFUSED(vpkl_finalize(), VPKL_INVALID_ARGUMENT, "1 handles are alive");
  vpkl_comm_destroy(comm);
  vpkl_comm_destroy(NULL);
  OK(vpkl_release_stream(NULL));
  OK(vpkl_finalize());
  REFUSED(vpkl_initialize(), VPKL_INVALID_ARGUMENT, "after vpkl_finalize");
#ifdef TEST_WITH_MPI
  MPI_Finalize();
#endif
  if (failures == 0 && rank == 0) printf("the C interface holds on %d ranks\n", size);
  return failures == 0 ? 0 : 1;
}
