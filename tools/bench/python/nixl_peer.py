"""Does the work of a benchmark's Node side with NIXL's Python API of the same version. Commands are JSON lines on stdin, answers JSON lines on stdout.
usage: nixl_peer.py [BACKEND NUM_THREADS [LIBRARY…]]; the libraries are those that the backend's plugin needs and the loader does not find. Commands:
  {"do": "open", "metadata": hex of the target's agent, "address": base of the target's memory, "length": bytes, "hugePages": true unless pages of 4 KiB are wanted, "memoryType": "DRAM" or "VRAM"}
  {"do": "prepare", "regions": r, "blocks": n, "block": bytes, "ids": [...], "times": t}              block ids to prepared requests, as vLLM 0.33 does it
"""
import ctypes
import json
import mmap
import os
import sys
import time

# NIXL logs to stdout, which is for answers: redirect it to stderr.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

sys.path.append(os.path.join(os.path.dirname(__file__), "../../../packages/nixl/test/children"))
# Under vLLM's Python the wheel lies in another environment. Its path comes last, so that only NIXL is found there.
of_vllm = "KV_BENCH_NIXL" in os.environ
if of_vllm:
    sys.path.append(os.environ["KV_BENCH_NIXL"])

import numpy as np
from cuda_memory import CudaMemory
from nixl_cu12._api import nixl_agent, nixl_agent_config

backend, threads, libraries = (sys.argv[1], int(sys.argv[2]), sys.argv[3:]) if len(sys.argv) > 1 else ("UCX", 0, [])
for library in libraries:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)

# After the wheel: vLLM would load its own NIXL, and a process holds only one.
if of_vllm:
    import vllm_peer

own_name = f"python-{os.getpid()}"
agent = nixl_agent(own_name, nixl_agent_config(num_threads=threads, backends=[backend]))
state = {}
lists = {}


def aligned(length, huge_pages):
    """Memory at a page. numpy asks the kernel for huge pages; PyTorch, which vLLM uses, does not."""
    if not huge_pages:
        small = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer = np.frombuffer(small, np.uint8)
        buffer[:] = 0
        return buffer
    buffer = np.zeros(length + 4096, np.uint8)
    offset = -buffer.ctypes.data % 4096
    return buffer[offset : offset + length]


def strided(base, length, count):
    return np.array([[base, length, 0, length, count]], dtype=np.uint64)


def prepared(block, count):
    """Prepared lists over both memories, created once per block size, as in a handshake."""
    key = (block, count)
    if key not in lists:
        lists[key] = (
            agent.prep_xfer_dlist("NIXL_INIT_AGENT", strided(state["base"], block, count), state["memoryType"]),
            agent.prep_xfer_dlist(state["remote"], strided(state["address"], block, count), state["memoryType"]),
        )
    return lists[key]


def finish(handle, status):
    while status == "PROC":
        status = agent.check_xfer_state(handle)
    agent.release_xfer_handle(handle)
    if status != "DONE":
        raise RuntimeError(status)


def do_open(command):
    length, memory_type = command["length"], command.get("memoryType", "DRAM")
    if memory_type == "VRAM":
        local = CudaMemory(0, length)
        base = local.address
    else:
        local = aligned(length, command.get("hugePages", True))
        base = local.ctypes.data
    agent.register_memory([(base, length, 0, "")], memory_type, backends=[backend])
    name = agent.add_remote_agent(bytes.fromhex(command["metadata"]))
    remote = name.decode() if isinstance(name, bytes) else name
    state.update(local=local, base=base, memoryType=memory_type, remote=remote, address=command["address"])
    return {"ok": True}


def ids_of(block_ids, regions, blocks):
    """Without vLLM: the least work it does for attention regions, which is to add each region's offset to the block ids."""
    offsets = np.arange(regions)[:, None] * blocks
    return (offsets + np.asarray(block_ids)[None, :]).flatten()


def do_prepare(command):
    regions, blocks = command["regions"], command["blocks"]
    local_list, remote_list = prepared(command["block"], regions * blocks)
    worker = vllm_peer.worker(regions, blocks) if of_vllm else None
    times = []
    for _ in range(command["times"]):
        begun = time.perf_counter()
        if worker is None:
            local, remote = ids_of(command["localIds"], regions, blocks), ids_of(command["remoteIds"], regions, blocks)
        else:
            local, remote = vllm_peer.read_ids(worker, command["localIds"], command["remoteIds"], regions, blocks)
        handle = agent.make_prepped_xfer("READ", local_list, local, remote_list, remote, b"request:1")
        ready = time.perf_counter()
        times.append((ready - begun) * 1e3)
        finish(handle, agent.transfer(handle))
    return {"ms": times}


