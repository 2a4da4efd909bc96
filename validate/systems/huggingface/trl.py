"""TRL's SFTTrainer over samples that are tokenized already."""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset


def sft_trainer(
    module: nn.Module, arguments: dict[str, Any], samples: Dataset[Any], callbacks: list[Any]
) -> Any:
    """TRL's trainer of a module on equal samples, with the plan's `arguments` of transformers' Trainer."""
    trl: Any = import_module("trl")
    datasets: Any = import_module("datasets")
    rows = datasets.Dataset.from_dict({"row": range(len(samples))})  # type: ignore[arg-type]

    def sample(asked: dict[str, list[int]]) -> dict[str, list[Any]]:
        each = samples[0]
        return {name: [each[name]] * len(asked["row"]) for name in ("input_ids", "labels")}

    config = trl.SFTConfig(
        **arguments,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
    )
    return trl.SFTTrainer(
        model=module,
        args=config,
        train_dataset=rows.with_transform(sample),
        processing_class=_tokenizer(),
        callbacks=callbacks,
    )


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
