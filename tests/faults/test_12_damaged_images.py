"""A damaged image ends a run with its path, or with --skip-bad-images is passed over alike by whatever reads."""

import contextlib
import os
import shutil
import struct
import warnings
import zlib
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from sklearn.datasets import load_digits, load_sample_images

import main
from tests.end_to_end.forked import Forked
from tests.end_to_end.processes import FINAL_LINE, rows
from tests.helpers import QUIETLY, image_tree, png_that_says
from tests.utils.data import loading
from utils.config.settings import UserError
from utils.data.images import decoding, unreadable
from utils.data.images.decoding import UnreadableImage, open_image

# images of each class
CLASSES = 10
EACH = {"train": 4, "test": 3}
BAD = {"train": (6, 7, 21, 39), "test": (4, 5, 6, 7, 20)}  # two in a row at a class's end, the last of all; a batch
STAND_INS = {6: 8, 7: 8, 21: 22, 39: 0}


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Class folders of handwritten digits, 28 by 28 grey pixels, as for MNIST."""
    root = tmp_path_factory.mktemp("clean")
    digits = load_digits()
    for label in range(CLASSES):
        images = iter(digits.images[digits.target == label])
        for split, count in EACH.items():
            (root / split / str(label)).mkdir(parents=True)
            for number in range(count):
                pixels = np.kron(next(images), np.ones((3, 3))).astype(np.uint8) * 15
                Image.fromarray(np.pad(pixels, 2)).save(root / split / str(label) / f"{number}.png")
    return root


def path_of(root, split, index):
    return root / split / str(index // EACH[split]) / f"{index % EACH[split]}.png"


def copied(clean, root):
    shutil.copytree(clean, root, ignore=shutil.ignore_patterns(".decoded"))
    return root


@pytest.fixture
def mended(clean, tmp_path):
    """Whole folders in which the stand-ins' files lie in place of the bad ones."""
    root = copied(clean, tmp_path / "mended")
    for bad, stand_in in STAND_INS.items():
        shutil.copy(path_of(clean, "train", stand_in), path_of(root, "train", bad))
    return root


@pytest.fixture
def damaged(clean, tmp_path):
    """The same folders with the images ``BAD`` spoilt, each in one of the ways below."""
    root = copied(clean, tmp_path / "data")
    ways = list(DAMAGE.values()) * 2
    for split, indices in BAD.items():
        for index in indices:
            ways.pop()(path_of(root, split, index))
    return root


# ------------------------------------------------------------------------------------------ damage


def cut_in_half(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def text(path):
    path.write_text("this is no image\n" * 10)


def enormous_png(path):
    path.write_bytes(png_that_says(100_000, 100_000))


def enormous_jpeg(path):
    Image.new("RGB", (64, 64)).save(path, "JPEG")
    data = bytearray(path.read_bytes())
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"  # 65535 by 65535
    path.write_bytes(data)


def dangling_link(path):
    path.unlink()
    path.symlink_to("nowhere.png")


DAMAGE = {way.__name__: way for way in (cut_in_half, empty, text, enormous_png, enormous_jpeg, dangling_link)}


def run_in_process(capsys, *flags):
    """Exit code, stdout and stderr of the program."""
    code = main.main([*QUIETLY, "--arch", "fc", *map(str, flags)])
    return code, *capsys.readouterr()


@pytest.mark.parametrize(("split", "spoil"), [("train", dangling_link), ("val", cut_in_half)])
def test_damage_ends_a_run_with_one_line_that_names_the_path(tmp_path, capsys, split, spoil):
    bad = image_tree(tmp_path, {"train": 2, "val": 2}, size=80, ending="jpg") / split / "b" / "0.jpg"
    spoil(bad)
    flags = ["--dataname", "folder", "--datapath", tmp_path, "--image-size", 16, "--epochs", 1, "--workers", 0]
    code, _, err = run_in_process(capsys, *flags, "--output", tmp_path / "runs")
    assert code == 2 and len(err.splitlines()) == 1
    assert err.startswith(f"main.py: {bad}: cannot be read as an image (") and "repair or remove the file" in err
    assert not list(tmp_path.glob("runs/*/*/*/checkpoints/final.pt"))


def test_damage_met_by_a_worker_ends_the_program_with_exit_code_2_and_one_line(clean, tmp_path):
    root = copied(clean, tmp_path / "data")
    bad = path_of(root, "train", 17)
    cut_in_half(bad)
    flags = ["--dataname", "mnist", "--datapath", root, "--arch", "fc", "--workers", 2, "--loader", "stream"]
    process = Forked(*flags, "--picture-epochs", "off", "--epochs", 1, "--output", tmp_path / "runs")
    _, err = process.communicate()
    assert process.returncode == 2 and len(err.splitlines()) == 1
    assert err.startswith(f"main.py: {bad}: cannot be read as an image")


def test_large_images_are_read_without_pillows_warning(tmp_path, monkeypatch):
    Image.new("RGB", (30, 20), "red").save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)  # Pillow warns from here on and refuses twice as many
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_image(str(tmp_path / "large.png"), "RGB").size == (30, 20)


