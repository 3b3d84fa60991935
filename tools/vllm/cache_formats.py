"""Prints what vLLM says of cache types and attention backends: packages/plan/fixtures/vllm-cache-formats.json.

Run: PYTHONPATH=~/.cache/kv-peer/vllm33 ~/.cache/kv-peer/vv/bin/python tools/vllm/cache_formats.py
A backend that cannot be imported on this machine is left out."""
import contextlib
import io
import json
import sys
from typing import get_args

import torch
import vllm
from vllm.config.cache import CacheDType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

KV_HEADS = 4


def head_slots():
    """By name of a backend: slots of a block of four KV heads. Fewer than four hold the K, or the V, of all heads."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=KV_HEADS, head_size=128, dtype=torch.bfloat16)
    slots = {}
    for backend in AttentionBackendEnum:
        try:
            found = backend.get_class()
            slots[found.get_name()] = found.customize_spec(spec).num_heads
        except (ImportError, RuntimeError, ValueError, AttributeError) as error:
            print(f"{backend.name} is left out: {error}", file=sys.stderr)
    return slots


with contextlib.redirect_stdout(io.StringIO()):
    slots = head_slots()
print(json.dumps({
    "vllm": vllm.__version__,
    "cacheDtypes": {name: get_kv_quant_mode(name).name for name in get_args(CacheDType)},
    "kvHeads": KV_HEADS,
    "headSlots": slots,
}, indent=2))
