"""Programs that declare their parameters have the checks and messages of the built-in one."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from manynodes.base.errors import Refusal
from manynodes.experiment.config import Experiment
from manynodes.experiment.declaration import built_in, read_declaration

PARAMETERS: dict[str, Any] = {
    "lr": {"type": "number", "exclusiveMinimum": 0},
    "width": {"type": "integer", "minimum": 1, "default": 8},
    "sizes": {"type": "array", "items": {"type": "integer"}, "default": [3, 4]},
    "start": {"type": ["string", "null"], "default": None, "format": "path"},
    "name": {"type": "string", "default": "01", "not": {"const": "none"}},
    "every": {"type": "integer", "default": 3, "result": False},
    "views": {"enum": ["one", "two"], "default": "one", "result": "evaluation"},
    "decay": {"type": "number", "default": 0, "only_with": {"width": {"minimum": 8}}},
    "batch": {"type": "integer", "default": 32, "per_process": "share"},
    "share": {"type": ["integer", "null"], "default": None},
}
CHECK = """
def check(parameters, geometry, dataset):
    if parameters["width"] % geometry["world_size"]:
        raise ValueError(f"width: {parameters['width']} does not divide; use a multiple")
    assert dataset is None or dataset["classes"] == 10
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print()\n")
    (tmp_path / "first.bin").write_text("")
    declare(tmp_path, PARAMETERS)
    (tmp_path / "check.py").write_text(CHECK)
    return tmp_path


def declare(place: Path, parameters: dict[str, Any]) -> None:
    text = yaml.safe_dump({"properties": parameters}, sort_keys=False)
    (place / "parameters.yaml").write_text(text)


def experiment(place: Path, **keys: Any) -> Experiment:
    return Experiment.from_files(
        {"experiment": "mine", "program": "train.py", "lr": 0.5} | keys, [place]
    )


def test_declared_parameters_are_keys_axes_and_values_of_runs(place: Path) -> None:
    found = experiment(place, lr=["0.1", 1], sizes=[[1, 2], [3]], seed=[0, 1], start="first.bin")
    assert next(iter(found.runs)) == "lr~0.1_sizes~1-2_seed~0"
    run = found.runs["lr~1.0_sizes~3_seed~1"]
    assert run.parameters == {
        "lr": 1.0, "width": 8, "sizes": [3], "start": run.start, "name": "01", "decay": 0.0,
        "batch": 32,
    }  # fmt: skip
    assert Path(run.start).resolve() == place / "first.bin"
    assert found.numeric_axes == ["lr"]
    assert Experiment.from_json(found.science).runs == found.runs


def test_what_changes_no_result_is_no_part_of_a_run(place: Path) -> None:
    found = experiment(place, every=9, views="two")
    assert found.runs == experiment(place).runs
    assert found.parameters_for(False) == {"every": 9}
    assert found.parameters_for("evaluation") == {"views": "two"}
    assert "every" not in found.science


def test_a_value_may_be_a_multiple_of_the_processes(place: Path) -> None:
    runs = experiment(place, share=10, nodes=[1, 4]).runs
    assert [run.batch for run in runs.values()] == [10, 40]


def test_a_value_may_grow_with_the_processes(place: Path) -> None:
    rule = {"enum": ["none", "linear"], "default": "linear"}
    declare(place, {"rate": {"type": "number", "default": 0.5, "grows_by": "rule"}, "rule": rule})
    (place / "check.py").unlink()
    given = {"experiment": "mine", "program": "train.py", "nodes": [1, 4]}
    runs = Experiment.from_files(given, [place]).runs
    assert [run.rate for run in runs.values()] == [0.5, 2.0]


def test_a_value_may_be_an_axis_of_the_numbers_below_another(place: Path) -> None:
    declare(place, {"parts": {"type": "integer"}, "part": {"type": "integer", "counts": "parts"}})
    (place / "check.py").unlink()
    given = {"experiment": "mine", "program": "train.py"}
    assert Experiment.from_files(given | {"parts": 2}, [place]).axes == {"part": [0, 1]}
    for value, line in (
        ({"parts": [2, 3]}, "parts: is a list; give part too"),
        (
            {"runs": [{"parts": 2}, {"parts": 3}]},
            "parts: varies in runs or search; give part there too",
        ),
        (
            {"parts": 4, "search": {"runs": 2, "parts": [2, 3]}},
            "parts: varies in runs or search; give part there too",
        ),
        (
            {"parts": -1},
            "parts: -1 is not a whole number from 1 to 10,000, which part counts",
        ),
        (
            {"parts": 1_000_000_000},
            "parts: 1000000000 is not a whole number from 1 to 10,000, which part counts",
        ),
        ({"part": 0}, "parts: is missing; the program has no default of it"),
    ):
        with pytest.raises(Refusal) as refused:
            Experiment.from_files(given | value, [place])
        assert str(refused.value) == f"config: {line}"
    rows = [{"parts": 2, "part": 1}, {"parts": 3, "part": 2}]
    assert len(Experiment.from_files(given | {"runs": rows}, [place]).runs) == 2


