"""`ExactRetrievalEvaluator` compared with `InformationRetrievalEvaluator`."""

import json

import numpy as np
import pytest
import torch

from tests.gloo_processes import answers
from tests.integration_packages import how_to_install
from tests.integrations.cases import retrieval_task, static_model

pytest.importorskip("sentence_transformers", reason=how_to_install("sentence_transformers"))
from sentence_transformers import util
from sentence_transformers.sentence_transformer import evaluation

from fewshot_callbacks.integrations import ExactRetrievalEvaluator
from tests.messages import missing_facts, refused

Theirs = evaluation.InformationRetrievalEvaluator
OPTIONS = {
    "name": "task",
    "mrr_at_k": [10, 3],
    "ndcg_at_k": [5, 10],
    "accuracy_at_k": [1, 3],
    "precision_recall_at_k": [2, 100],  # more than there are documents
    "map_at_k": [100, 2],
}


class Vectors:
    """A model that takes row numbers as texts."""

    similarity_fn_name = "cosine"
    model_card_data = type("Card", (), {"set_evaluation_metrics": lambda *_: None})()

    def __init__(self, queries, corpus):
        self.queries, self.corpus = queries, corpus
        self.encoded = []

    def similarity(self, queries, corpus):
        return util.cos_sim(queries, corpus)

    def encode_query(self, rows, truncate_dim=None, **_):
        self.encoded.append(len(rows))
        return self.queries[list(rows), :truncate_dim]

    def encode_document(self, rows, truncate_dim=None, **_):
        self.encoded.append(len(rows))
        return self.corpus[list(rows), :truncate_dim]


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
def test_values_keys_and_files_are_theirs_where_nothing_ties(similarity, tmp_path):
    model = static_model()
    model.similarity_fn_name = similarity
    evaluators = {name: kind(*retrieval_task(), **OPTIONS) for name, kind in both().items()}
    found = {name: evaluator(model, str(tmp_path / name), 1, 2) for name, evaluator in evaluators.items()}
    assert list(found["ours"]) == list(found["theirs"])
    assert found["ours"] == pytest.approx(found["theirs"], rel=0, abs=1e-15)
    assert evaluators["ours"].primary_metric == evaluators["theirs"].primary_metric == f"task_{similarity}_ndcg@10"
    heads = [next(iter((tmp_path / name).iterdir())).read_text().splitlines()[0] for name in found]
    assert heads[0] == heads[1]


def both():
    return {"ours": ExactRetrievalEvaluator, "theirs": Theirs}


def test_all_default_keys():
    found = {name: kind(*retrieval_task())(static_model()) for name, kind in both().items()}
    assert len(found["ours"]) == 15
    assert found["ours"] == pytest.approx(found["theirs"], rel=0, abs=1e-15)


def test_the_arguments_are_theirs_in_their_order():
    evaluator = ExactRetrievalEvaluator(*retrieval_task(), 7, [3], [4])
    assert (evaluator.corpus_chunk_size, evaluator.mrr_at_k, evaluator.ndcg_at_k) == (7, [3], [4])
    assert isinstance(evaluator, Theirs)
    with refused(TypeError, "'batchsize'"):
        ExactRetrievalEvaluator(*retrieval_task(), batchsize=3)


def test_several_score_functions_give_the_values_of_theirs():
    functions = {"cosine": util.cos_sim, "product": util.dot_score, "distance": util.euclidean_sim}
    found = {
        name: kind(*retrieval_task(), score_functions=functions, main_score_function="cosine")(static_model())
        for name, kind in both().items()
    }
    assert len(found["ours"]) == 45
    assert found["ours"] == pytest.approx(found["theirs"], rel=0, abs=1e-15)


