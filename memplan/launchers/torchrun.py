"""A script of PyTorch's own calls for one's own training loop, and the `torchrun` command that starts it."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from textwrap import indent, wrap
from typing import Any, ClassVar, Final, final

from memplan.engines.options import plan_dict
from memplan.launchers.base import Job, Launcher, Limit
from memplan.models import Decoder, end_modules, ends_are_tied
from memplan.models.config_of import config_of
from memplan.models.huggingface import HuggingFaceDecoder
from memplan.plan import Plan, stage_layers
from memplan.units import MiB

LINE: Final = 110
"""Columns of the script's longest lines."""

MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "collections.abc": ("Callable", "Iterable"),
    "contextlib": ("nullcontext",),
    "functools": ("partial",),
    "torch": ("nn",),
    "torch.amp.grad_scaler": ("GradScaler",),
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks": ("bf16_compress_hook", "fp16_compress_hook"),
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook": ("PowerSGDState", "powerSGD_hook"),
    "torch.distributed.device_mesh": ("DeviceMesh", "init_device_mesh"),
    "torch.distributed.fsdp": ("CPUOffloadPolicy", "MixedPrecisionPolicy", "fully_shard"),
    "torch.distributed.fsdp.sharded_grad_scaler": ("ShardedGradScaler",),
    "torch.distributed.optim": ("ZeroRedundancyOptimizer",),
    "torch.distributed.pipelining": ("PipelineStage",),
    "torch.distributed.pipelining.schedules": (
        *("Schedule1F1B", "ScheduleDualPipeV", "ScheduleGPipe", "ScheduleInterleaved1F1B"),
        *("ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS", "ScheduleZBVZeroBubble"),
    ),
    "torch.distributed.tensor": ("DTensor", "Replicate", "Shard", "distribute_tensor"),
    "torch.distributed.tensor.parallel": (
        *("ColwiseParallel", "PrepareModuleInput", "RowwiseParallel", "SequenceParallel"),
        *("loss_parallel", "parallelize_module"),
    ),
    "torch.nn.parallel": ("DistributedDataParallel",),
    "torch.nn.utils": ("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"),
    "torch.utils.checkpoint": ("create_selective_checkpoint_contexts",),
    "transformers": ("AutoConfig", "AutoModelForCausalLM"),
    "transformers.distributed": ("DistributedConfig",),
    "transformers.distributed.tensor_parallel": ("apply_tensor_parallelism",),
    "validate.systems.torch.modules": ("Transformer", "token_loss"),
}
"""The names that a script may use, by module; it imports those that it does use."""

OPTIMIZERS: Final = {"sgd": "SGD", "sgd-momentum": "SGD", "adam": "Adam", "adamw": "AdamW"}
"""The class in torch.optim of each optimizer."""

MOMENTUM: Final = {"sgd-momentum": "momentum=0.9"}
"""The argument of an optimizer with momentum."""

IMPLEMENTATIONS: Final = {"for-loop": "foreach=False", "foreach": "foreach=True", "fused": "fused=True"}
"""The argument that chooses each implementation of an optimizer."""

KEPT: Final = (
    *("aten.mm", "aten.addmm", "aten.bmm", "aten._scaled_dot_product_flash_attention_for_cpu"),
    *("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_efficient_attention"),
    *("aten._scaled_dot_product_cudnn_attention", "_c10d_functional.all_reduce"),
    "_c10d_functional.reduce_scatter_tensor",
)
"""The operations of torch.ops whose results selective recomputation keeps."""

NO_SIZES: Final = ("architectures", "pad_token_id", "bos_token_id", "eos_token_id")
"""Keys of a config.json that the script leaves at transformers' defaults."""