def test_parameters_vary_together_in_a_table(place: Path) -> None:
    (place / "runs.csv").write_text('lr,sizes,name\n0.1,"[1, 2]",01\n0.2,"[3]",2\n')
    given = {"experiment": "mine", "program": "train.py", "runs": "runs.csv"}
    runs = Experiment.from_files(given, [place]).runs
    assert [(run.lr, run.sizes, run.name) for run in runs.values()] == [
        (0.1, [1, 2], "01"), (0.2, [3], "2"),
    ]  # fmt: skip


@pytest.mark.parametrize(("spec", "given", "found"), [
    ({}, "01", "01"),
    ({}, "1e-3", 0.001),
    ({}, {"a": "01", "b": "2", "c": ["1.10", "3"]}, {"a": "01", "b": 2, "c": ["1.10", "3"]}),
    ({"type": "array"}, ["01", "10"], ["01", "10"]),
    ({"type": "array"}, ["1", "2"], [1, 2]),
    ({"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]}, ["1", "2"],
     ["1", 2]),
    ({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}, ["5"], ["5"]),
    ({"anyOf": [{"type": "array", "items": {"type": ["string", "number"]}}, {"type": "null"}]},
     ["5"], ["5"]),
    ({"allOf": [{"type": "string"}]}, "5", "5"),
    ({"type": "object", "additionalProperties": {"type": "string"}}, {"a": "5"}, {"a": "5"}),
    ({"type": "object", "additionalProperties": {"type": "number"}}, {"a": "010"}, {"a": 10}),
    # True or false says nothing.
    ({"type": "array", "items": True}, ["1", "2"], [1, 2]),
    ({"type": "object", "properties": {"x": True}}, {"x": "01"}, {"x": "01"}),
    ({"enum": [[1, 2], [3, 4]]}, ["1", "2"], [1, 2]),
])  # fmt: skip
def test_texts_stay_texts_where_the_schema_wants_them_or_says_nothing_and_they_are_no_numbers(
    place: Path, spec: dict[str, Any], given: Any, found: Any
) -> None:
    declare(place, {"value": spec})
    (place / "check.py").unlink()
    config = {"experiment": "mine", "program": "train.py", "value": given}
    assert Experiment.from_files(config, [place]).runs["run"].parameters == {"value": found}


@pytest.mark.parametrize(("keys", "line"), [
    ({"widht": 3}, "widht: unknown key; did you mean width?"),
    ({"width": "x"}, 'width: "x" is not a whole number'),
    ({"width": [8, 0]}, "width: 0 is too small; the least is 1"),
    ({"views": "three"}, 'views: "three" is not one of one, two'),
    ({"lr": []}, "lr: [] is too short; an axis needs at least one value"),
    ({"width": 9, "nodes": 2}, "width: 9 does not divide; use a multiple"),
    ({"parameters": {"a": 1}},
     "parameters: the program declares its own; give them beside program"),
    ({"width": 4, "decay": [0.0, 0.1]},
     "decay: an axis that width: 4 ignores; give one value, or another width"),
    ({"share": 4, "batch": 8}, "share: batch is given too; keep one of them"),
    ({"every": [1, 2]}, "every: [1, 2] is not a whole number"),
    ({"lr": None}, "lr: null is not a number"),
    ({"name": "none"}, "name: 'none' should not be valid under {'const': 'none'}"),
])  # fmt: skip
def test_a_mistake_is_one_line_before_any_job(place: Path, keys: dict[str, Any], line: str) -> None:
    with pytest.raises(Refusal) as refused:
        experiment(place, **keys)
    assert str(refused.value) == f"config: {line}"


@pytest.mark.parametrize("key", ["lr", "epochs"])
def test_a_parameter_that_is_not_declared_is_told_its_place(place: Path, key: str) -> None:
    (place / "parameters.yaml").unlink()
    with pytest.raises(Refusal) as refused:
        Experiment.from_files({"experiment": "mine", "program": "train.py", key: 1}, [place])
    assert str(refused.value) == (
        f"config: {key}: unknown key; your program's own keys belong in parameters, or are "
        "declared in parameters.yaml beside it"
    )


@pytest.mark.parametrize(("spec", "given", "line"), [
    ({"type": "object", "additionalProperties": False}, {"x": 1},
     "value.x: unknown key; leave it out"),
    ({"type": "object", "patternProperties": {"^x": {}}, "additionalProperties": False},
     {"x1": 1, "y": 1}, "value.y: unknown key; leave it out"),
    ({"type": "object", "required": ["x"]}, {}, "value.x: is missing; give it"),
    ({"type": "string", "minLength": 3}, "ab",
     'value: "ab" is too short; the least is 3 characters'),
    ({"type": "string", "minLength": 3}, "", "value: the text is empty"),
    ({"type": "array", "minItems": 2}, [1], "value: [1] is too short; give at least 2 values"),
    ({"const": 4}, 3, "value: 3 is not 4"),
])  # fmt: skip
def test_a_limit_of_the_user_s_own_is_told_in_words_that_are_true_of_it(
    place: Path, spec: dict[str, Any], given: Any, line: str
) -> None:
    declare(place, {"value": spec})
    config = {"experiment": "mine", "program": "train.py", "value": given}
    with pytest.raises(Refusal) as refused:
        Experiment.from_files(config, [place])
    assert str(refused.value) == f"config: {line}"


def test_a_value_without_a_default_must_be_given(place: Path) -> None:
    declare(place, PARAMETERS | {"later": {"type": "integer", "result": False}})
    with pytest.raises(Refusal, match="config: later: is missing"):
        experiment(place)
    with pytest.raises(Refusal, match="config: lr: is missing; the program has no default of it"):
        Experiment.from_files({"experiment": "mine", "program": "train.py"}, [place])


@pytest.mark.parametrize(("parameters", "said"), [
    ({"lr": {"type": "nummer"}}, "lr: 'nummer' is not valid"),
    ({"lr": {"type": "number", "default": "x"}}, "lr: default: 'x' is not of type 'number'"),
    ({"lr": {"$ref": "http://127.0.0.1/x"}}, "lr: $ref is not supported; write it out"),
    ({"lr": {"type": "number", "result": "no"}}, "enum in properties.lr.result"),
    ({"lr": {"grows_by": "rule"}}, 'lr: "rule" is no parameter'),
    ({"lr": {"type": "number", "grows_by": "by"}, "by": {"type": "string", "default": "x"}},
     "grows_by is for a number, and by needs a default and an enum of none, linear, square_root"),
    ({"batch": {"type": "integer", "per_process": "each"}, "each": {"type": "integer"}},
     "each: needs the default null, as batch is a multiple of it"),
    ({"lr": {"only_with": {"nods": {}}}}, "only_with: nods is no key of a run"),
    ({"lr": {"only_with": {"every": {}}}, "every": {"type": "integer", "result": False}},
     "lr: only_with: every is no key of a run"),
    ({"nodes": {"type": "integer"}}, "nodes is a key of every experiment; choose another name"),
    ({"world_size": {"type": "integer"}}, "has a meaning of its own; choose another name"),
    ({"1r": {"type": "integer"}}, "pattern in properties"),
    ({"a": {}, "b": {"only_with": {"a": {"type": "foo"}}}}, "b: 'foo' is not valid under any"),
    ({"a": {}, "b": {"only_with": {"a": {"pattern": "("}}}}, "b: '(' is not a 'regex'"),
    ({"a": {"$dynamicRef": "#x"}}, "a: $dynamicRef is not supported; write it out"),
])  # fmt: skip
def test_a_declaration_that_is_none_is_refused(
    place: Path, parameters: dict[str, Any], said: str
) -> None:
    declare(place, parameters)
    with pytest.raises(Refusal) as refused:
        Experiment.from_files({"experiment": "mine", "program": "train.py"}, [place])
    assert said in str(refused.value)


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "1 / 0", "def check(:", ""])
def test_a_check_that_fails_by_itself_is_named(place: Path, code: str) -> None:
    (place / "check.py").write_text(code)
    with pytest.raises(Refusal, match=r"^config: program: .*check.py: \w+"):
        experiment(place)


def test_what_a_check_changes_is_not_what_a_run_gets(place: Path) -> None:
    (place / "check.py").write_text(
        "def check(parameters, geometry, dataset): parameters['sizes'].append(9)\n"
    )
    runs = experiment(place, width=[8, 16]).runs.values()
    assert [run.sizes for run in runs] == [[3, 4], [3, 4]]


def test_reading_a_record_runs_no_code_of_the_users(place: Path) -> None:
    science = experiment(place).science
    (place / "check.py").write_text("raise SystemExit(3)")
    assert list(Experiment.from_json(science).runs) == ["run"]


def test_another_file_of_that_name_declares_nothing(place: Path) -> None:
    (place / "parameters.yaml").write_text("learning_rate: &x [1]\n<<: *x\n")
    given = {"experiment": "mine", "program": "train.py", "parameters": {"lr": 1}}
    assert Experiment.from_files(given, [place]).runs["run"].parameters == {"lr": 1}


def test_the_built_in_program_s_declaration_passes_the_checks_that_a_start_leaves_out() -> None:
    assert read_declaration(built_in().folder) == built_in()
