"""BertModel over shapes: Megatron's encoder, whose head predicts masked words and the order of sentences."""

from dataclasses import dataclass
from typing import ClassVar, final

from memplan.models.megatron.config import TransformerConfig
from memplan.models.megatron.fusions import bias_gelu, with_loss_beside
from memplan.models.megatron.layers import column_linear, norm, with_embeddings
from memplan.models.megatron.model import GPTModel
from memplan.shapes import FP32
from memplan.tape import Grads, Saved, Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BertModel(GPTModel):
    """A BERT as Megatron's arguments describe it: GPTModel's embeddings and layers, without the causal mask.

    `binary_head`: a second head says which of two sentences comes first, and there are two types of tokens.

    Source: megatron.core.models.bert.bert_model:BertModel.
    """

    sees_all: ClassVar[bool] = True

    binary_head: bool = True

    def with_types(self, x: Tensor) -> Tensor:
        if not self.binary_head:
            return x
        table = x.tape.parameter("embedding.tokentype_embeddings.weight", (2, self.d_model))
        return with_embeddings(x, table, "token types")

    def head(self, x: Tensor) -> Tensor:
        """The logits of each token.

        Source: megatron.core.models.bert.bert_lm_head:BertLMHead.forward.
        """
        h = norm(x, "encoder.final_layernorm", self.config)
        if self.binary_head:
            h = with_loss_beside(h, self._loss_of_order(h))
        h = linear(h, "lm_head.dense", self.d_model, self.config)
        h = norm(bias_gelu(h, None), "lm_head.layer_norm", self.config)
        return self._logits(h, "output_layer.bias")

    def _loss_of_order(self, h: Tensor) -> Tensor:
        """The loss of the binary head, which sees the first token of each sequence.

        Source: megatron.core.models.bert.pooler:Pooler.forward, pretrain_bert.py (`loss_func`).
        """
        first = tanh(linear(first_token(h), "pooler.dense", self.d_model, self.config))
        return loss_of_order(linear(first, "binary_head", 2, self.config))


def linear(x: Tensor, name: str, n_out: int, config: TransformerConfig) -> Tensor:
    """PyTorch's product with a bias, undivided: saves x.

    Source: megatron.core.transformer.utils:get_linear_layer.
    """
    alone = config._replace(tp=1, gradient_accumulation_fusion=False)
    weight = x.tape.parameter(f"{name}.weight", (n_out, x.shape[-1]))
    bias = x.tape.parameter(f"{name}.bias", (n_out,))
    return column_linear(x, weight, name, alone, bias=bias)


def first_token(h: Tensor) -> Tensor:
    """A view of the first token of each sequence; its gradient is in a tensor of zeros as large as h."""
    tape, shape, dtype = h.tape, h.shape, h.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("gradient of first tokens, and zeros", shape, dtype),)

    node = tape.node((h.node,), (), backward)
    return Tensor(tape, (shape[0], 1, shape[-1]), dtype, h.storage, node, True)


def tanh(x: Tensor) -> Tensor:
    """PyTorch's: saves its output."""
    tape, shape, dtype = x.tape, x.shape, x.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad", shape, dtype),)

    y = tape.new("tanh", shape, dtype)
    y.node = tape.node((x.node,), (y.detach(),), backward)
    return y


def loss_of_order(logits: Tensor) -> Tensor:
    """The mean cross-entropy of two logits for each sequence, in float32: saves their log-probabilities."""
    tape, shape, dtype = logits.tape, logits.shape, logits.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad", shape, dtype),)

    saved = tape.new("log-probabilities of the order", shape, FP32)
    return tape.new("loss of the order", (), FP32, tape.node((logits.node,), (saved,), backward))
