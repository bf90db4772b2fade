# SPDX-License-Identifier: MIT
"""Perplexity and KL divergence, from llama-perplexity.

The f16 run writes the log-probabilities of every token once; every configuration, f16 included, is then
held against them. f16 against itself is the floor below which a difference means nothing.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import struct
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from kvsplit import tools
from kvsplit.errors import CacheFolderError, NotFiniteError, ResultError, UsageError, why
from kvsplit.gguf_meta import GGUFInfo
from kvsplit.models import sha256_file
from kvsplit.policy import F16, KVQuant
from kvsplit.speed import kvq_args

if sys.platform != "win32":
    import fcntl

# llama-perplexity prints no statistics for fewer tokens
_MIN_TOKENS = 100


@dataclass(frozen=True)
class Text:
    """Text to evaluate on.

    Attributes:
        path: UTF-8 file.
        name: what outputs call it.
        sha256: of the file.
    """

    path: Path
    name: str
    sha256: str


def default_text(folder: Path) -> Path:
    """Write the text that every Python carries (the topics of its help) and return its path."""
    from pydoc_data import topics

    pieces: List[str] = [str(topics.topics[k]) for k in sorted(topics.topics)]
    path = folder / f"pydoc-topics-{sys.version_info[0]}.{sys.version_info[1]}.txt"
    path.write_text("\n\n".join(pieces), encoding="utf-8")
    return path


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Errors of the system become ours, with the way out."""
    try:
        yield
    except OSError as e:
        raise CacheFolderError(f"{path} can't be written ({why(e)}); set TMPDIR to a folder that can") from None


@contextmanager
def _temporary(prefix: str, folder: Optional[Path] = None) -> Iterator[Path]:
    """A temporary folder.

    Raises:
        CacheFolderError: there is no place for one.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix=prefix, dir=folder)
    except OSError as e:
        raise CacheFolderError(
            f"no temporary folder can be made ({why(e)}); set TMPDIR to a folder that can be written"
        ) from None
    with made as tmp:
        yield Path(tmp)


@contextmanager
def text_file(given: Optional[Path]) -> Iterator[Text]:
    """The text to use: a given file, or the default in a temporary one.

    Raises:
        UsageError: the file can't be read or isn't UTF-8.
        CacheFolderError: there is no place for a temporary one.
    """
    if given is not None:
        try:
            data = given.read_bytes()
            data.decode("utf-8")
        except UnicodeDecodeError as e:
            raise UsageError(f"--text: {given} is not UTF-8 text ({e.reason} at byte {e.start})") from None
        except OSError as e:
            raise UsageError(f"--text: {given} can't be read ({why(e)})") from None
        sha256 = hashlib.sha256(data).hexdigest()
        if given.is_file():
            yield Text(given, given.name, sha256)
            return
        with _temporary("kvsplit-text-") as tmp:  # a pipe can be read only once
            path = tmp / "text.txt"
            with _writing(path):
                path.write_bytes(data)
            yield Text(path, given.name, sha256)
        return
    with _temporary("kvsplit-text-") as tmp:
        with _writing(tmp):
            path = default_text(tmp)
        yield Text(path, f"pydoc_data.topics of Python {sys.version.split()[0]}", sha256_file(path))


@dataclass(frozen=True)
class QualityPlan:
    """What to measure.

    Attributes:
        ppl_ctx: tokens of a chunk; the second half of each is scored.
        chunks: chunks.
        n_threads: threads; None lets the tool choose.
        device: see :func:`kvsplit.tools.device_args`.
    """

    ppl_ctx: int = 2048
    chunks: int = 8
    n_threads: Optional[int] = None
    device: str = "auto"

    @property
    def scored(self) -> int:
        """Tokens that are scored."""
        return self.chunks * (self.ppl_ctx - 1 - self.ppl_ctx // 2)


@dataclass(frozen=True)
class Quality:
    """Statistics of one configuration against the f16 base; KLD in nats, top1 as a share.

    ``ppl_se`` and the other ``_se`` are standard errors as llama-perplexity gives them.
    """

    ppl: float
    ppl_se: float
    ppl_base: float
    ppl_base_se: float
    ppl_ratio: float
    ppl_ratio_se: float
    kld: float
    kld_se: float
    kld_max: float
    kld_p999: float
    kld_median: float
    top1: float
    top1_se: float


_NUM = r"([-+]?(?:[0-9.]+(?:e[-+]?[0-9]+)?|nan|inf))"
_PAIR = _NUM + r"\s*(?:±|\+/-|\ufffd+)\s*" + _NUM


def _pair(text: str, label: str) -> List[float]:
    m = re.search(r"^\s*" + label + r"\s*:\s*" + _PAIR, text, re.MULTILINE)
    if m is None:
        raise KeyError(label)
    return [float(m.group(1)), float(m.group(2))]


def _one(text: str, label: str) -> float:
    m = re.search(r"^\s*" + label + r"\s*:\s*" + _NUM, text, re.MULTILINE)
    if m is None:
        raise KeyError(label)
    return float(m.group(1))


def parse(output: str) -> Quality:
    """The statistics that ``llama-perplexity --kl-divergence`` prints at its end (it has no other format).

    Raises:
        ResultError: they aren't all there; the tool ends with status 0 even when it gave up.
        NotFiniteError: they are there, and PPL or KLD is no finite number.
    """
    at = output.rfind("====== Perplexity statistics")
    tail = output[at:] if at >= 0 else ""
    try:
        ppl = _pair(tail, r"Mean PPL\(Q\)")
        base = _pair(tail, r"Mean PPL\(base\)")
        ratio = _pair(tail, r"Mean PPL\(Q\)/PPL\(base\)")
        kld = _pair(tail, r"Mean\s+KLD")
        top = _pair(tail, r"Same top p")
        res = Quality(
            ppl=ppl[0],
            ppl_se=ppl[1],
            ppl_base=base[0],
            ppl_base_se=base[1],
            ppl_ratio=ratio[0],
            # the root of a difference that rounding can make negative when two runs are equal
            ppl_ratio_se=0.0 if math.isnan(ratio[1]) else ratio[1],
            kld=kld[0],
            kld_se=kld[1],
            kld_max=_one(tail, r"Maximum\s+KLD"),
            kld_p999=_one(tail, r"99\.9%\s+KLD"),
            kld_median=_one(tail, r"Median\s+KLD"),
            top1=top[0] / 100,
            top1_se=top[1] / 100,
        )
    except KeyError as e:
        raise ResultError(
            f"llama-perplexity gave no result: {e.args[0]} is missing\n{_reason(output)}".rstrip()
        ) from None
    if not (math.isfinite(res.ppl) and math.isfinite(res.kld)):
        raise NotFiniteError("llama-perplexity gave NaN: attention broke down under this configuration")
    return res


# the columns are PPL, ln of its ratio, KLD, RMS of the change of p, same top: each value +- its error
_CHUNK = re.compile(rf"^\s*(\d+)\s+{_PAIR}\s+{_PAIR}\s+{_PAIR}\s", re.MULTILINE)


def _by_chunk(running: Sequence[float]) -> List[float]:
    """Each chunk's own mean from the means of the chunks 1 to n: n * mean[n] - (n - 1) * mean[n - 1]."""
    before = [0.0, *running]
    return [round(n * before[n] - (n - 1) * before[n - 1], 8) for n in range(1, len(before))]


