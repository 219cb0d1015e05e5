"""What goes into a template: as it was asked for, else as the cluster says, else nothing; and where each is from."""

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

_LEAST_S = 420  # Slurm's signal may come 360 s before the end, and there has to be something to save by then
_NODES, _SPARES = 2, 1
_GIVEN = "given"
_NO_SLURM = "it was not given, and no Slurm answers here"
_VARIABLE = r"(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})"  # after its $


@dataclasses.dataclass(frozen=True)
class Template:
    """A batch script that can be written.

    Attributes:
        line: what it is for.
        training: the file that is written beside it as train.py.
        arguments: what this one is started with; None where it only starts the user's script, which has to be named.
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
    """What the command line says; None where it says nothing."""

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
    """A value as it stands in the file; None leaves its line out.

    Attributes:
        value: in the quotes that a shell needs.
        why: where it is from, or why there is none.
    """

    value: str | None
    why: str


def choose(asked: Asked, cluster: Cluster) -> dict[str, Choice]:
    """Choose the value of each word that a template has between two @.

    Raises:
        ConfigError: Slurm would refuse what was asked for, or a shell could not read it.
    """
    _check(asked)
    name, why = _partition(asked, cluster)
    partition = cluster.partitions.get((name or "").partition(",")[0])
    account = asked.account or cluster.account or None
    left = "it was not given, and Slurm names none for you" if cluster.partitions else _NO_SLURM
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
    """Refuse what no batch script can have."""
    for option, value, pattern in (
        ("--account", asked.account, r"\w[\w.+@:-]*"),
        ("--partition", asked.partition, r"\w[\w.+@-]*(?:,\w[\w.+@-]*)*"),
        ("--job-name", asked.job_name, r"\w[\w.+@-]*"),
        ("--mpi", asked.mpi, r"\w[\w.+/-]*"),
    ):
        if value is not None and not re.fullmatch(pattern, value, re.ASCII):
            raise ConfigError(f"{option} is made of letters, digits and a few signs, without spaces or quotes",
                              found=repr(value))  # fmt: skip
    words = {"--directory": asked.directory, "--script": asked.script, "--srun-args": asked.srun_args,
             "--output": str(asked.output), **{f"argument {word!r}": word for word in asked.arguments}}  # fmt: skip
    for option, value in words.items():
        if value is not None and not value.isprintable():
            raise ConfigError(f"{option} has a line break, or another sign that is not printed", found=repr(value))
    if asked.directory is not None and "://" in asked.directory:
        raise ConfigError("--directory is a path here: the journal of `mlflash run` lies there, too",
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
        return Choice(None, f"it was not given, and none of Slurm's is the default: {listed(list(there))}")
    return Choice(None, _NO_SLURM)


def _sizes(asked: Asked, cluster: Cluster, partition: Partition | None) -> dict[str, Choice]:
    """Nodes, spares, and what each node gives to how many ranks."""
    if partition is None:
        spares = asked.spares if asked.spares is not None else _SPARES if asked.nodes else 0
        ranks = asked.ranks_per_node or asked.gpus_per_node or 1
        return {
            **_nodes(asked, asked.nodes, spares, _NO_SLURM),
            "ranks-per-node": Choice(str(ranks), _GIVEN if asked.ranks_per_node else "one for each GPU that is known"),
            "gpus-per-node": Choice(str(asked.gpus_per_node or "") or None,
                                    _NO_SLURM if asked.gpus_per_node is None else _GIVEN),
            "cpus-per-task": Choice(None, "no Slurm answers here"),
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
        raise ConfigError(f"{many(ranks, 'rank')} on a node are more than the CPUs that {where} have", found=cpus)
    there = min(partition.nodes_like(kind, gpus), partition.most or sys.maxsize)
    spares = _SPARES if asked.spares is None else asked.spares
    nodes = asked.nodes or max(min(_NODES, there - spares), 1)
    spares = max(min(spares, there - nodes), 0) if asked.spares is None else spares
    if nodes + spares > there:
        raise ConfigError(f"nodes and spares are more than partition {partition.name} gives to a job",
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
        where = f"partition {partition.name} has no limit" if partition is not None else "no Slurm answers here"
        return Choice(None, f"it was not given, and {where}")
    time_s, limit_s = seconds(value), seconds(limit)
    if time_s is None:
        raise ConfigError("--time is minutes, hours:minutes:seconds, or days-hours", found=repr(value))
    if time_s < _LEAST_S:
        raise ConfigError("the time is too short, as up to 6 minutes of it are for the end of the job",
                          expected="7 minutes or more", found=value)  # fmt: skip
    if partition is not None and limit_s is not None and time_s > limit_s:
        raise ConfigError(f"partition {partition.name} lets no job run for so long", expected=f"at most {limit}",
                          found=value)  # fmt: skip
    return Choice(value, _GIVEN if asked.time else "the limit of the partition")


def _mpi(asked: Asked, cluster: Cluster) -> Choice:
    if asked.mpi is not None:
        if cluster.mpi and asked.mpi not in cluster.mpi:
            raise ConfigError(f"this srun has no --mpi={asked.mpi}", expected=listed(sorted(cluster.mpi), 8))
        return Choice(asked.mpi, _GIVEN)
    if not cluster.wanted_mpi:
        return Choice(None, "it was not given, and mpi4py loads no MPI here: Slurm takes its default")
    if cluster.mpi and cluster.wanted_mpi not in cluster.mpi:
        return Choice(None, f"it was not given, and {cluster.library} wants {cluster.wanted_mpi}, which this srun does "
                      "not have")  # fmt: skip
    return Choice(cluster.wanted_mpi, f"what {cluster.library} wants, which mpi4py loads here")


def _training(asked: Asked) -> dict[str, Choice]:
    """What is started where, and what it is told."""
    template, output = TEMPLATES[asked.template], Path(os.path.abspath(asked.output))
    directory = asked.directory or str(output / f"{asked.job_name or asked.template}-checkpoints")
    words = [word_of_shell(word) for word in asked.arguments]
    if asked.script is not None:
        script = os.path.abspath(asked.script)
        if not (Path(script).exists() or asked.srun_args):
            raise ConfigError("there is no such --script", found=script)
    elif template.arguments is None:
        raise ConfigError(f"--script is missing: the training of yours that {asked.template}.sbatch starts")
    else:
        script, words = str(output / "train.py"), [template.arguments, *words]
    programs = shutil.which("mlflash")
    found = [os.path.dirname(sys.executable), os.path.dirname(os.path.abspath(programs or sys.executable))]
    return {
        "directory": Choice(shlex.quote(os.path.abspath(directory)), _GIVEN if asked.directory else "beside the files"),
        "script": Choice(shlex.quote(script), _GIVEN if asked.script else "it is written, too"),
        "arguments": Choice(" ".join(words) or None, _GIVEN if asked.arguments else "the script's own" if words
                            else "none were given"),
        "train": Choice(shlex.quote(str(output / "train.py")), "it is written, too"),
        "srun-args": Choice(shlex.quote(asked.srun_args) if asked.srun_args else None,
                            _GIVEN if asked.srun_args else "none were given"),
        "bin": Choice(shlex.quote(":".join(dict.fromkeys(found))), "where this command runs"),
    }  # fmt: skip


def word_of_shell(word: str) -> str:
    """Quote a word so that a shell reads it as it is, but for variables, as $directory, which are filled in."""
    if not re.search(rf"\${_VARIABLE}", word):
        return shlex.quote(word)
    return '"' + re.sub(rf'[\\"`]|\$(?!{_VARIABLE})', r"\\\g<0>", word) + '"'
