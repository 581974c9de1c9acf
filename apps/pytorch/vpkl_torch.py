# SPDX-License-Identifier: Apache-2.0
"""vpkl for PyTorch, through its C interface (libvpkl_c) and ctypes.

Drop-in for the losses and the teacher cache of DeepSpeed's on-policy distillation example:

    from vpkl_torch import streamed_distillation_loss, TeacherLogitCache

Tensors on a GPU are worked on where they are, on the current stream; tensors on the CPU with OpenMP.
The library is found through VPKL_LIBRARY, beside an installed copy of this file, or by the linker.

Beyond the example's: `group` and `shard` for a vocabulary that is sharded over the ranks of a
torch.distributed group, and `in_place`.
"""
import atexit
import contextlib
import ctypes
import ctypes.util
import hashlib
import os
import pathlib
import threading
import weakref
from typing import Callable, NamedTuple, Optional, Tuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable

__all__ = [
    "Shard",
    "TeacherLogitCache",
    "VpklError",
    "built_with_cuda",
    "chunked_distillation_loss",
    "per_token_logprobs",
    "streamed_distillation_loss",
]


class VpklError(RuntimeError):
    """What vpkl refused, in its own words."""


class Shard(NamedTuple):
    """Ids [begin, end) of a vocabulary; column c of a rank's logits is id begin + c."""

    vocabulary: int
    begin: int
    end: int


# The C interface ----------------------------------------------------------------------------------

_FEATURE_CUDA, _FEATURE_NCCL = 1, 8
_i64, _ptr = ctypes.c_int64, ctypes.c_void_p
_GATHER = ctypes.CFUNCTYPE(ctypes.c_int, _ptr, _ptr, _ptr, ctypes.c_size_t, _i64)


class _Rows(ctypes.Structure):
    _fields_ = [("data", _ptr), ("type", ctypes.c_int), ("width", _i64), ("rows", _i64),
                ("rows_per_batch", _i64), ("batch_stride", _i64), ("row_stride", _i64),
                ("offsets", _ptr)]


class _Callbacks(ctypes.Structure):
    _fields_ = [("context", _ptr), ("rank", ctypes.c_int), ("size", ctypes.c_int),
                ("all_gather", _GATHER), ("all_gather_device", _ptr)]


class _ShardSpec(ctypes.Structure):
    _fields_ = [("vocabulary", _i64), ("begin", _i64), ("end", _i64), ("student_width", _i64),
                ("teacher_width", _i64)]


class _Divergence(ctypes.Structure):
    _fields_ = [("divergence", ctypes.c_int), ("beta", ctypes.c_double),
                ("temperature", ctypes.c_double)]


class _CacheOptions(ctypes.Structure):
    _fields_ = [("response_rows_only", ctypes.c_int), ("store_type", ctypes.c_int),
                ("memory_budget", ctypes.c_size_t), ("transfer_engine", ctypes.c_char_p),
                ("statistics_temperature", ctypes.c_double), ("statistics_columns", _i64)]


class _Normalization(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("divisor", ctypes.c_double), ("steps", _i64),
                ("loss_scale", ctypes.c_double)]


class _LossResult(ctypes.Structure):
    _fields_ = [("loss", ctypes.c_double), ("tokens", _i64), ("chunks", _i64), ("skipped", _i64)]


