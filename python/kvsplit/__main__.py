# SPDX-License-Identifier: MIT
"""``python -m kvsplit``."""

from __future__ import annotations

import sys

from kvsplit.cli import main

sys.exit(main())
