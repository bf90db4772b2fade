# SPDX-License-Identifier: MIT
"""Lists that must agree: kernel files, kernels that the host can ask for, head sizes, types, function constants."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Dict, Iterator, List, Set, Tuple

import pytest

REPO = Path(__file__).resolve().parents[2]
EXT = REPO / "ggml-metal-ext"
KERNELS = EXT / "kernels"
GGML = REPO / "vendor" / "src" / "vendor" / "llama.cpp" / "ggml" / "src"
METAL = GGML / "ggml-metal"

CACHE_TYPES = re.findall(r"\{ GGML_TYPE_(\w+),", (REPO / "ggml-ext" / "kvq-types.h").read_text())


def host_names() -> Dict[str, str]:
    """Kernel name -> file."""
    names: Dict[str, str] = {}
    for path in sorted(KERNELS.glob("*.metal")):
        for name in re.findall(r'host_name\("(\w+)"\)', path.read_text()):
            assert name not in names, f"{name} is in {names[name]} and in {path.name}"
            names[name] = path.name
        for name in re.findall(r"^kernel void (\w+)\(", path.read_text(), re.M):
            # a plain kernel: its own name, unless it is a template
            before = path.read_text().split(f"kernel void {name}(")[0].rstrip().splitlines()[-1]
            if not before.startswith("template"):
                names[name] = path.name
    return names


def head_sizes() -> List[Tuple[int, int]]:
    """Pairs that kvq_metal_fa_head_sizes accepts."""
    body = (EXT / "kvq-metal.cpp").read_text().split("bool kvq_metal_fa_head_sizes")[1].split("};")[0]
    pairs = [(int(a), int(b)) for a, b in re.findall(r"\{\s*(\d+),\s*(\d+) \}", body)]
    assert len(pairs) > 10
    return pairs


def upstream_names(pattern: str) -> Set[Tuple[int, int]]:
    """Pairs of head sizes of upstream's kernels whose host_name begins with the pattern."""
    found: Set[Tuple[int, int]] = set()
    for path in (METAL / "kernels").glob("fa_*.metal"):
        found |= {
            (int(a), int(b)) for a, b in re.findall(rf'host_name\("{pattern}_dk(\d+)_dv(\d+)"\s*\)', path.read_text())
        }
    return found


def test_kernel_files_are_in_both_lists() -> None:
    files = {p.stem for p in KERNELS.glob("*.metal")}
    cmake = re.search(r"set\(KVQ_METAL_KERNELS ([\w ]+)\)", (EXT / "kernels.cmake").read_text())
    assert cmake and set(cmake[1].split()) == files
    loader = re.findall(r"^    X\((\w+),\s*(\w+)\)", (EXT / "kvq-metal.h").read_text(), re.M)
    assert {name for _, name in loader} == files
    assert all(enum == name.upper() for enum, name in loader)
    upstream = re.findall(r"^    X\(\w+,\s*(\w+)\)", (METAL / "ggml-metal-device.m").read_text(), re.M)
    assert not set(upstream) & files, "a name that upstream's libraries have"
    assert "KVQ_METAL_LIBS" in (METAL / "ggml-metal-device.m").read_text()


def test_upstreams_own_lists_agree() -> None:
    cmake = set(re.findall(r"^    kernels/(\w+)\.metal$", (METAL / "CMakeLists.txt").read_text(), re.M))
    loader = set(re.findall(r"^    X\(\w+,\s*(\w+)\)", (METAL / "ggml-metal-device.m").read_text(), re.M))
    assert cmake == loader and len(cmake) > 20


