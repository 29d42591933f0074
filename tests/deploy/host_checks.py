# Checks of the systemd unit, the compose file, alerts, dashboard and runbook.
"""Each check takes the deploy folder and returns its problems, one line each."""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import yaml
from google.protobuf import text_format

from tests.deploy import k8s_checks, kustomize, sources

HARDENING = {
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "PrivateDevices": "yes",
    "ProtectKernelModules": "yes",
    "ProtectKernelTunables": "yes",
    "RestrictNamespaces": "yes",
    "SystemCallArchitectures": "native",
    "SystemCallFilter": "@system-service",
}
# What the compose file may use, of the compose specification.
SERVICE_KEYS = set(
    "image build user read_only cap_drop security_opt shm_size mem_limit cpus restart stop_grace_period "
    "healthcheck environment ports volumes entrypoint command depends_on".split()
)
SERIES_LABELS = {"job", "namespace", "instance"}  # of every scrape


def server_config(deploy: pathlib.Path):
    objects = kustomize.build(deploy / "k8s/base")
    return sources.parse("ServerConfig", k8s_checks.config_text(objects, "expertd.textproto"))


def unit_settings(path: pathlib.Path) -> dict[str, list[str]]:
    """`Section.Key` -> values, in order."""
    settings: dict[str, list[str]] = {}
    section = ""
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith(("#", ";")):
            key, _, value = line.partition("=")
            settings.setdefault(f"{section}.{key}", []).append(value)
    return settings


def env_file(path: pathlib.Path) -> tuple[dict[str, str], list[str]]:
    """Variables of an environment file, those that are commented out included, and its problems."""
    values, problems = {}, []
    for line in path.read_text().splitlines():
        match = re.fullmatch(r"#?(EXPERTD_\w+)=(\S*)", line)
        if match:
            values[match[1]] = match[2]
            if match[1] not in sources.variables():
                problems.append(f"{path.name}: no flag for {match[1]}")
        elif line and not line.startswith("#"):
            problems.append(f"{path.name}: cannot read {line!r}")
    return values, problems


def analyze(unit: pathlib.Path) -> list[str]:
    """What `systemd-analyze verify` says, with a program that exists here in place of expertd."""
    if shutil.which("systemd-analyze") is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / unit.name
        copy.write_text(unit.read_text().replace("ExecStart=/usr/local/bin/expertd", f"ExecStart={sys.executable}"))
        done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60)
    return [f"systemd-analyze: {line}" for line in done.stderr.splitlines() if unit.name.split("@")[0] in line]


def systemd(deploy: pathlib.Path) -> list[str]:
    folder = deploy / "systemd"
    unit = unit_settings(folder / "expertd@.service")
    problems = analyze(folder / "expertd@.service")
    for key, wanted in HARDENING.items():
        if unit.get(f"Service.{key}") != [wanted]:
            problems.append(f"unit: {key} is {unit.get(f'Service.{key}')}, need {wanted!r}")
    for key in ("ProcSubset", "MemoryDenyWriteExecute"):
        if f"Service.{key}" in unit:
            problems.append(f"unit: {key} breaks the daemon")
    (start,) = unit["Service.ExecStart"]
    if "--slot=%i" not in start.split():
        problems.append("unit: the instance is not the slot")
    for flag in re.findall(r"--(\w+)", start):
        if flag not in sources.flags():
            problems.append(f"unit: no flag --{flag}")
    prevented = unit.get("Service.RestartPreventExitStatus", [""])[0].split()
    if unit.get("Service.Restart") != ["on-failure"] or prevented != [str(sources.exit_codes()["Usage"])]:
        problems.append(f"unit: restarts after a usage error, or never: {prevented}")
    values, found = env_file(folder / "expertd.env.example")
    problems += found + env_file(folder / "expertd-slot.env.example")[1]
    if int(unit["Service.TimeoutStopSec"][0]) < int(values["EXPERTD_DRAIN_SECONDS"]) + 10:
        problems.append("unit: TimeoutStopSec is too short for EXPERTD_DRAIN_SECONDS")
    for line in unit["Service.Environment"]:
        if line.split("=")[0] not in sources.variables():
            problems.append(f"unit: no flag for {line}")
    if not re.search(r"^u expertd ", (folder / "expertd.sysusers.conf").read_text(), re.M):
        problems.append("sysusers: no user expertd")
    return problems


