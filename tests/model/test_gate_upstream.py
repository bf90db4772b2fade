# SPDX-License-Identifier: MIT
"""Without a quantized cache the patched tools say what unpatched ones say, token for token.

KVSPLIT_UPSTREAM_DIR names an unpatched build made on this machine: `make build-upstream` makes it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Callable, List

import pytest

pytestmark = [pytest.mark.native, pytest.mark.model, pytest.mark.slow]

SENTENCE = (
    "On day {} the river rose by {} centimetres, and the people in village number {} moved their sheep to the hills. "
)
PROMPTS = {
    "short": "The capital of France is",
    "code": "def fibonacci(n):\n    ",
    # several batches of 512 tokens, and beyond the window of 512 that Gemma's layers slide
    "long": "".join(SENTENCE.format(i, 7 * i % 31, i % 5) for i in range(1, 41)) + "In short, the story is about",
}


def missing(reason: str) -> None:
    """Skip, or fail where nothing may be missing."""
    if os.environ.get("KVSPLIT_REQUIRE", "") not in ("", "0"):
        pytest.fail(f"required by KVSPLIT_REQUIRE: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def upstream() -> Path:
    """llama-completion as upstream builds it."""
    folder = os.environ.get("KVSPLIT_UPSTREAM_DIR", "")
    if not folder:
        missing("KVSPLIT_UPSTREAM_DIR is not set: `make build-upstream` makes an unpatched build")
    for path in (Path(folder) / "bin" / "llama-completion", Path(folder) / "llama-completion"):
        if path.is_file():
            return path.resolve()
    missing(f"there is no llama-completion in {folder}")
    raise AssertionError("unreachable")


def tokens(program: Path, model: Path, prompt: Path, args: List[str]) -> bytes:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "LD_LIBRARY_PATH"))}
    command = [str(program), "-m", str(model), "-f", str(prompt), "-c", "4096", "-n", "64", "-t", "1", "-s", "1"]
    command += ["--temp", "0", "-no-cnv", "--no-display-prompt", *args]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=env, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:].decode("utf-8", "replace")
    return done.stdout


def test_the_other_build_is_unpatched(upstream: Path) -> None:
    done = subprocess.run([str(upstream), "--help"], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 0 and b"--cache-type-k" in done.stdout and b"--kvq" not in done.stdout


SETTINGS = ["-fa off", "-ctk f32 -ctv bf16", "-b 64 -ub 32"]


@pytest.mark.parametrize(
    "prompt, args", [(p, "") for p in PROMPTS] + [(p, a) for p in ("short", "long") for a in SETTINGS]
)
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_greedy_output_is_the_same(
    request: pytest.FixtureRequest,
    upstream: Path,
    tool: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    prompt: str,
    args: str,
) -> None:
    model: Path = request.getfixturevalue(name)
    text = tmp_path / "prompt.txt"
    text.write_text(PROMPTS[prompt], encoding="utf-8")
    theirs = tokens(upstream, model, text, args.split())
    ours = tokens(tool("llama-completion"), model, text, args.split())
    assert ours == theirs
    assert len(ours.split()) > 8, ours
