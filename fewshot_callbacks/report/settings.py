"""How much a report shows."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class ReportSettings:
    """Size and content of a report; numbers of items and pairs are upper bounds.

    Raises:
        ValueError: If a number is out of range.

    Examples:
        >>> ReportSettings(worst=12).worst
        12
    """

    max_mb: float = 20.0
    """Largest size of the file in MB; pictures that do not fit are left out, and the report says so."""
    worst: int = 24
    """Queries of the lowest average precision, at most three of a class."""
    searchable: int = 200
    """Further queries that the search finds: a seeded sample from all classes."""
    neighbours: int = 6
    """Neighbours that are shown of a query or a suspect."""
    suspects: int = 100
    """Items whose label is probably wrong, the most suspicious first."""
    duplicates: int = 60
    """Pairs of near duplicates, the most similar first, of each kind: inside the set, and between sets."""
    duplicates_from: float = 0.98
    """Lowest cosine of near duplicates; for binary codes the lowest share of equal bits."""
    confusion_queries: int = 20_000
    """Queries from whose neighbours confusions of classes are counted; a seeded sample if there are more."""
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
