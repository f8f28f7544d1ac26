"""`poolgrad msprobe`: dumps made by `tests/dumps.py`, right, wrong, damaged and hostile."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cases import NUMPY
from tests.command_line import poolgrad, poolgrad_process
from tests.dumps import K2, K3S2P1, Dump, add_adaptive, add_avg, gradients, value
from tests.oracle import Pool

from poolgrad.cli import dump_json
from poolgrad.cli.dump_calls import PoolCall, Unchecked
from poolgrad.cli.dump_folders import Folder, calls_in

K2S1 = Pool((2, 2), (1, 1))
CEIL = Pool((3, 2), (2, 3), (1, 0), ceil_mode=True, count_include_pad=False)


def run(folder: Path, *flags: object) -> list[dict[str, Any]]:
    """The lines of --json: calls that cannot be checked first, then the others in the order of the dump."""
    result = poolgrad("msprobe", folder, "--json", *flags)
    assert result.code in (0, 1), result.err
    return [json.loads(line) for line in result.out.splitlines()]


def only(folder: Path, *flags: object) -> dict[str, Any]:
    """The line of the only call."""
    (record,) = run(folder, *flags)
    return record


def parameters(folder: Path) -> dict[str, Any]:
    """avg2d's arguments as they were understood."""
    found = only(folder)["parameters"]
    assert isinstance(found, dict)
    return found


def reason(folder: Path, *flags: object) -> str:
    """Why the only call was not checked."""
    record = only(folder, *flags)
    assert record["status"] == "unchecked"
    return str(record["reason"])


def single(tmp_path: Path, name: str, pool: Pool, *arguments: Any, framework: str = "mindspore", **more: Any) -> Path:
    """A dump of one right call of avg_pool2d."""
    return add_avg(Dump(tmp_path / "rank0", framework), name, pool, *arguments, **more).write()


# ---- What is found, and with which arguments


@pytest.mark.parametrize("prefix", ["Functional", "Torch", "Mint", "MintFunctional"])
def test_calls_under_every_prefix(tmp_path: Path, prefix: str) -> None:
    dump = Dump(tmp_path / "rank0").other(3)
    add_avg(dump, f"{prefix}.avg_pool2d.7", K3S2P1, 3, 2, 1)
    add_adaptive(dump, f"{prefix}.adaptive_avg_pool2d.0", (3, 5), (3, 5), shape=(2, 2, 8, 7))
    records = run(dump.write(), "--standard", "allclose")
    assert [record["call"] for record in records] == [f"{prefix}.avg_pool2d.7", f"{prefix}.adaptive_avg_pool2d.0"]
    assert [record["op"] for record in records] == ["avg2d", "adaptive2d"]
    assert [record["status"] for record in records] == ["ok", "ok"]
    assert records[1]["tensors"]["grad_output"]["shape"] == [2, 2, 3, 5]


def test_torch_calls_adaptive_by_its_inner_name(tmp_path: Path) -> None:
    dump = add_adaptive(Dump(tmp_path / "rank0"), "Torch._adaptive_avg_pool2d.0", (2, 2), 2)
    assert only(dump.write())["status"] == "ok"


SPELLINGS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "positional": (((3, 2), (2, 3), (1, 0), True, False, None), {}),
    "keywords": ((), {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 0), "ceil_mode": True,
                      "count_include_pad": False, "divisor_override": None, "input_name": "input"}),
    "mixed": (((3, 2), (2, 3)), {"count_include_pad": False, "ceil_mode": True, "padding": [1, 0]}),
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_positional_and_keyword_arguments_are_merged(tmp_path: Path, spelling: str) -> None:
    positional, keywords = SPELLINGS[spelling]
    folder = single(tmp_path, "Mint.avg_pool2d.0", CEIL, *positional, **keywords)
    assert parameters(folder) == {
        "kernel_size": [3, 2],
        "stride": [2, 3],
        "padding": [1, 0],
        "ceil_mode": True,
        "count_include_pad": False,
        "divisor_override": 0,
    }
    assert only(folder, "--standard", "allclose")["status"] == "ok"


def test_the_input_alone_may_be_a_keyword(tmp_path: Path) -> None:
    for name in ("input", "input_x", "self"):
        shutil.rmtree(tmp_path / "rank0", ignore_errors=True)
        folder = single(tmp_path, "Functional.avg_pool2d.0", K2S1, input_name=name, kernel_size=2)
        assert only(folder)["status"] == "ok"


@pytest.mark.parametrize("stride", [(), (None,), ((),)], ids=["none given", "None", "empty"])
def test_pytorch_takes_the_kernel_for_the_stride(tmp_path: Path, stride: tuple[Any, ...]) -> None:
    folder = single(tmp_path, "Mint.avg_pool2d.0", Pool((2, 3), (2, 3)), (2, 3), *stride)
    assert parameters(folder)["stride"] == [2, 3]
    assert only(folder)["status"] == "ok"


def test_mindspore_takes_1_for_the_stride_and_0_for_no_divisor(tmp_path: Path) -> None:
    folder = single(tmp_path, "Functional.avg_pool2d.0", K2S1, 2, divisor_override=0)
    assert parameters(folder)["stride"] == [1]
    assert parameters(folder)["divisor_override"] == 0
    assert only(folder)["status"] == "ok"


