"""The same work as the Node side of a benchmark, with NIXL's own Python API of the same version. Commands come as JSON lines on stdin, answers go as JSON
lines to stdout. usage: nixl_peer.py, then
  {"do": "open", "metadata": hex of the target's agent, "address": base of the target's memory, "length": bytes}
  {"do": "read", "block": bytes, "count": n, "seed": s, "order": "scattered" | "contiguous"}       one READ of n blocks
  {"do": "prepare", "regions": r, "blocks": n, "block": bytes, "ids": [...], "times": t}              ids to posted, as vLLM 0.33 does it
"""
import json
import os
import sys
import time

# NIXL logs to stdout, where the answers go: it gets stderr instead.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

agent = nixl_agent("python-initiator", nixl_agent_config(num_threads=0))
state = {}
lists = {}


def aligned(length):
    buffer = np.zeros(length + 4096, np.uint8)
    offset = -buffer.ctypes.data % 4096
    return buffer[offset : offset + length]


def strided(base, length, count):
    return np.array([[base, length, 0, length, count]], dtype=np.uint64)


def prepared(block, count):
    """Lists over the whole of both memories, made once for a block size, as at a handshake."""
    key = (block, count)
    if key not in lists:
        lists[key] = (
            agent.prep_xfer_dlist("NIXL_INIT_AGENT", strided(state["local"].ctypes.data, block, count), "DRAM"),
            agent.prep_xfer_dlist(state["remote"], strided(state["address"], block, count), "DRAM"),
        )
    return lists[key]


def finish(handle, status):
    while status == "PROC":
        status = agent.check_xfer_state(handle)
    agent.release_xfer_handle(handle)
    if status != "DONE":
        raise RuntimeError(status)


def do_open(command):
    local = aligned(command["length"])
    agent.register_memory([(local.ctypes.data, local.nbytes, 0, "")], "DRAM", backends=["UCX"])
    name = agent.add_remote_agent(bytes.fromhex(command["metadata"]))
    state.update(local=local, remote=name.decode() if isinstance(name, bytes) else name, address=command["address"])
    return {"ok": True}


def do_read(command):
    count, block = command["count"], command["block"]
    local_list, remote_list = prepared(block, count)
    local, remote = np.array(command["local"], np.int32), np.array(command["remote"], np.int32)
    begun = time.perf_counter()
    handle = agent.make_prepped_xfer("READ", local_list, local, remote_list, remote, b"")
    status = agent.transfer(handle)
    posted = time.perf_counter()
    while status == "PROC":
        status = agent.check_xfer_state(handle)
    done = time.perf_counter()
    agent.release_xfer_handle(handle)
    if status != "DONE":
        raise RuntimeError(status)
    return {"ms": (done - begun) * 1e3, "postMs": (posted - begun) * 1e3}


def ids_of(block_ids, regions, blocks):
    """vLLM 0.33's way for attention regions: offsets by region, added to the block ids by broadcasting."""
    offsets = np.arange(regions)[:, None] * blocks
    return (offsets + np.asarray(block_ids)[None, :]).flatten()


def do_prepare(command):
    regions, blocks = command["regions"], command["blocks"]
    local_list, remote_list = prepared(command["block"], regions * blocks)
    times = []
    for _ in range(command["times"]):
        begun = time.perf_counter()
        local = ids_of(command["localIds"], regions, blocks)
        remote = ids_of(command["remoteIds"], regions, blocks)
        handle = agent.make_prepped_xfer("READ", local_list, local, remote_list, remote, b"")
        ready = time.perf_counter()
        times.append((ready - begun) * 1e3)
        finish(handle, agent.transfer(handle))
    return {"ms": times}


for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "close":
        break
    answer = {"open": do_open, "read": do_read, "prepare": do_prepare}[request["do"]](request)
    print(json.dumps(answer), file=answers, flush=True)
