"""The Python trainer with numpy arrays, over tcp and shm, to a cluster of two ranks: every rank ends
with the digest of what was sent. Starts its own clusters; LK_BUILD_DIR is the build."""

import json
import os
import struct
import subprocess
import sys
import tempfile
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


def digests(url):
    with urllib.request.urlopen(url + "/weight_info", timeout=30) as reply:
        return [rank["digest"] for rank in json.load(reply)["ranks"]]


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


def test_numpy_over_tcp(_url=None):
    send("tcp")


def test_numpy_over_shm(_url=None):
    send("shm")
