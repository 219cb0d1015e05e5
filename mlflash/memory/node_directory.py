"""The directory of this job in the memory of this node.

``<memory>/mlflash-<uid>/<job>/``. Nothing outside it is ever touched. Directories are 0700, files 0600, opened with
O_NOFOLLOW and checked for their owner; each deletion is logged. Foreign files in it are passed over, with one warning.

Anybody may take the name ``mlflash-<uid>``, because everybody may write to /dev/shm. Whatever is not a directory of
this user is passed over, too; then ``mlflash-<uid>.1`` is next, and so on. All processes that look for a job find it by
the same rule: the first of this user's directories that has the job, otherwise the first of them, otherwise the first
free name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import struct
import time

from ..errors import ConfigError, ForeignNode, JobInUse, MemoryTooSmall, UnsafePath
from ..text import LIGHT
from .process_names import works_for

log = logging.getLogger("mlflash")

PRIVATE = "owned by this user, no access for group and others, not a link"
_MOST_NAMES = 1000  # names to try; whoever takes more of them could also fill the memory
_passed_over: set[str] = set()

SLOT_NAME = re.compile(r"slot-(\d{4,})")
FIRST_ON_DISK = 1_000_000
"""The smallest number of a slot file on a disk of the node; those with smaller ones are in memory."""
_LOCK_NAME = "lock"
_PULSE_NAME = re.compile(r"pulse-\d{4,}")
_REQUEST_NAME = "drain"
_DISK_NAME = "disk"
_FLOCK = struct.Struct("hhlli")  # struct flock on 64-bit Linux
_locked_here: set[tuple[str, int]] = set()  # POSIX locks do not exclude the process that holds them
os.register_at_fork(after_in_child=_locked_here.clear)  # and a forked child does not have them


_FULL = {
    errno.ENOSPC: "is full",
    errno.ENOMEM: "has no memory left",
    errno.EDQUOT: "has no room left for this user (quota)",
    errno.EFBIG: "may not have such large files of this process (ulimit -f)",
}


def too_small(error: OSError, path: str, expected: str) -> MemoryTooSmall | None:
    """What an error of the file system means; None if that is not full."""
    if error.errno not in _FULL:
        return None
    why = _FULL[error.errno]
    with contextlib.suppress(OSError):
        if error.errno == errno.ENOSPC and not (status := os.statvfs(path)).f_favail and status.f_files:
            why = "has no inode left for another file"
    return MemoryTooSmall(f"{path} {why}", expected=expected)


def file_number(name: str) -> int:
    """``file_number("slot-0007") == 7``."""
    return int(name.removeprefix("slot-"))


def file_name(number: int) -> str:
    """``file_name(7) == "slot-0007"``."""
    return f"slot-{number:04d}"


def is_on_disk(number: int) -> bool:
    """Whether a slot file is on a disk of its node, and not in memory."""
    return number >= FIRST_ON_DISK


# This user's directory in a memory file system


def is_private(status: os.stat_result) -> bool:
    """Whether only this user can use a file or directory."""
    return status.st_uid == os.getuid() and not status.st_mode & 0o077


def describe(status: os.stat_result) -> str:
    """Say what a file or directory is, and who owns it."""
    return f"{stat.filemode(status.st_mode)} uid {status.st_uid}, {status.st_nlink} links"


def _pass_over(path: str, description: str) -> None:
    """Warn, once in this process, about something that is not ours: it is neither used nor deleted."""
    if path not in _passed_over:
        _passed_over.add(path)
        log.warning("%s is passed over, as it is not mlflash's: %s", path, description)


def scan_user_directories(memory: str) -> tuple[list[str], dict[str, str]]:
    """Find out who has the names of this user's directories.

    Returns:
        The paths of those that belong to this user, in their order; and what the others are, by path.
    """
    names = re.compile(rf"mlflash-{os.getuid()}(?:\.([1-9]\d*))?")
    by_number = {int(match[1] or 0): name for name in os.listdir(memory) if (match := names.fullmatch(name))}
    own, taken = [], {}
    for _, name in sorted(by_number.items()):
        path = os.path.join(memory, name)
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            own.append(path)
        else:
            taken[path] = describe(status)
    return own, taken


def user_directories(memory: str) -> list[str]:
    """List this user's directories, in the order in which a job is looked for."""
    try:
        own, taken = scan_user_directories(memory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    for path, description in taken.items():
        _pass_over(path, description)
    return own


def _find_user_directory(memory: str, job: str) -> str | None:
    """Find the directory of this user that has a job, or would get it; None if there is none."""
    own = user_directories(memory)
    return next((path for path in own if os.path.isdir(os.path.join(path, job))), own[0] if own else None)


def claim_user_directory(memory: str, job: str) -> str:
    """Find the directory for a job, or make one.

    The first rank of a node does it for all, so that somebody who takes and frees names meanwhile
    cannot divide them.

    Raises:
        ConfigError: none can be made in this memory.
        UnsafePath: somebody has taken all names.
    """
    for number in range(_MOST_NAMES):
        if (own := _find_user_directory(memory, job)) is not None:
            return own
        path = os.path.join(memory, f"mlflash-{os.getuid()}" + (f".{number}" if number else ""))
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass  # another user has it, or another process of this user has just made it
        except OSError as error:
            raise ConfigError(f"no directory can be made in {memory}: {error.strerror}", found=path) from None
    first = os.path.join(memory, f"mlflash-{os.getuid()}")
    raise UnsafePath(f"other users have taken all names for a directory of this user in {memory}", expected=PRIVATE,
                     found=f"{_MOST_NAMES} of them, from {first} on")  # fmt: skip


# The directory of a job in it


class NodeDirectory:
    """This job's files on this node.

    A job that keeps copies on a disk has a second one there: as ``disk``, its slot files can be used like these.

    Args:
        memory: the memory file system ("/dev/shm").
        top: this user's directory in the memory, as `claim_user_directory` found it; "": look for it.

    Raises:
        UnsafePath: a directory on the way is a link, open to others or somebody else's.
        ConfigError: there is no such file system.
        FileNotFoundError: the directory does not exist, and ``make`` is not set.
    """

    def __init__(self, memory: str, job: str, make: bool = True, top: str = ""):
        try:
            fd = os.open(memory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            if not make:
                raise
            raise ConfigError(f"{memory} cannot be used: {error.strerror}", found=memory,
                              expected="a directory; for slots of a tmpfs, such as /dev/shm") from None  # fmt: skip
        try:
            top = top or (claim_user_directory(memory, job) if make else _find_user_directory(memory, job) or "")
            if not top:
                raise FileNotFoundError(f"no directory of this user in {memory}")
        except OSError:
            os.close(fd)
            raise
        self._parts = os.path.basename(top), job
        self.path, self.top = os.path.join(memory, *self._parts), top
        self.memory, self._job = memory, job
        self.disk: NodeDirectory | None = None
        self.first = 0  # the smallest number of a slot file that is made here
        self.fd = self._opened(fd, make)
        self._lock_fd = -1
        self._locks: list[tuple[str, int]] = []
        self._locked: list[tuple[int, int]] = []  # ranges of the lock file
        if not make:
            self._find_disk()

    def use_disk(self, path: str, top: str = "") -> None:
        """Keep some slot files in a directory on a disk of this node, and note where, for commands.

        Args:
            top: this user's directory there; "": look for it.

        Raises:
            ConfigError, UnsafePath: it cannot be used.
        """
        self.disk = NodeDirectory(path, self._job, top=top)
        self.disk.first = FIRST_ON_DISK
        fd = self.open(_DISK_NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            os.write(fd, os.fsencode(path))
        finally:
            os.close(fd)

    def _find_disk(self) -> None:
        """Find the directory on a disk that this job has noted."""
        if self._status(_DISK_NAME) is None:
            return
        with contextlib.suppress(OSError, ConfigError, UnsafePath):  # for example unplugged
            fd = self.open(_DISK_NAME, os.O_RDONLY)
            try:
                path = os.fsdecode(os.read(fd, 4096))
            finally:
                os.close(fd)
            self.disk = NodeDirectory(path, self._job, make=False)

    def _opened(self, fd: int, make: bool) -> int:
        """Open the directory below that of the memory, whose descriptor is closed."""
        path = self.memory
        for part in self._parts:
            path, above = os.path.join(path, part), fd
            try:
                fd = _open_directory(part, above, path, make)
            finally:
                os.close(above)
        return fd

    def renew(self) -> None:
        """Make the directory, and hold the lock, anew if somebody has removed them.

        systemd does so with RemoveIPC at the end of a user's last session on the node.

        Raises:
            ConfigError, UnsafePath: it cannot be made.
            JobInUse: another process has made it, and holds the lock.
        """
        is_there = os.fstat(self.fd).st_nlink > 0
        if is_there and (self._lock_fd < 0 or os.fstat(self._lock_fd).st_nlink):
            return
        if not is_there:
            above = os.open(self.memory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            removed, self.fd = self.fd, self._opened(above, make=True)
            os.close(removed)
        log.warning("somebody has removed %s: it is made anew, and the next save is the first one in it", self.path)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
            self._hold(self._locked, 0.0)

    def lock(self, local_rank: int, local_size: int, wait_s: float = 8.0) -> None:
        """Hold this rank's part of the job's lock until the process ends.

        Not collective, but each rank of the node calls it. The first local rank also holds the places of all local
        ranks that there could be. The lock ends with the process, however it dies; a forked child does not inherit it.

        Raises:
            JobInUse: another live process holds it; the text names its pid.
        """
        key = (self.path, local_rank)
        if key in _locked_here:
            raise JobInUse("this process has a Checkpointer with this job name already: close it, or give "
                           "job= another name", found=self.path)  # fmt: skip
        self._locked = [(local_rank, 1)] + ([(local_size, 0)] if local_rank == 0 else [])
        self._hold(self._locked, wait_s)
        _locked_here.add(key)
        self._locks.append(key)

    def _hold(self, wanted: list[tuple[int, int]], wait_s: float) -> None:
        """Lock ranges of the lock file; length 0: to the end of the file, wherever it is."""
        self._lock_fd = self.open(_LOCK_NAME, os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + wait_s
        for start, length in wanted:
            while not self._try_lock(start, length):
                if time.monotonic() > deadline:
                    raise JobInUse(
                        f"job {self._job} is alive on this node: end it first; another job needs another name "
                        "(job=... or MLFLASH_JOB)",
                        expected=f"{self.path} free",
                        found=_who(self._holder(start, length)),
                    )
                time.sleep(0.05)

    def _try_lock(self, start: int, length: int) -> bool:
        try:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _holder(self, start: int, length: int) -> int:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        return works_for(int(_FLOCK.unpack(fcntl.fcntl(self._lock_fd, fcntl.F_GETLK, asked))[4]))

    def alive(self) -> int | None:
        """Process id of a live process of the job on this node; None if there is none. Takes no lock.

        If a courier holds the lock, it is the pid of its trainer; it is 0 if that has another pid
        namespace. Do not call it in processes that hold the lock themselves.
        """
        if self._status(_LOCK_NAME) is None:
            return None
        try:
            fd = self.open(_LOCK_NAME, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        finally:
            os.close(fd)
        return None if kind == fcntl.F_UNLCK else works_for(max(0, int(pid)))

    def open(self, name: str, flags: int) -> int:
        """Open a file of this directory (or make it, with O_CREAT) and check that it is ours.

        Raises:
            ForeignNode: the name leads out of this node's directory.
            MemoryTooSmall: there is no room for another file.
            UnsafePath: the file is a link, open to others, or somebody else's.
        """
        if (other := self._other(name)) is not None:
            return other.open(name, flags)
        if "/" in name or name in ("", ".", ".."):
            raise ForeignNode("a rank may touch the memory of its own node only", expected=self.path, found=name)
        path = os.path.join(self.path, name)
        try:
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        except OSError as error:
            if isinstance(error, (FileExistsError, FileNotFoundError)):
                raise
            if full := too_small(error, self.path, f"room for the file {name}"):
                raise full from error
            raise UnsafePath(f"cannot open {path}: {error.strerror}", found=_describe_name(name, self.fd)) from error
        status = os.fstat(fd)
        if not _is_ours(status):
            os.close(fd)
            raise UnsafePath(f"{path} is not a private file of this user", expected=PRIVATE, found=describe(status))
        return fd

    def _other(self, name: str) -> NodeDirectory | None:
        """The directory on a disk, if a slot file is there."""
        is_there = self.disk is not None and SLOT_NAME.fullmatch(name) and is_on_disk(file_number(name))
        return self.disk if is_there else None

    def slot_names(self) -> list[str]:
        own = sorted(name for name in os.listdir(self.fd) if SLOT_NAME.fullmatch(name) and self._status(name))
        if self.disk is not None:
            with contextlib.suppress(OSError):  # a disk that has failed holds nothing
                own += self.disk.slot_names()
        return own

    def pulse_names(self) -> list[str]:
        return sorted(name for name in os.listdir(self.fd) if _PULSE_NAME.fullmatch(name) and self._status(name))

    def leave_pulse(self, number: int) -> None:
        """Leave an empty file, by which another node sees that it has the same directory."""
        os.close(self.open(f"pulse-{number:04d}", os.O_WRONLY | os.O_CREAT))

    def forget_pulses(self) -> None:
        """Delete such files."""
        for name in self.pulse_names():
            self._unlink(name)

    def nbytes(self, name: str) -> int:
        """Size of a file of this node; 0 if it does not exist."""
        status = (self._other(name) or self)._status(name)
        return 0 if status is None else status.st_size

    def _status(self, name: str) -> os.stat_result | None:
        """The status of a file of ours; None if it does not exist, or, with a warning, if it is not ours."""
        try:
            status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if _is_ours(status):
            return status
        _pass_over(os.path.join(self.path, name), describe(status))
        return None

    def _unlink(self, name: str) -> bool:
        if self._status(name) is None:
            return False
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return False
        log.debug("deleted %s", os.path.join(self.path, name))
        return True

    def new_slot_name(self) -> tuple[str, int]:
        """Make a new, empty slot file; no two ranks get the same one. Returns name and descriptor."""
        number = self.first
        while True:
            name = f"slot-{number:04d}"
            try:
                return name, self.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                number += 1

    def remove(self, name: str) -> None:
        """Delete a slot file of this node."""
        if not SLOT_NAME.fullmatch(name):
            raise ForeignNode("only slot files are deleted here", expected=self.path, found=name)
        if (disk := self._other(name)) is None:
            self._unlink(name)
            return
        try:
            disk._unlink(name)
        except OSError as error:  # of a disk that has failed; nothing needs it any more
            log.warning("%s could not be deleted: %s", os.path.join(disk.path, name), error.strerror)

    def request_drain(self) -> None:
        """Ask the live job on this node to drain the next checkpoint that it commits."""
        os.close(self.open(_REQUEST_NAME, os.O_WRONLY | os.O_CREAT))

    def has_request(self) -> bool:
        """Whether a drain was asked for, and no job has noticed it yet."""
        return self._status(_REQUEST_NAME) is not None

    def take_request(self) -> bool:
        """Whether a drain was asked for; forgets the request."""
        return self._unlink(_REQUEST_NAME)

    def wipe(self) -> int:
        """Delete all slots, the lock and the directory; return the bytes freed. Hold the lock of all ranks before."""
        nbytes = 0
        for name in self.slot_names():
            nbytes += self.nbytes(name)
            self.remove(name)
        if self.disk is not None:
            self.disk.wipe()
        for name in (_LOCK_NAME, _REQUEST_NAME, _DISK_NAME, *self.pulse_names()):
            self._unlink(name)
        try:
            os.rmdir(self.path)
        except OSError:
            log.warning("%s stays: there are files in it that are not mlflash's", self.path)
        log.info("deleted %s, %d bytes of slots", self.path, nbytes)
        return nbytes

    def other_jobs(self) -> dict[str, int]:
        """Bytes of the slots that other jobs of this user hold in this memory, alive or not, by job."""
        held = held_by_jobs(self.memory)
        return {job: nbytes for job, nbytes in held.items() if nbytes and job != self._job.removesuffix(LIGHT)}

    def close(self) -> None:
        """Release the lock and the directory; the files stay. May be called twice."""
        for key in self._locks:
            _locked_here.discard(key)
        self._locks.clear()
        for fd in (self._lock_fd, self.fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self._lock_fd = -1
        if self.disk is not None:
            self.disk.close()


def jobs_of(memory: str) -> list[str]:
    """List the jobs of this user that have memory on this node. Light saves count as their job's."""
    return sorted({_job_of(path) for top in user_directories(memory) for path in _below(top)})


def _job_of(path: str) -> str:
    return os.path.basename(path).removesuffix(LIGHT)


def held_by_jobs(memory: str) -> dict[str, int]:
    """Bytes of the slots that jobs of this user hold in a memory, alive or not, by job."""
    held = dict.fromkeys(jobs_of(memory), 0)
    for top in user_directories(memory):
        for path in _below(top):
            held[_job_of(path)] += sum(map(_slot_nbytes, _entries(path)))
    return held


def clean(memory: str, job: str, wait_s: float = 0.0) -> int:
    """Delete what a job holds in the memory of this node, with its light saves; return the bytes freed.

    Args:
        wait_s: how long to wait for processes of the job that still end.

    Raises:
        JobInUse: the job is alive; nothing of this node was deleted.
        UnsafePath: its directory is not private to this user.
    """
    with contextlib.ExitStack() as ends:
        directories = []
        for name in (job, job + LIGHT):
            with contextlib.suppress(FileNotFoundError):
                directories.append(NodeDirectory(memory, name, make=False))
                ends.callback(directories[-1].close)
        for held in directories:
            held.lock(0, 1, wait_s)
        return sum(held.wipe() for held in directories)


def _entries(path: str) -> list[os.DirEntry[str]]:
    """What is in a directory; nothing if it does not exist or cannot be read."""
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def _below(path: str) -> list[str]:
    """The directories of this user in one of them, sorted; those that are not ours are passed over."""
    own = []
    for entry in _entries(path):
        if entry.is_dir(follow_symlinks=False):
            if (status := entry.stat(follow_symlinks=False)).st_uid == os.getuid():
                own.append(entry.path)
            else:
                _pass_over(entry.path, describe(status))
    return own


def _slot_nbytes(entry: os.DirEntry[str]) -> int:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return 0
    return status.st_blocks * 512 if SLOT_NAME.fullmatch(entry.name) and stat.S_ISREG(status.st_mode) else 0


def _is_ours(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and is_private(status)


def _open_directory(name: str, above: int, path: str, make: bool) -> int:
    """Open a directory, and make it if it does not exist; return its descriptor."""
    if make:
        try:
            os.mkdir(name, 0o700, dir_fd=above)
        except FileExistsError:
            pass
        except OSError as error:
            raise ConfigError(f"the directory {path} cannot be made: {error.strerror}", found=path) from None
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise UnsafePath(f"cannot use the directory {path}: {error.strerror}", expected=PRIVATE,
                         found=_describe_name(name, above)) from error  # fmt: skip
    status = os.fstat(fd)
    if not is_private(status):
        os.close(fd)
        raise UnsafePath(f"{path} is not a private directory of this user", expected=PRIVATE, found=describe(status))
    return fd


def _describe_name(name: str, above: int) -> str:
    try:
        return describe(os.stat(name, dir_fd=above, follow_symlinks=False))
    except OSError as error:
        return str(error)


def _who(holder: int) -> str:
    if holder:
        return f"held by pid {holder}"
    return "held in another container: containers of one job that share this memory need one host name, too"
