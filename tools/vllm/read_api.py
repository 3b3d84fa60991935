"""Writes what vLLM's HTTP API has into packages/proxy/fixtures/vllm-api.json: its routes, the headers that it reads, and the members of its answers.

    python3 tools/vllm/read_api.py ~/.cache/kv-peer/vllm31 vllm-0.32.0.whl ~/.cache/kv-peer/vllm33
"""

import ast
import json
import os
import re
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")
sys.path.insert(0, os.path.join(ROOT, "packages/peer/python"))

from sources import parse, read_tree, read_wheel  # noqa: E402
from syntax import last_name, own_fields  # noqa: E402

API = re.compile(r"vllm/entrypoints/(\w+/)*\w+\.py|[^/]+\.dist-info/METADATA")
# The classes of a route's answer: the whole one, and the events of a stream.
ANSWERS = {
    "/v1/completions": ["CompletionResponse", "CompletionStreamResponse"],
    "/v1/chat/completions": ["ChatCompletionResponse", "ChatCompletionStreamResponse"],
    "/v1/responses": ["ResponsesResponse"],
    "/v1/messages": ["AnthropicMessagesResponse"],
}
METHODS = {"get", "post", "put", "delete", "head", "patch", "websocket"}


def constants(tree):
    pairs = [(node.targets[0], node.value) for node in tree.body if isinstance(node, ast.Assign)]
    return {name.id: value.value for name, value in pairs if isinstance(name, ast.Name) and isinstance(value, ast.Constant)}


def routes_of(tree):
    """METHOD path of each route that a router has; applications of other programs are left out."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        path = getattr(node.args[0], "value", None)
        if last_name(node) == "Mount" and isinstance(path, str):
            yield f"GET {path}"
        if not isinstance(node.func, ast.Attribute) or not last_name(node.func.value).endswith("router"):
            continue
        if node.func.attr in METHODS and isinstance(path, str):
            yield f"{node.func.attr.upper()} {path}"
        if node.func.attr == "add_api_route" and isinstance(path, str):
            methods = [word.value for word in node.keywords if word.arg == "methods"]
            for method in methods[0].elts if methods else []:
                yield f"{method.value} {path}"


def headers_of(tree):
    """The headers that are read from a request."""
    known = constants(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        owner = ast.unparse(node.func.value)
        if node.func.attr != "get" or not re.fullmatch(r"(.*request\.|request_)?headers", owner, re.I):
            continue
        name = node.args[0]
        value = name.value if isinstance(name, ast.Constant) else known.get(last_name(name))
        if isinstance(value, str):
            yield value.lower()


def answers(trees):
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}

    def fields(name):
        for base in classes[name].bases if name in classes else []:
            yield from fields(last_name(base))
        if name in classes:
            yield from own_fields(classes[name]).items()

    def members(names):
        for name in names:
            for field, form in fields(name):
                yield field
                choice = re.match(r"list\[(\w+Choice)\]", form)
                if choice:
                    yield from (f"{field}.{inner}" for inner, _ in fields(choice[1]))

    return {route: list(dict.fromkeys(members(names))) for route, names in ANSWERS.items()}


def read(path):
    path = os.path.expanduser(path)
    files = (read_tree if os.path.isdir(path) else read_wheel)(path, lambda name: API.fullmatch(name) is not None)
    metadata = next(text for name, text in files.items() if name.endswith("METADATA"))
    version = re.search(rb"^Version: ([\d.]+)", metadata, re.M)[1].decode()
    trees = [parse(files, name) for name in sorted(files) if name.endswith(".py")]
    return version, {
        "routes": sorted({route for tree in trees for route in routes_of(tree)}),
        "headers": sorted({header for tree in trees for header in headers_of(tree)}),
        "answers": answers(trees),
    }


written = os.path.join(ROOT, "packages/proxy/fixtures/vllm-api.json")
known = {}
if os.path.exists(written):
    with open(written, encoding="utf-8") as file:
        known = json.load(file)
known |= dict(read(path) for path in sys.argv[1:])
with open(written, "w", encoding="utf-8") as file:
    json.dump(dict(sorted(known.items())), file, indent=2)
    file.write("\n")
