"""The table of compiled kernels judges what is launched: on each architecture the same tiles and constants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixmlp import AttentionSpec, RaggedBatch, build_plan
from radixmlp.kernels import trie_attention as forward
from radixmlp.kernels import trie_attention_backward as backward
from radixmlp.kernels.config import KernelConfig
from radixmlp.kernels.trie_launch import config_name, shipped_kinds
from radixmlp.kernels.trie_tiles import HEAD_DIMS, architecture, dkv_tile, dq_tile, forward_tile
from radixmlp.reference import TriePlan

PLAN = build_plan(RaggedBatch.from_sequences([[1, 2, 3], [1, 4]]))
ASKED = {"window": {"sliding_window": 2}, "softcap": {"softcap": 5.0}, "sinks": {"sinks": torch.zeros(4)}}
KERNELS = {
    forward: ("trie_attention_forward",),
    backward: ("trie_attention_dq", "trie_attention_dkv"),
}


class Recorder:
    """In place of a kernel: keeps what it would be specialised on, and runs nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, []

    def __getitem__(self, grid: object) -> Any:
        return lambda **arguments: self.launches.append(arguments)


def launched(
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    dtype: torch.dtype,
    shape: tuple[int, int],
    extras: tuple[str, ...],
    plan: TriePlan = PLAN,
) -> list[tuple[Any, dict[str, Any]]]:
    """(kernel, its arguments) of one forward and backward pass on `arch`, in order."""
    recorders = []
    for module, names in KERNELS.items():
        monkeypatch.setattr(module, "architecture", lambda device: arch)
        for name in names:
            recorders.append(Recorder(getattr(module, name)))
            monkeypatch.setattr(module, name, recorders[-1])
    spec = AttentionSpec(0.1, **{name: value for extra in extras for name, value in ASKED[extra].items()})
    q = torch.zeros(plan.num_nodes, 4, shape[0], dtype=dtype)
    k, v = (torch.zeros(plan.num_nodes, 1, width, dtype=dtype) for width in shape)
    out, lse = forward.trie_attention(q, k, v, plan, spec)
    backward.trie_attention_backward(torch.zeros_like(out), q, k, v, out, lse, plan, spec)
    monkeypatch.undo()
    return [(each.kernel, launch) for each in recorders for launch in each.launches]


def judged(arch: str) -> dict[str, KernelConfig]:
    return {config.name: config for config in [*forward.configurations(arch), *backward.configurations(arch)]}


def options_of(config: KernelConfig) -> dict[str, Any]:
    return {**config.constexprs, "num_warps": config.num_warps, "num_stages": config.num_stages}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_what_is_judged_is_what_is_launched(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    configs = judged(arch)
    seen = set()
    for dtype, shape, extras in shipped_kinds():
        for kernel, arguments in launched(monkeypatch, arch, dtype, shape, extras):
            name = kernel.__name__
            if name == "trie_attention_dkv":
                wanted = (want.lower() for want in ("dk", "dv") if arguments[f"WANT_{want.upper()}"])
                name = "trie_attention_" + "".join(wanted)
            name = config_name(name, *shape, dtype, extras)
            expected = options_of(configs[name])
            assert {key: arguments[key] for key in expected} == expected, name
            seen.add(name)
    assert seen == {name for name in configs if not name.startswith("add_parts")}


def test_a_table_for_another_architecture_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, dtype = (256, 256), torch.bfloat16
    (_, arguments), *_ = launched(monkeypatch, "sm_80", dtype, shape, ())
    name = config_name("trie_attention_forward", *shape, dtype, ())
    expected = options_of(judged("sm_90")[name])
    assert {key: arguments[key] for key in expected} != expected


def test_the_architecture_is_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    assert architecture(torch.device("cpu")) == "sm_90"
    for capability, name in [((8, 0), "sm_80"), ((8, 7), "sm_87"), ((9, 0), "sm_90"), ((10, 0), "sm_100")]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, it=capability: it)
        assert architecture(gpu) == name


def test_tiles_follow_the_architecture() -> None:
    for shape in HEAD_DIMS:
        for softcap in (False, True):
            tiles = {
                arch: (
                    forward_tile(*shape, torch.bfloat16, softcap, arch),
                    dq_tile(*shape, torch.bfloat16, arch),
                    dkv_tile(*shape, torch.bfloat16, softcap, arch),
                )
                for arch in ("sm_80", "sm_87", "sm_90", "sm_100")
            }
            assert tiles["sm_80"] == tiles["sm_87"] != tiles["sm_90"]
            assert tiles["sm_100"] == tiles["sm_90"]
            for tile in (tile for each in tiles.values() for tile in each):
                assert tile.rows >= 16
                assert tile.keys >= 16
