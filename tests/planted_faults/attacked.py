"""Train a tiny private run and attack it.

``python -m tests.planted_faults.attacked FOLDER NETWORKS`` does as ``privssl.audit --empirical``,
with fewer canaries, in seconds. Exit status as there.
"""

import sys
from pathlib import Path

import privssl.train as train
from privssl.audit import __main__ as audit
from privssl.audit import canary_attack, mechanism_attack

TINY = """
run: {{seed: 0, evaluate_every: 1000, images_every: 1000, device: cpu}}
data: {{name: toy, labelled: 24, unlabelled: 30}}
agents: {{support: 2, query: 1}}
model: {{name: small_cnn, width: 4}}
algorithm:
  {{name: fedssl, rounds: 3, local_steps: 2, batch_size: 8, generator_width: 4, gate: 0.0,
   warm_up: 0}}
privacy: {{epsilon: 50.0, noise_multiplier: 4.0, sample_rate: 0.5, steps: 6, momentum: 0.5,
  average_last: 0.5, update_at_support: [{networks}], protect: [{networks}]}}
"""


def main(folder: Path, networks: str) -> int:
    folder.mkdir()
    (folder / "tiny.yaml").write_text(TINY.format(networks=networks))
    trained = train.main([str(folder / "tiny.yaml"), f"run.output={folder / 'run'}"])
    if trained:
        return 100 + trained  # no verdict of an audit
    mechanism_attack.MEMBERS, mechanism_attack.OTHERS = 8_000, 100_000
    mechanism_attack.WITH_OTHERS = (128, 1 / 256)
    canary_attack.CANARIES, canary_attack.GUESSES = 200, 80
    return audit.main([str(folder / "run"), "--empirical"])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
