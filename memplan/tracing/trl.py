"""A module of transformers with the output layer that TRL's trainers give it: tokens are scored in tiles.

No logits are made. Of each tile of `TOKENS` by `VOCABULARY` the statistics of each token's distribution are
kept, and the backward pass makes the tile again. On CUDA a kernel of Triton's reads a tile where it is; on
CPU PyTorch's operations take copies.

Source: trl.trainer.utils (`add_fused_lm_head`), trl.kernels.chunked_logprob (`ChunkedLogProbFunction`), 1.16.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, Final, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memplan.errors import MissingRule
from memplan.models.recording import AGAIN, REFERENCE, ByTrainer, Scoring

TOKENS: Final = 4096
"""Tokens of a tile (`TOKEN_CHUNK_SIZE`)."""

VOCABULARY: Final = 32_768
"""Entries of the vocabulary of a tile (`_CHUNKED_LOGPROB_CHUNK_SIZE`)."""

BETA: Final = 0.1
"""The usual weight of a pair's difference (`DPOConfig.beta`)."""

EPSILON: Final = 0.2
"""How far a token's probability may have moved before its ratio is clipped (`GRPOConfig.epsilon`)."""


class Scores(NamedTuple):
    """What the module returns: of each token but the last (batch, seq - 1), and their loss.

    What a trainer does not ask for is None.

    Source: trl.trainer.utils (`FusedCausalLMOutput`).
    """

    loss: Tensor
    log_probs: Tensor
    entropy: Tensor | None
    mean_logits: Tensor | None
    is_top1: Tensor | None
    label_mask: Tensor


OF_SFT: Final = ("entropy", "is_top1")
OF_DPO: Final = ("entropy", "mean_logits", "is_top1")
OF_GRPO: Final = ("entropy",)
"""What a trainer asks for beside the log-probabilities of tokens; of a frozen copy it is nothing."""

AHEAD: Final = ("ref_chosen_logps", "ref_rejected_logps")
"""The reference's log-probabilities of pairs, where they were computed before training."""

Refer = Callable[[], tuple[Any, Sequence[Tensor]]]
"""Returns what is held meanwhile, and the reference's log-probabilities of chosen and rejected sequences."""


def with_scores(module: Any, by: ByTrainer) -> Callable[..., tuple[Scores, Tensor, Tensor]]:
    """The forward of a causal language model of transformers under TRL's SFTTrainer.

    It returns scores, and the mask of padding and the number of the batch's tokens, which it is given.

    Raises:
        MissingRule: as `_scorer`.
    """
    score = _scorer(module, by)

    def forward(
        *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, num_items_in_batch: Tensor
    ) -> tuple[Scores, Tensor, Tensor]:
        return score(input_ids, attention_mask, labels, OF_SFT), attention_mask, num_items_in_batch

    return forward


def with_reference(module: Any, by: ByTrainer) -> Callable[..., tuple[Scores, Refer, Tensor, Tensor]]:
    """The forward of a causal language model of transformers under TRL's DPOTrainer.

    It returns the scores of chosen and rejected sequences, a function that gives the reference's, and the
    masks that it is given. A frozen copy becomes a part of the module. Log-probabilities that were computed
    ahead are inputs.

    Assumes: prompts of one token, so that all others are scored; TRL's usual `disable_dropout`.
    Source: trl.trainer.dpo_trainer (`DPOTrainer._compute_loss`).

    Raises:
        MissingRule: as `_scorer`.
    """
    for one in module.modules():
        if isinstance(one, nn.Dropout):
            one.p = 0.0
    score, _, of_reference, as_reference = _scorers(module, by)

    def forward(
        *, input_ids: Tensor, attention_mask: Tensor, completion_mask: Tensor, **ahead: Tensor
    ) -> tuple[Scores, Refer, Tensor, Tensor]:
        labels = input_ids.masked_fill(completion_mask == 0, -100)
        device = input_ids.device.type
        autocasts, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

        def refer() -> tuple[Any, Sequence[Tensor]]:
            if ahead:
                return None, [ahead[name] for name in AHEAD]
            with torch.no_grad(), as_reference(), torch.autocast(device, dtype, enabled=autocasts):
                found = of_reference(input_ids, attention_mask, labels, _asked(by, OF_DPO))
            return found, found.log_probs.sum(dim=1).chunk(2)

        return score(input_ids, attention_mask, labels, OF_DPO), refer, attention_mask, completion_mask

    return forward


