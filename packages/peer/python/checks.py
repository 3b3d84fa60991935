"""What stops vLLM's connector: `assert` and `raise` in its functions."""

import ast

from syntax import FUNCTIONS


def checks(trees):
    """A line per check: file, function, and what is asserted or raised."""
    found = {}
    for name, tree in trees.items():
        note_checks(tree, [name.rsplit("/", 1)[-1]], found)
    return list(found)


def note_checks(node, place, found):
    for child in ast.iter_child_nodes(node):
        inside = [*place, child.name] if isinstance(child, (*FUNCTIONS, ast.ClassDef)) else place
        # A module's own statements guard its import.
        if len(place) > 1 and isinstance(child, ast.Assert):
            found[f"{place[0]} {'.'.join(place[1:])}: assert {ast.unparse(child.test)}"] = None
        # It passes an error on.
        if len(place) > 1 and isinstance(child, ast.Raise) and child.exc is not None:
            found[f"{place[0]} {'.'.join(place[1:])}: raise {ast.unparse(child.exc)}"] = None
        note_checks(child, inside, found)