def _load():
    def candidates():
        yield os.environ.get("VPKL_LIBRARY")
        prefix = pathlib.Path(__file__).resolve().parents[2]  # of <prefix>/share/vpkl/vpkl_torch.py
        for pattern in ("lib*/libvpkl_c.so", "lib/*/libvpkl_c.so"):
            yield from (str(path) for path in sorted(prefix.glob(pattern)))
        yield ctypes.util.find_library("vpkl_c")

    path = next((candidate for candidate in candidates() if candidate), None)
    if path is None:
        raise ImportError("libvpkl_c.so was not found; set VPKL_LIBRARY to its path")
    library = ctypes.CDLL(path)
    p, i = ctypes.POINTER, ctypes.c_int
    signatures = {
        "comm_self": [p(_ptr)],
        "comm_from_callbacks": [p(_Callbacks), p(_ptr)],
        "comm_from_nccl": [_ptr, p(_ptr)],
        "comm_destroy": [_ptr],
        "vocab_create": [_ptr, p(_ShardSpec), p(_ptr)],
        "vocab_destroy": [_ptr],
        "plan_create": [i, _ptr, _ptr, _ptr, p(_Divergence), i, i, i, _i64, p(_ptr)],
        "plan_execute": [_ptr, _ptr, p(_Rows), p(_Rows), _ptr, _ptr, p(_Rows)],
        "plan_destroy": [_ptr],
        "cache_create": [i, _ptr, p(_CacheOptions), p(_ptr)],
        "cache_store": [_ptr, _ptr, p(_Rows), _i64, _i64, _ptr, _i64],
        "cache_fetch_chunk": [_ptr, _ptr, _i64, _i64, p(_Rows)],
        "cache_destroy": [_ptr],
        "loss_create": [i, _ptr, _ptr, p(_Divergence), i, i, _i64, p(_ptr)],
        "loss_compute": [_ptr, _ptr, p(_Rows), _ptr, _ptr, _i64, _i64, _i64, p(_Normalization),
                         p(_Rows), _ptr, p(_LossResult)],
        "loss_destroy": [_ptr],
        "finalize": [],
    }
    if not library.vpkl_features() & _FEATURE_NCCL:
        del signatures["comm_from_nccl"]
    for name, arguments in signatures.items():
        function = getattr(library, "vpkl_" + name)
        function.argtypes = arguments
        function.restype = None if name.endswith("destroy") else i
    library.vpkl_last_error.restype = ctypes.c_char_p
    return library


_lib = _load()


def built_with_cuda() -> bool:
    """Whether the library takes tensors on GPUs."""
    return bool(_lib.vpkl_features() & _FEATURE_CUDA)


_callback_error = threading.local()  # what a callback of the call in progress raised


def _call(name, *arguments):
    _callback_error.value = None
    if getattr(_lib, "vpkl_" + name)(*arguments) != 0:
        text, cause = _lib.vpkl_last_error().decode(errors="replace"), _callback_error.value
        if isinstance(cause, KeyboardInterrupt):
            raise cause
        raise VpklError(text) from cause


class _Handle:
    """A handle of the library's, destroyed with the last reference; `keeps` live as long."""

    def __init__(self, kind, *arguments, create="create", keeps=()):
        self.pointer = _ptr()
        self._keeps = keeps
        _call(f"{kind}_{create}", *arguments, ctypes.byref(self.pointer))
        self.destroy = weakref.finalize(self, getattr(_lib, f"vpkl_{kind}_destroy"), self.pointer)
        _handles.add(self)


_handles = weakref.WeakSet()


_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_DIVERGENCES = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2}
_VOCAB_PARALLEL, _PLAN_ROWS = 2, 0


def _space(device):
    if device.type == "cpu":
        return 0
    if device.type == "cuda":
        return 1
    raise ValueError(f"device is {device}, expected cpu or cuda")


def _stream(device):
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def _rows(tensor, begin, end, length=None):
    """Rows (b, t) for t in [begin, end) of `[B, T, V]`, or `length` rows of each b."""
    count = end - begin if length is None else length
    # The stride of a dimension of one element says nothing.
    row = tensor.stride(1) if tensor.shape[1] > 1 else tensor.shape[2]
    return _Rows(tensor.data_ptr() + begin * row * tensor.element_size(),
                 _TYPES[tensor.dtype], tensor.shape[2], tensor.shape[0] * count, count,
                 tensor.stride(0) if tensor.shape[0] > 1 else max(1, count) * row, row, None)


def _usable(logits):
    """The tensor itself, or one whose rows the library can read."""
    if logits.dtype not in _TYPES:
        logits = logits.float()
    width = logits.shape[2]
    rows_fit = all(logits.shape[d] < 2 or logits.stride(d) >= width for d in (0, 1))
    return logits if (width < 2 or logits.stride(2) == 1) and rows_fit else logits.contiguous()


# Groups of ranks ----------------------------------------------------------------------------------


