"""Columns from Arrow's C interface, as rows and as labels, give the same results as arrays with the same values."""

import sys
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import torch

from fewshot_callbacks import InputError, evaluate_retrieval, functional
from fewshot_callbacks.functional._reading import as_tensor
from fewshot_callbacks.functional.item_reader import TAKES
from fewshot_callbacks.functional.movement import embedding_movement
from fewshot_callbacks.metrics import DiscriminantRatio, EmbeddingStore, RetrievalEvaluation
from tests.cases import sampled_product
from tests.functional.calls import CALLS_WITH_LABELS
from tests.functional.calls_of_sets import GALLERY, QUERIES, arguments, call, comparable
from tests.integration_packages import integration
from tests.messages import refused

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
LABELS = np.arange(40) % 4
WORDS = [f"class {label}" for label in LABELS]
LABEL_SETS = np.eye(4, dtype=np.int8)[LABELS]
LABEL_SETS[:, 0] = 1


class Capsule:
    """A column that only Arrow's C interface reads."""

    def __init__(self, array):
        self.array = array

    def __arrow_c_array__(self, requested_schema=None):
        return self.array.__arrow_c_array__(requested_schema)


class Stream:
    """Chunks that only Arrow's C interface reads."""

    def __init__(self, chunks):
        self.chunks = chunks

    def __arrow_c_stream__(self, requested_schema=None):
        return self.chunks.__arrow_c_stream__(requested_schema)


def fixed(rows):
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])


def lists(rows, kind=pa.list_):
    return pa.array(list(rows), kind(pa.from_numpy_dtype(rows.dtype)))


def within_others(array):
    """The array as a slice of a longer one, of which the other rows are null or have another length."""
    is_fixed = pa.types.is_fixed_size_list(array.type)
    other = pa.array([None, None if is_fixed else [7]], array.type)
    return pa.concat_arrays([other, array, other])[2:-2]


def in_chunks(array):
    return pa.chunked_array([array[:7], array[:0], array[7:8], array[8:]])


def as_dictionary(array):
    return pa.DictionaryArray.from_arrays(pa.array(range(len(array))), array)


ARROW_FORMS = {
    "fixed-size list": fixed,
    "list": lists,
    "large list": partial(lists, kind=pa.large_list),
    "list view": partial(lists, kind=pa.list_view),
    "slice of fixed-size lists": lambda rows: within_others(fixed(rows)),
    "slice of lists": lambda rows: within_others(lists(rows)),
    "chunks": lambda rows: in_chunks(fixed(rows)),
    "chunks of lists": lambda rows: in_chunks(lists(rows)),
    "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray,
    "dictionary": lambda rows: as_dictionary(lists(rows)),
    "capsule": lambda rows: Capsule(fixed(rows)),
    "stream": lambda rows: Stream(in_chunks(lists(rows))),
}


def polars_array(rows):
    return integration("polars").Series(rows)


def polars_list(rows):
    polars = integration("polars")
    return polars.Series(rows.tolist(), dtype=polars.List(getattr(polars, rows.dtype.name.title().replace("Ui", "UI"))))


def pandas_arrow(rows):
    pandas = integration("pandas", minversion="3")
    return pandas.Series(pandas.arrays.ArrowExtensionArray(fixed(rows)))


def pandas_objects(rows):
    return integration("pandas", minversion="3").Series(list(rows))


def data_set(rows, order=slice(None)):
    datasets = integration("datasets")
    number = datasets.Value(rows.dtype.name)
    features = datasets.Features({"embedding": datasets.List(number, length=rows.shape[1])})
    return datasets.Dataset.from_dict({"embedding": rows[order].tolist()}, features=features)


LIBRARIES = {
    "polars array": polars_array,
    "polars list": polars_list,
    "pandas arrow": pandas_arrow,
    "pandas objects": pandas_objects,
}
FORMS = ARROW_FORMS | LIBRARIES
DATA_SETS = {
    "column": lambda rows: data_set(rows)["embedding"],
    "rearranged": lambda rows: data_set(rows, slice(None, None, -1)).select(range(len(rows) - 1, -1, -1))["embedding"],
    "arrow": lambda rows: data_set(rows).with_format("arrow")["embedding"],
    "torch": lambda rows: data_set(rows).with_format("torch")["embedding"],
}


