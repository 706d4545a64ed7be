# %% [markdown]
# # 5. Backward
#
# If sequences share rows in the forward pass, their gradients must meet in those rows. This notebook shows
# where, and that nothing is lost: every parameter's gradient equals the one of the un-shared batch. Then
# comes the part that is easy to get wrong: a node where sequences part has *several* next tokens, so a
# training target belongs to an edge of the trie, not to a node.

# %%
from collections import defaultdict

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor

from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan
from radixmlp.reference.attention import causal_attention, trie_attention
from radixmlp.reference.model import Qwen3, rotary_angles
from radixmlp.reference.notebooks.drawing import PAPER, TRIE, draw_trie, new_figure
from radixmlp.reference.trie import build_plan

torch.manual_seed(0)
SENTENCES = [
    "is it true : bees sleep",
    "is it true : bees dance",
    "is it true : ice floats",
    "is it late",
    "is it true : bees sleep",
]
split = [sentence.split() for sentence in SENTENCES]
words = sorted({word for sentence in split for word in sentence})
batch = RaggedBatch.from_sequences([[words.index(word) for word in sentence] for sentence in split])
plan = build_plan(batch)
scatter, gather = plan.scatter.long(), plan.gather.long()
labels = [words[i] for i in plan.input_ids.tolist()]
copies = scatter.bincount(minlength=plan.num_nodes)
print(f"N = {plan.num_tokens}, N' = {plan.num_nodes}; rows per node: {copies.tolist()}")

# %% [markdown]
# ## The two maps, backwards
#
# Indexing has a simple derivative. Going forward, `scatter` copies a node's value to all of its rows. Going
# backward, the gradients of the copies are added up in the node:
#
# $$Y = U[\text{scatter}] \quad\Rightarrow\quad
#   \frac{\partial L}{\partial U_n} = \sum_{t:\ \text{scatter}[t] = n} \frac{\partial L}{\partial Y_t}$$
#
# `gather` reads one row for each node. Backward, that one row gets the gradient, and the rows that were not
# read get none.

# %%
unique = torch.randn(plan.num_nodes, 3, dtype=torch.float64, requires_grad=True)
upstream = torch.randn(plan.num_tokens, 3, dtype=torch.float64)
unique[scatter].backward(upstream)
added = torch.zeros_like(unique).index_add(0, scatter, upstream)
assert torch.allclose(unique.grad, added, rtol=0, atol=1e-14)

rows = torch.randn(plan.num_tokens, 3, dtype=torch.float64, requires_grad=True)
rows[gather].sum().backward()
touched = rows.grad.abs().sum(1).nonzero().flatten()
assert torch.equal(touched, gather.sort().values)
print("rows of the batch that receive a gradient through gather:", touched.tolist())

# %% [markdown]
# ## In a decoder
#
# Run the reference decoder twice on the same loss: dense, with a row for every token, and on the trie. In
# both, keep the gradient of the hidden states after layer 1. A loss on every sequence pulls at its own copy
# of a shared row; on the trie there is one row, and it feels the sum of all pulls.