def _nccl_of(group):
    """torch's NCCL communicator of the group; None where it, or the library, has none."""
    import torch.distributed as dist

    if not _lib.vpkl_features() & _FEATURE_NCCL or dist.get_backend(group) != "nccl":
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    backend = group._get_backend(device)
    if not hasattr(backend, "_comm_ptr"):  # before torch 2.7
        return None
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # torch makes it at first use
    return backend._comm_ptr() or None


class _Group:
    """The library's communicator over a torch.distributed group; None: this process alone."""

    def __init__(self, group):
        if group is None:
            self.comm = _Handle("comm", create="self")
            return
        import torch.distributed as dist

        nccl = _nccl_of(group)
        if all(_gathered(group, nccl is not None)):
            self.comm = _agreed(group, lambda: _Handle("comm", nccl, create="from_nccl"))
            return
        size = dist.get_world_size(group)
        device = torch.device("cpu")
        if dist.get_backend(group) == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())

        def all_gather(_context, local, gathered, count, _timeout_ms):
            try:
                if count == 0:
                    return 0
                own = torch.frombuffer((ctypes.c_uint8 * count).from_address(local),
                                       dtype=torch.uint8).to(device, copy=True)
                parts = [torch.empty_like(own) for _ in range(size)]
                dist.all_gather(parts, own, group=group)
                to = torch.frombuffer((ctypes.c_uint8 * (count * size)).from_address(gathered),
                                      dtype=torch.uint8)
                to.copy_(torch.cat(parts))
                return 0
            except BaseException as error:  # must not cross the C interface; _call raises it
                _callback_error.value = error
                return 1

        callback = _GATHER(all_gather)
        callbacks = _Callbacks(None, dist.get_rank(group), size, callback, None)
        self.comm = _Handle("comm", ctypes.byref(callbacks), create="from_callbacks",
                            keeps=(callback,))


_kept = {}


def _once(key, make):
    """Communicators, vocabularies, plans and losses are made once."""
    if key not in _kept:
        _kept[key] = make()
    return _kept[key]


def clear():
    """Drops the communicators, plans and losses kept between calls, and their memory."""
    _kept.clear()


@atexit.register
def _finalize():
    clear()
    for handle in list(_handles):
        handle.destroy()
    _lib.vpkl_finalize()


def _comm(group):
    return _once(("comm", group), lambda: _Group(group)).comm


def _vocab(group, shard, width):
    shard = shard or Shard(width, 0, width)
    spec = _ShardSpec(*shard, width, width)
    return _once(("vocab", group, shard, width),
                 lambda: _Handle("vocab", _comm(group).pointer, ctypes.byref(spec)))


def _divergence(loss_type, temperature):
    return _Divergence(_DIVERGENCES[loss_type], 0.5, temperature)


# Teacher cache ------------------------------------------------------------------------------------


class _Probe:
    """What a fetcher asked of a cache while it was watched."""

    _local = threading.local()

    def __init__(self, fetcher, start, end):
        self.cache = self.bounds = self.answer = None
        self._local.active = self
        try:
            self.returned = fetcher(start, end)
        except Exception:
            # Whoever works on a chunk may fail on what stands for it, and is called in earnest later.
            if self.cache is None:
                raise
            self.returned = None
        finally:
            self._local.active = None
        # The cache whose chunks the fetcher hands on unchanged.
        plain = (self.cache is not None and self.returned is self.answer
                 and self.bounds == (start, end) and self.answer._version == 0)
        self.served_by = self.cache if plain else None

    @classmethod
    def active(cls):
        return getattr(cls._local, "active", None)


def _with_chunk(fetcher, bounds, chunk):
    """The fetcher, without asking again for the chunk that is already there."""
    kept = {bounds: chunk}
    return lambda start, end: kept.pop((start, end), None) if (start, end) in kept else fetcher(
        start, end)


