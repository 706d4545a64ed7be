"""The READMEs' table and picture of measured results, drawn from a committed measurement.

    python -P paper_figures/figures/readme_measured.py [DEVICE | MEASURED.json]

Without an argument it takes the machine whose numbers the READMEs show.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from radixmlp.verify.measured import HOUSE_DEVICE, MeasuredFileError, measured_file, read_document

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
PICTURE = ROOT / "paper_figures" / "pictures" / "measured.svg"
TIMED = "plan + backbone + last-token logits"  # said once, below the table
COLORS = {"qwen3-0.6b": "#0072B2", "qwen3-8b": "#D55E00", "training": "#009E73"}


class Language(NamedTuple):
    """The words of one README's table; `names` replaces phrases in the bars' names and shapes, in this order."""

    readme: Path
    picture: str
    where: str
    headings: tuple[str, ...]
    same: str
    missed: str
    builder: str
    names: tuple[tuple[str, str], ...] = ()


ENGLISH = Language(
    ROOT / "README.md",
    "Speed-up over the faster dense, measured",
    "On {device} ({threads} threads), torch {torch}, transformers {transformers}, commit `{commit}`:",
    ("what", "measured", "20–80%", "ideal", "aim", "on"),
    "the same",
    "missed",
    "over the published Rust builder (`radix-mlp`), 4 to 2,048 sequences, 4K to 1M tokens",
)
CHINESE = Language(
    ROOT / "README.zh-CN.md",
    "实测：相对较快 dense 路径的加速比",
    "环境：{device}（{threads} 线程），torch {torch}，transformers {transformers}，commit `{commit}`：",
    ("项目", "实测值", "20–80% 分位", "理论值", "目标", "条件"),
    "同上",
    "未达到",
    "对比论文发布的 Rust 构建器（`radix-mlp`），4 至 2,048 条序列，4K 至 1M token",
    (
        ("trie over prefix KV-cache reuse", "trie 对前缀 KV cache 复用"),
        ("trie over dense, as a share of r", "trie 对 dense 的加速比占 r 的比例"),
        ("trie over dense, loss of all tokens", "trie 对 dense，全部 token 的损失"),
        ("trie over dense, loss of completions", "trie 对 dense，仅补全部分的损失"),
        (
            "trie's peak memory over dense, loss of all tokens",
            "trie 与 dense 的峰值内存之比，全部 token 的损失",
        ),
        (
            "trie's peak memory over dense, loss of completions",
            "trie 与 dense 的峰值内存之比，仅补全部分的损失",
        ),
        ("trie's peak memory over dense", "trie 与 dense 的峰值内存之比"),
        ("trie over dense", "trie 对 dense"),
        ("scatter over dense", "scatter 对 dense"),
        ("overhead where nothing is shared", "无可共享时的额外开销"),
        ("rerank, enabled over untouched", "重排序，enable 后对原模型"),
        ("items predicted otherwise than by dense", "与 dense 预测不同的题目数"),
        ("unchanged HFLM, share of its ceiling", "不改动的 HFLM，占其上限的比例"),
        ("RadixHFLM over dense HFLM, as a share of r", "RadixHFLM 对 dense HFLM 的加速比占 r 的比例"),
        (
            "loss curves, shared against un-shared, largest relative difference",
            "共享与不共享的损失曲线，最大相对差",
        ),
        ("chunked head's peak memory over the naive head's", "分块输出头与朴素输出头的峰值内存之比"),
        ("geometric mean, 25% shared", "几何平均，25% 共享"),
        ("radix over dense, as a share of r", "radix 对 dense 的加速比占 r 的比例"),
        ("pairs of documents in another order", "次序不同的文档对数"),
        ("index time not hidden, share of the run", "未被掩盖的索引时间占运行时间的比例"),
        ("slower than the best fixed choice", "比最佳固定选择慢"),
        ("slower than dense", "比 dense 慢"),
    ),
)
LANGUAGES = (ENGLISH, CHINESE)
READMES = [language.readme for language in LANGUAGES]


def main(argv: list[str] | None = None) -> None:
    """Rewrite the READMEs between their markers, and the picture."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        measured = read_document(chosen(arguments[0] if arguments else HOUSE_DEVICE))
    except MeasuredFileError as error:
        sys.exit(str(error))
    for language in LANGUAGES:
        if language.readme.is_file():
            text = language.readme.read_text(encoding="utf-8")
            language.readme.write_text(with_table(text, measured, language), encoding="utf-8")
    draw(measured, PICTURE)


