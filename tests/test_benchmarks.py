"""The benchmark programs: they answer --help, refuse what they cannot measure, and count right."""

import importlib
import json
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from benchmarks import end_to_end, harness, linear, memory, original, rollout, train_step

PROGRAMS = ("checkpoint", "end_to_end", "linear", "memory", "rollout", "train_step")
NEED_A_GPU = ("linear", "rollout", "train_step")


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_exits_0_and_names_every_flag_once(program, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{program}").main()
    assert ended.value.code == 0
    flags = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "  --" in line]
    assert flags and len(flags) == len(set(flags))


@pytest.mark.parametrize("program", NEED_A_GPU)
def test_without_a_gpu_a_measurement_is_refused(program, capsys):
    if torch.cuda.is_available():
        pytest.skip("NOT TESTED: there is a GPU here")
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{program}").main([])
    assert ended.value.code == 2
    assert "needs a CUDA GPU; --cpu" in capsys.readouterr().err


def test_an_unknown_arm_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        rollout.main(["--arms", "nvfp4,fp5"])
    assert "'fp5': expected some of nvfp4, bf16, nf4" in capsys.readouterr().err


# harness


def test_rows_stand_under_their_headings_and_each_is_written_when_it_comes(tmp_path, capsys):
    columns = [harness.Column("name", "name", 8), harness.Column("ms", "ms", 9, ".2f")]
    report = harness.Report(columns, tmp_path / "out.json", {"tokens": 3})
    for count, row in enumerate([{"name": "a", "ms": 1.5}, {"name": "bb"}], start=1):
        report.add(row | {"more": count})
        saved = json.loads((tmp_path / "out.json").read_text())
        assert len(saved["rows"]) == count and saved["rows"][-1]["more"] == count
    assert saved["settings"] == {"tokens": 3} and "gpu" in saved["machine"]
    heading, first, second = capsys.readouterr().out.splitlines()[-3:]
    assert (heading, first, second) == (
        "name             ms",
        "a              1.50",
        "bb                -",
    )


@pytest.mark.parametrize(
    ("values", "percent"), [([2.0], 0.0), ([1.0, 2.0, 3.0], 100.0), ([4.0, 4.0], 0.0)]
)
def test_spread_is_the_range_in_percent_of_the_median(values, percent):
    assert harness.spread(values) == percent


def test_lists_are_parsed_and_refused():
    assert harness.integers("0,32") == [0, 32]
    assert harness.several("a", "b")("b,a") == ["b", "a"]
    for parse, text in ((harness.integers, "1,-2"), (harness.several("a"), "a,,a")):
        with pytest.raises(Exception, match="expected"):
            parse(text)


SENDS = """
import json, sys, time
for row in range(3):
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps({"row": row}) + "\\n")
time.sleep(float(sys.argv[2]))
"""


def follow(rows, stays: float, seconds: float):
    rows.touch()
    child = subprocess.Popen([sys.executable, "-c", SENDS, str(rows), str(stays)])
    try:
        yield from harness._follow(child, rows, seconds)
    finally:
        memory.kill_tree(child)


def test_rows_of_a_child_arrive_in_order(tmp_path):
    assert list(follow(tmp_path / "rows", 0, 60)) == [{"row": 0}, {"row": 1}, {"row": 2}]


def test_a_child_that_hangs_is_given_up_and_its_rows_are_kept(tmp_path):
    got = []
    with pytest.raises(harness.ChildFailed, match="still running after 3 s"):
        for row in follow(tmp_path / "rows", 60, 3):
            got.append(row)
    assert len(got) == 3


def test_a_child_that_dies_says_why():
    with pytest.raises(harness.ChildFailed, match="KeyError: 'arm'|ModuleNotFoundError"):
        list(harness.run_child("benchmarks.rollout", {}, 60))


