#!/usr/bin/env python3
"""Records the handshake of an older vLLM, made by the Python code of its wheel.

usage: PYTHON record_handshake.py WHEEL MODEL OUT_FOLDER

PYTHON is one that has vLLM's dependencies, such as ~/.cache/kv-peer/vv/bin/python (setup.sh); MODEL is a model folder, such as
~/.cache/kv-peer/tiny-qwen3. The wheel's own code builds the config, computes the compatibility hash, encodes the metadata and
answers on its own listener, over ZMQ. No engine runs: the geometry of the cache and the agent's bytes are samples, with four
regions in host memory as one rank of MODEL would register. Writes VERSION.{req,rep0,rep1}.bin, the frames, and VERSION.json,
their origin and content.
"""

import hashlib
import inspect
import json
import os
import socket
import sys
import tempfile
import threading
import zipfile

SAMPLE = {
    "engine_id": "e0f4c6d2-0000-4000-8000-000000000000",
    "agent_metadata": b"not an agent of NIXL",
    "kv_caches_base_addr": [0x7F0000000000 + region * 0x200000 for region in range(4)],
    "device_id": 0,
    "num_blocks": 64,
    "block_lens": [32768] * 4,
    "block_strides": [32768] * 4,
    "block_size": 32,
    "ssm_sizes": (0, 0),
    "attn_backend_name": "CPU_ATTN",
    "physical_blocks_per_logical_kv_block": 1,
    "region_num_blocks": [64] * 4,
    "region_group_ids": [0] * 4,
    "region_names": [f"model.layers.{layer}.self_attn.attn" for layer in range(4)],
    "region_mem_types": ["DRAM"] * 4,
}


def main(wheel, model, out):
    with tempfile.TemporaryDirectory() as tree:
        with zipfile.ZipFile(wheel) as source:
            for name in source.namelist():
                if not name.endswith(".so"):
                    source.extract(name, tree)
        sys.path.insert(0, tree)
        record(wheel, model, out)


def record(wheel, model, out):
    import msgspec
    import vllm
    import vllm.config.utils as config_utils
    import zmq
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, metadata
    from vllm.engine.arg_utils import EngineArgs

    os.chdir(os.path.dirname(os.path.abspath(model)))
    config = EngineArgs(
        model=os.path.basename(model), dtype="float32", max_model_len=512, enforce_eager=True
    ).create_engine_config()

    factors = {}
    original = config_utils.hash_factors
    config_utils.hash_factors = lambda items: factors.update(items) or original(items)
    taken = inspect.signature(metadata.compute_nixl_compatibility_hash).parameters
    # The worker gives it whether one region holds all layers. By default none does.
    more = {"cross_layers_blocks": False} if "cross_layers_blocks" in taken else {}
    digest = metadata.compute_nixl_compatibility_hash(config, SAMPLE["attn_backend_name"], **more)

    # The names of layouts changed in 0.29; both mean that heads are contiguous in a block.
    has_names = os.path.exists(os.path.join(os.path.dirname(vllm.__file__), "v1/kv_cache_layout.py"))
    known = metadata.NixlAgentMetadata.__dataclass_fields__
    sample = SAMPLE | {"kv_cache_layout": "LBHNC" if has_names else "HND"}
    rank = metadata.NixlAgentMetadata(**{name: value for name, value in sample.items() if name in known})
    payload = metadata.NixlHandshakePayload(
        compatibility_hash=digest, agent_metadata_bytes=msgspec.msgpack.encode(rank)
    )

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ready, stop = threading.Event(), threading.Event()
    listen = next(
        vars(entry)["_nixl_handshake_listener"]
        for entry in vars(base_scheduler).values()
        if isinstance(entry, type) and "_nixl_handshake_listener" in vars(entry)
    ).__func__
    served = {(0, 0): msgspec.msgpack.encode(payload)}
    threading.Thread(target=listen, args=(served, ready, stop, "127.0.0.1", port), daemon=True).start()
    ready.wait()
    request = msgspec.msgpack.encode((metadata.GET_META_MSG, 0, 0))
    with zmq.Context() as context, context.socket(zmq.REQ) as client:
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(request)
        reply = client.recv_multipart()
    stop.set()

    os.makedirs(out, exist_ok=True)
    frames = {"req": request} | {f"rep{index}": frame for index, frame in enumerate(reply)}
    for name, frame in frames.items():
        with open(os.path.join(out, f"{vllm.__version__}.{name}.bin"), "wb") as file:
            file.write(frame)
    with open(wheel, "rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    described = {
        "wheel": os.path.basename(wheel),
        "sha256": checksum,
        "vllm_version": vllm.__version__,
        "nixl_connector_version": metadata.NIXL_CONNECTOR_VERSION,
        "factors": factors,
        "compatibility_hash": digest,
        "agent_metadata": {
            name: value.decode() if isinstance(value, bytes) else value
            for name, value in msgspec.msgpack.decode(payload.agent_metadata_bytes).items()
        },
    }
    with open(os.path.join(out, f"{vllm.__version__}.json"), "w") as file:
        json.dump(described, file, indent=1)
        file.write("\n")
    print(f"{vllm.__version__}: {len(reply)} frames, hash {digest}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    # The wheel's own folder is found before an installed vLLM.
    main(*(os.path.abspath(path) for path in sys.argv[1:]))
