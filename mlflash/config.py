"""All settings: unit, default and environment name of each; they are checked when a Checkpointer is made.

An argument in code takes precedence over the environment, and the environment over the default. Only the kill switch
takes precedence over both: ``MLFLASH_DISABLE=1`` is the opposite of ``enabled``, and mlflash is off if either of them
says so.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from .errors import ConfigError
from .placement import redundancy
from .placement.topology import Node, this_node
from .storage import canonical_json
from .storage.store import is_url, without_file_scheme
from .text import LIGHT

DISABLE = "MLFLASH_DISABLE"
"""Environment name of the kill switch."""
FRESH = "MLFLASH_FRESH"
"""Environment name of a fresh start."""
PREFER_CERTIFIED = "MLFLASH_PREFER_CERTIFIED"
"""Environment name of the rule that a restore takes what is certified."""
_OTHER_VARIABLES = tuple(
    f"MLFLASH_{name}"
    for name in ("AGENT", "COMPLETE", "FAILED_AT", "INTERFACE", "ISAL", "KEPT", "LIBMPI", "PRESUMED", "RUN", "TOKEN",
                 "TRACEBACK")
)  # fmt: skip
_OTHER_ARGUMENTS = ("comm", "replicated", "process_group")  # of Checkpointer
_NOT_SETTINGS = ("MLFLASH_TEST_", "MLFLASH_BENCH_")
COMPRESSIONS = ("gzip", "zstd", "lz4", "blosc", "blosc2", "bshuf", "bzip2")
"""HDF5's own, and those of hdf5plugin that give back every bit."""


@dataclasses.dataclass(frozen=True)
class Allowed:
    """Which values a setting may have, and what an error says of it after "expected: "."""

    holds: Callable[[Any], bool]
    text: str


def _one_of(*values: str) -> Allowed:
    return Allowed(lambda value: value in values, f"one of {', '.join(map(repr, values))}")


_ANY = Allowed(lambda value: True, "")
_NOT_NEGATIVE = Allowed(lambda value: value >= 0, "a number, 0 or more")
_ABOVE_0 = Allowed(lambda value: value > 0, "a number above 0")
_FRACTION = Allowed(lambda value: 0 <= value <= 1, "a number, 0 to 1")
_ABSOLUTE = Allowed(os.path.isabs, "an absolute path")
_SCHEME = Allowed(lambda value: _is_scheme(value), redundancy.EXPECTED)
_JOB_NAME = Allowed(
    lambda value: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(\+light)?", value) is not None,
    "a name for a directory: 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit",
)
_MOST = (1 << 63) - 1
LIGHT_MARGIN = 2
"""Saves after a whole one, at which it must have ended, if the saves between are light."""


def _setting(default: Any, doc: str, allowed: Allowed = _ANY, shown: str = "") -> Any:
    """Make a field of `Config`. The table of settings shows ``doc``, in Markdown, and ``shown`` as the default."""
    return dataclasses.field(default=default, metadata={"doc": doc, "allowed": allowed, "shown": shown})


