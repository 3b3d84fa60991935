"""NIXL repeats a call for ever while libfabric's tcp provider cannot connect.
`libfabric-endless-calls` of @kv/nixl repairs it. Usage: libfabric_endless_calls.py [LIBRARY...]:
what the loader does not find for NIXL's plugin, such as libfabric.so.1.

An owner has ended when a reader that has its metadata begins to read. Expected: the call reports an
error. Happens: it does not return.
"""

import ctypes
import subprocess
import sys

WAIT_SECONDS = 20


def owner(*libraries):
    side = Side("LIBFABRIC")
    side.tell()
    sys.stdin.read()


def reader(metadata, address, *libraries):
    side = Side("LIBFABRIC")
    say("begins")
    try:
        side.begin_read(metadata, address)
    except Exception as error:
        say(error)


roles = {"owner": owner, "reader": reader}
role = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] in roles else None
libraries = [argument for argument in sys.argv[1:] if argument.startswith("/")]
for library in libraries:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)

from pair import Process, Side, judge, say

if role:
    roles[role](*sys.argv[2:])
else:
    owning = Process("owner", *libraries)
    place = owning.answer()
    owning.kill()
    reading = Process("reader", *place, *libraries)
    reading.answer()
    try:
        reading.process.wait(WAIT_SECONDS)
        judge(False, "the call returned")
    except subprocess.TimeoutExpired:
        reading.kill()
        judge(True, f"the call did not return within {WAIT_SECONDS} s")
