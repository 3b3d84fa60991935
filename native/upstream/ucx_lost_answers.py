"""UCX aborts, or uses freed memory, for an answer to a reader that has died. `ucx-lost-answers` of
@kv/nixl repairs it.

Readers are killed while they read over TCP. Expected: the owner lives on. Happens: it ends by a
signal, after some readers.
"""

import os
import sys
import time

os.environ["UCX_TLS"] = "tcp"

from pair import Process, Side, judge, say

READERS = 100


def owner():
    side = Side("UCX")
    side.tell()
    sys.stdin.read()


def reader(metadata, address):
    side = Side("UCX")
    side.begin_read(metadata, address, block=64, count=16384)
    say("reads")
    while True:
        side.wait(1)
        side.agent.transfer(side.read)


if len(sys.argv) > 1:
    {"owner": owner, "reader": reader}[sys.argv[1]](*sys.argv[2:])
else:
    owning = Process("owner")
    place = owning.answer()
    for count in range(1, READERS + 1):
        reading = Process("reader", *place)
        reading.answer()
        time.sleep(0.005 * (count % 10))
        reading.kill()
        # The owner answers the dead reader, and dies of it, within a moment.
        time.sleep(0.2)
        if owning.process.poll() is not None:
            judge(True, f"the owner ended with {owning.process.returncode} after {count} readers died")
    owning.kill()
    judge(False, f"the owner outlived {READERS} readers")