def variable_of(name: str) -> str:
    """Return the environment name of a setting; "" if it has none. Not collective."""
    return "" if name in ("directory", "enabled", "heartbeat") else f"MLFLASH_{name.upper()}"


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of one Checkpointer; make it with :func:`from_environment`.

    ``tools/settings_table.py`` writes them into docs/using.md.
    """

    directory: str | None = _setting(
        None, "path on the parallel file system, or a URL. mlflash drains checkpoints to it and restores from it"
    )
    job: str = _setting(
        "",
        "the name by which a relaunched job finds the memory of the previous run",
        _JOB_NAME,
        shown="[see above](#starting-stopping-finding-again)",
    )
    redundancy: str = _setting("copy", "`none`, `copy`, `copy:k`, `xor:n` or `rs:n+k`: [plan.md](plan.md)", _SCHEME)
    domains: str | None = _setting(None, "file that lists the hosts and their failure domains", shown="what Slurm says")
    memory: str = _setting("/dev/shm", "node-local memory file system for the slots", _ABSOLUTE)
    copies: str = _setting(
        "", "directory on a disk of each node, for copies and parity. Empty: they are in memory. [disk.md](disk.md)",
        Allowed(lambda value: not value or os.path.isabs(value), "an absolute path"),
    )  # fmt: skip
    strict: bool = _setting(False, "1: a failed save raises an exception instead of a warning")
    timeout_s: float = _setting(
        300.0, "seconds after which a save, a restore or another call of all ranks [is late](#deadlines)", _ABOVE_0
    )
    lazy: bool = _setting(
        True,
        "copies while training continues, until an optimizer steps, for saves with `until=` and for adapters "
        "where it is safe. 0: every save copies everything before it returns",
    )
    when_busy: str = _setting(
        "wait",
        "what a save does when no slot is free because an earlier save has not committed: `wait`, or `skip` "
        "this save on all ranks (`snapshot.skipped`)",
        _one_of("wait", "skip"),
    )
    reserve: int = _setting(0, "bytes of state per rank to allocate when the `Checkpointer` is made", _NOT_NEGATIVE)
    transport: str = _setting(
        "auto",
        "how ranks send data to other nodes: `auto`, `rma` or `p2p`. [tuning.md](tuning.md#the-transport)",
        _one_of("auto", "rma", "p2p"),
    )
    fresh: str = _setting("", "starts from the beginning, once for each word given here. `True` is the word `1`")
    skip_stuck: int = _setting(
        0, "ignores a step that this many runs have restored without a newer commit. 0: never", _NOT_NEGATIVE
    )
    check_values: float = _setting(
        0.125,
        "fraction of the values of a large state that each save checks; each save checks other values. 0: "
        "none. [rolling_back.md](rolling_back.md)",
        _FRACTION,
    )
    check_skip: str = _setting("*mask*,*alibi*", "shell patterns of the tensors whose values mlflash does not check")
    on_suspect: str = _setting(
        "warn",
        "what happens when the values of a save are suspect: `warn`; `keep` the previous step until a good "
        "one follows; `raise` and save nothing",
        _one_of("warn", "keep", "raise"),
    )
    certify_after: int = _setting(
        0,
        "a step is certified when training has gone on from it for this many steps without anything suspect. "
        "0: mlflash certifies no step. Memory holds two states with 0, three with 1, and four with a larger "
        "number. [rolling_back.md](rolling_back.md#which-steps-are-certified)",
        _NOT_NEGATIVE,
    )
    history: int = _setting(
        0,
        "committed steps that are kept besides the newest, for `restore(before=)` and `load`. Each needs as much "
        "memory as a slot and its redundancy. With `copies=` they are on disks, whole. [disk.md](disk.md)",
        _NOT_NEGATIVE,
    )
    history_every_s: float = _setting(
        0.0,
        "`history` keeps at most one step in so many seconds. 0: each step",
        _NOT_NEGATIVE,
    )
    light: int = _setting(
        0,
        "between two whole saves, so many saves keep only gradients, from which the steps are made again. 0: every "
        "save is whole. [light.md](light.md)",
        _NOT_NEGATIVE,
    )
    prefer_certified: bool = _setting(False, "1: `restore` takes the newest certified step, if there is one")
    share: bool = _setting(True, "stores once per node what ranks hold alike. 0: only compares it")
    drain_every: int = _setting(
        0, "drains every k-th checkpoint to the directory. 0: none. [drain.md](drain.md)", _NOT_NEGATIVE
    )
    drain_rate: float = _setting(0.0, "bytes per second that all ranks together drain. 0: no limit", _NOT_NEGATIVE)
    drain_writers: int = _setting(0, "number of ranks that drain at the same time. 0: all", _NOT_NEGATIVE)
    keep_last: int = _setting(0, "number of newest checkpoints to keep in the directory. 0: all", _NOT_NEGATIVE)
    keep_every: int = _setting(
        0, "also keeps the checkpoints whose step is a multiple of this number. 0: no others", _NOT_NEGATIVE
    )
    format: str = _setting("dcp", "format of drained checkpoints: `dcp` or `hdf5`", _one_of("dcp", "hdf5"))
    safetensors: str = _setting(
        "",
        "path of a part of the state, such as `model`: its whole tensors are also written with each drained "
        "checkpoint, for `from_pretrained`. [drain.md](drain.md#for-hugging-face)",
    )
    compression: str = _setting(
        "", 'compression, with `format="hdf5"`: `gzip`, `zstd`, `lz4`, ...', _one_of("", *COMPRESSIONS)
    )
    provenance: str = _setting(
        "",
        "your own entries in the provenance of a checkpoint: a dict of JSON values, or JSON text. "
        "[drain.md](drain.md#where-a-checkpoint-comes-from)",
    )
    sign_key: str = _setting("", "PEM file of the Ed25519 private key that signs the provenance")
    send_rate: float = _setting(
        0.0,
        "bytes per second that a rank sends to protect a save. 0: no limit. "
        "[tuning.md](tuning.md#training-while-the-courier-works)",
        _NOT_NEGATIVE,
    )
    scrub_rate: float = _setting(
        20e6,
        "bytes per second of its own slots, copies and parity that each idle courier reads to verify them. 0:"
        " none. [tuning.md](tuning.md#verified-at-rest)",
        _NOT_NEGATIVE,
    )
    log: str = _setting(
        "", "file to which mlflash appends a line of JSON for each event: [watching.md](watching.md#the-event-log)"
    )
    metrics: str = _setting(
        "",
        "Prometheus metrics: a file, or `:PORT` on loopback. `otlp`: metrics and spans to an OpenTelemetry collector. "
        "Both: `:9464,otlp`. [watching.md](watching.md#prometheus)",
    )
    heartbeat: bool = _setting(
        True,
        "ranks report their progress to `mlflash run` and [`mlflash top`](watching.md). Commands that open the memory "
        "of a dead job set it to False",
    )
    enabled: bool = _setting(
        True,
        "0: mlflash does nothing. `MLFLASH_DISABLE=1` has the same effect and overrides this argument: "
        "[off.md](off.md)",
    )
    node: str = _setting(
        "",
        "name of this node in messages and files; empty: the name of its host. Set it where several nodes have one "
        "name, as containers of a host do. Ranks that share `memory` are on one node",
    )

    def __post_init__(self) -> None:
        if not self.enabled:
            return  # no setting is used
        for field in dataclasses.fields(self):
            allowed: Allowed = field.metadata["allowed"]
            self._check(field.name, allowed.holds(getattr(self, field.name)), allowed.text)
            is_large = type(value := getattr(self, field.name)) is int and value > _MOST
            self._check(field.name, not is_large, f"a number, {_MOST} at most")
        self._check("certify_after", not self.certify_after or self.check_values > 0, "0, because check_values is 0")
        self._check("drain_every", not self.drain_every or self.directory is not None, "0, or a directory to drain to")
        self._check("compression", not self.compression or self.format == "hdf5", "no compression, or format='hdf5'")

    @property
    def owner(self) -> str:
        """Who may delete a checkpoint in ``directory``: this user, with this directory and the job name.

        A chain of Slurm jobs that the user did not name is one owner.
        """
        by_slurm = _BY_SLURM.fullmatch(self.job)
        return f"{os.getuid()}:{_digest(self.directory or '')}:{by_slurm[2] if by_slurm else self.job}"

    @property
    def here(self) -> Node:
        """The node of this process."""
        return this_node(self.memory, self.node)

    @property
    def keeps_on_disk(self) -> bool:
        """Whether steps that are kept besides the newest are on disks, and not in memory."""
        return bool(self.copies and self.history) and not self.job.endswith(LIGHT)

    @property
    def drains_from_disk(self) -> bool:
        """Whether drains read the disks, so that memory has no slot for them."""
        return self.keeps_on_disk and not self.history_every_s and self.drain_every > 0

    @property
    def slots(self) -> SlotCounts:
        return self.slots_if(self.drain_every > 0)

    def slots_if(self, drains: bool) -> SlotCounts:
        """The slots of a rank if checkpoints are drained, or not."""
        return slot_counts(self.certify_after, self.history, self.keeps_on_disk, drains, not self.history_every_s)

    @property
    def slots_per_state(self) -> float:
        """Bytes of slots in memory for each byte of state."""
        slots = self.slots
        return slots.own + slots.copies * (0 if self.copies else redundancy.parse(self.redundancy).overhead)

    @functools.cached_property
    def mark(self) -> int:
        """Number that identifies the checkpoints of a fresh start; 0: this is not a fresh start.

        A relaunch with the same word finds its own checkpoints by it, and passes over those from before.
        """
        return (xxhash.xxh32_intdigest(self.fresh.encode()) or 1) if self.fresh else 0

    def _check(self, name: str, good: bool, expected: str) -> None:
        if not good:
            env = variable_of(name)
            raise ConfigError(
                f"bad setting {name}" + (f" (environment name {env})" if env else ""),
                expected=expected,
                found=repr(getattr(self, name)),
            )


def from_environment(env: Mapping[str, str], directory: str | os.PathLike[str] | None, **given: Any) -> Config:
    """Combine arguments, environment and defaults; an argument that is None was not given.

    If mlflash is off, the settings are returned as given, unchecked: a mistake in them must not stop a training.

    Raises:
        ConfigError: a value is out of range, or no job name can be found.
    """
    names = [field.name for field in dataclasses.fields(Config)]
    if not is_enabled(env, given.get("enabled")):
        kept = {name: value for name, value in given.items() if name in names and value is not None}
        return Config(**{**kept, "enabled": False})
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        name, env_name = field.name, variable_of(field.name)
        if given.get(name) is not None:
            values[name] = _converted(name, given[name], field.default)
        elif env_name and env.get(env_name, "") != "":
            values[name] = _parse(env_name, env[env_name], str if field.default is None else type(field.default))
    if unknown := given.keys() - set(names):
        known = [*names, *_OTHER_ARGUMENTS]
        raise ConfigError(f"unknown settings: {'; '.join(_guessed(name, known) for name in sorted(unknown))}")
    values["fresh"] = _word(values.get("fresh", ""))
    values["provenance"] = _object(values.get("provenance", ""))
    if values.get("sign_key"):  # couriers may have another working directory
        values["sign_key"] = os.path.abspath(values["sign_key"])
    given_as = None if directory is None else without_file_scheme(os.fspath(directory))
    values["directory"] = given_as if given_as is None or is_url(given_as) else os.path.abspath(given_as)
    if "job" not in values:
        values["job"] = job_name(env, values["directory"])
    return Config(**values)


def unknown_variables(env: Mapping[str, str]) -> list[str]:
    """List the environment variables that look like settings but are not, each with the setting that is meant."""
    known = [*(variable_of(field.name) for field in dataclasses.fields(Config)), DISABLE, *_OTHER_VARIABLES]
    return [_guessed(name, known) for name in sorted(env)
            if name.startswith("MLFLASH_") and name not in known and not name.startswith(_NOT_SETTINGS)]  # fmt: skip


def _guessed(name: str, known: Sequence[str]) -> str:
    import difflib  # couriers do without its pages

    stems = {name.removeprefix("MLFLASH_"): name for name in known}
    alike = difflib.get_close_matches(name.removeprefix("MLFLASH_"), stems, 1, cutoff=0.7)
    return name + (f" (did you mean {stems[alike[0]]}?)" if alike else "")


def is_enabled(env: Mapping[str, str], given: bool | None = None) -> bool:
    """Whether mlflash is on, by the environment and, if it is given, the argument in code."""
    return (given is None or bool(given)) and not _parse(DISABLE, env.get(DISABLE, "") or "0", bool)


_RANK_OPTION = re.compile(r"--?(?:local|node|machine|proc|process|global)?[-_]?rank(=.*)?")
_BY_SLURM = re.compile(r"slurm-([0-9]+)-([0-9a-f]{8})")
_MADE_UP = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # torchrun --standalone makes up such a UUID


def job_name(env: Mapping[str, str], directory: str | None, program: Sequence[str] | None = None) -> str:
    """Make a name for the job if neither ``job=`` nor ``MLFLASH_JOB`` gives one.

    A requeue keeps the Slurm job id; the digest keeps two trainings in one allocation apart. It is that of the
    directory, or without one that of the script and its arguments, except options that give a process its rank. An id
    that the user gives torchrun (``--rdzv-id``) is used as a name. An id that torchrun makes up is not, because it
    changes at each start.

    Example:
        ``SLURM_JOB_ID=71, directory=/lustre/me/run42`` → ``slurm-71-1c0d5a3e``; without Slurm → ``run42-1c0d5a3e``;
        with ``torchrun --rdzv-id 42`` and no directory → ``torchrun-42-73475cb4``.
    """
    if env.get("SLURM_JOB_ID"):
        source = directory or _training(sys.argv if program is None else program)
        return f"slurm-{env['SLURM_JOB_ID']}-{_digest(source)}"
    if directory:
        return "-".join(filter(None, (_stem(Path(directory).name), _digest(directory))))
    run_id = env.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none" and not _MADE_UP.fullmatch(run_id):
        return "-".join(filter(None, ("torchrun", _stem(run_id), _digest(run_id))))
    raise ConfigError(
        "this job has no name, so a relaunch could not find its memory: give Checkpointer a directory or "
        "job=..., or set MLFLASH_JOB"
        + (", or give torchrun an --rdzv-id (not with --standalone)" if "TORCHELASTIC_RUN_ID" in env else "")
    )


def _training(program: Sequence[str]) -> str:
    words, left = [os.path.realpath(program[0]) if program else ""], iter(program[1:])
    for word in left:
        if (option := _RANK_OPTION.fullmatch(word)) is None:
            words.append(word)
        elif option[1] is None:
            next(left, None)
    return "\0".join(words)


def others_of(job: str, there: Iterable[str]) -> list[str]:
    """Those of some jobs that are of the same Slurm job as one that was named after it."""
    own = _BY_SLURM.fullmatch(job)
    others = (_BY_SLURM.fullmatch(name) for name in there if name != job)
    return [other[0] for other in others if own and other and other[1] == own[1]]


def slots_of(certify_after: int, history: int = 0) -> int:
    """Return how many slots a rank has for its state (each copy has as many): one is written while the others are kept.

    If steps are certified, a third slot holds the certified step. A fourth one holds the step that is on trial while
    newer ones are saved. Each step of the history has one more.
    """
    return 2 + (certify_after > 0) + (certify_after > 1) + history


class SlotCounts(NamedTuple):
    """How many slots a rank has.

    Attributes:
        own: in memory, for its own state.
        copies: for each copy that it holds.
        kept: on a disk, for its own state.
    """

    own: int = 2
    copies: int = 2
    kept: int = 0


def slot_counts(certify_after: int, history: int, on_disk: bool, drains: bool, is_each_kept: bool = True) -> SlotCounts:
    """Return how many slots a rank has; one more is drained, which may take long.

    Args:
        on_disk: whether copies are on disks, and so the history.
        is_each_kept: whether each step gets into the history; otherwise drains read memory.
    """
    copies = slots_of(certify_after, history)
    if not (on_disk and history):
        return SlotCounts(copies + drains, copies, 0)
    from_disk = drains and is_each_kept
    return SlotCounts(slots_of(certify_after) + (drains and not from_disk), copies, copies + from_disk)


def history_of_light(light: int) -> int:
    """Return how many light saves are kept besides the newest, with so many between two whole ones.

    All since the older whole save may be needed until the newer one must have ended, while another one is written.
    """
    return light + LIGHT_MARGIN - 1


def _stem(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._-")[:48]


def _digest(directory: str) -> str:
    return hashlib.sha256(directory.encode()).hexdigest()[:8]


def _word(fresh: bool | str) -> str:
    """Return the word of a fresh start; "" if nothing begins anew."""
    return {"true": "1", "yes": "1", "on": "1", "false": "", "no": "", "off": "", "0": ""}.get(
        str(fresh).lower(), str(fresh)
    )


def _object(given: Any) -> str:
    """Return the given provenance as canonical JSON; "" if there is no provenance."""
    if given == "":
        return ""
    try:
        value = json.loads(given) if isinstance(given, str) else given
        if not isinstance(value, Mapping):
            raise ValueError(f"it is of {type(value)}")
        return canonical_json.encode(dict(value)).decode()
    except (ValueError, RecursionError) as error:
        raise ConfigError("bad setting provenance (environment name MLFLASH_PROVENANCE)",
                          expected="a dict of JSON values: None, bool, int, float, str, lists and dicts of them",
                          found=str(error)) from None  # fmt: skip


def _is_scheme(text: str) -> bool:
    try:
        redundancy.parse(text)
    except ConfigError:
        return False
    return True


def _converted(name: str, value: Any, default: Any) -> Any:
    """Convert an argument to the type of its setting without a loss; texts as in the environment."""
    kind = str if default is None else type(default)
    if name in ("fresh", "provenance") or type(value) is kind:  # the first two have forms of their own
        return value
    if isinstance(value, str) and kind is not str:
        return _parse(name, value, kind)
    converted: Any = value.item() if hasattr(value, "item") else value  # of NumPy
    if kind is str and isinstance(value, os.PathLike):
        converted = os.fspath(value)
    elif isinstance(converted, (int, float)):
        try:
            converted = kind(converted)
        except (ValueError, OverflowError):  # such as NaN
            converted = None
    if type(converted) is not kind or (kind is not str and converted != value):
        raise ConfigError(f"bad setting {name}", expected=_IN_WORDS[kind], found=repr(value))
    return converted


_IN_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


def _parse(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ConfigError(
            f"{name} is neither true nor false",
            expected="1 or 0 (also true, yes, on, false, no, off)",
            found=repr(text),
        )
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name} is not a number", expected=kind.__name__, found=repr(text)) from None
