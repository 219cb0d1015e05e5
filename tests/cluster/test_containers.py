"""Containers, as far as namespaces are: own process numbers and host names, a small /dev/shm, nothing to write to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from processes import free_port
from waiting import PATIENCE_S

pytestmark = pytest.mark.usefixtures("may_make_nodes")
TRAIN = """
import os, mlflash
try:
    with mlflash.Checkpointer(job="j", timeout_s=60) as ckpt:
        state = {"rank": int(os.environ["RANK"]), "step": 0}
        print("restored", ckpt.restore(state), state)
        ckpt.save(state["step"] + 1, {"rank": state["rank"], "step": state["step"] + 1}).wait()
except mlflash.errors.JobInUse as error:
    print(error)
"""
TWO_NODES = """
import os, mlflash
with mlflash.Checkpointer(job="j", timeout_s=60, redundancy="copy") as ckpt:
    committed = ckpt.save(1, {"rank": int(os.environ["RANK"])}).wait().committed
    print(committed, ckpt.survives)
"""
NO_INODES = """
import itertools, numpy, os, mlflash
with mlflash.Checkpointer(job="j", redundancy="none") as ckpt:
    made = []
    try:
        for number in itertools.count():
            made.append(f"/dev/shm/{number}")
            open(made[-1], "w").close()
    except OSError:
        made.pop()
    state = {"a": numpy.zeros(100_000, "u1")}
    print("restored", ckpt.restore(state))
    try:
        ckpt.save(1, state).wait()
    except mlflash.errors.SaveFailed as error:
        print(error)
    for name in made:
        os.unlink(name)
    print("then", ckpt.save(2, state).wait().committed)
"""
LARGE = """
import numpy, mlflash
with mlflash.Checkpointer(job="j") as ckpt:
    try:
        ckpt.save(1, {"a": numpy.zeros(100_000_000, "u1")}).wait()
    except mlflash.errors.SaveFailed as error:
        print(error)
    print("then", ckpt.save(2, {"a": 1}).wait().committed)
"""
PASS_ON = """
import json, os
from mlflash.launch.couriers import Couriers
couriers = Couriers("wireup_courier:serve", os.environ, 60)
couriers.next_epoch(60)
couriers.wait_up(60)
couriers.courier.channel.settimeout(60)
with couriers.courier.channel.makefile("rw") as lines:
    lines.write(json.dumps(["pass on", 1 << 22]) + "\\n")
    lines.flush()
    print(lines.readline() or "nothing: its courier has ended")
couriers.close(kill=False)
"""


def containers(memory: Path, spaces: Sequence[str], before: str = "", ranks: int = 2, script: str = TRAIN) -> list[str]:
    """Run one rank in each of some containers of this machine; gives what each printed."""
    names = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "MLFLASH_MEMORY": memory}
    started = []
    for rank in range(ranks):
        env = os.environ | {name: str(value) for name, value in {**names, "RANK": rank}.items()}
        command = ["unshare", *spaces, "sh", "-c", f'{before}\nexec "$@"', f"rank{rank}", sys.executable, "-c", script]
        # Not in the checkout, which python -c would import from.
        started.append(subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, cwd=memory))
    return [process.communicate(timeout=PATIENCE_S)[0] for process in started]


def test_containers_of_a_node_find_the_memory_that_the_ones_before_have_left(shm: Path) -> None:
    """Each has process numbers of its own; they share the host's network, its name and a directory in memory."""
    alone = ["--pid", "--fork", "--kill-child", "--mount-proc"]
    for step in (None, 1, 2):
        said = containers(shm, alone)
        assert said == [f"restored {step} {{'rank': {rank}, 'step': {step or 0}}}\n" for rank in range(2)]


def test_containers_that_share_memory_under_two_host_names_are_told_so(shm: Path) -> None:
    spaces = ["--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
    said = containers(shm, spaces, 'hostname "$0"')
    assert all(" is alive on this node: end it first" in text for text in said), said
    assert all("containers of one job that share this memory need one host name, too" in text for text in said), said


def test_containers_of_a_host_with_a_dev_shm_each_are_two_nodes() -> None:
    """As `docker run --network host` makes them: they share the host's network and its name, and no memory."""
    said = containers(Path("/dev/shm"), ["--mount"], "mount -t tmpfs tmpfs /dev/shm", script=TWO_NODES)
    assert said == ["True any process; any 1 of 2 nodes\n"] * 2


def test_the_own_address_is_that_of_an_interface_where_nothing_else_tells_it() -> None:
    """No default route, and a host name that nobody knows, as on a cluster whose only network is its fabric."""
    words = ["ip link add one type veth peer name other", "ip addr add 10.99.0.7/24 dev one", "ip link set one up",
             "ip link set other up", "hostname nobody-knows-it"]  # fmt: skip
    program = "from mlflash.launch.interfaces import own_address; print(own_address(False, {}))"
    shell = ["unshare", "--net", "--uts", "sh", "-c", f'{" && ".join(words)} && exec "$@"', "sh"]
    command = [*shell, sys.executable, "-c", program]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stdout == "10.99.0.7\n", done.stderr


@pytest.mark.parametrize(
    ("spaces", "netmod"), [("--pid --fork --kill-child --mount-proc", "ucx"), ("--user --map-root-user", "ofi")]
)
def test_ranks_that_cannot_read_each_other_get_the_right_bytes(
    shm: Path, spaces: str, netmod: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """MPI would read by a process number that means another process there, or be refused."""
    monkeypatch.setenv("MPIR_CVAR_CH4_NETMOD", netmod)
    assert containers(shm, spaces.split(), script=PASS_ON) == ["true\n\n"] * 2
    assert "ERROR" not in capfd.readouterr().err


def test_nothing_but_the_memory_has_to_be_writable(shm: Path) -> None:
    spaces = ["--mount"]
    for step in (None, 1):
        said = containers(shm, spaces, "mount -o remount,bind,ro /; ! touch /var/tmp/mlflash-test || exit 9", ranks=1)
        assert said == [f"restored {step} {{'rank': 0, 'step': {step or 0}}}\n"]


def limited(before: str, script: str, **env: str) -> str:
    """Run one rank in a mount namespace of its own, after a line of a shell; gives what it printed."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MLFLASH")}
    command = ["unshare", "--mount", "sh", "-c", f'{before} && exec "$@"', "sh", sys.executable, "-c", script]
    done = subprocess.run(command, env=plain | env, cwd="/", capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("then True\n"), "saves go on"
    return done.stdout


def test_without_an_inode_a_save_fails_with_the_reason_and_saves_go_on() -> None:
    said = limited("mount -t tmpfs -o size=64m,nr_inodes=200 tmpfs /dev/shm", NO_INODES)
    assert "restored None" in said and "has no inode left for another file" in said


def test_what_ulimit_forbids_fails_and_saves_go_on(shm: Path) -> None:
    said = limited("ulimit -f 20000", LARGE, MLFLASH_MEMORY=str(shm))
    assert "may not have such large files of this process (ulimit -f)" in said


def test_what_dockers_64_mib_do_not_hold_fails_with_numbers() -> None:
    said = limited("mount -t tmpfs -o size=64m tmpfs /dev/shm", LARGE)
    assert "do not fit into its memory" in said and "free space of /dev/shm" in said and "--shm-size" in said
