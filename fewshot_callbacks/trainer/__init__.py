"""What `protonet` and `callbacks` read from a running Trainer, where Lightning has no public interface."""