@final
class Torchrun(Launcher):
    """PyTorch's own calls, as `validate` makes them when it measures a plan."""

    file: ClassVar[str] = "train.py"

    def limits(self, job: Job) -> Iterator[Limit]:
        model, plan = job.estimate.model, job.estimate.plan
        if plan.optimizer not in OPTIMIZERS:
            why = f"optimizer={plan.optimizer!r}: the script makes one optimizer of PyTorch for all weights"
            yield Limit(why, {"optimizer": "adamw"})
        if not isinstance(model, Decoder):
            why = f"{model.name} is planned from a trace, which does not say how its module is made and fed"
            yield Limit(why, "use a model of a family (memplan models)")
        elif model.implementation not in SOURCES:
            why = f"implementation={model.implementation!r} has no module that a script could make"
            yield Limit(why, f"use {' or '.join(map(repr, SOURCES))}")
        elif model.implementation == "huggingface" and plan.pp > 1 and plan.tp > 1:
            yield Limit(
                f"pp={plan.pp}, tp={plan.tp}: the script divides whole modules of transformers", {"pp": 1}
            )
        elif model.implementation == "huggingface" and plan.pp > 1 and model.longest_seq_len is not None:
            again = "would add its learned positions again, as transformers does in each call"
            yield Limit(f"pp={plan.pp}: each stage of {model.name} {again}", {"pp": 1})
        if plan.cp > 1:
            yield Limit(f"cp={plan.cp}: the script divides no sequences, Accelerate does", {"cp": 1})
        if plan.clip_grad_norm is not None and plan.tp > 1 and plan.ddp:
            hides = "under DistributedDataParallel, which hides how gradients are divided"
            yield Limit(f"clip_grad_norm={plan.clip_grad_norm:g} with tp={plan.tp} {hides}", {"zero": 2})

    def text(self, job: Job, notes: tuple[str, ...]) -> str:
        source = SOURCES[job.estimate.model.implementation](job)
        body = "\n\n\n".join(
            [*source.definitions(), *_definitions(job), _divided(job, source), _prepared(job, source)]
        )
        return "\n".join(
            [_head(job), *_imports(source, body), "", "", body, "", "", _main(job.estimate.plan), ""]
        )


TORCHRUN: Final = Torchrun()


def torchrun_command(job: Job, program: str) -> str:
    """The command that starts a program on each node."""
    rendezvous = f"--nnodes {job.nodes} --rdzv-backend c10d --rdzv-endpoint HEAD_NODE:29500"
    where = "--standalone" if job.nodes == 1 else rendezvous
    return f"torchrun {where} --nproc-per-node {job.ranks_per_node} {program}"


# --- Whose modules ---


class Source(ABC):
    """The parts of a script that depend on whose modules are trained.

    Attributes:
        on_meta: whether the model gets its weights only when it is sharded.
        made: the expression for a model, or for a stage of a pipeline.
        blocks: the expression for the list of the blocks of `model`.
        loss: the expression for the loss of a micro-batch of `x` and `y`; in a pipeline, of `output` and `y`.
        filled: the line that draws the weights of a model on meta.
    """

    on_meta: bool
    made: str
    blocks: str
    loss: str
    filled: str

    def __init__(self, job: Job) -> None:
        self.job, self.model, self.plan = job, job.estimate.model, job.estimate.plan

    @property
    def divides_logits(self) -> bool:
        """Whether each tensor rank has its columns of the logits alone."""
        return self.plan.tp > 1 and not self.model.computes_loss

    def imports(self) -> Iterator[str]:
        """Its own import lines."""
        yield from ()

    def definitions(self) -> Iterator[str]:
        """The functions and classes that make the model."""
        yield from ()

    def recomputed(self) -> Iterator[str]:
        """The lines that have blocks recomputed."""
        yield from ()

    def cut(self) -> Iterator[str]:
        """The lines of tensor parallelism."""
        yield from ()

    @abstractmethod
    def ends(self) -> tuple[str, str]:
        """The expressions for the modules before the blocks, and after them."""


