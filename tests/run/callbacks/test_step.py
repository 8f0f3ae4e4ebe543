from lockstep_gpt.run.callbacks.step import StepCallback


class Steps(StepCallback):
    def __init__(self):
        self.steps, self.micro_steps = [], 0

    def on_train_batch_end(self, *arguments):
        self.micro_steps += 1
        super().on_train_batch_end(*arguments)

    def on_step_end(self, _trainer, _module, step):
        self.steps.append((step, self.micro_steps))


def test_a_step_ends_once_for_all_its_micro_batches(new_run):
    steps = Steps()
    new_run(max_steps=4).fit(steps)
    assert steps.steps == [(1, 2), (2, 4), (3, 6), (4, 8)]


def test_a_resumed_run_continues_with_the_next_step(new_run, tmp_path):
    run = new_run(max_steps=3)
    run.fit(run.checkpoints(tmp_path))
    run, steps = new_run(max_steps=5), Steps()
    run.fit(steps, run.checkpoints(tmp_path), ckpt_path=tmp_path / "step=000003.ckpt")
    assert [step for step, _ in steps.steps] == [4, 5]
