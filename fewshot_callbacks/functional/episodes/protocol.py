"""The sizes by which a network is evaluated on episodes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EpisodeProtocol:
    """Sizes, number and seed of evaluation episodes; they must be equal for two accuracies to be comparable.

    Args:
        ways: Classes per episode, at least 2.
        shots: Support images per class, at least 1.
        queries: Query images per class, at least 1.
        episodes: Number of episodes, at least 1; the papers use 600.
        seed: Seed of the episode list, at least 0.

    Raises:
        ValueError: If a number is too small.

    Examples:
        >>> EpisodeProtocol(ways=20).ways
        20
    """

    ways: int = 5
    shots: int = 1
    queries: int = 15
    episodes: int = 600
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"ways": 2, "shots": 1, "queries": 1, "episodes": 1, "seed": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"EpisodeProtocol({name}={getattr(self, name)}): use {name} >= {least}.")
