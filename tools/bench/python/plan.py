"""Times vLLM 0.33's functions between a request's block ids and the call into NIXL, in one process. usage: plan.py, with vLLM's Python tree on PYTHONPATH.
Commands are JSON lines on stdin, answers JSON lines on stdout:
  {"do": "prepare", "regions": r, "blocks": n, "localIds": [...], "remoteIds": [...], "times": t}   both sides' ids, the prefix cut, as _read_blocks does it
"""
import json
import os
import sys
import time

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from vllm_worker import read_ids, worker


def do_prepare(command):
    regions, blocks = command["regions"], command["blocks"]
    local, remote = command["localIds"], command["remoteIds"]
    self = worker(regions, blocks)
    times = []
    for _ in range(command["times"]):
        begun = time.perf_counter()
        read_ids(self, local, remote, regions, blocks)
        times.append((time.perf_counter() - begun) * 1e3)
    return {"ms": times}


for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps(do_prepare(request)), file=answers, flush=True)
