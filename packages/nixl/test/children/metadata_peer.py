"""A peer that is not ours, for tests of the exchange of metadata: NIXL's library by ctypes, with its own listen thread and its own etcd client.

`metadata_peer.py LIBRARY NAME PORT` prints a line when it is ready; PORT 0 is without the listen thread. It then answers each line of its input,
`COMMAND ARGUMENTS`, with one line of JSON: NIXL's status, or for `wait NAME` whether NIXL knew the peer of that name within ten seconds.
"""

import ctypes
import json
import mmap
import os
import sys
import time
from ctypes import byref, c_bool, c_int, c_size_t, c_uint, c_uint64, c_void_p

LENGTH = 65536
STRICT = 1


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


def main():
    path, name, port = sys.argv[1:]
    nixl = ctypes.CDLL(path)

    def call(function, *arguments):
        return getattr(nixl, "nixl_capi_" + function)(*arguments)

    def checked(function, *arguments):
        status = call(function, *arguments)
        if status != 0:
            sys.exit(f"{function} answered {status}")

    agent, types, parameters, backend, registration = (c_void_p() for _ in range(5))
    config = AgentConfig(
        progress_thread=True,
        listen_thread=port != "0",
        listen_port=int(port),
        thread_sync=STRICT,
        num_workers=1,
        listen_delay_us=10_000,
    )
    checked("create_configured_agent", name.encode(), byref(config), byref(agent))
    checked("get_plugin_params", agent, b"UCX", byref(types), byref(parameters))
    checked("create_backend", agent, b"UCX", parameters, byref(backend))
    pages = mmap.mmap(-1, LENGTH)
    pages[:] = b"p" * LENGTH
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    checked("create_reg_dlist", 0, byref(registration))
    checked("reg_dlist_add_desc", registration, c_void_p(address), c_size_t(LENGTH), c_uint64(0), None, c_size_t(0))
    checked("register_mem", agent, registration, None)
    print(json.dumps({"address": address, "lengthBytes": LENGTH}), flush=True)

    def place(arguments):
        if not arguments:
            return None
        options = c_void_p()
        checked("create_opt_args", byref(options))
        checked("opt_args_set_ip_addr", options, arguments[0].encode())
        checked("opt_args_set_port", options, ctypes.c_uint16(int(arguments[1])))
        return options

    def known(peer, wanted):
        for _ in range(1000):
            if (call("check_remote_md", agent, peer.encode(), None) == 0) == wanted:
                return True
            time.sleep(0.01)
        return False

    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "send":
            answer = call("send_local_md", agent, place(arguments))
        elif command == "fetch":
            answer = call("fetch_remote_md", agent, arguments[0].encode(), place(arguments[1:]))
        elif command == "invalidate":
            answer = call("invalidate_local_md", agent, place(arguments))
        else:
            answer = known(arguments[0], command == "wait")
        print(json.dumps(answer), flush=True)
    # NIXL and UCX are not asked to end: what they do then is none of this test's affair.
    os._exit(0)


main()
