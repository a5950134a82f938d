"""Data sets of Hugging Face's library: the images and labels that the library itself reads, by number, no network."""

import io
import os
import pickle
import re
import socket
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from scripts import check_data
from tests.helpers import file_of, mistakes_of, trained
from tests.utils.data import loading
from utils.checkpoint.fingerprint import listing_of, same_images
from utils.config.settings import UserError
from utils.data.formats.hugging_face import Rows, labels_of
from utils.data.images.decoding import UnreadableImage, open_image

datasets.disable_progress_bars()
NAMES = ["ant", "bee", "cat"]
FLAGS = ("--dataname", "hf", "--device", "cpu", "--image-size", "8", "--arch", "fc", "--workers", "0")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    connect = socket.socket.connect

    def refuse(*_, **__):
        raise AssertionError("the network is asked")

    def connect_here(self, address):  # to worker processes
        return connect(self, address) if self.family == socket.AF_UNIX else refuse()

    monkeypatch.setattr(socket.socket, "connect", connect_here)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def encoded(number, kind="PNG"):
    pixels = np.random.default_rng(number).integers(0, 256, (10 + number % 3, 12, 3), dtype=np.uint8)
    return file_of(Image.fromarray(pixels), kind)


def table(count, first=0, label=None, image=None):
    numbers = range(first, first + count)
    return datasets.Dataset.from_dict(
        {
            "id": list(numbers),
            "photo": [{"bytes": encoded(number), "path": None} for number in numbers],
            "kind": [number % 3 for number in numbers],
        },
        features=datasets.Features(
            {
                "id": datasets.Value("int64"),
                "photo": image or datasets.Image(),
                "kind": label or datasets.ClassLabel(names=NAMES),
            }
        ),
    )


def save(root, kind, train, validation):
    """Both splits below ``root`` as one of the layouts in which people have them."""
    splits = {"train": train, "validation": validation}
    if kind == "saved":
        datasets.DatasetDict(splits).save_to_disk(str(root))
        return root
    for name, split in splits.items():
        half = len(split) // 2
        for part, rows in enumerate((split.select(range(half)), split.select(range(half, len(split))))):
            place = {
                "hub": root / "data" / f"{name}-0000{part}-of-00002.parquet",
                "folders": root / name / f"000{part}.parquet",
            }[kind]
            place.parent.mkdir(parents=True, exist_ok=True)
            rows.to_parquet(str(place))
    return root


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("hf") / "set", "saved", table(24), table(9, 100))


def read(root, *flags):
    return loading.read(*FLAGS, "--datapath", root, *flags)


def validated(root, *flags):
    """The validation images as a loader gives them, and the fingerprint of the data."""
    _, validation, _ = loading.make(*FLAGS, "--datapath", root, *flags)
    return torch.cat([batch.images for batch in validation.batches()]), read(root, *flags).fingerprint


RESIDENT = ("--loader", "resident", "--augment", "flip")


def expected(first, count):
    return [np.asarray(Image.open(io.BytesIO(encoded(number)))) for number in range(first, first + count)]


@pytest.mark.parametrize("kind", ["saved", "hub", "folders"])
def test_images_labels_and_classes_are_those_that_were_written(tmp_path, kind):
    data = read(save(tmp_path / "set", kind, table(24), table(9, 100)))
    assert data.classes == tuple(NAMES)
    for images, first, count in ((data.train, 0, 24), (data.validation, 100, 9)):
        assert images.labels.tolist() == [number % 3 for number in range(first, first + count)]
        shown = [np.asarray(open_image(path, "RGB")) for path in images.paths]
        assert all(np.array_equal(a, b) for a, b in zip(shown, expected(first, count), strict=True))
    row = pickle.loads(pickle.dumps(data.train.paths[5]))  # as between processes
    assert row.endswith("train[5]") and row.content() == encoded(5)


