"""Several labels an image: read from tables and lists, packed, loaded and mixed, with what is missing."""

import csv
import math
import re

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image

from scripts import pack
from tests.helpers import mistakes_of
from tests.utils.data.loading import make, read, steps_in_any_way
from utils.config.groups.augmentation import AugmentationSettings
from utils.config.settings import UserError
from utils.data.formats.several_labels import LabelLists, of_column
from utils.data.loaders import targets_of
from utils.data.mixing import Mixing
from utils.data.sample_plan import MicroBatch
from utils.data.sampling import described

NAMES = ("ant", "bee", "cow")
# Labels of eight images to train on and of four to validate on; None is missing.
ROWS = [(1, 0, 0), (1, 1, 0), (0, 0, 0), (None, 1, 0), (0, 1, 1), (0, None, None), (1, 1, 1), (0, 0, 1)]
VALIDATION = [(1, 0, None), (0, 1, 0), (1, 0, 0), (0, 0, 0)]
COLUMNS = ("--label-columns", *NAMES)


@pytest.fixture
def tree(tmp_path):
    """Twelve images, a table with a column a class, and one with lists, in which a label is never missing alone."""
    with open(tmp_path / "columns.csv", "w") as a, open(tmp_path / "lists.csv", "w") as b:
        columns, lists = csv.writer(a), csv.writer(b)
        columns.writerow(["path", "split", *NAMES])
        lists.writerow(["path", "split", "label"])
        for number, row in enumerate(ROWS + VALIDATION):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"{number:02}.png")
            split = "train" if number < len(ROWS) else "val"
            columns.writerow([f"{number:02}.png", split, *("" if one is None else one for one in row)])
            names = [name for name, one in zip(NAMES, row, strict=True) if one]
            lists.writerow([f"{number:02}.png", split, "" if None in row else ";".join(names) or ";"])
    return tmp_path


def flags(tree, table="columns.csv", labels=COLUMNS):
    return ("--dataname", "folder", "--datapath", tree, "--labels", tree / table, *labels, "--image-size", 8)


def stored(rows):
    return [[-1 if one is None else one for one in row] for row in rows]


def test_a_column_a_class_gives_1_0_and_missing_in_the_order_of_the_flag(tree):
    data = read(*flags(tree))
    assert data.multilabel and data.classes == NAMES
    assert data.train.labels.dtype == torch.int8
    assert data.train.labels.tolist() == stored(ROWS)
    assert data.validation.labels.tolist() == stored(VALIDATION)
    turned = read(*flags(tree, labels=("--label-columns", "cow", "ant", "bee")))
    assert turned.classes == ("cow", "ant", "bee")
    assert torch.equal(turned.train.labels, data.train.labels[:, [2, 0, 1]])


def test_columns_may_have_blanks_and_commas_in_their_names(tree):
    table = tree / "columns.csv"
    table.write_text(table.read_text().replace("ant,bee", 'lung opacity,"bee, queen"', 1))
    names = ("lung opacity", "bee, queen", "cow")
    data = read(*flags(tree, labels=("--label-columns", *names)))
    assert data.classes == names
    assert data.train.labels.tolist() == stored(ROWS)
    recipe = tree / "recipe.yaml"
    recipe.write_text("label-columns: [lung opacity, 'bee, queen', cow]\n")
    assert read("--config", recipe, *flags(tree, labels=())).classes == names


@pytest.mark.parametrize("name", ["weight", "group", "split", "photo"])
def test_a_class_called_like_a_usual_column_is_only_a_class(tree, name):
    """As a weight, it would keep images without it from training."""
    text = (tree / "columns.csv").read_text().replace("cow", name, 1)
    (tree / "columns.csv").write_text(text.replace("split", "set", 1))
    data = read(*flags(tree, labels=("--label-columns", "ant", "bee", name)))
    assert data.train.labels.tolist() == stored(ROWS) and data.classes == ("ant", "bee", name)
    assert data.train.weights is data.train.groups is None


