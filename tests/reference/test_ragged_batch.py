"""What RaggedBatch accepts, what it lays out, and what it refuses with which words."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmlp.reference import RaggedBatch

SEQUENCES = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=6)


def pad(sequences: list[list[int]], lefts: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence after `left` columns of padding, in a batch `width` wide; padding holds -100."""
    ids = torch.full((len(sequences), width), -100)
    mask = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, (sequence, left) in enumerate(zip(sequences, lefts, strict=True)):
        ids[row, left : left + len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
        mask[row, left : left + len(sequence)] = 1
    return ids, mask


def assert_same(a: RaggedBatch, b: RaggedBatch) -> None:
    assert torch.equal(a.input_ids, b.input_ids)
    assert torch.equal(a.position_ids, b.position_ids)
    assert torch.equal(a.cu_seqlens, b.cu_seqlens)


@given(SEQUENCES)
@settings(max_examples=100, deadline=None)
def test_from_sequences_keeps_every_sequence(sequences):
    batch = RaggedBatch.from_sequences(sequences)
    assert batch.sequences() == sequences
    assert batch.num_sequences == len(sequences)
    assert batch.num_tokens == sum(map(len, sequences))
    assert batch.lengths.tolist() == [len(s) for s in sequences]
    assert batch.position_ids.tolist() == [p for s in sequences for p in range(len(s))]
    assert batch.cu_seqlens.dtype == torch.int32


@given(SEQUENCES, st.data())
@settings(max_examples=100, deadline=None)
def test_padding_on_either_side_is_the_same_batch(sequences, data):
    width = max(map(len, sequences), default=0) + data.draw(st.integers(0, 3))
    lefts = [data.draw(st.integers(0, width - len(s))) for s in sequences]
    ids, mask = pad(sequences, lefts, width)
    assert_same(RaggedBatch.from_padded(ids, mask), RaggedBatch.from_sequences(sequences))
    assert_same(RaggedBatch.from_padded(ids, mask.bool()), RaggedBatch.from_sequences(sequences))


def test_padded_positions_are_taken_where_the_tokens_are():
    ids, mask = pad([[5, 6], [7]], [1, 0], 3)
    each = RaggedBatch.from_padded(ids, mask, position_ids=torch.tensor([[9, 3, 4], [8, 9, 9]]))
    assert each.position_ids.tolist() == [3, 4, 8]
    shared = RaggedBatch.from_padded(ids, mask, position_ids=torch.tensor([[0, 1, 2]]))
    assert shared.position_ids.tolist() == [1, 2, 0]


def test_without_a_mask_every_column_is_a_token():
    assert RaggedBatch.from_padded(torch.tensor([[1, 2], [3, 4]])).sequences() == [[1, 2], [3, 4]]


def test_empty_sequences_keep_their_place():
    batch = RaggedBatch.from_sequences([[], [1, 2], [], [], [3], []])
    assert batch.sequences() == [[], [1, 2], [], [], [3], []]
    assert batch.cu_seqlens.tolist() == [0, 0, 2, 2, 2, 3, 3]


def test_empty_batches():
    for batch in (
        RaggedBatch.from_sequences([]),
        RaggedBatch.from_padded(torch.zeros(0, 5, dtype=torch.int64)),
        RaggedBatch(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.tensor([0])),
    ):
        assert (batch.num_tokens, batch.num_sequences, batch.cu_seqlens.tolist()) == (0, 0, [0])


def test_tensors_and_arrays_serve_as_sequences():
    numpy = pytest.importorskip("numpy")
    rows = [torch.tensor([1, 2], dtype=torch.int32), numpy.array([3], dtype=numpy.uint16), (4, 5)]
    assert RaggedBatch.from_sequences(rows).sequences() == [[1, 2], [3], [4, 5]]


def test_int32_tokens_stay_int32():
    rows = [torch.tensor([1, 2], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)]
    assert RaggedBatch.from_sequences(rows).input_ids.dtype == torch.int32


def test_sharing_keys_are_numbered_by_first_occurrence():
    batch = RaggedBatch.from_sequences([[1], [1], [1]], sharing_keys=["b", ("a", 1), "b"])
    assert batch.sharing_keys.tolist() == [0, 1, 0]


def test_the_largest_id_and_position_are_accepted():
    batch = RaggedBatch.from_sequences([[2**31 - 1]], position_ids=[[2**31 - 1]])
    assert (batch.input_ids.tolist(), batch.position_ids.tolist()) == ([2**31 - 1], [2**31 - 1])


BAD_SEQUENCES = {
    "a float id": ([[1], [2, 3.5]], r"sequence 1, offset 1 is 3\.5"),
    "a whole float": ([[1], [2.0]], r"sequence 1, offset 0 is 2\.0"),
    "a string": ([[1], ["two"]], "sequence 1, offset 0 is 'two'"),
    "nothing": ([[1, None]], "sequence 0, offset 1 is None"),
    "booleans": ([[1], [True]], "sequence 1, offset 0 is True"),
    "nesting": ([[1], [2, [3]]], r"sequence 1, offset 1 is \[3\]"),
    "a matrix": ([[1], [[2, 3]]], r"sequence 1 has shape \(1, 2\): offset 0"),
    "a number for a sequence": ([[1], 2], r"sequence 1 has shape \(\)"),
    "a float tensor": ([torch.tensor([1.5])], r"sequence 0, offset 0: value 1\.5 has dtype torch\.float32"),
    "a 3-D tensor": (torch.zeros(2, 3, 4, dtype=torch.int64), r"sequence 0 has shape \(3, 4\): offset 0"),
    "a negative id": ([[1], [], [2, 3, -4]], r"input_ids row 2, offset 2 is -4"),
    "an id beyond int32": ([[1], [2, 2**31]], r"input_ids row 1, offset 1 is 2147483648"),
    "an id beyond int64": ([[1], [2, 2**63]], r"sequence 1, offset 1 is 9223372036854775808"),
}


@pytest.mark.parametrize("case", BAD_SEQUENCES)
def test_bad_sequences_are_refused_by_row_and_offset(case):
    sequences, message = BAD_SEQUENCES[case]
    with pytest.raises(ValueError, match=message):
        RaggedBatch.from_sequences(sequences)


BAD_POSITIONS = {
    "too few": ([[0, 1], [0]], r"sequence 1 has 2 tokens but 1 position_ids: they part at offset 1"),
    "too many": ([[0, 1, 2], [0, 1]], r"sequence 0 has 2 tokens but 3 position_ids: they part at offset 2"),
    "rows missing": ([[0, 1]], "1 position_ids rows for 2 sequences"),
    "negative": ([[0, 1], [0, -1]], r"position_ids row 1, offset 1 is -1"),
    "too large": ([[0, 2**31], [0, 1]], r"position_ids row 0, offset 1 is 2147483648"),
    "a float": ([[0, 1], [0.5, 1]], r"position_ids of sequence 1, offset 0 is 0\.5"),
}


@pytest.mark.parametrize("case", BAD_POSITIONS)
def test_bad_positions_are_refused_by_row_and_offset(case):
    positions, message = BAD_POSITIONS[case]
    with pytest.raises(ValueError, match=message):
        RaggedBatch.from_sequences([[1, 2], [3, 4]], position_ids=positions)


def test_a_key_too_few_is_refused():
    with pytest.raises(ValueError, match="1 sharing_keys for 2 sequences"):
        RaggedBatch.from_sequences([[1], [2]], sharing_keys=["a"])


IDS = torch.tensor([1, 2, 3, 4])
COUNT = torch.tensor([0, 1, 0, 1])
BOUNDS = torch.tensor([0, 2, 4])
BAD_TENSORS = {
    "bounds start late": ((IDS, COUNT, torch.tensor([1, 2, 4])), r"row 0, offset 0 is 1: it must start at 0"),
    "bounds fall": ((IDS, COUNT, torch.tensor([0, 3, 2, 4])), r"falls from 3 to 2 at row 1 \(offset 2\)"),
    "narrow bounds fall": (
        (IDS, COUNT, torch.tensor([0, 3, 2, 4], dtype=torch.uint8)),
        r"falls from 3 to 2 at row 1 \(offset 2\)",
    ),
    "bounds end early": ((IDS, COUNT, torch.tensor([0, 3])), r"ends at 3 \(row 0, offset 1\).* 4 tokens"),
    "bounds end late": ((IDS, COUNT, torch.tensor([0, 2, 5])), r"ends at 5 \(row 1, offset 2\).* 4 tokens"),
    "no bounds": ((IDS, COUNT, torch.zeros(0, dtype=torch.int64)), r"cu_seqlens must be \[batch \+ 1\]"),
    "float bounds": ((IDS, COUNT, BOUNDS.float()), r"cu_seqlens has dtype torch\.float32, row 0, offset 0"),
    "float ids": (
        (IDS.float(), COUNT, BOUNDS),
        r"input_ids has dtype torch\.float32, row 0, offset 0 is 1\.0",
    ),
    "boolean ids": ((IDS.bool(), COUNT, BOUNDS), r"input_ids has dtype torch\.bool, row 0, offset 0 is True"),
    "negative ids": ((torch.tensor([1, 2, 3, -1]), COUNT, BOUNDS), r"input_ids row 1, offset 1 is -1"),
    "narrow negative ids": (
        (torch.tensor([1, 2, -3, 1], dtype=torch.int8), COUNT, BOUNDS),
        r"input_ids row 1, offset 0 is -3",
    ),
    "large ids": (
        (torch.tensor([1, 2**31, 3, 4]), COUNT, BOUNDS),
        r"input_ids row 0, offset 1 is 2147483648",
    ),
    "3-D ids": (
        (torch.zeros(1, 2, 2, dtype=torch.int64), COUNT, BOUNDS),
        r"input_ids must be \[num_tokens\], got shape \(1, 2, 2\): row 0, offset 0",
    ),
    "3-D positions": (
        (IDS, torch.zeros(1, 2, 2, dtype=torch.int64), BOUNDS),
        r"position_ids has shape \(1, 2, 2\), but input_ids has \(4,\)",
    ),
    "positions short": ((IDS, COUNT[:3], BOUNDS), r"shape \(3,\).*part at row 1, offset 1"),
    "positions long": ((IDS, torch.arange(6), BOUNDS), r"shape \(6,\).*part at row 1, offset 4"),
    "negative positions": ((IDS, torch.tensor([0, 1, -1, 1]), BOUNDS), r"position_ids row 1, offset 0 is -1"),
    "float positions": ((IDS, COUNT.double(), BOUNDS), r"position_ids has dtype torch\.float64"),
    "keys short": ((IDS, COUNT, BOUNDS, torch.tensor([1])), r"sharing_keys has shape \(1,\).* 2 sequences"),
    "float keys": ((IDS, COUNT, BOUNDS, torch.tensor([0.5, 0.7])), r"sharing_keys has dtype torch\.float32"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors_are_refused(case):
    tensors, message = BAD_TENSORS[case]
    with pytest.raises(ValueError, match=message):
        RaggedBatch(*tensors)


PADDED = torch.tensor([[1, 2, 3], [4, 5, 6]])
FULL = torch.ones(2, 3, dtype=torch.int64)
BAD_PADDED = {
    "a hole": (
        (PADDED, torch.tensor([[1, 1, 1], [1, 0, 1]])),
        r"attention_mask row 1 has a hole at offset 1",
    ),
    "a mask of two": (
        (PADDED, torch.tensor([[1, 1, 2], [1, 1, 1]])),
        r"attention_mask row 0, offset 2 is 2: expected 0 or 1",
    ),
    "a NaN in the mask": (
        (PADDED, torch.tensor([[1.0, 1.0, 1.0], [1.0, float("nan"), 1.0]])),
        r"attention_mask row 1, offset 1 is nan",
    ),
    "a mask of another shape": ((PADDED, FULL[:, :2]), r"attention_mask has shape \(2, 2\)"),
    "3-D ids": ((PADDED[None], None), r"got shape \(1, 2, 3\): row 0, offset 0"),
    "1-D ids": ((PADDED[0], None), r"got shape \(3,\): row 0, offset 0"),
    "float ids": ((PADDED.float(), FULL), r"dtype torch\.float32, row 0, offset 0 is 1\.0"),
    "a negative id beside padding": (
        (torch.tensor([[-9, 1], [-9, -2]]), torch.tensor([[0, 1], [0, 1]])),
        r"input_ids row 1, offset 1 is -2",
    ),
    "positions of another length": (
        (PADDED, FULL, torch.zeros(2, 2).long()),
        r"position_ids has shape \(2, 2\)",
    ),
    "positions of another batch": (
        (PADDED, FULL, torch.zeros(3, 3).long()),
        r"position_ids has shape \(3, 3\)",
    ),
    "a negative position": (
        (PADDED, FULL, torch.tensor([[0, 1, 2], [0, -1, 2]])),
        r"position_ids row 1, offset 1 is -1",
    ),
}


@pytest.mark.parametrize("case", BAD_PADDED)
def test_bad_padded_batches_are_refused(case):
    arguments, message = BAD_PADDED[case]
    with pytest.raises(ValueError, match=message):
        RaggedBatch.from_padded(*arguments)