@pytest.mark.parametrize("form, columns", [("pandas", None), ("numpy", ["kind"])])
def test_a_format_that_was_saved_with_a_table_changes_nothing(tmp_path, form, columns):
    save(tmp_path / "set", "saved", table(6).with_format(form, columns=columns), table(9, 100))
    assert [path.content() for path in read(tmp_path / "set").train.paths] == [*map(encoded, range(6))]


def test_the_layouts_of_one_data_set_have_one_fingerprint_and_other_images_another(tmp_path, saved):
    hub = save(tmp_path / "hub", "hub", table(24), table(9, 100))
    assert read(hub).fingerprint == read(saved).fingerprint
    assert read(hub).fingerprint == read(hub.rename(tmp_path / "moved")).fingerprint
    for other in (table(24, 1), table(23)):
        root = save(tmp_path / f"other{len(other)}{other[0]['id']}", "saved", other, table(9, 100))
        assert read(root).fingerprint != read(saved).fingerprint


def test_other_images_of_the_same_sizes_have_another_fingerprint(tmp_path):
    """As those of formats that do not compress. An older version knew nothing of the content."""
    sets = []
    for first in (0, 3):
        numbers = range(first, first + 24)
        rows = table(24).remove_columns("photo").add_column("photo", [{"bytes": encoded(n, "BMP")} for n in numbers])
        sets.append(read(save(tmp_path / str(first), "saved", rows.cast_column("photo", datasets.Image()), rows)))
    one, other = (data.fingerprint for data in sets)
    assert sets[0].train.paths.identity == sets[1].train.paths.identity
    assert listing_of(one) == listing_of(other) and not same_images(one, other)
    assert same_images(listing_of(one), other)


def test_a_parquet_file_that_was_replaced_by_one_of_the_same_time_is_converted_again(tmp_path):
    """Unpacking an archive, for example, sets times to those in it."""
    root = save(tmp_path / "set", "hub", table(24), table(9, 100))
    long_ago = 10**18

    def set_back():
        for path in root.rglob("*.parquet"):
            os.utime(path, ns=(long_ago, long_ago))

    set_back()
    before = read(root)
    assert before.train.paths[0].content() == encoded(0)
    save(root, "hub", table(24, 200), table(9, 100))
    set_back()
    after = read(root)
    assert after.train.paths[0].content() == encoded(200) and after.fingerprint != before.fingerprint
    sizes = [path.stat().st_size for path in sorted(root.rglob("*.parquet"))]
    label = datasets.ClassLabel(names=NAMES[::-1])
    save(root, "hub", table(24, 200, label), table(9, 100, label))
    set_back()
    assert [path.stat().st_size for path in sorted(root.rglob("*.parquet"))] == sizes
    assert read(root).classes == tuple(NAMES[::-1])


def test_parts_of_other_splits_are_no_training_images_though_their_names_begin_alike(tmp_path):
    root = save(tmp_path / "set", "hub", table(24), table(9, 100))
    for name in ("train_noisy", "validation.hard"):
        table(5, 300).to_parquet(str(root / "data" / f"{name}-00000-of-00001.parquet"))
    table(3, 400).to_parquet(str(root / "data" / "train-00002-of-00003-a09b74b3ef9c3b56.parquet"))
    data = read(root)
    assert (len(data.train), len(data.validation)) == (27, 9)
    assert data.warnings == ()
    (root / "data" / "train-00001-of-00002.parquet").unlink()
    assert read(root).warnings == (f"--datapath {root}: holds 2 of the 3 parquet files of train",)
    table(3, 500).to_parquet(str(root / "data" / "more.parquet"))
    assert f"--datapath {root}: parquet files whose names say no split are left out: data/more.parquet" in (
        read(root).warnings
    )