@final
class HuggingFace(Source):
    """A decoder of transformers, which computes its own loss."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        pipeline, n = self.plan.pp > 1, self.model.n_blocks
        self.whole = "model.model" if pipeline else "model"
        self.on_meta = self.plan.fsdp and not ends_are_tied(self.model)  # `to_empty` would untie them
        self.made = "Stage(blocks, first, last)" if pipeline else "build_model()"
        self.blocks = (
            "list(model.base.layers)"
            if pipeline
            else f"next(list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == {n})"
        )
        self.loss = "output" if pipeline else "model(input_ids=x, labels=y).loss"
        self.filled = f"{self.whole}.init_weights()  # load your checkpoint here"

    def definitions(self) -> Iterator[str]:
        stored = self.plan.formats.stored.name
        dtype = "" if stored == "float32" else f", dtype=torch.{stored}"
        made = f"return AutoModelForCausalLM.from_config(config{dtype})"
        yield _function(
            "def build_model() -> nn.Module:", [*self._config(), "config.use_cache = False", made]
        )
        if self.plan.pp > 1:
            last_norm: str = getattr(self.model, "last_norm", HuggingFaceDecoder.last_norm)
            stage = STAGE.replace("CONTEXT", _autocast(self.job) or "nullcontext()")
            yield stage.replace("LAST_NORM", last_norm.rpartition(".")[2])

    def _config(self) -> Iterator[str]:
        if self.job.named is not None and self.job.named.endswith(".json"):
            yield f"config = AutoConfig.from_pretrained({self.job.named!r})"
            return
        values: dict[str, Any] = config_of(self.model)  # type: ignore[arg-type]
        kind = values.pop("model_type")
        sizes = [f"{n}={v!r}" for n, v in values.items() if n not in NO_SIZES and (n, v) != ("dropout", 0.0)]
        yield "# The planned sizes; what is left out is transformers' default."
        yield from _call(f"config = AutoConfig.for_model({kind!r}, ", sizes)

    def recomputed(self) -> Iterator[str]:
        if self.plan.recompute == "none":
            return
        arguments = '"use_reentrant": False'
        if self.plan.recompute == "selective":
            yield from _call("kept = [", [f"torch.ops.{name}.default" for name in KEPT], "]")
            arguments += ', "context_fn": partial(create_selective_checkpoint_contexts, kept)'
        yield f"{self.whole}.gradient_checkpointing_enable({{{arguments}}})"
        if self.plan.recompute_blocks is not None:
            yield f"for block in blocks[{self.plan.recompute_blocks}:]:"
            yield "    block.gradient_checkpointing = False"

    def cut(self) -> Iterator[str]:
        if self.plan.tp == 1:
            return
        yield f"plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size={self.plan.tp}))"
        if ends_are_tied(self.model):
            yield "for name in model.all_tied_weights_keys:  # they are tied when they are divided"
            yield "    owner = model.get_submodule(name.rpartition('.')[0])"
            yield "    owner.weight = nn.Parameter(torch.empty_like(owner.weight))"
        yield 'apply_tensor_parallelism(model, mesh["tp"], plan)'
        yield from _when(ends_are_tied(self.model), "model.tie_weights()")

    def ends(self) -> tuple[str, str]:
        before, after = (
            f"[{', '.join(f'{self.whole}.{name}' for name in names)}]" for names in end_modules(self.model)
        )
        if self.plan.pp > 1:
            return f"*([{before}] if model.first else [])", f"*([{after}] if model.last else [])"
        return before, after


STAGE: Final = '''
class Stage(nn.Module):
    """Some of the blocks; the first stage has the embedding, the last one the head and the loss."""

    def __init__(self, blocks: Iterable[int], first: bool, last: bool) -> None:
        super().__init__()
        self.model, self.first, self.last = build_model(), first, last
        self.base = self.model.base_model
        self.base.layers = nn.ModuleList([self.base.layers[i] for i in blocks])
        if kinds := getattr(self.model.config, "layer_types", None):
            self.model.config.layer_types = [kinds[i] for i in blocks]
        if not first:
            self.base.set_input_embeddings(nn.Identity())
        if not last:
            self.base.LAST_NORM = nn.Identity()
            self.model.set_output_embeddings(nn.Identity())

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        named = {"input_ids" if self.first else "inputs_embeds": x}
        with CONTEXT:
            if self.last:
                return self.model(**named, labels=labels).loss
            return self.base(**named).last_hidden_state
'''.strip()


@final
class Own(Source):
    """memplan's own modules, which `validate` measures."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        chunks = f", chunks={self.plan.loss_chunks}" if self.plan.loss_chunks > 1 else ""
        self.on_meta, self.filled = False, ""
        self.made = "build_model(blocks, first, last)" if self.plan.pp > 1 else "build_model()"
        self.blocks = "list(model.blocks.values())"
        self.loss = f"token_loss({'output' if self.plan.pp > 1 else 'model(x)'}, y{chunks})"

    def imports(self) -> Iterator[str]:
        yield f"from {type(self.model).__module__} import {type(self.model).__name__}"

    def definitions(self) -> Iterator[str]:
        plan, n = self.plan, self.model.n_blocks
        values = {each: getattr(self.model, each.name) for each in fields(self.model)}
        sizes = [f"{each.name}={value!r}" for each, value in values.items() if value != each.default]
        stored = plan.formats.stored.name
        yield _function(
            f"def build_model(blocks=range({n}), first=True, last=True) -> nn.Module:",
            [
                "# memplan's own module, whose bytes were planned: replace it by yours, and the names below.",
                *_call(f"sizes = {type(self.model).__name__}(", sizes),
                f"model = Transformer(sizes, blocks, seq_len={plan.seq_len}, first=first, last=last)",
                *_when(_autocast(self.job), f"model.autocast_dtype = torch.{plan.formats.compute.name}"),
                *_when(stored != "float32", "for weight in model.parameters():"),
                *_when(stored != "float32", f"    weight.data = weight.data.to(torch.{stored})"),
                "return model",
            ],
        )

    def recomputed(self) -> Iterator[str]:
        if self.plan.recompute != "none":
            yield f"model.recompute = {self.plan.recompute!r}"
            yield f"model.recompute_blocks = {self.plan.recompute_blocks}"

    def cut(self) -> Iterator[str]:
        plan, sp, gpt = self.plan, self.plan.sequence_parallel, self.model.family == "gpt"
        if plan.tp == 1:
            return
        norms = ("attention_norm", "ffn_norm") if sp else ()
        columns = ["attention.wq", "attention.wk", "attention.wv", "feed_forward.w1"]
        columns += [] if gpt else ["feed_forward.w3"]
        logits = "input_layouts=between, output_layouts=Shard(-1), use_local_output=False"
        yield f'tp, between = mesh["tp"], {"Shard(1)" if sp else "Replicate()"}'
        yield f"rotary = ({'' if gpt else 'None,'})  # the rotary angles, which every rank has whole"
        yield "if model.embedding is not None:"
        yield '    styles = {"tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between)}'
        if sp and gpt:
            yield '    styles["positions"] = SequenceParallel(sequence_dim=0, use_local_output=True)'
            yield f"    model.embedding.sequence_shard = (tp.get_local_rank(), {plan.tp})"
        yield "    parallelize_module(model.embedding, tp, styles)"
        yield "for block in blocks:"
        yield "    styles = {}"
        yield '    styles["attention"] = PrepareModuleInput('
        yield "        input_layouts=(between, *rotary), desired_input_layouts=(Replicate(), *rotary)"
        yield "    )"
        yield '    styles["feed_forward"] = PrepareModuleInput('
        yield "        input_layouts=(between,), desired_input_layouts=(Replicate(),)"
        yield "    )"
        yield from indented([f"for name in {columns}:", "    styles[name] = ColwiseParallel()"])
        yield '    for name in ["attention.wo", "feed_forward.w2"]:'
        yield "        styles[name] = RowwiseParallel(output_layouts=between)"
        yield from [f'    styles["{name}"] = SequenceParallel()' for name in norms]
        yield "    parallelize_module(block, tp, styles)"
        yield "if model.head is not None:"
        yield f'    styles = {{"output": ColwiseParallel({logits})}}'
        yield from _when(sp, '    styles["norm"] = SequenceParallel()')
        yield "    parallelize_module(model.head, tp, styles)"
        yield from _when(ends_are_tied(self.model), "model.tie()")

    def ends(self) -> tuple[str, str]:
        before, after = "[model.embedding]", "[model.head]"
        if self.plan.pp > 1:
            return (
                f"*({before} if model.embedding is not None else [])",
                f"*({after} if model.head is not None else [])",
            )
        return before[1:-1], after[1:-1]


