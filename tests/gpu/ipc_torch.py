"""A trainer in torch on the engine's GPU, speaking what vLLM's own does: handles that torch pickles,
over HTTP. ipc_torch.py URL MODEL MODEL MODEL: checkpoints, each with its digest in MODEL/digest; the
engine has loaded the first. TAP on standard output."""

import base64
import glob
import json
import os
import pickle
import struct
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request

import torch
from torch.multiprocessing.reductions import reduce_tensor

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}
UPDATES = 40
url = sys.argv[1]


def load(directory):
    """Every tensor of the checkpoint, on the GPU, in the file's order."""
    out = []
    for path in sorted(glob.glob(directory + "/*.safetensors")):
        data = open(path, "rb").read()
        (size,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                start, end = (8 + size + x for x in entry["data_offsets"])
                raw = torch.frombuffer(bytearray(data[start:end]), dtype=torch.uint8)
                out.append((name, raw.view(DTYPES[entry["dtype"]]).view(entry["shape"]).cuda()))
    return out


def call(path, body=None, timeout=60):
    data = json.dumps(body).encode() if body is not None else b""
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def must(path, body=None):
    status, reply = call(path, body)
    assert status == 200, f"{path}: {status} {reply}"
    return reply


def ranks():
    with urllib.request.urlopen(url + "/weight_info") as reply:
        return json.load(reply)["ranks"]


def digest():
    return ranks()[0]["digest"]


UUID = str(torch.cuda.get_device_properties(0).uuid)


def describe(tensors):
    return {
        "names": [name for name, _ in tensors],
        "dtype_names": [str(t.dtype).split(".")[-1] for _, t in tensors],
        "shapes": [list(t.shape) for _, t in tensors],
    }


def pickled(handles):
    return base64.b64encode(pickle.dumps(handles)).decode()


def plain_info(tensors, with_function=False):
    handles = [{UUID: reduce_tensor(t) if with_function else reduce_tensor(t)[1]} for _, t in tensors]
    return {"update_info": {**describe(tensors), "ipc_handles_pickled": pickled(handles)}}


def send_plain(tensors, **options):
    must("/update_weights", plain_info(tensors, **options))


class Packer:
    """One buffer, exported once, filled chunk by chunk."""

    def __init__(self, size):
        self.buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
        self.handles = pickled({UUID: reduce_tensor(self.buffer)[1]})

    def flush(self, chunk):
        torch.cuda.current_stream().synchronize()
        sizes = [t.numel() * t.element_size() for _, t in chunk]
        info = {**describe(chunk), "ipc_handles_pickled": self.handles, "tensor_sizes": sizes}
        must("/update_weights", {"update_info": info})

    def send(self, tensors):
        chunk, used = [], 0
        for name, tensor in tensors:
            raw = tensor.contiguous().view(-1).view(torch.uint8)
            if used + raw.numel() > self.buffer.numel() and chunk:
                self.flush(chunk)
                chunk, used = [], 0
            self.buffer[used : used + raw.numel()].copy_(raw)
            chunk.append((name, tensor))
            used += raw.numel()
        self.flush(chunk)


def session(send, version):
    must("/pause?mode=keep")
    must("/start_weight_update")
    send()
    must("/finish_weight_update", {"weight_version": version})
    must("/resume")


def init(packed):
    must("/init_weight_transfer_engine", {"init_info": {"packed": packed}})


models = [load(directory) for directory in sys.argv[2:5]]
wanted = [open(directory + "/digest").read().strip() for directory in sys.argv[2:5]]


def test_1_per_tensor():
    init(False)
    session(lambda: send_plain(models[1]), "plain")
    assert digest() == wanted[1]
    session(lambda: send_plain(models[2], with_function=True), "pairs")
    assert digest() == wanted[2]


def test_2_parameters_views_and_dtypes():
    """Parameters, views into a larger storage, float32 and float16 masters where they are exact."""
    init(False)
    big = torch.cat([t.reshape(-1) for _, t in models[0]])
    views, at = [], 0
    for name, tensor in models[0]:
        view = big[at : at + tensor.numel()].view(tensor.shape)
        views.append((name, torch.nn.Parameter(view, requires_grad=False)))
        at += tensor.numel()
    session(lambda: send_plain(views), "views")
    assert digest() == wanted[0]
    wide = [(name, t.float()) for name, t in models[1]]
    session(lambda: send_plain(wide), "float32")
    assert digest() == wanted[1]


def test_3_packed():
    init(True)
    most = max(t.numel() * t.element_size() for _, t in models[1])
    for extra in (1 << 20, 3, 0):
        packer = Packer(most + extra)
        session(lambda: packer.send(models[1 if extra else 2]), f"packed {extra}")
        assert digest() == wanted[1 if extra else 2]


def used_on_gpu():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def engine_rss():
    total = 0
    for path in glob.glob("/proc/[0-9]*/comm"):
        try:
            if open(path).read().strip() == "lockstep-engine":
                status = open(os.path.dirname(path) + "/status").read()
                total += int(status.split("VmRSS:")[1].split()[0])
        except OSError:
            pass
    return total


def figures():
    counts = len(glob.glob("/dev/shm/torch_*"))
    return used_on_gpu(), torch.cuda.memory_reserved(), engine_rss(), counts


def test_4_forty_updates_leave_nothing():
    for packed in (False, True):
        init(packed)
        packer = Packer(1 << 20) if packed else None
        for i in range(UPDATES + 1):
            which = 1 + i % 2
            if i == 8:
                before = figures()
            session(lambda: packer.send(models[which]) if packed else send_plain(models[which]), str(i))
            assert digest() == wanted[which], i
        torch.cuda.ipc_collect()
        after = figures()
        print(f"# packed {packed}: GPU {before[0] >> 20} -> {after[0] >> 20} MB, trainer's cache "
              f"{before[1] >> 20} -> {after[1] >> 20} MB, engine {before[2]} -> {after[2]} kB, "
              f"files of counts {before[3]} -> {after[3]}")
        assert after[0] <= before[0] and after[1] <= before[1] and after[3] <= before[3]
        assert after[2] <= before[2] + 2048


def test_5_the_receiver_has_copied_before_it_answers():
    """What is written behind the answer does not arrive."""
    init(False)
    copies = [(name, t.clone()) for name, t in models[1]]

    def send():
        send_plain(copies)
        for _, t in copies:
            t.fill_(7)
        torch.cuda.synchronize()

    session(send, "overwritten")
    assert digest() == wanted[1]


def test_6_work_in_flight_is_waited_for():
    """The trainer does not synchronise: the event in the handle has to do."""
    init(False)
    copies = [(name, torch.empty_like(t)) for name, t in models[2]]
    big = torch.empty(1 << 28, dtype=torch.float32, device="cuda")

    def send():
        for _ in range(50):
            big.add_(1)  # tens of milliseconds of work before the copies
        for (_, target), (_, source) in zip(copies, models[2]):
            target.copy_(source)
        send_plain(copies)

    session(send, "in flight")
    assert digest() == wanted[2]


def test_7_refusals_come_first():
    init(False)
    must("/start_weight_update")
    before = digest()
    renamed = [("model.nrom.weight", models[1][0][1])] + models[1][1:]
    status, reply = call("/update_weights", plain_info(renamed))
    assert status == 400 and "model.nrom.weight" in json.dumps(reply), (status, reply)
    info = plain_info(models[1])
    info["update_info"]["ipc_handles_pickled"] = pickled([{"x": 1}] * len(models[1]))
    status, reply = call("/update_weights", info)
    assert status == 400 and UUID in json.dumps(reply), (status, reply)
    info["update_info"]["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(os.system)).decode()
    status, reply = call("/update_weights", info)
    assert status == 400, (status, reply)
    assert digest() == before
    must("/abort_weight_update")
    session(lambda: send_plain(models[0]), "after refusals")
    assert digest() == wanted[0]


def other_trainer(code, **env):
    """Another process, which may end as it likes."""
    argv = [sys.executable, __file__, url, *sys.argv[2:5], "--run", code]
    return subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)


def test_8_expandable_segments_are_refused():
    code = "init(False); must('/start_weight_update'); print(call('/update_weights', plain_info(models[1])))"
    done = other_trainer(code, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert "expandable_segments" in done.stdout and "(400" in done.stdout, done
    print("#", done.stdout.strip()[:300])
    must("/abort_weight_update")


def test_9_a_trainer_that_dies():
    """In the middle of a session; and with a call out whose event it will never record."""
    code = "init(False); must('/start_weight_update'); send_plain(models[1]); os._exit(9)"
    assert other_trainer(code).returncode == 9
    must("/abort_weight_update")
    init(False)
    session(lambda: send_plain(models[2]), "after a death")
    assert digest() == wanted[2]
    assert not ranks()[0]["dirty"]


def main():
    failed = 0
    for name, test in sorted(globals().items()):
        if not name.startswith("test_"):
            continue
        started = time.time()
        try:
            test()
            print(f"ok - ipc: {name} ({time.time() - started:.1f} s)")
        except Exception:
            failed += 1
            print(f"not ok - ipc: {name}")
            for line in traceback.format_exc().splitlines():
                print("#", line)
            call("/abort_weight_update")
            call("/resume")
    return failed != 0


if __name__ == "__main__":
    if "--run" in sys.argv:
        exec(sys.argv[sys.argv.index("--run") + 1])
    else:
        sys.exit(main())
