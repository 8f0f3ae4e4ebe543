"""Each kind of difference between two recordings has its cause; equal recordings have none."""

import copy
import json

import pytest

from lockstep.testing.diagnosis import diagnose, metric_finding, read_recording

SEEDED, USED, OTHER = "seeded", "used", "other"


def tensor(*values):
    return [str(values), max(map(abs, values)), [*values]]


def micro_batch(number, samples, loss=2.0):
    """A micro-batch that draws from torch's generator, and not from Python's."""
    return {
        "samples": samples,
        "before": {"torch": f"{SEEDED} {number}", "Python": SEEDED},
        "after": {"torch": f"{USED} {number}", "Python": SEEDED},
        "loss": loss,
    }


def line(step, micro_batches):
    return {
        "step": step,
        "micro_batches": micro_batches,
        "gradients": {"a": tensor(1.0, 2.0), "b": tensor(0.5)},
        "rates": [0.1],
        "weights": {"a": tensor(3.0, 4.0), "b": tensor(1.0 / step)},
        "buffers": {"mean": tensor(0.25)},
        "batch_norms": [],
    }


def recording(ranks):
    """Three steps of 4 samples on one rank or two, in two micro-batches."""
    steps = {}
    for step in (1, 2, 3):
        samples = [[f"{step}.{2 * leaf}", f"{step}.{2 * leaf + 1}"] for leaf in range(2)]
        leaves = [micro_batch(leaf, samples[leaf]) for leaf in range(2)]
        per_rank = 2 // ranks
        steps[step] = [
            line(step, copy.deepcopy(leaves[rank * per_rank : (rank + 1) * per_rank]))
            for rank in range(ranks)
        ]
    return steps


@pytest.fixture
def one():
    return recording(1)


@pytest.fixture
def two():
    return recording(2)


def last_leaf(two):
    """The second micro-batch of step 2, which is that of rank 1."""
    return two[2][1]["micro_batches"][0]


def on_all(two, kind, name, values):
    for rank in two[2]:
        rank[kind][name] = tensor(*values)


def other_sample(two):
    last_leaf(two)["samples"][0] = "another"


def one_sample_twice(two):
    last_leaf(two)["samples"][0] = "2.0"


def one_sample_less(two):
    last_leaf(two)["samples"].pop()


def order_of_samples(two):
    last_leaf(two)["samples"].reverse()


def seed_of_torch(two):
    loss(two)
    last_leaf(two)["before"]["torch"] = last_leaf(two)["after"]["torch"] = OTHER


def draws(two):
    gradient(two)
    last_leaf(two)["after"]["torch"] = OTHER


def loss(two):
    last_leaf(two)["loss"] = 2.5


def last_digit_of_the_loss(two):
    last_leaf(two)["loss"] = 2.0000002


def batchnorm(two):
    loss(two)
    for rank in two[2]:
        rank["batch_norms"] = ["net.norm"]


def gradient(two):
    on_all(two, "gradients", "b", [0.75])


def last_digit_of_a_gradient(two):
    on_all(two, "gradients", "b", [0.50000006])


def no_gradient(two):
    for rank in two[2]:
        del rank["gradients"]["b"]


def rate_of_a_rank(two):
    two[2][1]["rates"] = [0.2]


def rate_of_all(two):
    for rank in two[2]:
        rank["rates"] = [0.2]


def weight_of_a_rank(two):
    two[2][1]["weights"]["b"] = tensor(9.0)


def weight_of_all(two):
    on_all(two, "weights", "b", [9.0])


def buffer(two):
    on_all(two, "buffers", "mean", [0.5])