@pytest.mark.parametrize(
    ("log", "word"),
    [
        ("Traceback\n  x = 1\ntorch.OutOfMemoryError: CUDA\nbye\n", "torch.OutOfMemoryError: CUDA"),
        ("[rank0]: ValueError: no\n", "ValueError: no"),
        ("prog: error: disk full\n\n", "prog: error: disk full"),
        ("", "it said nothing"),
    ],
)
def test_the_last_word_of_a_log_is_its_exception(log, word):
    assert harness.last_word(log) == word


# linear


def test_every_way_through_the_linear_agrees_with_float64():
    error = linear.checked_errors(linear.arms_of(48, 64, "cpu"))
    assert set(error) == set(linear.ARMS)
    assert all(0 < e < 5e-3 for found in error.values() for e in found.values())


@pytest.mark.parametrize("arm", linear.ARMS)
def test_a_wrong_layer_is_not_timed(arm):
    arms = linear.arms_of(48, 64, "cpu")
    arms[arm] = linear.arms_of(48, 64, "cpu")[arm]  # of another weight
    with pytest.raises(AssertionError, match="is wrong"):
        linear.checked_errors(arms)


def test_a_weight_has_a_row_for_each_pass():
    rows = list(linear.measure((48, 64), tokens=4, repeats=2, device="cpu"))
    assert [row["pass"] for row in rows] == ["forward", "both"]
    assert all(row[f"{arm}_ms"] > 0 for row in rows for arm in linear.ARMS)
    assert rows[0]["nvfp4_over_bf16"] == rows[0]["nvfp4_ms"] / rows[0]["bf16_ms"]


def test_the_weights_of_two_models_are_measured_once_each():
    shapes = linear.shapes_of(["qwen2.5-7b", "qwen2.5-7b", "qwen2.5-32b"])
    assert len(shapes) == len(set(shapes)) == 8
    assert (512, 3584) in shapes and (5120, 27648) in shapes


# train_step


def test_decompression_replaces_every_frozen_linear():
    model = nn.Sequential(linear.arms_of(48, 64, "cpu")["nvfp4"], nn.ReLU())
    original.decompress_everywhere(model)
    assert type(model[0]) is original.DecompressedLinear
    with pytest.raises(ValueError, match="expected an NVFP4 checkpoint"):
        original.decompress_everywhere(nn.Linear(2, 2))


@pytest.mark.parametrize(("ragged", "lengths"), [(False, [8] * 4), (True, [2, 4, 6, 8])])
def test_a_batch_has_what_the_loss_reads_and_the_padding_that_is_asked_for(ragged, lengths):
    job = {"completions": 4, "prompt": 3, "tokens": 8, "ragged": ragged, "device": "cpu"}
    batch = train_step.random_batch(job, vocabulary=7)
    assert batch["prompt_ids"].shape == (4, 3) and batch["completion_ids"].shape == (4, 8)
    assert batch["completion_mask"].sum(1).tolist() == lengths
    assert batch["prompt_mask"].all() and batch["num_items_in_batch"] == sum(lengths)
    assert batch["completion_ids"].max() < 7 and batch["advantages"].shape == (4,)


def test_an_adapter_that_did_not_learn_is_an_error():
    model = nn.ModuleDict({"lora_B": nn.ModuleDict({"default": nn.Linear(2, 2, bias=False)})})
    model = nn.ModuleDict({"q_proj": model})
    train_step.check_learned(model)
    nn.init.zeros_(model["q_proj"]["lora_B"]["default"].weight)
    with pytest.raises(RuntimeError, match="1 of 1 adapters did not learn"):
        train_step.check_learned(model)