@pytest.mark.parametrize(
    "error", [struct.error("two\nlines"), zlib.error("cut"), IndexError(), EOFError(), OSError("cut")]
)
def test_whatever_a_reader_of_pillows_raises_is_one_line_with_the_path(clean, monkeypatch, error):
    monkeypatch.setattr(ImageOps, "exif_transpose", Mock(side_effect=error))
    with pytest.raises(
        UnreadableImage, match=r"0\.png: cannot be read as an image \((two lines|cut|\w+)\); repair"
    ) as caught:
        open_image(str(path_of(clean, "train", 0)), "L")
    assert len(str(caught.value).splitlines()) == 1


def test_what_is_not_the_files_fault_is_not_taken_for_a_bad_image(clean):
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    path = str(path_of(clean, "train", 0))
    with contextlib.ExitStack() as opened:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        with contextlib.suppress(OSError):
            while True:
                opened.enter_context(open(path, "rb"))
        with pytest.raises(UserError, match=r"0\.png: cannot be read .*Too many open files") as caught:
            open_image(path, "L")
    assert not isinstance(caught.value, UnreadableImage)


# ------------------------------------------------------------------------------------------ skipping


def make(root, *flags, rank=0, world_size=1, dataname="mnist"):
    """Both loaders; of images of one size, or for the data set 'folder' of any."""
    line = ("--dataname", dataname, "--datapath", root, "--batch-size", 3, "--val-batch-size", 2, *flags)
    return loading.make(*line, rank=rank, world_size=world_size)[:2]


READERS = {
    "read in place": ("--loader", "stream", "--workers", 0),
    "2 workers": ("--loader", "stream", "--workers", 2),
    "resident": ("--loader", "resident", "--workers", 0),
    "resident, decoded by workers": ("--loader", "resident", "--workers", 2),
}


def paths_passed(root, index):
    """Those of a bad training image and of the bad ones up to its stand-in."""
    passed = [index]
    while (passed[-1] + 1) % 40 in STAND_INS:
        passed.append((passed[-1] + 1) % 40)
    return [str(path_of(root, "train", bad)) for bad in passed]


