"""examples/python/lockstep_trainer.py with torch CUDA tensors, as a user would call it: TAP.

python_trainer.py ENDPOINT BACKEND DEVICE DIRECTORY DIGEST DIRECTORY DIGEST: sends the checkpoints in
turn, packed and not, by each way to meet, and compares the digest that every rank then has.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples/python"))
import lockstep_trainer as lockstep
import torch
from safetensors.torch import load_file

endpoint, backend, device = sys.argv[1], sys.argv[2], int(sys.argv[3])
sets = list(zip(sys.argv[4::2], sys.argv[5::2]))
cases = [{"packed": False}, {"packed": True, "packed_buffer_size_bytes": 1 << 16}]
if backend == "nccl":
    cases.append({"packed": True, "store": True})
torch.cuda.set_device(device)
library = {"library": os.environ["LK_TEST_NCCL_LIBRARY"]} if backend == "nccl" else {}
n = bad = 0
for case in cases:
    trainer = lockstep.trainer_init({"endpoint": endpoint, "backend": backend, "device": device,
                                     **library, **case})
    for directory, digest in sets:
        tensors = load_file(os.path.join(directory, "model.safetensors"), device=f"cuda:{device}")
        version = f"step-{n}"
        with trainer.update(version=version, pause="keep"):
            lockstep.trainer_send_weights(trainer, tensors.items(), packed=case["packed"])
        ranks = trainer.weight_info()["ranks"]
        good = trainer.digest(tensors.items()) == digest and all(r["digest"] == digest and r["version"] == version for r in ranks)
        n += 1
        bad += not good
        print(f"{'ok' if good else 'not ok'} {n} - {backend} {case}: {ranks[0]['digest']}")
    trainer.close()
print(f"1..{n}")
sys.exit(bad > 0)
