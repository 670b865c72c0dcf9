"""Models of transformers by their configuration: which class, and inputs of tokens."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError

# Tokens of a row where nobody says how many, and the model has room for more.
_SEQUENCE = 2048
# Heads whose labels are one a row, and not one a token.
_A_LABEL_A_ROW = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")


@dataclass(frozen=True)
class Tokens:
    """Integer inputs of a model of tokens: ``input_ids``, and ``labels`` where its forward takes them.

    Args:
        sequence: tokens of a row.
        labels: "token", "row", or "" where the forward takes none.
    """

    sequence: int
    labels: str

    def inputs(self, batch: int) -> dict[str, torch.Tensor]:
        """On the meta device: int64 of ``[batch, sequence]``, and labels of that shape or of ``[batch]``."""
        ids = torch.zeros(batch, self.sequence, dtype=torch.long, device="meta")
        labels = {"token": ids, "row": ids[:, 0]}
        return {"input_ids": ids} | ({"labels": torch.zeros_like(labels[self.labels])} if self.labels else {})

    def about(self, batch: int) -> str:
        """In words."""
        size = f"{batch:,} x {self.sequence:,} tokens a rank"
        return size if self.labels else f"{size}, without a loss: its forward takes no labels"


def near(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'layers'?" where one is like it."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def _library() -> Any:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"a configuration as MODEL needs transformers ({error}): pip install transformers, or name a function "
            "that makes the model, module:function"
        ) from None
    transformers.logging.set_verbosity_error()
    return transformers


def config_in(path: Path) -> Any:
    """The configuration in a file, or in ``config.json`` of a folder.

    Raises:
        ConfigError: there is none, or transformers does not know it.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"MODEL {str(path)!r}: {str(file)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"MODEL {str(path)!r}: {str(file)!r} is no JSON: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ConfigError(
            f"{str(file)!r} is no configuration of a transformers model: it must be an object with a model_type"
        )
    library = _library()
    kind = fields["model_type"]
    known = library.models.auto.configuration_auto.CONFIG_MAPPING
    if kind not in known:
        raise ConfigError(
            f"{str(file)!r}: transformers {library.__version__} has no model_type {kind!r}{near(kind, known.keys())}"
        )
    return _made(known[kind], fields, f"{str(file)!r}", strict=False)


def config_of(name: str, fields: Mapping[str, object]) -> Any:
    """``name(**fields)``, a class of configurations of transformers.

    Raises:
        ConfigError: there is no such class or field, or a value that it does not take.
    """
    library = _library()
    kind = getattr(library, name, None) if name.isidentifier() else None
    if not isinstance(kind, type) or not issubclass(kind, library.PretrainedConfig):
        known = [n for n in dir(library) if n.endswith("Config")]
        hint = near(name, known) or "; name a configuration, such as LlamaConfig, or module:function"
        raise ConfigError(f"transformers {library.__version__} has no configuration {name!r}{hint}")
    return _made(kind, fields, name, strict=True)


def _made(kind: Any, fields: Mapping[str, object], name: str, strict: bool) -> Any:
    """The configuration; it takes any field, so those that it does not know are found here.

    Args:
        strict: each of them is an error, and not only what is spelled nearly as one that it knows: files have fields of
            other versions, and of other tools.
    """
    try:
        config = kind.from_dict(dict(fields))
    except Exception as error:  # each class checks its fields in its own way
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError(f"{name}: {': '.join(lines) or type(error).__name__}") from None
    try:
        known = [n for n in dir(kind()) if not n.startswith("_")]
    except Exception:  # one that is made of others has no default, and is not told from them here
        return config
    given = set(fields) - {"model_type", "transformers_version", "auto_map"}
    # A field that is converted on its way, as those of position embeddings are, is not there afterwards.
    kept = vars(config)
    for field in sorted(given - set(known)):
        if field.startswith("_") or field not in kept:
            continue
        hint = near(field, known)
        if hint or strict:
            raise ConfigError(f"{name}: {kind.__name__} has no field {field!r}{hint}")
    return config


def model_of(config: Any) -> nn.Module:
    """The model of a configuration on the meta device: of the class that it names, else with the head for training."""
    library = _library()
    if getattr(config, "use_cache", False):
        config.use_cache = False  # what generation keeps is returned by the forward, and no training wants it
    kind = _class_of(library, config)
    with torch.device("meta"):
        # The class method that the Auto classes call; a model's own constructor would leave dtypes out.
        model: nn.Module = kind._from_config(config)
    return model.train()


def _class_of(library: Any, config: object) -> Any:
    for named in getattr(config, "architectures", None) or ():
        kind = getattr(library, named, None)
        if isinstance(kind, type) and issubclass(kind, library.PreTrainedModel):
            return kind
    auto = library.models.auto.modeling_auto
    heads: tuple[object, ...] = (
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_MASKED_LM_MAPPING,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    )
    if getattr(config, "is_decoder", False):
        heads = heads[2:]
    for mapping in (*heads, auto.MODEL_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, (list, tuple)) else found
    raise ConfigError(f"transformers {library.__version__} has no model for {type(config).__name__}")


def tokens_of(model: nn.Module, sequence: int | None) -> Tokens:
    """Inputs for ``model``, which reads tokens.

    Args:
        sequence: tokens of a row; None: 2,048, or as many as the model has positions for.

    Raises:
        ConfigError: it reads something else, or has not so many positions.
    """
    name = type(model).__name__
    taken = inspect.signature(model.forward).parameters
    first = getattr(model, "main_input_name", "input_ids")
    if first != "input_ids" or "input_ids" not in taken:
        reads = first if first != "input_ids" else ", ".join(taken) or "nothing"
        raise ConfigError(
            f"{name} reads {reads}, and --batch and --sequence make input_ids, tokens: write a function that returns "
            "(model, example_inputs) and name it, module:function"
        )
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        positions = None
    if sequence is not None and positions is not None and sequence > positions:
        raise ConfigError(
            f"--sequence {sequence:,} is more than the {positions:,} positions that {name} has; give its configuration "
            "a larger max_position_embeddings"
        )
    tokens = sequence or min(_SEQUENCE, positions or _SEQUENCE)
    a_row = name.endswith(_A_LABEL_A_ROW)
    return Tokens(tokens, ("row" if a_row else "token") if "labels" in taken else "")
