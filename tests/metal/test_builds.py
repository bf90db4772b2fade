# SPDX-License-Identifier: MIT
"""Other builds of the emulated device: with a sanitizer, and of the unpatched release."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Dict

import pytest

TESTS = Path(__file__).resolve().parent
NATIVE = Path(os.environ.get("KVSPLIT_NATIVE_DIR", TESTS.parents[1] / "build")).resolve()

pytestmark = pytest.mark.slow


def need(reason: str) -> None:
    """Skip, or fail where nothing may be missing."""
    if os.environ.get("KVSPLIT_REQUIRE", "") not in ("", "0"):
        pytest.fail(f"required by KVSPLIT_REQUIRE: {reason}", pytrace=False)
    pytest.skip(reason)


def build(folder: Path, libraries: str, **variables: str) -> Dict[str, str]:
    """Environment in which programs load an emulated device that is built in folder."""
    if sys.platform == "darwin" or not (NATIVE / "metal").is_dir():
        need("no emulated Metal device")
    command = ["cmake", "-S", str(TESTS), "-B", str(folder), f"-DKVSPLIT_METAL_LIBRARIES={libraries}"]
    for args in (
        command + [f"-D{name}={value}" for name, value in variables.items()],
        ["cmake", "--build", str(folder), "--parallel", "2"],
    ):
        done = subprocess.run(args, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    env = {k: v for k, v in os.environ.items() if not k.startswith("GGML_METAL")}
    return {**env, "GGML_BACKEND_PATH": str(folder / "metal" / "libggml-metal-emulated.so")}


def test_no_undefined_behaviour(tmp_path: Path) -> None:
    env = build(
        tmp_path,
        "fa_aux;fa_f16;quantize;misc;unary",
        KVSPLIT_METAL_SANITIZE="undefined",
        KVSPLIT_BUILD_DIR=str(NATIVE),
    )
    pairs = (
        "q8_0/kvq4 dk=64",
        "kvq6/kvq3 dk=96",
        "f16/q5_1 dk=128",
        "kvq2/bf16 dk=64",
        "kvq5/iq4_nl dk=192",
        "q4_1/f32 dk=32",
    )
    commands = [["test-metal-rows"], ["test-metal-attention", "--long"]]
    commands += [["test-metal-attention", "--one-head", pair] for pair in pairs]
    for command in commands:
        program = NATIVE / "bin" / command[0]
        done = subprocess.run([str(program), *command[1:]], env=env, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stdout[-1000:] + done.stderr[-3000:])


# What the device says of attention, through ggml's C functions: the release has no test program of ours.
ASK = """
import ctypes, itertools, json, sys
from pathlib import Path

bin = Path(sys.argv[1])
for name in ("libggml-base.so", "libggml-cpu.so", "libggml.so"):
    lib = ctypes.CDLL(str(bin / name), mode=ctypes.RTLD_GLOBAL)
base = ctypes.CDLL(str(bin / "libggml-base.so"))


class Params(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


for f in ("ggml_init", "ggml_new_tensor_4d", "ggml_flash_attn_ext", "ggml_backend_dev_by_name"):
    getattr(lib if f.startswith("ggml_backend") else base, f).restype = ctypes.c_void_p
base.ggml_init.argtypes = [Params]
base.ggml_new_tensor_4d.argtypes = [ctypes.c_void_p, ctypes.c_int] + [ctypes.c_int64]*4
base.ggml_flash_attn_ext.argtypes = [ctypes.c_void_p]*5 + [ctypes.c_float]*3
base.ggml_backend_dev_supports_op.argtypes = [ctypes.c_void_p]*2
base.ggml_backend_dev_supports_op.restype = ctypes.c_bool
lib.ggml_backend_load_all()
device = lib.ggml_backend_dev_by_name(b"MTL0")
assert device, "no device"
types = dict(f32=0, f16=1, q4_0=2, q4_1=3, q5_0=6, q5_1=7, q8_0=8, bf16=30)
answers = {}
for k, v in itertools.product(types, types):
    ctx = base.ggml_init(Params(1 << 20, None, True))
    q, tk, tv = (base.ggml_new_tensor_4d(ctx, t, 64, n, 2, 1) for t, n in ((0, 1), (types[k], 64), (types[v], 64)))
    op = base.ggml_flash_attn_ext(ctx, q, tk, tv, None, 0.125, 0.0, 0.0)
    answers[f"{k}/{v}"] = base.ggml_backend_dev_supports_op(device, op)
print(json.dumps(answers))
"""


def test_the_unpatched_release_refuses_unequal_types(tmp_path: Path) -> None:
    """The same harness on the release as it is: equal pairs are computed, unequal ones refused."""
    import json

    upstream = Path(os.environ.get("KVSPLIT_UPSTREAM_DIR", ""))
    if not (upstream / "bin" / "libggml-base.so").exists():
        need("no unpatched build: make build-upstream, KVSPLIT_UPSTREAM_DIR")
    env = build(
        tmp_path,
        "fa_aux;fa_f16;quantize;misc",
        KVSPLIT_LLAMA_DIR=str(upstream / "upstream"),
        KVSPLIT_BUILD_DIR=str(upstream),
    )

    def ask(where: Path, env: Dict[str, str]) -> Dict[str, bool]:
        done = subprocess.run([sys.executable, "-c", ASK, str(where / "bin")], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        answers: Dict[str, bool] = json.loads(done.stdout)
        return answers

    theirs = ask(upstream, env)
    assert {pair for pair, yes in theirs.items() if yes} == {p for p in theirs if p.split("/")[0] == p.split("/")[1]}
    ours = ask(NATIVE, {**env, "GGML_BACKEND_PATH": str(NATIVE / "metal" / "libggml-metal-emulated.so")})
    assert all(ours.values()) and ours.keys() == theirs.keys()
    print(f"{len(ours)} pairs: the release computes {sum(theirs.values())}, with our series {sum(ours.values())}")
