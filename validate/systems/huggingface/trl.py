"""TRL's SFTTrainer and DPOTrainer over samples that are tokenized already."""

from copy import deepcopy
from functools import cache
from importlib import import_module
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import Dataset


def sft_trainer(
    module: nn.Module, arguments: dict[str, Any], samples: Dataset[Any], callbacks: list[Any]
) -> Any:
    """TRL's trainer of a module on equal samples, with the plan's `arguments` of transformers' Trainer."""
    trl: Any = import_module("trl")
    each = samples[0]
    config = trl.SFTConfig(
        **arguments,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
    )
    return trl.SFTTrainer(
        model=module,
        args=config,
        train_dataset=_dataset(
            len(cast(Any, samples)), {name: each[name] for name in ("input_ids", "labels")}
        ),
        processing_class=_tokenizer(),
        callbacks=callbacks,
    )


def dpo_trainer(
    module: Any, arguments: dict[str, Any], samples: Dataset[Any], callbacks: list[Any], stored: torch.dtype
) -> Any:
    """TRL's trainer of a module on equal pairs, with the plan's `arguments` of transformers' Trainer.

    Each prompt is one token. The reference is a copy, as TRL loads it; of a module with adapters it is the
    module without them, which TRL makes anew, in float32: they become `stored` as the rest.
    """
    trl: Any = import_module("trl")
    own: Any = import_module("trl.trainer.dpo_trainer")
    ids = samples[0]["input_ids"]
    pair = {"prompt_ids": ids[:1], "chosen_ids": ids[1:], "rejected_ids": ids[:0:-1]}
    adapted = hasattr(module, "peft_config")
    config = trl.DPOConfig(**arguments, remove_unused_columns=False, max_length=None)
    with patch.object(own.DPOTrainer, "_prepare_dataset", lambda _, dataset, *__: dataset):
        trainer = own.DPOTrainer(
            model=module.unload() if adapted else module,
            ref_model=None if adapted else deepcopy(module).eval(),
            args=config,
            train_dataset=_dataset(len(cast(Any, samples)), pair),
            processing_class=_tokenizer(),
            callbacks=callbacks,
            peft_config=module.peft_config["default"] if adapted else None,
        )
    for one in trainer.model.parameters():
        if one.requires_grad:
            one.data = one.data.to(stored)
    return trainer


def _dataset(n: int, each: dict[str, list[int]]) -> Any:
    """A dataset of n equal samples."""
    datasets: Any = import_module("datasets")

    def sample(asked: dict[str, list[int]]) -> dict[str, list[Any]]:
        return {name: [values] * len(asked["row"]) for name, values in each.items()}

    return datasets.Dataset.from_dict({"row": range(n)}).with_transform(sample)


@cache
def masks_as_on_a_gpu() -> torch.library.Library:
    """Let masks on a GPU that is not there be of ones only, as all tokens have a target.

    How many places a mask chooses is read from the GPU, which here has no values. The places get their bytes
    all the same, without the memory that CUB takes to find them.
    """
    library = torch.library.Library("aten", "IMPL")

    def places(mask: torch.Tensor) -> torch.Tensor:
        none = torch.empty(0, dtype=torch.int64, device=mask.device)
        torch.ops.aten.nonzero.out(mask, out=none)
        return torch.empty((mask.dim(), mask.numel()), dtype=torch.int64, device=mask.device).t()

    library.impl("nonzero", places, "CUDA")
    return library


def _tokenizer() -> Any:
    """A tokenizer of one token, which pads; nothing is tokenized."""
    tokenizers: Any = import_module("tokenizers")
    transformers: Any = import_module("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"pad": 0}, unk_token="pad"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="pad", eos_token="pad")
