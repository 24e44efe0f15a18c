#!/usr/bin/env python3
"""NCCL updates of a real cluster (--device cuda-store on GPU 0) by a PyTorch trainer on GPU 1, and
what becomes of the cluster when that trainer dies, lies or counts wrongly. TAP.

    nccl_torch.py --find-nccl            prints the libnccl of torch
    nccl_torch.py URL MODEL LIBRARY [NAME...]
"""
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import traceback

import torch

import nccl_trainer as tt

HERE = os.path.dirname(os.path.abspath(__file__))
SILENT_S = 6  # the cluster's --transfer-timeout


def find_nccl():
    """The libnccl that torch has loaded."""
    torch.cuda.nccl.version()
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "libnccl.so" in line:
                return line.split()[-1]
    return "libnccl.so.2"


class Cluster:
    def __init__(self, url, model, library):
        self.url, self.model, self.library = url, model, library

    def digests(self):
        return [r["digest"] for r in tt.get(self.url, "/weight_info")["ranks"]]

    def trainer(self, *flags):
        return subprocess.Popen(
            [sys.executable, os.path.join(HERE, "nccl_trainer.py"), "--url", self.url, "--model",
             self.model, "--gpu", "1", "--nccl-library", self.library, *flags],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def train(self, *flags):
        """A whole run of the trainer; the digests after each update."""
        process = self.trainer(*flags)
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out[-3000:]
        return [d.split() for d in re.findall(r"^digests (.*)$", out, re.M)], out

    def clear(self):
        for path in ("/abort_weight_update", "/resume"):
            with contextlib.suppress(RuntimeError):
                tt.call(self.url, path)


def held(cluster, stage, *flags):
    """A trainer that has come to that stage."""
    process = cluster.trainer("--hold", stage, *flags)
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("holding"):
            return process
    raise AssertionError("the trainer ended: " + "".join(seen)[-3000:])


class Tests:
    def __init__(self, cluster):
        self.c = cluster
        self.loaded = cluster.digests()
        self.changed = None

    MODES = [[], ["--packed", "100000"], ["--packed", "1073741824"],
             ["--packed", "300000", "--in-update"], ["--packed", "1"]]

    def modes(self, modes, *rendezvous):
        """Every way of sending gives the same weights, and the file's own give the file's digest."""
        for mode in modes:
            digests, out = self.c.train(*rendezvous, *mode, "--perturb", "3", "--updates", "3")
            first, second, last = digests
            assert first != self.loaded, "nothing changed"
            self.changed = self.changed or first
            assert first == second == self.changed, f"{mode}: {digests}, not {self.changed}"
            assert last == self.loaded, f"{mode}: {last} instead of {self.loaded}"
            assert "nccl_version" in out, out

    def test_id_in_the_call(self):
        self.modes(self.MODES)

    def test_torchs_store(self):
        self.modes(self.MODES[:3], "--store")

    def recover(self):
        """Whatever happened: a new trainer, a whole update."""
        start = time.time()
        self.c.clear()
        digests, _ = self.c.train("--packed", "100000")
        assert digests == [self.loaded], digests
        print(f"# recovered in {time.time() - start:.1f} s")

    def kill_at(self, stage, *flags):
        process = held(self.c, stage, *flags)
        process.send_signal(signal.SIGKILL)
        process.wait()
        start = time.time()
        # the call that is under way has to end by itself
        while time.time() - start < 5 * SILENT_S:
            info = tt.get(self.c.url, "/weight_info")
            states = {r["state"] for r in info["ranks"]}
            if not states & {"INITIALISING", "RECEIVING", "initialising", "receiving"}:
                break
            time.sleep(0.2)
        print(f"# {stage}: {states} after {time.time() - start:.1f} s")
        self.recover()

    def test_killed_in_rendezvous(self):
        self.kill_at("rendezvous")

    def test_killed_in_rendezvous_over_the_store(self):
        self.kill_at("rendezvous", "--store")

    def test_killed_idle(self):
        self.kill_at("idle")

    def test_killed_in_a_broadcast(self):
        self.kill_at("broadcast")

    def test_killed_in_a_packed_broadcast(self):
        self.kill_at("broadcast", "--packed", "100000")

    def test_killed_before_finish(self):
        self.kill_at("finish")

    def test_other_sizes_than_announced(self):
        process = self.c.trainer("--lie", "--packed", "100000")
        out, _ = process.communicate(timeout=120)
        assert process.returncode != 0 and "/update_weights" in out, out[-3000:]
        print("#", out.strip().splitlines()[-1][:300])
        self.recover()

    def test_wrong_world_size(self):
        process = self.c.trainer("--world-size", "3")
        try:
            out, _ = process.communicate(timeout=4 * SILENT_S)
            print("#", out.strip().splitlines()[-1][:300])
            assert process.returncode != 0, out
        except subprocess.TimeoutExpired:
            process.kill()  # its own NCCL waits for ever; ours must not
        self.recover()

    def test_the_status_page_answers_while_an_update_blocks(self):
        process = held(self.c, "broadcast")
        start = time.time()
        assert tt.get(self.c.url, "/weight_info")["ranks"]
        assert time.time() - start < 2
        process.kill()
        process.wait()
        self.recover()


def run(url, model, library, wanted):
    print(f"# torch {torch.__version__}, libnccl {library}")
    cluster = Cluster(url, model, library)
    tests = Tests(cluster)
    done = failed = 0
    names = [n for n in dir(Tests) if n.startswith("test_")]
    for name in (n for n in names if not wanted or any(w in n for w in wanted)):
        start = time.time()
        done += 1
        try:
            getattr(tests, name)()
            print(f"ok {done} - {name} ({time.time() - start:.1f} s)", flush=True)
        except Exception:
            failed += 1
            print(f"not ok {done} - {name} ({time.time() - start:.1f} s)")
            print("\n".join("# " + line for line in traceback.format_exc().splitlines()), flush=True)
            cluster.clear()
    print(f"1..{done}")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--find-nccl"]:
        print(find_nccl())
    else:
        sys.exit(run(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