def test_files_that_number_their_classes_in_another_way_are_refused(tmp_path):
    root = save(tmp_path / "set", "hub", table(24), table(9, 100))
    other = table(6, 300, label=datasets.ClassLabel(names=NAMES[::-1]))
    other.to_parquet(str(root / "data" / "train-00001-of-00002.parquet"))
    with pytest.raises(
        UserError, match="classes of column kind are other ones, or in another order, than in train-00000"
    ):
        read(root)


def test_resident_images_are_those_of_the_column_and_of_files_as_they_are_now(tmp_path):
    def cells(first):
        return [{"bytes": encoded(first + number), "path": None} for number in range(12)]

    rows = {"photo": cells(0), "mask": cells(50), "kind": [number % 3 for number in range(12)]}
    features = {"photo": datasets.Image(), "mask": datasets.Image(), "kind": datasets.ClassLabel(names=NAMES)}
    rows["photo"][4] = {"bytes": None, "path": "a.png"}
    both = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    (tmp_path / "a.png").write_bytes(encoded(4))
    for name in ("train", "test"):
        write_as_it_is(both, tmp_path / f"{name}.parquet")

    def shown(column):
        return validated(tmp_path, *RESIDENT, "--image-column", column)

    (photos, before) = shown("photo")
    (masks, _) = shown("mask")
    assert not any(map(torch.equal, photos, masks))
    assert torch.equal(shown("photo")[0], photos)
    (tmp_path / "a.png").write_bytes(encoded(77))
    after, fingerprint = shown("photo")
    assert [number for number in range(12) if not torch.equal(after[number], photos[number])] == [4]
    assert fingerprint != before


def test_tables_are_mapped_and_told_apart_also_where_the_library_is_told_to_hold_them_in_memory(tmp_path, monkeypatch):
    """As HF_DATASETS_IN_MEMORY_MAX_SIZE does."""
    monkeypatch.setattr(datasets.config, "IN_MEMORY_MAX_SIZE", 10**9)
    root = save(tmp_path / "set", "saved", table(6), table(6))
    before = read(root).train.paths[0].version
    for path in (root / "train").glob("*.arrow"):
        os.utime(path, ns=(1, 1))
    assert read(root).train.paths[0].version != before


def write_as_it_is(rows, path):
    """As parquet files that other programs made: images that lie elsewhere stay there."""
    parquet.write_table(rows.with_format("arrow")[:], str(path))


def test_a_single_table_is_split_and_evaluated_as_it_was(tmp_path):
    table(24).save_to_disk(str(tmp_path))
    with pytest.raises(UserError, match=r"no validation or test split.*--val-split 0\.2"):
        read(tmp_path)
    data = read(tmp_path, "--val-split", "0.25")
    drawn = read(tmp_path, "--val-split", "0.25", "--val-split-by", "draw").validation.labels
    assert np.bincount(drawn).tolist() == [2, 2, 2]
    assert data.validation.labels.tolist() == [path.number % 3 for path in data.validation.paths]
    numbers = sorted(path.number for path in (*data.train.paths, *data.validation.paths))
    assert numbers == [*range(24)] and data.train.paths.identity != data.validation.paths.identity
    alone = loading.evaluated(tmp_path, *FLAGS, "--val-split", "0.25")
    assert alone.validation.paths.identity == data.validation.paths.identity


def test_a_set_to_evaluate_needs_no_training_images(tmp_path):
    datasets.DatasetDict({"test": table(9)}).save_to_disk(str(tmp_path))
    data = loading.evaluated(tmp_path, *FLAGS)
    assert data.train is None and len(data.validation) == 9 and data.classes == tuple(NAMES)
    with pytest.raises(UserError, match=r"holds no training images .*\(it holds test\)"):
        read(tmp_path)


