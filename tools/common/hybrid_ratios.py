"""Convert the ratios of attention and MLP layers, which older versions of Megatron-LM used, to the layer pattern of a
hybrid model."""

from __future__ import annotations

from collections.abc import Sequence

ATTENTION = "--hybrid-attention-ratio"
MLP = "--hybrid-mlp-ratio"
PATTERN = "--hybrid-layer-pattern"
PATTERNS = (PATTERN, "--hybrid-override-pattern")


def pattern_of(layers: int, attention: float, mlp: float) -> str:
    """Return the layer pattern, with one letter per layer. Attention layers (*) are evenly spaced between Mamba layers
    (M). Then some of the Mamba layers, also evenly spaced, are replaced with MLP layers (-). Raises ValueError if the
    shares are not fractions that add up to at most 1."""
    if layers < 1 or min(attention, mlp) < 0 or attention + mlp > 1:
        raise ValueError(f"{ATTENTION} {attention:g} and {MLP} {mlp:g}: must be shares that add up to at most 1")
    attentions, mlps = round(layers * attention), round(layers * mlp)
    others = layers - attentions
    letters = ["*" if chosen else "M" for chosen in _spaced(layers, others / (attentions + 1))]
    if mlps:
        places = [place for place, letter in enumerate(letters) if letter == "M"]
        for place, chosen in zip(places, _spaced(len(places), (others - mlps) / mlps), strict=True):
            letters[place] = "-" if chosen else "M"
    return "".join(letters)


def _spaced(places: int, gap: float) -> list[bool]:
    """Choose positions such that `gap` unchosen positions precede each chosen position. `gap` may be a fraction. Return
    a list with True for each chosen position."""
    found, left = [], gap
    for _ in range(places):
        found.append(left < 0.5)
        left += gap if found[-1] else -1
    return found


def computed_pattern(tokens: Sequence[tuple[str, list[str]]]) -> tuple[str, list[str]] | None:
    """Return the layer-pattern flag that replaces the flags for attention and MLP ratios in a command. Return None if
    there are no ratio flags, if the command already has a pattern, or if a required flag such as --num-layers is
    missing."""
    last = {name.replace("_", "-"): values for name, values in tokens}
    if last.keys().isdisjoint((ATTENTION, MLP)) or not last.keys().isdisjoint(PATTERNS):
        return None
    try:
        layers = int("".join(last.get("--num-layers", [])))
        shares = [float("".join(last.get(name, ["0"]))) for name in (ATTENTION, MLP)]
        return PATTERN, [pattern_of(layers, *shares)]
    except ValueError:
        return None