def of_metric(rows, labels):
    metric = RetrievalEvaluation()
    metric.update(rows, labels)
    return {name: value.item() for name, value in metric.compute().items()}


def of_moments(rows, labels):
    metric = DiscriminantRatio()
    metric.update(rows, labels)
    return metric.compute().item()


def of_store(rows, labels):
    store = EmbeddingStore()
    store.append(rows, labels)
    return [column.tolist() for column in store.gather()]


OTHER_CALLS = {
    "variance_ratio": functional.variance_ratio,
    "discriminant_ratio": functional.discriminant_ratio,
    "trial_scores": lambda rows, labels: functional.trial_scores(rows, [0, 1], [4, 6]),
    "embedding_movement": lambda rows, labels: embedding_movement(rows, rows),
    "training_dynamics": lambda rows, labels: functional.training_dynamics(rows, rows, labels, shots=2),
    "compression_costs": lambda rows, labels: {
        name: (variant.report.values, variant.bytes_per_item)
        for name, variant in functional.compression_costs(rows, labels, dims=[3], metrics="mAP").variants.items()
    },
    "RetrievalEvaluation": of_metric,
    "DiscriminantRatio": of_moments,
    "EmbeddingStore": of_store,
}


# ------------------------------------------------------------------------------------------------------------------- rows


def check_rows(name, form):
    """Compare the result of a function with columns of a form with that with NumPy arrays."""
    gallery = None if TAKES[name].one_set else GALLERY
    given = arguments(name, QUERIES, gallery)
    known = comparable(call(name, given))
    rows = {TAKES[name].argument(kind) for kind in ("queries", "gallery")} & given.keys()
    assert comparable(call(name, given | {argument: form(given[argument]) for argument in rows})) == known


@pytest.mark.parametrize(("name", "form"), sampled_product(TAKES, FORMS, count=32))
def test_a_column_of_vectors_is_the_rows_that_it_contains(name, form):
    check_rows(name, FORMS[form])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), sampled_product(TAKES, DATA_SETS, count=14))
def test_a_column_of_a_data_set_is_the_rows_that_it_contains(name, form):
    check_rows(name, DATA_SETS[form])


@pytest.mark.parametrize("name", OTHER_CALLS)
@pytest.mark.parametrize("form", ["fixed-size list", "chunks of lists", "capsule", "polars list", "pandas objects"])
def test_functions_that_read_rows_by_themselves_take_columns(name, form):
    expected = OTHER_CALLS[name](ROWS, LABELS)
    assert repr(OTHER_CALLS[name](FORMS[form](ROWS), LABELS)) == repr(expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8, np.uint8])
@pytest.mark.parametrize("form", ["fixed-size list", "list", "chunks", "capsule", "polars list", "pandas arrow"])
def test_columns_keep_the_type_of_their_numbers(form, dtype):
    rows = (50 * np.abs(ROWS) + (0 if dtype == np.uint8 else -20)).astype(dtype)
    column = FORMS[form](rows)
    for memory_mb in (None, 0.001):
        expected = evaluate_retrieval(rows, LABELS, memory_mb=memory_mb)
        assert evaluate_retrieval(column, LABELS, memory_mb=memory_mb) == expected
    costs = partial(functional.compression_costs, query_labels=LABELS, dims=[3], codes=(), metrics="mAP")
    assert costs(column).bytes_per_item == costs(rows).bytes_per_item == 6 * rows.itemsize


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8, np.uint8])
def test_columns_of_data_sets_keep_the_type_of_their_numbers(dtype):
    rows = (50 * np.abs(ROWS)).astype(dtype)
    assert evaluate_retrieval(data_set(rows)["embedding"], LABELS) == evaluate_retrieval(rows, LABELS)


@pytest.mark.slow
def test_a_column_of_a_data_set_with_a_transform_has_the_transformed_values():
    data = data_set(ROWS).with_transform(lambda batch: {"embedding": [[4 * x[0], *x[1:]] for x in batch["embedding"]]})
    expected = np.concatenate([4 * ROWS[:, :1], ROWS[:, 1:]], axis=1)
    assert evaluate_retrieval(data["embedding"], LABELS) == evaluate_retrieval(expected, LABELS)


