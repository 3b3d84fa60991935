"""Python imports this module at the start of every vLLM process of the live tests, because its folder is first on PYTHONPATH. It patches a few
modules as they are loaded. The patches change neither results nor messages.

vLLM expects a core for each process. Here several servers share two cores, so a process that busy-waits would delay the others until handshakes
time out and leases end:
- NIXL's Python API polls without pause. The pause of its progress thread becomes a millisecond.
- An engine that waits for a transfer, and has nothing to run, steps every millisecond. It now steps every 20 milliseconds.
- After a message, a worker busy-waits for a second on the shared memory of the next one. It now sleeps until it is woken, and checks every 5 milliseconds.

vLLM uses the widest vector instructions of the CPU, and their rounding differs. With AVX2 as the only ones, every x86 machine computes the bytes
that were recorded."""
import importlib.abc
import importlib.util
import sys
import time

PAUSE_US = 1000
IDLE_STEP_S = 0.02
LOOK_MS = 5
WIDER_THAN_AVX2 = ("avx512", "vnni", "amx")


def slow_down(api):
    make = api.nixlBind.nixlAgent

    def agent(name, config):
        config.pthrDelay = PAUSE_US
        return make(name, config)

    api.nixlBind.nixlAgent = agent


def rest(core):
    """Its only sleep is the one between two steps that ran nothing."""

    class Time:
        def __getattr__(self, name):
            return getattr(time, name)

        def sleep(self, seconds):
            time.sleep(max(seconds, IDLE_STEP_S))

    core.time = Time()


def look_now_and_then(shm_broadcast):
    """A call that is lost costs a look, too: vLLM's spinning hides that zmq drops the second of two calls within three milliseconds."""
    wait = shm_broadcast.SpinCondition.wait

    def sleep(self, timeout_ms=None):
        self.busy_loop_s = 0
        wait(self, LOOK_MS if timeout_ms is None else min(timeout_ms, LOOK_MS))

    shm_broadcast.SpinCondition.wait = sleep
    # Otherwise a native loop spins for 100 ms before each such wait.
    shm_broadcast.SPINLOOP_EXT_ENABLED = False


def narrow(cpu):
    for name in dir(cpu):
        if name.startswith("_is_") and any(part in name for part in WIDER_THAN_AVX2):
            setattr(cpu, name, lambda: False)


CHANGES = {
    "torch.cpu": narrow,
    "vllm.distributed.device_communicators.shm_broadcast": look_now_and_then,
    "vllm.v1.engine.core": rest,
}


def change_of(name):
    if name in CHANGES:
        return CHANGES[name]
    if name.startswith("nixl_cu") and name.endswith("._api"):
        return slow_down
    return None


class Finder(importlib.abc.MetaPathFinder):
    """Lets the real finder load the module, then changes it."""

    def find_spec(self, name, path, target=None):
        change = change_of(name)
        if change is None:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