def test_lists_in_a_cell_give_all_labels_an_empty_one_none_and_a_separator_alone_no_class(tree):
    data = read(*flags(tree, "lists.csv", ("--label-separator", ";")))
    assert data.classes == NAMES
    assert data.train.labels.tolist() == [[-1] * 3 if None in row else list(row) for row in ROWS]
    assert any("3 image(s) without any known label" in line for line in data.warnings)


def test_a_blank_may_separate_labels_and_a_separator_that_stands_nowhere_is_told(tree):
    text = (tree / "lists.csv").read_text()
    (tree / "blanks.csv").write_text(text.replace(";", " "))
    assert read(*flags(tree, "blanks.csv", ("--label-separator", " "))).classes == NAMES
    (tree / "one.csv").write_text(re.sub(r";\w+", "", text))
    warnings = read(*flags(tree, "one.csv", ("--label-separator", ","))).warnings
    assert "--label-separator: ',' occurs in no cell, so each cell names one class" in warnings


def test_a_cell_that_says_1_or_0_for_each_class_is_refused(tree):
    table = tree / "lists.csv"
    table.write_text("path,split,label\n00.png,train,0;1;1\n01.png,train,1;0;0\n02.png,val,0;1;0\n")
    (line,) = mistakes_of(read, *flags(tree, "lists.csv", ("--label-separator", ";")))
    assert "every list in the column of labels holds 3 zeros and ones" in line and "--label-columns" in line


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ([[0, 1, 1], None, [0, 0, 0]], True),
        ([[1, 1], [0, 1]], True),
        ([[0, 1], None, [1, 0]], True),  # otherwise each image shows both of two classes
        ([[0, 1], [0, 1]], False),
        ([[0, 0, 1], [1]], False),
        ([[0, 0, 2], [1, 2, 2]], False),
        ([[], None], False),
        ([["0", "0"], ["1", "0"]], True),
        ([["0"], ["1"]], False),
        ([["0", "0"], ["1", "x"]], False),
    ],
)
def test_lists_that_say_1_or_0_for_each_class_are_told_from_lists_of_classes(lists, expected):
    items = pyarrow.string() if isinstance((lists[0] or [0])[0], str) else pyarrow.int64()
    assert LabelLists.of_arrow(pyarrow.chunked_array([lists], pyarrow.list_(items))).are_truth_values is expected


def test_what_is_no_label_is_one_line_with_its_place(tree):
    table = tree / "columns.csv"
    table.write_text(table.read_text().replace("01.png,train,1,1,0", "01.png,train,1,2,0"))
    (line,) = mistakes_of(read, *flags(tree))
    assert line.endswith("columns.csv: line 3, column bee: 2 is none of 1, 0 and nothing, for a missing label")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (("--label-columns", "ant", "dog"), "--label-columns dog: .* has the columns path, split, ant, bee, cow$"),
        (("--label-columns", "ant", "ant"), "--label-columns: names a column twice"),
        ((*COLUMNS, "--label-separator", ";"), "two ways to give several labels"),
        ((*COLUMNS, "--class-map", "f"), "give several labels an image, and one"),
    ],
)
def test_flags_that_fit_no_table_or_not_each_other_are_one_line(tree, labels, message):
    with pytest.raises(UserError, match=message):
        read(*flags(tree, labels=labels))


def test_a_class_that_only_validation_has_and_a_split_without_labels_are_refused(tree):
    table = tree / "lists.csv"
    table.write_text(table.read_text().replace("08.png,val,", "08.png,val,emu"))
    with pytest.raises(UserError, match=r"line 10, column label: emu is no class of the rows to train on"):
        read(*flags(tree, "lists.csv", ("--label-separator", ";")))
    table.write_text("path,split,label\n00.png,train,ant;bee\n08.png,val,;\n")
    with pytest.raises(UserError, match="no image to validate on has a label$"):
        read(*flags(tree, "lists.csv", ("--label-separator", ";")))