def test_mindspore_takes_1_for_the_kernel(tmp_path: Path) -> None:
    folder = single(tmp_path, "Functional.avg_pool2d.0", Pool((1, 1), (2, 2)), stride=2)
    assert parameters(folder)["kernel_size"] == [1]


@pytest.mark.parametrize(
    ("framework", "stride"), [("mindspore", [1]), ("mindtorch", [2]), ("pytorch", [2]), (None, [1])]
)
def test_whose_functions_they_are(tmp_path: Path, framework: str | None, stride: list[int]) -> None:
    # The tensors tell where the header does not, as in old dumps; mindtorch has PyTorch's functions.
    dump = add_avg(Dump(tmp_path / "rank0"), "Functional.avg_pool2d.0", K2S1, 2)
    del dump.header["framework"]
    dump.header |= {"framework": framework} if framework else {}
    dump.write()
    (call,) = calls_in(Folder(str(dump.folder), "rank0"))
    assert isinstance(call, PoolCall)
    assert list(call.parameters["stride"]) == stride


def test_a_divisor_counts(tmp_path: Path) -> None:
    folder = single(
        tmp_path, "Mint.avg_pool2d.0", Pool((2, 2), (2, 2), divisor_override=-3), 2, None, 0, False, True, -3
    )
    assert parameters(folder)["divisor_override"] == -3
    assert only(folder)["status"] == "ok"


def test_mindspore_padding_of_four_sides(tmp_path: Path) -> None:
    pool = Pool((3, 4), (2, 2), (1, 2))
    folder = single(tmp_path, "Functional.avg_pool2d.0", pool, (3, 4), 2, (1, 1, 2, 2))
    assert parameters(folder)["padding"] == [1, 2]
    assert only(folder, "--standard", "allclose")["status"] == "ok"


@pytest.mark.parametrize("padding", [(0, 1, 0, 1), (1, 1, 0, 1), (1, 2, 1, 2)])
def test_padding_that_differs_by_side_is_unsupported(tmp_path: Path, padding: tuple[int, ...]) -> None:
    folder = single(tmp_path, "Functional.avg_pool2d.0", K2S1, 2, 1, padding)
    assert reason(folder) == f"its padding {padding} is not symmetric, which is unsupported by the operator"


def test_only_mindspore_has_padding_of_four_sides(tmp_path: Path) -> None:
    folder = single(tmp_path, "Mint.avg_pool2d.0", K2S1, 2, 1, (0, 0, 0, 0))
    assert reason(folder) == "padding is 4 integers, (0, 0, 0, 0); expected one for both axes, or two (H, W)"


@pytest.mark.parametrize("size", [(3, 5), [3, None], [None, 5]])
def test_output_size(tmp_path: Path, size: Any) -> None:
    shape = (1, 2, 3 if size[0] is None else 8, 5 if size[1] is None else 8)
    dump = add_adaptive(Dump(tmp_path / "rank0"), "Functional.adaptive_avg_pool2d.0", (3, 5), size, shape=shape)
    assert only(dump.write())["status"] == "ok"


def test_output_size_as_torch_size(tmp_path: Path) -> None:
    dump = add_adaptive(Dump(tmp_path / "rank0"), "Functional.adaptive_avg_pool2d.0", (3, 5), 0)
    entry = dump.data["Functional.adaptive_avg_pool2d.0.forward"]
    entry["input_args"][1] = {"type": "torch.Size", "value": [3, 5]}
    assert only(dump.write())["status"] == "ok"


def test_output_size_of_another_call(tmp_path: Path) -> None:
    dump = add_adaptive(Dump(tmp_path / "rank0"), "Functional.adaptive_avg_pool2d.0", (3, 5), (3, 4))
    assert reason(dump.write()) == "its output_size is 3x4 and gradOutput is float32 (1, 2, 3, 5)"


def aten(tmp_path: Path, api: str, pool: Pool | None, *arguments: Any) -> Path:
    """A dump of one of ATen's backward functions."""
    own, grad_output, grad_input = gradients(pool, (2, 3, 8, 6), (3, 3))
    dump, name = Dump(tmp_path / "rank0"), f"Aten.{api}.3"
    tensors = [dump.tensor(grad_output, f"{name}.forward.input.0"), dump.tensor(own, f"{name}.forward.input.1")]
    dump.data[f"{name}.forward"] = {
        "input_args": tensors + [value(argument) for argument in arguments],
        "input_kwargs": {},
        "output": [dump.tensor(grad_input, f"{name}.forward.output.0")],
    }
    return dump.write()


@pytest.mark.parametrize("overload", ["", ".default"])
def test_aten_backward_functions_carry_everything(tmp_path: Path, overload: str) -> None:
    folder = aten(tmp_path / "a", f"avg_pool2d_backward{overload}", CEIL, [3, 2], [2, 3], [1, 0], True, False, None)
    record = only(folder, "--standard", "allclose")
    assert (record["status"], record["op"]) == ("ok", "avg2d")
    assert record["parameters"]["ceil_mode"] is True
    folder = aten(tmp_path / "b", f"_adaptive_avg_pool2d_backward{overload}", None)
    record = only(folder, "--standard", "allclose")
    assert (record["status"], record["op"]) == ("ok", "adaptive2d")


