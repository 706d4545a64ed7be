"""Each planted fault must turn `radixmlp verify` red, and the record meant to catch it must be the red one."""

import dataclasses
import json
from collections import defaultdict
from itertools import pairwise

import pytest
import torch

import radixmlp
from radixmlp.optimized.integration import compact
from radixmlp.optimized.integration.facts import Facts
from radixmlp.reference import TriePlan
from radixmlp.reference.attention import causal_attention
from radixmlp.verify import run, runner
from radixmlp.verify.models import DTYPES, load_model
from radixmlp.verify.subject import Subject

MODEL = "tiny-qwen3"
EACH_DTYPE = [name if name == "float32" else pytest.param(name, marks=pytest.mark.slow) for name in DTYPES]


@pytest.fixture(autouse=True)
def untimed_index(monkeypatch):
    monkeypatch.setattr(runner, "measure_index", lambda workload: [])


def verify(tmp_path, subject, *arguments, model=MODEL, attention="trie-sdpa"):
    """(exit code, records) of a small run through the command line's own function."""
    line = ["--quick", "--model", model, "--attention", attention, "--out", str(tmp_path), *arguments]
    code = run.main(line, subject)
    return code, json.loads((tmp_path / "report.json").read_text())["records"]


def red(records):
    return {(record["kind"], record["metric"]) for record in records if not record["passed"]}


def parity_only(code, records, caught_by):
    """The run is red, and parity (by one of the named metrics) is what made it so."""
    assert code == run.EXIT_FAILED
    failed = {metric for kind, metric in red(records) if kind == "parity"}
    assert any(metric.endswith(caught_by) for metric in failed), failed


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_nothing_planted_is_green(tmp_path, dtype):
    code, records = verify(tmp_path, None, "--workload", "edges", "--workload", "tree", "--dtype", dtype)
    assert red(records) == set()
    assert code == 0
    assert {record["kind"] for record in records} >= {"parity", "compression", "index"}


def with_output(change):
    """The fast path with what it returns changed: `change(out, batch, logits_to_keep)` -> (hidden, logits)."""

    @dataclasses.dataclass
    class Changed:
        last_hidden_state: torch.Tensor
        logits: torch.Tensor

    def forward(model, batch, attention="auto", logits_to_keep=0):
        out = radixmlp.forward(model, batch, attention=attention, logits_to_keep=logits_to_keep)
        return Changed(*change(out))

    return Subject(forward, radixmlp.build_plan)


def zeros(out):
    return torch.zeros_like(out.last_hidden_state), torch.zeros_like(out.logits)


def no_scatter(out):
    """Compact rows handed out as if they were ragged ones, topped up to N rows."""
    rows = out.plan.gather.long()[torch.arange(out.plan.num_tokens) % out.plan.num_nodes]
    return out.last_hidden_state[rows], out.logits[rows]


def next_row(out):
    return out.last_hidden_state, out.logits.roll(1, 0)


def one_nan(out):
    hidden = out.last_hidden_state.clone()
    hidden[-1, -1] = torch.nan
    return hidden, out.logits


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("change", [zeros, no_scatter, next_row, one_nan])
def test_wrong_outputs(tmp_path, change, dtype):
    found = verify(tmp_path, with_output(change), "--workload", "tree", "--dtype", dtype)
    parity_only(*found, caught_by="_error")


def test_too_few_rows_is_a_failed_record_not_a_crash(tmp_path):
    subject = with_output(lambda out: (out.last_hidden_state[:-1], out.logits[:-1]))
    code, records = verify(tmp_path, subject, "--workload", "tree", "--dtype", "float32")
    assert code == run.EXIT_FAILED
    (failed,) = (record for record in records if not record["passed"])
    assert "shape" in failed["details"]["error"]


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("workload", ["synthetic:24+8x4", "tree"])
def test_positions_ignored(tmp_path, dtype, workload):
    def forward(model, batch, attention="auto", logits_to_keep=0):
        unplaced = dataclasses.replace(batch, position_ids=torch.zeros_like(batch.position_ids))
        return radixmlp.forward(model, unplaced, attention=attention, logits_to_keep=logits_to_keep)

    found = verify(tmp_path, Subject(forward, radixmlp.build_plan), "--workload", workload, "--dtype", dtype)
    parity_only(*found, caught_by="_error")


def test_a_model_whose_rotation_is_truncated_to_zero_proves_nothing(tmp_path, monkeypatch):
    """Every path agrees with every other there, so that the published proof passes."""

    def blind(*arguments):
        loaded = load_model(*arguments)
        loaded.model.model.rotary_emb.inv_freq.zero_()
        return loaded

    monkeypatch.setattr(runner, "load_model", blind)
    code, records = verify(tmp_path, None, "--workload", "tree", "--dtype", "float32")
    assert code == run.EXIT_FAILED
    assert red(records) == {("parity", "position_blindness")}


