"""Python imports this module at the start of every vLLM process of the live tests, because its folder is first on PYTHONPATH. It patches a few
modules as they are loaded. The patches change neither results nor messages.

vLLM expects a core for each process. Here several servers share two cores, so a process that busy-waits would delay the others until handshakes
time out and leases expire:
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
CHECK_MS = 5
WIDER_THAN_AVX2 = ("avx512", "vnni", "amx")


def pause_progress_thread(api):
    make = api.nixlBind.nixlAgent

    def agent(name, config):
        config.pthrDelay = PAUSE_US
        return make(name, config)

    api.nixlBind.nixlAgent = agent


def pause_idle_engine(core):
    """This vLLM module sleeps only between two steps that ran nothing."""

    class Time:
        def __getattr__(self, name):
            return getattr(time, name)

        def sleep(self, seconds):
            time.sleep(max(seconds, IDLE_STEP_S))

    core.time = Time()


def sleep_until_woken(shm_broadcast):
    """Sleeps at most CHECK_MS, because zmq drops the second of two wake-ups within three milliseconds. vLLM's busy-waiting hides that."""
    wait = shm_broadcast.SpinCondition.wait

    def sleep(self, timeout_ms=None):
        self.busy_loop_s = 0
        wait(self, CHECK_MS if timeout_ms is None else min(timeout_ms, CHECK_MS))

    shm_broadcast.SpinCondition.wait = sleep
    # Otherwise a native loop spins for 100 ms before each such wait.
    shm_broadcast.SPINLOOP_EXT_ENABLED = False


def limit_to_avx2(cpu):
    for name in dir(cpu):
        if name.startswith("_is_") and any(part in name for part in WIDER_THAN_AVX2):
            setattr(cpu, name, lambda: False)


PATCHES = {
    "torch.cpu": limit_to_avx2,
    "vllm.distributed.device_communicators.shm_broadcast": sleep_until_woken,
    "vllm.v1.engine.core": pause_idle_engine,
}


def patch_for(name):
    if name in PATCHES:
        return PATCHES[name]
    if name.startswith("nixl_cu") and name.endswith("._api"):
        return pause_progress_thread
    return None


class Finder(importlib.abc.MetaPathFinder):
    """Lets the real finder load the module, then patches it."""

    def find_spec(self, name, path, target=None):
        patch = patch_for(name)
        if patch is None:
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
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
