"""Configs: what is read, what is refused, and the error messages.

Expected messages are written out, because users see them. The algorithm here is a small one of
these tests, so that the registry can change without this file.
"""

import dataclasses
import math
import os
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import hypothesis.strategies as st
import pydantic
import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from privssl.algorithms import ALGORITHMS
from privssl.algorithms.base import MissingReplyPolicy
from privssl.errors import ConfigError
from privssl.experiment.config import Config, config_hash, load_config, to_yaml, without_paths
from privssl.settings.schema import Positive, Problem, Rate, strict


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class SmallConfig:
    name: Literal["fedssl"] = "fedssl"
    rounds: Positive = 100
    sharpness: Rate = 2.0
    layers: tuple[int, ...] = (8, 16)


class Small:
    Config = SmallConfig
    can_be_private = True
    without = MissingReplyPolicy(quorum=("step",))

    @classmethod
    def missing_reply_policy_for(cls, cfg: Any, *, private: bool) -> MissingReplyPolicy:
        return cls.without

    @classmethod
    def problems(cls, config: Any) -> Iterator[Problem]:
        if config.data.labels == "support" and config.agents.support == 0:
            text = "0, but fedssl reads labels at support agents: give at least 1"
            yield Problem("agents.support", text)


TABLE: dict[str, type[Any]] = {"fedssl": Small}
SOUND = "agents: {support: 2, query: 6}\nalgorithm: {name: fedssl}\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def write_config(text: str, name: str = "a.yaml") -> Path:
        Path(name).write_text(text, encoding="utf-8")
        return Path(name)

    return write_config


def refusal(path: Path, overrides: Sequence[str] = ()) -> list[str]:
    """The rows of the report, without its heading, columns separated by single spaces."""
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides, TABLE)
    return [" ".join(row.split()) for row in str(error.value).splitlines()[1:]]


def test_all_problems_are_reported_at_once_in_the_documented_layout(write: Any) -> None:
    text = """\
# FedSSL-DP
run:       {seed: 0, output: runs/fedssl_dp}
data:      {name: mnist, labelled: 150, partition: iid}
agents:    {support: 0, query: 6}
model:     {name: lenet, norm: batch}
algorithm:
  name: fedssl
  rounds: 100

privacy:
  epsilonn: 8.0
  delta: 1e-5
"""
    with pytest.raises(ConfigError) as error:
        load_config(write(text, "fedssl_dp.yaml"), ["run.seed=-1"], TABLE)
    assert str(error.value) == (
        "fedssl_dp.yaml: 4 problems\n"
        "  line 4    agents.support          "
        "0, but fedssl reads labels at support agents: give at least 1\n"
        "  line 5    model.norm              batch norm couples the rows of a batch, "
        "so no single row can be clipped. Set model.norm: group\n"
        "  line 11   privacy.epsilonn        unknown key. Did you mean epsilon?\n"
        "  argument  run.seed                needs a whole number >= 0, got -1"
    )


def test_the_command_line_overrides_the_file_and_the_file_overrides_the_default(write: Any) -> None:
    path = write(SOUND + "run: {seed: 3, evaluate_every: 4}\n")
    config = load_config(path, ["run.seed=5"], TABLE)
    assert (config.run.seed, config.run.evaluate_every, config.run.checkpoint_every) == (5, 4, 10)
    assert config.privacy is None


def test_a_run_is_named_after_its_file_and_written_to_runs(write: Any) -> None:
    path = write(SOUND, "trial.yaml")
    config = load_config(path, ["run.seed=7"], TABLE)
    assert (config.run.name, config.folder) == ("trial", Path("runs/trial-7"))
    assert load_config(path, ["run.output=else/where"], TABLE).folder == Path("else/where")


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("-1E2", -100.0), ("2.5e3", 2500.0), (".5e1", 5.0)]
)
def test_an_exponent_without_dot_or_sign_is_a_number_if_the_key_is_numeric(
    write: Any, text: str, value: float
) -> None:
    config = load_config(
        write(SOUND + f"run: {{join_seconds: {abs(value)}, name: {text}}}\n"),
        [f"privacy.epsilon={text.lstrip('-')}"], TABLE,
    )  # fmt: skip
    assert config.privacy is not None and config.privacy.epsilon == abs(value)
    assert config.run.name == text  # the control: this key is text