def test_aten_stride_may_be_empty(tmp_path: Path) -> None:
    folder = aten(tmp_path, "avg_pool2d_backward", Pool((2, 3), (2, 3)), [2, 3], [], [0, 0], False, True, None)
    assert only(folder)["status"] == "ok"


# ---- Folders


def test_steps_ranks_and_processes_in_order(tmp_path: Path) -> None:
    places = [
        "step0/rank2",
        "step0/rank10",
        "step10/rank",
        "step2/proc77",
        "step2/proc9",
        "step2/other",
        "stepx/rank0",
    ]
    for place in places:
        add_avg(Dump(tmp_path / place), "Mint.avg_pool2d.0", K2, 2).write()
    assert [record["rank"] for record in run(tmp_path)] == [
        "step0/rank2",
        "step0/rank10",
        "step2/proc9",
        "step2/proc77",
        "step10/rank",
    ]
    assert [record["rank"] for record in run(tmp_path / "step0")] == ["rank2", "rank10"]
    assert [record["rank"] for record in run(tmp_path / "step10" / "rank")] == ["rank"]


def test_no_dump(tmp_path: Path) -> None:
    result = poolgrad("msprobe", tmp_path)
    assert result.code == 3
    assert "is no msprobe dump: it has no dump.json and no folder rankN, rank or procPID" in result.error
    assert "there is no such directory" in poolgrad("msprobe", tmp_path / "nowhere").error
    (tmp_path / "file").touch()
    assert "it is no directory" in poolgrad("msprobe", tmp_path / "file").error


def test_tensors_are_read_where_they_lie_now(tmp_path: Path) -> None:
    # dump_data_dir is a path of the machine that dumped.
    folder = single(tmp_path, "Mint.avg_pool2d.0", K2, 2)
    shutil.move(folder, tmp_path / "moved")
    assert only(tmp_path / "moved")["status"] == "ok"


# ---- bfloat16


def widened(tmp_path: Path) -> Path:
    return single(tmp_path, "Mint.avg_pool2d.0", K3S2P1, 3, 2, 1, dtype="bfloat16")


def stored(folder: Path, what: str = "backward.output") -> Path:
    (path,) = (folder / "dump_tensor_data").glob(f"*.{what}.0.npy")
    return path


def test_widened_bfloat16_is_compared_as_bfloat16(tmp_path: Path) -> None:
    folder = widened(tmp_path)
    assert np.load(stored(folder)).dtype == np.float32
    record = only(folder, "--standard", "exact")
    assert record["status"] == "ok"
    assert record["comparison"]["precision_row"] == "bfloat16"
    assert record["comparison"]["actual"]["dtype"] == "bfloat16"
    assert record["comparison"]["expected"]["dtype"] == "bfloat16"


def test_widened_bfloat16_is_rounded_again(tmp_path: Path) -> None:
    folder = widened(tmp_path)
    for what in ("backward.output", "backward.input"):
        values = np.load(stored(folder, what))
        values *= np.where(np.arange(values.size).reshape(values.shape) % 2, 1 + 2.0**-12, 1 - 2.0**-12)
        np.save(stored(folder, what), values.astype(np.float32))
    assert only(folder, "--standard", "exact")["status"] == "ok"


def test_an_ulp_of_bfloat16_shows(tmp_path: Path) -> None:
    folder = widened(tmp_path)
    values = np.load(stored(folder))
    values[0, 1, 3, 3] *= 1 + 2.0**-7
    np.save(stored(folder), values.astype(NUMPY["bfloat16"]).astype(np.float32))
    record = only(folder, "--standard", "exact")
    assert record["status"] == "failed"
    assert record["comparison"]["mismatched"] == 1


def test_bfloat16_stored_as_such(tmp_path: Path) -> None:
    folder = widened(tmp_path)
    for path in (folder / "dump_tensor_data").iterdir():
        np.save(path, np.load(path).astype(NUMPY["bfloat16"]))
    assert only(folder, "--standard", "exact")["status"] == "ok"


@pytest.mark.parametrize("order", ["C", "F"])
def test_bf16_widened_is_a_flag_of_the_operators(tmp_path: Path, order: Any) -> None:
    own, grad_output, grad_input = gradients(K3S2P1, (1, 2, 8, 8), dtype="bfloat16")
    np.save(tmp_path / "self.npy", own.astype(np.float32))
    np.save(tmp_path / "grad_output.npy", np.asarray(grad_output.astype(np.float32), order=order))
    files = tmp_path / "grad_output.npy", tmp_path / "self.npy"
    result = poolgrad("avg2d", *files, "-k3", "-s2", "-p1", "-o", tmp_path / "out.npy", "--bf16-widened", "-q")
    assert (result.code, result.err) == (0, "")
    written = np.load(tmp_path / "out.npy")
    assert written.dtype == np.dtype("V2")
    assert np.array_equal(written.view(NUMPY["bfloat16"]), grad_input)


