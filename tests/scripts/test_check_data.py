"""scripts/check_data.py: each fault is planted in a small tree, named and counted; a clean tree has none."""

import hashlib
import shutil
import zlib
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from scripts import check_data
from scripts.data_check.findings import flattered_by_random
from scripts.data_check.survey import hexadecimal, take_survey
from tests.helpers import answer, csv_rows, exif_that_turns
from tests.utils.data.test_readers import write_idx
from utils.config.arguments import parse
from utils.config.settings import UserError
from utils.data.datasets import get_data
from utils.data.images.decoding import open_image

SIZE = (160, 120)


def noise(seed, size=SIZE):
    """An image that no other seed gives."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def plant(path, seed=None, size=SIZE, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    noise(zlib.crc32(repr(path.parts[-3:]).encode()) if seed is None else seed, size).save(path, **options)
    return path


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Two classes, 6 training and 4 validation images of each, nothing wrong with them."""
    folder = tmp_path_factory.mktemp("clean")
    seeds = iter(range(100))
    for split, count in (("train", 6), ("val", 4)):
        for name in ("cat", "dog"):
            for number in range(count):
                ending = ("png", "jpg")[number % 2]
                plant(folder / split / name / f"{number}.{ending}", next(seeds))
    return folder


@pytest.fixture
def tree(clean, tmp_path):
    """A copy of these."""
    return shutil.copytree(clean, tmp_path / "data")


class Checked:
    """Output, files and exit code of a check."""

    def __init__(self, code, said, folder):
        self.code = code
        self.text, self.err = said
        self.images = {row["path"]: row for row in csv_rows(folder / "images.csv")}
        self.damaged = dict(line.split("\t") for line in (folder / "damaged.txt").read_text().splitlines())
        assert (folder / "report.txt").read_text().strip() in self.text
        assert self.text.startswith("verdict: no faults" if code == 0 else "verdict: FAULTS")

    @property
    def lines(self):
        """Findings and notes."""
        return [line.removeprefix("- ") for line in self.text.splitlines() if line.startswith("- ")]

    def line(self, kind):
        """The one finding or note of a kind."""
        (found,) = [line for line in self.lines if line.startswith(f"{kind}: ")]
        return found

    def problem(self, path):
        return self.images[str(path)]["problem"]

    def row(self, name):
        """A table's row by its first cell."""
        return next(line.split()[1:] for line in self.text.splitlines() if line.split()[:1] == [name])


@pytest.fixture
def check(tmp_path, capsys):
    def run(*flags, data="folder", path=tmp_path / "data", workers=0):
        line = ["--dataname", data, "--workers", str(workers), "--output", str(tmp_path / "out"), *map(str, flags)]
        code = check_data.main([*line, "--datapath", str(path)] if path else line)
        return Checked(code, capsys.readouterr(), tmp_path / "out")

    return run


# ------------------------------------------------------------------------------------------ a clean tree


