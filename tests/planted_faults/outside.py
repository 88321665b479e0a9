"""Mistakes with what comes from outside: networks, weights, run folders, and rows in memory."""

from tests.planted_faults.fault import Fault

WARM = "privssl/experiment/warm_start.py"

IN_WARM = "tests/experiment/test_warm_start.py::test_"
IN_NETWORKS = "tests/api/test_own_networks.py::test_"
IN_SITE_ROWS = "tests/site/test_own_rows.py::test_"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "weights in a run's folder without a split count as public",
        ((WARM, "return config.is_file() and any(", "return not config and any("),),
        (IN_WARM + "a_private_run_refuses_weights_in_a_run_folder_that_lost_its_split",),
    ),
    Fault(
        "a convolution stays that oneDNN computes wrongly",
        (("privssl/models/__init__.py", "        avoid_overrun(module)\n", ""),),
        (
            "tests/ops/test_pointwise_conv.py::test_no_narrow_classifier_keeps_a_strided_1x1_convolution"
            "[resnet18]",
        ),
    ),
    # The Python interface -------------------------------------------------------------------------
    Fault(
        "a run folder chooses code that predicting imports",
        (
            (
                "privssl/api/run.py",
                "if self._model is None and is_imported(name) and name not in self._plugins:",
                "if False:",
            ),
            ("privssl/runtime/plugins.py", "    if not is_allowed(name):\n", "    if False:\n"),
        ),
        (IN_NETWORKS + "reading_a_run_folder_imports_no_code",),
    ),
    Fault(
        "a run folder chooses code that generating imports",
        (
            (
                "privssl/generation/rows.py",
                "    task = Task(len(names), shape, nn.Identity, config.run.precision)\n",
                "    from privssl.experiment.prepare import task_of\n\n"
                "    task = task_of(config, len(names), shape)\n",
            ),
        ),
        (IN_NETWORKS + "generating_rows_imports_no_network_that_the_run_folder_names",),
    ),
    Fault(
        "a private run begins with a classifier that has seen its rows",
        ((WARM, "        for run in runs_behind(new_classifier()):", "        for run in ():"),),
        tuple(
            f"{IN_WARM}a_private_run_refuses_the_classifier_of_a_run_that_used_its_rows_without_"
            f"noise[{form}]"
            for form in ("itself", "a copy", "a part", "its layer", "a function's")
        ),
    ),
    Fault(
        "a private run begins with a layer of a classifier that has seen its rows",
        (
            (
                "privssl/api/run.py",
                "        for layer in trained.modules():  #",
                "        for layer in [trained]:  #",
            ),
        ),
        (
            f"{IN_WARM}a_private_run_refuses_the_classifier_of_a_run_that_used_its_rows_without_"
            "noise[its layer]",
        ),
    ),
    Fault(
        "a classifier of a run whose folder is gone is taken in silence",
        ((WARM, "            if not (run / SPLIT).is_file():\n", "            if False:\n"),),
        (IN_WARM + "a_classifier_of_a_run_with_a_missing_folder_is_refused",),
    ),
    Fault(
        "weights of a run over sites on the same data are taken in silence",
        ((WARM, "    if _is_run_over_sites(run, former):\n", "    if False:\n"),),
        tuple(
            f"{IN_WARM}a_private_run_refuses_weights_of_a_run_over_sites_on_the_same_data[support-{how}]"
            for how in ("without", "with")
        ),
    ),
    Fault(
        "weights of a run on the same rows under another name are taken in silence",
        ((WARM, "    if not same and {", "    if not same or {"),),
        (IN_WARM + "a_private_run_warns_of_weights_of_a_run_on_its_rows_under_another_name",),
    ),
    Fault(
        "a warning counts labelled rows whose number is private",
        (
            (
                WARM,
                'counts_public = privacy.record_counts == "public"',
                "counts_public = True",
            ),
        ),
        (
            IN_WARM
            + "the_warning_about_former_weights_does_not_depend_on_a_private_row_count[private]",
        ),
    ),
    Fault(
        "options of a library's network read files",
        (("privssl/models/own_networks.py", "    _refuse_files(settings)\n", ""),),
        (IN_NETWORKS + "library_options_that_read_or_download_files_are_refused",),
    ),
    Fault(
        "a network that gives probabilities is trained",
        (("privssl/models/network_checks.py", "    if (out >= 0).all() and", "    if False and"),),
        (IN_NETWORKS + "a_network_of_one_layer_and_outputs_that_are_no_logits_are_refused",),
    ),
    Fault(
        "trackers get the folder of a text encoder",
        (("privssl/settings/names.py", "colon + Path(folder).name", "colon + folder"),),
        ("tests/experiment/test_config.py::test_the_config_for_trackers_names_no_local_folder",),
    ),
    Fault(
        "config.yaml of a private run has a hash of its rows",
        (
            (
                "privssl/api/experiment.py",
                "data.checksum if config.privacy is None else resumed",
                "data.checksum",
            ),
        ),
        (
            "tests/api/test_train.py::test_a_private_run_writes_no_hash_of_its_rows_and_"
            "resumes_only_with_them",
        ),
    ),
    Fault(
        "class names come from private labels",
        (
            (
                "privssl/experiment/prepare.py",
                "    refuse_classes_of_labels_alone(config, dataset)\n",
                "",
            ),
        ),
        (
            "tests/rows/test_csv_rows.py::"
            "test_a_class_that_only_private_labels_show_is_refused[True]",
        ),
    ),
    Fault(
        "one private image in colour gives all rows three channels",
        (
            (
                "privssl/experiment/row_checks.py",
                "    if dataset.coloured_by_train:\n",
                "    if ():\n",
            ),
        ),
        (
            "tests/data/test_image_files.py::"
            "test_a_private_run_is_refused_if_only_training_images_have_colour"
            "[coloured0-True]",
        ),
    ),
    Fault(
        "drawn test rows make classes of private rows public",
        (
            (
                "privssl/experiment/row_checks.py",
                "    if dataset.tests_drawn and (",
                "    if dataset.tests_drawn and not (",
            ),
        ),
        (
            "tests/api/test_dataset.py::test_test_rows_drawn_from_private_rows_do_not_make_"
            "classes_public",
        ),
    ),
    Fault(
        "labels of private rows decide how many test rows a class has",
        (
            (
                "privssl/api/frames.py",
                "for rows in parts if by_class else [labelled]:",
                "for rows in parts:",
            ),
        ),
        (
            "tests/api/test_dataset.py::test_with_declared_classes_no_training_label_affects_"
            "the_choice_of_test_rows[declared]",
        ),
    ),
    Fault(
        "a row of a frame has another account where other columns are declared",
        (("privssl/api/frames.py", "column_names, others=True)", "column_names)"),),
        ("tests/api/test_dataset.py::test_a_rows_record_does_not_depend_on_the_declared_columns",),
    ),
    Fault(
        "a site takes a split whose order follows from labels",
        (
            (
                "privssl/site/startup.py",
                "        refuse_order_by_labels(config, split, site.path(site.rows.split))\n",
                "",
            ),
        ),
        ("tests/site/test_site.py::test_a_site_refuses_a_split_drawn_with_rows_ordered_by_class",),
    ),
    Fault(
        "how long a site takes is in metrics.csv",
        (("privssl/runs/engine_factory.py", '"time/visit_s"', '"comm/visit_s"'),),
        (
            "tests/reporting/test_outside_trackers.py::"
            "test_site_durations_are_times_that_no_tracker_of_a_private_run_receives",
        ),
    ),
    Fault(
        "an export has paths of the machine that made it",
        (
            (
                "privssl/models/exported.py",
                '        node.meta.pop("stack_trace", None)\n',
                "        pass\n",
            ),
        ),
        ("tests/cli/test_export.py::test_an_exported_file_contains_no_path_and_no_source_code",),
    ),
    Fault(
        "features that an encoder keeps are no secret of a site",
        (
            (
                "privssl/site/settings.py",
                "        return (*paths, *caches(default_root()))\n",
                "        return paths\n",
            ),
        ),
        (
            "tests/site/test_site.py::test_the_command_warns_if_other_users_can_read_cached_"
            "encoder_features",
        ),
    ),
    Fault(
        "an audit does not look for what a claim takes as public",
        (
            (
                "privssl/audit/cross_checks.py",
                "    findings.problems += _find_public_part_differences(config, card)\n",
                "",
            ),
        ),
        (IN_NETWORKS + "the_card_states_that_network_and_initial_weights_are_assumed_public",),
    ),
    Fault(
        "a network is trusted because another has the same text",
        (
            (
                "privssl/privacy/row_bits.py",
                "    return repr(network) if own_code.has_known_layers(network) else ",
                "    return repr(network) if repr(network) else ",
            ),
        ),
        (
            "tests/privacy/test_private_counts.py::"
            "test_a_users_network_is_checked_again_after_another_with_the_same_source_text",
        ),
    ),
    Fault(
        "a dry run times the agent with the middle number of private rows",
        (
            (
                "privssl/runs/forecast.py",
                "return 0 if agent.id in under_account else _count_rows(agent)",
                "return _count_rows(agent)",
            ),
        ),
        (
            "tests/runs/test_forecast.py::test_the_choice_of_the_timed_agent_does_not_depend_"
            "on_private_row_counts",
        ),
    ),
    Fault(
        "a run folder chooses code that an audit imports",
        (("privssl/audit/canary_attack.py", "if is_imported(config.model.name):", "if False:"),),
        (IN_NETWORKS + "reading_a_run_folder_imports_no_code",),
    ),
    Fault(
        "other rows in memory are taken for those of the run",
        (
            (
                "privssl/api/experiment.py",
                'if recorded not in ("", data.checksum):',
                'if recorded == "" != data.checksum[:0]:',
            ),
        ),
        ("tests/api/test_train.py::test_resume_of_a_run_on_rows_in_memory_needs_the_rows",),
    ),
    Fault(
        "a private run takes a network that remembers rows",
        (
            (
                "privssl/privacy/independence.py",
                "    if changed or not torch.equal",
                "    if not changed and not torch.equal",
            ),
        ),
        (IN_NETWORKS + "a_private_run_refuses_layers_that_clipping_does_not_bound[Counting]",),
    ),
    Fault(
        "a private run takes a network that remembers rows for evaluation",
        (
            (
                "privssl/privacy/independence.py",
                "        if not torch.equal(network.eval()(batch), eval_output):\n",
                "        if False:\n",
            ),
        ),
        (IN_NETWORKS + "a_private_run_refuses_layers_that_clipping_does_not_bound[Centring]",),
    ),
    Fault(
        "a private step gets some of a network's parameters",
        (
            (
                "privssl/privacy/dp_sgd.py",
                "        if {id(p) for p in named_parameters} != {id(p) for p in parameters}:\n",
                "        if False:\n",
            ),
        ),
        (IN_NETWORKS + "a_private_run_refuses_layers_that_clipping_does_not_bound[Halving]",),
    ),
    Fault(
        "a site without a row does not start where the number of rows is private",
        (
            (
                "privssl/data/csv_rows.py",
                "    if not (rows or may_be_empty):\n",
                "    if not rows:\n",
            ),
        ),
        (IN_SITE_ROWS + "with_a_private_row_count_an_empty_table_is_treated_like_any_other[0]",),
    ),
    Fault(
        "one image decides whether a site with a private number of rows starts",
        (("privssl/site/startup.py", '    if config.data.name != "csv":\n', "    if False:\n"),),
        (IN_SITE_ROWS + "an_image_folder_is_refused_if_the_row_count_is_private[False]",),
    ),
    Fault(
        "weights of a run that drew other test rows begin a private run",
        ((WARM, "        yield from _find_other_data_warnings(key, run, former, split)\n", ""),),
        (
            IN_WARM + "a_private_run_refuses_weights_of_a_run_that_drew_other_test_rows_of_"
            "the_same_data[former run]",
            IN_WARM + "a_private_run_warns_of_weights_of_a_run_on_another_version_of_its_data",
        ),
    ),
    Fault(
        "frozen weights are left to a private step",
        (("privssl/models/network_checks.py", "    if frozen:\n", "    if False:\n"),),
        (IN_NETWORKS + "a_private_run_refuses_layers_that_clipping_does_not_bound[Frozen]",),
    ),
    Fault(
        "a private run begins with weights that its rows trained without noise",
        ((WARM, "if shared := len(own_rows & unprotected):", "if shared := 0:"),),
        (
            IN_WARM + "a_private_run_refuses_weights_of_a_run_that_used_its_rows_without_noise"
            "[same split]",
            IN_WARM + "rows_that_a_private_run_used_without_their_labels_are_refused_too",
        ),
    ),
    Fault(
        "over sites nobody says that the rows behind initial weights were not looked at",
        ((WARM, "if not split.agents:  # the agents are sites", "if False:"),),
        (IN_WARM + "over_sites_a_warning_says_that_rows_of_the_sites_were_not_checked[without]",),
    ),
    Fault(
        "nobody says that the epsilons of two runs on the same rows add up",
        ((WARM, "if shared or (charged and not counts_public):", "if shared := 0:"),),
        (
            IN_WARM
            + "a_private_run_warns_that_epsilons_add_up_with_those_of_the_run_of_its_weights",
        ),
    ),
    # Rows at sites --------------------------------------------------------------------------------
    Fault(
        "sites whose tables have other bounds agree",
        (
            (
                "privssl/experiment/config.py",
                '    task |= {"columns": [[name, *scale] for name, scale in columns.items()]} '
                "if columns else {}\n",
                "",
            ),
        ),
        (IN_SITE_ROWS + "sites_with_other_column_bounds_values_or_order_have_other_hashes",),
    ),
    Fault(
        "each site scales a table by its own rows",
        (
            (
                "privssl/experiment/row_checks.py",
                '    if data.name == "csv" and not (data.text or data.columns):\n',
                "    if False:\n",
            ),
        ),
        (IN_SITE_ROWS + "a_run_over_sites_refuses_a_table_without_declared_columns",),
    ),
    Fault(
        "one private image in colour decides the rows of a site",
        (
            (
                "privssl/data/image_folder.py",
                "coloured_by_train = any(header.mode in GREY for header in headers)",
                "coloured_by_train = False",
            ),
        ),
        (IN_SITE_ROWS + "a_private_site_refuses_colour_images_beside_grey_ones",),
    ),
    Fault(
        "an account goes on without the registry of its rows",
        (
            (
                "accounting/row_registry.py",
                "    if journal.exists() and not rows.exists():\n",
                "    if False:\n",
            ),
        ),
        (
            "tests/site/test_site.py::test_a_ledger_moved_without_its_row_registry_is_refused",
            "tests/runs/test_shared_accounts.py::test_an_account_without_its_row_registry_is_"
            "refused",
        ),
    ),
)
