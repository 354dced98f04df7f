"""The Kubernetes manifests: sound by the schemas of several releases, and their commands do what
they are there for, each run as its container would run it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

PLACE = Path(__file__).parents[2] / "examples" / "kubernetes"
MANIFESTS = sorted(path.name for path in PLACE.glob("*.yaml"))
DOCUMENT = {
    "version": 1,
    "workloads": [{"op": "rms_norm", "M": [1, 2, 3], "N": 64, "eps": 1e-6, "dtype": "float32"}],
}
LOAD = """
from tlcache import runtime
from tlcache.store import layout, record
root = layout.cache_root()
for path in layout.records(root):
    runtime.resolve(record.read(root, path.stem).spec, on_miss="error")
print(runtime.counters().restored)
"""


_NUMBERS = itertools.count()


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((PLACE / name).read_text()))


def pod_of(name: str) -> dict[str, Any]:
    """The pod of a manifest's Job or Deployment."""
    (found,) = [one for one in documents(name) if one["kind"] in ("Job", "Deployment")]
    pod: dict[str, Any] = found["spec"]["template"]["spec"]
    return pod


def containers(name: str) -> list[dict[str, Any]]:
    pod = pod_of(name)
    return [*pod.get("initContainers", ()), *pod["containers"]]


class Node:
    """A node's part: volumes as directories, variables as the manifest has them, and commands run
    as the kubelet would.
    """

    def __init__(self, run: Any, place: Path) -> None:
        self.run = run
        self.place = place
        self.volumes: dict[str, Path] = {}
        self.volume("shapes", 0o755)
        self.programs = place / "bin"
        self.programs.mkdir()
        source = '"from tlcache.cli import main; main()"'
        program = self.programs / "tlcache"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -c {source} "$@"\n')
        program.chmod(0o755)
        (config,) = documents("config.yaml")
        self.config = {**config["data"], "ARCHIVES": str(place / "store"), "TARGET": "cpu"}

    def volume(self, name: str, mode: int) -> Path:
        """Have an empty volume from here on."""
        path = self.volumes[name] = self.place / f"{name}-{next(_NUMBERS)}"
        path.mkdir()
        path.chmod(mode)
        return path

    def start(self, container: dict[str, Any], **told: str) -> Any:
        env = {one["name"]: one["value"] for one in container.get("env", ())}
        for source in container.get("envFrom", ()):
            env |= self.config if source.get("configMapRef") == {"name": "tlcache"} else {}
        env |= told
        places = {one["mountPath"]: self.volumes[one["name"]] for one in container["volumeMounts"]}
        places["/tmp"] = self.volume("tmp", 0o1777)  # a container's own
        inside = re.compile(rf"(?<![\w/.])({'|'.join(places)})\b")
        command = [
            re.sub(
                r"\$\((\w+)\)",
                lambda match: env[match[1]],
                inside.sub(lambda match: str(places[match[1]]), word),
            )
            for word in container["command"]
        ]
        path = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        return self.run(command, env={**env, "PATH": path})


@pytest.fixture
def node(run, tmp_path, monkeypatch) -> Node:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "JOB_", "RANK"))]:
        monkeypatch.delenv(name)
    node = Node(run, tmp_path)
    (node.volumes["shapes"] / "shapes.json").write_text(json.dumps(DOCUMENT))
    return node


def test_the_jobs_warm_gather_and_serve(node, python, tmp_path):
    (warm,) = containers("warm-job.yaml")
    for index in range(2):
        done = node.start(warm, JOB_COMPLETION_INDEX=str(index), JOB_COMPLETIONS="2")
        assert done.code == 0, done.err
    assert len(list((tmp_path / "store").iterdir())) == 2

    gather, check = containers("gather-job.yaml")
    node.volume("cache", 0o755)
    assert node.start(check).code == 1
    assert node.start(gather).code == 0
    assert node.start(check).code == 0

    kernels = node.volume("kernels", 0o755)
    for path in (tmp_path / "store").iterdir():
        shutil.copy(path, kernels)
    for name in ("serve-init.yaml", "serve-image.yaml"):
        root = node.volume("cache", 0o777) / "tilelang"  # as the kubelet makes an emptyDir
        imported, server = containers(name)
        done = node.start(imported)
        assert done.code == 0, done.err
        assert node.start(imported).code == 0  # as after a node's restart
        assert server["env"] == [{"name": "TILELANG_CACHE_DIR", "value": "/cache/tilelang"}]
        served = python(LOAD, env={"TILELANG_CACHE_DIR": str(root)})
        assert served.code == 0, served.err
        assert served.out == "3\n"


def test_a_pod_that_is_not_told_how_many_there_are_says_so(node):
    (warm,) = containers("warm-job.yaml")
    done = node.start({**warm, "env": []}, JOB_COMPLETION_INDEX="0")
    assert done.code == 2
    assert "set JOB_COMPLETIONS in the container's `env`" in done.err


@pytest.mark.parametrize("release", ["1.29", "1.33", "1.36"])
@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_sound_by_the_schemas(name, release):
    validating = pytest.importorskip("kubernetes_validate")
    if name == "serve-image.yaml" and release == "1.29":
        pytest.skip("Kubernetes 1.29 had no image volumes")
    for document in documents(name):
        validating.validate(document, release, strict=True)


def test_the_job_tells_its_pods_how_many_they_are():
    (job,) = documents("warm-job.yaml")
    assert job["spec"]["completionMode"] == "Indexed"
    (container,) = containers("warm-job.yaml")
    told = {one["name"]: one["value"] for one in container["env"]}
    assert told == {"JOB_COMPLETIONS": str(job["spec"]["completions"])}


@pytest.mark.parametrize("name", [name for name in MANIFESTS if name != "config.yaml"])
def test_what_a_pod_mounts_and_reads_is_there(name):
    pod = pod_of(name)
    claims = {
        one["metadata"]["name"]: one["spec"]["accessModes"]
        for each in MANIFESTS
        for one in documents(each)
        if one["kind"] == "PersistentVolumeClaim"
    }
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounted = {mount["name"] for one in containers(name) for mount in one["volumeMounts"]}
    assert mounted == set(volumes)
    for volume in volumes.values():
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        assert claim is None or claim in claims
    (config,) = documents("config.yaml")
    for container in containers(name):
        known = {one["name"] for one in container.get("env", ())} | set(config["data"])
        assert set(re.findall(r"\$\((\w+)\)", " ".join(container["command"]))) <= known


@pytest.mark.parametrize("name", [name for name in MANIFESTS if name.startswith("serve-")])
def test_who_serves_cannot_write_the_kernels(name):
    (server,) = pod_of(name)["containers"]
    assert [mount.get("readOnly") for mount in server["volumeMounts"]] == [True]


def test_the_volume_that_is_served_is_for_many_readers():
    gathered = documents("gather-job.yaml")[0]
    served = documents("serve-volume.yaml")[0]
    assert served["spec"]["accessModes"] == ["ReadOnlyMany"]
    assert served["spec"]["dataSource"]["name"] == gathered["metadata"]["name"]
    assert served["spec"]["resources"] == gathered["spec"]["resources"]


def test_the_page_names_each_manifest():
    page = (PLACE / "README.md").read_text()
    links = re.findall(r"\]\((\S+?)\)", page)
    assert set(MANIFESTS) == {name for name in links if "://" not in name}
