/* SPDX-License-Identifier: Apache-2.0 */
/**
 * \file
 * \brief C interface of vpkl: divergences over a sharded vocabulary, teacher cache, streamed loss
 * and greedy selection, over raw pointers, strides, streams and communicators.
 *
 * Every function returns a status; vpkl_last_error() then has the text, for the calling thread.
 * Nothing is thrown across this interface and nothing exits. A handle is used by one thread at a
 * time. Functions marked collective are called by every rank of the communicator in the same order;
 * an error of one rank that they detect is returned on every rank.
 *
 * Kokkos is initialised by the first call that needs it, on the current CUDA device, if nobody did
 * before.
 */
#ifndef VPKL_H
#define VPKL_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) && defined(VPKL_C_BUILD)
#define VPKL_C_API __attribute__((visibility("default")))
#else
#define VPKL_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** What every function returns; vpkl_last_error() has the text. */
typedef enum vpkl_status {
  VPKL_SUCCESS = 0,             /**< done, or enqueued */
  VPKL_INVALID_ARGUMENT = 1,    /**< an argument is outside its documented domain */
  VPKL_AGREEMENT_ERROR = 2,     /**< ranks were given arguments that must be equal but differ */
  VPKL_FILE_ERROR = 3,          /**< a file is missing, damaged or could not be written */
  VPKL_OUT_OF_MEMORY = 4,       /**< the text carries requested and available bytes */
  VPKL_COMMUNICATION_ERROR = 5, /**< a collective failed; its communicator is dead */
  VPKL_NUMERICAL_ERROR = 6,     /**< the scores of a row have no defined answer */
  VPKL_OTHER_ERROR = 7          /**< anything else, such as a failed CUDA call */
} vpkl_status;

/** \brief Text of the last status other than success on this thread; never null. */
VPKL_C_API const char* vpkl_last_error(void);

/** \brief "major.minor.patch" of the library that runs, to be compared with the header's user. */
VPKL_C_API const char* vpkl_version(void);

/** What a build can do; bits of vpkl_features(). */
typedef enum vpkl_feature {
  VPKL_FEATURE_CUDA = 1,
  VPKL_FEATURE_MPI = 2,
  VPKL_FEATURE_HDF5 = 4,
  VPKL_FEATURE_NCCL = 8
} vpkl_feature;
/** \brief Bits of vpkl_feature that the library which runs was built with. */
VPKL_C_API unsigned vpkl_features(void);

/**
 * \brief Initialises Kokkos if nobody did; optional, for control over when. The current CUDA device
 * becomes Kokkos' device.
 */
VPKL_C_API vpkl_status vpkl_initialize(void);

/**
 * \brief Ends what vpkl began: finalises Kokkos only if vpkl initialised it, and then nothing of
 * vpkl can be made any more.
 * \return VPKL_INVALID_ARGUMENT, and nothing done, while handles are alive
 */
VPKL_C_API vpkl_status vpkl_finalize(void);

/* Choices are integers, so that a wrong one is an error like any other argument. */

/** Where tensors live and work runs. */
typedef int32_t vpkl_space;
enum {
  VPKL_HOST = 0, /**< host memory; calls return when their work is done */
  VPKL_CUDA = 1  /**< memory of Kokkos' device; work is enqueued on the call's stream */
};

/** \brief Forgets what is kept for a stream; to be called before the stream is destroyed. */
VPKL_C_API vpkl_status vpkl_release_stream(void* cuda_stream);

/** Storage type of a tensor. */
typedef int32_t vpkl_element_type;
enum { VPKL_FP32 = 0, VPKL_BF16 = 1, VPKL_FP16 = 2 };
/** Divergence between teacher and student. */
typedef int32_t vpkl_divergence;
enum {
  VPKL_FORWARD_KL = 0, /**< D(teacher || student) */
  VPKL_REVERSE_KL = 1, /**< D(student || teacher) */
  VPKL_JSD = 2
};
/** How the vocabulary is brought together. */
typedef int32_t vpkl_route;
enum {
  VPKL_DENSE = 0,    /**< the whole vocabulary on every rank, no communication */
  VPKL_GATHERED = 1, /**< student shards gathered whole; teacher rows are already whole */
  VPKL_VOCAB_PARALLEL = 2
};

/**
 * Rows of a tensor `[rows, width]` or `[batch, rows_per_batch, width]`; the columns of a row are
 * contiguous. Strides count elements.
 */
