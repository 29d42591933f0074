# Builds the kustomizations under deploy/k8s with the few features that they use.
"""Loads a kustomization folder: resources, namespace, and strategic merge patches by path.

Anything else in a kustomization.yaml is an error, so that nothing is silently left out. Where kubectl
is installed, a test compares the result with `kubectl kustomize`.
"""

import copy
import pathlib

import yaml

FIELDS = {"apiVersion", "kind", "namespace", "resources", "patches"}
CLUSTER_KINDS = {"Namespace"}
# The key that identifies an element, for the lists that strategic merge patches merge; from the
# patchMergeKey marks of the Kubernetes API. Other lists are replaced.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "topologySpreadConstraints": "topologyKey",
}


class BuildError(Exception):
    """A kustomization that this loader, and mostly kustomize too, cannot build."""


def read_objects(path: pathlib.Path) -> list[dict]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def identity(obj: dict) -> tuple[str, str, str]:
    return obj["apiVersion"], obj["kind"], obj["metadata"].get("name", "")


def merge(base, patch, field: str = ""):
    """`base` with a strategic merge patch applied; what it names in a list comes first, as in kustomize."""
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = merge(base[key], value, key) if key in base else value
        return merged
    key = MERGE_KEYS.get(field)
    if not (isinstance(base, list) and isinstance(patch, list) and key):
        return patch
    known = {each[key]: each for each in base}
    patched = [merge(known.pop(each[key], {}), each) for each in patch]
    return patched + list(known.values())


def build(folder: pathlib.Path) -> list[dict]:
    """The objects of a kustomization, in the order of its resources."""
    spec = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := set(spec) - FIELDS:
        raise BuildError(f"{folder}: not supported here: {sorted(unknown)}")
    objects: list[dict] = []
    for name in spec.get("resources", []):
        path = folder / name
        objects += build(path) if path.is_dir() else read_objects(path)
    for entry in spec.get("patches", []):
        if set(entry) != {"path"}:
            raise BuildError(f"{folder}: a patch is {sorted(entry)}, need only path")
        for patch in read_objects(folder / entry["path"]):
            targets = [i for i, obj in enumerate(objects) if identity(obj) == identity(patch)]
            if len(targets) != 1:
                raise BuildError(f"{folder}: {entry['path']} matches {len(targets)} objects, need 1")
            objects[targets[0]] = merge(objects[targets[0]], patch)
    objects = copy.deepcopy(objects)
    for obj in objects:
        if "namespace" in spec and obj["kind"] not in CLUSTER_KINDS:
            obj["metadata"]["namespace"] = spec["namespace"]
    identities = [identity(obj) for obj in objects]
    if len(set(identities)) != len(identities):
        raise BuildError(f"{folder}: got an object twice in {identities}")
    return objects
