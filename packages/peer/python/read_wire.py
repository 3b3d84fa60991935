"""Reads what vLLM's NixlConnector sends and what a request may contain, from a wheel or a tree.

usage: python3 -I read_wire.py WHEEL_OR_TREE

Sources are parsed with `ast`, never executed or extracted to disk. Prints JSON: `vllm` and
`connectorVersion` (null when not found), `wire` (section to name to form), `checks` (a line each),
and `requests` (part to names; null without an API server). A missing section is absent. Unreadable
input gives `{"error": ...}`.
"""

import ast
import json
import os
import re
import sys

# -I keeps this folder out of the path, too.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True

from checks import checks
from client_requests import ARGUMENTS, requests
from sources import Unreadable, parse, read_tree, read_wheel
from syntax import FUNCTIONS, assignments, last_name, names_of_dict, note_keys, own_fields, own_nodes, text_of

NIXL = "vllm/distributed/kv_transfer/kv_connector/v1/nixl"
# The whole connector was one file in early versions.
CONNECTOR = re.compile(rf"{NIXL}/\w+\.py|{NIXL}_connector\.py")
# It reads and writes keys of kv_transfer_params.
ENGINE = re.compile(r"vllm/(v1|entrypoints)/(\w+/)*\w+\.py")
TOPOLOGY = "vllm/distributed/kv_transfer/kv_connector/utils.py"
LAYOUTS = ("vllm/v1/kv_cache_layout.py", "vllm/v1/attention/backends/utils.py")
HASH_FUNCTION = "vllm/config/utils.py"
VERSION = "vllm/_version.py"
DIST_INFO = re.compile(r"vllm[\w.+-]*\.dist-info/METADATA")

# Half of the names that every known version has identify a class or a dict, so that renamed
# names are reported.
PAYLOAD = {"compatibility_hash", "agent_metadata_bytes"}
METADATA = {"engine_id", "agent_metadata", "kv_caches_base_addr", "num_blocks", "block_lens", "kv_cache_layout"}
FACTORS = {"vllm_version", "nixl_connector_version", "dtype", "num_kv_heads", "head_size", "attn_backend_name"}
ANSWER = {"do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id", "tp_size"}
REGISTRATION = {"request_id", "decode_engine_id", "decode_host", "decode_port", "decode_tp_size", "local_block_ids"}


def is_wanted(name):
    return name in (*LAYOUTS, HASH_FUNCTION, VERSION, TOPOLOGY) or any(
        pattern.fullmatch(name) for pattern in (CONNECTOR, ENGINE, ARGUMENTS, DIST_INFO)
    )


def is_half(found, names):
    return 2 * len(names & set(found)) >= len(names)


class Source:
    def __init__(self, trees):
        self.constants, self.classes, self.functions = {}, [], []
        for name, tree in trees.items():
            for statement in tree.body:
                target = statement.target if isinstance(statement, ast.AnnAssign) else None
                if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                    target = statement.targets[0]
                if isinstance(target, ast.Name) and isinstance(statement.value, ast.Constant):
                    self.constants[target.id] = statement.value
            self.collect(tree, os.path.basename(name)[:-3])

    def collect(self, node, place):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                self.classes.append(child)
                self.collect(child, f"{place} {child.name}")
            elif isinstance(child, FUNCTIONS):
                self.functions.append((mode_of(place), child))
                self.collect(child, place)
            else:
                self.collect(child, place)

    def fields(self, names):
        """Fields of the class with these names: type and default; `class`: its encoding."""
        found = [entry for entry in self.classes if is_half(own_fields(entry), names)]
        if not found:
            return None
        best = max(found, key=lambda entry: len(names & set(own_fields(entry))))
        fields = {}
        for base in best.bases:
            inherited = next((entry for entry in self.classes if entry.name == last_name(base)), None)
            fields |= own_fields(inherited) if inherited is not None and inherited is not best else {}
        kinds = [ast.unparse(decorator) for decorator in best.decorator_list]
        kinds += [ast.unparse(each) for each in (*best.bases, *(word.value for word in best.keywords if not word.arg))]
        kinds += [f"{word.arg}={ast.unparse(word.value)}" for word in best.keywords if word.arg]
        return {"class": " ".join(kinds)} | fields | own_fields(best)

    def keys(self, names):
        """Per mode, keys of the dict with most of these names, and keys added to it."""
        found = {}
        for mode, function in self.functions:
            for node in own_nodes(function):
                keys = names_of_dict(node)
                if keys is None or not is_half(keys, names):
                    continue
                common, best = len(names & set(keys)), found.get(mode, (0, {}))
                if common < best[0]:
                    continue
                for target, value in assignments(function):
                    if value is node:
                        keys |= added_keys(function, ast.unparse(target))
                # Two branches may have a dict each.
                found[mode] = (common, best[1] | keys if common == best[0] else keys)
        return found

    def only_keys(self, names):
        """As `keys`, of the mode with most of the names."""
        return max(self.keys(names).values(), key=lambda entry: entry[0], default=(0, {}))[1]

    def nested(self, value):
        """A factor's parts: keys of the dicts that its function returns."""
        if not isinstance(value, ast.Call):
            return []
        for _, function in self.functions:
            if function.name == last_name(value.func):
                returned = [node.value for node in own_nodes(function) if isinstance(node, ast.Return) and node.value]
                return [key for node in returned for key in names_of_dict(node) or {}]
        return []


