"""The Python trainer with numpy arrays, over tcp and shm, to a cluster of two ranks: every rank ends
with the digest of what was sent. Starts its own clusters; LK_BUILD_DIR is the build."""

import json
import os
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import numpy

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "../..")
LOCKSTEP = os.path.join(ROOT, "deploy/lockstep")
os.environ.setdefault("LOCKSTEP_TRAINER_LIBRARY", os.path.join(
    os.environ["LK_BUILD_DIR"], "transfer/trainer/liblockstep_trainer.so"))
sys.path.insert(0, os.path.join(ROOT, "examples/python"))

import lockstep_trainer as lockstep  # noqa: E402


def make_model(path, seed):
    subprocess.run([LOCKSTEP, "make-model", "--arch", "qwen3_moe", "--seed", str(seed), "--out", path],
                   check=True, stdout=subprocess.DEVNULL)


def tensors_of(path):
    """(name, float32 array) of a checkpoint in bfloat16."""
    for name in sorted(os.listdir(path)):
        if not name.endswith(".safetensors"):
            continue
        with open(os.path.join(path, name), "rb") as file:
            data = file.read()
        size = struct.unpack("<Q", data[:8])[0]
        for tensor, entry in json.loads(data[8:8 + size]).items():
            if tensor == "__metadata__":
                continue
            assert entry["dtype"] == "BF16", entry
            first, last = (8 + size + at for at in entry["data_offsets"])
            halves = numpy.frombuffer(data[first:last], dtype="<u2").astype(numpy.uint32)
            yield tensor, (halves << 16).view(numpy.float32).reshape(entry["shape"])


def ranks_of(url):
    with urllib.request.urlopen(url + "/weight_info", timeout=30) as reply:
        return json.load(reply)["ranks"]


def digests(url):
    return [rank["digest"] for rank in ranks_of(url)]


def send(backend):
    with tempfile.TemporaryDirectory() as directory:
        make_model(directory + "/old", 1)
        make_model(directory + "/new", 2)
        endpoint = f"ipc://{directory}/trainer"
        server = subprocess.Popen(
            [LOCKSTEP, "serve", directory + "/old", "--port", "0", "--device", "cpu",
             "--data-parallel-size", "2", "--enable-expert-parallel", "--trainer-endpoint", endpoint,
             "--weight-transfer-config", json.dumps({"backend": backend})],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            url = server.stdout.readline().split(" on ")[1].strip()
            tensors = dict(tensors_of(directory + "/new"))
            with lockstep.trainer_init({"endpoint": endpoint, "backend": backend}) as trainer:
                want = trainer.digest(tensors.items())
                assert want not in digests(url)
                with trainer.update(version="step-1", pause="keep"):
                    assert trainer.send_weights(tensors.items()) == len(tensors)
                assert digests(url) == [want, want]
                assert trainer.weight_info()["weight_version"] == "step-1"
                try:
                    with trainer.update(version="step-2"):
                        trainer.send_weights([("no.such.tensor", numpy.zeros(4, numpy.float32))])
                    raise AssertionError("a tensor that the model has not was taken")
                except lockstep.LockstepError as error:
                    assert "no.such.tensor" in str(error), error
                assert digests(url) == [want, want]
        finally:
            server.terminate()
            assert server.wait(60) == 0


def engine_of(server, rank):
    with open(f"/proc/{server.pid}/task/{server.pid}/children") as children:
        for pid in children.read().split():
            with open(f"/proc/{pid}/cmdline") as line:
                if f"--data-parallel-rank\0{rank}\0" in line.read():
                    return int(pid)
    raise AssertionError(f"no engine {rank}")


def is_paused(url):
    while True:  # until the group has formed anew
        try:
            with urllib.request.urlopen(url + "/is_paused", timeout=30) as reply:
                return json.load(reply)["is_paused"]
        except urllib.error.HTTPError as error:
            assert error.code == 503, error


def test_next_update_after_a_rank_is_gone(_url=None):
    """Whether it dies between two updates or in the middle of one, the next one just works."""
    with tempfile.TemporaryDirectory() as directory:
        make_model(directory + "/old", 1)
        endpoint = f"ipc://{directory}/trainer"
        server = subprocess.Popen(
            [LOCKSTEP, "serve", directory + "/old", "--port", "0", "--device", "null",
             "--data-parallel-size", "3", "--trainer-endpoint", endpoint, "--engine-restarts", "0",
             "--data-parallel-min-size", "1", "--weight-transfer-config", '{"backend": "tcp"}'],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            url = server.stdout.readline().split(" on ")[1].strip()
            tensors = dict(tensors_of(directory + "/old"))
            with lockstep.trainer_init({"endpoint": endpoint}) as trainer:
                for ranks, lost in ((3, 1), (2, 0), (1, None)):
                    for name in tensors:
                        tensors[name] = tensors[name] + 1
                    with trainer.update(version=f"step-{ranks}"):
                        trainer.send_weights(tensors.items())
                    assert digests(url) == ranks * [trainer.digest(tensors.items())]
                    assert trainer.call("get_world_size")["world_size"] == ranks
                    if lost == 1:  # in the middle: between two chunks
                        try:
                            with trainer.update():
                                names = list(tensors)
                                trainer.send_weights([(names[0], tensors[names[0]])])
                                os.kill(engine_of(server, lost), 9)
                                while True:
                                    trainer.send_weights([(names[1], tensors[names[1]])])
                        except lockstep.LockstepError as error:
                            assert f"engine {lost}" in str(error) or f"rank {lost}" in str(error), error
                            assert "resume" not in str(error), error
                        assert not is_paused(url)
                    elif lost == 0:
                        os.kill(engine_of(server, lost), 9)
                        deadline = time.monotonic() + 20
                        while len(ranks_of(url)) == ranks:  # until everybody knows
                            assert time.monotonic() < deadline
        finally:
            server.terminate()
            assert server.wait(60) == 0


def test_numpy_over_tcp(_url=None):
    send("tcp")


def test_numpy_over_shm(_url=None):
    send("shm")