SOURCES: Final[Mapping[str, type[Source]]] = {"huggingface": HuggingFace, "reference": Own, "torchtitan": Own}
"""Whose modules a script trains, by implementation."""


# --- The script's parts ---


def _head(job: Job) -> str:
    """The script's docstring."""
    plan = job.estimate.plan
    lines = [
        f'"""{job.headline}',
        "",
        f"A step has {plan.global_batch} sequences of {plan.seq_len} tokens. Start it on each node:",
        "",
        f"    {torchrun_command(job, Torchrun.file)}",
    ]
    if job.command is not None:
        lines += ["", *indented([job.command])]
    return "\n".join([*lines, '"""'])


def _imports(source: Source, body: str) -> Iterator[str]:
    """The import lines of the names that occur in the script's text."""
    used = {
        module: [name for name in names if re.search(rf"\b{name}\b", body)]
        for module, names in MODULES.items()
    }
    lines = [f"from {module} import {', '.join(names)}" for module, names in used.items() if names]
    standard = [line for line in lines if re.match(r"from (collections|contextlib|functools)", line)]
    yield ""
    if "os." in body:
        yield "import os"
    yield from standard
    yield ""
    yield "import torch"
    if "dist." in body:
        yield "import torch.distributed as dist"
    yield from [line for line in lines if line not in standard]
    yield from source.imports()