def mode_of(place):
    return next((mode for mode in ("push", "pull") if mode in place.lower()), "")


def added_keys(function, owner):
    """Keys set by `d["k"] = …`, `d.update(k=…)`, `d |= {…}`."""
    keys = {}
    for node in own_nodes(function):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == owner:
            keys[text_of(node.slice, {})] = None
        if isinstance(node, ast.AugAssign) and ast.unparse(node.target) == owner:
            keys |= names_of_dict(node.value) or {"**" + last_name(node.value): None}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == owner:
            if node.func.attr == "setdefault" and node.args:
                keys[text_of(node.args[0], {})] = None
            if node.func.attr == "update":
                keys |= {word.arg or "**" + last_name(word.value): word.value for word in node.keywords}
                for argument in node.args:
                    keys |= names_of_dict(argument) or {"**" + last_name(argument): None}
    return keys


def notifications(source):
    """Texts of NIXL notifications, per mode."""
    forms = {}
    for mode, function in source.functions:
        for call in own_nodes(function):
            if not isinstance(call, ast.Call):
                continue
            sent = [word.value for word in call.keywords if word.arg in ("notif_msg", "notif_id")]
            if last_name(call.func) == "send_notif":
                sent += call.args[1:2]
            for value in sent:
                for node in values_of(value, function):
                    text = text_of(node, source.constants)
                    # A lone {name} was made elsewhere.
                    if not re.fullmatch(r"\{\w+\}", text):
                        forms.setdefault(mode, {})[text] = ""
    return forms


def values_of(node, function):
    """A local variable's value; other nodes as they are."""
    if not isinstance(node, ast.Name):
        return [node]
    return [value for target, value in assignments(function) if isinstance(target, ast.Name) and target.id == node.id]


def handshake(source):
    """The frames of request and reply, as client and listener send them."""
    frames = {}
    for _, function in source.functions:
        for call in own_nodes(function):
            if not isinstance(call, ast.Call) or not call.args or not isinstance(call.args[0], ast.Tuple):
                continue
            parts = call.args[0].elts
            if last_name(call.func) == "encode" and any(last_name(part) == "GET_META_MSG" for part in parts):
                frames["request"] = " ".join(text_of(part, source.constants) for part in parts)
            if last_name(call.func) == "send_multipart":
                # After the peer's identity and an empty frame.
                frames["reply"] = " ".join(text_of(part, source.constants) for part in parts[2:])
    return frames


def parameter_keys(trees, is_parameters):
    """Keys of kv_transfer_params that code reads and writes."""
    read, written = {}, {}

    def is_given(node):
        return is_parameters(last_name(node)) and isinstance(node, (ast.Name, ast.Attribute))

    for tree in trees:
        for node in ast.walk(tree):
            note_keys(node, is_given, read, written)
            # all(key in params for key in ("a", "b"))
            if isinstance(node, ast.GeneratorExp) and isinstance(node.elt, ast.Compare) and is_given(node.elt.comparators[0]):
                for loop in node.generators:
                    if isinstance(loop.iter, (ast.Tuple, ast.List)):
                        read.update({str(each.value): "" for each in loop.iter.elts if isinstance(each, ast.Constant)})
    return read, written


