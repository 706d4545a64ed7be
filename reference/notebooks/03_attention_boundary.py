# %% [markdown]
# # 3. The attention boundary
#
# Notebook 2 showed that one row per trie node is enough for all position-wise work. Attention is different:
# it works on sequences. So somewhere between the $N'$ compact rows and attention there is a boundary, and
# there are two ways to build it:
#
# - *The paper's way* (RadixMLP, arXiv 2601.15013, section 3): scatter Q, K and V to the $N$ rows of the
#   batch, run any variable-length attention there, gather the result back at once.
# - *On the trie*: stay on the $N'$ rows; each node attends to its ancestors. Notebook 4 is about that.
#
# This notebook writes one decoder layer out by hand, all three ways, and keeps a ledger of the tensors it
# makes.

# %%
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan
from radixmlp.reference.attention import causal_attention, trie_attention
from radixmlp.reference.model import Qwen3, rotary_angles, rotate
from radixmlp.reference.notebooks.drawing import draw_bars, new_figure
from radixmlp.reference.trie import build_plan

torch.manual_seed(0)
torch.set_grad_enabled(False)
SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
decoder = Qwen3(SIZES)
decoder.load(
    {name: 0.4 * torch.randn(p.shape, dtype=torch.float64) for name, p in decoder.named_parameters()}
)
layer = decoder.model.layers[0]

prefix = torch.randint(50, (12,)).tolist()
batch = RaggedBatch.from_sequences([prefix + torch.randint(50, (n,)).tolist() for n in (3, 5, 4, 6)])
plan = build_plan(batch)
print(f"N = {plan.num_tokens}, N' = {plan.num_nodes}, r = {plan.compression_ratio:.2f}")

# %% [markdown]
# ## One layer, three ways
#
# The three ways share every line except those at the boundary. `x` has $N$ rows for dense and $N'$ rows for
# the other two.

# %%


def run_layer(path: str, x: Tensor, plan: TriePlan, ledger: dict[str, Tensor]) -> Tensor:
    """One decoder layer; writes each tensor it makes into `ledger`."""
    block, head = layer.self_attn, (-1, SIZES["head_dim"])
    rotation = rotary_angles(plan.position_ids, decoder.frequencies, x.dtype)
    spec = AttentionSpec(SIZES["head_dim"] ** -0.5)

    normed = layer.input_layernorm(x)
    q = rotate(block.q_norm(block.q_proj(normed).unflatten(1, head)), rotation)
    k = rotate(block.k_norm(block.k_proj(normed).unflatten(1, head)), rotation)
    v = block.v_proj(normed).unflatten(1, head)
    ledger |= {"hidden": x, "q": q, "k": k, "v": v}

    if path == "dense":
        out = causal_attention(q, k, v, plan.cu_seqlens, spec)
    elif path == "paper":
        q_all, k_all, v_all = q[plan.scatter], k[plan.scatter], v[plan.scatter]  # [N', ...] -> [N, ...]
        out_all = causal_attention(q_all, k_all, v_all, plan.cu_seqlens, spec)
        out = out_all[plan.gather]  # [N, ...] -> [N', ...]
        ledger |= {"q scattered": q_all, "k scattered": k_all, "v scattered": v_all, "out scattered": out_all}
    else:
        out = trie_attention(q, k, v, plan, spec)

    x = x + block.o_proj(out.flatten(1))
    normed = layer.post_attention_layernorm(x)
    gate, up = layer.mlp.gate_proj(normed), layer.mlp.up_proj(normed)
    ledger |= {"attention out": out, "gate": gate, "up": up}
    return x + layer.mlp.down_proj(torch.nn.functional.silu(gate) * up)


