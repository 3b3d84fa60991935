"""What a client's request may contain, and what reaches the engine beside its sampling."""

import ast
import re

from sources import parse
from syntax import FUNCTIONS, assignments, last_name, names_of_dict, note_keys, own_fields, own_nodes

# Who writes and reads `SamplingParams.extra_args`, where connectors find kv_transfer_params.
ARGUMENTS = re.compile(r"vllm/(v1|entrypoints|distributed)/(\w+/)*\w+\.py|vllm/sampling_params\.py")
# Many files may share a request's classes.
PROTOCOL = re.compile(r"vllm/entrypoints/(\w+/)*protocol\.py")
REQUESTS = {
    "/v1/completions": "CompletionRequest",
    "/v1/chat/completions": "ChatCompletionRequest",
    "/v1/responses": "ResponsesRequest",
    "/v1/messages": "AnthropicMessagesRequest",
}
ENGINE_REQUEST = "vllm/v1/engine/__init__.py"


def requests(files):
    """The names of each found part. None without an API server."""
    if not any(name.startswith("vllm/entrypoints/") for name in files):
        return None
    found = {**members_of_requests(files), **extra_arguments(files)}
    return {part: list(names) for part, names in found.items() if names}


def members_of_requests(files):
    """Per route, its request class's members, inherited ones and aliases too."""
    trees = [parse(files, name) for name in sorted(files) if PROTOCOL.fullmatch(name)]
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}

    def members(name, seen=()):
        node = classes.get(name)
        if node is None or name in seen:
            return {}
        inherited = {}
        for base in node.bases:
            inherited |= members(last_name(base), (*seen, name))
        own = {field: "" for field in own_fields(node) if not field.startswith("_")}
        aliases = {
            each.value: ""
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.value, ast.Call)
            for word in field.value.keywords
            if word.arg in ("alias", "validation_alias")
            for each in ast.walk(word.value)
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        }
        return inherited | own | aliases

    found = {f"request {route}": members(name) for route, name in REQUESTS.items()}
    if ENGINE_REQUEST in files:
        for node in parse(files, ENGINE_REQUEST).body:
            if isinstance(node, ast.ClassDef) and node.name == "EngineCoreRequest":
                found["engine request"] = own_fields(node)
    return found


def extra_arguments(files):
    """Names that code reads from `extra_args` or puts there; "**name" for a whole dict."""
    read, written = {}, {}
    for name in files:
        if ARGUMENTS.fullmatch(name) and b"extra_args" in files[name]:
            for function in ast.walk(parse(files, name)):
                if isinstance(function, FUNCTIONS):
                    note_arguments(function, read, written)
    return {"extra arguments read": sorted(read), "extra arguments written": sorted(written)}


def is_extra_args(node):
    """True for `params.extra_args`, also with an alternative or as a copy."""
    if isinstance(node, ast.BoolOp):
        return any(is_extra_args(value) for value in node.values)
    if isinstance(node, ast.IfExp):
        return is_extra_args(node.body) or is_extra_args(node.orelse)
    if isinstance(node, ast.Call):
        return any(is_extra_args(argument) or getattr(argument, "value", None) == "extra_args" for argument in node.args)
    return isinstance(node, ast.Attribute) and node.attr == "extra_args"


def note_arguments(function, read, written):
    pairs = list(assignments(function))
    # extra = params.extra_args
    owners = {target.id for target, value in pairs if is_extra_args(value) and isinstance(target, ast.Name)}
    owners.add("extra_args")

    def is_owner(node):
        return isinstance(node, (ast.Name, ast.Attribute)) and last_name(node) in owners

    def note_value(value):
        for each in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
            if isinstance(each, ast.Attribute) and last_name(each.value) == "self":
                written["**" + each.attr] = ""
            written.update(names_of_dict(each) or {})

    for target, value in pairs:
        if is_owner(target) and last_name(target) == "extra_args":
            note_value(value)
    for node in own_nodes(function):
        note_keys(node, is_owner, read, written)
        for word in node.keywords if isinstance(node, ast.Call) else ():
            if word.arg == "extra_args":
                note_value(word.value)
