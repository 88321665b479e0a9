"""Configs on digits that test_run_over_sites.py shares with other tests."""

DIGITS = {
    "fedssl": "rounds: 2, local_steps: 2, batch_size: 8, generator_width: 4, gate: 0.0",
    "fedseal": "rounds: 2, bootstrap_epochs: 3, client_epochs: 1, server_epochs: 1, "
    "validation_rows: 5",
    "semifl": "rounds: 2, threshold: 0.0, epochs: 1.0, server_epochs: 1.0",
    "fedmatch": "rounds: 2, threshold: 0.0",
    "fedtrinet": "rounds: 2, warm_up: 1",
}


def on_digits(method: str) -> str:
    return (
        "data: {name: digits, labelled: 40, unlabelled: 90}\nagents: {support: 2, query: 3}\n"
        f"model: {{name: small_cnn, width: 4}}\n"
        f"algorithm:\n  {{name: {method}, {DIGITS[method]}}}\n"
        "run: {checkpoint_every: 2}\n"
    )
