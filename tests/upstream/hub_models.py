# SPDX-License-Identifier: MIT
"""pytest plugin for llama-cpp-python's own tests: models from this machine in place of a hub's.

A test that any transformer can serve gets the real model that KVSPLIT_TEST_MODEL names.
One that expects tokens of its own model, or another kind of model, is skipped with the reason.
"""

from __future__ import annotations

import os

import huggingface_hub
import pytest

# The model of the tests that any transformer can serve.
ANY_TRANSFORMER = ("tinyllamas/stories15M-q4_0.gguf",)


def download(repo_id: str, filename: str, **_options: object) -> str:
    """What hf_hub_download answers: the path of a local model, or a skip."""
    if filename not in ANY_TRANSFORMER:
        pytest.skip(f"needs {repo_id}/{filename} from a hub")
    local = os.environ.get("KVSPLIT_TEST_MODEL", "")
    if not os.path.isfile(local):
        pytest.skip("KVSPLIT_TEST_MODEL names no model file")
    return local


huggingface_hub.hf_hub_download = download
