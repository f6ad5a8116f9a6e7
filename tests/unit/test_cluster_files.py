"""The cluster files against the schemas of those who read them, and against what they promise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import ray
from jsonschema import Draft7Validator
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.cluster_support import CLUSTER, RAY_UP, RAYJOB, RAYJOB_SWEEP, ROOT, docker_instructions, document, pins
from tests.data import KUBERAY_RAYJOB

STORAGE = CLUSTER / "kuberay" / "storage.yaml"
NETWORK_POLICY = CLUSTER / "kuberay" / "network-policy.yaml"


@pytest.fixture(params=RAY_UP, ids=lambda path: path.stem)
def ray_up(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """A `ray up` file as written, and as Ray fills it with its defaults."""
    written = document(request.param)
    return written, prepare_config(written)


def test_there_is_a_ray_up_file_for_each_kind_of_machine() -> None:
    assert [path.stem for path in RAY_UP] == ["aws", "gcp", "on-premise"]


def test_ray_up_files_pass_rays_schema(ray_up: tuple[dict[str, Any], dict[str, Any]]) -> None:
    written, filled = ray_up
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text(encoding="utf-8"))
    assert [error.message for error in Draft7Validator(schema).iter_errors(written)] == []
    validate_config(filled)


def test_ray_up_starts_ray_with_a_token_and_the_dashboard_on_localhost(
    ray_up: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    _, filled = ray_up  # after the defaults, which would open the dashboard to all
    (head,) = [command for command in filled["head_start_ray_commands"] if "ray start" in command]
    (worker,) = [command for command in filled["worker_start_ray_commands"] if "ray start" in command]
    for command in (head, worker):
        assert "RAY_AUTH_MODE=token ray start" in command
    assert "--dashboard-host=127.0.0.1" in head.split()
    assert any("RAY_AUTH_MODE=token" in command for command in filled["initialization_commands"])
    home = f"/home/{filled['auth']['ssh_user']}"
    assert filled["file_mounts"][f"{home}/.ray/auth_token"] == "~/.ray/auth_token"


def test_ray_up_mounts_what_the_checkout_has(ray_up: tuple[dict[str, Any], dict[str, Any]]) -> None:
    written, _ = ray_up
    mounts = {target: source for target, source in written["file_mounts"].items() if not source.startswith("~")}
    for source in mounts.values():
        assert (ROOT / source).exists(), source
    home = f"/home/{written['auth']['ssh_user']}/piper-ray"
    named = {
        word.replace("~/piper-ray", home)
        for command in [*written["setup_commands"], *written["head_setup_commands"]]
        for word in command.split()
        if word.startswith("~/piper-ray") and ".venv" not in word
    }
    for path in named:
        assert any(path == target or path.startswith(f"{target}/") for target in mounts), path


def test_ray_up_keeps_the_driver_apart_from_workers_that_may_be_taken_away() -> None:
    spot = {"aws": ("InstanceMarketOptions", {"MarketType": "spot"}), "gcp": ("scheduling", "SPOT")}
    for name, (key, value) in spot.items():
        written = document(CLUSTER / "ray-up" / f"{name}.yaml")
        types = written["available_node_types"]
        head, worker = types["head"], types["worker"]
        assert head["resources"] == {"CPU": 0}
        assert key not in head["node_config"]
        found = worker["node_config"][key]
        assert value in (found, found.get("provisioningModel"))
        assert worker["min_workers"] == worker["max_workers"] == written["max_workers"]


def test_ray_up_leaves_no_default_that_opens_ssh_to_everybody() -> None:
    for node in document(CLUSTER / "ray-up" / "aws.yaml")["available_node_types"].values():
        assert node["node_config"]["SecurityGroupIds"]
    for node in document(CLUSTER / "ray-up" / "gcp.yaml")["available_node_types"].values():
        assert all("subnetwork" in interface for interface in node["node_config"]["networkInterfaces"])


def test_rayjob_passes_kuberays_schema() -> None:
    job = document(RAYJOB)
    assert job["apiVersion"] == "ray.io/v1"
    schema = _strict(json.loads(KUBERAY_RAYJOB.read_text(encoding="utf-8")))
    schema["properties"]["metadata"] = {"type": "object"}
    errors = Draft7Validator(schema).iter_errors(job)
    assert [("/".join(map(str, error.path)), error.message) for error in errors] == []


def test_the_strict_schema_finds_what_kuberay_would_ignore() -> None:
    schema = _strict({"type": "object", "properties": {"mode": {"type": "string"}}})
    assert list(Draft7Validator(schema).iter_errors({"mode": "token"})) == []
    assert list(Draft7Validator(schema).iter_errors({"mod": "token"})) != []


def test_rayjob_has_a_token_and_one_version_of_everything() -> None:
    cluster = document(RAYJOB)["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "piper-ray-auth"}
    assert cluster["rayVersion"] == ray.__version__ == pins(ROOT / "requirements.lock")["ray"]
    images = {container["image"] for pod in _pods() for container in pod["spec"]["containers"]}
    assert len(images) == 1
    assert not images.pop().endswith((":latest", "piper-ray"))


def test_rayjob_starts_again_from_a_state_that_outlives_the_pods() -> None:
    spec = document(RAYJOB)["spec"]
    assert spec["backoffLimit"] > 0
    head, worker = _pods()
    words = spec["entrypoint"].split()
    (claimed,) = [volume for volume in head["spec"]["volumes"] if "persistentVolumeClaim" in volume]
    mounts = {mount["name"]: mount["mountPath"] for mount in head["spec"]["containers"][0]["volumeMounts"]}
    for option in ("--checkpoint", "--out"):
        assert words[words.index(option) + 1].startswith(f"{mounts[claimed['name']]}/")
    assert claimed["persistentVolumeClaim"]["claimName"] == document(STORAGE)["metadata"]["name"]
    assert words[words.index("solve") + 1].startswith(f"{mounts['input']}/")
    assert "volumes" not in worker["spec"]


def test_a_sweep_is_the_rayjob_with_another_entrypoint() -> None:
    """Its dataset outlives the Pods, on the volume; the file is in the ConfigMap."""
    patch, spec = document(RAYJOB_SWEEP), document(RAYJOB)["spec"]
    assert patch["metadata"].keys() == {"name"}
    assert patch["spec"].keys() == {"entrypoint"}
    words, solve = patch["spec"]["entrypoint"].split(), spec["entrypoint"].split()
    storage, state = (Path(of[of.index(name) + 1]) for of, name in ((words, "--storage"), (solve, "--checkpoint")))
    assert storage.parent == state.parent
    assert Path(words[2]).parent == Path(solve[2]).parent


def test_rayjob_gives_the_solve_the_workers_that_it_asks_for() -> None:
    spec = document(RAYJOB)["spec"]
    words = spec["entrypoint"].split()
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert int(words[words.index("--workers") + 1]) == group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert words[words.index("--cpus-per-worker") + 1] == limits["cpu"]
    assert spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_pods_have_no_rights_to_speak_of() -> None:
    for pod in _pods():
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in pod["spec"]["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


def test_only_the_operator_reaches_kuberays_dashboard() -> None:
    head = document(RAYJOB)["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["serviceType"] == "ClusterIP"
    policy = document(NETWORK_POLICY)["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    ours = policy["podSelector"]["matchLabels"]
    for pod in _pods():
        assert ours.items() <= pod["metadata"]["labels"].items()
    among_pods, from_outside = policy["ingress"]
    assert among_pods == {"from": [{"podSelector": {"matchLabels": ours}}]}
    (peer,) = from_outside["from"]
    assert peer["podSelector"]["matchLabels"] == {"app.kubernetes.io/component": "kuberay-operator"}
    assert [port["port"] for port in from_outside["ports"]] == [8265]


def test_nothing_listens_everywhere_or_does_without_a_token() -> None:
    files = [path for path in CLUSTER.rglob("*") if path.is_file()]
    assert files
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"0\.0\.0\.0|RAY_AUTH_MODE=disabled|mode: disabled", text), path


def test_dockerfile_pins_what_it_installs() -> None:
    base = next(rest for name, rest in docker_instructions() if name == "FROM")
    lock = CLUSTER / "requirements.lock"
    (version,) = re.findall(r"--python-version (\S+)", lock.read_text(encoding="utf-8"))
    assert base.startswith(f"python:{version}-")
    installs = [rest for name, rest in docker_instructions() if name == "RUN" and "pip install" in rest]
    assert ["--require-hashes" in rest for rest in installs] == [True, False]
    assert {"--no-index", "--no-deps", "--no-build-isolation"} <= set(installs[1].split())


def test_dockerfile_copies_what_is_there_and_let_through() -> None:
    ignored = (CLUSTER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "*"
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = {source for name, rest in docker_instructions() if name == "COPY" for source in rest.split()[:-1]}
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)


def test_image_runs_as_a_plain_user_and_asks_for_a_token() -> None:
    instructions = docker_instructions()
    users = [rest for name, rest in instructions if name == "USER"]
    assert users == ["1000:1000"]
    names = [name for name, _ in instructions]
    mode = next(i for i, (name, rest) in enumerate(instructions) if name == "ENV" and "RAY_AUTH_MODE=token" in rest)
    assert "RUN" not in names[mode:]  # a Ray that the build starts under this mode would leave its token in the image


def test_image_holds_the_tested_versions() -> None:
    tested, image = pins(ROOT / "requirements.lock"), pins(CLUSTER / "requirements.lock")
    assert {name: image.get(name) for name in tested} == tested
    wanted = re.findall(r"^([\w-]+)", (CLUSTER / "requirements.in").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(wanted) <= image.keys()


def _pods() -> list[dict[str, Any]]:
    """The Pod templates of head and workers."""
    cluster = document(RAYJOB)["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


def _strict(schema: Any) -> Any:
    """A schema of Kubernetes as JSON schema; what it does not name is an error and not ignored."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    strict = {key: _strict(value) for key, value in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict
