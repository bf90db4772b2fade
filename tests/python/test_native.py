# SPDX-License-Identifier: MIT
"""The native library against its Python mirror: lock, table, grammar."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Callable

import pytest
from grammar import specs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsplit import _lock, native, tools
from kvsplit.cache_types import BITS, BY_NAME, CACHE_TYPES, POLICY_BASE
from kvsplit.errors import KVQuantError, NativeMismatchError, NativeMissingError, ToolError
from kvsplit.policy import KVQuant, Spec


def test_package_lock_is_the_vendored_one(repo: Path) -> None:
    text = (repo / "vendor" / "llama_cpp.lock").read_text(encoding="utf-8")
    lock = dict(re.findall(r"^(\w+)\s*=\s*(\S+)$", text, re.MULTILINE))
    assert (lock["name"], lock["version"], lock["sha256"]) == (_lock.NAME, _lock.VERSION, _lock.SHA256)


def test_block_sizes_are_those_of_gguf() -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    upstream = [t for t in CACHE_TYPES if not t.name.startswith("kvq")]
    assert len(upstream) == 9
    for t in upstream:
        kind = GGMLQuantizationType[t.name.upper()]
        assert (int(kind), *GGML_QUANT_SIZES[kind]) == (t.ggml_id, t.block, t.bytes)


def test_block_sizes_of_our_formats_are_their_bits() -> None:
    ours = [t for t in CACHE_TYPES if t.name.startswith("kvq")]
    assert sorted(t.name for t in ours) == ["kvq2", "kvq3", "kvq4", "kvq5", "kvq6"]
    for t in ours:
        bits = int(t.name[-1])
        # 32 values and a scale of 16 bits; ids are permanent
        assert (t.ggml_id, t.block, 8 * t.bytes) == (448 + bits, 32, 32 * bits + 16)


def test_missing_natives_say_where_they_were_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVSPLIT_NATIVE_DIR", str(tmp_path))
    with pytest.raises(NativeMissingError, match=re.escape(str(tmp_path))):
        native.library_path()
    with pytest.raises(NativeMissingError, match="llama-bench.*KVSPLIT_NATIVE_DIR"):
        tools.find("llama-bench")


def test_bindings_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.importlib.metadata, "version", lambda name: "0.3.0")
    with pytest.raises(NativeMismatchError, match=rf"0\.3\.0.*{re.escape(_lock.VERSION)}"):
        native._check_bindings()


def test_failures_of_tools_tell_the_signal() -> None:
    with pytest.raises(ToolError, match="SIGKILL") as e:
        tools.run_command([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], "it")
    assert e.value.returncode == -9
    with pytest.raises(ToolError, match="exit code 3\nwhy"):
        tools.run_command([sys.executable, "-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"], "it")


def test_much_output_on_both_streams_does_not_block() -> None:
    code = "import sys\nfor i in range(20000): print('x' * 20); print('y' * 20, file=sys.stderr)"
    res = tools.run_command([sys.executable, "-c", code], "it")
    assert len(res.stdout) == len(res.stderr) == 20000 * 21
    if sys.platform != "win32":
        assert res.peak_rss is not None and res.peak_rss > 1 << 20


@pytest.mark.native
def test_build_is_the_locked_one() -> None:
    build = native.load().build
    assert (build.version, build.source_sha256) == (_lock.VERSION, _lock.SHA256)
    assert re.fullmatch(r"[0-9a-f]{64}", build.patches_sha256)


@pytest.mark.native
def test_a_library_of_another_lock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = native.load().path
    monkeypatch.setattr(_lock, "VERSION", "9.9.9")
    with pytest.raises(NativeMismatchError, match=r"0\.3\.36.*9\.9\.9"):
        native.Native(path)


@pytest.mark.native
def test_a_library_of_other_patches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = native.load().path
    monkeypatch.setattr(native, "expected_patches", lambda: "0" * 64)
    with pytest.raises(NativeMismatchError, match="0{64}"):
        native.Native(path)


def test_a_library_without_the_functions_is_refused() -> None:
    with pytest.raises(NativeMismatchError, match="patches"):
        native.Native(Path(_any_library()))


def _any_library() -> str:
    import _ctypes

    return str(_ctypes.__file__)


@pytest.mark.native
def test_table_is_the_librarys() -> None:
    lib = native.load()
    assert [(t, lib.type_name(t)) for t in lib.cache_types()] == [(t.ggml_id, t.name) for t in CACHE_TYPES]
    for bits, name in BITS.items():
        assert lib.type_name(lib.handle(str(bits))) == name


@pytest.mark.native
def test_handles_are_above_all_types() -> None:
    lib = native.load()
    h = lib.handle("4,:2=8")
    assert h >= POLICY_BASE and h == lib.handle(" 4 , :2 = Q8_0")
    assert lib.type_name(h) == "kvq4,:2=q8_0"
    assert lib.handle("8") != 8


@pytest.mark.native
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs(), st.integers(1, 40))
def test_grammar_is_the_librarys(text: str, n_layer: int) -> None:
    lib = native.load()
    spec = Spec.parse(text)
    handle = lib.handle(text)
    assert lib.type_name(handle) == spec.text()
    try:
        want = spec.types(n_layer)
    except KVQuantError as e:
        with pytest.raises(KVQuantError) as native_error:
            lib.resolve(handle, n_layer)
        named = re.search(r"slice '[^']*'", str(e))
        assert named is not None and named.group(0) in str(native_error.value)
        return
    assert lib.resolve(handle, n_layer) == want


_alphabet = st.text(alphabet="0123456789,:=- kvqf_", max_size=14)


@pytest.mark.native
@settings(max_examples=500, deadline=None)
@given(_alphabet)
def test_both_refuse_the_same_specs(text: str) -> None:
    lib = native.load()
    try:
        want = Spec.parse(text).text()
    except KVQuantError:
        with pytest.raises(KVQuantError):
            lib.handle(text)
        return
    assert lib.type_name(lib.handle(text)) == want


@pytest.mark.native
@settings(max_examples=300, deadline=None)
@given(st.one_of(_alphabet, st.from_regex(r"[kK][0-9]{1,2}[vV][0-9]{1,2}", fullmatch=True)))
def test_both_refuse_the_same_presets(text: str) -> None:
    lib = native.load()
    try:
        q = KVQuant.parse(text)
    except KVQuantError:
        with pytest.raises(KVQuantError):
            lib.preset(text)
        return
    k, v = lib.preset(text)
    assert (lib.type_name(k), lib.type_name(v)) == (q.key, q.val)


@pytest.mark.native
def test_layout_of_the_layer_struct(synth_model: Callable[..., Path]) -> None:
    from kvsplit import Llama

    llm = Llama(synth_model(n_layer=3, n_head_kv=2, head_k=64), kvq="k8v4", n_ctx=256, verbose=False)
    layers = llm.kv_cache.layers
    llm.close()
    assert [x.il for x in layers] == [x.index for x in layers] == [0, 1, 2]
    assert {(x.n_cells, x.n_head_kv, x.head_k, x.head_v, x.type_k, x.type_v) for x in layers} == {
        (256, 2, 64, 64, "q8_0", "kvq4")
    }
    assert {(x.bytes_k, x.bytes_v) for x in layers} == {(256 * 4 * 34, 256 * 4 * 18)}


@pytest.mark.native
def test_importing_llama_cpp_first_from_elsewhere_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys, types\n"
        "m = types.ModuleType('llama_cpp.llama_cpp'); m._lib = types.SimpleNamespace(_name='/elsewhere/libllama.so')\n"
        "sys.modules['llama_cpp.llama_cpp'] = m\n"
        "from kvsplit import native, errors\n"
        "try: native.load()\n"
        "except errors.NativeMismatchError as e: print(e)\n"
    )
    env_path = str(native.PACKAGE.parent)
    res = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": env_path, "LLAMA_CPP_LIB_PATH": ""},
        check=False,
    )
    assert "import kvsplit first" in res.stdout, res.stderr


def test_type_names_are_unique() -> None:
    assert len(BY_NAME) == len(CACHE_TYPES)
