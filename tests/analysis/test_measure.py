import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from headgate.analysis import measure
from headgate.errors import HeadgateError


class Watch:
    """A clock that only moves when a function says how long it took."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def taking(self, *durations_ms: float) -> Callable[[], None]:
        remaining = list(durations_ms)

        def function() -> None:
            self.now_s += remaining.pop(0) / 1000

        return function


def test_samples_are_paired_by_round() -> None:
    watch = Watch()
    functions = {"slow": watch.taking(99, 4, 40, 400), "fast": watch.taking(99, 2, 10, 100)}
    timings = measure.time_interleaved(functions, rounds=3, warmup=1, clock=watch)
    assert timings["slow"].samples_ms == pytest.approx((4, 40, 400))
    assert timings["slow"].median_ms == pytest.approx(40)
    quotient = measure.ratio(timings["slow"], timings["fast"])
    assert quotient.samples == pytest.approx((2, 4, 4)) and quotient.median == pytest.approx(4)
    assert quotient.iqr == pytest.approx(1)


def test_a_ratio_cancels_what_disturbs_a_whole_round() -> None:
    load = [1, 7, 2, 30, 3]
    a, b = measure.timing_of([3 * x for x in load]), measure.timing_of([2 * x for x in load])
    assert measure.ratio(a, b).median == pytest.approx(1.5) and measure.ratio(a, b).iqr == pytest.approx(0)


def test_nobody_always_goes_first() -> None:
    order: list[str] = []
    functions = {name: (lambda name=name: order.append(name)) for name in "abc"}
    measure.time_interleaved(functions, rounds=3, warmup=0)
    assert "".join(order) == "abcbcacab"


def test_calls_are_averaged_and_settling_is_not_timed() -> None:
    watch = Watch()
    timings = measure.time_interleaved({"a": watch.taking(100, 1, 3, 100, 5, 7)}, 2, 0, calls=2, settle=1, clock=watch)
    assert timings["a"].samples_ms == pytest.approx((2, 6))


def test_before_is_not_timed() -> None:
    watch = Watch()
    seen: list[str] = []

    def before(name: str) -> None:
        seen.append(name)
        watch.now_s += 5

    timings = measure.time_interleaved({"a": watch.taking(1, 1)}, 2, 0, before=before, clock=watch)
    assert timings["a"].samples_ms == pytest.approx((1, 1)) and seen == ["a", "a"]


def test_median_and_spread_are_the_textbook_ones() -> None:
    timing = measure.timing_of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (timing.median_ms, timing.iqr_ms) == (3.0, 2.0)
    assert measure.timing_of([1.0]).iqr_ms == 0.0
    assert measure.interquartile_range([1, 9]) == statistics.quantiles([1, 9], n=4, method="inclusive")[2] - 3


def test_bad_requests_are_refused() -> None:
    with pytest.raises(HeadgateError, match="nothing to time"):
        measure.time_interleaved({}, 3)
    with pytest.raises(HeadgateError, match="rounds=0"):
        measure.time_interleaved({"a": lambda: None}, 0)
    with pytest.raises(HeadgateError, match="cannot be paired"):
        measure.ratio(measure.timing_of([1.0]), measure.timing_of([1.0, 2.0]))
    with pytest.raises(HeadgateError, match="0 threads"), measure.torch_threads(0):
        pass


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with measure.torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_modules_are_timed_in_eval_and_inference_mode() -> None:
    class Probe(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not self.training and torch.is_inference_mode_enabled() and torch.get_num_threads() == 1
            return x

    timings = measure.latency({"a": Probe(), "b": Probe()}, torch.zeros(1), threads=1, rounds=2, warmup=1)
    assert len(timings["a"].samples_ms) == 2 and timings["b"].median_ms > 0


def test_an_onnx_file_is_timed_on_its_own_threads(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    tensor = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 2]) for name in ("x", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", tensor[:1], tensor[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    path = tmp_path / "relu.onnx"
    onnx.save(model, path)
    x = torch.tensor([[-1.0, 2.0]])
    assert measure.onnx_call(path, x, threads=1)()[0].tolist() == [[0.0, 2.0]]
    assert measure.onnx_session(path, threads=2).get_session_options().intra_op_num_threads == 2
    assert measure.onnx_latency({"a": path}, x, threads=1, rounds=2)["a"].median_ms > 0
