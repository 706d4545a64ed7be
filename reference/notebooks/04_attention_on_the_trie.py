# %% [markdown]
# # 4. Attention on the trie
#
# The paper goes back to the full batch for attention (notebook 3). It need not. What a node's token may see
# is its path: the node itself and its ancestors. That is the same in every sequence that holds the node, so
# it can be computed once. This notebook builds the mask of it, adds a sliding window, and splits the sum in
# two parts that are merged again.

# %%
from collections.abc import Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Rectangle
from torch import Tensor

from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan
from radixmlp.reference.attention import causal_attention, trie_attention
from radixmlp.reference.notebooks.drawing import PAPER, TRIE, draw_mask, draw_trie, mask_legend, new_figure
from radixmlp.reference.trie import build_plan

torch.manual_seed(0)
SENTENCES = [
    "is it true : bees sleep",
    "is it true : bees dance",
    "is it true : ice floats",
    "is it late",
    "do bees sleep",
]
split = [sentence.split() for sentence in SENTENCES]
words = sorted({word for sentence in split for word in sentence})
batch = RaggedBatch.from_sequences([[words.index(word) for word in sentence] for sentence in split])
plan = build_plan(batch)
labels = [words[i] for i in plan.input_ids.tolist()]

# %% [markdown]
# ## The mask is one interval test
#
# In depth-first order the descendants of node $k$ are the rows $k+1$ to `subtree_end[k]` $- 1$. A query sees
# a key exactly if it is that key or one of its descendants:
#
# $$q \text{ sees } k \iff k \le q < \text{subtree\_end}[k]$$
#
# One integer per node is the whole mask, for any number of branches at any depth. Compare it with the slow
# way, walking up from each query:

# %%


def by_interval(plan: TriePlan) -> Tensor:
    """[N', N'] bool, seen[q, k], from `subtree_end` alone."""
    rows = torch.arange(plan.num_nodes)
    return (rows <= rows[:, None]) & (rows[:, None] < plan.subtree_end)


def by_walking(plan: TriePlan) -> Tensor:
    """[N', N'] bool, seen[q, k], from `parent` alone."""
    seen = torch.zeros(plan.num_nodes, plan.num_nodes, dtype=torch.bool)
    for query in range(plan.num_nodes):
        node = query
        while node >= 0:
            seen[query, node] = True
            node = int(plan.parent[node])
    return seen


seen = by_interval(plan)
assert torch.equal(seen, by_walking(plan))

random = torch.Generator().manual_seed(1)
for _ in range(100):  # two token ids only: these tries branch everywhere
    lengths = torch.randint(0, 9, (6,), generator=random).tolist()
    some = build_plan(
        RaggedBatch.from_sequences([torch.randint(2, (n,), generator=random).tolist() for n in lengths])
    )
    assert torch.equal(by_interval(some), by_walking(some))
print("100 random tries: the interval test equals walking up")

_, (left, right) = new_figure(11, 4.2, 2, [1.35, 1])
draw_trie(left, plan, labels)
draw_mask(right, seen, labels, "query q (downwards) sees key k (to the right)")
plt.show()

# %% [markdown]
# Read a line of the mask: it is a path of the trie. Read a column: it is one solid run, from the diagonal
# down to the end of the subtree. The dark triangles on the diagonal are stretches without a branch.
#
# It needs the depth-first order. Numbered as they come, the nodes of a subtree do not lie together, and the
# interval takes in strangers:

# %%
three = RaggedBatch.from_sequences([[1, 2, 3, 5], [1, 2, 4, 7], [1, 2, 3, 6]])
as_they_come = build_plan(three, order="input")
letters = ["-abcdefg"[i] for i in as_they_come.input_ids.tolist()]
truth, guess = by_walking(as_they_come), by_interval(as_they_come)
wrong = (truth != guess).nonzero().tolist()
print("wrong (query, key) pairs:", wrong)
assert wrong
assert torch.equal(by_interval(build_plan(three)), by_walking(build_plan(three)))

_, (left, right) = new_figure(9, 3.6, 2, [1.3, 1])
draw_trie(left, as_they_come, letters, 'abce, abdg, abcf, numbered by order="input"')
draw_mask(right, guess, letters, "the interval test in that order", truth)
mask_legend(right, guess, truth)
plt.show()