def test_flattened_files_are_whole(tmp_path: Path) -> None:
    """What the build embeds has our headers inside, and only upstream's includes left, which its own step inlines."""
    script = tmp_path / "run.cmake"
    script.write_text(
        'set(METALLIB_KERNEL_SOURCES "")\n'
        f'set(CMAKE_CURRENT_BINARY_DIR "{tmp_path}")\n'
        "macro(set_property)\nendmacro()\n"  # a script has no directory properties
        f'include("{EXT / "kernels.cmake"}")\n'
        'message("${METALLIB_KERNEL_SOURCES}")\n'
    )
    done = subprocess.run(["cmake", "-P", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = [Path(p) for p in done.stderr.strip().split(";")]
    assert {p.stem for p in files} == {p.stem for p in KERNELS.glob("*.metal")}
    for path in files:
        text = path.read_text()
        left = set(re.findall(r'#include "([^"]+)"', text))
        known = {"common.h", "dequantize.h", "quantize.h", "fa_common.metal", "fa_vec_common.metal"}
        assert left <= known, f"{path.name} includes {left - known}"
        assert text.count("#define FC_KVQ 9000") == 1 and "#pragma once" not in text
        source = (KERNELS / path.name).read_text()
        for line in source.splitlines():
            assert line.startswith("#include") or line in text, line


def asked_names() -> Iterator[str]:
    """Every name that the host code can form, from the head sizes and from its string literals."""
    source = (EXT / "kvq-metal.cpp").read_text()
    yield from re.findall(r'"(kernel_kvq_\w+)"', source)
    vec = {(a, b) for a, b in head_sizes() if a % 32 == 0}
    for dk, dv in vec:
        yield f"kernel_kvq_flash_attn_ext_vec_dk{dk}_dv{dv}_q2_ne4"
        yield f"kernel_kvq_flash_attn_ext_vec_dk{dk}_dv{dv}_q4_ne{2 if dk > 128 else 4}"
        yield f"kernel_kvq_flash_attn_ext_vec_dk{dk}_dv{dv}_q1_ne4"
        tuning = (METAL / "ggml-metal-tuning.cpp").read_text()
        base = re.search(rf"dk == {dk} && dv == {dv}\) \{{\s*return (\d);", tuning)
        assert base, (dk, dv)
        yield f"kernel_kvq_flash_attn_ext_vec_dk{dk}_dv{dv}_q1_ne{base[1]}"


def test_every_kernel_is_asked_for_and_there() -> None:
    there, asked = set(host_names()), set(asked_names())
    assert asked - there == set(), "asked for, and not there"
    assert there - asked == set(), "there, and never asked for"


def test_head_sizes_are_upstreams() -> None:
    assert set(head_sizes()) == upstream_names("kernel_flash_attn_ext_f16")
    vec = upstream_names("kernel_flash_attn_ext_vec_f16")
    assert {(a, b) for a, b in head_sizes() if a % 32 == 0} == vec


def test_types_of_the_kernels_are_those_of_a_cache() -> None:
    impl = (EXT / "kvq-metal-impl.h").read_text()
    assert set(re.findall(r"#define KVQ_METAL_TYPE_(\w+)", impl)) == set(CACHE_TYPES)
    source = (EXT / "kvq-metal.cpp").read_text()
    assert set(re.findall(r"KVQ_METAL_SAME\((\w+)\);", source)) == set(CACHE_TYPES)


def test_function_constants_are_free_upstream() -> None:
    text = (METAL / "ggml-metal-impl.h").read_text()
    blocks = [int(n) for n in re.findall(r"#define FC_\w+\s+(\d+)\b", text)]
    assert len(blocks) > 10
    # a block of upstream's is 100 long
    assert max(blocks) + 100 <= 9000
    ours = re.findall(r"FC_KVQ \+ (\d+)", (EXT / "kvq-metal-impl.h").read_text())
    assert len(ours) == len(set(ours))


def c_table(text: str, pattern: str) -> List[int]:
    found = re.search(pattern + r"\s*=\s*(\{.*?\});", text, re.S)
    assert found, pattern
    return [int(n) for n in re.findall(r"-?\d+", found[1])]


def test_codebooks_are_those_of_the_formats() -> None:
    from kvsplit import formats

    text = (KERNELS / "kvq-metal-codecs.h").read_text()
    for bits in (2, 3, 4):
        assert c_table(text, rf"kvq{bits}_levels\[\d+\]") == [int(x) for x in formats.get(f"kvq{bits}").levels]
    tries = c_table((KERNELS / "kvq_rows.metal").read_text(), r"kvq_tries\[5\]\[4\]")
    assert tries == [int(t) for bits in (2, 3, 4, 5, 6) for t in formats.get(f"kvq{bits}").tries]
    # the two lines, evaluated as the kernel does
    body = re.search(r"T kvq_line\(.*?\n\}", text, re.S)
    assert body
    numbers = re.findall(r"is_5 \? (\d+)\.0f : (\d+)\.0f", body[0])
    assert len(numbers) == 5
    for bits, column in ((5, 0), (6, 1)):
        first, second, a, b, c = (int(pair[column]) for pair in numbers)
        n = 2 << bits

        clamped = [(x, max(-first, min(first, x)), max(-second, min(second, x))) for x in range(-n // 2, n // 2)]
        levels = [a * x - b * inner - c * outer for x, inner, outer in clamped]
        assert levels == [int(v) for v in formats.get(f"kvq{bits}").levels]


def test_embedded_source_stays_small() -> None:
    """What the library carries of ours: bounded, because it is compiled on the user's machine."""
    size = sum(p.stat().st_size for p in KERNELS.iterdir()) + (EXT / "kvq-metal-impl.h").stat().st_size
    assert size < 100_000, size


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
