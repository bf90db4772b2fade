# SPDX-License-Identifier: MIT
"""Libraries that stand in for libllama: of another release, of other types, with a self-test that fails or crashes."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Sequence, Tuple

from needs import missing

from kvsplit import _lock, native
from kvsplit.cache_types import CACHE_TYPES

NAME = "libllama.dylib" if sys.platform == "darwin" else "libllama.so"
#: An installed package knows which patches it was built with, a source tree takes any.
PATCHES = native.expected_patches() or "5" * 64
BUILD = f"{_lock.VERSION} {_lock.SHA256} {PATCHES}"

#: Functions that the package binds; a made-up library needs those that it doesn't define by name alone.
_BOUND = re.findall(r'fn\("(kvq_\w+)"', inspect.getsource(native.Native._bind))
assert "kvq_resolve" in _BOUND

_ITEM = """
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <signal.h>
#include <unistd.h>

struct item { int32_t kind, status, device; int k, v; double error, limit; uint64_t want, have; char reason[192]; };
"""


def compile_c(code: str, out: Path, *flags: str) -> Path:
    """Make a shared library of C code."""
    cc = shutil.which("cc") or shutil.which("gcc")
    if cc is None:
        missing("no C compiler for a made-up library")
    out.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([cc, "-shared", "-fPIC", "-x", "c", "-", "-o", str(out), *flags], input=code, text=True, check=True)
    return out


def only_build(folder: Path, build: str = BUILD) -> Path:
    """A library that tells what it was built from, and nothing else."""
    return compile_c(f'const char * kvq_build(void) {{ return "{build}"; }}', folder / NAME)


def whole(
    folder: Path,
    *,
    build: str = BUILD,
    types: Sequence[Tuple[int, str, int, int]] = tuple((t.ggml_id, t.name, t.block, t.bytes) for t in CACHE_TYPES),
    load: str = "",
    items: str = "",
    run: str = "",
    self_test: bool = True,
) -> Path:
    """A library with all functions that ``kvsplit doctor`` calls.

    Args:
        folder: where it is put.
        build: what it says it was built from.
        types: id, name, values and bytes of a block of each cache type.
        load: C statements that run when it is loaded.
        items: C initializers of the self-test's items, ``{ kind, status, device, type_k, type_v, error, limit, want,
            have, reason },`` each.
        run: C statements that run before item ``i``.
        self_test: False leaves the self-test out, as in an older library.
    """
    names = "".join(f'if (t == {i}) return "{n}"; ' for i, n, _, _ in types)
    sizes = "".join(f"if (t == {i}) return {size}; " for i, _, _, size in types)
    blocks = "".join(f"if (t == {i}) return {block}; " for i, _, block, _ in types)
    ids = ", ".join(str(i) for i, _, _, _ in types)
    n_items = items.count("},")
    code = f"""{_ITEM}
static const int ids[] = {{ {ids} }};
static const struct item items[] = {{ {items or "{0}"} }};

__attribute__((constructor)) static void loaded(void) {{ {load} }}

const char * kvq_build(void)                {{ return "{build}"; }}
const char * kvq_last_error(void)           {{ return ""; }}
const char * kvq_type_name(int t)           {{ {names} return "none"; }}
const char * ggml_type_name(int t)          {{ return kvq_type_name(t); }}
int          kvq_cache_type(int32_t i)      {{ return i < {len(types)} ? ids[i] : 464; }}
size_t       ggml_type_size(int t)          {{ {sizes} return 0; }}
int64_t      ggml_blck_size(int t)          {{ {blocks} return 0; }}
const char * llama_print_system_info(void)  {{ return "MADE_UP = 1 | "; }}

size_t       ggml_backend_dev_count(void)             {{ return 1; }}
void *       ggml_backend_dev_get(size_t i)           {{ return (void *) (i + 1); }}
const char * ggml_backend_dev_name(void * d)          {{ return "DEV0"; }}
const char * ggml_backend_dev_description(void * d)   {{ return "a device"; }}
void *       ggml_backend_dev_backend_reg(void * d)   {{ return d; }}
const char * ggml_backend_reg_name(void * r)          {{ return "MADEUP"; }}
void         ggml_backend_dev_memory(void * d, size_t * f, size_t * t) {{ *f = 1u << 30; *t = 3u << 30; }}
"""
    code += "int ggml_backend_dev_type(void * d) { return 0; }\n"
    code += "".join(f"int {name}(void) {{ return 0; }}\n" for name in _BOUND if f"{name}(" not in code)
    if self_test:
        code += f"""
void *  kvq_selftest_init(void)      {{ return (void *) 1; }}
int32_t kvq_selftest_count(void * t) {{ return {n_items}; }}
void    kvq_selftest_free(void * t)  {{ }}
_Bool   kvq_selftest_get(void * t, int32_t i, struct item * out) {{ *out = items[i]; return 1; }}
_Bool   kvq_selftest_run(void * t, int32_t i, struct item * out) {{ {run} *out = items[i]; return 1; }}
"""
    return compile_c(code, folder / NAME)