def _definitions(job: Job) -> Iterator[str]:
    """The functions for data and, with several meshes, for lists of tensors."""
    plan, vocabulary = job.estimate.plan, job.estimate.model.vocab_size  # type: ignore[attr-defined]
    n, labels = plan.n_micro_batches * plan.micro_batch, "x.clone()"
    if job.estimate.model.implementation != "huggingface":
        labels = "x.roll(-1, dims=1)"
    yield _function(
        "def batch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:",
        [
            '"""The token ids and the labels of this rank\'s part of a step: put your data here."""',
            f"x = torch.randint({vocabulary}, ({n}, {plan.seq_len}), device=device)",
            f"return x, {labels}",
        ],
    )
    if _several_meshes(plan):
        yield BY_MESH


BY_MESH: Final = '''
def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors that operations on lists take together: DTensors of one mesh, or plain tensors."""
    groups: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())
'''.strip()


def _several_meshes(plan: Plan) -> bool:
    """Whether the weights of a rank are divided in several ways."""
    return plan.tp > 1


def _autocast(job: Job) -> str:
    """The context of the plan's mixed precision where no wrapper casts; empty: none."""
    plan = job.estimate.plan
    device, dtype = job.estimate.device.type, plan.formats.compute.name
    return f'torch.autocast("{device}", torch.{dtype})' if plan.autocasts else ""


def _divided(job: Job, source: Source) -> str:
    """The function that divides the model over the ranks."""
    plan = job.estimate.plan
    options = plan_dict(plan)
    lines = ['"""The model as the plan divides it."""', f"blocks = {source.blocks}"]
    lines += [*source.recomputed(), *source.cut()]
    if plan.fsdp:
        lines += _sharded(plan, source, options)
    device = '"cpu"' if plan.offload else "device"
    if source.on_meta:
        lines += [f"model.to_empty(device={device})", source.filled]
    elif not plan.fsdp:
        lines += ["model.to(device)"]
    if plan.offload and job.estimate.device.type != "cpu":
        lines += [
            "for module in model.modules():",
            "    for name, buffer in module.named_buffers(recurse=False):",
        ]
        lines += ["        setattr(module, name, buffer.to(device))"]
    if plan.ddp:
        lines += _replicated(options)
    used = [line for line in lines if re.search(r"\bblocks\b", line)]
    lines = [line for line in lines if len(used) > 1 or line not in used]
    return _function(
        "def divided(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> nn.Module:",
        [*lines, "return model"],
    )


def _sharded(plan: Plan, source: Source, options: Mapping[str, Any]) -> Iterator[str]:
    """The lines of FSDP2: units from the inside out, the root last with what they leave over."""
    formats = plan.formats
    arguments = ['mesh=mesh["dp_replicate", "dp"]' if plan.dp_replicate > 1 else 'mesh=mesh["dp"]']
    if plan.zero == 2:
        arguments += ["reshard_after_forward=False"]
    if not formats.gather == formats.reduce == formats.stored:
        casts = f"param_dtype=torch.{formats.gather.name}, reduce_dtype=torch.{formats.reduce.name}"
        arguments += [f"mp_policy=MixedPrecisionPolicy({casts})"]
    if plan.offload:
        arguments += ['offload_policy=CPUOffloadPolicy(pin_memory=device.type != "cpu")']
    units, n = [], options["fsdp_blocks"]
    before, after = source.ends()
    ends = options["fsdp_units"] == "block+ends"
    if ends:
        units += [before]
    if options["fsdp_units"] != "model":
        units += ["*blocks" if n == 1 else f"*(blocks[i : i + {n}] for i in range(0, len(blocks), {n}))"]
    if ends:
        units += [after]
    yield from _call("sharded = dict(", arguments)
    yield f"for unit in [{', '.join([*units, 'model'])}]:"
    yield "    fully_shard(unit, **sharded)"


