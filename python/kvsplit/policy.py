# SPDX-License-Identifier: MIT
"""Which layer's keys and values are stored as what: the grammar of ``--kvq-key``, ``--kvq-val`` and ``--kvq``.

SPEC   = TYPE {"," SLICE "=" TYPE}, for example ``8``, ``q5_1``, ``4,:2=8,-2:=16``
TYPE   = bits or the name of a cache type
SLICE  = INDEX | [INDEX] ":" [INDEX] [":" STEP], over the layers that store keys and values
PRESET = ``k<bits>v<bits>``, or ``8`` (= k8v4), ``4`` (= k4v4), ``16`` (= k16v16)

The native library parses the same grammar; a test holds the two together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple, Union

from kvsplit.cache_types import BITS, BY_NAME, allowed_text
from kvsplit.errors import CacheTypeError, KVQuantError, shown

if TYPE_CHECKING:
    from kvsplit.memory import ModelShape

SpecLike = Union[str, int]

_BLANK = " \t\r\n"
_SHORT_PRESETS: Dict[str, str] = {"8": "k8v4", "4": "k4v4", "16": "k16v16"}
_PRESET = re.compile(r"k([0-9]+)v([0-9]+)", re.ASCII)
_INDEX = re.compile(r"-?[0-9]{1,9}", re.ASCII)
_SLICE_HELP = "write 3, :2, -2:, 10:20 or ::2"


def _clean(text: str) -> str:
    """Trimmed, ASCII letters lowered: what the native parser sees."""
    return "".join(c.lower() if "A" <= c <= "Z" else c for c in text.strip(_BLANK))


def _text(given: SpecLike) -> str:
    """What was given as text; a number that no type has may be too long for Python to write."""
    return given if isinstance(given, str) else str(given) if 0 <= given <= 99 else "a number of no type"


def _where(argument: str) -> str:
    return f"{argument}: " if argument else ""


def _parse_type(text: str, argument: str, given: object) -> str:
    for bits, name in BITS.items():
        if text == str(bits):
            return name
    if text in BY_NAME:
        return text
    raise CacheTypeError(
        f"{_where(argument)}{shown(text)} is no cache type (given: {shown(given)}); allowed are {allowed_text()}",
        argument=argument,
        given=given,
    )


@dataclass(frozen=True)
class Slice:
    """Layers that an exception of a SPEC selects, as Python writes a slice; ``single`` is one index."""

    start: Optional[int]
    stop: Optional[int] = None
    step: int = 1
    single: bool = False

    def text(self) -> str:
        """Canonical text."""
        if self.single:
            return str(self.start)
        res = ("" if self.start is None else str(self.start)) + ":" + ("" if self.stop is None else str(self.stop))
        return res if self.step == 1 else f"{res}:{self.step}"

    def layers(self, n_layer: int) -> range:
        """Indices selected among ``n_layer`` layers.

        Raises:
            ValueError: with the reason, if an end lies outside or nothing is selected.
        """
        there = f"layers 0 to {n_layer - 1} store keys and values"

        def place(i: Optional[int], default: int) -> int:
            return default if i is None else i + n_layer if i < 0 else i

        start = place(self.start, 0)
        if self.single:
            if not 0 <= start < n_layer:
                raise ValueError(f"slice {self.text()!r} is out of range: {there}")
            return range(start, start + 1)
        stop = place(self.stop, n_layer)
        if not (0 <= start <= n_layer and 0 <= stop <= n_layer):
            raise ValueError(f"slice {self.text()!r} is out of range: {there}")
        if start >= stop:
            raise ValueError(f"slice {self.text()!r} selects no layer: {there}")
        return range(start, stop, self.step)


def _parse_slice(text: str, argument: str, given: object) -> Slice:
    def bad() -> KVQuantError:
        return KVQuantError(
            f"{_where(argument)}{shown(text)} is no layer slice (given: {shown(given)}); {_SLICE_HELP}",
            argument=argument,
            given=given,
        )

    def index(part: str) -> Optional[int]:
        if not part:
            return None
        if not _INDEX.fullmatch(part):
            raise bad()
        return int(part)

    parts = [p.strip(_BLANK) for p in text.split(":")]
    if len(parts) > 3:
        raise bad()
    values = [index(p) for p in parts]
    if len(values) == 1:
        if values[0] is None:
            raise bad()
        return Slice(values[0], single=True)
    step = values[2] if len(values) == 3 and values[2] is not None else 1
    if step < 1:
        raise KVQuantError(
            f"{_where(argument)}the step of slice {shown(text)} must be 1 or more (given: {shown(given)})",
            argument=argument,
            given=given,
        )
    return Slice(values[0], values[1], step)


@dataclass(frozen=True)
class Spec:
    """Parsed SPEC of one side: a default type, then exceptions of which later ones win."""

    default: str
    exceptions: Tuple[Tuple[Slice, str], ...] = ()

    @classmethod
    def parse(cls, text: SpecLike, argument: str = "") -> Spec:
        """Parse a SPEC given as text or as a number of bits.

        Raises:
            CacheTypeError: it names something that is no cache type.
            KVQuantError: it is malformed.
        """
        if isinstance(text, bool) or not isinstance(text, (str, int)):
            raise KVQuantError(
                f"{_where(argument)}a SPEC is text or a number of bits, not {type(text).__name__}: {shown(text)}; "
                f"allowed are {allowed_text()}",
                argument=argument,
                given=text,
            )
        parts = _clean(_text(text)).split(",")
        default = _parse_type(parts[0].strip(_BLANK), argument, text)
        exceptions: List[Tuple[Slice, str]] = []
        for raw in parts[1:]:
            part = raw.strip(_BLANK)
            left, eq, right = part.partition("=")
            if not eq:
                raise KVQuantError(
                    f"{_where(argument)}{shown(part)} is no exception (given: {shown(text)}); "
                    "write SLICE=TYPE, e.g. :2=8",
                    argument=argument,
                    given=text,
                )
            where = _parse_slice(left.strip(_BLANK), argument, text)
            exceptions.append((where, _parse_type(right.strip(_BLANK), argument, text)))
        return cls(default, tuple(exceptions))

    def text(self) -> str:
        """Canonical text: types by name, no blanks."""
        return ",".join([self.default, *(f"{s.text()}={t}" for s, t in self.exceptions)])

    def types(self, n_layer: int, argument: str = "") -> List[str]:
        """Type of each of ``n_layer`` layers.

        Raises:
            KVQuantError: a slice lies outside the layers or selects none.
        """
        res = [self.default] * n_layer
        for where, name in self.exceptions:
            try:
                layers = where.layers(n_layer)
            except ValueError as e:
                raise KVQuantError(f"{_where(argument)}{e}", argument=argument, given=self.text()) from None
            for i in layers:
                res[i] = name
        return res


def _parse_preset(preset: object, argument: str) -> Tuple[Spec, Spec]:
    if isinstance(preset, bool) or not isinstance(preset, (str, int)):
        raise KVQuantError(
            f"{_where(argument)}a PRESET is text such as 'k8v4', not {type(preset).__name__}: {shown(preset)}",
            argument=argument,
            given=preset,
        )
    text = _clean(_text(preset))
    text = _SHORT_PRESETS.get(text, text)
    m = _PRESET.fullmatch(text)
    if m is None:
        raise KVQuantError(
            f"{_where(argument)}{shown(preset)} is no preset; write k<bits>v<bits> such as k8v4, k6v5 or k3v3, "
            "or 8 (= k8v4), 4 (= k4v4), 16 (= f16); types by name or by layer go to kvq_key and kvq_val",
            argument=argument,
            given=preset,
        )
    return Spec.parse(m.group(1), argument), Spec.parse(m.group(2), argument)


@dataclass(frozen=True, repr=False)
class KVQuant:
    """How keys and values of a KV cache are stored. Immutable, comparable, hashable.

    Make it with :meth:`parse`; the fields are canonical texts.

    Attributes:
        key: SPEC of the keys, types by name.
        val: SPEC of the values.
    """

    key: str = "f16"
    val: str = "f16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", Spec.parse(self.key, "key").text())
        object.__setattr__(self, "val", Spec.parse(self.val, "val").text())

    @classmethod
    def parse(
        cls,
        kvq: Union[SpecLike, KVQuant, None] = None,
        *,
        key: Optional[SpecLike] = None,
        val: Optional[SpecLike] = None,
    ) -> KVQuant:
        """Read a preset, SPECs, or a preset with one side replaced.

        Args:
            kvq: PRESET for both sides (``"k8v4"``, ``8``), or a KVQuant.
            key: SPEC of the keys; wins over ``kvq``.
            val: SPEC of the values; wins over ``kvq``.

        Raises:
            KVQuantError: a ValueError that names the argument, shows what was given and lists what is allowed.
        """
        if isinstance(kvq, KVQuant):
            k, v = kvq.key, kvq.val
        elif kvq is None:
            k, v = "f16", "f16"
        else:
            sk, sv = _parse_preset(kvq, "kvq")
            k, v = sk.text(), sv.text()
        if key is not None:
            k = Spec.parse(key, "kvq_key").text()
        if val is not None:
            v = Spec.parse(val, "kvq_val").text()
        return cls(k, v)

    @classmethod
    def from_preset(cls, preset: SpecLike) -> KVQuant:
        """Both sides of a PRESET."""
        return cls.parse(preset)

    @classmethod
    def from_text(cls, text: str, argument: str = "config") -> KVQuant:
        """Read a label or preset (``F16``, ``K8V4``, ``8``) or two SPECs as ``KEY/VAL``."""
        if "/" in text:
            k, _, v = text.partition("/")
            return cls(Spec.parse(k, argument).text(), Spec.parse(v, argument).text())
        floats = {"f16": "k16v16", "fp16": "k16v16", "f32": "k32v32", "fp32": "k32v32"}
        text = floats.get(_clean(text), text)
        k_spec, v_spec = _parse_preset(text, argument)
        return cls(k_spec.text(), v_spec.text())

    @property
    def key_spec(self) -> Spec:
        """The keys' SPEC, parsed."""
        return Spec.parse(self.key, "kvq_key")

    @property
    def val_spec(self) -> Spec:
        """The values' SPEC, parsed."""
        return Spec.parse(self.val, "kvq_val")

    @property
    def per_layer(self) -> bool:
        """True if types differ by layer."""
        return bool(self.key_spec.exceptions or self.val_spec.exceptions)

    @property
    def quantized_val(self) -> bool:
        """True if any layer's values are quantized: flash attention is then needed."""
        spec = self.val_spec
        return any(BY_NAME[t].block > 1 for t in [spec.default, *(t for _, t in spec.exceptions)])

    @property
    def text(self) -> str:
        """``KEY/VAL`` in canonical text; :meth:`from_text` reads it back."""
        return f"{self.key}/{self.val}"

    @property
    def label(self) -> str:
        """Short name: ``F16``, ``K8V4``; the text where widths alone don't say it."""
        bits = {name: b for b, name in BITS.items()}
        if self.key == self.val == "f16":
            return "F16"
        if self.key in bits and self.val in bits:
            return f"K{bits[self.key]}V{bits[self.val]}"
        return self.text

    def types(self, n_layer: int) -> List[Tuple[str, str]]:
        """Types of keys and values of each layer that stores them.

        Raises:
            KVQuantError: a slice lies outside the layers or selects none.
        """
        return list(zip(self.key_spec.types(n_layer, "kvq_key"), self.val_spec.types(n_layer, "kvq_val")))

    def bits_per_value(self, n_layer: Optional[int] = None) -> float:
        """Mean storage of one value in bits, scales included, keys and values and layers weighted alike.

        Args:
            n_layer: layers that store keys and values; needed when types differ by layer.

        Raises:
            KVQuantError: types differ by layer and ``n_layer`` is None, or a slice lies outside the layers.
        """
        if n_layer is None:
            if self.per_layer:
                raise KVQuantError(
                    f"n_layer: {self.text} differs by layer, so the number of layers is needed",
                    argument="n_layer",
                    given=None,
                )
            n_layer = 1
        pairs = self.types(n_layer)
        return sum(BY_NAME[k].bits_per_value + BY_NAME[v].bits_per_value for k, v in pairs) / (2 * len(pairs))

    def bytes(self, shape: ModelShape, n_ctx: int, **kwargs: Any) -> int:
        """Bytes of the KV cache of a model at a context of ``n_ctx`` tokens.

        Args:
            shape: of the model, see :class:`kvsplit.memory.ModelShape`.
            n_ctx: tokens, over all sequences.
            **kwargs: as :func:`kvsplit.memory.kv_memory`.
        """
        from kvsplit.memory import kv_memory

        return kv_memory(shape, self, n_ctx, **kwargs).total_bytes

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"KVQuant(key={self.key!r}, val={self.val!r})"


F16 = KVQuant()
