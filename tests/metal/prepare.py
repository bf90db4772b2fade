#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Rewrites Metal sources so that a C++ compiler on Linux takes them.

    prepare.py kernels --output DIR FILE...     kernel sources and the headers that they include
    prepare.py device  --output FILE DEVICE_M   supports_op and the list of libraries, from ggml-metal-device.m

Every rule keeps the number of lines, so that a message of the compiler or of the emulator names the right line.
What no rule knows is an error: a kernel must not vanish because it is written in a new way.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

# Attributes of parameters that Metal fills in. The stand-in library has one enumerator `attribute_<name>` for each.
BUILT_IN = (
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "thread_index_in_simdgroup",
    "thread_index_in_threadgroup",
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threadgroups_per_grid",
    "threads_per_grid",
    "threads_per_simdgroup",
    "threads_per_threadgroup",
)

# Attributes that C++ has too.
ORDINARY = ("maybe_unused", "fallthrough", "nodiscard", "likely", "unlikely")


class PrepareError(Exception):
    """A source that the rules can't take."""


def line_of(text: str, position: int) -> int:
    """The number, from 1, of the line at a position of a text."""
    return text.count("\n", 0, position) + 1


def blank_comments(text: str) -> str:
    """Replaces comments and string contents by blanks of the same length, so that positions stay."""

    def blank(match: re.Match[str]) -> str:
        found = match.group(0)
        if found.startswith('"'):
            return '"' + " " * (len(found) - 2) + '"'
        return re.sub(r"[^\n]", " ", found)

    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.DOTALL)


def substitute(pattern: str, replacement: Callable[[re.Match[str]], str], text: str) -> str:
    """Like re.sub over code alone: matches that begin in a comment are left, line breaks are kept."""
    code = blank_comments(text)
    result = []
    end = 0
    for match in re.finditer(pattern, text, flags=re.DOTALL | re.MULTILINE):
        if match.start() < end or code[match.start() : match.end()].strip() == "":
            continue
        new = replacement(match)
        missing = match.group(0).count("\n") - new.count("\n")
        result += [text[end : match.start()], new, "\n" * missing]
        end = match.end()
    return "".join(result) + text[end:]


