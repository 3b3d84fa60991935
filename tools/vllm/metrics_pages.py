"""Writes /metrics pages of a vLLM D that READs KV, made by vLLM's own metric classes: usage: metrics_pages.py VLLM_TREE > pages.txt

Page n, from 0, is what D publishes after n prompts of PROMPT_TOKENS tokens, each READ in one transfer. Pages are separated by a line of "---".
"""
import sys
import types
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

PROMPT_TOKENS = 8192
# 256 MiB in 520 ms: TCP between two hosts, and 1 % of what 400 Gb/s give.
TRANSFER = {"transfer_duration": 0.520, "post_duration": 0.004, "bytes_transferred": 256 << 20, "num_descriptors": 1024}
LABELS = {"model_name": "large", "engine": "0"}


def page(stats_class, prom_class, prompts):
    registry = CollectorRegistry()

    def of(metric):
        return lambda **options: metric(registry=registry, **options)

    metrics = prom_class(None, {"Histogram": of(Histogram), "Counter": of(Counter)}, list(LABELS), {0: list(LABELS.values())})
    tokens = of(Counter)(name="vllm:prompt_tokens_by_source", documentation="Number of prompt tokens by source.", labelnames=[*LABELS, "source"])
    for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
        tokens.labels(*LABELS.values(), source)
    usage = of(Gauge)(name="vllm:kv_cache_usage_perc", documentation="KV-cache usage.", labelnames=list(LABELS))
    usage.labels(*LABELS.values()).set(0)
    info = of(Gauge)(name="vllm:cache_config_info", documentation="Information of the LLMEngine CacheConfig", labelnames=["num_gpu_blocks", "engine"])
    info.labels("4096", "0").set(1)
    for _ in range(prompts):
        stats = stats_class()
        for name, value in TRANSFER.items():
            stats.data[name].append(value)
        metrics.observe(stats.data)
        tokens.labels(*LABELS.values(), "external_kv_transfer").inc(PROMPT_TOKENS)
    lines = generate_latest(registry).decode().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("#") and "_bucket{" not in line and "_created{" not in line)


def load(tree):
    """Runs v1/nixl/stats.py with stand-ins for what it imports."""

    def module(name, **members):
        made = types.ModuleType(name)
        made.__dict__.update(members)
        sys.modules[name] = made

    class Stats:
        def __init__(self, data=None):
            self.data = data or {}
            self.__post_init__()

    class PromMetrics:
        def __init__(self, config, types_, labels, per_engine):
            self._histogram_cls, self._counter_cls = types_["Histogram"], types_["Counter"]
            self.per_engine_labelvalues = per_engine

    module("vllm")
    module("vllm.config", VllmConfig=object)
    module("vllm.distributed.kv_transfer.kv_connector.v1.metrics", KVConnectorPromMetrics=PromMetrics, KVConnectorStats=Stats, PromMetric=object, PromMetricT=object)
    module("vllm.v1.metrics.utils", create_metric_per_engine=lambda metric, values: {index: metric.labels(*each) for index, each in values.items()})
    source = Path(tree, "vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py").read_text().replace("@dataclass\n", "")
    made = {"__name__": "stats"}
    exec(compile(source, "stats.py", "exec"), made)
    return made["NixlKVConnectorStats"], made["NixlPromMetrics"]


classes = load(sys.argv[1])
print("---\n".join(page(*classes, prompts) for prompts in range(3)), end="")
