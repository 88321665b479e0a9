"""Mistakes in what a run keeps: journals, registry, checkpoints, and how a run goes on."""

from tests.planted_faults.fault import Fault

JOURNAL = "accounting/journal.py"
READER = "accounting/journal_reader.py"
LEDGER = "accounting/ledger.py"
REGISTRY = "accounting/row_registry.py"
CHECKPOINT = "privssl/runs/checkpoint.py"
RESUME = "privssl/runs/resume.py"
LOOP = "privssl/runs/round_loop.py"

EVALUATION = "privssl/training/evaluation.py"

IN_METRICS = "tests/training/test_metrics.py::test_"
IN_MEANINGLESS = "tests/cli/test_meaningless_runs.py::test_"
IN_LEDGER = "tests/accounting/test_ledger.py::test_"
IN_REGISTRY = "tests/accounting/test_row_registry.py::test_"
IN_FILES = "tests/storage/test_atomic_files.py::test_"
LENGTHENING = "privssl/runs/lengthening.py"
IN_LENGTHENING = "tests/runs/test_lengthening.py::test_"
IN_CHECKPOINT = "tests/runs/test_checkpoint.py::test_"
IN_RESUME = "tests/runs/test_resume.py::test_"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a renamed run forgets the ledger of the run that it replaced",
        (
            (
                "privssl/runs/launch.py",
                "        runs_resume.check_former_ledgers(folder, prepared, snapshot)\n",
                "",
            ),
        ),
        (
            "tests/runs/test_accounts_of_a_run.py::"
            "test_a_run_that_replaced_another_is_resumed_beside_the_other_ones_ledger_only",
        ),
    ),
    Fault(
        "a run goes on with another file of initial weights, which its card then names",
        (("privssl/runs/resume.py", "if former not in (None, current):", "if False:"),),
        (
            "tests/experiment/test_warm_start.py::"
            "test_a_run_is_not_resumed_if_its_file_of_initial_weights_has_changed",
        ),
    ),
    Fault(
        "a picture of a private run counts rows by class",
        ((LOOP, "self._trackers and self._prepared.plan is None and (", "self._trackers and ("),),
        (
            "tests/privacy/test_private_fedssl.py::"
            "test_a_private_run_writes_no_metric_and_no_pixel_of_labelled_rows",
        ),
    ),
    Fault(
        "a former run goes before the new one can begin",
        (
            (
                "privssl/runs/run_dir.py",
                "            if entries <= NOT_BEGUN:\n",
                "            if True:\n",
            ),
        ),
        (
            "tests/cli/test_train_command.py::test_the_replaced_run_is_restored_with_its_"
            "ledger_if_the_new_run_cannot_start",
        ),
    ),
    Fault(
        "the replaced run goes with its ledger",
        (
            (
                "privssl/runs/run_dir.py",
                "            ledger.rename(target)\n",
                "            target.mkdir()\n",
            ),
        ),
        (
            "tests/cli/test_train_command.py::test_the_ledger_of_a_replaced_run_is_kept_"
            "beside_the_new_run",
        ),
    ),
    # Paying ---------------------------------------------------------------------------------------
    Fault(
        "a visit is charged after its rows were read",
        (
            (
                LEDGER,
                "        self._file.refuse_damage()\n        try:\n",
                "        self._file.refuse_damage()\n        yield\n        try:\n",
            ),
            (LEDGER, "        yield  # an exception", "        # an exception"),
        ),
        (IN_LEDGER + "the_charge_is_on_disk_before_the_block_is_entered",),
        False,
    ),
    Fault(
        "a visit is not charged",
        ((LEDGER, "            self._journal.charge(event)\n", "            pass\n"),),
        (IN_LEDGER + "an_account_pays_for_exactly_the_visits_that_fit_and_refuses_the_next",),
        False,
    ),
    Fault(
        "two agents may hold one row",
        (
            (
                "privssl/experiment/prepare.py",
                "            refuse_shared_rows(labelled_agents, federated_data)\n",
                "            pass\n",
            ),
        ),
        (
            "tests/runs/test_shared_accounts.py::test_a_private_run_refuses_rows_that_two_"
            "agents_share",
        ),
        False,
    ),
    # The journal ---------------------------------------------------------------------------------
    Fault(
        "no line names the one before it",
        (
            (
                JOURNAL,
                '"seq": self.seq + 1, "prev": self.head',
                '"seq": self.seq + 1, "prev": FIRST_PREV',
            ),
        ),
        (IN_LEDGER + "every_line_contains_the_hash_of_the_previous_line",),
    ),
    Fault(
        "the chain is not looked at",
        ((READER, 'record.pop("prev", None) != journal.head', 'record.pop("prev", None) is None'),),
        (IN_LEDGER + "a_tampered_journal_is_refused_with_its_line_number",),
    ),
    Fault(
        "a ledger's own sum is believed",
        ((READER, "if not any(abs(recorded - e)", "if not any(0 * abs(recorded - e)"),),
        (IN_LEDGER + "a_tampered_journal_with_a_rebuilt_hash_chain_is_refused_by_its_content",),
    ),
    Fault(
        "two processes share a lock",
        ((JOURNAL, "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB"),),
        (IN_LEDGER + "two_accounts_of_one_agent_cannot_be_open_in_one_process",),
    ),
    Fault(
        "a journal that goes on is not locked itself",
        (
            (
                JOURNAL,
                "        self._lock_exclusively(self._file)\n\n    def extend",
                "\n    def extend",
            ),
        ),
        (IN_LEDGER + "removing_the_lock_file_admits_no_second_writer",),
    ),
    Fault(
        "a torn line costs nothing",
        (
            (
                READER,
                "        journal.torn_tail = True\n        journal.charge(journal.plan.event)\n",
                "        journal.torn_tail = True\n",
            ),
        ),
        (IN_LEDGER + "a_torn_last_line_stays_charged_as_a_whole_visit",),
    ),
    Fault(
        "a mended torn line costs nothing",
        (
            (
                READER,
                'only_keys(record, set(), "torn")\n            journal.charge(journal.plan.event)',
                'only_keys(record, set(), "torn")',
            ),
        ),
        (IN_LEDGER + "a_torn_last_line_stays_charged_as_a_whole_visit",),
    ),
    Fault(
        "a charge is not forced to the disk",
        ((JOURNAL, "            os.fsync(self._file)\n", ""),),
        (IN_FILES + "a_charge_is_durable_before_a_row_can_be_read",),
    ),
    Fault(
        "a journal that somebody changed goes on",
        (
            (
                JOURNAL,
                "if damage := self.damage():",
                "if (damage := self.damage()) and not self._file:",
            ),
        ),
        (IN_LEDGER + "a_journal_that_changed_on_disk_pays_for_nothing",),
    ),
    Fault(
        "after damage the smaller sum is claimed",
        ((LEDGER, "journal.epsilon > self.spent()", "journal.epsilon < self.spent()"),),
        (
            "tests/runs/test_journal_damage.py::test_charges_that_only_the_damaged_file_"
            "records_count_as_well",
        ),
    ),
    Fault(
        "a journal may be older than the checkpoint",
        ((LEDGER, "if journal.seq < minimum_seq:", "if journal.seq < 0:"),),
        (IN_LEDGER + "a_journal_older_than_the_checkpoint_is_refused",),
    ),
    Fault(
        "a journal that was cut and written on goes on",
        (
            (
                LEDGER,
                "if minimum_head and journal",
                "if minimum_head and not journal.plans and journal",
            ),
        ),
        (
            IN_LEDGER
            + "a_journal_that_was_cut_and_continued_is_refused_by_the_hash_in_the_checkpoint",
        ),
    ),
    # The registry of rows ------------------------------------------------------------------------
    Fault(
        "rows of agents of other runs may be missing from the registry",
        ((REGISTRY, "            _refuse_lost_rows(folder, registered)\n", ""),),
        (IN_REGISTRY + "no_row_is_claimed_while_the_rows_of_another_agents_account_are_missing",),
    ),
    Fault(
        "one row has two accounts",
        ((REGISTRY, "            _refuse_overlap(folder, merged)\n", ""),),
        (IN_REGISTRY + "one_row_under_two_ids_is_refused_over_two_claims_and_nothing_is_written",),
    ),
    Fault(
        "a row of an account is used without protection",
        ((REGISTRY, "            _refuse_unprotected(folder, merged, all_unprotected)\n", ""),),
        (IN_REGISTRY + "a_row_of_an_account_cannot_be_used_without_protection_later",),
    ),
    Fault(
        "fingerprints need no key",
        ((REGISTRY, "hmac.digest(key, row, hashlib.sha256)", "hashlib.sha256(row).digest()"),),
        (IN_REGISTRY + "a_fingerprint_cannot_be_tested_without_the_key",),
    ),
    # Checkpoints ---------------------------------------------------------------------------------
    Fault(
        "a checkpoint takes its name before it is on the disk",
        ((CHECKPOINT, "            sync_directory(temporary)\n", ""),),
        (IN_FILES + "a_snapshot_is_renamed_only_after_its_content_is_durable",),
    ),
    Fault(
        "a damaged tensor file is read",
        ((CHECKPOINT, ' or tensor_files.sha256_of(path) != entry["sha256"]', ""),),
        (IN_CHECKPOINT + "a_damaged_snapshot_is_skipped_for_the_previous_one",),
    ),
    Fault(
        "a checkpoint of another config is taken",
        (
            (
                CHECKPOINT,
                "not in (expected_digest, digest_with_rounds(snapshot.round))",
                "in ('',)",
            ),
        ),
        (IN_CHECKPOINT + "another_config_is_refused",),
    ),
    Fault(
        "a private run gets more rounds",
        ((LENGTHENING, "if config.privacy is not None:", "if False:"),),
        (IN_LENGTHENING + "private_runs_and_scheduled_algorithms_cannot_be_lengthened",),
    ),
    Fault(
        "checkpoints remember no ledger",
        (
            (
                LOOP,
                "records[accounts.LEDGER_SEQ + agent.id] = agent.account.seq",
                "records[accounts.LEDGER_SEQ + agent.id] = 0",
            ),
            (
                LOOP,
                "records[accounts.LEDGER_HEAD + agent.id] = agent.account.head",
                'records[accounts.LEDGER_HEAD + agent.id] = ""',
            ),
        ),
        (
            "tests/runs/test_accounts_of_a_run.py::test_a_new_checkpoint_with_an_old_ledger_"
            "is_refused_before_any_row_is_read",
        ),
    ),
    Fault(
        "curves are kept after the checkpoint",
        (
            (
                LOOP,
                "            for tracker in self._trackers:\n"
                "                tracker.keep()\n"
                "        finally:",
                "            pass\n        finally:",
            ),
        ),
        (IN_FILES + "metrics_csv_is_durable_before_the_checkpoint_of_its_rounds",),
    ),
    # A run that goes on --------------------------------------------------------------------------
    Fault(
        "agents forget in an interruption",
        ((LOOP, "self._engine.restore(snapshot.memories)", "self._engine.restore({})"),),
        (
            IN_RESUME + "a_run_interrupted_in_a_round_exits_with_130_and_resumes_to_the_same_"
            "results",
        ),
    ),
    Fault(
        "a run continues with other rows",
        (
            (
                RESUME,
                "if former_hash not in (None, manifest.hash):",
                "if former_hash not in (None, manifest.hash, checkpoint_hash):",
            ),
        ),
        (IN_RESUME + "resume_refuses_changed_data",),
    ),
    Fault(
        "a private run continues without its split",
        (
            (
                RESUME,
                "if prepared.plan is not None:  #",
                "if prepared.plan is None and checkpoint_hash:  #",
            ),
        ),
        (
            IN_RESUME + "resume_rewrites_a_lost_split_of_a_plain_run_and_refuses_that_of_a_"
            "private_run",
        ),
    ),
    Fault(
        "a run continues with another config",
        ((RESUME, "    if differences:\n", "    if len(differences) > 99:\n"),),
        (IN_RESUME + "resume_refuses_a_config_that_would_change_results_and_names_the_key",),
    ),
    Fault(
        "a resumed run begins its visits' ids anew",
        (("privssl/core/task.py", 'f"{self.visit_key}@{self.session_id}"', "self.visit_key"),),
        (
            "tests/engines/test_local_engine.py::test_a_visit_repeated_by_another_engine_has_"
            "another_charge_id",
        ),
    ),
    # Results --------------------------------------------------------------------------------------
    Fault(
        "outputs that are no numbers count as class 0",
        ((EVALUATION, "np.where(finite, predicted, outputs)", "predicted"),),
        (IN_METRICS + "rows_with_non_finite_outputs_are_counted_and_wrong",),
    ),
    Fault(
        "a class without rows lowers macro F1",
        ((EVALUATION, "        present = actual > 0\n", "        present = actual >= 0\n"),),
        (IN_METRICS + "metrics_equal_those_of_scikit_learn",),
    ),
    Fault(
        "a resumed run forgets the warnings of its rounds",
        ((LOOP, "*json.loads(progress.warnings), ", ""),),
        (IN_MEANINGLESS + "warnings_of_rounds_are_kept_across_an_interruption",),
    ),
    Fault(
        "an agent that sends back what it got has worked",
        (
            (
                "privssl/core/federation.py",
                "    return not pairs or any(",
                "    return True or any(",
            ),
        ),
        (IN_MEANINGLESS + "an_agent_counts_as_trained_if_it_sends_other_tensors_than_it_received",),
    ),
    Fault(
        "a private run tells that all its labels are of one class",
        (
            (
                "privssl/experiment/prepare.py",
                "    if config.privacy is not None:\n        return\n    parts =",
                "    parts =",
            ),
        ),
        (IN_MEANINGLESS + "useless_training_rows_give_a_warning_unless_the_run_is_private",),
    ),
    Fault(
        "new rows go through whatever weights an encoder has",
        (
            (
                "privssl/data/datasets.py",
                "    if encoder.checksum != checksum:\n",
                '    if checksum == "":\n',
            ),
        ),
        (
            "tests/api/test_predict_encoded.py::test_a_missing_or_changed_encoder_raises_one_"
            "clear_error",
        ),
    ),
    Fault(
        "new rows of a table are scaled in the order of their file",
        (
            (
                "privssl/api/new_rows.py",
                "numbers_of(part, self.columns), np.array(part.labels)",
                "numbers_of(part, dict(sorted(self.columns.items()))), np.array(part.labels)",
            ),
        ),
        ("tests/api/test_predict_encoded.py::test_predictions_have_the_runs_test_accuracy",),
    ),
    Fault(
        "p values of several tests are those of one",
        (
            (
                "privssl/compare/paired.py",
                "min(1.0, (len(order) - rank) * p_values[index])",
                "min(1.0, p_values[index])",
            ),
        ),
        ("tests/compare/test_vary.py::test_corrected_p_values_control_the_family_wise_error_rate",),
    ),
)
