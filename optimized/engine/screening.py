"""What can be seen to be wrong with a request before anything runs, without tokenising the whole pile."""

from __future__ import annotations

from radixmlp.optimized.engine.encoders import Encoder

_AT_ONCE = 256  # requests tokenised together
_JOINT = 8  # tokens that two texts may have more together than apart


def screen(encoder: Encoder) -> None:
    """Raise for what is empty or too long.

    A text has no more tokens than UTF-8 bytes (but for what a tokenizer's normaliser spells out). Only requests that
    can be too long by that count are tokenised here, and a beginning that many have in common is counted once. What
    may be cut is never too long.

    Raises:
        RequestError: names the request.
    """
    room = encoder.limit.tokens - encoder.around
    heads: dict[str, int] = {}
    doubtful = []
    for number, parts in enumerate(encoder.parts):
        if not any(map(str.strip, parts)):
            doubtful.append(number)
        elif not encoder.limit.truncate and _num_bytes(parts, room) > room:
            head = parts[0]
            if head not in heads:
                heads[head] = len(encoder.tokens.encode_each([head], [encoder.first[number]])[0])
            if heads[head] + _JOINT + _num_bytes(parts[1:], room) > room:
                doubtful.append(number)
    for start in range(0, len(doubtful), _AT_ONCE):
        encoder(doubtful[start : start + _AT_ONCE])


def _num_bytes(parts: tuple[str, ...], enough: int) -> int:
    """The UTF-8 bytes of the parts, or a number above them that is not more than `enough`."""
    most = 4 * sum(map(len, parts))
    return most if most <= enough else sum(len(part.encode(errors="surrogatepass")) for part in parts)