@pytest.mark.parametrize("what", ["weight", "buffer", "input_ids", "position_ids"])
def test_a_mutated_input(tmp_path, what):
    def forward(model, batch, attention="auto", logits_to_keep=0):
        out = radixmlp.forward(model, batch, attention=attention, logits_to_keep=logits_to_keep)
        with torch.no_grad():
            if what == "weight":
                model.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-3
            elif what == "buffer":
                model.model.rotary_emb.inv_freq[0] *= 1.001
            else:
                getattr(batch, what)[0] += 1
        return out

    subject = Subject(forward, radixmlp.build_plan)
    code, records = verify(tmp_path, subject, "--workload", "one-sequence", "--dtype", "float32")
    assert code == run.EXIT_FAILED
    assert ("parity", "inputs_changed") in red(records)


def build_by(key):
    """A builder that merges two tokens iff `key(parent, batch, sequence, row, start)` agrees."""

    def build_plan(batch, order="trie"):
        parents, firsts, scatter, numbers = [], [], [], {}
        bounds = batch.cu_seqlens.tolist()
        for sequence, (start, end) in enumerate(pairwise(bounds)):
            above = -1
            for row in range(start, end):
                node = numbers.setdefault(key(above, batch, sequence, row, start), len(parents))
                if node == len(parents):
                    parents.append(above)
                    firsts.append(row)
                scatter.append(node)
                above = node
        return number_nodes(batch, parents, firsts, scatter, order)

    return build_plan


def number_nodes(batch, parents, firsts, scatter, order):
    children = defaultdict(list)
    for node, parent in enumerate(parents):
        children[parent].append(node)
    visited, ends, stack = [], {}, [(node, False) for node in reversed(children[-1])]
    while stack:
        node, left = stack.pop()
        if left:
            ends[node] = len(visited)
            continue
        visited.append(node)
        stack.append((node, True))
        stack += [(child, False) for child in reversed(children[node])]
    new = {node: rank for rank, node in enumerate(visited)}
    if order == "input":
        new, visited = {node: node for node in new}, sorted(visited)
    ints = lambda values: torch.tensor(list(values), dtype=torch.int32)  # noqa: E731
    gather = ints(firsts[node] for node in visited)
    return TriePlan(
        gather=gather,
        scatter=ints(new[node] for node in scatter),
        parent=ints(new[parents[node]] if parents[node] >= 0 else -1 for node in visited),
        subtree_end=ints(ends[node] for node in visited),
        input_ids=batch.input_ids[gather],
        position_ids=batch.position_ids[gather],
        cu_seqlens=batch.cu_seqlens,
        order=order,
    )


def token(batch, row):
    return int(batch.input_ids[row])


def place(batch, row):
    return int(batch.position_ids[row])


def tenant(batch, sequence):
    return None if batch.sharing_keys is None else int(batch.sharing_keys[sequence])


KEYS = {
    "right": lambda up, b, s, row, start: (up, tenant(b, s), token(b, row), place(b, row)),
    "prefix one too long": lambda up, b, s, row, start: (
        (up, tenant(b, s), row == start or token(b, row - 1), place(b, row))
    ),
    "prefix one too short": lambda up, b, s, row, start: (
        (
            up,
            tenant(b, s),
            token(b, row),
            place(b, row),
            token(b, row + 1) if row + 1 < b.num_tokens else None,
        )
    ),
    "merged under another parent": lambda up, b, s, row, start: (tenant(b, s), token(b, row), place(b, row)),
    "merged at another position": lambda up, b, s, row, start: (up, tenant(b, s), token(b, row)),
    "merged across tenants": lambda up, b, s, row, start: (up, token(b, row), place(b, row)),
}


@pytest.fixture
def planted_builder(monkeypatch):
    """The fast path with another builder, and without its own probe, which would refuse most of them first."""

    def plant(name):
        build_plan = build_by(KEYS[name])
        monkeypatch.setattr(compact, "build_plan", build_plan)
        monkeypatch.setattr(compact, "ensure_verified", lambda model: Facts())
        return Subject(radixmlp.forward, build_plan)

    return plant


def test_the_slow_builder_of_this_file_is_right_when_its_key_is(tmp_path, planted_builder):
    workloads = ["--workload", "edges", "--workload", "tree", "--dtype", "float32"]
    _, records = verify(tmp_path, planted_builder("right"), *workloads)
    # Only `subtree_end` in input order, which it does not compute, may differ.
    assert red(records) <= {("index", "maps_equal_input")}


@pytest.mark.parametrize("name", [name for name in KEYS if name != "right"])
def test_a_false_merge_is_caught_by_the_index_checks(tmp_path, planted_builder, name):
    workloads = ["--workload", "edges", "--workload", "tree", "--dtype", "float32"]
    code, records = verify(tmp_path, planted_builder(name), *workloads)
    assert code == run.EXIT_FAILED
    failed = red(records)
    assert ("index", "maps_equal_trie") in failed
    assert ("compression", "compression_ratio") in failed
    if name not in ("prefix one too short", "merged across tenants"):  # those walk back to the right tokens
        assert ("index", "sequences_walked_back_trie") in failed


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize(
    "name", ["prefix one too long", "merged under another parent", "merged at another position"]
)
def test_a_false_merge_is_caught_by_parity_too(tmp_path, planted_builder, name, dtype):
    workloads = ["--workload", "edges", "--workload", "tree", "--dtype", dtype]
    found = verify(tmp_path, planted_builder(name), *workloads)
    parity_only(*found, caught_by="_error")