# %% [markdown]
# ## Attention under the mask
#
# With the mask in hand, attention on the trie is three lines. It equals the paper's way: scatter to the full
# batch, attend in each sequence, gather back.

# %%


def masked_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """q, k, v [rows, heads, D], seen [rows, rows] -> [rows, heads, D]."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def random_qkv(rows: int) -> Sequence[Tensor]:
    return torch.randn(3, rows, 2, 8, dtype=torch.float64).unbind()


def paper_attention(q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
    rows = plan.scatter
    return causal_attention(q[rows], k[rows], v[rows], plan.cu_seqlens, spec)[plan.gather]


q, k, v = random_qkv(plan.num_nodes)
spec = AttentionSpec(softmax_scale=8**-0.5)
ours = masked_attention(q, k, v, seen, spec.softmax_scale)
assert torch.allclose(ours, paper_attention(q, k, v, plan, spec), rtol=0, atol=1e-12)
assert torch.allclose(ours, trie_attention(q, k, v, plan, spec), rtol=0, atol=1e-12)

full = int((TriePlan.identity(batch).depth + 1).sum())
print(f"pairs in the full batch: {full}, on the trie: {int(seen.sum())}")
assert int(seen.sum()) == int((plan.depth + 1).sum())

# %% [markdown]
# ## A sliding window follows the path
#
# Many models let a token see only the last $w$ tokens. Last *on its path*: the distance between two nodes is
# the difference of their depths. Rows are no measure of it, since between a node and its ancestor there may
# lie whole other subtrees.

# %%
window = 3
distance = plan.depth[:, None] - plan.depth
along_the_path = seen & (distance < window)
rows = torch.arange(plan.num_nodes)
by_rows = seen & (rows[:, None] - rows < window)

sliding = AttentionSpec(softmax_scale=8**-0.5, sliding_window=window)
expected = paper_attention(q, k, v, plan, sliding)
assert torch.allclose(
    masked_attention(q, k, v, along_the_path, sliding.softmax_scale), expected, rtol=0, atol=1e-12
)
error = (masked_attention(q, k, v, by_rows, sliding.softmax_scale) - expected).abs().amax((1, 2))
print("nodes that a window by rows gets wrong:", [labels[n] for n in (error > 1e-9).nonzero().flatten()])
assert (error > 1e-3).any()

_, (left, right) = new_figure(11, 4.4, 2)
draw_mask(left, along_the_path, labels, f"window of {window} along the path")
draw_mask(right, by_rows, labels, f"wrong: window of {window} by rows", along_the_path)
mask_legend(right, by_rows, along_the_path)
plt.show()

# %% [markdown]
# A branch that comes back late in the order sits far below its parent in rows, and loses what it should see.
# It is a nasty mistake: on a batch without branches both masks agree.
#
# ## Two parts, merged
#
# A mask this sparse is a waste if we fill a whole square with it. The usual shape has one long shared prefix
# and many short suffixes. Split each suffix query's keys in two parts:
#
# - part 1, the prefix: *every* suffix query sees *all* of it. One matrix product, no mask;
# - part 2, its own suffix: small causal triangles.
#
# Each part has its own softmax, over its own keys. Beside its output $o_i$ we keep the logarithm of its
# denominator, $\ell_i = \log \sum_{k} e^{s_k}$. The softmax over both is then
#
# $$o = \frac{e^{\ell_1} o_1 + e^{\ell_2} o_2}{e^{\ell_1} + e^{\ell_2}}$$

# %%
PREFIX, OWN, BATCH = 6, 3, 3
start = list(range(PREFIX))
shared = build_plan(
    RaggedBatch.from_sequences([start + [10 + OWN * b + i for i in range(OWN)] for b in range(BATCH)])
)
names = ["p"] * PREFIX + [c for c in "abc" for _ in range(OWN)]
whole = by_interval(shared)

_, (axes,) = new_figure(5, 4.6)
draw_mask(axes, whole, names, "two parts of the suffix rows")
axes.add_patch(
    Rectangle((0, -shared.num_nodes), PREFIX - 0.08, BATCH * OWN, fill=False, edgecolor=TRIE, linewidth=3)
)
axes.text(PREFIX / 2, -PREFIX - 4.5, "part 1", ha="center", va="center", color="white", fontsize=13)
for b in range(BATCH):
    corner = PREFIX + OWN * b
    axes.add_patch(
        Rectangle((corner, -corner - OWN), OWN - 0.08, OWN, fill=False, edgecolor=PAPER, linewidth=3)
    )
axes.text(PREFIX + 4.6, -PREFIX - 1.2, "part 2", ha="center", va="center", fontsize=13)
plt.show()

# %%


def part(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention to one part of the keys: output [rows, heads, D], log-sum-exp [rows, heads]."""
    scores = torch.einsum("qhd,khd->qhk", q, k) * scale
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
    return torch.einsum("qhk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """One softmax out of two; never takes the exponential of a large number."""
    (o1, l1), (o2, l2) = first, second
    total = torch.logaddexp(l1, l2)
    return (l1 - total).exp()[..., None] * o1 + (l2 - total).exp()[..., None] * o2


q, k, v = random_qkv(shared.num_nodes)
scale = spec.softmax_scale
top = part(q[:PREFIX], k[:PREFIX], v[:PREFIX], whole[:PREFIX, :PREFIX], scale)[0]
on_prefix = part(q[PREFIX:], k[:PREFIX], v[:PREFIX], None, scale)
on_own = part(q[PREFIX:], k[PREFIX:], v[PREFIX:], whole[PREFIX:, PREFIX:], scale)
merged = torch.cat([top, merge(on_prefix, on_own)])

assert torch.allclose(merged, paper_attention(q, k, v, shared, spec), rtol=0, atol=1e-12)
print("two parts, merged, equal one softmax over all keys")

# %% [markdown]
# Why not write the formula down as it stands? Because scores of a real model are large, and $e^{\ell}$
# overflows. Only the difference $\ell_1 - \ell_2$ matters, and `merge` uses nothing else.

# %%
loud = 2000.0
(o1, l1), (o2, l2) = (
    part(q[PREFIX:], k[:PREFIX], v[:PREFIX], None, loud),
    part(q[PREFIX:], k[PREFIX:], v[PREFIX:], whole[PREFIX:, PREFIX:], loud),
)
literal = (l1.exp()[..., None] * o1 + l2.exp()[..., None] * o2) / (l1.exp() + l2.exp())[..., None]
truth = paper_attention(q, k, v, shared, AttentionSpec(loud))[PREFIX:]
print(f"large scores: the literal formula gives {int(literal.isnan().sum())} values that are no number")
assert literal.isnan().any()
assert torch.allclose(merge((o1, l1), (o2, l2)), truth, rtol=0, atol=1e-10)

# %% [markdown]
# ## What it saves, and what it does not
#
# For $B$ sequences of $P$ shared and $S$ own tokens:

# %%


def triangle(n: int) -> int:
    return n * (n + 1) // 2


def pairs(P: int, S: int, B: int) -> tuple[int, int]:
    """(query, key) pairs of the full batch and of the trie."""
    return B * triangle(P + S), triangle(P) + B * (S * P + triangle(S))


assert pairs(PREFIX, OWN, BATCH)[1] == int(whole.sum())
for P, S, B in ((512, 64, 16), (2048, 256, 32), (2048, 16, 32)):
    dense_pairs, trie_pairs = pairs(P, S, B)
    r = B * (P + S) / (P + B * S)
    print(f"{P:4} + {S:3} tokens x {B}: rows / {r:.1f}, pairs / {dense_pairs / trie_pairs:.1f}")

# %% [markdown]
# Attention shrinks by less than $r$. The shared rows are the shallow ones, with few keys each; the deep rows,
# with many, stay. That is why this project measures itself against the ratio of all FLOPs and not against
# $r$.

# %% [markdown]
# ## Change this and predict what happens
#
# An assertion that fails is an answer too: was it a law, or a fact about this example?
#
# 1. Set `window = 1`, then `window = 100`. What does the first window leave of $v$? With both, one assertion
#    fails: which, and is that a mistake?
# 2. In `by_interval`, replace `<` by `<=`. The mask is one too wide: which words now see which? Does the loop
#    over random tries find it, and would it with tries that never branch?
# 3. Let part 1 and part 2 overlap by one key (`k[: PREFIX + 1]`, `v[: PREFIX + 1]` in `on_prefix`). Which
#    assertion fails, and is the error large?
