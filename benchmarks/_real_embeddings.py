"""Embeddings of real data by trained networks, without a download: the models are in packages, the data on this machine.

Each set is kept in a cache folder, because the networks take minutes. A set depends on the files and documents of the
machine: two machines have similar sets, not equal ones.
"""

import argparse
import gzip
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import platformdirs
import torch
from torch import Tensor
from torch.nn.functional import normalize

# Increase this number with every change that alters a set.
VERSION = 1

SAMPLING_RATE = 16_000  # of the voice encoder
WINDOW = 160  # frames that the voice encoder was trained on: 1.6 s
LANGUAGES = ("en-gb", "en-us", "en-gb-scotland", "en-029")
WORDS_PER_MINUTE = (130, 220)
PITCHES = (30, 70)  # of 0 to 99
# Minimum and maximum number of words per recording. One recording has about 10 windows.
RECORDING_WORDS = (20, 80)

# A shorter paragraph is a heading or a version.
LEAST_CHARACTERS = 60
MOST_TOKEN_CHARACTERS = 2_000

TRAINING_BATCHES = 150
BATCH_CLASSES, BATCH_IMAGES = 20, 4


class RealSet(NamedTuple):
    """Embeddings (items, dim) in float32, and labels (items,) in int64."""

    embeddings: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Source:
    """A set that can be made on this machine if its modules and programs are installed.

    Attributes:
        what: What an item is, and what its label is.
        modules: Modules to import.
        programs: Programs to call.
        install: Commands that install what is missing.
        make: Returns at most the given number of items.
    """

    what: str
    modules: tuple[str, ...]
    programs: tuple[str, ...]
    install: str
    make: Callable[[int], RealSet]

    def missing(self) -> list[str]:
        """Return the modules and programs that are not installed."""
        modules = [name for name in self.modules if importlib.util.find_spec(name) is None]
        return modules + [name for name in self.programs if shutil.which(name) is None]


