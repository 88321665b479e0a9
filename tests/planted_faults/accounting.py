"""Mistakes in accounting, in the ledger's rules, in discrete noise and in what is claimed."""

from tests.planted_faults.fault import Fault

ACCOUNTANTS = "accounting/accountants.py"
LAPLACE = "accounting/discrete_laplace.py"
LEDGER = "accounting/ledger.py"
CARD = "privssl/privacy/privacy_card.py"
HISTOGRAM = "privssl/privacy/label_histogram.py"

IN_ACCOUNTANTS = "tests/accounting/test_accountants.py::test_"
IN_FILTERS = "tests/accounting/test_filters.py::test_"
IN_STOPPED = "tests/audit/test_stopped_runs.py::test_"
IN_LEDGER = "tests/accounting/test_ledger.py::test_"
IN_LAPLACE = "tests/accounting/test_discrete_laplace.py::test_"
IN_CARD = "tests/audit/test_card_and_audit.py::test_"
IN_HISTOGRAM = "tests/privacy/test_label_histogram.py::test_"

FAULTS: tuple[Fault, ...] = (
    # What releases cost --------------------------------------------------------------------------
    Fault(
        "no Renyi order is above 63",
        (
            (
                ACCOUNTANTS,
                "*range(11, 65), 80, 96, 128, 192, 256, 384, 512, 768, 1024",
                "*range(11, 64),",
            ),
        ),
        (IN_ACCOUNTANTS + "orders_are_large_enough_for_an_epsilon_far_below_a_tenth",),
    ),
    Fault(
        "conversion divides by the order",
        ((ACCOUNTANTS, "+ np.log(orders)) / (orders - 1)", "+ np.log(orders)) / orders"),),
        (IN_ACCOUNTANTS + "the_conversion_to_epsilon_follows_proposition_12",),
    ),
    Fault(
        "the exact epsilon is of twice the delta",
        ((ACCOUNTANTS, "- math.log(delta)\n\n    if", "- math.log(2 * delta)\n\n    if"),),
        (IN_ACCOUNTANTS + "full_batches_cost_the_exact_closed_form",),
    ),
    Fault(
        "costs of releases are not added",
        ((ACCOUNTANTS, "self.rdp + other.rdp,", "np.maximum(self.rdp, other.rdp),"),),
        (IN_ACCOUNTANTS + "steps_charged_separately_cost_the_same_as_steps_charged_together",),
    ),
    Fault(
        "full batches beside samples are counted as if there were no samples",
        ((ACCOUNTANTS, "self.sampled or other.sampled", "self.sampled and other.sampled"),),
        (IN_ACCOUNTANTS + "full_batches_beside_sampled_batches_are_composed_by_renyi_divergence",),
    ),
    Fault(
        "steps at full batches count once, however many",
        ((ACCOUNTANTS, "count * self.mu_squared,", "self.mu_squared,"),),
        (IN_ACCOUNTANTS + "max_repeats_is_the_last_count_that_fits",),
    ),
    Fault(
        "what cannot be computed costs nothing",
        ((ACCOUNTANTS, "np.where(np.isnan(rdp), np.inf,", "np.where(np.isnan(rdp), 0.0,"),),
        (IN_ACCOUNTANTS + "a_nan_from_the_library_counts_as_infinity",),
    ),
    Fault(
        "an unprotected read costs nothing",
        ((ACCOUNTANTS, "np.full(len(orders), np.inf)", "np.zeros(len(orders))"),),
        (IN_ACCOUNTANTS + "no_event_costs_nothing_and_an_unprotected_read_costs_infinity",),
    ),
    Fault(
        "a pure release costs half its divergence",
        ((ACCOUNTANTS, "np.asarray(orders) * eps**2 / 2", "np.asarray(orders) * eps**2 / 4"),),
        (IN_ACCOUNTANTS + "a_pure_release_costs_at_least_randomized_response_at_every_order",),
    ),
    Fault(
        "calibration gives a tick less noise",
        (
            (
                ACCOUNTANTS,
                "math.ceil(noise * _TICKS), last_tick) / _TICKS",
                "math.ceil(noise * _TICKS), last_tick) / _TICKS - 1 / _TICKS",
            ),
        ),
        (IN_ACCOUNTANTS + "calibrated_noise_fits_the_budget_and_a_tick_less_does_not",),
    ),
    Fault(
        "exact values of Gaussians are added up",
        (
            (
                ACCOUNTANTS,
                "np.maximum(_compute_conversion(delta, _ORDERS), 0.0)",
                "_compute_conversion(delta, _ORDERS)",
            ),
        ),
        (IN_CARD + "no_list_of_releases_sums_to_less_than_its_composed_epsilon",),
    ),
    Fault(
        "visits of several kinds count at the best order",
        ((ACCOUNTANTS, "if delta == 0 or len(self.kinds) < 2:", "if self.kinds:"),),
        (
            IN_FILTERS + "an_account_of_several_kinds_stops_before_the_best_order_would",
            IN_FILTERS + "beside_a_sampled_kind_other_events_count_at_the_order_fixed_by_that_kind",
        ),
    ),
    Fault(
        "samples after full batches count as samples",
        ((ACCOUNTANTS, "sampled=True, as_full=steps / sigma**2", "sampled=True, as_full=0.0"),),
        (
            IN_FILTERS
            + "full_batches_cost_the_exact_epsilon_and_later_events_count_as_full_batches",
        ),
    ),
    # What is claimed -----------------------------------------------------------------------------
    Fault(
        "a printed epsilon is rounded to the nearest",
        (
            (
                "accounting/budget.py",
                "return text if float(text) >= number else",
                "return text if text else",
            ),
        ),
        (IN_CARD + "a_printed_epsilon_is_never_rounded_down",),
    ),
    Fault(
        "a stopped run claims what it was charged",
        ((CARD, "bounds = fixed or claimed_delta == 0", "bounds = bool(accounts)"),),
        (IN_STOPPED + "a_stopped_run_guarantees_the_budget_and_reports_the_charged_epsilon",),
    ),
    Fault(
        "a claim falls with the budget",
        ((CARD, "} | dict(promised or {})", "}"),),
        (IN_STOPPED + "the_claim_is_the_highest_budget_even_after_it_was_lowered",),
    ),
    Fault(
        "the budget of an account may rise",
        (
            (
                "accounting/account_plan.py",
                "if new.budget.epsilon > old.budget.epsilon:",
                "if new.budget.epsilon > 2 * old.budget.epsilon:",
            ),
        ),
        (IN_LEDGER + "a_budget_never_rises_even_by_the_smallest_float",),
    ),
    # The ledger ----------------------------------------------------------------------------------
    Fault(
        "a visit may overdraw the budget",
        ((LEDGER, "budget > 0 and epsilon <= budget", "budget > 0 and self.spent() <= budget"),),
        (IN_LEDGER + "an_account_pays_for_exactly_the_visits_that_fit_and_refuses_the_next",),
    ),
    Fault(
        "a run's own limit is not held",
        ((LEDGER, "self._limit > 0 and run_epsilon <= self._limit", "self._limit > 0"),),
        (
            "tests/runs/test_shared_accounts.py::test_a_runs_own_budget_limits_it_although_"
            "the_account_has_more",
        ),
    ),
    Fault(
        "one visit is paid for twice",
        ((LEDGER, "if visit in self._journal.visits:", "if visit in self._journal.hashes:"),),
        (IN_LEDGER + "a_visit_key_is_charged_once_even_after_a_restart",),
    ),
    Fault(
        "a visit may cost more than planned",
        ((LEDGER, "if not cost.at_most(self.plan.visit_cost):", "if cost is None:"),),
        (IN_LEDGER + "a_visit_that_costs_more_than_planned_is_refused",),
    ),
    # Discrete noise ------------------------------------------------------------------------------
    Fault(
        "epsilon of discrete noise is rounded up",
        ((LAPLACE, "math.floor(Fraction(epsilon)", "math.ceil(Fraction(epsilon)"),),
        (IN_LAPLACE + "epsilon_is_never_rounded_up",),
    ),
    Fault(
        "0 is drawn twice as often",
        (
            (
                LAPLACE,
                "accepted = ~(negative & (y == 0))",
                "accepted = np.ones(len(y), dtype=np.bool_)",
            ),
        ),
        (IN_LAPLACE + "draws_follow_the_two_sided_geometric_law",),
    ),
    Fault(
        "a remainder is biased",
        ((LAPLACE, "np.uint64(_WORDS % bound)", "np.uint64(0 * bound)"),),
        (IN_LAPLACE + "a_word_that_would_bias_a_remainder_is_drawn_again",),
    ),
    Fault(
        "secure words follow numpy's seed",
        (
            (
                "accounting/secure_random.py",
                "    size = 8 * count\n",
                "    size = 8 * count\n"
                "    return np.random.randint(0, 2**64, count, dtype=np.uint64)\n",
            ),
        ),
        (IN_LAPLACE + "no_seed_repeats_noise",),
    ),
    # The label census ----------------------------------------------------------------------------
    Fault(
        "counts have noise of twice the epsilon",
        (
            (
                HISTOGRAM,
                "discrete_laplace(self.epsilon, counts",
                "discrete_laplace(2 * self.epsilon, counts",
            ),
        ),
        (IN_HISTOGRAM + "every_count_gets_its_own_draw",),
    ),
    Fault(
        "all counts of a table share one draw",
        (
            (
                HISTOGRAM,
                "discrete_laplace(self.epsilon, counts.numel())",
                "discrete_laplace(self.epsilon, 1).repeat(counts.numel())",
            ),
        ),
        (IN_HISTOGRAM + "every_count_gets_its_own_draw",),
    ),
)
