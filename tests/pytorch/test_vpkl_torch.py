#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vpkl_torch against PyTorch's own arithmetic, on the CPU and, where there is one, on a GPU."""
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, os.environ["VPKL_PYTHON_DIR"])
import vpkl_torch  # noqa: E402
from vpkl_torch import (Shard, TeacherLogitCache, VpklError, chunked_distillation_loss,  # noqa: E402
                        per_token_logprobs, streamed_distillation_loss)

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
LOSSES = ["forward_kl", "reverse_kl", "jsd"]


def reference(student, teacher, mask, loss_type, temperature):
    """In double, differentiable."""
    s = torch.log_softmax(student.double() / temperature, -1)
    t = torch.log_softmax(teacher.double() / temperature, -1)
    if loss_type == "forward_kl":
        value = (t.exp() * (t - s)).sum(-1)
    elif loss_type == "reverse_kl":
        value = (s.exp() * (s - t)).sum(-1)
    else:
        m = torch.logaddexp(s, t) - torch.log(torch.tensor(2.0, dtype=torch.float64))
        value = 0.5 * ((t.exp() * (t - m)).sum(-1) + (s.exp() * (s - m)).sum(-1))
    return (value * temperature**2 * mask).sum() / mask.sum().clamp_min(1.0)


def expected(student, teacher, mask, loss_type, temperature=1.0):
    leaf = student.detach().double().requires_grad_()
    loss = reference(leaf, teacher, mask.double(), loss_type, temperature)
    loss.backward()
    return loss.detach(), leaf.grad