def test_binary_codes_may_be_columns():
    bits = (ROWS > 0).astype(np.uint8)
    expected = evaluate_retrieval(bits, LABELS, similarity="hamming")
    assert evaluate_retrieval(fixed(bits), LABELS, similarity="hamming") == expected
    flags = fixed(bits).cast(pa.list_(pa.bool_(), 6))
    assert evaluate_retrieval(flags, LABELS, similarity="hamming") == expected


@pytest.mark.parametrize(
    "column",
    [
        pa.array([], pa.list_(pa.float32(), 6)),
        pa.array([], pa.list_(pa.float32())),
        pa.chunked_array([], pa.list_(pa.float32(), 6)),
    ],
)
def test_a_column_without_rows_is_refused_as_an_array_without_rows(column):
    with refused(InputError, "nearest", "queries", "empty"):
        functional.nearest(column)


@pytest.mark.parametrize("make", [fixed, lists, partial(lists, kind=pa.large_list), lambda rows: fixed(rows)[3:]])
def test_a_single_chunk_is_not_copied(make):
    rows = np.zeros((200_000, 64), np.float32)
    column = make(rows)
    values = column.flatten()
    address = values.buffers()[1].address + 4 * values.offset
    allocated = pa.total_allocated_bytes()
    tensor = as_tensor(column, "rows", "test")
    assert tensor.data_ptr() == address
    assert tensor.shape == (len(column), 64)
    assert pa.total_allocated_bytes() == allocated


def test_a_column_may_be_freed_before_its_rows():
    rows = as_tensor(Capsule(fixed(ROWS.copy())), "rows", "test")
    for _ in range(10):
        fixed(ROWS + 1)
    assert torch.equal(rows, torch.from_numpy(ROWS))


# -------------------------------------------------------------------------------------------------------------- refusals


def with_row(row, kind):
    return pa.array([*ROWS[:3].tolist(), row, *ROWS[4:].tolist()], kind)


FLOATS = pa.list_(pa.float32())
REFUSED = {
    "null row": (with_row(None, FLOATS), [3, "null"]),
    "null row of fixed-size lists": (with_row(None, pa.list_(pa.float32(), 6)), [3, "null"]),
    "null row of list views": (with_row(None, pa.list_view(pa.float32())), [3, "null"]),
    "null number": (with_row([1, 2, None, 4, 5, 6], FLOATS), [3, "null", 2]),
    "null number of fixed-size lists": (with_row([1, 2, None, 4, 5, 6], pa.list_(pa.float32(), 6)), [3, "null", 2]),
    "another length": (with_row([1, 2], FLOATS), [3, 2, 6]),
    "an empty list": (with_row([], FLOATS), [3, 0, 6]),
    "another length in a later chunk": (pa.chunked_array([lists(ROWS), with_row([1, 2], FLOATS)]), [43, 2, 6]),
    "another length of each chunk": (pa.chunked_array([lists(ROWS), lists(ROWS[:, :5])]), [40, 5, 6]),
    "null row in a later chunk": (pa.chunked_array([lists(ROWS), with_row(None, FLOATS)]), [43, "null"]),
    "words": (pa.array([["a"]] * 40), ["string"]),
    "lists of lists": (pa.array([[[1.0]]] * 40), ["list<item: double>"]),
    "a word each": (pa.array(WORDS), []),
    "a word each of a dictionary": (pa.array(WORDS).dictionary_encode(), []),
    "a number each": (pa.array(ROWS[:, 0]), []),
    "a number each of a capsule": (Capsule(pa.array(ROWS[:, 0])), []),
    "integers": (fixed(LABEL_SETS.astype(np.int64)), ["torch.int64"]),
    "booleans": (pa.array((ROWS > 0).tolist()), ["torch.bool"]),
    "dates": (pa.array([[0]] * 40, pa.list_(pa.int64())).cast(pa.list_(pa.timestamp("s"))), ["datetime64"]),
    "a table": (Capsule(pa.record_batch({"embedding": lists(ROWS)})), ["'embedding'"]),
    "not a number": (with_row([np.nan] * 6, FLOATS), ["NaN", 1]),
}


