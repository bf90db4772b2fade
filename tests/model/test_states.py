# SPDX-License-Identifier: MIT
"""Saved states: the C++ test on caches of several kinds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Callable, Dict

import pytest

pytestmark = [pytest.mark.native, pytest.mark.model]

POLICIES = ["q8_0", "kvq4", "kvq4", "q8_0", "f16", "f16", "q8_0", "f16", "kvq4,:1=q8_0", "kvq3,-1=f16", "q5_1", "q4_1"]

SHAPES: Dict[str, Dict[str, Any]] = {
    "head-64": {"n_layer": 3},
    "head-96": {"n_layer": 2, "head_k": 96},  # stored without a rotation
    "two-caches": {"arch": "gemma3", "n_layer": 4, "pattern": 2},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_saved_states(
    tool: Callable[[str], Path], synth_model: Callable[..., Path], tmp_path: Path, shape: str
) -> None:
    model = synth_model(**SHAPES[shape])
    # root, whom modes don't bind, as a user whom they do
    obeys = (
        ["setpriv", "--inh-caps=-all", "--bounding-set=-all"] if os.geteuid() == 0 and shutil.which("setpriv") else []
    )
    done = subprocess.run(
        [*obeys, str(tool("test-kvq-state")), str(model), str(tmp_path), *POLICIES],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    last = re.search(
        r"^test-kvq-state: (\d+) passed, 0 failed; (\d+) hostile states refused$", done.stdout, re.MULTILINE
    )
    assert last and done.returncode == 0, done.stdout[-4000:]
    assert "modes were tried" in done.stdout or (os.geteuid() == 0 and not obeys)
    # bytes of the beginnings of six states at the least
    assert int(last[1]) > 1000 and int(last[2]) > 1000
