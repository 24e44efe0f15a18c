"""The tensors of Qwen3-8B from a torch process to an engine on the same GPU, through CUDA IPC, beside
the GPU's own copy of the same bytes in the same run. ipc_update.py [--tap] [--updates N] [--small];
LK_BUILD_DIR is the build. Times of a whole update_weights call over HTTP, of a session from start to
finish, and of pause to resume; p50 and p95. --small: the tensors of a 0.6B model."""

import argparse
import base64
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
import urllib.request

import torch
from torch.multiprocessing.reductions import reduce_tensor

HERE = os.path.dirname(os.path.abspath(__file__))
LARGE = dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
             num_key_value_heads=8, tie_word_embeddings=False)
SMALL = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
             num_key_value_heads=8, tie_word_embeddings=True)
WARM = 3


def config(sizes):
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128,
            "vocab_size": 151936, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
            "rope_theta": 1000000, "hidden_act": "silu", "attention_bias": False,
            "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1, **sizes}


def shapes(c):
    h, i, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    yield "model.embed_tokens.weight", (c["vocab_size"], h)
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        yield p + "input_layernorm.weight", (h,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield f"{p}self_attn.{name}_proj.weight", (rows, h)
        yield p + "self_attn.o_proj.weight", (h, q)
        yield p + "self_attn.q_norm.weight", (d,)
        yield p + "self_attn.k_norm.weight", (d,)
        yield p + "post_attention_layernorm.weight", (h,)
        yield p + "mlp.gate_proj.weight", (i, h)
        yield p + "mlp.up_proj.weight", (i, h)
        yield p + "mlp.down_proj.weight", (h, i)
    yield "model.norm.weight", (h,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], h)


def percentiles(seconds):
    s = sorted(seconds)
    return s[len(s) // 2], s[min(len(s) - 1, len(s) * 95 // 100)]


class Server:
    def __init__(self, model, flags):
        build = os.environ["LK_BUILD_DIR"]
        env = dict(os.environ)
        env["LD_LIBRARY_PATH"] = build + "/lib:" + env.get("LD_LIBRARY_PATH", "")
        self.log = open(model + "/log", "w")
        self.process = subprocess.Popen(
            [HERE + "/../deploy/lockstep", "serve", model, "--port", "0", "--device", "cuda-store",
             "--load-format", "dummy", "--weight-transfer-config", '{"backend": "ipc"}', *flags],
            stdout=subprocess.PIPE, stderr=self.log, text=True, env=env)
        line = self.process.stdout.readline()
        if " on " not in line:
            raise RuntimeError(open(model + "/log").read()[-1500:])
        self.url = line.split(" on ")[1].strip()

    def call(self, path, body=None):
        data = json.dumps(body).encode() if body is not None else b""
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)

    def stop(self):
        self.process.terminate()
        self.process.wait()


def copy_rate(tensors, repeats):
    """The same tensors, copied by the driver."""
    targets = [torch.empty_like(t) for _, t in tensors]
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for target, (_, t) in zip(targets, tensors):
            target.copy_(t)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return percentiles(times[WARM:])


def run(sizes, flags, updates):
    c = config(sizes)
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    with tempfile.TemporaryDirectory() as directory:
        json.dump(c, open(directory + "/config.json", "w"))
        started = time.perf_counter()
        server = Server(directory, flags)
        print(f"# the engine was ready after {time.perf_counter() - started:.1f} s")
        try:
            tensors = [(n, torch.randn(s, dtype=torch.bfloat16, device="cuda")) for n, s in shapes(c)]
            total = sum(t.numel() * 2 for _, t in tensors)
            floor = copy_rate(tensors, updates + WARM)
            server.call("/init_weight_transfer_engine", {"init_info": {}})
            transfer, session, window = [], [], []
            for i in range(updates + WARM):
                handles = [{uuid: reduce_tensor(t)[1]} for _, t in tensors]
                info = {"names": [n for n, _ in tensors], "dtype_names": ["bfloat16"] * len(tensors),
                        "shapes": [list(t.shape) for _, t in tensors],
                        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode()}
                torch.cuda.synchronize()
                t0 = time.perf_counter()
                server.call("/pause?mode=keep")
                t1 = time.perf_counter()
                server.call("/start_weight_update")
                t2 = time.perf_counter()
                server.call("/update_weights", {"update_info": info})
                t3 = time.perf_counter()
                server.call("/finish_weight_update", {"weight_version": str(i)})
                t4 = time.perf_counter()
                server.call("/resume")
                t5 = time.perf_counter()
                transfer.append(t3 - t2)
                session.append(t4 - t1)
                window.append(t5 - t0)
        finally:
            server.stop()
    print(f"# {total / 1e9:.1f} GB in {len(tensors)} tensors, {updates} updates {' '.join(flags)}")
    print(f"#   {'device copy':20} {floor[0] * 1e3:8.2f} ms p50 {floor[1] * 1e3:8.2f} ms p95 "
          f"{total / floor[0] / 1e9:8.1f} GB/s")
    for name, times in (("update_weights", transfer), ("start to finish", session),
                        ("pause to resume", window)):
        p50, p95 = percentiles(times[WARM:])
        print(f"#   {name:20} {p50 * 1e3:8.2f} ms p50 {p95 * 1e3:8.2f} ms p95 "
              f"{total / p50 / 1e9:8.1f} GB/s  {floor[0] / p50:.2f} of the device copy; first "
              f"{times[0] * 1e3:.1f} ms")
    return floor[0] / percentiles(transfer[WARM:])[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tap", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--updates", type=int, default=20)
    args = parser.parse_args()
    ratios = {}
    for small in ([True] if args.small else [False, True]):
        for flags in (["--no-weight-digests"], []):
            try:
                ratios[small, bool(flags)] = run(SMALL if small else LARGE, flags, args.updates)
            except Exception as error:
                print(f"# {'small' if small else 'large'} {flags}: {error}")
                ratios[small, bool(flags)] = 0
    if args.tap:
        for (small, off), ratio in ratios.items():
            what = f"{'0.6B' if small else '8B'}, digests {'off' if off else 'on'}"
            print(f"{'ok' if ratio > 0 else 'not ok'} - ipc_update: {what}: {ratio:.2f}")
    sys.exit(0)
