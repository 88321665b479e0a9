"""Mistakes in guarantees for persons: in what groups, draws, counts, splits and claims them."""

from tests.planted_faults.fault import Fault

ROWS = "privssl/privacy/local_dp_sgd.py"
IN_PRIVACY = "tests/privacy/test_persons.py::test_"
IN_DATA = "tests/data/test_persons.py::test_"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "private training forgets whose rows are whose",
        ((ROWS, "LabelledRows(rows.x, rows.y, rows.ids, persons=rows.persons)",
          "LabelledRows(rows.x, rows.y, rows.ids)"),),
        (
            IN_PRIVACY + "all_rows_of_a_person_move_a_sum_by_at_most_one_clip_norm[1]",
            IN_PRIVACY + "a_visit_samples_persons_and_not_rows",
        ),
    ),
    Fault(
        "views of a person are of the first person's rows, too",
        (
            (
                ROWS,
                "return torch.tensor([number]) if self._groups is None else self._groups[number]",
                "return torch.cat([self._groups[0], self._groups[number]])",
            ),
        ),
        (IN_PRIVACY + "all_rows_of_a_person_move_a_sum_by_at_most_one_clip_norm[4]",),
    ),
    Fault(
        "with private counts a person's draws depend on its number",
        ((ROWS, "name = number if self._counts_public else", "name = number if True else"),),
        (IN_PRIVACY + "with_private_counts_a_person_more_moves_a_sum_by_at_most_one_clip_norm[1]",),
    ),
    Fault(
        "a step takes the first rows of a person only",
        (("privssl/privacy/persons.py",
          "group[torch.randperm(len(group), generator=rng)]", "group[:count]"),),
        (IN_PRIVACY + "over_steps_a_person_is_trained_on_all_its_rows",),
    ),
    Fault(
        "a census counts all rows of a person",
        (
            (
                "privssl/core/private_release.py",
                "    if most > per_person:\n",
                "    if False:\n",
            ),
        ),
        (IN_PRIVACY + "a_census_refuses_more_rows_of_a_person_than_its_noise_is_for",),
    ),
    Fault(
        "a census of several rows of a person has noise for one",
        (
            (
                "privssl/privacy/label_histogram.py",
                "exact_epsilon(settings.epsilon / k)",
                "exact_epsilon(settings.epsilon)",
            ),
        ),
        (IN_PRIVACY + "all_rows_of_a_person_cost_a_census_at_most_its_epsilon[2]",),
    ),
    Fault(
        "a step runs under an account of another unit",
        (("privssl/core/step_runner.py", "    _check_unit(agent)\n", ""),),
        (
            IN_PRIVACY
            + "no_step_runs_under_an_account_of_another_unit_than_its_rows[person]",
        ),
    ),
    Fault(
        "a step reads whose rows are whose",
        (("privssl/core/step_runner.py", '("x", "y", "ids", "persons")', '("x", "y", "ids")'),),
        (IN_PRIVACY + "only_a_private_mechanism_reads_whose_rows_are_whose",),
    ),
    Fault(
        "persons are promised by a scope that is not sound",
        (("accounting/account_plan.py", 'if self.unit == "person" and self.scope != "sound":',
          'if self.unit == "person" and self.scope == "":'),),
        (IN_PRIVACY + "a_plan_for_persons_is_sound_or_refused",),
    ),
    Fault(
        "a run for persons has rows that name none",
        (("privssl/experiment/account_rows.py", 'if unit == "person" and not named:',
          'if unit == "nobody" and not named:'),),
        (IN_PRIVACY + "a_run_is_refused_where_unit_and_rows_differ[None-person-privacy.unit is "
         "person, and the rows name no persons]",),
    ),
    Fault(
        "a person has rows at two agents",
        (("privssl/data/persons.py", "        others.append((name, here))\n", ""),),
        (IN_PRIVACY + "a_person_with_rows_at_two_places_is_refused[s1]",),
    ),
    Fault(
        "a person with labelled rows has unlabelled ones elsewhere",
        (("privssl/data/persons.py", "            if here & there:\n",
          '            if here & there and "unlabelled" not in other:\n'),),
        (IN_PRIVACY + "a_person_with_rows_at_two_places_is_refused[q0]",),
    ),
    Fault(
        "a lasting account knows rows and no persons",
        (("privssl/data/canonical.py", "dict.fromkeys(rows.persons or ())", "()"),),
        (IN_PRIVACY + "a_lasting_account_refuses_a_person_that_another_one_has",),
    ),
    Fault(
        "a split divides the rows of a person",
        (("privssl/data/split.py",
          "persons = dataset.persons and PersonRows(dataset.persons, row_labels)",
          "persons = dataset.persons[:0] and PersonRows(dataset.persons, row_labels)"),),
        (IN_DATA + "a_split_has_every_person_in_one_place_with_all_its_rows[0-iid]",),
    ),
    Fault(
        "a replayed split may be of other persons",
        (
            (
                "privssl/data/split_manifest.py",
                "        if self.persons != persons_checksum(dataset):\n",
                "        if False:\n",
            ),
        ),
        (IN_DATA + "a_replayed_split_counts_persons",),
    ),
    Fault(
        "weights of a run for records are taken for those of one for persons",
        (
            (
                "privssl/experiment/warm_start.py",
                'return guarantee is not None and guarantee.get("unit", "record") == unit',
                "return guarantee is not None",
            ),
        ),
        (
            "tests/experiment/test_warm_start.py::"
            "test_weights_of_a_private_run_of_another_unit_count_as_unprotected",
        ),
    ),
    Fault(
        "weights may have seen other rows of a labelled person",
        (
            (
                "privssl/experiment/warm_start.py",
                '    if privacy.unit == "person":  # and',
                '    if privacy.unit == "":  # and',
            ),
        ),
        (IN_PRIVACY + "weights_that_saw_an_unused_row_of_a_labelled_person_are_refused",),
    ),
    Fault(
        "a site's split gives rows of its persons to others",
        (
            (
                "privssl/site/startup.py",
                "            _refuse_shared_persons(site, dataset, split, labelled_ids)\n",
                "            pass\n",
            ),
        ),
        (
            "tests/site/test_own_rows.py::"
            "test_a_site_refuses_a_split_that_gives_rows_of_its_persons_to_others",
        ),
    ),
    Fault(
        "the audit takes a ledger for records for one for persons",
        (("privssl/audit/cross_checks.py", '("the unit", privacy.unit, plan.unit),', ""),),
        (IN_PRIVACY + "a_run_for_persons_says_so_and_its_audit_is_consistent[public]",),
    ),
)  # fmt: skip
