// SPDX-License-Identifier: Apache-2.0
// Operator, cache, streamed loss and greedy selection of the C interface.
#include <vpkl/capi/communicator.hpp>
#include <vpkl/divergence/plan.hpp>
#include <vpkl/rollout/greedy.hpp>
#include <vpkl/teacher/cache.hpp>
#include <vpkl/training/streamed_loss.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <vector>

using namespace vpkl;
using namespace vpkl::capi;

namespace {

template <class Enum>
Enum checked(int value, int count, char const* what) {
  if (value < 0 || value >= count)
    throw InvalidArgument(fmt::format("{} is {}, expected 0 to {}", what, value, count - 1));
  return static_cast<Enum>(value);
}

DivergenceOptions divergence_options(vpkl_divergence_options const* from) {
  vpkl_divergence_options const& o = deref(from, "divergence options");
  return {checked<Divergence>(o.divergence, 3, "divergence"), o.beta, o.temperature};
}

Route checked_route(int route) { return checked<Route>(route, 3, "route"); }

std::vector<std::int64_t> list(std::int64_t const* numbers, std::int64_t count, char const* what) {
  if (count < 0)
    throw InvalidArgument(fmt::format("{}: count is {}, expected at least 0", what, count));
  if (count > 0) deref(numbers, what);
  return {numbers, numbers + count};
}

}  // namespace

// The handles' interfaces; one implementation for each space.

struct vpkl_plan : Handle {
  virtual ~vpkl_plan() = default;
  virtual void execute(void* stream, vpkl_rows const* student, vpkl_rows const* teacher,
                       float const* row_weight, float* value, vpkl_rows const* gradient) = 0;
};

struct vpkl_cache : Handle {
  virtual ~vpkl_cache() = default;
  virtual void store(void* stream, vpkl_rows const* logits, std::int64_t batch, std::int64_t length,
                     std::int64_t const* kept, std::int64_t kept_count) = 0;
  virtual void fetch_chunk(void* stream, std::int64_t begin, std::int64_t end,
                           vpkl_rows const* out) = 0;
  virtual void fetch_rows(void* stream, std::vector<std::int64_t> const& rows,
                          vpkl_rows const* out) = 0;
  virtual std::size_t bytes() const = 0;
  virtual void free() noexcept = 0;
};

struct vpkl_loss : Handle {
  virtual ~vpkl_loss() = default;
  virtual LossResult compute(void* stream, vpkl_rows const* student, vpkl_cache* cache,
                             ResponseMask const& mask, vpkl_normalization const* normalization,
                             vpkl_rows const* gradient, float* row_values) = 0;
};

namespace {

template <class Exec>
struct Plan final : vpkl_plan {
  Exec fallback;  ///< what an error travels on where the call's stream is none
  DivergencePlan<Exec> plan;
  Plan(Exec const& exec, Communicator const& comm, VocabShard const& shard,
       typename DivergencePlan<Exec>::Options const& options)
      : plan(exec, comm, shard, options) {}

  void execute(void* stream, vpkl_rows const* student, vpkl_rows const* teacher,
               float const* row_weight, float* value, vpkl_rows const* gradient) override {
    Exec const* exec = nullptr;
    ConstRows s, t;
    Rows g;
    std::exception_ptr error;
    try {
      exec = &instance<Exec>(stream);
      s = rows<Exec>(student, "student logits");
      t = rows<Exec>(teacher, "teacher logits");
      if (gradient) g = rows<Exec>(gradient, "gradient");
      check_memory<Exec>(row_weight, "row weights");
      check_memory<Exec>(value, "values");
    } catch (...) {
      error = std::current_exception();
    }
    if (!exec) exec = &fallback;
    plan.execute(*exec, s, t, row_weight, value, g, error);
    if (impl::is_host_space<Exec>) impl::fence(*exec, "vpkl_plan_execute");
  }
};

template <class Exec>
struct Cache final : vpkl_cache {
  Communicator comm;
  TeacherCache<Exec> cache;
  Cache(Communicator const& c, typename TeacherCache<Exec>::Options const& options)
      : comm(c), cache(c, options) {}

