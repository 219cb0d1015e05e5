"""The Slurm of these tests: it is a real one, nodes die under it, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from cluster.nodes import HEAD, Nodes
from cluster.slurm.daemons import Slurm
from cluster.slurm.jobs import MPI_ENVIRONMENT, OTHER_PMI, PMI
from harness import SUPPORT, TESTS
from waiting import PATIENCE_S, until

WORLD = """
from mpi4py import MPI
names = MPI.COMM_WORLD.gather(MPI.Get_processor_name())
if names:
    print(len(names), "ranks:", *names, flush=True)
"""
GO_ON = f"""#!/bin/sh
step() {{ srun --no-kill --kill-on-bad-exit=0 --nodes=2 "$@"; }}
step -w host1,host2 --ntasks=2 sh -c 'echo $(hostname) began; exec sleep 1000' &
until sinfo -h -n host2 -o %T | grep -q down; do sleep 0.2; done
scancel $SLURM_JOB_ID.0
wait
step -w host1,host3 --ntasks=4 --mpi={PMI} {sys.executable} -m mpi4py -c "$WORLD"
"""
TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2")


def on_mpi(code: str) -> list[str]:
    return [sys.executable, "-m", "mpi4py", "-c", code]


def wait_until_gone(pids: Sequence[int]) -> None:
    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
        except OSError:
            return False

    until(lambda: not any(map(runs, pids)), lambda: f"the end of {[pid for pid in pids if runs(pid)]}")


def wait_for_second_after(second: int) -> None:
    """Wait until the clock shows a later second: Slurm compares whole ones."""
    until(lambda: int(time.time()) > second, f"the second after {second}")


def test_srun_starts_one_world_on_two_nodes(slurm: Slurm) -> None:
    done = slurm.run("srun", *TWO_BY_TWO, f"--mpi={PMI}", *on_mpi(WORLD), env=MPI_ENVIRONMENT)
    assert done.stdout == "4 ranks: host1 host1 host2 host2\n", done.stderr


def test_with_the_wrong_mpi_each_rank_is_a_world_and_mlflash_says_so(slurm: Slurm) -> None:
    done = slurm.run("srun", *TWO_BY_TWO, f"--mpi={OTHER_PMI}", *on_mpi(WORLD), env=MPI_ENVIRONMENT)
    assert sorted(done.stdout.splitlines()) == ["1 ranks: host1"] * 2 + ["1 ranks: host2"] * 2
    checkpointer = on_mpi("import mlflash; mlflash.Checkpointer()")
    said = {
        "thread": "srun started several tasks, but each of them is an MPI world",
        "process": "4 ranks of srun have no way to find each other without MPI: start them by srun --mpi=pmi2",
    }
    for courier, text in said.items():
        done = slurm.run("srun", *TWO_BY_TWO, f"--mpi={OTHER_PMI}", *checkpointer, check=False,
                         env={"MLFLASH_COURIER": courier})  # fmt: skip
        assert done.returncode == 1 and done.stderr.count(f"WorldMismatch: {text}") == 4, done.stderr
        assert done.stderr.count("expected: 4 ranks") == (4 if courier == "thread" else 0)


def test_a_job_goes_on_with_a_spare_when_a_node_crashes(slurm: Slurm) -> None:
    job = slurm.sbatch(GO_ON, "--nodes=3", "--exclusive", "--no-kill", env={**MPI_ENVIRONMENT, "WORLD": WORLD})
    job.wait_for_output("host2 began")
    slurm.nodes.crash("host2")
    job.wait("COMPLETED")
    assert "4 ranks: host1 host1 host3 host3\n" in job.output()
    assert job.hosts() == ["host1", "host3"], "with --no-kill, Slurm takes a dead node out of the job"


def test_nodes_that_fall_silent_are_down_and_come_back(slurm: Slurm) -> None:
    slurm.nodes.crash("host1", power_cut=True)
    slurm.nodes.cut("host2")
    slurm.kill_slurmd("host3")
    assert slurm.node_states()["host2"] == "idle"
    slurm.wait_for_nodes("down", "host1", "host2", "host3")
    assert slurm.node_states()["host4"] == "idle"
    slurm.nodes.boot("host1")
    slurm.nodes.plug("host2")
    slurm.kill_slurmd("host2")  # else slurmctld would look again only a minute later
    for host in ("host1", "host2", "host3"):
        slurm.start_slurmd(host)
    slurm.wait_for_nodes("idle", *slurm.nodes.names)
    assert sorted(slurm.run("srun", "--nodes=4", "hostname").stdout.split()) == list(slurm.nodes.names)


def test_a_node_that_reboots_at_once_is_down_where_reboots_are_not_forgiven(may_run_slurm: None, nodes: Nodes) -> None:
    with Slurm(nodes, {"ReturnToService": 1}) as slurm:
        job = slurm.sbatch("#!/bin/sh\nexec sleep 1000", "--nodes=2", "--no-kill")
        job.wait("RUNNING")
        nodes.crash("host2")
        wait_for_second_after(int(time.time()))  # it has rebooted if it was booted in a later one than it last answered
        nodes.boot("host2")
        slurm.start_slurmd("host2")
        slurm.wait_for_nodes("down", "host2")
        told = slurm.run("scontrol", "--oneliner", "show", "node", "host2").stdout
        assert "Reason=Node unexpectedly rebooted" in told, "it is down for another reason, such as silence"
        assert job.state() == "RUNNING" and job.hosts() == ["host1"]
        # Its boot, told as now less uptime, may look a second later by the next registration; its answer to resume must
        # be of no earlier one, or it has rebooted again.
        wait_for_second_after(int(time.time()) + 1)
        slurm.run("scontrol", "update", "nodename=host2", "state=resume")
        slurm.wait_for_nodes("idle", "host2")


def test_a_requeued_job_keeps_its_number_and_counts_its_restarts(slurm: Slurm) -> None:
    job = slurm.sbatch("#!/bin/sh\necho job $SLURM_JOB_ID restart ${SLURM_RESTART_COUNT-unset}\nexec sleep 1000")
    job.wait_for_output(f"job {job.id} restart unset\n")
    job.requeue()
    job.wait_for_output(f"job {job.id} restart 1\n")
    assert job.state() == "RUNNING" and job.details()["Restarts"] == "1"
    job.cancel()
    assert job.wait() == "CANCELLED"


def test_the_signal_before_the_time_limit_reaches_the_shell_of_the_script(slurm: Slurm) -> None:
    script = "#!/bin/sh\ntrap 'echo USR1 came; exit 7' USR1\necho ready\nsleep 1000 & wait"
    job = slurm.sbatch(script, "--time=1", "--signal=B:USR1@59")
    job.wait_for_output("USR1 came")
    assert job.wait("FAILED") and job.details()["ExitCode"] == "7:0"
    job = slurm.sbatch(script)
    job.wait_for_output("ready")
    job.signal("USR1", "--batch")
    job.wait_for_output("USR1 came")


def test_what_a_wait_waited_for_is_said_with_output_and_logs(slurm: Slurm) -> None:
    job = slurm.sbatch("#!/bin/sh\necho last words\nexit 3")
    job.wait()
    with pytest.raises(AssertionError, match=r"(?s)job 1: ended as FAILED, not RUNNING.*ExitCode=3:0.*last words"):
        job.wait("RUNNING")
    with pytest.raises(AssertionError, match=r"(?s)not within 0.1 s: job 2: COMPLETED.*slurmctld.log.*JobId=2"):
        slurm.sbatch("#!/bin/sh\nexec sleep 1000").wait("COMPLETED", timeout=0.1)
    with pytest.raises(AssertionError, match=r"(?s)not within 0.1 s: host1 down.*host1.log.*slurmd started"):
        slurm.wait_for_nodes("down", "host1", timeout=0.1)
    with pytest.raises(TimeoutError, match=r"(?s)not within 10 s: the end of sh -c .*\nbegun\n.*slurmctld.log"):
        slurm.run("sh", "-c", "echo begun; exec sleep 1000", timeout=10)
    with pytest.raises(RuntimeError, match=r"(?s)srun false ended with 1.*Exited with exit code 1.*slurmctld.log"):
        slurm.run("srun", "false")


def test_one_slurm_after_another_and_beside_it_leaves_nothing_behind(slurm: Slurm) -> None:
    with Nodes(["host1", "host2"]) as nodes:
        before = nodes.run("host1", "ls", "/tmp")  # the way to the checkout, where that is below /tmp
        for _ in range(2):
            with Slurm(nodes) as other:
                job = other.sbatch("#!/bin/sh\necho ready\nsrun sleep 1000", "--nodes=2")
                job.wait_for_output("ready")
                assert job.id == "1", "it remembers another one's jobs"
                ours = [pid for host in (HEAD, "host1", "host2") for pid in nodes.running(host)]
            wait_until_gone(ours)
            assert not other.path.exists()
            for host in ("host1", "host2"):
                assert nodes.running(host) == []
                assert nodes.run(host, "ls", "/tmp") == before
                assert "pmix" not in nodes.run(host, "cat", "/proc/mounts")
            other.close()  # twice does no harm
    assert slurm.run("srun", "--nodes=4", "hostname").stdout.count("host") == 4


def test_slurm_ends_with_the_process_that_made_it_even_if_it_is_killed(may_run_slurm: None) -> None:
    program = """
from cluster.nodes import HEAD, Nodes
from cluster.slurm.daemons import Slurm
from waiting import hang
slurm = Slurm(Nodes(["host1"]))
print(slurm.nodes.path, *slurm.nodes.running(HEAD), *slurm.nodes.running("host1"), flush=True)
hang()
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SUPPORT, TESTS)))}
    maker = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    path, *pids = maker.stdout.readline().split()
    maker.send_signal(signal.SIGKILL)
    maker.communicate(timeout=PATIENCE_S)
    assert len(pids) > 3, "munged, slurmctld, slurmd, and what waits for it"
    wait_until_gone([int(pid) for pid in pids])
    subprocess.run(["rm", "-r", path], check=True)  # the one thing that nobody was left to remove
