"""Reads Python sources of a wheel or a tree, within limits. Nothing is extracted or executed."""

import ast
import os
import stat
import sys
import zipfile
import zlib

MAX_ENTRIES = 100_000
MAX_FILE_BYTES = 4 << 20
MAX_TOTAL_BYTES = 128 << 20


class Unreadable(Exception):
    """No vLLM wheel or tree. Arguments: what is wrong, what to do."""


def read_wheel(path, is_wanted):
    """A wheel's wanted files: name to bytes."""
    files, total = {}, 0
    try:
        with zipfile.ZipFile(path) as wheel:
            entries = wheel.infolist()
            if len(entries) > MAX_ENTRIES:
                raise Unreadable(f"{path} has {len(entries)} entries; the limit is {MAX_ENTRIES}", "is it a wheel?")
            for entry in entries:
                if not is_wanted(entry.filename):
                    continue
                if entry.filename in files:
                    raise Unreadable(f"{path} has two entries {entry.filename}", "download the wheel again")
                # The directory may lie: decompress at most one byte beyond the limit.
                with wheel.open(entry) as source:
                    files[entry.filename] = limited(source.read(MAX_FILE_BYTES + 1), entry.filename)
                total = add(total, files[entry.filename], path)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise Unreadable(f"{path} is not a readable wheel: {error}", "give a .whl file or a folder that has vllm/ in it")
    return files


def read_tree(root, is_wanted):
    """The wanted files of a folder with vllm/, or of vllm/ itself."""
    package = os.path.join(root, "vllm")
    if not os.path.isdir(package) and os.path.isdir(os.path.join(root, "distributed")):
        package = root
    files, total, seen = {}, 0, 0
    found = [os.path.join(root, name) for name in sorted(os.listdir(root)) if name.endswith(".dist-info")]
    places = [(os.path.join(folder, "METADATA"), os.path.basename(folder) + "/METADATA") for folder in found]
    for folder, folders, names in os.walk(package):
        folders.sort()
        seen += len(names)
        if seen > MAX_ENTRIES:
            raise Unreadable(f"{root} has more than {MAX_ENTRIES} files", "give the folder that has vllm/ in it")
        inside = os.path.relpath(folder, package).replace(os.sep, "/")
        prefix = "vllm/" if inside == "." else f"vllm/{inside}/"
        places += [(os.path.join(folder, name), prefix + name) for name in sorted(names)]
    for path, name in places:
        # A FIFO or a device would block or never end.
        if not is_wanted(name) or not os.path.exists(path) or not stat.S_ISREG(os.stat(path).st_mode):
            continue
        with open(path, "rb") as source:
            files[name] = limited(source.read(MAX_FILE_BYTES + 1), name)
        total = add(total, files[name], root)
    return files


def limited(data, name):
    if len(data) > MAX_FILE_BYTES:
        raise Unreadable(f"{name} is larger than {MAX_FILE_BYTES} bytes", "is it vLLM's?")
    return data


def add(total, data, path):
    if total + len(data) > MAX_TOTAL_BYTES:
        raise Unreadable(f"the sources of {path} are larger than {MAX_TOTAL_BYTES} bytes", "is it vLLM?")
    return total + len(data)


def parse(files, name):
    try:
        return ast.parse(files[name])
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        python = ".".join(map(str, sys.version_info[:3]))
        raise Unreadable(
            f"{name}: Python {python} cannot parse it: {error}",
            "if this vLLM needs a newer Python, put that one first on PATH",
        )
