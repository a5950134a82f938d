"""Users' own files: what they add trains, resumes exactly and is refused when it is wrong, has changed or is missing."""

import io
import random
import textwrap
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from main import main
from models import load_model
from scripts import average_checkpoints, export, features
from scripts.common.command_line import run_tool
from scripts.common.runs import read_run
from scripts.evaluate import main as evaluate
from tests.end_to_end.processes import curves, differences, train
from tests.helpers import QUIETLY, csv_rows, equal, exif_that_turns, file_of, run_in, trained
from tests.utils.data.loading import read
from utils.config import plugins
from utils.config.arguments import parse
from utils.config.datasets import SPECS
from utils.config.groups.loss import LOSSES
from utils.config.settings import UserError
from utils.data.augment.base import Samples
from utils.data.augmentations import Context, build_augmentations
from utils.data.formats.own import Items, read_own
from utils.data.formats.own import _labels as own_labels
from utils.data.formats.readers import ImageFiles
from utils.data.images.decoding import UnreadableImage, read_pixels
from utils.data.images.levels import Colour
from utils.data.images.view import View
from utils.data.sample_plan import MicroBatch
from utils.data.sources import MicroBatchReader, StreamSource
from utils.optim.head import head_parameters
from utils.optim.lr_policy import LRPolicy

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples" / "plugin.py")
PARTS = ("--arch", "mixer", "--loss", "poly", "--optimizer", "signsgd", "--lr-policy", "inverse-sqrt", "--lr", "0.001")
FLAGS = ("--plugin", EXAMPLE, *PARTS, *"--augment brightness shift --best-metric margin --batch-size 64".split())
FLAGS = (*FLAGS, "--train-samples", 300, "--epochs", 2)  # ten steps


