"""The README's table and picture of measured results, drawn from a committed measurement.

    python -P paper_figures/figures/readme_measured.py [MEASURED.json]

Without an argument it takes the newest file of `paper_figures/measured/`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
PICTURE = ROOT / "paper_figures" / "pictures" / "measured.svg"
TIMED = "plan + backbone + last-token logits"  # said once, below the table
COLORS = {"qwen3-0.6b": "#0072B2", "qwen3-8b": "#D55E00", "training": "#009E73"}


def main(argv: list[str] | None = None) -> None:
    """Rewrite the README between its markers, and the picture."""
    arguments = sys.argv[1:] if argv is None else argv
    path = Path(arguments[0]) if arguments else newest()
    measured = json.loads(path.read_text(encoding="utf-8"))
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), measured), encoding="utf-8")
    draw(measured)


def newest() -> Path:
    """The measurement last written."""
    files = sorted((ROOT / "paper_figures" / "measured").glob("*.json"), key=lambda p: p.stat().st_mtime)
    if not files:
        sys.exit("nothing is measured yet: make bench")
    return files[-1]


def with_table(readme: str, measured: dict[str, Any]) -> str:
    """`readme` with the text between its markers replaced."""
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{table(measured)}\n{END}{after}"


def table(measured: dict[str, Any]) -> str:
    """A Markdown table of the bars with a limit; of the index builder's only what sums them up."""
    where = measured["environment"]
    lines = [
        "![Speed-up over the faster dense, measured](paper_figures/pictures/measured.svg)",
        "",
        f"On {where['device']} ({where['threads']} threads), torch {where['torch']}, transformers "
        f"{where['transformers']}, commit `{str(where['commit'])[:10]}`:",
        "",
        "| what | measured | 20–80% | ideal | aim | on |",
        "|---|---|---|---|---|---|",
    ]
    shape = ""
    for bar in shown(measured):
        spread = "" if bar["quantiles"] is None else "–".join(map(number, bar["quantiles"]))
        sign = "≥" if bar["better"] == "higher" else "≤"
        ideal = "" if bar["ideal"] is None else number(bar["ideal"])
        aim = (
            ""
            if bar["limit"] is None
            else f"{sign} {number(bar['limit'])}{'' if bar['passed'] else ' **missed**'}"
        )
        what = bar["name"].removesuffix(", index_speedup_vs_radix_mlp")
        where_run = "the same" if bar["shape"] == shape else bar["shape"].removesuffix(f"; {TIMED}")
        if bar["name"].startswith("index:"):
            where_run = "over the published Rust builder (`radix-mlp`), 4 to 2,048 sequences, 4K to 1M tokens"
        if "commit" in bar:
            where_run += f" (commit `{bar['commit'][:10]}`)"
        shape = bar["shape"]
        lines.append(f"| {what} | **{number(bar['value'])}** | {spread} | {ideal} | {aim} | {where_run} |")
    return "\n".join(lines)


def shown(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars a reader wants first."""
    bars: list[dict[str, Any]] = measured["bars"]
    return [b for b in bars if not b["name"].startswith("index:") or "geometric" in b["name"]]


def number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return "–"
    return f"{value:.2f}" if 0.01 <= abs(value) < 100 else f"{value:.3g}"


def draw(measured: dict[str, Any]) -> None:
    """Measured speed-ups as bars, beside their FLOP ideal."""
    bars = [b for b in measured["bars"] if b["name"].startswith(tuple(COLORS)) and b["better"] == "higher"]
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "radixmlp", "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(bars) + 1.2))
    for row, bar in enumerate(bars):
        color = COLORS[bar["name"].split(":")[0]]
        low, high = bar["quantiles"]
        errors = [[max(0.0, bar["value"] - low)], [max(0.0, high - bar["value"])]]
        axes.barh(-row, bar["value"], color=color, height=0.6, xerr=errors, ecolor="black", capsize=3)
        inside = {"ha": "right", "va": "center", "color": "white", "fontweight": "bold"}
        axes.text(low - 0.1, -row, f"{bar['value']:.2f}×", **inside)
        if bar["ideal"] is not None:
            axes.plot(
                [bar["ideal"]] * 2, [-row - 0.38, -row + 0.38], color="black", linestyle=":", linewidth=2
            )
    axes.set_yticks([-row for row in range(len(bars))], [bar["name"] for bar in bars])
    axes.axvline(1.0, color="#777777", linewidth=1)
    axes.set_xlim(left=0)
    axes.set_xlabel("speed-up (×); whiskers: 20% and 80% of paired runs; dotted: ideal by FLOPs")
    axes.set_title(measured["environment"]["device"])
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
