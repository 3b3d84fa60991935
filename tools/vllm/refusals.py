"""Runs vLLM's own check of a peer's handshake on pairs. Reads one pair as JSON per line (`CheckedPair` of @kv/fleet), and writes one line each: null where
vLLM takes the pair, else the message of its exception, "" for an assertion without one. The vLLM is that of PYTHONPATH; no server is started."""
import json
import logging
import os
import sys
import types

logging.disable(logging.CRITICAL)
from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo, TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker, push_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode


class Pull(base_worker.NixlBaseConnectorWorker):
    __abstractmethods__ = frozenset()

    def __del__(self):
        pass


class Push(push_worker.NixlPushConnectorWorker):
    __abstractmethods__ = frozenset()

    def __del__(self):
        pass


def metadata(side):
    regions = len(side["blockLengthsBytes"])
    return NixlAgentMetadata(
        engine_id="remote", agent_metadata=b"", kv_caches_base_addr=[0] * regions, device_id=0, num_blocks=8, block_lens=side["blockLengthsBytes"],
        block_strides=side["blockStridesBytes"], kv_cache_layout=side["layout"], block_size=side["blockSize"], ssm_sizes=(0, 0),
        attn_backend_name=side["attentionBackend"], physical_blocks_per_logical_kv_block=side["kernelsPerLogical"], region_num_blocks=[8] * regions,
        region_group_ids=side["regionGroupIds"], region_names=side.get("regionNames"), region_mem_types=["DRAM"] * regions, dcp_size=side["dcpSize"])


def layer_specs(cache_dtype):
    if not cache_dtype.startswith("nvfp4"):
        return {}
    spec = object.__new__(AttentionSpec)
    object.__setattr__(spec, "kv_quant_mode", KVQuantMode.NVFP4)
    return {"layer": spec}


def check(pair):
    local, remote = pair["local"], pair["remote"]
    topology = TransferTopology(
        tp_rank=0, tp_size=local["tpSize"], block_size=local["blockSize"], engine_id="local", is_mla=pair["isMla"], is_mamba=pair["hasStates"],
        total_num_kv_heads=pair["numKvHeads"], attn_backends=[], dcp_size=local["dcpSize"], tensor_shape=None)
    topology.register_remote_engine("remote", EngineTransferInfo(
        remote_tp_size=remote["tpSize"], remote_block_len=remote["blockLengthsBytes"][0], remote_block_size=remote["blockSize"],
        remote_physical_blocks_per_logical=remote["kernelsPerLogical"], remote_dcp_size=remote["dcpSize"]))
    regions = len(local["blockLengthsBytes"])
    draft = pair["draftKvHeads"]
    space = types.SimpleNamespace
    worker = object.__new__(Push if pair["isPush"] else Pull)
    worker.__dict__.update(
        transfer_topo=topology, tp_rank=0, world_size=local["tpSize"], dcp_size=local["dcpSize"], _has_mamba=pair["hasStates"], use_mla=pair["isMla"],
        region_group_ids=local["regionGroupIds"], dst_region_group_ids={"remote": remote["regionGroupIds"]}, region_names=local.get("regionNames"),
        _physical_blocks_per_logical_kv_block=local["kernelsPerLogical"], use_host_buffer=pair["usesHostBuffer"], kv_cache_layout=local["layout"],
        host_buffer_kv_cache_layout=local["layout"], backend_name=local["attentionBackend"], block_len_per_layer=local["blockLengthsBytes"],
        vllm_config=space(cache_config=space(enable_prefix_caching=pair["prefixCaching"])),
        kv_transfer_config=space(enable_permute_local_kv=pair["permutes"]), _is_hma_required=pair["needsHma"], enable_permute_local_kv=False,
        enable_heterogeneous_attn_post_process=False, _transfer_layer_region_indices=(), _transfer_layer_names=(), dst_num_blocks={"remote": 8},
        _region_is_mla=[pair["isMla"]] * regions, region_num_blocks=[8] * regions, num_regions=regions, region_mem_types=["DRAM"] * regions, device_id=0,
        _head_sharded_draft_regions=set() if draft is None else {regions - 1}, _head_sharded_draft_kv_heads=draft, draft_tp_mappings={},
        _layer_specs=layer_specs(pair["cacheDtype"]), _is_csa_linear=False)
    try:
        worker._validate_remote_agent_handshake(metadata(remote), remote["tpSize"], remote["dcpSize"])
    except (AttributeError, TypeError, KeyError):
        raise
    except Exception as refused:
        return str(refused)
    return None


for line in sys.stdin:
    print(json.dumps(check(json.loads(line))))
sys.stdout.flush()
os._exit(0)