typedef struct vpkl_rows {
  void* data;             /**< first element; null where an output is not wanted */
  vpkl_element_type type; /**< of every element */
  int64_t width;          /**< physical columns of a row */
  int64_t rows;           /**< all of them */
  int64_t rows_per_batch; /**< 0: rows are `row_stride` apart from first to last */
  int64_t batch_stride;   /**< from a batch's first row to the next one's */
  int64_t row_stride;     /**< from a row to the next one */
  const int64_t* offsets; /**< or null; element offset of each row, in the tensor's memory */
} vpkl_rows;

/* Communicators ------------------------------------------------------------------------------- */

/** A group of ranks. Handles made from it keep it alive. */
typedef struct vpkl_comm vpkl_comm;

/** \brief A group of one. */
VPKL_C_API vpkl_status vpkl_comm_self(vpkl_comm** comm);

/**
 * The caller's message layer; lets any process group serve. Called by the thread that called vpkl,
 * by every rank in the same order. A callback returns 0, or another number when the collective
 * failed or `timeout_ms` passed. Maxima and agreements are made of gathered records.
 */
typedef struct vpkl_comm_callbacks {
  void* context; /**< handed to the callbacks */
  int rank;      /**< of this process, in [0, size) */
  int size;      /**< number of ranks */
  /** Concatenates `bytes` of every rank in rank order, in host memory; `local` may be the own slot
   * of `gathered`. Blocks until done. */
  int (*all_gather)(void* context, const void* local, void* gathered, size_t bytes,
                    int64_t timeout_ms);
  /** The same in device memory: after the work on `cuda_stream`, before what follows there; need
   * not be waited for. Set on every rank or on none (vpkl_vocab_create compares); null: vpkl copies
   * to the host and calls all_gather. */
  int (*all_gather_device)(void* context, const void* local, void* gathered, size_t bytes,
                           void* cuda_stream, int64_t timeout_ms);
} vpkl_comm_callbacks;
/**
 * \brief A group over the caller's message layer. `callbacks` is copied; its context must outlive
 * everything made from `comm`.
 */
VPKL_C_API vpkl_status vpkl_comm_from_callbacks(const vpkl_comm_callbacks* callbacks,
                                                vpkl_comm** comm);

/** \brief Longest time a collective may take; default ten minutes. */
VPKL_C_API vpkl_status vpkl_comm_set_timeout(vpkl_comm* comm, int64_t milliseconds);

/** \brief Null is fine, here and in every other destroy function. */
VPKL_C_API void vpkl_comm_destroy(vpkl_comm* comm);

/* Vocabulary ---------------------------------------------------------------------------------- */

/** A rank's part of the vocabulary: ids [begin, end). Ranges tile [0, vocabulary) in rank order. */
typedef struct vpkl_shard {
  int64_t vocabulary;    /**< ids that count, over all ranks */
  int64_t begin;         /**< first id of this rank */
  int64_t end;           /**< one past its last */
  int64_t student_width; /**< physical columns of the student's rows, at least end - begin */
  int64_t teacher_width; /**< of the teacher's */
} vpkl_shard;

/** A vocabulary that the ranks of a group have agreed on. */
typedef struct vpkl_vocab vpkl_vocab;

/** \brief Collective. */
VPKL_C_API vpkl_status vpkl_vocab_create(const vpkl_comm* comm, const vpkl_shard* shard,
                                         vpkl_vocab** vocab);
/** \brief The whole vocabulary on this rank; no communication. */
VPKL_C_API vpkl_status vpkl_vocab_whole(int64_t vocabulary, int64_t student_width,
                                        int64_t teacher_width, vpkl_vocab** vocab);
/** \brief Null is fine. */
VPKL_C_API void vpkl_vocab_destroy(vpkl_vocab* vocab);

/* Operator ------------------------------------------------------------------------------------ */

/** The divergence and its parameters; equal on every rank. */
typedef struct vpkl_divergence_options {
  vpkl_divergence divergence; /**< which one */
  double beta;                /**< the teacher's weight in JSD, inside (0, 1) */
  double temperature;         /**< both sides are divided by it, values multiplied by its square */
} vpkl_divergence_options;

/** A prepared operator with its workspace. */
typedef struct vpkl_plan vpkl_plan;

/**
 * \brief Collective. With VPKL_DENSE no communication; `vocab` is then a whole one.
 * \param[in] space where tensors live and work runs
 * \param[in] cuda_stream stream of VPKL_CUDA that initialises the plan; null for VPKL_HOST
 * \param[in] comm the tensor-parallel group
 * \param[in] vocab ids of this rank's columns
 * \param[in] options equal on every rank
 * \param[in] route how the vocabulary is brought together
 * \param[in] student type of the student's logits and their gradient
 * \param[in] teacher type of the teacher's logits
 * \param[in] max_rows rows of the largest call
 * \param[out] plan to be destroyed with vpkl_plan_destroy
 */
