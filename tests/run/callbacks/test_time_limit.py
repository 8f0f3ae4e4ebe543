"""A run reports that Lightning's time limit ended it."""


def test_a_run_reports_that_its_time_limit_was_reached(command):
    words = ["run_dir=run", "max_steps=1000", "val_every=1000", "callbacks.sample=null"]
    output = command.train(*words, "+trainer.max_time={seconds: 0.01}").stdout
    assert "the time limit was reached, after " in output
    assert "stopped early, after step " in output


def test_a_run_that_ends_before_its_limit_prints_no_message(command):
    output = command.train("max_steps=6", "+trainer.max_time={hours: 1}", "run_dir=run").stdout
    assert "the time limit" not in output
