"""Mistakes in what is kept of published tables, and in what pages say of it."""

from tests.planted_faults.fault import Fault

STORE = "privssl/reproduce/store.py"
RUNNER = "privssl/reproduce/runner.py"

IN_RUNNING = "tests/reproduce/test_running.py::test_"
IN_PROCESSES = "tests/reproduce/test_processes.py::test_"
IN_SOURCES = "tests/reproduce/test_method_sources.py::test_"
IN_PAGES = "tests/reproduce/test_pages.py::test_"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "the best round is the number of a table",
        (
            (
                STORE,
                'return float(results["test_accuracy"]["final"])',
                'return float(results["test_accuracy"]["best"])',
            ),
        ),
        (IN_RUNNING + "the_number_is_that_of_the_last_round_and_not_the_best",),
    ),
    Fault(
        "an entry publishes the hash of a private run's split",
        (
            (
                STORE,
                '"split_hash": results["split_hash"],',
                '"split_hash": json.loads((folder / "split.json").read_text())["hash"],',
            ),
        ),
        (IN_RUNNING + "an_entry_of_a_private_run_contains_no_hash_of_its_split",),
    ),
    Fault(
        "a dry run of a comparison shows the hashes of private splits",
        (
            (
                "privssl/compare/runner.py",
                "WITHHELD if run.config.privacy else run.split[:12]",
                "run.split[:12]",
            ),
        ),
        ("tests/compare/test_compare.py::test_a_dry_run_prints_no_hash_of_a_private_split",),
    ),
    Fault(
        "a comparison keeps quiet of configs that use private rows without protection",
        (("privssl/compare/table.py", "    lines += _note_unprotected_configs(rows)\n", ""),),
        (
            "tests/compare/test_compare.py::test_a_note_names_a_config_that_uses_private_"
            "rows_without_a_guarantee",
        ),
    ),
    Fault(
        "a comparison keeps quiet of rows that have no noise in the split of another seed",
        (("privssl/compare/table.py", "    lines += _note_unprotected_splits(rows)\n", ""),),
        (
            "tests/compare/test_private_splits.py::test_a_note_says_that_private_runs_on_"
            "several_splits_have_no_joint_bound",
        ),
    ),
    Fault(
        "a comparison keeps quiet of accounts in several folders",
        (
            (
                "privssl/compare/table.py",
                "    if len({row.accounts for row in lasting}) > 1:\n",
                "    if False:\n",
            ),
        ),
        (
            "tests/compare/test_private_splits.py::test_a_note_says_that_accounts_in_several_"
            "folders_add_up",
        ),
    ),
    Fault(
        "an old entry counts beside newer ones",
        ((STORE, "        return new or self.entries\n", "        return self.entries\n"),),
        (IN_PAGES + "an_old_entry_counts_only_if_there_is_no_newer_one",),
    ),
    Fault(
        "the hash of a method leaves out what it imports",
        (
            (
                "privssl/reproduce/method_sources.py",
                "            pending += _parse_module(path.read_bytes()).imports\n",
                "",
            ),
        ),
        (
            IN_SOURCES + "a_statement_changes_the_hash_of_the_methods_that_import_its_module"
            "[privssl/algorithms/local_ssl.py-semifl-True]",
        ),
    ),
    Fault(
        "a run whose method has changed goes on",
        (
            (
                RUNNER,
                '"stale" if note.sources != sources else _find_state(folder, config)',
                "_find_state(folder, config)",
            ),
        ),
        (IN_RUNNING + "a_run_whose_method_changes_in_between_starts_anew",),
    ),
    Fault(
        "two processes run the same cell",
        ((RUNNER, "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB"),),
        (IN_RUNNING + "two_processes_do_not_run_the_same_cell",),
    ),
    Fault(
        "a run that outlives its parent has no lock",
        ((RUNNER, "pass_fds=[lock]", "pass_fds=[]"),),
        (IN_PROCESSES + "a_run_that_outlives_its_parent_keeps_the_lock",),
    ),
    Fault(
        "a claim is answered by means alone",
        (
            (
                "privssl/reproduce/claims.py",
                "if pairs and all(a > b for a, b in pairs):",
                "if pairs and sum(a - b for a, b in pairs) > 0:",
            ),
        ),
        (IN_PAGES + "an_order_is_compared_seed_by_seed[better1-other1-holds in the mean only]",),
    ),
    Fault(
        "rows of a column with other splits are not told",
        (
            (
                "privssl/reproduce/table_page.py",
                "if _are_splits_different(*pair)",
                "if pair[0] is None",
            ),
        ),
        (IN_PAGES + "rows_of_a_column_with_other_splits_are_reported",),
    ),
    Fault(
        "an entry in bfloat16 answers a cell that asks for float32",
        (
            (
                STORE,
                "return in_float32(config) if is_float32 and config.run.precision == "
                '"bfloat16" else config',
                'return type(config)(**vars(config) | {"run": dataclasses.replace(config.run, '
                'precision=entry["config"]["run"]["precision"])})',
            ),
        ),
        (IN_RUNNING + "an_entry_in_bfloat16_does_not_count_for_a_cell_in_float32",),
    ),
    Fault(
        "an entry stays new on another split",
        (
            (
                STORE,
                "            changed += _find_changed_rows(stored, section) "
                'if name == "data" else []\n',
                "",
            ),
        ),
        (IN_RUNNING + "cells_with_other_rows_are_other_runs_and_make_entries_old",),
    ),
    Fault(
        "a method's code stays new although it reads another variable",
        (
            (
                "privssl/reproduce/canonical_code.py",
                "inner if place else names",
                "inner",
            ),
        ),
        (
            "tests/reproduce/test_canonical_code.py::"
            "test_other_code_differs_and_names_that_others_may_use_count",
        ),
    ),
    Fault(
        "a comparison adds seeds on other rows",
        (
            (
                "privssl/compare/plan.py",
                "    if seeds and first.config.data.test is None:",
                "    if False:",
            ),
        ),
        ("tests/compare/test_compare.py::test_a_further_seed_with_changed_data_is_refused",),
    ),
)
