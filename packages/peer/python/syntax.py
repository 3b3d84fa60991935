"""What a piece of Python's syntax says."""

import ast

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def last_name(node):
    """The last name of an expression: "request_id" of `meta.remote.request_id`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return type(node).__name__


def text_of(node, constants):
    """A message as text: values as {name}, a list with a separator as {name,…}."""
    if isinstance(node, ast.Constant):
        return node.value.decode("latin-1") if isinstance(node.value, bytes) else str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, constants)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, constants) + text_of(node.right, constants)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "join" and isinstance(node.func.value, ast.Constant) and node.args:
            return "{" + last_name(node.args[0]) + str(node.func.value.value) + "…}"
        if node.func.attr == "encode" and last_name(node.func.value) == "msgpack" and node.args:
            return "{msgpack}"
        if node.func.attr == "encode":
            return text_of(node.func.value, constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return text_of(constants[node.id], constants)
    return "{" + last_name(node) + "}"


def names_of_dict(node):
    """Keys of a dict display or dict(...) call; "**name" for what is merged. None for others."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values)
        return {("**" + last_name(value) if key is None else text_of(key, {})): value for key, value in pairs}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        merged = {"**" + last_name(argument): argument for argument in node.args}
        return merged | {word.arg or "**" + last_name(word.value): word.value for word in node.keywords}
    return None


def note_keys(node, is_owner, read, written):
    """Adds keys that a node reads from an owner or writes to it."""
    if isinstance(node, ast.Subscript) and is_owner(node.value) and isinstance(node.slice, ast.Constant):
        (written if isinstance(node.ctx, ast.Store) else read)[str(node.slice.value)] = ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_owner(node.func.value):
        if node.func.attr in ("get", "pop") and node.args and isinstance(node.args[0], ast.Constant):
            read[str(node.args[0].value)] = ""
    if isinstance(node, ast.Compare) and is_owner(node.comparators[0]) and isinstance(node.left, ast.Constant):
        if isinstance(node.ops[0], (ast.In, ast.NotIn)):
            read[str(node.left.value)] = ""


def own_nodes(function):
    """A function's nodes without those of inner functions."""
    queue = list(ast.iter_child_nodes(function))
    while queue:
        node = queue.pop(0)
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            queue.extend(ast.iter_child_nodes(node))


def assignments(function):
    """Targets in a function with their assigned values."""
    for node in own_nodes(function):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        if isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            yield node.target, node.value


def own_fields(entry):
    fields = {}
    for node in entry.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            form = ast.unparse(node.annotation)
            if "ClassVar" not in form:
                fields[node.target.id] = form if node.value is None else f"{form} = {ast.unparse(node.value)}"
    return fields