def _replicated(options: Mapping[str, Any]) -> Iterator[str]:
    """The lines of DistributedDataParallel."""
    arguments = ["model", 'device_mesh=mesh["dp"]']
    if options["bucket_cap_bytes"] is not None:
        arguments += [f"bucket_cap_mb={options['bucket_cap_bytes'] / MiB!r}"]
    arguments += [f"{name}=True" for name in ("gradient_as_bucket_view", "static_graph") if options[name]]
    yield from _call("model = DistributedDataParallel(", arguments)
    match options["ddp_comm_hook"]:
        case "fp16" | "bf16" as narrow:
            yield f'model.register_comm_hook(mesh.get_group("dp"), {narrow}_compress_hook)'
        case "powersgd":
            yield 'state = PowerSGDState(mesh.get_group("dp"), start_powerSGD_iter=2)'
            yield "model.register_comm_hook(state, powerSGD_hook)"


def _prepared(job: Job, source: Source) -> str:
    """The function that sets up a rank, and returns its step."""
    plan, kind = job.estimate.plan, job.estimate.device.type
    lines = ['"""Forward, backward and update of one step, on this rank."""']
    lines += [*_started(plan, kind), *_models(plan, source), *_optimizer(plan), *_scaler(plan)]
    step = [*(_pipelined(job, source) if plan.pp > 1 else _accumulated(job, source)), *_update(plan)]
    if plan.pp > 1:
        lines += _stages(job, source)
    lines += ["", "def step() -> float:", *indented(step), "    return total", "", "return step"]
    return _function("def prepared() -> Callable[[], float]:", lines)


def _started(plan: Plan, kind: str) -> Iterator[str]:
    """The lines that start the process group."""
    axes = {axis: plan.mesh.size(axis) for axis in plan.mesh.divided}
    if kind == "cpu":
        yield 'device = torch.device("cpu")'
    else:
        yield f'device = torch.device("{kind}", int(os.environ["LOCAL_RANK"]))'
        yield f"torch.{kind}.set_device(device)"
    if not axes:
        yield "mesh = None"
        return
    yield f'dist.init_process_group("{"gloo" if kind == "cpu" else "nccl"}")'
    names = ", ".join(f'"{axis}"' for axis in axes)
    sizes = ", ".join(map(str, axes.values()))
    comma = "," if len(axes) == 1 else ""
    yield f'mesh = init_device_mesh("{kind}", ({sizes}{comma}), mesh_dim_names=({names}{comma}))'


def _models(plan: Plan, source: Source) -> Iterator[str]:
    """The lines that make this rank's model, or its stages."""
    if plan.pp == 1:
        if source.on_meta:
            yield 'with torch.device("meta"):'
            yield f"    model = {source.made}"
            yield "model = divided(model, mesh, device)"
        else:
            yield f"model = divided({source.made}, mesh, device)"
        yield "weights = list(model.parameters())"
        return
    layers = [stage_layers(source.model.n_blocks, plan, stage) for stage in range(plan.n_stages)]
    yield from _call("blocks_of_stage = [", [repr(blocks) for blocks in layers], "]")
    yield f"stages_of_rank = {[list(plan.stages_of(rank)) for rank in range(plan.pp)]}"
    yield "models = {}"
    yield 'for i in stages_of_rank[mesh["pp"].get_local_rank()]:'
    made = source.made.replace("blocks, first, last", f"blocks_of_stage[i], i == 0, i == {plan.n_stages - 1}")
    if source.on_meta:
        yield '    with torch.device("meta"):'
        yield f"        model = {made}"
        yield "    models[i] = divided(model, mesh, device)"
    else:
        yield f"    models[i] = divided({made}, mesh, device)"
    yield "weights = [weight for model in models.values() for weight in model.parameters()]"


