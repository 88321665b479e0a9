"""What a run promised about its labelled rows, what it spent, and what it may therefore claim.

Stands alone: imports numpy, scipy, Opacus' accountants and, where installed, dp-accounting.

    events       what was released                 SampledGaussian, PureEpsilon, ...
    accountants  what it costs                     epsilon, calibrate_noise, max_steps
    verify       the same from another library     pld_bracket
    coins        what noise is made of             random_words
    discrete_laplace  noise for counts             discrete_laplace, log_pmf
    budget       promise and claim, as sentences   Budget, Guarantee, Nominal
    plan         what one agent promises           AccountPlan
    registry     which account pays for which row  claim, shared_rows
    one_run      what one training run gave away   one_run_lower_bound, claim_rejected
    two_worlds   what many repetitions gave away   two_world_from_scores
    empirical    what a private step released      log_likelihood_ratio, noise_scale_p
    ledger       pays before rows are read         Account, read_journal
"""

from accounting.account_plan import AccountPlan
from accounting.accountants import calibrate_noise, epsilon, max_steps
from accounting.budget import NO_GUARANTEE, Budget, Guarantee, Nominal
from accounting.errors import AccountingError, BudgetExhausted, LedgerError, PlanError
from accounting.events import (
    ComposedEvent,
    Event,
    NonPrivateEvent,
    PoissonSampledGaussianEvent,
    PureDpEvent,
    same_batch_noise,
)
from accounting.ledger import Account, Journal, read_journal

__all__ = [
    "NO_GUARANTEE",
    "Account",
    "AccountPlan",
    "AccountingError",
    "Budget",
    "BudgetExhausted",
    "ComposedEvent",
    "Event",
    "Guarantee",
    "Journal",
    "LedgerError",
    "Nominal",
    "PlanError",
    "PureDpEvent",
    "PoissonSampledGaussianEvent",
    "NonPrivateEvent",
    "calibrate_noise",
    "epsilon",
    "max_steps",
    "read_journal",
    "same_batch_noise",
]
