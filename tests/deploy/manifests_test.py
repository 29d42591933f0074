# Checks the deployment files against Kubernetes' schemas and the sources, and plants errors in copies.
"""Tests of deploy/: no check finds a problem, and each check finds one that is planted."""

import pathlib
import shutil
import subprocess

import pytest
import yaml

from tests.deploy import host_checks, k8s_checks, kustomize, sources

DEPLOY = sources.ROOT / "deploy"
OVERLAYS = ("cpu", "gpu")


def deployment(deploy: pathlib.Path, overlay: str) -> list[dict]:
    """An overlay and the Job that forms its group."""
    return kustomize.build(deploy / "k8s/overlays" / overlay) + kustomize.read_objects(deploy / "k8s/up_job.yaml")


def run(check: str, deploy: pathlib.Path, overlay: str = "cpu") -> list[str]:
    if check in host_checks.CHECKS:
        return host_checks.CHECKS[check](deploy)
    return k8s_checks.CHECKS[check](deployment(deploy, overlay))


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("check", k8s_checks.CHECKS)
def test_overlay_is_good(check: str, overlay: str) -> None:
    assert run(check, DEPLOY, overlay) == []


@pytest.mark.parametrize("check", host_checks.CHECKS)
def test_host_files_are_good(check: str) -> None:
    assert run(check, DEPLOY) == []


