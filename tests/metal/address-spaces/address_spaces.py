#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Reads Metal kernels as Metal's compiler would where that compiler is not at hand: address spaces, types, and words.

    address_spaces.py           our kernels and those of upstream that our patches change
    address_spaces.py FILE...   these, by name
    address_spaces.py --all     all of ours and of upstream

Two readers look at each file:

- the pass: clang takes a rewritten copy as C++ for OpenCL, whose address spaces are Metal's under other names, with the
  declarations of `metal_stdlib` in this folder. Templates are instantiated with all types that they are used with.
- the lint (metal_lint.py): what that language allows and Metal's does not, found in the source and in clang's syntax
  tree.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[2]
sys.path[:0] = [str(HERE), str(HERE.parent)]

import metal_lint  # noqa: E402
import prepare  # noqa: E402

EXT = REPO / "ggml-metal-ext"
GGML = REPO / "vendor" / "src" / "vendor" / "llama.cpp" / "ggml" / "src"
UPSTREAM = GGML / "ggml-metal" / "kernels"

FLAGS = [
    *("-x", "cl", "-cl-std=clc++2021", "-cl-no-stdinc", "-nostdinc", "-target", "spir64", "-fsyntax-only"),
    *("-Xclang", "-cl-ext=-cl_khr_fp64,-__opencl_c_fp64"),  # Metal has no double
    *("-include", "metal_stdlib", "-D__METAL_VERSION__=310", "-DGGML_METAL_HAS_BF16"),
    *("-fno-caret-diagnostics", "-fno-color-diagnostics", "-ferror-limit=20"),
    "-Werror=unknown-attributes",
    "-Wno-duplicate-decl-specifier",  # `constant` implies const, and some write it as well
    "-Wno-c99-designator",
]

# Metal's manual doesn't say which of the two int8_t is. Overloads and templates must not depend on it.
INT8 = ("char", "signed char")

VECTOR = r"(?:bool|u?char|u?short|u?int|u?long|half|bfloat|float)[234]"
NUMBER = r"(?:\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)"


class Finding(NamedTuple):
    """What a reader refuses: reader is "pass" or "lint", line counts from 1."""

    reader: str
    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message} [{self.reader}]"


def find_clang() -> Optional[str]:
    """A clang of version 19 or later, or None. Apple's counts its versions in another way and doesn't qualify."""
    for name in ("clang-19", "clang-20", "clang-21", "clang-22", "clang"):
        path = shutil.which(name)
        if path:
            text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            version = re.search(r"clang version (\d+)", text)
            if version and int(version[1]) >= 19 and "Apple" not in text:
                return path
    return None


def sources() -> Dict[str, Path]:
    """All kernel sources and headers by name, ours and upstream's."""
    paths = [*UPSTREAM.iterdir(), UPSTREAM.parent / "ggml-metal-impl.h", *(EXT / "kernels").iterdir()]
    paths += [EXT / "kvq-metal-impl.h"]
    named = {path.name: path for path in paths}
    assert len(named) == len(paths), "a file of ours has the name of one of upstream's"
    return named


