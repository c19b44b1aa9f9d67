"""Scaling studies: tables, model and advice from laws that are known."""

import math
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from manynodes.experiment.config import Experiment
from manynodes.reporting import numbers, scaling, scaling_figure, speed_up
from manynodes.reporting.progress import read_record
from manynodes.reporting.step_model import Step, fit
from programs import finished

IMAGE, FIXED, HOP, BYTE = 2e-4, 3e-3, 1e-4, 1e-9  # seconds
PARAMETERS = 1_000_000


def seconds(processes: int, batch: int, sharing: float = 1.0) -> float:
    """A step, by the law."""
    reduced = 2 * (processes - 1) * (HOP + 4 * PARAMETERS * BYTE / processes)
    return sharing * (IMAGE * batch / processes + FIXED) + reduced


def study(runs: list[dict[str, Any]], **keys: Any) -> Experiment:
    return Experiment.from_config(
        {"experiment": "study", "model": "resnet9", "runs": runs, "epochs": 3} | keys
    )


def measured(experiment: Experiment, cpus: int = 64, noise: float = 0.0) -> list[dict[str, Any]]:
    """What the runs would leave behind on nodes with so many CPUs."""
    found = []
    for number, (name, run) in enumerate(experiment.runs.items()):
        sharing = max(1.0, run.nproc_per_node / cpus)
        rate = run.global_batch_size / seconds(run.world_size, run.global_batch_size, sharing)
        rate *= 1 + noise * (-1) ** number
        ranks = [
            {
                "host": f"n{node}",
                "device": "cpu",
                "threads": 1,
                "cpu_ids": f"0-{cpus - 1}",
                "input_seconds": 0.001,
            }
            for node in range(run.nodes)
            for _ in range(run.nproc_per_node)
        ]
        history = pd.DataFrame(
            {
                "images_per_second": [rate / 3, rate, rate],
                "seconds": [30.0, 10.0, 10.0],
                "val_accuracy": [0.5, 0.7, 0.8 + run.seed / 100],
            }
        )
        about = {"ranks": ranks, "parameters": PARAMETERS, "seconds": 90.0}
        found.append(scaling.of_run(name, run, about, history, 0.8 + run.seed / 100))
    return found


STRONG = [
    {"nodes": nodes, "global_batch_size": batch} for batch in (960, 480) for nodes in (1, 2, 4, 8)
]


def test_the_table_has_the_law_s_speed_up_and_share_of_communication() -> None:
    experiment = study(STRONG, seed=[0, 1])
    table = scaling.sizes(experiment, measured(experiment))
    assert list(table["runs"]) == [2] * 8
    for _, row in table.iterrows():
        nodes, batch = row["nodes"], row["global_batch_size"]
        speed_up = seconds(1, batch) / seconds(nodes, batch)
        assert row["strong_speed_up"] == pytest.approx(speed_up)
        assert row["strong_efficiency"] == pytest.approx(speed_up / nodes)
        reduced = 2 * (nodes - 1) * (HOP + 4 * PARAMETERS * BYTE / nodes)
        assert row["communication_share"] == pytest.approx(
            reduced / seconds(nodes, batch), rel=1e-3
        )
        assert row["cpu_hours"] == pytest.approx(nodes * 90 / 3600)
        assert (row["lowest_accuracy"], row["highest_accuracy"]) == (0.8, 0.81)
        # The first accuracy that all reach is that of the third epoch.
        assert row["seconds_to_target"] == 50
    weak = table["weak_efficiency"].notna()
    assert set(table["global_batch_size"] / table["processes"]) > set(
        table[weak]["global_batch_size"] / table[weak]["processes"]
    )


def test_the_model_predicts_a_size_that_it_has_not_seen() -> None:
    steps = [
        Step(p, 1, batch, 1.0, 4 * PARAMETERS, seconds(p, batch) * (1 + 0.02 * (-1) ** number))
        for number, (p, batch) in enumerate((p, b) for p in (1, 2, 3, 4) for b in (240, 480, 960))
    ]
    model = fit(steps)
    assert model is not None
    assert model.error < 0.05
    for processes in (8, 16):
        step = Step(processes, 1, 1920, 1.0, 4 * PARAMETERS, 0.0)
        assert model.seconds(step) == pytest.approx(seconds(processes, 1920), rel=0.1)


