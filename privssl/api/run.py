"""A finished run: its numbers, its guarantee, and predictions by its classifier."""

import csv
import dataclasses
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn

from privssl import models
from privssl.algorithms import WITH_UNREAD
from privssl.api.frames import label_of
from privssl.api.new_rows import RowForm
from privssl.api.row_sources import to_array
from privssl.data.column_values import values_of
from privssl.data.fields import class_number
from privssl.errors import ConfigError, DataError, RunFolderError, first_line
from privssl.experiment import config as configs
from privssl.experiment.devices import device_of
from privssl.models.network_checks import differ, outputs_of
from privssl.models.own_networks import (
    TRAINED_IN,
    NetworkSource,
    check_source,
    is_imported,
    reference_of,
)
from privssl.privacy.card_text import guarantee_sentence
from privssl.runs.run_dir import CLASSIFIER, read_card, read_outcome
from privssl.runtime.plugins import imports_allowed, load
from privssl.storage.tensor_files import open_lazily
from privssl.training.evaluation import CHUNK, score
from privssl.training.local_training import load_weights, network_input, weights_of


class Run:
    """The folder of a run that has ended, created by ``privssl.train`` and ``privssl.open_run``."""

    def __init__(
        self, folder: str | Path, model: NetworkSource | None = None, plugins: Collection[str] = ()
    ) -> None:
        """Open the run. Arguments as in :func:`open_run`; ``model`` is not a name.

        Raises:
            privssl.UserError: it is not the folder of a run that has ended, or is damaged.
        """
        self.folder = Path(folder)
        self._model, self._plugins = model, frozenset(plugins)
        if not self.folder.exists():
            raise RunFolderError(f"there is no run folder {self.folder}")
        outcome = read_outcome(self.folder)
        if outcome is None:
            raise RunFolderError(
                f"{self.folder} has no results.json: it is no run, or one that has not ended. Give "
                "the folder that a run named in its last lines"
            )
        self.results: dict[str, Any] = outcome[0]

    def __repr__(self) -> str:
        accuracy = self.results["test_accuracy"]["final"]
        return f"Run({str(self.folder)!r}, {self.results['status']}, test accuracy {accuracy:.4f})"

    # Numbers --------------------------------------------------------------------------------

    @property
    def metrics(self) -> dict[str, list[float | None]]:
        """Return columns of metrics.csv by name, a value per round; None if a round has none."""
        try:
            with (self.folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        except OSError as error:
            raise RunFolderError(f"{error.filename} cannot be read: {error.strerror}") from None
        names = list(rows[0]) if rows else []
        return {n: [float(row[n]) if row[n] else None for row in rows] for n in names}

    def frame(self) -> Any:
        """Return ``metrics`` as a pandas data frame, indexed by round."""
        try:
            import pandas as pd
        except ImportError:
            raise ConfigError("run.frame() needs pandas: pip install pandas") from None
        return pd.DataFrame(self.metrics).set_index("round")

    @property
    def guarantee(self) -> str | None:
        """The guarantee of a private run as a sentence; None without a guarantee."""
        card = read_card(self.folder)
        return guarantee_sentence(card) if card and card.get("guarantee") else None

    @property
    def class_names(self) -> list[str]:
        """Class names in the order of the outputs."""
        return [str(name) for name in self._read_result("class_names")]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a row; of an image (channels, height, width)."""
        return tuple(self._read_result("rows")["shape"])

    def _read_result(self, key: str) -> Any:
        if key not in self.results:
            raise RunFolderError(
                f"{self.folder / 'results.json'} has no {key}: an older version wrote it. Train "
                "again, or load classifier.safetensors yourself"
            )
        return self.results[key]

    # Predictions ----------------------------------------------------------------------------

    def classifier(self) -> nn.Module:
        """Return the released classifier on the CPU, in evaluation mode.

        It maps (B, *shape), as :meth:`network_input` returns, to logits (B, classes).
        """
        return self._build_classifier(torch.device("cpu"))

    def _build_classifier(self, device: torch.device) -> nn.Module:
        config = self._config
        name, precision = config.model.name, config.run.precision
        if self._model is None and is_imported(name) and name not in self._plugins:
            raise ConfigError(
                f"{self.folder} was trained with {name}, and no run folder may choose what code is "
                f"imported. Give the network: privssl.open_run(FOLDER, model=...), in a command "
                f"--model {name}"
            )
        assert precision != "auto"  # a run's config records the chosen precision
        settings = dataclasses.replace(config.model, weights="")
        shape, classes = tuple(self._read_result("rows")["shape"]), len(self.class_names)
        with imports_allowed(self._plugins, ALLOW):
            network = models.build_classifier(settings, shape, classes, precision, self._model)
        try:
            weights = dict(open_lazily(self.folder / CLASSIFIER))
            trained = load_weights(network, weights, device).eval()
        except OSError:
            raise RunFolderError(
                f"{self.folder} has no {CLASSIFIER}: the run has not ended. Continue it "
                "(--resume), or give another"
            ) from None
        except (RuntimeError, ValueError, SafetensorError) as error:
            raise RunFolderError(
                f"{self.folder / CLASSIFIER} does not fit {name} ({first_line(error)}). Give the "
                "network that the run was trained with"
            ) from None
        # absent in runs of networks of privssl, and of former versions
        recorded = self.results.get("outputs")
        if recorded and differ(outputs_of(trained, shape, device), recorded):
            raise RunFolderError(
                f"{name} has the weights of {self.folder}, and gives other outputs than the run's "
                "network: its code has changed, or its state dict lacks something random. Give "
                "the network that the run was trained with"
            )
        for layer in trained.modules():  # the network may become model= of a private run
            setattr(layer, TRAINED_IN, str(self.folder.resolve()))
        return trained

    @cached_property
    def _loaded_classifier(self) -> tuple[nn.Module, torch.device]:
        """Return the classifier on the run's device, if available here."""
        config = self._config
        try:
            device = device_of(config.run.device)
        except ConfigError:
            device = torch.device("cpu")
        return self._build_classifier(device), device

    def network_input(self, x: Any) -> Tensor:
        """Convert rows to the classifier's input: (N, *shape) float32 in [-1, 1].

        Args:
            x: rows in a form of ``privssl.Dataset``, or a list of images of Pillow.
        """
        return network_input(torch.from_numpy(self._convert_rows(x)))

    @cached_property
    def form(self) -> RowForm:
        """The format of the run's rows."""
        return RowForm.of(self.folder, self._config.data, self._read_result("rows"))

    def _convert_rows(self, x: Any) -> NDArray[Any]:
        """Convert rows to the format of training."""
        with imports_allowed(self._plugins, ALLOW):  # the encoder may be a plug-in
            return self.form.convert(x)

    @cached_property
    def _config(self) -> configs.Config:
        return configs.load_config(self.folder / "config.yaml", algorithms=WITH_UNREAD)

    @overload
    def predict(self, x: Any, probabilities: Literal[False] = ...) -> NDArray[np.str_]: ...
    @overload
    def predict(self, x: Any, probabilities: Literal[True]) -> NDArray[np.float32]: ...
    def predict(self, x: Any, probabilities: bool = False) -> NDArray[Any]:
        """Predict class names (N,) of rows, or with ``probabilities`` float32 (N, classes).

        Args:
            x: rows in a form of ``privssl.Dataset``, or a list of images of Pillow. For runs on
                texts: texts. For runs on tables: a data frame, a mapping of columns, or a list of
                mappings. A frozen encoder of the run is applied.

        Raises:
            privssl.UserError: rows of another form than the training rows, or the encoder is
                missing or has other weights.
        """
        logits = self._compute_logits(self._convert_rows(x))
        if probabilities:
            shares: NDArray[np.float32] = logits.softmax(dim=1).numpy()
            return shares
        names: NDArray[np.str_] = np.array(self.class_names, dtype=np.str_)
        predicted: NDArray[np.str_] = names[logits.argmax(dim=1).numpy()]
        return predicted

    @torch.no_grad()
    def _compute_logits(self, x: NDArray[Any]) -> Tensor:
        """Return logits (N, classes), computed like the run's test accuracy."""
        network, device = self._loaded_classifier
        parts = torch.split(torch.from_numpy(x), CHUNK) if len(x) else ()
        logits = [network(network_input(rows, device)).float().cpu() for rows in parts]
        return torch.cat(logits) if logits else torch.zeros(0, len(self.class_names))

    def evaluate(self, x: Any, y: Any) -> dict[str, Any]:
        """Compute metrics on labelled rows: ``rows``, ``accuracy``, ``loss``, ``macro_f1``,
        ``recall`` by class name, ``calibration_error``, ``confusion`` and ``not_finite``.

        A row of ``confusion`` is a true class, a column a predicted one; ``not_finite`` counts rows
        with NaN or infinite outputs.

        Args:
            x: rows as of :meth:`predict`.
            y: their class numbers, or class names (N,), or the label column of a frame.
        """
        rows, true = self._convert_rows(x), self._convert_labels(y)
        if len(rows) != len(true) or not len(rows):
            raise DataError(
                f"evaluate: {len(rows)} rows and {len(true)} labels. Give a label for each row, "
                "and at least one row"
            )
        (network, device), x = self._loaded_classifier, torch.from_numpy(rows)
        weights = weights_of(network)
        scores = score(network, weights, x, torch.from_numpy(true), device=device)
        return {
            "rows": scores.rows,
            "accuracy": scores.accuracy,
            **scores.as_json(self.class_names),
            "confusion": scores.confusion[:, :-1].tolist(),
            "not_finite": scores.not_finite,
        }

    def _convert_labels(self, y: Any) -> NDArray[np.int64]:
        """Return class numbers (N,) of numbers or names."""
        names = self.class_names
        numbers = {name: index for index, name in enumerate(names)}
        array = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.array(y)
        if array.ndim == 1 and array.dtype.kind in "bf":  # a frame column, as in a data set
            labels = [label_of(label) for label in array]
            integral = all(label.removeprefix("-").isdecimal() for label in labels)
            array = np.array(labels, dtype=np.int64 if integral and labels else object)
        if array.ndim == 1 and array.dtype.kind in "UO":
            labels = [label_of(label) for label in array]
            if "" in labels:
                raise DataError(
                    f"evaluate, row {labels.index('')}: no label. Leave out rows without one"
                )
            unknown = sorted({label for label in labels if class_number(label, numbers) is None})
            if unknown:
                raise DataError(
                    f"evaluate: {self.folder} knows no class {', '.join(unknown[:3])}. It has "
                    f"{', '.join(names[:20])}"
                )
            return np.array([class_number(label, numbers) for label in labels], dtype=np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                f"evaluate: labels are {array.dtype} of shape {array.shape}. Give class numbers or "
                "names (N,)"
            )
        if array.size and not 0 <= array.min() <= array.max() < len(names):
            raise DataError(f"evaluate: labels go from {array.min()} to {array.max()}, and classes "
                            f"from 0 to {len(names) - 1}. Number them as in training")  # fmt: skip
        texts = set(map(str, array.tolist()))
        by_name = {label: class_number(label, numbers) for label in texts}
        if None not in by_name.values() and any(index != int(n) for n, index in by_name.items()):
            raise DataError(
                f"evaluate: labels {', '.join(sorted(texts)[:3])} can be class numbers, which "
                f"begin at 0, or the names {', '.join(names[:3])}. Give names, as text: "
                "y.astype(str)"
            )
        return array.astype(np.int64)

    def generate(
        self,
        count: int,
        classes: Sequence[str] | None = None,
        seed: int = 0,
        acknowledge_query_rows: bool = False,
        confidence: float = 0.0,
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Generate labelled synthetic rows, equally many of each class.

        Args:
            count: rows, >= 1.
            classes: their names; None: all.
            seed: the same seed gives the same rows.
            acknowledge_query_rows: required for private runs, whose guarantee does not cover the
                unlabelled rows that the generator learned from.
            confidence: in [0, 1): least probability of the row's class by the run's classifier.

        Returns:
            x (count, *shape), images uint8, others float32; y (count,): indices into
                ``class_names``.

        Raises:
            privssl.UserError: the run has no generator, an argument is invalid, or the classifier
                is confident of too few rows. PrivacyError: the run is private, and
                acknowledge_query_rows is false.
        """
        from privssl.generation.rows import generate_rows

        names = [classes] if isinstance(classes, str) else classes
        # Networks are built before their weights are loaded.
        with torch.random.fork_rng(devices=[]), imports_allowed(self._plugins, ALLOW):
            synthetic = generate_rows(
                self.folder, count, names, seed, acknowledge_query_rows=acknowledge_query_rows,
                confidence=confidence, classify=lambda x: self.predict(x, probabilities=True),
            )  # fmt: skip
        return synthetic.x, synthetic.y

    def to_columns(self, x: NDArray[Any]) -> dict[str, list[float | str | None]]:
        """Return the columns of a table's numbers x (N, features), without the classes, in their
        own units; None: a missing number. Numbers that no line has count as the nearest line.
        Raises DataError for other rows, or a run that was not trained on a table.
        """
        columns = self.form.columns
        if columns is None:
            raise DataError(f"to_columns: {self.folder} was not trained on a table")
        rows = to_array("to_columns", x)
        if rows.ndim != 2 or rows.shape[1:] != self.shape:
            raise DataError(f"to_columns: rows are {rows.shape}. Give (N, {self.shape[0]})")
        return values_of(rows, columns)

    def audit(self) -> dict[str, Any]:
        """Audit the run's guarantee; return the fields of ``audit --json``."""
        from privssl.audit.__main__ import as_json, audit

        with imports_allowed(self._plugins, ALLOW):
            return as_json(audit(self.folder))


#: How to allow a name, for error messages.
ALLOW = (
    'open the run with it: privssl.open_run(FOLDER, plugins=["{name}"]), in a command '
    "--plugin {name}"
)


def open_run(
    folder: str | Path, model: NetworkSource | str | None = None, plugins: Collection[str] = ()
) -> Run:
    """Open the run in a folder.

    Args:
        folder: of a run that has ended.
        model: the network, if it was the user's own: the class or function, or its name
            (package.module:Name). Names in a run folder are never imported by themselves.
        plugins: names of its plug-ins that may be imported: ``generate`` and ``audit`` need the
            algorithm.

    Raises:
        privssl.UserError: it is not the folder of a run that has ended, or is damaged; the model
            is not a network.
    """
    if isinstance(model, str):
        with imports_allowed([model]):
            network = check_source(f"model {model}", load("models", "model", model))
        return Run(folder, network, plugins)
    if model is not None:
        reference_of(model)  # raises if it is not a network
    return Run(folder, model, plugins)
