"""Is conditional computation really faster?

`compact()` against the dense network at its best (BatchNorm folded, in both memory layouts; torch.compile; ONNX
Runtime; OpenVINO), against gathering the open weights by indexing, and against a network that was shrunk to the same
MACs beforehand. ResNet-50 at 224×224 and CIFAR ResNet-56; batches of 1, 8 and 32; a quarter, a half and three quarters
of the MACs open, in patterns that differ from image to image: random ones, and for CIFAR learned ones from a run
(`--learned`). A batch is also computed as if its images came one by one. All contenders of a case are timed
interleaved. What is not installed is left out, and said so.
"""

from __future__ import annotations

import copy
import gc
import json
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import decide_, full_name, independent_macs, make_network, parser, relative_difference, show
from latency import _onnx as onnx_contender
from rich.console import Console
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

import headgate
from headgate.analysis.measure import Timing, module_call, ratio, time_interleaved, torch_threads
from headgate.analysis.records import write_record
from headgate.gates.dynamic import GateNetwork
from headgate.inference.compact import CompactModel
from headgate.inference.kernel.prepared import Conv
from headgate.inference.kernel.tape import GatesStep, Steps
from headgate.inference.lowering.masks import GateSite
from headgate.models.names import load_named

QUESTION = "How fast is a network that computes only the open channels of each image, against all dense alternatives?"
MODELS = ("resnet50", "cifar_resnet56")
SAMPLE_MS = 40
DENSE = ("eager", "channels_last", "torch.compile", "onnxruntime", "openvino")
Row = dict[str, Any]
SAY = Console(highlight=False)


def main() -> None:
    options = _options()
    rows: list[Row] = []
    with torch_threads(options.threads):
        for name in ["cifar_resnet56"] if options.quick else options.models:
            for row in _network_rows(name, options):
                rows.append(row)
                write_record(  # after every case: some take minutes
                    options.out, question=QUESTION, results={"rows": rows, "kernel": headgate.kernel_level()},
                    threads=options.threads, seeds=[options.seed],
                )  # fmt: skip
    show(f"{options.threads} threads, milliseconds a batch", COLUMNS, [_cells(row) for row in rows])


def _options() -> Namespace:
    made = parser(QUESTION, "conditional_speed", MODELS)
    made.add_argument("--rounds", type=int, default=15, help="rounds at batch 1; fewer where a batch takes long")
    made.add_argument("--batches", type=lambda text: [int(size) for size in text.split(",")], default="1,8,32")
    made.add_argument(
        "--shares", type=lambda text: [float(share) for share in text.split(",")], default="0.25,0.5,0.75"
    )
    made.add_argument("--learned", action="append", default=[], metavar="NAME=FILE", help="a run's conditional network")
    made.add_argument("--data-dir", help="of CIFAR-10, for learned patterns: images open other channels than noise")
    return made.parse_args()


def _network_rows(name: str, options: Namespace) -> Iterator[Row]:
    dense, example = make_network(name, options.seed)
    for batch in options.batches[:1] if options.quick else options.batches:
        x = torch.randn(batch, *example.shape[1:], generator=torch.Generator().manual_seed(options.seed + 1))
        with tempfile.TemporaryDirectory() as folder:
            contenders = _dense_contenders(dense, x, Path(folder), options.threads)
            for share in options.shares[1:2] if options.quick else options.shares:
                gated = random_gates(dense, example[:1], share, options.seed)
                yield _case(name, "random", share, gated, x, contenders, options)
            for file in [text.partition("=")[2] for text in options.learned if text.startswith(f"{name}=")]:
                gated = _learned(name, Path(file))
                images = _real_images(options.data_dir, batch) if options.data_dir else x
                yield _case(name, "learned", gated.target, gated, images, contenders, options)
        gc.collect()


# ----------------------------------------------------------------------------------------------- the contenders


def random_gates(dense: nn.Module, example: Tensor, share: float, seed: int) -> headgate.GatedModel:
    """Gates that open others for other images, and `share` of the MACs on average over noise."""
    gated = headgate.gate(dense, example, kind="dynamic", target=share)
    assert gated.dynamic is not None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for network in gated.dynamic.networks:
            assert isinstance(network, GateNetwork)
            network.head.weight.normal_(0, 2.0, generator=generator)
            network.head.bias.normal_(0, 1.0, generator=generator)
    noise = [torch.randn(8, *example.shape[1:], generator=generator) for _ in range(2)]
    for network in gated.dynamic.networks:  # hidden values of a size that the head was made for
        network.train()
    with torch.no_grad():
        for _ in range(20):
            gated.model.eval()
            gated(noise[0])
    gated.calibrate(noise, batches=2, batchnorm=False)
    return gated.eval()


