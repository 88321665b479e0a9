"""Refuse configs whose network, views or algorithm do not fit the kind of rows.

Checked when the config is read, if the kind is known, and again when the rows are loaded.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from privssl.algorithms import ALGORITHMS
from privssl.core.rows import IMAGE, KINDS, SEQUENCE, VECTOR, RowKind, Shape, describe, kind_of
from privssl.data.datasets import Dataset
from privssl.data.split_manifest import Manifest
from privssl.encoders import kind_of_output
from privssl.errors import ConfigError, DataError, PrivacyError
from privssl.settings.error_messages import either
from privssl.settings.names import is_outside
from privssl.settings.schema import DataSettings, Problem

PUBLISHED = ("digits", "mnist", "fashion_mnist", "cifar10", "svhn", "toy")
IMAGE_SETS = (*PUBLISHED, "image_folder")


def kind_in(config: Any) -> RowKind | None:
    """Return the kind of rows of a config, if known before they are read."""
    if config.data.encoder:
        return kind_of_output(config.data.encoder)
    if config.data.name == "csv":
        return VECTOR
    return IMAGE if config.data.name in IMAGE_SETS else None


def row_problems(
    config: Any, kind: RowKind, algorithms: Mapping[str, type[Any]] = ALGORITHMS
) -> Iterator[Problem]:
    """Yield settings of a config (``experiment.config.Config``) that do not fit rows of a kind."""
    name, model, rows = config.algorithm.name, config.model, f"rows are {kind.name}s"
    if config.data.encoder:
        rows = f"{config.data.encoder} makes {kind.name}s"
    reason = getattr(algorithms[name], "needs_images", "")
    if reason and kind is not IMAGE:
        yield Problem("algorithm.name", f"{name} needs images: {reason}; {rows}")
    if not is_outside(model.name) and model.name not in kind.networks:
        takes = either([k.name + "s" for k in KINDS.values() if model.name in k.networks])
        text = f"{model.name} takes {takes}, and {rows}. Set {either(kind.networks)}"
        yield Problem("model.name", text)
    if model.norm not in kind.norms:
        yield Problem("model.norm", f"{model.norm} is for images. Set {either(kind.norms)}")
    for key, value in vars(config.algorithm).items():
        if key != "name" and value in IMAGE.views and value not in kind.views:
            text = f"{value} is a view of images, and {rows}. Set {either(kind.views)}"
            yield Problem(f"algorithm.{key}", text)
    if getattr(config.algorithm, "generator", "") == "variational" and kind is SEQUENCE:
        text = f"variational makes images and vectors, and {rows}. Set mixing"
        yield Problem("algorithm.generator", text)
    if getattr(config.algorithm, "generator_rounds", 0) and kind is SEQUENCE:
        text = f"G makes images and vectors, and {rows}. Leave it out"
        yield Problem("algorithm.generator_rounds", text)
    if getattr(config.algorithm, "flip", False) and kind is not IMAGE:
        yield Problem("algorithm.flip", f"true mirrors images, and {rows}. Leave it out")


def refuse_other_rows(config: Any, shape: Shape) -> None:
    """Raise if the config does not fit rows of this shape.

    Raises:
        ConfigError: the config does not fit their kind.
        DataError: the sides of images are not multiples of the algorithm's divisor.
    """
    kind = kind_of(shape)
    problems = list(row_problems(config, kind))
    if problems:
        lines = "\n".join(f"  {key}: {text}" for key, text in problems)
        raise ConfigError(
            f"{config.source}: rows of {config.data.name} are {describe(shape)}\n{lines}"
        )
    has_generator = getattr(config.algorithm, "generator_rounds", 0) > 0
    divisor = 4 if has_generator else ALGORITHMS[config.algorithm.name].sides_divisible_by
    if kind is IMAGE and (shape[1] % divisor or shape[2] % divisor):
        raise DataError(
            f"rows are {shape[1]}x{shape[2]} pixels, and {config.algorithm.name} needs sides that "
            f"are multiples of {divisor}. Resize or pad the images (image_folder: data.image_size)"
        )


def refuse_order_by_labels(config: Any, manifest: Manifest, path: object) -> None:
    """Raise PrivacyError for a split of a private run made with ``data.order``."""
    if config.privacy is not None and "order" in manifest.settings:
        raise PrivacyError(
            f"{path} was drawn with data.order, by which labels decide the place of each row, so "
            "one label would move the random draws of other rows. Draw a split without it"
        )


def refuse_undeclared_columns(data: DataSettings) -> None:
    """Raise ConfigError for a table over sites whose bounds and categories come from rows.

    Each site would scale columns by its own rows, so equal values would differ.
    """
    if data.name == "csv" and not (data.text or data.columns):
        raise ConfigError(
            "data.columns is missing: each site would scale its columns by its own rows. Declare "
            "bounds and categories in a file, and give it to all sites"
        )


def refuse_classes_of_labels_alone(config: Any, dataset: Dataset) -> None:
    """Raise PrivacyError for a class of a private run that only protected labels reveal.

    Its name and the number of outputs would be releases. Likewise for bounds and channels that come
    from rows. A class is known if it is published, declared, a folder, or if a test row has it: one
    of a test set, not one sampled from possible training rows.
    """
    if config.privacy is None:
        return
    if dataset.table == "measured":
        raise PrivacyError(
            "Dataset.from_frame took bounds and categories from training rows, which would be one "
            'more release. Declare them, from public knowledge: columns={"age": [0, 120], '
            '"colour": ["red", "blue"]}'
        )
    if dataset.standardised:
        refuse_standardised(config.data.name)
    if dataset.coloured_by_train:
        raise PrivacyError(
            f"{config.data.root}: images in train/ alone have colour, so that one private image "
            "would give all rows, and the network, three channels. Save all images in grey, or a "
            "test image in colour"
        )
    name, classes = config.data.name, dataset.classes
    is_table = name == "csv" or bool(dataset.table)
    numbered = dataset.class_names == tuple(map(str, range(classes)))
    if name in (*PUBLISHED, "sent140") or dataset.names_declared:
        return
    if dataset.tests_drawn and (is_table or numbered or name == "image_folder"):
        raise PrivacyError(
            "test rows were drawn from the rows that may train, so private labels alone say which "
            f"classes there are. Give {_describe_test_set(dataset, name)}"
        )
    if name == "image_folder":
        return
    counts = dataset.y_test.bincount(minlength=classes).tolist()
    if numbered and not is_table and not counts[-1]:
        raise PrivacyError(
            f"no test row has class {classes - 1}, the largest in the training rows: "
            "the number of outputs would be released from private labels, without noise. Give "
            "a test row of that class (with Dataset.from_arrays: or class_names)"
        )
    if is_table and (absent := sum(not n for n in counts)):
        raise PrivacyError(
            f"{absent} of {classes} classes are in training rows alone, so their names and "
            "the number of outputs would be released from private labels, without noise. Give a "
            "test row of each class"
        )


def refuse_standardised(where: object) -> None:
    """Raise PrivacyError for vectors that were scaled by their own mean and deviation."""
    raise PrivacyError(
        f"{where}: most columns have mean 0 and deviation 1, so the rows were scaled by their own "
        "statistics, and one private row moved all others, which no claim covers. Scale them by "
        "public bounds, or by statistics of public rows"
    )


def _describe_test_set(dataset: Dataset, name: str) -> str:
    """Return the public source of the classes if test rows are sampled."""
    if dataset.table:
        return "another frame (test=), or class_names from public knowledge"
    alternative = "" if name == "image_folder" else ", or class_names in Dataset.from_arrays"
    return f"a test set of its own, without data.test{alternative}"