def _optimizer(plan: Plan) -> Iterator[str]:
    """The lines of the optimizer."""
    kind, chosen = f"torch.optim.{OPTIMIZERS[plan.optimizer]}", plan_dict(plan)["optimizer_impl"]
    arguments = ["lr=1e-4", *_when(plan.optimizer in MOMENTUM, MOMENTUM.get(plan.optimizer, ""))]
    arguments += _when(chosen in IMPLEMENTATIONS, IMPLEMENTATIONS.get(chosen, ""))
    if plan.zero == 1:
        group = 'process_group=mesh.get_group("dp")'
        first = ["weights", f"optimizer_class={kind}", group]
        yield from _call("optimizer = ZeroRedundancyOptimizer(", [*first, *arguments])
    elif _several_meshes(plan) and chosen != "for-loop":
        yield from _call(
            f"optimizer = {kind}(", ['[{"params": group} for group in by_mesh(weights)]', *arguments]
        )
    else:
        yield from _call(f"optimizer = {kind}(", ["weights", *arguments])


def _scaler(plan: Plan) -> Iterator[str]:
    """The line of the loss scaler."""
    if plan.formats.loss_scaled:
        shared = plan.pp > 1 or (plan.tp > 1 and not plan.fsdp)
        yield f"scaler = {'ShardedGradScaler' if shared else 'GradScaler'}(device.type)"


def _accumulated(job: Job, source: Source) -> Iterator[str]:
    """The lines of forward and backward passes of micro-batches, one after the other."""
    plan = job.estimate.plan
    n = plan.n_micro_batches
    contexts, before = [], []
    if plan.ddp and n > 1:
        contexts += [f"model.no_sync() if i < {n - 1} else nullcontext()"]
    elif plan.fsdp and n > 1 and plan_dict(plan)["no_sync"]:
        before += [f"model.set_requires_gradient_sync(i == {n - 1})"]
    is_counted = bool(contexts or before)
    if source.divides_logits:
        contexts += ["loss_parallel()"]
    share = f" / {n}" if n > 1 else ""
    loss = [f"loss = {source.loss}{share}"]
    if source.model.computes_loss and (context := _autocast(job)):
        loss = [f"with {context}:", *indented(loss)]
    backward = "scaler.scale(loss).backward()" if plan.formats.loss_scaled else "loss.backward()"
    body = [*loss, backward]
    if contexts:
        body = [f"with {', '.join(contexts)}:", *indented(body)]
    index = "i, (x, y)" if is_counted else "x, y"
    pairs = f"zip(inputs.split({plan.micro_batch}), labels.split({plan.micro_batch}), strict=True)"
    yield "inputs, labels = batch(device)"
    yield "total = 0.0"
    yield f"for {index} in {f'enumerate({pairs})' if is_counted else pairs}:"
    yield from indented([*before, *body, "total += float(loss.detach())", "del loss"])


def _stages(job: Job, source: Source) -> Iterator[str]:
    """The lines of the pipeline's stages and its schedule."""
    plan = job.estimate.plan
    n, last = plan.n_micro_batches, plan.n_stages - 1
    compute = plan.formats.compute.name
    hidden = plan.formats.stored.name if plan.mixed and not plan.fsdp else compute
    width, between = source.model.d_model, plan.seq_len // (plan.tp if plan.sequence_parallel else 1)
    of_loss = source.model.computes_loss
    vocabulary = source.model.vocab_size  # type: ignore[attr-defined]
    shape = "()" if of_loss else f"({plan.micro_batch}, {plan.seq_len}, {vocabulary})"
    output = f'torch.empty({shape}, dtype=torch.{"float32" if of_loss else compute}, device="meta")'
    if source.divides_logits:
        output = f'distribute_tensor({output}, mesh["tp"], [Shard(-1)], src_data_rank=None)'
    yield ""
    yield f'tokens = torch.empty({plan.micro_batch}, {plan.seq_len}, dtype=torch.int64, device="meta")'
    yield from _call(
        "hidden = torch.empty(",
        [
            f"({plan.micro_batch}, {between}, {width})",
            f"dtype=torch.{hidden}",
            'device="meta"',
            "requires_grad=True",
        ],
    )
    yield f"output = {output}.requires_grad_()"
    yield "stages = []"
    yield "for i, model in models.items():"
    yield '    ends = {"input_args": hidden if i else tokens}'
    yield f'    ends["output_args"] = output if i == {last} else hidden'
    yield '    ends["group"] = mesh.get_group("pp")'
    if source.divides_logits:
        yield f"    if i == {last}:  # the logits are divided"
        yield '        ends["input_grads"] = torch.empty_like(hidden)'
        yield '        ends["output_grads"] = torch.empty_like(output)'
    yield f"    stages.append(PipelineStage(model, i, {plan.n_stages}, device, **ends))"
    share = f"{source.loss} / {n}" if n > 1 else source.loss
    yield ""
    yield "def loss_of(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:"
    yield f"    return {f'scaler.scale({share})' if plan.formats.loss_scaled else share}"
    schedule = plan.pipeline_schedule
    kind = schedule.runs_as.partition(":")[2]
    own = "stages[0]" if plan.virtual_stages == 1 and schedule.stages_per_rank == 1 else "stages"
    yield ""
    yield f"schedule = {kind}({own}, {n}, loss_fn=loss_of, scale_grads=False)"


