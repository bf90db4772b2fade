# SPDX-License-Identifier: MIT
"""Run a build of test-kvq-codec for another instruction set, under an emulator where this CPU lacks it.

usage: run_codec.py [--needs FLAG,FLAG] [--emulator PROGRAM] [--missing REASON] [--] EXE ARGS...

Exit code 77: skipped, with the reason. Under KVSPLIT_REQUIRE=1 a missing emulator or compiler is a failure; a CPU that
lacks an instruction set is not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys


def cpu_flags() -> set[str]:
    """Instruction sets of this CPU, by the names that Linux has for them."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as f:
            for line in f:
                if line.startswith("flags"):
                    return set(line.split(":", 1)[1].split())
    except OSError:
        pass
    return set()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--needs", default="")
    parser.add_argument("--emulator")
    parser.add_argument("--missing")
    parser.add_argument("command", nargs="*")
    args = parser.parse_args()

    if args.missing:
        print(f"skipped: {args.missing}", flush=True)
        return 1 if os.environ.get("KVSPLIT_REQUIRE") == "1" else 77
    lacking = sorted(set(args.needs.split(",")) - {""} - cpu_flags())
    if lacking:
        print(f"skipped: this CPU has no {', '.join(lacking)}", flush=True)
        return 77
    emulator = [args.emulator] if args.emulator else []
    return subprocess.run([*emulator, *args.command], stdin=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main())