def test_bf16_widened_is_a_flag_of_compare_and_diagnose(tmp_path: Path) -> None:
    own, grad_output, grad_input = gradients(K3S2P1, (1, 2, 8, 8), dtype="bfloat16")
    for name, tensor in {"self": own, "grad_output": grad_output, "made": grad_input}.items():
        np.save(tmp_path / f"{name}.npy", tensor.astype(np.float32))
    np.save(tmp_path / "golden.npy", grad_input.view(np.uint16))
    made = tmp_path / "made.npy"
    compared = poolgrad("compare", made, tmp_path / "golden.npy", "--bf16-bits", "--bf16-widened", "--standard=exact")
    assert compared.code == 0, compared.err
    files = tmp_path / "grad_output.npy", tmp_path / "self.npy", made
    diagnosed = poolgrad("diagnose", *files, "-k3", "-s2", "-p1", "--bf16-widened", "--json")
    assert diagnosed.code == 0
    assert diagnosed.record["actual"]["dtype"] == "bfloat16"


# ---- Verdicts, report, exit codes


def failing(dump: Dump, name: str, factor: float = 3.0) -> Dump:
    own, grad_output, grad_input = gradients(K3S2P1, (1, 2, 12, 12))
    return dump.call(name, own, grad_output, (grad_input * factor).astype(np.float32), 3, 2, 1)


def mixed_dump(tmp_path: Path) -> Path:
    """A call that passes, one that fails, and one whose file is gone."""
    dump = add_avg(Dump(tmp_path / "rank0"), "Mint.avg_pool2d.0", K2, 2)
    failing(dump, "Mint.avg_pool2d.1")
    add_avg(dump, "Mint.avg_pool2d.2", K2, 2)
    (dump.tensors / "Mint.avg_pool2d.2.backward.output.0.npy").unlink()
    return dump.write()


def test_the_table_has_a_row_a_call(tmp_path: Path) -> None:
    result = poolgrad("msprobe", mixed_dump(tmp_path))
    assert (result.code, result.err) == (1, "")
    rows = [line for line in result.out.splitlines() if "avg_pool2d." in line]
    assert [row.split()[0] for row in rows[:3]] == ["pass", "FAIL", "not"]
    assert rows[0].split() == ["pass", "0", "0", "rank0", "Mint.avg_pool2d.0"]
    # 2 is |3g - g| / |g|, but for the 1e-7 that the standard adds.
    assert rows[1].split() == ["FAIL", "2", "2", "rank0", "Mint.avg_pool2d.1"]
    assert "float32 1x2x12x12, gradOutput 1x2x6x6, -k 3 -s 2 -p 1" in result.out
    assert "the file of gradInput is missing: Mint.avg_pool2d.2.backward.output.0.npy" in result.out
    assert result.out.endswith("\n3 calls: 1 pass, 1 fail, 1 not checked\n")


def test_the_table_fits_a_terminal(tmp_path: Path) -> None:
    result = poolgrad_process("msprobe", mixed_dump(tmp_path), "--diagnose", COLUMNS="80")
    assert max(map(len, result.out.splitlines())) <= 80
    assert "Mint.avg_pool2d.1" in result.out


def test_json_has_a_line_a_call_and_the_count_on_stderr(tmp_path: Path) -> None:
    result = poolgrad("msprobe", mixed_dump(tmp_path), "--json")
    records = {record["call"]: record for record in map(json.loads, result.out.splitlines())}
    assert {name: record["status"] for name, record in records.items()} == {
        "Mint.avg_pool2d.0": "ok",
        "Mint.avg_pool2d.1": "failed",
        "Mint.avg_pool2d.2": "unchecked",
    }
    assert result.error == "3 calls: 1 pass, 1 fail, 1 not checked"
    comparison = records["Mint.avg_pool2d.1"]["comparison"]
    assert comparison["mare"] == pytest.approx(2, rel=1e-5)
    assert comparison["standard"] == "mere-mare"
    assert records["Mint.avg_pool2d.2"]["parameters"]["kernel_size"] == [2]
    assert all(record["schema"] == 1 and record["rank"] == "rank0" for record in records.values())


@pytest.mark.parametrize(("names", "code"), [("0", 0), ("02", 0), ("01", 1), ("2", 1), ("", 1)])
def test_exit_codes(tmp_path: Path, names: str, code: int) -> None:
    folder = mixed_dump(tmp_path)
    path = folder / "dump.json"
    text = json.loads(path.read_text())
    text["data"] = {name: entry for name, entry in text["data"].items() if name.split(".")[2] in names}
    path.write_text(json.dumps(text))
    shutil.rmtree(folder / "dump_tensor_data") if not names else None
    for stale in folder.glob("dump_tensor_data/*"):
        if stale.name.split(".")[2] not in names:
            stale.unlink()
    result = poolgrad("msprobe", folder)
    assert result.code == code
    assert (result.out == "no backward call of average pooling\n") == (not names)