def written(folder, text, name="mine.py"):
    file = folder / name
    file.write_text(textwrap.dedent(text))
    return str(file)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two epochs with all parts of the example."""
    run = trained(tmp_path_factory.mktemp("whole"), *FLAGS)
    plugins.load(())  # else only the first test to ask for the run would know the parts
    return run


# ------------------------------------------------------------------------------------------ they act


def test_features_are_studied_of_a_network_that_is_in_a_users_file(whole):
    own, flags = features.build_parser().parse_known_args([str(whole), "--plugin", EXAMPLE, "--device", "cpu"])
    loaded = features.open_network(own, flags, is_run=True)
    assert type(loaded.network).__name__ == "MLPMixer" and len(loaded.classes) == 10


def test_weights_alone_are_not_exported_of_a_network_that_is_in_a_users_file(whole, tmp_path):
    line = "--to safetensors: mixer is in a --plugin file, .* use --to onnx or torch-export"
    with pytest.raises(UserError, match=line):
        export.main([str(whole), "--plugin", EXAMPLE, "--to", "safetensors", "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_the_metric_is_the_mean_over_the_validation_images_of_what_the_function_gives(whole):
    network, classes, _ = load_model(whole, plugins=EXAMPLE)  # one file needs no list
    assert type(network).__name__ == "MLPMixer" and len(classes) == 10
    data = read("--resume", whole)
    pixels = data.validation.pixels.float().div(255)
    with torch.no_grad():
        shares = network((pixels - data.spec.mean[0]) / data.spec.std[0]).softmax(1)
    right = shares[torch.arange(360), data.validation.labels]
    others = shares.masked_fill(functional.one_hot(data.validation.labels, 10).bool(), 0).amax(1)
    assert float(csv_rows(whole / "metrics.csv")[-1]["val_margin"]) == pytest.approx(
        float((right - others).mean()), abs=1e-5
    )


def test_a_metric_that_changes_its_arguments_changes_no_figure(tmp_path):
    text = a_metric("targets.zero_()\n    return logits.zero_()[:, 0]")
    trained(tmp_path / "with", "--arch", "fc", "--max-steps", 2, "--plugin", written(tmp_path, text))
    trained(tmp_path / "without", "--arch", "fc", "--max-steps", 2)
    rows = [csv_rows(run_in(tmp_path / name) / "metrics.csv")[-1] for name in ("with", "without")]
    for figure in ("val_top1", "val_loss", "val_macro_f1"):
        assert rows[0][figure] == rows[1][figure]


def test_the_metric_does_not_depend_on_the_number_of_processes(tmp_path):
    one, two = (tmp_path / str(processes) for processes in (1, 2))
    parts = ("--plugin", EXAMPLE, *PARTS, "--augment", "brightness", "--global-batch-size", 66)
    trained(one, *parts, "--max-steps", 2)
    train(*parts, "--max-steps", 2, "--picture-epochs", "off", "--output", two, processes=2)
    values = [float(csv_rows(run_in(folder) / "metrics.csv")[-1]["val_margin"]) for folder in (one, two)]
    assert values[0] == pytest.approx(values[1], abs=1e-5)  # of the gradients' rounding in another order


def test_the_schedule_is_what_the_function_gives_from_the_end_of_the_warm_up_on():
    args = parse(
        ["--plugin", EXAMPLE, "--lr-policy", "inverse-sqrt", "--lr", "2", "--warmup-epochs", "1", "--epochs", "3"]
    )
    policy = LRPolicy(args.optimisation, 10)
    assert [policy(step) for step in (4, 9, 10, 13)] == pytest.approx([1.0, 2.0, 2.0, 1.0])


def test_the_loss_is_what_the_function_gives_and_both_kinds_of_targets_agree():
    args = parse(["--plugin", EXAMPLE, "--loss", "poly"])
    from utils.optim.criterion import build_criterion

    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.bfloat16)
    targets = torch.tensor([0, 0])
    probabilities = torch.tensor([2.0, -1.0]).sigmoid()
    expected = (-probabilities.log() + 1 - probabilities).mean()
    criterion = build_criterion(args.loss)
    assert criterion(logits, targets) == pytest.approx(float(expected), abs=1e-6)
    assert criterion(logits, functional.one_hot(targets, 2).float()) == pytest.approx(float(expected), abs=1e-6)


def test_an_image_is_augmented_by_seed_epoch_and_number_alone():
    args = parse(["--plugin", EXAMPLE, "--augment", "brightness"])
    (own,) = build_augmentations(("brightness",), Context(args.augmentation, 1, 8))
    images = torch.full((4, 1, 8, 8), 100, dtype=torch.uint8)

    def augmented(numbers, epoch, seed=0):
        samples = Samples(seed, epoch, torch.tensor(numbers).numpy())
        return own.apply(images[: len(numbers)], *own.draw(samples, 8, 8))

    together = augmented([3, 1, 2, 7], 0)
    assert equal(together[2:], augmented([2, 7], 0))
    assert not torch.equal(together, augmented([3, 1, 2, 7], 1))
    assert not torch.equal(together, augmented([3, 1, 2, 7], 0, seed=1))
    assert 80 <= together.min() < together.max() <= 120


def test_what_comes_after_an_augmentation_of_normalised_images_may_write_into_its_images(tmp_path):
    grey = (
        "@augmentation('grey', normalised=True)\ndef f(images, _):\n    return images.mean(1, True).expand(-1, 3, 4, 4)"
    )
    (tmp_path / "mine.py").write_text(f"from utils.plugin import augmentation\n{grey}")
    args = parse(["--plugin", str(tmp_path / "mine.py"), "--augment", "grey"])
    (own,) = build_augmentations(("grey",), Context(args.augmentation, 1, 4))
    images = own.apply(torch.rand(2, 3, 4, 4), *own.draw(Samples(0, 0, np.arange(2)), 4, 4))
    assert torch.equal(images.clone().mul_(2), images.mul_(2))


def test_hooks_are_called_and_choices_are_known(tmp_path, capsys):
    file = written(
        tmp_path,
        """
        from utils.plugin import hook

        @hook("before_validation")
        def before(traval):
            print("looking at step", traval.progress.step)
    """,
    )
    assert main(["--plugin", file, "--arch", "fc", *QUIETLY, "--max-steps", "2", "--output", str(tmp_path)]) == 0
    assert "looking at step 2" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--plugin", EXAMPLE, "--help"])
    text = capsys.readouterr().out
    assert all(f",{added}}}" in text for added in ("poly", "inverse-sqrt", "sqlite")), "the last of the choices"
    assert main(["--loss", "poly"]) == 2  # the file was that command's alone
    assert f"choose from {', '.join(LOSSES)}\n" in capsys.readouterr().err
    assert main(["--plugin", EXAMPLE, "--arch", "mixxer", "--output", str(tmp_path)]) == 2
    assert "did you mean mixer" in capsys.readouterr().err


def test_a_data_set_is_read_and_one_of_a_fixed_size_stays_in_memory(tmp_path):
    file = written(
        tmp_path,
        """
        import torch
        from utils.plugin import dataset

        class Squares(torch.utils.data.Dataset):
            def __init__(self, count):
                self.count = count
            def __len__(self):
                return self.count
            def __getitem__(self, index):
                return torch.full((3, 8, 8), 10 * index, dtype=torch.uint8), index % 2

        @dataset("squares", image_size=8, fixed_size=True)
        def squares(path):
            return Squares(6), Squares(3), ("even", "odd")

        @dataset("streamed", image_size=8)
        def streamed(path):
            return Squares(6), Squares(3), ("even", "odd")
    """,
    )
    data = read("--plugin", file, "--dataname", "squares")
    assert data.classes == ("even", "odd") and data.train.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert data.train.pixels[:, 2, 5, 5].tolist() == [0, 10, 20, 30, 40, 50]
    other = read("--plugin", file, "--dataname", "streamed")
    assert len(other.fingerprint) > 20 and other.fingerprint != data.fingerprint
    assert main(["--plugin", file, "--dataname", "streamed", "--arch", "fc", "--augment", "none", "--batch-size", "4",
                 "--epochs", "1", *QUIETLY, "--workers", "1", "--output", str(tmp_path / "runs")]) == 0  # fmt: skip


def test_another_datapath_is_another_data_set_for_code_that_reads_it(tmp_path, capsys):
    file = written(
        tmp_path,
        """\
        import numpy as np
        from utils.plugin import dataset, hook

        @dataset("mine", image_size=8, channels=1)
        def mine(path):
            images = [(np.full((8, 8), len(path), np.uint8), number % 2) for number in range(8)]
            return images, images, ["a", "b"]

        @hook("after_validation")
        def name(loop, *_):
            print("classes", loop.class_names)
        """,
    )
    flags = [*QUIETLY, "--plugin", file, "--dataname", "mine", "--arch", "fc", "--epochs", "1", "--workers", "0"]
    flags += ["--batch-size", "4", "--output", str(tmp_path / "runs"), "--resume", "auto"]
    for place, words in (("here", "Run "), ("here", "is finished"), ("elsewhere", "Run "), ("here", "is finished")):
        capsys.readouterr()
        assert main([*flags, "--datapath", place]) == 0
        assert words in capsys.readouterr().out
    runs = [*(tmp_path / "runs/mine/fc").iterdir()]
    assert len(runs) == 2
    assert main(["--device", "cpu", "--evaluate", "--resume", str(runs[0]), "--plugin", file]) == 0
    assert "classes ['a', 'b']" in capsys.readouterr().out


def test_a_warning_about_a_data_set_without_a_path_names_the_set_and_classes_of_one_name(tmp_path, capsys):
    file = written(
        tmp_path,
        """\
        import numpy as np
        from utils.plugin import dataset

        @dataset("mine", image_size=8, channels=1)
        def mine(path):
            images = [(np.zeros((8, 8), np.uint8), number % 2) for number in range(8)]
            return images, images[:1], ["a", "a"]
        """,
    )
    trained(tmp_path, "--arch", "fc", "--max-steps", 1, "--plugin", file, "--dataname", "mine")
    said = capsys.readouterr().err
    assert "--dataname mine: 1 of 2 classes have no validation image" in said
    assert "2 classes are called 'a'; make them one" in said


def test_images_of_a_fixed_size_are_read_as_those_in_files(tmp_path):
    """Upright, and all 16 bits scaled instead of cut off."""
    deep = Image.fromarray((1000 * np.arange(64).reshape(8, 8)).astype(np.uint16))
    lying = Image.fromarray(np.repeat(np.arange(8, dtype=np.uint8)[None] * 30, 8, 0))
    items = [(file_of(deep, "PNG"), 0), (file_of(lying, "JPEG", exif=exif_that_turns()), 1)]
    entry = plugins.Entry("dataset", "mine", lambda path: (items, items, ("a", "b")), tmp_path / "mine.py")
    spec = replace(SPECS["digits"], classes=None)
    pixels = {}
    for fixed in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(SPECS, "mine", replace(spec, fixed_size=fixed))
            images = read_own(entry, parse([]).data).train
        pixels[fixed] = images.pixels if fixed else torch.stack([read_pixels(path, "L") for path in images.paths])
    assert torch.equal(pixels[True], pixels[False])
    assert pixels[True][0, 0, 0].tolist() == [1000 * number // 256 for number in range(8)]


def test_a_picture_of_pillow_is_read_as_its_file(tmp_path):
    """PNG, in which it reaches the workers, knows neither rotation nor CMYK."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8))
    picture.save(tmp_path / "lying.jpg", exif=exif_that_turns())
    picture.convert("CMYK").save(tmp_path / "cmyk.jpg")
    for name in ("lying.jpg", "cmyk.jpg"):
        (read,) = Items([(Image.open(tmp_path / name), 0)], "mine/train", tmp_path / "mine.py")
        assert torch.equal(read_pixels(read, "RGB"), read_pixels(str(tmp_path / name), "RGB")), name
    for mode in ("I", "F"):
        (read,) = Items([(picture.convert("L").convert(mode), 0)], "mine/train", tmp_path / "mine.py")
        colour = Colour("L", (0, 255)) if mode == "F" else "L"
        assert torch.equal(read_pixels(read, colour)[0], torch.from_numpy(np.array(picture.convert("L")))), mode
    held = Image.open(io.BytesIO(file_of(picture, "PNG")[:60] + b"x" * 100))
    damaged = Items([(held, 0)], "mine/train", tmp_path / "mine.py")
    assert b"unreadable" in damaged.identity
    with pytest.raises(UnreadableImage):  # again, although Pillow now has an image, partly black
        read_pixels(damaged[0], "RGB")