@pytest.mark.parametrize(
    ("change", "what", "cause"),
    [
        (other_sample, "the samples: 1 of 4 samples are others", "data by rank: which"),
        (one_sample_twice, "are others, and 1 sample came twice", "data by rank: which"),
        (one_sample_less, "the samples: 4 and 3", "data by rank: which"),
        (order_of_samples, "the samples of micro-batch 2: the step has", "data by rank: the order"),
        (seed_of_torch, "micro-batch 2 begins with another state of torch's", "dropout or other"),
        (draws, "micro-batch 2 leaves another state of torch's", "dropout or other"),
        (loss, "the loss of micro-batch 2: 2.0, 2.5, of the same", "the module computes by rank"),
        (last_digit_of_the_loss, "the loss of micro-batch 2: 2.0, 2.0000002", "rounding"),
        (batchnorm, "the loss of micro-batch 2: 2.0, 2.5", "BatchNorm (net.norm)"),
        (gradient, "the gradient of b: 0.5, 0.75, with equal losses", "gradients are changed"),
        (last_digit_of_a_gradient, "the gradient of b: 0.5, 0.50000006", "sums in another order"),
        (no_gradient, "the gradient of b, which one run has", "a parameter that only some"),
        (rate_of_a_rank, "the learning rate: 0.1, 0.2 on rank 1", "a scheduler or optimizer by"),
        (rate_of_all, "the learning rate: 0.1, 0.2 on rank 0", "a scheduler by rank: the"),
        (weight_of_a_rank, "b after the update: 0.5 on rank 0, 9.0 on rank 1", "an optimizer by"),
        (weight_of_all, "b after the update: 0.5, 9.0", "an optimizer by rank"),
        (buffer, "the buffer mean after the update: 0.25, 0.5", "a buffer by rank"),
    ],
)
def test_a_change_in_step_2_is_found_there_with_its_cause(one, two, change, what, cause):
    change(two)
    later = copy.deepcopy(two[2][0]["weights"])
    two[3][0]["weights"] = later  # what follows also differs
    finding = diagnose(one, two)
    assert finding.step == 2
    assert what in finding.what
    assert finding.cause.startswith(cause)
    assert finding.remedy
    assert len(finding.text().splitlines()) == 3


def test_equal_recordings_have_no_finding_on_any_number_of_ranks(one, two):
    assert diagnose(one, one) is None
    assert diagnose(one, two) is None


def test_random_numbers_are_a_cause_only_if_they_are_drawn_and_change_something(one, two):
    leaf = last_leaf(two)
    leaf["before"]["Python"] = leaf["after"]["Python"] = OTHER
    loss(two)
    assert diagnose(one, two).what.startswith("the loss of micro-batch 2")  # none was drawn
    leaf["after"]["Python"] = USED
    finding = diagnose(one, two)
    assert "micro-batch 2 begins with another state of Python's generator" in finding.what
    assert "draw from Python's global generator" in finding.remedy
    leaf["loss"] = 2.0
    assert diagnose(one, two) is None  # such as for the name of a file


def test_the_earliest_step_counts_and_in_it_what_comes_first(one, two):
    weight_of_all(two)
    loss(two)
    two[3][1]["micro_batches"][0]["samples"][0] = "another"
    assert diagnose(one, two).what.startswith("the loss of micro-batch 2")
    two[1][0]["rates"] = [0.3]
    assert (diagnose(one, two).step, diagnose(one, two).what[:17]) == (1, "the learning rate")


def test_with_a_tolerance_rounding_is_equal_and_more_is_not(one, two):
    last_digit_of_a_gradient(two)
    last_digit_of_the_loss(two)
    assert diagnose(one, two, tolerance=1e-6) is None
    gradient(two)
    assert diagnose(one, two, tolerance=1e-6).what.startswith("the gradient of b")


def joined(one):
    """The same steps, of one micro-batch each."""
    for (only,) in one.values():
        first, second = only["micro_batches"]
        whole = micro_batch(0, [*first["samples"], *second["samples"]])
        only["micro_batches"] = [whole]
    return one


def test_micro_batches_of_another_size_are_compared_by_their_mean_loss(one, two):
    joined(one)
    assert diagnose(one, two, tolerance=1e-9) is None
    loss(two)
    assert diagnose(one, two, tolerance=1e-9) is None  # they may count differently
    gradient(two)
    finding = diagnose(one, two, tolerance=1e-9)
    assert finding.what == "the loss: 2.0, 2.25, of the same samples and weights"
    assert finding.cause.startswith("dropout or other random numbers: noise belongs")


