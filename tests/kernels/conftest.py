"""Kernels run here in Triton's interpreter: Triton chooses it when it is imported, by what tests/conftest.py set."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

if not isinstance(tl.sum, InterpretedFunction):
    raise pytest.UsageError(
        "Triton was imported before tests/conftest.py could choose: set TRITON_INTERPRET=1 for this run"
    )


if triton.__version__.startswith("3.6."):
    # Its interpreter takes int() of arrays of one element, wherever a loop's bound is a tensor; numpy 2.4 refuses.
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


@pytest.fixture
def nan_filled():
    """Tensors that PyTorch leaves uninitialised hold NaN, so that what a kernel fails to write shows. Seeded."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.ones(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
