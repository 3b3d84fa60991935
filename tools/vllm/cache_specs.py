"""What an installed vLLM (0.33) says of the KV caches of models: a line of JSON for each config.json, TP size and cache dtype, for `npm run conformance`.

Run: python tools/vllm/cache_specs.py --tp 1,2 --kv-cache-dtype auto,fp8 MODEL/config.json … > models.jsonl
It needs the CUDA wheel of vLLM with its dependencies, gcc, and neither a GPU nor weights: the model is built on torch's meta device, and the questions to a
GPU are answered as an H100 would (--gpu). No kernel is called. A few seconds for each line; a case that vLLM refuses has `error`."""
import argparse
import contextlib
import copy
import dataclasses
import gc
import importlib
import importlib.util
import io
import json
import math
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import warnings

GPUS = {"h100": ((9, 0), "NVIDIA H100 80GB HBM3", 132, 80 << 30), "b200": ((10, 0), "NVIDIA B200", 148, 180 << 30)}
POOL_BYTES = 1 << 46
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "",
               "VLLM_HAS_FLASHINFER_CUBIN": "1", "TOKENIZERS_PARALLELISM": "false"}


def with_driver_stub():
    """Starts this program again with a libcuda.so.1 that does nothing, where there is none: vLLM's libraries are linked against it."""
    known = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    if os.environ.get("CACHE_SPECS_STUB") or "libcuda.so.1" in known:
        return
    package = pathlib.Path(importlib.util.find_spec("vllm").origin).parent
    wanted = subprocess.run(["nm", "-D", "--undefined-only", *map(str, package.rglob("*.so"))], capture_output=True, text=True).stdout
    functions = sorted(set(re.findall(r" U (cu[A-Z]\w*)", wanted)))
    folder = tempfile.mkdtemp(prefix="libcuda-")
    source = pathlib.Path(folder, "libcuda.c")
    source.write_text("\n".join(f"int {function}(void) {{ return 100; }}" for function in functions))
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1"], check=True)
    path = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT, "CACHE_SPECS_STUB": folder, "LD_LIBRARY_PATH": path})


class AnyTokenizer(dict):
    """Some multimodal classes look up the ids of their placeholders: each is 1. It stands for an image processor too."""

    def __missing__(self, _):
        return 1

    def __getattr__(self, name):
        if name in ("vocab", "get_vocab"):
            return self if name == "vocab" else lambda: self
        return 1 if name.endswith("_id") else lambda *_, **__: 1


def pretend_gpu(name):
    """torch, Triton and vLLM's platform answer like the GPU of this name."""
    import torch
    capability, full_name, processors, memory = GPUS[name]
    properties = types.SimpleNamespace(name=full_name, major=capability[0], minor=capability[1], total_memory=memory, multi_processor_count=processors, warp_size=32,
                                       is_integrated=False, uuid="0", gcnArchName="", L2_cache_size=50 << 20, max_threads_per_multi_processor=2048,
                                       shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
                                       regs_per_multiprocessor=65536)
    answers = {"is_available": True, "is_initialized": True, "device_count": 8, "current_device": 0, "get_device_name": full_name, "get_device_capability": capability,
               "get_device_properties": properties, "mem_get_info": (memory, memory), "memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 0,
               "get_arch_list": [f"sm_{capability[0]}{capability[1]}"], "is_current_stream_capturing": False,
               "_lazy_init": None, "set_device": None, "synchronize": None, "empty_cache": None}
    for function, answer in answers.items():
        setattr(torch.cuda, function, (lambda given: lambda *_, **__: given)(answer))

    class Silent:
        cuda_stream = 0

        def __init__(self, *_, **__):
            pass

        def __getattr__(self, _):
            return lambda *_, **__: None

    torch.cuda.Stream = torch.cuda.Event = Silent
    torch.cuda.current_stream = torch.cuda.default_stream = Silent

    import triton
    from triton.backends.compiler import GPUTarget
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    limits = {"max_shared_mem": 232448, "multiprocessor_count": processors, "warpSize": 32, "max_num_regs": 65536, "sm_clock_rate": 0, "mem_clock_rate": 0, "mem_bus_width": 0}
    triton.runtime.driver.set_active(types.SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_device_capability=lambda *_: capability,
        get_active_torch_device=lambda: torch.device("meta"), utils=types.SimpleNamespace(get_device_properties=lambda *_: limits)))

    import vllm.platforms
    vllm.platforms.builtin_platform_plugins = {"cuda": lambda: "vllm.platforms.cuda.NonNvmlCudaPlatform"}
    type(vllm.platforms.current_platform).device_count = classmethod(lambda _: 8)
    # A class is looked at in a child process otherwise, which would not have these answers.
    import vllm.model_executor.models.registry as registry
    registry._run_in_subprocess = lambda look: look()
    import vllm.tokenizers
    vllm.tokenizers.cached_tokenizer_from_config = lambda *_, **__: AnyTokenizer()
    import vllm.transformers_utils.processor as processors
    processors.cached_get_image_processor = lambda *_, **__: AnyTokenizer()


