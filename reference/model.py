"""One complete decoder, Qwen3, run dense, as the paper does, or on the trie.

Legend: N rows of the ragged batch, n rows computed (N dense, N' compact), d hidden size, H heads,
D head dimension, V vocabulary. Submodules bear the names of the Hugging Face checkpoint.

Everything is computed in the dtype of the weights, and never below float32 in the places where Hugging Face
widens (norms, rotation angles, softmax): in float64 nothing is rounded further. The one exception is part
of the model, not of the arithmetic: its rotary frequencies are float32 numbers, as the model was trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from radixmlp.reference.attention import causal_attention, trie_attention
from radixmlp.reference.config import DecoderConfig
from radixmlp.reference.plan import AttentionSpec, Order, TriePlan
from radixmlp.reference.ragged import RaggedBatch
from radixmlp.reference.trie import build_plan

Mode = Literal["dense", "scatter", "trie"]
Attend = Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor]


class DecoderOutput(NamedTuple):
    """Ragged layout: `hidden` [N, d] after the last norm, `logits` [N, V]."""

    hidden: Tensor
    logits: Tensor


class Qwen3(nn.Module):
    """Qwen3 for causal language modelling.

    Args:
        config: a Hugging Face Qwen3 configuration, any object with its attributes, or a dict.

    Raises:
        ValueError: the configuration asks for something else than a dense Qwen3.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = c = DecoderConfig.from_hugging_face(config)
        self.frequencies = rotary_frequencies(c)
        with torch.device("meta"):  # shapes alone: `load` brings the weights
            self.model = Backbone(c)
            self.lm_head = (
                None if c.tie_word_embeddings else nn.Linear(c.hidden_size, c.vocab_size, bias=False)
            )

    def load(self, state_dict: Mapping[str, Tensor]) -> Self:
        """Take the tensors of a `Qwen3ForCausalLM` state dict as weights, uncopied; leaves eval mode on.

        Raises:
            ValueError: names or shapes do not fit the configuration, or the tensors differ in dtype.
        """
        weights = dict(state_dict)
        if self.lm_head is None:
            weights.pop("lm_head.weight", None)  # the embedding, under its second name
        dtypes = {tensor.dtype for tensor in weights.values()}
        if len(dtypes) > 1:
            raise ValueError(
                f"the state dict mixes {', '.join(sorted(map(str, dtypes)))}: convert it to one dtype"
            )
        try:
            self.load_state_dict(weights, assign=True)
        except RuntimeError as error:
            raise ValueError(f"the state dict does not fit this Qwen3 configuration: {error}") from None
        return self.eval()

    def forward(self, batch: RaggedBatch, mode: Mode = "dense", order: Order = "trie") -> DecoderOutput:
        """Run the batch.

        Args:
            batch: N tokens.
            mode: "dense" computes every token; "scatter" one row per trie node, and attention on the ragged
                layout (arXiv 2601.15013); "trie" one row per trie node throughout.
            order: how the trie is numbered; the result does not depend on it.

        Raises:
            ValueError: an unknown mode or order, a token id outside the vocabulary, dropout in training mode.
        """
        plan = TriePlan.identity(batch) if mode == "dense" else build_plan(batch, order)
        return self.run(plan, mode)

    def run(self, plan: TriePlan, mode: Mode) -> DecoderOutput:
        """Position-wise work on the plan's rows, attention by `mode`, and the result back in ragged layout.

        "dense" and "scatter" differ in the plan alone: an identity plan shares nothing.
        """
        if mode not in get_args(Mode):
            raise ValueError(f"mode is {mode!r}: expected one of {', '.join(map(repr, get_args(Mode)))}")
        self._check_token_ids(plan)
        attend = _attention_over(plan, mode)
        embedding = self.model.embed_tokens.weight
        rotation = rotary_angles(plan.position_ids, self.frequencies, embedding.dtype)
        hidden = self.model(plan.input_ids.long(), rotation, attend)  # [n, d]
        logits = F.linear(hidden, embedding if self.lm_head is None else self.lm_head.weight)
        return DecoderOutput(hidden[plan.scatter], logits[plan.scatter])

    def _check_token_ids(self, plan: TriePlan) -> None:
        if self.model.norm.weight.is_meta:
            raise ValueError("the decoder has no weights yet: call load(state_dict) first")
        outside = (plan.input_ids.long() >= self.config.vocab_size).nonzero()
        if outside.numel():
            node = int(outside[0])
            row = int(plan.gather[node])
            sequence = int(torch.searchsorted(plan.cu_seqlens[1:].contiguous(), row, right=True))
            raise ValueError(
                f"input_ids row {sequence}, offset {row - int(plan.cu_seqlens[sequence])} is "
                f"{int(plan.input_ids[node])}: the vocabulary ends at {self.config.vocab_size - 1}"
            )


