"""Writes tiny models with other kinds of KV cache and random weights into PEER_FOLDER, each with the tokenizer of the tiny Qwen3.
usage: make_kind_models.py PEER_FOLDER [KIND…]. Kinds: one-head (fewer KV heads than ranks), window (sliding-window and full-attention layers),
mla (one latent for all heads), hybrid (state-space and attention layers)."""
import shutil
import sys
from pathlib import Path

import torch
import transformers as t

SHARED = dict(vocab_size=1024, hidden_size=256, intermediate_size=512, max_position_embeddings=2048, tie_word_embeddings=False,
              initializer_range=0.08, bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="float32")


def one_head():
    config = t.Qwen3Config(**SHARED, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=1, head_dim=32)
    return t.Qwen3ForCausalLM(config)


def window():
    config = t.Gemma3TextConfig(**SHARED, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=32, sliding_window=64,
                                layer_types=["sliding_attention", "full_attention"] * 2, query_pre_attn_scalar=32)
    return t.Gemma3ForCausalLM(config)


def mla():
    # The CPU kernel supports only the latent sizes of DeepSeek.
    config = t.DeepseekV2Config(**SHARED, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=None,
                                qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=2, num_experts_per_tok=1,
                                first_k_dense_replace=2, moe_intermediate_size=64)
    return t.DeepseekV2ForCausalLM(config)


def hybrid():
    config = t.BambaConfig(**SHARED, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, attn_layer_indices=[1, 3],
                           mamba_n_heads=16, mamba_d_head=32, mamba_n_groups=2, mamba_d_state=32, mamba_d_conv=4, mamba_expand=2)
    return t.BambaForCausalLM(config)


KINDS = {"one-head": one_head, "window": window, "mla": mla, "hybrid": hybrid}
peer = Path(sys.argv[1])
for kind in sys.argv[2:] or KINDS:
    folder = peer / f"tiny-{kind}"
    torch.manual_seed(1234)
    KINDS[kind]().to(torch.float32).eval().save_pretrained(folder, safe_serialization=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (peer / "tiny-qwen3" / name).exists():
            shutil.copy(peer / "tiny-qwen3" / name, folder / name)
    print(kind, sum(file.stat().st_size for file in folder.iterdir()), "bytes")
