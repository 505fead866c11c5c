"""Extensions for operating long runs, such as recovery from lost hosts and deletion of older checkpoints."""