def beside_completions(by: ByTrainer, batch: int) -> dict[str, Tensor]:
    """The tensors that TRL's GRPOTrainer holds, beside sequences and their mask, when a forward pass begins.

    Each completion has an advantage, and log-probabilities of its tokens: by the trained model before the
    step, by vLLM, and by the reference. The first two have a ratio. The number of tokens counts all ranks'.
    FSDP2 casts what modules return.

    Source: trl.trainer.grpo_trainer (`GRPOTrainer._generate_and_score_completions`), 1.16.
    """
    of_tokens = torch.zeros(batch, cast(int, by.completion))
    returned = of_tokens.bfloat16() if by.casts_inputs else of_tokens
    found = {
        "advantages": torch.zeros(batch), "num_items_in_batch": torch.ones((), dtype=torch.int64),
        "old_per_token_logps": returned, "importance_sampling_ratio": torch.zeros(batch, 1),
        "sampling_per_token_logps": of_tokens,
    }  # fmt: skip
    return found | ({} if by.reference is None else {"ref_per_token_logps": returned})


def with_completions(
    module: Any, by: ByTrainer
) -> tuple[Callable[..., tuple[Scores, Tensor, Tensor, dict[str, Tensor]]], Callable[..., None]]:
    """The forward of a causal language model under TRL's GRPOTrainer, and what runs before it.

    It returns the scores of completions, the sequences and their mask, and what else it is given. Before
    it, the model scores the same completions without gradients, and so does the reference, if there is one.

    Source: trl.trainer.grpo_trainer (`GRPOTrainer._generate_and_score_completions`,
    `GRPOTrainer._get_per_token_logps_and_entropies`), 1.16.

    Raises:
        MissingRule: as `_scorer`.
    """
    score, again, of_reference, as_reference = _scorers(module, by)
    n = cast(int, by.completion)

    def joined(one: Tensor) -> Tensor:
        return torch.cat([one[:, :-n], one[:, -n:]], dim=1)  # of a prompt and a completion

    def labels_of(ids: Tensor, of_padding: Tensor) -> Tensor:
        labels = ids.masked_fill(of_padding == 0, -100)
        labels[:, :-n] = -100
        return labels

    def forward(**given: Tensor) -> tuple[Scores, Tensor, Tensor, dict[str, Tensor]]:
        ids, of_padding = joined(given["input_ids"]), joined(given["attention_mask"])
        return score(ids, of_padding, labels_of(ids, of_padding), OF_GRPO), ids, of_padding, given

    def before(**given: Tensor) -> None:
        ids, of_padding = joined(given["input_ids"]), joined(given["attention_mask"])
        with torch.no_grad():
            again(ids, of_padding, labels_of(ids, of_padding), OF_GRPO)
            torch.clear_autocast_cache()
            if by.reference is not None:
                with as_reference():
                    of_reference(ids, of_padding, labels_of(ids, of_padding), _asked(by, OF_GRPO))
                torch.clear_autocast_cache()

    return forward, before


Scorer = Callable[[Tensor, Tensor, Tensor, tuple[str, ...]], Scores]
"""Returns a model's scores of tokens, given also the mask of padding, labels and the names of scores."""