def _pipelined(job: Job, source: Source) -> Iterator[str]:
    """The lines of a step of a pipeline."""
    plan = job.estimate.plan
    labels = ", labels=labels" if source.model.computes_loss else ""
    context = "with loss_parallel():" if source.divides_logits else ""
    lines = [
        "inputs, labels = batch(device)",
        "arguments = (inputs,) if 0 in models else ()",
        "del inputs",
        "losses: list[torch.Tensor] = []",
    ]
    run = [
        f"if {plan.n_stages - 1} in models:",
        f"    schedule.step(*arguments, target=labels, losses=losses, return_outputs=False{labels})",
        "else:",
        "    schedule.step(*arguments, return_outputs=False)",
    ]
    yield from lines
    yield from [context, *indented(run)] if context else run
    yield "total = sum(float(loss.detach()) for loss in losses)"


def _update(plan: Plan) -> Iterator[str]:
    """The lines of the optimizer's part of a step."""
    options, scaled, most = plan_dict(plan), plan.formats.loss_scaled, plan.clip_grad_norm
    foreach = ", foreach=False" if options["optimizer_impl"] == "for-loop" else ""
    if scaled:
        yield "scaler.unscale_(optimizer)"
    if most is not None and not _several_meshes(plan) and plan.pp == 1:
        yield f"clip_grad_norm_(weights, {most!r}{foreach})"
    elif most is not None:
        with_grad = "[weight for weight in weights if weight.grad is not None]"
        group = "by_mesh(updated)" if _several_meshes(plan) else "[updated]"
        yield f"updated = {with_grad}"
        yield f"norms = [get_total_norm([weight.grad for weight in group]{foreach}) for group in {group}]"
        yield "norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]"
        yield "norm = torch.linalg.vector_norm(torch.stack(norms))"
        if plan.pp > 1:
            yield "norm **= 2"
            yield 'dist.all_reduce(norm, group=mesh.get_group("pp"))'
            yield "norm **= 0.5"
        yield f"for group in {group}:"
        yield f"    clip_grads_with_norm_(group, {most!r}, norm{foreach})"
    yield "scaler.step(optimizer)" if scaled else "optimizer.step()"
    if scaled:
        yield "scaler.update()"
    yield "optimizer.zero_grad()" if options["set_to_none"] else "optimizer.zero_grad(set_to_none=False)"


def _main(plan: Plan) -> str:
    lines = [
        "step = prepared()",
        "for i in range(10):",
        '    print(f"step {i}: loss {step():.4f}", flush=True)',
    ]
    if plan.world_size > 1:
        lines += ["dist.destroy_process_group()"]
    return _function('if __name__ == "__main__":', lines)


# --- Lines ---


def indented(lines: Iterable[str]) -> list[str]:
    """Lines one level deeper."""
    return [indent(line, "    ") for line in lines]


def _function(first: str, lines: Iterable[str]) -> str:
    return "\n".join([first, *indented(lines)])


def _when(condition: object, line: str) -> list[str]:
    return [line] if condition else []


def _call(first: str, arguments: Iterable[str], last: str = ")") -> list[str]:
    """A call on one line, or its arguments below it if they are too many."""
    arguments = list(arguments)
    whole = f"{first}{', '.join(arguments)}{last}"
    if len(whole) <= LINE - 8:
        return [whole]
    return [first.rstrip(), *indented(wrap(f"{', '.join(arguments)},", LINE - 12)), last]
