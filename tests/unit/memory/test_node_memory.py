"""The job's directory in node memory: private, locked, and the only thing that is touched."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from processes import killed_in_the_end
from waiting import is_in, until

from mlflash import errors
from mlflash.cli import main
from mlflash.memory.memory_limits import available
from mlflash.memory.node_directory import NodeDirectory, clean, held_by_jobs, jobs_of, too_small
from mlflash.memory.shared_memory_segment import attach, create, grow, lend
from mlflash.memory.slot_pool import AssignedFiles, SlotPool
from mlflash.telemetry.heartbeat import RankFacts, TrainerHeartbeat, live_jobs, read_heartbeats
from mlflash.tools import status_process

UID = os.getuid()


def test_directories_are_0700_and_files_0600(shm: Path) -> None:
    memory = NodeDirectory(str(shm), "j")
    assert memory.path == str(shm / f"mlflash-{UID}" / "j")
    for directory in (shm / f"mlflash-{UID}", Path(memory.path)):
        assert directory.stat().st_mode & 0o777 == 0o700
    segment = create(memory, 10)
    assert (Path(memory.path) / segment.name).stat().st_mode & 0o777 == 0o600
    memory.close()


def test_a_memory_file_system_that_is_not_there_is_named(shm: Path) -> None:
    with pytest.raises(errors.ConfigError, match=r"/nowhere cannot be used: No such file"):
        NodeDirectory(str(shm / "nowhere"), "j")
    with pytest.raises(FileNotFoundError):
        NodeDirectory(str(shm / "nowhere"), "j", make=False)


NEEDS_ROOT = pytest.mark.skipif(UID != 0, reason="needs root: files of other users are made")


@pytest.mark.parametrize("how", ["777", "755", "770", "701", "link", pytest.param("owner", marks=NEEDS_ROOT)])
def test_a_directory_that_is_not_ours_alone_is_refused(shm: Path, how: str) -> None:
    above, elsewhere = shm / f"mlflash-{UID}", shm / "elsewhere"
    above.mkdir(mode=0o700)
    elsewhere.mkdir(mode=0o700)
    if how == "link":
        (above / "j").symlink_to(elsewhere)
    elif how == "owner":
        (above / "j").mkdir(mode=0o700)
        os.chown(above / "j", 12_345, 12_345)
    else:
        above.chmod(int(how, 8))
    reason = {"link": "cannot use the directory", "owner": "uid 12345"}.get(how, "not a private directory")
    with pytest.raises(errors.UnsafePath, match=reason):
        NodeDirectory(str(shm), "j")
    assert list(elsewhere.iterdir()) == []


def take(shm: Path, kind: str) -> Path:
    """Be where this user's directory should be, before it is made."""
    path = shm / f"mlflash-{UID}"
    if kind == "file":
        path.write_text("mine")
    elif kind == "link":
        (shm / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(shm / "elsewhere")
    else:
        if UID:
            pytest.skip("needs root: a directory of another user is made")
        path.mkdir()
        os.chown(path, 12_345, 12_345)
    return path


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_where_somebody_took_this_users_directory_first_the_next_name_is_used_and_found_by_all(
    shm: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    taken = take(shm, kind)
    before = taken.lstat()
    memory = NodeDirectory(str(shm), "j")
    memory.lock(0, 1)
    assert memory.path == str(shm / f"mlflash-{UID}.1" / "j") and Path(memory.path).stat().st_mode & 63 == 0
    create(memory, 4096)
    heartbeat = TrainerHeartbeat(memory, RankFacts(0, 1, 0, "n", ""))
    beside = NodeDirectory(str(shm), "k")
    assert beside.path == str(shm / f"mlflash-{UID}.1" / "k"), "another job, another rank: the same directory"
    beside.close()
    assert [jobs_of(str(shm)), live_jobs(str(shm))] == [["j", "k"], ["j"]]
    assert held_by_jobs(str(shm)) == {"j": 4096, "k": 0} == {**NodeDirectory(str(shm), "k").other_jobs(), "k": 0}
    listed = CliRunner().invoke(main, ["jobs", "--memory", str(shm)]).output.splitlines()
    assert listed[3].split()[0] == "j" and listed[-1].endswith(": 4 KiB"), "k holds nothing"
    status = CliRunner().invoke(main, ["status", "--memory", str(shm), "--job", "j", "--json"])
    assert memory.path in status.output and '"file": "slot-0000"' in status.output
    heartbeat.end("ended")
    memory.close()
    after = taken.lstat()
    assert (after.st_ino, after.st_mode, after.st_uid, after.st_mtime) == (
        before.st_ino, before.st_mode, before.st_uid, before.st_mtime)  # fmt: skip
    warnings = [record for record in caplog.records if str(taken) in record.getMessage()]
    assert len(warnings) == 1 and "is passed over" in warnings[0].getMessage()
    taken.rmdir() if kind == "directory" else taken.unlink()
    later = NodeDirectory(str(shm), "j")
    assert later.slot_names() == ["slot-0000"], "the first name is free now: the job is where it was"
    later.close()
    (shm / f"mlflash-{UID}").mkdir(mode=0o700)
    NodeDirectory(str(shm), "new").close()
    assert NodeDirectory(str(shm), "j").slot_names() == ["slot-0000"]
    assert (jobs_of(str(shm)), clean(str(shm), "j")) == (["j", "k", "new"], 4096)


def test_a_run_that_gives_up_cleans_when_its_couriers_have_ended(shm: Path) -> None:
    hold = "import sys; from mlflash.memory.node_directory import NodeDirectory; held = NodeDirectory(sys.argv[1], 'j')"
    hold += "; held.lock(0, 1); print('held', flush=True); sys.stdin.read()"
    freed: list[int] = []
    with killed_in_the_end([sys.executable, "-c", hold, str(shm)], stdin=subprocess.PIPE,
                           stdout=subprocess.PIPE, text=True) as courier:  # fmt: skip
        assert courier.stdout.readline() == "held\n"
        memory = NodeDirectory(str(shm), "j")
        create(memory, 4096)
        cleaning = threading.Thread(target=lambda: freed.append(status_process._clean(str(shm), "j")))
        cleaning.start()
        until(lambda: is_in(cleaning, NodeDirectory._hold) or not cleaning.is_alive(), "the wait for a courier")
        assert memory.slot_names() == ["slot-0000"]
        courier.stdin.close()
        cleaning.join()
    assert freed == [4096] and memory.slot_names() == []
    memory.close()


def test_a_memory_where_nothing_can_be_made_is_named(shm: Path) -> None:
    if UID == 0:
        with pytest.raises(errors.ConfigError, match="no directory can be made in /proc"):
            NodeDirectory("/proc", "j")
        return
    shm.chmod(0o500)
    with pytest.raises(errors.ConfigError, match="no directory can be made"):
        NodeDirectory(str(shm), "j")


@pytest.mark.parametrize("kind", ["link", "dangling", "open", "directory", "hardlink", "fifo"])
def test_what_is_named_like_a_file_of_ours_and_is_not_is_passed_over_and_never_touched(
    shm: Path, node_memory: NodeDirectory, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = shm / "target"
    target.write_bytes(b"x" * 8192)
    target.chmod(0o600)
    for name in ("slot-0000", "slot-0002", "pulse-0000", "drain"):
        path = Path(node_memory.path, name)
        if kind in ("link", "dangling"):
            path.symlink_to(target if kind == "link" else shm / "nowhere")
        elif kind == "hardlink":
            os.link(target, path)
        elif kind == "directory":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path, 0o600)
        else:
            path.write_bytes(b"x" * 8192)
            path.chmod(0o644)
    before = {entry.name: entry.lstat() for entry in Path(node_memory.path).iterdir()}
    assert node_memory.slot_names() == node_memory.pulse_names() == []
    with pytest.raises(errors.UnsafePath):
        attach(node_memory, "slot-0000")
    assert create(node_memory, 4096).name == "slot-0001" and create(node_memory, 4096).name == "slot-0003"
    assert not node_memory.has_request() and not node_memory.take_request()
    TrainerHeartbeat(node_memory, RankFacts(0, 1, 0, "n", "")).end("ended")
    assert read_heartbeats(str(shm), "j") == ([], [])
    pool = SlotPool(node_memory, [1])
    pool.adopt(AssignedFiles([0, 1], {1: [2, 3]}, [None, None]), None, (), [0, 2])
    assert [slot.name for slot in pool.all()] == ["", "slot-0001", "", "", "", "slot-0003"]
    pool.drop_spare()
    assert node_memory.nbytes("slot-0000") == 0 and node_memory.other_jobs() == {}
    node_memory.remove("slot-0000")
    pool.close()
    assert node_memory.wipe() == 8192
    after = {entry.name: entry.lstat() for entry in Path(node_memory.path).iterdir()}
    assert {n: (s.st_ino, s.st_mode, s.st_size) for n, s in after.items()} == {
        n: (s.st_ino, s.st_mode, s.st_size) for n, s in before.items()}  # fmt: skip
    assert target.read_bytes() == b"x" * 8192
    warnings = [record.getMessage() for record in caplog.records if "is passed over, as" in record.getMessage()]
    assert len(warnings) == 4 and any("slot-0000" in text for text in warnings)


@pytest.mark.parametrize("name", ["../k/slot-0000", "/etc/passwd", "..", ""])
def test_no_name_leads_out_of_the_nodes_directory(shm: Path, name: str) -> None:
    memory = NodeDirectory(str(shm), "j")
    other = NodeDirectory(str(shm), "k")
    create(other, 4096)
    with pytest.raises(errors.ForeignNode):
        memory.open(name, os.O_RDONLY)
    with pytest.raises(errors.ForeignNode):
        memory.remove(name)
    memory.close()
    other.close()


def test_a_second_live_process_is_refused_with_the_pid_of_the_first(shm: Path) -> None:
    program = (
        "import sys; from mlflash.memory.node_directory import NodeDirectory; "
        "m = NodeDirectory(sys.argv[1], 'j'); m.lock(0, 2); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(shm)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as holder:  # fmt: skip
        assert holder.stdout.readline() == "held\n"
        memory = NodeDirectory(str(shm), "j")
        with pytest.raises(errors.JobInUse, match=f"held by pid {holder.pid}"):
            memory.lock(0, 1, wait_s=0.1)
        memory.close()
        beside = NodeDirectory(str(shm), "j")
        beside.lock(1, 2, wait_s=0.1)  # another local rank of the same job
        beside.close()
        holder.kill()
        holder.wait(60)
        after = NodeDirectory(str(shm), "j")
        after.lock(0, 1)  # the lock died with its process
        after.close()


def test_a_second_checkpointer_of_one_process_is_refused(shm: Path) -> None:
    first, second = NodeDirectory(str(shm), "j"), NodeDirectory(str(shm), "j")
    first.lock(0, 1)
    with pytest.raises(errors.JobInUse, match="this process has a Checkpointer"):
        second.lock(0, 1)
    first.close()
    second.lock(0, 1)
    second.close()


def test_a_file_that_grows_keeps_its_pages_and_its_name(node_memory: NodeDirectory) -> None:
    segment = create(node_memory, 10_000)
    segment.view[:] = 7
    grown = grow(node_memory, segment, 30_000)
    assert (grown.name, grown.inode, grown.nbytes) == (segment.name, segment.inode, 32_768)
    assert not segment.view.nbytes, "its mapping would be too small"
    assert set(grown.view[:12_288].tolist()) == {7} and not grown.view[12_288:].any()
    assert attach(node_memory, grown.name, {grown.inode: grown}) is grown


def test_a_file_is_lent_until_it_is_taken_back_whatever_forked_children_hold(node_memory: NodeDirectory) -> None:
    segment = create(node_memory, 4096)
    other = create(node_memory, 4096)
    first, second, third = (lend(node_memory, file.name) for file in (segment, segment, other))
    beside = attach(node_memory, segment.name)
    assert segment.is_lent and beside.is_lent, "each who has the file sees it"
    first[1]()
    assert segment.is_lent, "the other one has it still"
    ready, done = os.pipe()
    if not (child := os.fork()):
        try:
            second[1]()  # as where the child's views go: the parent's are there still
            os.write(done, b".")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(ready, 1) == b"." and segment.is_lent
        second[1]()
        third[1]()
        assert not segment.is_lent and not beside.is_lent
        assert not other.is_lent, "though the child has the descriptor"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@NEEDS_ROOT
@pytest.mark.parametrize("mib", [1, 5])
def test_a_full_tmpfs_is_an_error_that_leaves_nothing_behind(shm: Path, mib: int) -> None:
    small = shm / "small"
    small.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=0700", "tmpfs", str(small)], check=True, timeout=30
    )
    try:
        memory = NodeDirectory(str(small), "j")
        with pytest.raises(errors.MemoryTooSmall, match="is full"):
            create(memory, 12 << 20)
        assert memory.slot_names() == []
        with pytest.raises(errors.MemoryTooSmall, match="is full"):
            grow(memory, create(memory, 500_000), 12 << 20)
        assert memory.slot_names() == []
        create(memory, 500_000)
        memory.close()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True, timeout=30)


def fake_root(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


def test_cgroup_limits_are_read_in_both_versions(tmp_path: Path) -> None:
    v2 = fake_root(tmp_path / "v2", {
        "proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 50 kB\n",
        "proc/self/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/memory.max": "10000\n",
        "sys/fs/cgroup/job/memory.current": "7000\n",
        "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 500\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": "1\n",
    })  # fmt: skip
    free = available(str(tmp_path), v2)
    assert free["MemAvailable of the node"] == 51_200
    assert [v for k, v in free.items() if k.startswith("memory limit")] == [3500]
    v1 = fake_root(tmp_path / "v1", {
        "proc/self/mounts": "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\ncgroup /x cgroup rw,cpu 0 0\n",
        "proc/self/cgroup": "5:memory:/slurm/job\n4:cpu:/\n",
        "sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes": "8000\n",
        "sys/fs/cgroup/memory/slurm/job/memory.usage_in_bytes": "1000\n",
        "sys/fs/cgroup/memory/slurm/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/slurm/memory.usage_in_bytes": "1000\n",
    })  # fmt: skip
    free = available(str(tmp_path), v1)
    assert [v for k, v in free.items() if k.startswith("memory limit")] == [7000]


def test_what_leaves_no_room_is_named_and_other_errors_are_none_of_it(tmp_path: Path) -> None:
    problems = {number: too_small(OSError(number, ""), str(tmp_path), "1 GiB") for number in (
        errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG, errno.EIO)}  # fmt: skip
    assert problems.pop(errno.EIO) is None
    reasons = ["is full", "has no memory left", "has no room left for this user (quota)",
               "may not have such large files of this process (ulimit -f)"]  # fmt: skip
    assert [error and error.message for error in problems.values()] == [f"{tmp_path} {reason}" for reason in reasons]
