"""Texts that the workloads put around queries and passages.

Reranking follows the published benchmark's form (arXiv 2601.15013, section 5): a ChatML system message, then
a user message with the query, a fixed instruction and the passage; the last token opens the answer.
"""

from __future__ import annotations

SYSTEM_MESSAGE = "You are a helpful assistant specialized in embedding text for retrieval tasks."
# With the two labels and line breaks around it the instruction is 21 tokens long for SmolLM2.
RERANK_INSTRUCTION = "Judge how well the given passage answers the search query."

EMBED_SYSTEM_MESSAGE = (
    "You turn passages of text into embeddings for a search engine. Keep what a reader would search for: the "
    "subject, the names, the places, the numbers and the claim that is made. Leave out style, greetings and "
    "advertising. Passages that answer the same question should lie close together, even where they use "
    "other words; passages that only share words should not."
)

FEW_SHOT_EXAMPLES = (
    ("The river rose by two metres in a night and took the wooden bridge with it.", "nature"),
    ("Stir the milk slowly until it thickens, then take the pan off the heat.", "cooking"),
    ("The council will vote on the new tram line on Thursday evening.", "society"),
    ("Loosen the bolt by a quarter turn before you lift the wheel off.", "craft"),
    ("Swallows gather on the wires some days before they fly south.", "nature"),
    ("A pinch of salt brings out the sweetness of ripe melon.", "cooking"),
    ("Half of the members had never spoken at a meeting before.", "society"),
    ("Sand along the grain, wipe off the dust and apply a thin coat of oil.", "craft"),
)


def chatml(system: str, user: str) -> str:
    """One system and one user message as ChatML text, and the start of the answer."""
    turns = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
    return f"{turns}<|im_start|>assistant\n"


def rerank_query_first(query: str, passage: str) -> str:
    """Everything before the passage is shared by all passages of a query."""
    return chatml(SYSTEM_MESSAGE, f"Query: {query}\n{RERANK_INSTRUCTION}\nPassage: {passage}")


def rerank_document_first(query: str, passage: str) -> str:
    """Only the system message, and passages that begin alike, are shared."""
    return chatml(SYSTEM_MESSAGE, f"Passage: {passage}\n{RERANK_INSTRUCTION}\nQuery: {query}")


def embed_with_system_prompt(passage: str) -> str:
    """One passage to embed under a long system message."""
    return chatml(EMBED_SYSTEM_MESSAGE, passage)


def few_shot(text: str) -> str:
    """Labelled examples, then the text to label."""
    shots = "".join(f"Text: {example}\nSubject: {label}\n\n" for example, label in FEW_SHOT_EXAMPLES)
    return f"Name the subject of each text.\n\n{shots}Text: {text}\nSubject:"
