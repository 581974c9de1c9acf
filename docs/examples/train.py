# SPDX-License-Identifier: Apache-2.0
"""The PyTorch binding: distils a teacher into a student's language-model head.

    python3 train.py        or        torchrun --nproc-per-node 2 train.py

vpkl_torch must be in PYTHONPATH: share/vpkl of the installation. Under torchrun each rank holds a
part of the vocabulary. Runs on GPUs where there is one for each rank and vpkl was built for them. The
exit status is 1 unless the loss has fallen.
"""

import os
import sys

import torch
import torch.distributed as dist
from vpkl_torch import Shard, TeacherLogitCache, built_with_cuda, streamed_distillation_loss

B, T, H, V = 2, 32, 16, 1009  # sequences, positions, hidden size, vocabulary

local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
on_gpu = built_with_cuda() and torch.cuda.device_count() >= local_ranks
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)

group, shard, rank = None, None, 0
begin, end = 0, V
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("nccl" if on_gpu else "gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    begin, end = (V * r // dist.get_world_size() for r in (rank, rank + 1))
    shard = Shard(vocabulary=V, begin=begin, end=end)

generator = torch.Generator().manual_seed(1)
hidden = (torch.rand(B, T, H, generator=generator) * 2 - 1).to(device)
student_head, teacher_head = (
    (torch.rand(V, H, generator=generator) * 2 - 1).to(device) for _ in range(2)
)
student_head = torch.nn.Parameter(student_head[begin:end].clone())
teacher = hidden @ teacher_head[begin:end].T
response = (torch.arange(T, device=device) >= T // 2).float().expand(B, T)

cache = TeacherLogitCache.from_gpu_logits(teacher, store_dtype=torch.float32)
optimizer = torch.optim.SGD([student_head], lr=100)
losses = []
for update in range(20):
    student = hidden @ student_head.T
    loss = streamed_distillation_loss(
        student[:, :-1],
        lambda begin, end: cache.chunk_to_device(begin, end, student.device),
        response[:, 1:],
        "forward_kl",
        temperature=2.0,
        group=group,
        shard=shard,
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if rank == 0:
        print(f"update {update:2}, loss {losses[-1]:.6f}")

if group is not None:
    dist.destroy_process_group()
sys.exit(0 if losses[-1] < losses[0] / 2 else 1)