def compose(deploy: pathlib.Path) -> list[str]:
    spec = yaml.safe_load((deploy / "compose/compose.yaml").read_text())
    problems = []
    daemons = {name: each for name, each in spec["services"].items() if "environment" in each}
    for name, service in spec["services"].items():
        problems += [f"compose: {name}: unknown key {key}" for key in sorted(set(service) - SERVICE_KEYS)]
        if service.get("user") != "10001:10001" or not service.get("read_only") or service.get("cap_drop") != ["ALL"]:
            problems.append(f"compose: {name}: not confined")
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            exists = (deploy / "compose" / source).is_file() if source[0] == "." else source in spec["volumes"]
            if not exists:
                problems.append(f"compose: {name}: no volume {source}")
    published: list[str] = []
    for i, (name, service) in enumerate(daemons.items()):
        env = service["environment"]
        problems += [f"compose: {name}: no flag for {key}" for key in sorted(set(env) - sources.variables())]
        if env.get("EXPERTD_SLOT") != str(i) or env.get("EXPERTD_ADVERTISE") != name:
            problems.append(f"compose: {name}: slot or advertised name is not its own")
        inside = {k8s_checks.port_of(env[key]) for key in ("EXPERTD_LISTEN", "EXPERTD_PROBE_LISTEN")}
        if inside != sources.image_ports() or {int(port.split(":")[2]) for port in service["ports"]} != inside:
            problems.append(f"compose: {name}: ports differ from the image's")
        published += [port.rsplit(":", 1)[0] for port in service["ports"]]
        if service.get("shm_size") != "1gb":
            problems.append(f"compose: {name}: /dev/shm is small")
        if int(service.get("stop_grace_period", "0s").rstrip("s")) < int(env["EXPERTD_DRAIN_SECONDS"]) + 10:
            problems.append(f"compose: {name}: stop_grace_period is too short")
    if len(set(published)) != len(published):
        problems.append(f"compose: two services publish one port: {published}")
    waits = spec["services"]["form-group"]["depends_on"]
    if waits != {name: {"condition": "service_healthy"} for name in daemons}:
        problems.append("compose: form-group does not wait for every daemon")
    try:
        group = sources.parse("GroupFile", (deploy / "compose/group.textproto").read_text())
    except text_format.ParseError as error:
        return problems + [f"compose: group.textproto: {error}"]
    wanted = [f"{name}:{k8s_checks.port_of(each['environment']['EXPERTD_LISTEN'])}" for name, each in daemons.items()]
    if list(group.hosts) != wanted or group.config.ep_size != len(wanted):
        problems.append(f"compose: the group file's hosts are {list(group.hosts)}, need {wanted}")
    return problems


def expression(where: str, text: str) -> list[str]:
    """Names in a PromQL expression that the daemons do not have."""
    problems = []
    for opening, closing in ("()", "{}", "[]"):
        if text.count(opening) != text.count(closing):
            problems.append(f"{where}: unbalanced {opening}")
    for name in sorted(set(re.findall(r"\bexpertd_\w+", text)) - sources.metrics()):
        problems.append(f"{where}: no metric {name}")
    used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", text))
    for names in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", text):
        used |= {name.strip() for name in names.split(",")}
    for name in sorted(used - sources.metric_labels() - SERIES_LABELS):
        problems.append(f"{where}: no label {name}")
    for names in re.findall(r'reason=~?"([^"]*)"', text):
        problems += [f"{where}: no reason {name}" for name in names.split("|") if name not in sources.reasons()]
    return problems