  void store(void* stream, vpkl_rows const* logits, std::int64_t batch, std::int64_t length,
             std::int64_t const* kept, std::int64_t kept_count) override {
    Exec const* exec = nullptr;
    ConstRows from;
    std::vector<std::int64_t> listed;
    together(comm, [&] {
      exec = &instance<Exec>(stream);
      from = rows<Exec>(logits, "teacher logits");
      listed = list(kept, kept_count, "kept rows");
    });
    cache.store(*exec, from, batch, length, listed);
  }
  void fetch_chunk(void* stream, std::int64_t begin, std::int64_t end,
                   vpkl_rows const* out) override {
    cache.fetch_chunk(instance<Exec>(stream), begin, end, rows<Exec>(out, "fetched rows"));
  }
  void fetch_rows(void* stream, std::vector<std::int64_t> const& listed,
                  vpkl_rows const* out) override {
    cache.fetch_rows(instance<Exec>(stream), listed, rows<Exec>(out, "fetched rows"));
  }
  std::size_t bytes() const override { return cache.counters().bytes; }
  void free() noexcept override { cache.free(); }
};

template <class Exec>
struct Loss final : vpkl_loss {
  Communicator comm;
  StreamedLoss<Exec> loss;
  Loss(Communicator const& c, VocabShard const& shard,
       typename StreamedLoss<Exec>::Options const& options)
      : comm(options.route == Route::dense ? Communicator::self() : c), loss(c, shard, options) {}

  LossResult compute(void* stream, vpkl_rows const* student, vpkl_cache* cache,
                     ResponseMask const& mask, vpkl_normalization const* normalization,
                     vpkl_rows const* gradient, float* row_values) override {
    Exec const* exec = nullptr;
    ConstRows s;
    Rows g;
    Normalization n;
    auto* const held = dynamic_cast<Cache<Exec>*>(cache);
    try {
      together(comm, [&] {
        if (!held) throw InvalidArgument("teacher cache: it is null or of another space");
        exec = &instance<Exec>(stream);
        s = rows<Exec>(student, "student logits");
        if (gradient) g = rows<Exec>(gradient, "gradient");
        vpkl_normalization const& from = deref(normalization, "normalization");
        n.kind = checked<Normalization::Kind>(from.kind, 2, "normalization");
        n.divisor = from.divisor;
        n.gradient_accumulation_steps = from.gradient_accumulation_steps;
        n.loss_scale = from.loss_scale;
      });
    } catch (...) {
      if (held) held->free();
      throw;
    }
    LossResult const result = loss.compute(*exec, s, held->cache, mask, n, g);
    if (row_values) std::copy(loss.row_values().begin(), loss.row_values().end(), row_values);
    return result;
  }
};

}  // namespace

vpkl_status vpkl_plan_create(vpkl_space space, void* cuda_stream, const vpkl_comm* comm,
                             const vpkl_vocab* vocab, const vpkl_divergence_options* options,
                             vpkl_route route, vpkl_element_type student, vpkl_element_type teacher,
                             int64_t max_rows, vpkl_plan** plan) {
  return guarded([&] {
    in_space(space, [&](auto tag) {
      using Exec = typename decltype(tag)::Type;
      Communicator const& group = deref(comm, "communicator").comm;
      typename DivergencePlan<Exec>::Options to;
      Exec const* exec = nullptr;
      together(route == VPKL_DENSE ? Communicator::self() : group, [&] {
        exec = &instance<Exec>(cuda_stream);
        deref(vocab, "vocabulary");
        deref(plan, "plan");
        to.divergence = divergence_options(options);
        to.route = checked_route(route);
        to.student_type = element_type(student, "student");
        to.teacher_type = element_type(teacher, "teacher");
        to.max_rows = max_rows;
      });
      *plan = new Plan<Exec>(*exec, group, vocab->shard, to);
    });
  });
}

vpkl_status vpkl_plan_execute(vpkl_plan* plan, void* cuda_stream, const vpkl_rows* student,
                              const vpkl_rows* teacher, const float* row_weight, float* value,
                              const vpkl_rows* gradient) {
  return guarded([&] {
    deref(plan, "plan").execute(cuda_stream, student, teacher, row_weight, value, gradient);
  });
}

void vpkl_plan_destroy(vpkl_plan* plan) { delete plan; }

