# Starts the real programs with the configs of deploy/; skipped where they are not built.
"""Tests that expertd and expertctl accept what the deployment files give them."""

import contextlib
import os
import pathlib
import re
import select
import signal
import subprocess
import time
import urllib.request

import pytest
import yaml

from tests.deploy import host_checks, k8s_checks, kustomize, sources

DEPLOY = sources.ROOT / "deploy"
BIN = pathlib.Path(os.environ.get("EXPERTD_BIN_DIR", sources.ROOT / "build/release"))
WAIT = 30  # seconds; the longest that a start or a stop may take

pytestmark = pytest.mark.skipif(
    not ((BIN / "expertd").exists() and (BIN / "expertctl").exists()), reason=f"no programs in {BIN}"
)


@pytest.fixture(params=["cpu", "gpu"])
def overlay(request) -> list[dict]:
    return kustomize.build(DEPLOY / "k8s/overlays" / request.param)


def write_config(objects: list[dict], file: str, folder: pathlib.Path) -> pathlib.Path:
    path = folder / file
    path.write_text(k8s_checks.config_text(objects, file))
    return path


def surroundings() -> dict[str, str]:
    """This process's environment without anything that configures a daemon."""
    return {name: value for name, value in os.environ.items() if not name.startswith("EXPERTD_")}


def pod_environment(objects: list[dict], slot: int) -> dict[str, str]:
    """The container's environment as the kubelet would fill it in, for a pod on this machine."""
    _, container = k8s_checks.the_daemon(objects)
    given = {
        "EXPERTD_SLOT": str(slot),
        "EXPERTD_ADVERTISE": "127.0.0.1",
        "EXPERTD_DATA_HOST": "127.0.0.1",
        "EXPERTD_CPU_THREADS": "1",
    }
    env = {name: each.get("value", "") for name, each in k8s_checks.environment(container).items()}
    return {**surroundings(), **sources.image_variables(), **env, **given}


def read_line(process: subprocess.Popen, deadline: float) -> str:
    text = b""
    while not text.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))
        piece = os.read(process.stdout.fileno(), 4096) if ready else b""
        assert piece, f"no listening line within {WAIT} s: {text!r}"
        text += piece
    return text.decode()