def headings(deploy: pathlib.Path) -> set[str]:
    return set(re.findall(r"^## (.+)$", (deploy / "RUNBOOK.md").read_text(), re.M))


def alerts(deploy: pathlib.Path) -> list[str]:
    spec = yaml.safe_load((deploy / "prometheus/rules.yaml").read_text())
    problems = []
    rules = [rule for group in spec["groups"] for rule in group["rules"]]
    for rule in rules:
        problems += expression(rule["alert"], rule["expr"])
        if rule["annotations"].get("runbook") not in headings(deploy):
            problems.append(f"{rule['alert']}: RUNBOOK.md has no heading {rule['annotations'].get('runbook')!r}")
        if rule["labels"].get("severity") not in ("page", "ticket", "info"):
            problems.append(f"{rule['alert']}: severity is {rule['labels'].get('severity')}")
    config = server_config(deploy)
    for metric, limit in (
        ("expertd_queue_length", config.queue_capacity),
        ("expertd_bytes_in_flight", config.bytes_in_flight),
    ):
        if not any(rule["expr"] == f"{metric} > 0.8 * {limit}" for rule in rules):
            problems.append(f"alerts: {metric} is not compared with the config's {limit}")
    names = [rule["alert"] for rule in rules]
    if len(set(names)) != len(names):
        problems.append("alerts: a name is used twice")
    return problems


def dashboard(deploy: pathlib.Path) -> list[str]:
    spec = json.loads((deploy / "grafana/dashboard.json").read_text())
    problems = []
    ids = [panel["id"] for panel in spec["panels"]]
    if len(set(ids)) != len(ids):
        problems.append("dashboard: an id is used twice")
    for panel in spec["panels"]:
        for target in panel["targets"]:
            problems += expression(f"dashboard: {panel['title']}", target["expr"])
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                if label not in sources.metric_labels() | SERIES_LABELS:
                    problems.append(f"dashboard: {panel['title']}: no label {label}")
    return problems


def runbook(deploy: pathlib.Path) -> list[str]:
    text = (deploy / "RUNBOOK.md").read_text()
    problems = []
    table = text.split("\n## Reasons\n")[1]
    listed = {name for line in table.splitlines() for name in re.findall(r"`([A-Z_]{5,})`", line.split(" | ")[0])}
    problems += [f"runbook: no row for {name}" for name in sorted(sources.reasons() - listed)]
    problems += [f"runbook: no such reason {name}" for name in sorted(listed - sources.reasons())]
    for name in sorted(set(re.findall(r"expertd\.v1\.(\w+/\w+)", text)) - sources.methods()):
        problems.append(f"runbook: no such method {name}")
    for verb in sorted(set(re.findall(r"`?expertctl ([a-z]+)", text)) - sources.verbs() - {"will", "too"}):
        problems.append(f"runbook: no such verb {verb}")
    for code in sorted(sources.exit_codes().values()):
        if not re.search(rf"^\| {code} \| ", text, re.M):
            problems.append(f"runbook: no row for exit code {code}")
    for name in sorted(set(re.findall(r"\bEXPERTD_\w+", text)) - sources.variables()):
        problems.append(f"runbook: no flag for {name}")
    for name in sorted(set(re.findall(r"\bexpertd_\w+", text)) - sources.metrics()):
        problems.append(f"runbook: no metric {name}")
    quoted = re.findall(r"(?:at|see|under|:)\s\"([A-Z][^\"]+)\"", text)
    for path in (path for path in deploy.rglob("*") if path.is_file()):
        quoted += re.findall(r"RUNBOOK\.md,\s(?:# )?\"([^\"]+)\"", path.read_text())
    for heading in sorted({" ".join(each.split()) for each in quoted} - headings(deploy)):
        problems.append(f"runbook: no heading {heading}")
    return problems


CHECKS = {
    "systemd": systemd,
    "compose": compose,
    "alerts": alerts,
    "dashboard": dashboard,
    "runbook": runbook,
}
