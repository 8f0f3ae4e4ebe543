"""What a file system may lack: one place decides what the failure of an operation means.

Network and cluster file systems may have no locks (NFS without lockd, Lustre without `-o flock`),
no flush of a folder, or no hard links. Such a failure says `unsupported here`: the caller goes on
without the operation, or in another way. Any other one says `broken`, and ends what needs it.
"""

import errno
import shutil
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path

# What systems answer to an operation that this file system doesn't have.
UNSUPPORTED = frozenset(
    [errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.ENOTTY]
)
FULL = frozenset([errno.ENOSPC, errno.EDQUOT])
# error number -> what to do, where a folder or a file cannot be written
REMEDIES = {
    errno.ENOSPC: "make room on its disk",
    errno.EDQUOT: "make room within your quota",
    errno.EROFS: "its file system is read-only: choose another folder",
    errno.EACCES: "permit it, or choose a folder that you may write",
    errno.EPERM: "permit it, or choose a folder that you may write",
    errno.EFBIG: "raise the limit on the size of files, as ulimit -f shows it",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "choose a folder that exists",
    errno.ENOTDIR: "a part of this path is a file: choose another folder",
    errno.EIO: "its disk, or the network to it, has failed: check it, or choose another folder",
    errno.ESTALE: "its network file system is gone: mount it again",
    errno.ETIMEDOUT: "its network file system doesn't answer: check the network",
    **dict.fromkeys(
        [*UNSUPPORTED, errno.ENODEV], "its disk cannot do this: choose a folder on another disk"
    ),
    errno.EINVAL: "choose another folder",  # a name may be what is invalid
}


class Lock(Enum):
    """How an attempt to lock a file ended."""

    TAKEN = auto()
    BUSY = auto()  # another process has it
    UNSUPPORTED = auto()  # nobody can have it


def is_unsupported(error: OSError) -> bool:
    """Return whether an operation failed because this file system doesn't have it."""
    return error.errno in UNSUPPORTED


def is_full(error: OSError) -> bool:
    """Return whether an operation failed for lack of space."""
    return error.errno in FULL


def lacks_links(error: OSError) -> bool:
    """Return whether a hard link failed because this file system has none."""
    return is_unsupported(error) or error.errno in (errno.EPERM, errno.EXDEV, errno.EMLINK)


def lacks_folder_flush(error: OSError) -> bool:
    """Return whether a folder could not be flushed because it can't be: it may be write-only."""
    return is_unsupported(error) or error.errno in (errno.EACCES, errno.EISDIR, errno.EBADF)


def lacks_maps(error: OSError) -> bool:
    """Return whether a file could not be mapped into memory because this file system can't."""
    return is_unsupported(error) or error.errno == errno.ENODEV


def bytes_left(folder: Path) -> int | None:
    """Return the free bytes on the disk of `folder`; None if its file system doesn't tell."""
    try:
        disk = shutil.disk_usage(folder)
    except OSError as error:
        if is_unsupported(error):
            return None
        raise
    return disk.free if disk.total > 0 else None


def locked(take: Callable[[], object]) -> Lock:
    """Call `take`, which locks a file or raises, and return how that ended.

    Raises:
        OSError: the disk is broken.
    """
    try:
        take()
    except (BlockingIOError, PermissionError):  # POSIX allows both
        return Lock.BUSY
    except OSError as error:
        if is_unsupported(error):
            return Lock.UNSUPPORTED
        raise
    return Lock.TAKEN


def remedy(error: OSError, setting: str = "") -> str:
    """Return what to do about a folder or a file that cannot be written.

    Args:
        error: why it cannot be written.
        setting: that chooses the folder, if one does.

    Example:
        >>> remedy(OSError(errno.EROFS, "Read-only file system"))
        'its file system is read-only: choose another folder'
    """
    text = REMEDIES.get(error.errno or 0, "choose another folder")
    return text.replace("choose", f"set {setting} to") if setting else text