def problem(device, batch=3, length=21, width=517, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    student = (2 * torch.randn(batch, length, width, generator=generator)).to(device, dtype)
    teacher = (2 * torch.randn(batch, length, width, generator=generator)).to(device, dtype)
    mask = torch.zeros(batch, length - 1)
    mask[0, 5:9] = 1
    mask[0, 7] = 0  # a hole
    mask[-1, length - 2] = 1
    return student, teacher, mask.to(device)


class Case(unittest.TestCase):

    def assert_near(self, got, want, tolerance):
        scale = want.double().norm().clamp_min(1e-30)
        error = ((got.double().cpu() - want.double().cpu()).norm() / scale.cpu()).item()
        self.assertLess(error, tolerance)


class Losses(Case):

    def test_against_pytorch(self):
        for device in DEVICES:
            for dtype, tolerance in [(torch.float32, 2e-6), (torch.bfloat16, 4e-3),
                                     (torch.float16, 1e-3)]:
                for loss_type in LOSSES:
                    for temperature, chunk in [(1.0, 512), (2.0, 4), (0.5, 1)]:
                        with self.subTest(device=device, dtype=dtype, loss_type=loss_type,
                                          temperature=temperature, chunk=chunk):
                            self.against_pytorch(device, dtype, tolerance, loss_type, temperature,
                                                 chunk)

    def against_pytorch(self, device, dtype, tolerance, loss_type, temperature, chunk):
        student, teacher, mask = problem(device, dtype=dtype)
        want, want_gradient = expected(student[:, :-1], teacher[:, :-1], mask, loss_type,
                                       temperature)
        cache = TeacherLogitCache.from_gpu_logits(teacher, store_dtype=dtype)

        def fetch(start, end):
            return cache.chunk_to_device(start, end, device=student.device, dtype=student.dtype)

        def opaque(start, end):
            return fetch(start, end).clone()

        gradients = []
        for fetcher in (fetch, opaque, lambda start, end: teacher[:, start:end]):
            leaf = student.detach().clone().requires_grad_()
            loss = streamed_distillation_loss(leaf[:, :-1], fetcher, mask, loss_type, temperature,
                                              chunk)
            self.assertEqual((loss.dtype, loss.shape, loss.device), (torch.float32, (), mask.device))
            self.assert_near(loss, want, 2e-6)
            loss.backward()
            self.assertEqual(leaf.grad.dtype, dtype)
            self.assert_near(leaf.grad[:, :-1], want_gradient, tolerance)
            self.assertTrue((leaf.grad[:, -1] == 0).all() and (leaf.grad[1] == 0).all())
            gradients.append(leaf.grad)
        self.assertTrue(torch.equal(gradients[0], gradients[1]))
        self.assertTrue(torch.equal(gradients[0], gradients[2]))

    def test_bits_are_those_of_the_cpp_interface(self):
        for device in DEVICES:
            for rows, width in [(3, 1000), (40, 32003)]:
                with self.subTest(device=device, rows=rows, width=width), \
                        tempfile.TemporaryDirectory() as folder:
                    self.against_cpp(device, rows, width, pathlib.Path(folder))

    def against_cpp(self, device, rows, width, folder):
        torch.manual_seed(width)
        logits = (3 * torch.randn(2, 1, rows, width)).to(torch.bfloat16)
        logits.view(torch.int16).numpy().tofile(folder / "in")
        subprocess.run([os.environ["VPKL_OPERATOR"], "device" if device == "cuda" else "host",
                        str(rows), str(width), str(folder / "in"), str(folder / "out")], check=True,
                       timeout=120)
        want = torch.from_numpy(np.fromfile(folder / "out", np.int16)).view(3, -1)
        student, teacher = logits.to(device)
        mask = torch.ones(1, rows, device=device)
        for loss_type, bits in zip(LOSSES, want):
            leaf = student.clone().requires_grad_()
            chunked_distillation_loss(leaf, teacher, mask, loss_type, 1.0, rows).backward()
            got = leaf.grad.cpu().view(torch.int16).flatten()
            self.assertTrue(torch.equal(got, bits[:rows * width]), loss_type)

    def test_a_cache_is_recognised_and_nothing_else(self):
        student, teacher, mask = problem("cpu")
        student = student[:, :-1]
        cache = TeacherLogitCache.from_gpu_logits(teacher, store_dtype=torch.float32)

        def fetch(start, end):
            return cache.chunk_to_device(start, end, student.device)

        with mock.patch.object(vpkl_torch, "_by_chunks", side_effect=AssertionError("by chunks")):
            served = streamed_distillation_loss(student, fetch, mask)
        self.assert_near(served, expected(student, teacher[:, :-1], mask, "reverse_kl")[0], 2e-6)

        def changed(start, end):
            chunk = fetch(start, end)
            chunk[...] = 0 if torch.isnan(chunk.flatten()[0]) else 2 * chunk
            return chunk

        def changed_in_inference_mode(start, end):
            with torch.inference_mode():
                chunk = fetch(start, end)
                chunk.fill_(3)
            return chunk

        others = {
            "changed in place": (changed, 2 * teacher[:, :-1]),
            "changed in inference mode": (changed_in_inference_mode,
                                          torch.full_like(teacher[:, :-1], 3)),
            "scaled": (lambda s, e: 2 * fetch(s, e), 2 * teacher[:, :-1]),
            "shifted": (lambda s, e: fetch(s + 1, e + 1), teacher[:, 1:]),
            "copied": (lambda s, e: fetch(s, e).clone(), teacher[:, :-1]),
        }
        with mock.patch.object(vpkl_torch, "_by_rows", side_effect=AssertionError("by rows")):
            for name, (fetcher, logits) in others.items():
                with self.subTest(name):
                    want = expected(student, logits, mask, "reverse_kl")[0]
                    self.assert_near(streamed_distillation_loss(student, fetcher, mask), want, 2e-6)
            # Weights that are no mask.
            soft = mask * 0.25
            soft[0, 5] = 1.5
            want = expected(student, teacher[:, :-1], soft, "reverse_kl")[0]
            self.assert_near(streamed_distillation_loss(student, fetch, soft), want, 2e-6)

    def test_incoming_gradients(self):
        for device in DEVICES:
            student, teacher, mask = problem(device)
            most = torch.ones_like(mask)
            most[:, :3] = 0
            cache = TeacherLogitCache.from_gpu_logits(teacher, store_dtype=torch.float32)
            fetchers = {"by chunks": lambda s, e: teacher[:, s:e],
                        "by rows": lambda s, e: cache.chunk_to_device(s, e, device)}
            ways = {
                "scaled": (lambda loss: (3 * loss).backward(), 3),
                "expanded": (lambda loss: loss.expand(4).sum().backward(), 4),
                "strided": (lambda loss: loss.expand(6)[::2].backward(
                    torch.tensor([1.0, 9.0, 2.0, 9.0, 3.0], device=device)[::2]), 6),
                "twice": (lambda loss: (loss.backward(retain_graph=True), loss.backward()), 2),
            }

            def batched(loss, leaf):
                factors = torch.tensor([1.0, 2.0], device=device)
                return torch.autograd.grad(loss, leaf, factors, is_grads_batched=True)[0].sum(0)

            def apart(loss, leaf):
                first, = torch.autograd.grad(loss, leaf, retain_graph=True)
                first.mul_(7)
                return 3 * torch.autograd.grad(loss, leaf)[0]

            for counted, (fetched, fetcher), (name, (backward, factor)) in itertools.product(
                    (mask, most), fetchers.items(), ways.items()):
                with self.subTest(name, fetched=fetched, tokens=counted.sum(), device=device):
                    want = expected(student[:, :-1], teacher[:, :-1], counted, "forward_kl")[1]
                    leaf = student[:, :-1].clone().requires_grad_()
                    backward(streamed_distillation_loss(leaf, fetcher, counted, "forward_kl"))
                    self.assert_near(leaf.grad, factor * want, 2e-6)
                    for way in (batched, apart):
                        loss = streamed_distillation_loss(leaf, fetcher, counted, "forward_kl")
                        self.assert_near(way(loss, leaf), 3 * want, 2e-6)

    def test_a_fetcher_that_fails_says_why(self):
        student, teacher, mask = problem("cpu")
        cache = TeacherLogitCache.from_gpu_logits(teacher)
        with self.assertRaisesRegex(RuntimeError, "NVIDIA|CUDA|cuda|device"):
            streamed_distillation_loss(student[:, :-1],
                                       lambda s, e: cache.chunk_to_device(s, e, "cuda:77"), mask)

    def test_in_place(self):
        for device in DEVICES:
            student, teacher, mask = problem(device)
            leaf = student[:, :-1].clone().requires_grad_()
            logits = leaf * 1.0
            kept = logits.square()  # saves the logits for its backward
            loss, logits = streamed_distillation_loss(
                logits, lambda s, e: teacher[:, s:e], mask, "forward_kl", in_place=True)
            loss.backward(retain_graph=True)
            want, gradient = expected(student[:, :-1], teacher[:, :-1], mask, "forward_kl")
            self.assert_near(loss, want, 2e-6)
            self.assert_near(leaf.grad, gradient, 2e-6)
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                kept.sum().backward()

    def test_in_place_refuses_what_autograd_cannot_change(self):
        student, teacher, mask = problem("cpu")
        leaf = student.clone().requires_grad_()
        view = (leaf * 1.0)[:, :-1]
        shorter = student[:, :-1].clone().requires_grad_()
        for name, logits in {"view": view, "leaf": shorter}.items():
            before = logits.detach().clone()
            with self.subTest(name), self.assertRaisesRegex(ValueError, "neither a leaf nor a view"):
                streamed_distillation_loss(logits, lambda s, e: teacher[:, s:e], mask, in_place=True)
            self.assertTrue(torch.equal(logits, before))

    def test_loss_scales_of_half_precision(self):
        """Gradients of a mean over many tokens lie below fp16 unless scaled before they are
        rounded; the usual first scale of a scaler is beyond fp16 itself."""
        generator = torch.Generator().manual_seed(3)
        student = torch.randn(8, 64, 1000, generator=generator).half()
        teacher = torch.randn(8, 64, 1000, generator=generator).half()
        mask = torch.ones(8, 64)
        want = expected(student, teacher, mask, "forward_kl")[1]
        for scale in (1024.0, 65536.0):
            leaf = student.clone().requires_grad_()
            (chunked_distillation_loss(leaf, teacher, mask, "forward_kl") * scale).backward()
            self.assertTrue(torch.isfinite(leaf.grad).all())
            self.assert_near(leaf.grad.double() / scale, want, 1e-3)

    def test_an_opaque_fetcher_is_asked_for_each_counting_chunk_once(self):
        student, teacher, mask = problem("cpu")
        asked = []

        def fetch(start, end):
            asked.append((start, end))
            return teacher[:, start:end]

        streamed_distillation_loss(student[:, :-1], fetch, mask, chunk_size=4)
        self.assertEqual(asked, [(4, 8), (8, 12), (16, 20)])

    def test_autograd(self):
        student, teacher, mask = problem("cpu")
        leaf = student[:, :-1].clone().requires_grad_()
        loss = chunked_distillation_loss(leaf, teacher[:, :-1], mask)
        first, = torch.autograd.grad(loss**2, leaf, create_graph=True)
        with self.assertRaisesRegex(RuntimeError, "once_differentiable"):
            first.sum().backward()
        with torch.no_grad():
            loss = chunked_distillation_loss(leaf, teacher[:, :-1], mask)
        self.assertFalse(loss.requires_grad)

    def test_layouts(self):
        student, teacher, mask = problem("cpu")
        want = expected(student[:, :-1], teacher[:, :-1], mask, "forward_kl")
        transposed = student.transpose(1, 2).contiguous().transpose(1, 2)
        one = (student[:1], teacher[:1], mask[:1])
        for name, logits in {"view": student[:, :-1], "transposed": transposed[:, :-1],
                             "double": student[:, :-1].double()}.items():
            with self.subTest(name):
                leaf = logits.detach().requires_grad_()
                cache = TeacherLogitCache.from_gpu_logits(teacher, torch.float32)
                loss = streamed_distillation_loss(
                    leaf, lambda s, e: cache.chunk_to_device(s, e, torch.device("cpu")), mask,
                    "forward_kl")
                loss.backward()
                self.assert_near(loss, want[0], 2e-6)
                self.assert_near(leaf.grad, want[1], 2e-6)
        # One position, whose stride says nothing.
        single = torch.randn(2, 32, 1).transpose(1, 2)
        cache = TeacherLogitCache.from_gpu_logits(torch.randn(2, 2, 32), torch.float32)
        loss = streamed_distillation_loss(
            single, lambda s, e: cache.chunk_to_device(s, e, torch.device("cpu")), torch.ones(2, 1))
        self.assert_near(loss, expected(single, cache.cpu_logits[:, :1], torch.ones(2, 1),
                                        "reverse_kl")[0], 2e-6)
        loss = chunked_distillation_loss(one[0][:, :-1], one[1][:, :-1], one[2], "forward_kl")
        self.assert_near(loss, expected(one[0][:, :-1], one[1][:, :-1], one[2], "forward_kl")[0],
                         2e-6)

    def test_nothing_counts(self):
        student, teacher, mask = problem("cpu")
        leaf = student[:, :-1].clone().requires_grad_()
        cache = TeacherLogitCache.from_gpu_logits(teacher)
        loss = streamed_distillation_loss(
            leaf, lambda s, e: cache.chunk_to_device(s, e, torch.device("cpu")), mask * 0)
        loss.backward()
        self.assertEqual(loss.item(), 0.0)
        self.assertTrue((leaf.grad == 0).all())

    def test_refusals(self):
        student, teacher, mask = problem("cpu")
        refused = [
            (ValueError, r"Unknown loss_type 'kl'; choose from \['forward_kl', 'jsd', 'reverse_kl'\]",
             lambda: chunked_distillation_loss(student, teacher, mask, "kl")),
            (ValueError, "shape mismatch: student",
             lambda: chunked_distillation_loss(student, teacher[:, :-1], mask)),
            (ValueError, "does not match logits prefix",
             lambda: chunked_distillation_loss(student, teacher, mask)),
            (RuntimeError, "fetcher returned chunk of length 19, expected 20",
             lambda: streamed_distillation_loss(student[:, :-1], lambda s, e: teacher[:, s:e - 1],
                                                mask)),
            (ValueError, "shape mismatch",
             lambda: streamed_distillation_loss(student[:, :-1], lambda s, e: teacher[:1, s:e],
                                                mask)),
            (ValueError, "chunk_size is -1", lambda: chunked_distillation_loss(
                student[:, :-1], teacher[:, :-1], mask, chunk_size=-1)),
            (VpklError, "temperature", lambda: chunked_distillation_loss(
                student[:, :-1], teacher[:, :-1], mask, temperature=0.0)),
        ]
        for error, text, call in refused:
            with self.subTest(text), self.assertRaisesRegex(error, text):
                call()

    def test_log_probabilities(self):
        student, _, _ = problem("cpu", dtype=torch.bfloat16)
        labels = torch.randint(0, student.shape[-1], student.shape[:2])
        want = torch.log_softmax(student.double(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        got = per_token_logprobs(student, labels)
        self.assertEqual(got.dtype, torch.float32)
        self.assert_near(got, want, 1e-6)


class Exit(unittest.TestCase):

    def test_nothing_is_left_alive(self):
        """Also with a cache in a module's variable and tensors in flight."""
        program = ("import torch, vpkl_torch as v, atexit\n"
                   "atexit._clear()\n"
                   "c = v.TeacherLogitCache.from_gpu_logits(torch.zeros(1, 2, 8))\n"
                   "v.chunked_distillation_loss(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), "
                   "torch.ones(1, 2))\n"
                   "v._finalize()\n"
                   "print(v._lib.vpkl_initialize(), v._lib.vpkl_last_error())\n")
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": os.environ["VPKL_PYTHON_DIR"]},
                              timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("after vpkl_finalize", done.stdout)


class Cache(Case):

    def test_round_trip(self):
        for device in DEVICES:
            source = torch.randn(3, 10, 37).to(device)
            cache = TeacherLogitCache.from_gpu_logits(source)
            self.assertEqual((cache.shape, cache.dtype), ((3, 10, 37), torch.bfloat16))
            stored = source.to(torch.bfloat16)
            for start, end in [(0, 10), (3, 4), (5, 10)]:
                got = cache.chunk_to_device(start, end, torch.device(device))
                self.assertTrue(torch.equal(got, stored[:, start:end]))
                wide = cache.chunk_to_device(start, end, torch.device("cpu"), torch.float32)
                self.assertTrue(torch.equal(wide, stored[:, start:end].float().cpu()))
            self.assertTrue(torch.equal(cache.cpu_logits, stored.cpu()))
            cache.free()
            self.assertEqual(cache.cpu_logits.numel(), 0)

    def test_refusals(self):
        cache = TeacherLogitCache.from_gpu_logits(torch.zeros(1, 8, 4))
        for start, end in [(0, 9), (5, 3), (-1, 4), (2, 2)]:
            with self.assertRaisesRegex(ValueError, "invalid for T=8"):
                cache.chunk_to_device(start, end, torch.device("cpu"))
        for make in (TeacherLogitCache, TeacherLogitCache.from_gpu_logits):
            with self.assertRaisesRegex(ValueError, "must be 3-D"):
                make(torch.zeros(8, 32))


def sharded(rank, size, folder, backend):
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank,
                            world_size=size)
    if backend == "nccl" and vpkl_torch._lib.vpkl_features() & vpkl_torch._FEATURE_NCCL:
        assert vpkl_torch._nccl_of(dist.group.WORLD), "torch's communicator was not found"
    student, teacher, mask = problem(device)
    width = student.shape[-1]
    even = width * rank // size, width * (rank + 1) // size
    all_on_the_first = (0, width) if rank == 0 else (width, width)
    for loss_type, (begin, end) in itertools.product(LOSSES, (all_on_the_first, even)):
        want, gradient = expected(student[:, :-1], teacher[:, :-1], mask, loss_type)
        shard, local = Shard(width, begin, end), slice(begin, end)
        cache = TeacherLogitCache.from_gpu_logits(teacher[..., local].contiguous(), torch.float32)
        for fetcher in (lambda s, e: cache.chunk_to_device(s, e, device),
                        lambda s, e: teacher[:, s:e, local]):
            leaf = student[:, :-1, local].clone().requires_grad_()
            loss = streamed_distillation_loss(leaf, fetcher, mask, loss_type,
                                              group=dist.group.WORLD, shard=shard)
            loss.backward()
            assert abs(loss.item() - want.item()) < 2e-6 * abs(want.item()), (loss, want)
            difference = (leaf.grad.double() - gradient[..., local]).norm() / gradient.norm()
            assert difference < 2e-6, difference

    def fetch(start, end):
        return teacher[:, start:end, local]

    def fail(start, end):
        raise OSError("the disk is gone")

    # One rank's mistake is everybody's error.
    last = rank == size - 1
    other = mask.clone()
    other[0, 6] = 0
    mistakes = {
        "temperatures differ": dict(temperature=2.0 if last else 1.0),
        "temperature is -1": dict(temperature=-1.0),
        "loss types differ": dict(loss_type="jsd" if last else "forward_kl"),
        "the disk is gone": dict(teacher_chunk_fetcher=fail if last else fetch),
        "masks differ": dict(response_mask=other if last else mask),
        "does not match": dict(response_mask=mask[:, :-1] if last else mask),
        "Unknown loss_type": dict(loss_type="kl" if last else "jsd"),
    }
    for text, mistake in mistakes.items():
        arguments = dict(teacher_chunk_fetcher=fetch, response_mask=mask, loss_type="forward_kl",
                         temperature=1.0, chunk_size=7)
        try:
            streamed_distillation_loss(student[:, :-1, local], **{**arguments, **mistake},
                                       group=dist.group.WORLD, shard=shard)
            raise AssertionError(f"accepted: {text}")
        except (VpklError, ValueError, OSError) as error:
            assert text in str(error), (text, error)
        loss = streamed_distillation_loss(student[:, :-1, local], **arguments,
                                          group=dist.group.WORLD, shard=shard)
        want = expected(student[:, :-1], teacher[:, :-1], mask, "forward_kl")[0]
        assert abs(loss.item() - want.item()) < 2e-6 * abs(want.item())
    dist.destroy_process_group()


class Sharded(Case):

    def test_two_and_three_ranks(self):
        for size in (2, 3):
            with self.subTest(size=size), tempfile.TemporaryDirectory() as folder:
                torch.multiprocessing.spawn(sharded, (size, folder, "gloo"), nprocs=size)

    @unittest.skipIf(torch.cuda.device_count() < 2, "needs two GPUs")
    def test_two_gpus(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ,
                                                                      NCCL_NVLS_ENABLE="0"):
            torch.multiprocessing.spawn(sharded, (2, folder, "nccl"), nprocs=2)


if __name__ == "__main__":
    unittest.main()
