# SPDX-License-Identifier: MIT
"""Commands of ``kvsplit`` that are more than a few lines, a module each; :mod:`kvsplit.cli` names them."""