def test_advice_on_strong_scaling() -> None:
    experiment = study(STRONG)
    table = scaling.sizes(experiment, measured(experiment))
    assert scaling.advice(experiment, table) == [
        # 480 images: 12 ms of computation, 3 of fixed cost, 1.4 of latency, 7 of bandwidth.
        "8 nodes x 1 process x 1 thread trains 20,513 images/s, the most of all sizes; more than 8 "
        "processes would gain more; the limit of 8 nodes x 1 process x 1 thread is bandwidth of "
        "the all-reduce, 30% of a step (model, 0% off on sizes held out of its fit)."
    ]


def test_advice_takes_the_smallest_size_that_is_near_the_best() -> None:
    # On one machine with two CPUs, further processes only share them.
    runs = [{"nproc_per_node": n, "global_batch_size": b} for n in (1, 2, 3, 4) for b in (240, 480)]
    experiment = study(runs)
    table = scaling.sizes(experiment, measured(experiment, cpus=2, noise=0.01))
    (sentence,) = scaling.advice(experiment, table)
    assert sentence.startswith("1 node x 2 processes x 1 thread trains ")
    assert "from 2 processes on, twice as many gain less than 10%" in sentence
    assert "the limit of 1 node x 4 processes x 1 thread is shared CPUs" in sentence
    assert list(table["cpus"]) == [1, 1, 2, 2, 2, 2, 2, 2]
    assert list(table["sharing"]) == [1, 1, 1, 1, 1.5, 1.5, 2, 2]


def test_advice_doubts_what_cannot_be() -> None:
    experiment = study([{"nodes": nodes} for nodes in (1, 2)])
    found = measured(experiment)
    assert len(scaling.advice(experiment, scaling.sizes(experiment, found))) == 1
    # Somebody else's job ran beside the smaller one.
    found[0]["images_per_second"] /= 3
    doubt = scaling.advice(experiment, scaling.sizes(experiment, found))[-1]
    assert doubt.startswith("An efficiency above 130% shows")


def test_weak_scaling() -> None:
    experiment = study([{"nodes": n} for n in (1, 2, 4, 8)], batch_per_process=120)
    table = scaling.sizes(experiment, measured(experiment))
    for nodes, found in zip((1, 2, 4, 8), table["weak_efficiency"], strict=True):
        assert found == pytest.approx(seconds(1, 120) / seconds(nodes, 120 * nodes))
    assert table["strong_efficiency"].isna().all()
    (sentence,) = scaling.advice(experiment, table)
    assert sentence.startswith(
        "with 120 images per process, 8 nodes x 1 process x 1 thread trains "
    )
    assert "76% of what 1 node x 1 process x 1 thread promises" in sentence


def test_settings_are_compared_apart_and_few_sizes_have_no_model() -> None:
    runs = [run | {"learning_rate": 0.1 * run["nodes"]} for run in STRONG[:2]]
    experiment = study(runs, weight_decay=[0.0, 0.1])
    table = scaling.sizes(experiment, measured(experiment))
    first, second = scaling.advice(experiment, table)
    assert first.startswith("weight_decay 0.0: 2 nodes x 1 process x 1 thread trains")
    assert second.startswith("weight_decay 0.1: ")
    assert first.endswith("; too few sizes for a model.")
    rates = study(STRONG[:2], learning_rate=[0.1, 0.2])
    assert list(scaling.sizes(rates, measured(rates))["runs"]) == [1] * 4
    # What `auto` came to, on nodes of two kinds.
    rounded = study(STRONG[:2], seed=[0, 1])
    runs = measured(rounded)
    for number, run in enumerate(runs):
        run["computed_in"] = ("fp32", "bf16")[number % 2]
    both = scaling.sizes(rounded, runs)
    assert list(both["runs"]) == [1] * 4
    assert [line.partition(":")[0] for line in scaling.advice(rounded, both)] == [
        "in fp32", "in bf16",
    ]  # fmt: skip
    # Beside a named one, too.
    rounded = study(STRONG[:2], precision=["auto", "fp32"])
    runs = measured(rounded)
    for run, precision in zip(runs, ("bf16", "fp32", "fp32", "fp32"), strict=True):
        run["computed_in"] = precision
    assert list(scaling.by_setting(rounded, runs)) == [
        "precision auto  in bf16", "precision fp32", "precision auto  in fp32",
    ]  # fmt: skip
    lines = scaling.shown(experiment, table).set_index("")
    assert "model" not in lines.index
    assert scaling.meaning(table).startswith("Input: the share of a step in which ")
    assert list(lines.loc["setting"]) == ["weight_decay 0.0"] * 2 + ["weight_decay 0.1"] * 2
    images = {run: 360 * (1 + at) for at, run in enumerate(table["run"])}
    figure = scaling_figure.draw(experiment, table, images, "study")
    assert len(figure.axes) == 2
    assert figure.axes[1].get_title("left").endswith("95% interval of their test images")
    # Of more images, it is smaller.
    bars = [np.ptp(bar.get_segments()[0][:, 1]) for bar in figure.axes[1].collections]
    assert len(bars) == len(table)
    assert bars == sorted(bars, reverse=True)


