"""How much a report shows."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class ReportSettings:
    """How much a report shows; every number is a bound."""

    max_mb: float = 20.0
    """Size of the file in MB; pictures that find no room are left out, which is told."""
    worst: int = 24
    """Queries of the lowest average precision, at most three of a class."""
    searchable: int = 200
    """Further queries, a seeded sample from all classes, that the search finds."""
    neighbours: int = 6
    """Items that are shown beside a query or a suspect."""
    suspects: int = 100
    """Items whose label is probably wrong, the most suspicious first."""
    duplicates: int = 60
    """Pairs of near duplicates, the most similar first, of each kind: inside the set, and between sets."""
    duplicates_from: float = 0.98
    """Cosine from which two items are near duplicates; for binary codes the share of bits that agree."""
    confusion_queries: int = 20_000
    """Queries whose neighbours are looked at to tell which classes are confused; of more, a seeded sample."""
    thumbnail: int = 96
    """Pixels of the longer side of a picture."""
    memory_mb: float | None = None
    """Bound on the memory of each search beyond the embeddings, in MB; None is 512."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "memory_mb":
                continue
            least = 1 if field.name in ("neighbours", "thumbnail", "confusion_queries") else 0
            if not value >= least:
                raise ValueError(f"{field.name} is {value}. Pass {least} or more.")
