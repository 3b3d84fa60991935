"""Times vLLM 0.33's compute_tp_mapping over a grid of pairs, in one process. usage: mapping.py ROUNDS, with vLLM's Python tree on PYTHONPATH.
Prints {"calls": per round, "ms": [per round]}. The grid is that of tools/bench/mapping.ts."""
import json
import logging
import sys
import time

logging.disable(logging.INFO)
from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo, TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
from vllm.v1.kv_cache_interface import FullAttentionSpec

SIZES = (1, 2, 4, 8)
cases = []
for local in SIZES:
    for remote in SIZES:
        for heads in SIZES:
            for rank in range(local):
                topology = TransferTopology(
                    tp_rank=rank, tp_size=local, block_size=16, engine_id="local", is_mla=False, is_mamba=False,
                    total_num_kv_heads=heads, attn_backends=[], dcp_size=1, tensor_shape=None,
                )
                topology.register_remote_engine(
                    "remote",
                    EngineTransferInfo(
                        remote_tp_size=remote, remote_block_len=1024, remote_block_size=16,
                        remote_physical_blocks_per_logical=1, remote_dcp_size=1,
                    ),
                )
                try:
                    compute_tp_mapping(topology, remote, (FullAttentionSpec,), 1)
                except Exception:
                    continue
                cases.append((topology, remote))

times = []
for _ in range(int(sys.argv[1])):
    begun = time.perf_counter()
    for topology, remote in cases:
        compute_tp_mapping(topology, remote, (FullAttentionSpec,), 1)
    times.append((time.perf_counter() - begun) * 1e3)
print(json.dumps({"calls": len(cases), "ms": times}))