def _running(output: str) -> List[Tuple[float, float]]:
    """PPL and mean KLD over the chunks 1 to n, as they are printed.

    Raises:
        ResultError: no chunk, or one that is out of order.
    """
    found: List[Tuple[float, float]] = []
    for m in _CHUNK.finditer(output):
        if int(m.group(1)) != len(found) + 1:
            raise ResultError(f"llama-perplexity printed chunk {m.group(1)} after chunk {len(found)}")
        found.append((float(m.group(2)), float(m.group(6))))
    if not found:
        raise ResultError("llama-perplexity printed no chunk")
    return found


def chunk_klds(output: str, mean: Optional[float] = None) -> List[float]:
    """Mean KL divergence of each chunk, from the running means that llama-perplexity prints.

    They have 5 decimals. A rounding has a standard deviation of 1e-5 / sqrt(12), so chunk n has one of about
    4e-6 * n. In the mean of N chunks all this cancels, up to the rounding of the last, which is known better.

    Args:
        output: what it printed.
        mean: the mean of all chunks, which the statistics at the end give with one digit more.

    Returns:
        In nats, one a chunk.

    Raises:
        ResultError: no chunk, or one that is out of order.
    """
    running = [kld for _, kld in _running(output)]
    if mean is not None:
        if abs(running[-1] - mean) > 1.1e-5:  # both are rounded
            raise ResultError(f"llama-perplexity's last chunk has the mean KLD {running[-1]}, the statistics {mean}")
        running[-1] = mean
    return _by_chunk(running)


