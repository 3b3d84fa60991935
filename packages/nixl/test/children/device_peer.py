"""A peer that is not ours: NIXL's library and CUDA's driver by ctypes, for tests of memory on devices.

`device_peer.py LIBRARY cuda|torch|torch-expandable|host DEVICE LENGTH SEED` prints a line of JSON on how to reach its memory, then answers each line of its
input with one: `hash` with the SHA-256 of that memory. It ends with its input.
"""

import base64
import ctypes
import hashlib
import json
import mmap
import os
import random
import select
import sys
from ctypes import byref, c_bool, c_int, c_size_t, c_uint, c_uint64, c_void_p

from cuda_memory import CudaMemory, TorchMemory, checked

DRAM, VRAM = 0, 1
BACKEND = b"UCX"


class AgentConfig(ctypes.Structure):
    _fields_ = [
        ("progress_thread", c_bool),
        ("listen_thread", c_bool),
        ("listen_port", c_int),
        ("thread_sync", c_int),
        ("num_workers", c_uint),
        ("progress_delay_us", c_uint64),
        ("listen_delay_us", c_uint64),
        ("capture_telemetry", c_bool),
    ]


class HostMemory:
    def __init__(self, length):
        self.pages = mmap.mmap(-1, length)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))

    def write(self, data):
        self.pages[:] = data

    def read(self):
        return self.pages[:]


def main():
    path, kind, device, length, seed = sys.argv[1:]
    device, length = int(device), int(length)
    if kind == "host":
        memory = HostMemory(length)
    elif kind == "cuda":
        memory = CudaMemory(device, length)
    else:
        memory = TorchMemory(device, length, expandable=kind == "torch-expandable")
    memory.write(random.Random(int(seed)).randbytes(length))

    nixl = ctypes.CDLL(path)

    def call(name, *arguments):
        checked(name, getattr(nixl, "nixl_capi_" + name)(*arguments))

    agent, types, parameters, backend = c_void_p(), c_void_p(), c_void_p(), c_void_p()
    name = f"python-{os.getpid()}"
    config = AgentConfig(progress_thread=True, num_workers=1)
    call("create_configured_agent", name.encode(), byref(config), byref(agent))
    call("get_plugin_params", agent, BACKEND, byref(types), byref(parameters))
    call("create_backend", agent, BACKEND, parameters, byref(backend))
    registration = c_void_p()
    call("create_reg_dlist", DRAM if kind == "host" else VRAM, byref(registration))
    call(
        "reg_dlist_add_desc",
        registration,
        c_void_p(memory.address),
        c_size_t(length),
        c_uint64(device),
        None,
        c_size_t(0),
    )
    call("register_mem", agent, registration, None)
    data, size = c_void_p(), c_size_t()
    call("get_local_md", agent, byref(data), byref(size))
    tell = {
        "name": name,
        "address": memory.address,
        "deviceId": device,
        "metadata": base64.b64encode(ctypes.string_at(data, size.value)).decode(),
    }
    print(json.dumps(tell), flush=True)

    notifications = c_void_p()
    call("create_notif_map", byref(notifications))
    while True:
        # What others ask of this side moves while it asks for notifications.
        call("get_notifs", agent, notifications, None)
        if not select.select([sys.stdin], [], [], 0.001)[0]:
            continue
        if sys.stdin.readline() == "":
            break
        print(json.dumps(hashlib.sha256(memory.read()).hexdigest()), flush=True)
    # NIXL and UCX are not asked to end: what they do then is none of this test's affair.
    os._exit(0)


main()