vpkl_status vpkl_cache_create(vpkl_space space, const vpkl_comm* comm,
                              const vpkl_cache_options* options, vpkl_cache** cache) {
  return guarded([&] {
    in_space(space, [&](auto tag) {
      using Exec = typename decltype(tag)::Type;
      Communicator const& group = deref(comm, "communicator").comm;
      typename TeacherCache<Exec>::Options to;
      together(group, [&] {
        deref(cache, "cache");
        if (!options) return;
        if (options->response_rows_only) to.mode = CacheMode::response;
        if (options->store_type != -1)
          to.store_type = element_type(options->store_type, "teacher cache, store type");
        to.memory_budget = options->memory_budget;
        if (options->transfer_engine)
          to.engine = transfer_engine_from_string(options->transfer_engine);
        if (options->statistics_temperature != 0)
          to.statistics =
              TeacherStatistics{options->statistics_temperature, options->statistics_columns};
      });
      *cache = new Cache<Exec>(group, to);
    });
  });
}

vpkl_status vpkl_cache_store(vpkl_cache* cache, void* cuda_stream, const vpkl_rows* logits,
                             int64_t batch, int64_t length, const int64_t* kept,
                             int64_t kept_count) {
  return guarded([&] {
    deref(cache, "teacher cache").store(cuda_stream, logits, batch, length, kept, kept_count);
  });
}

vpkl_status vpkl_cache_fetch_chunk(vpkl_cache* cache, void* cuda_stream, int64_t begin, int64_t end,
                                   const vpkl_rows* out) {
  return guarded([&] { deref(cache, "teacher cache").fetch_chunk(cuda_stream, begin, end, out); });
}

vpkl_status vpkl_cache_fetch_rows(vpkl_cache* cache, void* cuda_stream, const int64_t* rows,
                                  int64_t count, const vpkl_rows* out) {
  return guarded([&] {
    deref(cache, "teacher cache").fetch_rows(cuda_stream, list(rows, count, "rows"), out);
  });
}

size_t vpkl_cache_bytes(const vpkl_cache* cache) { return cache ? cache->bytes() : 0; }

void vpkl_cache_free(vpkl_cache* cache) {
  if (cache) cache->free();
}

void vpkl_cache_destroy(vpkl_cache* cache) { delete cache; }

vpkl_status vpkl_loss_create(vpkl_space space, const vpkl_comm* comm, const vpkl_vocab* vocab,
                             const vpkl_divergence_options* options, vpkl_route route,
                             vpkl_plan_kind plan, int64_t chunk_width, vpkl_loss** loss) {
  return guarded([&] {
    in_space(space, [&](auto tag) {
      using Exec = typename decltype(tag)::Type;
      Communicator const& group = deref(comm, "communicator").comm;
      typename StreamedLoss<Exec>::Options to;
      together(route == VPKL_DENSE ? Communicator::self() : group, [&] {
        deref(vocab, "vocabulary");
        deref(loss, "loss");
        to.divergence = divergence_options(options);
        to.route = checked_route(route);
        to.plan = checked<PlanKind>(plan, 2, "plan");
        to.chunk_width = chunk_width;
      });
      *loss = new Loss<Exec>(group, vocab->shard, to);
    });
  });
}

vpkl_status vpkl_loss_compute(vpkl_loss* loss, void* cuda_stream, const vpkl_rows* student,
                              vpkl_cache* cache, const uint8_t* mask, int64_t batch, int64_t length,
                              int64_t mask_stride, const vpkl_normalization* normalization,
                              const vpkl_rows* gradient, float* row_values,
                              vpkl_loss_result* result) {
  return guarded([&] {
    LossResult const r =
        deref(loss, "loss")
            .compute(cuda_stream, student, cache, ResponseMask{mask, batch, length, mask_stride},
                     normalization, gradient, row_values);
    if (result) *result = {r.loss, r.tokens, r.chunks, r.skipped_chunks};
  });
}

void vpkl_loss_destroy(vpkl_loss* loss) { delete loss; }

vpkl_status vpkl_greedy_tokens(vpkl_space space, void* cuda_stream, const vpkl_comm* comm,
                               const vpkl_vocab* vocab, const vpkl_rows* logits, int64_t* tokens) {
  return guarded([&] {
    in_space(space, [&](auto tag) {
      using Exec = typename decltype(tag)::Type;
      Communicator const& group = deref(comm, "communicator").comm;
      Exec const* exec = nullptr;
      ConstRows from;
      together(group, [&] {
        exec = &instance<Exec>(cuda_stream);
        deref(vocab, "vocabulary");
        from = rows<Exec>(logits, "greedy selection, logits");
        if (from.index.count > 0) deref(tokens, "tokens");
      });
      std::vector<std::int64_t> const chosen = greedy_tokens(*exec, group, vocab->shard, from);
      std::copy(chosen.begin(), chosen.end(), tokens);
    });
  });
}
