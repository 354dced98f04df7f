"""What a result of `ops.py` amounts to: the goals, the tables, the plot.

All of it is made from the document that `ops.py --json` writes, so that `--from` can show a run
again, on a machine without a GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import method
from method import Failure, Goal
from ops_cells import COPY, DYNAMIC, EXACT, IN_PLACE, OURS, TUNED

__all__ = ["goals", "plot", "report"]

_LONG_ROWS = 2048
"""With fewer rows a norm's time is that of a launch: its bandwidth to a copy's means nothing."""


# --- goals and tables ---


class _Bandwidth(Goal):
    """A goal whose figure comes close to its bound: it is shown with two decimals."""

    def __str__(self) -> str:
        if self.value is None:
            return super().__str__()
        verdict = "met" if self.met else "missed"
        bound = f"goal: at least {self.bound:g}{self.unit}: {verdict}"
        return f"{self.name}: {self.value:.2f}{self.unit} ({bound})"


def _peers_of(cell: Mapping[str, Any]) -> list[str]:
    return [name for name in cell["us"] if name not in OURS and name != COPY]


def _fastest(cell: Mapping[str, Any], figure: str = "us") -> tuple[str, float] | None:
    """The fastest peer of a cell, and its time."""
    found = [(cell["us"][name][figure], name) for name in _peers_of(cell)]
    return (min(found)[1], min(found)[0]) if found else None


def _to_peer(cell: Mapping[str, Any], figure: str = "us") -> float | None:
    """The time of our default kernel over that of the fastest peer."""
    peer = _fastest(cell, figure)
    return cell["us"][EXACT][figure] / peer[1] if peer and EXACT in cell["us"] else None


def _to_tuned(cell: Mapping[str, Any], figure: str = "us") -> float | None:
    if EXACT not in cell["us"] or TUNED not in cell["us"]:
        return None
    return cell["us"][EXACT][figure] / cell["us"][TUNED][figure]


def _bandwidth(cell: Mapping[str, Any], name: str) -> float | None:
    """TB/s, read and written."""
    if name not in cell["us"]:
        return None
    moved = 4 * cell["M"] * cell["N"] if name == COPY else cell["bytes"]
    return moved / cell["us"][name]["us"] / 1e6


def _of_copy(cell: Mapping[str, Any], best: float | None) -> float | None:
    """Our bandwidth over a copy's: of the same tensor for RMSNorm, which moves the same bytes; else
    over the best that a copy reached in the run. None where there are few rows.
    """
    if cell["M"] < _LONG_ROWS:
        return None
    ours = _bandwidth(cell, EXACT)
    copy = _bandwidth(cell, COPY) if cell["op"] == "rms_norm" else best
    return ours / copy if ours and copy else None


def _best_copy(document: Mapping[str, Any]) -> float | None:
    """The best copy bandwidth among the cells with the most rows: shorter copies end in L2."""
    norms = [cell for cell in document["cells"] if cell["op"] != "gemm"]
    rows = max((cell["M"] for cell in norms), default=0)
    found = [_bandwidth(cell, COPY) or 0.0 for cell in norms if cell["M"] == rows]
    return max(found, default=0.0) or None


def _of(cells: Iterable[Mapping[str, Any]], op: str) -> list[Mapping[str, Any]]:
    return [cell for cell in cells if cell["op"] == op]


def _worst(
    cells: Sequence[Mapping[str, Any]],
    value: Callable[[Mapping[str, Any]], float | None],
    choose: Callable[..., Any],
    bound: float,
) -> tuple[float | None, str]:
    """The worst value, and where, and in how many cells the bound is missed."""
    found = [(value(cell), f"M={cell['M']} N={cell['N']}") for cell in cells]
    known = [(one, where) for one, where in found if one is not None]
    if not known:
        return None, "no cell"
    worst, where = choose(known)
    beyond = sum(choose(one, bound) != bound for one, _ in known)
    missing = len(found) - len(known)
    counted = f"worst of {len(known)}" + (f", {missing} not known" if missing else "")
    return worst, f"{where}, {counted}, {beyond} missed"


def goals(document: Mapping[str, Any]) -> list[Goal]:
    """The goals of what was measured."""
    found: list[Goal] = []
    best = _best_copy(document)
    for op in ("rms_norm", "fused_add_rms_norm"):
        cells = _of(document["cells"], op)
        if not cells:
            continue
        for what, ratio, bound in (
            ("slower than the fastest peer", _to_peer, 1),
            ("default slower than tuned", _to_tuned, 3),
        ):
            for figure, how in (("us", "medians"), ("middle_mean", "means of the middle half")):
                worst, where = _worst(cells, partial(ratio, figure=figure), max, 1 + bound / 100)
                value = None if worst is None else 100 * (worst - 1)
                found.append(
                    Goal(f"{op}, {what} by ({how}; {where})", value, bound, least=False, unit=" %")
                )
        long = [cell for cell in cells if cell["M"] == 32768 and cell["N"] >= 4096]
        if long:
            worst, where = _worst(long, partial(_of_copy, best=best), min, 0.98)
            value = None if worst is None else 100 * worst
            found.append(
                _Bandwidth(
                    f"{op}, bandwidth to a copy's ({where})", value, 98, least=True, unit=" %"
                )
            )
    for cell in _of(document["cells"], "gemm"):
        ratio = _to_peer(cell)
        found.append(
            Goal(
                f"gemm {cell['M']}^3, speed to torch.matmul's",
                None if ratio is None else 100 / ratio,
                90 if cell["M"] >= 8192 else 80,
                least=True,
                unit=" %",
            )
        )
    if host := document.get("host_time"):
        ratios = _host_ratios(host)
        found.append(Goal("host time, ops.rms_norm to F.rms_norm", ratios[0], 1, least=False))
        found.append(Goal("host time, ops.RMSNorm to nn.RMSNorm", ratios[1], 1, least=False))
    return found


def _host_ratios(host: Mapping[str, Any]) -> list[float]:
    pairs = (("ops.rms_norm", "F.rms_norm"), ("ops.RMSNorm", "torch.nn.RMSNorm"))
    return [
        statistics.median(method.ratios(host["us"][ours]["samples"], host["us"][theirs]["samples"]))
        for ours, theirs in pairs
    ]


def _percent(value: float | None, *, over: bool = False) -> str:
    if value is None:
        return "–"
    return f"{100 * (value - 1):+.1f} %" if over else f"{100 * value:.1f} %"


def _columns(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """All variants of some cells: the copy, ours, the peers."""
    names = list(dict.fromkeys(name for cell in cells for name in cell["us"]))
    ours = [name for name in OURS if name in names]
    peers = [name for name in names if name not in ours and name != COPY]
    return [*([COPY] if COPY in names else []), *ours, *peers]


def report(document: Mapping[str, Any]) -> None:
    """Print tables, goals, and what was left out."""
    best = _best_copy(document)
    for op in ("rms_norm", "fused_add_rms_norm"):
        cells = _of(document["cells"], op)
        if not cells:
            continue
        columns = _columns(cells)
        rows = []
        for cell in cells:
            times = [
                f"{cell['us'][name]['us']:.2f}" if name in cell["us"] else "–" for name in columns
            ]
            bandwidths = [_bandwidth(cell, name) for name in (EXACT, COPY)]
            rows.append(
                [
                    str(cell["N"]),
                    str(cell["M"]),
                    *times,
                    _percent(_to_peer(cell), over=True),
                    _percent(_to_tuned(cell), over=True),
                    *(f"{one:.2f}" if one else "–" for one in bandwidths),
                    _percent(_of_copy(cell, best)),
                ]
            )
        print(f"{op}, bf16, GPU time in µs; TB/s read and written")
        print()
        tail = ["to peer", "to tuned", "TB/s", "copy TB/s", "of copy"]
        print(method.table(["N", "M", *columns, *tail], rows))
        print()
        print(method.table(["N", "M", "default", "fastest candidate"], _schedules(cells)))
        print()
    if cells := _of(document["cells"], "gemm"):
        columns = _columns(cells)
        rows = []
        for cell in cells:
            flops = 2 * cell["M"] * cell["N"] * cell["K"]
            speeds = [
                f"{flops / cell['us'][name]['us'] / 1e6:.1f}" if name in cell["us"] else "–"
                for name in columns
            ]
            ratio = _to_peer(cell)
            rows.append(
                [
                    f"{cell['M']}^3",
                    *speeds,
                    _percent(1 / ratio if ratio else None),
                    _percent(_to_tuned(cell), over=True),
                ]
            )
        print("gemm, bf16, TFLOP/s")
        print()
        print(method.table(["M=N=K", *columns, "to torch", "to tuned"], rows))
        print()
        print(method.table(["N", "M", "default", "fastest candidate"], _schedules(cells)))
        print()
    if host := document.get("host_time"):
        print(f"host time of one eager call, M=1 N={host['N']} bf16, in µs")
        print()
        shown = [
            [name, *(f"{found[figure]:.2f}" for figure in ("median", "min", "max"))]
            for name, found in host["us"].items()
        ]
        print(method.table(["call", "median", "min", "max"], shown))
        print()
    for name, reason in document["failures"].items():
        print(f"left out: {name}: {reason}")
    for cell in document["cells"]:
        for name, reason in cell["failures"].items():
            print(f"left out: {cell['op']} M={cell['M']} N={cell['N']}: {name}: {reason}")
    for text in document["unmeasured"]:
        print(f"not measured: {text}")
    for goal in goals(document):
        print(goal)


def _schedules(cells: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [
        [str(cell["N"]), str(cell["M"]), cell["default"], cell["tuned"] or "–"] for cell in cells
    ]


# --- plot ---

_LOOKS = {
    EXACT: ("#c1121f", "D", 46),
    TUNED: ("#ff8fa3", "D", 26),
    DYNAMIC: ("#7a0910", "P", 34),
    IN_PLACE: ("#e07b00", "D", 34),
    "torch": ("#555555", "s", 22),
    "Inductor": ("#1f77b4", "o", 26),
    "Triton": ("#2ca02c", "^", 28),
    "Triton, autotuned": ("#98c98a", "^", 22),
    "Liger": ("#17a2b8", "v", 28),
    "FlashInfer": ("#76b900", "<", 26),
    "FlashInfer, no PDL": ("#b5c99a", "<", 20),
    "quack": ("#8e5bd0", ">", 28),
}
_CEILING, _BASE = 1.6, 0.88
"""The scale of y: what is slower is drawn at the ceiling; the base gives way to what is faster."""


def plot(document: Mapping[str, Any], path: str) -> None:
    """Draw the norms: a panel an operator and M, time relative to the fastest peer over N.

    Args:
        document: What `measure` returns, or a file of `--json`.
        path: Where to; the suffix says the format.

    Raises:
        Failure: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as missing:
        raise Failure(
            f"--plot needs matplotlib, which is not installed ({missing}); `pip install matplotlib`"
        ) from missing
    norms = [cell for cell in document["cells"] if cell["op"] != "gemm" and _fastest(cell)]
    if not norms:
        raise Failure("there is nothing to draw: no norm was measured together with a peer")
    kinds = list(dict.fromkeys(cell["op"] for cell in norms))
    counts = sorted({cell["M"] for cell in norms})
    widths = sorted({cell["N"] for cell in norms})
    names = [name for name in _LOOKS if any(name in cell["us"] for cell in norms)]
    least = min(_relative(cell, name) for cell in norms for name in names if name in cell["us"])
    base = min(_BASE, least - 0.03)
    figure, axes = pyplot.subplots(
        len(kinds),
        len(counts),
        figsize=(1.2 + 3.3 * len(counts), 1.1 + 3.0 * len(kinds)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    handles: dict[str, Any] = {}
    for row, kind in enumerate(kinds):
        for column, count in enumerate(counts):
            panel = axes[row][column]
            panel.axhline(1, color="#333333", linewidth=0.9, zorder=1)
            panel.grid(axis="y", color="#e6e6e6", linewidth=0.6, zorder=0)
            for edge in range(len(widths) - 1):
                panel.axvline(edge + 0.5, color="#e6e6e6", linewidth=0.6, zorder=0)
            for cell in norms:
                if (cell["op"], cell["M"]) == (kind, count):
                    _draw(panel, cell, widths.index(cell["N"]), names, handles)
            panel.set_title(f"{kind}, M = {count}", fontsize=9.5)
            panel.set_xticks(range(len(widths)), [str(width) for width in widths], fontsize=8.5)
            panel.set_xlim(-0.5, len(widths) - 0.5)
            panel.set_ylim(base, _CEILING + 0.1)
            panel.tick_params(axis="y", labelsize=8.5)
            panel.tick_params(axis="x", length=0)
            for side in ("top", "right"):
                panel.spines[side].set_visible(False)
            if row == len(kinds) - 1:
                panel.set_xlabel("N", fontsize=9)
            if column == 0:
                panel.set_ylabel("time / fastest peer's", fontsize=9)
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        ncols=min(len(names), 6 if len(counts) > 2 else 3),
        fontsize=8.5,
        frameon=False,
    )
    device = (document.get("host") or {}).get("gpu") or document["target"]
    figure.suptitle(
        f"GPU time on {device}, bf16: below 1 is faster than every peer; "
        f"numbers at the top are beyond the scale",
        fontsize=10,
    )
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _relative(cell: Mapping[str, Any], name: str) -> float:
    """The time of a variant over that of the fastest peer."""
    peer = _fastest(cell)
    assert peer is not None
    return cell["us"][name]["us"] / peer[1]


def _draw(
    panel: Any, cell: Mapping[str, Any], place: int, names: Sequence[str], handles: dict[str, Any]
) -> None:
    """One cell: a mark a variant, side by side, ours first."""
    step = 0.76 / max(1, len(names) - 1)
    beyond = 0
    for index, name in enumerate(names):
        color, marker, size = _LOOKS[name]
        drawn = handles.get(name)
        if name in cell["us"]:
            value = _relative(cell, name)
            x = place - 0.38 + index * step
            ours = name in OURS
            drawn = panel.scatter(
                [x],
                [min(value, _CEILING)],
                s=size,
                c=color,
                marker=marker,
                linewidths=0.6 if ours else 0,
                edgecolors="black" if ours else "none",
                zorder=4 if ours else 3,
                clip_on=False,
            )
            if value > _CEILING:
                panel.annotate(
                    f"{value:.1f}",
                    (x, _CEILING),
                    xytext=(0, 5 + 8 * (beyond % 2)),
                    textcoords="offset points",
                    ha="center",
                    fontsize=6.5,
                    color=color,
                )
                beyond += 1
        if drawn is not None:
            handles[name] = drawn
