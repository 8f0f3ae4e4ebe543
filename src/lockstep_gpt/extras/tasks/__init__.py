"""Tasks with answers: measures them during training, and the command `score`."""

# name -> target, help line, whether it accepts Hydra overrides; `cli.py` collects them.
COMMANDS = {"score": (".extras.tasks.score:main", "measure a model on tasks", False)}
CHECK = ".extras.tasks.task_settings:refuse_bad_tasks"
