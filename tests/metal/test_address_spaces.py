# SPDX-License-Identifier: MIT
"""Kernels against Metal's language, without Metal's compiler: address spaces, types, and what the language lacks.

Clang reads each kernel as C++ for OpenCL (the pass), and a lint finds what that language allows and Metal's does not.
This shows that a file is right about its address spaces. It doesn't show that Apple's compiler takes it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Iterator, List, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "address-spaces"))

import address_spaces
import metal_lint

CODECS, ROWS, VEC = "kvq-metal-codecs.h", "kvq_rows.metal", "kvq_fa_vec.metal"

# Apple's compiler takes all of upstream's files, so a reader that refuses one is wrong. These differ most from ours:
# threadgroup variables, arithmetic of mixed types, structs of blocks. The slow tier has all.
FEW = ("argsort.metal", "fa_aux.metal", "quantize.metal", "unary.metal")


def missing(reason: str) -> None:
    """Skip, or fail where nothing may be missing."""
    if os.environ.get("KVSPLIT_REQUIRE", "") not in ("", "0"):
        pytest.fail(f"required by KVSPLIT_REQUIRE: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> address_spaces.Checker:
    clang = address_spaces.find_clang()
    if not clang:
        missing("no clang 19 or later")
    if not address_spaces.UPSTREAM.is_dir():
        missing("llama.cpp's source is not fetched: make source")
    assert clang
    return address_spaces.Checker(clang, tmp_path_factory.mktemp("address-spaces"))


def shown(findings: List[address_spaces.Finding]) -> str:
    return "\n".join(str(finding) for finding in findings)


def test_every_checked_file_passes(checker: address_spaces.Checker) -> None:
    names = address_spaces.checked_files(checker.texts, address_spaces.patch_texts())
    assert {path.name for path in (address_spaces.EXT / "kernels").glob("*.metal")} <= set(names)
    findings = [finding for name in names for finding in checker.check(name)]
    assert not findings, shown(findings)


@pytest.mark.parametrize("name", FEW)
def test_what_apples_compiler_takes_is_taken(checker: address_spaces.Checker, name: str) -> None:
    findings = checker.check(name)
    assert not findings, shown(findings)


@pytest.mark.slow
def test_all_of_upstream_is_taken(checker: address_spaces.Checker) -> None:
    names = [name for name in address_spaces.kernel_files(checker.texts) if (address_spaces.UPSTREAM / name).exists()]
    assert len(names) > 30
    findings = [finding for name in names for finding in checker.check(name)]
    assert not findings, shown(findings)


def test_a_patched_file_is_checked(checker: address_spaces.Checker) -> None:
    ours = set(address_spaces.checked_files(checker.texts, ""))
    assert {ROWS, VEC} <= ours
    patch = "--- a/ggml/src/ggml-metal/kernels/{0}\n+++ b/ggml/src/ggml-metal/kernels/{0}\n"
    assert set(address_spaces.checked_files(checker.texts, patch.format("norm.metal"))) - ours == {"norm.metal"}
    # a part brings the files that include it
    names = set(address_spaces.checked_files(checker.texts, patch.format("fa_common.metal"))) - ours
    assert {"fa_f16.metal", "fa_q8_0.metal"} <= names
    assert not {"fa_common.metal", "fa_vec_f16.metal", "norm.metal"} & names


class Mistake(NamedTuple):
    """One line made wrong: in `file`, the only `old` becomes `new`, and `by` must see it where it reads `kernel`."""

    what: str
    by: str
    file: str
    old: str
    new: str
    kernel: str = ROWS


MISTAKES = (
    Mistake(
        "constant for device",
        "pass",
        CODECS,
        "kvq_load_codes(device const kvq_word * plane",
        "kvq_load_codes(constant kvq_word * plane",
    ),
    Mistake("device for constant", "pass", CODECS, "constant char * table =", "device const char * table ="),
    Mistake(
        "threadgroup for device",
        "pass",
        ROWS,
        "kvq_store_constant(const int type, const ushort d, const ushort lane, device uchar * block)",
        "kvq_store_constant(const int type, const ushort d, const ushort lane, threadgroup uchar * block)",
    ),
    Mistake(
        "threadgroup for device in a template of upstream",
        "pass",
        "fa_vec_common.metal",
        "device const half * pm[Q];",
        "threadgroup const half * pm[Q];",
        VEC,
    ),
    Mistake(
        "device for constant, of a kernel's arguments",
        "pass",
        ROWS,
        "kvq_cpy_dst(constant ggml_metal_kargs_cpy & args,",
        "kvq_cpy_dst(device const ggml_metal_kargs_cpy & args,",
    ),
    Mistake(
        "a cast to another space",
        "pass",
        CODECS,
        "const float d = *(device const half *) block;",
        "const float d = *(threadgroup const half *) block;",
    ),
    Mistake("no space in a cast", "lint", CODECS, "((device const float4 *) row)[i]", "((const float4 *) row)[i]"),
    Mistake(
        "no space of a parameter",
        "lint",
        CODECS,
        "float4 kvq_decode4(const int type, device const char * row,",
        "float4 kvq_decode4(const int type, const char * row,",
    ),
    Mistake("no space of a reference", "lint", ROWS, "thread half & d_out) {", "half & d_out) {"),
    Mistake("no space of a variable", "lint", ROWS, "device float4 * y =", "float4 * y ="),
    Mistake(
        "no space of a parameter that depends on a template",
        "lint",
        CODECS,
        "void kvq_decode_k_t4(device const kvq_row * row, short i, thread type4 & reg) {",
        "void kvq_decode_k_t4(device const kvq_row * row, short i, type4 & reg) {",
    ),
    Mistake(
        "no space of what a function gives",
        "pass",
        CODECS,
        "static inline constant char * kvq_table(",
        "static inline const char * kvq_table(",
    ),
    Mistake("no space of a kernel's buffer", "lint", ROWS, "device       half * dst,", "half * dst,"),
    Mistake("a write through const", "pass", ROWS, "*(device half *) block = d;", "*(device const half *) block = d;"),
    Mistake(
        "a write to constant",
        "pass",
        CODECS,
        "constant char * table = kvq_table(type);",
        "constant char * table = kvq_table(type); table[0] = 0;",
    ),
    Mistake("a pointer to another type", "pass", ROWS, "device float4 * y =", "device half4 * y ="),
    Mistake(
        "a matrix loaded from another type, in a template of upstream",
        "pass",
        "fa_common.metal",
        "s8x8_t vs[2];",
        "q8x8_t vs[2];",
        "fa_q8_0.metal",
    ),
    Mistake(
        "a decoder of another shape",
        "pass",
        CODECS,
        "#define KVQ_ROW_K_T4 kvq_row, 32767, kvq_decode_k_t4",
        "#define KVQ_ROW_K_T4 kvq_row, 32767, kvq_decode_k",
        VEC,
    ),
    Mistake(
        "an instantiation with the arguments of another kernel",
        "pass",
        ROWS,
        "kernel kvq_cpy_f_q_t kernel_kvq_cpy_f_q<half>;",
        "kernel kvq_cpy_q_f_t kernel_kvq_cpy_f_q<half>;",
    ),
    Mistake(
        "a vector of another type without a cast",
        "pass",
        ROWS,
        "y[0] = (half4) kvq_decode4(",
        "y[0] = kvq_decode4(",
    ),
    Mistake("too many values for a vector", "pass", ROWS, "0 : 1 << 30, 0);", "0 : 1 << 30, 0, 0);"),
    Mistake(
        "a reference to an element of a vector",
        "pass",
        CODECS,
        "reg[k] = kvq_decode4(type, row, 4*i + k);",
        "thread float & first = reg[k][0]; first = kvq_decode4(type, row, 4*i + k)[0];",
    ),
    Mistake("arguments of two types", "pass", ROWS, "min(largest >> 23, 253u)", "min(largest >> 23, 253)"),
    Mistake(
        "char taken for int8_t",
        "pass",
        ROWS,
        "const short k = lane/8;",
        "const short k = max((int8_t) (lane/8), (char) 0);",
    ),
    Mistake(
        "a simdgroup's sum of 64 bits",
        "pass",
        ROWS,
        "simd_sum((int) l*(int) l)",
        "simd_sum((int64_t) l*(int64_t) l)",
    ),
    Mistake("double", "pass", ROWS, "const float room   = ", "const double room   = "),
    Mistake(
        "long long",
        "lint",
        ROWS,
        "static inline uint64_t kvq_cpy_dst(",
        "static inline unsigned long long kvq_cpy_dst(",
    ),
    Mistake("a header of C++", "pass", CODECS, '#include "common.h"', "#include <cmath>"),
    Mistake("noexcept", "lint", CODECS, "kvq_spread4(const uint bits) {", "kvq_spread4(const uint bits) noexcept {"),
    Mistake(
        "a function constant outside of constant",
        "lint",
        CODECS,
        "constant int32_t FC_kvq_type_v [[",
        "int32_t FC_kvq_type_v [[",
    ),
    Mistake(
        "a table outside of constant",
        "lint",
        ROWS,
        "static constant short kvq_tries",
        "static const short kvq_tries",
    ),
    Mistake("a static variable", "lint", ROWS, "ushort k_best     = 0;", "static ushort k_best = 0;"),
    Mistake(
        "threadgroup memory in a helper",
        "lint",
        ROWS,
        "    const uint e = m >> 2;",
        "    threadgroup uint shared[1]; const uint e = m >> 2;",
    ),
    Mistake(
        "recursion",
        "lint",
        CODECS,
        "return p[0] | ((uint) p[1] << 16);",
        "return p[0] != 0 ? p[0] : kvq_load_word(p + 1);",
    ),
    Mistake("a kernel's value from nowhere", "lint", ROWS, "uint gid[[thread_position_in_grid]]) {", "uint gid) {"),
    Mistake(
        "a misspelt attribute",
        "pass",
        ROWS,
        "uint gid[[thread_position_in_grid]]) {",
        "uint gid[[thread_position_in_gird]]) {",
    ),
)


@pytest.fixture
def mistake(request: pytest.FixtureRequest, checker: address_spaces.Checker) -> Iterator[Mistake]:
    """The sources with one mistake."""
    made: Mistake = request.param
    original = checker.originals[made.file]
    assert original.count(made.old) == 1, f"{made.file} has {original.count(made.old)} times: {made.old}"
    assert "\n" not in made.old + made.new
    checker.put(made.file, original.replace(made.old, made.new))
    yield made
    checker.put(made.file, original)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m.by}: {m.what}", indirect=True)
def test_a_mistake_is_caught(checker: address_spaces.Checker, mistake: Mistake) -> None:
    findings = checker.check(mistake.kernel)
    assert findings, "neither the pass nor the lint sees it"
    print(shown(findings[:3]))
    assert {finding.reader for finding in findings} == {mistake.by}, shown(findings)
    # The lint names the line itself. The pass may name a call or a callee.
    line = checker.originals[mistake.file].split(mistake.old)[0].count("\n") + 1
    places = {(finding.file, finding.line) for finding in findings}
    if mistake.by == "lint":
        line -= mistake.what == "recursion"  # it names the function
        assert (mistake.file, line) in places, shown(findings)
    else:
        assert {file for file, _ in places} <= set(checker.texts), shown(findings)


WORDS = (
    "double x;",
    "long long x;",
    "unsigned long  long x;",
    "long double x;",
    "#include <vector>",
    "std::swap(a, b);",
    "virtual void f();",
    "new float[2];",
    "delete p;",
    "try {",
    "void f() noexcept;",
    "typeid(x);",
    "goto end;",
    "register int x;",
    "thread_local int x;",
    "auto f = [&](int x) { return x; };",
    "auto f = [] { return 1; };",
)


def test_every_word_is_refused() -> None:
    found = {text: [message for _, message in metal_lint.of_text(text)] for text in WORDS}
    assert all(found.values()), found
    seen = {message for messages in found.values() for message in messages}
    assert seen == {message for _, message in metal_lint.WORDS}, "a rule without an example"


def test_comments_and_other_names_are_not_refused() -> None:
    text = "// double, new: no\n/* goto */ int newest = doubled; // std\n#include <metal_stdlib>\nlong x; float a[4];\n"
    assert list(metal_lint.of_text(text)) == []


def test_lines_are_kept(checker: address_spaces.Checker) -> None:
    """What the readers report has the number of the line in the source, not in the copy."""
    for name, text in checker.originals.items():
        before, after = text.splitlines(), address_spaces.rewrite(text).splitlines()
        assert len(before) == len(after), name
        kept = set(before) & set(after)
        moved = [line for i, line in enumerate(before) if line in kept and after[i] != line and before.count(line) == 1]
        assert not moved, f"{name}: {moved[0]}"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
