"""What a processor is, from Linux and from elsewhere."""

import platform

import pytest
import torch

from lazyformer_fairseq.evaluation.costs.machine import short_device_name
from lazyformer_fairseq.executors import cpuinfo as of_linux
from lazyformer_fairseq.modules.processor import device_key

FIRST_CORE = "processor\t: 0\nvendor_id\t: {}\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: A 7 @ 2 GHz: fast\n"


@pytest.fixture(autouse=True)
def asked_anew():
    device_key.cache_clear()
    yield
    device_key.cache_clear()


def test_linux_says_more_than_the_name_it_is_sold_by(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(FIRST_CORE.format("AuthenticAMD") + "\n" + FIRST_CORE.format("another").replace("25", "26"))
    monkeypatch.setattr(of_linux, "CPUINFO", cpuinfo)
    for capability in ("AVX2", "AVX512"):  # what torch uses of it makes another key
        device_key.cache_clear()
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda found=capability: found)
        assert device_key("cpu") == f"A 7 @ 2 GHz: fast (AuthenticAMD family 25 model 1, {capability})"
        assert short_device_name(device_key("cpu")) == "A 7 @ 2 GHz: fast", "the title of a picture"


def test_elsewhere_python_knows_the_family(tmp_path, monkeypatch):
    monkeypatch.setattr(of_linux, "CPUINFO", tmp_path / "no such file")
    monkeypatch.setattr(platform, "processor", lambda: "AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD")
    assert device_key("cpu").startswith("AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD (")


def test_a_gpu_has_a_name_and_a_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert device_key("cuda") == "NVIDIA H100 80GB HBM3 (compute capability 9.0)"