def test_words_for_yes_and_no_are_read_and_others_are_told():
    labels, wrong = of_column(["1", "0", "", None, "True", "NO", "-1", "0.0", "x", float("nan"), ["a"], {"bytes": b""}])
    assert labels.tolist() == [1, 0, -1, -1, 1, 0, -1, 0, -1, -1, -1, -1]
    assert wrong.tolist() == [8, 10, 11]
    lists = LabelLists.split(["b; a", "", " ; ", "a"], ";")
    numbers = np.array(["ab".index(name) for name in lists.values])
    assert lists.matrix(numbers, 2).tolist() == [[1, 1], [-1, -1], [0, 0], [1, 0]]


@pytest.mark.parametrize("more", [(), ("--mixup", 1, "--cutmix", 1)])
def test_steps_have_the_same_targets_with_any_loader_ranks_and_passes(tree, more):
    line = (*flags(tree), "--augment", "none", "--global-batch-size", 4, "--workers", 0, *more)
    ways = [(1, 1, "resident"), (1, 2, "stream"), (2, 1, "stream"), (2, 1, "resident")]
    steps = steps_in_any_way(*line, ways=ways)
    rows = targets_of(torch.tensor(stored(ROWS), dtype=torch.int8))
    for numbers, _, targets in steps.values():
        assert targets.dtype == torch.float32
        if not more:
            assert torch.equal(targets.nan_to_num(-1), rows[numbers].nan_to_num(-1))


def test_packed_images_have_the_labels_of_their_table(tree, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed") / "shards"
    assert pack.main([*map(str, flags(tree)[:-2]), "--output", str(out), "--format", "png", "--workers", "0"]) == 0
    packed = read("--dataname", "shards", "--datapath", out, "--image-size", 8)
    data = read(*flags(tree))
    assert packed.classes == data.classes
    for split in ("train", "validation"):
        assert torch.equal(getattr(packed, split).labels, getattr(data, split).labels)
        assert getattr(packed, split).labels.dtype == torch.int8


def test_validation_shows_missing_labels_as_nan_and_leaves_none_out(tree):
    _, validation, _ = make(*flags(tree), "--val-batch-size", 3, "--workers", 0)
    assert validation.multilabel
    targets = torch.cat([batch.targets for batch in validation.batches()])
    assert torch.equal(targets.nan_to_num(-1), torch.tensor(stored(VALIDATION)).float())


class Drawn(Mixing):
    """A mixing of two images of which the first keeps a share of itself, and the second is left as it is."""

    kept = 0.25

    def draw(self, micro_batches, height, width):
        blend = super().draw(micro_batches, height, width)
        kept = np.array([self.kept, 1.0])
        object.__setattr__(blend, "opacity", kept)
        object.__setattr__(blend, "kept", kept)
        return blend


@pytest.mark.parametrize(("kept", "first"), [(0.25, [math.nan, math.nan, 0.25]), (0.0, [1.0, math.nan, 0.0])])
def test_a_mixed_pair_lacks_the_labels_that_either_lacks_and_an_image_alone_only_its_own(kept, first):
    mixing = Drawn(AugmentationSettings(mixup=1.0), 3, 0)
    object.__setattr__(mixing, "kept", kept)
    batch = MicroBatch(0, 0, np.arange(2), 2, 1.0, True)
    labels = torch.tensor([[math.nan, 0.0, 1.0], [1.0, math.nan, 0.0]])
    _, targets, _ = mixing(torch.zeros(2, 1, 4, 4), labels, [batch])
    assert torch.equal(targets.nan_to_num(-1), torch.tensor([first, [1.0, math.nan, 0.0]]).nan_to_num(-1))


def test_a_share_of_the_training_images_is_described_by_the_images_of_each_class(tree):
    train, _, _ = make(*flags(tree), "--train-samples", 7, "--workers", 0)
    chosen = train.plan.sampling
    counts = [sum(ROWS[number][place] == 1 for number in chosen.available) for place in range(3)]
    words = ", ".join(f"{count} {name}" for count, name in zip(counts, NAMES, strict=True))
    assert described(chosen, torch.tensor(stored(ROWS), dtype=torch.int8), NAMES).endswith(
        f"of 7 of the 8 training images: {words}"
    )
