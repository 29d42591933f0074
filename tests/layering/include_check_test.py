# Plants one violation at a time in a small correct tree and expects the include check to name it.
"""Tests of include_check.py."""

import pathlib

import pytest

from tests.layering import include_check


def header(path: str, body: str = "") -> str:
    guard = path.replace("/", "_").replace(".", "_").upper() + "_"
    return f"// A header.\n#ifndef {guard}\n#define {guard}\n{body}\n#endif  // {guard}\n"


def source(*includes: str) -> str:
    return "// A source.\n" + "".join(f"#include {include}\n" for include in includes)


GOOD = {
    "base/log.h": header("base/log.h", "#include <string>"),
    "base/log.cc": source('"base/log.h"', '"absl/strings/str_cat.h"'),
    "kernels/types.h": header("kernels/types.h"),
    "kernels/backends.cc": source('"kernels/ep/ep.h"', '"kernels/mlp/mlp.h"') + "#if EXPERTD_WITH_CUDA\n#endif\n",
    "kernels/cuda/status.h": header("kernels/cuda/status.h", "#include <cuda_runtime_api.h>"),
    "kernels/ep/ep.h": header("kernels/ep/ep.h", '#include "kernels/types.h"'),
    "kernels/ep/ep.cu": source('"kernels/ep/ep.h"', '"kernels/cuda/status.h"', "<nccl.h>"),
    "kernels/mlp/mlp.h": header("kernels/mlp/mlp.h"),
    "server/engine/engine.h": header("server/engine/engine.h", '#include "kernels/types.h"'),
    "server/rpc/step.h": header("server/rpc/step.h", "#include <grpcpp/grpcpp.h>"),
    "server/rpc/step.cc": source('"server/engine/engine.h"', '"expertd/v1/step.grpc.pb.h"'),
    "server/main.cc": source('"server/rpc/step.h"'),
    "client/cpp/rank.h": header("client/cpp/rank.h", '#include "expertd/v1/step.pb.h"'),
    "client/expertctl/main.cc": source('"client/cpp/rank.h"'),
    "proto/expertd/v1/step.proto": "// Messages.\n",
    "tests/testing/cluster.h": header("tests/testing/cluster.h", '#include "server/engine/engine.h"'),
    "tests/client/rank_test.cc": source('"client/cpp/rank.h"', '"tests/testing/cluster.h"', '"gtest/gtest.h"'),
}

BAD = [
    ("base/bad.cc", source('"kernels/types.h"'), "base may include only"),
    ("kernels/bad.cc", source('"server/engine/engine.h"'), "kernels may include only"),
    ("kernels/bad.cc", source('"kernels/ep/ep.h"'), "kernels may include only"),
    ("kernels/ep/bad.cu", source('"kernels/mlp/mlp.h"'), "kernels/ep may include only"),
    ("kernels/mlp/bad.cc", source('"kernels/ep/ep.h"'), "kernels/mlp may include only"),
    ("kernels/bad.cc", source('"expertd/v1/step.pb.h"'), "no protobuf or gRPC in kernels"),
    ("kernels/cpu/bad.cc", source("<google/protobuf/message.h>"), "no protobuf or gRPC"),
    ("kernels/cpu/bad.cc", source("<cuda_runtime.h>"), "builds without CUDA"),
    ("server/engine/bad.cc", source('"expertd/v1/step.pb.h"'), "no protobuf or gRPC in server/engine"),
    ("server/engine/bad.cc", source("<grpcpp/grpcpp.h>"), "no protobuf or gRPC in server/engine"),
    ("server/engine/bad.cc", source('"server/rpc/step.h"'), "server/engine may include only"),
    ("server/rpc/bad.cc", source("<cuda_runtime.h>"), "CUDA stops at kernels"),
    ("server/rpc/bad.cc", source('"client/cpp/rank.h"'), "server/rpc may include only"),
    ("client/cpp/bad.cc", source('"server/rpc/step.h"'), "client/cpp may include only"),
    ("client/expertctl/bad.cc", source('"kernels/types.h"'), "client/expertctl may include only"),
    ("server/bad.cc", source('"tests/testing/cluster.h"'), "nothing outside tests"),
    ("server/bad.cc", source("<gtest/gtest.h>"), "nothing outside tests"),
    ("server/rpc/bad.cc", source('"step.h"'), "relative to the root"),
    ("server/bad.cc", "// A source.\n#ifdef NDEBUG\n#endif\n", "build conditionals"),
    ("kernels/ep/bad.cu", "// A kernel.\n#  if __CUDA_ARCH__ >= 900\n#endif\n", "build conditionals"),
    ("base/bad.h", header("base/bad.h", "#if 1\n#endif"), "build conditionals"),
    ("base/bad.h", header("base/other.h"), "no include guard"),
    ("base/bad.cc", "int x;\n", "first line is not a comment"),
    ("base/bad.cc", "", "first line is not a comment"),
    ("proto/expertd/v1/bad.proto", 'syntax = "proto3";\n', "first line is not a comment"),
    ("tests/bad.py", "import os\n", "first line is not a comment"),
]


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    for path, text in GOOD.items():
        write(tmp_path, path, text)
    return tmp_path


def write(root: pathlib.Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def test_correct_tree_has_no_violation(tree: pathlib.Path) -> None:
    assert include_check.check_tree(tree) == []


@pytest.mark.parametrize(("path", "text", "what"), BAD)
def test_planted_violation_is_named(tree: pathlib.Path, path: str, text: str, what: str) -> None:
    write(tree, path, text)
    found = include_check.check_tree(tree)
    assert found and all(line.startswith(f"{path}:") for line in found)
    assert any(what in line for line in found)