def _learned(name: str, path: Path) -> headgate.GatedModel:
    gated = headgate.load(path, load_named(full_name(name)).model)
    assert isinstance(gated, headgate.GatedModel)
    return gated.eval()


def _real_images(data_dir: str, batch: int) -> Tensor:
    from headgate.data.sources import open_data

    images, _ = next(iter(open_data("cifar10", root=Path(data_dir)).test.eval_batches(batch)))
    return images


def _dense_contenders(dense: nn.Module, x: Tensor, folder: Path, threads: int) -> dict[str, Callable[[], Any]]:
    """The dense network in every form that is installed here."""
    folded = fuse(copy.deepcopy(dense))
    made = {"eager": module_call(folded, x)}
    last = copy.deepcopy(folded).to(memory_format=torch.channels_last)
    made["channels_last"] = module_call(last, x.to(memory_format=torch.channels_last))
    made["torch.compile"] = _compiled(folded, x)
    made["onnxruntime"] = onnx_contender(dense, x, folder / "dense.onnx", threads)
    openvino = _openvino(folder / "dense.onnx", x, threads)
    if openvino is not None:
        made["openvino"] = openvino
    return made


def _compiled(net: nn.Module, x: Tensor) -> Callable[[], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(net, dynamic=False)
        call = module_call(compiled, x)  # type: ignore[arg-type]
        call()
    return call


def _openvino(path: Path, x: Tensor, threads: int) -> Callable[[], Any] | None:
    try:
        import openvino
    except ImportError:
        SAY.print("openvino is not installed: left out")
        return None
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.Core().compile_model(str(path), "CPU", settings).create_infer_request()
    given = x.numpy()
    return lambda: request.infer([given])


class Gather(nn.Module):
    """A layer of the compact network by indexing: copy the open weights, convolve, put the results in their places."""

    def __init__(self, conv: Conv) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, in_mask: Tensor | None, out_mask: Tensor | None, residual: Tensor | None) -> Tensor:
        conv = self.conv
        stride, padding, dilation = conv.geometry
        results = []
        for image in range(len(x)):
            reads = _open(in_mask, image, x.shape[1])
            writes = _open(out_mask, image, len(conv.weight))
            whole = None
            if len(reads) and len(writes):
                part = conv.weight[writes][:, reads]
                bias = None if conv.bias is None else conv.bias[writes]
                y = F.conv2d(x[image : image + 1, reads], part, bias, stride, padding, dilation)
                whole = y.new_zeros(1, len(conv.weight), *y.shape[2:]).index_copy_(1, writes, y)
            results.append(whole)
        like = next((each for each in results if each is not None), None)
        if like is None:
            like = F.conv2d(x[:1], conv.weight, None, stride, padding, dilation) * 0
        y = torch.cat([torch.zeros_like(like) if each is None else each for each in results])
        if residual is not None:
            y = y + residual
        if conv.relu:
            y = y.relu_()
        return residual.copy_(y) if conv.in_place and residual is not None else y


def _open(mask: Tensor | None, image: int, count: int) -> Tensor:
    if mask is None:
        return torch.arange(count)
    return mask[image if len(mask) > 1 else 0].nonzero().flatten()


def gathering(fast: CompactModel) -> nn.Module:
    """The compact network with every convolution by indexing."""
    twin = copy.deepcopy(fast)
    for name, module in list(twin._layers.named_modules()):
        if isinstance(module, Conv):
            setattr(twin._layers, name, Gather(module))
    twin._quick = twin._layers
    return twin


def _shrunk(dense: nn.Module, example: Tensor, share: float, seed: int) -> nn.Module:
    """A network of the same MACs whose widths were decided beforehand."""
    gated = headgate.gate(dense, example, target=share)
    decide_(gated, "uniform", seed)
    return gated.shrink(fold_batchnorm=True)


# -------------------------------------------------------------------------------------------------------- a case


