"""Privacy accounts of labelled rows: budgets, charges and guarantees.

Imports nothing of privssl: numpy, scipy, Opacus' accountants and, where installed, dp-accounting.

    events            what was released            accountants      what it costs
    verify            the same by dp-accounting    secure_random    the bits of all noise
    discrete_laplace  noise for counts             budget           promise and claim as sentences
    account_plan      what one agent promises      row_registry     which account pays for a row
    ledger            charges before rows are read, on top of journal and journal_reader
    one_run_audit, two_sample_audit, mechanism_tests    lower bounds and tests for attacks
"""
