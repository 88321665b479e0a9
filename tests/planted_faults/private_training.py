"""Mistakes in private training: in what clips, draws, adds noise, releases and charges."""

from tests.planted_faults.fault import Fault

PRIVACY = "privssl/privacy/dp_sgd.py"
PLAN = "privssl/privacy/plan.py"
SECURE = "privssl/privacy/secure_noise.py"
INDEPENDENCE = "privssl/privacy/independence.py"
NOISE = "privssl/privacy/noisy_optimizer.py"
ROWS = "privssl/privacy/local_dp_sgd.py"
VISITS = "privssl/core/step_runner.py"
PER_ROW = "privssl/privacy/per_example_gradients.py"

IN_PRIVACY = "tests/privacy/test_dp_sgd.py::"
IN_NOISE = "tests/privacy/test_secure_noise.py::"
IN_SAMPLING = "tests/privacy/test_sampling.py::"
IN_INDEPENDENCE = "tests/privacy/test_independence.py::"
IN_VISIT = "tests/privacy/test_private_visit.py::"
IN_FEDSSL = "tests/privacy/test_private_fedssl.py::"
IN_COUNTS = "tests/privacy/test_private_counts.py::"
IN_VISITS = "tests/core/test_step_runner.py::"

_CLIPPED = "sums = clipped_sums(list(gradients.values()), drawn, self.clip_norm)"
_DEVIATION = "return float(optimiser.noise_multiplier * optimiser.max_grad_norm)"
_NORMAL = "return normal[:count]"
_DRAWN = "noise = secure_noise.secure_normal(sum(tensor.numel() for tensor in sums))"
_MASK = "return torch.from_numpy(secure_noise.secure_uniform(rows) < limit)"
_STEP = "            self._step()\n"
_ADD = "self._add_clipped(fields, pad_rows(mask[indices], size), row_loss, joint=joint)"
_SUMS = "        request = ClippedSum(\n"
_NOISY_STEP = "        self.optimiser.add_noise()\n        self.average()\n"