class Backbone(nn.Module):
    """Embedding, layers and last norm: token ids [n] -> hidden states [n, d]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, window) for window in config.sliding_windows)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, rotation, attend)
        return self.norm(x)


class DecoderLayer(nn.Module):
    """Attention, then MLP, each on the normed rows and added to the residual."""

    def __init__(self, config: DecoderConfig, sliding_window: int | None) -> None:
        super().__init__()
        self.self_attn = Attention(config, sliding_window)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    """Grouped-query attention with RMS-normed, rotated queries and keys."""

    def __init__(self, config: DecoderConfig, sliding_window: int | None) -> None:
        super().__init__()
        d, D, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.config, self.sliding_window = config, sliding_window
        self.q_proj = nn.Linear(d, config.num_attention_heads * D, bias)
        self.k_proj = nn.Linear(d, config.num_key_value_heads * D, bias)
        self.v_proj = nn.Linear(d, config.num_key_value_heads * D, bias)
        self.o_proj = nn.Linear(config.num_attention_heads * D, d, bias)
        self.q_norm = RMSNorm(D, config.rms_norm_eps)
        self.k_norm = RMSNorm(D, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        heads = (-1, self.config.head_dim)  # each head its own: [n, H * D] -> [n, H, D]
        q = rotate(self.q_norm(self.q_proj(x).unflatten(1, heads)), rotation)
        k = rotate(self.k_norm(self.k_proj(x).unflatten(1, heads)), rotation)
        v = self.v_proj(x).unflatten(1, heads)
        dropout = self.config.attention_dropout if self.training else 0.0
        spec = AttentionSpec(self.config.head_dim**-0.5, self.sliding_window, dropout=dropout)
        return self.o_proj(attend(q, k, v, spec).flatten(1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    """x / rms(x) over the last dimension, times a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(at_least_float32(x.dtype))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary_frequencies(config: DecoderConfig) -> Tensor:
    """[D / 2] radians per position, float32; part of the model like a weight, so computed once."""
    dims = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    return 1.0 / config.rope_theta ** (dims / config.head_dim)


def rotary_angles(position_ids: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * frequency, each [n, 1, D], for a head's two halves alike."""
    wide = at_least_float32(dtype)
    frequencies = frequencies.to(position_ids.device, wide).repeat(2)
    angles = position_ids[:, None, None].to(wide) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE: turn each pair (x[i], x[i + D/2]) of every head by its angle; x is [n, H, D]."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _attention_over(plan: TriePlan, mode: Mode) -> Attend:
    """The one place where the three modes differ: what attention does with the plan's rows."""

    def scatter_then_gather(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        rows = plan.scatter  # for the identity plan of "dense" this and the gather change nothing
        return causal_attention(q[rows], k[rows], v[rows], plan.cu_seqlens, spec)[plan.gather]

    def on_the_trie(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        return trie_attention(q, k, v, plan, spec)

    return on_the_trie if mode == "trie" else scatter_then_gather