def _scorers(module: Any, by: ByTrainer) -> tuple[Scorer, Scorer, Scorer, Callable[[], Any]]:
    """Returns a module's scorer in its forward pass, in others, its reference's, and what makes its context.

    The module gets a frozen copy as a part, unless its adapters are turned off.
    """
    copies = by.reference not in (None, "ahead", "adapters off")
    reference = deepcopy(module).requires_grad_(False) if copies else None
    score = again = _scorer(module, by)
    if by.hooks_again:
        module.add_module(AGAIN, again := _Again(score))
    if reference is None:
        off = by.reference == "adapters off"
        return score, again, again, module.disable_adapter if off else nullcontext
    module.add_module(REFERENCE, reference)
    return score, again, _scorer(reference, by, is_called=True), partial(_as_loaded, reference)


def _asked(by: ByTrainer, of_trained: tuple[str, ...]) -> tuple[str, ...]:
    """What is asked for of the reference: with its adapters off, the model's output layer is the same one."""
    return of_trained if by.reference == "adapters off" else ()


class _Again(nn.Module):
    """A pass of a module that is not its own forward; it scores tokens."""

    def __init__(self, score: Scorer) -> None:
        super().__init__()
        self.score = score

    def forward(self, *given: Any) -> Scores:
        return self.score(*given)


@contextmanager
def _as_loaded(reference: nn.Module) -> Iterator[None]:
    """A block in which the copy is as TRL loads it: weights require gradients, so that autocast keeps casts.

    Source: trl.trainer.utils (`create_model_from_path`); aten/src/ATen/autocast_mode.cpp (`cached_cast`).
    """
    reference.eval().requires_grad_(True)
    yield
    reference.requires_grad_(False)


def _scorer(module: Any, by: ByTrainer, *, is_called: bool = False) -> Scorer:
    """A function that scores the targets of a batch with a model; `is_called`: as a module, which FSDP2 sees.

    FSDP2 casts what it returns to the type that it gathers weights in.

    Raises:
        MissingRule: an output layer with a bias, or experts, whose router has a loss of its own.
    """
    base, scoring = module, cast(Scoring, by.scoring)
    if hasattr(module, "get_base_model"):
        base = module.get_base_model()
        if not scoring.gathers_head:
            _enable_input_require_grads(base)
    head, config = base.get_output_embeddings(), base.config.get_text_config()
    for what, asked in (
        ("an output layer with a bias", getattr(head, "bias", None) is not None),
        ("the loss of a router of experts", hasattr(config, "output_router_logits")),
    ):
        if asked:
            others = "sft" if by.reference is None else "dpo"
            asked_by = others if by.completion is None else "grpo"
            raise MissingRule(
                f"trainer={asked_by!r} with {what} has no rule yet; use another model, or "
                "trainer='huggingface'.",
                kind=f"TRL's trainers with {what}",
            )
    cap = getattr(config, "final_logit_softcapping", None)
    vars(head)["forward"] = partial(_scored, head, cap, scoring.gathers_head)

    def scored(
        ids: Tensor, of_padding: Tensor, labels: Tensor, asked: tuple[str, ...]
    ) -> tuple[Scores, torch.dtype]:
        output = base.base_model(input_ids=ids, attention_mask=of_padding, use_cache=False)
        hidden: Tensor = output.last_hidden_state
        return head(hidden[:, :-1], labels[:, 1:], asked), hidden.dtype

    if is_called:
        vars(module)["forward"] = scored

    def score(*given: Any) -> Scores:
        scores, gathered_in = module(*given) if is_called else scored(*given)
        return _cast_by_fsdp(scores, gathered_in) if by.casts_inputs else scores

    return score


def _cast_by_fsdp(scores: Scores, dtype: torch.dtype) -> Scores:
    floats = [one if one is None or not one.is_floating_point() else one.to(dtype) for one in scores]
    return Scores(*cast(Any, floats))


