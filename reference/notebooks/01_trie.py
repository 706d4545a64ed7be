# %% [markdown]
# # 1. The batch as a trie
#
# A batch of prompts repeats itself: the same instruction in front of many questions, the same query in front
# of many passages. This notebook finds the repetitions. We lay sequences end to end, build their prefix trie
# token by token, and read two index maps off it, `gather` and `scatter`. They are all that the rest of the
# project needs (RadixMLP, arXiv 2601.15013, section 3).

# %%
import matplotlib.pyplot as plt
import torch

from radixmlp.reference import RaggedBatch, TriePlan
from radixmlp.reference.notebooks.drawing import draw_batch, draw_trie, new_figure
from radixmlp.reference.trie import build_plan, reconstruct

SENTENCES = [
    "is it true : bees sleep",
    "is it true : bees dance",
    "do we know that bees sleep",
    "is it true : ice floats",
    "is it late",
]
split = [sentence.split() for sentence in SENTENCES]
words = sorted({word for sentence in split for word in sentence})
sequences = [[words.index(word) for word in sentence] for sentence in split]

# %% [markdown]
# ## No padding
#
# The sequences have different lengths. Instead of padding them to a rectangle we lay them end to end and
# remember where each one starts and ends, in `cu_seqlens` (cumulative sequence lengths): sequence $b$ owns
# the rows `cu_seqlens[b]` up to `cu_seqlens[b+1] - 1`. There are $N$ rows in all.

# %%
batch = RaggedBatch.from_sequences(sequences)
N = batch.num_tokens
print("input_ids   ", batch.input_ids.tolist())
print("position_ids", batch.position_ids.tolist())
print("cu_seqlens  ", batch.cu_seqlens.tolist())

assert batch.cu_seqlens.tolist()[-1] == N == sum(map(len, sequences))
assert batch.sequences() == sequences

# %% [markdown]
# ## Token by token
#
# Walk each sequence from its first token. At each step we stand on a node and read one token:
#
# $$\text{node} \;=\; \big(\text{parent node},\ (\text{token id},\ \text{position id})\big)$$
#
# If such a node is known, step on it. If not, make it. Two tokens end on one node exactly if their whole
# paths from the start are equal. Three lists come out of the walk:
#
# - `scatter[row]`: the node that a row of the batch stands on;
# - `parent[node]`: the node above, -1 for none;
# - `gather[node]`: the first row that stood on it.

# %%
known: dict[tuple[int, int, int], int] = {}
scatter: list[int] = []
parent: list[int] = []
gather: list[int] = []

for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
    steps = []
    above = -1
    for row in range(start, end):
        key = (above, int(batch.input_ids[row]), int(batch.position_ids[row]))
        is_new = key not in known
        if is_new:
            known[key] = len(parent)
            parent.append(above)
            gather.append(row)
        above = known[key]
        scatter.append(above)
        steps.append(f"{words[batch.input_ids[row]]}{'*' if is_new else ''}->{above}")
    print("  ".join(steps))
print("* a new node")

# %% [markdown]
# The library builds the same thing. Nodes numbered as we met them is its `order="input"`.

# %%
by_input = build_plan(batch, order="input")
assert by_input.scatter.tolist() == scatter
assert by_input.parent.tolist() == parent
assert by_input.gather.tolist() == gather

labels = [words[i] for i in by_input.input_ids.tolist()]
_, (left, right) = new_figure(11, 3.6, 2)
draw_batch(left, by_input, labels)
draw_trie(right, by_input, labels)
plt.show()

# %% [markdown]
# Dark boxes are shared: more than one row of the batch stands on that node. Small numbers are row numbers on
# the left and node numbers on the right.
#
# Look at *bees sleep* in the third sentence. It has the same two words at the same two positions as the first
# sentence, but another history. A causal model has read something else by then, so it gets nodes of its own.
#
# ## Reading the maps
#
# `gather` picks one row for each node, `scatter` puts each node's value back on all of its rows:
#
# $$X_\text{unique} = X[\text{gather}] \qquad Y = Y_\text{unique}[\text{scatter}]$$
#
# The first loses nothing that the second cannot bring back:

# %%
unique_ids = batch.input_ids[by_input.gather]  # [N']
assert torch.equal(unique_ids[by_input.scatter], batch.input_ids)
assert torch.equal(by_input.scatter[by_input.gather], torch.arange(by_input.num_nodes, dtype=torch.int32))

