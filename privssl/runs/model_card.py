"""``model_card.md``: the model card of a finished run, in the form of Hugging Face.

A YAML header for programs and a page for readers, made only from results.json and the privacy card.
Model hubs show it if it is named README.md.
"""

from collections.abc import Mapping
from typing import Any

import yaml

PRIVACY = "## Privacy\n\n"
MOST_RECALLS = 20  # classes


def model_card(results: Mapping[str, Any], sentences: str) -> str:
    """Render the page.

    ``results``: results.json of a finished run. ``sentences``: on its guarantee, by
    ``run_dir.read_outcome``.
    """
    results = _remove_line_breaks(results)
    header = yaml.safe_dump(_build_header(results), sort_keys=False, allow_unicode=True)
    agents = ", ".join(f"{count} {kind}" for kind, count in results["agents"].items())
    lines = [
        f"# {results['name']}",
        "",
        f"A classifier of {len(results['class_names'])} classes, trained by privssl with "
        f"{results['algorithm']} on {results['dataset']}: federated ({agents} agents), from "
        f"{_describe_labels(results)}, {results['rounds']} rounds.",
        "",
        *privacy_section(sentences).splitlines(),
        "",
        *("## Input and output", "", *_render_input_and_output(results), ""),
        *("## Results", "", *_render_results(results), ""),
    ]
    if results["warnings"]:
        lines += ["## Warnings", "", *(f"- {text}" for text in results["warnings"]), ""]
    return f"---\n{header}---\n\n" + "\n".join([*lines, *_render_use(results), ""])


def _describe_labels(results: Mapping[str, Any]) -> str:
    if results.get("labels_of") == "persons":
        return f"the labelled rows of {results['labels']} persons"
    return f"{results['labels']} labelled rows"


def _remove_line_breaks(tree: Any) -> Any:
    """Remove line breaks from all texts and names, so that a class name cannot begin a section."""
    if isinstance(tree, str):
        return " ".join(tree.split())
    if isinstance(tree, Mapping):
        return {_remove_line_breaks(key): _remove_line_breaks(value) for key, value in tree.items()}
    return [*map(_remove_line_breaks, tree)] if isinstance(tree, list | tuple) else tree


def privacy_section(sentences: str) -> str:
    """Return the page's section on privacy, with its heading. The audit compares it."""
    return f"{PRIVACY}{sentences}\n"


def read_privacy_section(page: str) -> str:
    """Return that section of a page; empty if there is none, or several."""
    _, *sections = page.split(f"\n{PRIVACY}")
    return PRIVACY + sections[0].split("\n\n## ")[0] + "\n" if len(sections) == 1 else ""


def _build_header(results: Mapping[str, Any]) -> dict[str, Any]:
    private = results["privacy"]["guarantee"] is not None
    task = f"{_kind_of_rows(results)}-classification"
    accuracy = {"type": "accuracy", "value": results["test_accuracy"]["final"]}
    f1 = {"type": "f1", "name": "macro F1", "value": results["metrics"]["macro_f1"]}
    entry = {
        "task": {"type": task},
        "dataset": {"name": results["dataset"], "type": results["dataset"], "split": "test"},
        "metrics": [accuracy, f1],
    }
    return {
        "library_name": "privssl",
        "pipeline_tag": task,
        "tags": ["federated-learning", "semi-supervised-learning", results["algorithm"]]
        + ["differential-privacy"] * private,
        "model-index": [{"name": results["name"], "results": [entry]}],
    }


def _kind_of_rows(results: Mapping[str, Any]) -> str:
    """Return image, text or tabular: the kind before an encoder."""
    rows = results["rows"]
    if rows["encoder"] is None:
        return "image" if rows["kind"] == "image" else "tabular"
    return {3: "image", 1: "tabular", 0: "text"}[len(rows.get("raw_shape", ()))]


def _render_input_and_output(results: Mapping[str, Any]) -> list[str]:
    rows, names = results["rows"], results["class_names"]
    encoder = rows["encoder"]
    return [
        f"- input: {rows['kind']} rows (B, {', '.join(map(str, rows['shape']))}), float32, "
        f"scaling: {scaling_of(rows)}",
        *([f"- encoder: {encoder['name']}, weights {encoder['weights'][:12]}, trained on "
           f"{encoder['trained_on']}"] if encoder else []),
        *([f"- columns: {', '.join(rows['columns'])}"] if "columns" in rows else []),
        f"- output: logits (B, {len(names)}); classes in order: {', '.join(names)}",
    ]  # fmt: skip


def scaling_of(rows: Mapping[str, Any]) -> str:
    """Describe the scaling of numbers to the network's input; ``rows``: of results.json."""
    if rows.get("columns"):
        return "columns by their bounds to [-1, 1], categories to one number each"
    return str(rows["scaling"])


def _render_results(results: Mapping[str, Any]) -> list[str]:
    metrics, recall = results["metrics"], results["metrics"]["recall"]
    values = [
        ("accuracy", results["test_accuracy"]["final"]), ("macro F1", metrics["macro_f1"]),
        ("cross-entropy (nats)", metrics["loss"]),
        ("calibration error (15 bins)", metrics["calibration_error"]),
    ]  # fmt: skip
    if len(recall) <= MOST_RECALLS:
        values += [(f"recall of {name.replace('|', ' ')}", value) for name, value in recall.items()]
    formatted = [(name, "-" if value is None else f"{value:.4f}") for name, value in values]
    table = (("metric", "value"), ("---", "---"), *formatted)
    return ["On test rows, after the last round.", "", *(f"| {a} | {b} |" for a, b in table)]


def _render_use(results: Mapping[str, Any]) -> list[str]:
    versions = results["versions"]
    # In a private run time may depend on rows, and this page is published.
    private = results["privacy"]["scope"] != "none"
    duration = "" if private else f" for {results['seconds']['total']:.0f} seconds"
    return [
        *("## Use", "", "```python", "import privssl", ""),
        'run = privssl.open_run("FOLDER")  # the run folder',
        *("print(run.predict(x))  # class names", "```", ""),
        "`classifier.safetensors` is a plain state dict; `privssl export` writes ONNX.",
        "",
        f"Trained{duration} with "
        f"{results['bytes']['up'] + results['bytes']['down']:,} bytes between server and agents. "
        f"privssl {versions['privssl']}, torch {versions['torch']}. Split hash: "
        f"{results['split_hash']}.",
    ]
