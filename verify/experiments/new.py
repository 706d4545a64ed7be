"""`radixmlp experiment new NAME`: a folder that works from the start."""

from __future__ import annotations

from pathlib import Path

import jinja2

from radixmlp.optimized.attention import attention_backends
from radixmlp.verify.experiments.files import ExperimentError, check_name

_TEMPLATES = Path(__file__).resolve().parent / "templates"


def create(name: str, root: Path) -> list[Path]:
    """Write README.md, experiment.py and test_NAME.py into a new folder of `root`; the files written.

    Raises:
        ExperimentError: a name that cannot be one, or that is taken; nothing was written.
    """
    check_name(name)
    folder, backend = root / name, name.replace("_", "-")
    if folder.exists():
        raise ExperimentError(
            f"{folder} exists and is left as it is: choose another name, or remove it first"
        )
    if backend in (*attention_backends(), "auto"):
        raise ExperimentError(f"an attention backend is called {backend!r} already: choose another name")
    words = name.split("_")
    values = {
        "name": name,
        "backend": backend,
        "title": " ".join(words).capitalize(),
        "class_name": "".join(word.capitalize() for word in words),
    }
    engine = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    names = {"README.md": "README.md", "experiment.py": "experiment.py", "test.py": f"test_{name}.py"}
    texts = {folder / file: engine.get_template(f"{kind}.j2").render(values) for kind, file in names.items()}
    folder.mkdir(parents=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)
