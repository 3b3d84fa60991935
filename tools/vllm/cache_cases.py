"""What an installed vLLM says of the caches of its whole registry: for each architecture a configuration, and that configuration with fields changed.

Run: python tools/vllm/cache_cases.py --out cases.jsonl FOLDER_OF_CONFIGS…
A configuration is a published one of a folder, else its config class's defaults, with as few layers as show a pattern; an attribute that vLLM misses is added.
A line of `cases.jsonl` is `{"meta": …}` with the base and the fields that vLLM read, or vLLM's answer to a change of it, as `cache_specs.py` prints it.
A case that the file holds already is not asked again. `npx tsx tools/vllm/learn-architectures.ts cases.jsonl gate.jsonl` makes kv-plan's table of the files."""
import argparse
import contextlib
import copy
import importlib
import json
import os
import pathlib
import random
import re
import sys
import tempfile
import time
import warnings

import cache_specs

LAYER_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
TEXT_FIELDS = ("text_config", "llm_config", "language_config", "thinker_config")
FEW_LAYERS = 8
MOST_REPAIRS = 24
# Values of attributes that vLLM misses, for configurations whose Python comes with a checkpoint. Others follow from the name.
TYPICAL = {
    "hidden_size": 1536, "num_hidden_layers": FEW_LAYERS, "num_attention_heads": 24, "num_key_value_heads": 8, "intermediate_size": 4096, "vocab_size": 32000, "head_dim": 64, "no_rope_layers": [1, 1, 1, 0] * 2,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "layer_norm_eps": 1e-6, "layer_norm_epsilon": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0, "rope_local_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False, "norm_topk_prob": True, "score_func": "sigmoid", "rotary_dim": 64,
    "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "num_expert_group": 1, "n_shared_experts": 1, "num_shared_experts": 1, "routed_scaling_factor": 1.0, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}
# Those that only some have, and of an encoder's part.
RARE = {"interleaved_sliding_window": [1024, 1024, 1024, None] * (FEW_LAYERS // 4), "layer_types": ["full_attention"] * FEW_LAYERS, "hybrid_override_pattern": "M*-E" * (FEW_LAYERS // 4), "hybrid_layer_pattern": [1, 0] * (FEW_LAYERS // 2), "activation": "gelu", "norm_type": "layer_norm", "merge_size": 2, "window_size": 400, "n_fft": 400, "sampling_rate": 16000, "hop_length": 160, "vision_feature_layer": -1, "select_layer": -1}
ENCODER = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16, "intermediate_size": 2048, "patch_size": 14, "image_size": 224, "num_channels": 3, "hidden_act": "gelu",
    "layer_norm_eps": 1e-6, "rms_norm_eps": 1e-6, "depth": 2, "num_heads": 16, "embed_dim": 1024, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "out_hidden_size": 1536,
}
# Model types of checkpoints whose architecture is named otherwise.
OWN_TYPES = {"BailingMoeV2_5ForCausalLM": "bailing_hybrid", "BailingMoeV3ForCausalLM": "bailing_hybrid", "MistralLarge3ForCausalLM": "deepseek_v3"}
# Many classes make latents of K and V where a configuration has these.
LATENT_FIELDS = {"kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"}
# Each is a change of one field or two: a value, or None to take the field out. `=null` writes an explicit null.
PROBES = (
    ("head_dim", 96), ("head_dim", None), ("head_dim", "=null"), ("num_key_value_heads", 4), ("num_key_value_heads", None), ("num_key_value_heads", "=null"),
    ("sliding_window", 96), ("sliding_window", None), ("use_sliding_window", True), ("layer_types", "mixed"), ("layer_types", "sliding"), ("layer_types", "full"),
    ("layer_types", None), ("is_causal", False), ("hidden_size", "double"), ("num_attention_heads", "half"), ("sliding_window_pattern", 3),
)
SUSPECT = re.compile(r"attn|attention|linear_|mamba|ssm|conv|_interval|period|offset|pattern|chunk|window|shared|sparse|index|compress|cross_|global|latent|hybrid|swa|"
                     r"block_type|layer_types|_ids$|indices|kv|head|multi_query|lora_rank|channels|no_rope|nope|per_layer|is_encoder|is_decoder|loop|recur|cla", re.I)


def registry():
    """The kind, module and class of each architecture that generates text."""
    from vllm.model_executor.models import registry as known
    found = {}
    for kind, models in (("text", known._TEXT_GENERATION_MODELS), ("multimodal", known._MULTIMODAL_MODELS), ("draft", known._SPECULATIVE_DECODING_MODELS), ("text", known._TRANSFORMERS_SUPPORTED_MODELS)):
        for architecture, (module, name) in models.items():
            found.setdefault(architecture, ("multimodal" if "MultiModal" in name else kind, module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}", name))
    return found


def is_frame(module):
    """Whether the class takes its layers of transformers: its architectures have nothing in common."""
    return module.endswith(".transformers")


def published(folders):
    """The smallest configuration of each architecture."""
    found = {}
    for path in sorted(path for folder in folders for path in pathlib.Path(folder).rglob("*.json")):
        try:
            config = json.loads(path.read_text(), parse_constant=lambda _: 1e30)
        except ValueError:
            continue
        names = config.get("architectures") if isinstance(config, dict) else None
        if not names or not isinstance(names[0], str):
            continue
        if names[0] not in found or len(json.dumps(config)) < len(json.dumps(found[names[0]][1])):
            found[names[0]] = (path.name, config)
    return found


def squeezed(name):
    return re.sub(r"[^a-z0-9]", "", re.sub(r"(ForCausalLM|ForConditionalGeneration|ForBlockDiffusion|ForActionPrediction|RealtimeGeneration|LMHeadModel|Model)$", "", name).lower())


def config_classes():
    """Config classes of transformers and vLLM by the architecture's name, and by a squeezed model type."""
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto
    from vllm.transformers_utils import config as vllm_configs
    by_architecture = {}
    for title, mapping in vars(modeling_auto).items():
        if title.endswith("_MAPPING_NAMES"):
            for kind, names in mapping.items():
                for name in names if isinstance(names, (tuple, list)) else (names,):
                    by_architecture.setdefault(name, kind)
    own = {kind: kind for kind in vllm_configs._CONFIG_REGISTRY}
    theirs = configuration_auto.CONFIG_MAPPING_NAMES

    def of(architecture):
        kind = by_architecture.get(architecture)
        if kind is None:
            wanted = squeezed(architecture)
            kind = next((kind for kind in (*own, *theirs) if re.sub(r"[^a-z0-9]", "", kind.lower()) == wanted), None)
        if kind in own:
            return kind, vllm_configs._CONFIG_REGISTRY[kind]
        # A wrapper may have the name of its encoder.
        return (kind, getattr(transformers, theirs[kind])) if kind in theirs and "Vision" not in theirs[kind] else (None, None)

    return of


def text_of(config):
    """The part with the language model's fields."""
    for field in TEXT_FIELDS:
        if isinstance(config.get(field), dict):
            return text_of(config[field])
    return config


def with_few_layers(config):
    """The configuration with its first layers only."""
    text = text_of(config)
    field = next((name for name in LAYER_FIELDS if isinstance(text.get(name), int)), None)
    if field is None or text[field] <= FEW_LAYERS:
        return config
    layers = text[field]
    for name, value in text.items():
        if isinstance(value, (list, str)) and len(value) in (layers, layers + 1) and name != "architectures":
            text[name] = value[:FEW_LAYERS]
        elif isinstance(value, dict) and value and all(key.isdigit() for key in value):
            text[name] = {key: each for key, each in value.items() if int(key) < FEW_LAYERS}
    text[field] = FEW_LAYERS
    return config


def without_latents():
    return {name: value for name, value in TYPICAL.items() if name not in LATENT_FIELDS}


def language_model(own=None):
    """The language model of a wrapper: of its own type, else one that most take."""
    if own:
        return {**TYPICAL, "model_type": own}
    return {**without_latents(), "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def guessed(name):
    """A value for an attribute that vLLM misses."""
    if name in TYPICAL or name in RARE:
        return {**TYPICAL, **RARE}[name]
    if name in TEXT_FIELDS:
        return language_model()
    if cache_specs.PARTS.match(name):
        return dict(ENCODER)
    if re.match(r"(num|n)_", name):
        return FEW_LAYERS
    if re.search(r"_act$|activation", name):
        return "gelu"
    if re.search(r"scor\w*_func", name):
        return "sigmoid"
    if re.match(r"(use|is|has|enable|add|with|apply|scale)_|.*(bias|norm|_layers_?only|gate)$", name):
        return False
    if re.search(r"eps|epsilon", name):
        return 1e-6
    if re.search(r"dropout|pdrop|_prob$", name):
        return 0.0
    if re.search(r"scal|mult|factor|theta|alpha|ratio", name):
        return 1.0
    if re.search(r"_conf(ig)?$", name):
        return {}
    if re.search(r"types$|_list$|_ids$|_layers$", name):
        return []
    return 8


@contextlib.contextmanager
def traced(names):
    """Collects the fields that vLLM reads of a config, whether it has them or not."""
    from transformers import PretrainedConfig
    before = PretrainedConfig.__getattribute__

    def read(self, name):
        if name[0] != "_" and "/vllm/" in sys._getframe(1).f_code.co_filename:
            names.add(name)
        return before(self, name)

    PretrainedConfig.__getattribute__ = read
    try:
        yield
    finally:
        PretrainedConfig.__getattribute__ = before


def asked(config, flags, seconds=60):
    """vLLM's answer, with the names of the fields that it read."""
    def answer(folder, config, flags):
        names, before = set(), set(sys.modules)
        with traced(names):
            found = real(folder, config, flags)
        return {**found, "read": sorted(names), "modules": [name for name in sys.modules if name not in before]}

    real, cache_specs.caches_of = cache_specs.caches_of, answer
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = cache_specs.in_child(folder, copy.deepcopy(config), flags, seconds)
    finally:
        cache_specs.caches_of = real
    # Modules that a child had to import are there for the next one.
    for name in found.pop("modules", []):
        with contextlib.suppress(BaseException):
            importlib.import_module(name)
    return found


AUTO = {"tp": 1, "kv_cache_dtype": "auto"}


def parts_of(config, path=""):
    """The configuration and the parts that are configurations, each with its path."""
    yield path, config
    for name, value in config.items():
        if isinstance(value, dict) and (cache_specs.PARTS.match(name) or name in TEXT_FIELDS):
            yield from parts_of(value, f"{path}{name}.")


def path_of(part, config):
    return next(path for path, each in parts_of(config) if each is part)


def part_that_lacks(config, answer):
    """The part with the most of the fields of the object that lacks an attribute; else the language model's."""
    owner = answer.get("owner", {})

    def likeness(part):
        plain = {name: value for name, value in part.items() if isinstance(value, (str, int))}
        return sum(owner.get(name) == value for name, value in plain.items()) / max(len(plain), 1)

    parts = [part for _, part in parts_of(config)]
    return max(parts, key=likeness) if owner else text_of(config)


def value_in(text):
    """A literal of a source line or an error."""
    return {"true": True, "false": False}.get(text.lower(), int(text) if text.isdigit() else text)


def asked_for(answer, layers):
    """A field that an error or the source line that raised it asks for, and its value."""
    error, line = answer["error"], answer.get("at", "")
    said = re.search(r"(?:requires|expects|needs|support) (\w+)(?:=| is )'?(\w+)'?", error)
    if said:
        yield said[1], value_in(said[2])
    number = re.search(r"requires a positive integer (\w+)", error)
    if number:
        yield number[1], FEW_LAYERS
    only = re.search(r"Unsupported activation: silu. Only (\w+) is supported", error)
    if only:
        yield "hidden_act", only[1]
    typed = re.search(r"[Ff]ield '(\w+)' expected int, got NoneType", error)
    if typed:
        yield typed[1], 512
    if line.startswith("assert "):
        for name in re.findall(r"not (?:\w+\.)*(\w+)", line):
            yield name, False
        for name, value in re.findall(r"(\w+) (?:==|in) \[?[\"']?([\w.]+)", line):
            yield name, value_in(value)
        for name in re.findall(r"(\w+) is not None", line):
            yield name, guessed(name)
        for name in re.findall(r"(\w+) > 0", line):
            yield name, 1
        for name in re.findall(r"config\.(\w+)(?= and|,|$)", line):
            yield name, True
    if "is not subscriptable" in error or "is not iterable" in error:
        for name in re.findall(r"(\w+)\[\w+\]", line):
            yield name, [0, 1] * (layers // 2)
        for name in re.findall(r"\((?:\w+\.)*(\w+)\)", line):
            yield name, []
    if "NoneType" in error:
        for name in re.findall(r"len\((?:\w+\.)*(\w+)\)", line):
            yield name, []
        for name in re.findall(r"int\((?:\w+\.)*(\w+)\)", line):
            yield name, 1
    if "no attribute 'strip'" in error:
        for name in re.findall(r"(\w+)\.strip", line):
            yield name, "1"


def repaired(config):
    """A configuration that vLLM builds, with the attributes that it missed, and the answer; or the error that remains."""
    added, wished = [], []
    for _ in range(MOST_REPAIRS):
        answer = asked(config, AUTO)
        error = answer.get("error", "")
        if error == "":
            break
        part = text_of(config)
        wishes = [(field, value) for field, value in asked_for(answer, FEW_LAYERS) if field not in wished]
        typed = re.search(r"[Ff]ield '(\w+)'.*?(float|int)\b", error, re.S)
        if typed and type(part.get(typed[1])) in (int, float) and typed[1] not in added:
            wishes = [(typed[1], float(part[typed[1]]) if typed[2] == "float" else int(part[typed[1]]))]
        missing = re.search(r"object has no attribute '(\w+)'|KeyError: '(\w+)'", error)
        name = missing and (missing[1] or missing[2])
        if wishes:
            name, value = wishes[0]
            wished.append(name)
        elif name is not None:
            part = part_that_lacks(config, answer)
            value = ENCODER[name] if part is not text_of(config) and name in ENCODER else guessed(name)
        path = path_of(part, config)
        # A field of the language model is named alone: a model needs it.
        full = name if part is text_of(config) else f"{path}{name}" if path else f".{name}"
        if name is None or (not wishes and (full in added or name in part)):
            break
        for each in [part] + [each for _, each in parts_of(config) if wishes and name in each]:
            each[name] = value
        if full not in added:
            added.append(full)
    answer.pop("owner", None)
    return config, added, answer


def changed(config, change):
    """The configuration with fields of its text part changed, or undefined where the change says nothing."""
    config = copy.deepcopy(config)
    part = text_of(config)
    for name, value in change.items():
        if value is None:
            part.pop(name, None)
        else:
            part[name] = None if value == "=null" else value
    return config


# What is asked of a wrapper: its language model is another architecture of the registry.
WRAPPER_PROBES = {("head_dim", 96), ("num_key_value_heads", 4), ("sliding_window", 96), ("layer_types", "mixed"), ("is_causal", False)}


def other_values(value):
    """Other values that a checkpoint may have."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int) and value > 0:
        return [value * 2] + [value // 2] * (value > 1)
    if isinstance(value, list) and len({json.dumps(each) for each in value}) > 1:
        return [value[::-1], value[1:] + value[:1]]
    return []


def probes_of(config, read, few):
    """Changes of one field that may decide. `few`: those that most architectures have; `wrapper`: the least."""
    part = text_of(config)
    layers = next((part[name] for name in LAYER_FIELDS if isinstance(part.get(name), int)), 0)
    found, seen = [], set()

    def add(change):
        key = json.dumps(change, sort_keys=True)
        if key not in seen and changed(config, change) != config:
            seen.add(key)
            found.append(change)

    for name, value in PROBES:
        has = name in part
        if few == "wrapper" and (name, value) not in WRAPPER_PROBES:
            continue
        if not has and name not in read:
            continue
        if value is None and not has:
            continue
        if name == "layer_types" and value is not None:
            kinds = {"mixed": ["sliding_attention", "full_attention"], "sliding": ["sliding_attention"], "full": ["full_attention"]}[value]
            change = {name: (kinds * layers)[:layers]}
            if value != "full" and not part.get("sliding_window"):
                change["sliding_window"] = 80
            if value == "full" and not has:
                continue
            add(change)
        elif value in ("double", "half"):
            if isinstance(part.get(name), int):
                add({name: part[name] * 2 if value == "double" else part[name] // 2})
        else:
            add({name: value})
    if not few:
        for name, value in part.items():
            if name in {probe[0] for probe in PROBES} or not SUSPECT.search(name) or name.endswith("_token_id") or name not in read:
                continue
            for other in other_values(value)[:1]:
                add({name: other})
    return found


class Cases:
    """The file of answers. A base that is asked again takes the place of the one before, and of its answers."""

    def __init__(self, path):
        self.path, self.known, self.bases = pathlib.Path(path), {}, {}
        entries = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                name = entry.get("meta", entry.get("config"))
                entries[name] = [*entries.get(name, []), entry] if "config" in entry else [entry]
        self.path.write_text("")
        for entry in (entry for each in entries.values() for entry in each):
            self.write(entry)
            if "meta" in entry:
                self.bases[entry["meta"]] = entry
            else:
                self.known[self.key(entry)] = entry

    @staticmethod
    def key(entry):
        changed = entry.get("changed", {})
        asked = [entry["config"], changed, entry["tp"], entry["kv_cache_dtype"], entry.get("draft")]
        return json.dumps(asked, sort_keys=True)

    def write(self, entry):
        with self.path.open("a") as file:
            file.write(json.dumps(cache_specs.finite(entry), separators=(",", ":")) + "\n")

    def ask(self, name, base, change, flags):
        entry = {"config": name, **({"changed": change} if change else {}), **flags, "gpu": "sm_90"}
        known = self.known.get(self.key(entry))
        if known is None:
            known = {**entry, **asked(changed(base, change), flags)}
            known.pop("read", None)
            self.write(known)
            self.known[self.key(entry)] = known
        return known


def follows(base, answer):
    """Whether vLLM's layers are those of the configuration: a class may have its own instead."""
    part = text_of(base)
    layers = next((part[name] for name in LAYER_FIELDS if isinstance(part.get(name), int)), None)
    return "error" not in answer and layers == len({first + index for count, _, _, first in answer["layers"] for index in range(count) if first is not None})


def whole_heads(part):
    """Defaults of a class may not fit one another."""
    heads, hidden = part.get("num_attention_heads"), part.get("hidden_size")
    if type(heads) is int and type(hidden) is int and heads > 0 and hidden % heads and not part.get("head_dim"):
        part["head_dim"] = 128


def ask_base(architecture, kind, module, sources, cases):
    """The configuration whose fields are changed: the first of the sources that vLLM builds, or the error of the last."""
    with contextlib.suppress(Exception), contextlib.redirect_stderr(open(os.devnull, "w")):
        importlib.import_module(module)
    if "error" not in cases.bases.get(architecture, {"error": True}):
        return
    for _, config in sources:
        whole_heads(text_of(config))
    tried = [each for source, config in sources for each in ((source, with_few_layers(copy.deepcopy(config))), (f"{source}, all layers", copy.deepcopy(config)))]
    found = None
    for position, (source, config) in enumerate(tried):
        if position % 2 == 1 and config == tried[position - 1][1]:
            continue
        base, added, answer = repaired(config)
        better = found is None or "error" in found[3] and "error" not in answer
        if better or follows(base, answer):
            found = source, base, added, answer
        if follows(base, answer):
            break
    source, base, added, answer = found
    entry = {"meta": architecture, "kind": kind, "source": source, "added": added, "read": answer.pop("read", []), "base": base}
    if "error" in answer:
        entry.update({name: answer[name] for name in ("error", "at") if name in answer})
    cases.write(entry)
    cases.bases[architecture] = entry
    cases.write({"config": architecture, **AUTO, "gpu": "sm_90", **answer})
    cases.known[Cases.key({"config": architecture, **AUTO})] = answer


def ask_changes(architecture, cases, few):
    entry = cases.bases[architecture]
    if "error" in entry:
        return
    base = entry["base"]
    if few == "alias":
        cases.ask(architecture, base, {}, {"tp": 8, "kv_cache_dtype": "fp8"})
        return
    for flags in ({"tp": 2, "kv_cache_dtype": "auto"}, {"tp": 8, "kv_cache_dtype": "fp8"}):
        cases.ask(architecture, base, {}, flags)
    for change in probes_of(base, set(entry["read"]), few):
        cases.ask(architecture, base, change, AUTO)
    # Fewer KV heads than ranks.
    if few != "wrapper" and "num_key_value_heads" in text_of(base):
        cases.ask(architecture, base, {"num_key_value_heads": 2}, {"tp": 8, "kv_cache_dtype": "auto"})


GATE_FLAGS = [{"tp": tp, "kv_cache_dtype": dtype} for dtype in ("auto", "fp8") for tp in (1, 2, 8)]


def gate_changes(architecture, config, read, count):
    """So many changes of one field and of two, the same in each run."""
    part, draw = text_of(config), random.Random(architecture)
    deciding = sorted(name for name in part if (SUSPECT.search(name) or name in LAYER_FIELDS) and name in read and not re.search(r"_token_id|dropout|_act$", name))
    without = draw.sample([{name: value} for name in deciding for value in (None, "=null")], min(4, len(deciding)))
    singles = probes_of(config, {probe[0] for probe in PROBES}, few=True) + without
    singles += [change for change in ({name: value} for name in deciding for value in other_values(part[name])) if change not in singles]
    draw.shuffle(singles)
    chosen = singles[:count // 2]
    for _ in range(20 * count):
        first, second = draw.sample(singles, 2)
        change = {**first, **second}
        if len(chosen) < count and len(change) > max(len(first), len(second)) and change not in chosen:
            chosen.append(change)
    return [(change, GATE_FLAGS[index % len(GATE_FLAGS)]) for index, change in enumerate(chosen)]


def ask_gate(cases, gate, only, count, minutes):
    """Answers to changes that the table is not made of."""
    began, kinds = time.time(), ("text", "multimodal", "draft")
    bases = [entry for name, entry in cases.bases.items() if name and "error" not in entry and (not only or name in only)]
    for entry in sorted(bases, key=lambda entry: kinds.index(entry["kind"])):
        if time.time() - began > minutes * 60:
            break
        asked_before = len(gate.known)
        for change, flags in gate_changes(entry["meta"], entry["base"], set(entry["read"]), count):
            gate.ask(entry["meta"], entry["base"], change, flags)
        if len(gate.known) > asked_before:
            print(f"{time.time() - began:.0f} s {entry['meta']}", flush=True)


def heads_of_drafts(part):
    """Heads for EAGLE 3 and EAGLE of Llama's layers, for a target of this width."""
    base = {
        "model_type": "llama",
        "hidden_size": part.get("hidden_size", 1536),
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 4096,
        "vocab_size": part.get("vocab_size", 32000),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
    head = {**base, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}
    eagle3 = {"method": "eagle3", "tokens": 3, "config": head}
    yield eagle3
    for change in ({"num_key_value_heads": 2}, {"num_hidden_layers": 2}, {"head_dim": 64}):
        yield {**eagle3, "config": {**eagle3["config"], **change}}
    yield {"method": "eagle", "tokens": 2, "config": {**base, "architectures": ["EagleLlamaForCausalLM"]}}


def ask_drafts(cases, drafts, only, minutes):
    """Answers of targets with a draft beside them: layers of the target's own checkpoint, and heads
    of Llama's layers."""
    began = time.time()
    bases = [entry for name, entry in cases.bases.items() if name and "error" not in entry and entry["kind"] == "text" and (not only or name in only)]
    for entry in bases:
        if time.time() - began > minutes * 60:
            break
        name, base = entry["meta"], entry["base"]
        own = {} if any(re.search(r"nextn|mtp", field) for field in text_of(base)) else {"num_nextn_predict_layers": 1}
        for tokens, flags in ((1, AUTO), (3, GATE_FLAGS[4])):
            if "error" in drafts.ask(name, base, own, {**flags, "draft": {"method": "mtp", "tokens": tokens}}):
                break
        for index, draft in enumerate(heads_of_drafts(text_of(base))):
            answer = drafts.ask(name, base, {}, {**GATE_FLAGS[index % len(GATE_FLAGS)], "draft": draft})
            # Without the interface for EAGLE 3 no head can be had.
            if "does not support EAGLE3" in answer.get("error", ""):
                break
        print(f"{time.time() - began:.0f} s {name}", flush=True)


def shape_of(config_class):
    """Attention heads, KV heads and head size that a class takes where a configuration has none; null for what it computes from others."""
    made = config_class().to_dict()
    heads, hidden = made.get("num_attention_heads"), made.get("hidden_size")
    other = made
    with contextlib.suppress(Exception):
        other = config_class(num_attention_heads=heads * 2, hidden_size=hidden * 4).to_dict()
    names = ("num_key_value_heads", "head_dim")
    return [heads if type(heads) is int else None, *(made.get(name) if type(made.get(name)) is int and made[name] == other.get(name) else None for name in names)]


def facts(architectures):
    """The release, the architectures that it no longer serves, those without a cache, and the shapes that config classes take where a configuration has none."""
    import transformers
    import vllm
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from vllm.model_executor.models import registry as known
    from vllm.transformers_utils.config import _CONFIG_REGISTRY
    kept = {**known._EMBEDDING_MODELS, **known._LATE_INTERACTION_MODELS, **known._TOKEN_CLASSIFICATION_MODELS, **known._SEQUENCE_CLASSIFICATION_MODELS}
    from vllm.model_executor.layers import quantization
    methods = [name for name in quantization.QUANTIZATION_METHODS if name not in quantization.DEPRECATED_QUANTIZATION_METHODS]
    shapes = {}
    for kind in {*CONFIG_MAPPING_NAMES, *_CONFIG_REGISTRY}:
        with contextlib.suppress(Exception):
            shape = shape_of(_CONFIG_REGISTRY.get(kind) or getattr(transformers, CONFIG_MAPPING_NAMES[kind]))
            if any(shape):
                shapes[kind] = shape
    return {"meta": "", "release": vllm.__version__, "architectures": {name: [kind, f"{module}.{title}"] for name, (kind, module, title) in architectures.items()},
            "servedUntil": known._PREVIOUSLY_SUPPORTED_MODELS, "others": sorted(name for name in kept if name not in architectures), "quantizations": methods, "shapes": shapes}


def made_configs(architecture, kind, class_of):
    """The defaults of its config class, if there is one, a wrapper's around a language model, and values that are typical."""
    model_type, config_class = class_of(architecture)
    found = []
    if config_class is not None:
        with contextlib.suppress(Exception):
            found.append((f"{config_class.__name__}()", config_class().to_dict()))
    if kind == "multimodal":
        defaults = found[0][1] if found else {}
        own = text_of(defaults).get("model_type") if text_of(defaults) is not defaults else None
        found += [(f"typical values in {field}", {field: language_model(own), "vision_config": dict(ENCODER)}) for field in ("text_config", "llm_config")]
    found.append(("typical values", without_latents()))
    found.append(("typical values with latents", dict(TYPICAL)))
    named = {"architectures": [architecture], "model_type": model_type or own_type(architecture)}
    # JSON has no infinity.
    return [(source, json.loads(json.dumps({**config, **named}, default=str), parse_constant=lambda _: 1e30)) for source, config in found]


def own_type(architecture):
    """A model type that vLLM's own code names, such as sarvam_mla; else the architecture's name."""
    from vllm.transformers_utils import model_arch_config_convertor
    named = re.findall(r'"([a-z]\w+)"', pathlib.Path(model_arch_config_convertor.__file__).read_text())
    wanted = squeezed(architecture)
    return OWN_TYPES.get(architecture) or next((name for name in named if name.replace("_", "") == wanted), wanted)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", help="folders of published config.json files")
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="", help="architectures, separated by commas")
    parser.add_argument("--kinds", default="text,multimodal")
    parser.add_argument("--few", action="store_true", help="only the changes that most architectures have")
    parser.add_argument("--skip-errors", action="store_true", help="do not try again what vLLM refused")
    parser.add_argument("--gate", help="ask instead for changes of one and two fields at other TP sizes, as a check of the table, and keep them in this file")
    parser.add_argument("--drafts", help="ask instead with drafts beside the targets, and keep the answers in this file")
    parser.add_argument("--count", type=int, default=30, help="of changes for each architecture, with --gate")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no architecture after this time")
    args = parser.parse_args()
    cache_specs.with_driver_stub()
    os.environ.update(cache_specs.ENVIRONMENT)
    warnings.simplefilter("ignore")
    cache_specs.pretend_gpu("h100")
    cache_specs.once_for_all_children()
    cases = Cases(args.out)
    only = args.only and args.only.split(",")
    if args.drafts:
        ask_drafts(cases, Cases(args.drafts), only, args.minutes)
        return
    if args.gate:
        ask_gate(cases, Cases(args.gate), only, args.count, args.minutes)
        return
    files, class_of, began = published(args.folders), config_classes(), time.time()
    if "" not in cases.bases:
        cases.write(facts(registry()))
    # Published ones first, so that a run that is cut short has the most that people use.
    wanted = [(architecture, *rest) for architecture, rest in sorted(registry().items(), key=lambda entry: entry[0] not in files)
              if rest[0] in args.kinds.split(",") and (not args.only or architecture in args.only.split(","))]

    def each(step):
        for architecture, kind, module, name in wanted:
            if time.time() - began > args.minutes * 60:
                break
            if args.skip_errors and "error" in cases.bases.get(architecture, {}):
                continue
            try:
                step(architecture, kind, module, name)
            except Exception as error:  # noqa: BLE001: the next architecture goes on
                print(f"{architecture}: {type(error).__name__}: {error}", file=sys.stderr)
            base = cases.bases.get(architecture, {})
            print(f"{time.time() - began:.0f} s {architecture} {base.get('source')}: {base.get('error', 'built')[:160]}", flush=True)

    def base_of(architecture, kind, module, name):
        # Names of one class share a published configuration, unless the class is a frame for any model.
        others = () if is_frame(module) else (other for other, each in registry().items() if each[1:] == (module, name))
        named = [architecture, *others]
        sources = [(source, {**config, "architectures": [architecture]}) for source, config in (files[other] for other in named if other in files)][:1]
        ask_base(architecture, kind, module, sources + made_configs(architecture, kind, class_of), cases)

    learned = set()

    def changes_of(architecture, kind, module, name):
        few = "alias" if (module, name) in learned and not is_frame(module) else "wrapper" if kind == "multimodal" else args.few
        ask_changes(architecture, cases, few)
        learned.add((module, name))

    each(base_of)
    each(changes_of)


if __name__ == "__main__":
    main()
