import pytest

from hetrain.telemetry.interface import Interface, interface_of, reports_for_host
from hetrain.telemetry.pace import Pace
from tests.small_run import config, train


@pytest.fixture
def net(tmp_path):
    for name, kind, sent in (("eth0", "1", 1000), ("ib0", "32", 50), ("lo", "772", 9)):
        folder = tmp_path / name / "statistics"
        folder.mkdir(parents=True)
        (folder / "tx_bytes").write_text(f"{sent}\n")
        (tmp_path / name / "type").write_text(f"{kind}\n")
    return tmp_path


def send(net, name, nbytes):
    path = net / name / "statistics" / "tx_bytes"
    path.write_text(f"{int(path.read_text()) + nbytes}\n")


def test_bytes_are_counted_from_the_start_and_pauses_left_out(net):
    interface = interface_of({"GLOO_SOCKET_IFNAME": "eth0"}, net)
    assert interface is not None
    send(net, "eth0", 7)
    assert interface.sent == 0
    interface.start()
    send(net, "eth0", 10)
    assert interface.sent == 10
    with interface.paused():
        send(net, "eth0", 500)
        assert interface.sent == 10
    send(net, "eth0", 3)
    assert interface.sent == 13


def test_several_interfaces_are_added_up(net):
    interface = interface_of({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, net)
    assert interface is not None
    interface.start()
    send(net, "eth0", 1)
    send(net, "ib0", 2)
    assert interface.sent == 3


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"GLOO_SOCKET_IFNAME": ""},
        {"GLOO_SOCKET_IFNAME": "lo"},
        {"GLOO_SOCKET_IFNAME": "eth0,lo"},
        {"GLOO_SOCKET_IFNAME": "eth7"},
        {"NCCL_SOCKET_IFNAME": "^docker"},
    ],
)
def test_without_an_interface_of_its_own_nothing_is_told(net, env):
    assert interface_of(env, net) is None


def test_nccl_names_one_too_and_gloo_comes_first(net):
    assert interface_of({"NCCL_SOCKET_IFNAME": "ib0"}, net) is not None
    assert interface_of({"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "lo"}, net) is None


def test_one_rank_of_a_host_reports():
    assert reports_for_host({})
    assert reports_for_host({"LOCAL_RANK": "0"})
    assert not reports_for_host({"LOCAL_RANK": "1"})


def test_pace_leaves_the_first_tenth_out():
    pace = Pace()
    for step in range(1, 21):  # two slow steps, 17 of 10 ms and one of 20
        pace.add(10.0 * min(step, 2) + 0.01 * max(step - 2, 0) + (0.01 if step == 20 else 0.0), 8 * step)
    values = pace.values()
    assert values["step_ms"]["p50"] == pytest.approx(10.0)
    assert values["step_ms"]["p90"] == pytest.approx(10.0)
    assert values["step_ms"]["mean"] == pytest.approx(190 / 18)
    assert values["examples_per_s_steady"] == pytest.approx(8 * 18 / 0.19)


def test_pace_of_no_steps_and_of_one():
    assert Pace().values() == {"step_ms": None, "examples_per_s_steady": None}
    one = Pace()
    one.add(0.5, 3)
    assert one.values() == {
        "step_ms": {"p50": 500.0, "p90": 500.0, "mean": 500.0},
        "examples_per_s_steady": 6.0,
    }


class Counting:
    """An interface that sends 100 bytes whenever it is looked at."""

    def __init__(self, path):
        self.path = path
        path.write_text("0")

    def read_text(self):
        sent = int(self.path.read_text()) + 100
        self.path.write_text(str(sent))
        return str(sent)


def sitting(monkeypatch, folder, steps, interface):
    monkeypatch.setattr("hetrain.trainer.interface_of", lambda env: interface)
    summary, _ = train(0, 1, config(folder, "het", train__max_steps=steps, checkpoint__resume="auto"))
    return summary


def test_the_summary_tells_what_the_kernel_counted_in_all_sittings(tmp_path, monkeypatch):
    first = sitting(monkeypatch, tmp_path, 5, Interface((Counting(tmp_path / "count"),)))
    assert first["kernel_bytes"] > 0
    assert first["kernel_bytes"] % 100 == 0
    assert first["step_ms"]["mean"] > 0
    second = sitting(monkeypatch, tmp_path, 10, Interface((Counting(tmp_path / "count"),)))
    assert second["kernel_bytes"] > first["kernel_bytes"]
    assert sitting(monkeypatch, tmp_path, 15, None)["kernel_bytes"] is None  # a part of a sum would mislead
    again = sitting(monkeypatch, tmp_path, 20, Interface((Counting(tmp_path / "count"),)))
    assert again["kernel_bytes"] is None