def split_parameters(text: str) -> list[str]:
    """Splits a parameter list at the commas that stand outside of brackets."""
    parts = [""]
    depth = 0
    for char in text:
        depth += (char in "(<[{") - (char in ")>]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def closing(code: str, start: int) -> int:
    """The position of the bracket that closes the one at `start`."""
    depth = 0
    for position in range(start, len(code)):
        depth += (code[position] in "([{") - (code[position] in ")]}")
        if depth == 0:
            return position
    raise PrepareError(f"line {line_of(code, start)}: a bracket is not closed")


def register_explicit(match: re.Match[str]) -> str:
    """An explicit instantiation with a host name becomes a registration, which instantiates as well."""
    name, declaration = match.group(1), match.group(2)
    # either `<type> f<...>` or `void f<...>(parameters)`: the function is the last name with its template arguments
    brackets = re.search(r"(\w+)\s*(<)", declaration)
    if not brackets:
        raise PrepareError(f"kernel {name}: an instantiation without template arguments")
    depth = 0
    for position in range(brackets.start(2), len(declaration)):
        depth += (declaration[position] == "<") - (declaration[position] == ">")
        if depth == 0:
            return f'MSL_REGISTER_KERNEL("{name}", {declaration[brackets.start(1) : position + 1]});'
    raise PrepareError(f"kernel {name}: template arguments are not closed")


def register_plain(text: str) -> str:
    """A kernel that is no template gets its registration behind its body, by its host name if it has one."""
    code = blank_comments(text)
    edits = []
    host_name = r'(\[\[\s*host_name\("\s*"\s*\)\s*\]\])?'
    for match in re.finditer(rf"^[ \t]*{host_name}\s*\bkernel\s+void\s+(\w+)\s*\(", code, flags=re.MULTILINE):
        before = code[: match.start()].rstrip()
        if before.endswith(">"):
            continue  # a template: registered where it is instantiated
        end = closing(code, match.end() - 1)
        if not code[end + 1 :].lstrip().startswith("{"):
            continue  # a declaration
        name = match.group(2)
        body = re.compile(r"^\}", flags=re.MULTILINE).search(code, end)
        if not body:
            raise PrepareError(f"kernel {name}: no end of its body at the beginning of a line")
        shown = name
        if match.group(1):
            shown = text[match.start(1) : match.end(1)].split('"')[1]
            edits.append((match.start(1), match.end(1), ""))
        edits.append((body.end(), body.end(), f' MSL_REGISTER_KERNEL("{shown}", {name});'))
    for start, end, new in reversed(edits):
        text = text[:start] + new + text[end:]
    return text


def strip_buffer_indices(text: str) -> str:
    """Removes `[[buffer(n)]]` where n is what the order of the parameters says anyway."""
    code = blank_comments(text)
    for match in re.finditer(r"\bkernel\s+void\s+(\w+)\s*\(", code):
        end = closing(code, match.end() - 1)
        index = 0
        for parameter in split_parameters(code[match.end() : end]):
            if not re.search(r"\b(?:device|constant)\b", parameter):
                continue
            given = re.search(r"\[\[\s*buffer\((\d+)\)\s*\]\]", parameter)
            if given and int(given.group(1)) != index:
                raise PrepareError(f"kernel {match.group(1)}: buffer({given.group(1)}) is parameter {index} in order")
            index += 1
    return substitute(r"\s*\[\[\s*buffer\(\d+\)\s*\]\]", lambda _: "", text)


def prepare_kernel(text: str) -> str:
    """Applies the rules to one kernel source or header.

    Raises:
        PrepareError: if something is left that no rule knows.
    """
    # Unrolled completely, the large kernels take a hundred times as long to compile.
    text = substitute(r'_Pragma\("clang loop unroll[^"]*"\)', lambda _: "", text)
    text = substitute(r"^[ \t]*#[ \t]*pragma[ \t]+unroll\b[^\n]*", lambda _: "", text)
    # `template [[host_name("X")]] kernel T f<...>;`
    text = substitute(
        r'\btemplate\s*\[\[\s*host_name\("([^"]*)"\s*\)\s*\]\]\s*kernel\s+([^;]*);', register_explicit, text
    )
    # `constant T NAME [[function_constant(ID)]];`: one variable in each library, as in Metal
    text = substitute(
        r"\bconstant\s+(\w+)\s+(\w+)\s*\[\[\s*function_constant\(([^\]]*)\)\s*\]\]\s*;",
        lambda m: f"MSL_FUNCTION_CONSTANT({m.group(1)}, {m.group(2)}, {m.group(3)});",
        text,
    )
    text = strip_buffer_indices(text)
    # `ushort i[[thread_index_in_simdgroup]]`: the type says where the value comes from
    text = substitute(
        r"\b(\w+)\s+(\w+)\s*\[\[\s*(" + "|".join(BUILT_IN) + r")\s*\]\]",
        lambda m: f"msl::built_in<{m.group(1)}, msl::attribute_{m.group(3)}> {m.group(2)}",
        text,
    )
    # `threadgroup T * p [[threadgroup(0)]]`: memory that the host sizes
    text = substitute(
        r"\bthreadgroup\s+([\w ]+?)\s*\*\s*(\w+)\s*\[\[\s*threadgroup\((\d+)\)\s*\]\]",
        lambda m: f"msl::threadgroup_argument<{m.group(1)}, {m.group(3)}> {m.group(2)}",
        text,
    )
    # `threadgroup T x[N];` in a kernel: storage that the lanes share
    text = substitute(
        r"^([ \t]+)threadgroup\s+(\w+)\s+(\w+)\s*((?:\[[^\]]*\])*)\s*;",
        lambda m: f"{m.group(1)}MSL_THREADGROUP_VARIABLE({m.group(2)}, {m.group(3)}, {m.group(4)});",
        text,
    )
    # Metal has no double: a literal without suffix is a float
    text = substitute(
        r"(?<![\w.])(?:\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(?![\w.])",
        lambda m: m.group(0) + "f",
        text,
    )
    text = register_plain(text)

    code = blank_comments(text)
    for match in re.finditer(r"\[\[\s*(\w*)[^\]]*\]\]", code):
        if match.group(1) not in ORDINARY:
            raise PrepareError(f"line {line_of(code, match.start())}: no rule for {match.group(0)}")
    for match in re.finditer(r"^\s+threadgroup\s+[\w:<>, ]+\s\w+\s*\[", code, flags=re.MULTILINE):
        raise PrepareError(f"line {line_of(code, match.start())}: no rule for {match.group(0).strip()}")
    return text


def function_text(text: str, code: str, name: str) -> str:
    """The definition of a C function, from its first line to the brace that closes it."""
    match = re.search(rf"^[\w ]*\b{name}\s*\(", code, flags=re.MULTILINE)
    if not match:
        raise PrepareError(f"no function {name}")
    body = code.index("{", closing(code, match.end() - 1))
    return text[match.start() : closing(code, body) + 1]


def prepare_device(text: str) -> str:
    """Takes supports_op, its helpers and the list of libraries out of ggml-metal-device.m, which is Objective-C.

    Returns C++ that expects a `struct ggml_metal_device` with a member `props`. The function is renamed
    `metal_supports_op`; the libraries become an array of names, `metal_library_names`.
    """
    code = blank_comments(text)

    includes = re.findall(r'^#(?:import|include)[ \t]+("[^"]+")', text, flags=re.MULTILINE)
    wanted = ["ggml_metal_device_supports_op"]
    helpers: list[str] = []
    while wanted:
        name = wanted.pop(0)
        body = function_text(text, code, name)
        helpers = [name, *[helper for helper in helpers if helper != name]]
        # static functions that it calls come along
        for called in re.findall(r"\b(\w+)\s*\(", blank_comments(body)):
            if called != name and re.search(rf"^static [\w ]*\b{called}\s*\(", code, flags=re.MULTILINE):
                wanted.append(called)
    functions = [function_text(text, code, name) for name in helpers]
    functions[-1] = functions[-1].replace("bool ggml_metal_device_supports_op(", "static bool metal_supports_op(", 1)

    macro = re.search(r"^#define GGML_METAL_LIBS\b(?:.*\\\n)*.*\n", text, flags=re.MULTILINE)
    if not macro:
        raise PrepareError("no list GGML_METAL_LIBS")

    lines = [f"#include {name}" for name in includes]
    # expanded by the compiler, as it may contain lists of other headers
    lines += ["", macro.group(0)]
    lines += ["static const char * const metal_library_names[] = {", "#define X(e, s) #s,", "    GGML_METAL_LIBS"]
    lines += ["#undef X", "};", ""]
    return "\n".join(lines) + "\n" + "\n\n".join(functions) + "\n"


def write_changed(path: Path, text: str) -> None:
    """Writes a file unless it holds that text already, so that nothing is compiled anew without need."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def main() -> int:
    """Runs one of the two commands; 1 and a message if a source can't be taken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    kernels = commands.add_parser("kernels", help="prepare kernel sources and headers")
    kernels.add_argument("--output", type=Path, required=True, help="folder")
    kernels.add_argument("files", type=Path, nargs="+")
    device = commands.add_parser("device", help="take supports_op out of ggml-metal-device.m")
    device.add_argument("--output", type=Path, required=True, help="file")
    device.add_argument("file", type=Path)
    args = parser.parse_args()

    path = None
    try:
        if args.command == "kernels":
            for path in args.files:
                write_changed(args.output / path.name, prepare_kernel(path.read_text(encoding="utf-8")))
        else:
            path = args.file
            write_changed(args.output, prepare_device(path.read_text(encoding="utf-8")))
    except PrepareError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
