"""A checkpoint's list of its shards, as a hostile or damaged file may say it."""

import hashlib
import json
from types import SimpleNamespace

import pytest
from torch.distributed.checkpoint import FileSystemWriter

from utils.checkpoint import sharded
from utils.checkpoint.sharded import Shards
from utils.config.settings import UserError

SOUND = {"keys": ["a"], "dtype": "float32", "shape": [2], "pieces": [[[0], [2], "__0_0.distcp", 0, 8]]}


def listing(**changes):
    return {"folder": "00000001_ab", "sha256": {"__0_0.distcp": "c"}, "tensors": json.dumps({"a": SOUND | changes})}


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [-1]},
        {"shape": [2**70]},
        {"shape": 2},
        {"dtype": "ones"},
        {"pieces": [[[0], [2]]]},
        {"pieces": [[[0], [2], ["__0_0.distcp"], 0, 8]]},
        {"pieces": [[[0], [2], "../last.pt", 0, 8]]},
        {"pieces": [[[0], [2], "__0_0.distcp", "0", 8]]},
    ],
)
def test_an_impossible_list_of_shards_is_refused_in_one_line(changes, tmp_path):
    assert Shards(tmp_path / "last.pt", listing()).tensors["a"].shape == (2,)
    with pytest.raises(UserError, match="its list of shards is damaged"):
        Shards(tmp_path / "last.pt", listing(**changes))


@pytest.mark.parametrize(("shape", "right"), [([2], True), ([1], False), ([0], False), ([3], False)])
def test_a_tensor_that_its_pieces_do_not_cover_is_refused(tmp_path, shape, right):
    """Its other numbers would be whatever the memory holds."""
    shards = Shards(tmp_path / "last.pt", listing(shape=[2], pieces=[[[0], shape, "__0_0.distcp", 0, 8]]))
    shards.folder.mkdir(parents=True)
    (shards.folder / "__0_0.distcp").write_bytes(bytes(100))
    shards.digests["__0_0.distcp"] = hashlib.sha256(bytes(100)).hexdigest()
    if right:
        shards.verify()
        return
    with pytest.raises(UserError, match="its shards cannot hold what it says"):
        shards.verify()


def test_where_the_pieces_lie_is_known_after_a_save_also_where_torch_notes_it_in_a_copy(tmp_path, monkeypatch):
    """As in torch 2.11, with which no checkpoint could be written otherwise."""
    monkeypatch.setattr(FileSystemWriter, "finish", lambda *_, **__: None)
    results = [[SimpleNamespace(index=(rank, part), storage_data=part) for part in range(2)] for rank in range(2)]
    metadata = SimpleNamespace(storage_data=None)
    sharded._writer(tmp_path).finish(metadata=metadata, results=results)
    assert metadata.storage_data == {(rank, part): part for rank in range(2) for part in range(2)}