@pytest.mark.parametrize(
    ("reader", "again"),
    [
        *(pytest.param(reader, False, id=name) for name, reader in READERS.items()),
        pytest.param(READERS["resident"], True, id="resident, second start"),
    ],
)
def test_training_shows_the_next_readable_image_with_its_label_and_the_samples_own_random_numbers(
    mended, damaged, reader, again
):
    if again:
        make(damaged, *reader, "--skip-bad-images")
    found = list(make(damaged, *reader, "--skip-bad-images")[0].batches(3))
    expected = list(make(mended, "--loader", "stream", "--workers", 0)[0].batches(3))
    assert len(found) == len(expected)
    for batch, reference in zip(found, expected, strict=True):
        assert torch.equal(batch.images, reference.images)
        assert batch.indices.tolist() == reference.indices.tolist() and batch.number == reference.number
        shown = [STAND_INS.get(index, index) for index in batch.indices.tolist()]
        assert batch.targets.tolist() == [index // EACH["train"] for index in shown]
        bad = [index for index in batch.indices.tolist() if index in STAND_INS]
        assert batch.unreadable == tuple(path for index in bad for path in paths_passed(damaged, index))
        assert batch.replaced == len(bad)
    assert sum(batch.replaced for batch in found) == len(STAND_INS)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stand_in_is_cropped_with_the_random_numbers_of_the_sample_that_it_stands_for(mended, damaged, workers):
    flags = ("--image-size", 16, "--workers")
    found = list(make(damaged, *flags, workers, "--skip-bad-images", dataname="folder")[0].batches(3))
    expected = list(make(mended, *flags, 0, dataname="folder")[0].batches(3))
    assert all(torch.equal(*(batch.images for batch in pair)) for pair in zip(found, expected, strict=True))
    assert sum(batch.replaced for batch in found) == len(STAND_INS)


@pytest.mark.parametrize("reader", ["read in place", "2 workers", "resident"])
def test_validation_leaves_bad_images_out_and_counts_the_others_once(clean, damaged, reader):
    """The reference: the whole folders' batches without the bad images."""
    expected = {batch.number: batch for batch in make(clean, "--loader", "stream", "--workers", 0)[1].batches()}
    found = {}
    for rank in range(2):
        _, loader = make(damaged, *READERS[reader], "--skip-bad-images", rank=rank, world_size=2)
        found |= {batch.number: batch for batch in loader.batches()}
    assert sorted(found) == sorted(expected)
    for number, batch in found.items():
        whole = expected[number]
        kept = [place for place, index in enumerate(whole.indices.tolist()) if index not in BAD["test"]]
        assert batch.images.shape == (len(kept), 1, 28, 28) and torch.equal(batch.images, whole.images[kept])
        assert batch.targets.tolist() == whole.targets[kept].tolist()
        assert batch.indices.tolist() == whole.indices[kept].tolist()
        bad = [index for index in whole.indices.tolist() if index in BAD["test"]]
        assert batch.unreadable == tuple(str(path_of(damaged, "test", index)) for index in bad)
    assert sorted(len(batch.targets) for batch in found.values())[:3] == [0, 0, 1]  # 4 and 5, 6 and 7, 20
    assert sum(len(batch.targets) for batch in found.values()) == 30 - 5


@pytest.mark.parametrize("reader", ["read in place", "resident"])
def test_very_many_bad_images_in_a_row_are_a_broken_disk(damaged, reader, monkeypatch):
    monkeypatch.setattr(unreadable, "MOST_IN_A_ROW", 5)  # images 4 to 7 of the validation are bad
    flags = (*READERS[reader], "--skip-bad-images")
    train, validation = make(damaged, *flags)
    assert len([*train.batches(0), *validation.batches()]) == 14 + 15
    monkeypatch.setattr(unreadable, "MOST_IN_A_ROW", 4)
    with pytest.raises(UserError, match=r"test/1/1\.png and the 3 images after it cannot be read .*check the disk"):
        train, validation = make(damaged, *flags, "--cache-dir", damaged / "other")
        list(validation.batches())


@pytest.mark.parametrize("loader", ["stream", "resident"])
def test_a_folder_without_a_readable_image_ends_the_run_all_the_same(clean, tmp_path, capsys, loader):
    root = copied(clean, tmp_path / "data")
    for index in range(30):
        text(path_of(root, "test", index))
    flags = ["--dataname", "mnist", "--datapath", root, "--loader", loader, "--workers", 0, "--skip-bad-images"]
    code, _, err = run_in_process(capsys, *flags, "--epochs", 1, "--output", tmp_path / "runs")
    assert code == 2 and len(err.splitlines()) == 1
    assert "and the 29 images after it cannot be read" in err and str(root / "test") in err


def test_what_was_decoded_with_the_flag_hides_no_damage_from_a_run_without_it(damaged):
    flags = ("--loader", "resident", "--workers", 0)
    make(damaged, *flags, "--skip-bad-images")
    assert len(list((damaged / ".decoded").glob("*.npy"))) == 2
    with pytest.raises(UserError, match="cannot be read as an image") as caught:
        make(damaged, *flags)
    assert str(caught.value).startswith(str(path_of(damaged, "train", 6)))


def test_an_image_that_could_not_be_read_for_a_time_is_shown_once_it_can(clean, tmp_path, monkeypatch):
    """The file stays the same, as when a network was down, so the decoded images are the same file's."""
    root = copied(clean, tmp_path / "data")
    path = path_of(root, "train", 6)
    flags = ("--loader", "resident", "--workers", 0)
    plain = decoding.content_of

    def down(asked):
        if str(asked) == str(path):
            raise OSError("Host is down")
        return plain(asked)

    with monkeypatch.context() as network:
        network.setattr(decoding, "content_of", down)
        batches = make(root, *flags, "--skip-bad-images")[0].batches(0)
        assert [path for batch in batches for path in batch.unreadable] == [str(path)]
    for more in (("--skip-bad-images",), ()):
        found = list(make(root, *flags, *more)[0].batches(0))
        expected = make(clean, "--loader", "stream", "--workers", 0)[0].batches(0)
        assert all(torch.equal(*(b.images for b in pair)) for pair in zip(found, expected, strict=True))
        assert all(batch.unreadable == () for batch in found)
    assert len(list((root / ".decoded").glob("*.npy"))) == 2  # training and validation: none was made anew


# ------------------------------------------------------------------------------------------ whole runs


def test_a_run_that_skips_lists_what_it_skipped_on_one_and_two_processes(damaged, tmp_path):
    flags = ["--dataname", "mnist", "--datapath", damaged, "--arch", "fc", "--skip-bad-images", "--epochs", 2]
    flags += ["--global-batch-size", 8, "--val-batch-size", 2, "--picture-epochs", "off"]
    runs = {  # whose loaders give the same batches: see above
        1: Forked(*flags, "--loader", "stream", "--workers", 1, "--output", tmp_path / "1"),
        2: Forked(*flags, "--loader", "resident", "--output", tmp_path / "2", processes=2),
    }
    listed = sorted(str(path_of(damaged, split, index)) for split, indices in BAD.items() for index in indices)
    for processes, run in runs.items():
        final = FINAL_LINE.fullmatch(run.output().splitlines()[-1])
        assert final["count"] == "25"
        (folder,) = tmp_path.glob(f"{processes}/mnist/fc/*")
        assert (folder / "bad_images.txt").read_text().splitlines() == listed
        assert [row["unreadable_images"] for row in rows(final["run"])] == ["4", "8"]


# ------------------------------------------------------------------------------------------ odd images


def test_odd_modes_show_the_pixels_of_pillows_conversion(tmp_path):
    """Beside those of tests/utils/data/test_decoding.py."""
    photograph = Image.fromarray(load_sample_images().images[1][100:180, 200:320])
    palette = photograph.quantize(64)
    files = {
        "grey_alpha.png": (photograph.convert("LA"), {}),
        "palette.png": (palette, {}),
        "transparent.png": (palette, {"transparency": bytes(range(64))}),
        "one_transparent_colour.png": (palette, {"transparency": 3}),
        "two_colours.png": (photograph.convert("1"), {}),
        "palette.bmp": (palette, {}),
    }
    for name, (image, options) in files.items():
        image.save(tmp_path / name, **options)
        with Image.open(tmp_path / name) as written, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shown = written.convert("RGB")
            warnings.simplefilter("error")
            assert open_image(str(tmp_path / name), "RGB").tobytes() == shown.tobytes(), name
