#!/usr/bin/env python3
"""The packed update loop that RL stacks write in PyTorch, for comparison with bench_nccl_update.

Rank 0 concatenates tensors into buffers of 1 GiB on two streams and broadcasts them; rank 1 copies
what it receives into its parameters. Two processes, one GPU each. Prints the times of the first and
of the following updates.

    torch_packed_loop.py [qwen3-8b|qwen3-0.6b] [--updates N]
"""
import argparse
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MODELS = {
    # hidden, intermediate, layers, heads, kv heads, tied
    "qwen3-8b": (4096, 12288, 36, 32, 8, False),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, True),
}
HEAD_DIM, VOCAB = 128, 151936
BUCKET = 1 << 30


def shapes(model):
    hidden, inter, layers, heads, kv, tied = MODELS[model]
    out = [(VOCAB, hidden)]
    for _ in range(layers):
        out += [(heads * HEAD_DIM, hidden), (kv * HEAD_DIM, hidden), (kv * HEAD_DIM, hidden),
                (hidden, heads * HEAD_DIM), (HEAD_DIM,), (HEAD_DIM,),
                (inter, hidden), (inter, hidden), (hidden, inter), (hidden,), (hidden,)]
    out.append((hidden,))
    if not tied:
        out.append((VOCAB, hidden))
    return out


def buckets(tensors):
    out, now, size = [], [], 0
    for t in tensors:
        now.append(t)
        size += t.numel() * t.element_size()
        if size > BUCKET:
            out.append(now)
            now, size = [], 0
    if now:
        out.append(now)
    return out


def update(rank, groups, streams):
    for i, group in enumerate(groups):
        stream = streams[i % len(streams)]
        stream.synchronize()
        with torch.cuda.stream(stream):
            if rank == 0:
                flat = torch.cat([t.view(-1).view(torch.uint8) for t in group])
                dist.broadcast(flat, src=0)
            else:
                size = sum(t.numel() * t.element_size() for t in group)
                flat = torch.empty(size, dtype=torch.uint8, device="cuda")
                dist.broadcast(flat, src=0)
                for t, piece in zip(group, flat.split([t.numel() * 2 for t in group])):
                    t.copy_(piece.view(t.dtype).view(t.shape))
    for stream in streams:
        stream.synchronize()


def run(rank, model, updates, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(1 - rank)  # the trainer on GPU 1, as in bench_nccl_update
    dist.init_process_group("nccl", rank=rank, world_size=2)
    tensors = [torch.randn(s, device="cuda", dtype=torch.bfloat16) * 0.02 for s in shapes(model)]
    total = sum(t.numel() * t.element_size() for t in tensors)
    groups, streams = buckets(tensors), [torch.cuda.Stream() for _ in range(2)]
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    times = []
    for _ in range(updates + 1):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        update(rank, groups, streams)
        times.append(time.perf_counter() - start)
    if rank == 1:
        first, rest = times[0], sorted(times[1:])
        p50, p95 = rest[len(rest) // 2], rest[int(0.95 * len(rest))]
        print(f"{model}, packed torch loop (torch {torch.__version__}, "
              f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}):")
        print(f"  first {first * 1e3:8.3f} ms ({total / first / 1e9:.1f} GB/s); then p50 "
              f"{p50 * 1e3:8.3f} ms  p95 {p95 * 1e3:8.3f} ms ({total / p50 / 1e9:.1f} GB/s at p50)  "
              f"{updates}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="qwen3-8b", choices=MODELS)
    parser.add_argument("--updates", type=int, default=25)
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(run, args=(args.model, args.updates, port), nprocs=2)


if __name__ == "__main__":
    main()
