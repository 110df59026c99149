"""The kernels for CUDA, in Triton's interpreter, against keys that are compared one by one and against plain PyTorch."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine import options
from fewshot_callbacks.engine.cuda import counter, tiles
from fewshot_callbacks.engine.open_pass import open_pass
from fewshot_callbacks.engine.pooled.histogram import PooledCounts
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.scores import products
from fewshot_callbacks.engine.scores.products import ScoreTiles
from fewshot_callbacks.functional import evaluate_retrieval, grouped_recall
from tests.cases import made, sampled_product
from tests.engine.cases import (
    ALL,
    KINDS,
    SIMILARITIES,
    cases,
    engine,
    labels_of,
    pooled_case,
    prepared,
    report,
    vectors,
)
from tests.engine.oracles import counted, expected

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton reads the variable while it is imported, which others may have done before: hence a process for these tests."""

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of its own that this file starts")


@pytest.mark.skipif(INTERPRETED, reason="is that process")
def test_all_of_this_file_in_a_process_of_its_own():
    pytest.importorskip("triton")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        "not exhaustive",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        __file__,
    ]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3],
        env=kept | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.fixture
def seen(monkeypatch):
    """What each call of a kernel was given, and what it returned in `todo` and `filled`."""
    calls = SimpleNamespace(parts=[], listed={}, decided=0)
    make, decide = counter.PartCounter._make, counter.PartCounter._decide

    def noted(self, tiles, todo):
        calls.parts.append(self)
        make(self, tiles, todo)
        listed = sum(part.filled[0].clamp(max=part.filled[1]) for part in self.lists)
        calls.listed[self] = calls.listed.get(self, 0) + int(listed)

    def noted_decision(self, side, other, items, others):
        calls.decided += len(items)
        decide(self, side, other, items, others)

    monkeypatch.setattr(counter.PartCounter, "_make", noted)
    monkeypatch.setattr(counter.PartCounter, "_decide", noted_decision)
    return calls


def in_float16(monkeypatch):
    """Make products in half precision of float16 operands, as for cosines on CUDA; here they would be TF32."""
    from_rows = ScoreTiles.from_rows.__func__

    def made_of(cls, *arguments, **named):
        scores = from_rows(cls, *arguments, **named)
        return replace(scores, bounds=replace(scores.bounds, half=torch.float16))

    monkeypatch.setattr(ScoreTiles, "from_rows", classmethod(made_of))


@st.composite
def settings_of_the_kernels(draw):
    rows = draw(st.sampled_from([16, 17, 64]))
    return {
        "precision": draw(st.sampled_from([None, "bfloat16", "float32", "float64"])),
        "layout": (rows, rows if draw(st.booleans()) else 40, draw(st.sampled_from([ALL, ALL, 23]))),
        "part_rows": draw(st.sampled_from([16, 32])),
    }


@interpreted
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), settings_of_the_kernels(), st.booleans())
def test_counts_are_those_of_the_keys(case, setting, half):
    with pytest.MonkeyPatch.context() as patch:
        if half and case["similarity"] == "cosine":
            in_float16(patch)
        with engine("triton", **setting):
            assert counted(case) == expected(case)


@interpreted
@pytest.mark.parametrize(("kind", "similarity"), sampled_product(KINDS, SIMILARITIES, count=15))
def test_all_kinds_of_rows_and_precisions_count_alike(kind, similarity, monkeypatch):
    case = {
        "queries": torch.from_numpy(vectors(kind, 70, 24)).float(),
        "query_labels": torch.from_numpy(labels_of("uneven", 70)),
        "similarity": similarity,
    }
    by_keys = expected(case)
    for precision in ("float32", "bfloat16"):  # half precision, which is TF32 here
        with engine("triton", precision, layout=(40, 40, ALL), part_rows=32):
            assert counted(case) == by_keys
    if similarity == "cosine":
        in_float16(monkeypatch)
        with engine("triton", "bfloat16", layout=(40, 40, ALL), part_rows=32):
            assert counted(case) == by_keys


