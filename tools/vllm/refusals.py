"""Runs vLLM's own checks on pairs: of a peer's handshake, and of the blocks of a request. Reads one pair as JSON per line (`CheckedPair` of @kv/plan/vllm),
and writes one line each: null where vLLM takes the pair, else the message of its exception, "" for an assertion without one. The vLLM is that of
PYTHONPATH; no server is started, and nothing is registered with NIXL."""
import collections
import json
import logging
import os
import sys
import threading
import types

import numpy as np

logging.disable(logging.CRITICAL)
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import pull_worker, push_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, RemoteMeta, ReqMeta
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVQuantMode, MambaSpec

BLOCKS = 8
ENGINE = "remote"
HAS_PLE = "ple_block_len" in NixlAgentMetadata.__dataclass_fields__
space = types.SimpleNamespace


class Pull(pull_worker.NixlPullConnectorWorker):
    __abstractmethods__ = frozenset()

    def __del__(self):
        pass


class Push(push_worker.NixlPushConnectorWorker):
    __abstractmethods__ = frozenset()

    def __del__(self):
        pass


def metadata(side):
    regions = len(side["blockLengthsBytes"])
    names = side.get("regionNames")
    return NixlAgentMetadata(
        engine_id=side.get("engineId", ENGINE), agent_metadata=b"", kv_caches_base_addr=[0] * regions, device_id=0,
        num_blocks=BLOCKS * side["kernelsPerLogical"], block_lens=list(side["blockLengthsBytes"]), block_strides=list(side["blockStridesBytes"]),
        kv_cache_layout=side["layout"], block_size=side["blockSize"], ssm_sizes=(0, 0), attn_backend_name=side["attentionBackend"],
        physical_blocks_per_logical_kv_block=side["kernelsPerLogical"], region_num_blocks=[BLOCKS * side["kernelsPerLogical"]] * regions,
        region_group_ids=list(side["regionGroupIds"]), region_names=names and list(names), region_mem_types=list(side["memoryTypes"]),
        dcp_size=side["dcpSize"], pcp_size=side.get("pcpSize", 1), region_members=[[name] for name in names or []],
        packed_member_layouts={name: tuple(place) for name, place in side.get("packedMembers", {}).items()},
        **({"ple_block_len": side.get("pleBlockLengthBytes")} if HAS_PLE else {}))


def layer_specs(cache_dtype):
    if not cache_dtype.startswith("nvfp4"):
        return {}
    spec = object.__new__(AttentionSpec)
    object.__setattr__(spec, "kv_quant_mode", KVQuantMode.NVFP4)
    return {"layer": spec}


def group_kinds(pair):
    request = pair.get("request")
    groups = len(request["decodeBlocks"]) if request else 1 + max(0, *pair["local"]["regionGroupIds"], *pair["remote"]["regionGroupIds"])
    if pair["hasStates"]:
        return (FullAttentionSpec,) * max(1, groups - 1) + (MambaSpec,)
    return (FullAttentionSpec,) * groups


