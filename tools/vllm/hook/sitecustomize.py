"""Found first on PYTHONPATH by the vLLM processes of the live tests. It changes two modules as they are loaded.

NIXL's Python API polls without pause, a whole core per agent; with several agents on two cores nothing else would run: the pause of
its progress thread becomes a millisecond.

vLLM takes the widest arithmetic that the CPU has, and each rounds in its own way: told that there is AVX2 only, every x86 machine computes the
bytes that were recorded."""
import importlib.abc
import importlib.util
import sys

PAUSE_US = 1000
WIDER_THAN_AVX2 = ("avx512", "vnni", "amx")


def slow_down(api):
    make = api.nixlBind.nixlAgent

    def agent(name, config):
        config.pthrDelay = PAUSE_US
        return make(name, config)

    api.nixlBind.nixlAgent = agent


def narrow(cpu):
    for name in dir(cpu):
        if name.startswith("_is_") and any(part in name for part in WIDER_THAN_AVX2):
            setattr(cpu, name, lambda: False)


def change_of(name):
    if name == "torch.cpu":
        return narrow
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