@interpreted
class TestRoads:
    """Each branch of the kernels is seen to be taken."""

    def case(self, noise, **others):
        queries, labels = made(100, 10, 24, noise=noise)
        return {"queries": queries, "query_labels": labels, "similarity": "cosine"} | others

    def setting(self, precision="bfloat16", rows=64):
        return engine("triton", precision, layout=(rows, rows, ALL), part_rows=32)

    def test_what_reaches_the_lowest_threshold_is_listed(self, seen):
        case = self.case(1.0)
        with self.setting():
            assert counted(case) == expected(case)
        passing = sum(table[0][0] + table[1][0] for table in expected(case).values())
        listed = seen.listed[seen.parts[-1]]  # those before are samples
        assert passing <= listed < 1.1 * passing + 100
        assert seen.decided < 0.01 * listed

    def test_a_list_that_is_full_begins_another_round(self, seen, monkeypatch):
        case = self.case(3.0)
        with self.setting(rows=17):  # lists as long as one tile, which holds 1,024 pairs
            assert counted(case) == expected(case)
        assert {len(part.lists[0].items) for part in seen.parts} == {32 * 32}
        assert sum(part is seen.parts[-1] for part in seen.parts) > 3

    def test_what_products_leave_open_is_decided_exactly(self, seen):
        queries = torch.nn.functional.one_hot(torch.arange(60) % 6, 24).float()
        case = {"queries": queries, "query_labels": torch.arange(60) % 7, "similarity": "cosine"}
        with self.setting():
            assert counted(case) == expected(case)
        assert seen.decided > 0
        assert all(part.products > 0 for part in seen.parts[-1:])

    def test_excluded_pairs_are_no_candidates(self):
        groups = torch.arange(100) // 7
        case = self.case(2.0, query_groups=groups)
        with self.setting():
            assert counted(case) == expected(case)
        two = self.case(2.0, gallery=case["queries"][:33], gallery_labels=case["query_labels"][:33])
        two |= {"query_ids": torch.arange(100), "gallery_ids": torch.arange(33)}
        with self.setting():
            assert counted(two) == expected(two)

    @pytest.mark.parametrize("similarity", ["dot", "euclidean"])
    def test_operands_in_parts_meet_once(self, similarity, monkeypatch, seen):
        monkeypatch.setattr(tiles, "SHARE_OF_KEPT", 0.0)  # one block at a time
        case = self.case(2.0, similarity=similarity)
        with self.setting("float32", rows=32):
            assert counted(case) == expected(case)
        sizes = {(len(part.rows), len(part.columns)) for part in seen.parts}
        assert max(sizes)[0] <= 32

    def test_partitions_meet_no_others(self):
        embeddings, labels = made(120, 12, 16, noise=2.0)
        of_keys = grouped_recall(embeddings, labels, group_size=4)
        with self.setting(None):
            assert grouped_recall(embeddings, labels, group_size=4) == of_keys

    def test_float64_is_left_to_plain_pytorch(self, seen):
        case = self.case(1.0)
        with self.setting("float64"):
            assert counted(case) == expected(case)
        assert not seen.parts

    def test_the_pilot_chooses_by_what_stays_open(self, monkeypatch):
        def chosen(noise):
            queries = torch.ones(80, 24) + noise * torch.randn(80, 24, generator=torch.Generator().manual_seed(0))
            walk = open_pass(
                *prepared({"queries": queries, "query_labels": torch.arange(80) % 8, "similarity": "cosine"}), 10**8
            )
            for _ in walk.run():
                pass
            return walk.precision

        monkeypatch.setattr(tiles, "OPEN_SHARE", 0.5)
        with self.setting(None):
            assert [chosen(noise) for noise in (1.0, 3e-2, 1e-5)] == [
                Precision.HALF, Precision.FLOAT32, Precision.FLOAT64
            ]  # fmt: skip


@interpreted
class TestPool:
    @pytest.mark.parametrize(
        ("kind", "similarity"), sampled_product(["separated", "hard", "few-values", "repeated"], SIMILARITIES, count=5)
    )
    def test_reports_are_the_same(self, kind, similarity):
        case = pooled_case(kind, similarity, n=80)
        of_reference = report(case, group_size=3)
        for precision in (None, "bfloat16", "float32"):
            with engine("triton", precision, layout=(64, 64, ALL), part_rows=32):
                assert report(case, group_size=3) == of_reference

    @pytest.mark.parametrize("groups", [False, True])
    def test_the_histogram_counts_each_candidate_once(self, groups):
        case = pooled_case("few-values", "cosine", n=80)
        if groups:
            case["query_groups"] = torch.arange(80) // 7

        def histogram(kernel):
            with engine(kernel, "float32", layout=(64, 64, ALL), part_rows=16):
                scores, candidates = prepared(case)
                walk = open_pass(scores, candidates, 10**8)
                pooled = PooledCounts(walk.matrix)
                for _ in walk.run(pooled):
                    pass
                return pooled.negatives

        triton, plain = histogram("triton"), histogram("pytorch")
        assert triton[1:].sum() == plain[1:].sum() > 0
        # the products are rounded in another order: a score on the border of two bins lies in either
        apart = (triton[1:] - plain[1:]).cumsum()
        assert abs(apart).max() <= plain.max()
        assert triton[0] == 0

    def test_where_few_pairs_matter_only_these_are_recorded(self):
        embeddings, labels = made(100, 10, 24, noise=0.3)

        def pooled(kernel):
            with engine(kernel, layout=(64, 64, ALL), part_rows=32):
                walk = open_pass(
                    *prepared({"queries": embeddings, "query_labels": labels, "similarity": "cosine"}), 10**8
                )
                counts = PooledCounts(walk.matrix)
                for _ in walk.run(counts):
                    pass
                return counts

        ours, every = pooled("triton"), pooled("pytorch")
        floor = ours.forecast.floor
        above = int(ours.forecast.grid.bin_of(np.array([floor]))[0]) + 1
        assert ours.negatives.sum() < 0.2 * every.negatives[1:].sum()
        # estimates are off by fewer than two bins of these
        assert ours.negatives[above - 60 :].sum() >= every.negatives[above:].sum()


