"""The texts of a tree: what its segments say, and where its sequences first part."""

from __future__ import annotations

from radixmlp.verify.inspect.tokenizing import TextTokenizer
from radixmlp.verify.inspect.tree import Tree

_EXCERPT = 600  # tokens


def first_branch(tree: Tree) -> tuple[int | None, list[int]]:
    """(the segment all sequences begin with or None, the ways on from there)."""
    if len(tree.roots) != 1 or tree.sequences[tree.roots[0]] < tree.order.size:
        return None, tree.roots
    return tree.roots[0], tree.children[tree.roots[0]]


def segment_text(tree: Tree, segment: int, tokenizer: TextTokenizer) -> str:
    """The text of a segment's tokens; long ones lose their middle."""
    ids = tree.segment_ids(segment)
    before = tree.last_id(segment)
    if len(ids) > _EXCERPT:
        ids = ids[: _EXCERPT // 2] + ids[-_EXCERPT // 2 :]
    if before is None:
        return tokenizer.decode(ids)
    # Some tokenizers drop the blank of a text's first word; with a token before it, it stays.
    head, whole = tokenizer.decode([before]), tokenizer.decode([before, *ids])
    return whole[len(head) :] if whole.startswith(head) else tokenizer.decode(ids)
