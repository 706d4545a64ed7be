"""Text from a file that is not trusted, for a terminal: nothing in it moves the cursor or turns the line around."""

from __future__ import annotations

import unicodedata

_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}
_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
ELLIPSIS = " … "


def printable(text: str) -> str:
    """Control, format and unassigned characters as escapes; everything else as it is."""
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(_escaped(character) for character in text)


def shorten(text: str, width: int) -> str:
    """`printable(text)` in at most `width` characters, cut in the middle.

    Both ends are what a reader compares: the end of a shared text is where sequences part.
    """
    if len(text) > 4 * width:  # no need to escape what is cut anyway
        text = text[: 2 * width] + text[-2 * width :]
        whole = False
    else:
        whole = True
    shown = printable(text)
    if whole and len(shown) <= width:
        return shown
    room = max(2, width - len(ELLIPSIS))
    return shown[: room - room // 2] + ELLIPSIS + shown[len(shown) - room // 2 :]


def _escaped(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    category = unicodedata.category(character)
    if category not in _INVISIBLE and not (category == "Zs" and character != " "):
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
