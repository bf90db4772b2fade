# SPDX-License-Identifier: MIT
"""What C++ for OpenCL takes and Metal's language does not: rules on the text of a source and on clang's syntax tree."""

from __future__ import annotations

import re
from typing import Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

import prepare

# Words and why. Matched in code, not in comments.
WORDS = (
    (r"\bdouble\b", "double: Metal has float at most"),
    (r"\blong\s+(?:long|double)\b", "long long, long double: Metal has neither; long has 64 bits"),
    (r"#\s*include\s*<(?!metal_|Metal)", "C++ library: Metal has its own alone"),
    (r"\bstd\s*::", "std: Metal's library is in the namespace metal"),
    (r"\bvirtual\b", "virtual: Metal has no virtual functions"),
    (r"\b(?:new|delete)\b", "new, delete: a kernel has no heap"),
    (r"\b(?:try|catch|throw|noexcept)\b", "exceptions: Metal has none"),
    (r"\b(?:dynamic_cast|typeid)\b", "type identification at run time: Metal has none"),
    (r"\bgoto\b", "goto: Metal has none"),
    (r"\b(?:register|thread_local)\b", "storage class: Metal has neither register nor thread_local"),
    (r"\[[&=]?\]\s*(?:\([^)]*\)\s*)?\{", "lambda: older versions of Metal have none"),
)

NO_SPACE = "pointer or reference without address space: Metal has no default one"
NO_CONSTANT = "storage that outlives a call: Metal has it in the constant address space alone"
RECURSION = "recursion: older versions of Metal have none"
NOT_IN_KERNEL = "threadgroup variable: Metal has them in the body of a kernel alone"
NOT_A_BUFFER = "pointer or reference of a kernel: it must be in device, constant or threadgroup"
NO_SOURCE = "parameter of a kernel: a value needs an attribute that says where it comes from"

SPACES = ("__global", "__local", "__constant", "__private")

# Nodes of the tree with a type that somebody wrote.
DECLARATIONS = {"VarDecl", "ParmVarDecl", "FieldDecl", "TypedefDecl", "TypeAliasDecl"}
CASTS = {"CStyleCastExpr", "CXXStaticCastExpr", "CXXReinterpretCastExpr", "CXXFunctionalCastExpr", "CXXConstCastExpr"}
FUNCTIONS = {"FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXConversionDecl", "CXXDestructorDecl"}

NODE = re.compile(r"([ |`-]*)(\w+) 0x[0-9a-f]+ (.*)")
PLACE = re.compile(r"\bcol:\d+|\bline:(\d+):\d+|(<[a-z ]+>|[^\s<>,]+):(\d+):\d+")
CALLED = re.compile(r"\b(?:Function|FunctionTemplate|CXXMethod) 0x[0-9a-f]+ '(\w+)'|\((?:no )?ADL\) = '(\w+)'")


def of_text(text: str) -> Iterator[Tuple[int, str]]:
    """Finds words and the parameters of kernels that Metal refuses. Yields (line, message)."""
    code = prepare.blank_comments(text)
    for pattern, message in WORDS:
        for match in re.finditer(pattern, code):
            yield prepare.line_of(code, match.start()), message
    for match in re.finditer(r"\bkernel\s+void\s+\w+\s*\(", code):
        position = match.end()
        for parameter in prepare.split_parameters(code[position : prepare.closing(code, match.end() - 1)]):
            line = prepare.line_of(code, position + len(parameter) - len(parameter.lstrip()))
            position += len(parameter) + 1
            if re.search(r"[*&]", parameter):
                if not re.search(r"\b(?:device|constant|threadgroup)\b(?!\s*\()", parameter):
                    yield line, NOT_A_BUFFER
            elif not re.search(r"\[\[\s*(?:" + "|".join(prepare.BUILT_IN) + r")\s*\]\]", parameter):
                yield line, NO_SOURCE


class Function(NamedTuple):
    """A function in the tree: how deep it stands, where, what it calls, where it declares threadgroup variables."""

    depth: int
    name: str
    file: str
    line: int
    calls: Set[str]
    threadgroup: List[int]


