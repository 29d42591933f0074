# Checks what each source file includes and how it begins: the layering rules of ARCHITECTURE.md.
#
# Usage: include_check.py ROOT. Prints one line per violation, `path:line: what is wrong`; exits 1 if
# there is any. Reads text only: needs no build. include_check_test.py plants violations to test it.
"""Layering check of the source tree."""

import pathlib
import re
import sys

CPP = {".h", ".cc", ".cu", ".cuh"}
COMMENT_STARTS = {
    **dict.fromkeys(CPP | {".proto"}, ("//",)),
    **dict.fromkeys([".py", ".sh", ".cmake"], ("#",)),
}
TOP_FOLDERS = ("base", "proto", "kernels", "server", "client", "tests", "cmake", "deploy")

# Folder -> folders whose headers its files may include, beside its own. The longest match counts, and
# a folder that is named here does not give its subfolders' headers away.
ALLOWED = {
    "base": [],
    "kernels": ["base"],
    "kernels/cpu": ["kernels", "kernels/router", "kernels/ep", "kernels/mlp", "kernels/optim", "base"],
    "kernels/cuda": ["kernels", "base"],
    "kernels/router": ["kernels", "kernels/cuda", "base"],
    "kernels/ep": ["kernels", "kernels/cuda", "base"],
    "kernels/mlp": ["kernels", "kernels/cuda", "base"],
    "kernels/optim": ["kernels", "kernels/cuda", "base"],
    "server": ["server/rpc", "server/engine", "server/store", "server/observe", "kernels", "base", "gen"],
    "server/rpc": ["server/engine", "server/store", "server/observe", "kernels", "base", "gen"],
    "server/engine": ["server/store", "server/observe", "kernels", "kernels/router", "kernels/optim", "base"],
    "server/store": ["kernels", "base"],
    "server/observe": ["base"],
    "client/cpp": ["base", "gen"],
    "client/expertctl": ["client/cpp", "client/expertctl/train", "base", "gen"],
    "client/expertctl/train": ["client/cpp", "base", "gen"],
    "tests": None,  # None: everything
}
# Single files with rights of their own.
ALLOWED_FILES = {
    "kernels/backends.h": ["kernels/router", "kernels/optim", "base"],
    "kernels/backends.cc": ["kernels", *(f for f in ALLOWED if f.startswith("kernels/")), "base"],
}
CONDITIONALS_ALLOWED_IN = {"kernels/backends.cc"}

GENERATED = re.compile(r"^(expertd/v1|google/rpc)/\w+(\.grpc)?\.pb\.h$")
PROTOBUF_OR_GRPC = re.compile(r"^(grpc|grpcpp|grpc\+\+|google/protobuf)/|\.pb\.h$")
CUDA = re.compile(r"^(cuda|cublas|nccl|cuda_\w+|cooperative_groups|cub/|cute/|cutlass/|driver_types)")
THIRD_PARTY = ("absl/", "gtest/", "gmock/", "grpc/", "grpcpp/", "google/protobuf/", "gloo/", "oneapi/",
               "cuda", "cublas", "nccl", "dnnl")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
CONDITIONAL = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif|elifdef|elifndef)\b\s*(.*)")


def folder_of(path: str) -> str:
    """The longest folder named in ALLOWED that holds `path`, or its first folder."""
    folder = path
    while "/" in folder:
        folder = folder.rsplit("/", 1)[0]
        if folder in ALLOWED:
            return folder
    return folder


def check_include(path: str, quote: str, header: str, root: pathlib.Path) -> str | None:
    """What is wrong with `path` including `header`, or None."""
    folder = folder_of(path)
    top = path.split("/", 1)[0]
    allowed = ALLOWED_FILES.get(path, ALLOWED.get(folder, []))
    if top != "tests":
        if header.startswith(("gtest/", "gmock/", "tests/")):
            return f"includes {header}: nothing outside tests may see tests"
        if CUDA.match(header) and top != "kernels":
            return f"includes {header}: CUDA stops at kernels"
        if CUDA.match(header) and folder in ("kernels", "kernels/cpu"):
            return f"includes {header}: {folder} builds without CUDA"
        if PROTOBUF_OR_GRPC.search(header) and "gen" not in allowed:
            return f"includes {header}: no protobuf or gRPC in {folder}"
    if quote == "<" or GENERATED.match(header):
        return None
    if not (root / header).is_file():
        if header.startswith(THIRD_PARTY):
            return None
        return f"includes {header}, which is not a file: paths are relative to the root of the tree"
    target = folder_of(header)
    if allowed is None or target == folder or target in allowed:
        return None
    return f"includes {header}: {folder} may include only {', '.join([folder, *allowed])}"


def check_file(path: str, text: str, root: pathlib.Path) -> list[str]:
    """All violations in one file, as `path:line: what is wrong`."""
    lines = text.splitlines()
    suffix = pathlib.PurePath(path).suffix
    found = []
    if not lines or not lines[0].startswith(COMMENT_STARTS[suffix]):
        found.append((1, "the first line is not a comment that says what the file is for"))
    if suffix not in CPP:
        return [f"{path}:{number}: {what}" for number, what in found]
    guard = re.sub(r"\W", "_", path).upper() + "_"
    guarded = False
    for number, line in enumerate(lines, 1):
        if match := INCLUDE.match(line):
            if what := check_include(path, match[1], match[2], root):
                found.append((number, what))
        elif match := CONDITIONAL.match(line):
            if suffix in (".h", ".cuh") and match[1] == "ifndef" and match[2].strip() == guard:
                guarded = True
            elif path not in CONDITIONALS_ALLOWED_IN:
                found.append((number, f"#{match[1]}: build conditionals only in kernels/backends.cc"))
    if suffix in (".h", ".cuh") and not guarded:
        found.append((1, f"no include guard #ifndef {guard}"))
    return [f"{path}:{number}: {what}" for number, what in found]


def check_tree(root: pathlib.Path) -> list[str]:
    """All violations in the tree under `root`."""
    found = []
    for top in TOP_FOLDERS:
        for file in sorted((root / top).rglob("*")):
            if file.suffix in COMMENT_STARTS and file.is_file() and file.name != "__init__.py":
                path = file.relative_to(root).as_posix()
                found += check_file(path, file.read_text(encoding="utf-8"), root)
    return found


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    found = check_tree(root)
    print("\n".join(found))
    print(f"{len(found)} violations of the layering rules")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