@pytest.mark.parametrize(("column", "facts"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_column_of_vectors_is_refused_with_the_row(column, facts):
    with refused(InputError, "evaluate_retrieval", "queries", *facts):
        evaluate_retrieval(column, LABELS)
    with pytest.raises(InputError, match="RetrievalEvaluation"):
        of_metric(column, np.zeros(len(column) if hasattr(column, "__len__") else 40, np.int64))


def test_nan_in_arrays_of_pandas_is_a_null():
    rows = ROWS.copy()
    rows[3, 2] = np.nan
    with refused(InputError, "evaluate_retrieval", "queries", 3, "null", 2):
        evaluate_retrieval(pandas_objects(rows), LABELS)


@pytest.mark.parametrize("form", ["fixed-size list", "chunks", "polars array", "polars list", "pandas arrow"])
def test_the_code_for_rows_with_nan_leaves_them_out(form):
    rows = ROWS.copy()
    rows[3] = np.nan
    column = FORMS[form](rows)
    with pytest.raises(InputError) as error:
        evaluate_retrieval(column, LABELS)
    names = {"queries": column, "np": np, "torch": torch}
    condition = str(error.value).partition("keep = ")[2].partition(", then ")
    names["keep"] = eval(condition[0], names)
    kept = eval(condition[2].partition("[keep]")[0] + "[keep]", names)
    assert torch.equal(kept.float(), torch.from_numpy(np.delete(ROWS, 3, axis=0)))


@pytest.mark.parametrize("column", [Capsule(fixed(ROWS)), fixed(ROWS)], ids=["capsule", "pyarrow"])
def test_without_pyarrow_the_command_that_installs_it_is_named(column, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refused(ModuleNotFoundError, "evaluate_retrieval", "queries", "pyarrow", "pip install"):
        evaluate_retrieval(column, LABELS)


def test_without_pyarrow_columns_that_numpy_reads_are_read(monkeypatch):
    labels = integration("pandas").Series(WORDS)
    rows = integration("polars").Series(ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert evaluate_retrieval(rows, labels) == evaluate_retrieval(ROWS, WORDS)


# ---------------------------------------------------------------------------------------------------------------- labels


def polars_labels(values, dtype=None):
    polars = integration("polars")
    return polars.Series(values, dtype=None if dtype is None else getattr(polars, dtype))


def pandas_labels(values, dtype):
    return integration("pandas").Series(values, dtype=dtype)


def data_set_labels(values):
    return integration("datasets").Dataset.from_dict({"label": values})["label"]


LABEL_FORMS = {
    "integers": (pa.array, LABELS),
    "bytes": (lambda values: pa.array(values, pa.uint8()), LABELS),
    "chunks": (lambda values: in_chunks(pa.array(values)), LABELS),
    "integers of a capsule": (lambda values: Capsule(pa.array(values)), LABELS),
    "integers of a stream": (lambda values: Stream(in_chunks(pa.array(values))), LABELS),
    "a column of lists": (lambda values: fixed(values[:, None]), LABELS),
    "words": (pa.array, WORDS),
    "large words": (lambda values: pa.array(values, pa.large_string()), WORDS),
    "chunks of words": (lambda values: in_chunks(pa.array(values)), WORDS),
    "views of words": (lambda values: pa.array(values, pa.string_view()), WORDS),
    "dictionary": (lambda values: pa.array(values).dictionary_encode(), WORDS),
    "runs": (lambda values: pa.RunEndEncodedArray.from_arrays(range(1, 41), values), WORDS),
    "words of a capsule": (lambda values: Capsule(pa.array(values)), WORDS),
    "large words of a capsule": (lambda values: Capsule(pa.array(values, pa.large_string())), WORDS),
    "views of words of a capsule": (lambda values: Capsule(pa.array(values, pa.string_view())), WORDS),
    "dictionary of a capsule": (lambda values: Capsule(pa.array(values).dictionary_encode()), WORDS),
    "runs of a capsule": (lambda values: Capsule(pa.RunEndEncodedArray.from_arrays(range(1, 41), values)), WORDS),
    "polars": (polars_labels, LABELS),
    "polars words": (polars_labels, WORDS),
    "polars categories": (partial(polars_labels, dtype="Categorical"), WORDS),
    "pandas": (partial(pandas_labels, dtype="int64[pyarrow]"), LABELS),
    "pandas nullable": (partial(pandas_labels, dtype="Int64"), LABELS),
    "pandas words": (partial(pandas_labels, dtype="string[pyarrow]"), WORDS),
    "pandas categories": (partial(pandas_labels, dtype="category"), WORDS),
    "pandas objects": (partial(pandas_labels, dtype=object), WORDS),
    "data set": pytest.param(data_set_labels, LABELS, marks=pytest.mark.slow),
    "data set of words": pytest.param(data_set_labels, WORDS, marks=pytest.mark.slow),
}


@pytest.mark.parametrize(("form", "values"), LABEL_FORMS.values(), ids=LABEL_FORMS)
def test_columns_are_the_labels_ids_groups_and_slices_that_they_contain(form, values):
    known = {"query_labels": values, "query_groups": values, "slices": {"camera": values}, "query_ids": values}
    given = {name: {"camera": form(values)} if name == "slices" else form(values) for name in known}
    for names in (["query_labels"], ["query_labels", "slices"]):
        expected = evaluate_retrieval(ROWS, **{name: known[name] for name in names})
        assert evaluate_retrieval(ROWS, **{name: given[name] for name in names}) == expected
    for name in ("query_groups", "query_ids"):
        others = {"query_labels": LABELS // 2, "gallery": ROWS, "gallery_labels": LABELS // 2}
        gallery = name.replace("query", "gallery")
        expected = functional.nearest(ROWS, **others, **{name: values, gallery: values}, k=2)
        found = functional.nearest(ROWS, **others, **{name: given[name], gallery: given[name]}, k=2)
        assert comparable(found) == comparable(expected)
    expected = of_metric(ROWS, values)
    assert of_metric(ROWS, given["query_labels"]) == expected


@pytest.mark.parametrize("name", CALLS_WITH_LABELS)
def test_every_function_with_labels_takes_them_as_a_column(name):
    items = torch.from_numpy(ROWS)
    expected = CALLS_WITH_LABELS[name](items, torch.from_numpy(LABELS))
    assert repr(CALLS_WITH_LABELS[name](items, pa.array(LABELS))) == repr(expected)


@pytest.mark.parametrize("form", ["fixed-size list", "chunks of lists", "capsule", "polars list"])
def test_several_labels_of_each_item_may_be_lists_of_zeros_and_ones(form):
    expected = evaluate_retrieval(ROWS, LABEL_SETS)
    assert evaluate_retrieval(ROWS, FORMS[form](LABEL_SETS)) == expected


@pytest.mark.parametrize("form", ["fixed-size list", "chunks of lists", "capsule", "polars list"])
def test_targets_of_a_regression_may_be_lists(form):
    targets = ROWS[:, :2].astype(np.float64) ** 2
    expected = functional.linear_probe(ROWS, targets, ROWS, targets)
    found = functional.linear_probe(ROWS, FORMS[form](targets), ROWS, FORMS[form](targets))
    assert comparable(found) == comparable(expected)


@pytest.mark.parametrize("wrap", [pa.array, Capsule, Stream], ids=["pyarrow", "capsule", "stream"])
@pytest.mark.parametrize("values", [LABELS.tolist(), WORDS], ids=["integers", "words"])
def test_a_null_label_is_refused_with_its_row(wrap, values):
    array = pa.array([*values[:5], None, *values[6:]])
    column = wrap(pa.chunked_array([array])) if wrap is Stream else array if wrap is pa.array else wrap(array)
    with refused(InputError, "evaluate_retrieval", "query_labels", "missing", 5):
        evaluate_retrieval(ROWS, column)


def test_lists_of_words_are_no_labels():
    with refused(InputError, "evaluate_retrieval", "query_labels", "string"):
        evaluate_retrieval(ROWS, pa.array([["a"]] * 40))
