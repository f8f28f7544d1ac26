"""In memory, with `out=`: against torch, oneDNN and a plain copy."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from tests.bench.cases import DTYPES, MEMORY_CASES, Case
from tests.bench.measure import Check, Line, alternate
from tests.bench.options import Options
from tests.bench.peers import Peer, load_torch


def lines(options: Options) -> Iterator[Line]:
    """A line for every case and dtype, and the geometric mean over them."""
    peer = load_torch(options.threads)
    ratios: list[float] = []
    for case in MEMORY_CASES:
        for dtype in DTYPES:
            if options.selects(f"{case.name} {dtype}"):
                line = _line(case, dtype, peer, options)
                ratios += [check.value for check in line.checks if check.what == "torch/poolgrad"]
                yield line
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        mean_check = Check(f"geometric mean of torch/poolgrad over {len(ratios)} rows", mean, at_least=4)
        yield Line("memory", "in memory, all rows", checks=[mean_check])


def _line(case: Case, dtype: str, peer: Peer | None, options: Options) -> Line:
    grad_output, out = case.grad_output(dtype), case.grad_input(dtype)
    source, target = case.grad_input(dtype), case.grad_input(dtype)
    tasks = {
        "poolgrad": case.poolgrad(grad_output, out, dtype, options.threads),
        "copy": lambda: np.copyto(target, source),
    }
    line = Line("memory", f"{case.name} {dtype}")
    if peer is None:
        line.notes.append("torch: not installed")
    else:
        _check(case, dtype, peer)
        tasks["torch"] = peer.aten(case, grad_output, target)
        onednn = peer.onednn(case, grad_output, out)
        if onednn is None:
            line.notes.append("oneDNN: no such path")
        else:
            tasks["oneDNN"] = onednn
    line.times = alternate(tasks, options.rounds, budget=20)
    line.checks = _checks(line, case, dtype)
    return line


def _checks(line: Line, case: Case, dtype: str) -> list[Check]:
    checks = [Check("poolgrad/copy", line.ratio("poolgrad", "copy"))]
    if "torch" in line.times:
        least = 1.2 if dtype == "float16" and case.overlaps else 1.5
        checks.append(Check("torch/poolgrad", line.ratio("torch", "poolgrad"), at_least=least))
    if "oneDNN" in line.times:
        checks.append(Check("oneDNN/poolgrad", line.ratio("oneDNN", "poolgrad"), at_least=1))
    return checks


def _check(case: Case, dtype: str, peer: Peer) -> None:
    """That both sides answer the same question: the first item of the batch, compared in float32."""
    one = Case(**{**vars(case), "shape": (1, *case.shape[1:])})
    grad_output, out = one.grad_output(dtype), one.grad_input(dtype)
    one.poolgrad(grad_output, out, dtype, threads=1)()
    step = {"float32": 2.0**-20, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    least = 2.0**-23 if dtype == "float16" else 1e-6
    np.testing.assert_allclose(out.astype(np.float32), peer.expected(one, grad_output), rtol=step, atol=least)
