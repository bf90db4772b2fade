#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
#
# Sets KVSplit up in the clone that this script is in. Asks nothing, can be run again, and removes nothing
# that it did not make. bash 3.2 is enough (macOS).

set -euo pipefail

usage() {
    local text
    IFS= read -r -d '' text <<'TEXT' || true
Usage: scripts/install_kvsplit.sh [OPTIONS]

Builds the libraries and tools in build/, and installs the Python package.

  --python venv|system|none  where the package goes: .venv (default), the running Python, or nowhere
  --build-type TYPE          Release (default), RelWithDebInfo or Debug
  --jobs N                   compile N files at a time (default: number of cores)
  --with-cuda                also build for NVIDIA GPUs (needs nvcc)
  --no-model                 don't get the small model (SmolLM2, 93 MB)
  --demo                     afterwards: text under K8V4, then a table and a chart
  -h, --help                 this text

Environment:
  PYTHON                     the Python to use (default: python3)
  CC, CXX                    the compilers to use (default: cc, c++)
  KVSPLIT_CACHE_DIR          folder for downloads (default: the user's cache folder)
  KVSPLIT_LLAMA_CPP_SDIST    a local copy of the pinned source archive

The log is build/install.log. Exit codes: 0 done, 1 a step failed, 2 usage, 3 something needed is missing.
TEXT
    printf '%s' "$text"
}

fail_usage() {
    echo "install_kvsplit.sh: $1 (see --help)" >&2
    exit 2
}

mode=venv
build_type=Release
jobs=
cuda=
model=1
demo=

while [ $# -gt 0 ]; do
    case "$1" in
        --python=*|--build-type=*|--jobs=*)
            option="${1%%=*}"
            value="${1#*=}"
            shift
            set -- "$option" "$value" ${1+"$@"}
            continue ;;
        --python)
            case "${2:-}" in
                venv|system|none) mode="$2" ;;
                *) fail_usage "--python takes venv, system or none, not '${2:-}'" ;;
            esac
            shift 2 ;;
        --build-type)
            case "${2:-}" in
                Release|RelWithDebInfo|MinSizeRel|Debug) build_type="$2" ;;
                *) fail_usage "--build-type takes Release, RelWithDebInfo, MinSizeRel or Debug, not '${2:-}'" ;;
            esac
            shift 2 ;;
        --jobs)
            case "${2:-}" in
                ''|*[!0-9]*|0*) fail_usage "--jobs takes a number from 1, not '${2:-}'" ;;
            esac
            jobs="$2"
            shift 2 ;;
        --with-cuda) cuda=1; shift ;;
        --no-model) model=; shift ;;
        --demo) demo=1; shift ;;
        -h|--help) usage; exit 0 ;;
        *) fail_usage "unknown option '$1'" ;;
    esac
done

[ -z "$demo" ] || [ "$mode" != none ] || fail_usage "--demo needs the Python package: not with --python none"
[ -z "$demo" ] || [ -n "$model" ] || fail_usage "--demo needs the model: not with --no-model"

absent=
for tool in env uname cat tail sed awk df ls mkdir date; do
    command -v "$tool" >/dev/null 2>&1 || absent="$absent $tool"
done
if [ -n "$absent" ]; then
    echo "error: not found on the PATH:$absent" >&2
    echo "PATH is '${PATH:-}'. Add the system's folders: PATH=\"\$PATH:/usr/bin:/bin\" bash ${BASH_SOURCE[0]}" >&2
    exit 3
fi