def test_no_remedy_is_a_setting_that_the_runs_had(one, two):
    """What is set already can't be what is missing: then something else adds, or another loader."""
    for rounded in (last_digit_of_a_gradient, last_digit_of_the_loss):
        changed = copy.deepcopy(two)
        rounded(changed)
        assert "set batch.exact_micro_size" in diagnose(one, changed).remedy
        exact = diagnose(one, changed, batch={"exact_micro_size": 2}).remedy
        assert exact.startswith("batch.exact_micro_size is set, and fixes")
    joined(one)
    loss(two)
    gradient(two)
    remedies = {
        "set batch.micro_size": {},
        "load with train_loader and the batch": {"micro_size": 2},
    }
    for remedy, batch in remedies.items():
        assert diagnose(one, two, tolerance=1e-9, batch=batch).remedy.startswith(remedy)


def test_a_generator_that_the_step_itself_seeds_is_not_blamed_for_a_bug(one, two):
    """As `np.random.seed(int(torch.randint(...)))` does, whatever the state was before."""
    loss(two)
    last_leaf(two)["before"]["torch"] = OTHER
    assert diagnose(one, two).cause.startswith("the module computes by rank")


def test_initial_weights_are_compared_before_the_first_step(one, two):
    for run in (one, two):
        for step in run[1]:
            step["micro_batches"] = []
            del step["gradients"], step["rates"]
    two[1][1]["weights"]["a"] = tensor(3.0, 5.0)
    finding = diagnose(one, two)
    assert finding.what == "a to begin with: 4.0 on rank 0, 5.0 on rank 1"
    assert finding.cause.startswith("initial weights by rank")


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (other_sample, "data without a place"),
        (seed_of_torch, "random numbers without seeds"),
        (gradient, "a state that isn't in the checkpoint"),
    ],
)
def test_after_a_kill_the_cause_is_what_a_restart_loses(two, change, cause):
    killed = copy.deepcopy(two)
    change(killed)
    assert diagnose(two, killed, killed=True).cause.startswith(cause)


def test_a_repeated_step_has_its_last_line_and_a_torn_line_none(tmp_path):
    lines = [
        {"step": 0, "micro_batches": []},
        {"step": 1, "micro_batches": [1]},
        {"step": 2, "micro_batches": [1]},
        {"step": 1, "micro_batches": []},  # a restart
        {"step": 2, "micro_batches": [2]},
    ]
    for rank in (0, 1, 10):
        text = "".join(f"{json.dumps(each)}\n" for each in lines)
        (tmp_path / f"{rank}.jsonl").write_text(f'{text}{{"step": 3, "mic')
    steps = read_recording(tmp_path)
    assert [*steps] == [0, 1, 2]
    assert [line["micro_batches"] for line in steps[1]] == [[1]] * 3
    assert [line["micro_batches"] for line in steps[2]] == [[2]] * 3


def test_a_step_that_a_rank_has_not_recorded_is_left_out(tmp_path):
    for rank, steps in enumerate([(0, 1, 2), (0, 1)]):
        text = "".join(f"{json.dumps({'step': i, 'micro_batches': []})}\n" for i in steps)
        (tmp_path / f"{rank}.jsonl").write_text(text)
    assert [*read_recording(tmp_path)] == [0, 1]
    assert read_recording(tmp_path / "absent") == {}


def test_a_column_that_differs_in_its_last_digits_alone_is_rounded():
    finding = metric_finding(5, "val/loss", ("1.3487333059310913", "1.3487332661946614"))
    assert finding.cause.startswith("rounding")
    assert "log_tolerance" in finding.remedy


def test_a_column_that_differs_alone_is_a_metric_by_rank():
    finding = metric_finding(7, "val/accuracy", ("0.5", ""))
    assert finding.text().splitlines()[0] == (
        "begins at: step 7, val/accuracy of metrics.csv: 0.5, nothing"
    )
    assert finding.cause.startswith("a metric by rank")
    assert finding.remedy.startswith("log it with Mean")
