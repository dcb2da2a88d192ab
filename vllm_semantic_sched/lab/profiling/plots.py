"""Draws the measured times and the fitted profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_semantic_sched.lab.profiling.measure import Measurements
from vllm_semantic_sched.policy.profile.formula import EngineProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#2f7ebc", "#c0392b", "#27915b", "#e08e0b", "#7d6aa8", "#8c8c8c")


def draw(profile: EngineProfile, found: Measurements, path: Path) -> None:
    """Draw prefills, decodes, transfers (dots: measured, lines: profile) and the error of every
    step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.5), layout="constrained")
    prefill, decode, transfer, error = figure.subplots(2, 2).flat
    _prefill(prefill, profile, found)
    _decode(decode, profile, found)
    _transfer(transfer, profile, found)
    _error(error, profile, found)
    for axis in (prefill, decode, transfer, error):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7, frameon=False)
    figure.suptitle(f"{profile.model} on {profile.hardware}: {profile.source}", fontsize=10)
    figure.savefig(path, dpi=120)


def _prefill(axis: Axes, profile: EngineProfile, found: Measurements) -> None:
    lengths, seconds = zip(*found.prefills, strict=True)
    line = np.geomspace(min(lengths), max(lengths), 200).astype(int)
    axis.plot(lengths, seconds, "o", ms=4, color=_COLORS[0], label="measured")
    axis.plot(line, [profile.prefill_alone(int(n)) for n in line], color=_COLORS[0], label="fit")
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="s", title="prefill of one prompt")


def _decode(axis: Axes, profile: EngineProfile, found: Measurements) -> None:
    sizes = sorted({step.batch.decodes for step in found.decode_steps})
    for color, size in zip(_COLORS * len(sizes), sizes, strict=False):
        steps = sorted(
            (step for step in found.decode_steps if step.batch.decodes == size),
            key=lambda step: step.batch.context,
        )
        contexts = [step.batch.context / size for step in steps]
        axis.plot(contexts, [step.seconds * 1e3 for step in steps], "o", ms=4, color=color)
        fitted = [profile.step(step.batch) * 1e3 for step in steps]
        axis.plot(contexts, fitted, color=color, label=f"{size} sequence{'s' * (size > 1)}")
    axis.set(xscale="log", yscale="log", xlabel="tokens of each sequence", ylabel="ms")
    axis.set_title("decode step")


def _transfer(axis: Axes, profile: EngineProfile, found: Measurements) -> None:
    for name, pairs, fit, color in (
        ("save", found.saves, profile.save, _COLORS[1]),
        ("load", found.loads, profile.load, _COLORS[2]),
    ):
        tokens, seconds = zip(*pairs, strict=True)
        axis.plot(tokens, [second * 1e3 for second in seconds], "o", ms=4, color=color)
        axis.plot(tokens, [fit(count) * 1e3 for count in tokens], color=color, label=name)
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title="transfer of KV")


def _error(axis: Axes, profile: EngineProfile, found: Measurements) -> None:
    for name, steps, color in (
        ("prefill", found.prefill_steps, _COLORS[0]),
        ("decode", found.decode_steps, _COLORS[1]),
        ("both", found.mixed_steps, _COLORS[2]),
    ):
        measured = [step.seconds * 1e3 for step in steps]
        errors = [100 * (profile.step(step.batch) / step.seconds - 1) for step in steps]
        axis.plot(measured, errors, "o", ms=4, color=color, label=name)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set(xscale="log", xlabel="measured ms", ylabel="fit against measured, %")
    axis.set_title("error per step")
