"""Names in a config: those of privssl, and plug-ins (``runtime/plugins.py``)."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from privssl.runtime import plugins

ALGORITHMS = (
    "fedssl", "supervise", "pseudo", "mixmatch", "fedmatch_mixup", "fedseal", "fedtrinet",
    "fedmatch", "semifl", "label_census", "server_sl", "fedavg", "fedprox", "fixmatch", "uda",
    "fedsem", "pi_model", "mean_teacher", "remixmatch", "feddyn", "lg_fedavg", "heterofl",
    "fedrgd", "fl2", "sage",
)  # fmt: skip
LABELS_AT_BOTH = ("fedavg", "fedprox")  # support data.labels: labels-at-both
NETWORKS = (
    "small_cnn", "lenet", "lenet32", "fedavg_cnn", "alexnet", "trinet_cnn", "trinet_svhn",
    "resnet9", "resnet18", "resnet18_3x3", "wresnet28x2", "linear", "mlp", "text_cnn", "gru",
)  # fmt: skip
DATA_SETS = (
    *("digits", "mnist", "fashion_mnist", "cifar10", "svhn", "image_folder", "npz", "toy"),
    *("arrays", "csv", "sent140"),
)
PARTITIONS = (
    "iid", "dirichlet", "dirichlet_equal", "classes_per_agent", "shards", "round_robin",
    "imbalanced",
)  # fmt: skip
IMAGE_ENCODERS = ("efficientnet_lite0",)
TEXT_VECTORS = ("minilm_mean", "minilm_tweets")  # other encoders return sequences
TEXT_ENCODERS = ("minilm", "minilm_words", *TEXT_VECTORS)
ENCODER_PREFIXES = ("torchvision", "timm", "huggingface")
TRACKERS = ("wandb", "mlflow")


def _make_annotations(
    kind: plugins.Kind, built_in: tuple[str, ...], others: str = ""
) -> tuple[Any, Any]:
    """Return annotations of a key that takes a built-in name, a reference or an entry point."""
    description = f"{others}`package.module:Name` or an installed plug-in"

    def check(name: str) -> str:
        if name not in built_in and not plugins.is_known(kind, name):
            raise PydanticCustomError("unknown_name", "unknown name")  # the schema describes it
        return name

    validate: Callable[[str], str] = check
    return AfterValidator(validate), WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(built_in), "type": "string"},
                {"type": "string", "pattern": plugins.REFERENCE, "description": description},
            ],
            "plugins": kind,
        }
    )


_NETWORK = _make_annotations("models", NETWORKS, "`torchvision:NAME`, `timm:NAME`, ")
_DATA_SET = _make_annotations("datasets", DATA_SETS)
_PARTITION = _make_annotations("partitions", PARTITIONS)
_TRACKER = _make_annotations("trackers", TRACKERS)

NetworkName = Annotated[str, _NETWORK[0], _NETWORK[1]]
DataSetName = Annotated[str, _DATA_SET[0], _DATA_SET[1]]
PartitionName = Annotated[str, _PARTITION[0], _PARTITION[1]]
TrackerName = Annotated[str, _TRACKER[0], _TRACKER[1]]


def is_outside(network: str) -> bool:
    """Return whether ``model.name`` is not privssl's: a plug-in, torchvision's or timm's."""
    return network not in NETWORKS


def is_own_encoder(encoder: str) -> bool:
    """Return whether ``data.encoder`` names a plug-in."""
    built_in = encoder in ("", *IMAGE_ENCODERS, *TEXT_ENCODERS)
    return not built_in and encoder.partition(":")[0] not in ENCODER_PREFIXES


def encoder_without_path(encoder: str) -> str:
    """Return ``data.encoder`` without the path of its folder on this machine."""
    prefix, colon, folder = encoder.partition("huggingface:")
    return colon + Path(folder).name if colon and not prefix else encoder
