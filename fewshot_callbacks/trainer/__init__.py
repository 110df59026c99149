"""What `protonet` and `callbacks` read off a running Trainer, where Lightning has no public word for it."""