def add_cache_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for the folder that caches the sets."""
    cache = os.environ.get("FEWSHOT_CALLBACKS_CACHE") or platformdirs.user_cache_dir("fewshot_callbacks")
    parser.add_argument(
        "--cache", type=Path, default=Path(cache), help="folder of the real embeddings (default: %(default)s)"
    )


def load(name: str, items: int, cache: Path) -> RealSet:
    """Return a set of `SOURCES`, from the cache if it is there; otherwise it is made and cached.

    Args:
        name: Key of `SOURCES`.
        items: Maximum number of items.
        cache: Folder, which is made if it does not exist.
    """
    file = cache / f"real-{name}-{items}-{VERSION}.pt"
    if not file.exists():
        made = SOURCES[name].make(items)
        cache.mkdir(parents=True, exist_ok=True)
        # Moving a complete file into place never leaves a partial one, even if two processes make the set.
        temporary = file.with_suffix(f".{os.getpid()}")
        torch.save({"embeddings": made.embeddings, "labels": made.labels}, temporary)
        temporary.replace(file)
    return RealSet(**torch.load(file, weights_only=True))


def as_set(embeddings: Tensor, names: Sequence[Hashable]) -> RealSet:
    """Return unit vectors of all classes with at least two items, shuffled.

    Args:
        embeddings: (items, dim).
        names: (items,) class of each item.
    """
    number = {name: index for index, name in enumerate(dict.fromkeys(names))}
    size = Counter(names)
    order = [index for index, name in enumerate(names) if size[name] > 1]
    random.Random(0).shuffle(order)
    labels = torch.tensor([number[names[index]] for index in order], dtype=torch.int64)
    return RealSet(normalize(embeddings[order].float(), dim=1), labels)


# ---------------------------------------------------------------------------------------------------------------- voices


def voices(items: int) -> RealSet:
    """Return windows of 1.6 s of synthetic speech, embedded by resemblyzer; the label is the voice.

    A voice is an accent plus a variant of espeak-ng. It reads the Python reference at several speeds and pitches.
    """
    from resemblyzer import VoiceEncoder  # noqa: PLC0415

    recordings = draw_recordings(items)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        spectrograms = list(pool.map(record, recordings))
    windows: list[np.ndarray] = []
    names: list[str] = []
    for recording, spectrogram in zip(recordings, spectrograms, strict=True):
        for start in range(0, len(spectrogram) - WINDOW + 1, WINDOW // 2):
            windows.append(spectrogram[start : start + WINDOW])
            names.append(recording.voice)
    encoder = VoiceEncoder("cpu", verbose=False)
    with torch.inference_mode():
        batches = [
            encoder(torch.from_numpy(np.stack(windows[start : min(start + 256, items)])))
            for start in range(0, min(len(windows), items), 256)
        ]
    return as_set(torch.cat(batches).clone(), names[:items])


class Recording(NamedTuple):
    """One request to espeak-ng."""

    voice: str
    text: str
    words_per_minute: int
    pitch: int


def draw_recordings(items: int) -> list[Recording]:
    """Return recordings with more than the given total of windows, the voices in random order."""
    from pydoc_data.topics import topics  # noqa: PLC0415

    generator = random.Random(0)
    words = re.findall(r"[a-z]+", " ".join(topics.values()))
    accents = [f"{language}+{variant}" for language in LANGUAGES for variant in voice_variants()]
    recordings = []
    # A recording of the fewest words at the highest speed lasts 5 s: 5 windows of 1.6 s that overlap by half.
    for _ in range(items // 5 + 2):
        length = generator.randint(*RECORDING_WORDS)
        first = generator.randrange(len(words) - length)
        voice = generator.choice(accents)
        text = " ".join(words[first : first + length])
        recordings.append(Recording(voice, text, generator.randint(*WORDS_PER_MINUTE), generator.randint(*PITCHES)))
    return recordings


def voice_variants() -> list[str]:
    """Return the variants of espeak-ng, such as "f2"; each changes the formants of a voice."""
    command = ["espeak-ng", "--voices=variant"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[1:]
    return sorted({line.split("!v/")[1].split("  ")[0].strip() for line in lines if "!v/" in line})


def record(recording: Recording) -> np.ndarray:
    """Return the mel spectrogram (frames, channels) of a recording, with leading and trailing silence removed."""
    import librosa  # noqa: PLC0415
    from resemblyzer.audio import normalize_volume, wav_to_mel_spectrogram  # noqa: PLC0415

    settings = ["-v", recording.voice, "-s", str(recording.words_per_minute), "-p", str(recording.pitch)]
    command = ["espeak-ng", *settings, "--stdout", recording.text]
    stream = subprocess.run(command, capture_output=True, check=True).stdout
    # The header of a stream does not contain the length. It has 44 bytes, with the sample rate at byte 24.
    rate = int.from_bytes(stream[24:28], "little")
    samples = np.frombuffer(stream, np.int16, offset=44).astype(np.float32) / 2**15
    samples = librosa.resample(samples, orig_sr=rate, target_sr=SAMPLING_RATE, res_type="polyphase")
    samples, _ = librosa.effects.trim(normalize_volume(samples, -30.0, increase_only=True), top_db=40)
    return wav_to_mel_spectrogram(samples)


# ----------------------------------------------------------------------------------------------------------------- files


def files(items: int) -> RealSet:
    """Return files of the system, embedded by the last hidden layer of magika; the label is the file extension."""
    import magika  # noqa: PLC0415
    import onnx  # noqa: PLC0415
    import onnxruntime  # noqa: PLC0415

    (file,) = Path(magika.__file__).parent.glob("models/standard_*/model.onnx")
    settings = json.loads((file.parent / "config.min.json").read_text(encoding="utf-8"))
    model = onnx.load(file)
    # The last matrix product of the network multiplies the embedding by the vectors of the content types.
    embedding = [node for node in model.graph.node if node.op_type == "MatMul"][-1].input[0]
    model.graph.output.append(onnx.ValueInfoProto(name=embedding))
    network = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    paths = draw_files(items, settings["min_file_size_for_dl"])
    batches = []
    for start in range(0, len(paths), 64):
        content = np.array([first_and_last_bytes(path, settings) for path in paths[start : start + 64]], np.int32)
        batches.append(torch.from_numpy(network.run([embedding], {"bytes": content})[0]))
    return as_set(torch.cat(batches), [path.suffix.lower() for path in paths])


def draw_files(items: int, least_bytes: int) -> list[Path]:
    """Return files with an extension, drawn from the folders of programs, program data and Python."""
    found = []
    for folder in ("/usr/share", "/usr/lib", "/usr/include", "/etc", sys.prefix, sys.base_prefix):
        for parent, _, names in os.walk(folder):
            found += [Path(parent, name) for name in names]
    # One of these folders may be inside another.
    found = sorted(set(found))
    random.Random(0).shuffle(found)
    drawn: list[Path] = []
    for path in found:
        if len(drawn) == items:
            break
        is_word = re.fullmatch(r"\.[A-Za-z]\w*", path.suffix) is not None
        if is_word and not path.is_symlink() and os.access(path, os.R_OK) and path.stat().st_size >= least_bytes:
            drawn.append(path)
    return drawn


def first_and_last_bytes(path: Path, settings: dict[str, int]) -> list[int]:
    """Return the input of magika: the first and last bytes of a file, stripped of white space and padded."""
    with path.open("rb") as file:
        block = min(settings["block_size"], path.stat().st_size)
        beginning = file.read(block).lstrip()[: settings["beg_size"]]
        file.seek(-block, os.SEEK_END)
        end = file.read(block).rstrip()[-settings["end_size"] :]
    padding = settings["padding_token"]
    return [
        *beginning,
        *[padding] * (settings["beg_size"] - len(beginning)),
        *[padding] * (settings["end_size"] - len(end)),
        *end,
    ]


# ------------------------------------------------------------------------------------------------------------ paragraphs


def paragraphs(items: int) -> RealSet:
    """Return paragraphs from the documents of packages, embedded by wordllama; the label is the package.

    Many packages share a licence, so that equal rows have different labels.
    """
    import wordllama  # noqa: PLC0415

    # The package looks for its tokenizer only in the cache, but ships it in its own folder: the package is the cache.
    package = Path(wordllama.__file__).parent
    model = wordllama.WordLlama.load(cache_dir=package, disable_download=True)
    texts: list[str] = []
    names: list[str] = []
    for name, text in draw_paragraphs(items):
        names.append(name)
        texts.append(text[:MOST_TOKEN_CHARACTERS])
    return as_set(torch.from_numpy(model.embed(texts)), names)


def draw_paragraphs(items: int) -> list[tuple[str, str]]:
    """Return (package, paragraph) pairs of whole packages, drawn until there are enough paragraphs.

    The documents come from Debian packages, and from the metadata and licences of Python packages.
    """
    documents: dict[str, list[Path]] = {}
    for file in sorted(Path("/usr/share/doc").glob("*/*")):
        is_text = file.name == "copyright" or file.name.startswith(("README", "NEWS"))
        if is_text and file.is_file():
            documents.setdefault(file.parent.name, []).append(file)
    for folder in {Path(entry) for entry in sys.path if entry.endswith("site-packages")}:
        for information in sorted(folder.glob("*.dist-info")):
            texts = [information / "METADATA", *information.glob("**/LICENSE*")]
            documents.setdefault(information.name, []).extend(file for file in texts if file.is_file())
    packages = sorted(documents)
    random.Random(0).shuffle(packages)
    drawn: list[tuple[str, str]] = []
    for package in packages:
        for file in documents[package]:
            drawn += [(package, paragraph) for paragraph in paragraphs_of(file)]
        if len(drawn) >= items:
            break
    return drawn[:items]


def paragraphs_of(file: Path) -> list[str]:
    """Return the paragraphs of a plain or gzipped text, one per line."""
    content = file.read_bytes()
    if file.suffix == ".gz":
        content = gzip.decompress(content)
    # Debian writes an empty line in a licence as a dot.
    blocks = re.split(r"\n[ \t.]*\n", content.decode("utf-8", errors="replace"))
    joined = [" ".join(block.split()) for block in blocks]
    return [paragraph for paragraph in joined if len(paragraph) >= LEAST_CHARACTERS]


# ---------------------------------------------------------------------------------------------------------------- glyphs


def glyphs(items: int) -> RealSet:
    """Return the glyphs of all scripts, embedded by a network that was trained on the training split for half a minute.

    The label is the character. Most images belong to classes that the network was trained on.
    """
    from fewshot_callbacks import Conv4, Glyphs, SoftAveragePrecisionLoss  # noqa: PLC0415

    torch.manual_seed(0)
    generator = random.Random(0)
    train = Glyphs("train")
    images_of_class: dict[int, list[int]] = {}
    for index, label in enumerate(train.labels.tolist()):
        images_of_class.setdefault(label, []).append(index)
    network, loss = Conv4(1), SoftAveragePrecisionLoss()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(TRAINING_BATCHES):
        classes = generator.sample(sorted(images_of_class), BATCH_CLASSES)
        batch = [index for label in classes for index in generator.sample(images_of_class[label], BATCH_IMAGES)]
        optimizer.zero_grad()
        loss(network(train.batch(batch)[0]), train.labels[batch]).backward()
        optimizer.step()
    network.eval()
    embeddings: list[Tensor] = []
    names: list[str] = []
    for split in train.splits:
        dataset = train.with_split(split)
        names += [dataset.class_names[label] for label in dataset.labels.tolist()]
        with torch.inference_mode():
            embeddings += [network(dataset.batch(part.tolist())[0]) for part in torch.arange(len(dataset)).split(512)]
    order = list(range(len(names)))
    generator.shuffle(order)
    chosen = sorted(order[:items])
    return as_set(torch.cat(embeddings)[chosen].clone(), [names[index] for index in chosen])


SOURCES = {
    "voices": Source(
        "1.6 s of speech; its voice",
        ("resemblyzer", "pkg_resources"),
        ("espeak-ng",),
        'apt-get install espeak-ng; pip install resemblyzer "setuptools<81"',
        voices,
    ),
    "files": Source("a file; the ending of its name", ("magika", "onnx"), (), "pip install magika onnx", files),
    "paragraphs": Source("a paragraph; its package", ("wordllama",), (), "pip install wordllama", paragraphs),
    "glyphs": Source("a glyph; its character", (), (), "", glyphs),
}
"""name -> how a set is made"""
