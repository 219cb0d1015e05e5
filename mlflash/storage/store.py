"""A directory for checkpoints: on a file system, or behind a URL that fsspec knows.

A file is there whole or not at all. On a file system it is written under a temporary name, synced and renamed, and its
directory is synced. In an object store it appears when its upload is completed. Nothing is deleted here unless it is
named.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from ..crash_points import reach
from ..errors import ConfigError, UnsafePath, pip_install

log = logging.getLogger("mlflash")

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
_FILE = re.compile("(file|local)://", re.IGNORECASE)
_REMOTE_CHUNK_NBYTES = 64 << 20  # a part of a multipart upload
_S3_CONNECT_S, _S3_READ_S = 3.0, 20.0
_S3_TRIES = 2  # tries of botocore, and of each of the two loops of s3fs around it


def open_store(place: str | os.PathLike[str]) -> Store:
    """Open a directory, or a URL that fsspec knows; nothing is made. Raises ConfigError if a package is missing."""
    path = without_file_scheme(os.fspath(place))
    return Remote(path) if is_url(path) else Directory(os.path.abspath(path))


def is_url(path: str) -> bool:
    """Whether this is a URL of something remote, and neither a path nor a ``file://`` URL of one."""
    return _URL.match(path) is not None and _FILE.match(path) is None


def without_file_scheme(path: str) -> str:
    """The path of a ``file://`` URL; anything else stays as it is."""
    return unquote(urlsplit(path).path) if _FILE.match(path) else path


