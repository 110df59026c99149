"""Thin holders of state around `fewshot_callbacks.functional`: update, compute, reduction over ranks."""
