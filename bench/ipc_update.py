"""The tensors of Qwen3-8B from a torch process to an engine on the same GPU, through CUDA IPC, beside
the GPU's own copy of the same bytes in the same run. ipc_update.py [--tap] [--updates N] [--small |
--large] [--digests off|on|both]; LK_BUILD_DIR is the build. Times of a whole update_weights call, of a
session from start to finish, and of pause to resume; p50 and p95.

Ways to send: each tensor exported anew (what torch's users do), exports kept between updates, and packed
into buffers of 2 GiB. Ways to call: "http" is urllib, with a new connection for every call; "http kept" one
connection, on which a request is one write; "socket" the trainer's socket through the C library
(lst_call); "send_weights" is lockstep_trainer.py's own, which keeps exports by itself: its update_weights
has all of it, whatever Python does.

"preparation" is what comes before the calls (exporting, pickling, the call's JSON text; packed: filling the
buffer, within the session), and is not in the other figures unless packed, where it is in the last two.
"engine" is where the engine says that its time went. --small: the tensors of a 0.6B model."""

import argparse
import base64
import http.client
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

import torch
from torch.multiprocessing.reductions import reduce_tensor

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../examples/python"))
LARGE = dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
             num_key_value_heads=8, tie_word_embeddings=False)
SMALL = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
             num_key_value_heads=8, tie_word_embeddings=True)
WARM = 3
WAYS = (("per tensor", "http"), ("exports kept", "http"), ("packed", "http"),
        ("per tensor", "http kept"), ("exports kept", "http kept"),
        ("per tensor", "socket"), ("exports kept", "socket"), ("exports kept", "send_weights"))
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
        self.endpoint = f"ipc://{model}/trainer.sock"
        self.process = subprocess.Popen(
            [HERE + "/../deploy/lockstep", "serve", model, "--port", "0", "--device", "cuda-store",
             "--trainer-endpoint", self.endpoint, "--load-format", "dummy",
             "--weight-transfer-config", '{"backend": "ipc"}', *flags],
            stdout=subprocess.PIPE, stderr=self.log, text=True, env=env)
        line = self.process.stdout.readline()
        if " on " not in line:
            raise RuntimeError(open(model + "/log").read()[-1500:])
        self.url = line.split(" on ")[1].strip()

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
PATHS = {"pause": "/pause?mode=keep"}


class Http:
    """A new connection for every call, as urllib does it."""

    def __init__(self, server):
        self.url = server.url

    def call(self, name, text=b""):
        request = urllib.request.Request(self.url + PATHS.get(name, "/" + name), text,
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)