def test_standards(tmp_path: Path) -> None:
    dump = Dump(tmp_path / "rank0")
    failing(dump, "Mint.avg_pool2d.0", factor=1 + 2.0**-15)
    folder = dump.write()
    assert only(folder)["status"] == "ok"
    assert only(folder, "--standard", "exact")["status"] == "failed"
    assert only(folder, "--standard", "allclose")["status"] == "failed"
    assert only(folder, "--standard", "allclose", "--rtol", "1e-3")["status"] == "ok"
    assert only(folder, "--standard", "mixed")["comparison"]["standard"] == "mixed"


def test_cube_math_type_and_product_are_for_all_calls(tmp_path: Path) -> None:
    dump = add_avg(Dump(tmp_path / "rank0"), "Mint.avg_pool2d.0", K2, 2)
    add_adaptive(dump, "Mint.adaptive_avg_pool2d.0", (2, 2), 2)
    folder = dump.write()
    records = run(folder, "--cube-math-type", "USE_HF32")
    assert [record["comparison"]["precision_row"] for record in records] == ["hfloat32", "float32"]
    records = run(folder, "--product", "atlas-inference")
    assert records[0]["reason"].startswith("cubeMathType is 0 KEEP_DTYPE, which atlas-inference does not take")
    assert records[1]["status"] == "ok"


def test_diagnose_says_what_a_failing_call_is(tmp_path: Path) -> None:
    own, _, _ = gradients(K3S2P1, (1, 2, 12, 12))
    wrong = gradients(Pool((3, 3), (2, 2), (1, 1), count_include_pad=False), (1, 2, 12, 12))
    dump = Dump(tmp_path / "rank0").call("Mint.avg_pool2d.0", own, *wrong[1:], 3, 2, 1)
    add_avg(dump, "Mint.avg_pool2d.1", K2, 2)
    folder = dump.write()
    assert "diagnosis" not in run(folder)[0]
    failed, passed = run(folder, "--diagnose")
    assert failed["status"] == "failed"
    assert "count_include_pad=False" in failed["diagnosis"]["sentence"]
    assert failed["diagnosis"]["explained"] is True
    assert "diagnosis" not in passed
    assert "count_include_pad=False" in poolgrad("msprobe", folder, "--diagnose").out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rtol", "1"], "--rtol and --atol belong to the standard allclose"),
        (["--manifest", "m", "--diagnose"], "--manifest runs nothing, so that --diagnose has no meaning with it"),
        (["--manifest", "m", "--scheduler", "x"], "--manifest runs nothing"),
        (["--scheduler", "x", "--threads", "2"], "--threads is of this machine"),
        (["--standard", "best"], "'best' is not one of"),
        (["--product", "x"], "'x' is not one of"),
    ],
)
def test_flags_that_are_refused(tmp_path: Path, flags: list[str], message: str) -> None:
    result = poolgrad("msprobe", tmp_path, *flags)
    assert result.code == 2
    assert message in result.error


ROOT = Path(__file__).resolve().parent.parent
FIXTURE = ROOT / "fixtures" / "msprobe_dump"


def test_the_report_that_the_readme_shows() -> None:
    blocks = re.findall(
        r"^```text\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    (shown,) = [block for block in blocks if "Mint.adaptive_avg_pool2d.0" in block]
    result = poolgrad("msprobe", FIXTURE / "step0", "--diagnose")
    assert [re.findall(r"[^\s─]+", text) for text in [result.out + "exit code 1"]] == [re.findall(r"[^\s─]+", shown)]


def test_the_fixture_is_what_its_script_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "fixtures.make_msprobe_dump", str(tmp_path)], cwd=ROOT, check=True)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert made == sorted(path.relative_to(FIXTURE) for path in FIXTURE.rglob("*") if path.is_file())
    for path in made:
        assert (tmp_path / path).read_bytes() == (FIXTURE / path).read_bytes(), path


# ---- The manifest


def test_manifest_has_the_same_jobs(tmp_path: Path) -> None:
    from poolgrad.cli.jobs import parse_job, run_job

    dump = add_avg(Dump(tmp_path / "rank0"), "Mint.avg_pool2d.0", CEIL, (3, 2), (2, 3), (1, 0), True, False)
    add_avg(dump, "Mint.avg_pool2d.1", K3S2P1, 3, 2, 1, dtype="bfloat16")
    add_adaptive(dump, "Mint.adaptive_avg_pool2d.0", (3, 5), (3, 5))
    failing(dump, "Mint.avg_pool2d.2")
    dump.data["Mint.avg_pool2d.9.backward"] = dump.data["Mint.avg_pool2d.0.backward"]
    manifest = tmp_path / "jobs.jsonl"
    result = poolgrad("msprobe", dump.write(), "--standard", "allclose", "--manifest", manifest)
    assert (result.code, result.out) == (0, "")
    first, last = result.err.splitlines()
    assert first.startswith("rank0/Mint.avg_pool2d.9: not checked: ")
    assert last == f"4 jobs in {manifest}, 1 calls not checked"
    jobs = [parse_job(line, tmp_path) for line in manifest.read_text().splitlines()]
    assert [job.id for job in jobs][:2] == ["rank0/Mint.avg_pool2d.0", "rank0/Mint.avg_pool2d.1"]
    results = [run_job(job) for job in jobs]
    assert [one["status"] for one in results] == ["ok", "ok", "ok", "failed"]
    assert results[1]["comparison"]["precision_row"] == "bfloat16"
    batch = poolgrad("batch", manifest, "--workers", "1")
    assert batch.code == 1
    assert [json.loads(line)["status"] for line in batch.out.splitlines()] == ["ok", "ok", "ok", "failed"]
    mine = [one for one in run(dump.folder, "--standard", "allclose") if one["status"] != "unchecked"]
    for one, job in zip(mine, results, strict=True):
        assert {**one["comparison"], "seconds": 0} == {**job["comparison"], "seconds": 0}