def test_a_setting_has_the_learning_rate_as_it_is_given() -> None:
    """Not as a rule multiplies it: 0.2 on one node and 0.1 on two become the same."""
    experiment = study(
        [], nodes=[1, 2], batch_per_process=120, learning_rate=[0.1, 0.2],
        learning_rate_rule="linear",
    )  # fmt: skip
    table = scaling.sizes(experiment, measured(experiment))
    assert table["weak_efficiency"].notna().sum() == 4
    advice = scaling.advice(experiment, table)
    assert [sentence.partition(":")[0] for sentence in advice] == [
        "learning_rate 0.1", "learning_rate 0.2",
    ]  # fmt: skip


def test_sizes_that_divide_the_same_cpu_are_drawn_without_a_curve() -> None:
    experiment = study([{"nproc_per_node": n, "global_batch_size": 480} for n in (1, 2)])
    table = scaling.sizes(experiment, measured(experiment, cpus=1))
    images = dict.fromkeys(table["run"], 360)
    (accuracy,) = scaling_figure.draw(experiment, table, images, "study").axes
    assert accuracy.get_title("left").endswith("95% interval of 360 images")
    assert accuracy.get_ylabel() == "test accuracy"


@pytest.mark.parametrize("number", [2, 12])
def test_settings_are_told_apart_in_each_panel(number: int) -> None:
    """Their accuracies stood in one colour, under the same names of sizes."""
    sizes = [{"nodes": nodes, "cpus_per_proc": cpus} for nodes in (1, 2) for cpus in (1, 2)]
    decays = [each / 100 for each in range(number)]
    experiment = study(sizes, weight_decay=decays, global_batch_size=480)
    runs = measured(experiment)
    for run in runs:
        run["threads"] = experiment.runs[run["run"]].cpus_per_proc
        run["cpus"] = run["nodes"] * run["threads"]
    table = scaling.sizes(experiment, runs)
    images = dict.fromkeys(table["run"], 360)
    strong, fastest, accuracy = scaling_figure.draw(experiment, table, images, "study").axes
    settings = [f"weight_decay {value}" for value in decays]
    assert fastest.get_title("left") == f"Images per second, {settings[0]}  batch 480"
    for axes, words in ((strong, [f"{setting}  batch 480" for setting in settings]),
                        (accuracy, settings)):  # fmt: skip
        assert [text.get_text() for text in axes.get_legend().get_texts()][:number] == words
    names = [text.get_text() for text in accuracy.get_xticklabels()]
    assert len({*names}) == len(names) == 4
    points = [line for line in accuracy.lines if len(line.get_xdata())]
    places = [float(line.get_xdata()[0]) for line in points]
    assert len({line.get_color() for line in points}) == number
    assert len({*places}) == len(points) == 4 * number
    # Each at its size.
    assert Counter(map(round, places)) == dict.fromkeys(range(4), number)


