# %% [markdown]
# # 2. Why position-wise work may be shared
#
# A decoder has two kinds of work. *Position-wise* work looks at one row at a time: embedding, norms, the
# projections to Q, K, V and back, RoPE, the MLP. *Attention* is the only place where a row reads other rows,
# and it reads only rows before it in its own sequence. From this follows the claim that everything rests on:
#
# > Two tokens with the same path of (token id, position id) from the start of their sequences have the same
# > hidden state after every layer.
#
# This notebook proves it by induction, and checks each step with numbers. Then it breaks it, in two ways.

# %%
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from radixmlp.reference import AttentionSpec, RaggedBatch
from radixmlp.reference.attention import causal_attention
from radixmlp.reference.model import Attend, Qwen3, rotary_angles, rotate
from radixmlp.reference.notebooks.drawing import PAPER, SEEN, TRIE, draw_batch, draw_trie, new_figure
from radixmlp.reference.trie import build_plan

SENTENCES = [
    "is it true : bees sleep",
    "is it true : bees dance",
    "do we know that bees sleep",
    "is it true : ice floats",
    "is it late",
    "it is late",
]
split = [sentence.split() for sentence in SENTENCES]
words = sorted({word for sentence in split for word in sentence})
batch = RaggedBatch.from_sequences([[words.index(word) for word in sentence] for sentence in split])
plan = build_plan(batch)
labels = [words[i] for i in plan.input_ids.tolist()]

_, (left, right) = new_figure(11, 4.2, 2)
draw_batch(left, plan, labels)
draw_trie(right, plan, labels)
plt.show()

# %% [markdown]
# The model is the reference decoder, a small Qwen3 with random weights, in double precision: there, two
# values that are equal by mathematics differ by 1e-14 at most, and two that are not differ by far more.
# `dense` below computes every row of the batch, as any framework would. It is the side that knows nothing of
# tries.

# %%
torch.manual_seed(0)
torch.set_grad_enabled(False)
HEAD_DIM = 8
decoder = Qwen3(
    {
        "vocab_size": len(words),
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
    }
)
decoder.load(
    {name: 0.4 * torch.randn(p.shape, dtype=torch.float64) for name, p in decoder.named_parameters()}
)
layers = list(decoder.model.layers)


