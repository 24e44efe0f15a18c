#!/usr/bin/env python3
"""A trainer written with nothing but PyTorch and the libnccl of its package, as vLLM's trainers are:
HTTP calls, torch's own TCPStore (or the id in the call), one all-reduce, broadcasts.

    nccl_trainer.py --url URL --model DIR --gpu N [--store] [--packed BYTES] [--in-update]
        [--perturb SEED] [--updates N] [--hold STAGE] [--lie] [--world-size N]

It sends other values, and with the last update the file's own; it prints the digest of every rank
after each update. With --hold it prints "holding STAGE" at that
point and waits to be killed: rendezvous, idle, broadcast, finish.
"""
import argparse
import base64
import ctypes
import json
import os
import pickle
import socket
import struct
import sys
import threading
import time
import types
import urllib.error
import urllib.request

import torch

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}
CODES = {torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6,
         torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


def pose_as_vllm():
    """The id has to be pickled under the name that vLLM's workers know."""
    name = "vllm.distributed.device_communicators.pynccl_wrapper"
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    UniqueId.__module__, UniqueId.__name__, UniqueId.__qualname__ = name, "ncclUniqueId", "ncclUniqueId"
    sys.modules[name].ncclUniqueId = UniqueId


class Nccl:
    def __init__(self, gpu, path=None):
        torch.cuda.set_device(gpu)
        self.lib = ctypes.CDLL(path or "libnccl.so.2")
        self.comm = ctypes.c_void_p()
        self.stream = torch.cuda.Stream()

    def check(self, code):
        if code != 0:
            self.lib.ncclGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError("NCCL: " + self.lib.ncclGetErrorString(code).decode())

    def unique_id(self):
        uid = UniqueId()
        self.check(self.lib.ncclGetUniqueId(ctypes.byref(uid)))
        return uid

    def join(self, uid, world_size):
        self.check(self.lib.ncclCommInitRank(ctypes.byref(self.comm), world_size, uid, 0))
        one = torch.zeros(1, device="cuda")
        out = torch.empty_like(one)
        self.check(self.lib.ncclAllReduce(ctypes.c_void_p(one.data_ptr()),
                                          ctypes.c_void_p(out.data_ptr()), ctypes.c_size_t(1), 7, 0,
                                          self.comm, ctypes.c_void_p(self.stream.cuda_stream)))
        self.stream.synchronize()

    def broadcast(self, tensor):
        self.check(self.lib.ncclBroadcast(ctypes.c_void_p(tensor.data_ptr()),
                                          ctypes.c_void_p(tensor.data_ptr()),
                                          ctypes.c_size_t(tensor.numel()), CODES[tensor.dtype], 0,
                                          self.comm, ctypes.c_void_p(self.stream.cuda_stream)))


def call(url, path, body=None, timeout=120):
    data = json.dumps(body if body is not None else {}).encode()
    request = urllib.request.Request(url + path, data=data, method="POST",
                                     headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return json.loads(reply.read() or b"{}")
    except urllib.error.HTTPError as e:
        raise RuntimeError(f"{path}: {e.code} {e.read().decode()[:600]}") from None


def get(url, path):
    with urllib.request.urlopen(url + path, timeout=60) as reply:
        return json.loads(reply.read())


def in_thread(fn, *args):
    box = {}

    def run():
        try:
            box["value"] = fn(*args)
        except Exception as e:  # handed to whoever joins
            box["error"] = e
    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join():
        thread.join()
        if "error" in box:
            raise box["error"]
        return box["value"]
    return join


def load(directory):
    """name -> tensor on the GPU, in file order."""
    out = {}
    for file in sorted(os.listdir(directory)):
        if not file.endswith(".safetensors"):
            continue
        with open(os.path.join(directory, file), "rb") as f:
            size = struct.unpack("<Q", f.read(8))[0]
            header = json.loads(f.read(size))
            base = f.read()
        header.pop("__metadata__", None)
        for name, t in header.items():
            first, last = t["data_offsets"]
            raw = torch.frombuffer(bytearray(base[first:last]), dtype=torch.uint8).cuda()
            out[name] = raw.view(DTYPES[t["dtype"]]).view(t["shape"])
    return out


def perturb(tensors, seed):
    """Other values; every third tensor travels in another dtype that holds them exactly."""
    out = {}
    for i, (name, t) in enumerate(tensors.items()):
        t = (t.float() * (1 + seed / 64)).to(torch.bfloat16)
        out[name] = t.float() if i % 3 == 1 else t
    return out


def hold(args, stage):
    if args.hold == stage:
        print("holding", stage, flush=True)
        time.sleep(3600)


def meet(args, nccl):
    world = 1 + get(args.url, "/get_world_size")["world_size"]
    info = {"rank_offset": 1, "world_size": args.world_size or world}
    if args.packed and not args.in_update:
        info.update(packed=True, packed_buffer_size_bytes=args.packed, packed_num_buffers=2)
    uid = nccl.unique_id()
    if not args.store:
        info["nccl_unique_id_b64"] = base64.b64encode(bytes(uid)).decode()
        join = in_thread(call, args.url, "/init_weight_transfer_engine", {"init_info": info})
        hold(args, "rendezvous")
    else:
        from datetime import timedelta
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        info.update(master_address="127.0.0.1", master_port=port)
        join = in_thread(call, args.url, "/init_weight_transfer_engine", {"init_info": info})
        hold(args, "rendezvous")
        store = torch.distributed.TCPStore(
            host_name="127.0.0.1", port=port, world_size=world, is_master=True,
            timeout=timedelta(seconds=60), use_libuv=False, master_listen_fd=listener.detach())
        store.set("broadcast_from/0/0", pickle.dumps(uid))
        nccl.store = store
    nccl.join(uid, args.world_size or world)
    return join()


def send(args, nccl, tensors):
    torch.cuda.synchronize()
    if args.lie:
        tensors = dict(list(tensors.items())[: len(tensors) // 2])
    if args.hold == "broadcast":
        first = next(iter(tensors.values())).contiguous()
        if not args.packed:
            nccl.broadcast(first)
        hold(args, "broadcast")
    with torch.cuda.stream(nccl.stream):
        if not args.packed:
            for t in tensors.values():
                nccl.broadcast(t)
        else:
            group, size = [], 0
            for t in tensors.values():
                group.append(t.contiguous().view(-1).view(torch.uint8))
                size += group[-1].numel()
                if size > args.packed:
                    nccl.broadcast(torch.cat(group))
                    group, size = [], 0
            if group:
                nccl.broadcast(torch.cat(group))
    nccl.stream.synchronize()


def update(args, nccl, tensors, version):
    info = {"names": list(tensors), "shapes": [list(t.shape) for t in tensors.values()],
            "dtype_names": [str(t.dtype).split(".")[1] for t in tensors.values()]}
    if args.packed and args.in_update:
        info.update(packed=True, packed_buffer_size_bytes=args.packed, packed_num_buffers=2)
    call(args.url, "/pause?mode=keep")
    call(args.url, "/start_weight_update", {"is_checkpoint_format": True} if args.in_update else None)
    join = in_thread(call, args.url, "/update_weights", {"update_info": info})
    send(args, nccl, tensors)
    print("update_weights:", json.dumps(join()))
    hold(args, "finish")
    call(args.url, "/finish_weight_update", {"weight_version": version})
    call(args.url, "/resume")
    ranks = get(args.url, "/weight_info")["ranks"]
    print("digests", " ".join(r["digest"] for r in ranks), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gpu", type=int, default=1)
    parser.add_argument("--nccl-library")
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--packed", type=int, default=0)
    parser.add_argument("--in-update", action="store_true")
    parser.add_argument("--perturb", type=int, default=0)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--world-size", type=int, default=0)
    parser.add_argument("--hold", default="")
    parser.add_argument("--lie", action="store_true")
    args = parser.parse_args()
    pose_as_vllm()
    nccl = Nccl(args.gpu, args.nccl_library)
    tensors = load(args.model)
    changed = perturb(tensors, args.perturb) if args.perturb else tensors
    print("init:", json.dumps(meet(args, nccl)), flush=True)
    hold(args, "idle")
    for i in range(args.updates):
        last = i == args.updates - 1
        update(args, nccl, tensors if last else changed, f"step-{i}")
    sys.stdout.flush()
    os._exit(0)  # as trainers end: nobody destroys the communicator


if __name__ == "__main__":
    main()
