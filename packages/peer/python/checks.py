"""The checks that stop vLLM's connector: the `assert` and `raise` statements of its functions."""

import ast


def checks(trees):
    """A line for each check: file, function, and what is asserted or raised."""
    found = {}
    for name, tree in trees.items():
        note_checks(tree, [name.rsplit("/", 1)[-1]], found)
    return list(found)


def note_checks(node, place, found):
    for child in ast.iter_child_nodes(node):
        inside = [*place, child.name] if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else place
        # Statements of a module guard its import.
        if len(place) > 1 and isinstance(child, ast.Assert):
            found[f"{place[0]} {'.'.join(place[1:])}: assert {ast.unparse(child.test)}"] = None
        # Without an expression, an error is passed on.
        if len(place) > 1 and isinstance(child, ast.Raise) and child.exc is not None:
            found[f"{place[0]} {'.'.join(place[1:])}: raise {ast.unparse(child.exc)}"] = None
        note_checks(child, inside, found)