@contextlib.contextmanager
def daemons(commands: list[tuple[list[str], dict[str, str]]], folder: pathlib.Path):
    """Running daemons, one per (flags, environment); gives [(process, listening line)]."""
    processes: list[subprocess.Popen] = []
    try:
        for i, (flags, env) in enumerate(commands):
            with (folder / f"{i}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen([BIN / "expertd", *flags], env=env, stdout=subprocess.PIPE, stderr=log)
                )
        deadline = time.monotonic() + WAIT
        yield [(process, read_line(process, deadline)) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def address(line: str) -> str:
    return re.search(r"\baddress=(\S+)", line)[1]


def test_help_knows_every_flag_and_variable(overlay: list[dict]) -> None:
    text = subprocess.run([BIN / "expertd", "--help"], capture_output=True, text=True, timeout=WAIT, check=True).stdout
    _, container = k8s_checks.the_daemon(overlay)
    used = {arg.split("=")[0] for arg in container["args"]}
    used |= {name for name in k8s_checks.environment(container) if name.startswith("EXPERTD_")}
    used |= set(host_checks.env_file(DEPLOY / "systemd/expertd.env.example")[0])
    used |= set(re.findall(r"EXPERTD_\w+|--\w+", (DEPLOY / "systemd/expertd@.service").read_text())) - {"--now"}
    spec = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
    used |= {name for service in spec["services"].values() for name in service.get("environment", {})}
    words = set(re.findall(r"--\w+|EXPERTD_\w+", text))
    assert used - words == set()
    assert "--slots" not in words


def test_daemon_takes_the_config_map_and_stops_in_time(overlay: list[dict], tmp_path: pathlib.Path) -> None:
    path = write_config(overlay, "expertd.textproto", tmp_path)
    flags = [f"--config={path}", "--listen=127.0.0.1:0", "--probe_listen=127.0.0.1:0", "--device=cpu"]
    stateful, _ = k8s_checks.the_daemon(overlay)
    with daemons([(flags, pod_environment(overlay, 0))], tmp_path) as [(process, line)]:
        assert re.fullmatch(r"listening address=127.0.0.1:\d+ probe_address=127.0.0.1:\d+\n", line)
        process.send_signal(signal.SIGTERM)
        assert process.wait(stateful["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]) == 0
    log = (tmp_path / "0.log").read_text()
    config = sources.parse("ServerConfig", path.read_text())
    for field in ("data_dir", "bytes_in_flight", "queue_capacity", "drain_seconds"):
        assert f" {field}={getattr(config, field)} " in log, f"{field} of the file does not hold: {log}"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [("drain_seconds", "drain_second", "drain_second"), ("queue_capacity: 256", "queue_capacity: 0", "queue_capacity")],
)
def test_daemon_refuses_a_bad_config_map(tmp_path: pathlib.Path, old: str, new: str, expected: str) -> None:
    objects = kustomize.build(DEPLOY / "k8s/overlays/cpu")
    path = write_config(objects, "expertd.textproto", tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    done = subprocess.run(
        [BIN / "expertd", f"--config={path}", "--listen=127.0.0.1:0"], capture_output=True, text=True, timeout=WAIT
    )
    unit = host_checks.unit_settings(DEPLOY / "systemd/expertd@.service")
    assert [str(done.returncode)] == unit["Service.RestartPreventExitStatus"]
    assert expected in done.stderr


def test_gpu_overlay_on_a_cpu_build_says_what_is_missing(tmp_path: pathlib.Path) -> None:
    objects = kustomize.build(DEPLOY / "k8s/overlays/gpu")
    path = write_config(objects, "expertd.textproto", tmp_path)
    done = subprocess.run(
        [BIN / "expertd", f"--config={path}", "--listen=127.0.0.1:0", "--probe_listen=127.0.0.1:0"],
        env={**pod_environment(objects, 0), "EXPERTD_DEVICE": "cuda:99"},
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert done.returncode == sources.exit_codes()["DeviceUnavailable"], done.stderr
    assert "cuda" in done.stderr


GROUP_FILES = ["k8s/overlays/cpu", "k8s/overlays/gpu", "compose/group.textproto"]


@pytest.mark.parametrize("where", GROUP_FILES)
def test_plan_takes_the_group_file(where: str, tmp_path: pathlib.Path) -> None:
    path = DEPLOY / where
    if path.is_dir():
        path = write_config(kustomize.build(path), "group.textproto", tmp_path)
    done = subprocess.run(
        [BIN / "expertctl", "plan", f"--config={path}"], capture_output=True, text=True, timeout=WAIT
    )
    assert done.returncode == 0, done.stderr
    group = sources.parse("GroupFile", path.read_text())
    assert f"group of {len(group.hosts)} ranks" in done.stdout


def test_up_job_forms_the_group_of_the_cpu_overlay(tmp_path: pathlib.Path) -> None:
    objects = kustomize.build(DEPLOY / "k8s/overlays/cpu")
    stateful, _ = k8s_checks.the_daemon(objects)
    path = write_config(objects, "expertd.textproto", tmp_path)
    flags = [f"--config={path}", "--listen=127.0.0.1:0", "--probe_listen=127.0.0.1:0"]
    commands = [(flags, pod_environment(objects, slot)) for slot in range(stateful["spec"]["replicas"])]
    (job,) = kustomize.read_objects(DEPLOY / "k8s/up_job.yaml")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    group = write_config(objects, "group.textproto", tmp_path)
    args = [arg if "--config=" not in arg else f"--config={group}" for arg in container["args"]]
    with daemons(commands, tmp_path) as running:
        hosts = ",".join(address(line) for _, line in running)
        done = subprocess.run(
            [BIN / pathlib.Path(container["command"][0]).name, *args, f"--hosts={hosts}"],
            capture_output=True,
            text=True,
            timeout=WAIT,
        )
        logs = "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
        assert done.returncode == 0, done.stderr + logs
        assert "4 ranks, backend gloo" in done.stdout
        assert "layer block0  weights version 1" in done.stdout


def test_alerts_and_dashboard_name_metrics_that_are_served(tmp_path: pathlib.Path) -> None:
    flags = ["--listen=127.0.0.1:0", "--probe_listen=127.0.0.1:0"]
    with daemons([(flags, surroundings())], tmp_path) as [(_, line)]:
        probe = re.search(r"probe_address=(\S+)", line)[1]
        bodies = {}
        for path in sources.probe_paths() - {"/groupz"}:
            with urllib.request.urlopen(f"http://{probe}{path}", timeout=WAIT) as answer:
                bodies[path] = answer.read().decode()
    served = set(re.findall(r"^# TYPE (\w+) ", bodies["/metrics"], re.M))
    for file in ("prometheus/rules.yaml", "grafana/dashboard.json"):
        named = set(re.findall(r"\bexpertd_\w+", (DEPLOY / file).read_text()))
        assert named and named - served == set(), file
