"""Checks for both sides of a deployment: files and their modes, disk space, certificates, versions."""

import os
import shlex
import shutil
import stat
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.packages.versions import differing, shared_versions
from hyperfl_flwr.deploy.keys import read_certificate
from hyperfl_flwr.deploy.provision import VERSIONS
from hyperfl_flwr.launch.findings import Finding, error, ok, warning

RENEWAL_PERIOD = timedelta(days=30)
"""Remaining validity below which a certificate gets a warning."""

ERROR_BYTES, WARNING_BYTES = 200 * 2**20, 5 * 2**30
"""Free disk space below which a round will, or may, fail: it stores several copies of messages and clients' states."""


def files(folder: Path, names: Sequence[str]) -> Iterator[Finding]:
    """Check that files exist."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        yield error("files", f"{', '.join(missing)} missing in {folder}", "restore the folder from the operator's copy")
    else:
        yield ok("files", f"all in {folder}")


def private(subject: str, paths: Sequence[Path]) -> Iterator[Finding]:
    """Check that only their owner has access, who owns their folder if it is one of them; missing ones are skipped."""
    there = [path for path in paths if path.exists()]
    yield from owners(subject, there)
    opened = [path for path in there if stat.S_IMODE(path.stat().st_mode) & 0o077]
    for path in opened:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = f"other users have access to {path} (mode {mode:03o})"
        yield error(subject, text, f"chmod go= {shlex.quote(str(path))}")
    if there and not opened:
        yield ok(subject, f"{', '.join(path.name for path in there)}: accessible to their owner only")


def owners(subject: str, paths: Sequence[Path]) -> Iterator[Finding]:
    """Find what does not belong to the user whose folder it is in, as after a command that root has run.

    Paths that do not exist, and those whose folder is none of them, are skipped.
    """
    for path in filter(os.path.lexists, paths):
        owner, expected = path.lstat().st_uid, path.parent.stat().st_uid
        if path.parent in paths and owner != expected:
            text = f"{path} belongs to uid {owner}, its folder to uid {expected}"
            yield error(subject, text, f"sudo chown -h {expected} {shlex.quote(str(path))}")


def authority(folder: Path) -> Iterator[Finding]:
    """Check the authority's certificate in a folder."""
    try:
        certificate = read_certificate(folder / "ca.crt")
    except StateError as failure:
        yield error("authority", str(failure), "copy it from the operator's `server` folder")
        return
    remedy = "the operator must create a new deployment with `hyperfl deploy init`"
    yield from validity("authority", certificate, remedy)


def validity(subject: str, certificate: x509.Certificate, remedy: str) -> Iterator[Finding]:
    """Check that a certificate is valid now and for the next days, see `RENEWAL_PERIOD`."""
    now, end = datetime.now(UTC), certificate.not_valid_after_utc
    if now < certificate.not_valid_before_utc:
        text = f"the certificate is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        yield error(subject, text, "set this machine's clock")
    elif now > end:
        yield error(subject, f"the certificate expired on {end:%Y-%m-%d}", remedy)
    elif now > end - RENEWAL_PERIOD:
        yield warning(subject, f"the certificate expires on {end:%Y-%m-%d}", remedy)
    else:
        yield ok(subject, f"the certificate is valid until {end:%Y-%m-%d}")


def is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Return whether a certificate was signed by an authority."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def writable(subject: str, folder: Path) -> Iterator[Finding]:
    """Check that a folder is writable and has free space; a missing folder is checked by its closest parent."""
    place = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:  # really writes: permissions alone show neither a full disk nor a quota
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as failure:
        text = f"{place} is not writable ({failure.strerror})"
        yield error(subject, text, f"make it writable for this user ({_user()}), or free disk space")
        return
    free = shutil.disk_usage(place).free
    text = f"{folder} is writable, {free / 2**30:.1f} GiB are free"
    if free < ERROR_BYTES:
        yield error(subject, text, "free disk space")
    elif free < WARNING_BYTES:
        yield warning(subject, text, "free disk space soon")
    else:
        yield ok(subject, text)


def same_versions(folder: Path) -> Iterator[Finding]:
    """Check that the installed versions are those that the operator had when the node's folder was created."""
    try:
        made_with = {name: str(version) for name, version in tomllib.loads((folder / VERSIONS).read_text()).items()}
    except (OSError, ValueError):
        yield warning("versions", f"{VERSIONS} cannot be read", "ask the operator which versions are used")
        return
    others = differing(made_with)
    for name, expected, installed in others:
        text = f"{name} {installed} is installed, but the operator had {expected} when this folder was created"
        if name in ("hyperfl-flwr", "flwr"):
            yield error("versions", text, f"install {name} {expected}, or the operator's present version")
        else:
            yield warning("versions", text, f"install {name} {expected}, because results may differ")
    if not others:
        yield ok("versions", ", ".join(f"{name} {version}" for name, version in shared_versions().items()))


def _user() -> str:
    return f"uid {os.getuid()}"