@interpreted
class TestTrust:
    def run(self):
        embeddings, labels = made(60, 6, 8, noise=2.0)
        with engine("compiled"):
            of_reference = evaluate_retrieval(embeddings, labels)
        with engine("triton", layout=(32, 32, ALL), part_rows=16):
            assert evaluate_retrieval(embeddings, labels) == of_reference

    def test_kernels_that_fail_are_replaced(self, monkeypatch):
        def broken(self, *_):
            raise RuntimeError("out of shared memory")

        monkeypatch.setattr(counter.PartCounter, "_make", broken)
        with pytest.warns(UserWarning, match="RuntimeError: out of shared memory.*falls back to plain PyTorch"):
            self.run()

    def test_kernels_that_count_otherwise_are_replaced(self, monkeypatch):
        make = counter.PartCounter._make

        def wrong(self, tiles, todo):
            make(self, tiles, todo)
            self.rows.blocks[0].counts.hits[0, -1] += 1

        monkeypatch.setattr(counter.PartCounter, "_make", wrong)
        with pytest.warns(UserWarning, match="they do not count as PyTorch does"):
            self.run()

    def test_a_process_that_did_not_choose_tries_them_too(self):
        case = {"queries": made(60, 6, 8)[0], "query_labels": made(60, 6, 8)[1], "similarity": "cosine"}
        with engine("triton", "float32", layout=(32, 32, ALL), part_rows=16):
            scores, candidates = prepared(case)
            walk = open_pass(scores, candidates, 10**8)
            assert walk.tile_maker.trusted is None
            for _ in walk.run():
                pass
            assert walk.tile_maker.trusted


class TestChoice:
    def test_what_cannot_be_loaded_is_said_once_and_replaced(self, monkeypatch):
        def broken(name):
            raise ImportError("no triton here")

        options._load_triton.cache_clear()
        monkeypatch.setattr(options, "importlib", SimpleNamespace(import_module=broken))
        try:
            with engine("triton"):
                with pytest.warns(UserWarning, match=r"ImportError: no triton here.*falls back to plain PyTorch"):
                    assert options.triton_kernels(torch.device("cpu")) is None
                report = evaluate_retrieval(torch.eye(3)[torch.arange(12) % 3], torch.arange(12) % 3, group_size=None)
                assert report.mAP == 1.0  # warnings are errors: a second one would raise
        finally:
            options._load_triton.cache_clear()

    def test_the_cpu_does_not_ask_for_them(self):
        assert options.triton_kernels(torch.device("cpu")) is None
        with engine("pytorch"):
            assert options.triton_kernels(torch.device("cuda")) is None

    @pytest.mark.parametrize(("capability", "hip"), [((7, 5), None), ((9, 4), "6.2")])
    def test_devices_that_are_not_for_them_are_left_alone(self, monkeypatch, capability, hip):
        options._load_triton.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert options.triton_kernels(torch.device("cuda:0")) is None
        options._load_triton.cache_clear()

    def test_dots_and_distances_take_tf32(self, monkeypatch):
        monkeypatch.setattr(products, "triton_kernels", lambda device: SimpleNamespace())
        assert ScoreTiles.from_rows(torch.ones(2, 3), torch.ones(2, 3), "dot").half == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("noise", [0.5, 3.0])
def test_on_a_gpu_as_on_the_cpu(similarity, noise):
    embeddings, labels = made(3000, 60, 130, noise=noise)
    of_cpu = evaluate_retrieval(embeddings, labels, similarity=similarity)
    assert evaluate_retrieval(embeddings, labels, similarity=similarity, device="cuda") == of_cpu