def lacks_space(written: str) -> bool:
    """Whether a type, as clang writes it, has a pointer or reference to no address space or to the generic one."""
    start = 0
    for match in re.finditer(r"[*&]+", written):
        is_function = written[: match.start()].endswith("(") and written[match.end() :].startswith(")(")
        if not is_function and not any(space in written[start : match.start()] for space in SPACES):
            return True
        start = match.end()
    return False


def of_tree(dump: str, files: Set[str]) -> List[Tuple[str, int, str]]:
    """Finds declarations in clang's syntax tree, as -ast-dump prints it, that Metal refuses.

    Templates are read as they are written: the tree must not hold their instantiations.

    Returns (file, line, message) for what stands in one of the given files.
    """
    findings: Dict[Tuple[str, int, str], None] = {}
    functions: List[Function] = []
    current: Optional[Function] = None
    is_kernel: Set[int] = set()  # of indices in functions
    skipped: Optional[int] = None  # depth of something that the compiler made
    file, line = "", 0

    for text in dump.splitlines():
        node = NODE.match(text)
        if not node:
            continue
        depth, kind, rest = len(node[1]), node[2], node[3]

        # A place is printed as far as it differs from the one before, so each must be looked at.
        before_type = rest.split("'", 1)[0]
        places = list(PLACE.finditer(before_type))
        for place in places:
            line = int(place[1] or place[3] or line)
            file = place[2] or file

        if skipped is not None and depth > skipped:
            continue
        skipped = depth if re.search(r"> .*\bimplicit\b", before_type) else None
        if skipped is not None:
            continue
        if current and depth <= current.depth:
            current = None

        quoted = re.search(r"'([^']*)'", rest)
        written = quoted[1] if quoted else ""
        here = file in files

        if kind in FUNCTIONS:
            name = re.search(r"(\w+) $", before_type)
            if here and lacks_space(written.split("(", 1)[0]):
                findings[file, line, NO_SPACE] = None
            if kind == "FunctionDecl" and name and current is None:
                current = Function(depth, name[1], file, line, set(), [])
                functions.append(current)
        elif here and kind in DECLARATIONS | CASTS and lacks_space(written):
            # Metal takes `float x[N]` as a parameter, without a space. Printed as a pointer, it ends behind its name.
            end, name_at = (int(place[0].rsplit(":", 1)[1]) for place in (places[0], places[0], *places)[-2:])
            is_array = kind == "ParmVarDecl" and end > name_at and "(" not in written and "cinit" not in rest
            if not is_array:
                findings[file, line, NO_SPACE] = None

        if here and kind == "VarDecl":
            own = re.split(r"[*&]", written)[-1]
            is_static = re.search(r"\bstatic\b", rest[rest.rfind("'") :])
            if "__global" in own or (is_static and "__constant" not in own):
                findings[file, line, NO_CONSTANT] = None

        if current:
            if kind == "AnnotateAttr" and rest.endswith('"kernel"'):
                is_kernel.add(len(functions) - 1)
            for called in CALLED.finditer(rest):
                name_called = called[1] or called[2]
                if name_called == "msl_threadgroup_variable":
                    current.threadgroup.append(line)
                current.calls.add(name_called)

    # by name: overloads count as one
    graph: Dict[str, Set[str]] = {}
    for function in functions:
        graph.setdefault(function.name, set()).update(function.calls)
    for i, function in enumerate(functions):
        if function.file in files:
            if i not in is_kernel:
                findings.update({(function.file, at, NOT_IN_KERNEL): None for at in function.threadgroup})
            if reaches(function.name, graph):
                findings[function.file, function.line, RECURSION] = None
    return list(findings)


def reaches(name: str, graph: Dict[str, Set[str]]) -> bool:
    """Whether a function is called by what it calls, directly or not."""
    todo = [name]
    seen: Set[str] = set()
    while todo:
        new = graph.get(todo.pop(), set()) - seen
        seen |= new
        todo += new
    return name in seen