def test_a_key_without_section_beside_an_algorithm_without_name_is_reported(write: Any) -> None:
    rows = refusal(write("algorithm: {name: {a: b}}\nrounds: 3\n"))
    assert any(row.startswith("line 2 rounds unknown section") for row in rows)


def test_an_exponent_is_a_number_where_a_key_takes_a_number_or_one_word(write: Any) -> None:
    path = write(SOUND)
    assert load_config(path, ["algorithm.gate=1e-1"]).algorithm.gate == 0.1
    assert load_config(path, ["algorithm.gate=similarity"]).algorithm.gate == "similarity"
    needed = "needs a number >= 0 and <= 1 or similarity, got 10.0"
    with pytest.raises(ConfigError, match=needed):
        load_config(path, ["algorithm.gate=1e1"])


def test_a_number_in_quotes_stays_text(write: Any) -> None:
    rows = refusal(write(SOUND + "privacy: {epsilon: '1e0', delta: 1e-5}\n"))
    assert rows == ["line 3 privacy.epsilon '1e0' is text to YAML. Write 1.0e+0"]


def test_lists_become_tuples_and_integers_become_floats_where_needed(write: Any) -> None:
    path = write(SOUND + "privacy: {epsilon: 8, update_at_support: [F, D], protect: [F, D]}\n")
    config = load_config(path, ["algorithm.layers=[1, 2]"], TABLE)
    assert config.algorithm.layers == (1, 2)
    assert config.privacy is not None
    assert config.privacy.protect == ("F", "D")
    assert isinstance(config.privacy.epsilon, float)


def test_an_argument_creates_the_privacy_section_and_null_removes_it(write: Any) -> None:
    path = write(SOUND)
    private = load_config(path, ["privacy.epsilon=4"], TABLE).privacy
    assert private is not None
    assert private.epsilon == 4.0
    private_path = write(SOUND + "privacy: {epsilon: 4.0, deltaa: 3}\n", "b.yaml")
    assert load_config(private_path, ["privacy=null"], TABLE).privacy is None
    again = load_config(private_path, ["privacy=null", "privacy.epsilon=2"], TABLE).privacy
    assert again is not None
    assert again.epsilon == 2.0


def test_an_empty_privacy_section_never_means_a_run_without_privacy(write: Any) -> None:
    path = write(SOUND + "privacy:\n  # epsilon: 8.0\n")
    text = "empty. Give epsilon, or write privacy: null for no privacy"
    assert refusal(path) == [f"line 3 privacy {text}"]
    assert refusal(write(SOUND), ["privacy="]) == [
        "argument privacy is a section. Write privacy.key=value"
    ]
    assert load_config(write(SOUND + "privacy: null\n"), (), TABLE).privacy is None
    assert load_config(path, ["privacy.epsilon=8"], TABLE).privacy is not None


def test_an_argument_replaces_an_invalid_value_of_the_file(write: Any) -> None:
    path = write(SOUND + "run: {seed: on}\n")
    assert refusal(path)
    assert load_config(path, ["run.seed=1"], TABLE).run.seed == 1