case "${BASH_SOURCE[0]}" in
    */*) here="${BASH_SOURCE[0]%/*}" ;;
    *) here=. ;;
esac
root="$(cd "${here:-/}/.." && pwd)"
cd "$root"
system="$(uname -s)"
machine="$(uname -m)"
python="${PYTHON:-python3}"
[ -n "$jobs" ] || jobs="$(nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)"

if [ -e build ] && [ ! -f build/CMakeCache.txt ] && [ ! -f build/install.log ] && [ ! -d build/test-results ] \
    && [ -n "$(ls -A build)" ]; then
    echo "error: $root/build is there and is no build folder of KVSplit: move it away, then run this again." >&2
    exit 3
fi
mkdir -p build
log="$root/build/install.log"
: > "$log"
building=
state=build/.kvsplit-state  # "building" while compilers run: found there later, they were killed

#
# steps
#

step_no=0
step_count=4
[ "$mode" = none ] || step_count=$((step_count + 1))
[ -z "$model" ] || [ "$mode" = none ] || step_count=$((step_count + 1))
[ -z "$demo" ] || step_count=$((step_count + 1))
step_name=start
started=$(date +%s)

show() {
    printf '%s\n' "$*"
    printf '%s\n' "$*" >> "$log"
}

step() {
    step_no=$((step_no + 1))
    step_name="$1"
    show "[$step_no/$step_count] $1"
}

on_exit() {
    code=$?
    [ -z "$building" ] || echo stopped > "$state" || true
    if [ "$code" != 0 ] && [ "$code" != 3 ]; then
        {
            echo
            echo "FAILED in step $step_no of $step_count: $step_name"
            echo "The log is $log. Its last lines:"
            tail -n 15 "$log" | sed 's/^/    /'
            echo "Running this script again goes on from what is done."
        } >&2
        code=1
    fi
    exit "$code"
}
trap on_exit EXIT
trap 'exit 130' INT TERM HUP

# Run a command with its output in the log. On a terminal its latest line is shown.
quietly() {
    printf '+ %s\n' "$*" >> "$log"
    if [ -t 1 ]; then
        # pipefail: the command's failure counts, not that of the display
        "$@" 2>&1 </dev/null | while IFS= read -r line || [ -n "$line" ]; do
            printf '%s\n' "$line" >> "$log"
            printf '\r\033[K      %.70s' "$line"
        done
        printf '\r\033[K'
    else
        "$@" >> "$log" 2>&1 </dev/null
    fi
}

missing=0
lack() {
    missing=1
    show "      missing: $1"
    show "               $2"
}

#
# needs
#

step "Check what is needed ($system $machine)"

if [ "$system" = Darwin ]; then
    get_compiler="xcode-select --install"
    get_python="get Python from python.org, or: brew install python"
    get_cuda="CUDA is not made for macOS: leave --with-cuda away"
    if ! xcode-select -p >/dev/null 2>&1; then
        lack "Command Line Tools" "$get_compiler"
    fi
    case "$(command -v clang 2>/dev/null || true)" in
        */homebrew/*|/usr/local/opt/*|/usr/local/Cellar/*)
            show "      note: clang is Homebrew's. If the build fails: CC=/usr/bin/clang CXX=/usr/bin/clang++ $0" ;;
    esac
else
    get_compiler="Debian, Ubuntu: sudo apt install g++ make   Fedora: sudo dnf install gcc-c++ make"
    get_python="Debian, Ubuntu: sudo apt install python3 python3-venv   Fedora: sudo dnf install python3"
    get_cuda="install the CUDA toolkit and put its bin folder on the PATH"
fi

# try_compiler WHAT VARIABLE SUFFIX STANDARD SOURCE DEFAULT...
# Compiles and links a small program with the compiler that VARIABLE names, else with the first default there is.
# A compiler can be on the PATH and not work: no headers, no library, no licence.
try_compiler() {
    local what="$1" variable="$2" suffix="$3" standard="$4" source="$5" name said
    local command
    shift 5
    name="${!variable:-}"
    if [ -z "$name" ]; then
        for name in "$@" ''; do
            [ -z "$name" ] || ! command -v "$name" >/dev/null 2>&1 || break
        done
        if [ -z "$name" ]; then
            lack "$what ($1)" "$get_compiler"
            return 0
        fi
        command=("$name")
    elif command -v "$name" >/dev/null 2>&1; then
        command=("$name")
    else
        read -r -a command <<<"$name"  # a compiler with options, or behind ccache
        if ! command -v "${command[0]:-}" >/dev/null 2>&1; then
            lack "$what that $variable names ($name)" "$get_compiler"
            return 0
        fi
        name="$variable=$name"
    fi
    mkdir -p build/compiler-check
    printf '%s\n' "$source" > "build/compiler-check/try.$suffix"
    : > "build/compiler-check/try-$suffix"
    printf '+ %s\n' "${command[*]} $standard try.$suffix" >> "$log"
    if ! said="$("${command[@]}" "$standard" "build/compiler-check/try.$suffix" -o "build/compiler-check/try-$suffix" 2>&1 </dev/null)" \
        || [ ! -s "build/compiler-check/try-$suffix" ]; then
        printf '%s\n' "$said" >> "$log"
        lack "$what that works: $name can't compile a small program with $standard" "$get_compiler"
        while IFS= read -r name; do
            [ -z "$name" ] || show "               it said: $name"
            break
        done <<<"$said"
    fi
}
try_compiler "a C++ compiler" CXX cpp -std=c++17 \
    '#include <string>
#include <optional>
int main() { std::optional<std::string> s("x"); return s->size() == 1 ? 0 : 1; }' c++ g++ clang++
try_compiler "a C compiler" CC c -std=c11 \
    '#include <stdio.h>
int main(void) { return puts("x") < 0; }' cc gcc clang
command -v git >/dev/null 2>&1 || lack "git" "Debian, Ubuntu: sudo apt install git   macOS: xcode-select --install"
[ -z "$cuda" ] || command -v nvcc >/dev/null 2>&1 || lack "nvcc, for --with-cuda" "$get_cuda"

if ! command -v "$python" >/dev/null 2>&1; then
    lack "Python ($python)" "$get_python"
elif ! python_version="$("$python" -c 'import platform; print(platform.python_version())' 2>>"$log" </dev/null)"; then
    lack "a Python that works: $(command -v "$python") does not run Python code (the log is $log)" \
        "$get_python, then leave PYTHON unset or name it: PYTHON=/path/to/python3 $0"
elif case "$python_version" in [0-9]*.[0-9]*) false ;; esac then
    lack "a Python that works: $(command -v "$python") is not Python" \
        "$get_python, then leave PYTHON unset or name it: PYTHON=/path/to/python3 $0"
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' >/dev/null 2>&1; then
    lack "Python 3.9 or newer ($python is $python_version)" "$get_python"
else
    python_machine="$("$python" -c 'import platform; print(platform.machine())')"
    on_arm="$(sysctl -n hw.optional.arm64 2>/dev/null || echo 0)"
    if [ "$system" = Darwin ] && [ "$on_arm" = 1 ] && [ "$python_machine" = x86_64 ]; then
        lack "a Python for arm64 ($(command -v "$python") is for Intel Macs and runs under Rosetta: it can't load these libraries)" \
            "$get_python, then: PYTHON=/path/to/python3 $0"
    fi
    if [ "$mode" = venv ] && ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        lack "Python's venv module" "Debian, Ubuntu: sudo apt install python3-venv"
    fi
    if [ "$mode" = system ] && ! "$python" -m pip --version >/dev/null 2>&1; then
        lack "pip" "Debian, Ubuntu: sudo apt install python3-pip   else: $python -m ensurepip"
    fi
fi

cmake_ok() {
    command -v cmake >/dev/null 2>&1 || return 1
    cmake --version 2>/dev/null | awk 'NR == 1 { split($3, v, "."); exit !(v[1] > 3 || (v[1] == 3 && v[2] >= 21)) }'
}
if [ "$mode" = none ] && ! command -v ninja >/dev/null 2>&1 && ! command -v make >/dev/null 2>&1; then
    lack "ninja or make" "pip install ninja   (--python venv does it by itself)"
fi
if [ "$mode" = none ] && ! cmake_ok; then
    lack "cmake 3.21 or newer" "pip install cmake   (--python venv does it by itself)"
fi

# Source 0.3 GB, objects and libraries 0.7 GB, environment 0.7 GB, model 0.2 GB.
free_kib="$(df -Pk . | awk 'NR == 2 { print $4 }')"
if [ "${free_kib:-0}" -lt 2500000 ]; then
    lack "disk space: $((free_kib / 1024)) MiB are free here, 2500 MiB are needed" "make room, or clone elsewhere"
fi

if [ "$missing" != 0 ]; then
    show "Nothing was installed. Get what is missing, then run this again."
    exit 3
fi

#
# the work
#

bin=
if [ "$mode" = venv ]; then
    step "Python environment (.venv)"
    quietly "$python" scripts/setup_venv.py --venv .venv
    bin="$root/.venv/bin"
    python="$bin/python"
    PATH="$bin:$PATH"
    export PATH
elif [ "$mode" = system ]; then
    step "Python packages ($(command -v "$python"))"
    quietly "$python" scripts/setup_venv.py --system
    bin="$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')"
    PATH="$bin:$PATH"
    export PATH
fi

step "Source: pinned release and patches"
quietly "$python" scripts/patchq apply

step "Configure ($build_type$([ -z "$cuda" ] || echo ", CUDA"))"
set -- -S . -B build -DCMAKE_BUILD_TYPE="$build_type" -DPython3_EXECUTABLE="$(command -v "$python")"
if [ ! -f build/CMakeCache.txt ]; then
    # A folder that was configured before keeps its generator and its tests.
    set -- "$@" -DKVSPLIT_BUILD_TESTS=OFF
    if command -v ninja >/dev/null 2>&1; then set -- "$@" -G Ninja; fi
fi
[ -z "$cuda" ] || set -- "$@" -DGGML_CUDA=ON
quietly cmake "$@"

step "Build (about 5 minutes on 2 cores; $jobs at a time)"
set -- --build build --parallel "$jobs" --target kvsplit-natives
was=
[ ! -f "$state" ] || IFS= read -r was < "$state" || true
if [ "$was" = building ] && [ ! -f build/build.ninja ]; then
    # make takes an object for whole that a killed compiler left half; ninja keeps a record and doesn't
    show "      the last build was killed: everything is compiled anew"
    set -- "$@" --clean-first
fi
building=1
echo building > "$state"
quietly cmake "$@"
building=
echo done > "$state"

if [ "$mode" != none ]; then
    show "      install the package"
    quietly env SKBUILD_CMAKE_BUILD_TYPE="$build_type" \
        "$python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall .
fi

if [ -n "$model" ] && [ "$mode" != none ]; then
    step "Model: SmolLM2-135M"
    quietly "$bin/kvsplit" models pull smollm2
fi

if [ -n "$demo" ]; then
    step "Demo: text with 8-bit keys and 4-bit values, then a comparison"
    "$bin/kvsplit" run --model smollm2 --kvq 8 -p "The key-value cache of a language model" -n 64 </dev/null
    "$bin/kvsplit" compare --model smollm2 --quick </dev/null
fi

show "Done in $(($(date +%s) - started)) s. The log is $log"
if [ "$mode" = venv ]; then
    show "Next: source \"$root/.venv/bin/activate\" && kvsplit --help"
elif [ "$mode" = system ]; then
    show "Next: $bin/kvsplit --help"
else
    show "Next: \"$root/build/bin/llama-cli\" --help"
fi
