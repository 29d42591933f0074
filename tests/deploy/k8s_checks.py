# Checks of Kubernetes objects: schemas, selectors, ports, pod settings, the group file.
"""Each check takes the objects of one deployment and returns its problems, one line each."""

import re

import kubernetes_validate
from google.protobuf import text_format

from tests.deploy import sources

# The oldest version the manifests are for, and the newest that the schemas know.
VERSIONS = ("1.28", "1.34")
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
MIN_SHM = 1 << 30  # what `expertctl doctor` asks for
UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "k": 10**3, "M": 10**6, "G": 10**9}


def size(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([A-Za-z]*)", text).groups()
    return int(number) * UNITS[unit]


def name_of(obj: dict) -> str:
    meta = obj["metadata"]
    return f"{obj['kind']} {meta.get('name') or meta.get('generateName')}"


def of_kind(objects: list[dict], *kinds: str) -> list[dict]:
    return [obj for obj in objects if obj["kind"] in kinds]


def templates(objects: list[dict]) -> list[tuple[str, dict]]:
    return [(name_of(obj), obj["spec"]["template"]) for obj in of_kind(objects, "StatefulSet", "Job")]


def the_daemon(objects: list[dict]) -> tuple[dict, dict]:
    """The StatefulSet and its only container."""
    (stateful,) = of_kind(objects, "StatefulSet")
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    return stateful, container


def environment(container: dict) -> dict[str, dict]:
    return {each["name"]: each for each in container.get("env", [])}


def config_text(objects: list[dict], file: str) -> str:
    return "".join(obj["data"].get(file, "") for obj in of_kind(objects, "ConfigMap"))


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


def schemas(objects: list[dict]) -> list[str]:
    problems = []
    for obj in objects:
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(obj, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                where = ".".join(str(part) for part in error.path)
                problems.append(f"{name_of(obj)}: Kubernetes {version}: {where}: {error.message[:200]}")
            except kubernetes_validate.SchemaNotFoundError as error:
                problems.append(f"{name_of(obj)}: {error.message}")
    return problems


def find_selectors(node, path: str = ""):
    """Every (path, labels) of a label selector in an object."""
    if isinstance(node, list):
        for i, each in enumerate(node):
            yield from find_selectors(each, f"{path}[{i}]")
    elif isinstance(node, dict):
        for key, value in node.items():
            if key == "namespaceSelector":
                continue
            if key == "matchLabels":
                yield path, value
            elif path == ".spec" and key == "selector" and "matchLabels" not in value:
                yield f"{path}.{key}", value
            else:
                yield from find_selectors(value, f"{path}.{key}")


def selectors(objects: list[dict]) -> list[str]:
    problems = []
    labels = {name: template["metadata"]["labels"] for name, template in templates(objects)}
    for obj in objects:
        for path, wanted in find_selectors(obj):
            owner = obj["kind"] == "StatefulSet" and path == ".spec.selector"
            candidates = [labels[name_of(obj)]] if owner else labels.values()
            if not any(wanted.items() <= each.items() for each in candidates):
                problems.append(f"{name_of(obj)}{path}: no pod has the labels {wanted}")
    stateful, _ = the_daemon(objects)
    headless = [each for each in of_kind(objects, "Service") if each["spec"].get("clusterIP") == "None"]
    if stateful["spec"]["serviceName"] not in [each["metadata"]["name"] for each in headless]:
        problems.append("StatefulSet: serviceName is no headless Service")
    if not all(each["spec"].get("publishNotReadyAddresses") for each in headless):
        problems.append("headless Service: publishNotReadyAddresses is off")
    return problems


def ports(objects: list[dict]) -> list[str]:
    problems = []
    stateful, container = the_daemon(objects)
    config = sources.parse("ServerConfig", config_text(objects, "expertd.textproto"))
    wanted = {"grpc": port_of(config.listen), "probe": port_of(config.probe_listen)}
    got = {each["name"]: each["containerPort"] for each in container["ports"]}
    if got != wanted:
        problems.append(f"StatefulSet: ports are {got}, the config says {wanted}")
    if set(wanted.values()) != sources.image_ports():
        problems.append(f"config: ports {wanted} are not those of the Dockerfile")
    for probe in PROBES:
        get = container.get(probe, {}).get("httpGet", {})
        if got.get(get.get("port"), get.get("port")) != wanted["probe"]:
            problems.append(f"{probe}: port {get.get('port')} is not the probe port {wanted['probe']}")
        need = "/readyz" if probe == "readinessProbe" else "/healthz"
        if get.get("path") != need or need not in sources.probe_paths():
            problems.append(f"{probe}: path is {get.get('path')}, need {need}")
    annotations = stateful["spec"]["template"]["metadata"]["annotations"]
    if annotations["prometheus.io/port"] != str(wanted["probe"]):
        problems.append("prometheus.io/port is not the probe port")
    if annotations["prometheus.io/path"] not in sources.probe_paths():
        problems.append("prometheus.io/path is not served")
    for service in of_kind(objects, "Service"):
        for port in service["spec"]["ports"]:
            if port["targetPort"] not in got or port["port"] != got[port["targetPort"]]:
                problems.append(f"{name_of(service)}: port {port} is not one of {got}")
    for policy in of_kind(objects, "NetworkPolicy"):
        opened = {each["port"] for rule in policy["spec"]["ingress"] for each in rule.get("ports", [])}
        if opened != set(wanted.values()):
            problems.append(f"{name_of(policy)}: opens {opened}, need {wanted}")
        if not any("ports" not in rule for rule in policy["spec"]["ingress"]):
            problems.append(f"{name_of(policy)}: peers need every port")
    return problems


def restricted(name: str, spec: dict) -> list[str]:
    """What the restricted pod security standard and this project ask of every pod."""
    problems = []
    pod = spec.get("securityContext", {})
    if pod.get("runAsUser") != 10001 or pod.get("runAsNonRoot") is not True:
        problems.append(f"{name}: does not run as user 10001")
    if pod.get("seccompProfile") != {"type": "RuntimeDefault"}:
        problems.append(f"{name}: seccompProfile is not RuntimeDefault")
    if spec.get("automountServiceAccountToken") is not False:
        problems.append(f"{name}: mounts a service account token")
    if spec.get("enableServiceLinks") is not False:
        problems.append(f"{name}: service links would set EXPERTD_* variables")
    for container in spec["containers"]:
        security = container.get("securityContext", {})
        if security != {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }:
            problems.append(f"{name}: container securityContext is {security}")
        if container["image"] != "expertd:latest":
            problems.append(f"{name}: image is {container['image']}, need the placeholder")
        for kind in ("cpu", "memory"):
            for which in ("requests", "limits"):
                if kind not in container.get("resources", {}).get(which, {}):
                    problems.append(f"{name}: no {which}.{kind}")
    return problems


def volumes(name: str, spec: dict, claims: list[dict], objects: list[dict]) -> list[str]:
    problems = []
    declared = {each["name"] for each in spec.get("volumes", [])} | {each["metadata"]["name"] for each in claims}
    mounted = {each["name"] for container in spec["containers"] for each in container.get("volumeMounts", [])}
    if declared != mounted:
        problems.append(f"{name}: volumes {declared} are not the mounted {mounted}")
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(objects, "ConfigMap")}
    for volume in spec.get("volumes", []):
        if "configMap" not in volume:
            continue
        data = maps.get(volume["configMap"]["name"])
        if data is None:
            problems.append(f"{name}: no ConfigMap {volume['configMap']['name']}")
            continue
        mount = next(m for c in spec["containers"] for m in c["volumeMounts"] if m["name"] == volume["name"])
        files = {f"--config={mount['mountPath']}/{file}" for file in data}
        if not files & {arg for container in spec["containers"] for arg in container.get("args", [])}:
            problems.append(f"{name}: no argument reads {sorted(files)}")
    return problems


def pods(objects: list[dict]) -> list[str]:
    problems = []
    for name, template in templates(objects):
        problems += restricted(name, template["spec"])
    for obj in of_kind(objects, "StatefulSet", "Job"):
        claims = obj["spec"].get("volumeClaimTemplates", [])
        problems += volumes(name_of(obj), obj["spec"]["template"]["spec"], claims, objects)
    stateful, container = the_daemon(objects)
    spec = stateful["spec"]["template"]["spec"]
    env = environment(container)
    config = sources.parse("ServerConfig", config_text(objects, "expertd.textproto"))
    if stateful["spec"].get("podManagementPolicy") != "Parallel":
        problems.append("StatefulSet: podManagementPolicy is not Parallel")
    slot = env.get("EXPERTD_SLOT", {}).get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
    if slot != "metadata.labels['apps.kubernetes.io/pod-index']":
        problems.append(f"StatefulSet: EXPERTD_SLOT is {slot}, need the pod index")
    for unknown in sorted(name for name in env if name.startswith("EXPERTD_") and name not in sources.variables()):
        problems.append(f"StatefulSet: no flag for {unknown}")
    for arg in container["args"]:
        if arg.split("=")[0].removeprefix("--") not in sources.flags():
            problems.append(f"StatefulSet: no flag {arg}")
    for name in sources.image_variables():
        if env.get(name, {}).get("value", "unset") != "":
            problems.append(f"StatefulSet: the image's {name} beats the config file; set it empty")
    defined: set[str] = set()
    for each in container["env"]:
        for name in set(re.findall(r"\$\((\w+)\)", each.get("value", ""))) - defined:
            problems.append(f"StatefulSet: {each['name']} refers to {name}, which is not set before it")
        defined.add(each["name"])
    advertise = env.get("EXPERTD_ADVERTISE", {}).get("value", "")
    if f".{stateful['spec']['serviceName']}." not in advertise:
        problems.append(f"StatefulSet: EXPERTD_ADVERTISE {advertise} is not a name of the headless Service")
    grace = spec["terminationGracePeriodSeconds"]
    if grace < config.drain_seconds + 10:
        problems.append(f"StatefulSet: grace period {grace} s is too short for drain_seconds {config.drain_seconds}")
    limit = size(container["resources"]["limits"]["memory"])
    if 2 * config.bytes_in_flight > limit:
        problems.append(f"config: bytes_in_flight {config.bytes_in_flight} is over half of the memory limit {limit}")
    shm = [each.get("emptyDir", {}) for each in spec["volumes"] if each["name"] == "shm"]
    if not shm or shm[0].get("medium") != "Memory" or size(shm[0].get("sizeLimit", "0")) < MIN_SHM:
        problems.append(f"StatefulSet: /dev/shm is {shm}, need memory of at least {MIN_SHM} bytes")
    return problems


def group_file(objects: list[dict]) -> list[str]:
    stateful, _ = the_daemon(objects)
    text = config_text(objects, "group.textproto")
    try:
        group = sources.parse("GroupFile", text)
        config = sources.parse("ServerConfig", config_text(objects, "expertd.textproto"))
    except text_format.ParseError as error:
        return [f"textproto: {error}"]
    count = stateful["spec"]["replicas"]
    service, port = stateful["spec"]["serviceName"], port_of(config.listen)
    wanted = [f"{stateful['metadata']['name']}-{i}.{service}:{port}" for i in range(count)]
    problems = []
    if list(group.hosts) != wanted:
        problems.append(f"group file: hosts are {list(group.hosts)}, need {wanted}")
    if group.config.ep_size != count:
        problems.append(f"group file: ep_size {group.config.ep_size}, need the {count} replicas")
    for layer in group.layers:
        if layer.config.expert_count % count or layer.config.expert_count > group.config.max_experts:
            problems.append(f"group file: layer {layer.layer_id}: experts do not fit the group")
        if layer.config.hidden > group.config.max_hidden or layer.config.top_k > group.config.max_top_k:
            problems.append(f"group file: layer {layer.layer_id}: exceeds the group's maxima")
    return problems


CHECKS = {
    "schemas": schemas,
    "selectors": selectors,
    "ports": ports,
    "pods": pods,
    "group_file": group_file,
}
