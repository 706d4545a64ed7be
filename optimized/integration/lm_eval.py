"""lm-evaluation-harness on the trie: loglikelihoods from one row of logits per distinct token.

`HFLM` takes a log-softmax over [batch, length, vocabulary], although it reads the continuations alone. `RadixHFLM`
computes the continuations' logits alone, each distinct one once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from radixmlp.optimized.errors import UnsupportedAttentionError, UnsupportedModelError
from radixmlp.optimized.index import build_plan
from radixmlp.optimized.integration.compact import DENSE, forward
from radixmlp.optimized.integration.enabling import enable
from radixmlp.optimized.integration.output import RaggedOutput
from radixmlp.reference import RaggedBatch

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from tqdm import tqdm
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "radixmlp.optimized.integration.lm_eval needs lm-evaluation-harness with its Hugging Face models: "
        "pip install 'radixmlp[integrations]'",
        name=missing.name,
    ) from missing

# What lm-eval passes around: (its cache's key, context tokens, continuation tokens).
Request = tuple[Any, list[int], list[int]]
Answer = tuple[float, bool]

_log = logging.getLogger(__name__)


@register_model("radixmlp")
class RadixHFLM(HFLM):
    """`HFLM` whose loglikelihoods are read off compact rows.

    Its arguments are those of `HFLM`; the model is enabled with `attention` and `threshold` (as of
    `radixmlp.enable`) unless it is already. Generation and everything else is `HFLM`'s, on the enabled model. The
    answers are those of `HFLM` with `logits_cache=False` (its cache misreads inputs that are cut into context and
    continuation at different places): same order, same log-probabilities up to rounding.

    Batches of `batch_size` distinct inputs are formed in the order of their tokens, not of their length, so that
    inputs with the longest common prefixes meet in one batch; shorter inputs need no padding.

    Raises:
        UnsupportedModelError: the model cannot be compacted, or is an encoder-decoder.
    """

    def __init__(self, *args: Any, attention: str = "auto", threshold: float = 0.9, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.backend != "causal":
            raise UnsupportedModelError(
                f"{type(self.model).__name__} is an encoder-decoder: only causal decoders share prefixes; use HFLM"
            )
        if not hasattr(self.model, "radixmlp_stats"):
            enable(self.model, attention, threshold)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        """One (log-probability, whether greedy decoding would say it) a request, in their order."""
        groups = self._grouped(requests)
        size = self._inputs_per_batch(requests, override_bs) or max(1, len(groups))
        answers: dict[int, Answer] = {}
        progress = tqdm(
            total=len(requests),
            disable=disable_tqdm or self.rank != 0,
            desc="Running loglikelihood requests",
        )
        for inputs in _chunks(sorted(groups), size):
            places = [place for tokens in inputs for place in groups[tokens]]
            asked = [requests[place] for place in places]
            owners = [row for row, tokens in enumerate(inputs) for _ in groups[tokens]]
            try:
                found = self._answers(inputs, owners, [request[2] for request in asked])
            except (UnsupportedModelError, UnsupportedAttentionError) as refused:
                _log.debug("a batch runs as HFLM would run it: %s", refused)
                found = super()._loglikelihood_tokens(asked, disable_tqdm=True, override_bs=len(inputs))
            for place, (key, _, _), answer in zip(places, asked, found, strict=True):
                answers[place] = answer
                if key is not None:  # the windows of a rolling loglikelihood carry none
                    self.cache_hook.add_partial("loglikelihood", key, answer)
            progress.update(len(places))
        progress.close()
        return [answers[place] for place in range(len(requests))]

    def _grouped(self, requests: Sequence[Request]) -> dict[tuple[int, ...], list[int]]:
        """The requests' numbers, by the tokens the model is given: all but the last, the latest `max_length`."""
        groups: dict[tuple[int, ...], list[int]] = {}
        truncated = 0
        for number, (_, context, continuation) in enumerate(requests):
            if not context or not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"request {number} has {len(context)} context and {len(continuation)} continuation tokens: "
                    f"expected at least one of each, and no more than {self.max_length} to be scored"
                )
            tokens = (context + continuation)[:-1]
            truncated += len(tokens) > self.max_length
            groups.setdefault(tuple(tokens[-self.max_length :]), []).append(number)
        if truncated:
            _log.warning(
                "%d of %d requests are longer than the model's maximum length (%d) and lose their beginning",
                truncated,
                len(requests),
                self.max_length,
            )
        return groups

    def _inputs_per_batch(self, requests: Sequence[Request], override: int | None) -> int:
        """0: all in one."""
        if self.batch_size != "auto":
            return int(self.batch_size)
        if override is not None or not requests:
            return override or 1
        longest = max(requests, key=lambda request: len(request[1]) + len(request[2]))
        return int(self._detect_batch_size([longest], 0))

    def _answers(
        self, inputs: Sequence[Sequence[int]], owners: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> list[Answer]:
        """The answers for `continuations`, each the end of `inputs[owner]` shifted by one token."""
        batch = RaggedBatch.from_sequences(inputs)
        lengths = [len(continuation) for continuation in continuations]
        kept = [0] * len(inputs)
        for owner, length in zip(owners, lengths, strict=True):
            kept[owner] = max(kept[owner], length)
        with (
            torch.no_grad(),
            torch.autocast(
                device_type=self.device.type,
                dtype=self.mixed_precision_dtype,
                enabled=self.mixed_precision_dtype is not None,
            ),
        ):
            started = time.perf_counter()
            plan = build_plan(batch)
            self.model.radixmlp_stats.count_index(time.perf_counter() - started)
            output = forward(self.model, batch, plan=plan, logits_to_keep=torch.tensor(kept))
            assert output.compact_logits is not None
            log_probs = F.log_softmax(output.compact_logits, dim=-1, dtype=self.softmax_dtype)  # [R, V]
            row = _rows_of(output, kept, owners, lengths)
            targets = torch.tensor([token for tokens in continuations for token in tokens], device=row.device)
            said = (log_probs.argmax(-1)[row] == targets).cpu().split(lengths)
            scores = log_probs[row, targets].cpu().split(lengths)
        self._count(batch, output)
        return [(float(score.sum()), bool(same.all())) for score, same in zip(scores, said, strict=True)]

    def _count(self, batch: RaggedBatch, output: RaggedOutput) -> None:
        """Add the batch to the model's statistics; its slots are those that padding would have given it."""
        stats = self.model.radixmlp_stats
        slots = batch.num_sequences * int(batch.lengths.max())
        if output.attention == DENSE:
            stats.count_dense("little to share", slots)
        else:
            stats.count_compact(slots, output.plan.num_tokens, output.plan.num_nodes)


def _rows_of(
    output: RaggedOutput, kept: Sequence[int], owners: Sequence[int], counts: Sequence[int]
) -> Tensor:
    """[sum(counts)] rows of `output.compact_logits`: the last counts[i] tokens of sequence owners[i], for each i.

    `output` has the logits of the last kept[b] tokens of each sequence b.
    """
    assert output.logit_rows is not None
    ends = list(accumulate(kept))
    places = [
        place
        for owner, count in zip(owners, counts, strict=True)
        for place in range(ends[owner] - count, ends[owner])
    ]
    return output.logit_rows[torch.tensor(places, device=output.logit_rows.device)]


def _chunks(items: list[tuple[int, ...]], size: int) -> Iterator[list[tuple[int, ...]]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