def test_a_label_that_is_a_fraction_is_refused_and_not_cut_off():
    assert own_labels([(None, 1.0), (None, torch.tensor(0)), (None, True)], 2, "train").tolist() == [1, 0, 1]
    with pytest.raises(UserError, match=r"train: .*the label 0.9 is no whole number"):
        own_labels([(None, 1), (None, 0.9)], 2, "train")


def test_a_target_transform_makes_the_labels():
    class Turned:
        targets = (0, 1, 2)
        target_transform = staticmethod(lambda label: (label + 1) % 3)

        def __len__(self):
            return 3

        def __getitem__(self, index):
            return None, self.target_transform(self.targets[index])

    assert own_labels(Turned(), 3, "train").tolist() == [1, 2, 0]


class Augmented:
    """A data set whose items draw from the random numbers of Python, NumPy and torch."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        image = np.full((8, 8), 10 * index, dtype=np.uint8)
        image[0, 0] = random.randrange(256)
        image[0, 1] = np.random.randint(256)
        image[0, 2] = torch.randint(256, ())
        return image, 0


def test_a_set_that_augments_its_items_is_recognised_and_goes_on_drawing():
    one, again = (Items(Augmented(), "mine/train", Path("mine.py")) for _ in range(2))
    drawn = one.read(1)
    assert one.identity == again.identity and one.version_of(2) == again.version_of(2)
    assert one.read(1) not in (drawn, again.read(1))


def test_the_workers_of_all_ranks_and_seeds_draw_other_numbers():
    images = ImageFiles(Items(Augmented(), "mine/train", Path("mine.py")), torch.zeros(4, dtype=torch.int64), "L")
    micro_batches = [MicroBatch(0, 0, np.array([1]), 1, 1.0, True) for _ in range(2)]
    drawn = []
    for seed, rank in ((0, 0), (0, 1), (1, 0)):
        reader = MicroBatchReader(images, View(8, whole=True), seed=seed)
        source = StreamSource(reader, torch.device("cpu"), workers=2, cores=1, rank=rank)
        drawn += [tuple(pixels[0, 0, 0, :3].tolist()) for _, pixels, _ in source.batches(micro_batches)]
    assert len(set(drawn)) == len(drawn) == 6


# --------------------------------------------------------------------------------------- they resume


def test_a_run_in_two_parts_ends_in_the_same_bits(whole, tmp_path):
    trained(tmp_path, *FLAGS, "--max-steps", 7)
    run = trained(tmp_path, *FLAGS, "--resume", "auto")
    assert differences(whole, run) == [] and curves(whole) == curves(run)


def test_a_file_that_changed_or_is_missing_is_refused_at_a_resume_and_named(tmp_path, capsys):
    text = Path(EXAMPLE).read_text()
    file = written(tmp_path, text)
    flags = [*QUIETLY, "--plugin", file, *PARTS, "--output", str(tmp_path), "--epochs", "2", "--train-samples", "128"]
    run = trained(tmp_path, *flags, "--max-steps", 3)
    Path(file).write_text(text.replace("depth=4", "depth=4 + 0"))
    for resume in ("auto", str(run)):
        capsys.readouterr()
        assert main([*flags, "--resume", resume]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "--plugin mine.py: has changed" in line
        assert f"put it back, start anew without --resume, or go on like this with --resume {run} --res" in line
    assert main(["--resume", str(run)]) == 2
    assert "was trained with mine.py; add the flag" in capsys.readouterr().err
    assert main([*flags, "--resume", str(run), "--resume-override"]) == 0
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "has changed" in line]
    assert warning.endswith("; going on with the files as they are now")
    told = []
    assert read_run(run, told.append) is None and "were changed by --resume-override" in told[0], "in no table"
    Path(file).write_text(text)
    assert main(["--plugin", file, "--evaluate", "--resume", str(run)]) == 2  # it went on with the changed one
    err = capsys.readouterr().err
    assert "has changed" in err and "put it back, or evaluate like this with scripts/evaluate.py" in err
    assert "--resume" not in err, "an evaluation starts nothing, and refuses --resume-override"


def test_a_checkpoint_never_starts_code_and_says_what_it_needs(whole):
    with pytest.raises(UserError, match="network mixer is in plugin.py; give that file by --plugin"):
        load_model(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(whole, plugins=[EXAMPLE])


def test_a_tool_names_the_line_of_a_users_file_whose_late_import_fails(tmp_path, monkeypatch, capsys):
    plugins.load(
        [written(tmp_path, "from utils.plugin import loss\n@loss('late')\ndef f(a, b):\n    import no_package\n")]
    )
    monkeypatch.setattr("sys.argv", ["tool"])
    assert run_tool("tool.py", lambda _: plugins.added("loss")["late"].make(1, 2)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("mine.py, line 4: ModuleNotFoundError: No module named 'no_package'")


def test_a_tool_is_told_if_the_file_is_not_the_one_of_the_training(whole, tmp_path):
    file = written(tmp_path, Path(EXAMPLE).read_text() + "# more\n", "plugin.py")
    with pytest.warns(UserWarning, match="plugin.py is not what it was"):
        load_model(whole, plugins=[file])


@pytest.mark.parametrize("flags", [("--loss", "mine"), ("--augment", "mine"), ("--dataname", "mine")])
def test_a_tool_that_needs_more_than_the_network_names_the_file_to_give(flags, tmp_path, monkeypatch, capsys):
    file = written(
        tmp_path,
        """
        import numpy
        from torch.nn.functional import cross_entropy
        from utils.plugin import augmentation, dataset, loss

        loss("mine")(cross_entropy)
        augmentation("mine")(lambda images, numbers: images)
        images = [(numpy.full((8, 8, 3), 40 * label, numpy.uint8), label) for label in (0, 1)]
        dataset("mine", image_size=8, fixed_size=True)(lambda path: (images, images, "ab"))
        """,
    )
    more = [*QUIETLY, "--arch", "fc", "--max-steps", "1", "--output", str(tmp_path / "runs")]
    more += ["--datapath", file] if "--dataname" in flags else []  # for the user's reader, which may want a file
    assert main(["--plugin", file, *flags, *more]) == 0
    run = str(run_in(tmp_path))
    plugins.load(())  # as a new process
    load_model(run)  # the network alone needs no file
    with pytest.raises(UserError, match=f"was trained with {' '.join(flags)} of mine.py; give that file by --plugin"):
        evaluate([run, "--device", "cpu"])
    for split in ("val", "train"):
        assert evaluate([run, "--device", "cpu", "--plugin", file, "--split", split]) == 0


def test_parts_may_use_names_that_libraries_and_wrappers_use(tmp_path):
    file = written(
        tmp_path,
        """
        import torch
        from utils.plugin import loss, network, optimizer

        class Wrapped(torch.nn.Module):
            def __init__(self, inputs, features, classes):
                super().__init__()
                self.aux_head = torch.nn.Linear(inputs, features)
                self.module = torch.nn.Linear(features, classes)
            def forward(self, images):
                return self.module(self.aux_head(images.flatten(1)))

        @network("wrapped")
        def wrapped(classes, channels, image_size, features, size):
            return Wrapped(channels * size**2, features, classes)

        @optimizer("paired")
        def paired(groups, lr, coefficients=(1.0, 2.0)):
            assert coefficients == (0.5, 2)
            return torch.optim.SGD(groups, lr)

        @loss("own")
        def own(logits, targets):
            return torch.nn.functional.cross_entropy(logits, targets)
        """,
    )
    flags = ["--plugin", file, "--arch", "wrapped", "--model-kwargs", "features=12", "size=8", "--loss", "own"]
    flags += ["--optimizer", "paired", "--opt-kwargs", "coefficients=[0.5,2]"]
    run = trained(tmp_path, *flags, "--max-steps", 2)
    assert [*head_parameters(load_model(run).network)] == ["module.weight", "module.bias"]
    assert evaluate([str(run), "--device", "cpu", "--plugin", file]) == 0
    pair = [str(run / "checkpoints" / name) for name in ("initial.pt", "final.pt")]
    line = ["--checkpoints", *pair, "--output", str(tmp_path / "soup.pt"), "--device", "cpu", "--plugin", file]
    assert average_checkpoints.main(line) == 0


def test_class_folders_are_evaluated_where_the_runs_own_data_set_takes_no_path(tmp_path, capsys):
    file = written(
        tmp_path,
        """
        import numpy
        from utils.plugin import dataset

        images = [(numpy.full((8, 8, 3), 40 * label, numpy.uint8), label) for label in (0, 1)]
        dataset("mine", image_size=8)(lambda path: (images, images, "ab"))
        """,
    )
    run = trained(tmp_path, "--plugin", file, "--dataname", "mine", "--arch", "fc", "--max-steps", 1, "-w", 0)
    for number in range(5):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), number).save(path)
    line = [str(run), "--device", "cpu", "--plugin", file, "--workers", "0", "--datapath"]
    capsys.readouterr()
    assert evaluate([*line, str(tmp_path / "photos")]) == 0
    assert "5 images" in capsys.readouterr().out
    with pytest.raises(UserError, match="no such folder"):
        evaluate([*line, str(tmp_path / "fotos")])


def test_a_damaged_image_of_a_streamed_data_set_is_skipped_and_a_mistake_in_its_code_is_not(tmp_path, capsys):
    text = """
        import numpy
        from utils.plugin import dataset

        class Images(list):
            @property
            def targets(self):
                return [index % 2 for index in range(len(self))]
            def __getitem__(self, index):
                if index == 20:
                    raise ERROR("no such image")
                return numpy.full((8, 8, 3), index, numpy.uint8), index % 2

        dataset("mine", image_size=8)(lambda path: (Images(24 * [0]), Images(2 * [0]), "ab"))
        """
    for error, code in (("OSError", 0), ("KeyError", 2)):
        file = written(tmp_path, text.replace("ERROR", error), f"{error}.py")
        flags = ["--plugin", file, "--dataname", "mine", "--arch", "fc", "--augment", "none", "--skip-bad-images"]
        more = ["--device", "cpu", "--workers", "1", "--epochs", "1", "--output", str(tmp_path / error)]
        assert main([*flags, *more]) == code
    assert "KeyError.py, line 11: mine/train[20]: KeyError: 'no such image'" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ mistakes


def that_adds(kind, signature, body="...", more=""):
    """A file that adds a ``kind`` called mine."""
    return f"from utils.plugin import {kind}\n@{kind}('mine'{more})\ndef mine({signature}):\n    {body}\n"


a_network = partial(that_adds, "network", "classes, channels, image_size")
a_loss = partial(that_adds, "loss", "logits, targets")
a_metric = partial(that_adds, "metric", "logits, targets")
a_policy = partial(that_adds, "lr_policy", "step, steps")
an_augmentation = partial(that_adds, "augmentation", "images, numbers")
an_optimizer = partial(that_adds, "optimizer", "groups, lr")
a_data_set = partial(that_adds, "dataset", "path")
UNREADABLE = "class Data(list):\n    targets = [0, 1]\n    def __getitem__(self, i):\n        return no\n"
MISTAKES = {
    "def broken(:\n": "line 1: SyntaxError",
    "import no_such_package\n": "line 1: ModuleNotFoundError",
    "\n\n1 / 0\n": "line 3: ZeroDivisionError",
    "from utils.plugin import nothing\n": "line 1: ImportError",
    "\nraise SystemExit\n": "line 2: SystemExit",
    a_network("exit(0)"): "line 4: network mine: SystemExit: 0",
    a_loss().replace("mine", "focal"): "line 2: there is a loss focal already",
    a_loss().replace("'mine'", "'a b'"): "the name 'a b' of a loss must be",
    "from utils.plugin import hook\n@hook('after_updates')\ndef f(t): ...\n": "no point after_updates for a hook; did you",
    "from utils.plugin import metric\n\n@metric\ndef f(_, __): ...\n": 'line 3: write @metric("NAME"), with a name in brackets',
    "from utils.plugin import hook\n@hook('after_validation')\ndef f(traval): ...\n": (
        "hook after_validation: must take (Caller, Report): too many positional arguments"
    ),
    that_adds("metric", "logits"): "line 2: metric mine: must take (logits, targets): too many positional arguments",
    that_adds("network", "classes, *, width"): (
        "line 2: network mine: must take (classes, channels, image_size): too many positional arguments"
    ),
    "from utils.plugin import loss\nclass Mine:\n    def __init__(self, logits): ...\nloss('mine')(Mine)\n": (
        "loss mine: must take (logits, targets): too many positional arguments"
    ),
    that_adds("lr_policy", "step, steps, floor"): (
        "line 2: lr_policy mine: must take (step, steps): missing a required argument: 'floor'"
    ),
    a_data_set("open(path)"): (
        "line 4: dataset mine: TypeError: expected str, bytes or os.PathLike object, not NoneType; --datapath was not"
    ),
    "from utils.plugin import hook\nhook(len)\n": 'write @hook("NAME")',
    a_network().replace("mine", "resnet18"): "there is a network resnet18 already",
    a_network("pass"): "network mine must return a torch.nn.Module, not NoneType",
    "from torch import nn\n" + a_network("return nn.Flatten()"): "network mine has no parameter that trains",
    a_loss("return logits.detach().sum()"): "loss mine must be computed from the logits; nothing would train",
    **{
        a_policy(f"return {factor}"): f"lr_policy mine must return a number of 0 or more, not {given} (step 0)"
        for factor, given in {"float('nan')": "nan", "-1": "-1", "'x'": "'x'", "None": "None"}.items()
    },
    a_policy("return 1 - 2 * step / steps"): "lr_policy mine must return a number of 0 or more, not -",
    a_network("raise ValueError('no')"): "line 4: network mine: ValueError: no",
    a_loss("return logits[targets]"): "loss mine must return a tensor of one number, not a",
    a_metric("return 1"): "metric mine must return a value for each of 64 images, a tensor of the shape (64,), not int",
    a_metric().replace("'mine'", "'top1'"): "there is a metric top1 already",
    a_metric().replace("'mine'", "'Top1'"): "there is a metric Top1 already",
    a_metric("return logits"): "a tensor of the shape (64,), not (64, 10)",
    an_augmentation("return images[:1, 0]"): "augmentation mine must return images of the shape",
    an_augmentation("return images / 255"): (
        "augmentation mine must return levels from 0 to 255, as it is given; its numbers lie between 0 and 1"
    ),
    **{
        an_augmentation(f"return {made}", more): (
            f"augmentation mine must return {words} as it is given; its numbers lie between"
        )
        for more, made, words in (
            ("", "(images / 255 - 0.3) / 0.35", "levels from 0 to 255,"),
            ("", "images.float() - 300", "levels from 0 to 255,"),
            ("", "images.long() + 300", "levels from 0 to 255,"),
            (", normalised=True", "images * 255", "images normalised"),
        )
    },
    an_augmentation(more=", numbers=-1"): (
        "line 2: ValueError: augmentation mine: numbers must be a whole number of 0 or more, not -1"
    ),
    a_data_set(more=", channels=3, mean=[0.3]"): (
        "line 2: ValueError: data set mine: mean must be 3 number(s), one per channel, not 1"
    ),
    a_data_set("return [1], [1], 'ab'", ", augment=['flp']"): (
        "data set mine: there is no augmentation flp; did you mean flip"
    ),
    a_data_set("return 1"): "(training, validation, classes)",
    a_data_set("return [1], [1], 3"): "data set mine must return the names of the classes last, not 3",
    a_data_set("return [(0, 5)], [(0, 0)], 'ab'"): "train: item 0 has label 5 of 2 classes",
    UNREADABLE + a_data_set("return Data('ab'), Data('ab'), 'ab'"): "line 4: mine/train[0]: NameError: name 'no'",
    UNREADABLE + a_data_set("return Data('ab'), Data('ab'), 'ab'", ", fixed_size=True"): (
        "line 4: mine/train[0]: NameError: name 'no'"
    ),
    UNREADABLE + a_data_set("return Data('abc'), Data('ab'), 'ab'"): "train: 3 items have 2 targets",
    UNREADABLE.replace("(list)", "") + a_data_set("return Data(), Data(), 'ab'"): (
        "train: must have a length (TypeError: object of type 'Data' has no len())"
    ),
    an_optimizer("return lr"): "torch.optim.Optimizer, not float",
    an_optimizer().replace("mine", "sgd"): "there is an optimizer sgd already",
    "import torch\n" + an_optimizer("return torch.optim.LBFGS(groups, lr)"): (
        "optimizer mine needs the loss again in its step, which has it once"
    ),
    "from torch import nn\nclass Net(nn.Linear):\n    def forward(self, x):\n        return no if self.training else super().forward(x.flatten(1))\n"
    + a_network("return Net(64, 10)"): "line 4: NameError: name 'no'",
    "from torch import nn\nclass Net(nn.Linear):\n    def forward(self, x):\n        if self.training:\n            import no_package\n"
    "        return super().forward(x.flatten(1))\n"
    + a_network("return Net(64, 10)"): "line 5: ModuleNotFoundError: No module named 'no_package'",
    "from torch import nn\nclass Net(nn.Linear):\n    def forward(self, x):\n        return no\n"
    + a_network("return Net(64, 10)"): "line 4: network mine at --image-size 8: NameError: name 'no' is not defined",
    "from torch import nn\n" + a_network("return nn.Linear(5, 10)"): "network mine at --image-size 8: RuntimeError: ",
}


FOUND_IN_TRAINING = ("loss", "metric", "augmentation")


def test_parameters_that_an_own_optimizer_leaves_out_are_counted_and_named(tmp_path, capsys):
    text = """
        import torch
        from utils.plugin import optimizer

        optimizer("mine")(lambda groups, lr: torch.optim.SGD(groups[:1], lr=lr))
        """
    flags = [*QUIETLY, "--plugin", written(tmp_path, text), "--optimizer", "mine", "--arch", "fc", "--dry-run"]
    assert main([*flags, "--no-decay-norm-bias"]) == 0
    line = "--optimizer mine does not train layers.1.bias, layers.3.bias, layers.5.bias (410 parameters): they keep"
    assert line in capsys.readouterr().err
    assert main(flags) == 0  # one group, of all
    assert "does not train" not in capsys.readouterr().err


def test_a_damaged_image_of_a_fixed_size_is_not_skipped_and_the_line_does_not_advise_to(tmp_path, capsys):
    damaged = UNREADABLE.replace("return no", "raise OSError('cut')")
    file = written(tmp_path, damaged + a_data_set("return Data('ab'), Data('ab'), 'ab'", ", fixed_size=True"))
    flags = ("--dataname", "mine", "--skip-bad-images", "--output", str(tmp_path / "runs"))
    assert main([*QUIETLY, "--plugin", file, *flags]) == 2
    err = capsys.readouterr().err
    assert "mine/train[0]: cannot be read as an image (cut); leave it out of the data set" in err
    assert "or skip it with" not in err


def test_the_line_about_an_image_whose_own_file_is_lost_names_that_file(tmp_path):
    class Data(list):
        def __getitem__(self, number):
            return Image.open(tmp_path / "lost.png"), 0

    with pytest.raises(UnreadableImage, match=r"^mine/train\[0\]: cannot be read as an image .*lost\.png"):
        read_pixels(Items(Data("a"), "mine/train", "mine.py")[0], "RGB")


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_a_file_is_one_line_with_its_place(text, tmp_path, capsys):
    file = written(tmp_path, text)
    own = {"network": "--arch", "loss": "--loss", "augmentation": "--augment", "dataset": "--dataname"}
    own |= {"optimizer": "--optimizer", "lr_policy": "--lr-policy"}
    kind = next((kind for kind in own if f"@{kind}('mine'" in text), None)
    arch = "resnet18" if "resnet18" in text else "fc"
    flags = ["--arch", arch, *([own[kind], "mine"] if kind else [])]
    output = tmp_path / "runs"
    code = main([*QUIETLY, "--plugin", file, *flags, "--max-steps", "1", "--output", str(output)])
    err = capsys.readouterr().err
    assert code == 2
    (line,) = [line for line in err.splitlines() if "warning" not in line]
    assert line.startswith("main.py: --plugin ") and "mine.py" in line and MISTAKES[text] in line
    assert not output.exists() or any(f"@{kind}(" in text for kind in FOUND_IN_TRAINING) or "self.training" in text


def test_a_network_that_gives_several_tensors_is_told_so_and_not_to_try_another_image_size(tmp_path, capsys):
    text = "class Net(nn.Linear):\n    def forward(self, x):\n        return 2 * (super().forward(x.flatten(1)),)\n"
    file = written(tmp_path, "from torch import nn\n" + text + a_network("return Net(64, 10)"))
    assert main([*QUIETLY, "--plugin", file, "--arch", "mine", "--output", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err == "main.py: --arch mine gives tuple where a classifier gives (1, 10)\n"


def test_files_that_cannot_be_read_or_have_one_name_are_refused(tmp_path, capsys):
    assert main(["--plugin", str(tmp_path / "none.py")]) == 2
    assert "none.py: cannot be read (No such file" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    twins = [written(tmp_path, ""), written(tmp_path / "other", "")]
    assert main(["--plugin", *twins]) == 2
    assert "has the same name; rename one" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["5", "[5]", "{a: b}"])
def test_what_is_no_file_in_a_recipe_is_refused(value, recipe, capsys):
    assert main(["--config", recipe(f"plugin: {value}\n"), "--dry-run"]) == 2
    assert "plugin: must name files, not " in capsys.readouterr().err


def test_a_recipe_names_files_relative_to_itself(tmp_path, recipe, monkeypatch):
    written(tmp_path, "from utils.plugin import loss\n@loss('mine')\ndef f(a, b): ...\n")
    path = recipe("plugin: mine.py\nloss: mine\n")
    monkeypatch.chdir("/")
    args = parse(["--config", path])
    assert args.loss.loss == "mine" and args.run.plugin == (str(tmp_path / "mine.py"),)