def test_self_may_be_gone(tmp_path: Path) -> None:
    # It gives shape and dtype, which gradInput has as well.
    folder = single(tmp_path, "Mint.avg_pool2d.0", K2, 2)
    stored(folder, "forward.input").unlink()
    assert only(folder)["status"] == "ok"


# ---- Calls that cannot be checked


def test_statistics_mode(tmp_path: Path) -> None:
    folder = add_avg(Dump(tmp_path / "rank0", task="statistics"), "Mint.avg_pool2d.0", K2, 2).write()
    assert reason(folder) == "its tensors were not stored, as in statistics mode; dump with task tensor"


def test_one_tensor_was_not_stored(tmp_path: Path) -> None:
    dump = add_avg(Dump(tmp_path / "rank0"), "Mint.avg_pool2d.0", K2, 2)
    del dump.data["Mint.avg_pool2d.0.backward"]["input"][0]["data_name"]
    assert reason(dump.write()) == "gradOutput was not stored: dump.json has no data_name for it"


def test_a_crashed_dump_without_its_json(tmp_path: Path) -> None:
    dump = add_avg(Dump(tmp_path / "rank0"), "Mint.avg_pool2d.0", K2, 2)
    add_avg(dump, "Mint.avg_pool2d.10", K2, 2)
    add_avg(dump, "Mint.avg_pool2d.9", K2, 2)
    Dump(tmp_path / "rank1")
    records = run(tmp_path)
    assert [(record["rank"], record["call"]) for record in records] == [
        ("rank0", "Mint.avg_pool2d.0"),
        ("rank0", "Mint.avg_pool2d.9"),
        ("rank0", "Mint.avg_pool2d.10"),
        ("rank1", "dump.json"),
    ]
    assert {record["reason"] for record in records} == {"dump.json is missing: the run that dumped it crashed"}


