"""What a processor is, from Linux and from elsewhere."""

import platform

import pytest

from lazyformer_fairseq.modules import processor


@pytest.fixture(autouse=True)
def asked_anew():
    for ask in (processor.processor_name, processor.is_amd):
        ask.cache_clear()
    yield
    for ask in (processor.processor_name, processor.is_amd):
        ask.cache_clear()


@pytest.mark.parametrize(("vendor", "amd"), [("AuthenticAMD", True), ("GenuineIntel", False)])
def test_linux_says_who_made_it(tmp_path, monkeypatch, vendor, amd):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel\t\t: 17\nmodel name\t: A 7 @ 2 GHz: fast\n\n")
    monkeypatch.setattr(processor, "CPUINFO", cpuinfo)
    assert processor.is_amd() == amd
    assert processor.processor_name() == "A 7 @ 2 GHz: fast"


def test_elsewhere_python_knows_the_family(tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "no such file")
    monkeypatch.setattr(platform, "processor", lambda: "AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD")
    assert processor.is_amd() and processor.processor_name().startswith("AMD64")