class TeacherLogitCache:
    """Teacher logits `[B, T, V]` of a micro-batch in (pinned) host memory, fetched by chunks.

    `TeacherLogitCache(cpu_logits)` wraps a tensor on the CPU as it is; `from_gpu_logits` stores
    logits, on whatever device they are, in vpkl's own cache.
    """

    def __init__(self, cpu_logits: torch.Tensor):
        if cpu_logits.dim() != 3:
            raise ValueError(f"cpu_logits must be 3-D [B, T, V]; got shape {tuple(cpu_logits.shape)}")
        if cpu_logits.device.type != "cpu":
            raise ValueError(f"cpu_logits must live on CPU; got device {cpu_logits.device}")
        self._tensor, self._handle = cpu_logits, None
        self._shape, self._dtype = tuple(cpu_logits.shape), cpu_logits.dtype

    @classmethod
    def from_gpu_logits(cls, logits: torch.Tensor,
                        store_dtype: torch.dtype = torch.bfloat16) -> "TeacherLogitCache":
        if logits.dim() != 3:
            raise ValueError(f"cpu_logits must be 3-D [B, T, V]; got shape {tuple(logits.shape)}")
        if store_dtype not in _TYPES:
            return cls(logits.detach().to(store_dtype).cpu())
        self = cls.__new__(cls)
        logits = _usable(logits.detach())
        batch, length, _ = logits.shape
        options = _CacheOptions(0, _TYPES[store_dtype], 0, None, 0, 0)
        self._device, self._tensor = logits.device, None
        self._shape, self._dtype = tuple(logits.shape), store_dtype
        self._handle = _Handle("cache", _space(logits.device), _comm(None).pointer,
                               ctypes.byref(options))
        _call("cache_store", self._handle.pointer, _stream(logits.device),
              ctypes.byref(_rows(logits, 0, length)), batch, length, None, 0)
        return self

    @property
    def shape(self) -> Tuple[int, int, int]:
        return tuple(int(n) for n in self._shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def cpu_logits(self) -> torch.Tensor:
        """A copy of everything held, on the CPU; the tensor itself where the cache wraps one."""
        if self._handle is None:
            return self._tensor
        return self.chunk_to_device(0, self.shape[1], torch.device("cpu"))

    def chunk_to_device(self, start: int, end: int, device: torch.device,
                        dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        batch, length, width = self.shape
        if not 0 <= start < end <= length:
            raise ValueError(f"chunk bounds [{start}, {end}) invalid for T={length}")
        device, dtype = torch.device(device), dtype or self._dtype
        probe = _Probe.active()
        if probe is not None:
            # Whoever keeps it for data is to notice. An inference tensor would not count its changes.
            with torch.inference_mode(False):
                nan = torch.full((1,), float("nan"), dtype=dtype, device=device)
                probe.answer = nan.expand(batch, end - start, width)
            probe.cache, probe.bounds = self, (start, end)
            return probe.answer
        if self._handle is None:
            return self._tensor[:, start:end].to(device=device, dtype=dtype, non_blocking=True)
        fetched = dtype if dtype in _TYPES else self._dtype
        out = torch.empty(batch, end - start, width, dtype=fetched, device=self._device)
        _call("cache_fetch_chunk", self._handle.pointer, _stream(self._device), start, end,
              ctypes.byref(_rows(out, 0, end - start)))
        return out.to(device=device, dtype=dtype)

    def free(self) -> None:
        """Drops the rows; work already enqueued on them ends first."""
        self._handle, self._tensor, self._shape = None, torch.empty(0), (0, 0, 0)


# Losses -------------------------------------------------------------------------------------------


class _Work(NamedTuple):
    """One call's inputs, checked."""

    fetcher: Callable[[int, int], torch.Tensor]
    cache: Optional[TeacherLogitCache]  # set where it serves the rows itself
    mask: torch.Tensor  # [B, T] float32 on the host
    counts: np.ndarray  # [B, T], where it is not 0
    counted: np.ndarray  # places in [B * T] of those
    total: float  # of the mask, at least 1; the loss is the mean
    divisor: float  # of the gradient
    loss_type: str
    temperature: float
    chunk_size: int
    group: object
    shard: Optional[Shard]


def _by_rows(student, gradient, work):
    """The library's streamed loss over its own cache, whose rows are one position longer; the
    gradient is that of the counted rows alone."""
    batch, length, width = student.shape
    device, space = student.device, _space(student.device)
    vocab = _vocab(work.group, work.shard, width)
    options = _divergence(work.loss_type, work.temperature)
    loss = _once(
        ("loss", space, work.group, work.shard, width, work.loss_type, work.temperature,
         work.chunk_size),
        lambda: _Handle("loss", space, _comm(work.group).pointer, vocab.pointer,
                        ctypes.byref(options), _VOCAB_PARALLEL, _PLAN_ROWS, work.chunk_size))
    mask = np.zeros((batch, length + 1), np.uint8)
    mask[:, 1:] = work.counts
    result = _LossResult()
    # The last position never counts: the student's rows there, maybe beyond its memory, are not
    # touched.
    student_rows = _rows(student, 0, length, length + 1)
    gradient_rows = None
    if gradient is not None:
        gradient_rows = ctypes.byref(_rows(gradient.unsqueeze(0), 0, len(gradient)))
    _call("loss_compute", loss.pointer, _stream(device), ctypes.byref(student_rows),
          work.cache._handle.pointer, mask.ctypes.data, batch, length + 1, 0,
          ctypes.byref(_Normalization(1, work.divisor, 1, 1.0)), gradient_rows, None,
          ctypes.byref(result))
    return torch.full((), result.loss * work.divisor / work.total, dtype=torch.float32,
                      device=device)


def _fetched(fetcher, start, end, student):
    """A chunk of the fetcher's that the library can read."""
    teacher = fetcher(start, end)
    if teacher.shape[1] != end - start:
        raise RuntimeError(f"fetcher returned chunk of length {teacher.shape[1]}, "
                           f"expected {end - start}")
    shape = (student.shape[0], end - start, student.shape[2])
    if teacher.shape != shape:
        raise ValueError(f"shape mismatch: student {shape} vs teacher {tuple(teacher.shape)}")
    return _usable(teacher.detach().to(student.device))


def _plan(space, device, vocab, student, teacher, rows, work):
    """A plan for at least `rows` rows; the largest asked for is kept."""
    stream = _stream(device)
    key = ("plan", space, stream, work.group, work.shard, vocab, work.loss_type, work.temperature,
           student, teacher)
    kept_rows, plan = _kept.get(key, (0, None))
    if plan is None or kept_rows < rows:
        options = _divergence(work.loss_type, work.temperature)
        plan = _Handle("plan", space, stream, _comm(work.group).pointer, vocab.pointer,
                       ctypes.byref(options), _VOCAB_PARALLEL, _TYPES[student], _TYPES[teacher],
                       rows)
        _kept[key] = rows, plan
    return plan


def _by_chunks(student, gradient, work):
    """The operator on one fetched chunk after the other."""
    batch, length, width = student.shape
    device, space = student.device, _space(student.device)
    vocab = _vocab(work.group, work.shard, width)
    weights = (work.mask / work.divisor).to(device)
    total = torch.zeros((), dtype=torch.float32, device=device)
    for start in range(0, length, work.chunk_size):
        end = min(start + work.chunk_size, length)
        if not work.mask[:, start:end].any():
            if gradient is not None:
                gradient[:, start:end].zero_()
            continue
        teacher = _agreed(work.group, lambda: _fetched(work.fetcher, start, end, student))
        plan = _plan(space, device, vocab, student.dtype, teacher.dtype,
                     batch * min(work.chunk_size, length), work)
        weight = weights[:, start:end].contiguous()
        value = torch.empty(batch, end - start, dtype=torch.float32, device=device)
        gradient_rows = None if gradient is None else ctypes.byref(_rows(gradient, start, end))
        _call("plan_execute", plan.pointer, _stream(device),
              ctypes.byref(_rows(student, start, end)), ctypes.byref(_rows(teacher, 0, end - start)),
              weight.data_ptr(), value.data_ptr(), gradient_rows)
        total += (value * weight).sum()
    return total * (work.divisor / work.total)


class _Distillation(torch.autograd.Function):

    @staticmethod
    def forward(ctx, student, work, in_place, wanted):
        ctx.scale, ctx.shape = work.divisor / work.total, student.shape
        if in_place:
            loss = _by_chunks(student, student, work)
            ctx.mark_dirty(student)
            ctx.full, ctx.counted = student.detach(), None
            return loss, student
        batch, length, width = student.shape
        # Where few rows count, they alone are kept for backward.
        few = 2 * len(work.counted) <= batch * length
        ctx.full = ctx.counted = None
        if wanted and (few or work.cache is not None):
            ctx.places = torch.from_numpy(work.counted).to(student.device, non_blocking=True)
        if work.cache is None:
            gradient = student.new_empty(batch, length, width) if wanted else None
            loss = _by_chunks(student, gradient, work)
            if wanted and few:
                ctx.counted = gradient.flatten(0, 1)[ctx.places]
            else:
                ctx.full = gradient
        else:
            if wanted:
                # The tensor of the first backward: zeroed while the teacher comes over the bus.
                ctx.full = student.new_zeros(batch, length, width)
                ctx.counted = student.new_empty(len(work.counted), width)
            loss = _by_rows(student, ctx.counted, work)
            if wanted and not few:
                ctx.full.flatten(0, 1).index_copy_(0, ctx.places, ctx.counted)
                ctx.counted = None
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        # A factor of no dimensions stays in fp32, whatever the gradient's type.
        factor = upstream.float() * ctx.scale
        if ctx.counted is None:
            return ctx.full * factor, None, None, None
        counted = ctx.counted * factor

        def filled(full):
            full.view(ctx.shape[0] * ctx.shape[1], ctx.shape[2]).index_copy_(0, ctx.places, counted)
            return full

        made, ctx.full = ctx.full, None
        if made is not None:
            try:
                return filled(made), None, None, None
            except RuntimeError:  # under vmap: only `counted` has the batch
                pass
        return filled(counted.new_zeros(ctx.shape)), None, None, None


def _gathered(group, mine):
    """What every rank of the group brings, in rank order."""
    import torch.distributed as dist

    everyones = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group=group)
    return everyones


def _agreed(group, local, told=None):
    """What `local` returns; what it raises on one rank, every rank of the group raises. `told` by name
    must be equal on all ranks."""
    result = error = None
    try:
        result = local()
    except Exception as raised:
        error = raised
    if group is not None:
        all_told = _gathered(group, (error and f"{type(error).__name__}: {error}", told))
        if error is None:
            for rank, (text, other) in enumerate(all_told):
                if text:
                    raise VpklError(f"rank {rank}: {text}")
                for name, value in (other or {}).items():
                    first = all_told[0][1][name]
                    if value != first:
                        raise VpklError(f"{name} differ: {first} on rank 0, {value} on rank {rank}")
    if error is not None:
        raise error
    return result


def _check(student, mask, loss_type, chunk_size, in_place):
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}, expected at least 1")
    # Only a whole tensor of autograd's own can be given another content.
    if in_place and student.requires_grad and (student.is_leaf or student._is_view()):
        raise ValueError("in_place needs logits that are neither a leaf nor a view")
    if loss_type not in _DIVERGENCES:
        raise ValueError(f"Unknown loss_type {loss_type!r}; choose from {sorted(_DIVERGENCES)}")
    batch, length, _ = student.shape
    if mask.shape != (batch, length):
        raise ValueError(f"response_mask {tuple(mask.shape)} does not match logits "
                         f"prefix ({batch}, {length})")


