"""The key by which a job's ranks know each other. It never stands on a command line."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from bagua_ext.launch import LaunchInfo

_KEY_BYTES = 32
_MIN_KEY_BYTES = 16


def read_secret(info: LaunchInfo) -> bytes:
    """Returns the job's key: from the launcher's descriptor, a named file or the user's key file.

    Raises:
        ValueError: the source cannot be read, is too short, or others may read the file.
    """
    if info.secret_fd is not None:
        return _read_descriptor(info.secret_fd)
    if info.secret_file is not None:
        return _read_file(Path(info.secret_file))
    return _user_key()


def _read_descriptor(fd: int) -> bytes:
    try:
        # pread leaves the offset alone: all ranks of a host share the open file.
        key = os.pread(fd, os.fstat(fd).st_size, 0)
    except OSError as error:
        raise ValueError(
            f"BAGUA_SECRET_FD={fd} cannot be read ({error.strerror}). The descriptor is inherited "
            "from bagua-run: a wrapper that closes descriptors must pass it on."
        ) from error
    return _checked(key, f"descriptor {fd}")


def _read_file(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        key = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"the key file {path} cannot be read ({error.strerror}). Set BAGUA_SECRET_FILE to a "
            "file with the same random bytes on every host."
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise ValueError(f"others may read the key file {path}. Run: chmod 600 {path}")
    return _checked(key, str(path))


def _checked(key: bytes, origin: str) -> bytes:
    if len(key) < _MIN_KEY_BYTES:
        raise ValueError(
            f"the key in {origin} has {len(key)} bytes, at least {_MIN_KEY_BYTES} are needed"
        )
    return key


def _user_key() -> bytes:
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    path = Path(base) / "bagua_ext" / "key"
    if not path.exists():
        try:
            _create(path)
        except OSError as error:
            raise ValueError(
                f"the key file {path} cannot be made ({error.strerror}). Set BAGUA_SECRET_FILE to "
                "a file of at least 16 random bytes, mode 0600."
            ) from error
    return _read_file(path)


def _create(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"key.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        # A link fails where a rename would replace: ranks that start together agree on one key.
        os.link(draft, path)
    except FileExistsError:
        return
    finally:
        draft.unlink()
