"""TRL's SFTTrainer, DPOTrainer and GRPOTrainer over samples that are tokenized already."""

from collections.abc import Iterator
from copy import deepcopy
from importlib import import_module
from math import log
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import Dataset

from memplan import Plan
from validate.cases import option
from validate.systems.torch.parallelize import torch_dtype


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
    module: Any, arguments: dict[str, Any], samples: Dataset[Any], callbacks: list[Any], plan: Plan
) -> Any:
    """TRL's trainer of a module on equal pairs, with the plan's `arguments` of transformers' Trainer.

    Each prompt is one token. The reference is a copy, as TRL loads it; of a module with adapters it is the
    module without them, which TRL makes anew. Log-probabilities that are computed ahead are given: they are
    no part of a step.
    """
    trl: Any = import_module("trl")
    own: Any = import_module("trl.trainer.dpo_trainer")
    ids = samples[0]["input_ids"]
    pair = {"prompt_ids": ids[:1], "chosen_ids": ids[1:], "rejected_ids": ids[:0:-1]}
    adapted = hasattr(module, "peft_config")
    ahead = option(plan, "precompute_ref_log_probs", False)
    if ahead:
        pair |= {"ref_chosen_logps": 0.0, "ref_rejected_logps": 0.0}
    config = trl.DPOConfig(
        **arguments, remove_unused_columns=False, max_length=None, precompute_ref_log_probs=ahead
    )
    stubs: dict[str, Any] = dict.fromkeys(("_prepare_dataset", "_precompute_ref_logps"), _as_it_is)
    of_module: dict[str, Any] = {
        "hash_module": lambda _: "",
        "create_model_from_path": lambda *_, **__: deepcopy(module),
    }
    with patch.multiple(own.DPOTrainer, **stubs), patch.multiple(own, **of_module):
        trainer = own.DPOTrainer(
            model=module.unload() if adapted else module,
            ref_model=None if adapted or ahead else deepcopy(module).eval(),
            args=config,
            train_dataset=_dataset(len(cast(Any, samples)), pair),
            processing_class=_tokenizer(),
            callbacks=callbacks,
            peft_config=module.peft_config["default"] if adapted else None,
        )
    return _as_stored(trainer, plan)


def _as_it_is(_: Any, dataset: Any, *__: Any) -> Any:
    return dataset


def grpo_trainer(
    module: Any,
    arguments: dict[str, Any],
    samples: Dataset[Any],
    callbacks: list[Any],
    plan: Plan,
    *,
    computes: bool,
) -> Any:
    """TRL's trainer of a module on equal completions, with the plan's `arguments` of transformers' Trainer.

    No server of vLLM runs: a stub gives the completions, and takes no weights. The texts of prompts and
    completions, which are gathered for logs alone, stay on their rank. The reference is as for DPO. Where
    nothing is computed, `nanmin` and `nanmax` are plain minima and maxima, as no value is known.

    Every other completion is rewarded, so that the loss falls as these become likelier. The stub calls all
    tokens equally likely, and the ratio to that is not clipped.
    """
    trl: Any = import_module("trl")
    own: Any = import_module("trl.trainer.grpo_trainer")
    ids, n = samples[0]["input_ids"], option(plan, "max_completion_length", 0)

    class Served(own.GRPOTrainer):  # type: ignore[misc]
        def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
            return [ids[:-n]] * len(prompts), None, {}

    class Server(own.VLLMGeneration):  # type: ignore[misc]
        """vLLM in server mode, as the trainer sees it."""

        def _init_vllm(self) -> None:
            self.vllm_client = self

        def get_server_info(self) -> dict[str, Any]:
            return {"model_config": {"logprobs_mode": "processed_logprobs"}}

        def sync_weights(self) -> None:
            """Gather weights that are sharded, but beside adapters; nothing is sent."""
            super().sync_weights()

        def update_named_params(self, _: Any, weights: Iterator[Any]) -> None:
            """Gather weights on the rank that would send them."""
            for _ in weights:
                pass

        def reset_prefix_cache(self) -> None:
            """There is none."""

        def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
            both = ids[-n:], ids[: -n - 1 : -1]
            each = [[-log(module.config.vocab_size)]] * n
            return prompts, [both[i % 2] for i in range(len(prompts))], [each] * len(prompts), None

    def rewards(completions: list[str], **_: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    adapted = hasattr(module, "peft_config")
    config = trl.GRPOConfig(
        **arguments,
        remove_unused_columns=False,
        use_vllm=True,
        vllm_mode="server",
        max_completion_length=n,
        num_generations=plan.global_batch,
        vllm_importance_sampling_clip_max=1e30,
        beta=0.04 if option(plan, "ref_model", False) else 0.0,
    )
    patch.object(own, "gather_object", lambda texts: texts).start()
    if not computes:
        patch.multiple(own, nanmin=torch.min, nanmax=torch.max).start()
    copied = patch.object(own, "create_model_from_path", lambda *_, **__: deepcopy(module).eval())
    with copied, patch.object(own, "VLLMGeneration", Server):
        trainer = Served(
            model=module.unload() if adapted else module,
            reward_funcs=rewards,
            args=config,
            train_dataset=_dataset(len(cast(Any, samples)), {"prompt": ""}),
            processing_class=_tokenizer(),
            callbacks=callbacks,
            peft_config=module.peft_config["default"] if adapted else None,
        )
    return _as_stored(trainer, plan)


def _as_stored(trainer: Any, plan: Plan) -> Any:
    """The trainer, whose trained weights have the plan's type: adapters that TRL makes are in float32."""
    for one in trainer.model.parameters():
        if one.requires_grad:
            one.data = one.data.to(torch_dtype(plan.formats.stored))
    return trainer


def _dataset(n: int, each: dict[str, Any]) -> Any:
    """A dataset of n equal samples."""
    datasets: Any = import_module("datasets")

    def sample(asked: dict[str, list[int]]) -> dict[str, list[Any]]:
        return {name: [values] * len(asked["row"]) for name, values in each.items()}

    return datasets.Dataset.from_dict({"row": range(n)}).with_transform(sample)


def n_targets(completion: tuple[int, int] | None, mask: torch.Tensor) -> int:
    """How many places a mask chooses: all of them, as all tokens have a target, unless it is of completions.

    `completion`: the number of targets in a sequence of GRPO's, and how many of these its mask chooses.
    """
    if completion is not None and mask.dim() == 2 and mask.shape[1] == completion[0]:
        return mask.shape[0] * completion[1]
    return mask.numel()


def _tokenizer() -> Any:
    """A tokenizer of one token, which pads; nothing is tokenized."""
    tokenizers: Any = import_module("tokenizers")
    transformers: Any = import_module("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"pad": 0}, unk_token="pad"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="pad", eos_token="pad")
