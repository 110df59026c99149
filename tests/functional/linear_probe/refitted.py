"""The slow, obvious linear probe: one fit by the normal equations for each item, or group, that is left out."""

import numpy as np
import torch


def clusters(items, dim, classes, offset=0.0, seed=0, noise=2.0):
    """Overlapping clusters in float64: embeddings and classes."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dim, generator=generator, dtype=torch.float64)
    labels = torch.arange(items) % classes
    rows = centres[labels] + noise * torch.randn(items, dim, generator=generator, dtype=torch.float64) + offset
    return rows, labels


def signs(labels, classes):
    """1 for the class of an item and -1 for all others."""
    return np.where(np.arange(classes) == np.asarray(labels)[:, None], 1.0, -1.0)


def fitted(rows, targets, alpha):
    """Coefficients and intercept of a ridge regression that does not penalise the intercept."""
    mean, target_mean = rows.mean(axis=0), targets.mean(axis=0)
    centred = rows - mean
    coefficients = np.linalg.solve(
        centred.T @ centred + alpha * np.eye(rows.shape[1]), centred.T @ (targets - target_mean)
    )
    return coefficients, target_mean - mean @ coefficients


def left_out_predictions(rows, targets, groups, alpha):
    """The prediction of each item by a fit without its group."""
    rows, targets, groups = np.asarray(rows, np.float64), np.asarray(targets, np.float64), np.asarray(groups)
    predictions = np.empty_like(targets)
    for group in np.unique(groups):
        out = groups == group
        coefficients, intercept = fitted(rows[~out], targets[~out], alpha)
        predictions[out] = rows[out] @ coefficients + intercept
    return predictions


def mean_eigenvalue(rows):
    """Mean of the eigenvalues of the scatter matrix that are not zero, which is the unit of a strength."""
    rows = np.asarray(rows, np.float64)
    centred = rows - rows.mean(axis=0)
    return np.square(centred).sum() / np.linalg.matrix_rank(centred)