FAULTS: tuple[Fault, ...] = (
    # The sum -------------------------------------------------------------------------------------
    Fault(
        "rows are not clipped",
        ((PRIVACY, _CLIPPED, _CLIPPED.replace("self.clip_norm", "1e12")),),
        (
            IN_PRIVACY
            + "test_without_noise_a_step_moves_the_weights_by_the_sum_of_clipped_gradients",
        ),
        True,
    ),
    Fault(
        "each network is clipped alone",
        (
            (
                PRIVACY,
                _CLIPPED,
                "sums = [s for net in dict.fromkeys(key[0] for key in gradients) for s in "
                "clipped_sums([g for key, g in gradients.items() if key[0] == net], drawn, "
                "self.clip_norm)]",
            ),
        ),
        (IN_PRIVACY + "test_two_networks_share_one_clip_norm",),
        True,
        protect="F, D, G",
    ),
    Fault(
        "each view of a row is clipped alone",
        (
            (
                PRIVACY,
                _SUMS,
                "        for view in range(self._plan.views if self._plan.views > 1 else 0):\n"
                "            one = {name: x[:, view : view + 1] for name, x in fields.items()}\n"
                "            if next(iter(fields.values())).shape[1] > 1:\n"
                "                self._add_clipped(one, mask, row_loss)\n"
                "        if self._plan.views > 1 and next(iter(fields.values())).shape[1] > 1:\n"
                "            return\n" + _SUMS,
            ),
        ),
        (IN_PRIVACY + "test_all_views_of_a_row_share_one_clip_norm",),
        True,
    ),
    Fault(
        "the clip norm follows the rows",
        (
            (
                PRIVACY,
                _CLIPPED,
                "lengths = torch.stack([g.norms() for g in gradients.values()]).norm(dim=0)\n"
                "        "
                + _CLIPPED.replace("self.clip_norm", "max(1e-9, float(lengths.median()))"),
            ),
        ),
        (
            IN_PRIVACY
            + "test_without_noise_a_step_moves_the_weights_by_the_sum_of_clipped_gradients",
        ),
        True,
    ),
    Fault(
        "a row without a finite gradient is an error",
        (
            (
                PRIVACY,
                _CLIPPED,
                "if not all(g.norms().isfinite().all() for g in gradients.values()):\n"
                '            raise ValueError("a gradient is not finite")\n        ' + _CLIPPED,
            ),
        ),
        (IN_PRIVACY + "test_a_row_with_a_non_finite_gradient_adds_nothing_and_causes_no_log_line",),
        False,
    ),
    Fault(
        "rows that were not drawn count",
        ((PRIVACY, _ADD, _ADD.replace("mask[indices]", "torch.ones_like(mask[indices])")),),
        (IN_PRIVACY + "test_the_sum_does_not_depend_on_microbatches_or_on_the_padded_batch_size",),
        True,
    ),
    Fault(
        "the sum is divided by the rows that were drawn",
        (
            (PRIVACY, _STEP, "            self._drawn = len(sampled)\n" + _STEP),
            (
                PRIVACY,
                "NoisyOptimizerStep(self._optimizer, self._plan.expected_batch)",
                "NoisyOptimizerStep(self._optimizer, max(1.0, float(self._drawn)))",
            ),
        ),
        (
            IN_PRIVACY
            + "test_the_divisor_is_the_public_batch_size_and_not_the_number_of_drawn_rows",
        ),
        True,
    ),
    Fault(
        "a sum outlives its step",
        ((PRIVACY, "parameter.grad = parameter.summed_grad = None", "parameter.grad = None"),),
        (IN_PRIVACY + "test_no_sum_without_noise_is_left_after_a_visit",),
        True,
    ),
    # Who takes part ------------------------------------------------------------------------------
    Fault(
        "rows are drawn half as often again as is charged",
        ((PLAN, _MASK, _MASK.replace("limit", "1.5 * limit")),),
        (IN_SAMPLING + "test_every_row_is_drawn_with_the_sample_rate_and_independently",),
        True,
    ),
    Fault(
        "half the sample rate is charged",
        (
            (
                PLAN,
                "            sample_rate=self.sample_rate,\n",
                "            sample_rate=0.5 * self.sample_rate,\n",
            ),
        ),
        (IN_VISIT + "test_the_charged_event_matches_the_sampler_and_the_noise",),
        False,
    ),
    Fault(
        "batches have a fixed size",
        (
            (
                PLAN,
                _MASK,
                "order = torch.from_numpy(secure_noise.secure_uniform(rows)).argsort().argsort()\n"
                "        return order < round(self.sample_rate * rows)",
            ),
        ),
        (IN_SAMPLING + "test_every_row_is_drawn_with_the_sample_rate_and_independently",),
        True,
    ),
    Fault(
        "an empty batch is skipped",
        ((PRIVACY, _STEP, "            if len(sampled):\n    " + _STEP),),
        (
            IN_PRIVACY + "test_a_step_with_an_empty_batch_is_a_step_of_noise_alone",
            IN_VISIT + "test_an_agent_with_one_row_or_none_takes_all_its_steps",
        ),
        True,
    ),
    Fault(
        "one step more than is charged",
        (
            (
                PRIVACY,
                "for step in range(self._plan.steps):",
                "for step in range(self._plan.steps + 1):",
            ),
        ),
        (IN_PRIVACY + "test_an_agent_without_rows_takes_all_its_steps_and_reads_nothing",),
        True,
    ),
    # Noise ---------------------------------------------------------------------------------------
    Fault(
        "half the noise",
        ((NOISE, _DEVIATION, _DEVIATION.replace("float(", "float(0.5 * ")),),
        (IN_NOISE + "test_noise_is_normal_with_the_planned_deviation_to_within_two_percent",),
        True,
    ),
    Fault(
        "two percent less noise",
        ((NOISE, _DEVIATION, _DEVIATION.replace("float(", "float(0.98 * ")),),
        (IN_NOISE + "test_noise_is_normal_with_the_planned_deviation_to_within_two_percent",),
        True,
    ),
    Fault(
        "each step of a visit has the same noise",
        (
            (
                NOISE,
                _DRAWN,
                "count = sum(tensor.numel() for tensor in sums)\n"
                "    noise = optimiser.__dict__.setdefault(count, "
                "secure_noise.secure_normal(count))",
            ),
        ),
        (IN_NOISE + "test_every_step_and_visit_releases_fresh_noise",),
        True,
    ),
    Fault(
        "each visit has the same noise",
        (
            (
                NOISE,
                _DRAWN,
                "count = sum(tensor.numel() for tensor in sums)\n"
                "    optimiser.calls = optimiser.__dict__.get('calls', 0) + 1\n"
                "    kept = add_noise.__dict__\n"
                "    noise = secure_noise.secure_normal(count)\n"
                "    noise = kept.setdefault((optimiser.calls, count), noise)",
            ),
        ),
        (IN_NOISE + "test_every_step_and_visit_releases_fresh_noise",),
        True,
    ),
    Fault(
        "noise follows the seed of the run",
        ((SECURE, _NORMAL, "return torch.randn(2 * half, dtype=torch.float64).numpy()[:count]"),),
        (IN_FEDSSL + "test_run_seed_changes_neither_masks_nor_noise",),
        False,
    ),
    Fault(
        "one network alone has noise",
        (
            (
                NOISE,
                _DRAWN,
                _DRAWN + "\n    noise = noise.copy()\n    noise[sums[0].numel() :] = 0.0",
            ),
        ),
        (IN_NOISE + "test_every_step_and_visit_releases_fresh_noise",),
        True,
        protect="F, D, G",
    ),
    Fault(
        "the last step of a visit has no noise",
        (
            (
                PRIVACY,
                _STEP,
                "            if 0 < step == self._plan.steps - 1:\n"
                "                self._optimizer.noise_multiplier = 0.0\n" + _STEP,
            ),
        ),
        (IN_PRIVACY + "test_a_visit_sends_the_mean_of_its_last_iterates_each_with_noise",),
        False,  # momentum and averages leave it 1% of the variance of this run
    ),
    Fault(
        "the average is of iterates without noise",
        (
            (
                PRIVACY,
                _NOISY_STEP,
                "        clean = [p.summed_grad for p in self.optimiser.params]\n"
                + _NOISY_STEP
                + "        rate = self.optimiser.original_optimizer.param_groups[0]['lr']\n"
                "        for p, c in zip(self.optimiser.params, clean):\n"
                "            p.hidden = rate * (p.grad - c / self.expected_batch)\n",
            ),
            (
                PRIVACY,
                "iterate = [parameter.detach().clone() for parameter in self._optimizer.params]",
                "iterate = [p.detach() + p.hidden for p in self._optimizer.params]",
            ),
        ),
        (IN_PRIVACY + "test_a_visit_sends_the_mean_of_its_last_iterates_each_with_noise",),
        True,
    ),
    Fault(
        "momentum is of sums without noise",
        (
            (
                PRIVACY,
                _NOISY_STEP,
                "        kept = self.optimiser.__dict__.setdefault('kept', {})\n"
                "        group = self.optimiser.original_optimizer.param_groups[0]\n"
                "        momentum = kept.setdefault('momentum', group['momentum'])\n"
                "        group['momentum'] = 0.0\n"
                "        for p in self.optimiser.params:\n"
                "            kept[p] = momentum * kept.get(p, 0.0) + p.summed_grad\n"
                "            p.summed_grad = kept[p].clone()\n" + _NOISY_STEP,
            ),
        ),
        (IN_PRIVACY + "test_momentum_accumulates_sums_with_noise_only",),
        True,
    ),
    Fault(
        "noise is not rounded to a grid",
        ((NOISE, "if deviation else 0.0", "if deviation < 0 else 0.0"),),
        (IN_NOISE + "test_released_numbers_lie_on_one_grid_whatever_the_sum",),
        False,
    ),
    Fault(
        "agents side by side have one noise",
        (
            (
                NOISE,
                "secure_noise.secure_normal(len(sums))), alpha=deviation)",
                "add_noise.__dict__.setdefault(len(sums), secure_noise.secure_normal(len(sums)))), "
                "alpha=deviation)",
            ),
        ),
        (
            "tests/privacy/test_private_fedavg.py::"
            "test_in_a_joint_step_each_agent_has_independent_noise_of_its_own_deviation",
        ),
        False,
    ),
    # What rows reach, and what leaves ------------------------------------------------------------
    Fault(
        "a network's buffers are released",
        ((PRIVACY, "        if buffered:\n", "        if buffered and not networks:\n"),),
        (
            IN_PRIVACY
            + "test_a_network_with_buffers_is_refused_because_buffers_would_be_sent_without_noise",
        ),
        False,
    ),
    Fault(
        "a network that is trained without noise leaves, and is called sound",
        (
            (
                PLAN,
                'return "sound" if set(self.update) <= set(self.protect) else "as_published"',
                'return "sound"',
            ),
        ),
        (IN_PRIVACY + "test_the_scope_is_sound_only_if_every_trained_network_has_noise",),
        False,
    ),
    Fault(
        "a message may hold more than its plan names",
        ((VISITS, "not set(sent) <= set(plan.update)", "False"),),
        (
            IN_VISITS + "test_a_visit_that_releases_more_than_its_plan_names_is_refused_and_"
            "stays_charged",
        ),
        False,
    ),
    Fault(
        "a charged step sends what no private mechanism made",
        (
            (
                VISITS,
                "    unprotected = [n for n in protected if not is_release",
                "    unprotected = [n for n in () if not is_release",
            ),
        ),
        (IN_VISITS + "test_a_charged_step_may_send_only_the_bits_that_a_private_mechanism_made",),
        False,
    ),
    Fault(
        "one charge pays for a mechanism that took more steps",
        (
            (
                "privssl/core/private_release.py",
                "    return charged == event and released",
                "    return charged and released",
            ),
        ),
        (IN_VISITS + "test_a_mechanism_with_another_event_than_the_charged_one_is_refused",),
        False,
    ),
    Fault(
        "a step looks at all labelled rows beside private training",
        ((VISITS, "and self._sealed and not mechanism_is_reading()", "and not self._sealed"),),
        (IN_VISITS + "test_under_dp_sgd_only_private_training_may_read_rows",),
        False,
    ),
    Fault(
        "one charge pays for a mechanism twice",
        (("privssl/core/private_release.py", "    if made.begun:\n", "    if made is None:\n"),),
        (
            IN_VISITS + "test_a_charged_step_may_send_only_the_bits_that_a_private_mechanism_made",
            IN_VISIT
            + "test_networks_trained_one_after_the_other_are_two_mechanisms_under_one_charge",
        ),
        False,
    ),
    Fault(
        "what is drawn for a row may depend on others",
        ((ROWS, "    if mixed:\n", "    if mixed and not draw:\n"),),
        (IN_INDEPENDENCE + "test_the_draw_of_a_row_must_not_depend_on_other_rows",),
        False,
    ),
    Fault(
        "with private counts, draws are by place",
        ((ROWS, "BLOCK if counts_public else 1", "BLOCK"),),
        (
            IN_FEDSSL
            + "test_with_private_counts_adding_a_row_leaves_the_draws_of_all_other_rows_unchanged",
        ),
        False,
    ),
    Fault(
        "layers that mix rows are accepted",
        (
            (
                INDEPENDENCE,
                'if isinstance(layer, _COUPLING) or getattr(layer, "track_running_stats", False)',
                "if not network",
            ),
        ),
        (
            IN_INDEPENDENCE
            + "test_batch_norm_is_refused_by_layer_name_in_trained_and_in_frozen_networks",
        ),
        False,
    ),
    Fault(
        "linear layers take inputs that MKL rounds by a row's place",
        ((PER_ROW, "missing := -weight.shape[-1] % 4", "missing := 0"),),
        (IN_COUNTS + "test_linear_layers_in_private_steps_have_a_multiple_of_four_inputs",),
        False,
    ),
    Fault(
        "parts whose rows change places may have a remainder of a vector",
        ((PLAN, "multiple = 4 if self.fixes_positions(rows) else 32", "multiple = 4"),),
        (IN_COUNTS + "test_a_batch_beyond_its_public_size_gets_more_microbatches_of_that_size",),
        False,
    ),
    # The claim -----------------------------------------------------------------------------------
    Fault(
        "a server may hold labelled rows under a claim against itself",
        (
            (
                "privssl/experiment/config.py",
                'config.data.labels in ("labels-at-server", "labels-at-both"):',
                'config.data.labels == "labels-at-both":',
            ),
        ),
        (
            IN_FEDSSL + "test_a_privacy_section_is_refused_for_a_labelled_server_since_the_"
            "observer_controls_it",
        ),
        False,
    ),
    # The account ---------------------------------------------------------------------------------
    Fault(
        "rows are in reach before they are paid for",
        (
            (
                VISITS,
                "return running and account is not None and account.paid_visits() > paid_before",
                "return running",
            ),
        ),
        (IN_VISITS + "test_a_step_cannot_read_labelled_rows_before_its_charge",),
        False,
    ),
    Fault(
        "the check whether a step wrote into rows reads them before they are paid for",
        (
            (
                VISITS,
                "labelled = agent.held_labelled if agent.account is None else None",
                "labelled = agent.held_labelled",
            ),
        ),
        (
            "tests/privacy/test_private_fedavg.py"
            "::test_every_visit_is_charged_before_its_rows_are_read[1]",
        ),
        False,
    ),
    Fault(
        "the largest radii of noise have 64 bits",
        ((SECURE, "tail = np.flatnonzero(radii < FAR)", "tail = np.flatnonzero(radii < 0)"),),
        (IN_NOISE + "test_only_large_radii_get_additional_random_bits[None]",),
        False,
    ),
    Fault(
        "the sample rate is rounded up to the draws",
        ((SECURE, "return math.floor(chance * 2.0**53)", "return math.ceil(chance * 2.0**53)"),),
        (
            IN_SAMPLING + "test_no_row_is_drawn_with_more_than_the_sample_rate",
            IN_SAMPLING + "test_a_sample_rate_below_the_finest_draw_draws_no_row",
        ),
        False,
    ),
)
