"""Durable files: written under a temporary name, flushed, renamed, so readers see the old or the new one."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
import socket
from pathlib import Path

logger = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
_held_locks: set[FileLock] = set()


class FileLock:
    """An exclusive advisory lock on a file that names its holder; it ends with the process that took it.

    `path` is created and never deleted: deleting a lock file lets two processes hold "the" lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def acquire(self) -> None:
        """Take the lock or raise BlockingIOError whose text names the holder. Never waits."""
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise BlockingIOError(errno.EWOULDBLOCK, holder) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(handle)
                raise
            logger.warning("%s: this file system has no locks; make sure that no other process writes here", self.path)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._handle = handle
        _held_locks.add(self)

    @property
    def held(self) -> bool:
        """Whether this object holds it."""
        return self._handle is not None

    def release(self) -> None:
        """Give the lock back. Does nothing if it is not held."""
        _held_locks.discard(self)
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _drop_inherited_locks() -> None:
    # A forked worker shares its parent's lock and would keep it after the parent's death: the run could not
    # be resumed.
    for lock in tuple(_held_locks):
        lock.release()


os.register_at_fork(after_in_child=_drop_inherited_locks)


def fsync_path(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder`, then `folder` itself."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync_path(Path(root, name))
        fsync_path(Path(root))


def copy_mode(folder: Path, reference: Path) -> None:
    """Give every file below `folder` the permissions of `reference`: safetensors makes its files private to
    the user.
    """
    mode = reference.stat().st_mode
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def write_file(path: Path, data: bytes) -> None:
    """Create `path` with `data` and flush it. For files inside a temporary folder; elsewhere use
    `write_atomic`.
    """
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`. On any failure the old file stays and nothing else is left behind."""
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        write_file(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def temporary_sibling(target: Path, kind: str = "tmp") -> Path:
    """An unused name beside `target`, on the same file system: `NAME.tmp-1a2b3c4d`."""
    return target.with_name(f"{target.name}.{kind}-{secrets.token_hex(4)}")


def replace_folder(ready: Path, target: Path) -> Path | None:
    """Rename the finished folder `ready` to `target`; returns where an older `target` went (for
    `remove_tree`), if any.

    Two renames, since a folder with content cannot be renamed over: a crash between them leaves the older one
    whole, as `NAME.old-...`.
    """
    old = temporary_sibling(target, "old") if target.exists() else None
    if old is not None:
        os.rename(target, old)
    try:
        os.rename(ready, target)
    except OSError:
        if old is not None:
            os.rename(old, target)
        raise
    return old


def remove_tree(folder: Path) -> None:
    """Delete a folder. What cannot be deleted is logged, not raised: leftovers only cost disk space."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        logger.warning("could not delete %s: delete it by hand to free its disk space", folder)