embedded = decoder.model.embed_tokens(batch.input_ids)  # [N, hidden_size]
plans = {"dense": TriePlan.identity(batch), "paper": plan, "trie": plan}
ledgers: dict[str, dict[str, Tensor]] = {path: {} for path in plans}
outputs = {
    path: run_layer(path, embedded[its_plan.gather], its_plan, ledgers[path])[its_plan.scatter]
    for path, its_plan in plans.items()
}
for path, output in outputs.items():
    difference = float((output - outputs["dense"]).abs().max())
    assert difference < 1e-12
    print(f"{path:6} computes {plans[path].num_nodes} rows, and equals dense: {difference < 1e-12}")

# %% [markdown]
# For dense the plan is the identity: `gather` and `scatter` change nothing. So "dense" is not another
# program, only another plan. The project's baselines are made the same way.
#
# ## Why the boundary stands where it stands
#
# *RoPE before the scatter.* A rotation is a function of the row and its position id, and a node has one
# position id. So rotating $N'$ rows and copying is the same as copying and rotating $N$ rows, only cheaper:
#
# $$\operatorname{rope}(q_\text{unique})[\text{scatter}] = \operatorname{rope}(q_\text{unique}[\text{scatter}])$$

# %%
unrotated = torch.randn(plan.num_nodes, 4, 8, dtype=torch.float64)
compact_rotation = rotary_angles(plan.position_ids, decoder.frequencies, torch.float64)
ragged_rotation = rotary_angles(batch.position_ids, decoder.frequencies, torch.float64)
assert torch.equal(
    rotate(unrotated, compact_rotation)[plan.scatter], rotate(unrotated[plan.scatter], ragged_rotation)
)
print("RoPE and scatter change places: True")

# %% [markdown]
# *Gather right after attention.* On the $N$ rows attention computes every duplicate anew, and by the
# induction of notebook 2 the duplicates come out equal. So it does not matter which of them `gather` takes,
# and nothing is averaged or lost.

# %%
out_all = ledgers["paper"]["out scattered"]
first_of_its_node = out_all[plan.gather][plan.scatter]
assert float((out_all - first_of_its_node).abs().max()) < 1e-12
duplicates = plan.num_tokens - plan.num_nodes
print(f"{duplicates} of {plan.num_tokens} rows that the paper's attention computes are copies of others")

# %% [markdown]
# *What if the scatter is forgotten?* Then attention runs over compact rows as if they were one sequence, and
# the suffix of one prompt reads the suffix of another. The shapes fit, nothing crashes. Only numbers tell:

# %%
together = torch.tensor([0, plan.num_nodes], dtype=torch.int32)
q, k, v = (ledgers["trie"][name] for name in ("q", "k", "v"))
forgotten = causal_attention(q, k, v, together, AttentionSpec(8**-0.5))
wrong = (forgotten - ledgers["trie"]["attention out"]).abs().amax((1, 2)) > 1e-9
print("nodes that come out wrong:", wrong.nonzero().flatten().tolist())
assert forgotten.shape == ledgers["trie"]["attention out"].shape
assert wrong.nonzero().flatten().tolist() == list(range(15, plan.num_nodes))  # all but the first sequence

# %% [markdown]
# ## The ledger
#
# How wide each tensor is follows from the model, how many rows it has from the path. First we check that
# against the layer we just ran, then we take the widths of Qwen3-0.6B and a batch of 16 prompts with 512
# shared and 64 own tokens.

# %%


def widths(sizes: dict[str, int]) -> dict[str, int]:
    """Numbers in one row of each tensor."""
    q = sizes["num_attention_heads"] * sizes["head_dim"]
    kv = sizes["num_key_value_heads"] * sizes["head_dim"]
    d, m = sizes["hidden_size"], sizes["intermediate_size"]
    return {
        "hidden": d,
        "q": q,
        "k": kv,
        "v": kv,
        "q scattered": q,
        "k scattered": kv,
        "v scattered": kv,
        "out scattered": q,
        "attention out": q,
        "gate": m,
        "up": m,
    }


