"""curves.png is drawn from one run or several, and what cannot be drawn is said."""

import json

import numpy
import pytest

from qerl import report

PNG = b"\x89PNG\r\n\x1a\n"


def row(step: int, **changes) -> dict:
    keys = [key for key, _ in report.PANELS]
    return {"step": step} | dict.fromkeys(keys, 0.5) | dict.fromkeys(report.TIMES, 1.0) | changes


def run(folder, rows):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """The figure of the last call: pyplot forgets it on close."""
    from matplotlib import pyplot

    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    yield kept
    monkeypatch.undo()
    pyplot.close("all")


def lines(figure, panel: int) -> dict[str, list]:
    return {line.get_label(): list(line.get_ydata()) for line in figure.axes[panel].lines}


def test_two_runs_make_two_lines_in_each_panel(tmp_path, drawn):
    first = run(tmp_path / "nvfp4", [row(1, reward=0.1), row(2, reward=0.9)])
    second = run(tmp_path / "bf16", [row(1, reward=0.2), row(2, reward=0.3), row(3, reward=0.4)])
    assert report.main([str(first), str(second)]) == 0
    assert (first / "curves.png").read_bytes().startswith(PNG)
    assert lines(drawn[0], 0) == {"nvfp4": [0.1, 0.9], "bf16": [0.2, 0.3, 0.4]}
    assert all(set(lines(drawn[0], panel)) == {"nvfp4", "bf16"} for panel in range(5))


def test_runs_of_one_name_in_two_folders_are_both_drawn(tmp_path, drawn):
    first = run(tmp_path / "a" / "run", [row(1, reward=0.1)])
    second = run(tmp_path / "b" / "run", [row(1, reward=0.2)])
    assert report.main([str(first), str(second)]) == 0
    assert sorted(lines(drawn[0], 0).values()) == [[0.1], [0.2]]


def test_the_bars_add_up_to_the_mean_time_of_a_step(tmp_path, drawn):
    rows = [row(1, time_rollout_s=3.0), row(2, time_rollout_s=1.0)]
    report.main([str(run(tmp_path / "run", rows))])
    heights = [bar.get_height() for bar in drawn[0].axes[5].patches]
    assert heights == [2.0, 1.0, 1.0, 1.0]


def test_a_value_that_was_not_measured_is_a_gap(tmp_path, drawn):
    folder = run(tmp_path / "run", [row(1), row(2, reward=None, logp_gap_mean=None), row(3)])
    assert report.main([str(folder)]) == 0
    values = lines(drawn[0], 0)["run"]
    assert values[0] == values[2] == 0.5 and values[1] != values[1]


def test_a_value_without_neighbours_is_seen(tmp_path, drawn):
    assert report.main([str(run(tmp_path / "run", [row(1)]))]) == 0
    figure = drawn[0]
    figure.canvas.draw()
    inside = figure.axes[1].get_window_extent().padded(-2)  # without the frame
    height = figure.canvas.get_width_height()[1]
    x0, y0, x1, y1 = (int(edge) for edge in inside.extents)
    pixels = numpy.asarray(figure.canvas.buffer_rgba())[height - y1 : height - y0, x0:x1]
    assert (pixels != 255).any()


def test_a_key_that_a_row_lacks_is_a_gap_and_counts_for_nothing(tmp_path, drawn):
    short = {"step": 2, "reward": 0.5, "time_rollout_s": 3.0}
    folder = run(tmp_path / "run", [row(1), short, row(3, time_reward_s=None), {"step": 4}])
    assert report.main([str(folder)]) == 0
    entropy, rewards = lines(drawn[0], 1)["run"], lines(drawn[0], 0)["run"]
    assert entropy[0] == entropy[2] == 0.5 and entropy[1] != entropy[1]
    assert rewards[:3] == [0.5] * 3 and rewards[3] != rewards[3]
    heights = [bar.get_height() for bar in drawn[0].axes[5].patches]
    assert heights == pytest.approx([5 / 3, 1.0, 1.0, 1.0])


def test_a_picture_that_cannot_be_written_ends_with_status_2(tmp_path, capsys):
    folder = run(tmp_path / "run", [row(1)])
    assert report.main([str(folder), "--output", str(tmp_path / "absent" / "my.png")]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "absent") in said and said.count("\n") == 1


def test_output_names_another_file(tmp_path):
    folder = run(tmp_path / "run", [row(1)])
    assert report.main([str(folder), "--output", str(tmp_path / "my.png")]) == 0
    assert (tmp_path / "my.png").read_bytes().startswith(PNG)
    assert not (folder / "curves.png").exists()


def test_an_output_without_a_kind_ends_with_status_2(tmp_path, capsys):
    folder = run(tmp_path / "run", [row(1)])
    assert report.main([str(folder), "--output", str(folder)]) == 2
    assert "end it with .png" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "does not exist: expected the --output-dir"),
        ("", "has not finished its first step"),
        ('{"step": 1, "rew', "line 1 is not whole"),
        ('{"reward": 1}\n', "line 1 has no step"),
        ('{"step": 1}\n5\n', "line 2 has no step"),
    ],
)
def test_a_folder_without_whole_metrics_ends_with_status_2(tmp_path, capsys, text, words):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert report.main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert not (tmp_path / "curves.png").exists()