def _enable_input_require_grads(base: Any) -> None:
    """Let the embeddings of tokens require gradients where blocks are recomputed.

    Source: `transformers.modeling_utils:PreTrainedModel.enable_input_require_grads`, which
    trl.trainer.sft_trainer (`SFTTrainer.__init__`) calls.
    """
    embedding = base.get_input_embeddings()
    forward = embedding.forward

    def embedded(ids: Tensor) -> Tensor:
        found: Tensor = forward(ids)
        recomputes = any(getattr(one, "gradient_checkpointing", False) for one in base.modules())
        return found.requires_grad_() if recomputes else found

    vars(embedding)["forward"] = embedded


def _scored(
    head: Any, cap: float | None, gathers: bool, hidden: Tensor, labels: Tensor, asked: tuple[str, ...]
) -> Scores:
    """The scores of labels by the output layer, whose logits are capped, and whose weight may be gathered."""
    mask = labels != -100
    on_cuda = hidden.device.type == "cuda"
    weight = head.weight.clone() if gathers else head.weight
    found = cast(Any, _Tiles).apply(
        cast(Any, _Chosen).apply(hidden, mask) if on_cuda else hidden.reshape(-1, hidden.size(-1)),
        weight,
        cast(Any, _Chosen).apply(labels, mask) if on_cuda else labels.clamp(min=0).reshape(-1),
        cap,
        asked,
    )
    if on_cuda:
        found = (one if one is None else cast(Any, _Placed).apply(one, mask) for one in found)
    else:
        found = (one if one is None else one.view(mask.shape).masked_fill(~mask, 0) for one in found)
    log_probs, entropy, mean_logits, is_top1 = found
    loss = -log_probs.sum() / mask.sum().clamp(min=1)
    return Scores(loss, log_probs, entropy, mean_logits, is_top1, mask)


def loss_of_scores(scores: Scores, of_padding: Tensor, n_items: Tensor) -> Tensor:
    """The loss, and what is counted beside it; on one rank, so that nothing is gathered.

    Source: trl.trainer.sft_trainer (`SFTTrainer.compute_loss`).
    """
    of_tokens = -scores.log_probs
    loss = of_tokens.sum() / n_items.clamp(min=1)
    loss = loss * 1
    n_valid = scores.label_mask.sum().sum()
    entropy = cast(Tensor, scores.entropy).detach().sum().sum()
    n_correct = cast(Tensor, scores.is_top1).sum().sum()
    entropy / n_valid
    n_correct / n_valid
    of_padding.sum().sum()
    return loss


def loss_of_pairs(scores: Scores, refer: Refer, of_padding: Tensor, of_completions: Tensor) -> Tensor:
    """The loss of pairs of a chosen and a rejected sequence, the chosen ones first.

    Neglects: what is counted beside it.
    Source: trl.trainer.dpo_trainer (`DPOTrainer._compute_loss`), 1.16.
    """
    of_tokens = scores.log_probs[:, -of_completions[..., 1:].size(1) :]
    chosen, rejected = of_tokens.sum(dim=1).chunk(2)
    _held, (chosen_before, rejected_before) = refer()
    of_chosen, of_rejected = chosen - chosen_before, rejected - rejected_before
    difference = of_chosen - of_rejected
    of_pairs = -F.logsigmoid(BETA * difference)
    loss: Tensor = 0.0 + of_pairs.mean() * 1.0
    return loss


