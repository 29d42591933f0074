# Facts of the sources that the deployment files repeat: flags, reasons, metrics, exit codes, paths.
"""Reads names out of the C++ sources and protos, so that deployment files can be checked against them."""

import functools
import pathlib
import re
import tempfile

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = "expertd.v1"


def read(path: str) -> str:
    return (ROOT / path).read_text()


@functools.cache
def pool() -> descriptor_pool.DescriptorPool:
    """All protos of the public API, compiled here: needs no build."""
    files = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/api.binpb"
        args = ["protoc", f"-I{ROOT / 'proto'}", f"--descriptor_set_out={out}", *files]
        if protoc.main(args) != 0:
            raise RuntimeError("protoc failed on proto/")
        descriptors = descriptor_pb2.FileDescriptorSet.FromString(pathlib.Path(out).read_bytes())
    result = descriptor_pool.DescriptorPool()
    for file in descriptors.file:
        result.Add(file)
    return result


def parse(message: str, text: str):
    """A textproto as the programs read it. Raises text_format.ParseError."""
    descriptor = pool().FindMessageTypeByName(f"{PACKAGE}.{message}")
    return text_format.Parse(text, message_factory.GetMessageClass(descriptor)(), descriptor_pool=pool())


def flags() -> set[str]:
    """Flags of expertd: the fields of ServerConfig, and config."""
    return {field.name for field in pool().FindMessageTypeByName(f"{PACKAGE}.ServerConfig").fields} | {"config"}


def variables() -> set[str]:
    return {f"EXPERTD_{flag.upper()}" for flag in flags()}


def methods() -> set[str]:
    """ "ControlService/DescribeGroup" and so on."""
    found = set()
    for path in (ROOT / "proto").rglob("*.proto"):
        text = path.read_text()
        for service in re.finditer(r"^service (\w+) \{(.*?)^\}", text, re.M | re.S):
            found |= {f"{service[1]}/{name}" for name in re.findall(r"^  rpc (\w+)\(", service[2], re.M)}
    return found


def reasons() -> set[str]:
    return set(re.findall(r'\{Reason::k\w+, "([A-Z_]+)", StatusCode', read("base/error.cc")))


def verbs() -> set[str]:
    table = read("client/expertctl/main.cc").split("kVerbs[] = {")[1].split("};")[0]
    return set(re.findall(r'\{"(\w+)", ', table))


def exit_codes() -> dict[str, int]:
    return {name: int(code) for name, code in re.findall(r"^  k(\w+) = (\d+),", read("server/exit_code.h"), re.M)}


def probe_paths() -> set[str]:
    return set(re.findall(r'path == "(/\w+)"', read("server/observe/probe_server.cc")))


def metrics() -> set[str]:
    return set(re.findall(r'"(expertd_\w+)"', read("server/engine_metrics.cc")))


def metric_labels() -> set[str]:
    return set(re.findall(r'\{"(\w+)", ', read("server/engine_metrics.cc")))


def image_variables() -> dict[str, str]:
    """What the Dockerfile's ENV instructions set."""
    return dict(re.findall(r"(EXPERTD_\w+)=(\S+)", "\n".join(re.findall(r"^ENV (.*)", read("Dockerfile"), re.M))))


def image_ports() -> set[int]:
    return {int(port) for port in re.findall(r"\d+", "".join(re.findall(r"^EXPOSE (.*)", read("Dockerfile"), re.M)))}