@pytest.mark.slow
def test_a_step_of_the_real_trainer_is_measured_without_a_gpu(tmp_path):
    arms = ["nvfp4", "bf16-stock", "decompress"]
    small = f"--cpu --shape smollm2-135m --layers 1 --arms {','.join(arms)} --completions 2"
    size = "--tokens 8 --prompt 4 --repeats 1 --rank 4 --ragged"
    output = tmp_path / "out.json"
    assert train_step.main([*small.split(), *size.split(), "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["arm"] for row in rows] == arms
    assert all(row["step_s"] > 0 and row["base_gib"] > 0 for row in rows)


# rollout


@pytest.mark.slow
def test_the_real_engine_is_measured_without_a_gpu(tmp_path):
    small = "--cpu --shapes smollm2-135m --layers 1 --arms nvfp4 --ranks 0,4,8 --batches 2"
    size = "--prompt 4 --output-tokens 64 --repeats 1 --noise --no-compile"
    output = tmp_path / "out.json"
    assert rollout.main([*small.split(), *size.split(), "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["rank"] for row in rows] == [0, 4, 8]
    assert all(row["decode_tokens_per_s"] > 0 and row["start_s"] > 0 for row in rows)


def test_an_engine_with_slots_of_another_rank_samples_with_the_adapter_as_before(engine, two):
    texts = [[1, 4093, 198, 1780, 314, 216, 33, 1232, 216]]
    engine.sync(two[0])
    before = engine.score(texts)
    engine.sync(None)
    rollout.resize_slots(engine.llm, two[0].rank // 2)
    with pytest.raises(RuntimeError):  # it does not fit
        engine.sync(two[0])
    for rank in (two[0].rank, engine.settings.lora_rank):
        rollout.resize_slots(engine.llm, rank)
        engine.sync(two[0])
        assert engine.score(texts) == before


def test_what_benchmark_and_engine_say_of_compiling_is_joined():
    sizes, captured = {"cudagraph_capture_sizes": [1]}, {"mode": 0}
    options = {"kv_cache_memory_bytes": 7, "compilation_config": sizes}
    asked = rollout.with_options(dict, options, model="m", compilation_config=captured)
    assert asked == {
        "model": "m",
        "kv_cache_memory_bytes": 7,
        "compilation_config": sizes | captured,
    }
    assert rollout.with_options(dict, options, model="m")["compilation_config"] == sizes
    assert rollout.with_options(dict, {}, model="m") == {"model": "m", "compilation_config": {}}


def test_no_adapter_is_measured_in_an_engine_that_is_built_anyway():
    assert rollout.engines([0]) == [(0, [0])]
    assert rollout.engines([0, 64, 32]) == [(32, [0, 32]), (64, [64])]
    assert rollout.engines([16]) == [(16, [16])]
    assert rollout.engines([0], shared=True) == [(0, [0])]
    assert rollout.engines([0, 64, 32], shared=True) == [(64, [0, 32, 64])]


def test_decode_speed_is_the_difference_of_the_two_lengths():
    # 2 s of prefill and 10 ms a step: 15 steps after the prompt for 16 tokens, 115 for 116.
    row = rollout.speeds([(2.15, 3.15)] * 2, batch=8, prompt=100, output=116)
    assert row["decode_tokens_per_s"] == pytest.approx(800)
    assert row["step_ms"] == pytest.approx(10)
    assert row["prefill_tokens_per_s"] == pytest.approx(400)
    assert row["tokens_per_s"] == pytest.approx(8 * 116 / 3.15)
    assert row["spread_percent"] == pytest.approx(0)


def test_a_difference_lost_in_noise_gives_no_speed():
    row = rollout.speeds([(2.0, 3.0), (2.0, 1.9)], batch=8, prompt=100, output=116)
    assert "decode_tokens_per_s" not in row and "too fast" in row["note"]


def test_time_is_foreseen_on_a_line_that_never_falls():
    assert rollout.foreseen(1, []) == 0
    assert rollout.foreseen(8, [(1, 3.0)]) == 3.0
    assert rollout.foreseen(4, [(1, 3.0), (2, 4.0)]) == 6.0
    assert rollout.foreseen(4, [(1, 3.0), (2, 2.0)]) == 2.0


def test_batches_beyond_the_time_limit_are_named_not_measured():
    def generate(prompts, tokens):
        time.sleep(0.002 * tokens)
        return [[0] * tokens for _ in prompts]

    job = {"batches": [4, 1, 64], "seconds": 0.25, "prompt": 4, "output": 36, "repeats": 1}
    rows = list(rollout.measure_batches(generate, rollout.Prompts(500, 4), job))
    assert [row["batch"] for row in rows] == [1, 4, 64]
    assert rows[0]["decode_tokens_per_s"] > 0
    assert "note" not in rows[0] and rows[2]["note"].startswith("skipped: ")


def test_a_completion_of_another_length_is_an_error():
    with pytest.raises(RuntimeError, match="expected 16 each"):
        rollout.timed(lambda prompts, tokens: [[0] * 15 for _ in prompts], [[1]], 16)


def test_no_two_prompts_begin_alike():
    prompts = rollout.Prompts(vocabulary=50, length=3)
    taken = prompts.take(20) + prompts.take(30)
    assert len({ids[0] for ids in taken}) == 50
    assert {len(ids) for ids in taken} == {3} and max(map(max, taken)) < 50
    with pytest.raises(ValueError, match="no first tokens left"):
        prompts.take(1)


def test_the_random_adapter_covers_every_projection():
    job = {"shape": "smollm2-135m", "layers": 2, "device": "cpu"}
    adapter = rollout.random_adapter(job, 4)
    assert len(adapter.tensors) == 2 * 7 * 2 and adapter.rank == 4
    assert all(tensor.abs().sum() > 0 for tensor in adapter.tensors.values())
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_{}.weight"
    assert adapter.tensors[name.format("A")].shape == (4, 1536)
    assert adapter.tensors[name.format("B")].shape == (576, 4)


# memory


def test_the_memory_of_a_command_is_sampled_and_written(tmp_path, capsys):
    output = tmp_path / "memory.json"
    hold = "import time; held = bytearray(200_000_000); time.sleep(1)"
    command = ["--every", "0.1", "--output", str(output), "--", sys.executable, "-c", hold]
    assert memory.main(command) == 0
    saved = json.loads(output.read_text())
    assert saved["exit_status"] == 0 and len(saved["samples"]) > 3
    assert 0.18 < saved["host_peak_gib"] < 0.5
    assert capsys.readouterr().out.splitlines()[-1].startswith("peak")


def test_the_status_of_the_command_is_passed_on():
    assert memory.main(["--", "bash", "-c", "exit 7"]) == 7
    assert memory.main(["--", "bash", "-c", "kill -TERM $$"]) == 128 + 15


def test_a_command_that_is_over_at_once_is_sampled_all_the_same():
    class Late(memory.Sampler):
        def take(self):
            time.sleep(0.3)  # the command is gone before anybody looks
            return super().take()

    sampler = Late()
    assert memory.watch(["true"], sampler, None, lambda status: None) == 0
    assert len(sampler.samples) == 1


class Rising(memory.Sampler):
    """A gauge whose GPU fills by 1 GiB a sample."""

    def take(self):
        sample = super().take()._replace(gpu_gib=float(len(self.samples)))
        self.samples[-1] = sample
        return sample


def test_a_command_above_the_limit_is_killed_with_its_children():
    sampler = Rising(every=0.1)
    started = time.perf_counter()
    command = ["bash", "-c", "sleep 60 & sleep 60"]
    assert memory.watch(command, sampler, 4.5, lambda status: None) == memory.OVER_LIMIT
    assert sampler.gpu_peak() == 5.0
    assert time.perf_counter() - started < 20
    assert memory.tree(sampler.pid) == [sampler.pid]  # the sleeps are gone


def test_a_command_under_the_limit_ends_by_itself():
    assert memory.watch(["sleep", "0.3"], Rising(every=0.1), 1000, lambda status: None) == 0


def test_a_limit_without_a_gpu_is_refused(capsys):
    if memory.open_gpu() is not None:
        pytest.skip("NOT TESTED: there is a GPU here")
    with pytest.raises(SystemExit) as ended:
        memory.main(["--limit-gib", "80", "--", "true"])
    assert ended.value.code == 2
    assert "NVML finds none here" in capsys.readouterr().err


def test_a_sampler_measures_the_process_it_runs_in():
    with memory.Sampler(every=0.05) as sampler:
        time.sleep(0.2)
    assert len(sampler.samples) >= 3 and sampler.host_peak() > 0


@pytest.mark.parametrize("count", [1, 9, 10, 11, 95])
def test_the_printed_slices_keep_the_peak_and_the_end(count):
    samples = [memory.Sample(float(i), i % 7.0, i % 5.0) for i in range(count)]
    parts = memory.slices(samples)
    assert 1 <= len(parts) <= memory.SLICES
    assert max(p.gpu_gib for p in parts) == max(s.gpu_gib for s in samples)
    assert parts[-1].seconds == samples[-1].seconds


def test_a_leak_shows_in_the_peaks_of_every_ten_steps():
    samples = [memory.Sample(0.0, None, 3.0, 0)]  # loading holds the most
    samples += [memory.Sample(step, None, 1 + step / 10, step) for step in range(1, 25)]
    samples += [memory.Sample(99.0, None, 9.0, 25)]
    rows = memory.by_steps(samples)
    assert [(name, part.host_gib) for name, part in rows] == [
        ("2-10", 1.9),
        ("11-20", 2.9),
        ("21-25", 3.4),
    ]


def test_a_sample_knows_how_many_steps_are_done(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    sampler = memory.Sampler(metrics=metrics)
    assert sampler.take().step == 0
    metrics.write_text("{}\n{}\n")
    assert sampler.take().step == 2


# end_to_end


def run_folder(folder, precision: str, train: float, steps: int = 4):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"flags": {"precision": precision}}))
    row = {"time_rollout_s": 2.0, "time_reward_s": 0.5, "time_sync_s": 0.25}
    row |= {"tokens_per_s": 100.0, "completion_length": 50.0, "peak_memory_gib": 3.0}
    rows = [row | {"time_train_s": train, "logp_gap_mean": None} for _ in range(steps)]
    rows[0]["time_train_s"] = 1000.0  # compiling
    rows[-1]["logp_gap_mean"] = 0.125
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def test_a_run_is_summed_up_by_its_medians_after_the_first_step(tmp_path):
    row = end_to_end.summary(run_folder(tmp_path / "a", "nvfp4", train=1.25), skip=1)
    assert (row["step_s"], row["train_s"], row["rollout_s"], row["steps"]) == (4.0, 1.25, 2.0, 3)
    assert (row["gap"], row["tokens_per_s"], row["peak_gib"]) == (0.125, 100.0, 3.0)


def test_runs_are_compared_with_the_first(tmp_path, capsys):
    runs = [run_folder(tmp_path / "a", "bf16", 5.25), run_folder(tmp_path / "b", "nvfp4", 1.25)]
    output = tmp_path / "out.json"
    assert end_to_end.main([*map(str, runs), "--output", str(output)]) == 0
    assert [r["speed"] for r in json.loads(output.read_text())["rows"]] == [1.0, 2.0]
    assert capsys.readouterr().out.splitlines()[-1].split()[:4] == ["b", "nvfp4", "3", "4.00"]


def test_a_run_without_enough_steps_is_refused(tmp_path, capsys):
    run = run_folder(tmp_path / "a", "bf16", 1.0, steps=1)
    with pytest.raises(SystemExit) as ended:
        end_to_end.main([str(run)])
    assert ended.value.code == 2 and "more than --skip 1" in capsys.readouterr().err
    with pytest.raises(ValueError, match="config.json is missing"):
        end_to_end.summary(tmp_path, 1)