def _distil(student, fetcher, mask, loss_type, temperature, chunk_size, group, shard, in_place):
    host_mask = mask.detach().to("cpu", torch.float32)
    weights = host_mask.numpy()  # torch's own operators take several times as long on so little
    told = None
    if group is not None:
        digest = hashlib.sha256(weights.tobytes()).hexdigest()[:16]
        # Plans are kept: ranks that do not ask for the same would not make the same collectives.
        told = {"mask shapes": tuple(host_mask.shape), "masks": digest, "chunk sizes": chunk_size,
                "loss types": loss_type, "temperatures": float(temperature),
                "student types": str(student.dtype), "in_place": bool(in_place)}
    _agreed(group, lambda: _check(student, host_mask, loss_type, chunk_size, in_place), told)

    # A fetcher that only hands on chunks of a cache is served by rows: what does not count never
    # crosses the bus.
    _, length, width = student.shape
    counts = weights != 0
    counted = np.flatnonzero(counts)
    cache = None
    if not in_place and len(counted) > 0:
        start = int((counted % length).min()) // chunk_size * chunk_size
        bounds = start, min(start + chunk_size, length)
        probe = _agreed(group, lambda: _Probe(fetcher, *bounds))
        cache = probe.served_by
        if probe.cache is None:
            fetcher = _with_chunk(fetcher, bounds, probe.returned)
    binary = bool((weights[counts] == 1).all())
    serves = (cache is not None and cache._handle is not None and binary
              and cache._device == student.device
              and cache.shape == (student.shape[0], length + 1, width))
    if group is not None:
        serves = all(_gathered(group, serves))
    student = _usable(student)
    # What fp16 can hold of a gradient is decided by the loss scale, so that comes before the mean.
    total = max(float(weights.sum(dtype=np.float64)), 1.0)
    divisor = 1.0 if student.dtype == torch.float16 else total
    wanted = torch.is_grad_enabled() and student.requires_grad
    work = _Work(fetcher, cache if serves else None, host_mask, counts, counted, total,
                 divisor, loss_type, temperature, chunk_size, group, shard)
    on_device = (torch.cuda.device(student.device) if student.device.type == "cuda"
                 else contextlib.nullcontext())
    with on_device:
        return _Distillation.apply(student, work, in_place, wanted)