# %%
decoder = Qwen3(
    {
        "vocab_size": len(words),
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
)
decoder.load(
    {name: 0.4 * torch.randn(p.shape, dtype=torch.float64) for name, p in decoder.named_parameters()}
)


def run(plan: TriePlan) -> tuple[Tensor, Tensor]:
    """Hidden states after layer 1, and logits, one row for each node of `plan`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if plan.num_nodes == plan.num_tokens:
            return causal_attention(q, k, v, plan.cu_seqlens, spec)
        return trie_attention(q, k, v, plan, spec)

    rotation = rotary_angles(plan.position_ids, decoder.frequencies, torch.float64)
    x = decoder.model.embed_tokens(plan.input_ids)
    kept = []
    for layer in decoder.model.layers:
        x = layer(x, rotation, attend)
        kept.append(x)
    kept[0].retain_grad()
    return kept[0], F.linear(decoder.model.norm(x), decoder.lm_head.weight)


def gradients() -> dict[str, Tensor]:
    """The gradient of every parameter; forgets them in the decoder."""
    found = {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
    decoder.zero_grad()
    return found


def same(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The largest error of any gradient, relative to its largest entry."""
    assert ours.keys() == truth.keys()
    return max(float((ours[n] - truth[n]).abs().max() / truth[n].abs().max()) for n in truth)


direction = torch.randn(plan.num_tokens, len(words), dtype=torch.float64)  # any loss on every token will do

hidden_dense, logits_dense = run(TriePlan.identity(batch))
(logits_dense * direction).sum().backward()
gradients_dense = gradients()

hidden_trie, logits_trie = run(plan)
(logits_trie[scatter] * direction).sum().backward()
gradients_trie = gradients()

met = torch.zeros_like(hidden_trie).index_add(0, scatter, hidden_dense.grad)
assert torch.allclose(hidden_trie.grad, met, rtol=0, atol=1e-9)
assert same(gradients_trie, gradients_dense) < 1e-10
print(f"{len(gradients_dense)} parameters: every gradient on the trie equals the dense one")

_, (axes,) = new_figure(9, 3.4)
axes.bar(range(plan.num_nodes), hidden_trie.grad.norm(dim=1), color=TRIE, label="one row on the trie")
axes.scatter(
    scatter,
    hidden_dense.grad.norm(dim=1),
    color=PAPER,
    edgecolor="white",
    marker="D",
    label="its copies in the dense batch",
)
axes.set_xticks(range(plan.num_nodes), [f"{word}\n{n}" for n, word in enumerate(labels)])
axes.set_ylabel("size of the gradient")
axes.set_title("after layer 1: copies pull apart, the shared row feels their sum")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# The bar is the length of a sum of vectors, so it may be shorter than the sum of its diamonds. Where a node
# stands for one row, diamond and bar agree.
#
# ## Targets live on edges
#
# Language modelling asks each token for the next one. After *:* the batch goes on with *bees* three times and
# with *ice* once. That is one node with two targets, one of them of weight 3. In general, sum the weights
# $w_t$ of all tokens $t$ that stand on node $n$ and go on with token $v$:
#
# $$W_{nv} = \sum_{t:\ \text{scatter}[t]=n,\ \text{next}(t)=v} w_t \qquad
#   L = -\sum_{t} w_t \log p(\text{next}(t) \mid t) = -\sum_{n, v} W_{nv} \log p(v \mid n)$$
#
# so that one row of logits per node, and one log-softmax, serves all of its targets.

# %%
last = torch.zeros(plan.num_tokens, dtype=torch.bool)
last[batch.cu_seqlens[1:].long() - 1] = True
source_rows = (~last).nonzero().flatten()  # rows that have a next token
targets = batch.input_ids[source_rows + 1]
weights = torch.ones(source_rows.numel(), dtype=torch.float64)


def edge_weights(weights: Tensor) -> dict[tuple[int, int], float]:
    """{(node, next token): summed weight}."""
    edges: dict[tuple[int, int], float] = defaultdict(float)
    for row, target, weight in zip(source_rows.tolist(), targets.tolist(), weights.tolist(), strict=True):
        edges[int(scatter[row]), target] += weight
    return dict(edges)


def loss_on_edges(logits: Tensor, edges: dict[tuple[int, int], float]) -> Tensor:
    """The loss of the whole batch from one row of logits per node."""
    log_p = logits.log_softmax(-1)
    nodes, tokens = torch.tensor(list(edges)).T
    return -(torch.tensor(list(edges.values()), dtype=log_p.dtype) * log_p[nodes, tokens]).sum()


def loss_on_rows(logits: Tensor, weights: Tensor) -> Tensor:
    """The loss of the whole batch as everyone writes it: one row of logits per token."""
    return (weights * F.cross_entropy(logits[source_rows], targets, reduction="none")).sum()


edges = edge_weights(weights)
child = {(int(above), labels[n]): n for n, above in enumerate(plan.parent)}
drawn = {(n, child[n, words[v]]): weight for (n, v), weight in edges.items()}
_, (axes,) = new_figure(9, 3)
draw_trie(
    axes,
    plan,
    labels,
    "how many sequences ask for each next token",
    {edge: f"{weight:g}" for edge, weight in drawn.items()},
    {edge: 0.8 + weight for edge, weight in drawn.items()},
)
plt.show()
print(
    f"{source_rows.numel()} targets in the batch, {len(edges)} edges, {len({n for n, _ in edges})} rows of logits"
)

# %% [markdown]
# The two losses are one number, and they pull at the parameters in the same way:

# %%
_, logits_dense = run(TriePlan.identity(batch))
loss_dense = loss_on_rows(logits_dense, weights)
loss_dense.backward()
gradients_dense = gradients()

_, logits_trie = run(plan)
loss_trie = loss_on_edges(logits_trie, edges)
loss_trie.backward()
gradients_trie = gradients()

assert torch.allclose(loss_trie, loss_dense, rtol=1e-12, atol=0)
assert same(gradients_trie, gradients_dense) < 1e-10
print("loss and gradients on edges equal those on rows")

# %% [markdown]
# ## The tempting mistake
#
# It is tempting to gather the labels like everything else: one target per node, the one of its first row. All
# shapes fit and the loss goes down in training. But every branch except the first is never trained, and
# repeated prompts count once.

# %%
first_target: dict[tuple[int, int], float] = {}
for row, target in zip(source_rows.tolist(), targets.tolist(), strict=True):
    node = int(scatter[row])
    if not any(n == node for n, _ in first_target):
        first_target[node, target] = 1.0

_, logits_trie = run(plan)
loss_on_edges(logits_trie, first_target).backward()
gradients_wrong = gradients()
forgotten = [(labels[n], words[v]) for n, v in edges if (n, v) not in first_target]
print("targets that are never trained:", forgotten)
assert forgotten
assert same(gradients_wrong, gradients_dense) > 0.1

# %% [markdown]
# ## Advantages
#
# In reinforcement learning with groups (GRPO), each completion has an advantage, and the advantages of a
# group sum to zero. Use them as weights, on every token of the sequence. Along the shared beginning they meet
# on the same edges, and cancel: what all completions have in common teaches nothing. On edges of their own
# they stay. Let the first three sentences be such a group; the other two get no weight. On the trie you can
# read it off.

# %%
advantages = torch.tensor([1.0, -0.25, -0.75, 0.0, 0.0], dtype=torch.float64)
owner = torch.bucketize(source_rows, batch.cu_seqlens[1:].long(), right=True)
weights = advantages[owner]
edges = edge_weights(weights)
drawn = {(n, child[n, words[v]]): weight for (n, v), weight in edges.items()}

_, (axes,) = new_figure(9, 3)
draw_trie(
    axes,
    plan,
    labels,
    "summed advantages: the beginning that all completions share has weight 0",
    {edge: f"{weight:+.2f}" if weight else "0" for edge, weight in drawn.items()},
    {edge: 0.8 + 3 * abs(weight) for edge, weight in drawn.items()},
)
plt.show()
colon = labels.index(":")
assert all(weight == 0 for (above, _), weight in drawn.items() if above < colon)
assert all(
    weight != 0 for (above, below), weight in drawn.items() if above >= colon and labels[below] != "late"
)

_, logits_dense = run(TriePlan.identity(batch))
loss_on_rows(logits_dense, weights).backward()
gradients_dense = gradients()
_, logits_trie = run(plan)
loss_on_edges(logits_trie, edges).backward()
assert same(gradients(), gradients_dense) < 1e-10
print("gradients with advantages, of both signs, agree too")

# %% [markdown]
# ## Change this and predict what happens
#
# An assertion that fails is an answer too: was it a law, or a fact about this example?
#
# 1. Take the last sentence out. It repeats the first: which numbers on the edges change, and does $N'$?
# 2. Give all advantages the same value. Which edges have weight 0 now? And which if you leave out the targets
#    inside the prompt, as training code usually does? (Before the call of `edge_weights`:
#    `weights[source_rows - batch.cu_seqlens[owner] < 3] = 0`.)
# 3. Apply dropout after each layer: `x = F.dropout(x, 0.5)` in the loop of `run`. Why can no seed make dense
#    and trie agree any more? (Count the random numbers each draws. This is why training with dropout is
#    refused.)