def worker_of(pair):
    local, remote = pair["local"], pair["remote"]
    topology = TransferTopology(
        tp_rank=0, tp_size=local["tpSize"], block_size=local["blockSize"], engine_id=local.get("engineId", "local"), is_mla=pair["isMla"],
        is_mamba=pair["hasStates"], total_num_kv_heads=pair["numKvHeads"], attn_backends=[], dcp_size=local["dcpSize"], tensor_shape=None)
    lengths = list(local["blockLengthsBytes"])
    regions = len(lengths)
    kernels = BLOCKS * local["kernelsPerLogical"]
    draft = pair["draftKvHeads"]
    kinds = group_kinds(pair)
    names = local.get("regionNames") or [f"layer {at}" for at in range(regions)]
    ple = local.get("pleBlockLengthBytes") or remote.get("pleBlockLengthBytes")
    worker = object.__new__(Push if pair["isPush"] else Pull)
    is_strided = hasattr(worker, "_strided_desc_starts")
    no_blocks = lambda *_: np.zeros((0, 5 if is_strided else 3))
    handles = lambda: collections.defaultdict(lambda: 1)
    worker.__dict__.update(
        transfer_topo=topology, tp_rank=0, world_size=local["tpSize"], dcp_size=local["dcpSize"], dcp_rank=0, pcp_size=local.get("pcpSize", 1),
        pp_size=local.get("ppSize", 1), _remote_region_offset=0, engine_id="local", _has_mamba=pair["hasStates"], use_mla=pair["isMla"],
        region_group_ids=list(local["regionGroupIds"]), region_names=local.get("regionNames"), block_size=local["blockSize"],
        _physical_blocks_per_logical_kv_block=local["kernelsPerLogical"], use_host_buffer=pair["usesHostBuffer"], kv_cache_layout=local["layout"],
        host_buffer_kv_cache_layout=local["layout"], backend_name=local["attentionBackend"], block_len_per_layer=lengths,
        block_stride_per_layer=list(local["blockStridesBytes"]), nixl_memory_type="DRAM", _logical_num_blocks=BLOCKS,
        vllm_config=space(cache_config=space(enable_prefix_caching=pair["prefixCaching"])),
        kv_transfer_config=space(enable_permute_local_kv=pair["permutes"]), _is_hma_required=pair["needsHma"], enable_permute_local_kv=False,
        enable_heterogeneous_attn_post_process=False, _transfer_layer_region_indices=(), _transfer_layer_names=(), _transfer_layer_group_ids=(),
        _packed_member_layouts={name: tuple(place) for name, place in local.get("packedMembers", {}).items()},
        _has_packed_cache=local["layout"].startswith("BL"), _region_is_mla=[pair["isMla"]] * regions, region_num_blocks=[kernels] * regions,
        num_regions=regions, num_descs=regions * kernels, region_mem_types=["DRAM"] * regions, device_id=0, _mixed_mem_types=False,
        _head_sharded_draft_regions=set() if draft is None else {regions - 1}, _head_sharded_draft_kv_heads=draft, draft_tp_mappings={},
        _layer_specs=layer_specs(pair["cacheDtype"]), _is_csa_linear=pair.get("isCsaLinear", False), _group_spec_types=kinds, tp_mappings={},
        _conv_decomp=space(remote_conv_offsets=lambda *_: [], local_conv_offsets=[]), _mamba_ssm_size=(0, 0), _ssm_region_indices=[],
        _ple_region_index=0 if ple else None, _ple_block_len=local.get("pleBlockLengthBytes") or 0, _ple_group_index=None,
        dst_num_blocks={"local": kernels}, dst_region_num_blocks={"local": [kernels] * regions}, dst_region_group_ids={}, dst_uses_region_group_mapping={}, dst_region_mem_types={},
        dst_xfer_side_handles=collections.defaultdict(handles), kv_caches_base_addr=collections.defaultdict(dict),
        _remote_agents={}, src_xfer_handles_by_block_size=handles(), src_blocks_data_by_block_size={}, src_xfer_handles_by_tp_ratio={},
        nixl_wrapper=space(
            add_remote_agent=lambda _: "agent", get_xfer_descs=lambda *_: [], prep_xfer_dlist=lambda *_, **__: 1, send_notif=lambda *_, **__: None,
            make_prepped_xfer=lambda *_, **__: 1, transfer=lambda _: None),
        _uses_region_group_mapping=False, _compute_desc_ids=lambda **_: [], _build_fa_remote=no_blocks,
        _recving_transfers=collections.defaultdict(list), _invalid_remote_engines=set(), _remote_registration_generations={}, _engine_last_active={},
        _bidirectional_kv_xfer_enabled=False, _sending_transfers=collections.defaultdict(list), _sending_transfers_lock=threading.Lock(),
        kv_cache_config=space(
            transfer_groups=[space(kv_cache_spec=object.__new__(kind)) for kind in kinds], transfer_group_ids=list(range(len(kinds))),
            transfer_group_index_by_layer={name: 0 for name in names}))

    def local_blocks(ratio):
        rows = [(0, length // ratio, 0, length // ratio, kernels * ratio) if is_strided else (0, length // ratio, 0) for length in lengths]
        return np.array(rows if is_strided else [row for row in rows for _ in range(kernels * ratio)])

    worker.src_blocks_data = local_blocks(1)
    worker.register_local_xfer_handler = lambda size: (1, local_blocks(local["blockSize"] // size))
    if not pair["hasStates"] or pair["isMla"]:
        worker._needs_split_local_xfer_handles = lambda *_: False
    if not ple or not HAS_PLE:
        worker._build_mamba_remote = no_blocks
    if pair.get("writes") and hasattr(worker, "_requires_layer_name_routing"):
        worker._set_region_layers([[name] for name in names])
    return worker


def run(worker, pair):
    remote = pair["remote"]
    described = metadata(remote)
    if worker._is_csa_linear:
        worker._validate_csa_linear_tp_layout(remote["tpSize"])
    worker._validate_remote_parallel_config(described)
    worker.add_remote_agent(described, 0, remote["tpSize"], remote["dcpSize"])
    if pair["isPush"] and not pair.get("writes"):
        return
    engine = described.engine_id
    worker._remote_agents[engine] = {(0, rank): "agent" for rank in range(remote["tpSize"])}
    worker.src_xfer_handles_by_tp_ratio = collections.defaultdict(lambda: [1] * 64)
    kinds = worker._group_spec_types
    # Whole logical blocks on both sides.
    whole = [1 if kind is MambaSpec else pair["local"]["kernelsPerLogical"] * described.physical_blocks_per_logical_kv_block for kind in kinds]
    request = pair.get("request") or {"decodeBlocks": whole, "prefillBlocks": whole, "numTokens": 1}
    decode = [list(range(count)) for count in request["decodeBlocks"]]
    prefill = [list(range(count)) for count in request["prefillBlocks"]]
    mine, theirs = (prefill, decode) if pair["isPush"] else (decode, prefill)
    # The other side names logical blocks.
    per = described.physical_blocks_per_logical_kv_block
    logical = [ids if kind is MambaSpec else ids[: len(ids) // per] for ids, kind in zip(theirs, kinds)]
    about = ReqMeta(local_block_ids=mine, local_physical_block_ids=mine, tp_size=1, local_num_computed_blocks=tuple(0 for _ in kinds), remote=RemoteMeta(
        block_ids=logical, host="h", port=1, engine_id=engine, request_id="r", num_tokens=request["numTokens"]))
    (worker._xfer_blocks_for_req if pair["isPush"] else worker._read_blocks_for_req)("r", about)


def check(pair):
    worker = worker_of(pair)
    try:
        run(worker, pair)
    except (AttributeError, TypeError, KeyError):
        raise
    except Exception as refused:
        return str(refused)
    return None


for line in sys.stdin:
    try:
        print(json.dumps(check(json.loads(line))))
    except Exception:
        sys.stderr.write(line)
        raise
sys.stdout.flush()
os._exit(0)
