# expertctl against real daemons: every verb, its JSON and its exit code.

import json
import os
import signal
import subprocess
import time

import pytest

from tests.integration.python import daemon_process

WORLD = 3
TIMEOUT = 60  # Seconds, of one run of expertctl.

GROUP_FILE = """
group_id: "cli"
config { backend: "gloo" max_tokens_per_rank: 32 max_hidden: 32 max_top_k: 4 max_experts: 12
         max_token_dtype: DTYPE_BF16 }
layers { layer_id: "block0" seed: 3
         config { expert_count: 6 hidden: 32 intermediate: 16 top_k: 2 token_dtype: DTYPE_BF16
                  weight_dtype: DTYPE_BF16 router { kind: ROUTER_KIND_SOFTMAX } } }
"""


def expertctl(*args, code=0):
    """Runs expertctl; returns its stdout after checking the exit code."""
    command = [daemon_process.program("expertctl"), *args]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode == code, f"{args}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with daemon_process.Fleet(WORLD, tmp_path_factory.mktemp("logs")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def config(fleet, tmp_path_factory):
    """A group file of the running daemons, given in reverse slot order."""
    path = tmp_path_factory.mktemp("config") / "group.textproto"
    hosts = "".join(f'hosts: "{address}"\n' for address in reversed(fleet.addresses))
    path.write_text(hosts + GROUP_FILE)
    return f"--config={path}"


@pytest.fixture(scope="module")
def group(config):
    expertctl("up", config)
    return config


def test_help_names_every_verb_and_exit_code():
    text = expertctl("--help")
    for verb in ("up", "status", "describe", "plan", "forward", "train", "bench", "save", "load",
                 "drain", "down", "doctor", "conformance", "top"):
        assert f"  {verb} " in text
        assert "--hosts" in expertctl(verb, "--help")
    assert "Exit codes" in text


def test_wrong_flags():
    expertctl("up", "--nope", "--hosts=a:1", code=64)
    expertctl("forward", code=64)  # No hosts.
    expertctl("nonsense", code=64)


def test_unreachable_daemon_is_reported():
    hosts = "--hosts=127.0.0.1:1"
    status = json.loads(expertctl("status", hosts, "--json", code=1))
    assert not status[0]["reachable"]
    findings = json.loads(expertctl("doctor", hosts, "--json", code=1))
    assert findings[0]["severity"] == "problem" and findings[0]["remedy"]
    error = json.loads(expertctl("up", hosts, "--timeout=1", "--json", code=1))["error"]
    assert error["code"] == "UNAVAILABLE" and "127.0.0.1:1" in error["message"]


def test_doctor_finds_no_problem(config):
    findings = json.loads(expertctl("doctor", config, "--json"))
    assert not [f for f in findings if f["severity"] == "problem"]


def test_doctor_finds_the_same_daemon_twice(fleet):
    host = fleet.addresses[0]
    twice = f"--hosts={host},{host.replace('127.0.0.1', 'localhost')}"
    assert "the same daemon twice" in expertctl("doctor", twice, code=1)


def test_up_twice_makes_a_newer_epoch_and_keeps_the_layer(config):
    first = json.loads(expertctl("up", config, "--json"))
    second = json.loads(expertctl("up", config, "--json"))
    assert second["epoch"] > first["epoch"]
    assert second["layers"][0]["ranks"][0]["weights_version"] == "1"


def test_status(group):
    hosts = json.loads(expertctl("status", group, "--json"))
    assert [h["group"]["rank"] for h in hosts] == ["2", "1", "0"]  # Hosts were given reversed.
    assert {h["group"]["state"] for h in hosts} == {"GROUP_STATE_READY"}


def test_describe_tells_where_every_shard_lives(group):
    layer = json.loads(expertctl("describe", group, "--json"))["layers"][0]
    assert layer["sharding"]["mesh"] == {"dp": 1, "ep": WORLD}
    tensors = {t["name"]: t for t in layer["sharding"]["tensors"]}
    gate_up = tensors["gate_up"]
    assert gate_up["global_shape"] == [6, 32, 32]
    assert gate_up["spec"] == ["ep", None, None]
    assert [s["expert_ids"] for s in gate_up["shards"]] == [[0, 1], [2, 3], [4, 5]]
    assert tensors["tokens"]["spec"] == [["dp", "ep"], None]


def test_plan_needs_no_daemon():
    plan = json.loads(expertctl("plan", "--world=4", "--max_hidden=64", "--json"))
    assert plan["ranks"] == 4
    assert plan["group"]["recv_tokens"] == plan["group"]["recv_rows"] * 64 * 4


def test_forward(group):
    result = json.loads(expertctl("forward", group, "--tokens=5", "--json"))
    assert result["output_rms"] > 0
    routed = sum(int(n) for rank in result["ranks"] for n in rank["tokens_per_expert"])
    assert routed == WORLD * 5 * 2


def test_forward_errors_keep_their_reason(group):
    error = json.loads(expertctl("forward", group, "--tokens=33", "--json", code=1))["error"]
    assert error["reason"] == "TOKENS_OVER_LIMIT"
    expertctl("forward", group)  # The group goes on.
    expertctl("forward", group, "--layer=nope", code=1)


