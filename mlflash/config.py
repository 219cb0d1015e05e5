"""All settings: unit, default and environment name of each; they are checked when a Checkpointer is made.

An argument in code takes precedence over the environment, and the environment over the default. Only the kill switch
takes precedence over both: ``MLFLASH_DISABLE=1`` is the opposite of ``enabled``, and mlflash is off if either of them
says so.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from .errors import ConfigError
from .placement import redundancy_scheme
from .storage import canonical_json
from .storage.store import is_url, without_file_scheme

MIB = 1 << 20
DISABLE = "MLFLASH_DISABLE"
"""Environment name of the kill switch."""
FRESH = "MLFLASH_FRESH"
"""Environment name of a fresh start."""
PREFER_CERTIFIED = "MLFLASH_PREFER_CERTIFIED"
"""Environment name of the rule that a restore takes what is certified."""
_OTHER_VARIABLES = tuple(
    f"MLFLASH_{name}" for name in ("COMPLETE", "INTERFACE", "ISAL", "KEPT", "PRESUMED", "RUN", "TRACEBACK")
)
_NOT_SETTINGS = ("MLFLASH_TEST_", "MLFLASH_BENCH_")
COMPRESSIONS = ("gzip", "zstd", "lz4", "blosc", "blosc2", "bshuf", "bzip2")
"""HDF5's own, and those of hdf5plugin that give back every bit."""


