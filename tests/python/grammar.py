# SPDX-License-Identifier: MIT
"""Well-formed SPECs, drawn at random."""

from __future__ import annotations

from typing import Optional

from hypothesis import strategies as st

from kvsplit.cache_types import BITS, CACHE_TYPES

TYPES = st.sampled_from([t.name for t in CACHE_TYPES] + [str(b) for b in BITS])
ENDS = st.one_of(st.none(), st.integers(-40, 40))


@st.composite
def specs(draw: st.DrawFn) -> str:
    def blank() -> str:
        return draw(st.sampled_from(["", "", " ", "\t"]))

    out = [blank() + draw(TYPES) + blank()]
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            where = str(draw(st.integers(-40, 40)))
        else:
            start, stop = draw(ENDS), draw(ENDS)
            where = f"{'' if start is None else start}:{blank()}{'' if stop is None else stop}"
            if draw(st.booleans()):
                step: Optional[int] = draw(st.one_of(st.none(), st.integers(1, 5)))
                where += ":" + ("" if step is None else str(step))
        out.append(f"{blank()}{where}{blank()}={blank()}{draw(TYPES).upper()}{blank()}")
    return ",".join(out)