def dense(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Causal attention in each sequence of the batch."""
    return causal_attention(q, k, v, batch.cu_seqlens, spec)


def states(token_ids: Tensor, position_ids: Tensor, attend: Attend = dense) -> list[Tensor]:
    """The hidden states [N, hidden_size] after the embedding and after each layer."""
    rotation = rotary_angles(position_ids, decoder.frequencies, torch.float64)
    rows = [decoder.model.embed_tokens(token_ids)]
    for layer in layers:
        rows.append(layer(rows[-1], rotation, attend))
    return rows


hidden = states(batch.input_ids, batch.position_ids)
print(len(hidden), "times", tuple(hidden[0].shape))

# %% [markdown]
# ## The claim, counted
#
# If the claim is true, the $N$ rows of a layer's output hold at most $N'$ different ones. Count them.

# %%


def distinct(rows: Tensor, tolerance: float = 1e-9) -> int:
    """How many different rows there are."""
    rows = rows.flatten(1)
    equal = (rows[:, None] - rows).abs().amax(-1) < tolerance
    has_an_earlier_twin = equal.tril(-1).any(1)
    return int((~has_an_earlier_twin).sum())


counts = [distinct(rows) for rows in hidden]
print(f"N = {plan.num_tokens}, N' = {plan.num_nodes}")
for name, count in zip(["embedding", "layer 1", "layer 2", "layer 3"], counts, strict=True):
    print(f"{name:10} {count} different rows")

assert counts[0] == len(words)  # an embedding has seen nothing but the token
assert counts[1:] == [plan.num_nodes] * 3  # from the first attention on: one value per trie node

# %% [markdown]
# After the embedding there are as many different rows as there are words. One attention later there are $N'$,
# and that number never moves again. Not one row more: that is the claim. Not one fewer: nothing is left to
# share beyond the trie (with weights as random as these).
#
# ## The induction, step by step
#
# *Start.* Embedding is a function of the token id. Rows of one node have equal token ids, so equal
# embeddings.
#
# *Step.* Let the rows of one node be equal before a layer. Then in that layer:
#
# 1. norm and projections are functions of the row: $q$, $k$, $v$ are equal;
# 2. RoPE is a function of the row and its position id, which the node fixes too: still equal;
# 3. attention at token $t$ is $\;o_t = \sum_{s \le t} \operatorname{softmax}_s(q_t \cdot k_s)\, v_s$, over
#    the tokens of $t$'s own path. For two rows of one node these paths go through the same nodes, and the
#    $k_s$, $v_s$ are equal by 1 and 2: $o_t$ is equal;
# 4. output projection, residual and MLP are functions of the row: equal after the layer.
#
# Now in numbers. `apart` is the largest difference between a row and the first row of its node: it must be
# zero at every step. The table counts the different rows at each step.

# %%


def apart(rows: Tensor) -> float:
    """The largest difference between two rows of one node."""
    first_of_its_node = rows[plan.gather][plan.scatter]
    return float((rows - first_of_its_node).abs().max())


rotation = rotary_angles(batch.position_ids, decoder.frequencies, torch.float64)
for number, (layer, before) in enumerate(zip(layers, hidden[:-1], strict=True), start=1):
    block = layer.self_attn
    normed = layer.input_layernorm(before)
    q, k, v = (f(normed).unflatten(1, (-1, HEAD_DIM)) for f in (block.q_proj, block.k_proj, block.v_proj))
    q_rotated = rotate(block.q_norm(q), rotation)
    k_rotated = rotate(block.k_norm(k), rotation)
    attended = dense(q_rotated, k_rotated, v, AttentionSpec(HEAD_DIM**-0.5))
    after_attention = before + block.o_proj(attended.flatten(1))
    after = after_attention + layer.mlp(layer.post_attention_layernorm(after_attention))
    assert torch.allclose(
        after, hidden[number], rtol=0, atol=1e-12
    )  # this is the decoder's layer, written out

    steps = {
        "q, k, v": torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1),
        "after RoPE": torch.cat([q_rotated.flatten(1), k_rotated.flatten(1)], 1),
        "attention": attended,
        "layer": after,
    }
    assert all(apart(rows) < 1e-12 for rows in steps.values())
    print(f"layer {number}: different rows", {name: distinct(rows) for name, rows in steps.items()})

# %% [markdown]
# In layer 1 you can watch the node's key come together: $q$, $k$, $v$ know the token; RoPE adds the position;
# attention adds the history. All three are part of a node's identity, and these are the reasons.
#
# So it is enough to compute one row for each node, and copy. What one layer does on $N'$ rows is in notebook
# 3.
#
# ## Breaking it: positions left out
#
# Take one sequence twice, the second time with a gap in its positions (as after an image, or packed text). A
# trie of token ids alone would merge all of it.

# %%
sentence = batch.input_ids[:6]
plain = torch.arange(6)
gap = torch.tensor([0, 1, 2, 9, 10, 11])
shift = plain + 7


def alone(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention in one sequence of six tokens."""
    return causal_attention(q, k, v, torch.tensor([0, 6]), spec)


last = {
    name: states(sentence, positions, alone)[-1]
    for name, positions in (("plain", plain), ("gap", gap), ("shift", shift))
}
with_gap = (last["gap"] - last["plain"]).abs().amax(-1)
shifted = (last["shift"] - last["plain"]).abs().amax(-1)
print("tokens that change with a gap in the middle:", (with_gap > 1e-9).nonzero().flatten().tolist())
print("tokens that change with everything shifted: ", (shifted > 1e-9).nonzero().flatten().tolist())

assert (with_gap[:3] < 1e-12).all()
assert (with_gap[3:] > 1e-3).all()
assert (shifted < 1e-9).all()

both = RaggedBatch.from_sequences([sentence, sentence, sentence], [plain, gap, shift])
shared = build_plan(both)
print(f"the trie shares {shared.num_tokens - shared.num_nodes} rows of the {shared.num_tokens}")
assert shared.num_tokens - shared.num_nodes == 3

# %% [markdown]
# With the gap, tokens 3 to 5 change, and the trie keeps them apart. A shift of the whole sequence changes
# nothing, because RoPE feels differences of positions only. The trie keeps the shifted sequence apart
# nevertheless: it shares what *must* be equal whatever the position encoding is, and with learned positions
# those rows would differ.
#
# ## Breaking it: a mixer that looks ahead
#
# Let every token attend to its whole sequence, as in BERT. Point 3 of the proof falls: two rows of one node
# now read different continuations.

# %%


def both_ways(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Every token attends to all of its sequence."""
    pieces = []
    for a, b in pairwise(batch.cu_seqlens.tolist()):
        group = q.shape[1] // k.shape[1]
        keys, values = (x[a:b].repeat_interleave(group, dim=1) for x in (k, v))
        weights = torch.einsum("qhd,khd->hqk", q[a:b], keys).mul(spec.softmax_scale).softmax(-1)
        pieces.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(pieces)


looking_ahead = [distinct(rows) for rows in states(batch.input_ids, batch.position_ids, both_ways)]
print("different rows:", looking_ahead)
assert looking_ahead[0] == len(words)
assert all(count > plan.num_nodes for count in looking_ahead[1:])

_, (axes,) = new_figure(7, 3.4)
places = range(len(hidden))
axes.axhline(plan.num_tokens, color=SEEN, linewidth=1, linestyle=":")
axes.axhline(plan.num_nodes, color=SEEN, linewidth=1, linestyle="--")
axes.text(3.05, plan.num_tokens, "N", va="center")
axes.text(3.05, plan.num_nodes, "N'", va="center")
axes.plot(places, counts, color=TRIE, marker="o", label="causal attention")
axes.plot(places, looking_ahead, color=PAPER, marker="s", linestyle="-.", label="attention that looks ahead")
axes.set_xticks(places, ["embedding", "layer 1", "layer 2", "layer 3"])
axes.set_ylim(0, plan.num_tokens + 3)
axes.set_ylabel("different rows")
axes.legend(frameon=False, loc="lower right")
plt.show()

# %% [markdown]
# Nothing is left to share but the embedding. This is why `radixmlp.enable` first runs a probe on a model, and
# refuses it if any row reads another one outside causal attention.

# %% [markdown]
# ## Change this and predict what happens
#
# An assertion that fails is an answer too: was it a law, or a fact about this example?
#
# 1. Put a sentence of one word, five times, into the batch: `"bees bees bees bees bees"`. How many different
#    rows has it after layer 3, and how many nodes? (What does attention do to five equal values? The claim
#    says *at most* $N'$.)
# 2. Replace `dense` by a mixer that is causal but no attention: in each sequence, the mean of $v$ over the
#    tokens so far (and `.repeat_interleave(2, dim=1)`, since there are half as many value heads). Does the
#    induction still hold, and with which line changed? Are there $N'$ different rows after layer 1? Look at
#    *is it late* and *it is late*.
# 3. Make `both_ways` look only one token ahead. Which rows of a shared prefix go wrong after layer 1, after
#    layer 2, after layer 3?