@pytest.mark.parametrize(
    ("line", "row"),
    [
        ("runn: {seed: 1}", "runn unknown section. Did you mean run?"),
        ("run: {sead: 1}", "run.sead unknown key. Did you mean seed?"),
        ("run: {seed: 1, seed: 2}", "run.seed given twice: first on line 3"),
        ("agents: {}", "agents given twice: first on line 1"),
        ("run: {seed: 1.0}", "run.seed needs a whole number >= 0, got 1.0"),
        ("run: {seed: true}", "run.seed needs a whole number >= 0, got true"),
        ("run: {seed: '3'}", "run.seed '3' is text to YAML. Write 3"),
        ("run: {seed: 1e3}", "run.seed '1e3' is text to YAML. Write 1000"),
        ("run: {seed: }", "run.seed needs a whole number >= 0, got null"),
        ("run: {seed: [1, 2]}", "run.seed needs a whole number >= 0, got [1, 2]"),
        ("run: {seed: {a: 1}}", "run.seed needs a whole number >= 0, got keys (a)"),
        ("run: {name: 2024}", "run.name needs text, got 2024. Put it in quotes"),
        ("run: {overwrite: 1}", "run.overwrite needs true or false, got 1"),
        ("run: 3", "run needs keys with values, got 3"),
        ("model: {width: 0}", "model.width needs a whole number >= 1, got 0"),
        (
            "model: {norm: grop}",
            "model.norm needs group, batch, static or none, got 'grop'. Did you mean group?",
        ),
        (
            "data: {partition: dirichlet, alpha: .nan}",
            "data.alpha needs a number > 0 or null, got nan",
        ),
        ("data: {partition: dirichlet}", "data.alpha missing: partition dirichlet needs it"),
        ("privacy: {delta: 1.0e-5}", "privacy.epsilon missing: needs a number >= 0"),
        (
            "privacy: {epsilon: 8, protect: F}",
            "privacy.protect needs a list of F, G or D, got 'F'. Write [F]",
        ),
        (
            "privacy: {epsilon: 8, momentum: 1.0}",
            "privacy.momentum needs a number >= 0 and < 1, got 1.0",
        ),
        ("model: [lenet]", "model needs keys with values, got [lenet]"),
        ('run: {output: "a\\0b"}', "run.output 'a\\x00b' has characters that cannot be printed"),
        (
            "run: {overwrite: on}",
            "run.overwrite 'on' is true or false to YAML. Write that, or put it in quotes",
        ),
        (
            "run: {name: no}",
            "run.name 'no' is true or false to YAML. Write that, or put it in quotes",
        ),
        (
            "run: {seed: 010}",
            "run.seed '010' is a number to YAML, but in another base or with _ or : inside. "
            "Write plain decimal digits, or put it in quotes to mean text",
        ),
        (
            "run: {name: 2024-01-01}",
            "run.name '2024-01-01' is a timestamp to YAML. Put it in quotes to mean text",
        ),
        ("epsilon: 8.0", "epsilon unknown section. Did you mean privacy.epsilon?"),
        ("algorithm.rounds: 8", "algorithm.rounds unknown section. Did you mean algorithm?"),
    ],
)
def test_each_mistake_is_named_with_its_line_and_its_remedy(
    write: Any, line: str, row: str
) -> None:
    assert refusal(write(SOUND + line + "\n")) == [f"line 3 {row}"]


