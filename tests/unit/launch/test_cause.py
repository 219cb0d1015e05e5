"""Why a rank failed, from what processes, libraries and kernels really print."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlflash.launch.cause import PROGNOSES, Cause, cause_of
from mlflash.launch.kernel_evidence import KernelEvidence

KILLED, ABORTED, ENDED = 128 + signal.SIGKILL, 128 + signal.SIGABRT, 128 + signal.SIGTERM
OOM_KILL = (
    "Memory cgroup out of memory: Killed process 4711 (python) total-vm:98412340kB, anon-rss:64210116kB, file-rss:"
    "92160kB, shmem-rss:0kB, UID:1000 pgtables:131072kB oom_score_adj:0"
)
FALLEN = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
FAULT = "NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS"
RAISED = """Traceback (most recent call last):
  File "/home/me/train.py", line 40, in <module>
    main()
  File "/home/me/train.py", line 31, in step
    loss = model(batch)
  File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1775, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
{}
"""
AT = "/home/me/train.py:31 in step"
TORCH_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 1.58 GiB is free. Process 3817 has 77.51 GiB memory in use."
)
TIMEOUT = (
    "[rank3]:[E1130 03:12:44.801924 ProcessGroupNCCL.cpp:683] [Rank 3] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600060"
)
WATCHDOG = f"""{TIMEOUT} milliseconds before timing out.
[rank3]:[E1130 03:12:45.127310 ProcessGroupNCCL.cpp:2241] [PG ID 0 PG GUID 0(default_pg) Rank 3] Exception detected
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception
Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:670
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f5a9616c1b6 in libc10.so)
"""
REMOTE = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote "
    "process exited or there was a network error, NCCL version 2.27.5"
)
DUPLICATE = REMOTE.replace("remote process exited or there was a network error", "invalid usage (NCCL_DEBUG=WARN)")
GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.7]"
ALLOC = "RuntimeError: [enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory: you tried"
WORKER = "RuntimeError: DataLoader worker (pid 4712) is killed by signal: Killed. "
ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
LAUNCH = "torch.AcceleratorError: CUDA error: unspecified launch failure"
PREFIXED = "".join(f"[rank7]: {line}\n" for line in RAISED.format("KeyError: 'tokens'").splitlines())
SYNTAX = '  File "/home/me/train.py", line 3\n    loss = model(\n                ^\nSyntaxError: invalid syntax\n'
CHAINED = RAISED.format("KeyError: 1") + "\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize(
    ("code", "stderr", "more", "kind", "text", "evidence"),
    [
        (1, RAISED.format("ValueError: loss is NaN\nat step 3"), {}, "error", "ValueError: loss is NaN", AT),
        (1, PREFIXED, {}, "error", "KeyError: 'tokens'", AT),
        (1, SYNTAX, {}, "error", "SyntaxError: invalid syntax", "/home/me/train.py:3"),
        (1, CHAINED + RAISED.format("OSError: [Errno 5]"), {}, "error", "OSError: [Errno 5]", AT),
        (1, RAISED.format("E: x") + "warned\n" * 9000, {}, "error", "E: x", AT),
        (ABORTED, RAISED.format("E: x") + "terminate called\n", {}, "error", "E: x", AT),
        (3, RAISED.format("E: x") + "caught\n" * 9000, {}, "exit", "its process ended with code 3", "caught"),
        (1, RAISED.format(TORCH_OOM), {}, "device out of memory", TORCH_OOM, AT),
        (1, RAISED.format("RuntimeError: CUDA error: out of memory"), {}, "device out of memory", "RuntimeError: ", AT),
        (1, RAISED.format(ALLOC), {}, "out of memory", ALLOC, AT),
        (1, RAISED.format("MemoryError"), {}, "out of memory", "MemoryError", AT),
        (KILLED, "", {"oom_kills": 1}, "out of memory", "the kernel killed it", "oom_kill of its cgroup rose by 1"),
        (KILLED, "", {"kernel": [OOM_KILL], "pid": 4711}, "out of memory", "the kernel killed it", OOM_KILL[:60]),
        (KILLED, "", {"kernel": [OOM_KILL], "pid": 471, "oom_kills": 0}, "killed", "", "from outside"),
        (1, RAISED.format(WORKER), {"oom_kills": 1}, "out of memory", "the kernel killed it", "oom_kill of its"),
        (1, RAISED.format(WORKER), {"oom_kills": 0}, "error", WORKER.strip(), AT),
        (1, RAISED.format("ValueError: x"), {"oom_kills": 1}, "error", "ValueError: x", AT),
        (KILLED, "", {"oom_kills": 0}, "killed", "its process was killed by signal 9", "from outside"),
        (KILLED, GLOO, {"oom_kills": 0}, "killed", "its process was killed by signal 9", "from outside"),
        (KILLED, RAISED.format("E: logged"), {}, "killed", "its process was killed by signal 9", "by whom is unknown"),
        (ENDED, "", {"sender": "its agent"}, "killed", "its process was killed by signal 15", "from its agent"),
        (ENDED, RAISED.format("E: x"), {"sender": "its agent"}, "error", "E: x", AT),
        (130, RAISED.format("KeyboardInterrupt"), {}, "killed", "its process was killed by signal 2", "from outside"),
        (ABORTED, WATCHDOG, {}, "nccl", TIMEOUT, ""),
        (ABORTED, WATCHDOG + "frame\n" * 2000, {}, "nccl", TIMEOUT, ""),
        (ABORTED, TORCH_OOM + "\ncaught\n" * 2000 + "free(): invalid size\n", {}, "crash", "its process", "free()"),
        (1, RAISED.format(REMOTE), {}, "nccl", REMOTE, AT),
        (1, RAISED.format(DUPLICATE), {}, "error", DUPLICATE, AT),
        (1, RAISED.format(GLOO), {}, "peer", GLOO, AT),
        (1, "mlflash: rank 2 ends, as all ranks do: SaveFailed: no\n", {}, "peer", "it ended", "mlflash: rank 2 ends"),
        (1, "rank 1 has left the job: E: x; this rank ends, too\n", {}, "peer", "it ended", "rank 1 has left the job"),
        (1, RAISED.format(LAUNCH), {"kernel": [FAULT, FALLEN]}, "device", "a GPU of its node failed", FALLEN[:60]),
        (ABORTED, WATCHDOG, {"kernel": [FALLEN]}, "device", "a GPU of its node failed", FALLEN[:60]),
        (1, RAISED.format(LAUNCH), {"kernel": [FAULT]}, "error", LAUNCH, AT),
        (1, RAISED.format("ValueError: x"), {"kernel": [FALLEN]}, "error", "ValueError: x", AT),
        (1, RAISED.format(ECC), {}, "device", ECC, AT),
        (139, "Fatal Python error: Segmentation fault\n\nCurrent\n", {}, "crash", "its process crashed (SIGSEGV)",
         "Fatal Python error: Segmentation fault"),
        (7, "no data in /lustre\n\n", {}, "exit", "its process ended with code 7", "no data in /lustre"),
        (255, "", {}, "exit", "its process ended with code 255", ""),
    ],
)  # fmt: skip
def test_a_failure_has_a_kind_and_what_shows_it(
    code: int, stderr: str, more: dict[str, object], kind: str, text: str, evidence: str
) -> None:
    cause = cause_of(code, stderr, **more)  # type: ignore[arg-type]
    assert cause.kind == kind and kind in PROGNOSES, cause
    assert cause.text.startswith(text) and cause.evidence.startswith(evidence)
    assert bool(evidence) == bool(cause.evidence)


@pytest.mark.parametrize(
    ("first", "second", "is_again"),
    [
        (Cause("error", "KeyError: 17 at 0x7f", "t.py:3", 1), Cause("error", "KeyError: 4 at 0x8f", "t.py:7"), True),
        (Cause("error", "AssertionError", "t.py:3 in step"), Cause("error", "AssertionError", "t.py:3 in load"), False),
        (Cause("error", "KeyError: 17"), Cause("error", "IndexError: 17"), False),
        (Cause("device out of memory", TORCH_OOM), Cause("device out of memory", TORCH_OOM.replace("2.00", "3")), True),
        (Cause("error", "MemoryError"), Cause("out of memory", "MemoryError"), False),
        (cause_of(KILLED, oom_kills=1), cause_of(KILLED, oom_kills=2), True),
        (cause_of(KILLED), cause_of(KILLED), False),
        (cause_of(ABORTED, WATCHDOG), cause_of(ABORTED, WATCHDOG), False),
    ],
)
def test_only_what_the_program_itself_does_again_is_the_same_error(first: Cause, second: Cause, is_again: bool) -> None:
    assert second.is_again(first) == is_again and not second.is_again(None)


def test_a_real_exception_is_read_as_python_prints_it() -> None:
    program = "import json\ndef step():\n    json.loads('{')\nstep()\n"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    cause = cause_of(ended.returncode, ended.stderr)
    assert str(cause) == (
        "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) "
        "[<string>:3 in step]"
    )


# What the kernel shows


def cgroup(root: Path, version: int) -> Path:
    """A cgroup of this process below a folder; the file that counts."""
    mounts = "cgroup /sys/fs/cgroup/memory cgroup rw,memory" if version == 1 else "cgroup2 /sys/fs/cgroup cgroup2 rw"
    group = root / "sys/fs/cgroup" / ("memory" if version == 1 else "") / "job/step"
    group.mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mounts").write_text(f"{mounts} 0 0\n")
    (root / "proc/self/cgroup").write_text("4:memory:/job/step\n" if version == 1 else "0::/job/step\n")
    return group / ("memory.oom_control" if version == 1 else "memory.events")


@pytest.mark.parametrize("version", [1, 2])
def test_processes_that_the_kernel_killed_are_counted_since_the_last_call(tmp_path: Path, version: int) -> None:
    file = cgroup(tmp_path, version)
    file.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    evidence = KernelEvidence(str(tmp_path))
    assert evidence.oom_kills() == 0
    file.write_text("low 0\nhigh 0\nmax 9\noom 3\noom_kill 7\n")
    assert evidence.oom_kills() == 2 and evidence.oom_kills() == 0
    file.unlink()
    assert evidence.oom_kills() is None
    assert evidence.since(evidence.mark()) == []


def test_lines_of_the_kernel_count_from_when_a_rank_began(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    log = tmp_path / "dev/kmsg"
    log.write_text(f"4,1,100,-;{FALLEN}\n")  # before the agent
    evidence = KernelEvidence(str(tmp_path))

    def add(line: str) -> None:
        with log.open("a") as file:
            file.write(f"4,2,200,-;{line}\n SUBSYSTEM=pci\n")

    add(FAULT)
    mark = evidence.mark()
    add("usb 1-1: new device")
    add(OOM_KILL)
    assert evidence.since(mark) == [OOM_KILL]
    add(FALLEN)
    assert evidence.since(mark) == [OOM_KILL, FALLEN] and evidence.since(evidence.mark()) == []
    assert evidence.oom_kills() is None, "there is no cgroup"


@pytest.mark.skipif(not os.access("/sys/fs/cgroup/memory/memory.oom_control", os.W_OK), reason="needs cgroups, as root")
def test_a_process_beyond_the_limit_of_its_cgroup_is_seen_to_be_killed_for_that(tmp_path: Path) -> None:
    group = Path(f"/sys/fs/cgroup/memory/mlflash-{os.getpid()}")
    group.mkdir()
    program = f"""
import os, subprocess, sys
open("{group}/cgroup.procs", "w").write(str(os.getpid()))
from mlflash.launch.cause import cause_of
from mlflash.launch.kernel_evidence import KernelEvidence
evidence = KernelEvidence()
process = subprocess.run([sys.executable, "-c", "x = bytearray(1 << 28)"])
print(cause_of(128 - process.returncode, oom_kills=evidence.oom_kills()))
open("/sys/fs/cgroup/memory/cgroup.procs", "w").write(str(os.getpid()))
"""
    try:
        (group / "memory.limit_in_bytes").write_text(str(128 << 20))
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    finally:
        group.rmdir()
    expected = "the kernel killed it because memory was used up [oom_kill of its cgroup rose by 1]\n"
    assert ended.stdout == expected, ended.stderr