def _setting(default: Any, env: str | None, doc: str) -> Any:
    return dataclasses.field(default=default, metadata={"env": env, "doc": doc})


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of one Checkpointer; make it with :func:`from_environment`."""

    enabled: bool = _setting(True, None, "False turns mlflash off, and so does MLFLASH_DISABLE=1")
    job: str = _setting("", "MLFLASH_JOB", "name by which a relaunch finds the memory of the run before")
    directory: str | None = _setting(None, None, "directory on the parallel file system")
    redundancy: str = _setting("copy", "MLFLASH_REDUNDANCY", "scheme: none | copy | copy:k | xor:n | rs:n+k")
    domains: str | None = _setting(None, "MLFLASH_DOMAINS", "file of hosts and their failure domains")
    memory: str = _setting("/dev/shm", "MLFLASH_MEMORY", "node-local memory file system")
    strict: bool = _setting(False, "MLFLASH_STRICT", "a failed save raises instead of warning")
    timeout_s: float = _setting(
        300.0, "MLFLASH_TIMEOUT_S", "seconds for each job of the courier; for a drain: seconds without progress"
    )
    lazy: bool = _setting(
        True,
        "MLFLASH_LAZY",
        "copy while training continues, until an optimizer steps, if that is safe; 0: copy at once",
    )
    when_busy: str = _setting("wait", "MLFLASH_WHEN_BUSY", "when both slots are busy: wait | skip this save")
    reserve: int = _setting(0, "MLFLASH_RESERVE", "bytes of state per rank to allocate at the start")
    transport: str = _setting("auto", "MLFLASH_TRANSPORT", "between nodes: auto | rma | p2p")
    skip_stuck: int = _setting(0, "MLFLASH_SKIP_STUCK", "pass over a step that so many runs have restored; 0: never")
    check_values: float = _setting(
        0.125, "MLFLASH_CHECK_VALUES", "fraction of the values that each save checks; 0: none"
    )
    check_skip: str = _setting(
        "*mask*,*alibi*", "MLFLASH_CHECK_SKIP", "patterns of tensors whose values are not checked: 'a*,*b'"
    )
    on_suspect: str = _setting(
        "warn", "MLFLASH_ON_SUSPECT", "when values are suspect: warn | keep the step before | raise"
    )
    certify_after: int = _setting(
        0, "MLFLASH_CERTIFY_AFTER", "steps without suspect values that certify a step; 0: never"
    )
    prefer_certified: bool = _setting(False, PREFER_CERTIFIED, "restore the newest certified step, if there is one")
    fresh: str = _setting("", FRESH, "begin anew, once for each word that is given, such as 1; '': go on")
    share: bool = _setting(True, "MLFLASH_SHARE", "store once per node what ranks hold alike; 0: only compare it")
    drain_every: int = _setting(0, "MLFLASH_DRAIN_EVERY", "drain every k-th checkpoint to directory; 0: none")
    drain_rate: float = _setting(
        0.0, "MLFLASH_DRAIN_RATE", "bytes per second that all ranks together drain; 0: no limit"
    )
    drain_writers: int = _setting(0, "MLFLASH_DRAIN_WRITERS", "number of ranks that drain at the same time; 0: all")
    keep_last: int = _setting(0, "MLFLASH_KEEP_LAST", "number of newest checkpoints to keep in directory; 0: all")
    keep_every: int = _setting(
        0, "MLFLASH_KEEP_EVERY", "also keep checkpoints whose step is a multiple of this; 0: no others"
    )
    format: str = _setting("hdf5", "MLFLASH_FORMAT", "format of drained checkpoints: hdf5 | dcp")
    compression: str = _setting("", "MLFLASH_COMPRESSION", "compression of drained HDF5 files: gzip | zstd | lz4 | ...")
    send_rate: float = _setting(
        0.0, "MLFLASH_SEND_RATE", "bytes per second that a rank sends to protect a save; 0: no limit"
    )
    max_slowdown: float = _setting(
        0.0,
        "MLFLASH_MAX_SLOWDOWN",
        "largest slowdown of steps while a save is sent, such as 0.03; 0: steps are not timed",
    )
    scrub_rate: float = _setting(20e6, "MLFLASH_SCRUB_RATE", "bytes per second that an idle courier verifies; 0: none")
    courier: str = _setting("auto", "MLFLASH_COURIER", "what calls MPI: auto | process (beside the trainer) | thread")
    courier_cpus: str = _setting("auto", "MLFLASH_COURIER_CPUS", "cores of couriers: auto | inherit | such as 0-3,8")
    nice: int = _setting(0, "MLFLASH_NICE", "niceness of the courier's thread, 0 to 19")
    copy_threads: int = _setting(
        0, "MLFLASH_COPY_THREADS", "threads of a rank for copies and checks; 0: as many as help"
    )
    chunk_nbytes: int = _setting(
        4 * MIB, "MLFLASH_CHUNK_NBYTES", "bytes per transfer: a multiple of block_nbytes, at most 1 GiB"
    )
    block_nbytes: int = _setting(MIB, "MLFLASH_BLOCK_NBYTES", "bytes per checksum")
    provenance: str = _setting(
        "", "MLFLASH_PROVENANCE", "your own entries in the provenance of drained checkpoints: a JSON object"
    )
    sign_key: str = _setting("", "MLFLASH_SIGN_KEY", "file of the Ed25519 key that signs their provenance; '': none")
    log: str = _setting("", "MLFLASH_LOG", "file that gets a line of JSON for each event; '': none")
    metrics: str = _setting("", "MLFLASH_METRICS", "Prometheus metrics: a file, or ':PORT' on loopback; '': none")
    heartbeat: bool = _setting(True, None, "ranks report their progress to mlflash run and mlflash top")
    ranks_per_node: int = _setting(0, "MLFLASH_RANKS_PER_NODE", "emulate nodes of n ranks (0: real nodes)")

    def __post_init__(self) -> None:
        if not self.enabled:
            return  # no setting is used
        for field in dataclasses.fields(self):
            if type(value := getattr(self, field.name)) is int:
                self._check(field.name, value < 1 << 63, "a number below 2**63")
        self._check("redundancy", _is_scheme(self.redundancy), redundancy_scheme.EXPECTED)
        self._check("when_busy", self.when_busy in ("wait", "skip"), "'wait' or 'skip'")
        self._check("transport", self.transport in ("auto", "rma", "p2p"), "'auto', 'rma' or 'p2p'")
        self._check("timeout_s", self.timeout_s > 0, "a number of seconds above 0")
        self._check("reserve", self.reserve >= 0, "a number of bytes, 0 or more")
        self._check("skip_stuck", self.skip_stuck >= 0, "a number of restores, 0 or more")
        self._check("check_values", 0 <= self.check_values <= 1, "a number, 0 to 1")
        self._check("certify_after", self.certify_after >= 0, "a number of steps, 0 or more")
        self._check("certify_after", not self.certify_after or self.check_values > 0, "0, because check_values is 0")
        self._check("on_suspect", self.on_suspect in ("warn", "keep", "raise"), "'warn', 'keep' or 'raise'")
        for name in ("drain_every", "drain_rate", "drain_writers", "keep_last", "keep_every"):
            self._check(name, getattr(self, name) >= 0, "a number, 0 or more")
        for name in ("send_rate", "max_slowdown", "scrub_rate"):
            self._check(name, getattr(self, name) >= 0, "a number, 0 or more")
        self._check("copy_threads", 0 <= self.copy_threads <= 64, "a number, 0 to 64")
        self._check("courier", self.courier in ("thread", "process", "auto"), "'thread', 'process' or 'auto'")
        self._check("courier_cpus", _is_cores(self.courier_cpus), "'auto', 'inherit', or numbers such as 0-3,8")
        self._check("nice", 0 <= self.nice <= 19, "a number, 0 to 19")
        self._check("drain_every", not self.drain_every or self.directory is not None, "0, or a directory to drain to")
        self._check("format", self.format in ("hdf5", "dcp"), "'hdf5' or 'dcp'")
        self._check("compression", self.compression in ("", *COMPRESSIONS), f"one of {', '.join(COMPRESSIONS)}")
        self._check("compression", not self.compression or self.format == "hdf5", "no compression, or format='hdf5'")
        self._check("ranks_per_node", self.ranks_per_node >= 0, "a number of ranks, 0 or more")
        whole_pages = self.block_nbytes % 4096 == 0
        self._check("block_nbytes", whole_pages and 4096 <= self.block_nbytes <= 1 << 30, "4 KiB to 1 GiB, whole pages")
        # Open MPI 5 refuses a count above 2^31-1, so a transfer has at most 1 GiB.
        whole = self.chunk_nbytes % self.block_nbytes == 0
        self._check(
            "chunk_nbytes", whole and self.block_nbytes <= self.chunk_nbytes <= 1 << 30,
            f"a multiple of block_nbytes ({self.block_nbytes}), at most 1 GiB",
        )  # fmt: skip
        self._check("memory", os.path.isabs(self.memory), "an absolute path")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", self.job):
            raise ConfigError(
                "this job name cannot be used as a directory name",
                expected="1 to 64 letters, digits, '.', '_' or '-', not starting with '.', '_' or '-'",
                found=repr(self.job),
            )

    @property
    def owner(self) -> str:
        """Who may delete a checkpoint in ``directory``: this user, with this directory and the job name.

        A chain of Slurm jobs that the user did not name is one owner.
        """
        by_slurm = _BY_SLURM.fullmatch(self.job)
        return f"{os.getuid()}:{_digest(self.directory or '')}:{by_slurm[2] if by_slurm else self.job}"

    @property
    def slots(self) -> int:
        """Number of slots that a rank has for its state; each copy has as many."""
        return slots_of(self.certify_after)

    @property
    def slots_per_state(self) -> float:
        """Bytes that a rank's slots and their redundancy take for each byte of its state."""
        return self.slots * (1 + redundancy_scheme.parse(self.redundancy).overhead)

    @property
    def mark(self) -> int:
        """Number that identifies the checkpoints of a fresh start; 0: this is not a fresh start.

        A relaunch with the same word finds its own checkpoints by it, and passes over those from before.
        """
        return (xxhash.xxh32_intdigest(self.fresh.encode()) or 1) if self.fresh else 0

    def _check(self, name: str, good: bool, expected: str) -> None:
        if not good:
            env = next(f.metadata["env"] for f in dataclasses.fields(self) if f.name == name)
            raise ConfigError(
                f"bad setting {name}" + (f" (environment name {env})" if env else ""),
                expected=expected,
                found=repr(getattr(self, name)),
            )


