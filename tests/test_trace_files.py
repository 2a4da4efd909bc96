"""Files of traces: what they allocate adds up, and reading one takes time by its size only."""

import json
import time
from copy import deepcopy

import pytest

import memplan
from memplan.errors import InvalidValue
from memplan.models.trace_from_json import MOST_DIMS, model_of_text
from validate.cases import trace_file

with open(trace_file("hf-gpt2-untied"), encoding="utf-8") as file:
    TRACE = json.load(file)


def changed(change):
    """The text of a trace in which the first recording's parts are changed."""
    data = deepcopy(TRACE)
    recording = data["recordings"][0]
    change(recording["parts"], len(recording["buffers"]))
    return json.dumps(data)


def estimated(text, pp=1):
    model = model_of_text(text)
    return memplan.estimate(model, device="cpu", dp=1, pp=pp, global_batch=2, precision="fp32")


def test_the_trace_itself_is_read_and_estimated():
    assert estimated(changed(lambda parts, n: None)).peak.total_bytes > 0


def after_the_free(parts):
    """The part and the place after the first free of a part that frees."""
    part = next(part for part, events in parts.items() if any(isinstance(e, int) and e < 0 for e in events))
    return part, next(i for i, e in enumerate(parts[part]) if isinstance(e, int) and e < 0)


def frees_twice(parts, n):
    part, i = after_the_free(parts)
    parts[part].insert(i, parts[part][i])


def frees_too_early(parts, n):
    event = next(e for e in parts["head"] if isinstance(e, int) and e >= 0)
    parts["inputs"].insert(0, -1 - event)


def frees_never(parts, n):
    part, i = after_the_free(parts)
    del parts[part][i]


def frees_in_every_block(parts, n):
    parts["embed"].append(0)
    parts["block"].append(-1)


def adds_to_nothing(parts, n):
    parts["inputs"].append([n - 1])


def has_no_gradient(parts, n):
    parts["embed_backward"] = [
        e for e in parts["embed_backward"] if not (isinstance(e, list) and len(e) == 2)
    ]


def kernel_without_results(parts, n):
    parts["head"].append(["sum", 1, [1, 1, 0], "float32"])


@pytest.mark.parametrize(
    "change, complaint",
    [
        (frees_twice, "which nothing has allocated"),
        (frees_too_early, "inputs frees .* which nothing has allocated"),
        (frees_never, "nothing frees .* and it is no gradient"),
        (frees_in_every_block, "block frees .* which nothing has allocated"),
        (adds_to_nothing, "inputs frees .* which nothing has allocated"),
        (has_no_gradient, "nothing frees|is trained and has no gradient"),
        (kernel_without_results, "head has a kernel without its results"),
    ],
)
def test_a_trace_that_does_not_add_up_is_refused(change, complaint):
    with pytest.raises(InvalidValue, match=f"{complaint}.*trace the module again"):
        model_of_text(changed(change))


def test_a_cut_that_frees_what_its_part_does_not_free_is_refused():
    data = deepcopy(TRACE)
    for place, part in ((0, data["recordings"][0]["cut"][1]), (6, "end")):
        changed_cut = deepcopy(data)
        changed_cut["recordings"][0]["cut"][place] = 3
        with pytest.raises(InvalidValue, match=f"cut says that {part} frees .*, which it does not"):
            model_of_text(json.dumps(changed_cut))


def test_a_boundary_that_no_block_makes_is_refused():
    data = deepcopy(TRACE)
    data["recordings"][0]["boundary"][0] = 1
    with pytest.raises(InvalidValue, match=r"no block allocates .*, the boundary of blocks"):
        model_of_text(json.dumps(data))


def many_frozen(data, n):
    data["frozen"] = [f"a{i}" for i in range(n)]
    data["module_buffers"] += [[f"b{i}", [1], "float32"] for i in range(n)]


def many_buffers(data, n):
    data["recordings"][0]["buffers"] += [0] * n


def many_events(data, n):
    data["recordings"][0]["parts"]["head"][:0] = [0, -1] * n


def many_alive(data, n):
    recording = data["recordings"][0]
    first = len(recording["buffers"])
    recording["buffers"] += [0] * n
    own = range(first, first + n)
    recording["parts"]["embed"][:0] = [*own, *(-1 - i for i in reversed(own))]


@pytest.mark.parametrize("change", [many_frozen, many_buffers, many_events, many_alive])
@pytest.mark.parametrize("pp", [1, 2])
def test_time_grows_with_the_size_of_a_trace(change, pp):
    took_s = []
    for n in (2_500, 10_000):
        data = deepcopy(TRACE)
        change(data, n)
        text = json.dumps(data)
        began_s = time.process_time()
        estimated(text, pp)
        took_s.append(time.process_time() - began_s)
    assert took_s[1] < 1.0 + 6 * took_s[0]


def test_more_values_and_dims_than_a_module_has_are_refused_at_once():
    began_s = time.process_time()
    with pytest.raises(InvalidValue, match=r"holds \d+ values, and a trace has 3000000 at most"):
        model_of_text(f'{{"a":[{"0," * 12_000_000}0]}}')
    assert time.process_time() - began_s < 0.5
    data = deepcopy(TRACE)
    data["buffers"][0][1] = [1] * (MOST_DIMS + 1)
    with pytest.raises(InvalidValue, match="a shape of 65 dims is not allowed in a trace"):
        model_of_text(json.dumps(data))