def elements(sizes: dict[str, int], path: str, N: int, nodes: int) -> dict[str, int]:
    """Numbers in each tensor of one layer."""
    rows = N if path == "dense" else nodes
    return {
        name: width * (N if "scattered" in name else rows)
        for name, width in widths(sizes).items()
        if "scattered" not in name or path == "paper"
    }


for path in plans:
    counted = elements(SIZES, path, plan.num_tokens, plan.num_nodes)
    assert counted == {name: tensor.numel() for name, tensor in ledgers[path].items()}

QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
shared, own, sequences = 512, 64, 16
N, nodes = (shared + own) * sequences, shared + own * sequences
MIB = 2**20
sizes = {
    path: {name: 2 * n / MIB for name, n in elements(QWEN3_06B, path, N, nodes).items()} for path in plans
}
names = list(widths(QWEN3_06B))
_, (axes,) = new_figure(8, 5.6)
draw_bars(
    axes,
    names,
    {path: [sizes[path].get(name, 0) for name in names] for path in plans},
    "MiB in 16-bit, one layer",
    f"Qwen3-0.6B, {sequences} prompts of {shared} + {own} tokens: N = {N}, N' = {nodes}, r = {N / nodes:.1f}",
)
plt.show()

# %% [markdown]
# Every tensor shrinks by $r$, except the four at the paper's boundary, which have the full $N$ rows. On the
# trie there are no such four.
#
# ## What lives at the same time
#
# In inference most tensors die young. Two moments of a layer decide its peak: *attention* (the hidden state,
# Q, K, V and the output are alive) and *the MLP* (the hidden state, its norm, gate, up and their product).

# %%
moments = ["during attention", "during the MLP"]
attention_tensors = [n for n in names if n not in ("gate", "up", "attention out")]
alive: dict[str, list[float]] = {}
for path in plans:
    at_attention = sum(sizes[path].get(name, 0) for name in attention_tensors)
    if path != "paper":  # there "out scattered" is the output
        at_attention += sizes[path]["attention out"]
    in_mlp = 2 * sizes[path]["hidden"] + 3 * sizes[path]["gate"]
    alive[path] = [at_attention, in_mlp]

peak = {path: max(both) for path, both in alive.items()}
for path, both in alive.items():
    where = moments[both.index(peak[path])]
    print(f"{path:6} peak {where}, {peak[path] / peak['dense']:.2f} of dense")
assert peak["trie"] == peak["dense"] * nodes / N
assert peak["dense"] > peak["paper"] > peak["trie"]
assert alive["paper"][1] == alive["trie"][1]

_, (axes,) = new_figure(8, 2.6)
draw_bars(axes, moments, alive, "MiB alive at once")
plt.show()

# %% [markdown]
# With the paper's boundary the peak moves from the MLP to attention. That is still a good deal: it works with
# any attention kernel as it is. But what is left to gain lies exactly there. The same holds for the work
# inside attention: the paper's way looks at all pairs of the full batch, the trie at each pair once.

# %%
dense_depth, trie_depth = TriePlan.identity(batch).depth, plan.depth
pairs = {"dense": int((dense_depth + 1).sum()), "trie": int((trie_depth + 1).sum())}
pairs["paper"] = pairs["dense"]
print("visible (query, key) pairs in the small batch:", pairs)
assert pairs["trie"] < pairs["paper"]

# %% [markdown]
# ## Change this and predict what happens
#
# An assertion that fails is an answer too: was it a law, or a fact about this example?
#
# 1. Set `shared, own = 64, 512`: little prefix, long suffixes. Which of the three peaks moves most? Is the
#    paper's peak still at attention?
# 2. Give the model as many key heads as query heads (`"num_key_value_heads": 16`). Which bars grow, and for
#    which path does it hurt most?
# 3. In `run_layer`, move the `rotate` of `q` behind the scatter. What else must change for the result to stay
#    right, and on how many rows does it then run?
