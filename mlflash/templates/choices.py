"""The values of a template: from the command line, else from the cluster, else none. Each has its source."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from ..human_readable.wording import listed, many
from .cluster import Cluster, Partition, seconds

_LEAST_S = 420  # Slurm's signal may come 360 s before the end, and a step must be trained by then
_NODES, _SPARES = 2, 1
_GIVEN = "given"
_NO_SLURM = "it was not given, and Slurm does not answer here"
_VARIABLE = r"(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})"  # without the $ before it


@dataclasses.dataclass(frozen=True)
class Template:
    """A batch script that the command can write.

    Attributes:
        line: what it is for.
        training: the file that is written next to it as train.py.
        arguments: arguments of that file. None if it only starts the user's script, which the user must name.
    """

    line: str
    training: str
    arguments: str | None


TEMPLATES = {
    "train": Template("a PyTorch training with a Checkpointer", "train.py", '--checkpoints "$directory"'),
    "array": Template("several trainings that requeue themselves until they are done", "train.py",
                      '--checkpoints "$directory" --seed "$SLURM_ARRAY_TASK_ID"'),
    "megatron": Template("Megatron-LM with its local checkpoints in memory", "megatron_train.py", None),
    "nemo": Template("NeMo's training with checkpoints in memory", "nemo_train.py", None),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Asked:
    """The command line. None for each value that it does not have."""

    template: str
    output: Path
    account: str | None = None
    partition: str | None = None
    nodes: int | None = None
    spares: int | None = None
    ranks_per_node: int | None = None
    gpus_per_node: int | None = None
    time: str | None = None
    mpi: str | None = None
    job_name: str | None = None
    directory: str | None = None
    srun_args: str | None = None
    script: str | None = None
    arguments: tuple[str, ...] = ()


class Choice(NamedTuple):
    """A value in the file. None leaves its line out.

    Attributes:
        value: the value, quoted for a shell.
        why: its source, or why there is no value.
    """

    value: str | None
    why: str


def choose(asked: Asked, cluster: Cluster) -> dict[str, Choice]:
    """Choose the value of each word between two @ in a template.

    Raises:
        ConfigError: Slurm would refuse a value, or a shell could not read it.
    """
    _check(asked)
    name, why = _partition(asked, cluster)
    partition = cluster.partitions.get((name or "").partition(",")[0])
    account = asked.account or cluster.account or None
    left = "it was not given, and Slurm has no default account for you" if cluster.partitions else _NO_SLURM
    return {
        "account": Choice(account, _GIVEN if asked.account else "your default account" if account else left),
        "partition": Choice(name, why),
        "job-name": Choice(asked.job_name or asked.template, _GIVEN if asked.job_name else "the template's"),
        **_sizes(asked, cluster, partition),
        "time": _time(asked, partition),
        "mpi": _mpi(asked, cluster),
        **_training(asked),
    }


def _check(asked: Asked) -> None:
    """Refuse values that a batch script cannot have."""
    for option, value, pattern in (
        ("--account", asked.account, r"\w[\w.+@:-]*"),
        ("--partition", asked.partition, r"\w[\w.+@-]*(?:,\w[\w.+@-]*)*"),
        ("--job-name", asked.job_name, r"\w[\w.+@-]*"),
        ("--mpi", asked.mpi, r"\w[\w.+/-]*"),
    ):
        if value is not None and not re.fullmatch(pattern, value, re.ASCII):
            raise ConfigError(f"{option} may have letters, digits and a few signs, but no spaces or quotes",
                              found=repr(value))  # fmt: skip
    words = {"--directory": asked.directory, "--script": asked.script, "--srun-args": asked.srun_args,
             "--output": str(asked.output), **{f"argument {word!r}": word for word in asked.arguments}}  # fmt: skip
    for option, value in words.items():
        if value is not None and not value.isprintable():
            raise ConfigError(f"{option} has a line break or another unprintable character", found=repr(value))
    if asked.directory is not None and "://" in asked.directory:
        raise ConfigError("--directory must be a path here, because `mlflash run` writes its journal there, too",
                          found=asked.directory)  # fmt: skip
    try:
        shlex.split(asked.srun_args or "")
    except ValueError as error:
        raise ConfigError(f"--srun-args cannot be split into words: {error}", found=asked.srun_args) from None


def _partition(asked: Asked, cluster: Cluster) -> Choice:
    there = cluster.partitions
    if asked.partition is not None:
        for name in asked.partition.split(","):
            if there and name not in there:
                raise ConfigError(f"Slurm has no partition {name}", expected=listed(list(there)), found=name)
        return Choice(asked.partition, _GIVEN)
    for partition in there.values():
        if partition.default or len(there) == 1:
            return Choice(partition.name, "Slurm's default" if partition.default else "the only one")
    if there:
        return Choice(None, f"it was not given, and none of Slurm's partitions is the default: {listed(list(there))}")
    return Choice(None, _NO_SLURM)


def _sizes(asked: Asked, cluster: Cluster, partition: Partition | None) -> dict[str, Choice]:
    """Choose nodes, spares, ranks per node, GPUs and CPUs."""
    if partition is None:
        spares = asked.spares if asked.spares is not None else _SPARES if asked.nodes else 0
        ranks = asked.ranks_per_node or asked.gpus_per_node or 1
        return {
            **_nodes(asked, asked.nodes, spares, _NO_SLURM),
            "ranks-per-node": Choice(str(ranks), _GIVEN if asked.ranks_per_node else "one for each known GPU"),
            "gpus-per-node": Choice(str(asked.gpus_per_node or "") or None,
                                    _NO_SLURM if asked.gpus_per_node is None else _GIVEN),
            "cpus-per-task": Choice(None, "Slurm does not answer here"),
        }  # fmt: skip
    where = f"the nodes of partition {partition.name}"
    kind = partition.usual(asked.gpus_per_node or 0)
    if kind is None:
        raise ConfigError(f"--gpus-per-node is more than {where} have", expected=f"{asked.gpus_per_node} GPUs",
                          found=max((kind.gpus for kind in partition.kinds), default=0))  # fmt: skip
    ranks = asked.ranks_per_node or asked.gpus_per_node or kind.gpus or 1
    gpus = min(ranks, kind.gpus) if asked.gpus_per_node is None else asked.gpus_per_node
    cpus = cluster.cpus.get(kind, kind.cpus)
    if ranks > cpus:
        raise ConfigError(f"{many(ranks, 'rank')} on a node are more than the CPUs of {where}", found=cpus)
    there = min(partition.nodes_like(kind, gpus), partition.most or sys.maxsize)
    spares = _SPARES if asked.spares is None else asked.spares
    nodes = asked.nodes or max(min(_NODES, there - spares), 1)
    spares = max(min(spares, there - nodes), 0) if asked.spares is None else spares
    if nodes + spares > there:
        raise ConfigError(f"partition {partition.name} gives a job fewer nodes than --nodes and --spares together",
                          expected=nodes + spares, found=there)  # fmt: skip
    by = "one for each GPU" if gpus else f"{where} have no GPU"
    return {
        **_nodes(asked, nodes, spares, f"a small start; partition {partition.name} gives {there:,} to a job"),
        "ranks-per-node": Choice(str(ranks), _GIVEN if asked.ranks_per_node else by),
        "gpus-per-node": Choice(str(gpus or "") or None, _GIVEN if asked.gpus_per_node is not None else
                                f"{where} have {kind.gpus or 'none'}"),
        "cpus-per-task": Choice(str(cpus // ranks), f"{where} have {many(cpus, 'CPU')}"),
    }  # fmt: skip


def _nodes(asked: Asked, nodes: int | None, spares: int, why: str) -> dict[str, Choice]:
    return {"nodes": Choice(str(nodes + spares) if nodes else None,
                            f"{nodes} {_GIVEN}, and {many(spares, 'spare')}" if asked.nodes else why),
            "spares": Choice(str(spares), _GIVEN if asked.spares is not None else "of these nodes")}  # fmt: skip


def _time(asked: Asked, partition: Partition | None) -> Choice:
    limit = partition.limit if partition is not None else ""
    value = asked.time or limit
    if not value:
        where = f"partition {partition.name} has no limit" if partition is not None else "Slurm does not answer here"
        return Choice(None, f"it was not given, and {where}")
    time_s, limit_s = seconds(value), seconds(limit)
    if time_s is None:
        raise ConfigError("--time must be minutes, hours:minutes:seconds, or days-hours", found=repr(value))
    if time_s < _LEAST_S:
        raise ConfigError("the time limit is too short: the end of the job needs up to 6 minutes",
                          expected="7 minutes or more", found=value)  # fmt: skip
    if partition is not None and limit_s is not None and time_s > limit_s:
        raise ConfigError(f"--time is longer than the limit of partition {partition.name}", expected=f"at most {limit}",
                          found=value)  # fmt: skip
    return Choice(value, _GIVEN if asked.time else "the limit of the partition")


def _mpi(asked: Asked, cluster: Cluster) -> Choice:
    if asked.mpi is not None:
        if cluster.mpi and asked.mpi not in cluster.mpi:
            raise ConfigError(f"this srun has no --mpi={asked.mpi}", expected=listed(sorted(cluster.mpi), 8))
        return Choice(asked.mpi, _GIVEN)
    if not cluster.wanted_mpi:
        return Choice(None, "it was not given, and mpi4py cannot load MPI here: Slurm uses its default")
    if cluster.mpi and cluster.wanted_mpi not in cluster.mpi:
        return Choice(None, f"it was not given, and {cluster.library} needs {cluster.wanted_mpi}, which this srun does "
                      "not have")  # fmt: skip
    return Choice(cluster.wanted_mpi, f"needed by {cluster.library}, which mpi4py loads here")


def _training(asked: Asked) -> dict[str, Choice]:
    """Choose the script, its arguments, the directory and the paths."""
    template, output = TEMPLATES[asked.template], Path(os.path.abspath(asked.output))
    directory = asked.directory or str(output / f"{asked.job_name or asked.template}-checkpoints")
    words = [word_of_shell(word) for word in asked.arguments]
    if asked.script is not None:
        script = os.path.abspath(asked.script)
        if not (Path(script).exists() or asked.srun_args):
            raise ConfigError("the file of --script does not exist", found=script)
    elif template.arguments is None:
        raise ConfigError(f"--script is missing: name the training script that {asked.template}.sbatch starts")
    else:
        script, words = str(output / "train.py"), [template.arguments, *words]
    programs = shutil.which("mlflash")
    found = [os.path.dirname(sys.executable), os.path.dirname(os.path.abspath(programs or sys.executable))]
    return {
        "directory": Choice(shlex.quote(os.path.abspath(directory)), _GIVEN if asked.directory else "next to files"),
        "script": Choice(shlex.quote(script), _GIVEN if asked.script else "this command writes it"),
        "arguments": Choice(" ".join(words) or None, _GIVEN if asked.arguments else "the script's own" if words
                            else "none were given"),
        "train": Choice(shlex.quote(str(output / "train.py")), "this command writes it"),
        "srun-args": Choice(shlex.quote(asked.srun_args) if asked.srun_args else None,
                            _GIVEN if asked.srun_args else "none were given"),
        "bin": Choice(shlex.quote(":".join(dict.fromkeys(found))), "where this command is installed"),
    }  # fmt: skip


def word_of_shell(word: str) -> str:
    """Quote a word for a shell. The shell still expands variables such as $directory."""
    if not re.search(rf"\${_VARIABLE}", word):
        return shlex.quote(word)
    return '"' + re.sub(rf'[\\"`]|\$(?!{_VARIABLE})', r"\\\g<0>", word) + '"'
