"""Mistakes in the equations of the algorithms."""

from tests.planted_faults.fault import Fault

FEDSSL = "privssl/algorithms/fedssl/algorithm.py"
MIXING = "privssl/algorithms/fedssl/losses.py"
GATE = "privssl/algorithms/fedssl/gate.py"
FEDSEAL = "privssl/algorithms/fedseal/algorithm.py"
SIGNS = "privssl/algorithms/fedseal/negative_learning.py"
SEMIFL = "privssl/algorithms/semifl/algorithm.py"
SEMIFL_LOSSES = "privssl/algorithms/semifl/losses.py"
STATIC = "privssl/models/static_norm.py"
FEDMATCH = "privssl/algorithms/fedmatch/algorithm.py"
HALVES = "privssl/algorithms/fedmatch/disjoint_training.py"
HELPERS = "privssl/algorithms/fedmatch/helper_agents.py"
SPARSE = "privssl/algorithms/fedmatch/sparse_updates.py"
FEDTRINET = "privssl/algorithms/fedtrinet/algorithm.py"
VOTING = "privssl/algorithms/fedtrinet/voting.py"
CENSUS = "privssl/algorithms/label_census/algorithm.py"
CENSUS_GENERATOR = "privssl/algorithms/label_census/generator_training.py"
CENSUS_MAP = "privssl/algorithms/label_census/feature_map.py"
VARIATIONAL = "generators/variational.py"
NAMES = "privssl/algorithms/label_census/cluster_labels.py"
UDA = "privssl/algorithms/baselines/fixmatch_uda.py"
MIXUP = "privssl/algorithms/baselines/fedmatch_mixup.py"
FEDSEM = "privssl/algorithms/baselines/pseudo_labeling.py"
FL2 = "privssl/algorithms/fl2/thresholds.py"
FL2_ROUNDS = "privssl/algorithms/fl2/algorithm.py"
SAGE = "privssl/algorithms/baselines/sage.py"
LOCAL = "privssl/algorithms/local_ssl.py"
AGGREGATION = "privssl/core/aggregation.py"
FEDDYN = "privssl/algorithms/baselines/feddyn.py"
LG = "privssl/algorithms/baselines/lg_fedavg.py"
HETEROFL = "privssl/algorithms/baselines/heterofl.py"
SUPERVISED = "privssl/algorithms/baselines/supervised.py"
FEDRGD = "privssl/algorithms/baselines/fedrgd.py"
LOCAL_SETTINGS = "privssl/algorithms/baselines/local_settings.py"

IN_FEDSSL = "tests/algorithms/test_fedssl.py::test_"
IN_BASELINES = "tests/algorithms/test_fedssl_baselines.py::test_"
IN_FEDSEAL = "tests/algorithms/test_fedseal.py::test_"
IN_SEMIFL = "tests/algorithms/test_semifl.py::test_"
IN_COMPARATORS = "tests/algorithms/test_labelled_comparators.py::test_"
IN_MODELS = "tests/models/test_models.py::test_"
IN_FEDMATCH = "tests/algorithms/test_fedmatch.py::test_"
AS_PRINTED = "tests/algorithms/test_fedmatch_as_printed.py::test_"
IN_FEDTRINET = "tests/algorithms/test_fedtrinet.py::test_"
IN_CENSUS = "tests/algorithms/test_label_census.py::test_"
IN_HISTOGRAM = "tests/privacy/test_label_histogram.py::test_"
IN_UDA = "tests/algorithms/test_baselines.py::test_"
IN_SETTINGS = "tests/algorithms/test_settings_without_effect.py::test_"
IN_LOCAL = "tests/algorithms/test_local_baselines.py::test_"
AT_BOTH = "tests/algorithms/test_labels_at_both.py::test_"
IN_NEWER = "tests/algorithms/test_fl2_and_sage.py::test_"
IN_LOSSES = "tests/training/test_pseudo_mixup_losses.py::test_"