@pytest.mark.parametrize(
    ("cpu_ids", "threads", "cpus", "sharing"),
    [
        (["0-1", "0-1", "0-1"], 1, 2, 1.5),  # of one machine
        (["0", "1,3", "4-5"], 1, 3, 1.0),  # each bound to its own
        (["0-63"] * 3, 4, 12, 1.0),
    ],
)
def test_cpus_that_processes_share(
    cpu_ids: list[str], threads: int, cpus: int, sharing: float
) -> None:
    run = next(iter(study([{"nproc_per_node": 3, "global_batch_size": 240}]).runs.values()))
    ranks = [
        {
            "host": "n",
            "device": "cpu",
            "threads": threads,
            "cpu_ids": ids,
            "input_seconds": 0.0,
        }
        for ids in cpu_ids
    ]
    history = pd.DataFrame({"images_per_second": [1.0], "seconds": [1.0], "val_accuracy": [0.1]})
    found = scaling.of_run(
        "run", run, {"ranks": ranks, "parameters": 1, "seconds": 1.0}, history, 0.1
    )
    assert (found["cpus"], found["sharing"]) == (cpus, sharing)
    on_gpus = [rank | {"device": f"cuda:{number}"} for number, rank in enumerate(ranks)]
    found = scaling.of_run(
        "run", run, {"ranks": on_gpus, "parameters": 1, "seconds": 1.0}, history, 0.1
    )
    assert (found["gpus"], found["sharing"], scaling.units(found)) == (3, 1.0, 3)
    # As they were trained: of smaller batches than the most, with a part of the parameters.
    about = {"ranks": ranks, "parameters": 100, "seconds": 1.0}
    of_part = {"images_per_step": run.global_batch_size / 2, "trained_parameters": 25}
    history["images_per_second"] = 10.0
    for rank in ranks:
        rank["input_seconds"] = run.global_batch_size / 40
    found = scaling.of_run("run", run, about | of_part, history, 0.1)
    assert (found["input_share"], found["gradient_bytes"]) == (0.5, 100)


def program(**keys: Any) -> Experiment:
    return Experiment.from_config({"experiment": "mine", "command": ["./train"]} | keys)


def test_a_program_that_measures_no_rate_is_compared_by_its_time() -> None:
    experiment = program(nodes=[1, 2, 4], nproc_per_node=2, seed=[0, 1], parameters={"lr": [1, 2]})
    taken = {1: 100.0, 2: 60.0, 4: 80.0}
    table = speed_up.sizes(
        experiment,
        {
            name: (speed_up.rates_of(pd.DataFrame(), {"eval_samples_per_second": 9.0}),
                   taken[run.nodes] + (20 * run.seed if run.values["lr"] == 2 else 0))
            for name, run in experiment.runs.items()
        },
    )  # fmt: skip
    assert list(table["runs"]) == [2] * 6
    assert list(table["processes"]) == [2, 4, 8] * 2
    assert list(table["seconds"]) == [100, 60, 80, 110, 70, 90]
    assert list(table["speed_up"]) == pytest.approx([1, 10 / 6, 10 / 8, 1, 11 / 7, 11 / 9])
    assert list(table["efficiency"])[:3] == pytest.approx([1, 5 / 6, 5 / 16])
    assert speed_up.advice(experiment, table) == [
        "lr 1: 2 nodes x 2 processes is 1.67 times as fast as 1 node x 2 processes, the fastest; "
        "its efficiency is 83%.",
        "lr 2: 2 nodes x 2 processes is 1.57 times as fast as 1 node x 2 processes, the fastest; "
        "its efficiency is 79%.",
        "By the seconds of the whole program, its start included: sizes that do the same work.",
    ]
    assert list(speed_up.shown(experiment, table)["setting"]) == ["lr 1"] * 3 + ["lr 2"] * 3
    assert len(scaling_figure.draw_programs(experiment, table, "mine").axes[0].lines) == 5


@pytest.mark.parametrize("unknown", [1, 2, 4])
def test_a_time_of_no_second_is_compared_with_nothing(unknown: int) -> None:
    """As after a step of the clock; the base, or another size, by one of its two seeds."""
    experiment = program(nodes=[1, 2, 4], seed=[0, 1])
    table = speed_up.sizes(experiment, {
        name: ({}, 0 if (run.nodes, run.seed) == (unknown, 1) else 100 / run.nodes)
        for name, run in experiment.runs.items()
    })  # fmt: skip
    wanted = [math.nan if unknown in (1, nodes) else nodes for nodes in (1, 2, 4)]
    assert list(table["speed_up"]) == pytest.approx(wanted, nan_ok=True)
    shown = speed_up.shown(experiment, table)
    assert [*shown["seconds"]].count("–") == 1
    assert [*shown["efficiency"]] == ["–" if math.isnan(each) else "100%" for each in wanted]
    assert speed_up.advice(experiment, table) == []
    points, ideal, _ = scaling_figure.draw_programs(experiment, table, "mine").axes[0].lines
    assert list(points.get_ydata()) == [each for each in wanted if not math.isnan(each)]
    assert list(ideal.get_ydata()) == [1, 2, 4]