def pretend_ranks(tp_size):
    """The groups of vLLM's parallel state, as rank 0 of so many tensor-parallel ranks sees them."""
    import torch
    import vllm.distributed.parallel_state as state
    sizes = dict.fromkeys(["_INNER_DP_WORLD", "_PP", "_DP", "_EP", "_DCP", "_PCP", "_EPLB", "_ETP", "_ENGRAM_DP"], 1)
    for name, size in {**sizes, "_WORLD": tp_size, "_TP": tp_size}.items():
        members = types.SimpleNamespace(size=(lambda count: lambda: count)(size), rank=lambda: 0, group_name=name)
        group = object.__new__(state.GroupCoordinator)
        vars(group).update(unique_name=name, rank=0, local_rank=0, rank_in_group=0, device_index=0, world_size=size, ranks=list(range(size)),
                           group_ranks=[list(range(size))], device=torch.device("cuda:0"), cpu_group=members, device_group=members, device_communicator=None,
                           mq_broadcaster=None, use_device_communicator=False, use_custom_op_call=False, use_cpu_custom_send_recv=False)
        setattr(state, name, group)
    torch.distributed.is_initialized = lambda: True
    torch.distributed.get_rank = lambda *_: 0
    torch.distributed.get_world_size = lambda *_: tp_size