def streamed_distillation_loss(
    student_logits: torch.Tensor,
    teacher_chunk_fetcher: Callable[[int, int], torch.Tensor],
    response_mask: torch.Tensor,
    loss_type: str = "reverse_kl",
    temperature: float = 1.0,
    chunk_size: int = 512,
    *,
    group=None,
    shard: Optional[Shard] = None,
    in_place: bool = False,
) -> torch.Tensor:
    """Mean divergence over the masked positions, teacher logits fetched chunk by chunk.

    Args:
        student_logits: ``[B, T, V]``, already shifted (``logits[:, :-1]``); under a group the local
            columns.
        teacher_chunk_fetcher: ``fn(start, end) -> [B, end - start, V]``. One that hands on chunks of
            a `TeacherLogitCache` unchanged is recognised by the first chunk that counts, for which
            the cache only notes what was asked.
        response_mask: ``[B, T]``, already shifted (``mask[:, 1:]``).
        loss_type: ``"forward_kl" | "reverse_kl" | "jsd"``.
        group: torch.distributed group over whose ranks the vocabulary is sharded.
        shard: this rank's ids; needed with ``group``.
        in_place: the gradient replaces the student's logits, which must be neither a leaf nor a
            view; returns ``(loss, student_logits)``, and the second must be used from then on.

    Returns:
        fp32 scalar, the same on every rank of the group.
    """
    return _distil(student_logits, teacher_chunk_fetcher, response_mask, loss_type, temperature,
                   chunk_size, group, shard, in_place)


