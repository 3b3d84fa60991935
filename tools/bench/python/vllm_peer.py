"""vLLM 0.33's functions between a request's block ids and the call into NIXL, and its TP mapping. Needs vLLM's Python tree on PYTHONPATH.
As a program it times them: commands are JSON lines on stdin, answers JSON lines on stdout, {"ms": one for each of `times`}:
  {"do": "prepare", "regions": r, "blocks": n, "localIds": [...], "remoteIds": [...], "times": t}   both sides' ids, the prefix cut, as _read_blocks does it
  {"do": "mapping", "cases": [[rank, tp size, remote tp size, heads], ...], "times": t}
"""
import json
import logging
import os
import sys
import time
import types

logging.disable(logging.INFO)
import vllm.v1.kv_cache_interface as interface
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

Worker = next(
    value for name, value in vars(base_worker).items() if isinstance(value, type) and hasattr(value, "_compute_desc_ids")
)


def worker(regions, blocks):
    """A worker with only the fields that these functions read."""
    self = types.SimpleNamespace(
        _has_mamba=False, _conv_decomp=None, _ssm_region_indices=[], _transfer_layer_group_ids=(), _transfer_layer_region_indices=(),
        num_regions=regions, block_len_per_layer=[1024] * regions, block_stride_per_layer=[1024] * regions, region_group_ids=[0] * regions,
        _uses_region_group_mapping=False, _group_spec_types=(interface.FullAttentionSpec,), _scratch_region_indices=[], _ple_group_index=None,
        _ple_region_index=None, _region_is_mla=[False] * regions, region_num_blocks=[blocks] * regions, device_id=0, transfer_topo=object(),
        use_mla=False, _mamba_ssm_size=(0, 0), _logical_num_blocks=blocks, _physical_blocks_per_logical_kv_block=1, tp_rank=0,
        _head_sharded_draft_regions=set(), draft_tp_mappings={}, _ple_block_len=None,
    )
    for name in ("_compute_desc_ids", "_logical_to_kernel_block_ids", "_apply_prefix_caching"):
        setattr(self, name, types.MethodType(getattr(Worker, name), self))
    return self


def ids_of(self, ids, regions, blocks):
    return self._compute_desc_ids(
        block_ids=[ids], dst_num_blocks=blocks, block_size_ratio=None, physical_blocks_per_logical=1,
        region_num_blocks=[blocks] * regions, region_group_ids=[0] * regions, uses_region_group_mapping=False,
    )


def read_ids(self, local, remote, regions, blocks):
    """The descriptor ids of both sides, without the blocks of a prefix hit."""
    mine, theirs = self._apply_prefix_caching(
        decode_block_ids=[local], prefill_block_ids=[remote], decode_physical_per_logical=1, prefill_physical_per_logical=1
    )
    there = ids_of(self, theirs[0], regions, blocks)
    return ids_of(self, mine[0], regions, blocks), there


def topology_of(rank, size, remote, heads):
    from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo, TransferTopology

    topology = TransferTopology(
        tp_rank=rank, tp_size=size, block_size=16, engine_id="local", is_mla=False, is_mamba=False,
        total_num_kv_heads=heads, attn_backends=[], dcp_size=1, tensor_shape=None,
    )
    info = EngineTransferInfo(
        remote_tp_size=remote, remote_block_len=1024, remote_block_size=16, remote_physical_blocks_per_logical=1, remote_dcp_size=1
    )
    topology.register_remote_engine("remote", info)
    return topology


def work_of(command):
    if command["do"] == "prepare":
        regions, blocks = command["regions"], command["blocks"]
        self = worker(regions, blocks)
        return lambda: read_ids(self, command["localIds"], command["remoteIds"], regions, blocks)
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping

    cases = [(topology_of(*case), case[2]) for case in command["cases"]]
    specs = (interface.FullAttentionSpec,)
    return lambda: [compute_tp_mapping(topology, remote, specs, 1) for topology, remote in cases]


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        work = work_of(request)
        times = []
        for _ in range(request["times"]):
            begun = time.perf_counter()
            work()
            times.append((time.perf_counter() - begun) * 1e3)
        print(json.dumps({"ms": times}), file=answers, flush=True)