class KeptHttp:
    """One connection; a request's header and body leave together."""

    def __init__(self, server):
        host, port = server.url.split("//")[1].split(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call(self, name, text=b""):
        self.socket.sendall((f"POST {PATHS.get(name, '/' + name)} HTTP/1.1\r\nHost: localhost\r\n"
                             f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
                             ).encode() + text)
        reply = http.client.HTTPResponse(self.socket, method="POST")
        reply.begin()
        body = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{name}: {reply.status} {body[:500]}")
        return json.loads(body)


class Library:
    """The trainer's socket, through the library."""

    def __init__(self, server):
        import lockstep_trainer

        self.trainer = lockstep_trainer.trainer_init({"endpoint": server.endpoint, "backend": "ipc"})

    def call(self, name, text=b""):
        if name == "pause":
            return self.trainer.pause("keep")
        return self.trainer.call_text(name, text or None)


def engine_seconds(reply):
    return [reply["ranks"][0][f"ipc_{key}_us"] / 1e6 for key in ENGINE]


class Sender:
    """One way to send: prepare() is outside the session, send() within it."""

    def __init__(self, server, tensors, way, how):
        self.tensors, self.way, self.how = tensors, way, how
        self.calls = Http(server) if how == "http" else KeptHttp(server) if how == "http kept" \
            else Library(server)
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

    def text(self, tensors, **more):
        return json.dumps({"update_info": self.info(tensors, **more)}).encode()

    def prepare(self):
        if self.way == "packed" or self.how == "send_weights":
            pass
        elif self.ready is None or self.way == "per tensor":
            handles = [{self.uuid: reduce_tensor(t)[1]} for _, t in self.tensors]
            self.ready = self.text(self.tensors, ipc_handles_pickled=self.pickled(handles))
        torch.cuda.synchronize()

    def update_weights(self, text):
        """Seconds of the call; adds what the engine says to self.engine."""
        start = time.perf_counter()
        reply = self.calls.call("update_weights", text)
        seconds = time.perf_counter() - start
        self.engine = [t + more for t, more in zip(self.engine, engine_seconds(reply))]
        return seconds

    def send_weights(self):
        start = time.perf_counter()
        self.calls.trainer.send_weights(self.tensors, packed=False, chunk_bytes=1 << 62)
        seconds = time.perf_counter() - start
        self.engine = engine_seconds(self.calls.trainer.last_reply)
        return seconds

    def send(self):
        """Seconds of the update_weights calls."""
        self.engine = [0.0] * len(ENGINE)
        if self.how == "send_weights":
            return self.send_weights()
        if self.way != "packed":
            return self.update_weights(self.ready)
        seconds = 0.0
        for chunk in self.chunks:
            at, sizes = 0, [t.numel() * 2 for _, t in chunk]
            for (_, t), size in zip(chunk, sizes):
                self.buffer[at:at + size].view(torch.bfloat16).copy_(t.view(-1))
                at += size
            torch.cuda.synchronize()
            seconds += self.update_weights(self.text(
                chunk, ipc_handles_pickled=self.handle, tensor_sizes=sizes, packed=True))
        return seconds


def measure(sender, updates):
    rows, call = [], sender.calls.call
    for i in range(updates + WARM):
        t = [time.perf_counter()]
        sender.prepare()
        t.append(time.perf_counter())
        call("pause")
        t.append(time.perf_counter())
        call("start_weight_update")
        transfer = sender.send()
        call("finish_weight_update", json.dumps({"weight_version": str(i)}).encode())
        t.append(time.perf_counter())
        call("resume")
        t.append(time.perf_counter())
        rows.append((t[1] - t[0], transfer, t[3] - t[2], t[4] - t[1], *sender.engine))
    return list(zip(*rows))


def report(way, columns, total, floor):
    """Returns update_weights' share of the device copy's rate."""
    for name, times in zip(("preparation", "update_weights", "start to finish", "pause to resume"),
                           columns):
        p50, p95 = percentiles(times[WARM:])
        print(f"#   {way + ', ' + name:43} {p50 * 1e3:8.2f} ms p50 {p95 * 1e3:8.2f} ms p95 "
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
            print(f"#   {'device copy':43} {floor[0] * 1e3:8.2f} ms p50 {floor[1] * 1e3:8.2f} ms p95 "
                  f"{total / floor[0] / 1e9:8.1f} GB/s")
            Http(server).call("init_weight_transfer_engine", b'{"init_info": {}}')
            for way in WAYS:
                ratios[way] = report(", ".join(way), measure(Sender(server, tensors, *way), updates),
                                     total, floor[0])
        finally:
            server.stop()
    return ratios


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tap", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--digests", choices=("off", "on", "both"), default="both")
    parser.add_argument("--updates", type=int, default=20)
    args = parser.parse_args()
    ratios = {}
    for small in [True] if args.small else [False] if args.large else [False, True]:
        for off in {"off": [True], "on": [False], "both": [True, False]}[args.digests]:
            try:
                ratios[small, off] = run(SMALL if small else LARGE,
                                         ["--no-weight-digests"] if off else [], args.updates)
            except Exception as error:
                print(f"# {'small' if small else 'large'}, digests {'off' if off else 'on'}: {error!r}")
                ratios[small, off] = {way: 0.0 for way in WAYS}
    if args.tap:
        for (small, off), by_way in ratios.items():
            for way, ratio in by_way.items():
                what = f"{'0.6B' if small else '8B'}, digests {'off' if off else 'on'}, {', '.join(way)}"
                print(f"{'ok' if ratio > 0 else 'not ok'} - ipc_update: {what}: {ratio:.2f}")
    sys.exit(0 if all(ratio > 0 for by_way in ratios.values() for ratio in by_way.values()) else 1)