def shuffled(count, seed):
    """The Node side's shuffle, so that both move the same blocks in the same order."""
    ids = list(range(count))
    value = seed
    for i in range(count - 1, 0, -1):
        value = (value * 1664525 + 1013904223) & 0xFFFFFFFF
        j = value % (i + 1)
        ids[i], ids[j] = ids[j], ids[i]
    return np.array(ids, np.int32)


orders = {}


def order(count, seed):
    if (count, seed) not in orders:
        orders[(count, seed)] = shuffled(count, seed)
    return orders[(count, seed)]


def do_move(command):
    """Polls until the transfer is done, with a pause of `pauseMs` between polls."""
    count, block, pause = command["count"], command["block"], command["pauseMs"] / 1e3
    local_list, remote_list = prepared(block, count)
    local, remote = (order(count, seed) for seed in command["seeds"])
    begun = time.perf_counter()
    handle = agent.make_prepped_xfer(command["operation"], local_list, local, remote_list, remote, b"")
    status = agent.transfer(handle)
    while status == "PROC":
        if pause:
            time.sleep(pause)
        status = agent.check_xfer_state(handle)
    done = time.perf_counter()
    finish(handle, status)
    return {"ms": (done - begun) * 1e3}


def do_small(command):
    local_list, remote_list = prepared(command["block"], 64)
    ids = np.array([7], np.int32)
    make, move, release = [], [], []
    for _ in range(command["times"]):
        begun = time.perf_counter()
        handle = agent.make_prepped_xfer("READ", local_list, ids, remote_list, ids, b"")
        made = time.perf_counter()
        status = agent.transfer(handle)
        while status == "PROC":
            status = agent.check_xfer_state(handle)
        done = time.perf_counter()
        agent.release_xfer_handle(handle)
        released = time.perf_counter()
        make.append((made - begun) * 1e6)
        move.append((done - made) * 1e6)
        release.append((released - done) * 1e6)
    return {"make": make, "move": move, "release": release}


def do_list(command):
    """Prepares a list of `count` scattered blocks of the memory."""
    count, block = command["count"], command["block"]
    if count not in orders:
        places = np.arange(count, dtype=np.uint64) * 7919 % count
        orders[count] = np.column_stack([state["base"] + places * block, np.full(count, block), np.zeros(count)]).astype(np.uint64)
    begun = time.perf_counter()
    handle = agent.prep_xfer_dlist("NIXL_INIT_AGENT", orders[count], "DRAM")
    ms = (time.perf_counter() - begun) * 1e3
    agent.release_dlist_handle(handle)
    return {"ms": ms}


def do_metadata(command):
    return {"name": own_name, "metadata": agent.get_agent_metadata().hex(), "address": state["base"]}


def do_meet(command):
    agent.add_remote_agent(bytes.fromhex(command["metadata"]))
    return {}


def do_say(command):
    """Sends notifications with their send time, with a pause before each."""
    for _ in range(command["count"]):
        time.sleep(command["gapMs"] / 1e3)
        agent.send_notif(command["to"], str(time.clock_gettime_ns(time.CLOCK_MONOTONIC)).encode())
    return {}


def do_listen(command):
    """Measures the delays of the next notifications, with a pause of `sleepMs` between polls."""
    delays = []
    while len(delays) < command["count"]:
        for messages in agent.get_new_notifs().values():
            now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            delays.extend((now - int(message)) / 1e6 for message in messages)
        if command["sleepMs"]:
            time.sleep(command["sleepMs"] / 1e3)
    return {"delaysMs": delays}


def do_handshake(command):
    """Adds a peer and prepares the lists of both sides, with an existing backend, in vLLM 0.33's strided form."""
    count, block = command["count"], command["block"]
    metadata = bytes.fromhex(command["metadata"])
    begun = time.perf_counter()
    name = agent.add_remote_agent(metadata)
    name = name.decode() if isinstance(name, bytes) else name
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", strided(state["base"], block, count), "DRAM")
    remote = agent.prep_xfer_dlist(name, strided(command["address"], block, count), "DRAM")
    ms = (time.perf_counter() - begun) * 1e3
    agent.release_dlist_handle(local)
    agent.release_dlist_handle(remote)
    agent.remove_remote_agent(name)
    return {"ms": ms}


answerers = {name[3:]: value for name, value in list(globals().items()) if name.startswith("do_")}
for line in sys.stdin:
    request = json.loads(line)
    answer = answerers[request["do"]](request)
    print(json.dumps(answer), file=answers, flush=True)
