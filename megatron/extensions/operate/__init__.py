"""Extensions that keep long runs going: recovery from lost hosts, deletion of older checkpoints."""