def test_conformance(group):
    lines = [json.loads(line) for line in expertctl("conformance", group, "--json").splitlines()]
    assert lines[-1]["failed"] == 0 and lines[-1]["passed"] == len(lines) - 1 > 15
    layers = json.loads(expertctl("describe", group, "--json"))["layers"]
    assert [layer["ranks"][0]["layer_id"] for layer in layers] == ["block0"]


def test_bench(group):
    out = expertctl("bench", group, "--json", "--seconds=0.01", "--iterations=3", "--tokens=4",
                    "--hidden=32", "--experts=6", "--token_dtype=bf16")
    rows = [json.loads(line) for line in out.splitlines()]
    assert {"ping", "dispatch", "combine", "forward"} <= {row["op"] for row in rows}
    assert all(0 < row["p10_us"] <= row["median_us"] <= row["p90_us"] for row in rows)


def test_top(group):
    rows = expertctl("top", group, "--count=2", "--interval=0.1", "--json").splitlines()
    assert len(rows) == 2
    assert len(json.loads(rows[0])["routes"]) == 6


@pytest.mark.parametrize("verb", ["save", "load"])
def test_what_is_not_there_yet_says_so(group, verb):
    error = expertctl(verb, group, "--layer=block0", "--path=/tmp/x", "--json", code=2)
    assert json.loads(error)["error"]["reason"] == "NOT_IMPLEMENTED"


def test_train_on_a_formed_group(group, tmp_path):
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 2000)
    out = expertctl("up", group, "--max_tokens_per_rank=1024", "--max_hidden=128",
                    "--max_token_dtype=f32", "--group_id=train")
    assert "train" in out
    # 8 experts do not divide by 3 ranks: the service says so, and nothing is left behind.
    error = json.loads(expertctl("train", group, f"--data={text}", "--steps=1", "--json", code=1))
    assert "expert_count" in error["error"]["message"]
    expertctl("up", group)


def test_drain_and_resume(group):
    expertctl("drain", group)
    error = json.loads(expertctl("up", group, "--timeout=2", "--json", code=1))["error"]
    assert error["reason"] == "DRAINING"
    expertctl("drain", group, "--resume")
    expertctl("up", group)


def test_down_twice(group):
    expertctl("down", group)
    expertctl("down", group)
    assert "in no group" in json.loads(
        expertctl("describe", group, "--json", code=1))["error"]["message"]


def children_of(pid):
    """Process ids of the direct children of `pid`."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            return [int(child) for child in children.read().split()]
    except FileNotFoundError:
        return []


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Demo:
    """`train --demo` with two daemons on a small text."""

    def __init__(self, tmp_path, *flags):
        text = tmp_path / "text"
        text.write_text("the quick brown fox jumps over the lazy dog. " * 1000)
        command = [daemon_process.program("expertctl"), "train", "--demo", "--world=2",
                   f"--data={text}", *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.stderr = ""

    def wait_until_training(self):
        """Reads stderr up to the first progress line; returns the daemons' process ids."""
        for line in self.process.stderr:
            self.stderr += line
            if line.startswith("["):
                return children_of(self.process.pid)
        pytest.fail(f"the demo ended early:\n{self.stderr}")

    def finish(self):
        out, err = self.process.communicate(timeout=TIMEOUT)
        self.stderr += err
        return out


def assert_gone(pids):
    end = time.monotonic() + 10
    while any(runs(pid) for pid in pids):
        assert time.monotonic() < end, "daemons outlived expertctl"
        time.sleep(0.02)


def test_demo_trains_and_takes_its_daemons_down(tmp_path):
    demo = Demo(tmp_path, "--steps=2")
    daemons = demo.wait_until_training()
    assert len(daemons) == 2
    result = json.loads(demo.finish().splitlines()[-1])
    assert demo.process.returncode == 0, demo.stderr
    assert result["steps"] == 2
    assert result["final_loss"] < result["first_loss"]
    assert result["bigram_entropy"] > 0 and result["tokens_per_second"] > 0
    assert_gone(daemons)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_demo_leaves_no_daemon_behind(tmp_path, number):
    demo = Demo(tmp_path, "--seconds=300")
    daemons = demo.wait_until_training()
    os.kill(demo.process.pid, number)
    out = demo.finish()
    assert demo.process.returncode == (-9 if number == signal.SIGKILL else 130), demo.stderr
    if number == signal.SIGINT:
        assert json.loads(out.splitlines()[-1])["stopped"]
    assert_gone(daemons)


def test_demo_reports_a_daemon_that_dies(tmp_path):
    demo = Demo(tmp_path, "--seconds=300")
    daemons = demo.wait_until_training()
    os.kill(daemons[1], signal.SIGKILL)
    demo.finish()
    assert demo.process.returncode == 1
    assert "was killed by signal 9" in demo.stderr
    assert "rank 1" in demo.stderr
    assert_gone(daemons)
