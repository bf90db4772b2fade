# SPDX-License-Identifier: MIT
"""pytest plugin for llama-cpp-python's own tests: models from this machine in place of a hub's.

A test that any transformer can serve gets the real model that KVSPLIT_TEST_MODEL names.
One that expects tokens of its own model, or another kind of model, is skipped with the reason.
"""

from __future__ import annotations

import os

import huggingface_hub
import pytest

# Tests that use the 0.8B model only as a model that can finish a well-known sentence, and the 15M transformer.
ANY_TRANSFORMER = ("tinyllamas/stories15M-q4_0.gguf",)
ANY_TRANSFORMER_TESTS = ("test_real_llama", "test_real_llama_repeated_prompt_cache")


class HubModels:
    """Answers hf_hub_download for the test that is running."""

    def __init__(self) -> None:
        self.test = ""
        huggingface_hub.hf_hub_download = self.download

    def download(self, repo_id: str, filename: str, **_options: object) -> str:
        local = os.environ.get("KVSPLIT_TEST_MODEL", "")
        if filename in ANY_TRANSFORMER or self.test in ANY_TRANSFORMER_TESTS:
            if os.path.isfile(local):
                return local
            pytest.skip("KVSPLIT_TEST_MODEL names no model file")
        pytest.skip(f"needs {repo_id}/{filename} from a hub")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.test = item.name


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(HubModels(), "kvsplit-hub-models")