def loss_of_completions(
    scores: Scores, ids: Tensor, of_padding: Tensor, given: Mapping[str, Tensor]
) -> Tensor:
    """DAPO's loss of completions, over all generated tokens; meanwhile `ids` and `of_padding` are held.

    Neglects: metrics other than entropies.
    Source: trl.trainer.grpo_trainer (`GRPOTrainer._compute_loss`), 1.16.
    """
    mask = given["attention_mask"][:, -given["old_per_token_logps"].size(1) :]
    log_probs = torch.cat([scores.log_probs[:, -mask.size(1) :]], dim=0)
    entropies = torch.cat([cast(Tensor, scores.entropy)[:, -mask.size(1) :]], dim=0)
    advantages = given["advantages"].unsqueeze(1)
    ratio = torch.exp(log_probs - given["old_per_token_logps"])
    clipped = torch.clamp(ratio, 1 - EPSILON, 1 + EPSILON)
    of_reference = given.get("ref_per_token_logps")
    if of_reference is not None:
        divergence = torch.exp(of_reference - log_probs) - (of_reference - log_probs) - 1
    of_ratio, of_clipped = ratio * advantages, clipped * advantages
    of_tokens = -torch.min(of_ratio, of_clipped) * given["importance_sampling_ratio"]
    if of_reference is not None:
        of_tokens = of_tokens + BETA * divergence
    n_tokens = given["num_items_in_batch"].clamp(min=1.0) / 1  # by the number of ranks
    loss: Tensor = (of_tokens * mask).sum() / (n_tokens * 1 / 1)  # by shares of a step
    torch.stack([(entropies * mask).sum(), mask.sum().float()])
    return loss