LABELS = {
    "text": ([NAMES[number % 3] for number in range(12)], tuple(NAMES)),
    "numbers": ([number % 3 for number in range(12)], ("0", "1", "2")),
    "truth": ([number % 2 == 1 for number in range(12)], ("false", "true")),
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_may_be_text_numbers_or_truth_values_and_columns_are_guessed_by_their_names(tmp_path, kind):
    values, classes = LABELS[kind]
    rows = datasets.Dataset.from_dict({"jpg": [encoded(n, "JPEG") for n in range(12)], "cls": values, "id": values})
    data = read(save(tmp_path, "saved", rows, rows))
    assert data.classes == classes
    assert [classes[label] for label in data.train.labels] == [str(value).lower() for value in values]
    assert np.asarray(open_image(data.train.paths[3], "RGB")).shape == (10, 12, 3)


def test_labels_that_are_text_in_one_split_and_bare_numbers_in_the_other_are_refused(tmp_path):
    texts = change("kind", [NAMES[number % 3] for number in range(24)])(table(24))
    numbers = change("kind", [number % 3 for number in range(24)])(table(24))
    with pytest.raises(UserError, match="--label-column kind: holds text in train and numbers in validation"):
        read(save(tmp_path / "bad", "saved", texts, numbers), "--label-column", "kind")
    named = read(save(tmp_path / "good", "saved", texts, table(24)), "--label-column", "kind")
    assert named.validation.labels.tolist() == named.train.labels.tolist()


def change(column, values, kind=None):
    def changed(rows):
        rows = rows.remove_columns(column).add_column(column, values)
        return rows if kind is None else rows.cast_column(column, kind)

    return changed


def refusal_of(rows, flags, tmp_path):
    """The line with which a data set of these rows is refused."""
    (line,) = mistakes_of(read, save(tmp_path / "set", "saved", rows, rows), *flags.split())
    return line


TRUTH = [[0, 1, 1], [1, 0, 0]] * 12
TRUTH_IS_TOLD = r"every list of train holds 3 zeros and ones, .* give lists of the classes shown"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([-1, *[0, 1] * 12][:24], r"1 rows of train have a label that is no class, the first -1 in row 0"),
        ([10**12] * 24, r"--label-column kind: holds numbers up to 1,000,000,000,000; classes are numbers from 0 on"),
        ([None, *[0, 1] * 12][:24], r"--label-column kind: 1 rows of train have no label"),
        (["", " ", *"ab" * 11], r"--label-column kind: 2 rows of train have no label"),
        ([["a", ""], ["a", "b"]] * 12, r"--label-column kind: 12 labels in the lists of train are missing"),
        (
            [["a", None], ["a", "b"]] * 12,
            r"--label-column kind: 12 labels in the lists of train are missing; leave them out of the lists",
        ),
        ([[0, 1, 1], [1, -1, -2]] * 12, r"12 rows of train have a label that is no class, the first -1 in row 1 "),
        (TRUTH, TRUTH_IS_TOLD),
        ([[0.5, 1.0]] * 24, r"holds lists of double in train; lists of classes are needed"),
    ],
)
def test_labels_that_cannot_be_read_are_one_clear_line(values, words, tmp_path):
    rows = change("kind", values)(table(24))
    assert re.search(words, refusal_of(rows, "--label-column kind", tmp_path))


@pytest.mark.parametrize(
    ("make", "flags", "words"),
    [
        (None, "--label-column species", r"--label-column species: .* has the columns id, photo, kind"),
        (None, "--image-column id", r"--image-column id: holds no images but Value"),
        (
            lambda rows: rows.add_column("coarse", [0] * 24).cast_column(
                "coarse", datasets.ClassLabel(names=["a", "b"])
            ),
            "",
            r"--label-column COLUMN is needed: .* has the columns id, photo, kind, coarse",
        ),
        (
            change("kind", TRUTH, datasets.Sequence(datasets.ClassLabel(names=["no", "yes"]))),
            "--label-column kind",
            TRUTH_IS_TOLD,
        ),
    ],
)
def test_columns_that_cannot_be_taken_are_one_clear_line(make, flags, words, tmp_path):
    rows = make(table(24)) if make else table(24)
    assert re.search(words, refusal_of(rows, flags, tmp_path))


