"""`plan` predicts a run, `doctor` checks the machines, `drill` breaks small runs on purpose."""

# name -> target, description, whether it accepts Hydra overrides; `cli.py` collects them.
COMMANDS = {
    "plan": (".extras.cluster.plan:main", "predict memory, time, and cost on any devices", True),
    "doctor": (".extras.cluster.doctor:main", "check whether these machines can train", True),
    "drill": (".extras.cluster.drill:main", "break small runs on purpose to test recovery", True),
}
RECEIPT = ".extras.cluster.advice:attention_line"
ADVISE = ".extras.cluster.advice:advise"
PEAK_TFLOPS = ".extras.cluster.peaks:peak_of"
MOVED = {"lockstep_gpt.cluster": "lockstep_gpt.extras.cluster"}
