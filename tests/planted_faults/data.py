"""Mistakes in who gets which rows, and in what may be known of them."""

from tests.planted_faults.fault import Fault

DATA = "privssl/data/__init__.py"
SPLIT = "privssl/data/split.py"
MANIFEST = "privssl/data/split_manifest.py"
PARTITION = "privssl/data/partition.py"
COLUMN_VALUES = "privssl/data/column_values.py"
FIELDS = "privssl/data/fields.py"
ROUND_LOOP = "privssl/runs/round_loop.py"

IN_CANONICAL = "tests/data/test_canonical.py::test_"
IN_FRAMES = "tests/api/test_dataset.py::test_"
IN_KINDS = "tests/rows/test_kinds_of_rows.py::test_"
IN_FEDERATION = "tests/data/test_federation.py::test_"
IN_MANIFEST = "tests/data/test_split_manifest.py::test_"
IN_TABLES = "tests/rows/test_csv_rows.py::test_"
IN_SPELLINGS = "tests/rows/test_spellings.py::test_"
IN_SERIES = "tests/rows/test_time_series.py::test_"
IN_PARTITION = "tests/data/test_partition.py::test_"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a picture of other shades than bytes has another account as floats",
        (("privssl/data/canonical.py", "(near_integer | clear)", "near_integer"),),
        (
            IN_CANONICAL + "a_digit_has_one_content_as_built_in_bytes_and_divided_by_16",
            IN_CANONICAL + "floats_between_levels_have_the_content_of_the_nearest_level",
        ),
    ),
    Fault(
        "a line of a table has another account in single precision",
        ((FIELDS, "else float(np.float32(number)))", "else number)"),),
        (IN_FRAMES + "a_rows_record_does_not_depend_on_precision_or_on_the_csv_reader",),
    ),
    Fault(
        "a row of a frame has another account in each process",
        (("privssl/api/frames.py", '_ADDRESS.sub("", str(ordered))', "str(ordered)"),),
        (IN_FRAMES + "a_rows_record_does_not_depend_on_memory_addresses_or_on_set_order",),
    ),
    Fault(
        "a patient's number is rounded, and patients share an account",
        ((FIELDS, "number if number.is_integer() else float(", "float("),),
        (IN_FRAMES + "a_rows_record_does_not_depend_on_precision_or_on_the_csv_reader",),
    ),
    Fault(
        "a whole number beside a missing one is no category",
        ((FIELDS, "else by_form.get(plain(v), -1)", "else -1"),),
        (IN_SPELLINGS + "integer_categories_beside_a_missing_value_keep_their_category",),
    ),
    Fault(
        "frames are taken by place whatever their columns are",
        (("privssl/api/frames.py", "if columns != names[first]:", "if False:"),),
        (IN_SPELLINGS + "frames_with_columns_in_another_order_are_not_read_by_position",),
    ),
    Fault(
        "private vectors may be scaled by their own statistics",
        (("privssl/experiment/row_checks.py", "if dataset.standardised:", "if False:"),),
        (IN_KINDS + "a_private_run_refuses_vectors_that_were_scaled_by_their_own_statistics",),
    ),
    Fault(
        "a time series has a second budget as a sequence",
        (("privssl/data/canonical.py", "_as_bytes(row.reshape(-1))", "_as_bytes(row)"),),
        (IN_SERIES + "a_series_has_one_account_content_as_sequence_and_as_vector",),
    ),
    Fault(
        "private time series may be scaled by statistics of each feature",
        (
            (
                "privssl/data/standardisation.py",
                "return by_number or (by_feature and",
                "return by_number or (False and",
            ),
        ),
        (IN_SERIES + "a_private_run_refuses_sequences_that_were_scaled_by_statistics_of_all_rows",),
    ),
    Fault(
        "an agent of a run may scale private vectors by its own rows",
        (
            (
                "privssl/data/__init__.py",
                "stripped = dataclasses.replace(stripped, standardised=True)",
                "pass",
            ),
        ),
        (
            "tests/api/test_dataset.py::test_private_vectors_standardised_by_an_agents_own_"
            "rows_are_refused",
        ),
    ),
    Fault(
        "a site may scale private vectors by its own rows",
        (
            (
                "privssl/site/startup.py",
                "    if public and arrays.x is not None and (",
                "    if () and (",
            ),
        ),
        (
            "tests/site/test_own_rows.py::test_vectors_standardised_by_their_own_rows_are_"
            "refused_if_the_row_count_is_public[public-True]",
        ),
    ),
    Fault(
        "a text has another account where a reader resolves its entities",
        (
            (
                "privssl/data/canonical.py",
                "(unescaped := html.unescape(text)) != text",
                "(unescaped := text) != text",
            ),
        ),
        (IN_TABLES + "equal_tweets_are_one_record_and_html_entities_are_resolved",),
    ),
    Fault(
        "copies are looked for among labelled rows of a private run",
        ((DATA, "labelled = [] if private else", "labelled = [] if private is None else"),),
        (
            "tests/data/test_unlabelled_rows.py::test_"
            "in_a_private_run_copies_are_looked_for_among_unlabelled_rows_alone",
        ),
    ),
    Fault(
        "a private run looks for copies as one without privacy does",
        ((ROUND_LOOP, "private, held = self._prepared.plan is not None", "private, held = False"),),
        (
            "tests/cli/test_train_command.py::test_"
            "a_private_run_looks_for_copies_among_unlabelled_rows_alone",
        ),
    ),
    Fault(
        "synthetic lines: categories are compared after they were cut",
        ((COLUMN_VALUES, "rows = x.copy()", "rows = x.clip(-1, 1)"),),
        (
            "tests/rows/test_column_values.py::test_"
            "any_numbers_become_the_nearest_line_of_a_table_by_hand",
        ),
    ),
    Fault(
        "unlabelled rows are ordered by their hidden labels",
        (
            (
                DATA,
                "unlabelled_rows(holding.unlabelled, rows)",
                "unlabelled_rows(tuple(sorted(holding.unlabelled, key=y.__getitem__)), rows)",
            ),
        ),
        (IN_FEDERATION + "labels_of_unlabelled_rows_reach_no_agent",),
    ),
    Fault(
        "the data set stays in reach of every step",
        ((DATA, "empty = dataset.x_train[:0].clone()", "empty = dataset.x_train"),),
        (IN_FEDERATION + "the_data_set_keeps_no_training_rows",),
    ),
    Fault(
        "agents share memory",
        (
            (
                "privssl/data/encoded.py",
                "return self._x.index_select(0, ids), records",
                "return (self._x[int(ids.min()) : int(ids.max()) + 1][: len(ids)] if "
                "len(ids) else self._x[:0]), records",
            ),
        ),
        (IN_FEDERATION + "agents_share_no_memory_with_the_data_set_or_other_agents",),
    ),
    Fault(
        "labels at the server and agents: agents hold the server's rows too",
        ((SPLIT, "        labelled = np.setdiff1d(labelled, server_rows)\n", ""),),
        (
            "tests/algorithms/test_labels_at_both.py::"
            "test_the_server_holds_its_number_of_rows_of_all_classes_and_agents_the_others",
        ),
    ),
    Fault(
        "every seed has one split",
        ((SPLIT, 'randomness.stream(seed, 0, "world"', 'randomness.stream(0, 0, "world"'),),
        (IN_FEDERATION + "one_seed_gives_one_split_and_another_seed_another",),
    ),
    Fault(
        "stratified labels are drawn whatever their class",
        (
            (
                SPLIT,
                "rows[np.lexsort((class_order[classes], rank))[:count]]",
                "rows[np.lexsort((class_order[classes], 0 * rank))[:count]]",
            ),
        ),
        (IN_FEDERATION + "stratified_labels_are_equally_many_of_each_class",),
    ),
    Fault(
        "a labelled row is an unlabelled one as well",
        ((SPLIT, "remaining = np.setdiff1d(all_rows, labelled)", "remaining = all_rows"),),
        (IN_FEDERATION + "no_row_is_held_twice_and_none_is_lost",),
    ),
    Fault(
        "a validation row is a labelled one as well",
        ((SPLIT, "others = np.setdiff1d(with_label, labelled)", "others = with_label"),),
        (IN_FEDERATION + "no_row_is_held_twice_and_none_is_lost",),
    ),
    Fault(
        "a split that somebody changed is taken",
        ((MANIFEST, "if stated_hash != manifest.hash:", "if stated_hash is None:"),),
        (IN_MANIFEST + "a_changed_digit_is_detected",),
    ),
    Fault(
        "a split of other data is taken",
        ((DATA, "    split.check(dataset, digest)\n", ""),),
        (IN_FEDERATION + "a_split_of_other_rows_is_refused",),
    ),
    Fault(
        "one row has two holders in a split",
        (
            (
                MANIFEST,
                "            if row in owners:\n",
                "            if row in owners and row < 0:\n",
            ),
        ),
        (IN_MANIFEST + "invalid_rows_are_refused_even_with_a_valid_hash",),
    ),
    Fault(
        "Dirichlet shares are of one agent, not of one class",
        ((PARTITION, "np.cumsum(shares[number])[:-1]", "np.cumsum(shares[0])[:-1]"),),
        (IN_PARTITION + "the_spread_of_class_shares_is_that_of_the_distribution",),
    ),
    Fault(
        "round robin begins at the last agent",
        ((PARTITION, "or [number % agents]", "or [-1 - number % agents]"),),
        (IN_PARTITION + "round_robin_reproduces_the_example_of_the_paper",),
    ),
    Fault(
        "a missing number and the middle of a column are the same row",
        (("privssl/data/csv_rows.py", "2.0 * absent - 1)", "0.0 * absent - 1)"),),
        (IN_TABLES + "a_missing_number_becomes_the_middle_and_an_indicator",),
    ),
    Fault(
        "a record has another account where a missing number is written otherwise",
        (
            (
                "privssl/data/fields.py",
                "    if is_absent(value):\n        return",
                "    if False:\n        return",
            ),
        ),
        (IN_TABLES + "a_missing_number_becomes_the_middle_and_an_indicator",),
    ),
)