def tied_task():
    """Return 6 queries and 40 documents of few coordinates, so that most scores tie."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randint(0, 2, (6, 3), generator=generator).float() + 0.5
    corpus = torch.randint(0, 2, (40, 3), generator=generator).float() + 0.5
    return queries, corpus, {number: {5 * number, 5 * number + 1} for number in range(6)}


def renamed(relevant, prefix):
    """Return the corpus and the relevant documents with ids whose order is that of `prefix`."""
    corpus = {prefix(number): number for number in range(40)}
    return corpus, {query: {prefix(document) for document in documents} for query, documents in relevant.items()}


def test_other_ids_of_documents_move_their_values_and_not_ours():
    queries, corpus, relevant = tied_task()
    texts = {number: number for number in range(6)}
    spread = {}
    for name, kind in both().items():
        values = [
            kind(texts, *renamed(relevant, prefix))(Vectors(queries, corpus))["cosine_ndcg@10"]
            for prefix in (lambda number: f"{number:03}", lambda number: f"{999 - number:03}")
        ]
        spread[name] = abs(values[0] - values[1])
    assert spread["ours"] == 0
    assert spread["theirs"] > 0.01


def test_ties_count_as_the_mean_over_orders():
    queries, corpus, relevant = tied_task()
    texts = {number: number for number in range(6)}
    exact = ExactRetrievalEvaluator(texts, *renamed(relevant, str), ndcg_at_k=[10])(Vectors(queries, corpus))
    generator = np.random.default_rng(0)
    values = []
    for _ in range(200):
        order = generator.permutation(40)
        task = renamed(relevant, lambda number, order=order: f"{order[number]:03}")
        values.append(Theirs(texts, *task)(Vectors(queries, corpus))["cosine_ndcg@10"])
    assert exact["cosine_ndcg@10"] == pytest.approx(np.mean(values), abs=4 * np.std(values) / np.sqrt(200))


def test_dims_come_from_one_encoding_and_are_theirs_with_truncate_dim(tmp_path):
    generator = torch.Generator().manual_seed(0)
    model = Vectors(torch.randn(20, 16, generator=generator), torch.randn(60, 16, generator=generator))
    _, corpus, relevant = retrieval_task()
    texts = {query: number for number, query in enumerate(relevant)}
    task = texts, {document: number for number, document in enumerate(corpus)}, relevant
    evaluator = ExactRetrievalEvaluator(*task, name="dim", dims=(4, 16), corpus_chunk_size=25)
    found = evaluator(model, str(tmp_path))
    assert model.encoded == [20, 25, 25, 10]
    expected = {}
    for dim in (4, 16):
        expected |= Theirs(*task, name=f"dim_{dim}", truncate_dim=dim)(model)
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=0, abs=1e-15)
    assert evaluator.primary_metric == "dim_16_cosine_ndcg@10"
    assert len(list(tmp_path.iterdir())) == 2


def test_embeddings_that_are_passed_are_not_computed():
    queries, corpus, relevant = tied_task()
    texts, task = {number: number for number in range(6)}, renamed(relevant, str)
    model = Vectors(queries, None)
    for dims in (None, (2, 3)):
        evaluator = ExactRetrievalEvaluator(texts, *task, dims=dims)
        found = evaluator(model, corpus_embeddings=corpus)
        assert found == evaluator(Vectors(queries, corpus))


def test_documents_that_are_not_there_count_as_never_found():
    queries, corpus, relevant = retrieval_task()
    for of_query in relevant.values():
        of_query.add("d99")
    relevant["q0"] = {"d98"}
    found = ExactRetrievalEvaluator(queries, corpus, relevant, unknown="ignore")(static_model())
    assert found == pytest.approx(Theirs(queries, corpus, relevant)(static_model()), rel=0, abs=1e-15)


def test_an_evaluator_of_nano_beir_gives_the_values_of_theirs(monkeypatch):
    queries, corpus, relevant = retrieval_task()
    rows = {
        "queries": [{"_id": query, "text": text} for query, text in queries.items()],
        "corpus": [{"_id": document, "text": text} for document, text in corpus.items()],
        "qrels": [
            {"query-id": query, "corpus-id": document}
            for query, documents in relevant.items()
            for document in documents
        ],
    }
    monkeypatch.setattr(evaluation.NanoBEIREvaluator, "_load_dataset_subset_split", lambda _, part, **__: rows[part])

    class ExactNanoBEIREvaluator(evaluation.NanoBEIREvaluator):
        information_retrieval_class = ExactRetrievalEvaluator

    names = ["msmarco", "nq"]
    ours, theirs = (kind(names)(static_model()) for kind in (ExactNanoBEIREvaluator, evaluation.NanoBEIREvaluator))
    assert ours == pytest.approx(theirs, rel=0, abs=1e-15)


def test_one_process_alone_evaluates(gloo_folder):
    """From version 6.2 the Trainer calls an evaluator in the first process alone: it must not wait for the others."""
    [first, _] = answers(gloo_folder, "tests.integrations.process_jobs", 2)
    assert first["on_first"] == ExactRetrievalEvaluator(*retrieval_task())(static_model())


def test_no_matrix_of_all_scores_is_made():
    """The function of scores is only asked for its name."""
    queries, corpus, relevant = tied_task()

    class Named(Vectors):
        def similarity(self, queries, corpus):
            raise AssertionError("a matrix")

    texts = {number: number for number in range(6)}
    evaluator = ExactRetrievalEvaluator(texts, *renamed(relevant, str), memory_mb=1)
    expected = ExactRetrievalEvaluator(texts, *renamed(relevant, str))(Vectors(queries, corpus))
    assert evaluator(Named(queries, corpus)) == expected


def test_the_model_card_has_the_values():
    model = static_model()
    ExactRetrievalEvaluator(*retrieval_task(), name="task")(model)
    ExactRetrievalEvaluator(*retrieval_task(), name="dim", dims=(16, 4))(model)
    card = model.model_card_data
    assert [evaluator.name for evaluator in card.eval_results_dict] == ["task", "dim_16", "dim_4"]
    assert [evaluator.get_config_dict() for evaluator in card.eval_results_dict][1:] == [
        {"truncate_dim": 16},
        {"truncate_dim": 4},
    ]


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"relevant_docs": {"other": {"d0"}}}, ("query", "relevant_docs", "ids")),
        ({"queries": {}}, ("query", "relevant_docs", "ids")),
        ({"relevant_docs": {"q0": ["d0", "d1", "d0"]}}, ("relevant_docs", "'q0'", "twice", "sets")),
        ({"relevant_docs": {"q0": {"d0", "x"}, "q1": {"y"}}}, ("item", "ids", "'x', 'y'", 2, "unknown='ignore'")),
        ({"dims": (4, 4)}, ("dims=(4, 4)", "different", "positive")),
        ({"dims": ()}, ("dims=()", "different", "positive")),
        ({"dims": (4,), "truncate_dim": 8}, ("dims=(4,)", "truncate_dim=8")),
        ({"write_predictions": True}, ("write_predictions=True", "InformationRetrievalEvaluator")),
        ({"unknown": "drop"}, ("unknown='drop'", "'error'", "'ignore'")),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_encoded(options, facts):
    queries, corpus, relevant = retrieval_task()
    arguments = {"queries": queries, "corpus": corpus, "relevant_docs": relevant} | options
    with refused(ValueError, *facts):
        ExactRetrievalEvaluator(**arguments)


SCORES = ("cos_sim", "dot_score", "euclidean_sim", "score_functions")


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"dims": (4, 32)}, ("dims", 32, 16)),
        ({"score_functions": {"cosine": util.manhattan_sim}}, ("manhattan_sim", *SCORES)),
    ],
)
def test_arguments_that_do_not_fit_the_model_are_refused_with_the_fix(options, facts):
    with refused(ValueError, "ExactRetrievalEvaluator", *facts):
        ExactRetrievalEvaluator(*retrieval_task(), **options)(static_model())


def test_a_model_with_a_similarity_that_is_not_exact_is_refused():
    model = static_model()
    model.similarity_fn_name = "manhattan"
    with refused(ValueError, "ExactRetrievalEvaluator", "manhattan", *SCORES):
        ExactRetrievalEvaluator(*retrieval_task())(model)


def test_values_go_into_json():
    json.dumps(ExactRetrievalEvaluator(*retrieval_task())(static_model()))


def other_encoder(kind):
    """An encoder of sentence-transformers without one dense vector for each text."""
    from sentence_transformers import sparse_encoder
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding
    from transformers import PreTrainedTokenizerFast

    if kind == "SparseEncoder":
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=static_model()[0].tokenizer, unk_token="?", pad_token="?")
        weights = torch.rand(tokenizer.vocab_size)
        return sparse_encoder.SparseEncoder(modules=[SparseStaticEmbedding(tokenizer, weights)], device="cpu")
    named = type(kind, (), {})
    return type("Own", (named,), {})()


@pytest.mark.parametrize(
    ("kind", "fitting"),
    [
        ("SparseEncoder", "SparseInformationRetrievalEvaluator"),
        ("MultiVectorEncoder", "MultiVectorInformationRetrievalEvaluator"),
        ("CrossEncoder", "CrossEncoderRerankingEvaluator"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"dims": (8, 4)}])
def test_models_without_a_dense_vector_for_each_text_are_refused_with_their_evaluator(kind, fitting, options):
    model = other_encoder(kind)
    evaluator = ExactRetrievalEvaluator(*retrieval_task(), **options)
    facts = (f"the model ({type(model).__name__})", "SentenceTransformer", fitting)
    with refused(ValueError, *facts):
        evaluator(model)
    with refused(ValueError, *facts):
        evaluator(static_model(), corpus_model=model)


def test_a_kind_of_note_is_logged_once(caplog):
    rows = torch.nn.functional.normalize(torch.randn(10, 8, generator=torch.Generator().manual_seed(0)))
    corpus = {f"d{number}": number for number in range(30)}
    queries = {f"q{number}": number for number in range(10)}
    evaluator = ExactRetrievalEvaluator(queries, corpus, {query: {"d1"} for query in queries})
    for _ in range(2):
        evaluator(Vectors(rows, torch.zeros(30, 8)))
    told = [record.getMessage() for record in caplog.records]
    assert len([text for text in told if not missing_facts(text, ("ExactRetrievalEvaluator", 30, "zero"))]) == 1
