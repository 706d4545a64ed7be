"""The shapes of the models that the paper measures, for predictions."""

from __future__ import annotations

from radixmlp.verify.ideal import DecoderShape

_VOCABULARY = 151_936
QWEN3 = {
    "0.6b": DecoderShape(1024, 16, 8, 128, 3072, _VOCABULARY, (None,) * 28),
    "4b": DecoderShape(2560, 32, 8, 128, 9728, _VOCABULARY, (None,) * 36),
    "8b": DecoderShape(4096, 32, 8, 128, 12_288, _VOCABULARY, (None,) * 36),
}
TITLES = {"0.6b": "Qwen3-0.6B", "4b": "Qwen3-4B", "8b": "Qwen3-8B"}  # as the paper's tables call them
WIDTHS = {"0.6b": "qwen3-0.6b", "4b": "qwen3-4b", "8b": "qwen3-8b"}  # as the measured series call them