def from_environment(env: Mapping[str, str], directory: str | os.PathLike[str] | None, **given: Any) -> Config:
    """Combine arguments, environment and defaults.

    Args:
        env: the environment, usually ``os.environ``.
        directory: where checkpoints are drained to; also gives the job its name if nothing else does.
        given: settings by field name; None means "not given".

    Returns:
        The settings. If mlflash is off they are returned as given, unchecked, because a mistake in them must not stop a
        training.

    Raises:
        ConfigError: a value is out of range, or no job name can be found.
    """
    names = [field.name for field in dataclasses.fields(Config)]
    if not is_enabled(env, given.get("enabled")):
        kept = {name: value for name, value in given.items() if name in names and value is not None}
        return Config(**{**kept, "enabled": False})
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        name, env_name = field.name, field.metadata["env"]
        if given.get(name) is not None:
            values[name] = _converted(name, given[name], field.default)
        elif env_name and env.get(env_name, "") != "":
            values[name] = _parse(env_name, env[env_name], str if field.default is None else type(field.default))
    if unknown := given.keys() - set(names):
        raise ConfigError(f"unknown settings: {'; '.join(_guessed(name, names) for name in sorted(unknown))}")
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
    """List the environment variables that look like settings but are not.

    Example:
        ``{"MLFLASH_DRAIN_EVRY": "5"}`` → ``["MLFLASH_DRAIN_EVRY (did you mean MLFLASH_DRAIN_EVERY?)"]``.
    """
    known = [field.metadata["env"] for field in dataclasses.fields(Config) if field.metadata["env"]]
    known += [DISABLE, *_OTHER_VARIABLES]
    return [_guessed(name, known) for name in sorted(env)
            if name.startswith("MLFLASH_") and name not in known and not name.startswith(_NOT_SETTINGS)]  # fmt: skip


