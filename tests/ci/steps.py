"""The steps of the gate and of all tests, in the order in which they begin.

Lint, types and unit tests, with what they need, are the first steps: nothing else begins before all of these have
passed.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of make.

    Attributes:
        name: unique in its list.
        make: targets and variables, as in a shell.
        seconds: how long it takes beside others on two cores.
        after: steps that must have passed before, as a rule those that make environments.
        is_first: nothing but first steps begins before all of these have passed.
        waits: mostly for timers (Slurm's, TCP's).
        has_report: its tests are counted from its report; without a report it counts as one test.
    """

    name: str
    make: str
    seconds: float
    after: tuple[str, ...] = ("env",)
    is_first: bool = False
    waits: bool = False
    has_report: bool = True

    @property
    def limit(self) -> float:
        """Seconds after which it is ended and has failed: a busy machine is slow."""
        return 120 + 3 * self.seconds


def _environment(name: str, seconds: float, *after: str, is_first: bool = False) -> Step:
    folder = name.replace("env", ".venv")
    stamp = ".tests" if name == "env-lint" else ".installed"
    return Step(name, f"{folder}/{stamp}", seconds, after, is_first=is_first, has_report=False)


def _gate(name: str, seconds: float, *after: str, waits: bool = False) -> Step:
    return Step(name, f"{name} MARK=gate", seconds, after or ("env",), waits=waits)


def _first(unit: str, seconds: float) -> tuple[Step, ...]:
    return (
        Step("packages", ".venv/.tests", 75, (), is_first=True, has_report=False),
        _environment("env-lint", 11, is_first=True),
        Step("lint", "lint", 3, ("env-lint",), is_first=True, has_report=False),
        Step("wheel", ".venv-build/.wheel", 6, (), is_first=True, has_report=False),
        _environment("env", 5, "packages", "wheel", is_first=True),
        Step("unit", unit, seconds, is_first=True),
        Step("type", "type", 20, ("env", "env-lint"), is_first=True, has_report=False),
    )


GATE = (
    *_first("unit MARK='not slow'", 90),
    # What waits.
    _gate("slurm", 60, waits=True),
    _gate("cluster", 80, waits=True),
    _gate("faults", 300, waits=True),  # for the ends of processes
    # What computes.
    _environment("env-transformers", 50, "env"),
    Step("simulation", "simulation", 190),
    _environment("env-lightning", 25, "env"),
    _gate("nemo", 80, "env-transformers", "env-lightning"),
    _gate("megatron-trainings", 50),
    Step("test-3", "test-3 TRANSPORT=p2p MARK='not slow'", 120),
    _gate("torchtitan", 40, "env-transformers"),
    _gate("transformers", 40, "env-transformers"),
    _gate("deepspeed", 40, "env-transformers"),
    _gate("lightning", 40, "env-lightning"),
    _gate("adapters", 60, "env-transformers"),
    _gate("programs", 120),
    # What depends on the number of ranks.
    Step("test-4", "test-4 TRANSPORT=rma MARK='not slow' ONLY='parity or sharing or scrub or newest or reshard'", 110),
    _gate("package", 60),
    Step("demo", "demo DEMO='--steps 8'", 40, has_report=False),
    Step("test-1", "test-1 TRANSPORT=p2p", 40),
)
FULL = (
    *_first("unit", 200),
    Step("docs", "docs", 60, ("wheel",), has_report=False),
    _environment("env-openmpi", 10, "env"),
    _environment("env-transformers", 50, "env"),
    _environment("env-lightning", 25, "env"),
    _environment("env-megatron", 10, "env"),
    _environment("env-files", 40, "env-transformers"),
    # What waits.
    Step("slurm", "slurm", 900, waits=True),
    Step("cluster", "cluster", 1450, waits=True),
    # What computes.
    Step("faults", "faults", 1700),
    Step("simulation", "simulation", 190),
    Step("simulate", "simulate SEEDS=0:1000 JOBS=1", 500, has_report=False),
    Step("programs", "programs", 900, ("env-openmpi",)),  # some of their trainers are started by Open MPI
    Step("nemo", "nemo", 700, ("env-transformers", "env-lightning")),
    Step("megatron-ranks", "megatron-ranks", 100, ("env-megatron",)),
    Step("megatron-trainings", "megatron-trainings", 350, ("env-megatron",)),
    Step("deepspeed", "deepspeed", 180, ("env-transformers",)),
    Step("torchtitan", "torchtitan", 200, ("env-transformers",)),
    Step("lightning", "lightning", 280, ("env-lightning",)),
    Step("transformers", "transformers", 240, ("env-transformers",)),
    Step("torchao", "torchao", 100, ("env",)),
    Step("package", "package", 800),
    Step("test-1", "test-1 TRANSPORT=p2p", 40),
    Step("test-8", "test-8", 120),
    # 2, 3 and 4 have both transports.
    Step("test-2", "test-2", 200),
    Step("test-3", "test-3", 250),
    Step("test-4", "test-4", 300),
    Step("test-5", "test-5 TRANSPORT=rma", 150),
    Step("openmpi-test-3", "MPI=openmpi test-3 TRANSPORT=p2p", 150, ("env-openmpi",)),  # couriers are those of MPICH
    Step("adapters", "adapters", 250, ("env-files",)),
    Step("files", "files", 80, ("env-files",)),
    Step("browser", "browser", 75, ("env", "docs")),
    Step("chaos", "chaos SEED=1 MINUTES=1", 90, has_report=False),
    Step("chaos-parity", "chaos SEED=2 MINUTES=0.5 CHAOS='--redundancy rs:2+2'", 60, has_report=False),
    Step("chaos-rma", "chaos SEED=3 MINUTES=0.5 CHAOS='--transport rma --ranks-per-node 2'", 60, has_report=False),
    Step("bench", "bench BENCH=--quick", 300, ("env-megatron",), has_report=False),  # whether each works; no figures
    Step("demo", "demo", 40, has_report=False),
)  # fmt: skip


def of_torch(version: str) -> tuple[Step, Step]:
    """The steps of `make full` for another version of PyTorch, which take 5 GB and half an hour."""
    environment = _environment(f"env-torch-{version}", 600, "env-transformers", "env-lightning")
    return environment, Step(f"torch-{version}", f"torch-{version}", 1500, (environment.name,))
