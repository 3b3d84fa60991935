"""What a client's request may contain, and what of it reaches the engine beside its sampling."""

import ast
import re

from sources import parse
from syntax import last_name, names_of_dict, own_fields, own_nodes

# What becomes `SamplingParams.extra_args`, where connectors find kv_transfer_params, and who reads it.
ARGUMENTS = re.compile(r"vllm/(v1|entrypoints|distributed)/(\w+/)*\w+\.py|vllm/sampling_params\.py")
# The classes of clients' requests, which many files may share.
PROTOCOL = re.compile(r"vllm/entrypoints/(\w+/)*protocol\.py")
REQUESTS = {
    "/v1/completions": "CompletionRequest",
    "/v1/chat/completions": "ChatCompletionRequest",
    "/v1/responses": "ResponsesRequest",
    "/v1/messages": "AnthropicMessagesRequest",
}
ENGINE_REQUEST = "vllm/v1/engine/__init__.py"


def requests(files):
    """The names of each part that was found. None for sources without an API server."""
    if not any(name.startswith("vllm/entrypoints/") for name in files):
        return None
    found = {**members_of_requests(files), **extra_arguments(files)}
    return {part: list(names) for part, names in found.items() if names}


def members_of_requests(files):
    """Per route, the members of its request class: those of its base classes too, and the names that stand for one (`Field(alias=…)`)."""
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
    """The names that code reads from `extra_args`, and what it puts there; "**name" for a whole dict, such as a member of the request."""
    read, written = set(), set()
    for name in files:
        if ARGUMENTS.fullmatch(name) and b"extra_args" in files[name]:
            for function in ast.walk(parse(files, name)):
                if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    note_arguments(function, read, written)
    return {"extra arguments read": sorted(read), "extra arguments written": sorted(written)}


def is_extra_args(node):
    """Whether an expression is `params.extra_args`, also where it has an alternative or is copied."""
    if isinstance(node, ast.BoolOp):
        return any(is_extra_args(value) for value in node.values)
    if isinstance(node, ast.IfExp):
        return is_extra_args(node.body) or is_extra_args(node.orelse)
    if isinstance(node, ast.Call):
        return any(is_extra_args(argument) or getattr(argument, "value", None) == "extra_args" for argument in node.args)
    return isinstance(node, ast.Attribute) and node.attr == "extra_args"


def note_arguments(function, read, written):
    nodes = list(own_nodes(function))
    assigned = [node for node in nodes if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None]
    targets = {id(node): node.targets if isinstance(node, ast.Assign) else [node.target] for node in assigned}
    # extra = params.extra_args
    owners = {"extra_args"}
    for node in assigned:
        if is_extra_args(node.value):
            owners |= {target.id for target in targets[id(node)] if isinstance(target, ast.Name)}

    def is_owner(node):
        return isinstance(node, (ast.Name, ast.Attribute)) and last_name(node) in owners

    def note_value(value):
        for each in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
            if isinstance(each, ast.Attribute) and last_name(each.value) == "self":
                written.add("**" + each.attr)
            written.update(names_of_dict(each) or {})

    for node in assigned:
        if any(is_owner(target) and last_name(target) == "extra_args" for target in targets[id(node)]):
            note_value(node.value)
    for node in nodes:
        if isinstance(node, ast.Subscript) and is_owner(node.value) and isinstance(node.slice, ast.Constant):
            (written if isinstance(node.ctx, ast.Store) else read).add(str(node.slice.value))
        if isinstance(node, ast.Compare) and is_owner(node.comparators[0]) and isinstance(node.left, ast.Constant):
            if isinstance(node.ops[0], (ast.In, ast.NotIn)):
                read.add(str(node.left.value))
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and is_owner(node.func.value) and node.func.attr in ("get", "pop"):
                read.update(str(each.value) for each in node.args[:1] if isinstance(each, ast.Constant))
            for word in node.keywords:
                if word.arg == "extra_args":
                    note_value(word.value)