def test_each_overlay_changes_only_what_it_should() -> None:
    cpu, gpu = (deployment(DEPLOY, overlay) for overlay in OVERLAYS)
    assert [k8s_checks.name_of(obj) for obj in cpu] == [k8s_checks.name_of(obj) for obj in gpu]
    _, daemon = k8s_checks.the_daemon(gpu)
    assert daemon["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert k8s_checks.environment(daemon)["EXPERTD_DEVICE"]["value"] == "cuda:0"
    _, daemon = k8s_checks.the_daemon(cpu)
    assert "nvidia.com/gpu" not in daemon["resources"]["limits"]
    assert "EXPERTD_DEVICE" not in k8s_checks.environment(daemon)


def test_every_yaml_of_k8s_is_used() -> None:
    names = {path for path in (DEPLOY / "k8s").rglob("*.yaml") if path.name != "kustomization.yaml"}
    used = {DEPLOY / "k8s/up_job.yaml"}
    for path in (DEPLOY / "k8s").rglob("kustomization.yaml"):
        spec = yaml.safe_load(path.read_text())
        used |= {path.parent / name for name in spec["resources"]}
        used |= {path.parent / patch["path"] for patch in spec.get("patches", [])}
    assert names - used == set()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_builds_the_same(overlay: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl to compare with")
    folder = DEPLOY / "k8s/overlays" / overlay
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=60, check=True)

    def key(obj: dict) -> tuple[str, str]:
        return obj["kind"], obj["metadata"]["name"]

    assert sorted(yaml.safe_load_all(done.stdout), key=key) == sorted(kustomize.build(folder), key=key)


def test_alerts_pass_promtool() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool")
    for words in (["check", "rules", DEPLOY / "prometheus/rules.yaml"], ["test", "rules", "alerts_cases.yaml"]):
        done = subprocess.run(
            ["promtool", *words], cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


# (check, file under deploy/, what is replaced, by what, what the check must say)
PLANTED = [
    ("schemas", "k8s/base/statefulset.yaml", "serviceName:", "serviceNam:", "serviceNam"),
    ("schemas", "k8s/base/statefulset.yaml", "failureThreshold: 6\n", "failureThreshold: six\n", "'six' is not of type"),
    ("schemas", "k8s/base/network.yaml", "policyTypes: [Ingress, Egress]", "policyTypes: Ingress", "policyTypes"),
    ("schemas", "k8s/base/disruption.yaml", "apiVersion: policy/v1", "apiVersion: policy/v0", "schema"),
    ("schemas", "k8s/up_job.yaml", "restartPolicy: Never", "restartPolcy: Never", "restartPolcy"),
    ("selectors", "k8s/base/services.yaml", "component: daemon", "component: deamon", "Service expertd"),
    ("selectors", "k8s/base/disruption.yaml", "component: daemon", "component: other", "PodDisruptionBudget"),
    ("selectors", "k8s/base/network.yaml", 'expertd-client: "true"', 'client: "true"', "NetworkPolicy"),
    ("selectors", "k8s/up_job.yaml", 'expertd-client: "true"', 'client: "true"', "NetworkPolicy"),
    ("selectors", "k8s/base/statefulset.yaml", "matchLabels:\n      app.kubernetes.io/name: expertd",
     "matchLabels:\n      app.kubernetes.io/name: x", "StatefulSet expertd.spec.selector"),
    ("selectors", "k8s/base/services.yaml", "publishNotReadyAddresses: true", "publishNotReadyAddresses: false",
     "publishNotReadyAddresses"),
    ("selectors", "k8s/base/services.yaml", "clusterIP: None", "type: ClusterIP", "no headless Service"),
    ("ports", "k8s/base/config.yaml", "0.0.0.0:50052", "0.0.0.0:50053", "the config says"),
    ("ports", "k8s/base/statefulset.yaml", "path: /healthz\n              port: probe",
     "path: /healthz\n              port: grpc", "is not the probe port"),
    ("ports", "k8s/base/statefulset.yaml", "path: /readyz", "path: /groupz", "need /readyz"),
    ("ports", "k8s/base/statefulset.yaml", 'prometheus.io/port: "50052"', 'prometheus.io/port: "50051"', "prometheus"),
    ("ports", "k8s/base/services.yaml", "targetPort: probe", "targetPort: probes", "Service expertd-peers"),
    ("ports", "k8s/base/network.yaml", "port: 50052", "port: 50050", "opens"),
    ("pods", "k8s/base/statefulset.yaml", "runAsUser: 10001", "runAsUser: 0", "user 10001"),
    ("pods", "k8s/base/statefulset.yaml", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false",
     "securityContext"),
    ("pods", "k8s/up_job.yaml", "type: RuntimeDefault", "type: Unconfined", "Job expertd-up-: seccompProfile"),
    ("pods", "k8s/base/statefulset.yaml", "terminationGracePeriodSeconds: 40", "terminationGracePeriodSeconds: 25",
     "grace period"),
    ("pods", "k8s/base/config.yaml", "drain_seconds: 20", "drain_seconds: 60", "grace period"),
    ("pods", "k8s/base/config.yaml", "bytes_in_flight: 2147483648", "bytes_in_flight: 8589934592", "half of the memory"),
    ("pods", "k8s/base/statefulset.yaml", "sizeLimit: 1Gi", "sizeLimit: 64Mi", "/dev/shm"),
    ("pods", "k8s/base/statefulset.yaml", "EXPERTD_SLOT", "EXPERTD_SLOTS", "EXPERTD_SLOTS"),
    ("pods", "k8s/base/statefulset.yaml", "pod-index", "pod-name", "need the pod index"),
    ("pods", "k8s/base/statefulset.yaml", "- name: EXPERTD_LISTEN\n              value: \"\"",
     "- name: EXPERTD_LISTEN\n              value: 127.0.0.1:1", "EXPERTD_LISTEN beats"),
    ("pods", "k8s/base/statefulset.yaml", "--config=/etc", "--conf=/etc", "no flag --conf"),
    ("pods", "k8s/base/statefulset.yaml", "name: expertd-config", "name: expertd-settings", "no ConfigMap"),
    ("pods", "k8s/base/statefulset.yaml", "podManagementPolicy: Parallel", "podManagementPolicy: OrderedReady",
     "Parallel"),
    ("pods", "k8s/base/statefulset.yaml", "expertd-peers.$", "expertd.$", "EXPERTD_ADVERTISE"),
    ("pods", "k8s/base/statefulset.yaml", "name: POD_NAMESPACE", "name: NAMESPACE", "refers to POD_NAMESPACE"),
    ("pods", "k8s/base/statefulset.yaml", "enableServiceLinks: false", "enableServiceLinks: true", "service links"),
    ("pods", "k8s/base/statefulset.yaml", "- name: shm\n              mountPath", "- name: data\n              mountPath",
     "are not the mounted"),
    ("group_file", "k8s/overlays/cpu/group.yaml", 'hosts: "expertd-3.expertd-peers:50051"\n', "", "hosts are"),
    ("group_file", "k8s/overlays/cpu/statefulset.yaml", "replicas: 4", "replicas: 5", "need the 5 replicas"),
    ("group_file", "k8s/overlays/cpu/group.yaml", "max_hidden:", "max_hiden:", "max_hiden"),
    ("group_file", "k8s/overlays/cpu/group.yaml", "expert_count: 16", "expert_count: 15", "do not fit"),
    ("systemd", "systemd/expertd@.service", "--slot=%i", "--slots=%i", "--slots"),
    ("systemd", "systemd/expertd@.service", "RestartPreventExitStatus=2", "RestartPreventExitStatus=3", "usage error"),
    ("systemd", "systemd/expertd@.service", "TimeoutStopSec=40", "TimeoutStopSec=20", "TimeoutStopSec"),
    ("systemd", "systemd/expertd@.service", "ProtectHome=yes\n", "", "ProtectHome"),
    ("systemd", "systemd/expertd@.service", "LockPersonality=yes", "MemoryDenyWriteExecute=yes", "breaks the daemon"),
    ("systemd", "systemd/expertd.env.example", "EXPERTD_DEVICE=", "EXPERTD_DEVISE=", "EXPERTD_DEVISE"),
    ("compose", "compose/compose.yaml", 'EXPERTD_SLOT: "2"', 'EXPERTD_SLOT: "1"', "expertd-2: slot"),
    ("compose", "compose/compose.yaml", "127.0.0.1:50061", "127.0.0.1:50051", "publish one port"),
    ("compose", "compose/compose.yaml", "shm_size: 1gb", "shm_size: 64mb", "/dev/shm"),
    ("compose", "compose/compose.yaml", "stop_grace_period:", "stop_grace:", "unknown key stop_grace"),
    ("compose", "compose/compose.yaml", "      expertd-3: {condition: service_healthy}\n", "", "wait for every daemon"),
    ("compose", "compose/group.textproto", "expertd-1:50051", "expertd-1:50052", "group file's hosts"),
    ("compose", "compose/compose.yaml", "EXPERTD_CPU_THREADS", "EXPERTD_THREADS", "EXPERTD_THREADS"),
    ("alerts", "prometheus/rules.yaml", "absent(expertd_info)", "absent(expertd_up)", "no metric expertd_up"),
    ("alerts", "prometheus/rules.yaml", 'state="BROKEN"', 'status="BROKEN"', "no label status"),
    ("alerts", "prometheus/rules.yaml", "PEER_LOST|STEP", "PEER_GONE|STEP", "no reason PEER_GONE"),
    ("alerts", "prometheus/rules.yaml", "0.8 * 256", "0.8 * 512", "config's 256"),
    ("alerts", "prometheus/rules.yaml", "runbook: Steps hang", "runbook: Steps stop", "no heading"),
    ("alerts", "k8s/base/config.yaml", "queue_capacity: 256", "queue_capacity: 128", "config's 128"),
    ("dashboard", "grafana/dashboard.json", "expertd_tokens_total", "expertd_token_total", "no metric"),
    ("dashboard", "grafana/dashboard.json", "{{operation}}", "{{method}}", "no label method"),
    ("runbook", "RUNBOOK.md", "`STEP_TIMEOUT` | the", "`STEP_LATE` | the", "no row for STEP_TIMEOUT"),
    ("runbook", "RUNBOOK.md", "ControlService/AbortGroup", "ControlService/StopGroup", "no such method"),
    ("runbook", "RUNBOOK.md", "expertctl doctor --hosts", "expertctl check --hosts", "no such verb check"),
    ("runbook", "RUNBOOK.md", "| 5 | device fault", "| five | device fault", "exit code 5"),
    ("runbook", "RUNBOOK.md", "\n## Upgrading\n", "\n## Upgrades\n", "no heading Upgrading"),
]


@pytest.mark.parametrize(("check", "file", "old", "new", "expected"), PLANTED)
def test_planted_error_is_found(
    tmp_path: pathlib.Path, check: str, file: str, old: str, new: str, expected: str
) -> None:
    deploy = tmp_path / "deploy"
    shutil.copytree(DEPLOY, deploy)
    text = (deploy / file).read_text()
    assert old in text, f"{file} has no {old!r} to replace"
    (deploy / file).write_text(text.replace(old, new))
    problems = run(check, deploy)
    assert any(expected in problem for problem in problems), problems


def test_systemd_analyze_sees_an_unknown_key(tmp_path: pathlib.Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    unit = tmp_path / "expertd@.service"
    unit.write_text((DEPLOY / "systemd" / unit.name).read_text().replace("ProtectClock=", "ProtectClocks="))
    assert any("ProtectClocks" in problem for problem in host_checks.analyze(unit))


BROKEN_KUSTOMIZATIONS = [
    ("k8s/overlays/cpu/kustomization.yaml", "namespace: expertd", "namePrefix: a-", "not supported here"),
    ("k8s/overlays/cpu/statefulset.yaml", "name: expertd\n", "name: expert\n", "matches 0 objects"),
    ("k8s/base/kustomization.yaml", "  - config.yaml", "  - config.yaml\n  - config.yaml", "twice"),
]


@pytest.mark.parametrize(("file", "old", "new", "expected"), BROKEN_KUSTOMIZATIONS)
def test_broken_kustomization_is_refused(tmp_path: pathlib.Path, file: str, old: str, new: str, expected: str) -> None:
    deploy = tmp_path / "deploy"
    shutil.copytree(DEPLOY, deploy)
    text = (deploy / file).read_text()
    assert old in text
    (deploy / file).write_text(text.replace(old, new, 1))
    with pytest.raises(kustomize.BuildError, match=expected):
        kustomize.build(deploy / "k8s/overlays/cpu")