class Directory:
    """A directory of a file system. New directories are 0700, new files 0600; links in it are not followed.

    Nothing is collective. Errors of the file system are OSError.
    """

    def __init__(self, path: str, below: bool = False):
        self.path = path
        self._below = below  # a link to the directory itself is left to the user

    def at(self, name: str) -> Directory:
        return Directory(os.path.join(self.path, name), below=True)

    def make(self, parents: bool = True) -> None:
        """Make this directory if it does not exist; with ``parents`` also those above it."""
        if os.path.isdir(self.path):
            return
        above = Directory(os.path.dirname(self.path))
        if parents:
            above.make()
        os.mkdir(self.path, 0o700)
        log.debug("made %s", self.path)
        above._sync()

    def names(self) -> list[str]:
        """What is in it, sorted; empty if it does not exist."""
        self._refuse_link()
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []

    def write(self, name: str, content: Iterable[Any], tag: str = "") -> int:
        """Write a file, whole or not at all, and durably; return its bytes. An existing one is replaced."""
        self._refuse_link()
        temporary, path = os.path.join(self.path, f".{name}.{tag}.tmp"), os.path.join(self.path, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600)
        log.debug("writing %s", path)
        reach("drain.file_made")
        written = 0
        try:
            try:
                for piece in content:
                    rest = memoryview(piece).cast("B")
                    while rest:
                        done = os.write(fd, rest)
                        written, rest = written + done, rest[done:]
                reach("drain.file_written")
                os.fsync(fd)
            finally:
                os.close(fd)
            reach("drain.file_synced")
            os.rename(temporary, path)
        except BaseException:
            os.unlink(temporary)
            log.info("deleted %s", temporary)
            raise
        reach("drain.file_renamed")
        self._sync()
        return written

    def read(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """Read a part of a file; fewer bytes if it ends before."""
        fd = self._open(name)
        try:
            remaining = max(0, os.fstat(fd).st_size - start) if nbytes is None else nbytes
            pieces = []
            while remaining and (piece := os.pread(fd, remaining, start)):
                pieces.append(piece)
                start, remaining = start + len(piece), remaining - len(piece)
        except OSError as error:
            error.filename = os.path.join(self.path, name)
            raise
        finally:
            os.close(fd)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def open(self, name: str) -> Any:
        """Open a file for reading in any order."""
        return os.fdopen(self._open(name), "rb")

    def nbytes(self, name: str) -> int:
        return os.stat(os.path.join(self.path, name), follow_symlinks=False).st_size

    def remove(self, name: str) -> None:
        """Delete a file of this directory; do nothing if it does not exist."""
        self._refuse_link()
        try:
            os.unlink(os.path.join(self.path, name))
        except FileNotFoundError:
            return
        log.info("deleted %s", os.path.join(self.path, name))

    def remove_directory(self) -> bool:
        """Delete this directory if it is empty; return whether it is gone."""
        try:
            os.rmdir(self.path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        log.info("deleted %s", self.path)
        return True

    def why_not_writable(self) -> str:
        """Why nothing can be written to it, as far as is known without writing; "" if no reason is known."""
        path = self.path
        while not os.path.lexists(path):  # a missing directory can be made if the one above is writable
            path = os.path.dirname(path)
        if not os.path.isdir(path):
            return f"{path} is not a directory"
        return "" if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written by this user"

    def _open(self, name: str) -> int:
        """Open a file for reading; do not follow a link, and do not wait for a pipe that somebody put there."""
        self._refuse_link()
        path = os.path.join(self.path, name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UnsafePath("a link in the directory is not followed", found=path) from None
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise UnsafePath("this is no file", found=path)
        return fd

    def _refuse_link(self) -> None:
        if self._below and os.path.islink(self.path):
            raise UnsafePath("a link in the directory is not followed", found=self.path)

    def _sync(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class Remote:
    """A folder of an object store, by fsspec.

    There is no rename: an upload that is not completed leaves no object. If S3 cannot be reached, a call takes less
    than 30 s; if S3 accepts connections but does not answer, less than 3 minutes.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None):
        import fsspec

        self.path = url.rstrip("/")
        self._options = dict(options or {})
        protocol = fsspec.core.split_protocol(self.path)[0]
        is_s3 = protocol in ("s3", "s3a")
        more = _patience({**fsspec.config.conf.get(protocol, {}), **self._options}) if is_s3 else {}
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.path, **self._options, **more)
        except ImportError as error:
            how = pip_install("s3") if is_s3 else "install it into this environment"
            raise ConfigError(f"a package that opens {self.path} is missing: {how}", found=str(error)) from None
        if is_s3:
            self._files.retries = _S3_TRIES

    def at(self, name: str) -> Remote:
        return Remote(f"{self.path}/{name}", self._options)

    def make(self, parents: bool = True) -> None:
        with self._telling():
            self._files.makedirs(self._root, exist_ok=True)  # does nothing if folders are only parts of names

    def names(self) -> list[str]:
        self._files.invalidate_cache(self._root)
        try:
            with self._telling():
                listed = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        names = {path.rstrip("/").rsplit("/", 1)[-1] for path in listed if path.rstrip("/") != self._root}
        return sorted(names)

    def write(self, name: str, content: Iterable[Any], tag: str = "") -> int:
        written = 0
        with self._telling(name):
            file = self._files.open(f"{self._root}/{name}", "wb", block_size=_REMOTE_CHUNK_NBYTES)
        log.debug("writing %s/%s", self.path, name)
        reach("drain.file_made")
        try:
            for piece in content:
                with self._telling(name):
                    written += file.write(piece)
            reach("drain.file_written")
            with self._telling(name):
                file.close()
        except BaseException:
            try:
                file.discard()
            except Exception as problem:  # the first error matters more
                log.warning("what was uploaded of %s/%s could not be discarded: %s", self.path, name, problem)
            file.closed = True  # otherwise its end would complete the upload
            raise
        reach("drain.file_renamed")
        return written

    def read(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        if nbytes == 0:  # S3 takes an empty range for all bytes, or refuses it
            self.nbytes(name)
            return b""
        end = None if nbytes is None else start + nbytes
        try:
            with self._telling(name):
                return bytes(self._files.cat_file(f"{self._root}/{name}", start=start, end=end))
        except OSError as error:
            # The server refuses a range after the end, and any range of an empty object.
            if error.errno == errno.EINVAL and self.nbytes(name) <= start:
                return b""
            raise

    def open(self, name: str) -> Any:
        with self._telling(name):
            return self._files.open(f"{self._root}/{name}", "rb")

    def nbytes(self, name: str) -> int:
        self._files.invalidate_cache(self._root)
        with self._telling(name):
            return int(self._files.info(f"{self._root}/{name}")["size"])

    def remove(self, name: str) -> None:
        try:
            with self._telling(name):
                self._files.rm_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return
        log.info("deleted %s/%s", self.path, name)

    def remove_directory(self) -> bool:
        if self.names():
            return False
        with contextlib.suppress(OSError), self._telling():
            self._files.rmdir(self._root)  # some stores have nothing to delete
        return True

    def why_not_writable(self) -> str:
        return ""  # only an upload would tell

    @contextlib.contextmanager
    def _telling(self, name: str = "") -> Iterator[None]:
        """Turn whatever a library raises into an OSError with number, text and URL."""
        try:
            yield
        except Exception as problem:
            if isinstance(problem, OSError):
                kinds = ((FileNotFoundError, errno.ENOENT), (PermissionError, errno.EACCES), (OSError, errno.EIO))
                number = problem.errno or next(number for kind, number in kinds if isinstance(problem, kind))
                text = problem.strerror or str(problem)
            else:  # botocore's error if the endpoint does not answer
                number, text = errno.EIO, f"{type(problem).__name__}: {problem}"
            raise OSError(number, text, f"{self.path}/{name}") from problem


def _patience(options: Mapping[str, Any]) -> dict[str, Any]:
    """How long to wait for S3, and how often to try; the user's settings of fsspec or botocore take precedence."""
    tries = {} if "AWS_MAX_ATTEMPTS" in os.environ else {"retries": {"total_max_attempts": _S3_TRIES}}
    defaults = {"connect_timeout": _S3_CONNECT_S, "read_timeout": _S3_READ_S, **tries}
    return {"config_kwargs": {**defaults, **options.get("config_kwargs", {})}}


Store = Directory | Remote


Item = TypeVar("Item")
Result = TypeVar("Result")

THREADS = 16
_LEAST = 8  # items per thread, at least: for fewer, starting it takes longer


def each(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Do something with each item, in any order, and wait until all is done.

    The threads end with the process: a file system that hangs delays nobody else.

    Raises:
        Exception: what the work raised for one of the items; no other item is begun after that.
    """
    results: list[Result | None] = [None] * len(items)
    errors: list[Exception] = []
    numbers = iter(range(len(items)))

    def run() -> None:
        try:
            for at in numbers:  # each number goes to one thread
                if errors:
                    return
                results[at] = work(items[at])
        except Exception as error:  # raised below
            errors.append(error)

    threads = [threading.Thread(target=run, name="mlflash-files", daemon=True)
               for _ in range(min(THREADS, len(items) // _LEAST) - 1)]  # fmt: skip
    for thread in threads:
        thread.start()
    run()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]


# Checkpoints of other libraries, by the names of their files


DCP = "PyTorch DCP"
SAFETENSORS = "Hugging Face safetensors"
TORCH_CHECKPOINTING = "torch_checkpointing"

_NEWEST = 3  # folders that are looked into
_OF_FIRST_RANK = re.compile(r".+_0\.pt")
_OWN = (".h5", ".mlflash")


def format_of(names: Collection[str]) -> str:
    """Name the format of a checkpoint by the names in its folder; "": none of these, or mlflash's own."""
    if any(name.endswith(_OWN) for name in names):
        return ""
    if ".metadata" in names:
        return DCP
    if any(name.endswith(".safetensors") for name in names):
        return SAFETENSORS
    has_their_names = "metadata.pkl" in names or any(map(_OF_FIRST_RANK.fullmatch, names))
    return TORCH_CHECKPOINTING if has_their_names else ""


def find_other_format(store: Store) -> tuple[str, str] | None:
    """Look for another library's checkpoint in a directory and its last folders: where it is, and its format."""
    with contextlib.suppress(OSError):
        names = store.names()
        for place in [store, *(store.at(name) for name in reversed(names[-_NEWEST:]))]:
            with contextlib.suppress(OSError):
                if form := format_of(place.names()):
                    return place.path, form
    return None
