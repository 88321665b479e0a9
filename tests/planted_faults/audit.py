"""Mistakes in the audit: what it does not look at, or believes."""

from tests.planted_faults.fault import Fault

WITNESSES = "privssl/audit/witnesses.py"
CLAIM = "privssl/audit/claim_verification.py"
CARD = "privssl/audit/card_recomputation.py"
CROSS = "privssl/audit/cross_checks.py"
ATTACK = "privssl/audit/mechanism_attack.py"

IN_TAMPERING = "tests/audit/test_audit_tampering.py::test_"
IN_SITES = "tests/site/test_run_over_sites.py::test_"
FORGETS = (
    "tests/runs/test_shared_accounts.py::test_the_audit_finds_a_card_without_the_ledger_of_a_"
    "replaced_run"
)
ANEW = "a_card_rewritten_with_other_public_facts_is_violated"
IN_CARD = "tests/audit/test_card_and_audit.py::test_"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "the ledgers of sites are not compared with config.yaml",
        (
            (
                CROSS,
                "(journal.plans[-1:] if local else journal.plans)",
                "journal.plans[: -1 * local]",
            ),
        ),
        (IN_SITES + "the_audit_finds_a_rewritten_copy_of_a_sites_ledger_in_the_run_folder",),
    ),
    Fault(
        "the ledgers of sites are not compared with what checkpoints record as charged",
        (
            (
                CROSS,
                "findings.problems += _find_unpaid_charges(agent, journal, closest, files)",
                "pass",
            ),
        ),
        (IN_SITES + "the_audit_finds_a_rewritten_copy_of_a_sites_ledger_in_the_run_folder",),
    ),
    Fault(
        "the copy of an account is not compared with the run's checkpoints",
        ((CROSS, "(agent, journal)] if files.ended else [journal]", "(agent, journal)][:1]"),),
        (
            "tests/runs/test_shared_accounts.py::test_the_audit_finds_a_ledger_copy_that_is_"
            "older_than_the_runs_checkpoints[the account is here]",
        ),
    ),
    Fault(
        "a run whose account outlives it records no ledger of a run that it replaced",
        (
            (
                "privssl/runs/accounts.py",
                "{} if config.privacy is None else",
                "{} if config.privacy is None or config.privacy.ledger else",
            ),
        ),
        (FORGETS,),
    ),
    Fault(
        "any ledger of a replaced run counts as one that goes on",
        ((CROSS, "continues = bool(head) and head in", "continues = bool(head) or head in"),),
        (
            FORGETS,
            IN_TAMPERING + "a_card_that_omits_the_ledger_of_a_replaced_run_is_violated",
        ),
    ),
    Fault(
        "the nominal epsilon of a replaced run is added to a guarantee",
        (
            (
                "privssl/privacy/former_ledgers.py",
                "{_NOTHING if ledger in nominal_ledgers else _BOTH[unit]}",
                "{_BOTH[unit]}",
            ),
        ),
        (IN_CARD + "a_nominal_epsilon_of_a_replaced_run_is_not_added_to_a_guarantee",),
    ),
    Fault(
        "an error says the hash of a split",
        (
            (
                "privssl/data/split_manifest.py",
                "another hash than it ",
                "{manifest.hash}, another hash than it ",
            ),
        ),
        (IN_TAMPERING + "an_audit_prints_no_hash_of_an_edited_split",),
    ),
    Fault(
        "the error on a split of other rows says their checksum",
        (
            (
                "privssl/data/split_manifest.py",
                "{dataset.name} here has {other}.",
                "{dataset.name} here has {other} ({checksum[:12]}).",
            ),
        ),
        (
            "tests/data/test_split_manifest.py::"
            "test_the_error_on_a_split_of_other_data_contains_no_checksum",
        ),
    ),
    Fault(
        "absent checkpoints are no doubt",
        (
            (
                WITNESSES,
                'if not any((run / "checkpoints").glob("round_*/snapshot.json")):',
                'if not (run / "checkpoints").parent.exists():',
            ),
        ),
        (IN_TAMPERING + "a_folder_without_some_of_the_witnesses_is_inconclusive",),
    ),
    Fault(
        "absent metrics are no doubt",
        (
            (
                WITNESSES,
                'not (run / "metrics.csv").is_file() and (files.results or {}).get("rounds") != 0:',
                '(files.results or {}).get("rounds") == -1:',
            ),
        ),
        (IN_TAMPERING + "a_folder_without_some_of_the_witnesses_is_inconclusive",),
    ),
    Fault(
        "the released weights are not looked at",
        (
            (
                WITNESSES,
                'if tensor_files.sha256_of(path) != weights["sha256"]:',
                'if tensor_files.sha256_of(path) == "":',
            ),
        ),
        (IN_TAMPERING + "an_edited_file_is_reported_and_the_folder_is_not_consistent",),
    ),
    Fault(
        "a card is not made a second time",
        (
            (
                CARD,
                "if path := _find_difference(name, card_json[name], recomputed_json[name]):",
                "if path := _find_difference(name, recomputed_json[name], recomputed_json[name]):",
            ),
        ),
        (IN_CARD + "a_card_that_does_not_follow_from_its_ledgers_is_violated",),
    ),
    Fault(
        "a numeric bound that is another method's is not compared",
        ((CARD, "if any(bound < lowest for bound in _upper_bounds(entry)):", "if lowest < -1:"),),
        (
            IN_CARD + "a_card_that_does_not_follow_from_its_ledgers_is_violated[has a numeric "
            "bound below its costs]",
        ),
    ),
    Fault(
        "a card's claim is not recomputed",
        (
            (
                CLAIM,
                "report.recomputed = at_card.epsilon",
                "report.recomputed = report.claimed or at_card.epsilon",
            ),
            (
                CARD,
                "if path := _find_difference(name, card_json[name], recomputed_json[name]):",
                "if path := _find_difference(name, recomputed_json[name], recomputed_json[name]):",
            ),
        ),
        (IN_CARD + "a_card_with_a_false_claim_is_violated",),
    ),
    Fault(
        "numeric bounds of a stopped run are believed",
        (
            (
                CARD,
                "    if claim and _has_bounds(card):\n        yield",
                "    if not card:\n        yield",
            ),
        ),
        (
            "tests/audit/test_stopped_runs.py::"
            "test_numeric_bounds_on_the_card_of_a_stopped_run_are_violated",
        ),
    ),
    Fault(
        "a ledger's noise is not held against the config",
        (
            (
                CROSS,
                "        if expected != recorded:\n",
                '        if expected != recorded and name != "a visit":\n',
            ),
        ),
        (
            IN_TAMPERING
            + "noise_in_ledgers_and_card_that_differs_from_the_config_is_violated_and_named",
        ),
    ),
    Fault(
        "checkpoints' memories of a ledger are not asked",
        (
            (
                CROSS,
                "return record.seq <= journal.seq and journal.hashes[record.seq] == record.head",
                "return True",
            ),
        ),
        (IN_CARD + "a_checkpoint_contradicts_a_cut_ledger_with_a_rewritten_card",),
    ),
    Fault(
        "a second library is believed whatever it says",
        (
            (
                CLAIM,
                "abs(opacus - library) > _TOLERANCE * max(1.0, library)",
                "abs(opacus - library) < 0",
            ),
        ),
        (IN_CARD + "a_disagreement_of_the_second_library_is_violated",),
    ),
    Fault(
        "visits after the card are forgiven in a finished run",
        (
            (
                CLAIM,
                "        if files.ended:\n            report.problems.append(text)\n",
                "        if files.ended:\n            report.notes.append(text)\n",
            ),
        ),
        (IN_CARD + "a_finished_run_with_visits_after_its_card_is_violated",),
    ),
    Fault(
        "unknown fields of a card are taken for checked",
        ((CARD, "    for key in files.unknown_keys:\n", "    for key in ():\n"),),
        (IN_TAMPERING + "an_edited_file_is_reported_and_the_folder_is_not_consistent",),
    ),
    Fault(
        "a claim is of the agent that spent least",
        (
            (
                "privssl/privacy/privacy_card.py",
                'overall = max(entry["epsilon"]["value"]',
                'overall = min(entry["epsilon"]["value"]',
            ),
        ),
        (IN_CARD + "the_claim_is_the_largest_epsilon_of_an_agent_and_never_a_sum",),
    ),
    Fault(
        "a model card may claim what it likes",
        (
            (
                CROSS,
                "(MODEL_CARD, read_privacy_section, privacy_section(claim_sentences(card))),",
                "(MODEL_CARD, lambda _: 0, 0),",
            ),
        ),
        ("tests/runs/test_model_card.py::test_the_audit_finds_a_model_card_with_another_claim",),
    ),
    Fault(
        "what a stopped run was charged is called guaranteed",
        (
            (
                "privssl/privacy/privacy_card.py",
                '"charged" if kind == "guaranteed" and not bounds else kind',
                "kind",
            ),
        ),
        (
            "tests/audit/test_stopped_runs.py::test_"
            "with_other_visits_than_planned_or_shared_accounts_the_claim_is_the_budget[resumed]",
            "tests/audit/test_stopped_runs.py::test_"
            "the_charged_epsilon_is_labelled_charged_even_if_it_equals_the_budget",
        ),
    ),
    Fault(
        "a claim states a smaller delta than it has",
        (
            (
                "accounting/budget.py",
                "return text if float(text) >= delta else repr(delta)",
                "return text",
            ),
        ),
        (IN_CARD + "a_printed_delta_is_never_rounded_down",),
    ),
    Fault(
        "the model card of a private run has its time",
        (
            (
                "privssl/runs/model_card.py",
                'duration = "" if private else f" for',
                'duration = f" for',
            ),
        ),
        ("tests/runs/test_model_card.py::test_the_model_card_of_a_private_run_contains_no_times",),
    ),
    Fault(
        "a card may name another data set than the run",
        ((CROSS, 'if card["dataset"] != config.data.name:', "if False:"),),
        (IN_TAMPERING + ANEW + "[changes0-config.yaml has the data set toy, the card another]",),
    ),
    Fault(
        "a card may name other classes and rows than results.json",
        ((CROSS, "findings.problems += _find_row_differences(results, card)", "pass"),),
        (
            IN_TAMPERING + ANEW + "[changes1-other classes or rows than results.json]",
            IN_TAMPERING + ANEW + "[changes3-other classes or rows]",
        ),
    ),
    Fault(
        "a card may be without its clip norm",
        (
            (
                CROSS,
                'if card["clip_norm"] != clip_norm:',
                'if card["clip_norm"] not in (None, clip_norm):',
            ),
        ),
        (IN_TAMPERING + ANEW + "[changes4-the card None]",),
    ),
    Fault(
        "a card may forget the ledger of a replaced run",
        (
            (
                CROSS,
                "if (ledger, agent) not in on_card and not continues:",
                "if (ledger, agent) not in on_card and continues:",
            ),
        ),
        (IN_TAMPERING + "a_card_that_omits_the_ledger_of_a_replaced_run_is_violated",),
    ),
)