def test_a_rate_of_the_evaluation_is_none_of_the_training(tmp_path: Path) -> None:
    """Evaluated with the same speed, trained in 100 and 60 seconds."""
    config = {"evaluate": "e.py", "nodes": [1, 2]}
    folder = finished(
        tmp_path / "mine", config, [{"accuracy": 0.9}] * 2, [{"seconds": 100}, {"seconds": 60}],
        [{"images_per_second": 500.0}],
    )  # fmt: skip
    experiment = read_record(folder)
    runs = numbers.read(experiment, experiment.runs, folder)
    table = numbers.tables(experiment, runs)
    assert list(table["scaling"]["speed_up"]) == pytest.approx([1, 100 / 60])
    assert list(table["summary"]["images_per_second"]) == [500, 500]


def test_a_program_s_own_rate_and_cpus_and_a_batch_that_goes_with_the_size() -> None:
    pairs = [
        {"cpus_per_proc": cpus, "nproc_per_node": processes, "batch": 64 * processes}
        for cpus, processes in ((1, 1), (2, 1), (1, 4))
    ]
    experiment = program(runs=pairs, parameters={"batch": 64}, device="cpu")
    rates = [math.nan, 1.0, 30.0, 50.0]  # the first row is of something else
    rows = pd.DataFrame({"epoch": [0, 1, 2, 3], "tokens_per_second": rates})
    measured = {
        name: (speed_up.rates_of(rows * run.world_size, {}), 50.0)
        for name, run in experiment.runs.items()
    }
    table = speed_up.sizes(experiment, measured)
    assert list(table["tokens_per_second"]) == [40, 40, 160]
    assert list(table["efficiency"]) == [1, 0.5, 1]
    *_, last = speed_up.advice(experiment, table)
    assert last == "By tokens_per_second."
    # A run without it, or without a size to compare with.
    measured[next(iter(measured))] = ({}, 50.0)
    assert list(speed_up.sizes(experiment, measured)["seconds"]) == [50] * 3
    assert speed_up.advice(experiment, table[:1]) == []


def test_the_ideal_is_a_straight_line_and_sizes_of_one_place_share_a_label() -> None:
    experiment = program(nodes=[1, 8], nproc_per_node=[1, 8], parameters={"lr": [1, 2]})
    rate = {"eval_samples_per_second": 9.0}
    measured = {
        name: (speed_up.rates_of(pd.DataFrame(), rate), 100 / run.nodes / run.nproc_per_node)
        for name, run in experiment.runs.items()
    }
    table = speed_up.sizes(experiment, measured)
    (axes,) = scaling_figure.draw_programs(experiment, table, "mine").axes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert sorted(text.get_text() for text in axes.texts) == ["1x1", "1x8, 8x1", "8x8"]


def test_dollar_signs_of_a_setting_are_no_formula() -> None:
    experiment = program(nodes=[1, 2], parameters={"cost": ["$a^$", "b"]})
    table = speed_up.sizes(experiment, dict.fromkeys(experiment.runs, ({}, 100.0)))
    figure = scaling_figure.draw_programs(experiment, table, "mine")
    figure.canvas.draw()
    legend = figure.axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["cost $a^$", "cost b", "ideal"]


@pytest.mark.parametrize(("settings", "named"), [(12, 12), (24, 24), (40, 0)])
def test_a_legend_of_many_settings_hides_no_point_and_is_inside_the_figure(
    settings: int, named: int
) -> None:
    kinds = [f"option {number} of a rather long name" for number in range(settings)]
    experiment = program(nodes=[1, 2, 4], parameters={"kind": kinds})
    runs = enumerate(experiment.runs.items())
    measured = {name: ({}, 100 / run.nodes + number) for number, (name, run) in runs}
    table = speed_up.sizes(experiment, measured)
    figure = scaling_figure.draw_programs(experiment, table, "mine")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.canvas.draw()
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert len(legend.get_texts()) == named + 1
    box = legend.get_window_extent()
    assert box.y0 >= 0
    if named:
        assert box.y1 <= axes.xaxis.label.get_window_extent().y0
    assert ("a colour per setting" in figure.get_suptitle()) == (not named)
    # Not one for each setting, on each other.
    assert sorted(text.get_text() for text in axes.texts) == ["1x1", "2x1", "4x1"]
