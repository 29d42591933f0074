# Compares the GPU image with the CPU image, and with the bundle it is made of.
"""The GPU image differs from the CPU image in what it is made of, not in how it is run."""
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = ("ENV", "USER", "EXPOSE", "WORKDIR")


def instructions(name: str) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", (ROOT / name).read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(" ", 1)) for line in lines]


def last_stage(name: str) -> list[tuple[str, str]]:
    all_of_it = instructions(name)
    first = max(i for i, (word, _) in enumerate(all_of_it) if word == "FROM")
    return all_of_it[first:]


@pytest.mark.parametrize("word", RUNTIME)
def test_both_images_run_alike(word):
    values = [[value for key, value in last_stage(name) if key == word] for name in ("Dockerfile", "Dockerfile.gpu")]
    assert values[0] == values[1] and values[0]


def test_both_images_have_the_same_user():
    users = [re.findall(r"useradd .*? expertd\b", value) for name in ("Dockerfile", "Dockerfile.gpu") for _, value in last_stage(name)]
    found = [user[0] for user in users if user]
    assert len(found) == 2 and found[0] == found[1]


def test_the_gpu_image_is_the_bundle():
    stage = last_stage("Dockerfile.gpu")
    assert [value for word, value in stage if word == "COPY"] == ["build/bundle /opt/expertd"]
    assert [value for word, value in stage if word == "ENTRYPOINT"] == ['["/opt/expertd/bin/expertd"]']
    assert (ROOT / "Dockerfile.gpu.dockerignore").read_text().split() == ["*", "!build/bundle"]
    dev = (ROOT / "dev").read_text()
    assert "dir=build/bundle" in dev and '"$dir/run_gpu_tests"' in dev


def test_the_cuda_of_the_base_image_is_the_builds():
    base = dict(last_stage("Dockerfile.gpu"))["FROM"]
    assert re.fullmatch(r"nvidia/cuda:13\.0\.\d+-base-ubuntu24\.04", base)