OPEN_GATE = (
    IN_FEDSSL + "with_an_open_gate_f_learns_rows_and_mixes_and_g_realism_and_reconstruction",
)

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a census may count rows by what follows from all of them",
        (
            (
                "privssl/core/step_runner.py",
                "labelled, is_paid, visit, sealed=sealed,",
                "labelled, is_paid, visit, sealed=not account.plan.visit_cost.is_pure,",
            ),
        ),
        (
            IN_HISTOGRAM + "a_census_assigns_rows_one_at_a_time_so_that_no_row_moves_the_cluster_"
            "of_another[above_the_mean_of_all-True]",
        ),
    ),
    # (FL)^2 and SAGE -----------------------------------------------------------------------------
    Fault(
        "(FL)^2, Eq. 9: a class's threshold is not scaled to the agent's",
        ((FL2, "p / p.max() * tau", "p * tau"),),
        (IN_NEWER + "thresholds_are_the_mean_confidence_scaled_by_the_class_mean_prediction",),
    ),
    Fault(
        "FedMatch with L-MixUp: helpers that nobody learns from are sent",
        ((MIXUP, "self.cfg.helpers if self.cfg.divergence_weight else 0", "self.cfg.helpers"),),
        (IN_SETTINGS + "with_a_helper_weight_of_zero_no_agent_is_sent_helpers",),
    ),
    Fault(
        "FedRGD: a reply is weighted by its number of rows",
        (
            (
                FEDRGD,
                'weights: Literal["equal"] = "equal"',
                'weights: Literal["rows", "equal"] = "rows"',
            ),
        ),
        (IN_SETTINGS + "users_and_servers_of_fedrgd_send_no_row_count",),
    ),
    Fault(
        "an agent alone sends the number of its rows",
        ((LOCAL_SETTINGS, 'if self.aggregation == "mean":', "if True:"),),
        (IN_LOCAL + "without_aggregation_an_agent_continues_from_its_own_network",),
    ),
    Fault(
        "(FL)^2: momentum moves the weights though nobody replied",
        ((FL2_ROUNDS, "if any(not reply.declined for reply in replies)", "if True"),),
        (
            IN_NEWER + "a_round_without_replies_changes_nothing_despite_momentum",
            "tests/algorithms/test_algorithm_contract.py::"
            "test_an_algorithm_keeps_its_promises[fl2]",
        ),
    ),
    Fault(
        "(FL)^2, Eq. 12: weights move by T g, not T^2 g",
        ((FL2, "radius * t * s / norm", "radius * s / norm"),),
        (IN_NEWER + "weights_are_perturbed_along_the_gradient_and_adaptively_by_their_size",),
    ),
    Fault(
        "(FL)^2, Eq. 15: sure agents count more",
        ((FL2, "1 - float(reply.payload.tau)", "float(reply.payload.tau)"),),
        (IN_NEWER + "agents_that_have_learned_less_have_larger_weights",),
    ),
    Fault(
        "SAGE: the global label counts where both agree in confidence",
        ((SAGE, "l * hot_local + (1 - l) * hot_global", "(1 - l) * hot_local + l * hot_global"),),
        (
            IN_NEWER
            + "the_weight_of_local_pseudo_labels_halves_at_a_confidence_gap_of_five_percent",
        ),
    ),
    Fault(
        "ReMixMatch: the head of the rotation loss does not learn",
        (
            (
                "privssl/algorithms/baselines/remixmatch.py",
                "(head - rate * gradient)",
                "(head - 0 * rate * gradient)",
            ),
        ),
        (
            "tests/algorithms/test_centralised.py::"
            "test_remixmatch_predicts_the_rotation_from_features_and_its_head_learns",
        ),
    ),
    Fault(
        "labels at the server and agents: agents start from where the server started",
        ((SUPERVISED, "            state = SupervisedState(F)\n        return", "        return"),),
        (AT_BOTH + "the_server_trains_first_and_agents_start_from_its_weights",),
    ),
    Fault(
        "FedSem, local labels: the global model labels",
        ((FEDSEM, 'if self.cfg.labelled_by == "local":', "if False:"),),
        (IN_UDA + "the_local_model_of_fedsem_predicts_the_agents_own_classes_only",),
    ),
    Fault(
        "FedTriNet, Eq. 5: t counts from 0",
        ((VOTING, "(t + self.first_round) / self.clock", "t / self.clock"),),
        (IN_FEDTRINET + "rounds_count_from_one_as_printed_and_from_zero_as_in_the_code",),
    ),
    Fault(
        "FedTriNet, III.B: every agent uploads",
        (
            (
                FEDTRINET,
                "dataclasses.replace(request, upload=False)",
                "request, aggregator=mean",
            ),
        ),
        (IN_FEDTRINET + "all_agents_may_train_of_which_the_sampled_ones_upload",),
    ),
    Fault(
        "FedSEAL, Fig. 3: a complementary label is right where it is the class",
        ((SIGNS, "labels.y_minus != y", "labels.y_minus == y"),),
        (IN_FEDSEAL + "label_rates_and_class_confidences_are_those_of_validation_rows",),
    ),
    # FedSSL --------------------------------------------------------------------------------------
    Fault(
        "FedMatch with L-MixUp: the divergence is a sum over helpers",
        ((MIXUP, "logits[:, None]).mean(dim=1)", "logits[:, None]).sum(dim=1)"),),
        (
            "tests/algorithms/test_fedmatch_mixup.py::"
            "test_the_divergence_is_the_mean_over_helpers_of_kl_from_the_helper_to_the_agent",
        ),
    ),
    Fault(
        "ReMixMatch: a mix is nearer to the other row",
        (
            (
                "privssl/training/mixup.py",
                "torch.maximum(lam, 1 - lam) if towards_first",
                "torch.minimum(lam, 1 - lam) if towards_first",
            ),
        ),
        ("tests/algorithms/test_centralised.py::test_the_mixing_factor_is_at_least_one_half",),
    ),
    Fault(
        "ReMixMatch: guesses move away from the labels' frequencies",
        (
            (
                "privssl/algorithms/baselines/remixmatch.py",
                "q * (p + 1e-6) / (p_tilde + 1e-6)",
                "q * (p_tilde + 1e-6) / (p + 1e-6)",
            ),
        ),
        (
            "tests/algorithms/test_centralised.py::"
            "test_predictions_are_aligned_with_the_label_distribution",
        ),
    ),
    Fault(
        "Mean Teacher: the network is its own teacher",
        (
            (
                "privssl/algorithms/baselines/mean_teacher.py",
                "        logits: Tensor = teacher(x)",
                "        logits: Tensor = F(x)",
            ),
        ),
        (
            "tests/algorithms/test_centralised.py::"
            "test_mean_teacher_compares_with_the_teacher_and_the_pi_model_with_itself",
        ),
    ),
    Fault(
        "FedSSL, in turn: G-MixUp trains G by realism once more",
        (
            (
                "privssl/algorithms/fedssl/settings.py",
                "self, weight_real=0.0, weight_reconstruction=0.0, weight_code=0.0",
                "self, weight_reconstruction=0.0, weight_code=0.0",
            ),
        ),
        (
            IN_FEDSSL
            + "in_turn_g_reg_has_realism_and_reconstruction_and_g_mixup_the_mixed_cross_entropy",
        ),
    ),
    Fault(
        "FedSSL, Eq. 3: lambda weighs the class to mix in",
        ((MIXING, "p_mix = mix(b.lam, b.p1, b.p2)", "p_mix = mix(b.lam, b.p2, b.p1)"),),
        OPEN_GATE,
    ),
    Fault(
        "FedSSL, Eq. 6: realism of an even blend counts most",
        (
            (
                "generators/objectives.py",
                "torch.exp(torch.maximum(lam, 1 - lam) - 1)",
                "torch.exp(torch.minimum(lam, 1 - lam) - 1)",
            ),
        ),
        (
            ""
            "tests/generators/test_generators.py::"
            "test_g_is_one_at_the_ends_and_smallest_in_the_middle",
        ),
    ),
    Fault(
        "FedSSL, Eq. 6: D's loss reaches G",
        ((MIXING, "x_hat.detach()]), torch.cat", "x_hat]), torch.cat"),),
        (IN_FEDSSL + "with_the_gate_closed_each_loss_trains_its_own_network_only",),
    ),
    Fault(
        "FedSSL, Eq. 6: D is not shown p'",
        ((MIXING, 'label = p_mix if cfg.judge == "mixed" else b.p2', "label = b.p2"),),
        OPEN_GATE,
    ),
    Fault(
        "FedSSL, Eq. 7: G rebuilds the row that F learns",
        ((MIXING, "reconstruction_loss(x_rec, b.mild)", "reconstruction_loss(x_rec, b.strong)"),),
        OPEN_GATE,
    ),
    Fault(
        "FedSSL: G is guided by F's weight",
        (
            (
                MIXING,
                "scale_gradient(x_hat, cfg.weight_guidance / cfg.weight_mix)",
                "scale_gradient(x_hat, 1.0)",
            ),
        ),
        (IN_FEDSSL + "the_guidance_of_g_has_one_weight_whether_f_learns_from_mixes_or_not",),
    ),
    Fault(
        "label census: the generator sees the labelled rows of mixed agents",
        (
            (
                CENSUS,
                'z = torch.rand(len(indices), self.cfg.noise_size, generator=ctx.rng("z"))',
                'z = torch.rand(len(indices), self.cfg.noise_size, generator=ctx.rng("z"))\n'
                "        held = getattr(agent, 'held_labelled', None)\n"
                "        z = z if held is None else (z + held.x.float().mean() / 255).frac()",
            ),
        ),
        (IN_CENSUS + "labelled_rows_affect_the_run_only_through_the_table",),
    ),
    Fault(
        "label census: the generator's codes cost nothing",
        ((CENSUS_GENERATOR, "+ weight_code * cost", "+ 0 * cost"),),
        (
            "tests/algorithms/test_label_census_generator.py::test_"
            "the_loss_is_the_squared_distance_of_copies_and_the_divergence_of_codes",
        ),
    ),
    Fault(
        "generator of vectors: numbers have no noise of their own",
        ((VARIATIONAL, "rows + self._log_deviations().exp() * noise[:, None]", "rows"),),
        (
            "tests/generators/test_generators.py::test_"
            "numbers_of_a_vector_vary_around_the_decoder_by_a_learned_deviation",
        ),
    ),
    Fault(
        "label census: spare cells take part in the graph",
        ((CENSUS_MAP, "clustering.count_cells(state.centroids)", "self.cfg.cells"),),
        (IN_CENSUS + "a_cell_has_five_rows_on_average_but_there_are_as_many_cells_as_clusters",),
    ),
    Fault(
        "FedSSL: the gate is open from the start",
        (
            (
                FEDSSL,
                "train_on_mixes=self.cfg.gate == 0 or state.gate_round > 0,",
                "train_on_mixes=True,",
            ),
        ),
        (IN_FEDSSL + "f_learns_from_mixes_only_behind_an_open_gate",),
    ),
    Fault(
        "FedSSL: the gate closes again",
        ((GATE, "state.gate_round > 0 or agreement >= gate", "agreement >= gate"),),
        (IN_FEDSSL + "the_gate_opens_in_the_round_after_f_recognised_enough_mixes_and_stays_open",),
    ),
    Fault(
        "FedSSL-DP as published: a support agent also sends the similarity of gradients",
        (
            (
                FEDSSL,
                "return FedSSLUpdate(update.F, private_update.G, update.D)",
                "return dataclasses.replace(update, G=private_update.G, agreement=None)",
            ),
        ),
        (
            "tests/privacy/test_private_fedssl.py::test_"
            "the_published_scheme_sends_all_three_networks_and_calls_its_epsilon_nominal",
        ),
    ),
    Fault(
        "FedSSL: the gate by similarity never closes",
        (
            (
                GATE,
                "is_open = similarity >= SIMILAR",
                "is_open = state.gate_round > 0 or similarity >= SIMILAR",
            ),
        ),
        (IN_FEDSSL + "the_gate_is_open_while_gradients_of_mixes_are_similar_to_those_of_rows",),
    ),
    Fault(
        "FedSSL: the gate compares mixes with the rows that they are made of",
        (
            (
                MIXING,
                "to_mix, real = batch.batches(len(batch.lam) - len(batch.lam) // 2)",
                "to_mix = real = batch",
            ),
        ),
        (IN_FEDSSL + "the_similarity_is_that_of_mixes_of_some_rows_and_of_other_rows",),
    ),
    Fault(
        "FedSSL, Alg. 2: support agents all start from the server's networks",
        (
            (
                FEDSSL,
                "            for agent in self._support_agents(federation):  # Alg. 2 l. 2\n"
                "                request = self._make_request(state, federation)\n",
                "            request = self._make_request(state, federation)\n"
                "            for agent in self._support_agents(federation):  # Alg. 2 l. 2\n",
            ),
        ),
        (
            IN_FEDSSL
            + "in_sequence_each_support_agent_continues_from_the_weights_of_the_previous_one",
        ),
    ),
    Fault(
        "FedSSL, Alg. 2: what support agents learned is lost",
        (
            (
                FEDSSL,
                "            for agent in self._support_agents(federation):  # Alg. 2 l. 2\n"
                "                request = self._make_request(state, federation)\n",
                "            handed_on = state\n"
                "            for agent in self._support_agents(federation):  # Alg. 2 l. 2\n"
                "                request = self._make_request(handed_on, federation)\n",
            ),
            (
                FEDSSL,
                "state = _apply_update(state, reply.payload)",
                "handed_on = _apply_update(handed_on, reply.payload)",
            ),
        ),
        (IN_FEDSSL + "in_sequence_without_query_training_the_support_agents_weights_are_kept",),
    ),
    Fault(
        "FedSSL: a query pass reads labelled rows",
        (
            (
                FEDSSL,
                "        rows = agent.unlabelled\n",
                "        if agent.held_labelled is not None:\n"
                "            agent.held_labelled.x.sum()\n"
                "        rows = agent.unlabelled\n",
            ),
        ),
        (
            "tests/privacy/test_mixed_agents.py::"
            "test_uncharged_answers_do_not_depend_on_labelled_rows",
        ),
    ),
    Fault(
        "FedSSL, l. 9: groups count by their agents",
        ((LOCAL, '"half": 1 / len(group)', '"half": 1.0'),),
        (IN_BASELINES + "the_two_groups_are_averaged_as_configured",),
    ),
    Fault(
        "FedSSL and its baselines: a cosine that takes the rate down twice as fast",
        ((LOCAL, "math.cos(math.pi * (round_number", "math.cos(2 * math.pi * (round_number"),),
        (IN_BASELINES + "a_cosine_decays_the_rate_over_all_rounds",),
    ),
    Fault(
        "FedSSL, Eq. 2: guesses are made less decided",
        (
            (
                "privssl/training/pseudo_labels.py",
                "powered = probs**sharpness",
                "powered = probs ** (1 / sharpness)",
            ),
        ),
        (IN_LOSSES + "sharpening_by_hand",),
    ),
    Fault(
        "FedSSL, L-MixUp: labels are not mixed with their rows' partners",
        (("privssl/training/mixup.py", "mix(lam, p, p[partner])", "mix(lam, p, p)"),),
        (IN_LOSSES + "a_row_and_its_label_are_mixed_with_the_same_partner_by_the_same_factor",),
    ),
    # FedSEAL -------------------------------------------------------------------------------------
    Fault(
        "FedSEAL, Eq. 5: a threshold is a mean over rows that are called so",
        (
            (
                SIGNS,
                "count = torch.bincount(y, minlength=p.shape[1])",
                "count = torch.bincount(predicted, minlength=p.shape[1])",
            ),
        ),
        (
            IN_FEDSEAL
            + "a_threshold_is_the_summed_confidence_of_predictions_over_the_rows_of_a_class",
        ),
    ),
    Fault(
        "FedSEAL, Eq. 8: the first models fade",
        ((FEDSEAL, '(p - memory["p_bar"]) / model_count if', '(p - memory["p_bar"]) / 2 if'),),
        (IN_FEDSEAL + "past_predictions_are_averaged_over_models",),
    ),
    Fault(
        "FedSEAL, Eq. 12: a sure row is a negative one as well",
        ((SIGNS, "negative = ~positive & unlikely.any(dim=1)", "negative = unlikely.any(dim=1)"),),
        (IN_FEDSEAL + "a_row_is_positive_or_negative_or_left_out",),
    ),
    Fault(
        "FedSEAL, Eq. 12: a complement is any class",
        (
            (
                SIGNS,
                "torch.where(negative[:, None], unlikely.float(), 1.0)",
                "torch.ones_like(p_bar)",
            ),
        ),
        (IN_FEDSEAL + "a_complementary_label_is_any_unlikely_class_and_no_other",),
    ),
    Fault(
        "FedSEAL, Eq. 13: lambda falls",
        ((SIGNS, "return 1 - (1 - lambda_1) * d, 1.0", "return lambda_1 * d, 1.0"),),
        (IN_FEDSEAL + "lambda_follows_each_reading_of_the_paper",),
    ),
    Fault(
        "FedSEAL, Eq. 15: negative learning teaches the complement",
        (
            (
                SIGNS,
                "return logits.logsumexp(dim=1) - logits.masked_fill(excluded, -torch.inf)",
                "return logits.logsumexp(dim=1) - logits.masked_fill(~excluded, -torch.inf)",
            ),
        ),
        (IN_FEDSEAL + "the_complementary_loss_is_minus_log_of_one_minus_p",),
    ),
    Fault(
        "FedSEAL: validation rows are learned",
        (
            (
                FEDSEAL,
                "torch.nonzero(~is_validation)[:, 0], torch",
                "torch.arange(len(is_validation)), torch",
            ),
        ),
        (IN_FEDSEAL + "validation_rows_are_used_for_thresholds_and_not_for_training",),
    ),
    # SemiFL --------------------------------------------------------------------------------------
    Fault(
        "SemiFL: static norm keeps the biased variance",
        ((STATIC, "correction=0 if single else 1", "correction=0"),),
        (IN_MODELS + "collected_statistics_are_means_over_batches_of_mean_and_unbiased_variance",),
    ),
    Fault(
        "SemiFL: training goes by collected statistics",
        (
            (
                STATIC,
                "by_batch = self.training or self.collecting or not",
                "by_batch = self.collecting or not",
            ),
        ),
        (IN_MODELS + "in_training_static_norm_uses_batch_statistics_whatever_was_collected",),
    ),
    Fault(
        "SemiFL: MIX weighs the second label by lambda",
        (
            (
                SEMIFL_LOSSES,
                "return lam * cross_entropy(logits, y1) + (1 - lam) * cross_entropy(logits, y2)",
                "return lam * cross_entropy(logits, y2) + (1 - lam) * cross_entropy(logits, y1)",
            ),
        ),
        (IN_SEMIFL + "the_mixed_loss_weighs_both_labels_by_lambda",),
    ),
    Fault(
        "SemiFL: the server's momentum is forgotten",
        ((AGGREGATION, "momentum * velocity[name] + (F[name] - value)", "F[name] - value"),),
        (IN_SEMIFL + "the_servers_momentum_increases_steps_under_a_constant_difference",),
    ),
    Fault(
        "SemiFL: rows that are not sure are learned",
        (
            (
                SEMIFL,
                "confident = P.max(dim=1).values >= cfg.threshold  # (N,)",
                "confident = P.max(dim=1).values >= 0.0  # (N,)",
            ),
        ),
        (IN_SEMIFL + "a_row_is_confident_from_tau_on_and_an_agent_without_one_declines",),
    ),
    Fault(
        "SemiFL, Eq. 4: sure rows are mixed in as well",
        ((SEMIFL_LOSSES, "pool = pool[~confident]", "pool = pool[:]"),),
        (IN_SEMIFL + "by_the_text_mixes_use_unsure_rows_or_any_rows_if_all_are_confident",),
    ),
    Fault(
        "SemiFL: labels are never probabilities",
        ((SEMIFL, "y = P if variant.soft_labels else P.argmax", "y = P.argmax"),),
        (IN_SEMIFL + "an_agent_learns_from_the_received_probabilities_or_from_their_largest",),
    ),
    Fault(
        "FedDyn: an agent moves away from what it gathered",
        ((FEDDYN, "squared_distance(F, anchor) - linear", "squared_distance(F, anchor) + linear"),),
        (IN_COMPARATORS + "an_agents_step_follows_its_accumulated_gradient_which_it_updates",),
    ),
    Fault(
        "LG-FedAvg: the whole model goes down",
        ((LG, "LGRequest(self._select_part(state.F, shared=True))", "LGRequest(state.F)"),),
        (IN_COMPARATORS + "after_the_warm_up_only_the_head_is_sent_and_averaged",),
    ),
    Fault(
        "HeteroFL: absent classes keep their logits",
        ((HETEROFL, 'F(batch["x"]) * batch["held"]', 'F(batch["x"])'),),
        (IN_COMPARATORS + "the_masked_loss_sets_logits_of_absent_classes_to_0",),
    ),
    Fault(
        "HeteroFL: a narrow network may have a hidden layer that only the scaler would keep",
        ((HETEROFL, "if config.levels > 1 and (hidden", "if False and (hidden"),),
        (
            IN_COMPARATORS
            + "a_hidden_linear_layer_without_a_norm_is_refused_unless_there_is_one_level",
        ),
    ),
    Fault(
        "HeteroFL: agents without an entry count for it",
        ((HETEROFL, "count[_make_slices(mean[name])] += agents", "count += agents"),),
        (IN_COMPARATORS + "each_entry_is_the_mean_over_the_agents_that_have_it",),
    ),
    Fault(
        "FedRGD: groups leave the server out",
        ((FEDRGD, "count / (count + 1))", "min(count, 1.0))"),),
        (IN_COMPARATORS + "a_group_is_the_mean_of_the_server_and_its_users",),
    ),
    # FedMatch ------------------------------------------------------------------------------------
    Fault(
        "FedMatch, Eq. 5: unlabelled rows move sigma",
        ((HALVES, 'self._step("psi", loss)', 'self._step("sigma", loss)'),),
        (IN_FEDMATCH + "a_step_on_psi_follows_the_equations",),
    ),
    Fault(
        "FedMatch, Eq. 5: penalties are means",
        ((HALVES, "l2 * (p - s).square().sum()", "l2 * (p - s).square().mean()"),),
        (IN_FEDMATCH + "penalties_are_sums_over_all_weights",),
    ),
    Fault(
        "FedMatch, Eq. 1: the divergence is turned round",
        ((HALVES, "divergences = [(h * (h / p).log())", "divergences = [(p * (p / h).log())"),),
        (IN_FEDMATCH + "the_inter_client_loss_is_the_mean_divergence_from_the_helpers",),
    ),
    Fault(
        "FedMatch, Eq. 3: helpers do not vote",
        (
            (
                HELPERS,
                "votes = votes + one_hot(choice, classes) * confident[:, None]",
                "votes = votes + 0 * one_hot(choice, classes) * confident[:, None]",
            ),
        ),
        (IN_FEDMATCH + "a_step_on_psi_follows_the_equations",),
    ),
    Fault(
        "FedMatch: helpers are those that are farthest",
        (
            (
                HELPERS,
                "helpers[agent] = tuple(others[:count])",
                "helpers[agent] = tuple(sorted(set(embedded) - {agent, *others[:count]}))[:count]",
            ),
        ),
        (IN_FEDMATCH + "the_nearest_helpers_equal_those_of_an_exhaustive_search",),
    ),
    Fault(
        "FedMatch: an agent helps itself",
        (
            (
                HELPERS,
                "for position in positions if embedded[position] != agent]",
                "for position in positions]",
            ),
        ),
        (IN_FEDMATCH + "an_agent_never_helps_itself_even_among_equal_ones",),
    ),
    Fault(
        "FedMatch: differences that were cut arrive",
        (
            (
                SPARSE,
                "return _merge_entries(updated, received, masks), _count_sent",
                "return dict(updated), _count_sent",
            ),
        ),
        (IN_FEDMATCH + "an_upload_of_psi_keeps_the_servers_entries_where_the_difference_is_small",),
    ),
    Fault(
        "FedMatch, Eq. 1: rows below the threshold are not drawn to the helpers",
        (
            (
                HALVES,
                "used = torch.ones_like(confident) if uses_all else confident",
                "used = confident",
            ),
        ),
        (AS_PRINTED + "every_unlabelled_row_has_the_divergence_from_the_helpers",),
    ),
    Fault(
        "FedMatch, A.3: clients keep their rate",
        (
            (
                FEDMATCH,
                "float(state.plateaus.get(agent.id, plateau)[0])",
                "float(plateau[0])",
            ),
        ),
        (AS_PRINTED + "the_rate_of_every_agent_follows_the_validation_loss_of_its_own_network",),
    ),
    Fault(
        "FedMatch, 3.1: helpers are never refreshed",
        (
            (
                FEDMATCH,
                "state.helped_at.get(a.id, never) >= period",
                "state.helped_at.get(a.id, 0) < 0",
            ),
        ),
        (AS_PRINTED + "helpers_are_used_in_every_round_and_refreshed_when_they_are_old",),
    ),
    Fault(
        "FedMatch, 3.2: an agent forgets what the next differences are from",
        (
            (
                "privssl/algorithms/fedmatch/exchange.py",
                "agent.memory = {**agent.memory, **held}",
                "agent.memory = {**held, **agent.memory}",
            ),
        ),
        (AS_PRINTED + "sparse_messages_give_the_same_weights_as_dense_ones_with_the_same_entries",),
    ),
    Fault(
        "Sparse messages: values come to other places",
        (
            (
                "privssl/core/sparse_tensors.py",
                "flat.index_copy_(0, positions.to(flat.device), values)",
                "flat.index_copy_(0, positions.to(flat.device), values.flip(0))",
            ),
        ),
        (
            "tests/core/test_sparse_tensors.py::test_changed_entries_are_restored_at_their_"
            "positions",
        ),
    ),
    Fault(
        "data.test: test rows stay training rows",
        (
            (
                "privssl/data/datasets.py",
                "index_fill(0, test_ids, False)",
                "index_fill(0, test_ids, True)",
            ),
        ),
        (
            "tests/data/test_drawn_test_rows.py::test_"
            "every_row_is_used_once_for_training_validation_or_testing",
        ),
    ),
    # FedTriNet -----------------------------------------------------------------------------------
    Fault(
        "FedTriNet: the first player alone votes",
        ((VOTING, "torch.stack(list(probs)).sum(dim=0) / 3", "probs[0]"),),
        (IN_FEDTRINET + "the_vote_is_the_mean_of_the_players_probabilities",),
    ),
    Fault(
        "FedTriNet: a vote at the threshold is believed",
        ((VOTING, "return classes, highest > threshold", "return classes, highest >= threshold"),),
        (IN_FEDTRINET + "a_tie_goes_to_the_lowest_class_and_the_mean_must_exceed_the_threshold",),
    ),
    Fault(
        "FedTriNet, Eq. 5: the threshold does not sink",
        ((VOTING, "falling = (100 - 2 * t) / 100", "falling = (100 - 0 * t) / 100"),),
        (IN_FEDTRINET + "the_threshold_decays_as_printed",),
    ),
    Fault(
        "FedTriNet, Eq. 6: lambda is left out",
        (
            (
                VOTING,
                "(labelled + pseudo_batch, cfg.pseudo_weight)]",
                "(labelled + pseudo_batch, 1.0)]",
            ),
        ),
        (
            IN_FEDTRINET
            + "the_loss_is_the_mean_over_labels_plus_lambda_times_that_over_pseudo_labels",
        ),
    ),
    Fault(
        "FedTriNet: the splice has the local network's first layers",
        (
            (
                FEDTRINET,
                "splice(msg.F, local, self._shallow)",
                "splice(local, msg.F, self._shallow)",
            ),
        ),
        (IN_FEDTRINET + "without_fine_tuning_and_admitted_rows_phase_2_is_fedavg",),
    ),
    # The label census ----------------------------------------------------------------------------
    Fault(
        "label census: one record is two counts",
        (
            (
                "privssl/privacy/label_histogram.py",
                "counts[cluster, label] += 1",
                "counts[cluster, : label + 1] += 1",
            ),
        ),
        (IN_CENSUS + "each_labelled_row_counts_once_in_its_cluster_and_class",),
    ),
    Fault(
        "label census: rows are counted before they are paid for",
        (
            (
                CENSUS,
                "            with agent.account.spend(self.plan.event, ctx.charge_id):\n"
                "                return Census("
                "self.plan.release(self._count_labels(agent, msg, ctx)))",
                "            counts = self._count_labels(agent, msg, ctx)\n"
                "            with agent.account.spend(self.plan.event, ctx.charge_id):\n"
                "                return Census(self.plan.release(counts))",
            ),
        ),
        (IN_HISTOGRAM + "a_census_is_charged_before_its_rows_are_read",),
    ),
    Fault(
        "label census: a malicious map is used",
        ((CENSUS, "        self.check_map(msg)\n", ""),),
        (IN_CENSUS + "a_malicious_map_is_refused_in_the_same_way_for_any_number_of_rows",),
    ),
    Fault(
        "label census: noise is no part of the posterior",
        ((NAMES, "for _ in range(agents if epsilon is not None else 0):", "for _ in range(0):"),),
        (IN_CENSUS + "the_posterior_is_bayes_rule_over_the_class_of_a_cluster",),
    ),
    Fault(
        "label census: the answers wait for the next checkpoint",
        ((CENSUS, 'Phase("census", 1, saved=True)', 'Phase("census", 1)'),),
        (
            IN_CENSUS
            + "the_round_of_the_answers_is_saved_at_once_because_answers_cannot_be_repeated",
        ),
    ),
    # FixMatch, UDA -------------------------------------------------------------------------------
    Fault(
        "FixMatch: rows that are not sure teach",
        (
            (
                UDA,
                "confident = p.amax(dim=1) >= self.cfg.threshold  # (B,)",
                "confident = p.amax(dim=1) >= 0.0  # (B,)",
            ),
        ),
        (IN_UDA + "fixmatch_learns_from_confident_rows_only",),
    ),
    Fault(
        "UDA: guesses are made less decided",
        ((UDA, "sharpen(p, 1 / self.cfg.temperature)", "sharpen(p, self.cfg.temperature)"),),
        (IN_UDA + "uda_learns_the_sharpened_distribution",),
    ),
    Fault(
        "UDA: annealing leaves out the rows that are not known yet",
        ((UDA, "return ~(logits.softmax", "return (logits.softmax"),),
        (IN_UDA + "labelled_rows_that_are_already_known_have_no_loss",),
    ),
)
