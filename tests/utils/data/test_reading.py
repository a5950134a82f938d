"""A run reads its data once, also where the search for a run to resume has looked at them before."""

from tests.utils.data.loading import CPU
from utils.config.arguments import parse
from utils.data import datasets
from utils.data.formats.listing import Lister


def test_what_a_search_has_read_is_not_read_again_and_other_settings_are(monkeypatch):
    read = []

    def get_data(settings, *given):
        read.append(settings.dataname)
        return reads(settings, *given)

    reads = datasets.get_data
    monkeypatch.setattr(datasets, "get_data", get_data)
    reader = datasets.DataReader(CPU, Lister())
    digits = parse([]).data
    fingerprint = reader.fingerprint(digits)
    assert reader.to_train_on(digits, None).fingerprint == fingerprint and read == ["digits"]
    other = parse(["--dataname", "synthetic", "--image-size", "8"]).data
    reader.fingerprint(digits)
    assert reader.to_train_on(other, None).fingerprint != fingerprint and read == ["digits", "digits", "synthetic"]
