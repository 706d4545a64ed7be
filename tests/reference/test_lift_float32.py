"""Inside lift_float32 nothing is rounded to float32; outside everything is as ever."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from radixmlp.verify.lift import lift_float32

THIRD = torch.tensor([1.0, 2.0], dtype=torch.float64) / 3  # not a float32 number
AS_FLOAT32 = torch.zeros(1, dtype=torch.float32)

CASTS = {
    "float": lambda x: x.float(),
    "to dtype": lambda x: x.to(torch.float32),
    "to dtype=": lambda x: x.to(dtype=torch.float32),
    "to device and dtype": lambda x: x.to("cpu", torch.float32),
    "to device= and dtype=": lambda x: x.to(device="cpu", dtype=torch.float, copy=True),
    "to another tensor": lambda x: x.to(AS_FLOAT32),
    "to tensor=": lambda x: x.to(tensor=AS_FLOAT32),
    "type": lambda x: x.type(torch.float32),
    "type by name": lambda x: x.type("torch.FloatTensor"),
    "type by class": lambda x: x.type(torch.FloatTensor),
    "type_as": lambda x: x.type_as(AS_FLOAT32),
    "type_as other=": lambda x: x.type_as(other=AS_FLOAT32),
    "sum": lambda x: x[:1].sum(dtype=torch.float32),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
def test_a_cast_changes_nothing_inside(cast):
    with lift_float32():
        inside = cast(THIRD)
    assert inside.dtype == torch.float64
    assert torch.equal(inside.reshape(-1), THIRD[: inside.numel()])
    assert cast(THIRD).dtype == torch.float32


SOFTMAXES = {
    "functional": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    "torch": lambda x: torch.softmax(x, -1, dtype=torch.float32),
    "method": lambda x: x.softmax(-1, torch.float32),
    "log": lambda x: F.log_softmax(x, dim=-1, dtype=torch.float32).exp(),
}


@pytest.mark.parametrize("softmax", SOFTMAXES.values(), ids=SOFTMAXES.keys())
def test_softmax_is_computed_in_float64(softmax):
    truth = THIRD.softmax(-1)
    with lift_float32():
        torch.testing.assert_close(softmax(THIRD), truth, rtol=0, atol=1e-15)
    assert softmax(THIRD).dtype == torch.float32


def test_new_tensors_and_integers_become_float64():
    with lift_float32():
        assert torch.arange(3, dtype=torch.float32).dtype == torch.float64
        assert torch.full((2,), 0.1).dtype == torch.float64
        assert torch.tensor(0.1).item() == 0.1
        assert (torch.arange(3) / 7).dtype == torch.float64
        assert torch.arange(3).float().dtype == torch.float64
        assert torch.zeros(2, dtype=torch.float32, device="cpu").dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32
    assert torch.zeros(2).dtype == torch.float32


def test_other_casts_and_bit_views_are_left_alone():
    bits = torch.tensor([1065353216], dtype=torch.int32)
    with lift_float32():
        assert bits.view(torch.float32).tolist() == [1.0]
        assert THIRD.to(torch.bfloat16).dtype == torch.bfloat16
        assert THIRD.to(torch.int64).dtype == torch.int64
        assert THIRD.half().dtype == torch.float16


def test_gradients_pass_unrounded():
    def gradient() -> torch.Tensor:
        x = THIRD.clone().requires_grad_()
        (x.float().pow(3).to(x.dtype).sum()).backward()
        return x.grad

    with lift_float32():
        lifted = gradient()
    assert torch.equal(lifted, 3 * THIRD**2)
    assert not torch.equal(gradient(), 3 * THIRD**2)


def test_the_default_dtype_comes_back_after_an_error():
    with pytest.raises(RuntimeError, match="inside"), lift_float32():
        raise RuntimeError("inside")
    assert torch.get_default_dtype() == torch.float32
    assert torch.zeros(1).to(torch.float32).dtype == torch.float32


class ResultsBelowFloat64(TorchDispatchMode):
    """Counts the operations that yield a floating-point tensor of less than float64."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any(t.is_floating_point() and t.dtype != torch.float64 for t in tensors):
            self.names.append(str(func))
        return result


FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "smollm3", "gemma2", "gemma3_text"]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_operation_of_a_model_yields_less_than_float64(family, attention):
    if (family, attention) == ("gemma2", "sdpa"):
        attention = "eager"  # softcapping: transformers offers no SDPA for it
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    sizes |= {"intermediate_size": 24, "vocab_size": 20, "num_hidden_layers": 2, "sliding_window": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(family, **sizes, **special)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
    ids = torch.arange(1, 10)[None]
    with lift_float32(), ResultsBelowFloat64() as inside:
        logits = model(ids).logits
        logits.logsumexp(-1).sum().backward()
    assert inside.names == []
    assert logits.dtype == torch.float64
    with ResultsBelowFloat64() as outside:
        model(ids)
    assert outside.names != []
