"""The counter of OOM kills of a process's cgroup, found in trees as kernels of either version show them."""

import os
from pathlib import Path

import pytest

from lmlive.server.cgroups import Cgroups, read_oom_kills

V1 = "35 31 0:32 {root} {place} rw,relatime shared:9 - cgroup cgroup rw,memory"
OTHER_V1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"
V2 = "41 31 0:38 {root} {place} rw,relatime - cgroup2 cgroup2 rw,nsdelegate"
ROOTFS = "31 23 0:28 / / rw,relatime - ext4 /dev/vda rw"


class Machine:
    """What a kernel shows: mounts, the cgroup of process 7, and files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.proc = path / "proc"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "7").mkdir()
        self.mounts: list[str] = [ROOTFS, OTHER_V1]

    def mount(self, line: str, name: str, root: str = "/") -> Path:
        place = self.path / name
        escaped = str(place).replace("\\", r"\134").replace(" ", r"\040")
        self.mounts.append(line.format(root=root, place=escaped))
        return place

    def count(self, directory: Path, name: str, text: str) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
        return directory / name

    def oom_kills(self, cgroup: str) -> int | None:
        (self.proc / "self" / "mountinfo").write_text("\n".join(self.mounts))
        (self.proc / "7" / "cgroup").write_text(cgroup)
        return Cgroups(str(self.proc)).find_counter(7)()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_version_1(machine: Machine) -> None:
    place = machine.mount(V1, "memory")
    machine.count(place / "pod" / "a", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert machine.oom_kills("5:cpu:/elsewhere\n4:memory:/pod/a\n0::/\n") == 3


def test_version_2_counts_the_cgroup_itself_and_not_those_below(machine: Machine) -> None:
    place = machine.mount(V2, "unified")
    machine.count(place / "pod", "memory.events", "low 0\nhigh 0\nmax 9\noom 2\noom_kill 5\noom_group_kill 0\n")
    assert machine.oom_kills("0::/pod\n") == 5
    machine.count(place / "pod", "memory.events.local", "low 0\nhigh 0\nmax 9\noom 2\noom_kill 4\n")
    assert machine.oom_kills("0::/pod\n") == 4


def test_where_version_1_has_the_memory_it_is_asked(machine: Machine) -> None:
    first, second = machine.mount(V1, "memory"), machine.mount(V2, "unified")
    machine.count(first / "pod", "memory.oom_control", "oom_kill 1\n")
    machine.count(second / "pod", "memory.events", "oom_kill 2\n")
    assert machine.oom_kills("4:memory:/pod\n0::/pod\n") == 1
    assert machine.oom_kills("4:cpu:/pod\n0::/pod\n") == 2
    assert machine.oom_kills("4:hugetlb,memory:/pod\n0::/pod\n") == 1


def test_of_a_tree_that_is_mounted_in_part_the_rest_is_below(machine: Machine) -> None:
    place = machine.mount(V2, "unified", root="/docker/abc")
    machine.count(place / "pod", "memory.events", "oom_kill 6\n")
    machine.count(place, "memory.events", "oom_kill 7\n")
    assert machine.oom_kills("0::/docker/abc/pod\n") == 6
    assert machine.oom_kills("0::/docker/abc\n") == 7
    assert machine.oom_kills("0::/docker/abcdef\n") is None
    assert machine.oom_kills("0::/elsewhere\n") is None


def test_a_cgroup_that_is_outside_of_ours_is_not_asked(machine: Machine) -> None:
    place = machine.mount(V2, "unified")
    place.mkdir()
    machine.count(place.parent / "neighbour", "memory.events", "oom_kill 6\n")
    assert machine.oom_kills("0::/../neighbour\n") is None


def test_white_space_in_a_mount_is_read(machine: Machine) -> None:
    place = machine.mount(V2, "a place")
    machine.count(place / "pod", "memory.events", "oom_kill 8\n")
    assert machine.oom_kills("0::/pod\n") == 8


@pytest.mark.parametrize("cgroup", ["", "\n", "nonsense", "0::/gone (deleted)\n", "0::/without\n", "4:memory:/x\n"])
def test_what_is_not_there_is_unknown(machine: Machine, cgroup: str) -> None:
    place = machine.mount(V2, "unified")
    machine.mounts += ["", "short", "1 2 3 4 5 - cgroup2", r"1 2 3 \9 \04 rw - cgroup2 x y"]
    machine.count(place / "without", "memory.events", "oom_kill many\noom_kills 3\n")
    assert machine.oom_kills(cgroup) is None


def test_a_process_that_is_gone_has_no_counter(tmp_path: Path) -> None:
    assert Cgroups(str(tmp_path)).find_counter(7)() is None
    assert Cgroups().find_counter(2**22 - 1)() is None
    assert read_oom_kills(()) is None


def test_mounts_are_read_once(machine: Machine) -> None:
    place = machine.mount(V2, "unified")
    counter = machine.count(place / "pod", "memory.events", "oom_kill 1\n")
    (machine.proc / "self" / "mountinfo").write_text("\n".join(machine.mounts))
    (machine.proc / "7" / "cgroup").write_text("0::/pod\n")
    cgroups = Cgroups(str(machine.proc))
    assert cgroups.find_counter(7)() == 1
    (machine.proc / "self" / "mountinfo").unlink()
    count = cgroups.find_counter(7)
    counter.write_text("oom_kill 2\n")
    assert count() == 2


def test_this_machine_is_read_without_a_stumble() -> None:
    count = Cgroups().find_counter(os.getpid())()
    assert count is None or count >= 0