def _case(
    name: str, patterns: str, share: float, gated: headgate.GatedModel, x: Tensor,
    dense_calls: dict[str, Callable[[], Any]], options: Namespace,
) -> Row:  # fmt: skip
    fast = gated.compact(x)
    with torch.no_grad():
        gap = relative_difference(fast(x), gated(x))
    open_share = gated.macs() / gated.dense_macs
    small = _shrunk(_without_gates(gated), x[:1], max(open_share, 0.05), options.seed)
    calls = {
        **dense_calls, "compact": module_call(fast, x), "gather": module_call(gathering(fast), x),
        "shrunk": module_call(small, x),
    }  # fmt: skip
    if len(x) > 1:
        calls["one by one"] = _one_by_one(gated.compact(x[:1]), x)
    for call in calls.values():
        call()
    start = time.perf_counter()
    calls["compact"]()
    once_ms = (time.perf_counter() - start) * 1000
    rounds = 3 if options.quick else max(4, min(options.rounds, int(2500 / once_ms)))
    settle = 1 if once_ms < 300 else 0
    timings = time_interleaved(calls, rounds, warmup=0, calls=max(1, round(SAMPLE_MS / once_ms)), settle=settle)
    best_torch = min(("eager", "channels_last", "torch.compile"), key=lambda each: timings[each].median_ms)
    best = min((each for each in DENSE if each in timings), key=lambda each: timings[each].median_ms)
    row = {
        "model": name, "patterns": patterns, "batch": len(x), "asked": share, "open": round(float(open_share), 4),
        "timings": timings, "difference": gap, "best_torch": best_torch, "best_dense": best,
        "over_best_torch": ratio(timings[best_torch], timings["compact"]),
        "over_best_dense": ratio(timings[best], timings["compact"]),
        "of_shrunk_speed": ratio(timings["shrunk"], timings["compact"]),
        "shrunk_open": round(independent_macs(small, x) / gated.dense_macs, 4),
        "of_mac_ratio": round(ratio(timings[best_torch], timings["compact"]).median * float(open_share), 3),
        "over_one_by_one": ratio(timings["one by one"], timings["compact"]) if len(x) > 1 else None,
        "at_once": fast.at_once,
        "gates_share": round(_gates_ms(fast, x) / timings["compact"].median_ms, 4),
        "dense_layers": sorted(fast.report.dense), "kernel_layers": len(fast.report.fast),
    }  # fmt: skip
    SAY.print(f"{name} {patterns} batch {len(x)} open {open_share:.2f}: " + json.dumps(_short(timings)))
    return row


def _one_by_one(fast: CompactModel, x: Tensor) -> Callable[[], Any]:
    """The images of a batch as if each came alone."""
    each = [module_call(fast, image) for image in x.split(1)]
    return lambda: [call() for call in each]


def _without_gates(gated: headgate.GatedModel) -> nn.Module:
    """The dense network with the gated one's weights."""
    from headgate.gates.draws import detach

    net = copy.deepcopy(gated.model)
    detach(net)
    return net


def _gates_ms(fast: CompactModel, x: Tensor) -> float:
    """What the gate networks of a pass take: all of them in one call, on copies of what they saw."""
    seen: list[tuple[GateSite, Tensor, Tensor | None]] = []
    sites = [module for module in fast._layers.modules() if isinstance(module, GateSite)]
    hooks = [site.register_forward_pre_hook(lambda site, args: seen.append((site, *_copied(args)))) for site in sites]
    part = x[: fast.at_once or len(x)]
    fast._layers(part)
    for hook in hooks:
        hook.remove()
    given = [tensor for _, *tensors in seen for tensor in tensors if tensor is not None]
    steps, place, result = [], 0, len(given)
    for site, _, arriving in seen:
        gives = tuple(range(result, result + len(site.sizes)))
        steps.append(GatesStep(site, place, None if arriving is None else place + 1, gives))
        place, result = place + 1 + (arriving is not None), result + len(gives)
    gates = Steps(steps, len(given), [])
    passes = []
    for _ in range(9):
        start = time.perf_counter()
        gates(*given)
        passes.append((time.perf_counter() - start) * 1000)
    return sorted(passes)[len(passes) // 2] * len(x) / len(part)


def _copied(args: tuple[Tensor | None, ...]) -> tuple[Tensor | None, Tensor | None]:
    images, arriving = (*args, None)[:2]
    assert images is not None
    return images.clone(), arriving


def _short(timings: dict[str, Timing]) -> dict[str, float]:
    return {name: round(timing.median_ms, 2) for name, timing in timings.items()}


COLUMNS = [
    "network", "patterns", "batch", "open", *DENSE, "gather", "shrunk", "compact", "× best torch", "× best dense",
    "of shrunk", "of MACs", "gates",
]  # fmt: skip


def _cells(row: Row) -> list[Any]:
    timings = row["timings"]
    times = [timings[name].median_ms if name in timings else None for name in (*DENSE, "gather", "shrunk", "compact")]
    return [
        row["model"], row["patterns"], row["batch"], row["open"], *times, row["over_best_torch"].median,
        row["over_best_dense"].median, row["of_shrunk_speed"].median, row["of_mac_ratio"], row["gates_share"],
    ]  # fmt: skip


if __name__ == "__main__":
    main()