def test_a_crashed_dump_with_half_its_json(tmp_path: Path) -> None:
    folder = single(tmp_path, "Mint.avg_pool2d.0", K2, 2)
    text = (folder / "dump.json").read_text()
    (folder / "dump.json").write_text(text[: len(text) // 2])
    assert "it is cut short, as by a crash of the run that dumped it" in reason(folder)


def test_a_crashed_dump_whose_json_lacks_the_last_calls(tmp_path: Path) -> None:
    dump = add_avg(Dump(tmp_path / "rank0"), "Mint.avg_pool2d.0", K2, 2)
    dump.write()
    add_avg(dump, "Mint.avg_pool2d.1", K2, 2)
    records = run(dump.folder)
    assert [record["status"] for record in records] == ["unchecked", "ok"]
    assert records[0]["call"] == "Mint.avg_pool2d.1"
    assert records[0]["reason"] == "dump.json does not list it: the run that dumped it crashed"


def test_a_backward_entry_without_its_forward_entry(tmp_path: Path) -> None:
    dump = add_avg(Dump(tmp_path / "rank0"), "Mint.avg_pool2d.0", K2, 2)
    dump.data["Mint.avg_pool2d.1.forward"] = dump.data.pop("Mint.avg_pool2d.0.forward")
    assert reason(dump.write()) == "Mint.avg_pool2d.0.forward is not in dump.json, which holds the arguments"


def test_a_forward_entry_alone_is_no_backward_call(tmp_path: Path) -> None:
    dump = add_avg(Dump(tmp_path / "rank0"), "Mint.avg_pool2d.0", K2, 2)
    add_avg(dump, "Mint.avg_pool2d.1", K2, 2)
    del dump.data["Mint.avg_pool2d.1.backward"]
    for path in dump.tensors.glob("Mint.avg_pool2d.1.backward*"):
        path.unlink()
    assert [record["call"] for record in run(dump.write())] == ["Mint.avg_pool2d.0"]


def test_level_l0_has_modules_without_arguments(tmp_path: Path) -> None:
    dump = Dump(tmp_path / "rank0", level="L0")
    dump.data["Module.layer.pool.AvgPool2d.backward.0"] = {"input": [], "output": []}
    dump.data["Cell.layer.conv.Conv2d.backward.0"] = {"input": [], "output": []}
    record = only(dump.write())
    assert record["call"] == "Module.layer.pool.AvgPool2d"
    assert record["reason"] == "level L0 holds no arguments of functions; dump at level L1 or mix"


def test_gradients_that_nobody_asked_for(tmp_path: Path) -> None:
    dump = add_avg(Dump(tmp_path / "rank0"), "Mint.avg_pool2d.0", K2, 2)
    dump.data["Mint.avg_pool2d.0.backward"]["output"] = [None]
    assert reason(dump.write()) == "its output holds no tensors, expected gradInput alone"


def test_other_outputs_are_null(tmp_path: Path) -> None:
    dump = add_avg(Dump(tmp_path / "rank0"), "Mint.avg_pool2d.0", K2, 2)
    dump.data["Mint.avg_pool2d.0.backward"]["output"] += [None, None]
    assert only(dump.write())["status"] == "ok"


@pytest.mark.parametrize("what", ["backward.input", "backward.output", "forward.input"])
@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_a_file_that_is_not_what_dump_json_says(tmp_path: Path, what: str, change: str) -> None:
    folder = single(tmp_path, "Mint.avg_pool2d.0", K2, 2)
    path = stored(folder, what)
    array = np.load(path)
    np.save(path, array[:, :1] if change == "shape" else array.astype(np.float16))
    assert f"{path.name} holds float" in reason(folder)
    assert "and dump.json says float32 (1, 2, " in reason(folder)


def test_a_damaged_file(tmp_path: Path) -> None:
    folder = single(tmp_path, "Mint.avg_pool2d.0", K2, 2)
    os.truncate(stored(folder), 200)
    assert "is cut short" in reason(folder)


def test_a_call_that_the_operator_rejects(tmp_path: Path) -> None:
    folder = single(tmp_path, "Mint.avg_pool2d.0", K2S1, 2)
    assert reason(folder).startswith("gradOutput is 7x7, kernel 2 stride 2 padding 0 over 8x8 gives 4x4")


Change = Callable[[dict[str, Any], dict[str, Any]], object]
"""What to change in a forward and a backward entry of avg_pool2d(x, 2, 2, padding=0)."""

CHANGES: dict[str, Change] = {
    "its argument kernel_size is given twice": lambda f, _: f["input_kwargs"].update(kernel_size=value(2)),
    "its argument input is given twice": lambda f, _: f["input_kwargs"].update(input_x=f["input_args"][0]),
    "it has 9 positional arguments, expected at most 7": lambda f, _: f["input_args"].extend([None] * 6),
    "it has an argument 'data_format', which the function does not know": (
        lambda f, _: f["input_kwargs"].update(data_format=value("NCHW"))
    ),
    "its argument kernel_size is not in the dump": lambda f, _: f["input_args"].__delitem__(slice(1, None)),
    "its argument input is no tensor": lambda f, _: f["input_args"].__setitem__(0, value(3)),
    "its argument kernel_size is 2.5, expected one integer or two": (
        lambda f, _: f["input_args"].__setitem__(1, value(2.5))
    ),
    "its argument stride is (2, True), expected one integer or two": (
        lambda f, _: f["input_args"].__setitem__(2, value((2, True)))
    ),
    "its argument padding is a tensor, float32 (1, 2, 8, 8), expected one integer or two": (
        lambda f, _: f["input_kwargs"].update(padding=f["input_args"][0])
    ),
    "its argument ceil_mode is 0, expected true or false": lambda f, _: f["input_kwargs"].update(ceil_mode=value(0)),
    "its argument divisor_override is True, expected an integer": (
        lambda f, _: f["input_kwargs"].update(divisor_override=value(True))
    ),
    "padding is a list of 1, which no argument of average pooling is": (
        lambda f, _: f["input_kwargs"].update(padding=[[1]])
    ),
    "the shape of input is a list of 4": lambda f, _: f["input_args"][0].update(shape=[True, 2, 8, 8]),
    "the dtype of input is 3": lambda f, _: f["input_args"][0].update(dtype=3),
    '"input_args" is no list': lambda f, _: f.update(input_args={}),
    '"input_kwargs" is no object': lambda f, _: f.update(input_kwargs=[]),
    "its output holds 2 tensors, expected gradInput alone": lambda _, b: b["output"].extend(b["input"]),
    "its input holds no tensors, expected gradOutput alone": lambda _, b: b.pop("input"),
    "gradInput is float32 (1, 2, 4, 4) and self float32 (1, 2, 8, 8), expected the same": (
        lambda _, b: b.update(output=b["input"])
    ),
}


@pytest.mark.parametrize("expected", CHANGES)
def test_entries_that_say_something_else(tmp_path: Path, expected: str) -> None:
    dump = add_avg(Dump(tmp_path / "rank0"), "Mint.avg_pool2d.0", K2, 2, 2, padding=0)
    CHANGES[expected](dump.data["Mint.avg_pool2d.0.forward"], dump.data["Mint.avg_pool2d.0.backward"])
    assert reason(dump.write()).removeprefix("an element of ") == expected


# ---- dump.json that is hostile

TENSOR = {"type": "mindspore.Tensor", "dtype": "Float32", "shape": [1, 2, 8, 8], "data_name": "x.npy"}

TEXTS = {
    "": "is not the JSON of a dump",
    "null": "the file is no object",
    "[]": "the file is no object",
    "{}": 'it has no "data"',
    '{"data": []}': '"data" is no object',
    '{"data": {}} {}': "something follows its end",
    '{"data": {1: 2}}': "a key is no text",
    '{"data": {"a" 1}}': "expected ':'",
    '{"data": {"a": 1 "b": 2}}': "expected ',' or '}'",
    '{"data": {"a": [[[}': "is not the JSON of a dump",
    '{"data": {"a": 1': "it is cut short",
    '{"x": ' + "[" * 200_000 + "]" * 200_000 + ', "data": {}}': "is nested too deeply",
    '{"data": {"a": ' + '{"a":' * 200_000 + "1" + "}" * 200_000 + "}}": "is nested too deeply",
    '{"data": {"a": ' + "9" * 10_000 + "}}": "is not the JSON of a dump",
}


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:20] or "empty")
def test_hostile_json_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "dump.json").write_text(text)
    found = reason(tmp_path)
    assert TEXTS[text] in found
    assert found.startswith(f"{tmp_path}/dump.json ")
    assert len(found) < 300 + len(str(tmp_path))
    assert "\n" not in found


