#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Get the pinned upstream source: download once, check its sha256, unpack to vendor/src.

Usage: python3 vendor/fetch.py [--root DIR] [--sdist-only]

Prints the path of the unpacked source (or of the source archive) on stdout, messages on stderr.

Environment:
  KVSPLIT_LLAMA_CPP_SDIST  a local source archive to use instead of a download; its sha256 must match
  KVSPLIT_CACHE_DIR        folder of the cache (default: the user's cache folder, "kvsplit" in it)

Exit codes: 0 done, 1 usage, 2 lock, hash, archive, download or cache, 4 the unpacked source was edited by hand,
130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Callable, Dict, Iterator, List, NoReturn, Optional, Tuple

try:
    import fcntl
except ImportError:  # not a POSIX system: no lock, one process at a time
    fcntl = None  # type: ignore[assignment]

EXIT_OK = 0
EXIT_USAGE = 1
EXIT_SOURCE = 2
EXIT_EDITED = 4
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

SOURCE_STAMP = ".kvsplit-source"  # what was unpacked, and the sha256 of every file in it
PATCH_STAMP = ".kvsplit-patched"  # written by scripts/patchq
MANIFEST = ".kvsplit-files"  # size, time and sha256 of every unpacked file: what need not be read again
ORIG_DIR = ".kvsplit-orig"  # originals of patched files, kept by scripts/patchq
OURS = (SOURCE_STAMP, PATCH_STAMP, MANIFEST, ORIG_DIR)


class SourceError(Exception):
    """A failure with a message for a person and an exit code."""

    def __init__(self, message: str, code: int = EXIT_SOURCE) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Lock:
    """The pinned source distribution: project name, version, file name, sha256 (hex)."""

    name: str
    version: str
    file: str
    sha256: str

    def text(self) -> str:
        return "".join(f"{k} = {getattr(self, k)}\n" for k in ("name", "version", "file", "sha256"))


def note(message: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it, or its disk is full: what is done counts
        print(f"kvsplit: {message}", file=sys.stderr, flush=True)


def why(e: OSError) -> str:
    """The system's reason for an error; a disk or a quota that is used up is called so."""
    full = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
    reason = f"disk full: {e.strerror}" if e.errno in full else str(e.strerror or e)
    return f"{e.filename}: {reason}" if e.filename else reason


class Terminated(BaseException):
    """SIGTERM, or SIGHUP of a terminal that closes: work folders are removed on the way out."""


def _on_end(signum: int, frame: object) -> NoReturn:
    raise Terminated


def ending(body: Callable[[], int]) -> int:
    """Run a program's body and return its exit code; whatever ends it is one message on stderr.

    Errors of the system that nobody expected are EXIT_SOURCE.
    """
    for signum in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(signum) == signal.SIG_DFL:
            signal.signal(signum, _on_end)
    code = EXIT_OK
    try:
        try:
            code = body()
            sys.stdout.flush()
            return code
        except SourceError as e:
            note(f"error: {e}")
            code = e.code
        except OSError as e:
            note(f"error: {why(e)}")
            code = EXIT_SOURCE
        except KeyboardInterrupt:
            note("interrupted; run it again to go on")
            code = EXIT_INTERRUPTED
        except Terminated:
            note("terminated; run it again to go on")
            code = EXIT_TERMINATED
        sys.stdout.flush()
        return code
    except OSError:
        # what stdout still holds and can't take: Python would complain about it once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code


def lock_path(root: Path) -> Path:
    return root / "vendor" / "llama_cpp.lock"


def load_lock(root: Path) -> Lock:
    """Read vendor/llama_cpp.lock. SourceError if it is missing or malformed."""
    path = lock_path(root)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise SourceError(f"{path}: can't read the lock: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise SourceError(f"{path}: is no UTF-8 text (byte {e.start})") from e
    values: Dict[str, str] = {}
    for n, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, eq, value = (s.strip() for s in line.partition("="))
        if not eq or key not in ("name", "version", "file", "sha256") or key in values or not value:
            raise SourceError(f"{path}:{n}: expected one each of name, version, file, sha256 as 'key = value'")
        values[key] = value
    missing = [k for k in ("name", "version", "file", "sha256") if k not in values]
    if missing:
        raise SourceError(f"{path}: missing: {', '.join(missing)}")
    if not re.fullmatch(r"[0-9a-f]{64}", values["sha256"]):
        raise SourceError(f"{path}: sha256 must be 64 lower-case hex digits")
    if "/" in values["file"] or values["file"].startswith("."):
        raise SourceError(f"{path}: file must be a plain file name")
    return Lock(**values)


def cache_dir() -> Path:
    """The user's cache folder of KVSplit, as platformdirs.user_cache_dir("kvsplit", appauthor=False) has it.

    SourceError if it would be in the home of a user who has none.
    """
    try:
        if os.environ.get("KVSPLIT_CACHE_DIR"):
            return Path(os.environ["KVSPLIT_CACHE_DIR"]).expanduser()
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "kvsplit"
        if os.environ.get("XDG_CACHE_HOME"):
            return Path(os.environ["XDG_CACHE_HOME"]) / "kvsplit"
        return Path.home() / ".cache" / "kvsplit"
    except RuntimeError:
        raise SourceError("this user has no home folder; set HOME, or KVSPLIT_CACHE_DIR to a folder") from None


def sha256_file(path: Path) -> str:
    h = hashlib.sha256()
    with path.open("rb") as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            h.update(block)
    return h.hexdigest()


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; a second process waits."""
    if fcntl is None:
        yield
        return
    with path.open("a") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            note(f"waiting for another process that holds {path}")
            fcntl.flock(f, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


def remove_stale(folder: Path, prefix: str) -> None:
    """Remove work files and folders that a killed run left: only names that tempfile makes of the prefix.

    The caller holds the lock under which they are made, so none of them is in use.
    """
    if fcntl is None:
        return
    name = re.compile(re.escape(prefix) + r"[a-z0-9_]{8}")
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if not name.fullmatch(path.name) or path.is_symlink():
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def check_hash(path: Path, lock: Lock) -> None:
    """SourceError unless the file can be read and its sha256 is the lock's."""
    try:
        have = sha256_file(path)
    except OSError as e:
        raise SourceError(f"{path}: can't be read: {e.strerror or e}") from e
    if have != lock.sha256:
        raise SourceError(
            f"{path}: wrong sha256, nothing was unpacked\n"
            f"  expected {lock.sha256} ({lock.name} {lock.version})\n"
            f"  found    {have}"
        )


def pip_command() -> Optional[List[str]]:
    """A pip that runs: this interpreter's, else one on the PATH."""
    # -I: inside an isolated build, PYTHONPATH hides the interpreter's own pip.
    tries = [[sys.executable, "-I", "-m", "pip"]]
    for name in ("python3", "python"):
        found = shutil.which(name)
        if found:
            tries.append([found, "-I", "-m", "pip"])
    for name in ("pip3", "pip"):
        found = shutil.which(name)
        if found:
            tries.append([found])
    for command in tries:
        try:
            done = subprocess.run(command + ["--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except OSError:
            continue
        if done.returncode == 0:
            return command
    return None


def run_loud(command: List[str], env: Dict[str, str]) -> Tuple[int, str]:
    """Run a command whose output goes to our stderr as it comes. Returns its exit code and the end of what it said."""
    said = b""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env=env) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            for block in iter(lambda: process.stdout.read1(1 << 16), b""):  # type: ignore[union-attr]
                said = (said + block)[-(1 << 16) :]
                with contextlib.suppress(OSError):
                    sys.stderr.buffer.write(block)
                    sys.stderr.buffer.flush()
        except BaseException:
            process.kill()
            raise
    return process.returncode, said.decode("utf-8", "replace")


def download(lock: Lock, folder: Path) -> Path:
    """Let pip get the source archive by name, version and hash into an empty folder."""
    pip = pip_command()
    way_out = (
        f"The way out: run this once with a connection, or get {lock.file} (sha256 {lock.sha256})\n"
        "elsewhere and set KVSPLIT_LLAMA_CPP_SDIST to its path."
    )
    if pip is None:
        raise SourceError(f"no pip to get {lock.name} {lock.version} with: python3 -m ensurepip\n{way_out}")
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{lock.name}=={lock.version} --hash=sha256:{lock.sha256}\n", encoding="utf-8")
    out = folder / "out"
    out.mkdir()
    note(f"getting {lock.name} {lock.version} (source, about 77 MB)")
    # --no-binary for this one name only: its build requirements may come as wheels.
    command = pip + ["download", "--require-hashes", "--no-deps", "--no-binary", lock.name]
    command += ["--dest", str(out), "-r", str(requirements)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("CMAKE_")}
    code, said = run_loud(command, env)
    if code != 0 and ("No space left" in said or "Disk quota" in said):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out / lock.file))
    if code != 0 and "DO NOT MATCH THE HASHES" in said:
        raise SourceError(
            f"{lock.name} {lock.version} of your package index is not the pinned file (pip's message stands above)\n"
            f"{way_out}"
        )
    if code != 0:
        raise SourceError(f"offline and not cached: {lock.name} {lock.version} (pip's message stands above)\n{way_out}")
    files = sorted(out.iterdir())
    if [f.name for f in files] != [lock.file]:
        raise SourceError(f"pip brought {[f.name for f in files]}, the lock says {lock.file}")
    return files[0]


def ensure_sdist(lock: Lock) -> Path:
    """Path of the checked source archive: the local one, the cached one, or a fresh download."""
    local = os.environ.get("KVSPLIT_LLAMA_CPP_SDIST")
    if local:
        path = Path(local).expanduser()
        if not path.is_file():
            raise SourceError(f"KVSPLIT_LLAMA_CPP_SDIST={local}: no such file")
        check_hash(path, lock)
        return path
    folder = cache_dir() / "sdist"
    target = folder / lock.file
    with contextlib.suppress(OSError):  # one that can't be read is told of below
        if target.is_file() and sha256_file(target) == lock.sha256:
            return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock"):
            if target.is_file():  # another process was faster, or the file is damaged
                if sha256_file(target) == lock.sha256:
                    return target
                note(f"{target}: damaged, getting it anew")
            remove_stale(folder, ".part-")
            work = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
            try:
                fresh = download(lock, work)
                check_hash(fresh, lock)
                os.replace(fresh, target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as e:
        raise SourceError(
            f"{folder}: can't write to the cache folder: {why(e)}\n"
            "The way out: set KVSPLIT_CACHE_DIR to a folder that you may write to, "
            f"or KVSPLIT_LLAMA_CPP_SDIST to a copy of {lock.file}."
        ) from e
    return target


def members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The archive's files with their one top folder taken off; SourceError on anything unsafe."""
    top: Optional[str] = None
    for m in archive:
        parts = PurePosixPath(m.name).parts
        if m.name.startswith("/") or "\\" in m.name or ".." in parts or not parts:
            raise SourceError(f"unsafe path in the archive: {m.name!r}")
        if top is None:
            top = parts[0]
        if parts[0] != top:
            raise SourceError(f"more than one top folder in the archive: {m.name!r}")
        if m.isdir():
            continue
        if not m.isreg():
            raise SourceError(f"neither a file nor a folder in the archive: {m.name!r}")
        if len(parts) == 1:
            raise SourceError(f"a file beside the top folder in the archive: {m.name!r}")
        # A submodule's pointer to a repository that isn't there makes every git command fail.
        if ".git" in parts:
            continue
        m.name = "/".join(parts[1:])
        yield m


def unpack(sdist: Path, lock: Lock, folder: Path) -> None:
    """Unpack a checked archive into a folder that exists and is empty, and leave the source stamp there."""
    files: Dict[str, str] = {}
    seen: Dict[str, List[object]] = {}
    try:
        with tarfile.open(sdist, "r:gz") as archive:
            for m in members(archive):
                source = archive.extractfile(m)
                assert source is not None  # members() yields regular files only
                with source:
                    data = source.read()
                path = folder / m.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                if m.mode & 0o100:
                    path.chmod(0o755)
                files[m.name] = sha256_bytes(data)
                st = path.stat()
                seen[m.name] = [st.st_size, st.st_mtime_ns, files[m.name]]
    except (tarfile.TarError, EOFError) as e:
        raise SourceError(f"{sdist}: not a usable source archive: {e}") from e
    if not files:
        raise SourceError(f"{sdist}: the archive is empty")
    stamp = {"name": lock.name, "version": lock.version, "sha256": lock.sha256, "files": files}
    (folder / MANIFEST).write_text(json.dumps({"files": seen}, sort_keys=True) + "\n", encoding="utf-8")
    (folder / SOURCE_STAMP).write_text(json.dumps(stamp, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def read_json(path: Path) -> Dict:
    """A JSON object, or {} if the file is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def edited_files(src: Path) -> List[str]:
    """Files of an unpacked tree that neither the archive nor scripts/patchq wrote as they are now."""
    known = {k: [v] for k, v in read_json(src / SOURCE_STAMP).get("files", {}).items()}
    for name, hashes in read_json(src / PATCH_STAMP).get("files", {}).items():
        known.setdefault(name, []).extend(hashes)
    changed = []
    for path in sorted(src.rglob("*")):
        name = path.relative_to(src).as_posix()
        if name.split("/")[0] in OURS or "__pycache__" in path.parts:
            continue
        if path.is_symlink() or (path.is_file() and sha256_file(path) not in known.get(name, [])):
            changed.append(name)
    return changed


def ensure_source(root: Path) -> Path:
    """vendor/src of the locked version, unpacked if need be.

    Raises SourceError if the archive can't be had or is wrong, or if a tree of another version
    holds changes that unpacking would lose.
    """
    lock = load_lock(root)
    src = root / "vendor" / "src"
    if read_json(src / SOURCE_STAMP).get("sha256") == lock.sha256:
        if any((root / "vendor").glob(".unpack-*")):
            with contextlib.suppress(OSError), locked(root / "vendor" / ".lock"):
                remove_stale(root / "vendor", ".unpack-")
        return src
    sdist = ensure_sdist(lock)
    try:
        with locked(root / "vendor" / ".lock"):
            remove_stale(root / "vendor", ".unpack-")
            if read_json(src / SOURCE_STAMP).get("sha256") == lock.sha256:
                return src
            if src.exists():
                changed = edited_files(src)
                if changed:
                    shown = "\n".join(f"  {name}" for name in changed[:20])
                    raise SourceError(
                        f"{src} holds another version, and files in it that were made or edited by hand:\n{shown}\n"
                        f"Move {src} away to keep them, then run this again.",
                        EXIT_EDITED,
                    )
            work = Path(tempfile.mkdtemp(prefix=".unpack-", dir=root / "vendor"))
            try:
                note(f"unpacking {lock.name} {lock.version} to {src}")
                fresh = work / "src"
                fresh.mkdir()
                unpack(sdist, lock, fresh)
                if src.exists():
                    os.replace(src, work / "old")
                os.replace(fresh, src)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as e:
        raise SourceError(f"{root / 'vendor'}: can't unpack the source: {why(e)}") from e
    return src


def main(argv: Optional[List[str]] = None) -> int:
    doc = __doc__ or ""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="project folder")
    parser.add_argument("--sdist-only", action="store_true", help="don't unpack; print the archive's path")
    try:
        args = parser.parse_args(argv)
    except SystemExit as e:
        return EXIT_USAGE if e.code else EXIT_OK

    def body() -> int:
        root = args.root.resolve()
        print(ensure_sdist(load_lock(root)) if args.sdist_only else ensure_source(root))
        return EXIT_OK

    return ending(body)


if __name__ == "__main__":
    sys.exit(main())