def chunked_distillation_loss(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    response_mask: torch.Tensor,
    loss_type: str = "reverse_kl",
    temperature: float = 1.0,
    chunk_size: int = 512,
    *,
    group=None,
    shard: Optional[Shard] = None,
) -> torch.Tensor:
    """As `streamed_distillation_loss`, with the teacher's ``[B, T, V]`` logits at hand."""
    if loss_type not in _DIVERGENCES:
        raise ValueError(f"Unknown loss_type {loss_type!r}; choose from {sorted(_DIVERGENCES)}")
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(f"shape mismatch: student {tuple(student_logits.shape)} vs teacher "
                         f"{tuple(teacher_logits.shape)}")
    return streamed_distillation_loss(student_logits, lambda start, end: teacher_logits[:, start:end],
                                      response_mask, loss_type, temperature, chunk_size, group=group,
                                      shard=shard)


def per_token_logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """log p(label_t | context) for each position of ``[B, T, V]``; fp32 ``[B, T]``.

    For logging: under autograd it keeps the logits in fp32.
    """
    chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1).float()
    # One position at a time, so that without autograd there is no [B, T, V] in fp32.
    normalizer = [torch.logsumexp(logits[:, t].float(), dim=-1) for t in range(logits.shape[1])]
    return chosen - torch.stack(normalizer, dim=1) if normalizer else chosen
