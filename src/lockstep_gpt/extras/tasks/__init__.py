"""Tasks with answers: measures them during training, and the command `score`."""

from lockstep_gpt.registry import Command

COMMANDS = {"score": Command(".extras.tasks.score:main", "measure a model on tasks", False)}
CHECK = ".extras.tasks.task_settings:refuse_bad_tasks"
