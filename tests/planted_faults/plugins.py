"""Mistakes with code from outside of privssl: who may have it imported, and what it may do."""

from tests.planted_faults.fault import Fault

IN_PLUGINS = "tests/api/test_plugins.py::test_"
IN_CHECK = "tests/testing/test_check_algorithm.py::test_"

IN_CENSUS = "tests/privacy/test_label_histogram.py::test_"
IN_STEPS = "tests/core/test_step_runner.py::test_"
IN_ROWS = "tests/privacy/test_independence.py::test_"
IN_ENCODERS = "tests/rows/test_encoders.py::test_"
IN_MISTAKES = "tests/api/test_own_method_mistakes.py::test_"
RUNNER = "privssl/core/step_runner.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a step writes into its agent's rows",
        ((RUNNER, "if number != row_versions[name]", "if number < 0"),),
        (IN_MISTAKES + "a_mistake_in_a_round_is_reported_with_its_file_and_line[RowsChanged]",),
    ),
    Fault(
        "NumPy's numbers of a method from outside follow from what ran before",
        (("privssl/runtime/randomness.py", "    np.random.seed(seed)\n", ""),),
        (IN_MISTAKES + "global_random_generators_are_seeded_for_a_users_algorithm",),
    ),
    Fault(
        "a run ends with a state that no checkpoint gives back",
        (
            (
                "privssl/runs/checked_algorithm.py",
                "if type(state) is not expected:",
                "if state is None:",
            ),
        ),
        (IN_MISTAKES + "a_mistake_in_a_round_is_reported_with_its_file_and_line[OtherState]",),
    ),
    Fault(
        "a site imports whatever the experiment names",
        (
            (
                "privssl/site/startup.py",
                "    with plugins.imports_allowed(allowed, advice):\n",
                "    with plugins.imports_allowed(None, advice):\n",
            ),
        ),
        (
            "tests/site/test_site.py::test_a_site_imports_only_the_plug_ins_that_its_site_file_"
            "allows",
        ),
    ),
    Fault(
        "what reads a run folder imports what it names",
        (("privssl/runtime/plugins.py", "    if not is_allowed(name):\n", "    if False:\n"),),
        (
            IN_PLUGINS + "no_plug_in_is_imported_without_permission",
            IN_PLUGINS + "the_audit_of_a_users_algorithm_imports_it_only_if_the_caller_names_it",
        ),
    ),
    Fault(
        "a permission to import outlives its block",
        (("privssl/runtime/plugins.py", "        _permission.reset(token)\n", "        pass\n"),),
        (IN_PLUGINS + "no_plug_in_is_imported_without_permission",),
    ),
    Fault(
        "a method of one's own says what a visit costs",
        (
            (
                "privssl/algorithms/__init__.py",
                "candidate.make_plan.__func__ is not Algorithm.make_plan.__func__",
                "candidate.make_plan.__func__ is None",
            ),
        ),
        (IN_CHECK + "wrong_arguments_are_refused_before_anything_is_simulated[OwnPlan]",),
    ),
    Fault(
        "the card is silent about a method of one's own",
        (
            (
                "privssl/privacy/privacy_card.py",
                "if algorithm in ALGORITHMS else",
                "if algorithm else",
            ),
        ),
        (IN_PLUGINS + "the_audit_of_a_users_algorithm_imports_it_only_if_the_caller_names_it",),
    ),
    Fault(
        "an audit believes a card that names another algorithm",
        (
            (
                "privssl/audit/cross_checks.py",
                'if card["algorithm"] != config.algorithm.name:',
                "if not config.algorithm.name:",
            ),
        ),
        (IN_PLUGINS + "the_audit_finds_a_card_that_hides_the_users_algorithm",),
    ),
    Fault(
        "a partition of one's own gives a row to two agents",
        (("privssl/data/partition.py", " and np.bincount(ids).max() == 1", ""),),
        (IN_PLUGINS + "a_mistake_in_a_plug_in_raises_one_clear_error[data.partition-Twice]",),
    ),
    Fault(
        "a census of a method of one's own releases whatever it is given",
        (
            (
                "privssl/privacy/label_histogram.py",
                "        counts = exact_counts(counts, self.rows_per_person)\n",
                "",
            ),
        ),
        (IN_CENSUS + "a_census_releases_one_count_per_row_as_it_was_assigned",),
    ),
    Fault(
        "a method of one's own chooses among several tables of counts",
        (
            (
                "privssl/core/private_release.py",
                "if len(made.counted) != 1:",
                "if not any(one is seen for one, _ in made.counted):",
            ),
            (
                "privssl/core/private_release.py",
                "    [(recorded, exact, most)] = made.counted\n",
                "    recorded, exact, most = next(one for one in made.counted if one[0] is seen)\n",
            ),
        ),
        (IN_CENSUS + "a_census_releases_one_count_per_row_as_it_was_assigned",),
    ),
    Fault(
        "a cluster of one's own moves with the rows before",
        (
            (
                "privssl/privacy/label_histogram.py",
                "if outside and cluster_ids != ",
                "if outside is None and cluster_ids != ",
            ),
        ),
        (IN_CENSUS + "a_census_releases_one_count_per_row_as_it_was_assigned",),
    ),
    Fault(
        "a cluster or view of one's own is trusted as the function of privssl that it is given to",
        (
            (
                "privssl/privacy/own_code.py",
                "    return is_ours([getattr",
                "    return True or is_ours([getattr",
            ),
        ),
        (
            IN_CENSUS + "a_census_releases_one_count_per_row_as_it_was_assigned",
            IN_ROWS + "a_view_of_ones_own_config_that_keeps_rows_after_a_warm_up_is_refused",
        ),
    ),
    Fault(
        "a charged step sees exact counts",
        (
            (
                "privssl/core/private_release.py",
                "seen = torch.zeros_like(counts) if made.sealed else counts",
                "seen, made.sealed = counts, False",
            ),
        ),
        (IN_CENSUS + "a_charged_step_sees_no_exact_count",),
    ),
    Fault(
        "a step of one's own sends another table if a cluster fails",
        ((RUNNER, '("a private mechanism failed in it", made.failed)', '("", False)'),),
        (
            IN_CENSUS + "a_census_releases_one_count_per_row_as_it_was_assigned",
            IN_STEPS + "a_step_that_continues_after_an_error_on_its_rows_is_refused",
        ),
    ),
    Fault(
        "a charged step decides by rows whether it sends anything",
        ((RUNNER, "if name not in sent and plan.scope", "if name in () and plan.scope"),),
        (IN_STEPS + "a_visit_that_releases_more_than_its_plan_names_is_refused_and_stays_charged",),
    ),
    Fault(
        "a charge that is not on disk opens the rows",
        (("accounting/ledger.py", "return len(self._journal.visits)", "return self.visits()"),),
        (IN_STEPS + "rows_are_closed_to_a_step_that_ignores_a_failed_charge",),
    ),
    Fault(
        "a resumed run begins a registry beside accounts that were moved",
        (
            (
                "privssl/runs/accounts.py",
                "            if LEDGER_SEQ + name in extra:",
                "            if name == extra:",
            ),
        ),
        (
            "tests/runs/test_shared_accounts.py::test_a_resume_without_its_accounts_begins_no_new_registry",
        ),
    ),
    Fault(
        "an error of a charged step has its text",
        ((RUNNER, "        if not is_paid() or {name", "        if is_paid() or {name"),),
        (IN_STEPS + "an_error_of_a_charged_step_from_outside_shows_no_row",),
    ),
    Fault(
        "a private number of rows is read beside private training",
        ((RUNNER, "not (self._counted or mechanism_is_reading())", "not self._rows"),),
        (IN_STEPS + "only_private_training_may_read_a_private_row_count",),
    ),
    Fault(
        "what a network of one's own keeps of a visit's rows is not looked for",
        (
            (
                "privssl/privacy/local_dp_sgd.py",
                "            probe.check_unchanged()\n",
                "            pass\n",
            ),
        ),
        (IN_ROWS + "a_network_or_draw_that_starts_to_keep_rows_after_a_warm_up_is_refused",),
    ),
    Fault(
        "an error on labelled rows has its text",
        (
            (
                "privssl/core/private_release.py",
                "if isinstance(error, PrivacyError | AccountingError):",
                "if isinstance(error, Exception):",
            ),
            # the second line of defence, which has a fault of its own
            (
                "privssl/core/step_runner.py",
                "        if not is_paid() or {name",
                "        if True or {name",
            ),
        ),
        (
            IN_CENSUS + "an_error_in_a_cluster_function_shows_no_row_and_no_label",
            IN_ROWS + "an_error_in_a_draw_on_labelled_rows_shows_no_label",
        ),
    ),
    Fault(
        "an encoder of one's own is tried on few rows alone",
        (
            (
                "privssl/encoders/frozen.py",
                "is_own = is_own_encoder(encoder.name)",
                "is_own = is_own_encoder('')",
            ),
        ),
        (IN_ENCODERS + "an_encoder_from_a_plug_in_that_keeps_rows_after_a_warm_up_is_refused",),
    ),
    Fault(
        "an encoder of one's own is not tried",
        (
            (
                "privssl/data/datasets.py",
                "    refuse_state(encoder, ",
                "    print(encoder.name, ",
            ),
        ),
        (IN_PLUGINS + "a_mistake_in_a_plug_in_raises_one_clear_error[data.encoder-fitted]",),
    ),
    Fault(
        "an encoder of one's own keeps something of rows",
        (
            (
                "privssl/encoders/own_encoders.py",
                "if not all(map(torch.equal, first, reversed(second))):",
                "if max((a - b).max() for a, b in zip(first, second[::-1], strict=True)) > 0.01:",
            ),
        ),
        (
            IN_PLUGINS
            + "a_mistake_in_a_plug_in_raises_one_clear_error[data.encoder-drifting_encoder]",
        ),
    ),
    Fault(
        "a folder of a text encoder chooses code",
        (
            (
                "privssl/encoders/text_encoders.py",
                "    if keys or (path.parent",
                "    if keys is None or (path.parent",
            ),
        ),
        (
            "tests/rows/test_encoders.py::"
            "test_a_model_folder_cannot_select_code_for_transformers_to_load",
        ),
    ),
    Fault(
        "a guess of private labels is measured",
        (("privssl/data/__init__.py", "        if not private:\n", "        if True:\n"),),
        (
            "tests/data/test_unlabelled_rows.py::"
            "test_in_a_private_run_no_pseudo_label_is_compared_with_a_label_that_an_agent_holds",
        ),
    ),
    Fault(
        "rows are encoded side by side",
        (
            (
                "privssl/encoders/frozen.py",
                "features = network(rows[index : index + 1])",
                "features = network(rows)[index : index + 1]",
            ),
        ),
        ("tests/rows/test_encoders.py::test_the_features_of_a_row_do_not_depend_on_other_rows",),
    ),
    Fault(
        "private labels alone say how many outputs there are",
        (
            (
                "privssl/experiment/row_checks.py",
                "if numbered and not is_table and not counts[-1]:",
                "if numbered and not is_table and not counts:",
            ),
        ),
        (
            "tests/api/test_dataset.py::test_a_private_run_refuses_a_class_count_inferred_"
            "from_labels",
        ),
    ),
    Fault(
        "labels decide the order of rows in a private run",
        (
            (
                "privssl/experiment/row_checks.py",
                'and "order" in manifest.settings',
                'and "orders" in manifest.settings',
            ),
        ),
        (
            "tests/data/test_drawn_test_rows.py::"
            "test_a_private_run_refuses_an_order_that_depends_on_labels",
        ),
    ),
    Fault(
        "the words of a card are printed as a program",
        (
            (
                "privssl/audit/__main__.py",
                'print("#", " ".join(report.claim.split()))',
                'print("#", report.claim)',
            ),
        ),
        (
            "tests/audit/test_canary_attack.py::"
            "test_texts_of_a_card_are_printed_as_comments_and_never_as_code",
        ),
    ),
    Fault(
        "a class name writes the privacy section of a model card",
        (
            (
                "privssl/runs/model_card.py",
                '        return " ".join(tree.split())\n',
                "        return tree\n",
            ),
        ),
        (
            "tests/runs/test_model_card.py::test_names_cannot_add_sections_or_lines_to_the_"
            "model_card",
        ),
    ),
    Fault(
        "a run goes on with another version of a plug-in",
        (("privssl/runs/resume.py", "if former[field] != plugin[field]:", "if not former:"),),
        (
            "tests/examples/test_example_package.py::"
            "test_a_run_is_not_resumed_with_another_version_of_a_plug_in",
        ),
    ),
    Fault(
        "a tracker gets pictures of a private run",
        (
            (
                "privssl/reporting/outside_trackers.py",
                'if not self._private and hasattr(self._tracker, "images"):',
                'if hasattr(self._tracker, "images"):',
            ),
        ),
        (
            "tests/reporting/test_outside_trackers.py::"
            "test_a_tracker_of_a_private_run_receives_neither_pictures_nor_times[True]",
        ),
    ),
    Fault(
        "bounds of a private table come from its rows",
        (
            (
                "privssl/experiment/row_checks.py",
                'if dataset.table == "measured":',
                'if dataset.table == "never":',
            ),
        ),
        (
            "tests/api/test_dataset.py::test_a_private_run_refuses_bounds_from_its_rows_and_"
            "accepts_declared_ones",
        ),
    ),
    Fault(
        "check_algorithm does not look at a resumed run",
        (
            (
                "privssl/testing/promises.py",
                "    if not same_bits(trial.whole.state, resumed.state):\n",
                "    if resumed is None:\n",
            ),
        ),
        (
            IN_CHECK + "an_algorithm_that_breaks_a_promise_fails_with_the_name_of_the_"
            "promise[Resume]",
        ),
    ),
)