@pytest.mark.parametrize(
    ("arguments", "row"),
    [
        (["run.seed"], "run.seed write section.key=value"),
        (["seed=1"], "seed write section.key=value. Did you mean run.seed?"),
        (
            ["rounds=1"],
            "rounds write section.key=value. Did you mean algorithm.rounds?",
        ),
        (["rownds=1"], "rownds write section.key=value"),
        (["rum.seed=1"], "rum.seed unknown section. Did you mean run?"),
        (["model=lenet"], "model is a section. Write model.key=value"),
        (["run.seed=1", "run.seed=2"], "run.seed given twice among the arguments"),
        (["algorithm.rounds=1e1"], "algorithm.rounds '1e1' is text to YAML. Write 10"),
        (["algorithm.sharpness=0.0"], "algorithm.sharpness needs a number > 0, got 0.0"),
        (["algorithm.sharp=1.0"], "algorithm.sharp unknown key. Did you mean sharpness?"),
        (
            ["run.name=*x"],
            "run.name '*x' cannot be read: anchors (&) and aliases (*) are not read. "
            "Write the value out",
        ),
        (
            ["run.overwrite=yes"],
            "run.overwrite 'yes' is true or false to YAML. Write that, or put it in quotes",
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_reported_as_an_argument(
    write: Any, arguments: list[str], row: str
) -> None:
    assert refusal(write(SOUND), arguments) == [f"argument {row}"]


@pytest.mark.parametrize(
    ("section", "row"),
    [
        ("", "file algorithm.name missing: needs fedssl"),
        ("algorithm: {rounds: 3}", "line 1 algorithm.name missing: needs fedssl"),
        (
            "algorithm: {name: fedsl}",
            "line 1 algorithm.name unknown algorithm. Did you mean fedssl? "
            "Your own is package.module:Name",
        ),
        (
            "algorithm: {name: FedSSL}",
            "line 1 algorithm.name unknown algorithm. Did you mean fedssl? "
            "Your own is package.module:Name",
        ),
        (
            "algorithm: {name: other}",
            "line 1 algorithm.name unknown algorithm. Known: fedssl. "
            "Your own is package.module:Name",
        ),
        (
            "algorithm: {name: mine.method.Mine}",
            "line 1 algorithm.name unknown algorithm. Did you mean mine.method:Mine?",
        ),
    ],
)
def test_an_algorithm_must_be_named_and_known(write: Any, section: str, row: str) -> None:
    assert refusal(write(section)) == [row]


def test_a_check_of_an_invalid_value_reports_nothing_further(write: Any) -> None:
    broken = write(SOUND.replace("support: 2", "support: none"))
    assert refusal(broken) == ["line 1 agents.support needs a whole number >= 0, got 'none'"]
    # the same check reports its problem if the value can be read
    assert "reads labels at support agents" in refusal(broken, ["agents.support=0"])[0]
    # a misspelled key is not reported as missing
    misspelt = write(SOUND + "data: {partition: dirichlet, alpah: 0.3}\n")
    assert refusal(misspelt) == ["line 3 data.alpah unknown key. Did you mean alpha?"]


def test_an_error_about_a_missing_key_names_the_line_of_its_section_or_the_file(
    write: Any,
) -> None:
    advice = "agents.support 0, but fedssl reads labels at support agents: give at least 1"
    assert refusal(write("algorithm: {name: fedssl}\n")) == [f"file {advice}"]
    assert refusal(write("algorithm: {name: fedssl}\nagents: {query: 1}\n")) == [f"line 2 {advice}"]


def test_agents_without_rows_and_unused_agents_are_reported_with_their_line(write: Any) -> None:
    """For every algorithm, not only for those with a message of their own."""
    path = write("algorithm: {name: pseudo}\nagents:\n  support: 2\n  query: 2\n  mixed: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "line 5" in str(caught.value)
    assert "agents.mixed is 1, but with data.labels support there can be none" in str(caught.value)


@pytest.mark.parametrize(
    ("section", "row"),
    [
        (
            "data: {root: my.npz}",
            "line 3 data.root has no effect: digits comes with privssl. Give data.name of what "
            "lies there (npz, image_folder, ...)",
        ),
        (
            "data: {image_size: 16}",
            "line 3 data.image_size has no effect: it belongs to image_folder",
        ),
        (
            "data: {name: image_folder, root: x, image_size: 100000}",
            "line 3 data.image_size 100000: give at most 4096",
        ),
    ],
)
def test_image_sizes_are_for_image_folders_and_bounded(write: Any, section: str, row: str) -> None:
    assert refusal(write(SOUND + section + "\n")) == [row]


def billion_laughs() -> str:
    lines = ["a: &a0 [x, x]"] + [f"b{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "row"),
    [
        (billion_laughs(), "line 1 not a config: anchors (&) and aliases (*) are not read. "),
        ("\nrun: {name: *x}", "line 2 not a config: anchors (&) and aliases (*) are not read. "),
        (
            "run: !!python/object/apply:os.system ['touch pwned']",
            "line 1 not a config: the tag tag:yaml.org,2002:python/object/apply:os.system is not",
        ),
        ("run: " + "[" * 500_000, "line 1 not a config: nested deeper than 8 levels"),
        ("run: " + "{a: " * 500, "line 1 not a config: nested deeper than 8 levels"),
        (
            "run: {seed: 1\n",
            "line 2 not a config: expected ',' or '}', but got '<stream end>'. Close the",
        ),
        ("run: {}\n---\nrun: {}\n", "line 2 not a config: but found another document"),
        (
            "run:\n\tseed: 1\n",
            "line 2 not a config: found character '\\t' that cannot start any token. Indent with "
            "spaces, not with tabs",
        ),
        (
            "run:\n  seed: 1\n   name: x\n",
            "line 3 not a config: mapping values are not allowed here. Begin the keys of a section",
        ),
        (
            "run:\n  name: @x\n",
            "line 2 not a config: found character '@' that cannot start any token. Put",
        ),
        (
            "run: {name: 'x}\n",
            "line 2 not a config: found unexpected end of stream. Close the quotes",
        ),
        ("run: \x00", "line 1 not a config: character 0x0 is not text"),
    ],
)
def test_a_hostile_or_broken_text_is_refused_with_its_line(write: Any, text: str, row: str) -> None:
    [only] = refusal(write(text))
    assert only.startswith(row)
    assert not Path("pwned").exists()


def test_a_file_that_is_no_mapping_of_sections_is_refused(write: Any) -> None:
    rows = refusal(write("just words"))
    needed = "needs sections (run, data, agents, model, algorithm, privacy), not one value"
    assert f"line 1 {needed}" in rows


def test_an_unreadable_file_is_named_with_similar_file_names(write: Any) -> None:
    write(SOUND, "fedssl.yaml")

    def text(path: str) -> str:
        with pytest.raises(ConfigError) as error:
            load_config(Path(path), (), TABLE)
        return str(error.value)

    assert text("fedsl.yaml") == "fedsl.yaml: no such file. Did you mean fedssl.yaml?"
    assert text("zzz") == "zzz: no such file. In . there is fedssl.yaml"
    assert text("fedssl.yaml/config.yaml").startswith("fedssl.yaml/config.yaml: no such file")
    assert text("no/a.yaml") == "no/a.yaml: no such file. There is no folder no"
    assert text(".") == ".: a folder, not a config file. In . there is fedssl.yaml"
    assert text("a\0b") == "'a\\x00b': cannot be read: embedded null byte"
    Path("big.yaml").write_bytes(b"#" * (2**20 + 1))
    assert text("big.yaml") == "big.yaml: larger than 1 MiB, so this is no config file"
    Path("latin.yaml").write_bytes(b"run: {name: \xe9}")
    assert text("latin.yaml") == "latin.yaml: not UTF-8 text (byte 12). Save it as UTF-8"


@pytest.mark.parametrize("name", ["..", "a/b", "a\\b", "con", "COM1.txt", "'a '", "a.", "'a:b'"])
def test_a_run_name_that_is_no_plain_file_name_is_refused(write: Any, name: str) -> None:
    [row] = refusal(write(SOUND), [f"run.name={name}"])
    assert row.startswith("argument run.name ")
    assert "cannot be the name of a folder on every system. Use letters" in row


def test_names_longer_than_200_characters_are_refused(write: Any) -> None:
    path = write(SOUND)
    for key in ("name", "output"):
        assert refusal(path, [f"run.{key}={'x' * 201}"]) == [
            f"argument run.{key} has 201 characters: give at most 200"
        ]
        assert load_config(path, [f"run.{key}={'x' * 200}"], TABLE)


def test_delta_is_checked_against_the_rows_of_an_agent(write: Any) -> None:
    # 100 labelled rows at 2 support agents: 50 each; 1/50 = 0.02 and 50^-1.1 = 0.01353
    path = write(SOUND + "data: {labelled: 100}\nprivacy: {epsilon: 8.0}\n")
    assert refusal(path, ["privacy.delta=0.02"]) == [
        "argument privacy.delta 0.02 allows a whole row to be published: an agent holds about 50 "
        "labelled rows. Give less than 1 / 50, better 1.3e-2"
    ]
    assert load_config(path, ["privacy.delta=0.0199"], TABLE).warnings == (
        "privacy.delta is 0.0199, large for about 50 labelled rows of an agent. "
        "Customary is at most 1.3e-2",
    )
    assert math.isclose(50**-1.1, 0.01353, rel_tol=1e-3)
    assert load_config(path, ["privacy.delta=0.0135"], TABLE).warnings == ()
    # one agent holds all 100: 0.0199 is above 1/100
    assert refusal(path, ["privacy.delta=0.0199", "agents.support=1"])


def test_paths_are_made_absolute(
    write: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = SOUND + (
        "data: {name: npz, root: rows/my.npz, split: ~/split.json}\n"
        "privacy: {epsilon: 1, ledger: accounts, ledger_epsilon: 2}\n"
    )
    config = load_config(write(text), (), TABLE)
    assert config.data.root == str(tmp_path / "rows" / "my.npz")
    assert config.data.split == "~/split.json"  # already absolute
    assert config.privacy is not None and config.privacy.ledger == str(tmp_path / "accounts")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(config))
    monkeypatch.chdir("/")
    assert load_config(run / "config.yaml", (), TABLE) == config
    # The control: a relative path is relative to the working directory.
    assert load_config(tmp_path / "a.yaml", (), TABLE).data.root == "/rows/my.npz"


def test_the_config_for_trackers_names_no_local_folder(write: Any) -> None:
    text = SOUND + (
        "data: {name: csv, root: /secret/rows, label: y, text: t,"
        " encoder: 'huggingface:/secret/models/bert'}\n"
        "model: {name: linear}\nrun: {output: /secret/run}\n"
    )
    config = load_config(write(text), (), TABLE)
    assert "/secret/models" in to_yaml(config)  # the control
    told = without_paths(config)
    assert "secret" not in str(told)
    assert told["data"]["encoder"] == "huggingface:bert"


def test_the_config_of_a_run_of_an_older_version_keeps_its_checksum(write: Any) -> None:
    write(SOUND + "data: {name: npz, root: my.npz}\n", "config.yaml")
    begun = Path("split.json")
    begun.write_text("{}")
    assert load_config(Path("config.yaml"), (), TABLE).data.root == "my.npz"
    begun.unlink()  # the control
    assert load_config(Path("config.yaml"), (), TABLE).data.root == str(Path("my.npz").absolute())


def test_a_config_file_whose_name_is_not_utf8_is_refused(write: Any) -> None:
    path = Path(os.fsdecode(b"a\xff.yaml"))
    path.write_text(SOUND)
    with pytest.raises(ConfigError, match=r"'a\\udcff\.yaml': its name is not UTF-8. Rename"):
        load_config(path, (), TABLE)
    assert load_config(write(SOUND, "ä.yaml"), (), TABLE).run.name == "ä"  # the control


@pytest.mark.parametrize(
    ("key", "fit", "outside", "range_"),
    [
        ("clip_norm", ["0.001", "1e6"], ["0", "0.0009", "1.1e6", "1e38"], "0.001 to 1000000"),
        ("learning_rate", ["1e3"], ["1001", "1e38"], "at most 1000"),
        ("noise_multiplier", ["0.2", "1e4"], ["0.1", "1e5", "1e38"], "0.2 to 10000"),
    ],
)
def test_numbers_that_make_a_private_run_meaningless_are_refused_with_the_reason(
    write: Any, key: str, fit: list[str], outside: list[str], range_: str
) -> None:
    path = write(SOUND + "privacy: {epsilon: 8}\n")
    for value in fit:  # the control
        assert load_config(path, [f"privacy.{key}={value}"], TABLE).privacy is not None
    for value in outside:
        [row] = refusal(path, [f"privacy.{key}={value}"])
        assert row.startswith(f"argument privacy.{key} ") and f"give {range_}" in row
        assert "(" in row


def test_bfloat16_is_refused_in_private_runs_only(write: Any) -> None:
    path = write(SOUND + "run: {precision: bfloat16}\n")
    assert load_config(path, (), TABLE).run.precision == "bfloat16"
    [row] = refusal(path, ["privacy.epsilon=8"])
    assert row.startswith("line 3 run.precision private gradients are clipped and noised")


@pytest.mark.parametrize(
    ("model", "capable", "expected"),
    [
        ("small_cnn", True, "bfloat16"),
        ("small_cnn", False, "float32"),
        ("lenet", True, "float32"),  # bfloat16 is not faster (docs/performance.md)
        ("resnet9", True, "bfloat16"),
    ],
)
def test_precision_auto_is_resolved_to_a_precision_for_this_machine(
    write: Any, monkeypatch: pytest.MonkeyPatch, model: str, capable: bool, expected: str
) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: capable)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("privssl.ops.dispatch.instruction_set", lambda: None)
    path = write(SOUND + f"run: {{precision: auto}}\nmodel: {{name: {model}}}\n")
    config = load_config(path, (), TABLE)
    assert config.run.precision == expected
    assert f"precision: {expected}" in to_yaml(config)
    told = load_config(path, [f"run.precision={expected}"], TABLE)
    assert config_hash(config) == config_hash(told)
    for other in ("privacy.epsilon=8", "run.batched_agents=2"):  # which support float32 only
        assert load_config(path, [other], TABLE).run.precision == "float32"


@pytest.mark.parametrize(
    ("capable", "machine", "device", "warns"),
    [
        (True, "x86_64", "cpu", False),
        (False, "x86_64", "cpu", True),
        (False, "x86_64", "auto", True),
        (False, "x86_64", "cuda", False),
        (False, "aarch64", "cpu", False),  # whose instructions torch does not report
    ],
)
def test_bfloat16_without_processor_instructions_causes_a_warning(
    write: Any, monkeypatch: pytest.MonkeyPatch, capable: bool, machine: str, device: str,
    warns: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: capable)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("platform.machine", lambda: machine)
    path = write(SOUND + f"run: {{precision: bfloat16, device: {device}}}\n")
    warned = load_config(path, (), TABLE).warnings
    assert warned == (
        "run.precision is bfloat16, for which this processor has no instructions: steps can "
        "take several times as long as in float32. Set it to auto",
    ) * warns  # fmt: skip
    for other in ("float32", "auto"):
        assert load_config(path, [f"run.precision={other}"], TABLE).warnings == ()


@pytest.mark.parametrize("norm", ["batch", "static"])
def test_a_norm_that_couples_rows_is_refused_in_private_runs_only(write: Any, norm: str) -> None:
    path = write(SOUND + f"model: {{norm: {norm}}}\n")
    assert load_config(path, (), TABLE).model.norm == norm
    [row] = refusal(path, ["privacy.epsilon=8"])
    assert row.startswith(f"line 3 model.norm {norm} norm couples the rows")


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


names = st.text(
    string.ascii_letters + string.digits + " -_'#é", min_size=1, max_size=20
).filter(
    lambda text: (
        text == text.strip()
        # Device names on Windows, which are short and without spaces.
        and not text[:3].lower().startswith(("con", "prn", "aux", "nul", "com", "lpt"))
    )
)
choices = st.fixed_dictionaries(
    {"agents.support": st.integers(1, 99).map(str), "run.name": names.map(quoted)},
    optional={
        "run.seed": st.integers(0, 2**63).map(str),
        "run.output": names.map(quoted),
        "run.overwrite": st.sampled_from(["true", "false"]),
        "data.labelled": st.integers(200, 10**4).map(str),
        "data.root": st.sampled_from(["on", "1e5", "null", "1.0", "~", "a: b", "- x"]).map(quoted),
        "model.norm": st.sampled_from(["group", "none"]),
        "algorithm.sharpness": st.floats(1e-300, 1e6).map(lambda x: f"{x:.17e}"),
        "algorithm.layers": st.lists(st.integers(-5, 5), max_size=3).map(str),
        "privacy.epsilon": st.floats(0, 1e6).map(lambda x: f"{x:.17e}"),
    },
)


@given(choices)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_resolved_config_reads_back_as_equal(write: Any, chosen: dict[str, str]) -> None:
    given = {"data.root": "rows.npz", **chosen, "data.name": "npz"}
    config = load_config(write(SOUND), [f"{key}={value}" for key, value in given.items()], TABLE)
    again = load_config(write(to_yaml(config), "resolved.yaml"), (), TABLE)
    assert again == config
    assert config_hash(again) == config_hash(config)
    assert to_yaml(again) == to_yaml(config)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_the_resolved_config_of_every_algorithm_contains_every_key(write: Any, name: str) -> None:
    agents = "agents: {support: 2, query: 6}\n"
    if name == "server_sl":  # the one that needs a labelled server
        agents = "data: {labels: labels-at-server}\nagents: {query: 6}\n"
    config = load_config(write(agents + f"algorithm: {{name: {name}}}\n"))
    resolved = to_yaml(config)
    assert load_config(write(resolved)) == config
    written = yaml.safe_load(resolved)
    for section in ("run", "data", "agents", "model", "algorithm"):
        keys = {field.name for field in dataclasses.fields(getattr(config, section))}
        assert written[section].keys() == keys


def test_the_digest_covers_exactly_the_settings_that_can_change_a_trained_bit(write: Any) -> None:
    path = write(SOUND + "privacy: {epsilon: 8.0}\n")
    open_to_all = write(SOUND, "open.yaml")
    narrow = config_hash(load_config(open_to_all, ["run.precision=bfloat16"], TABLE))
    assert narrow != config_hash(load_config(open_to_all, (), TABLE))

    def digest_with(*overrides: str) -> str:
        return config_hash(load_config(path, overrides, TABLE))

    free = ["name=x", "output=y", "overwrite=true", "evaluate_every=2", "checkpoint_every=3"]
    free += ["images_every=4", "device=cpu", "check_wire=true", "workers=2"]
    free += ["batched_agents=4"]  # only in the last bits, like the device
    assert {digest_with(f"run.{override}") for override in free} == {digest_with()}
    assert digest_with("privacy.epsilon=8") == digest_with()  # 8 is 8.0
    bound = ["run.seed=1", "data.labelled=200", "agents.query=7", "model.width=8"]
    bound += ["algorithm.rounds=5", "privacy.delta=1.0e-6", "privacy=null"]
    different = {digest_with(override) for override in bound}
    assert len(different | {digest_with()}) == len(bound) + 1
    assert len({digest_with("data.name=npz", f"data.root={root}") for root in "ab"}) == 2


def test_a_config_is_frozen(write: Any) -> None:
    config: Config = load_config(write(SOUND), (), TABLE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run = None  # type: ignore[assignment, misc]


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("agents.query", 10**6),
        ("model.width", 2**16),
        ("algorithm.rounds", 10**7),
    ],
)
def test_numbers_beyond_every_machine_are_refused(write: Any, key: str, most: int) -> None:
    load_config(write(SOUND), [f"{key}={most}"], TABLE)  # the control
    [row] = refusal(write(SOUND), [f"{key}={most + 1}"])
    assert row == f"argument {key} {most + 1}: give at most {most}"


@pytest.mark.parametrize("name", ["label_census", "semifl"])
def test_a_former_run_with_batched_agents_of_a_refused_algorithm_resumes_without_them(
    tmp_path: Path, name: str
) -> None:
    agents = "agents: {support: 2, query: 2}\n"
    asked = f"{agents}algorithm: {{name: {name}}}\nrun: {{batched_agents: 4}}\n"
    (tmp_path / "config.yaml").write_text(asked)
    with pytest.raises(ConfigError, match=f"is 4, but agents of {name} gain too little from it"):
        load_config(tmp_path / "config.yaml")  # the control: the folder has no run
    (tmp_path / "split.json").write_text("{}")
    assert load_config(tmp_path / "config.yaml").run.batched_agents == 1
    with pytest.raises(ConfigError, match=f"is 8, but agents of {name} gain too little from it"):
        load_config(tmp_path / "config.yaml", ["run.batched_agents=8"])
    (tmp_path / "config.yaml").write_text(asked.replace(name, "fedavg"))
    assert load_config(tmp_path / "config.yaml").run.batched_agents == 4
