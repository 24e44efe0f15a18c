#!/usr/bin/env python3
"""Writes a Llama-architecture GGUF file with a byte-level BPE vocabulary (SmolLM2, for one) out as a
Hugging Face directory: config.json, generation_config.json, model.safetensors (bfloat16),
tokenizer.json, tokenizer_config.json.

    pip install gguf numpy
    python3 gguf_to_hf.py model.gguf OUT_DIR

GGUF stores the rows of Llama's q and k projections permuted (pairs of a rotation side by side);
Hugging Face keeps the two halves of a head apart. The rows are put back here.
"""
import json
import os
import struct
import sys

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

PRE_TOKENIZERS = {
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
    "gpt-2": [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}],
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name):
    fixed = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
             "output.weight": "lm_head.weight"}
    if name in fixed:
        return fixed[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def unpermute(w, heads):
    """(heads * head_dim, in): interleaved rotation pairs back to two halves per head."""
    half = w.shape[0] // heads // 2
    return w.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(w.shape)


def to_bf16(x):
    """float32 -> uint16, round to nearest even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path, tensors):
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(data.shape), "data_offsets": [offset, offset + data.nbytes]}
        offset += data.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)))
        f.write(text)
        for data in tensors.values():
            f.write(data.tobytes())


def write_tokenizer(out, field):
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    special = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True} for i, (t, k) in enumerate(zip(tokens, types)) if k == 3]
    pre = field("tokenizer.ggml.pre")
    if field("tokenizer.ggml.model") != "gpt2" or pre not in PRE_TOKENIZERS:
        sys.exit(f"tokenizer {field('tokenizer.ggml.model')}/{pre} is not known to this script")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "vocab": {t: i for i, t in enumerate(tokens)}, "merges": field("tokenizer.ggml.merges")},
    }
    with open(os.path.join(out, "tokenizer.json"), "w", encoding="utf-8") as f:
        json.dump(tokenizer, f, ensure_ascii=False)
    with open(os.path.join(out, "tokenizer_config.json"), "w", encoding="utf-8") as f:
        json.dump({"add_bos_token": False, "eos_token": tokens[field("tokenizer.ggml.eos_token_id")],
                   "chat_template": field("tokenizer.chat_template")}, f, ensure_ascii=False, indent=2)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    reader, out = GGUFReader(sys.argv[1]), sys.argv[2]
    field = lambda name: reader.fields[name].contents()
    if field("general.architecture") != "llama":
        sys.exit(f"architecture {field('general.architecture')} is not llama")
    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    hidden = field("llama.embedding_length")
    os.makedirs(out)
    tensors = {}
    for t in reader.tensors:
        w = dequantize(t.data, t.tensor_type)
        if ".attn_q." in t.name:
            w = unpermute(w, heads)
        elif ".attn_k." in t.name:
            w = unpermute(w, kv_heads)
        tensors[hf_name(t.name)] = to_bf16(w)
    write_safetensors(os.path.join(out, "model.safetensors"), dict(sorted(tensors.items())))
    eos = field("tokenizer.ggml.eos_token_id")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"), "eos_token_id": eos, "hidden_act": "silu",
        "head_dim": hidden // heads, "hidden_size": hidden, "intermediate_size": field("llama.feed_forward_length"),
        "max_position_embeddings": field("llama.context_length"), "mlp_bias": False,
        "num_attention_heads": heads, "num_hidden_layers": field("llama.block_count"),
        "num_key_value_heads": kv_heads, "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_parameters": {"rope_theta": field("llama.rope.freq_base"), "rope_type": "default"},
        "tie_word_embeddings": "lm_head.weight" not in tensors, "dtype": "bfloat16",
        "vocab_size": field("llama.vocab_size"),
    }
    for name, value in (("config.json", config), ("generation_config.json", {"eos_token_id": eos})):
        with open(os.path.join(out, name), "w", encoding="utf-8") as f:
            json.dump(value, f, indent=2)
    write_tokenizer(out, field)
    print(out)


if __name__ == "__main__":
    main()
