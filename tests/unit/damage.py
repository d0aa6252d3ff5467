"""Ways to damage a file: for tests that a reader answers with its own errors, whatever the bytes."""

import re

from hypothesis import strategies as st

_NUMBERS = (b"-1", b"0", b"7", b"1e9", b"null", b'"x"', b"4611686018427387904", b"9" * 23)
_WHOLE = re.compile(rb"\d+")


def damaged(data: bytes, *, numbers: bool = False) -> st.SearchStrategy[bytes]:
    """The bytes with a few of them changed, cut out, doubled or added; `numbers`: or a number replaced."""
    places = [match.span() for match in _WHOLE.finditer(data)] if numbers else []
    one = st.tuples(
        st.sampled_from(["change", "cut", "double", "add", *(["number"] * 4 if places else [])]),
        st.integers(0, len(data) - 1),
        st.integers(0, 255),
        st.integers(1, 64),
    )

    def apply(changes: list[tuple[str, int, int, int]]) -> bytes:
        made = bytearray(data)
        for kind, at, byte, length in sorted(changes, key=lambda change: -change[1]):
            if kind == "change":
                made[at] = byte
            elif kind == "cut":
                del made[at : at + length]
            elif kind == "double":
                made[at:at] = made[at : at + length]
            elif kind == "add":
                made[at:at] = bytes([byte])
            else:
                start, end = places[at % len(places)]
                made[start:end] = _NUMBERS[byte % len(_NUMBERS)]
            if not made:
                break
        return bytes(made)

    return st.lists(one, min_size=1, max_size=1 if numbers else 4).map(apply)
