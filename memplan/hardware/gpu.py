"""One GPU, in bytes and bytes per second, and the table of GPUs with a known datasheet."""

from dataclasses import dataclass
from functools import cache
from typing import Final, final, get_args

from memplan.checks import LARGEST_BYTES, checked_choice, checked_count, checked_positive
from memplan.device import CPU, Device, DeviceType
from memplan.errors import InvalidValue, shown_value, unknown_name
from memplan.files import toml_table
from memplan.names import words
from memplan.units import GB, TB, TFLOP, GiB

DTYPES: Final = ("fp32", "tf32", "fp16", "bf16", "fp8")
"""The number formats that peak rates are stated for."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection of one GPU: `bytes_per_s` in one direction, None where no rate is known.

    Raises:
        InvalidValue: a name that is no text, or a rate that is no finite number above 0.
    """

    name: str
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        _check_name("a link's name", self.name)
        if self.bytes_per_s is not None:
            object.__setattr__(self, "bytes_per_s", checked_positive("bytes_per_s", self.bytes_per_s))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device.

    `kind` is torch's device type: "cuda" (NVIDIA, and AMD under ROCm) or "cpu". `memory_bytes` is the
    nominal capacity, `usable_bytes` what PyTorch sees of it; both None: no limit. `capability` is CUDA's
    compute capability, None for other makers' GPUs. The `*_flops_per_s` are peak dense rates; None: the
    format is not supported, or no rate is known. `board_power_w` is the most that the board draws.
    `link` joins a node's GPUs, `host_link` it and its host: a name of `memplan/time/host_links.toml`.

    Raises:
        InvalidValue, UnknownName: bytes that are no positive integers, rates that are no finite numbers above
            0, another kind, or a link that is no `Link`.
    """

    name: str
    title: str = ""
    kind: str = "cuda"
    memory_bytes: int | None = None
    usable_bytes: int | None = None
    capability: tuple[int, int] | None = None
    multiprocessors: int = 0
    memory_bytes_per_s: float | None = None
    fp32_flops_per_s: float | None = None
    tf32_flops_per_s: float | None = None
    fp16_flops_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    fp8_flops_per_s: float | None = None
    board_power_w: float | None = None
    link: Link
    host_link: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        _check_name("a GPU's name", self.name)
        checked_choice("kind", self.kind, get_args(DeviceType))
        for field in ("memory_bytes", "usable_bytes"):
            if (n_bytes := getattr(self, field)) is not None:
                object.__setattr__(self, field, checked_count(field, n_bytes, most=LARGEST_BYTES))
        dtype_rates = (f"{dtype}_flops_per_s" for dtype in DTYPES)
        for field in ("memory_bytes_per_s", "board_power_w", *dtype_rates):
            if (rate := getattr(self, field)) is not None:
                object.__setattr__(self, field, checked_positive(field, rate))
        check_link("link", self.link)
        if self.capability is not None:
            object.__setattr__(self, "capability", _checked_capability(self.capability))
        checked_count("multiprocessors", self.multiprocessors, least=0)
        for field in ("title", "source", "host_link"):
            if not isinstance(text := getattr(self, field), str):
                raise InvalidValue(f"{field}={shown_value(text)} is not allowed; use a text.")

    @property
    def device(self) -> Device:
        """The device that its kernels run on.

        >>> gpu("a100-80-sxm").device
        Device(type='cuda', capability=(8, 0), multiprocessors=108, runs_kernels=True, name='a100-80-sxm')
        """
        if self.kind == "cpu":
            return CPU
        return Device("cuda", self.capability, self.multiprocessors, name=self.name)


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidValue(f"{what} is {shown_value(name)}; use a text that is not empty.")


def _checked_capability(value: object) -> tuple[int, int]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidValue(f"capability={shown_value(value)} is not allowed; use two numbers, as (9, 0).")
    major, minor = (checked_count("capability", part, least=0, most=99) for part in value)
    return major, minor


def check_link(name: str, link: object) -> None:
    """Raise unless a value is a `Link`.

    Raises:
        InvalidValue: for anything else.
    """
    if not isinstance(link, Link):
        raise InvalidValue(
            f"{name}={shown_value(link)} is not a link; use memplan.Link(name=..., bytes_per_s=...)."
        )


GPUS: Final = "hardware/gpus.toml"
"""The table of GPUs."""


def gpu_names() -> tuple[str, ...]:
    """The known names, in the table's order.

    >>> gpu_names()[:2]
    ('v100-32', 't4')
    """
    return tuple(toml_table(GPUS))


def gpu(name: str) -> Gpu:
    """The GPU of that name, or of one of its other names (`also` in the table), in any case.

    >>> g = gpu("h100-sxm")
    >>> g.memory_bytes == 80 * GiB, g.link.bytes_per_s / 1e9
    (True, 450.0)
    >>> gpu("RTX4090").name, gpu("A100").name
    ('rtx-4090', 'a100-80-sxm')

    Raises:
        UnknownName: with the nearest name.
    """
    known = None
    if isinstance(name, str):
        known = name if name in toml_table(GPUS) else _by_words().get(words(name))
    if known is None:
        names = gpu_names()
        raise unknown_name("GPU", name, names, f"`memplan gpus` lists the {len(names)} that are known.")
    return _gpu(known)


@cache
def _by_words() -> dict[tuple[str, ...], str]:
    """The table's names by the words of each and of its other names."""
    return {
        words(each): name
        for name, entry in toml_table(GPUS).items()
        for each in (name, *entry.get("also", ()))
    }


@cache
def _gpu(name: str) -> Gpu:
    entry = toml_table(GPUS)[name]
    major, _, minor = entry.get("compute_capability", "").partition(".")
    return Gpu(
        name=name,
        title=entry["title"],
        kind=entry["kind"],
        memory_bytes=_whole(entry.get("memory_gib"), GiB),
        usable_bytes=_whole(entry.get("usable_gib"), GiB),
        capability=(int(major), int(minor)) if major else None,
        multiprocessors=entry.get("multiprocessors", 0),
        memory_bytes_per_s=_scaled(entry.get("memory_tb_per_s"), TB),
        **{f"{dtype}_flops_per_s": _scaled(entry.get(f"{dtype}_tflops"), TFLOP) for dtype in DTYPES},
        board_power_w=entry.get("board_power_w"),
        link=Link(name=entry["link"], bytes_per_s=_scaled(entry.get("link_gb_per_s"), GB / 2)),
        host_link=entry.get("host_link", entry["link"]),
        source=entry["source"],
    )


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _whole(value: float | None, unit: int) -> int | None:
    return None if value is None else int(value * unit)