def layouts(files):
    """Cache layouts: an Enum's members, or earlier a Literal."""
    for name in LAYOUTS:
        tree = parse(files, name) if name in files else ast.Module(body=[], type_ignores=[])
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == "KVCacheLayout":
                members = [entry for entry in node.body if isinstance(entry, ast.Assign)]
                return {entry.targets[0].id: ast.unparse(entry.value) for entry in members}
            if isinstance(node, ast.Assign) and last_name(node.targets[0]) == "KVCacheLayoutType":
                return {each.value: "" for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
    return {}


def nested_calls(node):
    """A function's result as nested calls, without their modules."""
    if isinstance(node, ast.Call):
        inner = [node.func.value] if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call) else []
        arguments = [nested_calls(argument) for argument in (*inner, *node.args)]
        arguments += [f"{word.arg}={ast.unparse(word.value)}" for word in node.keywords]
        return f"{last_name(node.func)}({', '.join(arguments)})"
    return last_name(node)


def hash_form(files):
    if HASH_FUNCTION not in files:
        return {}
    for node in ast.walk(parse(files, HASH_FUNCTION)):
        if isinstance(node, ast.FunctionDef) and node.name == "hash_factors":
            returned = [each.value for each in own_nodes(node) if isinstance(each, ast.Return) and each.value]
            return {"hash_factors": "; ".join(nested_calls(value) for value in returned)}
    return {}


def version_of(files):
    if VERSION in files:
        for node in parse(files, VERSION).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                if any(last_name(target) in ("__version__", "version") for target in node.targets):
                    return str(node.value.value)
    for name, data in files.items():
        found = re.search(r"^Version: (\S+)", data.decode("utf-8", "replace"), re.M) if DIST_INFO.fullmatch(name) else None
        if found:
            return found[1]
    return None


def read_wire(path):
    if not os.path.exists(path):
        raise Unreadable(f"{path} does not exist", "give a .whl file or a folder that has vllm/ in it")
    files = read_tree(path, is_wanted) if os.path.isdir(path) else read_wheel(path, is_wanted)
    trees = {name: parse(files, name) for name in sorted(files) if CONNECTOR.fullmatch(name)}
    if not trees:
        raise Unreadable(f"{path} has no {NIXL}", "give a wheel of vLLM 0.27 or later, or a folder that has vllm/ in it")
    source = Source(trees)
    version = source.constants.get("NIXL_CONNECTOR_VERSION")

    factors = {}
    for key, value in source.only_keys(FACTORS).items():
        factors |= {key: ""} | {f"{key}.{part}": "" for part in source.nested(value)}
    engine = [name for name in sorted(files) if ENGINE.fullmatch(name) and b"kv_transfer_params" in files[name]]
    read, written = parameter_keys(trees.values(), lambda name: name in ("params", "kv_transfer_params"))
    elsewhere = parameter_keys((parse(files, name) for name in engine), lambda name: name == "kv_transfer_params")

    wire = {
        "handshake": handshake(source),
        "handshake payload": source.fields(PAYLOAD),
        "agent metadata": source.fields(METADATA),
        "cache layouts": layouts(files),
        "hash function": hash_form(files),
        "compatibility hash": factors,
        "push registration": dict.fromkeys(source.only_keys(REGISTRATION), ""),
        "parameters read": read | elsewhere[0],
        "parameters written": written | elsewhere[1],
    }
    for mode, (_, keys) in source.keys(ANSWER).items():
        wire[f"{mode} answer".strip()] = dict.fromkeys(keys, "")
    for mode, forms in notifications(source).items():
        wire[f"{mode} notifications".strip()] = forms
    return {
        "vllm": version_of(files),
        "connectorVersion": version.value if isinstance(version, ast.Constant) and isinstance(version.value, int) else None,
        "wire": {section: entries for section, entries in wire.items() if entries},
        "checks": checks(trees | ({TOPOLOGY: parse(files, TOPOLOGY)} if TOPOLOGY in files else {})),
        "requests": requests(files),
    }


def main():
    if sys.version_info < (3, 9):
        hint = "put a newer python3 first on PATH"
        print(json.dumps({"error": {"message": f"python3 is {sys.version.split()[0]}; 3.9 is needed", "hint": hint}}))
        return
    # Hostile input must not take the machine's memory.
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    except (ImportError, ValueError, OSError):
        pass
    try:
        result = read_wire(sys.argv[1])
    except Unreadable as error:
        result = {"error": {"message": error.args[0], "hint": error.args[1]}}
    except (OSError, MemoryError, RecursionError) as error:
        message = f"{sys.argv[1]} cannot be read: {error or type(error).__name__}"
        result = {"error": {"message": message, "hint": "give a .whl file or a folder that has vllm/ in it"}}
    print(json.dumps(result))


main()