def test_damaged_rows_are_named_and_skipped_on_request(tmp_path, capsys):
    rows = table(24).to_dict()
    rows["photo"][7]["bytes"] = encoded(7)[:40]
    rows["photo"][9] = None
    damaged = datasets.Dataset.from_dict(rows, features=table(1).features)
    root = save(tmp_path / "set", "saved", damaged, table(9, 100))
    paths = read(root).train.paths
    for number, reason in ((7, "is not an image in a known format"), (9, "holds no image")):
        with pytest.raises(UnreadableImage, match=rf"train\[{number}\]: cannot be read as an image .*{reason}"):
            open_image(paths[number], "RGB")
    run = trained(tmp_path / "runs", *FLAGS, "--datapath", root, "--epochs", 1, "--skip-bad-images")
    assert all(f"train[{number}]" in (run / "bad_images.txt").read_text() for number in (7, 9))


def test_an_image_that_lies_elsewhere_is_read_from_the_disk_and_never_fetched(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(5))
    cells = [{"bytes": None, "path": path} for path in ("a.png", "https://example.com/x.png", "gone.png")]
    rows = datasets.Dataset.from_dict({"photo": cells}, features=datasets.Features({"photo": datasets.Image()}))
    paths = Rows(rows, "photo", "set/train", str(tmp_path))
    assert np.array_equal(np.asarray(open_image(paths[0], "RGB")), expected(5, 1)[0])
    for number, reason in ((1, "nothing is fetched"), (2, "No such file")):
        with pytest.raises(UnreadableImage, match=reason):
            open_image(paths[number], "RGB")


def test_a_damaged_table_and_two_data_sets_in_one_folder_are_clear_errors(tmp_path):
    root = save(tmp_path / "set", "saved", table(24), table(9))
    (arrow,) = (root / "train").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:100])
    with pytest.raises(UserError, match="set/train cannot be read by the library datasets"):
        read(root)
    for name in ("one", "two"):
        save(tmp_path / "both" / name, "folders", table(6), table(6))
    with pytest.raises(UserError, match="parquet files of train lie in .*one/train and in .*two/train"):
        read(tmp_path / "both")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no training images that save_to_disk wrote"):
        read(tmp_path / "empty")


def test_a_table_that_is_read_as_class_folders_gets_a_hint_and_one_that_is_checked_no_false_notes(
    saved, tmp_path, capsys
):
    with pytest.raises(UserError, match="holds tables of Hugging Face's library datasets; use --dataname hf"):
        read(saved, "--dataname", "folder")
    flags = ["--dataname", "hf", "--datapath", str(saved), "--workers", "0", "--no-progress", "--output", str(tmp_path)]
    assert check_data.main(flags) == 0
    report = capsys.readouterr().out
    assert "no faults in 33 images" in report and "other format" not in report and "not read" not in report


def test_without_the_library_a_line_says_how_to_install_it(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        UserError, match=r"--dataname hf needs the library datasets .*pip install -r requirements-tools\.txt"
    ):
        read(saved)


def test_resident_images_and_worker_processes_read_the_same_rows(saved, tmp_path):
    def batches(*flags):
        return validated(saved, "--cache-dir", tmp_path, *flags)[0]

    here = batches("--loader", "stream")
    there = batches("--loader", "stream", "--workers", 2)
    assert torch.equal(here, there)
    for _ in ("decoded", "kept"):
        assert torch.equal(batches(*RESIDENT), here) and len([*Path(tmp_path).glob("*.npy")]) == 2


def test_a_missing_text_is_an_image_whose_labels_are_all_unknown():
    table = datasets.Dataset.from_dict({"labels": ["cat;dog", None, "dog"]})
    assert labels_of(table, "labels", "train", ";").known.tolist() == [True, False, True]
