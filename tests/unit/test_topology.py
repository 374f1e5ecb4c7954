"""Hosts, cores and what decides the bits of a result."""

import json
import os
from dataclasses import replace

import pytest

from farandole import topology
from farandole.topology import NumericsFingerprint

FINGERPRINT = NumericsFingerprint(1, "2.13.0", "AVX512", "Some CPU", "cpu")


def test_host_id_is_stable_here_and_names_nothing():
    assert topology.host_id() == topology.host_id()
    assert len(topology.host_id()) == 16
    int(topology.host_id(), 16)


@pytest.mark.parametrize("changed", ["boot_id", "mnt", "net", "ipc"])
def test_host_id_differs_where_memory_cannot_be_shared(changed, monkeypatch):
    here = topology.host_id()
    if changed == "boot_id":
        monkeypatch.setattr(topology, "_read", lambda path: "another boot")
    else:
        real = os.readlink
        monkeypatch.setattr(
            os, "readlink", lambda p: "other" if str(p).endswith(changed) else real(p)
        )
    assert topology.host_id() != here


def test_available_cores_are_those_of_the_affinity_at_most():
    assert 1 <= topology.available_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "membership", "quota"),
    [
        ({"a/b": "150000 100000"}, "0::/a/b", 1.5),
        ({"a/b": "max 100000"}, "0::/a/b", None),
        ({"a/b": "max 100000", "a": "50000 100000"}, "0::/a/b", 0.5),
        ({"a/b": "200000 100000", "": "100000 100000"}, "1:cpu:/x\n0::/a/b", 1.0),
        ({}, "0::/", None),
        ({"a": "100000 100000"}, "3:cpu:/a", None),
        ({}, "", None),
    ],
)
def test_cgroup_quota_is_the_least_on_the_way_up(tmp_path, files, membership, quota):
    for folder, text in files.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "cpu.max").write_text(text + "\n")
    assert topology.cgroup_quota(tmp_path, membership) == quota


def test_less_than_one_core_counts_as_one(monkeypatch):
    monkeypatch.setattr(topology, "cgroup_quota", lambda root, membership: 0.5)
    assert topology.available_cores() == 1


def test_fingerprint_survives_json():
    assert NumericsFingerprint.from_dict(json.loads(json.dumps(FINGERPRINT.to_dict()))) == (
        FINGERPRINT
    )


def test_fingerprint_names_each_difference():
    other = replace(FINGERPRINT, threads=2, device="A GPU")
    assert FINGERPRINT.differences(FINGERPRINT) == []
    assert FINGERPRINT.differences(other) == [
        "threads is 1 here, 2 there",
        "device is cpu here, A GPU there",
    ]


def test_fingerprint_of_an_older_version_lacks_fields():
    data = FINGERPRINT.to_dict()
    del data["device"]
    old = NumericsFingerprint.from_dict({**data, "forgotten": "x"})
    assert FINGERPRINT.differences(old) == ["device is cpu here, unknown there"]


def test_fingerprint_of_here_knows_the_cpu():
    mine = topology.numerics_fingerprint(threads=1, torch_version="2", cpu_capability="AVX2")
    assert mine.cpu_model
    assert mine.device == "cpu"


def test_caches_are_kept_where_the_user_wants_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert topology.user_cache_dir() == tmp_path / ".cache" / "farandole"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert topology.user_cache_dir() == tmp_path / "c" / "farandole"