@pytest.mark.parametrize("workers", [0, 2])
def test_a_clean_tree_has_no_finding_and_no_note_and_every_image_is_listed_as_it_is(check, tree, workers):
    checked = check(workers=workers)
    assert (checked.code, checked.lines, checked.damaged) == (0, [], {})
    assert "Findings: none" in checked.text and "12 training and 8 validation images, 2 classes" in checked.text
    assert "each of the 2 classes has 6 training and 4 validation images" in checked.text
    paths = sorted(path for path in tree.rglob("*.*"))
    assert sorted(checked.images) == list(map(str, paths))
    for path in paths:
        row = checked.images[str(path)]
        assert [row["split"], row["class"]] == [path.parts[-3], path.parts[-2]]
        assert [row["width"], row["height"], row["mode"], row["problem"]] == ["160", "120", "RGB", ""]
        assert row["format"] == {".png": "PNG", ".jpg": "JPEG"}[path.suffix]
        assert row["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert len({row["pixel_hash"] for row in checked.images.values()}) == len(paths)


def test_what_is_checked_is_what_training_reads(tree):
    settings = parse(["--dataname", "folder", "--datapath", str(tree)]).data
    found = take_survey(settings)
    data = get_data(settings, torch.device("cpu"))
    assert [*found.paths] == [*data.train.paths, *data.validation.paths]
    assert found.classes == data.classes and found.refusal is None and found.ranges["train"] == range(len(data.train))
    assert found.labels.tolist() == [*data.train.labels.tolist(), *data.validation.labels.tolist()]


def test_folders_that_training_refuses_are_listed_as_training_would_once_they_are_mended(tree):
    plant(tree / "val" / "ape" / "0.png")
    settings = parse(["--dataname", "folder", "--datapath", str(tree)]).data
    refused = take_survey(settings)
    with pytest.raises(UserError) as refusal:
        get_data(settings, torch.device("cpu"))
    assert refused.refusal == str(refusal.value)
    plant(tree / "train" / "ape" / "0.png")
    mended = take_survey(settings)
    assert mended.refusal is None
    assert [*refused.paths] == [path for path in mended.paths if path != str(tree / "train" / "ape" / "0.png")]
    assert refused.classes == mended.classes


# --------------------------------------------------------------------------------------------- damage


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_bytes(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


DAMAGE = {
    "truncated JPEG": ("1.jpg", cut, "truncated"),
    "truncated PNG": ("0.png", cut, "truncated"),
    "changed PNG": ("0.png", flip_bytes, ""),
    "empty": ("1.jpg", lambda path: path.write_bytes(b""), "is empty (0 bytes)"),
    "text": ("1.jpg", lambda path: path.write_text("no image"), "not an image in a known format"),
    "broken link": ("1.jpg", lambda path: (path.unlink(), path.symlink_to("gone.jpg")), "No such file"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_image_is_named_with_its_reason_as_training_would_refuse_it(check, tree, kind):
    name, damage, reason = DAMAGE[kind]
    path = tree / "train" / "dog" / name
    damage(path)
    with pytest.raises(UserError):
        open_image(str(path), "RGB")
    checked = check()
    assert checked.code == 1 and list(checked.damaged) == [str(path)] and reason in checked.damaged[str(path)]
    assert checked.text.splitlines()[0] == "verdict: FAULTS among 20 images: 1 damaged"
    assert f"train/dog/{name} {checked.damaged[str(path)]}" in checked.line("damaged")
    assert checked.problem(path).startswith("damaged: ")
    assert f"\ntrain/dog/{name}: " in checked.text


def test_all_damaged_images_stand_in_the_file_and_the_first_in_the_report(check, tree):
    for number in range(30):
        (tree / "val" / "cat" / f"bad{number:02}.png").write_bytes(b"")
    checked = check()
    assert len(checked.damaged) == 30 and "30 damaged" in checked.text.splitlines()[0]
    assert len(checked.lines) == 1, "none of them repeats another"
    assert "... and 10 more in damaged.txt" in checked.text and "and 27 more" in checked.line("damaged")


def test_broken_metadata_is_no_damage(check, tree):
    plant(tree / "train" / "cat" / "exif.jpg", exif=b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01")
    checked = check()
    assert checked.code == 0 and checked.damaged == {}


# ----------------------------------------------------------------------------------------- duplicates


def test_a_copy_in_the_other_split_is_a_fault_under_any_name(check, tree):
    copy = tree / "val" / "dog" / "other name.jpg"
    shutil.copy(tree / "train" / "dog" / "3.jpg", copy)
    checked = check()
    assert checked.code == 1 and len(checked.lines) == 1
    line = checked.line("in both splits")
    assert "1 image of val (11 %)" in line and "(1 the same file, 0 the same pixels)" in line
    assert "val/dog/other name.jpg = train/dog/3.jpg" in line and "another class" not in line
    assert checked.problem(copy) == "also in train: train/dog/3.jpg"
    assert checked.problem(tree / "train" / "dog" / "3.jpg") == "also in val: val/dog/other name.jpg"


def test_a_validation_that_is_all_of_training_is_told_in_plain_percent(check, tree):
    shutil.rmtree(tree / "val")
    shutil.copytree(tree / "train", tree / "val")
    assert "images of val (100 %) with the pixels" in check().line("in both splits")


def test_images_to_test_on_are_checked_though_training_leaves_them_alone(check, tree):
    for name in ("cat", "dog"):
        shutil.copytree(tree / "train" / name, tree / "test" / name)
        for number in range(6):
            plant(next((tree / "test" / name).glob(f"{number}.*")), 90 + number + 10 * (name == "cat"))
    assert check().lines == []
    shutil.copy(tree / "train" / "dog" / "1.jpg", tree / "test" / "cat" / "copy.jpg")
    shutil.copy(tree / "val" / "dog" / "1.jpg", tree / "test" / "dog" / "copy.jpg")
    (tree / "test" / "dog" / "0.png").write_bytes(b"")
    plant(tree / "test" / "eel" / "0.png")
    checked = check()
    assert checked.code == 1 and "12 training, 8 validation and 14 test images, 2 classes" in checked.text
    assert "each of the 2 classes has 6 training, 4 validation and 7 test images" in checked.text
    assert "test/dog/0.png is empty" in checked.line("damaged")
    leaks = [line for line in checked.lines if line.startswith("in both splits")]
    assert "1 image of test (7.1 %) with the pixels of one of train" in leaks[0] and "under another class" in leaks[0]
    assert "of one of val (1 the same file, 0 the same pixels): test/dog/copy.jpg = val/dog/1.jpg" in leaks[1]
    assert "only in test/, not in train/: eel" in checked.line("classes in one split")
    assert checked.problem(tree / "test" / "cat" / "copy.jpg") == "also in train: train/dog/1.jpg"
    assert checked.images[str(tree / "test" / "dog" / "copy.jpg")]["split"] == "test"
    whole = check("--val-split", "0.3", path=tree / "train")
    assert "test images" not in whole.text, "nothing beside the one tree is read"
    folds = check("--folds", 3, "--fold", 0).text
    assert "12 training, 0 validation" not in folds and "14 test" in folds


def test_the_rows_of_a_table_that_are_to_test_on_are_checked(check, tree, tmp_path):
    paths = [path.relative_to(tree) for path in sorted(tree.glob("*/*/*.*"))]
    shutil.copy(tree / "train" / "dog" / "1.jpg", tree / "copy.jpg")
    rows = [f"{path},{path.parts[1]},{path.parts[0]},p{number}" for number, path in enumerate(paths)]
    rows += ["copy.jpg,dog,test,p0"]
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(["path,label,split,patient", *rows]) + "\n")
    checked = check("--labels", table, path=tree)
    assert checked.code == 1 and "12 training, 8 validation and 1 test images" in checked.text
    assert "1 image of test (100 %) with the pixels of one of train" in checked.line("in both splits")
    assert "1 group in train and in test, with 100 % of test's images (p0)" in checked.line("groups in both splits")
    whole = table.read_text()
    table.write_text(whole.replace("copy.jpg,dog,", "copy.jpg,Dog,"))
    hidden = check("--labels", table, path=tree)
    assert hidden.code == 0 and "12 training and 8 validation images" in hidden.text
    assert "line 22, column label: Dog is no class of the rows to train on" in hidden.line("rows to test on")
    Image.new("RGB", SIZE).save(tree / "other.png")
    table.write_text(whole + "other.png,Cat,test,p99\n")
    assert "line 23, column label: Cat is no class" in check("--labels", table, path=tree).line("rows to test on")
    table.write_text(whole.replace("test,p0", "test,P1"))
    assert "'P1' and 'p1'" in check("--labels", table, path=tree).line("rows to test on")
    table.write_text(whole.replace(",val,", ",test,"))
    assert "12 training and 9 validation images" in check("--labels", table, path=tree).text, "they choose best.pt"


def test_a_lossless_copy_in_another_format_is_found_by_its_pixels(check, tree):
    source = tree / "train" / "cat" / "1.jpg"
    copy = tree / "val" / "dog" / "copy.bmp"
    Image.open(source).save(copy)
    line = check().line("in both splits")
    assert "(0 the same file, 1 the same pixels), 1 of them under another class" in line


def test_a_leaked_image_is_told_with_its_own_file_and_class_rather_than_with_another_of_its_pixels(check, tree):
    source = tree / "train" / "dog" / "3.jpg"
    Image.open(source).save(tree / "train" / "cat" / "before.bmp")
    Image.open(source).save(tree / "train" / "dog" / "1before.bmp")
    shutil.copy(source, tree / "val" / "dog" / "copy.jpg")
    line = check().line("in both splits")
    assert "(1 the same file, 0 the same pixels): val/dog/copy.jpg = train/dog/3.jpg;" in line


def test_one_pixel_that_differs_makes_no_duplicate(check, tree):
    pixels = np.array(Image.open(tree / "train" / "cat" / "0.png"))
    pixels[5, 7, 1] ^= 1
    Image.fromarray(pixels).save(tree / "val" / "cat" / "near.png")
    assert check().code == 0


def test_equal_images_under_two_classes_are_a_fault_and_under_one_a_note(check, tree):
    shutil.copy(tree / "train" / "cat" / "0.png", tree / "train" / "cat" / "again.png")
    checked = check()
    assert checked.code == 0 and len(checked.lines) == 1
    assert "1 image of train with" in checked.line("repeated") and "train/cat/again.png" in checked.line("repeated")
    shutil.copy(tree / "train" / "cat" / "0.png", tree / "train" / "dog" / "also.png")
    checked = check()
    assert checked.code == 1 and len(checked.lines) == 1
    assert "3 images of train with equal pixels and different classes" in checked.line("label conflicts")
    assert "train/cat/0.png = train/dog/also.png" in checked.line("label conflicts")


def test_with_val_split_copies_that_fall_on_both_sides_are_leakage(check, tree):
    for number in range(6):
        shutil.copy(tree / "train" / "cat" / "0.png", tree / "train" / "cat" / f"copy{number}.png")
    shutil.rmtree(tree / "val")
    checked = check("--val-split", "0.5")
    split = [row["split"] for path, row in checked.images.items() if "copy" in path or path.endswith("cat/0.png")]
    assert 0 < split.count("val") < 7, "the planted copies must lie on both sides for this test to say something"
    assert checked.code == 1 and f"{split.count('val')} image" in checked.line("in both splits")


def test_a_hash_that_ends_in_zero_bytes_is_written_whole():
    assert [hexadecimal(np.array([digest], dtype="S4")[0], 4) for digest in (b"\1\0\0\0", b"")] == ["01000000", ""]


# -------------------------------------------------------------------------------- classes and other files


def test_a_class_that_training_lacks_is_a_finding_beside_the_refusal(check, tree):
    plant(tree / "val" / "ape" / "0.png")
    checked = check()
    assert checked.code == 1 and "has classes that" in checked.line("refusal of training")
    assert "only in val/, not in train/: ape" in checked.line("classes in one split")
    assert len(checked.images) == 21 and checked.row("ape") == ["0", "1"]


def test_validation_images_in_no_class_folders_get_one_advice(check, tree):
    shutil.move(tree / "val" / "cat", tree / "val" / "images")
    shutil.rmtree(tree / "val" / "dog")
    checked = check()
    assert "sort its images into folders named like those of train/" in checked.line("refusal of training")
    assert "classes in one split" not in checked.text


def test_arrays_of_further_channels_are_not_damaged_because_training_refuses_their_folders(check, tmp_path):
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            array = np.random.default_rng(len(split + name)).integers(0, 256, (8, 8, 5), dtype=np.uint8)
            np.save(tmp_path / "data" / split / name / "0.npy", array)
    (tmp_path / "data" / "train" / "eel").mkdir()
    checked = check()
    assert checked.code == 1 and "holds no images" in checked.line("refusal of training")
    assert not any(line.startswith("damaged") for line in checked.lines)


def test_a_class_that_validation_lacks_is_a_finding(check, tree):
    plant(tree / "train" / "ape" / "0.png")
    checked = check()
    assert checked.code == 1 and len(checked.lines) == 1
    assert "only in train/, not in val/: ape" in checked.line("classes in one split")
    rows = [f"{path.relative_to(tree)},{path.parts[-2]},{path.parts[-3]}" for path in sorted(tree.rglob("*.*"))]
    (tree.parent / "labels.csv").write_text("\n".join(["path,label,split", *rows]))
    table = check("--labels", tree.parent / "labels.csv", path=tree)
    assert table.code == 1 and "only in training, not in validation: ape" in table.line("classes in one split")
    plant(tree / "train" / "ape" / "1.png", 1)
    fold = check("--folds", "5", "--fold", "4", path=tree / "train")
    assert fold.code == 0 and "only in training, not in validation: ape" in fold.line("classes in one split")


def test_empty_class_folders_are_findings(check, tree):
    for split in ("train", "val"):
        (tree / split / "eel").mkdir()
    checked = check()
    assert checked.code == 1 and "holds no images" in checked.line("refusal of training")
    empty = [line for line in checked.lines if line.startswith("empty classes")]
    assert ["train/eel" in empty[0], "val/eel" in empty[1], len(empty)] == [True, True, 2]


def test_images_outside_class_folders_are_a_finding(check, tree):
    plant(tree / "train" / "loose.png")
    checked = check()
    assert checked.code == 1 and len(checked.lines) == 1
    assert "1 image in no class folder" in checked.line("outside class folders") and "train/loose.png" in checked.text


def test_images_of_formats_that_training_leaves_out_are_a_finding(check, tree):
    noise(2001).save(tree / "train" / "cat" / "moving.gif")
    (tree / "val" / "dog" / "phone.HEIC").write_bytes(b"")
    checked = check()
    assert checked.code == 1 and len(checked.lines) == 1 and len(checked.images) == 20
    line = checked.line("formats that are not read")
    assert "2 images (.gif 1, .heic 1): train/cat/moving.gif, val/dog/phone.HEIC; convert" in line


def test_names_are_told_from_the_data_sets_folder_on_even_when_that_is_the_working_directory(check, tree, monkeypatch):
    shutil.rmtree(tree / "val")
    (tree / "train" / ".git").mkdir()
    (tree / "train" / "cat" / "\x1b[31m.png").write_bytes(b"")
    monkeypatch.chdir(tree / "train")
    checked = check("--val-split", "0.5", path=".")
    assert checked.line("not read") == "not read: .git (hidden)" and "cat/?[31m.png is empty" in checked.line("damaged")


def test_what_is_not_read_is_noted_with_the_reason(check, tree, tmp_path):
    (tree / "README.md").write_text("about")
    (tree / ".decoded").mkdir()  # the program's own
    (tree / "train" / ".git").mkdir()
    (tree / "train" / "cat" / ".DS_Store").write_text("")
    (tree / "train" / "cat" / "boxes.txt").write_text("")
    plant(tmp_path / "elsewhere" / "x" / "0.png")
    (tree / "train" / "dog" / "link").symlink_to(tmp_path / "elsewhere")
    plant(tree / "train" / "dog" / ".thumbs" / "0.png", size=(150, 150))
    checked = check()
    assert checked.code == 0 and len(checked.images) == 20
    assert sorted(checked.lines) == sorted(
        [
            "not read: README.md (beside the splits)",
            "not read: train/.git, train/cat/.DS_Store, train/dog/.thumbs (hidden)",
            "not read: train/cat/boxes.txt (no image ending: .txt 1)",
            "not read: train/dog/link (link to a folder)",
        ]
    )


# ------------------------------------------------------------------------------------- sizes and formats


def test_images_of_another_size_are_a_finding_in_a_set_of_one_size(check, tmp_path):
    for number in range(10):
        for split in ("train", "test"):
            plant(tmp_path / "data" / split / str(number) / "0.png", size=(32, 32))
    assert check(data="cifar10").code == 0
    plant(tmp_path / "data" / "test" / "7" / "wide.png", size=(40, 32))
    checked = check(data="cifar10")
    assert checked.code == 1 and len(checked.lines) == 1
    assert "1 image not 32x32: test/7/wide.png (40x32)" in checked.line("wrong size")


def test_a_turned_image_is_noted_and_has_its_upright_size(check, tree):
    turned = [
        plant(tree / "train" / "cat" / f"turned.{ending}", number, exif=exif_that_turns())
        for number, ending in enumerate(("jpg", "png", "webp"), 1000)
    ]
    checked = check()
    assert checked.code == 0 and "3 images turned upright" in checked.line("EXIF rotation")
    for path in turned:
        row = checked.images[str(path)]
        assert (row["width"], row["height"]) == ("120", "160") == tuple(map(str, open_image(str(path), "RGB").size))


def test_modes_formats_and_odd_sizes_are_counted_and_noted(check, tree):
    folder = tree / "train" / "cat"
    noise(2001).convert("L").save(folder / "grey.png")
    noise(2002).convert("P").save(folder / "palette.png")
    noise(2003).convert("CMYK").save(folder / "ink.jpg")
    noise(2004).convert("RGBA").save(folder / "alpha.png")
    Image.fromarray(np.arange(160 * 120, dtype=np.uint16).reshape(120, 160)).save(folder / "deep.png")
    plant(folder / "small.png", size=(63, 64))
    plant(folder / "wide.png", size=(600, 120))
    noise(2005).save(folder / "renamed.jpg", format="PNG")
    checked = check("--image-size", "128")
    assert checked.code == 0 and len(checked.images) == 28
    modes = set(checked.line("converted").split(": ")[-1].split(", "))
    assert modes == {"L 1", "P 1", "CMYK 1", "RGBA 1", "I;16 1"} and "5 images" in checked.line("converted")
    assert "1 image below half of the 128" in checked.line("small") and "small.png (63x64)" in checked.text
    assert "wide.png (600x120)" in checked.line("extreme ratio")
    assert "train/cat/renamed.jpg is PNG" in checked.line("other format")
    assert len(checked.lines) == 5
    widths, heights = zip(*([int(row["width"]), int(row["height"])] for row in checked.images.values()), strict=True)
    for name, sides in (("width", widths), ("height", heights)):
        assert checked.row(name) == [f"{f(sides):,.0f}" for f in (min, np.median, max)]
    assert "3 sizes" in checked.text


def test_many_classes_show_the_largest_and_smallest(check, tmp_path):
    for number in range(20):
        for copy in range(number + 1):
            plant(tmp_path / "data" / "train" / f"c{number:02}" / f"{copy}.png", 100 * number + copy, (16, 16))
        plant(tmp_path / "data" / "val" / f"c{number:02}" / "0.png", 10_000 + number, (16, 16))
    checked = check("--image-size", "16")
    assert [checked.row(name) for name in ("c19", "c12", "c07", "c00")] == [[str(n), "1"] for n in (20, 13, 8, 1)]
    assert "... 4 more" in checked.text and "c10" not in checked.text
    assert "largest / smallest     20.00        1.00" in checked.text and "20 times" in checked.line("unbalanced")


# -------------------------------------------------------------------------------------- sets in memory


def test_flags_about_a_part_of_the_images_are_told_to_do_nothing(check):
    said = check("--train-samples", "10", "--image-size", "8", data="digits", path=None).err
    assert "warning: --train-samples 10 does nothing in check_data.py, which reads all images as they are" in said
    assert "--image-size" not in said


def test_digits_are_checked_by_their_pixels(check):
    checked = check(data="digits", path=None)
    pixels = [bytes(row) for row in np.round(load_digits().data * 255 / 16).astype(np.uint8)]
    hashes = {row["pixel_hash"] for row in checked.images.values()}
    assert len(checked.images) == 1797 and len(hashes) == len(set(pixels))
    assert checked.code == 0 and checked.images["train[0]"]["width"] == "8"
    assert "1,437 training and 360 validation images, 10 classes" in checked.text


def test_duplicates_in_mnists_files_are_found_with_their_labels(check, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (60, 28, 28), dtype=np.uint8)
    labels = np.arange(60, dtype=np.uint8) % 10
    images[11] = images[2]  # of class 1 and 2
    # validation: 5 as in training, 6 where training says 7
    images[45] = images[5]
    images[46] = images[7]
    write_idx(tmp_path / "data", (images[:40], labels[:40]), (images[40:], labels[40:]))
    checked = check(data="mnist")
    assert checked.code == 1 and len(checked.lines) == 2
    assert "2 images of train" in checked.line("label conflicts") and "train[2] (2) = train[11] (1)" in checked.text
    assert "2 images of val (10 %)" in checked.line("in both splits")
    assert "1 of them under another class: val[5] = train[5], val[6] = train[7]" in checked.line("in both splits")


# ------------------------------------------------------------------------------------------- the command


def test_files_lie_below_checks_by_default(tree, tmp_path, monkeypatch, capsys):
    cut(tree / "train" / "cat" / "1.jpg")
    monkeypatch.chdir(tmp_path)
    assert check_data.main(["--dataname", "folder", "--datapath", "data", "--workers", "2"]) == 1
    said = capsys.readouterr()
    assert said.err == "" and said.out.startswith("verdict: FAULTS among 20 images: 1 damaged\n")
    files = [tmp_path / "checks" / "folder_data" / name for name in ("damaged.txt", "images.csv", "report.txt")]
    assert sorted(files[0].parent.iterdir()) == files
    assert files[0].read_text().startswith("data/train/cat/1.jpg\t")


def test_a_check_that_is_interrupted_leaves_no_report(tree, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("scripts.data_check.survey.open_image", Mock(side_effect=KeyboardInterrupt))
    line = ["--dataname", "folder", "--datapath", str(tree), "--workers", "0", "--output", str(tmp_path / "out")]
    code, said = answer(check_data, line, capsys, monkeypatch)
    assert (code, said.err, (tmp_path / "out").exists()) == (130, "check_data.py: interrupted\n", False)


def test_folders_that_a_class_map_does_not_name_are_told_and_no_fault(check, tree, tmp_path):
    plant(tree / "train" / "yak" / "0.png")
    (tmp_path / "map.txt").write_text("dog\ncat")
    checked = check("--class-map", tmp_path / "map.txt")
    assert checked.code == 0 and "does not name yak, so 1 images are left out" in checked.err


def test_groups_in_both_splits_are_a_fault_and_how_far_a_random_split_flatters_a_note(check, tmp_path):
    draw = np.random.default_rng(0)
    rows = ["path,label,patient,split"]
    for number in range(60):
        pixels = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        split = "val" if number % 5 == 0 else "train"
        patient = f"alone{number}" if number < 20 else f"p{number // 4}"
        rows.append(f"{number}.png,{'ab'[number % 2]},{patient},{split}")
    (tmp_path / "labels.csv").write_text("\n".join(rows) + "\n")
    checked = check("--labels", tmp_path / "labels.csv", path=tmp_path)
    both = "8 groups in train and in val, with 67 % of val's images (p10, p11, p12 and 5 more)"
    assert checked.code == 1 and both in checked.line("groups in both splits")
    # 40 of 60 images have 3 others in their group: (40 / 60) (1 - 0.2^3) = 66 %
    assert "trained on the group of 66 % of its validation images" in " ".join(checked.text.split())
    checked = check("--labels", tmp_path / "labels.csv", "--split-column", "off", "--val-split", "0.3", path=tmp_path)
    assert checked.code == 0 and "groups in both splits" not in checked.text
    assert "30 groups of 2.0 images; this split keeps them whole" in checked.line("groups")


def test_images_of_none_of_several_labels_are_those_of_which_all_labels_are_known(check, tmp_path):
    rows = ["1,0", "0,1", ",", ",0", "0,0", "1,0", "0,1"]  # of a and b; without a figure unknown
    for number in range(len(rows)):
        Image.new("RGB", (8, 8), (30 * number,) * 3).save(tmp_path / f"{number}.png")
    lines = [f"{number}.png,{row},{'train' if number < 5 else 'val'}" for number, row in enumerate(rows)]
    (tmp_path / "labels.csv").write_text("\n".join(["path,a,b,split", *lines]))
    flags = ["--labels", tmp_path / "labels.csv", "--label-columns", "a", "b"]
    checked = check(*flags, path=tmp_path)
    assert "1 image with no label" in checked.line("without labels")
    assert "Labels in training: 0.50 an image (0 to 1), 1 image with none, 30.0 % missing" in checked.text


def test_classes_of_several_labels_get_the_notes_that_training_warns_of(check, tmp_path):
    rows = [f"{number}.png,{'rare;' * (number % 12 == 0)}cat|dog;dog|cat" for number in range(24)]
    for number in range(len(rows)):
        Image.new("RGB", (8, 8), (10 * number,) * 3).save(tmp_path / f"{number}.png")
    lines = [f"{row},{'train' if number < 12 else 'val'}" for number, row in enumerate(rows)]
    (tmp_path / "labels.csv").write_text("\n".join(["path,label,split", *lines]))
    checked = check("--labels", tmp_path / "labels.csv", "--label-separator", ";", path=tmp_path)
    assert checked.line("unbalanced").endswith(
        "times the training images of the smallest; micro F1 then says little about the small ones"
    )
    assert "2 of 3 class names are joined of several" in checked.line("joined class names")


def test_images_that_no_training_reads_are_told(check, tree, tmp_path):
    (tree / "val").rename(tree / "train" / "test")
    for folder in (tree / "train" / "test").iterdir():
        for path in [*folder.iterdir()]:
            path.rename(folder.parent / f"{folder.name}_{path.name}")
        folder.rmdir()
    checked = check("--val-split", "0.3", path=tree / "train")
    said = " ".join(checked.line("class named like a split").split())
    assert f"test in {tree / 'train'} is taken for a class" in said
    paths = sorted(tree.glob("train/*/*.*"))
    rows = [
        f"{path.relative_to(tree)},{number % 2},{('train', 'val')[number % 4 // 2]}"
        for number, path in enumerate(paths)
    ]
    (tmp_path / "labels.csv").write_text("\n".join(["path,label,split", *rows[1:], rows[0].replace(",train", ",test")]))
    checked = check("--labels", tmp_path / "labels.csv", path=tree)
    assert "labels: " in checked.text and "1 rows of test are not for training" in checked.text


def test_the_share_that_a_random_split_flatters_is_that_of_random_splits():
    sizes = np.array([1] * 30 + [2] * 40 + [7] * 20)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    seen = []
    for seed in range(200):
        train, validation = train_test_split(groups, test_size=0.2, random_state=seed)
        seen.append(np.isin(validation, train).mean())
    # a split of fixed size is not quite one of independent images: the probabilities differ by the order of 1 / n
    assert flattered_by_random(sizes) == pytest.approx(np.mean(seen), abs=3 / len(groups))
