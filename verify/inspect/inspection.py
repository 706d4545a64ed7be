"""What an inspection is asked and what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from radixmlp.optimized.engine.batching import Policy
from radixmlp.optimized.jobs.requests import BadLine
from radixmlp.verify.inspect.causes import Causes
from radixmlp.verify.inspect.ragged import Tokens
from radixmlp.verify.inspect.survey import POOL_TOKENS, BatchSum, Survey, Window
from radixmlp.verify.inspect.templates import Text
from radixmlp.verify.inspect.tree import Tree

HEAD_SEQUENCES, HEAD_TOKENS = 10_000, 1_000_000


@dataclass(frozen=True)
class Options:
    """What to count.

    Args:
        max_batch_tokens: compact rows a batch.
        threshold: largest gamma at which a batch is worth compacting.
        policy: of the batches the verdict speaks of.
        windows: sliding windows to count pairs for.
        pool_tokens: sequences are divided into batches this many tokens at a time, or more.
        head_sequences, head_tokens: what the tree and the search for causes look at, from the file's beginning.
    """

    max_batch_tokens: int = 65_536
    threshold: float = 0.9
    policy: Policy = "prefix"
    windows: Sequence[Window] = (None,)
    pool_tokens: int = POOL_TOKENS
    head_sequences: int = HEAD_SEQUENCES
    head_tokens: int = HEAD_TOKENS


@dataclass
class Line:
    """One way to write the requests, counted.

    Args:
        template: its name.
        surveys: the batches by policy.
        whole: the sums of all sequences as one batch; None where they were too many to be held together.
    """

    template: str
    surveys: dict[Policy, Survey]
    whole: BatchSum | None = None

    @classmethod
    def empty(cls, template: str, options: Options) -> Line:
        """Nothing counted yet."""
        policies: tuple[Policy, ...] = ("prefix", "fifo")
        sizes = (options.max_batch_tokens, options.windows, options.pool_tokens)
        return cls(template, {policy: Survey(policy, *sizes) for policy in policies})


@dataclass
class Head:
    """The beginning of the file.

    Args:
        texts, tokens: its sequences.
        tree: their trie.
        causes: what keeps them apart.
        complete: whether it is the whole file.
    """

    texts: list[Text] = field(default_factory=list)
    tokens: Tokens = field(default_factory=lambda: Tokens.join([]))
    complete: bool = True
    tree: Tree | None = None
    causes: Causes | None = None


@dataclass
class Inspection:
    """What a file of requests shares.

    Args:
        requests, sequences: good lines, and texts they make (one a passage).
        bad_lines, bad: how many lines are none, and the first of them.
        too_long, first_too_long: sequences longer than a batch, left out of all sums, and the line of the first.
        doubled_bos: sequences that begin with two beginning-of-sequence tokens.
        empty: sequences without a token.
        main: as asked for.
        swapped: query and passage the other way round, where all requests are pairs.
    """

    options: Options
    tokenizer: str
    main: Line
    swapped: Line | None = None
    requests: int = 0
    sequences: int = 0
    bad_lines: int = 0
    bad: list[BadLine] = field(default_factory=list)
    too_long: int = 0
    first_too_long: int | None = None
    doubled_bos: int = 0
    empty: int = 0
    head: Head = field(default_factory=Head)

    @property
    def survey(self) -> Survey:
        """The batches the verdict speaks of."""
        return self.main.surveys[self.options.policy]