def included(name: str, texts: Mapping[str, str]) -> List[str]:
    """A source and all that it includes, directly or not, of the given texts."""
    names = [name]
    for one in names:
        found = re.findall(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', texts[one], flags=re.MULTILINE)
        names += [other for other in dict.fromkeys(found) if other in texts and other not in names]
    return names


def kernel_files(texts: Mapping[str, str]) -> List[str]:
    """Sources that are compiled on their own, which no other includes."""
    parts = {part for name in texts for part in included(name, texts)[1:]}
    return [name for name in sorted(texts) if name.endswith(".metal") and name not in parts]


def checked_files(texts: Mapping[str, str], patches: str) -> List[str]:
    """Kernel files of ours, and those of upstream that a patch changes, be it in what they include."""
    folder = UPSTREAM.relative_to(GGML.parents[1]).as_posix()
    changed = set(re.findall(rf"^\+\+\+ b/{folder}/(\S+)", patches, flags=re.MULTILINE))
    ours = {path.name for path in (EXT / "kernels").iterdir()}
    return [name for name in kernel_files(texts) if name in ours or changed & set(included(name, texts))]


def patch_texts() -> str:
    """All patches of the series."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted((REPO / "patches").glob("*.patch")))


def rewrite(text: str) -> str:
    """Says in C++ for OpenCL what Metal says in another way. Lines keep their numbers.

    Raises:
        prepare.PrepareError: if an attribute is left that no rule knows.
    """
    substitute = prepare.substitute

    # `template [[host_name("X")]] kernel T f<...>;` is an instantiation, which the syntax tree can do without
    text = substitute(
        r'\b(template\s*\[\[\s*host_name\("[^"]*"\s*\)\s*\]\]\s*kernel\s+)([^;]*);',
        lambda m: "\n" * m[1].count("\n") + f"MSL_INSTANTIATE({m[2]});",
        text,
    )
    # a function constant has its value from elsewhere; the pass or the lint sees if it isn't `constant`
    text = substitute(
        r"\b((?:constant\s+)?)(\w+)\s+(\w+)\s*\[\[\s*function_constant\([^\]]*\)\s*\]\]\s*;",
        lambda m: f"extern {m[1]}{m[2]} {m[3]};",
        text,
    )
    # attributes of parameters: metal_lint.py looks at those in the original
    text = substitute(r"\s*\[\[\s*(?:host_name|buffer|threadgroup)\([^)]*\)\s*\]\]", lambda _: "", text)
    text = substitute(r"\s*\[\[\s*(?:" + "|".join(prepare.BUILT_IN) + r")\s*\]\]", lambda _: "", text)
    # `threadgroup T x[N];`: OpenCL has these in its own kernels alone, which can't be templates
    text = substitute(
        r"^([ \t]+)threadgroup\s+(\w+)\s+(\w+)\s*((?:\[[^\]]*\])*)\s*;",
        lambda m: f"{m[1]}threadgroup {m[2]} (& {m[3]}){m[4]} = msl_threadgroup_variable<{m[2]}{m[4]}>();",
        text,
    )
    # clang puts a pointer to a function into the generic address space, and then takes no function for it
    text = substitute(r"\(\s*\*\s*(\w+)\s*\)\s*\(", lambda m: f"(&{m[1]})(", text)
    # vectors are classes here, and `c ? x : half2(...)` wants both sides in one address space
    text = substitute(
        rf"\? ([\w.\[\]]+) : ({VECTOR})\(([^()]*)\)", lambda m: f"? {m[2]}({m[1]}) : {m[2]}({m[2]}({m[3]}))", text
    )
    # a literal without suffix is a float in Metal
    text = substitute(rf"(?<![\w.]){NUMBER}(?![\w.])", lambda m: m[0] + "f", text)

    code = prepare.blank_comments(text)
    for match in re.finditer(r"\[\[\s*(\w*)[^\]]*\]\]", code):
        if match[1] not in prepare.ORDINARY:
            raise prepare.PrepareError(f"line {prepare.line_of(code, match.start())}: no rule for {match[0]}")
    return text


class Checker:
    """The sources, rewritten into a folder, and clang to read them with."""

    def __init__(self, clang: str, folder: Path) -> None:
        self.clang = clang
        self.folder = folder
        self.originals = {name: path.read_text(encoding="utf-8") for name, path in sources().items()}
        self.texts: Dict[str, str] = {}
        self.refused: Dict[str, Finding] = {}
        for name, text in self.originals.items():
            self.put(name, text)

    def put(self, name: str, text: str) -> None:
        """Replaces one of the sources."""
        self.texts[name] = text
        self.refused.pop(name, None)
        try:
            (self.folder / name).write_text(rewrite(text), encoding="utf-8")
        except prepare.PrepareError as error:
            line = re.match(r"line (\d+): ", str(error))
            self.refused[name] = Finding("pass", name, int(line[1]) if line else 1, str(error))

    def run(self, name: str, *flags: str) -> "subprocess.CompletedProcess[str]":
        command = [self.clang, *FLAGS, f"-I{HERE}", f"-I{self.folder}", f"-I{GGML}", *flags, str(self.folder / name)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def read_as_opencl(self, name: str) -> List[Finding]:
        """The pass. Errors alone: warnings are about C++, and upstream's kernels have some."""
        refused = [self.refused[one] for one in included(name, self.texts) if one in self.refused]
        if refused:
            return refused
        findings: Dict[Finding, None] = {}
        uses_int8 = any(re.search(r"\bint8_t\b", self.texts[one]) for one in included(name, self.texts))
        for int8 in INT8 if uses_int8 else INT8[:1]:
            done = self.run(name, f"-DMSL_INT8={int8}")
            for line in done.stderr.splitlines():
                match = re.match(r"(.*?):(\d+):\d+: (?:fatal )?error: (.*)", line)
                if match and "too many errors" not in line:
                    findings[Finding("pass", Path(match[1]).name, int(match[2]), match[3])] = None
            if done.returncode != 0 and not findings:
                raise RuntimeError(f"{name}: {done.stderr}")
            if findings:
                break
        return list(findings)

    def lint(self, name: str) -> List[Finding]:
        """The lint, over a file and all that it includes.

        Raises:
            RuntimeError: if clang doesn't take the file; the pass says what is wrong with it.
        """
        names = included(name, self.texts)
        findings = []
        for one in names:
            findings += [Finding("lint", one, line, message) for line, message in metal_lint.of_text(self.texts[one])]
        tree = self.run(name, "-DMSL_SYNTAX_TREE", "-DMSL_INT8=char", "-Xclang", "-ast-dump")
        if tree.returncode != 0:
            raise RuntimeError(f"{name}: no syntax tree: {tree.stderr}")
        known = {str(self.folder / one): one for one in names}
        found = metal_lint.of_tree(tree.stdout, set(known))
        return findings + [Finding("lint", known[file], line, message) for file, line, message in found]

    def check(self, name: str) -> List[Finding]:
        """What the pass finds, or else what the lint finds."""
        return self.read_as_opencl(name) or self.lint(name)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Prints what is found; 1 if anything is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="all of upstream's kernels as well")
    parser.add_argument("files", nargs="*", metavar="FILE", help="names of kernel files")
    args = parser.parse_args(arguments)

    clang = find_clang()
    if not clang:
        print("no clang 19 or later", file=sys.stderr)
        return 2
    findings: Dict[Finding, None] = {}
    with tempfile.TemporaryDirectory() as folder:
        checker = Checker(clang, Path(folder))
        if args.files:
            names = [Path(name).name for name in args.files]
        elif args.all:
            names = kernel_files(checker.texts)
        else:
            names = checked_files(checker.texts, patch_texts())
        for name in names:
            findings.update(dict.fromkeys(checker.check(name)))
    for finding in findings:
        print(finding)
    print(f"{len(names)} files, {len(findings)} findings", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