def chunk_nlls(output: str, ppl: Optional[float] = None) -> List[float]:
    """Mean negative log-likelihood of each chunk, from the running perplexities that llama-perplexity prints.

    They have 4 decimals, so their logarithms are exact to 3e-5 / PPL and chunk n to about 4e-5 * n / PPL
    (standard deviations); as with :func:`chunk_klds` this cancels in a mean over chunks.

    Args:
        output: what it printed.
        ppl: of all chunks, which the statistics at the end give with two digits more.

    Returns:
        In nats a token, one a chunk.

    Raises:
        ResultError: no chunk, or one that is out of order.
    """
    running = [p for p, _ in _running(output)]
    if ppl is not None:
        if abs(running[-1] - ppl) > 1.1e-4:
            raise ResultError(f"llama-perplexity's last chunk has the PPL {running[-1]}, the statistics {ppl}")
        running[-1] = ppl
    return _by_chunk([math.log(p) for p in running])


def _reason(output: str) -> str:
    """What the tool says about its failure, without its time stamps."""
    lines = [re.sub(r"^[0-9.]+ [IWE] ", "", s).strip() for s in output.splitlines()]
    told = [s for s in lines if re.search(r"error|fail|need at least|tokenizes to|NaN", s, re.IGNORECASE)]
    return "\n".join((told or [s for s in lines if s])[-4:])


def n_vocab(info: GGUFInfo) -> int:
    """Tokens in a model's vocabulary; 0 if unknown."""
    return info.array_lengths.get("tokenizer.ggml.tokens", 0)