class MaskedTrie:
    """Attention over an explicit [N', N'] mask, one step too wide where asked."""

    def __init__(self, wide):
        self.wide = wide
        self.name = f"trie-planted-{wide}"

    def unsupported(self, spec, device, dtype, training):
        return None

    def __call__(self, q, k, v, plan, spec):
        rows = torch.arange(plan.num_nodes)
        ends = plan.subtree_end + (self.wide == "subtree")
        seen = (rows <= rows[:, None] + (self.wide == "future")) & (rows[:, None] < ends)
        if spec.sliding_window is not None:
            distance = plan.depth[:, None] - plan.depth
            seen &= distance < spec.sliding_window + (self.wide == "window")
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * spec.softmax_scale
        precise = torch.promote_types(q.dtype, torch.float32)
        weights = scores.to(precise).masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v.repeat_interleave(group, 1))


class Scattering:
    """The paper's path (scatter, attention per sequence, gather) with one of its two moves left out."""

    def __init__(self, dropped):
        self.dropped = dropped
        self.name = f"scatter-planted-{dropped}"

    def unsupported(self, spec, device, dtype, training):
        return None

    def __call__(self, q, k, v, plan, spec):
        rows = plan.scatter.long()
        if self.dropped == "scatter":
            rows = torch.arange(plan.num_tokens) % plan.num_nodes
        out = causal_attention(q[rows], k[rows], v[rows], plan.cu_seqlens, spec)
        return out[: plan.num_nodes] if self.dropped == "gather" else out[plan.gather.long()]


@pytest.fixture
def planted():
    names = []

    def plant(backend):
        names.append(radixmlp.register_attention(backend).name)
        return names[-1]

    yield plant
    for name in names:
        radixmlp.unregister_attention(name)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize(
    ("model", "wide"),
    [
        ("tiny-qwen3", None),
        ("tiny-mistral", None),
        ("tiny-qwen3", "subtree"),
        ("tiny-qwen3", "future"),
        ("tiny-mistral", "window"),
    ],
)
def test_a_mask_one_too_wide(tmp_path, planted, model, wide, dtype):
    name = planted(MaskedTrie(wide))
    found = verify(tmp_path, None, "--workload", "tree", "--dtype", dtype, model=model, attention=name)
    if wide is None:
        assert found[0] == 0, red(found[1])
    else:
        parity_only(*found, caught_by="_error")


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("dropped", [None, "scatter", "gather"])
def test_a_dropped_scatter(tmp_path, planted, dropped, dtype):
    name = planted(Scattering(dropped))
    found = verify(tmp_path, None, "--workload", "tree", "--dtype", dtype, attention=name)
    if dropped is None:
        assert found[0] == 0, red(found[1])
    else:
        parity_only(*found, caught_by="_error")


def test_gradients_of_duplicate_rows_dropped(tmp_path):
    """The forward is right to the last bit; only training would learn the wrong thing."""

    def first_rows_only(out):
        first = torch.zeros(out.plan.num_tokens, 1, dtype=torch.float64)
        first[out.plan.gather.long()] = 1
        kept = [
            values * first + values.detach() * (1 - first) for values in (out.last_hidden_state, out.logits)
        ]
        return tuple(kept)

    subject = with_output(first_rows_only)
    code, records = verify(tmp_path, subject, "--workload", "edges", "--dtype", "float64")
    assert code == run.EXIT_FAILED
    assert red(records) == {("parity", "lifted_gradient_error")}


def test_no_speed_without_green_parity(tmp_path, monkeypatch):
    """`measure_speed` and `measure_memory` are not even called for a wrong backend."""
    asked = []
    for name in ("measure_speed", "measure_memory"):
        monkeypatch.setattr(runner, name, lambda *arguments, **options: asked.append(arguments) or [])
    arguments = [
        "--quick",
        "--model",
        "qwen3-0.6b-width",
        "--workload",
        "synthetic:8+4x3",
        "--dtype",
        "bfloat16",
    ]
    assert run.main([*arguments, "--out", str(tmp_path)], with_output(zeros)) == run.EXIT_FAILED
    assert asked == []
    assert run.main([*arguments, "--out", str(tmp_path)], None) == 0
    assert len(asked) == 2


def test_two_runs_judge_the_same_numbers(tmp_path):
    line = ["--workload", "edges", "--dtype", "float32"]
    first, second = (verify(tmp_path, None, *line)[1] for _ in range(2))
    values = [
        [(r["metric"], r["value"]) for r in records if r["kind"] == "parity"] for records in (first, second)
    ]
    assert values[0] == values[1]
