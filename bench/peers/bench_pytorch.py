#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The PyTorch binding on one GPU: host time of the C entry, and the streamed loss with backward
against DeepSpeed's on-policy distillation example, in one run.

--opsd is the folder of that example (DeepSpeedExamples, training/opsd): its `losses.py` is timed over
a teacher in pageable memory, as the example keeps it after `.cpu()`, and over row copies from pinned
memory. Needs VPKL_LIBRARY, or an installed vpkl.
"""
import argparse
import ctypes
import importlib.util
import json
import pathlib
import statistics
import sys
import time

import torch


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--opsd", type=pathlib.Path, help="folder with the example's losses.py")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2112)
    parser.add_argument("--vocabulary", type=int, default=75968)
    parser.add_argument("--response", type=int, default=64, help="response tokens a sequence")
    parser.add_argument("--chunk-width", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--output-jsonl", type=pathlib.Path, help="results, appended")
    return parser.parse_args()


def module(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def entry_time(vpkl, repetitions):
    """Microseconds that a call of vpkl_plan_execute keeps the host, one rank, resident logits."""
    rows, width = 16, 1024
    student, teacher = (torch.randn(1, rows, width, device="cuda", dtype=torch.bfloat16)
                        for _ in range(2))
    gradient = torch.empty_like(student)
    value = torch.empty(rows, device="cuda")
    options = vpkl._divergence("forward_kl", 1.0)
    vocab = vpkl._vocab(None, None, width)
    stream = vpkl._stream(student.device)
    space = vpkl._space(student.device)
    plan = vpkl._Handle("plan", space, stream, vpkl._comm(None).pointer, vocab.pointer,
                        ctypes.byref(options), vpkl._VOCAB_PARALLEL, vpkl._TYPES[student.dtype],
                        vpkl._TYPES[teacher.dtype], rows)
    arguments = (plan.pointer, stream, ctypes.byref(vpkl._rows(student, 0, rows)),
                 ctypes.byref(vpkl._rows(teacher, 0, rows)), None, value.data_ptr(),
                 ctypes.byref(vpkl._rows(gradient, 0, rows)))
    execute = vpkl._lib.vpkl_plan_execute
    calls, times = 50, []
    for _ in range(repetitions + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            status = execute(*arguments)
        times.append((time.perf_counter() - start) / calls * 1e6)
        assert status == 0, vpkl._lib.vpkl_last_error()
    return statistics.median(times[2:])


def milliseconds(step, repetitions):
    times = []
    for _ in range(repetitions + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def main():
    options = parse()
    if not torch.cuda.is_available():
        sys.exit("bench_pytorch.py needs a CUDA GPU")
    root = pathlib.Path(__file__).resolve().parents[2]
    vpkl = module("vpkl_torch", root / "apps" / "pytorch" / "vpkl_torch.py")
    # The losses get logits and mask shifted already: one position less than the teacher has.
    shape = (options.batch, options.length, options.vocabulary)
    device = torch.device("cuda")
    torch.manual_seed(0)
    teacher = torch.randn(shape, device=device, dtype=torch.bfloat16) * 3
    student = (3 * torch.randn(options.batch, options.length - 1, options.vocabulary, device=device,
                               dtype=torch.bfloat16)).requires_grad_()
    mask = torch.zeros(options.batch, options.length - 1, device=device)
    mask[:, -options.response:] = 1

    cache = vpkl.TeacherLogitCache.from_gpu_logits(teacher)
    pinned = torch.empty(shape, dtype=torch.bfloat16, pin_memory=True).copy_(teacher)
    pageable = pinned.clone()
    del teacher

    def row_copies(start, end):
        out = torch.empty(options.batch, end - start, options.vocabulary, dtype=torch.bfloat16,
                          device=device)
        for sequence in range(options.batch):
            out[sequence].copy_(pinned[sequence, start:end], non_blocking=True)
        return out

    def step(losses, fetcher):
        student.grad = None
        loss = losses.streamed_distillation_loss(student, fetcher, mask, "forward_kl", 1.0,
                                                 options.chunk_width)
        loss.backward()
        return float(loss.detach())

    cases = {"vpkl, its cache by rows":
             (vpkl, lambda start, end: cache.chunk_to_device(start, end, device))}
    if options.opsd:
        opsd = module("opsd_losses", options.opsd / "losses.py")
        cases["example, pinned row copies"] = (opsd, row_copies)
        cases["example, pageable"] = (
            opsd, lambda start, end: pageable[:, start:end].to(device, non_blocking=True))
    results = {"entry_us": entry_time(vpkl, options.repetitions), "shape": shape,
               "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "losses": {},
               "ms": {}}
    print(f"C entry, host: {results['entry_us']:.1f} us")
    for name, (losses, fetcher) in cases.items():
        results["losses"][name] = step(losses, fetcher)
        results["ms"][name] = milliseconds(lambda: step(losses, fetcher), options.repetitions)
        ratio = results["ms"][name] / next(iter(results["ms"].values()))
        print(f"{name:30} {results['ms'][name]:9.2f} ms  {ratio:6.2f} x  "
              f"loss {results['losses'][name]:.6f}")
    if options.output_jsonl:
        with options.output_jsonl.open("a", encoding="utf-8") as file:
            file.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
