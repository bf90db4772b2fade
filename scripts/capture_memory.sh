#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
#
# The memory of a command and all its children while it runs: samples, a summary, a curve.
#
#   scripts/capture_memory.sh [OPTIONS] -- COMMAND ARG...
#
# This is `kvsplit capture` of the clone that the script is in; --help lists the options. bash 3.2 is enough (macOS).

set -eu

# Not with `cd`: the command must run where we were called.
script="${BASH_SOURCE[0]}"
while [ -L "$script" ]; do
    folder="$(cd -P "$(dirname "$script")" && pwd)"
    script="$(readlink "$script")"
    case "$script" in
        /*) ;;
        *) script="$folder/$script" ;;
    esac
done
root="$(cd -P "$(dirname "$script")/.." && pwd)"

if [ -x "$root/.venv/bin/kvsplit" ]; then
    exec "$root/.venv/bin/kvsplit" capture "$@"
fi
python="${PYTHON:-python3}"
if ! command -v "$python" >/dev/null 2>&1; then
    echo "capture_memory.sh: $python was not found; run scripts/install_kvsplit.sh, or set PYTHON" >&2
    exit 1
fi
# The clone's own package, and not by PYTHONPATH: the command's environment must stay as it is.
exec "$python" -c '
import sys
sys.path.insert(0, sys.argv.pop(1))
sys.argv[0] = "kvsplit"
try:
    from kvsplit.cli import main
except ImportError as e:
    sys.exit(f"capture_memory.sh: {e}; run scripts/install_kvsplit.sh, or set PYTHON to a Python that has kvsplit")
sys.exit(main())
' "$root/python" capture "$@"
