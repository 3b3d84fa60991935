"""Writes the tiny Qwen3 that vLLM and the demo's engine both run: random weights from seed 1234 and a whitespace tokenizer.
usage: make_tiny_model.py FOLDER. It also writes hf_ref.json, the tokens that transformers generates: an independent reference."""
import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 1024
folder = Path(sys.argv[1])

torch.manual_seed(1234)
config = Qwen3Config(
    vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=32, max_position_embeddings=2048, rope_theta=10000.0, rms_norm_eps=1e-6,
    tie_word_embeddings=False, initializer_range=0.08, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    attention_bias=False, use_cache=True, dtype="float32",
)
model = Qwen3ForCausalLM(config).to(torch.float32).eval()
model.save_pretrained(folder, safe_serialization=True)

words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t1", eos_token="t2", pad_token="t0", unk_token="t0").save_pretrained(folder)

prompt = [(7 * i * i + 3 * i + 11) % 1000 + 10 for i in range(100)]
with torch.no_grad():
    generated = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None)[0, 100:].tolist()
(folder / "hf_ref.json").write_text(json.dumps({"prompt": prompt, "hf_greedy16": generated}))