print(f"N = {by_input.num_tokens} rows, N' = {by_input.num_nodes} nodes")
print(f"gamma = N'/N = {by_input.gamma:.2f}: the share of rows that are left to compute")
print(f"r     = N/N' = {by_input.compression_ratio:.2f}: how many times the batch repeats itself")

# %% [markdown]
# ## Depth-first numbers
#
# Number the nodes another way: after a node come all of its descendants, then its next sibling. Then the
# subtree of every node is one slice, and a single number says where it ends: `subtree_end`. (Notebook 4 makes
# a whole attention mask of that number.)

# %%
children: dict[int, list[int]] = {}
for node, above in enumerate(parent):
    children.setdefault(above, []).append(node)


def visit(node: int) -> list[int]:
    """The node and everything below it, depth-first."""
    return [node, *(below for child in children.get(node, []) for below in visit(child))]


depth_first = [node for root in children[-1] for node in visit(root)]
ends = [place + len(visit(node)) for place, node in enumerate(depth_first)]

plan = build_plan(batch)  # order="trie" is the default
assert plan.gather.tolist() == [gather[node] for node in depth_first]
assert plan.subtree_end.tolist() == ends

labels = [words[i] for i in plan.input_ids.tolist()]
_, (left, right) = new_figure(11, 3.6, 2)
draw_trie(left, by_input, [words[i] for i in by_input.input_ids.tolist()], 'order="input": as they come')
draw_trie(right, plan, labels, 'order="trie": depth-first')
plt.show()

colon = labels.index(":")
print(f"below node {colon} ':' lie the nodes {colon + 1} to {plan.subtree_end[colon] - 1}, and no others")
descendants = {colon}
for node, above in enumerate(plan.parent.tolist()):  # parents come before their children
    if above in descendants:
        descendants.add(node)
assert descendants == set(range(colon, int(plan.subtree_end[colon])))

# %% [markdown]
# ## A check that cannot fail
#
# Suppose a builder forgets the parent and merges all rows with equal token and position. Then *bees sleep* of
# the third sentence is merged with that of the first: wrong. Does our check from above see it?

# %%
careless: dict[tuple[int, int], int] = {}
wrong_scatter, wrong_gather, wrong_parent = [], [], []
for b, sequence in enumerate(sequences):
    above = -1
    for position, token in enumerate(sequence):
        if (token, position) not in careless:
            careless[token, position] = len(wrong_gather)
            wrong_gather.append(int(batch.cu_seqlens[b]) + position)
            wrong_parent.append(above)
        above = careless[token, position]
        wrong_scatter.append(above)

assert torch.equal(batch.input_ids[wrong_gather][wrong_scatter], batch.input_ids)  # passes: it sees nothing
print(f"{len(wrong_gather)} nodes instead of {plan.num_nodes}, and the token ids still come back right")

# %% [markdown]
# It does not. Every row gets its own token back, as it would with any merge of equal tokens. What must be
# checked is the *path*: take the node of each sequence's last token and walk `parent` up to the root.

# %%


def as_tensor(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


first = as_tensor(wrong_gather)
wrong = TriePlan(
    first,
    as_tensor(wrong_scatter),
    as_tensor(wrong_parent),
    first,  # no use of subtree_end here
    batch.input_ids[first],
    batch.position_ids[first],
    batch.cu_seqlens,
    "input",
)
said = [[words[token] for token, _ in path] for path in reconstruct(wrong)]
assert [[words[token] for token, _ in path] for path in reconstruct(plan)] == split
assert said != split
b = next(b for b in range(len(split)) if said[b] != split[b])
print("a sentence was         ", " ".join(split[b]))
print("the careless trie says ", " ".join(said[b]))

# %% [markdown]
# ## Change this and predict what happens
#
# Change the first code cell or the batch, and say what you expect before you run it.
#
# 1. Put the sentences in another order: `SENTENCES.reverse()`. Do $N'$ and $\gamma$ change? Do `gather` and
#    `scatter`?
# 2. Append a sentence that is the beginning of another one: `"is it true"`. How many new nodes does it make?
#    Does any box change its colour?
# 3. Give the second sentence other positions: make `positions = [list(range(len(s))) for s in sequences]`,
#    set `positions[1] = [1, 2, 3, 4, 5, 6]`, and hand it to `from_sequences(sequences, positions)`. The words
#    are as before. What does the second sentence still share?
