#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times value and gradient of other implementations on one GPU.

Same shapes and, where an operator is the same, the same names as bench_divergence_cuda; writes
Google Benchmark's JSON, so that bench/compare can put both into one table. Needs torch with CUDA;
Triton, liger-kernel and Fast-LLM (0.4, Python 3.12) are used where they can be imported, and named
in the context where not.

    bench_peers.py --out peers.json [--quick]
"""
import argparse
import datetime
import itertools
import json
import statistics
import sys

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
try:
    import liger_kernel
    from liger_kernel.transformers import LigerJSD, LigerKLDIVLoss
except ImportError:
    liger_kernel = None
try:
    import fast_llm
    from fast_llm.functional.config import EntropyLossType, TargetFormat
    from fast_llm.functional.triton.entropy_loss import triton_entropy_loss_forward_backward
except ImportError:
    fast_llm = None

SHAPES = [(rows, columns) for columns in (75968, 151936) for rows in (64, 1024, 4096)]


def eager(divergence, student, teacher):
    """The textbook form; the gradient by automatic differentiation."""
    log_s = F.log_softmax(student.float(), -1)
    log_t = F.log_softmax(teacher.float(), -1)
    if divergence == "forward_kl":
        return F.kl_div(log_s, log_t, reduction="sum", log_target=True)
    if divergence == "reverse_kl":
        return F.kl_div(log_t, log_s, reduction="sum", log_target=True)
    log_m = torch.logaddexp(log_s, log_t) - 0.6931471805599453
    kl = lambda p, m: F.kl_div(m, p, reduction="sum", log_target=True)
    return 0.5 * (kl(log_t, log_m) + kl(log_s, log_m))


def with_gradient(function):
    def run(student, teacher):
        student = student.detach().requires_grad_(True)
        function(student, teacher).backward()
        return student.grad

    return run


def liger(divergence, dtype):
    """liger-kernel's losses, forward KL and JSD, take log-probabilities; these are of this type."""

    def log_probabilities(s, t):
        return F.log_softmax(s, -1, dtype=dtype), F.log_softmax(t, -1, dtype=dtype)

    if divergence == "forward_kl":
        loss = LigerKLDIVLoss(reduction="sum", log_target=True)
        return lambda s, t: loss(*log_probabilities(s, t))
    loss = LigerJSD(beta=0.5)
    return lambda s, t: loss(*log_probabilities(s, t)) * s.shape[0]


def fast_llm_kernel(divergence):
    """Fast-LLM's kernel is for the mean over rows."""
    kind = getattr(EntropyLossType, divergence)

    def run(student, teacher):
        *_, gradient = triton_entropy_loss_forward_backward(
            student,
            teacher,
            None,
            grad_output=float(student.shape[0]),
            logits_scale_factor=1.0,
            target_format=TargetFormat.logits,
            entropy_loss_type=kind,
        )
        return gradient

    return run


