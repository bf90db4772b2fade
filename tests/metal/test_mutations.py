# SPDX-License-Identifier: MIT
"""Planted faults: each one, built into an emulated device of its own, must be caught by the tests of this folder.

Faults that a function constant can plant are in test_metal.py; these need another build.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple

import pytest

REPO = Path(__file__).resolve().parents[2]
NATIVE = Path(os.environ.get("KVSPLIT_NATIVE_DIR", REPO / "build")).resolve()
GGML = REPO / "vendor" / "src" / "vendor" / "llama.cpp" / "ggml"

pytestmark = pytest.mark.slow

ATTENTION = ["test-metal-attention", "--one-head"]


class Fault(NamedTuple):
    """A replacement in one file, and the program that must fail with it."""

    name: str
    file: str
    old: str
    new: str
    caught_by: List[str]


CODECS = "ggml-metal-ext/kernels/kvq-metal-codecs.h"
VEC = "ggml-metal-ext/kernels/kvq_fa_vec.metal"
ROWS = "ggml-metal-ext/kernels/kvq_rows.metal"
HOST = "ggml-metal-ext/kvq-metal.cpp"
UPSTREAM_VEC = "llama/ggml/src/ggml-metal/kernels/fa_vec_common.metal"

FAULTS = (
    Fault(
        "the codec of K decodes V",
        CODECS,
        "#define KVQ_ROW_V_T4 kvq_row, 32767, kvq_decode_v_t4",
        "#define KVQ_ROW_V_T4 kvq_row, 32767, kvq_decode_k_t4",
        [*ATTENTION, "q8_0/kvq4 dk=64"],
    ),
    Fault(
        "a block of q5_1 has the size of q5_0's",
        CODECS,
        "case KVQ_METAL_TYPE_Q5_1:   return 24;",
        "case KVQ_METAL_TYPE_Q5_1:   return 22;",
        [*ATTENTION, "q8_0/q5_1 dk=64"],
    ),
    Fault(
        "one level of the codebook is off by one",
        CODECS,
        "{ -127, -94, -72, -56, -43, -30, -20, -9, 0, 11, 20, 32, 43, 58, 76, 103 }",
        "{ -127, -94, -72, -56, -43, -30, -20, -9, 0, 11, 21, 32, 43, 58, 76, 103 }",
        [*ATTENTION, "q8_0/kvq3 dk=64"],
    ),
    Fault(
        "the path of a block doesn't begin with zeros",
        CODECS,
        "(j > 0 ? plane[2*j - 1] >> 8 : 0)",
        "(j > 0 ? plane[2*j - 1] >> 8 : 0x3f)",
        ["test-metal-rows"],
    ),
    Fault(
        "a scale that is tried has another sign",
        ROWS,
        "{ 256, -275, 271,  278 },",
        "{ 256,  275, 271,  278 },",
        ["test-metal-rows"],
    ),
    Fault(
        "heads are put back in another order",
        VEC,
        "i*FC_kvq_reduce_shared + j",
        "j*FC_kvq_reduce_kv + i",
        ["test-metal-attention", "--long"],
    ),
    Fault("wrong stride between shared heads", HOST, "    args.nb02 *= n;\n", "", ["test-metal-attention", "--long"]),
    Fault(
        "V is converted with the strides of K",
        HOST,
        "/*.nb1     =*/ kv->nb[1],",
        "/*.nb1     =*/ op->src[1]->nb[1],",
        [*ATTENTION, "q8_0/kvq4 dk=64"],
    ),
    Fault(
        "a kernel file is missing in the loader's list",
        "ggml-metal-ext/kvq-metal.h",
        "    X(KVQ_ROWS,   kvq_rows)",
        "",
        ["test-metal-rows"],
    ),
    Fault(
        "no barrier between scores and probabilities",
        UPSTREAM_VEC,
        "            simdgroup_barrier(mem_flags::mem_threadgroup);\n\n            // online softmax",
        "            // online softmax",
        [*ATTENTION, "kvq4/kvq4 dk=64"],
    ),
    Fault(
        "no barrier before the simdgroups' results are added",
        UPSTREAM_VEC,
        "    so4 -= tiisg;\n\n    threadgroup_barrier(mem_flags::mem_threadgroup);",
        "    so4 -= tiisg;",
        ["test-metal-attention", "--long"],
    ),
    Fault(
        "half of the threadgroup memory",
        "llama/ggml/src/ggml-metal/ggml-metal-ops.cpp",
        "(size_t) (dk_pad + 4*ncpsg + 2*dv_pad)*nqptg*nsg;",
        "(size_t) (dk_pad + 4*ncpsg + 2*dv_pad)*nqptg*nsg/2;",
        [*ATTENTION, "kvq4/kvq4 dk=64"],
    ),
)


class Copy(NamedTuple):
    """A copy of the sources that a fault may be planted in, and its build."""

    root: Path
    build: Path

    def make(self) -> None:
        done = subprocess.run(["cmake", "--build", str(self.build), "--parallel", "2"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:]

    def run(self, command: List[str], schedule: str) -> int:
        env: Dict[str, str] = {
            **os.environ,
            "GGML_BACKEND_PATH": str(self.build / "metal" / "libggml-metal-emulated.so"),
            "GGML_METAL_EMULATED_SCHED": schedule,
        }
        program = NATIVE / "bin" / command[0]
        done = subprocess.run(
            [str(program), *command[1:]], env=env, capture_output=True, stdin=subprocess.DEVNULL, timeout=900
        )
        return done.returncode


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    if sys.platform == "darwin" or not (NATIVE / "metal").is_dir():
        if os.environ.get("KVSPLIT_REQUIRE", "") not in ("", "0") and sys.platform != "darwin":
            pytest.fail("required by KVSPLIT_REQUIRE: no emulated Metal device", pytrace=False)
        pytest.skip("no emulated Metal device")
    root = tmp_path_factory.mktemp("metal")
    for folder in ("tests/metal", "ggml-metal-ext", "ggml-ext"):
        shutil.copytree(REPO / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("include", "src"):
        shutil.copytree(GGML / folder, root / "llama" / "ggml" / folder)
    build = root / "build"
    # few kernels of upstream's: a fault in a shared file compiles all of them again
    done = subprocess.run(
        ["cmake", "-S", str(root / "tests" / "metal"), "-B", str(build), f"-DKVSPLIT_LLAMA_DIR={root / 'llama'}",
         f"-DKVSPLIT_BUILD_DIR={NATIVE}", "-DKVSPLIT_METAL_LIBRARIES=fa_aux;fa_f16;quantize;misc;unary"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    made = Copy(root, build)
    made.make()
    yield made


SCHEDULES = ("ascending", "descending", "random:1")


def test_without_a_fault_all_pass(copy: Copy) -> None:
    for command in {tuple(fault.caught_by) for fault in FAULTS}:
        for schedule in SCHEDULES:
            assert copy.run(list(command), schedule) == 0, (command, schedule)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_caught(copy: Copy, fault: Fault) -> None:
    path = copy.root / fault.file
    text = path.read_text()
    assert text.count(fault.old) == 1, f"{fault.file} has changed: {fault.old!r} is there {text.count(fault.old)} times"
    path.write_text(text.replace(fault.old, fault.new))
    try:
        copy.make()
        caught = [schedule for schedule in SCHEDULES if copy.run(fault.caught_by, schedule) != 0]
    finally:
        path.write_text(text)
    print(f"{fault.name}: caught by {' '.join(fault.caught_by)} ({', '.join(caught) or 'no schedule'})")
    assert caught, f"not caught: {fault.name}"