def base_bytes(plan: QualityPlan, vocab: int) -> int:
    """Size of the file of log-probabilities: 16 bits for each token of the vocabulary and scored token."""
    row = 2 * (2 * ((vocab + 1) // 2) + 4)
    return 20 + 4 * plan.ppl_ctx * plan.chunks + plan.scored * row


def check(plan: QualityPlan, text: Text) -> None:
    """Refuse what can't give a result.

    Raises:
        UsageError: too few tokens are scored, or the text is too short for a chunk.
    """
    if plan.scored < _MIN_TOKENS:
        raise UsageError(
            f"--ppl-ctx {plan.ppl_ctx} with --chunks {plan.chunks} scores {plan.scored} tokens, "
            f"at least {_MIN_TOKENS} are needed"
        )
    size = text.path.stat().st_size
    if size < 2 * plan.ppl_ctx:  # a token is rarely shorter than a byte
        raise UsageError(f"--text: {text.name} has {size} bytes, too few for chunks of {plan.ppl_ctx} tokens")
    if size < plan.chunks * plan.ppl_ctx:
        raise UsageError(
            f"--chunks: {text.name} has {size} bytes, too few for {plan.chunks} chunks of {plan.ppl_ctx} tokens"
        )


def _args(model: Path, quant: KVQuant, plan: QualityPlan) -> List[str]:
    args = ["-m", str(model), "-c", str(plan.ppl_ctx), "-fa", "on", *kvq_args(quant), *tools.device_args(plan.device)]
    if plan.n_threads is not None:
        args += ["-t", str(plan.n_threads)]
    return args


_BASE = "kvsplit-base-"


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Hold a lock in a temporary folder as long as we live: a kill leaves the folder, and takes the lock."""
    with open(folder / "lock", "wb") as f:
        if sys.platform != "win32":
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _remove_orphans(folder: Path) -> None:
    """Remove bases of runs that were killed: they can take gigabytes, and nobody else knows what they are."""
    if sys.platform == "win32":
        return
    for old in folder.glob(f"{_BASE}*"):
        with suppress(OSError), open(old / "lock", "rb") as f:  # no lock yet: it is being made
            if time.time() - os.fstat(f.fileno()).st_mtime < 10:  # or not yet locked
                continue
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            names = {p.name for p in old.iterdir()}
            if names <= {"f16.kld", "lock"}:  # what we put there; anything else is somebody's
                for name in names:
                    (old / name).unlink()
                old.rmdir()


@contextmanager
def base_file(
    model: Path, info: GGUFInfo, text: Text, plan: QualityPlan, folder: Optional[Path] = None
) -> Iterator[Path]:
    """Write the f16 base into a temporary file, which is removed in the end.

    Args:
        model, info: the model and its metadata.
        text, plan: what to evaluate.
        folder: where the temporary file goes; None means the system's.

    Raises:
        CacheFolderError: the disk is too small for it.
        ToolError, ResultError: llama-perplexity failed.
    """
    check(plan, text)
    with suppress(FileNotFoundError):  # no temporary folder at all: said below
        _remove_orphans(Path(folder or tempfile.gettempdir()))
    with _temporary(_BASE, folder) as tmp, _owned(tmp):
        need = base_bytes(plan, n_vocab(info))
        free = shutil.disk_usage(tmp).free
        if free < need + (64 << 20):
            raise CacheFolderError(
                f"the f16 base needs {need >> 20} MiB in {tmp}, {free >> 20} MiB are free; "
                "use fewer --chunks, a smaller --ppl-ctx, or set TMPDIR to another disk"
            )
        path = tmp / "f16.kld"
        args = _args(model, F16, plan) + ["-f", str(text.path), "--chunks", str(plan.chunks)]
        res = tools.run("llama-perplexity", [*args, "--kl-divergence-base", str(path)])
        if not path.is_file() or path.stat().st_size < need // 2:
            raise ResultError(
                f"llama-perplexity wrote no f16 base\n{_reason(res.stderr + res.stdout)}\n"
                f"the text {text.name} may be too short for --ppl-ctx {plan.ppl_ctx}"
            )
        # the tool doesn't notice that a disk got full: half a base would be held against whole ones
        have, want = path.stat().st_size, _base_size(path)
        if have < want:
            raise CacheFolderError(
                f"{path} has {have} bytes of {want}: disk full while llama-perplexity wrote the f16 base; "
                "use fewer --chunks, a smaller --ppl-ctx, or set TMPDIR to another disk"
            )
        _as_asked(F16, res.stderr)
        yield path


def _base_head(path: Path) -> Tuple[int, int, int]:
    """What a base file holds: after the mark of 8 bytes come tokens of a chunk, vocabulary and chunks, 32 bits each."""
    with open(path, "rb") as f:
        head = f.read(20)
    if len(head) < 20 or head[:8] != b"_logits_":
        raise ResultError("llama-perplexity wrote an f16 base of another form than this version reads")
    n_ctx, vocab, chunks = struct.unpack("<3i", head[8:])
    return int(n_ctx), int(vocab), int(chunks)


def base_chunks(path: Path) -> int:
    """Chunks in a base file."""
    return _base_head(path)[2]


def _base_size(path: Path) -> int:
    """Bytes that a base file must have by its own head."""
    n_ctx, vocab, chunks = _base_head(path)
    return base_bytes(QualityPlan(n_ctx, chunks), vocab)


# what a tool says at start of the types that its context stores, per kind of layer
_STORED = re.compile(r"kvq: K (\S+) \([\d.]+ bits\)(?:, V (\S+) \([\d.]+ bits\)|[^;]*); layers? ([\d,-]+);")


def _as_asked(quant: KVQuant, stderr: str) -> None:
    """Hold the types that a tool's own context stores to those that were asked for; MLA stores no values.

    Raises:
        ResultError: a layer has others, or the tool doesn't tell.
    """
    stored: Dict[int, Tuple[str, Optional[str]]] = {}
    for key, val, layers in _STORED.findall(stderr):
        for part in layers.split(","):
            first, _, last = part.partition("-")
            for i in range(int(first), int(last or first) + 1):
                stored.setdefault(i, (key, val or None))  # an indexer's second cache comes later
    if not stored:
        raise ResultError("llama-perplexity doesn't tell which types its context stores; it isn't this build's")
    for i, asked in enumerate(quant.types(len(stored))):
        key, value = stored.get(i, ("none", "none"))
        if (key, value or asked[1]) != asked:
            raise ResultError(
                f"layer {i} was asked to store {'/'.join(asked)}, llama-perplexity stores {key}/{value or asked[1]}"
            )


def output(model: Path, quant: KVQuant, base: Path, plan: QualityPlan) -> str:
    """What llama-perplexity prints when it holds one configuration against the base.

    Raises:
        ToolError: llama-perplexity failed.
        ResultError: its own context stored other types than were asked for.
    """
    args = [*_args(model, quant, plan), "--kl-divergence", "--kl-divergence-base", str(base)]
    res = tools.run("llama-perplexity", args)
    _as_asked(quant, res.stderr)
    return res.stdout if "====== Perplexity statistics" in res.stdout else res.stdout + res.stderr


def measure(model: Path, quant: KVQuant, base: Path, plan: QualityPlan) -> Quality:
    """Hold one configuration against the base.

    Raises:
        ToolError: llama-perplexity failed.
        ResultError: it printed no statistics.
    """
    return parse(output(model, quant, base, plan))


def run(
    model: Path,
    info: GGUFInfo,
    quants: Sequence[KVQuant],
    text: Text,
    plan: QualityPlan,
    *,
    step: Callable[[str], None] = lambda what: None,
) -> List[Quality]:
    """All configurations against one base, in their order."""
    step("quality, f16 base")
    out: List[Quality] = []
    with base_file(model, info, text, plan) as base:
        for quant in quants:
            step(f"quality {quant.label}")
            out.append(measure(model, quant, base, plan))
    return out
