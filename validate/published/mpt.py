"""MPT as llm-foundry's modules run and Composer's loop trains it: a forward pass over shapes."""

from dataclasses import dataclass
from typing import ClassVar, Final, Literal, final

from memplan.models.decoders import GptDecoder
from memplan.ops import (
    embedding,
    feature_parts,
    gelu,
    heads,
    layer_norm,
    learned_positions,
    linear,
    merged_heads,
)
from memplan.ops.fused_attention import flash_attention_cuda
from memplan.shapes import FP32, INT64
from memplan.tape import Grads, Saved, Tape, Tensor

N_METRICS: Final = 2
"""Metrics of each micro-batch, which compute the loss again: cross-entropy and perplexity."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Mpt(GptDecoder):
    """`MPTForCausalLM` with learned positions, biases, a tied head and flash-attn's fused cross-entropy.

    Composer holds a micro-batch's logits until its backward pass has ended, and then computes its metrics
    from them, in float32. `attn_impl` is whose FlashAttention runs: "triton", on views of the queries, keys
    and values, or flash-attn's ("flash"), on copies without padding.

    Neglects: the mask of padding, which is all ones, and reading back how many tokens it leaves; that the
    tables and the last norm are units of their own, which are the root's here.
    Source: mosaicml/llm-foundry at 5e85bd62d, llmfoundry/models (mpt/modeling_mpt.py, layers/attention.py,
    layers/blocks.py); mosaicml/composer v0.17.2, `Trainer._train_microbatch`.
    """

    family: ClassVar[str] = "custom"
    code: ClassVar[str] = "llm-foundry 0.4, MPTForCausalLM"

    attn_impl: Literal["flash", "triton"]

    def embed(self, tokens: Tensor) -> Tensor:
        ids = tokens.tape.new("position ids", tokens.shape, INT64)
        x = embedding(tokens, "transformer.wte", self.vocab_size, self.d_model)
        return x + learned_positions(ids, "transformer.wpe", self.max_seq_len, self.d_model)

    def after_backward(self, tape: Tape) -> None:
        """Composer's metrics, of the logits that it has held until then.

        Source: composer.metrics.nlp (`LanguageCrossEntropy.update`).
        """
        for logits in tape.held:
            for _ in range(N_METRICS):
                with tape.workspace() as temporary:
                    temporary.keep(logits.new("logits in float32", logits.shape, FP32))
                    temporary.keep(logits.new("log-probabilities", logits.shape, FP32))
        tape.let_go()

    def block(self, x: Tensor, kind: str) -> Tensor:
        x = x + self._attention(layer_norm(x, "norm_1"))
        h = linear(layer_norm(x, "norm_2"), "ffn.up_proj", self.d_ff, bias=True, split="columns")
        return x + linear(gelu(h), "ffn.down_proj", self.d_model, bias=True, split="rows")

    def _attention(self, x: Tensor) -> Tensor:
        qkv = linear(x, "attn.Wqkv", 3 * self.d_model, bias=True, split="columns")
        q, k, v = [heads(self._copied(part, "unpadded part"), self.d_head) for part in feature_parts(qkv, 3)]
        del qkv
        y = merged_heads(flash_attention_cuda(q, k, v, dropout=False))
        y = self._copied(y, "padded attention")
        return linear(y, "attn.out_proj", self.d_model, bias=True, split="rows")

    def _copied(self, x: Tensor, name: str) -> Tensor:
        """x gathered by its tokens' indices, which it saves, or scattered by them; for Triton x itself.

        Source: flash_attn.bert_padding (`IndexFirstAxis`, `IndexPutFirstAxis`).
        """
        if self.attn_impl == "triton":
            return x
        tape, shape, dtype = x.tape, x.shape, x.dtype
        indices = tape.new("indices of tokens", shape[:2], INT64)

        def backward(grad: Tensor, saved: Saved) -> Grads:
            return (grad.new("grad", shape, dtype),)

        return x.new(name, shape, dtype, tape.node((x.node,), (indices,), backward))

    def head(self, x: Tensor) -> Tensor:
        h = layer_norm(x, "transformer.norm_f")
        return linear(h, "transformer.wte", self.vocab_size, bias=False, split="columns")

    def loss(self, logits: Tensor) -> Tensor:
        """The mean of flash-attn's `CrossEntropyLoss`, which saves the logits and each row's log-sum-exp.

        Source: flash_attn.ops.triton.cross_entropy (`CrossEntropyLoss`), 2.4.2.
        """
        tape, shape, dtype = logits.tape, logits.shape, logits.dtype
        targets = tape.new("targets", shape[:2], INT64)
        losses = logits.new("losses", shape[:2], FP32)
        lse = tape.new("log-sum-exp of logits", shape[:2], FP32)

        def backward(grad: Tensor, saved: Saved) -> Grads:
            return (saved[0].new("grad of logits", shape, dtype),)

        losses.node = tape.node((logits.node,), (logits.detach(), lse, targets), backward)
        loss = losses.new("loss", (), FP32)
        loss.node = tape.node((losses.node,), (), lambda grad, saved: (grad,))
        tape.hold(logits.detach())
        return loss