VPKL_C_API vpkl_status vpkl_plan_create(vpkl_space space, void* cuda_stream, const vpkl_comm* comm,
                                        const vpkl_vocab* vocab,
                                        const vpkl_divergence_options* options, vpkl_route route,
                                        vpkl_element_type student, vpkl_element_type teacher,
                                        int64_t max_rows, vpkl_plan** plan);

/**
 * \brief Collective, one all-gather (JSD two). Values, and gradients of sum(row_weight * value).
 * \param[in] plan made for these types and at least as many rows
 * \param[in] cuda_stream stream that the work is enqueued on; null for VPKL_HOST
 * \param[in] student `[rows, student_width]`
 * \param[in] teacher `[rows, teacher_width]`; gathered: `[rows, vocabulary]`
 * \param[in] row_weight `[rows]`, or null for 1; rows of weight 0 are never read
 * \param[out] value `[rows]`, divergence times the square of the temperature
 * \param[out] gradient `[rows, student_width]` in the student's type, may be the student's rows;
 * null: values only
 */
VPKL_C_API vpkl_status vpkl_plan_execute(vpkl_plan* plan, void* cuda_stream,
                                         const vpkl_rows* student, const vpkl_rows* teacher,
                                         const float* row_weight, float* value,
                                         const vpkl_rows* gradient);
/** \brief Null is fine. */
VPKL_C_API void vpkl_plan_destroy(vpkl_plan* plan);

/* Teacher cache ------------------------------------------------------------------------------- */

/** What a cache keeps, and how much of it. */
typedef struct vpkl_cache_options {
  int response_rows_only; /**< 0: keep every row; 1: keep the rows listed at store */
  int store_type;         /**< a vpkl_element_type, or -1: the logits' own */
  size_t memory_budget;   /**< bytes; 0: what the machine and its limits leave */
  const char*
      transfer_engine; /**< null or "automatic", "pinned_2d", "pinned_rows", "mapped", ... */
  /** Not 0: keep the statistics that forward KL of several ranks wants at this temperature, to read
   * the teacher once instead of twice. */
  double statistics_temperature;
  int64_t
      statistics_columns; /**< of this rank that count, from the first; -1: every one, 0: none */
} vpkl_cache_options;

/** Teacher rows of one micro-batch in (pinned) host memory. */
typedef struct vpkl_cache vpkl_cache;

/**
 * \brief Collective.
 * \param[in] space where the logits live
 * \param[in] comm the tensor-parallel group, whose ranks store together
 * \param[in] options null: every row in its own type
 * \param[out] cache empty; to be destroyed with vpkl_cache_destroy
 */
VPKL_C_API vpkl_status vpkl_cache_create(vpkl_space space, const vpkl_comm* comm,
                                         const vpkl_cache_options* options, vpkl_cache** cache);

/**
 * \brief Collective. Replaces what was held. The logits may be overwritten by later work on the
 * stream.
 * \param[in] cache empty or not
 * \param[in] cuda_stream stream that made the logits; null for VPKL_HOST
 * \param[in] logits `[batch * length, width]`, row b * length + t
 * \param[in] batch sequences
 * \param[in] length positions of each
 * \param[in] kept ascending row numbers where only response rows are kept, else null
 * \param[in] kept_count how many they are
 */
VPKL_C_API vpkl_status vpkl_cache_store(vpkl_cache* cache, void* cuda_stream,
                                        const vpkl_rows* logits, int64_t batch, int64_t length,
                                        const int64_t* kept, int64_t kept_count);

/** \brief Enqueues positions [begin, end) of every batch row, in (b, t) order. */
VPKL_C_API vpkl_status vpkl_cache_fetch_chunk(vpkl_cache* cache, void* cuda_stream, int64_t begin,
                                              int64_t end, const vpkl_rows* out);

/** \brief Enqueues the listed rows (numbers b * length + t, any order). */
VPKL_C_API vpkl_status vpkl_cache_fetch_rows(vpkl_cache* cache, void* cuda_stream,
                                             const int64_t* rows, int64_t count,
                                             const vpkl_rows* out);

/** \brief Bytes held now. */
VPKL_C_API size_t vpkl_cache_bytes(const vpkl_cache* cache);

/** \brief Drops the rows; work already enqueued on them ends first. */
VPKL_C_API void vpkl_cache_free(vpkl_cache* cache);
/** \brief As vpkl_cache_free, and ends the handle; null is fine. */
VPKL_C_API void vpkl_cache_destroy(vpkl_cache* cache);

/* Streamed loss ------------------------------------------------------------------------------- */