def test_json_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_bytes(b'{"data": {"\xff": 1}}')
    assert "byte 11 is not UTF-8" in reason(tmp_path)


def test_json_that_is_huge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_json, "MOST_BYTES", 100)
    (tmp_path / "dump.json").write_bytes(b"{" + b" " * 100)
    assert "has 101 bytes; a dump.json of over 100 is not read" in reason(tmp_path)
    with open(tmp_path / "dump.json", "wb") as file:
        file.truncate(1 << 40)  # A hole: no memory may be taken for it.
    assert f"has {1 << 40} bytes" in reason(tmp_path)


def test_json_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "dump.json")
    assert "it is not a regular file" in reason(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "..", ".", "a/b.npy", "a\\b.npy", "a\0.npy", "", 7, ["x.npy"], "x" * 300],
)
def test_data_names_that_lead_elsewhere(tmp_path: Path, name: Any) -> None:
    dump = add_avg(Dump(tmp_path / "rank0"), "Mint.avg_pool2d.0", K2, 2)
    dump.data["Mint.avg_pool2d.0.backward"]["output"][0]["data_name"] = name
    found = reason(dump.write())
    assert found.startswith("the data_name of gradInput 0 is ")
    assert "\0" not in found
    if isinstance(name, str) and any(mark in name for mark in ("/", "..", "\\", "\0")):
        assert found.endswith("which leads out of dump_tensor_data")


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    dump = add_avg(Dump(tmp_path / "rank0"), "Mint.avg_pool2d.0", K2, 2)
    dump.data["Mint.avg_pool2d.0.forward"]["input_kwargs"] = {"\x1b[31m\n": None}
    dump.data["Mint.avg_pool2d.0.backward"]["output"][0]["dtype"] = "\x1b[31m"
    result = poolgrad("msprobe", dump.write())
    assert "\x1b" not in result.out


HOSTILE: list[Any] = [
    None, True, -1, 0, 2**63, 1.5, float("nan"), "x", [], [[1]], {}, {"type": "int", "value": 2**80},
    {"type": "int", "value": "3"}, {"type": "int", "value": [[3]]}, {**TENSOR, "shape": [2**62] * 70},
    {**TENSOR, "shape": [True, -1]}, {**TENSOR, "dtype": 3}, {"type": "slice", "value": [0, None, {}]},
]  # fmt: skip


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every node's parent and key."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []:
        yield tree, key
        yield from places(tree[key])


def test_any_value_at_any_place_is_a_call_or_a_reason(tmp_path: Path) -> None:
    dump = add_avg(Dump(tmp_path / "rank0"), "Functional.avg_pool2d.0", K2, (2, 2), 2, padding=0)
    add_adaptive(dump, "Functional.adaptive_avg_pool2d.0", (2, 2), 2)
    tree = {**dump.header, "data": dump.data}
    folder, unchecked, total = Folder(str(dump.folder), "rank0"), 0, 0
    for number, (parent, key) in enumerate(list(places(tree))):
        kept = parent[key]
        for hostile in HOSTILE[number % 3 :: 3]:
            parent[key] = hostile
            (dump.folder / "dump.json").write_text(json.dumps(tree))
            for one in calls_in(folder):
                total += 1
                if isinstance(one, Unchecked):
                    unchecked += 1
                    assert one.reason
                    assert len(one.reason) < 300 + len(str(tmp_path))
        parent[key] = kept
    assert total > 500
    assert unchecked > total / 5


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda value: str(value)[:20])
def test_the_whole_command_survives_hostile_arguments(tmp_path: Path, hostile: Any) -> None:
    dump = Dump(tmp_path / "rank0")
    for number, key in enumerate(
        ["kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"]
    ):
        arguments: dict[str, Any] = {"kernel_size": 2, "padding": 0, "divisor_override": 0}
        add_avg(dump, f"Mint.avg_pool2d.{number}", K2, **arguments)
        dump.data[f"Mint.avg_pool2d.{number}.forward"]["input_kwargs"][key] = hostile
    result = poolgrad("msprobe", dump.write(), "--json")
    assert result.code in (0, 1)
    for record in map(json.loads, result.out.splitlines()):
        assert record["status"] in ("ok", "unchecked")
        assert "bug" not in record.get("reason", "")
