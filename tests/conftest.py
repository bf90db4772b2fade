# SPDX-License-Identifier: MIT
"""Fixtures that all Python tests share: native libraries and tools, real models, synthetic models.

What is missing is a skip with its reason; with KVSPLIT_REQUIRE=1 it is a failure.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

import pytest

REPO = Path(__file__).resolve().parent.parent
try:
    import kvsplit  # noqa: F401
except ImportError:
    sys.path.insert(0, str(REPO / "python"))
sys.path.insert(0, str(REPO / "tests" / "python"))

import synth  # noqa: E402

# A clone's own build is what its tests are about.
if "KVSPLIT_NATIVE_DIR" not in os.environ and (REPO / "build" / "bin").is_dir():
    os.environ["KVSPLIT_NATIVE_DIR"] = str(REPO / "build")

REQUIRE = os.environ.get("KVSPLIT_REQUIRE", "") not in ("", "0")


def missing(reason: str) -> None:
    """Skip, or fail where nothing may be missing."""
    if REQUIRE:
        pytest.fail(f"required by KVSPLIT_REQUIRE: {reason}", pytrace=False)
    pytest.skip(reason)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "native: needs the native libraries or tools")
    config.addinivalue_line("markers", "model: needs a real model")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    config.addinivalue_line("markers", "hours: takes an hour or more")


def _native_reason() -> Optional[str]:
    from kvsplit import errors, native

    try:
        native.load()
    except errors.NativeError as e:
        return str(e)
    return None


@pytest.fixture(scope="session")
def native_reason() -> Optional[str]:
    """None if the native libraries can be used, else why not."""
    return _native_reason()


@pytest.fixture(autouse=True)
def _native_marker(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("native"):
        reason = request.getfixturevalue("native_reason")
        if reason:
            missing(f"no native libraries: {reason}")


@pytest.fixture(scope="session")
def repo() -> Path:
    """Root of the source tree."""
    return REPO


@pytest.fixture(scope="session")
def tool() -> Callable[[str], Path]:
    """Path of a native tool by name; skips when it isn't built."""
    from kvsplit import errors, tools

    def find(name: str) -> Path:
        try:
            return tools.find(name)
        except errors.NativeError as e:
            missing(str(e))
            raise AssertionError("unreachable") from e

    return find


@pytest.fixture(scope="session")
def run_tool(tool: Callable[[str], Path]) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Run a native tool, output captured as text; never raises on its exit status."""

    def run(name: str, *args: Any, timeout: float = 300, env: Optional[Dict[str, str]] = None, **kw: Any) -> Any:
        e = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_ARG_")}
        e.update(env or {})
        return subprocess.run(
            [str(tool(name)), *[str(a) for a in args]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=e,
            check=False,
            **kw,
        )

    return run


def _model(name: str) -> Path:
    from kvsplit import errors, models

    try:
        return models.ensure(name, quiet=True)
    except errors.KVSplitError as e:
        missing(f"model {name}: {e}")
        raise AssertionError("unreachable") from e


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, a real model with 30 layers and 3 KV heads of 64 values."""
    return _model("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma-3-270M, a real model with sliding-window layers."""
    return _model("gemma3-270m")


@pytest.fixture(scope="session")
def eval_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text to evaluate on: the file that KVSPLIT_TEXT names, else one that every Python carries."""
    env = os.environ.get("KVSPLIT_TEXT")
    if env and Path(env).is_file():
        return Path(env)
    from kvsplit import quality

    return quality.default_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def synth_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make (once a shape) a random-weight model: ``synth_model(n_layer=2, head_k=80, tokenizer=path)``."""
    folder = tmp_path_factory.mktemp("synth")
    made: Dict[str, Path] = {}

    def make(tokenizer: Optional[Path] = None, **shape: Any) -> Path:
        s = synth.Shape(**shape)
        key = hashlib.sha256(f"{s}{tokenizer}".encode()).hexdigest()[:16]
        if key not in made:
            made[key] = synth.write_model(folder / f"{key}.gguf", s, tokenizer)
        return made[key]

    return make


@pytest.fixture
def clean_env(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The environment without settings of this project or of llama.cpp."""
    names: List[str] = [k for k in os.environ if k.startswith(("KVSPLIT_", "LLAMA_ARG_"))]
    for k in names:
        monkeypatch.delenv(k)
    yield monkeypatch