/** How the counted rows are cut into calls of the operator. */
typedef int32_t vpkl_plan_kind;
enum {
  VPKL_PLAN_ROWS = 0,  /**< counted rows alone */
  VPKL_PLAN_CHUNKS = 1 /**< ranges of positions; those without counted rows are skipped */
};

/** What the sum over rows is divided by. */
typedef int32_t vpkl_normalization_kind;
enum {
  VPKL_TOKEN_MEAN = 0,    /**< the micro-batch's tokens */
  VPKL_GLOBAL_DIVISOR = 1 /**< a number of the caller's */
};

/** Normalisation of a micro-batch's loss and gradient; equal on every rank. */
typedef struct vpkl_normalization {
  vpkl_normalization_kind kind;        /**< which divisor */
  double divisor;                      /**< global divisor: tokens of the whole batch */
  int64_t gradient_accumulation_steps; /**< micro-batches in the window, at least 1 */
  double loss_scale;                   /**< factor on the gradient alone */
} vpkl_normalization;

/** Result of one micro-batch. */
typedef struct vpkl_loss_result {
  double loss;            /**< without gradient accumulation and loss scale; equal on every rank */
  int64_t tokens;         /**< rows that counted */
  int64_t chunks;         /**< operator calls */
  int64_t skipped_chunks; /**< without counted rows; neither fetched nor computed */
} vpkl_loss_result;

/** A micro-batch's distillation loss, a chunk of rows at a time. */
typedef struct vpkl_loss vpkl_loss;

/**
 * \brief Collective.
 * \param[in] space where tensors live and work runs
 * \param[in] comm the tensor-parallel group
 * \param[in] vocab ids of this rank's columns; with VPKL_DENSE a whole one
 * \param[in] options equal on every rank
 * \param[in] route how the vocabulary is brought together
 * \param[in] plan how the counted rows are cut
 * \param[in] chunk_width positions a chunk; bounds device memory
 * \param[out] loss to be destroyed with vpkl_loss_destroy
 */
VPKL_C_API vpkl_status vpkl_loss_create(vpkl_space space, const vpkl_comm* comm,
                                        const vpkl_vocab* vocab,
                                        const vpkl_divergence_options* options, vpkl_route route,
                                        vpkl_plan_kind plan, int64_t chunk_width, vpkl_loss** loss);

/**
 * \brief Collective. Position t counts if mask[b][t + 1] is not 0. Returns when the loss is known;
 * the gradient is enqueued. On failure the cache is freed.
 * \param[in] loss made for these options
 * \param[in] cuda_stream stream that made the logits; null for VPKL_HOST
 * \param[in] student `[batch * length, student_width]`
 * \param[in] cache the teacher's rows of this micro-batch; with VPKL_GATHERED whole rows
 * \param[in] mask `[batch, length]` in host memory, unshifted, rows `mask_stride` apart
 * \param[in] batch sequences
 * \param[in] length positions of each
 * \param[in] mask_stride elements between the mask's rows; 0: length
 * \param[in] normalization what the sum over rows is divided and multiplied by
 * \param[out] gradient as student, may be the student's rows; null: value only. Rows that do not
 * count are written 0. With VPKL_PLAN_ROWS also `[tokens, student_width]`: the counted rows alone,
 * in their order. \param[out] row_values `[batch, length]` floats in host memory, or null: values
 * of the rows \param[out] result loss and counts
 */
VPKL_C_API vpkl_status vpkl_loss_compute(vpkl_loss* loss, void* cuda_stream,
                                         const vpkl_rows* student, vpkl_cache* cache,
                                         const uint8_t* mask, int64_t batch, int64_t length,
                                         int64_t mask_stride,
                                         const vpkl_normalization* normalization,
                                         const vpkl_rows* gradient, float* row_values,
                                         vpkl_loss_result* result);
/** \brief Null is fine. */
VPKL_C_API void vpkl_loss_destroy(vpkl_loss* loss);

/* Greedy selection ---------------------------------------------------------------------------- */

/**
 * \brief Collective. The id with the largest logit of each row over the whole vocabulary, the
 * smallest among equals; the same on every rank.
 * \param[in] space where the logits live
 * \param[in] cuda_stream stream that made them, which is waited for; null for VPKL_HOST
 * \param[in] comm the tensor-parallel group
 * \param[in] vocab ids of this rank's columns
 * \param[in] logits `[rows, student_width]`, usually of the last position
 * \param[out] tokens `[rows]` in host memory
 */
VPKL_C_API vpkl_status vpkl_greedy_tokens(vpkl_space space, void* cuda_stream,
                                          const vpkl_comm* comm, const vpkl_vocab* vocab,
                                          const vpkl_rows* logits, int64_t* tokens);

#ifdef __cplusplus
}
#endif

#endif