if triton:

    @triton.jit
    def statistics_kernel(S, T, OUT, columns, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        ms = -float("inf")
        mt = -float("inf")
        ss = 0.0
        st = 0.0
        w = 0.0
        for first in range(0, columns, BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < columns
            s = tl.load(S + row * columns + at, inside, -float("inf")).to(tl.float32)
            t = tl.load(T + row * columns + at, inside, -float("inf")).to(tl.float32)
            ns = tl.maximum(ms, tl.max(s, 0))
            nt = tl.maximum(mt, tl.max(t, 0))
            es = tl.exp(s - ns)
            et = tl.exp(t - nt)
            ss = ss * tl.exp(ms - ns) + tl.sum(es, 0)
            w = w * tl.exp(mt - nt) + tl.sum(tl.where(inside, et * (t - s), 0.0), 0)
            st = st * tl.exp(mt - nt) + tl.sum(et, 0)
            ms = ns
            mt = nt
        ls = ms + tl.log(ss)
        lt = mt + tl.log(st)
        tl.store(OUT + row * 3, ls)
        tl.store(OUT + row * 3 + 1, lt)
        tl.store(OUT + row * 3 + 2, w / st - lt + ls)

    @triton.jit
    def gradient_kernel(S, T, OUT, G, columns, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < columns
        ls = tl.load(OUT + row * 3)
        lt = tl.load(OUT + row * 3 + 1)
        s = tl.load(S + row * columns + at, inside, 0.0).to(tl.float32)
        t = tl.load(T + row * columns + at, inside, 0.0).to(tl.float32)
        g = tl.exp(s - ls) - tl.exp(t - lt)
        tl.store(G + row * columns + at, g.to(G.dtype.element_ty), inside)

    def two_kernels(student, teacher):
        rows, columns = student.shape
        out = torch.empty((rows, 3), device=student.device)
        gradient = torch.empty_like(student)
        statistics_kernel[(rows,)](student, teacher, out, columns, BLOCK=8192, num_warps=16)
        gradient_kernel[(rows, triton.cdiv(columns, 4096))](
            student, teacher, out, gradient, columns, BLOCK=4096, num_warps=8
        )
        return gradient


def milliseconds(call, sets, repetitions):
    """Median over samples of several calls each, after warm-up, over several sets of buffers.

    One call a sample would count the time in which Python prepares it.
    """
    buffers = itertools.cycle(sets)
    # As many as bench_divergence_cuda, but several.
    calls = min(64, max(8, (1 << 27) // sets[0][0].numel()))

    def sample():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call(*next(buffers))
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / calls

    sample()
    return statistics.median(sample() for _ in range(repetitions))


def candidates(divergence):
    yield "torch_eager", with_gradient(lambda s, t: eager(divergence, s, t))
    compiled = torch.compile(lambda s, t: eager(divergence, s, t), dynamic=False)
    yield "torch_compile", with_gradient(compiled)
    if triton and divergence == "forward_kl":
        yield "triton_two_kernels", two_kernels
    if liger_kernel and divergence != "reverse_kl":
        yield "liger_fp32", with_gradient(liger(divergence, torch.float32))
        # Log-probabilities of two or three digits.
        yield "liger_bf16", with_gradient(liger(divergence, torch.bfloat16))
    if fast_llm and divergence != "jsd":
        yield "fast_llm", fast_llm_kernel(divergence)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--quick", action="store_true", help="[1024, 75968] only")
    parser.add_argument("--repetitions", type=int, default=10)
    arguments = parser.parse_args()
    context = {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__ if triton else "not importable",
        "liger_kernel": getattr(liger_kernel, "__version__", "importable")
        if liger_kernel
        else "not importable",
        "fast_llm": fast_llm.__version__ if fast_llm else "not importable",
    }
    benchmarks = []
    for rows, columns in [(1024, 75968)] if arguments.quick else SHAPES:
        torch._dynamo.reset()
        bytes_ = rows * columns * 2
        sets = [
            tuple(torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            for _ in range(max(1, min(16, (400 << 20) // (3 * bytes_) + 1)))
        ]
        for divergence in ("forward_kl", "reverse_kl", "jsd"):
            for name, call in candidates(divergence):
                label = f"divergence/{divergence}/{name}/bf16/{rows}x{columns}"
                row = {"name": label, "run_name": label, "time_unit": "us"}
                try:
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    us = milliseconds(call, sets, arguments.repetitions) * 1e3
                    row.update(real_time=us, median_us=us)
                    row["extra_bytes"] = torch.cuda.max_memory_allocated() - before
                except Exception as error:  # a peer that fails is reported, not fatal
                    row.update(error_occurred=True, error_message=str(error).splitlines()[0][:200])
                    torch.cuda.empty_cache()
                print(label, row.get("median_us", row.get("error_message")), file=sys.stderr)
                benchmarks.append(row)
    with open(arguments.out, "w") as file:
        json.dump({"context": context, "benchmarks": benchmarks}, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