def chosen(asked: str) -> Path:
    """A file of measurements, by its path or by the device's name."""
    return Path(asked) if asked.endswith(".json") else measured_file(ROOT, asked)


def with_table(readme: str, measured: dict[str, Any], language: Language = ENGLISH) -> str:
    """`readme` with the text between its markers replaced."""
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{table(measured, language)}\n{END}{after}"


def table(measured: dict[str, Any], language: Language = ENGLISH) -> str:
    """A Markdown table of the bars with a limit; of the index builder's only what sums them up."""
    where = measured["environment"]
    found = {key: where[key] for key in ("device", "threads", "torch", "transformers")}
    lines = [
        f"![{language.picture}](paper_figures/pictures/measured.svg)",
        "",
        language.where.format(**found, commit=str(where["commit"])[:10]),
        "",
        f"| {' | '.join(language.headings)} |",
        "|---" * len(language.headings) + "|",
    ]
    shape = ""
    for bar in shown(measured):
        lines.append(_row(bar, shape, language))
        shape = bar["shape"]
    return "\n".join(lines)


def _row(bar: dict[str, Any], shape_before: str, language: Language) -> str:
    spread = "" if bar["quantiles"] is None else "–".join(map(number, bar["quantiles"]))
    ideal = "" if bar["ideal"] is None else number(bar["ideal"])
    sign = "≥" if bar["better"] == "higher" else "≤"
    missed = "" if bar["passed"] else f" **{language.missed}**"
    aim = "" if bar["limit"] is None else f"{sign} {number(bar['limit'])}{missed}"
    where = language.same if bar["shape"] == shape_before else bar["shape"].removesuffix(f"; {TIMED}")
    if bar["name"].startswith("index:"):
        where = language.builder
    if "commit" in bar:
        where += f" (commit `{bar['commit'][:10]}`)"
    what = _said(bar["name"].removesuffix(", index_speedup_vs_radix_mlp"), language)
    return f"| {what} | **{number(bar['value'])}** | {spread} | {ideal} | {aim} | {where} |"


def _said(text: str, language: Language) -> str:
    for phrase, translated in language.names:
        if phrase in text:
            return text.replace(phrase, translated)
    return text


def shown(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars a reader wants first."""
    bars: list[dict[str, Any]] = measured["bars"]
    return [b for b in bars if not b["name"].startswith("index:") or "geometric" in b["name"]]


def number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return "–"
    return f"{value:.2f}" if 0.01 <= abs(value) < 100 else f"{value:.3g}"


def draw(measured: dict[str, Any], picture: Path) -> None:
    """Measured speed-ups as bars, beside their FLOP ideal."""
    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "radixmlp", "font.family": "DejaVu Sans"}):
        figure = _bars(measured)
        figure.savefig(picture, format="svg", metadata={"Date": None})


def _bars(measured: dict[str, Any]) -> Figure:
    names = tuple(f"{group}:" for group in COLORS)
    bars = [b for b in measured["bars"] if b["name"].startswith(names) and b["better"] == "higher"]
    figure = Figure(figsize=(9, 0.5 * len(bars) + 1.2))
    axes = figure.subplots()
    for row, bar in enumerate(bars):
        color = COLORS[bar["name"].split(":")[0]]
        low, high = bar["quantiles"] or (bar["value"], bar["value"])
        errors = [[max(0.0, bar["value"] - low)], [max(0.0, high - bar["value"])]]
        axes.barh(-row, bar["value"], color=color, height=0.6, xerr=errors, ecolor="black", capsize=3)
        inside: dict[str, Any] = {"ha": "right", "va": "center", "color": "white", "fontweight": "bold"}
        axes.text(low - 0.1, -row, f"{bar['value']:.2f}×", **inside)
        if bar["ideal"] is not None:
            height = [-row - 0.38, -row + 0.38]
            axes.plot([bar["ideal"]] * 2, height, color="black", linestyle=":", linewidth=2)
    axes.set_yticks([-row for row in range(len(bars))], [bar["name"] for bar in bars])
    axes.axvline(1.0, color="#777777", linewidth=1)
    axes.set_xlim(left=0)
    axes.set_xlabel("speed-up (×); whiskers: 20% and 80% of paired runs; dotted: ideal by FLOPs")
    axes.set_title(measured["environment"]["device"])
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
