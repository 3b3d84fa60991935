"""vLLM 0.33's own P2P tier (session, ZMQ and NIXL, unmodified) without an engine: commands as JSON lines on stdin, what happens as JSON lines on stdout.

Run: python p2p_peer.py HOST:PORT BLOCKS BLOCK_BYTES [SEED]
The first line says the fingerprint. Block i holds i + 1 in each byte.
{"hold": {"KEY": BLOCK}}            the blocks that look-ups find; {"KEY": null} forgets
{"read": "HOST:PORT", "request": ID, "keys": [...], "blocks": [...]}   look-up, then a load of what was found into these blocks
{"load": "HOST:PORT", "request": ID, "keys": [...], "blocks": [...]}   a load without a look-up, as a decode worker's
{"finish": ID, "peer": "HOST:PORT"} the end of a request"""
import json
import mmap
import queue
import sys
import threading
import time
import types
import uuid

import numpy as np
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.p2p.control.zmq import ZmqTransport
from vllm.v1.kv_offload.tiering.p2p.data.nixl import NixlTransport
from vllm.v1.kv_offload.tiering.p2p.session.session import P2PSession

local, blocks, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
seed = sys.argv[4] if len(sys.argv) > 4 else "vllm"
host, port = local.rsplit(":", 1)
memory = mmap.mmap(-1, blocks * length)
for block in range(blocks):
    memory[block * length:(block + 1) * length] = bytes([(block + 1) % 256]) * length
data = NixlTransport(str(uuid.uuid4()), memoryview(memory).cast("B", shape=[blocks, length]), config_fields={"model": "tiny"}, num_threads=0)
control = ZmqTransport(local, host, int(port))
sessions, held, reads = {}, {}, {}


def say(**what):
    print(json.dumps(what), flush=True)


class Parent:
    """What a session asks the tiering manager."""

    jobs = 1000

    def on_new_request(self, _):
        return None

    def on_request_finished(self, _):
        return None

    def lookup(self, key, _):
        return LookupResult.HIT if bytes(key) in held else LookupResult.MISS

    def create_store_job(self, keys, _):
        Parent.jobs += 1
        ids = np.array([held[bytes(key)] for key in keys])
        return types.SimpleNamespace(job_id=Parent.jobs, keys=list(keys), block_ids=ids, chunk_ids=ids)


def session_of(peer):
    if peer not in sessions:
        sessions[peer] = P2PSession(peer, local, data, length, seed, control.connect(peer))
    return sessions[peer]


def obey(command):
    if "hold" in command:
        for key, block in command["hold"].items():
            held.pop(key.encode(), None)
            if block is not None:
                held[key.encode()] = block
    elif "read" in command or "load" in command:
        peer = command.get("read") or command["load"]
        keys = [key.encode() for key in command["keys"]]
        session_of(peer)
        reads[command["request"]] = {"peer": peer, "keys": keys, "blocks": command["blocks"], "asks": "read" in command, "found": None}
    elif "finish" in command:
        session_of(command["peer"]).finish_request(command["finish"])


def advance(request, read, session):
    """Looks up until all is known, then loads what was found."""
    if read["found"] is not None:
        return
    if read["asks"]:
        answers = [session.register_lookup(request, key) for key in read["keys"]]
        if None in answers:
            return
        read["found"] = [key for key, hit in zip(read["keys"], answers) if hit]
        say(event="found", request=request, keys=[key.decode() for key in read["found"]])
    else:
        read["found"] = read["keys"]
    if read["found"]:
        read["job"] = len(reads)
        session.request_blocks(read["job"], request, read["found"], read["blocks"][:len(read["found"])])


def bytes_of(block):
    return memory[block * length:(block + 1) * length]


parent, commands = Parent(), queue.Queue()
threading.Thread(target=lambda: [commands.put(json.loads(line)) for line in sys.stdin] and None or commands.put(None), daemon=True).start()
say(event="ready", fingerprint=data.config_fingerprint)
while True:
    while not commands.empty():
        command = commands.get()
        if command is None:
            sys.exit(0)
        obey(command)
    for connection in control.poll():
        sessions.setdefault(connection.peer_id, None) or sessions.__setitem__(connection.peer_id, P2PSession(connection.peer_id, local, data, length, seed, connection))
    for peer, session in list(sessions.items()):
        result = session.poll()
        session.serve_external_requests(parent)
        for request in result.new_fetch_ids:
            say(event="fetch", request=request)
        for job, success in result.stores:
            say(event="store", success=success)
        for request, read in reads.items():
            if read["peer"] == peer and session.alive:
                advance(request, read, session)
        session.flush_pending_lookups()
        for load in result.loads:
            read = reads[load.kv_request_id]
            say(event="load", request=load.kv_request_id, success=load.success,
                bytes=[sorted(set(bytes_of(block))) for block in read["blocks"][:len(read["found"])]])
        if not session.alive:
            say(event="ended", peer=peer, reason=session.death_reason)
            session.close()
            data.remove_remote_peer(peer)
            del sessions[peer]
    time.sleep(0.001)