class _Chosen(torch.autograd.Function):
    """The elements of x that a mask of its first dims chooses.

    Source: aten/src/ATen/native/TensorAdvancedIndexing.cpp (`index_put_with_sort`, `_index_put_impl_`),
    torch/csrc/autograd/FunctionsManual.cpp (`index_backward`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.shape = x.shape
        return x[mask.nonzero().unbind(1)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        found = grads[0].new_zeros(ctx.shape)
        found.index_put_(mask.nonzero().unbind(1), grads[0], accumulate=True)
        return found, None


class _Placed(torch.autograd.Function):
    """One number for each element of a mask that is true, in the mask's shape.

    Source: aten/src/ATen/native/cuda/IndexKernel.cpp (`masked_scatter__cuda`),
    torch/csrc/autograd/FunctionsManual.cpp (`masked_scatter_backward`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return x.new_zeros(mask.shape).masked_scatter(mask, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return grads[0][mask.nonzero().unbind(1)], None


class _Tiles(torch.autograd.Function):
    """Log-probabilities of targets, and what is `asked` for, else None; each (tokens).

    That may be entropies, the mean of logits, and whether the target is the likeliest.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None, asked: tuple[str, ...]
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        n, device = hidden.shape[0], hidden.device
        autocasts = torch.is_autocast_enabled(device.type)
        ctx.dtype = torch.get_autocast_dtype(device.type) if autocasts else hidden.dtype
        ctx.cap = cap
        kept = [torch.full((n,), -math.inf, device=device)]
        kept += [torch.zeros((n,), device=device) for _ in range(4)]
        kept += [torch.full((n,), -math.inf, device=device), torch.zeros((n,), device=device)]
        tiles = torch.empty((min(n, TOKENS), VOCABULARY), device=device, dtype=ctx.dtype)
        for first in range(0, n, TOKENS):
            rows = slice(first, min(first + TOKENS, n))
            x = hidden[rows].to(ctx.dtype)
            for start in range(0, weight.shape[0], VOCABULARY):
                end = min(start + VOCABULARY, weight.shape[0])
                tile = tiles[: x.shape[0], : end - start]
                torch.mm(x, weight[start:end].to(ctx.dtype).t(), out=tile)
                if device.type == "cpu":
                    _read(tile, targets[rows] - start, [one[rows] for one in kept], cap, asked)
        largest, total, weighted, _, of_words, before, of_target = kept
        log_z = largest + torch.log(total)
        log_probs = of_target - log_z
        entropy = log_z - weighted / total if "entropy" in asked else None
        mean = of_words / weight.shape[0] if "mean_logits" in asked else None
        is_top1 = (of_target >= largest) & (of_target > before) if "is_top1" in asked else None
        ctx.save_for_backward(hidden, weight, targets, log_z, log_z if entropy is None else entropy)
        ctx.mark_non_differentiable(*[one for one in (mean, is_top1) if one is not None])
        return log_probs, entropy, mean, is_top1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_z, _ = ctx.saved_tensors
        n, device = hidden.shape[0], hidden.device
        needed = [of for of, needs in zip((hidden, weight), ctx.needs_input_grad[:2], strict=True) if needs]
        wide = {id(of): torch.zeros(of.shape, device=device) for of in needed}
        tiles = torch.empty((min(n, TOKENS), VOCABULARY), device=device, dtype=ctx.dtype)
        grad = cast(Tensor, grads[0]).float().contiguous()
        for first in range(0, n, TOKENS):
            rows = slice(first, min(first + TOKENS, n))
            x = hidden[rows].to(ctx.dtype)
            for start in range(0, weight.shape[0], VOCABULARY):
                end = min(start + VOCABULARY, weight.shape[0])
                w = weight[start:end].to(ctx.dtype)
                tile = tiles[: x.shape[0], : end - start]
                torch.mm(x, w.t(), out=tile)
                if device.type == "cpu":
                    _put_gradient(tile, start, targets[rows], log_z[rows], grad[rows], ctx.cap)
                if id(hidden) in wide:
                    _add_product(wide[id(hidden)][rows], tile, w)
                if id(weight) in wide:
                    _add_product(wide[id(weight)][start:end], tile.t(), x)
        of_hidden, of_weight = (
            wide[id(of)].to(of.dtype) if id(of) in wide else None for of in (hidden, weight)
        )
        return of_hidden, of_weight, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a product to a total in float32; on CUDA its operands may be narrower."""
    if total.device.type == "cuda" and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def _read(tile: Tensor, local: Tensor, kept: list[Tensor], cap: float | None, asked: tuple[str, ...]) -> None:
    """Put a tile's part into the statistics on CPU; `local`: the targets' places in the tile."""
    z = _logits(tile.float(), cap)
    if "mean_logits" in asked:
        kept[4].add_(z.sum(-1))
    if "is_top1" in asked:
        before = torch.arange(z.shape[1], device=z.device) < local.unsqueeze(-1)
        kept[5].copy_(torch.maximum(kept[5], z.masked_fill(~before, -math.inf).amax(-1)))
    largest = torch.maximum(kept[0], z.amax(-1))
    rescale = torch.exp(kept[0] - largest)
    e = torch.exp(z - largest.unsqueeze(-1))
    kept[1].mul_(rescale).add_(e.sum(-1))
    if "entropy" in asked:
        kept[2].mul_(rescale).add_((e * z).sum(-1))
    kept[0].copy_(largest)
    inside = (local >= 0) & (local < z.shape[1])
    target = z.gather(-1, local.clamp(0, z.shape[1] - 1).unsqueeze(-1)).squeeze(-1)
    kept[6].copy_(torch.where(inside, target, kept[6]))


def _logits(z: Tensor, cap: float | None) -> Tensor:
    z = z * 1.0  # by a scale
    if cap is not None:
        z = cap * torch.tanh(z / cap)
    return z * 1.0  # by a temperature


def _put_gradient(
    tile: Tensor, start: int, targets: Tensor, log_z: Tensor, grad: Tensor, cap: float | None
) -> None:
    """Put the gradient of a tile of logits in their place on CPU."""
    y = tile.float() * 1.0
    if cap is not None:
        t = torch.tanh(y / cap)
        z = cap * t * 1.0
    else:
        z = y * 1.0
    log_p = z - log_z.unsqueeze(-1)
    p = torch.exp(log_p)
    found = torch.zeros_like(z)
    is_target = torch.arange(start, start + z.shape[1], device=z.device) == targets.unsqueeze(-1)
    found += grad.unsqueeze(-1) * (is_target.float() - p)
    found = found * 1.0
    if cap is not None:
        found = found * (1 - t * t)
    tile.copy_(found * 1.0)
