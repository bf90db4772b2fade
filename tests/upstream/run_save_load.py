# SPDX-License-Identifier: MIT
"""Run upstream's test-save-load-state on the real model that KVSPLIT_TEST_MODEL names.

Exit code 77: skipped, because it names none. Under KVSPLIT_REQUIRE=1 that is a failure.
"""

import os
import subprocess
import sys

model = os.environ.get("KVSPLIT_TEST_MODEL", "")
if not os.path.isfile(model):
    print("skipped: KVSPLIT_TEST_MODEL names no model file", flush=True)
    sys.exit(1 if os.environ.get("KVSPLIT_REQUIRE") == "1" else 77)
sys.exit(subprocess.run([sys.argv[1], "-m", model, "-n", "16", "-c", "256"], stdin=subprocess.DEVNULL).returncode)