def on_meta():
    """A mode in which tensors that are wanted on the GPU have no memory."""
    import torch

    def is_gpu(place):
        return type(place) is int or (type(place) in (str, torch.device) and str(place).startswith("cuda"))

    class OnMeta(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, kinds, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if function is torch.Tensor.cuda:
                return args[0].to("meta")
            # Slopes of ALiBi and scales of an activation, which decide no cache. Whole numbers may, and are refused.
            if args and isinstance(args[0], torch.Tensor) and args[0].is_meta and args[0].is_floating_point():
                if function is torch.Tensor.cpu:
                    return args[0]
                if function in (torch.Tensor.tolist, torch.Tensor.item):
                    return function(torch.zeros(args[0].shape, device="cpu"))
            if function is torch.Tensor.to:
                args = tuple("meta" if type(value) is not int and is_gpu(value) else value for value in args)
            if is_gpu(kwargs.get("device")):
                kwargs["device"] = "meta"
            return function(*args, **kwargs)

    return OnMeta()


def value_of(value):
    """A field of a spec as JSON."""
    if isinstance(value, (list, tuple)):
        return [value_of(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return getattr(value, "name", value)
    return getattr(value, "name", None) or str(value).removeprefix("torch.")


def fields_of(spec):
    """The class of a spec, its fields that are not at their defaults, and the bytes of a page."""
    shown = {"class": type(spec).__name__}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name != "kv_cache_specs" and (field.name == "head_size_v" or (value is not None and value != field.default)):
            shown[field.name] = value_of(value)
    if not hasattr(spec, "kv_cache_specs"):
        shown["page_size_bytes"] = spec.page_size_bytes
    return shown


class Numbered(list):
    """Values by their first number of appearance."""

    def of(self, value):
        if value not in self:
            self.append(value)
        return self.index(value)


def in_runs(positions):
    """Positions as [first, count, step]."""
    runs = []
    for position in positions:
        if runs and runs[-1][1] == 1 and position > runs[-1][0]:
            runs[-1][1:] = [2, position - runs[-1][0]]
        elif runs and runs[-1][1] > 1 and position == runs[-1][0] + runs[-1][1] * runs[-1][2]:
            runs[-1][1] += 1
        else:
            runs.append([position, 1, 1])
    return runs


def layers_of(specs):
    """Specs, names with * for the layer's number, and runs of layers [count, spec, name, first layer]."""
    shapes, names, runs = Numbered(), Numbered(), []
    for name, spec in specs.items():
        parts = name.split(".")
        number = next((int(part) for part in parts if part.isdigit()), None)
        kind = [shapes.of(fields_of(spec)), names.of(".".join("*" if part == str(number) else part for part in parts))]
        if runs and number is not None and runs[-1][1:3] == kind and runs[-1][3] + runs[-1][0] == number:
            runs[-1][0] += 1
        else:
            runs.append([1, *kind, number])
    return {"specs": list(shapes), "names": list(names), "layers": runs}


class Attributes(dict):
    """An object of a config that is read by attributes, and written as JSON."""

    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


# Parts of a config that are configs themselves.
PARTS = re.compile(r"(text|llm|language|thinker|vision|visual|vit|audio|speech|sound|encoder|projector)\w*_config$")


def part_of(name, value):
    """A part as an object: of its own class where transformers has it."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    if not PARTS.match(name) or not isinstance(value, dict):
        return value
    if value.get("model_type") in CONFIG_MAPPING_NAMES:
        return transformers.AutoConfig.for_model(**value)
    return type(name, (transformers.PretrainedConfig,), {"model_type": name})(**{field: part_of(field, each) for field, each in value.items()})


# Base classes of the configs whose Python comes with a checkpoint, by model_type. Others have PretrainedConfig's.
OWN_BASES = {"mimo": "Qwen2Config"}


def register_own_class(config):
    """A class for a model_type that comes with the checkpoint's own Python, which is not run: the fields as they are, on its base class."""
    import transformers
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from vllm.transformers_utils.config import _CONFIG_REGISTRY
    kind = config.get("model_type", "")
    config.pop("auto_map", None)
    if kind in CONFIG_MAPPING_NAMES or kind in _CONFIG_REGISTRY:
        return

    class FromFile(getattr(transformers, OWN_BASES.get(kind, "PretrainedConfig"))):
        model_type = kind
        max_position_embeddings = None

        def __init__(self, block_configs=None, **given):
            super().__init__(**{name: part_of(name, value) for name, value in given.items()})
            if block_configs is not None:
                self.block_configs = [Attributes({part: Attributes(given) for part, given in block.items()}) for block in block_configs]

    AutoConfig.register(kind, FromFile)


def speculation(folder, draft):
    """The engine's flag for a draft `{"method", "config", "tokens"}`; without a config it is part of
    the target's checkpoint."""
    config = draft.get("config")
    if config is None:
        return {"method": draft["method"], "num_speculative_tokens": draft["tokens"]}
    own = pathlib.Path(folder, "draft")
    own.mkdir(exist_ok=True)
    register_own_class(config)
    pathlib.Path(own, "config.json").write_text(json.dumps(config))
    return {"method": draft["method"], "model": str(own), "num_speculative_tokens": draft["tokens"]}


def build_draft(engine, target):
    """Builds the draft beside its target, as the worker's speculator does; its layers are marked."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import requires_aux_hidden_states, set_eagle3_aux_hidden_state_layers
    own, layers = engine.speculative_config, engine.compilation_config.static_forward_context
    if requires_aux_hidden_states(own):
        set_eagle3_aux_hidden_state_layers(target, own)
    before = set(layers)
    initialize_model(own.apply_draft_overrides(engine), model_config=own.draft_model_config)
    for name in set(layers) - before:
        layers[name].is_draft_layer = True


def caches_of(folder, config, flags):
    """vLLM's answer for a config, which it reads from the folder, and the engine's flags."""
    import torch
    from vllm.config import KVTransferConfig, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core import kv_cache_planning
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
    from vllm.v1.worker.workspace import init_workspace_manager
    register_own_class(config)
    pathlib.Path(folder, "config.json").write_text(json.dumps(config))
    pretend_ranks(flags["tp"])
    init_workspace_manager(torch.device("meta"))
    extra = {} if flags.get("prefix_caching", True) else {"enable_prefix_caching": False}
    if "draft" in flags:
        extra["speculative_config"] = speculation(folder, copy.deepcopy(flags["draft"]))
    engine = EngineArgs(model=folder, tokenizer=folder, skip_tokenizer_init=True, load_format="dummy", tensor_parallel_size=flags["tp"],
                        kv_cache_dtype=flags["kv_cache_dtype"], enforce_eager=True, language_model_only=True, generation_config="vllm", disable_log_stats=True,
                        distributed_executor_backend="mp", kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both"),
                        **extra).create_engine_config()
    with set_current_vllm_config(engine), on_meta():
        with set_default_torch_dtype(engine.model_config.dtype), torch.device("meta"):
            target = initialize_model(engine)
            if "draft" in flags:
                build_draft(engine, target)
        current_platform.update_block_size_for_backend(engine)
        specs = get_kv_cache_spec(engine)
        modules = engine.compilation_config.static_forward_context
        backends = list(dict.fromkeys(modules[name].get_attn_backend() for name in specs))
        register_all_kvcache_specs(engine)
        layout = resolve_kv_cache_layout(engine, [[each.name for each in get_supported_kv_cache_layouts(backends)]], list(specs.values()))
        shown, order = layers_of(copy.copy(specs)), {name: position for position, name in enumerate(specs)}
        groups = kv_cache_planning.get_global_kv_cache_groups(engine, [specs])
        placed = kv_cache_planning.get_kv_cache_configs(engine, [specs], [POOL_BYTES], groups)[0]
    cache = engine.cache_config
    hybrid = {"mamba_block_size": cache.mamba_block_size, "mamba_cache_mode": cache.mamba_cache_mode} if engine.model_config.is_hybrid else {}
    return {
        "architecture": engine.model_config.architecture, "resolved_dtype": cache.cache_dtype, "model_dtype": value_of(engine.model_config.dtype),
        "block_size": cache.block_size, **hybrid, "layout": layout.name, "backends": [backend.get_name() for backend in backends], **shown,
        "groups": [{
            "members": in_runs([order[name] for name in group.layer_names]), "spec": fields_of(group.kv_cache_spec), "block_size": group.kv_cache_spec.block_size,
            "page_sizes": sorted({spec.page_size_bytes for spec in kv_cache_planning.iter_layer_specs(group.kv_cache_spec)}),
        } for group in groups],
        "num_blocks_in_64_TiB": placed.num_blocks,
        "tensors": [[len(tensor.layers), tensor.offset, tensor.layer_stride, tensor.block_stride] for tensor in placed.kv_cache_tensors],
    }


def place_of(error):
    """The line of vLLM's source that raised an error, and the fields of the object that lacks an attribute."""
    lines = [frame.line for frame in traceback.extract_tb(error.__traceback__) if "/vllm/" in frame.filename]
    owner = vars(error.obj) if isinstance(error, AttributeError) and hasattr(error.obj, "model_type") else {}
    fields = {name: value for name, value in owner.items() if isinstance(value, (str, int))}
    return {**({"at": lines[-1]} if lines else {}), **({"owner": fields} if fields else {})}


def once_for_all_children():
    """Imports and the setting of the log's levels take longer than a case."""
    for module in ("engine.arg_utils", "model_executor.model_loader.utils", "v1.core.kv_cache_planning", "v1.worker.gpu.attn_utils"):
        importlib.import_module(f"vllm.{module}")
    with contextlib.suppress(ImportError):
        importlib.import_module("humming")  # vLLM asks for it; its import starts processes for seconds
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed
    configure_logging_if_needed(LoggingConfig())


def in_child(folder, config, flags, seconds):
    """The answer of a forked process: a case changes vLLM's state, and may end in a crash. The seconds
    are of a processor: a busy machine refuses nothing."""
    reader, writer = os.pipe()
    # A collection in the child would copy the parent's pages.
    gc.freeze()
    child = os.fork()
    if child == 0:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                answer = caches_of(folder, config, flags)
        except BaseException as error:  # noqa: BLE001: whatever vLLM raises is its answer
            answer = {"error": f"{type(error).__name__}: {str(error)[:600]}", **place_of(error)}
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(answer))
        os._exit(0)
    os.close(writer)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(20 * seconds)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    signal.alarm(0)
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"no answer in {seconds} s"}


def finite(value):
    """JSON as Python writes it has Infinity and NaN."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", help="config.json files")
    parser.add_argument("--tp", default="1", help="TP sizes, such as 1,2,8")
    parser.add_argument("--kv-cache-dtype", default="auto", help="such as auto,fp8")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--seconds", type=int, default=300, help="the longest processor time of a case")
    args = parser.parse_args()
    with_driver_stub()
    os.environ.update(ENVIRONMENT)
    warnings.simplefilter("ignore")
    pretend_gpu(args.gpu)
    once_for_all_children()
    capability = GPUS[args.gpu][0]
    for path in map(pathlib.Path, args.configs):
        config = json.loads(path.read_text())
        name = path.name if path.name != "config.json" else f"{path.resolve().parent.name}.json"
        for dtype in args.kv_cache_dtype.split(","):
            for tp in map(int, args.tp.split(",")):
                flags = {"tp": tp, "kv_cache_dtype": dtype, **({"prefix_caching": False} if args.no_prefix_caching else {})}
                with tempfile.TemporaryDirectory() as folder:
                    answer = in_child(folder, copy.deepcopy(config), flags, args.seconds)
                line = {"config": name, **flags, "gpu": f"sm_{capability[0]}{capability[1]}", **answer}
                print(json.dumps(finite(line), separators=(",", ":")), flush=True)


if __name__ == "__main__":
    main()
