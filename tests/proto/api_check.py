#!/usr/bin/env python3
"""Compares the public API with its committed descriptor set: only additions are allowed.

Usage: api_check.py            report every change that would break a caller; exit 1 when there is one
       api_check.py --update   record the API as it is, after the check has passed
"""
import argparse
import pathlib
import sys
import tempfile

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto"
COMMITTED = PROTO / "expertd" / "v1" / "api.binpb"


def compile_api():
    """The FileDescriptorSet of proto/expertd/v1 with comments."""
    files = sorted(str(p.relative_to(PROTO)) for p in PROTO.glob("expertd/v1/*.proto"))
    with tempfile.NamedTemporaryFile(suffix=".binpb") as out:
        code = protoc.main(
            ["protoc", f"-I{PROTO}", f"--descriptor_set_out={out.name}", "--include_source_info"]
            + files
        )
        if code != 0:
            raise RuntimeError("the protos do not compile")
        result = descriptor_pb2.FileDescriptorSet()
        result.ParseFromString(pathlib.Path(out.name).read_bytes())
    return result


def read_committed():
    result = descriptor_pb2.FileDescriptorSet()
    result.ParseFromString(COMMITTED.read_bytes())
    return result


def messages(files):
    """Every message by full name, nested ones included."""
    found = {}

    def walk(prefix, message):
        name = f"{prefix}.{message.name}"
        found[name] = message
        for nested in message.nested_type:
            walk(name, nested)

    for file in files.file:
        for message in file.message_type:
            walk(file.package, message)
    return found


def enums(files):
    found = {f"{f.package}.{e.name}": e for f in files.file for e in f.enum_type}
    for name, message in messages(files).items():
        found.update({f"{name}.{e.name}": e for e in message.enum_type})
    return found


def methods(files):
    return {
        f"{f.package}.{s.name}/{m.name}": m
        for f in files.file
        for s in f.service
        for m in s.method
    }


def oneof_name(message, field):
    return message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""


def field_facts(message, field):
    return {
        "number": field.number,
        "type": field.type,
        "type_name": field.type_name,
        "label": field.label,
        "oneof": oneof_name(message, field),
    }


def breaking_changes(old, new):
    """Texts of all changes from `old` to `new` that could break a caller."""
    problems = []
    new_messages, new_enums, new_methods = messages(new), enums(new), methods(new)
    for name, message in messages(old).items():
        if name not in new_messages:
            problems.append(f"message {name} is gone")
            continue
        fields = {f.name: f for f in new_messages[name].field}
        for field in message.field:
            if field.name not in fields:
                problems.append(f"field {name}.{field.name} is gone")
                continue
            before = field_facts(message, field)
            after = field_facts(new_messages[name], fields[field.name])
            for fact in before:
                if before[fact] != after[fact]:
                    problems.append(
                        f"field {name}.{field.name}: {fact} was {before[fact]!r}, "
                        f"is {after[fact]!r}"
                    )
    for name, enum in enums(old).items():
        values = {v.name: v.number for v in new_enums[name].value} if name in new_enums else {}
        for value in enum.value:
            if values.get(value.name) != value.number:
                problems.append(
                    f"enum value {name}.{value.name}: was {value.number}, "
                    f"is {values.get(value.name)}"
                )
    for name, method in methods(old).items():
        if name not in new_methods:
            problems.append(f"method {name} is gone")
            continue
        for fact in ("input_type", "output_type", "client_streaming", "server_streaming"):
            before, after = getattr(method, fact), getattr(new_methods[name], fact)
            if before != after:
                problems.append(f"method {name}: {fact} was {before!r}, is {after!r}")
    return problems


def undocumented_methods(files):
    """Methods without an `Errors:` block in their comment."""
    missing = []
    for file in files.file:
        comments = {tuple(l.path): l.leading_comments for l in file.source_code_info.location}
        for s, service in enumerate(file.service):
            for m, method in enumerate(service.method):
                if "Errors:" not in comments.get((6, s, 2, m), ""):
                    missing.append(f"{service.name}.{method.name}")
    return missing


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="record the API as it is")
    args = parser.parse_args()
    current = compile_api()
    problems = breaking_changes(read_committed(), current) if COMMITTED.exists() else []
    problems += [f"method {name} has no Errors: block" for name in undocumented_methods(current)]
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    if args.update:
        for file in current.file:
            file.ClearField("source_code_info")
        COMMITTED.write_bytes(current.SerializeToString(deterministic=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
