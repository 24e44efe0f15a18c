"""The tensors of Qwen3-8B from a torch process to an engine on the same GPU, through CUDA IPC, beside
the GPU's own copy of the same bytes in the same run. ipc_update.py [--tap] [--updates N] [--small];
LK_BUILD_DIR is the build. Times of a whole update_weights call over HTTP, of a session from start to
finish, and of pause to resume; p50 and p95. Three ways: each tensor exported anew (what torch's users
do), exports kept between updates, and packed into buffers of 2 GiB. "preparation" is what torch does
before the calls (exporting, pickling; packed: filling the buffer, within the session), and is not in
the other figures unless packed, where it is in the last two. "engine" is where the engine says that its
time went. --small: the tensors of a 0.6B model."""

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
WAYS = ("per tensor", "exports kept", "packed")
BUFFER = 2 << 30


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


ENGINE = ("read", "open", "events", "copies", "end")


class Sender:
    """One way to send: prepare() is outside the session, send() within it."""

    def __init__(self, server, tensors, way):
        self.server, self.tensors, self.way = server, tensors, way
        self.uuid = str(torch.cuda.get_device_properties(0).uuid)
        self.ready = None
        self.engine = [0.0] * len(ENGINE)
        if way == "packed":
            self.buffer = torch.empty(BUFFER, dtype=torch.uint8, device="cuda")
            self.handle = self.pickled({self.uuid: reduce_tensor(self.buffer)[1]})
            self.chunks = list(self.cut())

    @staticmethod
    def pickled(handles):
        return base64.b64encode(pickle.dumps(handles)).decode()

    def cut(self):
        """Lists of tensors of at most BUFFER bytes together."""
        chunk, room = [], BUFFER
        for name, t in self.tensors:
            size = t.numel() * 2
            if size > BUFFER:
                raise ValueError(f"{name} has {size} bytes, the packed buffer {BUFFER}")
            if size > room:
                yield chunk
                chunk, room = [], BUFFER
            chunk.append((name, t))
            room -= size
        yield chunk

    def info(self, tensors, **more):
        return {"names": [n for n, _ in tensors], "dtype_names": ["bfloat16"] * len(tensors),
                "shapes": [list(t.shape) for _, t in tensors], **more}

    def prepare(self):
        if self.way != "packed" and (self.ready is None or self.way == "per tensor"):
            handles = [{self.uuid: reduce_tensor(t)[1]} for _, t in self.tensors]
            self.ready = self.info(self.tensors, ipc_handles_pickled=self.pickled(handles))
        torch.cuda.synchronize()

    def update_weights(self, info):
        """Seconds of the call; adds what the engine says to self.engine."""
        start = time.perf_counter()
        reply = self.server.call("/update_weights", {"update_info": info})
        seconds = time.perf_counter() - start
        rank = reply["ranks"][0]
        self.engine = [t + rank[f"ipc_{key}_us"] / 1e6 for t, key in zip(self.engine, ENGINE)]
        return seconds

    def send(self):
        """Seconds of the update_weights calls."""
        self.engine = [0.0] * len(ENGINE)
        if self.way != "packed":
            return self.update_weights(self.ready)
        seconds = 0.0
        for chunk in self.chunks:
            at, sizes = 0, [t.numel() * 2 for _, t in chunk]
            for (_, t), size in zip(chunk, sizes):
                self.buffer[at:at + size].view(torch.bfloat16).copy_(t.view(-1))
                at += size
            torch.cuda.synchronize()
            seconds += self.update_weights(self.info(
                chunk, ipc_handles_pickled=self.handle, tensor_sizes=sizes, packed=True))
        return seconds


def measure(sender, server, updates):
    rows = []
    for i in range(updates + WARM):
        t = [time.perf_counter()]
        sender.prepare()
        t.append(time.perf_counter())
        server.call("/pause?mode=keep")
        t.append(time.perf_counter())
        server.call("/start_weight_update")
        transfer = sender.send()
        server.call("/finish_weight_update", {"weight_version": str(i)})
        t.append(time.perf_counter())
        server.call("/resume")
        t.append(time.perf_counter())
        rows.append((t[1] - t[0], transfer, t[3] - t[2], t[4] - t[1], *sender.engine))
    return list(zip(*rows))


def report(way, columns, total, floor):
    """Returns update_weights' share of the device copy's rate."""
    for name, times in zip(("preparation", "update_weights", "start to finish", "pause to resume"),
                           columns):
        p50, p95 = percentiles(times[WARM:])
        print(f"#   {way + ', ' + name:29} {p50 * 1e3:8.2f} ms p50 {p95 * 1e3:8.2f} ms p95 "
              f"{total / p50 / 1e9:8.1f} GB/s  {floor / p50:.2f} of the device copy; first "
              f"{times[0] * 1e3:.1f} ms")
    engine = [f"{key} {percentiles(times[WARM:])[0] * 1e3:.2f}"
              for key, times in zip(ENGINE, columns[4:])]
    rest = percentiles([row[1] - sum(row[4:]) for row in list(zip(*columns))[WARM:]])[0]
    print(f"#   {way}, engine, ms p50: {', '.join(engine)}, all else of the calls {rest * 1e3:.2f}")
    return floor / percentiles(columns[1][WARM:])[0]


def run(sizes, flags, updates):
    """Ratios by way."""
    ratios = {}
    with tempfile.TemporaryDirectory() as directory:
        json.dump(config(sizes), open(directory + "/config.json", "w"))
        started = time.perf_counter()
        server = Server(directory, flags)
        print(f"# the engine was ready after {time.perf_counter() - started:.1f} s")
        try:
            tensors = [(n, torch.randn(s, dtype=torch.bfloat16, device="cuda"))
                       for n, s in shapes(config(sizes))]
            total = sum(t.numel() * 2 for _, t in tensors)
            floor = copy_rate(tensors, updates + WARM)
            print(f"# {total / 1e9:.1f} GB in {len(tensors)} tensors, {updates} updates {' '.join(flags)}")
            print(f"#   {'device copy':29} {floor[0] * 1e3:8.2f} ms p50 {floor[1] * 1e3:8.2f} ms p95 "
                  f"{total / floor[0] / 1e9:8.1f} GB/s")
            server.call("/init_weight_transfer_engine", {"init_info": {}})
            for way in WAYS:
                ratios[way] = report(way, measure(Sender(server, tensors, way), server, updates),
                                     total, floor[0])
        finally:
            server.stop()
    return ratios


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
                ratios[small, bool(flags)] = {way: 0.0 for way in WAYS}
    if args.tap:
        for (small, off), by_way in ratios.items():
            for way, ratio in by_way.items():
                what = f"{'0.6B' if small else '8B'}, digests {'off' if off else 'on'}, {way}"
                print(f"{'ok' if ratio > 0 else 'not ok'} - ipc_update: {what}: {ratio:.2f}")
    sys.exit(0)