def _guessed(name: str, known: Sequence[str]) -> str:
    stems = {one.removeprefix("MLFLASH_"): one for one in known}
    alike = difflib.get_close_matches(name.removeprefix("MLFLASH_"), stems, 1, cutoff=0.7)
    return name + (f" (did you mean {stems[alike[0]]}?)" if alike else "")


def is_enabled(env: Mapping[str, str], given: bool | None = None) -> bool:
    """Whether mlflash is on.

    Args:
        env: the environment, usually ``os.environ``.
        given: the argument in code; None: not given.

    Raises:
        ConfigError: ``MLFLASH_DISABLE`` is neither true nor false.
    """
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

    Args:
        env: the environment.
        directory: where the job drains to, an absolute path.
        program: the script of the training and its arguments; None: those of this process.

    Raises:
        ConfigError: nothing gives the job a name.
    """
    if env.get("SLURM_JOB_ID"):
        told = directory or _training(sys.argv if program is None else program)
        return f"slurm-{env['SLURM_JOB_ID']}-{_digest(told)}"
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
    """The script of a training and its arguments, the same on all ranks."""
    words, left = [os.path.realpath(program[0]) if program else ""], iter(program[1:])
    for word in left:
        if (option := _RANK_OPTION.fullmatch(word)) is None:
            words.append(word)
        elif option[1] is None:
            next(left, None)
    return "\0".join(words)


def others_of(job: str, there: Iterable[str]) -> list[str]:
    """Those of some jobs that are of the same Slurm job as one that was named after it."""
    mine = _BY_SLURM.fullmatch(job)
    found = [(name, _BY_SLURM.fullmatch(name)) for name in there if mine and name != job]
    return [name for name, by_slurm in found if mine and by_slurm and by_slurm[1] == mine[1]]


def slots_of(certify_after: int) -> int:
    """Return how many slots a rank has for its state (each copy has as many): one is written while the others are kept.

    If steps are certified, a third slot holds the certified step. A fourth one holds the step that is on trial while
    newer ones are saved.

    Args:
        certify_after: see `Config`.
    """
    return 2 + (certify_after > 0) + (certify_after > 1)


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


def _is_cores(text: str) -> bool:
    if not re.fullmatch(r"auto|inherit|\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", text):
        return False
    spans = [part.split("-") for part in text.split(",") if "-" in part]
    return all(int(first) <= int(last) for first, last in spans)


def _is_scheme(text: str) -> bool:
    try:
        redundancy_scheme.parse(text)
    except ConfigError:
        return False
    return True


def _converted(name: str, value: Any, default: Any) -> Any:
    """Convert an argument to the type of its setting; texts as in the environment.

    Raises:
        ConfigError: it cannot be converted without a loss.
    """
    kind = str if default is None else type(default)
    if name in ("fresh", "provenance") or type(value) is kind:  # the first two have forms of their own
        return value
    if isinstance(value, str) and kind is not str:
        return _parse(name, value, kind)
    found: Any = value.item() if hasattr(value, "item") else value  # of NumPy
    if kind is str and isinstance(value, os.PathLike):
        found = os.fspath(value)
    elif isinstance(found, (int, float)):
        try:
            found = kind(found)
        except (ValueError, OverflowError):  # such as NaN
            found = None
    if type(found) is not kind or (kind is not str and found != value):
        raise ConfigError(f"bad setting {name}", expected=_IN_WORDS[kind], found=repr(value))
    return found


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
