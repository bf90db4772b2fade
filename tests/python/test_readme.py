# SPDX-License-Identifier: MIT
"""README.md and docs/ against what they speak of: results, flags, variables, targets, links, the C example."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, List, Set

import pytest

DOCS = ("README.md", "CONTRIBUTING.md", "patches/README.md", *(f"docs/{n}.md" for n in (
    "c", "capture", "configuration", "cpu", "design", "inspect", "measuring", "memory", "metal", "numerics", "python",
    "reliability", "scope", "testing", "upgrading",
)))  # fmt: skip


def _rows(decode: Dict[str, float]) -> List[Dict[str, Any]]:
    """A small run as `kvsplit compare` records it."""
    same: Dict[str, Any] = {
        "schema": 1, "run_id": "r", "kvsplit_version": "0", "lock": "l", "source_sha256": "s", "patches_sha256": "p",
        "command": "kvsplit compare m.gguf", "model_filename": "m.gguf", "model_sha256": "m", "python": "3",
        "platform": "Linux", "cpu_info": "A CPU", "test_time": "",
    }  # fmt: skip
    rows: List[Dict[str, Any]] = []
    for config, (k, v, size) in {"F16": ("f16", "f16", 400), "K8V4": ("q8_0", "kvq4", 100)}.items():
        ours = {**same, "config": config, "kvq_key": k, "kvq_val": v, "type_k": k, "type_v": v}
        rows.append({**ours, "kind": "memory", "n_ctx": 4096, "kv_bytes": size << 20, "kv_bytes_f16": 400 << 20,
                     "saving": 1 - size / 400, "bits_per_value": 16.0, "backend_decode": "CPU"})  # fmt: skip
        for n_prompt, n_gen in ((0, 16), (128, 0)):
            rows.append({**ours, "kind": "speed", "n_prompt": n_prompt, "n_gen": n_gen, "n_depth": 256, "n_threads": 2,
                         "samples_ts": [decode[config]], "median_ts": decode[config]})  # fmt: skip
        rows.append({**ours, "kind": "quality", "text": "t.txt", "text_sha256": "t", "ppl_ctx": 512, "chunks": 3,
                     "ppl": 20.5, "ppl_se": 0.25, "kld": 0.0125, "kld_se": 0.0005, "top1": 0.94, "kld_floor": 0.0,
                     })  # fmt: skip
    return rows


def _run(script: Path, *args: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, str(script), *map(str, args)], capture_output=True, text=True, check=False)


def test_readme_and_results_agree(repo: Path, script: ModuleType) -> None:
    readme = (repo / "README.md").read_text(encoding="utf-8")
    files = script.choose(repo, readme)
    found = script.BLOCK.search(readme)
    assert found and found.group(0) == script.block(files), "run scripts/readme_table.py"
    if sorted((repo / "results").glob("*.jsonl")):
        assert script.named(readme), "results are recorded, and README.md shows none of them"


def test_table_follows_the_results(repo: Path, tmp_path: Path) -> None:
    program = repo / "scripts" / "readme_table.py"
    (tmp_path / "README.md").write_text("a\n<!-- results: -->\nold\n<!-- end of results -->\nb\n", encoding="utf-8")
    (tmp_path / "results").mkdir()
    run = tmp_path / "results" / "run.jsonl"

    def record(k8v4: float) -> None:
        run.write_text("".join(json.dumps(r) + "\n" for r in _rows({"F16": 40.0, "K8V4": k8v4})), encoding="utf-8")

    record(30.0)
    assert _run(program, "--root", tmp_path, "--check").returncode == 1
    assert _run(program, "--root", tmp_path, run).returncode == 0
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert text.startswith("a\n<!-- results: run.jsonl -->\n") and text.endswith("<!-- end of results -->\nb\n")
    cells = "| 100.00 | 75.0 % | 30.0 | 30.0 | 20.500 ± 0.250 | 0.01250 ± 0.00050 | 94.0 % |"
    assert f"| K8V4 | q8_0/kvq4 {cells}" in text
    assert "0.75x" in text and "floor, f16 against itself, is 0.00000" in text
    assert _run(program, "--root", tmp_path, "--check").returncode == 0

    record(20.0)
    assert _run(program, "--root", tmp_path, "--check").returncode == 1
    assert _run(program, "--root", tmp_path).returncode == 0
    assert "0.50x" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_table_refuses_what_is_not_committed_with_the_project(repo: Path, tmp_path: Path) -> None:
    program = repo / "scripts" / "readme_table.py"
    other = tmp_path / "run.jsonl"
    other.write_text("", encoding="utf-8")
    before = (repo / "README.md").read_bytes()
    done = _run(program, other)
    assert done.returncode == 2 and "is not in" in done.stderr
    assert (repo / "README.md").read_bytes() == before


@pytest.mark.parametrize("name", DOCS)
def test_links_lead_somewhere(repo: Path, name: str) -> None:
    page = repo / name
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name}: {target}"
        if anchor:
            heads = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}
            assert anchor in slugs, f"{name}: {target}"


def _words(repo: Path, pattern: str, *globs: str) -> Set[str]:
    found: Set[str] = set()
    for glob in globs:
        files = sorted(repo.glob(glob))
        assert files, f"nothing matches {glob}"
        for f in files:
            found |= set(re.findall(pattern, f.read_text(encoding="utf-8")))
    return found


def test_configuration_names_everything_there_is(repo: Path) -> None:
    page = (repo / "docs" / "configuration.md").read_text(encoding="utf-8")
    flags = _words(repo, r'"(--kvq[a-z-]*)"', "llama-ext/*.cpp")
    assert "--kvq-val-draft" in flags
    variables = _words(repo, r'"(LLAMA_ARG_KVQ[A-Z_]*)"', "llama-ext/*.cpp")
    assert "LLAMA_ARG_KVQ_KEY" in variables
    variables |= _words(repo, r'environ[^\n]*"((?:KVSPLIT|LLAMA)_[A-Z_]*[A-Z])"', "python/kvsplit/*.py", "vendor/*.py",
                        "scripts/*", "tests/**/*.py")  # fmt: skip
    assert {"KVSPLIT_NATIVE_DIR", "KVSPLIT_LLAMA_CPP_SDIST", "LLAMA_CPP_LIB_PATH"} <= variables
    metadata = _words(repo, r'"(kvq\.[a-z]+)"', "llama-ext/kvq.cpp")
    options = _words(repo, r"(?:option\(|set\((?=[A-Z_]+ [^\n]* CACHE ))(KVSPLIT_[A-Z_]+)", "CMakeLists.txt")
    assert {"KVSPLIT_BUILD_TESTS", "KVSPLIT_SOURCE_DIR"} <= options
    targets = _words(repo, r"(?m)^([a-z][a-z-]*):.*##", "Makefile")
    assert "test-slow" in targets
    wanted = flags | variables | metadata | options | {f"make {t}" for t in targets}
    missing = sorted(w for w in wanted if f"`{w}`" not in page and f"`{w} " not in page)
    assert not missing, f"docs/configuration.md doesn't say what these are: {missing}"


@pytest.mark.parametrize(
    ("command", "name", "head"),
    [("bench", "configuration", "`kvsplit bench "), ("plot", "configuration", "`kvsplit plot "),
     ("report", "configuration", "`kvsplit report "), ("capture", "capture", "## Options"),
     ("inspect", "inspect", "## What it prints")],
)  # fmt: skip
def test_every_option_of_a_measuring_command_has_a_row(repo: Path, command: str, name: str, head: str) -> None:
    page = (repo / "docs" / f"{name}.md").read_text(encoding="utf-8")
    # this command's table alone: others name the same options
    found = re.search(rf"^{re.escape(head)}.*?(?=^`kvsplit |^## )", page, re.M | re.S)
    assert found, f"docs/{name}.md has no {head!r}"
    page = found[0]
    options = _words(repo, r'"(--[a-z][a-z-]+)"(?=,|\))', f"python/kvsplit/commands/{command}.py") - {"--model"}
    assert "--json" in options and len(options) > 5
    rows = "\n".join(line for line in page.splitlines() if line.startswith("| `--"))
    missing = sorted(o for o in options if not re.search(rf"`{o}[` ]", rows))
    assert not missing, f"docs/{name}.md doesn't say what these options of kvsplit {command} are: {missing}"


def test_limits_of_the_verdict_are_those_of_the_report(repo: Path) -> None:
    from kvsplit import report

    page = (repo / "docs" / "measuring.md").read_text(encoding="utf-8")
    for t in report.TARGETS.values():
        decode = "" if t.decode is None else f"at least {t.decode}x of f16 "
        row = rf"\| `{t.name}`[^|]*\| at most {t.kld} \| at most \+{100 * t.ppl:g} % \| {decode}\|"
        assert re.search(row, page), f"docs/measuring.md has other limits for {t}"
    for n in (f"{report.MIN_CHUNKS} chunks", f"{report.SURE_ROUNDS} rounds"):
        assert f"{n} " in page or f"{n}." in page, f"docs/measuring.md doesn't say that a verdict needs {n}"


def test_prediction_follows_its_script(repo: Path) -> None:
    page = (repo / "docs" / "metal.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- (scripts/predict_metal.py .*?) -->\n(.*?)\n\n", page, re.S)
    assert found
    command = [sys.executable, str(repo / found[1].split()[0]), *found[1].split()[1:]]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == found[2].strip()


@pytest.mark.native
def test_c_example_compiles_and_runs(repo: Path, tmp_path: Path, synth_model: Callable[..., Path]) -> None:
    from kvsplit import native

    compiler = os.environ.get("CC") or shutil.which("cc")
    llama = repo / "vendor" / "src" / "vendor" / "llama.cpp"
    if not compiler:
        pytest.skip("no C compiler")
    page = (repo / "docs" / "c.md").read_text(encoding="utf-8")
    source = tmp_path / "example.c"
    source.write_text(re.findall(r"```c\n(.*?)```", page, re.S)[0], encoding="utf-8")
    lib = native.load().path.parent.resolve()
    command = [compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", str(source), "-o", str(tmp_path / "example")]
    command += [f"-I{d}" for d in (repo / "llama-ext", llama / "include", llama / "ggml" / "include")]
    command += [f"-L{lib}", "-lllama", "-lggml-base", f"-Wl,-rpath,{lib}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    model = synth_model(n_layer=6)
    done = subprocess.run([str(tmp_path / "example"), str(model)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("layer ")]
    assert [line.split()[5] for line in lines] == ["q8_0", "q8_0", "kvq4", "kvq4", "q8_0", "q8_0"], done.stdout
