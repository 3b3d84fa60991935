"""UCX ends its listener at any error of accept() but EAGAIN. `ucx-listener` of @kv/nixl repairs it.

An owner has no free file descriptor while a reader connects. The descriptors are freed, and a new
reader connects. Expected: it reads. Happens: its READ does not end.
"""

import os
import resource
import sys

os.environ["UCX_TLS"] = "tcp"

from pair import Process, Side, judge, say


def owner():
    # A container may allow a thousand million.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most))
    side = Side("UCX")
    side.tell()
    held = []
    for line in sys.stdin:
        if line == "fill\n":
            try:
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                pass
        else:
            for descriptor in held:
                os.close(descriptor)
        say("done")


def reader(metadata, address):
    side = Side("UCX")
    try:
        side.begin_read(metadata, address)
        say(side.wait(10))
    except Exception:
        say("ERR")
    os._exit(0)


if len(sys.argv) > 1:
    {"owner": owner, "reader": reader}[sys.argv[1]](*sys.argv[2:])
else:
    owning = Process("owner")
    place = owning.answer()
    before = Process("reader", *place).answer()
    owning.ask("fill")
    Process("reader", *place).answer()
    owning.ask("free")
    after = Process("reader", *place).answer()
    owning.kill()
    judge(before == ["DONE"] and after != ["DONE"], f"a READ before: {before[0]}; after the descriptors were free again: {after[0]}")
