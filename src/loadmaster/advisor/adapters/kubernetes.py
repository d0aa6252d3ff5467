"""Kubernetes: reads nodes, running pods and pending jobs as recorded JSON, writes the manifest it would
advise.

Serves `batch/v1` Jobs (Kueue: parallelism) and Kubeflow PyTorchJobs (Worker replicas), one GPU a pod. A
job says its curve and deadline in annotations `loadmaster.dev/seconds` ('{"1": 3600, "2": 1900}') and
`loadmaster.dev/deadline-seconds`.
"""

import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np

from loadmaster.advisor.adapters.log import AdviceEntry
from loadmaster.advisor.adapters.requests import Pending, advise_pending, curve_of
from loadmaster.advisor.jobs.state import ClusterState, host_layout
from loadmaster.core.errors import FormatError

_SECONDS = "loadmaster.dev/seconds"
_DEADLINE = "loadmaster.dev/deadline-seconds"
_ADVISED = "loadmaster.dev/advised-devices"
_GPU = "nvidia.com/gpu"
_PRODUCT = "nvidia.com/gpu.product"
_MOST_DIGITS = 6


def advise_kubernetes(document: dict[str, Any]) -> list[AdviceEntry]:
    """Advice on every pending job; a manifest is the job's own with the number advised."""
    state = kubernetes_state(document)
    entries = []
    for manifest in _items(document, "pending"):
        name = str(_at(manifest, "metadata", "name"))
        notes = _at(manifest, "metadata", "annotations") or {}
        if not isinstance(notes, dict):
            raise FormatError(f"job {name!r}: its annotations are not names and values")
        try:
            curve = curve_of(name, {name: json.loads(notes.get(_SECONDS, "null"))})
            limit = None if notes.get(_DEADLINE) is None else float(notes[_DEADLINE])
        except (ValueError, RecursionError) as trouble:
            raise FormatError(
                f"job {name!r}: an annotation {_SECONDS} or {_DEADLINE} is malformed: {trouble}"
            ) from None
        requested = _replicas(manifest)
        if (each := _gpus_of_a_pod(manifest, name)) > 1:
            why = f"each pod of job {name!r} asks for {each} GPUs; only jobs of one GPU a pod can be advised"
            entries.append(AdviceEntry(name, "kubernetes", False, requested * each, 0, why, limit))
            continue
        answer, entry = advise_pending(
            Pending(name, name, requested, limit, manifest), state, curve, "kubernetes"
        )
        if answer is not None and answer.admit:
            entry = replace(entry, action=_manifest(manifest, len(answer.devices)))
        entries.append(entry)
    return entries


def kubernetes_state(document: dict[str, Any]) -> ClusterState:
    """Nodes with GPUs; GPUs of running pods come free at a time nobody has told."""
    sizes, kinds, names = [], [], []
    for node in _items(document, "nodes"):
        count = _count(_at(node, "status", "allocatable", _GPU), f"node {_at(node, 'metadata', 'name')}")
        if count > 0 and not _at(node, "spec", "unschedulable"):
            sizes.append(count)
            kinds.append(str(_at(node, "metadata", "labels", _PRODUCT) or "gpu"))
            names.append(str(_at(node, "metadata", "name")))
    if not sizes:
        raise FormatError(f"no node of the recorded cluster has allocatable {_GPU}")
    layout = host_layout(sizes, kinds)
    free_at = np.zeros(layout.num_devices)
    for pod in _items(document, "pods"):
        node = _at(pod, "spec", "nodeName")
        if node not in names or _at(pod, "status", "phase") in ("Succeeded", "Failed"):
            continue
        containers = _at(pod, "spec", "containers") or []
        told = f"pod {_at(pod, 'metadata', 'name')}"
        used = sum(_count(_at(c, "resources", "limits", _GPU), told) for c in _list(containers, told))
        free = np.flatnonzero((layout.host == names.index(node)) & (free_at == 0))
        free_at[free[:used]] = np.inf
    return ClusterState(
        replace(layout, name=tuple(f"{names[h]}/gpu{i}" for i, h in enumerate(layout.host))), free_at
    )


def _replicas(manifest: dict[str, Any]) -> int:
    told = f"job {_at(manifest, 'metadata', 'name')}"
    worker = _at(manifest, "spec", "pytorchReplicaSpecs", "Worker", "replicas")
    if worker is None:
        return max(1, _count(_at(manifest, "spec", "parallelism") or 1, told))
    return max(1, _count(worker, told) + _masters(manifest))


def _masters(manifest: dict[str, Any]) -> int:
    """A PyTorchJob may have a master beside its workers: it trains like them."""
    return 1 if _at(manifest, "spec", "pytorchReplicaSpecs", "Master") is not None else 0


def _gpus_of_a_pod(manifest: dict[str, Any], name: str) -> int:
    """The most GPUs that a pod of the job asks for; 1 where none are named."""
    roles = _at(manifest, "spec", "pytorchReplicaSpecs")
    templates = [_at(role, "template") for role in roles.values()] if isinstance(roles, dict) else []
    most = 1
    for template in (*templates, _at(manifest, "spec", "template")):
        containers = _list(_at(template, "spec", "containers") or [], f"job {name}")
        most = max(most, sum(_count(_at(c, "resources", "limits", _GPU), f"job {name}") for c in containers))
    return most


def _count(value: Any, told: str) -> int:
    """A whole number as Kubernetes writes it; 0 where there is none."""
    text = str(value if value is not None else 0)
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise FormatError(f"{told} has {text[:40]!r} GPUs or pods; give a whole number >= 0")
    return int(text)


def _list(value: Any, told: str) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"{told}: its containers are not a list")
    return value


def _manifest(manifest: dict[str, Any], count: int) -> str:
    """The same job with so many pods; Kueue starts it when its quota allows."""
    changed = copy.deepcopy(manifest)
    spec = changed["spec"]
    if "pytorchReplicaSpecs" in spec:
        spec["pytorchReplicaSpecs"]["Worker"]["replicas"] = count - _masters(manifest)
    else:
        spec["parallelism"] = count
        if "completions" in spec:
            spec["completions"] = count
    changed["metadata"].setdefault("annotations", {})[_ADVISED] = str(count)
    return json.dumps(changed, indent=2, sort_keys=True)


def _items(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = document.get(name, {"items": []})
    rows = found.get("items") if isinstance(found, dict) else found
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise FormatError(f"the recorded cluster has no list {name!r}")
    return rows


def _at(value: Any, *path: str) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value
