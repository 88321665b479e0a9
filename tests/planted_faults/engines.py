"""Mistakes between server and agents: engines, means, messages, requests and sites."""

from tests.planted_faults.fault import Fault

AGGREGATION = "privssl/core/aggregation.py"
MESSAGES = "privssl/core/messages.py"
RUNNER = "privssl/core/step_runner.py"
LOCAL = "privssl/engines/local.py"
POOL = "privssl/engines/process_pool.py"
BATCHED = "privssl/engines/batched.py"
REMOTE = "privssl/engines/remote.py"
PROTOCOL = "privssl/remote/protocol.py"
SITE = "privssl/site/request_handler.py"
STARTUP = "privssl/site/startup.py"

IN_MESSAGES = "tests/core/test_messages.py::test_"
IN_RUNNER = "tests/core/test_step_runner.py::test_"
IN_FEDERATION = "tests/core/test_agents_and_federation.py::test_"
IN_CONFORMANCE = "tests/engines/test_engine_conformance.py::test_"
IN_POOL = "tests/engines/test_process_pool.py::test_"
IN_INDEPENDENCE = "tests/privacy/test_independence.py::test_"
IN_BATCHED = "tests/training/test_batched_agents.py::test_"
IN_REMOTE = "tests/engines/test_remote_engine.py::test_"
IN_PROTOCOL = "tests/remote/test_protocol.py::test_"
IN_SITE = "tests/site/test_site.py::test_"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "agents are stacked although a stack rounds their rows by other rows",
        (
            (
                "privssl/privacy/batched_dp_sgd.py",
                "if not _keeps_bits(first, parameters, fields):",
                "if False:",
            ),
        ),
        (
            "tests/privacy/test_stacked_rounding.py::test_agents_are_computed_alone_where_a_stack_would_round_rows_by_other_rows[by_place]",
        ),
    ),
    Fault(
        "the rows of other agents are not looked at when a stack is tried",
        (
            (
                "privssl/privacy/row_bits.py",
                "if not (equal and _are_equal(after, before, others, others)):",
                "if not equal:",
            ),
        ),
        (
            "tests/privacy/test_stacked_rounding.py::test_agents_are_computed_alone_where_a_stack_would_round_rows_by_other_rows[by_the_rows_of_another_agent]",
        ),
    ),
    # The mean ------------------------------------------------------------------------------------
    Fault(
        "every reply weighs as much as all before it",
        (
            (
                AGGREGATION,
                "piece.mean.lerp_(piece.numbers, weight / self._total)",
                "piece.mean.lerp_(piece.numbers, weight and 0.5)",
            ),
        ),
        (IN_MESSAGES + "the_average_weighs_every_agent_by_its_weight",),
    ),
    Fault(
        "a mean loses digits",
        (
            (
                AGGREGATION,
                "part.numel() for part in sent.values()), dtype=torch.float64",
                "part.numel() for part in sent.values()), dtype=torch.float32",
            ),
            (
                AGGREGATION,
                "torch.empty(min(PIECE, len(flat_mean)), dtype=torch.float64)",
                "torch.empty(min(PIECE, len(flat_mean)), dtype=torch.float32)",
            ),
        ),
        (IN_MESSAGES + "a_mean_over_many_agents_is_rounded_once",),
    ),
    Fault(
        "weights of another form are averaged",
        ((AGGREGATION, "        self._check_form(sent, sender)\n", ""),),
        (IN_MESSAGES + "tensors_of_unlike_shapes_dtypes_or_names_are_not_averaged",),
    ),
    Fault(
        "a share may be negative",
        ((AGGREGATION, "math.isfinite(weight) and weight >= 0", "math.isfinite(weight)"),),
        (IN_MESSAGES + "a_negative_or_infinite_weight_is_refused",),
    ),
    Fault(
        "a mean follows the order of arrival",
        (
            (
                AGGREGATION,
                "in sorted(replies, key=lambda reply: natural_order(reply.sender.id)):",
                "in replies:",
            ),
        ),
        (IN_MESSAGES + "the_average_does_not_depend_on_the_order_of_arrival",),
    ),
    # Messages ------------------------------------------------------------------------------------
    Fault(
        "numbers that are not finite pass",
        ((MESSAGES, "not _is_finite(tensor)", "not len(tensor.shape) >= 0"),),
        (IN_MESSAGES + "finite_numbers_pass_even_if_their_sum_overflows_and_others_never_pass",),
    ),
    Fault(
        "a message may hold any type of numbers",
        ((MESSAGES, "tensor.dtype not in tensor_files.DTYPE_NAMES:", "tensor.dtype is None:"),),
        (IN_MESSAGES + "tensors_of_unsupported_dtypes_are_refused",),
    ),
    Fault(
        "a field may be of another type than declared",
        ((MESSAGES, "if not _has_type(value, allowed[spec.name]):", "if value is allowed:"),),
        (IN_MESSAGES + "a_field_of_another_type_than_declared_is_refused",),
    ),
    Fault(
        "a message may have fields of its own",
        (
            (
                PROTOCOL,
                'only_keys(fields, names - {"body"}, kind.__name__)',
                "fields = {k: v for k, v in fields.items() if k in names}",
            ),
        ),
        (IN_PROTOCOL + "an_unknown_field_is_refused",),
    ),
    Fault(
        "a stated size is believed",
        ((PROTOCOL, "if size > min(MAX_HEADER_BYTES, len(data) - _START):", "if size > 2**32:"),),
        (IN_PROTOCOL + "a_header_above_its_size_limit_is_not_decoded",),
    ),
    Fault(
        "a request of any size is read",
        (("privssl/remote/framing.py", "if size > MAX_BYTES:", "if size > 2**62:"),),
        (IN_SITE + "a_request_with_a_stated_size_above_the_limit_is_not_read",),
    ),
    Fault(
        "the id of a visit says nothing of its message",
        ((PROTOCOL, "hashlib.sha256(self.body).digest()", 'hashlib.sha256(b"").digest()'),),
        (IN_PROTOCOL + "the_id_of_a_visit_depends_on_every_field_that_affects_its_result",),
    ),
    Fault(
        "the id of a visit follows its deadline",
        ((PROTOCOL, 'k not in ("deadline", "body")', 'k not in ("body",)'),),
        (IN_PROTOCOL + "the_id_of_a_visit_does_not_depend_on_its_deadline",),
    ),
    # A visit -------------------------------------------------------------------------------------
    Fault(
        "a step that breaks off leaves its memory",
        (
            (
                RUNNER,
                "            content = step(copy, message, ctx)\n",
                "            try:\n"
                "                content = step(copy, message, ctx)\n"
                "            finally:\n"
                "                agent.memory = copy.memory\n",
            ),
        ),
        (IN_RUNNER + "a_new_memory_is_stored_unless_the_step_fails",),
    ),
    Fault(
        "a step may write into what is remembered",
        ((RUNNER, "if version != memory_versions[name]", "if version < memory_versions[name]"),),
        (IN_RUNNER + "a_step_cannot_write_into_its_memory_in_place",),
    ),
    Fault(
        "two visits of a round share their chance",
        (("privssl/core/task.py", 'f"{self.visit_key}:{purpose}"', "purpose"),),
        (IN_CONFORMANCE + "random_numbers_differ_by_round_agent_and_visit_and_not_by_other_calls",),
    ),
    Fault(
        "two purposes share their chance",
        (("privssl/runtime/randomness.py", '{agent}/{purpose}".encode()', '{agent}".encode()'),),
        (IN_FEDERATION + "streams_differ_for_every_seed_round_agent_and_purpose",),
    ),
    Fault(
        "curves of protected rows leave",
        ((LOCAL, "telemetry=agent.account is None,", "telemetry=True,"),),
        ("tests/engines/test_local_engine.py::test_an_agent_with_an_account_reports_no_metrics",),
    ),
    Fault(
        "an agent gets the server's own tensors",
        ((LOCAL, "        return value.detach().clone()  #", "        return value  #"),),
        (IN_CONFORMANCE + "an_agent_cannot_write_into_the_servers_state",),
    ),
    # Engines -------------------------------------------------------------------------------------
    Fault(
        "replies of workers come from the last to the first",
        (
            (
                POOL,
                "for index in range(len(delivery.calls)):",
                "for index in reversed(range(len(delivery.calls))):",
            ),
        ),
        (IN_POOL + "replies_come_in_the_order_of_calls_and_not_of_completion",),
    ),
    Fault(
        "workers keep what agents remember",
        ((POOL, 'if response["memory_changed"]:', 'if response["memory_changed"] is None:'),),
        (IN_POOL + "an_agent_keeps_its_memory_in_every_worker",),
    ),
    Fault(
        "workers open accounts",
        (
            (
                POOL,
                "return self._agents[call.to.id].account is None and bool(own_step == call.step)",
                "return bool(own_step == call.step)",
            ),
        ),
        (IN_POOL + "an_agent_with_an_account_is_visited_in_this_process_and_reports_no_metrics",),
    ),
    Fault(
        "of several errors the last is raised",
        (
            (
                POOL,
                "raise delivery.failed[min(delivery.failed)]",
                "raise delivery.failed[max(delivery.failed)]",
            ),
        ),
        (IN_POOL + "a_workers_error_keeps_its_type_and_the_first_in_call_order_is_raised",),
    ),
    Fault(
        "agents side by side get each other's replies",
        (
            (
                BATCHED,
                "replies |= zip(chunk, self._run_batched(",
                "replies |= zip(reversed(chunk), self._run_batched(",
            ),
        ),
        (IN_BATCHED + "replies_equal_those_of_the_local_engine_in_the_order_of_calls",),
    ),
    Fault(
        "private steps take a GPU",
        (
            (
                "privssl/experiment/devices.py",
                "private=private and noisy",
                "private=False and noisy",
            ),
        ),
        ("tests/experiment/test_devices.py::test_device_auto_is_a_gpu_except_for_private_steps",),
    ),
    Fault(
        "a site's private steps take a GPU",
        ((STARTUP, "private = site.budget is not None and", "private = site.budget is None and"),),
        ("tests/site/test_site.py::test_a_site_with_a_budget_trains_on_the_cpu",),
    ),
    Fault(
        "private steps take networks that a plug-in moved to a GPU",
        (("privssl/privacy/local_dp_sgd.py", "    refuse_other_devices(networks, {})\n", ""),),
        (f"{IN_INDEPENDENCE}private_steps_refuse_networks_and_fields_that_are_not_on_the_cpu[F]",),
    ),
    Fault(
        "private steps take fields that a plug-in moved to a GPU",
        (("privssl/privacy/local_dp_sgd.py", "    refuse_other_devices({}, synthetic)\n", ""),),
        (f"{IN_INDEPENDENCE}private_steps_refuse_networks_and_fields_that_are_not_on_the_cpu[x]",),
    ),
    Fault(
        "a private run whose steps took a GPU is resumed",
        (("privssl/runs/launch.py", "        runs_resume.check_device(folder)\n", ""),),
        (
            "tests/runs/test_resume.py::test_resume_refuses_a_private_run_that_trained_on_a_"
            "gpu[train.log-Device cpu, torch-Device cuda, torch]",
        ),
    ),
    Fault(
        "the audit does not look at the device of private steps",
        (
            (
                "privssl/audit/cross_checks.py",
                "    if doubt := other_device(files.run, config):",
                '    if doubt := "":',
            ),
        ),
        (
            "tests/audit/test_audit_tampering.py::"
            "test_a_guarantee_with_private_steps_on_a_gpu_is_inconclusive",
        ),
    ),
    # Sites ---------------------------------------------------------------------------------------
    Fault(
        "views of a private step are stacked with other agents'",
        (
            (
                BATCHED,
                "WHEN_CHARGED = (ClippedSum, NoisyOptimizerStep)",
                "WHEN_CHARGED = object",
            ),
        ),
        (
            IN_BATCHED + "after_its_charge_an_agent_shares_no_stack_with_other_agents",
            "tests/privacy/test_private_fedavg.py::"
            "test_neither_rows_nor_batches_of_an_agent_change_a_bit_of_what_another_agent_sends",
        ),
    ),
    Fault(
        "networks of a private step are stacked with other agents'",
        (
            (
                BATCHED,
                "charged = account is not None and account.visits() > visits_before",
                "charged = account is not None and isinstance(request, BatchedCall)",
            ),
        ),
        (IN_BATCHED + "after_its_charge_an_agent_shares_no_stack_with_other_agents",),
    ),
    Fault(
        "a request that comes twice is done twice",
        (
            (
                SITE,
                "            if stored is not None:\n",
                "            if stored is not None and not request.id:\n",
            ),
        ),
        (IN_SITE + "a_visit_is_charged_once_and_a_repeated_request_gets_the_stored_reply",),
    ),
    Fault(
        "a visit that was charged and lost is done again",
        ((SITE, "if account.is_charged(_charge_id_of(request)):", "if not account:"),),
        (IN_SITE + "a_reply_that_cannot_be_stored_is_not_sent_and_the_visit_is_lost",),
    ),
    Fault(
        "a site takes any weights",
        ((SITE, "if largest > LARGEST_WEIGHT:", "if largest > 1e30:"),),
        (IN_SITE + "a_site_with_a_budget_refuses_weights_above_one_million",),
    ),
    Fault(
        "a site imports the network of any config",
        ((STARTUP, "    _check_network(site, config)\n", ""),),
        (IN_SITE + "a_site_imports_only_the_network_that_its_site_file_allows",),
    ),
    Fault(
        "a site works under another config",
        ((SITE, "if frame.agreement != self.agreement:", "if not frame.agreement:"),),
        (IN_SITE + "a_coordinator_config_with_less_noise_is_refused",),
    ),
    Fault(
        "losses leave a site beside its budget",
        ((SITE, "telemetry=account is None and self.share_notes,", "telemetry=self.share_notes,"),),
        (IN_SITE + "metrics_are_sent_only_if_the_operator_allows_it_and_never_with_a_budget",),
    ),
    Fault(
        "a site's error tells what it was",
        (
            (
                SITE,
                'in codes if isinstance(error, kind)), "failed")',
                "in codes if isinstance(error, kind)), str(error))",
            ),
        ),
        (IN_SITE + "an_error_sends_only_its_code_and_logs_its_message_at_the_site",),
    ),
    Fault(
        "a site forgets where its ledger ended",
        (
            (
                SITE,
                "            self.store.mark = account.seq, account.head\n        except",
                "            pass\n        except",
            ),
            (
                SITE,
                "                self.store.mark = account.seq, account.head\n        charged",
                "                pass\n        charged",
            ),
        ),
        (IN_SITE + "the_mark_records_the_end_of_the_ledger_and_a_damaged_mark_stops_visits",),
    ),
    Fault(
        "a site serves with a ledger that is not the one of its mark",
        ((STARTUP, "    _refuse_other_ledger(path, store)\n", ""),),
        (
            IN_SITE + "the_command_reports_a_ledger_that_contradicts_its_mark_before_the_site_"
            "serves",
        ),
    ),
    Fault(
        "a site may name any share",
        (
            (
                REMOTE,
                "weight_ok = 0 <= response.weight <= protocol.MOST_SHARE",
                "weight_ok = 0 <= response.weight",
            ),
        ),
        (IN_REMOTE + "a_reply_that_the_step_cannot_produce_counts_as_no_reply",),
    ),
    Fault(
        "a charged visit may name a share",
        ((REMOTE, "response.weight == 1.0 if response.charged else weight_ok", "weight_ok"),),
        (IN_REMOTE + "a_reply_that_the_step_cannot_produce_counts_as_no_reply",),
    ),
    Fault(
        "an answer to another visit is taken",
        (
            (
                REMOTE,
                "if response.id != request.id or not (response.weight",
                "if not (response.weight",
            ),
        ),
        (IN_REMOTE + "bytes_that_are_no_reply_to_this_visit_count_as_no_reply",),
    ),
    Fault(
        "a site works below the quorum",
        ((REMOTE, "if replied >= quorum * total:", "if replied:"),),
        (IN_REMOTE + "below_the_quorum_a_parallel_step_stops_the_run",),
    ),
    Fault(
        "an operator's delta may be another than the noise's",
        ((STARTUP, "if budget.delta != privacy.delta:", "if budget.delta > 1:"),),
        (IN_SITE + "a_config_that_contradicts_the_operators_budget_is_refused",),
    ),
    Fault(
        "a site spends what the config promises",
        (
            (
                STARTUP,
                "budget = Budget(site.budget.epsilon, site",
                "budget = Budget(privacy.epsilon, site",
            ),
        ),
        (IN_SITE + "the_operators_smaller_budget_limits_spending_and_cannot_be_raised",),
    ),
    Fault(
        "with private counts a refusal tells of rows",
        ((STARTUP, "public = not config.hides_counts", "public = config is not None"),),
        (IN_SITE + "with_private_counts_the_delta_is_not_compared_with_the_row_count",),
    ),
    Fault(
        "a site measures only weights that are fractions",
        (
            (
                "privssl/site/request_handler.py",
                "if tensor.numel():",
                "if tensor.is_floating_point() and tensor.numel():",
            ),
        ),
        (IN_SITE + "weights_that_are_too_large_are_refused_for_every_dtype[kind0]",),
    ),
)
